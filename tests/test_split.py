"""The halves of an exchange: the whole call bit by bit, in any order, under JAX's transformations; their errors.

Covers the shared cases of exchange_cases.py in halves, windows, replicas, pairs and handles; pending exchanges across
others, loops, checkpoints, jit and donation. How halves become CUDA calls is tested in test_lowering.py.
"""

import doctest
import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from exchange_cases import LAYOUTS, QUICK_COMPILE, ExchangeCases, Sizes, split_combine, split_dispatch
from jax.sharding import PartitionSpec as P

import jax_ep
from jax_ep import _compat, nn, testing

RANKS, TOKENS, TOPK, HIDDEN, EXPERTS = 2, 5, 2, 128, 4
OPTIONS = dict(num_experts=EXPERTS, axis_name="ep")
KINDS = dict(num_ranks=RANKS, num_tokens=TOKENS, num_topk=TOPK, num_experts=EXPERTS)


@pytest.fixture(scope="module")
def data():
    x = testing.random_rows((RANKS, TOKENS, HIDDEN), "bfloat16")
    idx = testing.routing("masked", **KINDS)
    return x, idx, np.random.default_rng(0).random(idx.shape).astype(np.float32)


def on_ranks(run, mesh, **kwargs):
    return jax.jit(testing.on_ranks(run, mesh, jit=False, **kwargs), compiler_options=QUICK_COMPILE)


def test_example():
    """The worked example of the docstring."""
    (example,) = doctest.DocTestFinder().find(jax_ep.dispatch_start, "dispatch_start", globs={})
    assert example.examples and doctest.DocTestRunner().run(example).failed == 0


def test_signatures():
    """What starts take is what the whole calls take, with their defaults."""
    for start, whole in ((jax_ep.dispatch_start, jax_ep.dispatch), (jax_ep.combine_start, jax_ep.combine)):
        assert inspect.signature(start).parameters == inspect.signature(whole).parameters


CASES = {
    # name: sizes beside num_ranks and num_experts = 3 * num_ranks, routing
    "expert": (dict(expert_alignment=4), "masked"),
    "token": (dict(layout="token"), "zipf"),
    "batched": (dict(layout="batched", capacity=4), "one_rank"),
    "drops": (dict(capacity=8, dtype="float16"), "one_rank"),
    "fp8": (dict(hidden=256, quantize="fp8"), "empty_ranks"),
    "fp8_wire": (dict(hidden=128, quantize="fp8_wire", layout="token", dtype="float16"), "masked"),
    "opaque": (dict(hidden=128, quantize="opaque", dtype="float32"), "duplicates"),
    "nodes": (dict(ranks_per_node=2), "uniform"),
}


@pytest.mark.parametrize("mode", ("auto", "latency", "throughput"))
def test_mode_of_the_layer(make_mesh, mode):
    config = nn.MoEConfig(HIDDEN, 8, EXPERTS, TOPK, axis_name="ep", **({} if mode == "auto" else {"mode": mode}))
    seen = []

    def layer(x, router):
        recv = nn.dispatch_tokens(x, nn.route(router, x, config), config)
        seen.append(recv.handle.spec.mode)
        return nn.combine_outputs(recv.x, recv, config)

    jax.eval_shape(
        jax.shard_map(layer, mesh=make_mesh(RANKS), in_specs=(P("ep"), P()), out_specs=P("ep")),
        jax.ShapeDtypeStruct((RANKS * TOKENS, HIDDEN), "float32"),
        jax.ShapeDtypeStruct((HIDDEN, EXPERTS), "float32"),
    )
    assert seen == [mode]


@pytest.mark.parametrize("name", CASES)
def test_halves_meet_the_oracle(name):
    """B36: dispatch, a second tensor and combine in halves, forward and backward."""
    changes, kind = CASES[name]
    cases = ExchangeCases()
    cases.implementation = "xla"
    sizes = Sizes(3, 9, is_split=True, **changes)
    cases.run(sizes, cases.routing(kind, sizes))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_modes_meet_the_oracle(layout):
    """B40: mode="latency" changes nothing in pure JAX (the other cases say "auto")."""
    cases = ExchangeCases()
    cases.implementation = "xla"
    sizes = Sizes(2, 6, layout=layout, mode="latency")
    cases.run(sizes, cases.routing("masked", sizes))


def layer(dispatch, combine, x, idx, w, **kwargs):
    """A dispatch with weights, a second tensor, and a weighted sum with bias."""
    recv = dispatch(x, idx, w, **OPTIONS, **kwargs)
    again = dispatch(x * 2, handle=recv.handle)
    row_weights = None if kwargs.get("layout") == "token" else recv.weights
    return combine(recv.x + again.x, recv.handle, weights=row_weights, bias=x), recv


@pytest.mark.parametrize(
    "changes",
    [
        dict(window=1, capacity=4),
        dict(expert_map=np.array([[0, 4], [1, -1], [2, 5], [-1, -1]]), num_physical_experts=6),
        dict(layout="token", zero_tail=False),
    ],
    ids=["window", "expert_map", "token"],
)
def test_halves_equal_the_whole(make_mesh, data, changes):
    """Every field of Recv, the sum and both gradients have the bits of the fused calls; mode, maps and windows too."""

    def run(dispatch, combine):
        def step(x, idx, w):
            def loss(x, w):
                out, recv = layer(dispatch, combine, x, idx, w, **changes)
                seen = (recv.weights, recv.counts, recv.load, recv.handle)
                return jnp.sum(out.astype(jnp.float32) ** 2), (out, seen)

            return jax.value_and_grad(loss, (0, 1), has_aux=True)(x, w)

        return on_ranks(step, make_mesh(RANKS))(*data)

    halves, whole = run(split_dispatch, split_combine), run(jax_ep.dispatch, jax_ep.combine)
    jax.tree.map(testing.same_bits, halves, whole)


@pytest.mark.parametrize("order", [(0, 1), (1, 0)], ids=["first first", "last first"])
def test_two_pending_exchanges(make_mesh, order):
    """B36: two starts, then both dones in either order, with other sizes, layouts and hidden; dispatch and combine."""
    layouts, sizes = ("expert", "token"), ((9, 2, 8), (5, 3, 16))

    def run(xs, ids):
        send = lambda x, idx, layout: jax_ep.dispatch_start(x, idx, num_experts=8, axis_name="ep", layout=layout)
        pending = [send(*args) for args in zip(xs, ids, layouts, strict=True)]
        recvs, outs = {}, {}
        for n in order:
            recvs[n] = jax_ep.dispatch_done(pending[n])
        pending = [jax_ep.combine_start(recvs[n].x * (1 + n), recvs[n].handle) for n in range(2)]
        for n in order:
            outs[n] = jax_ep.combine_done(pending[n])
        return recvs, outs

    xs = [testing.random_rows((4, tokens, hidden), seed=tokens) for tokens, _, hidden in sizes]
    routing = lambda tokens, topk: dict(num_ranks=4, num_tokens=tokens, num_topk=topk, num_experts=8)
    ids = [testing.routing("zipf", **routing(tokens, topk)) for tokens, topk, _ in sizes]
    recvs, outs = on_ranks(run, make_mesh(4))(xs, ids)
    for n, layout in enumerate(layouts):
        oracle = testing.oracle_dispatch(xs[n], ids[n], num_experts=8, layout=layout)
        testing.check_recv(recvs[n], oracle)
        testing.same_bits(outs[n], testing.oracle_combine(oracle, oracle.x * np.float32(1 + n)), layout)


def sandwich(x, idx, w, scale):
    """A layer that computes something else, shared, while rows are under way, in both directions."""
    pending = jax_ep.dispatch_start(x, idx, w, **OPTIONS)
    pending, x = jax.lax.optimization_barrier((pending, x))
    shared = jnp.tanh(x * scale)
    pending, shared = jax.lax.optimization_barrier((pending, shared))
    recv = jax_ep.dispatch_done(pending)
    pending = jax_ep.combine_start(jnp.tanh(recv.x), recv.handle, weights=recv.weights)
    pending, shared = jax.lax.optimization_barrier((pending, shared))
    shared = shared + x
    pending, shared = jax.lax.optimization_barrier((pending, shared))
    return shared + jax_ep.combine_done(pending)


def plain(x, idx, w, scale):
    recv = jax_ep.dispatch(x, idx, w, **OPTIONS)
    shared = jnp.tanh(x * scale) + x
    return shared + jax_ep.combine(jnp.tanh(recv.x), recv.handle, weights=recv.weights)


def gradients(layer):
    """Of a scan over three layers."""

    def run(x, idx, w):
        def loss(x, w):
            step = lambda x, scale: (layer(x, idx, w, scale), None)
            scales = jnp.linspace(0.5, 1.5, 3, dtype=x.dtype)
            return jnp.sum(jax.lax.scan(step, x, scales)[0].astype(jnp.float32) ** 2)

        return jax.value_and_grad(loss, (0, 1))(x, w)

    return run


POLICIES = {
    "nothing": jax.checkpoint_policies.nothing_saveable,
    "everything": jax.checkpoint_policies.everything_saveable,
    "names": jax.checkpoint_policies.save_only_these_names("jax_ep_handle", "jax_ep_recv", "jax_ep_out"),
}


@pytest.mark.parametrize("policy", [None, "nothing", "names"])
@pytest.mark.parametrize("check_vma", [True, False])
def test_scan_over_checkpointed_layers(make_mesh, data, policy, check_vma):
    """B45, B47: halves and barriers in a scan, recomputed or saved, give the gradients of the whole calls."""
    x, idx, w = data
    data = x.astype(np.float32), idx, w
    wrap = jax.checkpoint if policy is None else lambda f: jax.checkpoint(f, policy=POLICIES[policy])
    wrap = (lambda f: f) if policy is None else wrap
    run = lambda layer: on_ranks(gradients(wrap(layer)), make_mesh(RANKS), check_vma=check_vma)(*data)
    (value, grads), (expected_value, expected) = run(sandwich), run(plain)
    np.testing.assert_allclose(value, expected_value, rtol=1e-5)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4), grads, expected)


def primitives(jaxpr, loops=0):
    """Each of our primitives in a program, with the number of loops around it."""
    found = []
    for eqn in jaxpr.eqns:
        if eqn.primitive.name.startswith("jax_ep_"):
            found.append((eqn.primitive.name.removeprefix("jax_ep_"), loops))
        for inner in jax.tree.leaves(list(eqn.params.values()), is_leaf=lambda v: hasattr(v, "eqns")):
            if hasattr(inner, "eqns"):
                found += primitives(getattr(inner, "jaxpr", inner), loops + (eqn.primitive.name == "scan"))
    return sorted(found)


def test_each_start_has_its_done(make_mesh, data):
    """One pair per call and turn of the loop; what runs backward, or again under jax.checkpoint, are whole calls."""
    x, idx, w = data
    args = x.astype(np.float32), idx, w
    pairs = [(f"{op}_{half}", 1) for op in ("dispatch", "combine") for half in ("start", "done")]
    backward = [("redispatch", 1), ("combine", 1)]

    def found(layer):
        return primitives(jax.make_jaxpr(testing.on_ranks(gradients(layer), make_mesh(RANKS)))(*args).jaxpr)

    assert found(sandwich) == sorted(pairs + backward)
    assert found(jax.checkpoint(sandwich, policy=POLICIES["names"])) == sorted(pairs + backward)
    assert found(jax.checkpoint(sandwich, policy=POLICIES["everything"])) == sorted(pairs + backward)
    again = [("dispatch", 1)]  # the sum itself is not needed backward
    assert found(jax.checkpoint(sandwich)) == sorted(pairs + backward + again)


def test_second_derivatives(make_mesh, data):
    """B35: a directional derivative of the gradient equals that of the whole calls."""
    x, idx, w = data
    args = x.astype(np.float32), idx, w

    def run(layer):
        def step(x, idx, w):
            loss = lambda x, w: jnp.sum(layer(x, idx, w, 0.5) ** 2)
            directional = lambda x, w: jnp.sum(jnp.sin(jnp.arange(x.shape[1])) * jax.grad(loss)(x, w))
            return jax.grad(directional, (0, 1))(x, w)

        return on_ranks(step, make_mesh(RANKS))(*args)

    assert all(np.abs(g).max() > 1e-3 for g in run(plain))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4), run(sandwich), run(plain))


def test_results_vary_over_the_union_of_axes(make_mesh):
    """B47: tickets and results vary over the group's axes and those of every operand."""
    seen = {}

    def run(x, idx, bias):
        pending = jax_ep.dispatch_start(x, idx, **OPTIONS)
        recv = jax_ep.dispatch_done(pending)
        back = jax_ep.combine_start(recv.x, recv.handle, bias=bias)
        out = jax_ep.combine_done(back)
        seen["dispatch"] = [_compat.varying_axes(a) for a in jax.tree.leaves((pending, recv))]
        seen["combine"] = [_compat.varying_axes(a) for a in jax.tree.leaves((back, out))]
        return out

    mesh = make_mesh(2, 2, 2, axis_names=("dp", "ep", "tp"))
    run = jax.shard_map(run, mesh=mesh, in_specs=(P("dp"), P("dp"), P("tp")), out_specs=(P(("dp", "ep", "tp"))))
    jax.eval_shape(run, np.zeros((8, 8), np.float32), np.zeros((8, 2), np.int32), np.zeros((8, 8), np.float32))
    assert len(seen["dispatch"]) > 10 and set(seen["dispatch"]) == {frozenset({"dp", "ep"})}
    assert len(seen["combine"]) > 10 and set(seen["combine"]) == {frozenset({"dp", "ep", "tp"})}


def test_pending_is_plain_data(make_mesh, data):
    """A pending exchange crosses jit, donated, and is done by another program."""
    mesh, (x, idx, w) = make_mesh(RANKS), data
    send = testing.on_ranks(lambda *a: jax_ep.dispatch_start(*a, **OPTIONS), mesh)
    receive = testing.on_ranks(jax_ep.dispatch_done, mesh, jit=False)
    pending = send(x, idx, w)
    assert pending.ticket.shape == (RANKS, 2) and pending.ticket.dtype == np.int32
    recv, _ = jax.jit(lambda p: (receive(p), p), donate_argnums=0)(pending)
    testing.check_recv(recv, testing.oracle_dispatch(x, idx, w, num_experts=EXPERTS))
    assert pending.call.x.is_deleted() and pending.ticket.is_deleted()


def test_no_tokens_at_all(make_mesh):
    """B01: arrays of literally no token, forward and backward."""

    def step(x, idx, w):
        loss = lambda x, w: jnp.sum(layer(split_dispatch, split_combine, x, idx, w)[0])
        return jax.grad(loss, (0, 1))(x, w)

    x, idx, w = np.zeros((2, 0, 8), np.float32), np.zeros((2, 0, 2), np.int32), np.zeros((2, 0, 2), np.float32)
    g_x, g_w = on_ranks(step, make_mesh(2))(x, idx, w)
    assert g_x.shape == x.shape and g_w.shape == w.shape


def trace(make_mesh, run, *args):
    return jax.eval_shape(testing.on_ranks(run, make_mesh(RANKS), jit=False), *args)


def start_of(x, idx, op):
    recv = jax_ep.dispatch(x, idx, **OPTIONS)
    starts = {
        "dispatch": lambda: jax_ep.dispatch_start(x, idx, **OPTIONS),
        "second": lambda: jax_ep.dispatch_start(x, handle=recv.handle),
        "combine": lambda: jax_ep.combine_start(recv.x, recv.handle),
        "recv": lambda: recv,
    }
    return starts[op]()


start = jax_ep.dispatch_start

MISTAKES = {
    "combine's to dispatch": ("combine", jax_ep.dispatch_done, "got the Pending of combine_start.*to combine_done"),
    "dispatch's to combine": ("dispatch", jax_ep.combine_done, "got the Pending of dispatch_start.*to dispatch_done"),
    "a second tensor's": ("second", jax_ep.combine_done, "^combine_done: got the Pending of dispatch_start"),
    "a Recv": ("recv", jax_ep.dispatch_done, "^dispatch_done: got Recv, expected what dispatch_start returned"),
    "as a handle": ("dispatch", lambda p: jax_ep.combine(p.call.x, p), "combine: got handle of type Pending"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_wrong_pending(make_mesh, data, name):
    op, done, text = MISTAKES[name]
    with pytest.raises(TypeError, match=text):
        trace(make_mesh, lambda x, idx: done(start_of(x, idx, op)), *data[:2])


@pytest.mark.parametrize(
    ("run", "error", "text"),
    [
        (
            lambda x, i: start(x, i, **OPTIONS, mode="fast"),
            ValueError,
            "^dispatch_start: got mode='fast'",
        ),
        (
            lambda x, i: start(x[:3], i, **OPTIONS),
            ValueError,
            r"^dispatch_start: got topk_idx.*\[3, num_",
        ),
        (lambda x, i: start(x, i, **OPTIONS, rows=3), TypeError, "unexpected keyword argument 'rows'"),
        (
            lambda x, i: start(x, handle=jax_ep.dispatch(x, i, **OPTIONS).handle, capacity=8),
            TypeError,
            "^dispatch_start: got capacity= beside handle=",
        ),
        (
            lambda x, i: jax_ep.combine_start(x, jax_ep.dispatch(x, i, **OPTIONS).handle),
            ValueError,
            r"^combine_start: got y of shape \(5, 128\)",
        ),
    ],
    ids=["mode", "tokens", "keyword", "beside handle", "rows"],
)
def test_mistakes_name_the_start(make_mesh, data, run, error, text):
    """The rules are those of the whole calls."""
    with pytest.raises(error, match=text):
        trace(make_mesh, run, *data[:2])


def test_vmap_is_refused(make_mesh, data):
    run = lambda x, idx: jax.vmap(lambda x, i: jax_ep.dispatch_start(x, i, **OPTIONS).ticket)(x[None], idx[None])
    with pytest.raises(NotImplementedError, match=r"cannot be vmapped.*jax\.lax\.map"):
        trace(make_mesh, run, *data[:2])


def test_cuda_is_refused_on_cpu(make_mesh, data):
    """implementation="cuda" never falls back; the error names the half."""
    run = lambda x, i: jax_ep.dispatch_start(x, i, **OPTIONS, implementation="cuda").ticket
    with pytest.raises(ValueError, match=r'jax_ep_dispatch_start: implementation="cuda".*lowered for cpu'):
        testing.on_ranks(run, make_mesh(RANKS)).lower(*data[:2])
