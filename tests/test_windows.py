"""dispatch(window=) against the oracle, and windowed: equal to a capacity that holds everything, forward and backward.

Coverage: every window of every layout (and one past the end), with all operations and gradients along its handle;
windowed under skew, with one window and with many, idle ranks, no tokens; gradients of params, rows, weights and bias;
groups that run different numbers of windows; rounding in bfloat16; integer params; checkpoint; errors.
"""

import dataclasses
import doctest
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from exchange_cases import LAYOUTS, QUICK_COMPILE, Inputs, Sizes, check, exchange, make_inputs

import jax_ep
from jax_ep import testing

RANKS, EXPERTS, TOKENS, TOPK, HIDDEN, WIDE = 3, 6, 5, 3, 8, 12
SMALL = {"expert": 4, "token": 2, "batched": 2}
# One window for any routing. (An expert may repeat within a token here, which the default of "batched" does not hold.)
LARGE = {"expert": None, "token": None, "batched": RANKS * TOKENS * TOPK}


def test_example():
    """The worked example of the docstring."""
    (example,) = doctest.DocTestFinder().find(jax_ep.windowed, "windowed", globs={})
    assert example.examples and doctest.DocTestRunner().run(example).failed == 0


def routing(kind, num_ranks=RANKS, seed=0):
    return testing.routing(
        kind, num_ranks=num_ranks, num_tokens=TOKENS, num_topk=TOPK, num_experts=2 * num_ranks, seed=seed
    )


@pytest.mark.parametrize(
    "sizes",
    [
        Sizes(RANKS, EXPERTS, TOKENS, TOPK, capacity=8, expert_alignment=4),
        Sizes(RANKS, EXPERTS, TOKENS, TOPK, layout="token", capacity=4),
        Sizes(RANKS, EXPERTS, TOKENS, TOPK, layout="batched", capacity=3, zero_tail=False),
    ],
    ids=lambda sizes: sizes.layout,
)
def test_every_window(make_mesh, sizes):
    """B23: one program for all windows; each delivers its rows, all of them every row once, and one more is empty."""
    run = testing.on_ranks(lambda w, *a: exchange(sizes, Inputs(*a), w), make_mesh(RANKS), jit=False)
    program = jax.jit(run, compiler_options=QUICK_COMPILE)
    for kind in ("zipf", "one_rank", "empty_ranks", "invalid"):
        idx = routing(kind)
        whole = make_inputs(sizes, idx)[1]
        num_windows = int(whole.stats[0, 4])
        assert num_windows > 1
        times_sent = np.zeros(idx.shape, int)
        for window in range(num_windows + 1):
            inputs, oracle = make_inputs(sizes, idx, window, window)
            result = program(np.full(RANKS, window, np.int32), *dataclasses.astuple(inputs))
            check(sizes, result, inputs, oracle)
            is_sent = np.asarray(result["recv"].handle.dst_row) >= 0
            times_sent += is_sent
            assert is_sent.any() == (window < num_windows)
            assert (is_sent == (whole.dst_row >= 0)).all() or window > 0
        assert (times_sent == (whole.topk_idx >= 0)).all()


def test_a_window_is_a_number_of_any_kind(make_mesh):
    """Python int, NumPy and traced ids of other widths; a huge one is past the end without overflow."""
    x, idx = testing.code_rows(RANKS, TOKENS, HIDDEN), routing("zipf")

    def send(x, idx, window):
        recv = lambda w: jax_ep.dispatch(x, idx, num_experts=EXPERTS, axis_name="ep", capacity=4, window=w)
        return [recv(w) for w in (1, np.int64(1), window, window.astype(jnp.uint8))], recv(2**31 - 1)

    same, past = testing.on_ranks(send, make_mesh(RANKS))(x, idx, np.ones(RANKS, np.int16))
    oracle = testing.oracle_dispatch(x, idx, num_experts=EXPERTS, capacity=4, window=1)
    for recv in same:
        testing.check_recv(recv, oracle)
    assert not past.x.any() and not past.group_sizes.any() and not past.num_dropped.any()
    assert (past.handle.dst_row == -1).all()


def make_params(num_experts, rng):
    """Small integers, so that every sum is exact; the last leaf is no parameter but a number of the expert."""
    integers = lambda *shape: rng.integers(-2, 3, (num_experts, *shape)).astype(np.float32)
    numbers = np.arange(num_experts, dtype=np.int32) % 2
    return {"w1": integers(HIDDEN, WIDE), "w2": integers(WIDE, HIDDEN), "number": numbers}


def expert_rows(params, recv):
    """relu(x @ w1) @ w2, plus the expert's number, which makes padding rows differ from 0."""

    def one(rows, expert):
        w1, w2, number = (params[name][expert] for name in ("w1", "w2", "number"))
        hidden = jax.nn.relu(jnp.einsum("...h,...hf->...f", rows.astype(jnp.float32), w1))
        return (jnp.einsum("...f,...fh->...h", hidden, w2) + number[..., None]).astype(rows.dtype)

    if recv.topk_idx is not None:
        weights = jnp.ones(recv.topk_idx.shape) if recv.weights is None else recv.weights
        y = 0.0
        for k in range(recv.topk_idx.shape[1]):
            local = recv.topk_idx[:, k]
            y += jnp.where((local >= 0)[:, None], weights[:, k, None] * one(recv.x, jnp.maximum(local, 0)), 0)
        return y.astype(recv.x.dtype)
    if recv.x.ndim == 3:
        return one(recv.x, jnp.broadcast_to(jnp.arange(len(recv.x))[:, None], recv.x.shape[:2]))
    return one(recv.x, jnp.repeat(jnp.arange(len(recv.counts)), recv.group_sizes, total_repeat_length=len(recv.x)))


def in_one_piece(params, x, idx, w, bias, layout, num_experts):
    """The layer without windows, in a capacity that drops nothing."""
    recv = jax_ep.dispatch(
        x, idx, w, num_experts=num_experts, axis_name="ep", layout=layout, capacity=LARGE[layout], implementation="xla"
    )
    weights = None if layout == "token" else recv.weights
    return jax_ep.combine(expert_rows(params, recv), recv.handle, weights=weights, bias=bias), recv.num_dropped


def in_windows(params, x, idx, w, bias, layout, num_experts, capacity, **kwargs):
    return jax_ep.windowed(
        expert_rows, params, x, idx, w, num_experts=num_experts, axis_name="ep", layout=layout, capacity=capacity,
        bias=bias, **kwargs,
    )  # fmt: skip


@functools.cache
def both(layout, capacity):
    """Jitted: (out, gradients) in one piece and in windows, and what was dropped and the number of windows."""
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:RANKS]), ("ep",))

    def run(params, x, idx, w, bias, g):
        floats = {k: v for k, v in params.items() if k != "number"}
        merged = lambda floats: {**floats, "number": params["number"]}
        piece = lambda f, x, w, b: in_one_piece(merged(f), x, idx, w, b, layout, EXPERTS)
        windows = lambda f, x, w, b: in_windows(merged(f), x, idx, w, b, layout, EXPERTS, capacity)
        expected, pullback, dropped = jax.vjp(piece, floats, x, w, bias, has_aux=True)
        got, windowed_pullback = jax.vjp(windows, floats, x, w, bias)
        kwargs = dict(num_experts=EXPERTS, axis_name="ep", layout=layout, capacity=capacity)
        num_windows = jax_ep.dispatch(x, idx, **kwargs).num_windows
        return (got, windowed_pullback(g)), (expected, pullback(g)), (dropped, num_windows)

    return jax.jit(testing.on_ranks(run, mesh, jit=False), compiler_options=QUICK_COMPILE)


@pytest.mark.parametrize("kind", ["zipf", "one_rank", "empty_ranks", "masked", "one_expert", "no_tokens"])
@pytest.mark.parametrize("size", ["small", "large"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_equal_to_one_piece(layout, size, kind):
    """B23, B32: the same numbers whatever the number of windows, exact because all of them are integers or quarters."""
    capacity = (SMALL if size == "small" else LARGE)[layout]
    rng = np.random.default_rng(len(kind))
    integers = lambda *shape: rng.integers(-3, 4, shape).astype(np.float32)
    params = make_params(EXPERTS, rng)
    params = {k: v.reshape(RANKS, 2, *v.shape[1:]) for k, v in params.items()}
    tokens = (RANKS, TOKENS, HIDDEN)
    idx = routing(kind)
    w = np.where(idx < 0, np.nan, rng.integers(1, 5, idx.shape) / 4).astype(np.float32)
    args = params, integers(*tokens), idx, w, integers(*tokens), integers(*tokens)
    got, expected, (dropped, num_windows) = both(layout, capacity)(*args)
    assert not dropped.any() and (num_windows == num_windows[0]).all()
    assert (num_windows[0] > 1) == (size == "small" and kind != "no_tokens")
    jax.tree.map(np.testing.assert_array_equal, got, expected)
    if kind != "no_tokens":
        assert all(np.any(a) for a in jax.tree.leaves(got))


def test_groups_run_their_own_number_of_windows(make_mesh):
    """Params that dp groups share: their gradients are summed once, after the loops, though one group loops longer."""
    mesh = make_mesh(2, 2, axis_names=("dp", "ep"))
    spec = jax.sharding.PartitionSpec
    rng = np.random.default_rng(0)
    params = make_params(4, rng)
    x, g = (rng.integers(-3, 4, (4 * TOKENS, HIDDEN)).astype(np.float32) for _ in range(2))
    busy = testing.routing("one_rank", num_ranks=2, num_tokens=TOKENS, num_topk=TOPK, num_experts=4)
    idle = np.full((2, TOKENS, TOPK), -1, np.int32)
    idle[0, 0, 0] = 1
    idx = np.concatenate([busy, idle]).reshape(-1, TOPK)
    w = np.where(idx < 0, 0, rng.integers(1, 5, idx.shape) / 4).astype(np.float32)
    tokens = spec(("dp", "ep"))

    def gradients(layer):
        def loss(floats, params, x, w):
            merged = lambda f, p: {**f, "number": p["number"]}
            run = jax.shard_map(
                lambda f, p, x, idx, w: layer(merged(f, p), x, idx, w),
                mesh=mesh,
                in_specs=(spec("ep"), spec("ep"), tokens, tokens, tokens),
                out_specs=tokens,
            )
            return jnp.vdot(run(floats, params, x, idx, w), g)

        floats = {k: v for k, v in params.items() if k != "number"}
        return jax.jit(jax.grad(loss, (0, 2, 3)), compiler_options=QUICK_COMPILE)(floats, params, x, w)

    got = gradients(lambda *a: in_windows(*a, None, "expert", 4, 4))
    expected = gradients(lambda *a: in_one_piece(*a, None, "expert", 4)[0])
    jax.tree.map(np.testing.assert_array_equal, got, expected)


def test_rounding(make_mesh):
    """bfloat16: each window's combine rounds as combine does; their sum and the bias are in float32, rounded once."""
    x, bias = (testing.random_rows((2, TOKENS, HIDDEN), "bfloat16", seed=n) for n in range(2))
    idx = routing("zipf", num_ranks=2)
    kwargs = dict(num_experts=4, capacity=4)

    def run(x, idx, bias):
        scaled = lambda scale, recv: recv.x * scale
        layer = lambda **more: jax_ep.windowed(
            scaled, jnp.bfloat16(1.25), x, idx, None, axis_name="ep", **{**kwargs, **more}
        )
        return layer(bias=bias), layer(capacity=None)

    out, one_window = testing.on_ranks(run, make_mesh(2))(x, idx, bias)
    total = np.zeros(x.shape, np.float32)
    window = num_windows = 0
    while window == 0 or window < num_windows:
        oracle = testing.oracle_dispatch(x, idx, **kwargs, window=window)
        y = np.asarray(oracle.x * jnp.bfloat16(1.25))
        total += testing.oracle_combine(oracle, y).astype(np.float32)
        window, num_windows = window + 1, int(oracle.stats[0, 4])
    assert num_windows > 2
    testing.same_bits(out, (total + bias.astype(np.float32)).astype(bias.dtype))
    oracle = testing.oracle_dispatch(x, idx, num_experts=4)
    testing.same_bits(one_window, testing.oracle_combine(oracle, np.asarray(oracle.x * jnp.bfloat16(1.25))))


@pytest.mark.parametrize("mode", ["auto", "throughput", "latency"])
def test_mode_of_every_window(make_mesh, mode):
    """Whatever `expert_fn` is given, forward and backward, came in the mode asked for, and goes back in it."""
    seen = []

    def experts(scale, recv):
        seen.append(recv.handle.spec.mode)
        return recv.x * scale

    def run(x, idx):
        kwargs = {} if mode == "auto" else {"mode": mode}
        layer = lambda x: jax_ep.windowed(
            experts, jnp.float32(2), x, idx, None, num_experts=4, axis_name="ep", capacity=4, **kwargs
        )
        return jax.grad(lambda x: jnp.sum(layer(x)))(x)

    x = np.ones((2, TOKENS, HIDDEN), np.float32)
    idx = routing("zipf", num_ranks=2)
    grad = testing.on_ranks(run, make_mesh(2))(x, idx)
    np.testing.assert_array_equal(grad, np.broadcast_to(2.0 * (idx >= 0).sum(-1, keepdims=True), x.shape))
    assert seen == [mode]  # traced once, for all windows and both directions


def test_under_checkpoint_without_vma(make_mesh):
    """jax.checkpoint around the layer, shard_map without check_vma: the same gradients."""
    rng = np.random.default_rng(3)
    params = make_params(4, rng)
    params = {k: v.reshape(2, 2, *v.shape[1:]) for k, v in params.items()}
    x = rng.integers(-3, 4, (2, TOKENS, HIDDEN)).astype(np.float32)
    idx = routing("zipf", num_ranks=2)

    def run(params, x, idx):
        layer = lambda x: in_windows(params, x, idx, None, None, "expert", 4, 4)
        return [jax.grad(lambda x, f=f: jnp.sum(f(x) ** 2))(x) for f in (layer, jax.checkpoint(layer))]

    grads = []
    for check_vma in (True, False):
        program = testing.on_ranks(run, make_mesh(2), jit=False, check_vma=check_vma)
        grads += jax.jit(program, compiler_options=QUICK_COMPILE)(params, x, idx)
    for grad in grads:
        testing.same_bits(grad, grads[0])
    assert np.any(grads[0])


@pytest.mark.parametrize("is_recomputed", [False, True], ids=["plain", "checkpoint"])
def test_what_expert_fn_closes_over(make_mesh, is_recomputed):
    """Values made inside shard_map, whose gradient is taken outside of it: floats, integers and bools; as params."""

    def loss(x, idx, is_closed_over):
        def layer(x, idx):
            made = jax.lax.axis_index("ep") + 1, jnp.sum(jax.lax.stop_gradient(x)), x[0, 0] > 0

            def experts(params, recv):
                number, total, flag = made if is_closed_over else params
                return recv.x * number * total + jnp.where(flag, recv.x, 0)

            params = () if is_closed_over else (made[0], jax.lax.stop_gradient(made[1]), made[2])
            run = lambda x: jax_ep.windowed(
                experts, params, x, idx, None, num_experts=4, axis_name="ep", capacity=4
            )  # fmt: skip
            return (jax.checkpoint(run) if is_recomputed else run)(x)

        return jnp.sum(testing.on_ranks(layer, make_mesh(2), jit=False)(x, idx) ** 2)

    x = testing.random_rows((2, TOKENS, HIDDEN)) / 16
    idx = routing("zipf", num_ranks=2)
    grads = [
        jax.jit(jax.grad(functools.partial(loss, is_closed_over=closed)), compiler_options=QUICK_COMPILE)(x, idx)
        for closed in (True, False)
    ]
    np.testing.assert_allclose(*grads, rtol=1e-6)
    assert np.any(grads[0])


def test_closed_over_arrays_are_not_differentiated(make_mesh):
    """A gradient that would have to pass through what expert_fn closes over is an error, not 0."""
    x, idx = np.zeros((2, TOKENS, HIDDEN), np.float32), np.zeros((2, TOKENS, 2), np.int32)

    def loss(scale):
        layer = lambda x, idx: jax_ep.windowed(
            lambda params, recv: recv.x * scale, (), x, idx, None, num_experts=4, axis_name="ep", capacity=4
        )
        return jnp.sum(testing.on_ranks(layer, make_mesh(2), jit=False)(x, idx))

    with pytest.raises(TypeError, match="^windowed: expert_fn closes over .* params; pass it there"):
        jax.eval_shape(jax.grad(loss), 2.0)
    jax.eval_shape(jax.grad(lambda scale: loss(jax.lax.stop_gradient(scale))), 2.0)


@pytest.mark.parametrize(
    ("changes", "error", "words"),
    [
        ({"axis_name": "tp"}, ValueError, ["windowed: axis_name='tp' is not bound", "shard_map"]),
        ({"num_experts": 5}, ValueError, ["windowed: got num_experts=5", "expected"]),
        ({"capacity": 0}, ValueError, ["capacity=0", "1 to"]),
        ({"mode": "fast"}, ValueError, ["windowed: got mode='fast'", '"latency"']),
        ({"layout": "row"}, ValueError, ["windowed: got layout='row'", '"batched"']),
        ({"bias": np.zeros((2, 3, HIDDEN), np.float32)}, ValueError, ["windowed: got bias of shape (3, 8)", "(5, 8)"]),
        ({"y": lambda params, recv: recv.x[:1]}, ValueError, ["combine: got y of shape (1, 8)", "[4, hidden]"]),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_mistakes(make_mesh, changes, error, words):
    """Static mistakes raise while tracing, by name."""
    kwargs = {"num_experts": 4, "axis_name": "ep", "capacity": 4, **changes}
    expert_fn, bias = kwargs.pop("y", lambda params, recv: recv.x), kwargs.pop("bias", None)
    run = lambda x, idx, bias: jax_ep.windowed(expert_fn, (), x, idx, None, bias=bias, **kwargs)
    x, idx = np.zeros((2, TOKENS, HIDDEN), np.float32), np.zeros((2, TOKENS, 2), np.int32)
    with pytest.raises(error) as caught:
        jax.eval_shape(testing.on_ranks(run, make_mesh(2)), x, idx, bias)
    for word in words:
        assert word in str(caught.value)
