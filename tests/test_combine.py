"""combine beyond the common cases: numerics, older handles, interleaved micro-batches, other hidden and dtype."""

import doctest

import jax.numpy as jnp
import numpy as np
import pytest

import jax_ep
from jax_ep import testing


def test_example():
    """The worked example of the docstring."""
    (example,) = doctest.DocTestFinder().find(jax_ep.combine, "combine", globs={})
    assert example.examples and doctest.DocTestRunner().run(example).failed == 0


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("num_topk", [2, 16])
def test_sums_are_in_float32(make_mesh, num_topk, dtype):
    """B30: cancelling values and weights that bf16 cannot hold; the error does not grow with k inside a rank. Rows of
    float32 show that weights are not rounded either."""
    num_tokens = 6
    idx = np.tile(np.arange(num_topk, dtype=np.int32), (1, num_tokens, 1))
    x = testing.code_rows(1, num_tokens, 8, dtype)
    oracle = testing.oracle_dispatch(x, idx, num_experts=num_topk)
    y = np.zeros(oracle.x.shape, np.float32)
    w = np.zeros(oracle.x.shape[:2], np.float32)
    for _, _, k, _, row in oracle.entries():
        y[0, row] = (256, 1, -256, 1)[k % 4]
        w[0, row] = 1 / 3 if k % 2 else 1 + 2**-9
    y = y.astype(jnp.dtype(dtype))

    def run(x, idx, y, w):
        handle = jax_ep.dispatch(x, idx, num_experts=num_topk, axis_name="ep").handle
        return jax_ep.combine(y, handle), jax_ep.combine(y, handle, weights=w)

    plain, weighted = testing.on_ranks(run, make_mesh(1))(x, idx, y, w)
    testing.same_bits(plain, testing.oracle_combine(oracle, y), "plain")
    testing.within(weighted, testing.oracle_combine(oracle, y, w), testing.combine_tolerance(oracle, y, w), "weighted")
    exact = sum((256, 1, -256, 1)[k % 4] * (1 / 3 if k % 2 else 1 + 2**-9) for k in range(num_topk))
    assert np.abs(np.asarray(weighted, np.float64) - exact).max() <= abs(exact) * (
        2**-8 if dtype == "bfloat16" else 2**-12
    )


def test_handles_of_two_dispatches(make_mesh):
    """B36, B44: D(a) D(b) D(c) C(a) C(b) C(c), and the other way round, in one program without data flow between them;
    a and c differ in nothing but their rows and routing."""
    sizes = {"a": (9, 2), "b": (5, 3), "c": (9, 2)}

    def run(x, idx):
        recv = {}
        for name in "abc":
            layout = "token" if name == "b" else "expert"
            recv[name] = jax_ep.dispatch(x[name], idx[name], num_experts=8, axis_name="ep", layout=layout)
        orders = ["abc", "cba"]
        return [{n: jax_ep.combine(recv[n].x * (1 + m), recv[n].handle) for n in o} for m, o in enumerate(orders)]

    x = {n: testing.random_rows((4, t, 8), seed=ord(n)) for n, (t, _) in sizes.items()}
    idx = {
        n: testing.routing("zipf", num_ranks=4, num_tokens=t, num_topk=k, num_experts=8, seed=ord(n))
        for n, (t, k) in sizes.items()
    }
    run = testing.on_ranks(run, make_mesh(4))
    for _ in range(3):
        for m, outs in enumerate(run(x, idx)):
            for name, out in outs.items():
                layout = "token" if name == "b" else "expert"
                oracle = testing.oracle_dispatch(x[name], idx[name], num_experts=8, layout=layout)
                testing.same_bits(out, testing.oracle_combine(oracle, oracle.x * np.float32(1 + m)), name)


def test_older_handle_in_another_program(make_mesh):
    """B44, B35: a handle crosses a jit boundary as a pytree and stays right after newer dispatches."""
    mesh = make_mesh(2)
    send = testing.on_ranks(lambda x, i: jax_ep.dispatch(x, i, num_experts=4, axis_name="ep"), mesh)
    back = testing.on_ranks(lambda y, h, w: jax_ep.combine(y, h, weights=w), mesh)
    x = testing.code_rows(2, 7, 8)
    routings = [
        testing.routing(kind, num_ranks=2, num_tokens=7, num_topk=2, num_experts=4) for kind in ("masked", "zipf")
    ]
    recvs = [send(x, idx) for idx in routings]
    w = np.random.default_rng(0).random(recvs[0].x.shape[:2]).astype(np.float32)
    for recv, idx in zip(recvs, routings, strict=True):  # the older one first
        oracle = testing.oracle_dispatch(x, idx, num_experts=4)
        expected = testing.oracle_combine(oracle, oracle.x, w)
        testing.within(back(recv.x, recv.handle, w), expected, testing.combine_tolerance(oracle, oracle.x, w))


def test_hidden_and_dtype_may_change(make_mesh):
    """Experts may widen rows and compute in another dtype; the result follows y."""

    def run(x, idx):
        recv = jax_ep.dispatch(x, idx, num_experts=4, axis_name="ep")
        y = jnp.concatenate([recv.x, recv.x * 2, recv.x * 4], 1).astype(jnp.float32)
        return jax_ep.combine(y, recv.handle)

    x = testing.code_rows(2, 7, 8, "bfloat16")
    idx = testing.routing("uniform", num_ranks=2, num_tokens=7, num_topk=2, num_experts=4)
    out = testing.on_ranks(run, make_mesh(2))(x, idx)
    wide = x.astype(np.float32) * 2
    testing.same_bits(out, np.concatenate([wide, wide * 2, wide * 4], -1))
