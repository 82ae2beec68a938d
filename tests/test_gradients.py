"""Gradients: idle experts, router weights, second derivatives, integer operands.

The gradient of each operation alone is compared bit for bit in exchange_cases.py; test_adjoint.py has the transposes.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from exchange_cases import LAYOUTS, QUICK_COMPILE

import jax_ep
from jax_ep import testing

TOKENS, TOPK, HIDDEN, WIDE = 6, 2, 8, 12


def experts(rows, expert, params):
    """A small MLP with biases, chosen per row."""
    w1, b1, w2, b2 = (p[expert] for p in params)
    hidden = jnp.tanh(jnp.einsum("...h,...hf->...f", rows, w1) + b1)
    return jnp.einsum("...f,...fh->...h", hidden, w2) + b2


def local_experts(recv):
    """The local expert of each row, in the layouts that have one."""
    shape = recv.x.shape[:-1]
    if len(shape) == 2:
        return jnp.broadcast_to(jnp.arange(shape[0])[:, None], shape)
    return jnp.repeat(jnp.arange(len(recv.counts)), recv.group_sizes, total_repeat_length=shape[0])


def make_params(num_experts, seed=0):
    rng = np.random.default_rng(seed)
    shapes = [(HIDDEN, WIDE), (WIDE,), (WIDE, HIDDEN), (HIDDEN,)]
    return tuple(rng.standard_normal((num_experts, *s)).astype(np.float32) for s in shapes)


def router(x, gate, idx):
    """Softmax weights of the chosen experts; ids are given, -1 included."""
    probabilities = jax.nn.softmax(x @ gate)
    return jnp.take_along_axis(probabilities, jnp.maximum(idx, 0), axis=-1)


def dense_loss(x, gate, params, idx, target):
    """Oracle: every (token, k) by itself, on one device, all ranks' tokens concatenated."""
    w = router(x, gate, idx)
    out = 0.0
    for k in range(idx.shape[1]):
        is_routed = (idx[:, k] >= 0)[:, None]
        y = experts(x, jnp.maximum(idx[:, k], 0), params)
        out = out + jnp.where(is_routed, w[:, k, None] * y, 0)
    return jnp.sum((out - target) ** 2)


jit = functools.partial(jax.jit, compiler_options=QUICK_COMPILE)
dense_gradients = jit(jax.value_and_grad(dense_loss, (0, 1, 2)))


def ep_loss(x, gate, params, idx, target, *, layout, num_experts):
    """The same on one rank of the group; `params` are the local experts', `gate` is replicated."""
    w = router(x, gate, idx)
    # An expert may repeat within a token here, which the default capacity of "batched" does not hold.
    capacity = idx.size * jax.lax.axis_size("ep") if layout == "batched" else None
    recv = jax_ep.dispatch(x, idx, w, num_experts=num_experts, axis_name="ep", layout=layout, capacity=capacity)
    if layout != "token":
        out = jax_ep.combine(experts(recv.x, local_experts(recv), params), recv.handle, weights=recv.weights)
    else:
        y = 0.0
        for k in range(idx.shape[1]):
            local = recv.topk_idx[:, k]
            rows = experts(recv.x, jnp.maximum(local, 0), params)
            y = y + jnp.where((local >= 0)[:, None], recv.weights[:, k, None] * rows, 0)
        out = jax_ep.combine(y, recv.handle)
    return jnp.sum((out - target) ** 2)


@functools.cache
def ep_gradients(num_ranks, layout):
    """Jitted gradients wrt x, gate and expert parameters; losses of all ranks are summed."""
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:num_ranks]), ("ep",))
    spec = jax.sharding.PartitionSpec

    def loss(x, gate, params, idx, target):
        local = ep_loss(x, gate, params, idx, target, layout=layout, num_experts=2 * num_ranks)
        return jax.lax.psum(local, "ep")

    def total(*args):
        specs = (spec("ep"), spec(), spec("ep"), spec("ep"), spec("ep"))
        return jax.shard_map(loss, mesh=mesh, in_specs=specs, out_specs=spec())(*args)

    return jit(jax.value_and_grad(total, (0, 1, 2)))


@pytest.mark.parametrize("kind", ["uniform", "masked", "one_rank", "empty_ranks", "no_tokens"])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("num_ranks", [1, 4])
def test_layer_against_dense(num_ranks, layout, kind):
    """B03, B32: x, router and experts get the dense gradients; idle experts exactly 0; nothing leaks from -1."""
    num_experts = 2 * num_ranks
    rng = np.random.default_rng(1)
    shape = (num_ranks * TOKENS, HIDDEN)
    x, target = (rng.standard_normal(shape).astype(np.float32) for _ in range(2))
    gate = rng.standard_normal((HIDDEN, num_experts)).astype(np.float32)
    params = make_params(num_experts)
    idx = testing.routing(kind, num_ranks=num_ranks, num_tokens=TOKENS, num_topk=TOPK, num_experts=num_experts)
    idx = idx.reshape(-1, TOPK)
    value, grads = ep_gradients(num_ranks, layout)(x, gate, params, idx, target)
    expected_value, expected = dense_gradients(x, gate, params, idx, target)
    np.testing.assert_allclose(value, expected_value, rtol=1e-5)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4), grads, expected)
    idle = [e for e in range(num_experts) if not (idx == e).any()]
    for g in grads[2]:
        assert not np.asarray(g)[idle].any()
    lost = (idx < 0).all(1)
    assert not np.asarray(grads[0])[lost].any()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_weight_gradient_of_each_entry(make_mesh, layout):
    """B32: d w[t, k] = dot(dy[t], f_e(x[t])) wherever the expert lives, exactly 0 at -1; f_e(x) = (e + 1) x."""

    def run(x, idx, w, g):
        def f(w):
            recv = jax_ep.dispatch(x, idx, w, num_experts=8, axis_name="ep", layout=layout)
            first = 2 * jax.lax.axis_index("ep") + 1
            if layout != "token":
                scale = first + local_experts(recv)
                return jax_ep.combine(recv.x * scale[..., None], recv.handle, weights=recv.weights)
            scale = jnp.where(recv.topk_idx >= 0, (first + recv.topk_idx) * recv.weights, 0).sum(1)
            return jax_ep.combine(recv.x * scale[:, None], recv.handle)

        return jax.vjp(f, w)[1](g)[0]

    x, g = testing.random_rows((4, TOKENS, HIDDEN)), testing.random_rows((4, TOKENS, HIDDEN), seed=1)
    idx = testing.routing("masked", num_ranks=4, num_tokens=TOKENS, num_topk=3, num_experts=8)
    w = np.random.default_rng(0).random(idx.shape).astype(np.float32)
    w[idx < 0] = np.nan
    grad = np.asarray(testing.on_ranks(run, make_mesh(4))(x, idx, w, g))
    expected = np.where(idx >= 0, (idx + 1) * (x.astype(np.float64) * g).sum(-1)[..., None], 0)
    size = 8 * (np.abs(x.astype(np.float64)) * np.abs(g)).sum(-1)[..., None]
    testing.within(grad, expected, 2.0**-20 * size)
    assert not grad[idx < 0].any()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_second_derivatives(layout):
    """B35: grad of grad through the layer equals the dense layer's; no stop_gradient on ids by the user."""
    num_ranks = 2
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:num_ranks]), ("ep",))
    spec = jax.sharding.PartitionSpec
    rng = np.random.default_rng(2)
    x, target, v = (rng.standard_normal((num_ranks * TOKENS, HIDDEN)).astype(np.float32) for _ in range(3))
    gate = rng.standard_normal((HIDDEN, 4)).astype(np.float32)
    idx = testing.routing("masked", num_ranks=2, num_tokens=TOKENS, num_topk=TOPK, num_experts=4).reshape(-1, TOPK)
    params, idx = jax.tree.map(jnp.asarray, (make_params(4), idx))

    def ep(x, gate):
        local = lambda *a: jax.lax.psum(ep_loss(*a, layout=layout, num_experts=4), "ep")
        specs = (spec("ep"), spec(), spec("ep"), spec("ep"), spec("ep"))
        return jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=spec())(x, gate, params, idx, target)

    def hessian_vector(loss):
        directional = lambda x, gate: jnp.vdot(jax.grad(loss)(x, gate), v)
        return jit(jax.grad(directional, (0, 1)))(x, gate)

    got = hessian_vector(ep)
    expected = hessian_vector(lambda x, gate: dense_loss(x, gate, params, idx, target))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-3), got, expected)


def test_integer_operands_have_no_gradient(make_mesh):
    """B35: traced ids and a handle pytree as arguments beside differentiated ones; float0 where asked for."""

    def run(x, idx, w):
        def loss(x, idx, w):
            recv = jax_ep.dispatch(x, idx, w, num_experts=4, axis_name="ep")
            return jnp.sum(jax_ep.combine(recv.x, recv.handle, weights=recv.weights)), recv.handle

        (g_x, g_idx, g_w), handle = jax.grad(loss, (0, 1, 2), allow_int=True, has_aux=True)(x, idx, w)
        assert g_idx.dtype == jax.dtypes.float0 and g_idx.shape == idx.shape

        def through_handle(x, handle):
            return jnp.sum(jax_ep.dispatch(x, handle=handle).x)

        g_again, g_handle = jax.grad(through_handle, (0, 1), allow_int=True)(x, handle)
        assert all(leaf.dtype == jax.dtypes.float0 for leaf in jax.tree.leaves(g_handle))
        return g_x, g_w, g_again

    x, w = testing.code_rows(2, 5, 8), np.ones((2, 5, 2), np.float32)
    idx = testing.routing("masked", num_ranks=2, num_tokens=5, num_topk=2, num_experts=4)
    g_x, g_w, g_again = testing.on_ranks(run, make_mesh(2))(x, idx, w)
    routed = (idx >= 0).sum(-1)[..., None] * np.ones(8)
    np.testing.assert_array_equal(g_x, routed)
    np.testing.assert_array_equal(g_again, routed)
    np.testing.assert_array_equal(g_w, np.where(idx >= 0, x.sum(-1)[..., None], 0))


def test_forward_mode_is_refused(make_mesh):
    """B34: reverse mode only, said clearly by JAX."""

    def run(x, idx):
        send = lambda x: jax_ep.dispatch(x, idx, num_experts=4, axis_name="ep").x
        return jax.jvp(send, (x,), (x,))[1]

    x, idx = np.zeros((2, 4, 8), np.float32), np.zeros((2, 4, 1), np.int32)
    with pytest.raises(TypeError, match="forward-mode.*custom_vjp"):
        testing.on_ranks(run, make_mesh(2)).lower(x, idx)


def test_backward_does_not_route_again(make_mesh):
    """One routing exchange forward, none backward; the transposes are one combine and one dispatch along the handle."""

    def step(x, idx, w):
        def loss(x, w):
            recv = jax_ep.dispatch(x, idx, w, num_experts=4, axis_name="ep")
            return jnp.sum(jax_ep.combine(recv.x * 2, recv.handle, weights=recv.weights) ** 2)

        return jax.grad(loss, (0, 1))(x, w)

    x, idx, w = np.zeros((2, 4, 8), np.float32), np.zeros((2, 4, 2), np.int32), np.zeros((2, 4, 2), np.float32)
    jaxpr = str(jax.make_jaxpr(testing.on_ranks(step, make_mesh(2)))(x, idx, w))
    calls = {op: jaxpr.count(f"= jax_ep_{op}[") for op in ("dispatch", "redispatch", "combine")}
    assert calls == {"dispatch": 1, "redispatch": 1, "combine": 2}


def test_replicated_bias(make_mesh):
    """A bias that all ranks share gets the sum of their gradients, with and without vma."""
    spec = jax.sharding.PartitionSpec
    x = testing.code_rows(2, 5, 8).reshape(10, 8)
    idx = testing.routing("uniform", num_ranks=2, num_tokens=5, num_topk=2, num_experts=4).reshape(10, 2)

    def layer(x, idx, bias):
        recv = jax_ep.dispatch(x, idx, num_experts=4, axis_name="ep")
        return jax_ep.combine(recv.x, recv.handle, bias=bias)

    for check_vma in (True, False):
        run = jax.shard_map(
            layer,
            mesh=make_mesh(2),
            in_specs=(spec("ep"), spec("ep"), spec()),
            out_specs=spec("ep"),
            check_vma=check_vma,
        )
        grad = jax.jit(jax.grad(lambda b, run=run: jnp.vdot(run(x, idx, b), x)))(np.zeros((5, 8), np.float32))
        np.testing.assert_array_equal(grad, x[:5] + x[5:])
