"""The rules of quantised rows, each once; errors as in `shapes`, whose part this is."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jax_ep.shapes import PAYLOAD_DTYPES, round_up

KINDS = ("fp8", "fp8_ue8m0")
BLOCK = 128  # channels that share a scale


def kind(op: str, value, kinds: tuple[str, ...]) -> str:
    """One of `kinds`."""
    if value not in kinds:
        raise ValueError(f"{op}: got quantize={value!r}, expected {' or '.join(repr(k) for k in kinds)}")
    return value


def quantizable(op: str, name: str, x) -> jax.Array:
    """Rows that divide into blocks with a scale each."""
    x = jnp.asarray(x)
    if x.dtype.name not in PAYLOAD_DTYPES:
        raise TypeError(f"{op}: got {name} of dtype {x.dtype}, expected one of {', '.join(PAYLOAD_DTYPES)}; cast it")
    hidden = x.shape[-1] if x.ndim else 0
    if hidden == 0 or hidden % BLOCK:
        raise ValueError(
            f"{op}: got {name} of shape {x.shape} to quantise, expected a hidden size that is a positive multiple of "
            f"{BLOCK} (one scale each); pad it to {round_up(max(hidden, 1), BLOCK)}"
        )
    return x


def dequantizable(op: str, data, scale, carrier) -> None:
    """Data and scales that are numbers of known layout, not opaque bytes, and a carrier of their shape."""
    for name, array in (("data", data), ("scale", scale)):
        if array is None or not jnp.issubdtype(array.dtype, jnp.floating):
            got = "None" if array is None else f"dtype {array.dtype}"
            raise TypeError(
                f"{op}: got {name} of {got}, expected a float type such as float8_e4m3fn; "
                "an opaque pair must be decoded by the code that knows its format"
            )
    if data.shape[:-1] != scale.shape[:-1] or scale.shape[-1] == 0 or data.shape[-1] % scale.shape[-1]:
        raise ValueError(
            f"{op}: got data of shape {data.shape} and scale of shape {scale.shape}, expected [..., hidden] and "
            "[..., num_blocks] where num_blocks divides hidden"
        )
    if carrier is not None and carrier.shape != data.shape:
        raise ValueError(
            f"{op}: got data of shape {data.shape} and carrier of shape {carrier.shape}, expected equal shapes; data "
            "that holds several values in an element must be decoded by the code that knows its format"
        )


def dequantized_dtype(op: str, dtype, carrier):
    """The dtype asked for, or that of the carrier."""
    if dtype is None and carrier is None:
        raise TypeError(f"{op}: this pair has no carrier to tell its dtype; pass dtype=, e.g. jnp.bfloat16")
    dtype = jnp.dtype(carrier.dtype if dtype is None else dtype)
    if dtype.name not in PAYLOAD_DTYPES:
        raise TypeError(f"{op}: got dtype={dtype}, expected one of {', '.join(PAYLOAD_DTYPES)}")
    return dtype
