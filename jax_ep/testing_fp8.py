"""The NumPy oracle of FP8 quantisation; `jax_ep.testing` offers it.

Written from the contract in `jax_ep.quantize`'s docstring on real numbers (float64 holds every quantity exactly but the
two float32 products, which NumPy rounds as IEEE says), not from the code there.
"""

from __future__ import annotations

import ml_dtypes
import numpy as np

_BLOCK = 128
_SMALLEST_AMAX = np.float32(448 * 2.0**-110)


def oracle_quantize(x: np.ndarray, kind: str = "fp8") -> tuple[np.ndarray, np.ndarray]:
    """Data e4m3 [..., H] and scale [..., H / 128], float32 or (kind "fp8_ue8m0") float8_e8m0fnu."""
    blocks = x.astype(np.float32).reshape(*x.shape[:-1], x.shape[-1] // _BLOCK, _BLOCK)
    finite = np.where(np.isfinite(blocks), np.abs(blocks), np.float32(0))
    amax = np.maximum(finite.max(-1), _SMALLEST_AMAX)
    scale = amax * np.float32(1 / 448)
    if kind == "fp8":
        fraction, exponent = np.frexp(amax.astype(np.float64))  # amax = fraction * 2**exponent, fraction in [1/2, 1)
        upper = np.floor(fraction * 2**16) + 1
        inverse = 448 * np.ldexp(np.floor((2**31 - 1) / upper), -15 - exponent)
    else:
        fraction, exponent = np.frexp(scale.astype(np.float64))
        exponent = np.where(fraction == 0.5, exponent - 1, exponent)  # ceil(log2(scale))
        inverse = np.ldexp(1.0, -exponent)
        scale = (exponent + 127).astype(np.uint8).view(ml_dtypes.float8_e8m0fnu)
    with np.errstate(over="ignore", invalid="ignore"):
        scaled = np.clip(blocks * inverse.astype(np.float32)[..., None], np.float32(-448), np.float32(448))
    data = scaled.astype(ml_dtypes.float8_e4m3fn)
    data.view(np.uint8)[np.isnan(blocks)] = 0x7F
    return data.reshape(x.shape), scale


def oracle_dequantize(data: np.ndarray, scale: np.ndarray, dtype="float32") -> np.ndarray:
    """float32(data) * float32(scale), rounded to `dtype`; scale byte 0 of float8_e8m0fnu counts as 0."""
    factor = scale.astype(np.float32)
    if scale.dtype == ml_dtypes.float8_e8m0fnu:
        factor = np.where(scale.view(np.uint8) == 0, np.float32(0), factor)
    blocks = data.astype(np.float32).reshape(*scale.shape, _BLOCK)
    with np.errstate(over="ignore", invalid="ignore"):
        return (blocks * factor[..., None]).reshape(data.shape).astype(np.dtype(dtype))
