"""dispatch beyond the common cases: empty arrays, sizes, layouts of operands, meshes, independence, second tensors."""

import doctest
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from exchange_cases import LAYOUTS, QUICK_COMPILE
from jax.sharding import Mesh, PartitionSpec

import jax_ep
from jax_ep import testing


@pytest.mark.parametrize("name", ["dispatch", "Recv"])
def test_example(name):
    """The worked example of the docstring."""
    (example,) = doctest.DocTestFinder().find(getattr(jax_ep, name), name, globs={})
    assert example.examples and doctest.DocTestRunner().run(example).failed == 0


def round_trip(num_experts, layout="token", **kwargs):
    """Every token to its experts and back, as the sum of what arrived."""

    def run(x, idx):
        recv = jax_ep.dispatch(x, idx, num_experts=num_experts, axis_name="ep", layout=layout, **kwargs)
        return jax_ep.combine(recv.x, recv.handle), recv

    return run


@pytest.mark.parametrize("layout", LAYOUTS)
def test_no_tokens_at_all(make_mesh, layout):
    """B01: arrays of literally no token, forward and backward."""
    alignment = 8 if layout == "expert" else 1

    def step(x, idx, w):
        def loss(x, w):
            recv = jax_ep.dispatch(x, idx, w, num_experts=4, axis_name="ep", layout=layout, expert_alignment=alignment)
            out = jax_ep.combine(recv.x, recv.handle, bias=x)
            return jnp.sum(out) + jnp.sum(recv.weights), (out, recv)

        return jax.grad(loss, (0, 1), has_aux=True)(x, w)

    x, idx, w = np.zeros((2, 0, 8), np.float32), np.zeros((2, 0, 2), np.int32), np.zeros((2, 0, 2), np.float32)
    (g_x, g_w), (out, recv) = testing.on_ranks(step, make_mesh(2))(x, idx, w)
    assert out.shape == g_x.shape == x.shape and g_w.shape == w.shape
    rows = {"expert": (2, 16), "token": (2, 0), "batched": (2, 2, 0)}[layout]
    assert recv.x.shape == (*rows, 8) and not recv.x.any() and not recv.counts.any()
    assert recv.weights.shape == ((2, 0, 2) if layout == "token" else rows)
    assert recv.demand.tolist() == recv.num_dropped.tolist() == [0, 0]


@pytest.mark.parametrize("num_tokens", [0, 5])
def test_eager_shard_map(make_mesh, num_tokens):
    """B01, B49: without jit."""
    x = testing.code_rows(2, num_tokens, 8)
    idx = testing.routing("masked", num_ranks=2, num_tokens=num_tokens, num_topk=2, num_experts=4)
    out, recv = testing.on_ranks(round_trip(4), make_mesh(2), jit=False)(x, idx)
    assert out.shape == x.shape
    if num_tokens == 0:  # JAX cannot fetch empty results of an eager shard_map
        assert recv.demand.tolist() == [0, 0] and not recv.counts.any()
        return
    oracle = testing.oracle_dispatch(x, idx, num_experts=4, layout="token")
    testing.check_recv(recv, oracle)
    testing.same_bits(out, testing.oracle_combine(oracle, oracle.x))


@pytest.mark.parametrize("hidden", [8, 120, 2880, 6144])
def test_hidden_sizes(make_mesh, hidden):
    """B16: every hidden of whole 16-byte units travels to its last column."""
    x = testing.random_rows((2, 17, hidden), "bfloat16")
    x[..., -16:] = np.arange(16)[-hidden:] * 3 + np.arange(17)[:, None]
    idx = testing.routing("uniform", num_ranks=2, num_tokens=17, num_topk=1, num_experts=4)
    out, _ = testing.on_ranks(round_trip(4), make_mesh(2))(x, idx)
    testing.same_bits(out, x, "round trip")


def test_other_hidden_sizes_are_refused(make_mesh):
    """B16: the rest is refused while tracing, with the unit named."""
    for hidden in (100, 4, 12, 1):
        x, idx = np.zeros((2, 4, hidden), jnp.bfloat16), np.zeros((2, 4, 1), np.int32)
        with pytest.raises(ValueError, match="multiple of 16 bytes"):
            jax.eval_shape(testing.on_ranks(round_trip(4), make_mesh(2)), x, idx)


@pytest.mark.parametrize(
    ("dtype", "extremes"),
    [("float16", [65504, -65504]), ("bfloat16", [3e38, 65536, -3e38]), ("float32", [3e38, 1 + 2**-23])],
)
def test_extreme_values_keep_their_dtype(make_mesh, dtype, extremes):
    """B17, B28: the largest values, NaN and infinities arrive, and only in their own token."""
    x = testing.random_rows((2, 7, 8), dtype)
    x[0, 0, : len(extremes)] = extremes
    x[0, 2], x[1, 4], x[1, 5] = np.nan, np.inf, -np.inf
    idx = testing.routing("uniform", num_ranks=2, num_tokens=7, num_topk=1, num_experts=4)
    out, recv = testing.on_ranks(round_trip(4), make_mesh(2))(x, idx)
    testing.same_bits(out, x, "round trip")
    testing.check_recv(recv, testing.oracle_dispatch(x, idx, num_experts=4, layout="token"))


def test_operands_of_any_memory_layout(make_mesh):
    """B19: transposed, strided, reversed, broadcast and sliced operands are read like fresh copies, combine's too."""
    send = round_trip(4)

    def views(y, ids):
        wide = jnp.concatenate([y, y], 1)
        idx = ids.T
        xs = [y.T, wide[:, ::2][: len(idx)], y[::-1][: len(idx)], jnp.broadcast_to(y[0], (len(idx), len(y)))]
        xs.append(jax.lax.dynamic_slice(wide, (2, 4), (len(idx), len(y))))
        fresh = jax.lax.optimization_barrier((xs, idx + 0))
        results = [send(x, idx) for x in xs]
        recv = results[0][1]
        ys = jnp.repeat(recv.x, 2, axis=1)[:, ::2], jnp.flip(recv.x.T, 0)[::-1].T, recv.x[::-1][::-1]
        sums = [jax_ep.combine(y, recv.handle) for y in ys]
        return results, [send(x, fresh[1]) for x in fresh[0]], sums

    y = testing.random_rows((2, 8, 8), "bfloat16")
    ids = testing.routing("uniform", num_ranks=2, num_tokens=8, num_topk=2, num_experts=4).transpose(0, 2, 1)
    got, expected, sums = testing.on_ranks(views, make_mesh(2))(y, ids.copy())
    jax.tree.map(testing.same_bits, got, expected)
    for out in sums:
        testing.same_bits(out, got[0][0], "combine")
    first = testing.oracle_dispatch(y.transpose(0, 2, 1), ids.transpose(0, 2, 1), num_experts=4, layout="token")
    testing.check_recv(jax.tree.map(lambda a: a, got[0][1]), first)


@pytest.mark.parametrize("order", list(itertools.permutations(range(4))), ids=str)
def test_rank_is_the_position_in_the_mesh(order):
    """B54: device ids play no part, there and back."""
    mesh = Mesh(np.array(jax.devices())[list(order)], ("ep",))
    x = testing.code_rows(4, 3, 8)
    idx = testing.routing("masked", num_ranks=4, num_tokens=3, num_topk=2, num_experts=8)
    program = jax.jit(testing.on_ranks(round_trip(8), mesh, jit=False), compiler_options=QUICK_COMPILE)
    out, recv = program(x, idx)
    oracle = testing.oracle_dispatch(x, idx, num_experts=8, layout="token")
    testing.check_recv(recv, oracle)
    testing.same_bits(out, testing.oracle_combine(oracle, oracle.x))


MESHES = [
    # shape, axes, the group's axes, the other axes
    ((2, 4), ("dp", "ep"), ("ep",), ("dp",)),
    ((4, 2), ("ep", "dp"), ("ep",), ("dp",)),
    ((2, 2, 2), ("pp", "ep", "tp"), ("ep",), ("pp", "tp")),
    ((2, 2, 2), ("a", "dp", "b"), ("a", "b"), ("dp",)),
    ((2, 2, 2), ("a", "dp", "b"), ("b", "a"), ("dp",)),
]


@pytest.mark.parametrize(("shape", "axes", "group", "others"), MESHES, ids=lambda v: "".join(map(str, v)))
def test_group_over_some_axes(make_mesh, shape, axes, group, others):
    """B55, B54: strided groups and several axes; every group is independent and equals its own oracle."""
    mesh = make_mesh(*shape, axis_names=axes)
    num_ranks = int(np.prod([mesh.shape[a] for a in group]))
    num_groups = mesh.size // num_ranks
    num_experts = 2 * num_ranks
    axis_name = group if len(group) > 1 else group[0]
    run = testing.on_ranks(lambda x, idx: send(x, idx), mesh, (*others, *group))

    def send(x, idx):
        return jax_ep.dispatch(x, idx, num_experts=num_experts, axis_name=axis_name, layout="token")

    x = testing.code_rows(mesh.size, 5, 8)
    kinds = itertools.cycle(("zipf", "masked", "one_rank"))
    idx = np.concatenate(
        [
            testing.routing(kind, num_ranks=num_ranks, num_tokens=5, num_topk=2, num_experts=num_experts, seed=g)
            for g, kind in zip(range(num_groups), kinds, strict=False)
        ]
    )
    recv = run(x, idx)
    for g in range(num_groups):
        part = slice(g * num_ranks, (g + 1) * num_ranks)
        oracle = testing.oracle_dispatch(x[part], idx[part], num_experts=num_experts, layout="token")
        testing.check_recv(jax.tree.map(lambda a, part=part: a[part], recv), oracle)

    # Other tokens and another routing in the last group change no bit of the first.
    x[-1], idx[-1] = -x[-1], -1
    changed = run(x, idx)
    jax.tree.map(lambda a, b: testing.same_bits(a[:num_ranks], b[:num_ranks]), recv, changed)


def test_result_depends_on_the_token_alone(make_mesh):
    """B31: other ranks' tokens, the order of tokens and repetition change no bit of a token's result."""

    def run(x, idx, w):
        recv = jax_ep.dispatch(x, idx, w, num_experts=8, axis_name="ep")
        scale = jax.lax.axis_index("ep") + jnp.arange(len(recv.x))[:, None] * 0 + 0.3
        return jax_ep.combine((recv.x * scale).astype(x.dtype), recv.handle, weights=recv.weights)

    run = testing.on_ranks(run, make_mesh(4))
    x = testing.random_rows((4, 9, 16), "bfloat16")
    idx = testing.routing("uniform", num_ranks=4, num_tokens=9, num_topk=4, num_experts=8)
    w = np.random.default_rng(0).random(idx.shape).astype(np.float32)
    out = np.asarray(run(x, idx, w))

    others_x, others_idx = x.copy(), idx.copy()
    others_x[1:] = testing.random_rows((3, 9, 16), "bfloat16", 1)
    others_idx[1:] = testing.routing("one_rank", num_ranks=4, num_tokens=9, num_topk=4, num_experts=8)[1:]
    testing.same_bits(run(others_x, others_idx, w)[0], out[0], "with other ranks changed")
    others_idx[1:] = -1
    testing.same_bits(run(others_x, others_idx, w)[0], out[0], "alone")

    order = np.random.default_rng(1).permutation(9)
    testing.same_bits(run(x[:, order], idx[:, order], w[:, order]), out[:, order], "permuted")
    for _ in range(10):
        testing.same_bits(run(x, idx, w), out, "repeated")


def test_weights_of_other_float_types(make_mesh):
    """B17: gate weights in bf16 arrive as the float32 of the same value, and get a bf16 gradient."""

    def run(x, idx, w):
        def loss(w):
            recv = jax_ep.dispatch(x, idx, w, num_experts=4, axis_name="ep")
            return recv.weights.sum(), recv.weights

        return jax.grad(loss, has_aux=True)(w)

    w = testing.random_rows((2, 5, 2), "bfloat16")
    idx = testing.routing("uniform", num_ranks=2, num_tokens=5, num_topk=2, num_experts=4)
    grad, weights = testing.on_ranks(run, make_mesh(2))(testing.code_rows(2, 5, 8), idx, w)
    assert weights.dtype == jnp.float32 and grad.dtype == jnp.bfloat16 and (grad == 1).all()
    assert sorted(np.asarray(weights)[np.asarray(weights) != 0]) == sorted(w.astype(np.float32).ravel())


def test_x64(make_mesh):
    """B21, B17: with 64-bit types on, int64 ids give the same bits, handles stay i32, and float64 rows are refused."""
    x = testing.code_rows(2, 7, 8)
    idx = testing.routing("invalid", num_ranks=2, num_tokens=7, num_topk=3, num_experts=4).astype(np.int64)
    idx[0, 0] = 2**32 - 1, 2**32, -(2**32)  # -1, 0 and 0 if they wrapped
    w = np.random.default_rng(0).random(idx.shape)
    send = lambda x, idx, w: jax_ep.dispatch(x, idx, w, num_experts=4, axis_name="ep")
    with jax.enable_x64(True):
        program = testing.on_ranks(lambda *a: (r := send(*a), jax_ep.combine(r.x, r.handle)), make_mesh(2))
        recv, out = program(x, idx, w)
        with pytest.raises(TypeError, match="float64.*cast"):
            jax.eval_shape(program, x.astype(np.float64), idx, w)
        oracle = testing.oracle_dispatch(x, idx, w.astype(np.float32), num_experts=4)
        testing.check_recv(recv, oracle)
        testing.same_bits(out, testing.oracle_combine(oracle, oracle.x))
    assert oracle.stats[0, 2] >= 3


@pytest.mark.parametrize(("layout", "capacity"), [("expert", 8), ("batched", 3)])
def test_second_tensor_reports_the_same_routing(make_mesh, layout, capacity):
    """dispatch(x2, handle=): another hidden and dtype, the routing's sizes and statistics, no weights."""
    kwargs = dict(num_experts=4, layout=layout, capacity=capacity)

    def run(x, x2, idx):
        recv = jax_ep.dispatch(x, idx, idx * 1.0, axis_name="ep", **kwargs)
        return recv, jax_ep.dispatch(x2, handle=recv.handle)

    x, x2 = testing.code_rows(2, 7, 8), testing.random_rows((2, 7, 24), "float16")
    idx = testing.routing("masked", num_ranks=2, num_tokens=7, num_topk=2, num_experts=4)
    first, second = testing.on_ranks(run, make_mesh(2))(x, x2, idx)
    oracle = testing.oracle_dispatch(x, idx, **kwargs)
    testing.same_bits(second.x, testing.oracle_redispatch(oracle, x2).reshape(second.x.shape))
    assert second.weights is None and int(first.num_dropped.sum()) > 0
    assert (second.group_sizes is None) == (layout == "batched")
    for name in ("group_sizes", "counts", "demand", "num_dropped", "num_invalid"):
        if getattr(first, name) is not None:
            testing.same_bits(getattr(second, name), getattr(first, name), name)


def test_program_has_only_the_exchange_it_needs(make_mesh):
    """B49: operands sharded over the axis are not gathered around the call; three gathers and one transpose inside."""
    mesh = make_mesh(4)
    spec = PartitionSpec("ep")

    def send(x, idx):
        return jax_ep.dispatch(x, idx, num_experts=8, axis_name="ep").x

    run = jax.jit(jax.shard_map(send, mesh=mesh, in_specs=spec, out_specs=spec))
    x = jax.device_put(np.zeros((20, 8), np.float32), jax.NamedSharding(mesh, spec))
    idx = jax.device_put(np.zeros((20, 2), np.int32), jax.NamedSharding(mesh, spec))
    hlo = run.lower(x, idx).compile().as_text()
    calls = {op: hlo.count(f" {op}(") for op in ("all-gather", "all-to-all", "all-reduce", "collective-permute")}
    # counts, ids, rows of entries, rows; slots
    assert calls == {"all-gather": 4, "all-to-all": 1, "all-reduce": 0, "collective-permute": 0}
