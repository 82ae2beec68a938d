"""FP8 rows: quantise to e4m3 with one scale per 128 channels, and back, with a straight-through gradient.

The arithmetic is the executable definition: kernels follow it bit for bit. It divides no floats and adds none beside a
product, because XLA does neither in the same way on every backend; what decides a bit is done on integers.
"""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jax_ep import _compat, quantize_shapes

BLOCK = quantize_shapes.BLOCK
SCALE_DTYPES = {"fp8": jnp.float32, "fp8_ue8m0": jnp.float8_e8m0fnu}
_FLOOR_BITS = int(np.float32(448 * 2.0**-110).view(np.uint32))  # smallest amax: no scale or inverse is subnormal
_INF_BITS = 0x7F800000
_IMPLICIT_ONE = 1 << 23
_NAN_E4M3 = 0x7F


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Quantized:
    """Rows in a narrow type with their scales: what `quantize` makes and dispatch delivers.

    value[..., h] = float32(data[..., h]) * float32(scale[..., h // (hidden / num_blocks)])

    A pair made elsewhere (MXFP8, NVFP4 packed into bytes, ...) travels through dispatch as opaque bytes: then data and
    scale may have any dtype of whole bytes, and `scale` any width, or be None.

    Gradients do not pass through data and scale (their cotangents are 0) but through `carrier`: zeros in the dtype and
    shape of the rows before quantising, on which no value depends, so that the compiler drops them. A pair without
    carrier (None) has no gradient.
    """

    data: jax.Array  # [..., hidden] float8_e4m3fn, or opaque
    scale: jax.Array | None  # [..., hidden / 128] float32 or float8_e8m0fnu, or opaque
    carrier: jax.Array | None = None  # [..., hidden] zeros in the payload dtype

    def dequantize(self, dtype=None) -> jax.Array:
        """The rows as bfloat16, float16 or float32.

        Args:
          dtype: of the result. None: the carrier's dtype, and a TypeError where there is no carrier.

        Returns:
          [..., hidden]: the product above in float32, rounded once to `dtype`. A scale byte 0 of float8_e8m0fnu counts
          as 0, so rows that hold no token are 0. Values within 1/16 of the largest of `dtype` may become infinite.

        Raises:
          TypeError, ValueError: data or scale are opaque (integers), or the hidden size is no multiple of the blocks.
        """
        dtype = quantize_shapes.dequantized_dtype("Quantized.dequantize", dtype, self.carrier)
        quantize_shapes.dequantizable("Quantized.dequantize", self.data, self.scale, self.carrier)
        # The cotangent of the carrier varies over all mesh axes that the result varies over.
        pair = _compat.vary_together(self, ())
        return _dequantize(dtype, pair.data, pair.scale, pair.carrier)


def quantize(x: jax.Array, kind: str = "fp8") -> Quantized:
    """Quantises rows to float8_e4m3fn with one scale per block of 128 channels.

    Per row and block, with amax the largest finite magnitude in it, but at least 448 * 2**-110::

        "fp8":       scale = amax * float32(1/448)
        "fp8_ue8m0": scale = 2**ceil(log2(amax * float32(1/448)))
        data = round_to_e4m3(clamp(x / scale, -448, 448))

    where the division is a product with an inverse of relative error below 2**-14 ("fp8") or none ("fp8_ue8m0").

    Example:
      Two rows, one of them tiny: each has its own scale.

      >>> import jax.numpy as jnp, jax_ep
      >>> x = jnp.array([[448.0, 1.0, -3.3], [7 * 2.0**-20, -7 * 2.0**-24, 0.0]])
      >>> q = jax_ep.quantize(jnp.pad(x, ((0, 0), (0, 125))))
      >>> q.data.dtype, q.scale.shape
      (dtype(float8_e4m3fn), (2, 1))
      >>> q.data[:, :3].tolist()
      [[448.0, 1.0, -3.25], [448.0, -28.0, 0.0]]
      >>> q.scale[:, 0].tolist()
      [1.0, 1.4901161193847656e-08]
      >>> q.dequantize()[0, :3].tolist()
      [448.0, 1.0, -3.25]
      >>> jax_ep.quantize(jnp.pad(x, ((0, 0), (0, 125))), "fp8_ue8m0").scale[:, 0].tolist()
      [1.0, 1.4901161193847656e-08]

    Args:
      x: [..., hidden] bfloat16, float16 or float32; hidden is a multiple of 128.
      kind: "fp8" (float32 scales) or "fp8_ue8m0" (powers of two, stored as float8_e8m0fnu, a biased exponent byte).

    Returns:
      `Quantized`: data [..., hidden] float8_e4m3fn, scale [..., hidden / 128], carrier [..., hidden] in x's dtype.
      Infinities saturate to +-448 and have no part in the scale; NaN stays NaN (bits 0x7f). A block of zeros is 0 with
      the smallest scale, 2**-110; in blocks below 2**-101 elements of at most 2**-120 become 0.
      Error of an element: at most 2**-4 + 2**-13 of it, or 2**-10 + 2**-20 of the scale where that is more.

    Raises:
      ValueError, TypeError: while tracing, for another hidden size, dtype or kind.

    Notes:
      Differentiable in reverse mode, straight through: the cotangent of x is that of the result's carrier.
      Deterministic: equal bits on every backend, and equal to what dispatch(quantize=) does.

    Source:
      Blocks of 128 and e4m3 follow DeepSeek-V3 (https://arxiv.org/abs/2412.19437); power-of-two scales the OCP
      Microscaling formats.
    """
    kind = quantize_shapes.kind("quantize", kind, quantize_shapes.KINDS)
    x = quantize_shapes.quantizable("quantize", "x", x)
    return _quantize(kind, x)


def to_fp8(x: jax.Array, kind: str) -> tuple[jax.Array, jax.Array]:
    """Data [..., hidden] and scale [..., hidden / 128] of `quantize`, without gradient."""
    if x.size == 0:  # nothing to compute, and XLA cannot partition some programs on empty arrays
        scale_shape = (*x.shape[:-1], x.shape[-1] // BLOCK)
        return jnp.zeros(x.shape, jnp.float8_e4m3fn), jnp.zeros(scale_shape, SCALE_DTYPES[kind])
    if x.dtype != jnp.float32:
        x = lax.optimization_barrier(x)  # or XLA may quantise what x was before its rounding to this dtype
    blocks = x.astype(jnp.float32).reshape(*x.shape[:-1], x.shape[-1] // BLOCK, BLOCK)
    magnitude = _bits(blocks) & jnp.uint32(0x7FFFFFFF)
    # Integers order like the magnitudes that they encode, and no backend flushes them to zero.
    amax = jnp.max(jnp.where(magnitude < _INF_BITS, magnitude, 0), axis=-1)
    amax = jnp.maximum(amax, jnp.uint32(_FLOOR_BITS))
    scale = _float(amax) * np.float32(1 / 448)
    if kind == "fp8":
        inverse = _inverse(amax)
    else:
        bits = _bits(scale)
        exponent = (bits >> 23) + jnp.where(bits & (_IMPLICIT_ONE - 1), jnp.uint32(1), jnp.uint32(0))
        inverse = _float((254 - exponent) << 23)
        scale = lax.bitcast_convert_type(exponent.astype(jnp.uint8), jnp.float8_e8m0fnu)
    scaled = jnp.clip(blocks * inverse[..., None], -448.0, 448.0)
    code = jnp.where(magnitude > _INF_BITS, jnp.uint32(_NAN_E4M3), _round_to_e4m3(scaled))
    data = lax.bitcast_convert_type(code.astype(jnp.uint8), jnp.float8_e4m3fn).reshape(x.shape)
    # XLA may drop a pair of conversions, and gather constant factors: neither may reach over this border.
    return lax.optimization_barrier((data, scale))


def from_fp8(data: jax.Array, scale: jax.Array, dtype) -> jax.Array:
    """Rows of `data` and their scales as `dtype`, without gradient."""
    if scale.dtype == jnp.float8_e8m0fnu:
        byte = lax.bitcast_convert_type(scale, jnp.uint8).astype(jnp.uint32)
        scale = jnp.where(byte == 255, jnp.float32(np.nan), _float(byte << 23))
    num_blocks = scale.shape[-1]
    blocks = data.astype(jnp.float32).reshape(*data.shape[:-1], num_blocks, data.shape[-1] // max(num_blocks, 1))
    return (blocks * scale.astype(jnp.float32)[..., None]).reshape(data.shape).astype(dtype)


def zero_carrier(x: jax.Array, shape: tuple[int, ...] | None = None) -> jax.Array:
    """Zeros in x's dtype that vary over the mesh axes that x varies over."""
    zeros = jnp.zeros(x.shape if shape is None else shape, x.dtype)
    return _compat.vary_together((zeros, x), ())[0]


def _inverse(amax):
    """About 448 / amax, for the bits of amax; never so large that amax * inverse exceeds 448.

    THE definition, for amax = mantissa24 * 2**(e - 150) with e its exponent field and mantissa24 in [2**23, 2**24):

        m16     = (mantissa24 >> 8) + 1             in (2**15, 2**16], above the mantissa's upper 16 bits
        inv_m   = 0x7fffffff // m16                 in [2**15 - 1, 2**16)
        inverse = float32(7 * inv_m) * 2**(117 - e) = 448 * inv_m * 2**(111 - e)

    7 * inv_m has 19 bits, so the conversion is exact; the power of two is added to the exponent field, which stays
    between 7 and 237.
    """
    m16 = ((amax & (_IMPLICIT_ONE - 1) | _IMPLICIT_ONE) >> 8) + 1
    inv_m = lax.div(jnp.full_like(m16, 0x7FFFFFFF), m16)
    exponent = (amax >> 23).astype(jnp.int32)
    return _float(_bits((7 * inv_m).astype(jnp.float32)) + ((117 - exponent) << 23).astype(jnp.uint32))


def _round_to_e4m3(value):
    """Code, u32, of f32 values within +-448, ties to even: on integers, since backends convert by way of float16."""
    bits = _bits(value)
    magnitude = bits & 0x7FFFFFFF
    normal = ((magnitude + 0x7FFFF + ((magnitude >> 20) & 1)) >> 20) - (120 << 3)
    # Below 2**-6 in units of 2**-9: the mantissa shifted by 21 and more, where 26 already leaves nothing.
    mantissa = (magnitude & (_IMPLICIT_ONE - 1)) | _IMPLICIT_ONE
    shift = 141 - jnp.clip(magnitude >> 23, 115, 120)
    subnormal = (mantissa + (jnp.uint32(1) << (shift - 1)) - 1 + ((mantissa >> shift) & 1)) >> shift
    return ((bits >> 24) & 0x80) | jnp.where(magnitude < (121 << 23), subnormal, normal)


def _bits(a):
    return lax.bitcast_convert_type(a, jnp.uint32)


def _float(bits):
    return lax.bitcast_convert_type(bits, jnp.float32)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _quantize(kind, x) -> Quantized:
    data, scale = to_fp8(x, kind)
    return Quantized(data, scale, zero_carrier(x))


def _quantize_fwd(kind, x):
    return _quantize(kind, x), None


def _quantize_bwd(kind, _, cotangent: Quantized):
    return (cotangent.carrier,)


_quantize.defvjp(_quantize_fwd, _quantize_bwd)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _dequantize(dtype, data, scale, carrier) -> jax.Array:
    return from_fp8(data, scale, dtype)


def _dequantize_fwd(dtype, data, scale, carrier):
    # An empty array is the least that tells the carrier's dtype backward.
    like = None if carrier is None else jnp.zeros(0, carrier.dtype)
    return from_fp8(data, scale, dtype), like


def _dequantize_bwd(dtype, like, g):
    return None, None, None if like is None else g.astype(like.dtype)


_dequantize.defvjp(_dequantize_fwd, _dequantize_bwd)
