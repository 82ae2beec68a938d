"""expert_map, recv.load, balance and gather_replicas.

Covers: replica choice against loops, holes and duplicates in the map, experts without a replica, ids that are invalid
as logical ones only, handle reuse and gradients with replicas, static mistakes, balance against brute force and its
bounds, a layer with replicas against one without and against a dense sum, forward and gradient.
"""

import dataclasses
import doctest
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from exchange_cases import QUICK_COMPILE
from jax.sharding import NamedSharding, PartitionSpec

import jax_ep
from jax_ep import testing

RANKS, TOKENS, TOPK, HIDDEN = 4, 9, 3, 8
EXPERTS, PHYSICAL = 6, 12  # six do not divide by four ranks
jit = functools.partial(jax.jit, compiler_options=QUICK_COMPILE)

MAPS = {
    "one replica each": [[e, -1, -1] for e in range(EXPERTS)],
    "uneven": [[0, 4, 8], [1, 5, -1], [11, -1, -1], [2, 3, -1], [6, 10, -1], [7, 9, -1]],
    "holes, any order": [[-1, 8, 0], [5, -1, 1], [-1, -1, 11], [3, -1, 2], [-1, 6, -1], [7, 9, 10]],
    "experts without": [[0, 4, 8], [-1, -1, -1], [11, -1, -1], [-5, PHYSICAL, 1 << 30], [6, 10, -1], [7, 9, -1]],
    "none": [[-1, -1, -1]] * EXPERTS,
}


@pytest.mark.parametrize("function", ["balance", "gather_replicas"])
def test_example(function):
    """The worked example of the docstring."""
    (example,) = doctest.DocTestFinder().find(getattr(jax_ep, function), function, globs={})
    assert example.examples and doctest.DocTestRunner().run(example).failed == 0


def replicated(fn, mesh):
    """`fn(map, *arrays of one rank)` on all ranks, the map equal on all."""

    def local(expert_map, *args):
        args = jax.tree.map(lambda a: a[0], args)
        return jax.tree.map(lambda a: a[None], fn(expert_map, *args))

    spec = PartitionSpec("ep")

    def run(expert_map, *args):
        return jax.shard_map(local, mesh=mesh, in_specs=(PartitionSpec(), *[spec] * len(args)), out_specs=spec)(
            expert_map, *args
        )

    return jit(run)


@functools.cache
def exchange(mesh, layout):
    """Dispatch by a map, a second tensor, the sum back, and the gradient of x and the weights."""

    def run(expert_map, x, idx, w, x2, g_x, g_w):
        def send(x, w):
            recv = jax_ep.dispatch(
                x, idx, w, num_experts=EXPERTS, axis_name="ep", layout=layout, expert_map=expert_map,
                num_physical_experts=PHYSICAL, expert_alignment=4 if layout == "expert" else 1,
            )  # fmt: skip
            return (recv.x, recv.weights), recv

        _, pullback, recv = jax.vjp(send, x, w, has_aux=True)
        again = jax_ep.dispatch(x2, handle=recv.handle)
        grads = pullback((g_x.reshape(recv.x.shape), g_w.reshape(recv.weights.shape)))  # given with flat rows
        return recv, again, jax_ep.combine(recv.x, recv.handle), grads

    return replicated(run, mesh)


@pytest.mark.parametrize("name", MAPS)
@pytest.mark.parametrize("layout", ["expert", "token", "batched"])
def test_replicas(make_mesh, layout, name):
    """Everything that leaves dispatch, and everything made with its handle, is that of the physical ids."""
    expert_map = np.array(MAPS[name], np.int32)
    x = testing.code_rows(RANKS, TOKENS, HIDDEN)
    run = exchange(make_mesh(RANKS), layout)
    for kind in ("zipf", "invalid", "duplicates"):
        idx = testing.routing(kind, num_ranks=RANKS, num_tokens=TOKENS, num_topk=TOPK, num_experts=EXPERTS)
        idx[:, 0, 0] = EXPERTS  # invalid as a logical id, though there is such a physical one
        w = np.random.default_rng(0).random(idx.shape).astype(np.float32)
        physical, num_masked = testing.oracle_replicas(idx, expert_map, PHYSICAL)
        oracle = testing.oracle_dispatch(
            x, physical, w, num_experts=PHYSICAL, layout=layout, expert_alignment=4 if layout == "expert" else 1
        )
        num_invalid = np.sum((idx < -1) | (idx >= EXPERTS), axis=(1, 2))
        oracle.stats[:, 2], oracle.stats[:, 3] = num_invalid, num_masked
        g_x, g_w = testing.random_rows(oracle.x.shape), testing.random_rows(oracle.weights.shape)
        recv, again, out, grads = run(expert_map, x, idx, w, x + 1, g_x, g_w)
        load = testing.oracle_load(idx, EXPERTS)
        testing.check_recv(recv, oracle, load=load)
        assert load.sum() == (num_masked.sum() + np.sum(oracle.topk_idx >= 0))
        testing.same_bits(
            np.reshape(again.x, oracle.x.shape), testing.oracle_redispatch(oracle, x + 1), "second tensor"
        )
        testing.same_bits(again.load, load, "load beside the second tensor")
        testing.same_bits(again.num_masked, num_masked, "num_masked beside the second tensor")
        testing.same_bits(out, testing.oracle_combine(oracle, oracle.x), "combine")
        for got, expected in zip(grads, testing.oracle_dispatch_grad(oracle, g_x, g_w), strict=True):
            testing.same_bits(got, expected, "gradient")


def test_replicas_share_the_tokens(make_mesh):
    """All tokens to one expert: per source its replicas differ by one entry at most; sources start apart."""
    expert_map = np.full((EXPERTS, 3), -1, np.int32)
    expert_map[0] = 0, 4, 9
    idx = testing.routing("one_expert", num_ranks=RANKS, num_tokens=10, num_topk=TOPK, num_experts=EXPERTS)
    physical, _ = testing.oracle_replicas(idx, expert_map, PHYSICAL)
    counts = np.stack([np.bincount(p[p >= 0], minlength=PHYSICAL) for p in physical])[:, [0, 4, 9]]
    assert counts.max() - counts.min() == 1 and len(set(physical[:3, 0, 0])) == 3

    def run(expert_map, idx):
        x = jnp.ones((10, HIDDEN))
        recv = jax_ep.dispatch(
            x, idx, num_experts=EXPERTS, axis_name="ep", expert_map=expert_map, num_physical_experts=PHYSICAL
        )
        return recv.counts

    got = replicated(run, make_mesh(RANKS))(expert_map, idx).reshape(-1)
    assert got.tolist() == [14 if p == 0 else 13 if p in (4, 9) else 0 for p in range(PHYSICAL)]


MISTAKES = {
    "map alone": ({"num_physical_experts": None}, TypeError, ["without num_physical_experts="]),
    "number alone": ({"expert_map": None}, TypeError, ["num_physical_experts=12", "without expert_map="]),
    "ranks do not divide": ({"num_physical_experts": 10}, ValueError, ["num_physical_experts=10", "4 ranks", "12"]),
    "traced number": ({"num_physical_experts": 12.0}, TypeError, ["num_physical_experts=12.0", "static int"]),
    "no physical expert": ({"num_physical_experts": 0}, ValueError, ["num_physical_experts=0", "multiple of 4"]),
    "rows": ({"expert_map": np.zeros((5, 2), np.int32)}, ValueError, ["shape (5, 2)", "[6, max_replicas]"]),
    "rank": ({"expert_map": np.zeros(6, np.int32)}, ValueError, ["shape (6,)", "max_replicas"]),
    "no column": ({"expert_map": np.zeros((6, 0), np.int32)}, ValueError, ["shape (6, 0)"]),
    "floats": ({"expert_map": np.zeros((6, 2), np.float32)}, TypeError, ["float32", "integer", "cast"]),
    "no logical expert": ({"num_experts": 0}, ValueError, ["num_experts=0"]),
    "logical experts missing": ({"num_experts": None}, TypeError, ["num_experts is missing"]),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_mistakes(make_mesh, name):
    changes, error, words = MISTAKES[name]
    given = {
        "num_experts": EXPERTS, "expert_map": np.array(MAPS["uneven"]), "num_physical_experts": PHYSICAL, **changes,
    }  # fmt: skip
    x, idx = np.zeros((RANKS, 4, HIDDEN), np.float32), np.zeros((RANKS, 4, 2), np.int32)
    program = testing.on_ranks(lambda x, idx: jax_ep.dispatch(x, idx, axis_name="ep", **given), make_mesh(RANKS))
    with pytest.raises(error) as caught:
        jax.eval_shape(program, x, idx)
    for word in ("dispatch: ", *words):
        assert word in str(caught.value)


def test_a_handle_has_its_map(make_mesh):
    def run(x, idx):
        recv = jax_ep.dispatch(x, idx, num_experts=4, axis_name="ep")
        return jax_ep.dispatch(x, handle=recv.handle, expert_map=jnp.zeros((4, 1), jnp.int32)).x

    with pytest.raises(TypeError, match="expert_map= beside handle="):
        jax.eval_shape(
            testing.on_ranks(run, make_mesh(2)), np.zeros((2, 4, 8), np.float32), np.zeros((2, 4, 2), np.int32)
        )


# --- balance ------------------------------------------------------------------------------------------------------


def loads(expert_map, load, num_replicas):
    """Load of each physical expert when an expert's replicas share evenly."""
    physical = np.zeros(num_replicas)
    for replicas, n in zip(expert_map, load, strict=True):
        replicas = replicas[replicas >= 0]
        physical[replicas] += n / len(replicas)
    return physical


def zipf(num_experts):
    return np.random.default_rng(num_experts).permutation(1e6 / (1 + np.arange(num_experts)))


@pytest.mark.parametrize(
    ("num_experts", "num_replicas", "num_ranks"), [(8, 12, 4), (16, 16, 4), (64, 80, 8), (5, 9, 3)]
)
def test_balance(num_experts, num_replicas, num_ranks):
    """A valid placement, within the greedy bound, better than one replica each in the given order."""
    load = zipf(num_experts)
    expert_map = jax_ep.balance(load, num_replicas, num_ranks=num_ranks)
    assert expert_map.shape == (num_experts, num_replicas - num_experts + 1) and expert_map.dtype == np.int32
    assert sorted(expert_map[expert_map >= 0]) == list(range(num_replicas))
    for row in expert_map:
        count = np.sum(row >= 0)
        assert count >= 1 and (row[count:] == -1).all() and (np.diff(row[:count]) > 0).all()
    physical = loads(expert_map, load, num_replicas)
    assert physical.max() <= load.sum() / (num_replicas - num_experts + 1) * (1 + 1e-12)
    if num_replicas > num_experts:
        assert physical.max() < load.max()
    per_rank = physical.reshape(num_ranks, -1).sum(1)
    assert per_rank.max() <= load.sum() / num_ranks + physical.max()
    if num_experts % num_ranks == 0:
        assert per_rank.max() < load.reshape(num_ranks, -1).sum(1).max()
    testing.same_bits(jax_ep.balance(list(load), num_replicas, num_ranks=num_ranks), expert_map, "again")


def test_replication_is_optimal():
    """No other number of replicas has a smaller largest load per replica."""
    for seed in range(20):
        load = np.random.default_rng(seed).integers(0, 50, 4)
        got = loads(jax_ep.balance(load, 8), load, 8).max()
        counts = (c for c in itertools.product(range(1, 6), repeat=4) if sum(c) == 8)
        assert got == min(max(load / np.array(c)) for c in counts)


def test_ties_are_settled():
    """Equal loads: replicas go round the experts, experts go round the ranks, on every machine alike."""
    assert jax_ep.balance(np.zeros(4), 8, num_ranks=2).tolist() == jax_ep.balance(jnp.ones(4), 8, num_ranks=2).tolist()
    assert jax_ep.balance(np.ones(4, int), 4, num_ranks=2).tolist() == [[0], [2], [1], [3]]
    assert np.sum(jax_ep.balance(np.zeros(4), 8, num_ranks=2) >= 0, axis=1).tolist() == [2, 2, 2, 2]
    both = jax_ep.balance([6, 6], 4, num_ranks=2)  # the replicas of an expert go to different ranks
    assert both.tolist() == [[0, 2, -1], [1, 3, -1]]


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        (([1.0, 2.0], 1), ValueError, "num_replicas=1 for 2 experts"),
        (([1.0, 2.0], 3, 2), ValueError, "use e.g. 4"),
        (([1.0, -2.0], 2), ValueError, "negative"),
        (([1.0, np.nan], 2), ValueError, "not finite"),
        (([[1.0, 2.0]], 2), ValueError, r"shape \(1, 2\)"),
        (([1.0, 2.0], 2.0), TypeError, "static int"),
    ],
)
def test_balance_mistakes(arguments, error, text):
    with pytest.raises(error, match=text):
        jax_ep.balance(*arguments[:2], num_ranks=arguments[2] if len(arguments) > 2 else 1)


def test_balance_under_jit_is_refused():
    with pytest.raises(TypeError, match="traced load"):
        jax.jit(lambda load: jax_ep.balance(load, 4))(jnp.ones(4))


# --- weights ------------------------------------------------------------------------------------------------------


def test_gather_mistakes():
    with pytest.raises(ValueError, match=r"shape \(3, 2\).*\[6, \.\.\.\]"):
        jax_ep.gather_replicas({"w": np.zeros((3, 2))}, np.array(MAPS["uneven"]), PHYSICAL)
    with pytest.raises(TypeError, match="float32"):
        jax_ep.gather_replicas(np.zeros(6), np.zeros((6, 1), np.float32), PHYSICAL)


def test_physical_experts_without_a_logical_one_are_zero():
    expert_map = np.array([[3, -1], [0, 1], [PHYSICAL, -7]])
    out = jax_ep.gather_replicas(jnp.array([[1.0], [2.0], [3.0]]), expert_map, 5)
    assert out[:, 0].tolist() == [2.0, 2.0, 0.0, 1.0, 0.0]


def test_layer_with_replicas_equals_the_one_without(make_mesh):
    """Forward and gradients of x, weights and experts; sharded experts under jit; both equal a dense sum."""
    num_experts, num_replicas, hidden, mesh = 8, 12, 8, make_mesh(RANKS)
    rng = np.random.default_rng(1)
    x = rng.integers(-4, 5, (RANKS * TOKENS, hidden)).astype(np.float32)
    idx = testing.routing("zipf", num_ranks=1, num_tokens=RANKS * TOKENS, num_topk=TOPK, num_experts=num_experts)[0]
    idx[::5, 1] = -1
    w = rng.integers(1, 5, idx.shape).astype(np.float32)
    experts = rng.integers(-2, 3, (num_experts, hidden, hidden)).astype(np.float32)
    target = rng.integers(-2, 3, x.shape).astype(np.float32)
    expert_map = jax_ep.balance(np.bincount(idx[idx >= 0], minlength=num_experts), num_replicas, num_ranks=RANKS)
    spec = PartitionSpec("ep")

    def layer(x, w, experts, expert_map, in_windows=False):
        physical = None if expert_map is None else num_replicas
        if expert_map is not None:
            experts = jax_ep.gather_replicas(experts, expert_map, num_replicas)

        def apply(experts, recv):
            return jax.lax.ragged_dot(recv.x, experts, recv.group_sizes)

        def local(x, idx, w, experts, expert_map):
            sizes = dict(num_experts=num_experts, num_physical_experts=physical)
            if in_windows:
                return jax_ep.windowed(
                    apply, experts, x, idx, w, axis_name="ep", capacity=8, expert_map=expert_map, **sizes
                )
            recv = jax_ep.dispatch(x, idx, w, axis_name="ep", expert_map=expert_map, **sizes)
            return jax_ep.combine(apply(experts, recv), recv.handle, weights=recv.weights)

        run = jax.shard_map(local, mesh=mesh, in_specs=(spec, spec, spec, spec, PartitionSpec()), out_specs=spec)
        return run(x, idx, w, experts, expert_map)

    def dense(x, w, experts, _):
        out = jnp.zeros_like(x)
        for k in range(TOPK):
            y = jnp.einsum("th,tho->to", x, experts[jnp.maximum(idx[:, k], 0)])
            out += jnp.where(idx[:, k, None] >= 0, w[:, k, None] * y, 0)
        return out

    def value_and_grads(layer):
        def loss(x, w, experts, expert_map):
            out = layer(x, w, experts, expert_map)
            return jnp.sum(out * target), out

        return jit(jax.value_and_grad(loss, (0, 1, 2), has_aux=True))

    sharded = jax.device_put(experts, NamedSharding(mesh, spec))
    expected = value_and_grads(dense)(x, w, experts, None)
    in_windows = functools.partial(layer, in_windows=True)
    for one, given in ((layer, None), (layer, expert_map), (in_windows, expert_map)):
        got = value_and_grads(one)(x, w, sharded, given)  # integers all of them: exact, in any order of summation
        jax.tree.map(lambda a, b: np.testing.assert_array_equal(np.asarray(a), np.asarray(b)), got, expected)


def test_several_and_automatic_axes(make_mesh):
    """A map beside mesh axes that stay automatic, and ranks counted over two axes."""
    mesh = make_mesh(2, 2, axis_names=("dp", "ep"))
    for names, manual in (("ep", {"ep"}), (("dp", "ep"), {"dp", "ep"})):
        num_ranks = 2 * len(manual)
        idx = testing.routing("zipf", num_ranks=num_ranks, num_tokens=5, num_topk=2, num_experts=3)
        x = testing.code_rows(num_ranks, 5, HIDDEN)
        expert_map = jax_ep.balance([5, 1, 1], 4, num_ranks=num_ranks)
        spec = PartitionSpec(names)

        def layer(expert_map, x, idx, names=names):
            recv = jax_ep.dispatch(
                x, idx, num_experts=3, axis_name=names, expert_map=expert_map, num_physical_experts=4
            )
            return jax_ep.combine(recv.x, recv.handle), recv.load, recv.handle.topk_idx

        in_specs = (PartitionSpec(), spec, spec)
        run = jax.shard_map(layer, mesh=mesh, in_specs=in_specs, out_specs=spec, axis_names=manual)
        out, load, physical = jit(run)(expert_map, x.reshape(-1, HIDDEN), idx.reshape(-1, 2))
        np.testing.assert_array_equal(out, 2 * x.reshape(-1, HIDDEN))
        np.testing.assert_array_equal(load.reshape(num_ranks, 3), testing.oracle_load(idx, 3))
        expected, _ = testing.oracle_replicas(idx, expert_map, 4)
        np.testing.assert_array_equal(physical.reshape(idx.shape), expected)


def test_load_is_dropped_where_nobody_reads_it(make_mesh):
    """The load is a scatter of its own beside the exchange, and not a residual of the backward pass."""
    x, idx = np.zeros((2, 4, 8), np.float32), np.zeros((2, 4, 2), np.int32)

    def scatters(fn):
        text = jax.jit(testing.on_ranks(fn, make_mesh(2))).lower(x, idx).as_text()
        return text.count('"stablehlo.scatter"(')

    def send(x, idx):
        return jax_ep.dispatch(x, idx, num_experts=4, axis_name="ep")

    def loss(x, idx):
        recv = send(x, idx)
        return jnp.sum(jax_ep.combine(recv.x, recv.handle) + jax_ep.dispatch(x, handle=recv.handle).x[:4])

    def both(x, idx):
        recv = send(x, idx)
        return recv.x, recv.load

    assert scatters(lambda x, idx: send(x, idx).x) + 1 == scatters(both)
    handle = jax.eval_shape(testing.on_ranks(lambda x, idx: send(x, idx).handle, make_mesh(2)), x, idx)
    assert handle.load.shape == (2, 4) and dataclasses.replace(handle, load=None).load is None
    residuals = jax.eval_shape(
        testing.on_ranks(lambda x, idx: jax.tree.leaves(jax.vjp(lambda x: loss(x, idx), x)[1]), make_mesh(2)), x, idx
    )
    assert (2, 4) not in [r.shape for r in residuals]
