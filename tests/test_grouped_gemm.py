"""grouped_matmul: values and gradients against a loop over groups, padding rows with NaN, and the tokamax path through
a stand-in that behaves as its GPU kernels do (rows past the groups unwritten, results not marked as varying)."""

import doctest
import sys
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

from jax_ep import grouped_gemm
from jax_ep.grouped_gemm import grouped_matmul

M, K, N = 11, 4, 6
SIZES = ((3, 0, 5), (11, 0, 0), (0, 0, 0), (0, 4, 7))


def test_example():
    """The worked example of the docstring."""
    (example,) = doctest.DocTestFinder().find(grouped_matmul, "grouped_matmul", globs={})
    assert example.examples and doctest.DocTestRunner().run(example).failed == 0


def oracle(lhs, rhs, sizes, g_out):
    """Result and both gradients, NumPy f64."""
    lhs, rhs, g_out = (np.asarray(a, np.float64) for a in (lhs, rhs, g_out))
    out, g_lhs, g_rhs = np.zeros((M, N)), np.zeros((M, K)), np.zeros_like(rhs)
    start = 0
    for e, size in enumerate(sizes):
        rows = slice(start, start := start + size)
        out[rows] = lhs[rows] @ rhs[e]
        g_lhs[rows] = g_out[rows] @ rhs[e].T
        g_rhs[e] = lhs[rows].T @ g_out[rows]
    return out, g_lhs, g_rhs


def operands(sizes):
    """Random operands whose padding rows are NaN, in lhs and in the cotangent."""
    keys = jax.random.split(jax.random.key(0), 3)
    lhs = jax.random.normal(keys[0], (M, K)).at[sum(sizes) :].set(jnp.nan)
    g_out = jax.random.normal(keys[2], (M, N)).at[sum(sizes) :].set(jnp.nan)
    return lhs, jax.random.normal(keys[1], (len(sizes), K, N)), jnp.array(sizes, jnp.int32), g_out


@pytest.fixture
def fake_tokamax(monkeypatch):
    """Replaces tokamax; lists the calls."""
    calls = []

    def ragged_dot_general(a, b, group_sizes, dims, preferred_element_type):
        calls.append(dims)
        end = jnp.sum(group_sizes)
        out = lax.ragged_dot_general(a, b, group_sizes, dims, preferred_element_type=preferred_element_type)
        if dims.rhs_group_dimensions:
            out = jnp.where(jnp.arange(a.shape[0])[:, None] < end, out, jnp.nan)  # rows it does not write
        else:  # its mask is a product, so a NaN past the groups stays
            out = out + 0 * jnp.sum(jnp.where(jnp.arange(a.shape[0])[:, None] < end, 0, a))
            out = out + 0 * jnp.sum(jnp.where(jnp.arange(b.shape[0])[:, None] < end, 0, b))
        return out

    module = types.ModuleType("tokamax")
    module.ragged_dot_general = ragged_dot_general
    monkeypatch.setitem(sys.modules, "tokamax", module)
    return calls


@pytest.mark.parametrize("implementation", ("ragged_dot", "tokamax"))
def test_values_and_gradients(implementation, fake_tokamax):
    @jax.jit
    def run(lhs, rhs, sizes, g_out):
        out, vjp = jax.vjp(lambda a, b: grouped_matmul(a, b, sizes, implementation=implementation), lhs, rhs)
        return out, *vjp(g_out)

    for sizes in SIZES:
        args = operands(sizes)
        for got, want in zip(run(*args), oracle(args[0], args[1], sizes, args[3]), strict=True):
            np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)
    assert len(fake_tokamax) == (3 if implementation == "tokamax" else 0)  # traced once


@pytest.mark.parametrize("implementation", ("ragged_dot", "tokamax"))
def test_replicated_matrices_in_shard_map(implementation, fake_tokamax, make_mesh):
    """Matrices replicated over the axis that splits the rows get the gradient of all rows."""
    sizes, ranks = SIZES[0], 2
    lhs, rhs, group_sizes, g_out = operands(sizes)

    def local(lhs, rhs, g_out):
        _, vjp = jax.vjp(lambda a, b: grouped_matmul(a, b, group_sizes, implementation=implementation), lhs, rhs)
        return vjp(g_out)

    run = jax.shard_map(local, mesh=make_mesh(ranks), in_specs=(P("ep"), P(), P("ep")), out_specs=(P("ep"), P()))
    twice = [jnp.concatenate([a, 2 * a]) for a in (lhs, g_out)]
    g_lhs, g_rhs = jax.jit(run)(twice[0], rhs, twice[1])
    _, want_lhs, want_rhs = oracle(lhs, rhs, sizes, g_out)
    np.testing.assert_allclose(g_lhs, np.concatenate([want_lhs, 2 * want_lhs]), rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(g_rhs, 5 * want_rhs, rtol=1e-5, atol=1e-5)


def test_default_implementation(monkeypatch):
    def default(backend, installed, dtype=jnp.bfloat16, k=256, n=128):
        monkeypatch.setattr(jax, "default_backend", lambda: backend)
        monkeypatch.setattr(grouped_gemm, "_has_tokamax", lambda: installed)
        return grouped_gemm.default_implementation(dtype, k, n)

    assert default("gpu", True) == "tokamax"
    assert default("gpu", True, dtype=jnp.float16) == "tokamax"
    assert default("gpu", False) == "ragged_dot"
    assert default("cpu", True) == "ragged_dot"
    assert default("gpu", True, dtype=jnp.float32) == "ragged_dot"
    assert default("gpu", True, n=96) == "ragged_dot"


def test_mistakes(monkeypatch):
    lhs, rhs, sizes, _ = operands(SIZES[0])
    with pytest.raises(ValueError, match=r"expected lhs \[m, k\].*got \(11, 4\), \(3, 6, 4\)"):
        grouped_matmul(lhs, jnp.swapaxes(rhs, 1, 2), sizes)
    with pytest.raises(TypeError, match="got lhs float32 and rhs bfloat16"):
        grouped_matmul(lhs, rhs.astype(jnp.bfloat16), sizes)
    with pytest.raises(TypeError, match="got group_sizes float32, expected int32"):
        grouped_matmul(lhs, rhs, sizes.astype(jnp.float32))
    with pytest.raises(ValueError, match="got implementation='cublas', expected None or one of"):
        grouped_matmul(lhs, rhs, sizes, implementation="cublas")
    monkeypatch.setitem(sys.modules, "tokamax", None)
    with pytest.raises(ImportError, match="needs the package tokamax"):
        grouped_matmul(lhs, rhs, sizes, implementation="tokamax")
