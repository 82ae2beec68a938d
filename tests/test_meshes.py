"""Groups within larger meshes and programs: axis orders, strides, several groups at once, a pipeline stage beside ep.

Covers dp x ep x tp in every order with all gradients, groups over different axes with different shapes, top-k, layouts
and capacities in one program, a pipeline whose idle steps send nothing, nested shard_maps, and meshes of which some
axes are automatic. Every group is compared with its own oracle. test_dispatch.py has orders of devices, test_group.py
the pure functions.
"""

import dataclasses
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from exchange_cases import QUICK_COMPILE, ExchangeCases, Inputs, Sizes, check, exchange, make_inputs
from jax.sharding import PartitionSpec as P

import jax_ep
from jax_ep import testing


def compiled(fn, mesh, axes=("ep",)):
    return jax.jit(testing.on_ranks(fn, mesh, axes, jit=False), compiler_options=QUICK_COMPILE)


@pytest.mark.parametrize("order", list(itertools.permutations(("dp", "ep", "tp"))), ids="-".join)
def test_every_order_of_axes(make_mesh, order):
    """B54, B55: neighbours, strides of two and of four; four groups that differ in everything, all gradients."""
    mesh = make_mesh(2, 2, 2, axis_names=order)
    sizes = Sizes(2, 6, num_tokens=4, num_topk=2, hidden=8, expert_alignment=2)
    kinds = ("zipf", "masked", "one_rank", "invalid")
    each = [make_inputs(sizes, ExchangeCases().routing(kind, sizes, n), n) for n, kind in enumerate(kinds)]
    stacked = jax.tree.map(lambda *a: np.concatenate(a), *(dataclasses.astuple(inputs) for inputs, _ in each))
    # The axis of the group is the minor one of the stack, wherever it lies in the mesh.
    others = tuple(axis for axis in order if axis != "ep")
    result = compiled(lambda *a: exchange(sizes, Inputs(*a)), mesh, (*others, "ep"))(*stacked)
    for n, (inputs, oracle) in enumerate(each):
        check(sizes, jax.tree.map(lambda a, n=n: a[2 * n : 2 * n + 2], result), inputs, oracle)


def test_several_groups_in_one_program(make_mesh):
    """B55: three exchanges over different axes, each with its own tokens, top-k, experts, layout and capacity."""
    mesh = make_mesh(2, 2, 2, axis_names=("a", "b", "c"))
    axes = ("a", "b", "c")
    layers = {
        # the group's axes -> tokens, top-k, experts, layout, capacity, alignment
        ("b",): (5, 2, 6, "expert", None, 4),
        ("c", "a"): (3, 3, 8, "token", 9, 1),
        ("a", "b", "c"): (4, 1, 16, "expert", 4, 2),
    }
    data = {}
    for group, (tokens, topk, experts, *_) in layers.items():
        num_ranks = 2 ** len(group)
        ids = [
            testing.routing("zipf", num_ranks=num_ranks, num_tokens=tokens, num_topk=topk, num_experts=experts, seed=n)
            for n in range(8 // num_ranks)
        ]
        # [group, rank, ...] -> positions of the mesh: the group's axes are the minor ones, in their order.
        others = [axis for axis in axes if axis not in group]
        back = [[*others, *group].index(axis) for axis in axes]
        to_mesh = lambda v, back=back: v.reshape(2, 2, 2, *v.shape[2:]).transpose(*back, 3, 4).reshape(8, *v.shape[2:])
        x = testing.code_rows(8, tokens, 8).reshape(8 // num_ranks, num_ranks, tokens, 8)
        data[group] = x, np.stack(ids), to_mesh

    def run(*args):
        outs = []
        for (group, (_, _, experts, layout, capacity, alignment)), (x, idx) in zip(layers.items(), args, strict=True):
            kwargs = dict(num_experts=experts, axis_name=group, layout=layout, capacity=capacity)
            recv = jax_ep.dispatch(x, idx, expert_alignment=alignment, **kwargs)
            outs.append((recv.x, jax_ep.combine(recv.x, recv.handle), recv.num_dropped))
        return outs

    args = [(to_mesh(x), to_mesh(idx)) for x, idx, to_mesh in data.values()]
    results = compiled(run, mesh, axes)(*args)
    dropped = 0
    for (group, (_, _, experts, layout, capacity, alignment)), result in zip(layers.items(), results, strict=True):
        x, idx, to_mesh = data[group]
        kwargs = dict(num_experts=experts, layout=layout, capacity=capacity, expert_alignment=alignment)
        oracles = [testing.oracle_dispatch(x[n], idx[n], **kwargs) for n in range(len(x))]
        rows, out, num_dropped = result
        testing.same_bits(rows, to_mesh(np.stack([o.x for o in oracles])), f"rows of {group}")
        sums = np.stack([testing.oracle_combine(o, o.x) for o in oracles])
        testing.same_bits(out, to_mesh(sums), f"sums of {group}")
        dropped += int(num_dropped.sum())
        assert int(num_dropped.sum()) == sum(int(o.stats[:, 1].sum()) for o in oracles)
    assert dropped > 0


def scaled_experts(x, idx, w, scales, num_local):
    """One layer with a residual; expert e of the group multiplies tanh(x) by scales[e]."""
    recv = jax_ep.dispatch(x, idx, w, num_experts=2 * num_local, axis_name="ep")
    local = jnp.repeat(jnp.arange(num_local), recv.group_sizes, total_repeat_length=len(recv.x))
    y = jnp.tanh(recv.x) * scales[jax.lax.axis_index("ep") * num_local + local][:, None]
    return x + jax_ep.combine(y, recv.handle, weights=recv.weights)


def dense(x, idx, w, scales):
    return x + jnp.tanh(x) * jnp.sum(jnp.where(idx >= 0, w * scales[idx], 0), -1)[..., None]


def test_pipeline_stage_beside_the_group(make_mesh):
    """B55, B01: two stages of two ranks; micro-batches go from stage to stage, a stage without one sends nothing."""
    stages, batches, tokens, topk, hidden = 2, 3, 4, 2, 8
    mesh = make_mesh(stages, 2, axis_names=("pp", "ep"))
    rng = np.random.default_rng(0)
    micro = rng.standard_normal((2, batches, tokens, hidden)).astype(np.float32)  # rank of ep, micro-batch
    w = rng.random((stages, 2, batches, tokens, topk)).astype(np.float32)
    idx = np.stack(
        [
            testing.routing("masked", num_ranks=2, num_tokens=batches * tokens, num_topk=topk, num_experts=4, seed=s)
            for s in range(stages)
        ]
    ).reshape(w.shape)
    scales = rng.standard_normal((stages, 4)).astype(np.float32)

    def run(micro, idx, w, scales):  # one stage and rank: [1, 1, ...] of idx and w
        stage = jax.lax.axis_index("pp")
        micro, idx, w, scales = micro[0], idx[0, 0], w[0, 0], scales[0]
        state = jax.lax.pcast(jnp.zeros_like(micro[0]), "pp", to="varying")
        outs = []
        for step in range(batches + stages - 1):
            batch = step - stage
            is_busy = (batch >= 0) & (batch < batches)
            at = jnp.clip(batch, 0, batches - 1)
            x = jnp.where(stage == 0, micro[min(step, batches - 1)], state)
            out = scaled_experts(x, jnp.where(is_busy, idx[at], -1), w[at], scales, 2)
            state = jax.lax.ppermute(out, "pp", [(0, 1), (1, 0)])
            outs.append(out)
        last = jnp.stack(outs[stages - 1 :])
        return jax.lax.psum(jnp.where(stage == stages - 1, last, 0), "pp")[None]

    specs = (P("ep"), P("pp", "ep"), P("pp", "ep"), P("pp"))
    pipeline = jax.shard_map(run, mesh=mesh, in_specs=specs, out_specs=P("ep"))

    def whole(micro, idx, w, scales):
        for s in range(stages):
            micro = dense(micro, idx[s], w[s], scales[s])
        return micro

    def value_and_grad(f):
        loss = lambda micro, w, scales: jnp.sum(f(micro, idx, w, scales) ** 2)
        return jax.jit(jax.value_and_grad(loss, (0, 1, 2)), compiler_options=QUICK_COMPILE)(micro, w, scales)

    (value, grads), (expected_value, expected) = value_and_grad(pipeline), value_and_grad(whole)
    np.testing.assert_allclose(value, expected_value, rtol=1e-5)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4), grads, expected)


@pytest.mark.parametrize("manual", [{"ep"}, {"dp", "ep"}], ids=lambda m: "+".join(sorted(m)))
def test_automatic_axes_beside_the_group(make_mesh, manual):
    """B47, B55: dp and tp automatic, or tp alone; rows are sharded over both beside ep, and the gradient is right."""
    mesh = make_mesh(2, 2, 2, axis_names=("dp", "ep", "tp"))
    dp = ("dp",) if "dp" in manual else ()
    groups, tokens = (2 if dp else 1), 6
    rng = np.random.default_rng(0)
    idx = np.concatenate(
        [
            testing.routing("masked", num_ranks=2, num_tokens=tokens, num_topk=2, num_experts=4, seed=n).reshape(-1, 2)
            for n in range(groups)
        ]
    )
    x = rng.standard_normal((len(idx), 8)).astype(np.float32)
    w, scales = rng.random(idx.shape).astype(np.float32), rng.standard_normal(4).astype(np.float32)
    spec = P((*dp, "ep"))
    layer = jax.shard_map(
        lambda *a: scaled_experts(*a, 2), mesh=mesh, in_specs=(spec, spec, spec, P()), out_specs=spec, axis_names=manual
    )

    def gradients(f, x):
        loss = lambda x, w, scales: jnp.sum(f(x, idx, w, scales) ** 2)
        return jax.jit(jax.grad(loss, (0, 1, 2)), compiler_options=QUICK_COMPILE)(x, w, scales)

    got = gradients(layer, jax.device_put(x, jax.NamedSharding(mesh, P(("dp", "ep"), "tp"))))
    expected = gradients(dense, x)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4), got, expected)


def test_nested_shard_maps():
    """B55: dp bound outside, ep inside, over the current mesh; two groups with different routings."""
    mesh = jax.make_mesh((2, 4), ("dp", "ep"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    x = testing.code_rows(8, 3, 8).reshape(2, 12, 8)
    sizes = dict(num_ranks=4, num_tokens=3, num_topk=2, num_experts=8)
    idx = np.stack([testing.routing(kind, **sizes) for kind in ("zipf", "one_rank")])

    def layer(x, idx):
        recv = jax_ep.dispatch(x, idx, num_experts=8, axis_name="ep")
        return recv.x, jax_ep.combine(recv.x, recv.handle)

    def outer(x, idx):
        return jax.shard_map(layer, in_specs=P("ep"), out_specs=P("ep"), axis_names={"ep"})(x, idx)

    with jax.set_mesh(mesh):
        run = jax.shard_map(outer, in_specs=P("dp"), out_specs=P("dp"), axis_names={"dp"})
        rows, sums = jax.jit(run)(x.reshape(24, 8), idx.reshape(24, 2))
    for group in range(2):
        oracle = testing.oracle_dispatch(x[group].reshape(4, 3, 8), idx[group], num_experts=8)
        testing.same_bits(np.asarray(rows).reshape(2, *oracle.x.shape)[group], oracle.x, "rows")
        sum_ = testing.oracle_combine(oracle, oracle.x)
        testing.same_bits(np.asarray(sums).reshape(2, *sum_.shape)[group], sum_, "sums")
