"""Under JAX's transformations: checkpoint, scan, cond, vma, partial-manual meshes, donation, export, vmap."""

import functools
import importlib.util
import json
import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from exchange_cases import QUICK_COMPILE
from jax.sharding import PartitionSpec as P

import jax_ep
from jax_ep import _compat, testing

RANKS, TOKENS, TOPK, HIDDEN, EXPERTS, LAYERS = 2, 5, 2, 8, 4, 4
SCALES = np.linspace(0.5, 1.5, LAYERS * EXPERTS, dtype=np.float32).reshape(LAYERS, EXPERTS)


def moe(x, idx, w, scales):
    """One layer on one rank; expert e multiplies by scales[e] after a nonlinearity."""
    recv = jax_ep.dispatch(x, idx, w, num_experts=EXPERTS, axis_name="ep")
    local = jnp.repeat(jnp.arange(EXPERTS // RANKS), recv.group_sizes, total_repeat_length=len(recv.x))
    expert = jax.lax.axis_index("ep") * (EXPERTS // RANKS) + local
    y = jnp.tanh(recv.x) * jnp.asarray(scales)[expert][:, None]
    return x + jax_ep.combine(y, recv.handle, weights=recv.weights)


def dense(x, idx, w, scales):
    """The same on all ranks' tokens, without exchange."""
    for layer in scales:
        x = x + jnp.tanh(x) * jnp.sum(jnp.where(idx >= 0, w * jnp.asarray(layer)[idx], 0), -1)[..., None]
    return x


@pytest.fixture(scope="module")
def data():
    x = testing.random_rows((RANKS, TOKENS, HIDDEN)) / 16
    idx = testing.routing("masked", num_ranks=RANKS, num_tokens=TOKENS, num_topk=TOPK, num_experts=EXPERTS)
    w = np.random.default_rng(0).random(idx.shape).astype(np.float32)
    return x, idx, w


@pytest.fixture(scope="module")
def expected(data):
    x, idx, w = data
    return jax.value_and_grad(lambda x, w: jnp.sum(dense(x, idx, w, SCALES) ** 2), (0, 1))(x, w)


def gradients(layer, mesh, **kwargs):
    """Loss and gradients of a scan over layers, per rank; the loss is the rank's own."""

    def run(x, idx, w):
        def loss(x, w):
            step = lambda carry, scales: (layer(carry, idx, w, scales), None)
            return jnp.sum(jax.lax.scan(step, x, SCALES)[0] ** 2)

        return jax.value_and_grad(loss, (0, 1))(x, w)

    return jax.jit(testing.on_ranks(run, mesh, jit=False, **kwargs), compiler_options=QUICK_COMPILE)


NAMES = ("jax_ep_handle", "jax_ep_recv", "jax_ep_out")
POLICIES = {
    "none": None,
    "nothing": jax.checkpoint_policies.nothing_saveable,
    "everything": jax.checkpoint_policies.everything_saveable,
    "dots": jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
    "handle": jax.checkpoint_policies.save_only_these_names("jax_ep_handle"),
    "all names": jax.checkpoint_policies.save_only_these_names(*NAMES),
}


@pytest.mark.parametrize("policy", POLICIES)
def test_scan_of_checkpointed_layers(make_mesh, data, expected, policy):
    """B45, B47: scan over layers with vma checked, with and without remat, under each kind of policy."""
    layer = moe if policy == "none" else jax.checkpoint(moe, policy=POLICIES[policy])
    value, grads = gradients(layer, make_mesh(RANKS))(*data)
    np.testing.assert_allclose(value.sum(), expected[0], rtol=1e-5)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5), grads, expected[1])


def test_checkpoint_names_save_the_exchanges(make_mesh, data):
    """B45: a policy on our names decides how often a layer exchanges; the routing is never exchanged twice then."""

    def jaxpr_calls(layer):
        def run(x, idx, w):
            return jax.grad(lambda x, w: jnp.sum(layer(x, idx, w, SCALES[0]) ** 2), (0, 1))(x, w)

        jaxpr = str(jax.make_jaxpr(testing.on_ranks(run, make_mesh(RANKS)))(*data))
        return {op: jaxpr.count(f"= jax_ep_{op}[") for op in ("dispatch", "redispatch", "combine")}

    plain = jaxpr_calls(moe)
    assert plain == {"dispatch": 1, "redispatch": 1, "combine": 2}
    assert jaxpr_calls(jax.checkpoint(moe, policy=POLICIES["all names"])) == plain
    assert jaxpr_calls(jax.checkpoint(moe)) == {**plain, "dispatch": 2}  # the sum itself is not needed backward

    def second_tensor(x, idx, w, scales):
        recv = jax_ep.dispatch(x, idx, num_experts=EXPERTS, axis_name="ep")
        recv2 = jax_ep.dispatch(x * 2, handle=recv.handle)
        return jax_ep.combine(recv2.x, recv2.handle)

    # Here no received row is needed backward: saving the small handle alone avoids every second exchange.
    assert jaxpr_calls(jax.checkpoint(second_tensor, policy=POLICIES["handle"]))["dispatch"] == 1
    assert jaxpr_calls(jax.checkpoint(second_tensor))["dispatch"] == 2


@pytest.mark.parametrize("layout", ["expert", "token", "batched"])
def test_without_implicit_promotion(make_mesh, data, layout):
    """Users who forbid that ranks and dtypes are promoted may call everything, forward and backward."""
    x, idx, w = data

    def run(x, idx, w):
        def loss(x, w):
            settings = dict(num_experts=EXPERTS, axis_name="ep", layout=layout)
            config = jax_ep.Config(debug_checks=True, ranks_per_node=1)
            experts = np.arange(EXPERTS)[:, None]
            recv = jax_ep.dispatch(
                x, idx, w, config=config, expert_map=experts, num_physical_experts=EXPERTS, **settings
            )  # fmt: skip
            weights = None if layout == "token" else recv.weights
            out = jax_ep.combine(recv.x, recv.handle, weights=weights, bias=x)
            out += jax_ep.windowed(lambda params, recv: recv.x, (), x, idx, w, capacity=2, **settings)
            wide = jax_ep.dispatch(jnp.tile(x, (1, 16)), handle=recv.handle, quantize="fp8_ue8m0")
            return jnp.sum(out) + jnp.sum(jax_ep.combine(wide.x.dequantize(), recv.handle, quantize="fp8_wire"))

        return jax.grad(loss, (0, 1))(x, w)

    with jax.numpy_rank_promotion("raise"), jax.numpy_dtype_promotion("strict"):
        grads = jax.eval_shape(testing.on_ranks(run, make_mesh(RANKS), jit=False), x, idx, w)
        jax.jit(testing.on_ranks(run, make_mesh(RANKS), jit=False)).lower(x, idx, w)
    assert [g.shape for g in grads] == [x.shape, w.shape]


def test_vma_off(make_mesh, data, expected):
    """B47: check_vma=False gives the same."""
    value, grads = gradients(jax.checkpoint(moe), make_mesh(RANKS), check_vma=False)(*data)
    np.testing.assert_allclose(value.sum(), expected[0], rtol=1e-5)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5), grads, expected[1])


def test_results_vary_over_the_union_of_axes(make_mesh):
    """B47: each result varies over the group's axes and every axis that an operand varies over."""
    seen = {}

    def run(x, idx, bias):
        recv = jax_ep.dispatch(x, idx, num_experts=4, axis_name="ep")
        out = jax_ep.combine(recv.x, recv.handle, bias=bias)
        seen.update(x=x, bias=bias, out=out, **{f"recv {n}": a for n, a in enumerate(jax.tree.leaves(recv))})
        seen.update({name: _compat.varying_axes(a) for name, a in seen.items()})
        return out

    mesh = make_mesh(2, 2, 2, axis_names=("dp", "ep", "tp"))
    run = jax.shard_map(run, mesh=mesh, in_specs=(P("dp"), P("dp"), P("tp")), out_specs=P(("dp", "ep", "tp")))
    x, idx, bias = np.zeros((8, 8), np.float32), np.zeros((8, 2), np.int32), np.zeros((8, 8), np.float32)
    jax.eval_shape(run, x, idx, bias)
    assert seen.pop("x") == {"dp"} and seen.pop("bias") == {"tp"}
    assert seen.pop("out") == {"dp", "ep", "tp"}
    assert len(seen) > 10 and all(axes == {"dp", "ep"} for axes in seen.values())


def test_cond_and_while(make_mesh, data):
    """B47: inside branches and loops, with a predicate that all ranks share; a handle as a loop's carry."""

    def run(x, idx, w, flag):
        layer = lambda x: moe(x, idx, w, SCALES[0])
        skipped = jax.lax.cond(flag[0] > 0, layer, lambda x: x * 1, x)
        recv = jax_ep.dispatch(x, idx, w, num_experts=EXPERTS, axis_name="ep")

        def body(carry):
            n, x, handle = carry
            again = jax_ep.dispatch(x, handle=handle)
            return n + 1, jax_ep.combine(again.x, again.handle), again.handle

        looped = jax.lax.while_loop(lambda carry: carry[0] < 3, body, (0, x, recv.handle))
        return skipped, looped[1]

    x, idx, w = data
    mesh = make_mesh(RANKS)
    spec = P("ep")
    local = lambda x, idx, w, flag: tuple(a[None] for a in run(x[0], idx[0], w[0], flag))
    program = jax.jit(jax.shard_map(local, mesh=mesh, in_specs=(spec, spec, spec, P()), out_specs=spec))
    taken, looped = program(x, idx, w, np.ones(1, np.int32))
    np.testing.assert_allclose(taken, dense(x, idx, w, SCALES[:1]), rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(looped, x * ((idx >= 0).sum(-1)[..., None] ** 3), rtol=1e-5)
    testing.same_bits(program(x, idx, w, np.zeros(1, np.int32))[0], x)


def test_some_axes_automatic(make_mesh, data):
    """B47: a mesh of which only ep is manual, rows sharded automatically over the other axis."""
    mesh = make_mesh(2, RANKS, axis_names=("tp", "ep"))
    x, idx, w = (a.reshape(-1, a.shape[-1]) for a in data)
    x = jax.device_put(x, jax.NamedSharding(mesh, P("ep", "tp")))
    layer = jax.shard_map(
        lambda x, idx, w: moe(x, idx, w, SCALES[0]), mesh=mesh, in_specs=P("ep"), out_specs=P("ep"), axis_names={"ep"}
    )
    grad = jax.jit(jax.grad(lambda x: jnp.sum(layer(x, idx, w) ** 2)))(x)
    expected = jax.grad(lambda x: jnp.sum(dense(x, idx, w, SCALES[:1]) ** 2))(np.asarray(x))
    np.testing.assert_allclose(grad, expected, rtol=1e-4, atol=1e-5)


def test_shapes_and_compilation_before_any_call(make_mesh, data):
    """B50: eval_shape communicates nothing; lower().compile() works before any real call, and its result runs."""
    program = gradients(moe, make_mesh(RANKS))
    value, (g_x, g_w) = jax.eval_shape(program, *data)
    assert (value.shape, g_x.shape, g_w.shape) == ((RANKS,), data[0].shape, data[2].shape)
    assert program._cache_size() == 0
    compiled = program.lower(*data).compile()
    jax.tree.map(testing.same_bits, compiled(*data), program(*data))


def test_donation(make_mesh, data):
    """A handle and rows may be donated."""
    mesh = make_mesh(RANKS)
    recv = testing.on_ranks(lambda x, i: jax_ep.dispatch(x, i, num_experts=EXPERTS, axis_name="ep"), mesh)(*data[:2])
    back = testing.on_ranks(lambda recv: jax_ep.combine(recv.x, recv.handle), mesh, jit=False)
    expected = np.asarray(jax.jit(back)(recv))
    out = jax.jit(lambda r: (back(r), r), donate_argnums=0)(recv)[0]
    testing.same_bits(out, expected)
    assert recv.x.is_deleted() and recv.handle.slot.is_deleted()

    # Tokens and ids too, when the result has their place.
    x, idx = (jax.device_put(a, jax.NamedSharding(mesh, P("ep"))) for a in data[:2])
    there = testing.on_ranks(lambda x, i: (moe(x, i, i * 0.5, SCALES[0]), i), mesh, jit=False)
    expected = jax.tree.map(np.asarray, jax.jit(there)(x, idx))
    jax.tree.map(testing.same_bits, jax.jit(there, donate_argnums=(0, 1))(x, idx), expected)
    assert x.is_deleted() and idx.is_deleted()


def test_vmap_is_refused_with_the_remedy(make_mesh):
    """vmap would be one exchange per element: the error says to use lax.map, which works."""
    x = testing.random_rows((2, 3, 5, 8))
    sizes = dict(num_ranks=2, num_tokens=5, num_topk=2, num_experts=4)
    idx = np.stack([testing.routing("masked", **sizes, seed=seed) for seed in range(3)], 1)

    def run(mapped, x, idx):
        def one(args):
            recv = jax_ep.dispatch(*args, num_experts=4, axis_name="ep")
            return jax_ep.combine(recv.x, recv.handle)

        return mapped(one, (x, idx))

    by_vmap = functools.partial(run, lambda f, args: jax.vmap(f)(args))
    with pytest.raises(NotImplementedError, match=r"cannot be vmapped.*jax\.lax\.map"):
        jax.eval_shape(testing.on_ranks(by_vmap, make_mesh(2)), x, idx)
    out = testing.on_ranks(functools.partial(run, jax.lax.map), make_mesh(2))(x, idx)
    for n in range(3):
        oracle = testing.oracle_dispatch(x[:, n], idx[:, n], num_experts=4)
        testing.same_bits(out[:, n], testing.oracle_combine(oracle, oracle.x))


def test_export(make_mesh):
    """B52: an exported program, written to bytes and read again where that works, gives equal results and gradients."""
    mesh = make_mesh(2)

    def run(x, idx, w):
        recv = jax_ep.dispatch(x, idx, w, num_experts=4, axis_name="ep")
        return jax_ep.combine(recv.x, recv.handle, weights=recv.weights)

    x = testing.random_rows((2, 5, 8), "bfloat16")
    idx = testing.routing("zipf", num_ranks=2, num_tokens=5, num_topk=2, num_experts=4)
    w = np.random.default_rng(0).random(idx.shape).astype(np.float32)
    args = [jax.device_put(a, jax.NamedSharding(mesh, P("ep"))) for a in (x, idx, w)]
    program = testing.on_ranks(run, mesh)
    exported = jax.export.export(program)(*args)
    if importlib.util.find_spec("flatbuffers"):  # JAX writes an exported program with it, and does not require it
        exported = jax.export.deserialize(exported.serialize(vjp_order=1))
    testing.same_bits(jax.jit(exported.call)(*args), program(*args))

    def gradients(f):
        loss = lambda x, w: jnp.sum(f(x, args[1], w).astype(jnp.float32) ** 2)
        return jax.jit(jax.grad(loss, (0, 1)))(args[0], args[2])

    jax.tree.map(testing.same_bits, gradients(exported.call), gradients(program))


CACHED = """
import json, jax, numpy as np, jax_ep
from jax_ep import testing
mesh = jax.sharding.Mesh(np.array(jax.devices()[:2]), ("ep",))
x = testing.random_rows((2, 5, 8))
idx = testing.routing("zipf", num_ranks=2, num_tokens=5, num_topk=2, num_experts=4)
def run(x, idx):
    recv = jax_ep.dispatch(x, idx, num_experts=4, axis_name="ep")
    return jax_ep.combine(recv.x, recv.handle)
program = testing.on_ranks(run, mesh)
print(json.dumps([np.asarray(program(x, idx)).tolist(), program.lower(x, idx).as_text()]))
"""


@pytest.mark.multiprocess
def test_compilation_cache_of_another_process(tmp_path):
    """B52: nothing in the program depends on the run, so a second process finds its executable in the cache."""
    env = {
        **os.environ,
        "JAX_COMPILATION_CACHE_DIR": str(tmp_path),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
    }

    def run():
        done = subprocess.run([sys.executable, "-c", CACHED], capture_output=True, text=True, timeout=300, env=env)
        assert done.returncode == 0, done.stderr
        entries = {path.name for path in tmp_path.iterdir() if path.name.endswith("-cache")}
        return json.loads(done.stdout.splitlines()[-1]), entries

    (first, entries), (second, entries_after) = run(), run()
    assert first == second
    assert entries and entries_after == entries
    x = testing.random_rows((2, 5, 8))
    idx = testing.routing("zipf", num_ranks=2, num_tokens=5, num_topk=2, num_experts=4)
    oracle = testing.oracle_dispatch(x, idx, num_experts=4)
    testing.same_bits(np.array(first[0], np.float32), testing.oracle_combine(oracle, oracle.x))
