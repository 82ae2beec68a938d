"""One grouped matrix product for the experts of a rank, with switchable implementations.

`jax.lax.ragged_dot` runs on every backend. On NVIDIA GPUs it is slow for large groups and takes
large temporaries; tokamax's Mosaic kernels are the default there when they are installed.
"""

from __future__ import annotations

import functools
import importlib.util

import jax
import jax.numpy as jnp
from jax import lax

from jax_ep import _compat

IMPLEMENTATIONS = ("ragged_dot", "tokamax")

# Block sizes of tokamax's default kernels; other extents are left to ragged_dot.
_TOKAMAX_MULTIPLE = 128


def grouped_matmul(lhs, rhs, group_sizes, *, implementation=None):
    """Multiplies consecutive groups of rows by one matrix per group.

    Row `i` of `lhs` belongs to the group `e` whose range `[start_e, start_e + group_sizes[e])`
    holds `i`, where `start_e` is the sum of the sizes before it, and `out[i] = lhs[i] @ rhs[e]`.
    Rows past the last group are padding: their result and their gradient are 0, and what they
    hold, NaN included, reaches nothing else.

    Example:
      Two groups, of one and of two rows, and a row of padding.

      >>> import jax.numpy as jnp
      >>> from jax_ep.grouped_gemm import grouped_matmul
      >>> lhs = jnp.array([[1.0], [2.0], [3.0], [9.0]])
      >>> rhs = jnp.array([[[10.0]], [[100.0]]])
      >>> grouped_matmul(lhs, rhs, jnp.array([1, 2])).tolist()
      [[10.0], [200.0], [300.0], [0.0]]

    Args:
      lhs: `[m, k]` floating point rows.
      rhs: `[g, k, n]` one matrix per group, of `lhs`' dtype.
      group_sizes: `[g]` i32, at least 0 each, their sum at most `m`. A larger sum is not checked.
      implementation: `"ragged_dot"` (`jax.lax.ragged_dot`), `"tokamax"` (`tokamax.ragged_dot`), or
        None: tokamax on GPU when it is installed, the dtype is bf16 or f16 and `k` and `n` are
        multiples of 128, else ragged_dot.

    Returns:
      `[m, n]` of `lhs`' dtype. Rows past the last group are 0.

    Raises:
      ValueError: shapes or implementation not as above.
      TypeError: dtypes not as above.
      ImportError: `"tokamax"` was asked for and is not installed.

    Notes:
      Differentiable with respect to `lhs` and `rhs`; the tokamax implementation once and in
      reverse mode only. May be called inside or outside `shard_map`; no communication. On CPU
      ragged_dot does the work of `g` full products, so few groups a device are best there.
    """
    _check(lhs, rhs, group_sizes)
    name = implementation or default_implementation(lhs.dtype, rhs.shape[1], rhs.shape[2])
    if name == "ragged_dot":
        return lax.ragged_dot(lhs, rhs, group_sizes)
    if name == "tokamax":
        # Both operands vary over the same manual axes inside; the cast's transpose sums the
        # gradient of a matrix that is replicated over some of them.
        return _tokamax_matmul(*_compat.vary_together((lhs, rhs, group_sizes), ()))
    raise ValueError(
        f"grouped_matmul: got implementation={implementation!r}, expected None or one of {IMPLEMENTATIONS}"
    )


def default_implementation(dtype, k, n):
    """The implementation that None stands for, from static facts only."""
    fits = k % _TOKAMAX_MULTIPLE == 0 and n % _TOKAMAX_MULTIPLE == 0
    half = jnp.dtype(dtype) in (jnp.bfloat16, jnp.float16)
    if fits and half and jax.default_backend() == "gpu" and _has_tokamax():
        return "tokamax"
    return "ragged_dot"


@functools.cache
def _has_tokamax():
    return importlib.util.find_spec("tokamax") is not None


def _check(lhs, rhs, group_sizes):
    shapes = (lhs.shape, rhs.shape, group_sizes.shape)
    good = lhs.ndim == 2 and rhs.ndim == 3 and group_sizes.ndim == 1
    if not good or lhs.shape[1] != rhs.shape[1] or rhs.shape[0] != group_sizes.shape[0]:
        raise ValueError(
            "grouped_matmul: expected lhs [m, k], rhs [g, k, n] and group_sizes [g], got "
            f"{shapes[0]}, {shapes[1]} and {shapes[2]}"
        )
    if lhs.dtype != rhs.dtype or not jnp.issubdtype(lhs.dtype, jnp.floating):
        raise TypeError(
            f"grouped_matmul: got lhs {lhs.dtype} and rhs {rhs.dtype}, expected one floating "
            "point dtype for both; cast the weights to the dtype of the rows"
        )
    if group_sizes.dtype != jnp.int32:
        raise TypeError(f"grouped_matmul: got group_sizes {group_sizes.dtype}, expected int32")


@jax.custom_vjp
def _tokamax_matmul(lhs, rhs, group_sizes):
    dims = lax.RaggedDotDimensionNumbers((((1,), (1,)), ((), ())), (0,), (0,))
    out = _tokamax_call(lhs, rhs, group_sizes, dims)
    return _mask_rows(out, group_sizes)


def _tokamax_fwd(lhs, rhs, group_sizes):
    return _tokamax_matmul(lhs, rhs, group_sizes), (lhs, rhs, group_sizes)


def _tokamax_bwd(residuals, g_out):
    # NOTE: tokamax leaves rows past the last group unwritten, and its weight gradient multiplies
    # them by 0, which keeps a NaN. So rows are masked with `where` on every side.
    lhs, rhs, group_sizes = residuals
    g_out = _mask_rows(g_out, group_sizes)
    lhs_dims = lax.RaggedDotDimensionNumbers((((1,), (2,)), ((), ())), (0,), (0,))
    g_lhs = _mask_rows(_tokamax_call(g_out, rhs, group_sizes, lhs_dims), group_sizes)
    rhs_dims = lax.RaggedDotDimensionNumbers((((0,), (0,)), ((), ())), (0,), ())
    g_rhs = _tokamax_call(_mask_rows(lhs, group_sizes), g_out, group_sizes, rhs_dims)
    return g_lhs, g_rhs, None


_tokamax_matmul.defvjp(_tokamax_fwd, _tokamax_bwd)


def _tokamax_call(a, b, group_sizes, dims):
    try:
        import tokamax
    except ImportError as error:
        raise ImportError(
            "grouped_matmul: implementation='tokamax' needs the package tokamax (Python >= 3.12)"
        ) from error
    out = tokamax.ragged_dot_general(a, b, group_sizes, dims, preferred_element_type=a.dtype)
    # Its kernels do not mark what they return as varying over manual axes.
    return _compat.vary_together((out, a), ())[0]


def _mask_rows(x, group_sizes):
    rows = lax.broadcasted_iota(jnp.int32, (x.shape[0], 1), 0)
    return jnp.where(rows < jnp.sum(group_sizes), x, jnp.zeros((), x.dtype))
