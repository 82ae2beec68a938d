"""The FP8 quantiser: every bit against the oracle, error bounds, special values, the straight-through gradient.

Inputs: all bfloat16 and float16 and many float32 values, in blocks of like and of unlike size; ties between codes;
zero, tiny and huge rows, infinities, NaN of both signs. How quantised rows travel is tested with dispatch and combine.
"""

import doctest
import functools
import re

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import jax_ep
from jax_ep import testing
from jax_ep.quantize import _inverse, _round_to_e4m3

KINDS = ["fp8", "fp8_ue8m0"]


def test_example():
    """The worked example of the docstring."""
    (example,) = doctest.DocTestFinder().find(jax_ep.quantize, "quantize", globs={})
    assert example.examples and doctest.DocTestRunner().run(example).failed == 0


def every_pattern(dtype):
    """All 2**16 patterns of a 16-bit type, in order (like sizes share a block), strided, at random, and in blocks of
    several largest values."""
    values = np.arange(2**16, dtype=np.uint16)
    shuffled = np.random.default_rng(0).permutation(values)
    rows = [values.reshape(-1, 256), values.reshape(256, -1).T, shuffled.reshape(-1, 256)]
    infinity = np.array(np.inf, dtype).view(np.uint16)
    for largest in np.linspace(1, infinity - 1, 8).astype(np.uint16):  # bits order like the magnitudes they encode
        rows.append(patterns_up_to(largest, infinity))
    return np.concatenate([np.ascontiguousarray(r) for r in rows]).view(dtype)


def patterns_up_to(largest, infinity):
    """Every pattern of at most this magnitude, and every infinity and NaN, in blocks that begin with the largest."""
    values = np.arange(2**16, dtype=np.uint16)
    magnitude = values & 0x7FFF
    values = values[(magnitude <= largest) | (magnitude >= infinity)]
    blocks = np.resize(values, (-(-len(values) // 254), 2, 127))
    return np.insert(blocks, 0, largest, axis=-1).reshape(-1, 256)


def float32_values():
    """Random bits, normal numbers of every scale, each special value in a row of ordinary ones, ties between codes."""
    rng = np.random.default_rng(1)
    bits = rng.integers(0, 2**32, (64, 256), dtype=np.uint64).astype(np.uint32).view(np.float32)
    scaled = np.ldexp(rng.uniform(-1, 1, (512, 256)), rng.integers(-149, 128, (512, 1))).astype(np.float32)
    top, tiny = np.finfo(np.float32).max, np.float32(2.0**-149)
    special = np.float32([0, -0.0, np.inf, -np.inf, np.nan, -np.nan, top, -top, tiny, 2.0**-120, 448 * 2.0**-110])
    alone = np.zeros((len(special), 256), np.float32)
    alone[:, 5] = special
    mixed = rng.standard_normal(alone.shape).astype(np.float32)
    mixed[:, ::7] = special[:, None]
    codes = np.arange(0x7F, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float32)
    ties = np.append((codes[1:] + codes[:-1]) / 2, np.float32([448, 0]))  # a block
    around = [np.append(np.nextafter(ties[:-2], np.float32(end)), ties[-2:]) for end in (0, 500)]
    scales = np.float32(2.0 ** np.array([[-100], [-30], [0], [1], [100]]))
    ties = np.concatenate([np.append(row, -row) * scales for row in (ties, *around)])
    return np.concatenate([bits, scaled, alone, mixed, ties])


def ties_of_uneven_scales():
    """Ties between the small codes, and just above, under largest magnitudes whose inverses are inexact."""
    halves = (np.arange(8) + 0.5) * 2.0**-9
    ties = np.concatenate([halves * (1 + n * 2.0**-16) for n in range(15)])
    amax = np.random.default_rng(2).uniform(1, 2, (512, 1))
    blocks = np.zeros((512, 128))
    blocks[:, :1] = amax
    blocks[:, 1 : 1 + len(ties)] = ties * amax / 448
    return blocks.reshape(-1, 256).astype(np.float32)


@functools.cache
def program(kind, dtype):
    """Quantise, and back to `dtype` in the same program."""

    def run(x):
        q = jax_ep.quantize(x, kind)
        return q.data, q.scale, q.dequantize(), q.dequantize(jnp.float32)

    return jax.jit(run)


def check_bits(kind, dtype):
    """Data, scales and dequantised values equal the oracle's, on whatever device is the default; returns the rows."""
    x = float32_values() if dtype == "float32" else every_pattern(jnp.dtype(dtype))
    data, scale = testing.oracle_quantize(x, kind)
    got = program(kind, dtype)(x)
    testing.same_bits(got[0], data, "data")
    testing.same_bits(got[1], scale, "scale")
    for back in got[2:]:
        back, expected = np.asarray(back), testing.oracle_dequantize(data, scale, back.dtype)
        is_nan = np.isnan(expected)
        assert (np.isnan(back) == is_nan).all()
        testing.same_bits(back[~is_nan], expected[~is_nan], "dequantised")
    return x


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("kind", KINDS)
def test_bits(kind, dtype):
    """B27: `check_bits` compiled, and some rows without jit."""
    x = check_bits(kind, dtype)
    few = x[:: len(x) // 16]
    eager = jax_ep.quantize(jnp.asarray(few), kind)
    data, scale = testing.oracle_quantize(few, kind)
    testing.same_bits(eager.data, data, "data, eager")
    testing.same_bits(eager.scale, scale, "scale, eager")


@pytest.mark.parametrize("kind", KINDS)
def test_error_bound(kind):
    """The bound of the docstring, on rows of every scale."""
    x = float32_values()
    x = np.where(np.isfinite(x) & (np.abs(x) < 2.0**127), x, np.float32(1))
    x = np.concatenate([x, ties_of_uneven_scales()])
    data, scale = testing.oracle_quantize(x, kind)
    back = testing.oracle_dequantize(data, scale).astype(np.float64)
    step = np.repeat(scale.astype(np.float64), 128, -1)
    exact = x.astype(np.float64)
    testing.within(back, exact, np.maximum((2.0**-4 + 2.0**-13) * np.abs(exact), (2.0**-10 + 2.0**-20) * step))
    assert (np.abs(data.astype(np.float32)) <= 448).all()


def test_oracle_by_hand():
    """Special values written out: the oracle is not only equal to what it checks."""
    x = np.zeros((6, 128), np.float32)
    x[1, :3] = 2.0**-101, 2.0**-121, -(2.0**-149)
    x[2, :4] = np.inf, 448, -np.inf, 1
    x[3, :3] = np.nan, -np.nan, 224
    x[4, :2] = 896, 1
    x[5, :2] = 900, 1
    data, scale = testing.oracle_quantize(x)
    assert scale[:4, 0].tolist() == [2.0**-110, np.float32(2.0**-101) * np.float32(1 / 448), 1, 0.5]
    assert not data[0].view(np.uint8).any()
    assert data[1, :3].astype(float).tolist() == [448, 0, 0] and np.signbit(data[1, 2])
    assert data[2, :5].astype(float).tolist() == [448, 448, -448, 1, 0]
    assert data[3, :3].view(np.uint8).tolist() == [0x7F, 0x7F, 0x7E]
    data, scale = testing.oracle_quantize(x, "fp8_ue8m0")
    assert scale.view(np.uint8)[:, 0].tolist() == [17, 18, 127, 126, 128, 129]
    assert data[4, :2].astype(float).tolist() == [448, 0.5] and data[5, :2].astype(float).tolist() == [224, 0.25]


def test_inverse_never_overshoots():
    """amax * inverse <= 448 for every upper half of a mantissa and its extremes, relative error below 2**-14."""
    upper = np.arange(2**15, 2**16, dtype=np.uint32) << 8
    mantissa = np.concatenate([upper, upper + 1, upper + 255]) & (2**23 - 1)
    for exponent in (25, 127, 254):
        amax = np.uint32(exponent << 23) | mantissa
        inverse = np.asarray(_inverse(jnp.asarray(amax)))
        product = amax.view(np.float32).astype(np.float64) * inverse.astype(np.float64)
        assert product.max() < 448 and product.min() > 448 * (1 - 2.0**-14)
        with np.errstate(over="ignore"):
            assert (amax.view(np.float32) * inverse).max() <= 448


def test_rounding_to_e4m3():
    """Ties and their neighbours around every code, subnormals included, as ml_dtypes rounds them."""
    codes = np.arange(0x7F, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float64)
    middle = ((codes[1:] + codes[:-1]) / 2).astype(np.float32)
    near = [np.nextafter(middle, np.float32(0)), middle, np.nextafter(middle, np.float32(500))]
    values = np.concatenate([codes.astype(np.float32), *near, np.float32([2.0**-126, 2.0**-149, 2.0**-11])])
    values = np.concatenate([values, -values])
    got = np.asarray(jax.jit(_round_to_e4m3)(values)).astype(np.uint8)
    testing.same_bits(got, values.astype(ml_dtypes.float8_e4m3fn).view(np.uint8))


def test_quantises_what_was_rounded():
    """XLA may keep f32 precision over a rounding to bf16; the quantiser sees the rounded rows."""
    x = np.random.default_rng(0).standard_normal((16, 256)).astype(np.float32)
    run = jax.jit(lambda x: jax_ep.quantize((x * 1.001).astype(jnp.bfloat16)))
    data, scale = testing.oracle_quantize((x * np.float32(1.001)).astype(ml_dtypes.bfloat16))
    got = run(x)
    testing.same_bits(got.data, data)
    testing.same_bits(got.scale, scale)


@pytest.mark.parametrize("kind", KINDS)
def test_straight_through(kind):
    """The gradient of a function of the dequantised rows is that function's, at those rows, in the payload dtype."""
    x = testing.random_rows((4, 256), "bfloat16")

    def loss(rows):
        return jnp.sum(jnp.sin(rows.astype(jnp.float32)))

    def through(x):
        q = jax_ep.quantize(x, kind)
        return loss(q.dequantize()) + loss(q.dequantize(jnp.float32))  # twice: the cotangents add up

    q = jax_ep.quantize(jnp.asarray(x), kind)
    grad = jax.jit(jax.grad(through))(x)
    each = [jax.grad(loss)(q.dequantize(dtype)) for dtype in (jnp.bfloat16, jnp.float32)]
    testing.same_bits(grad, each[0] + each[1].astype(jnp.bfloat16))

    g_q = jax.grad(lambda q: loss(q.dequantize()))(q)
    testing.same_bits(g_q.carrier, each[0])
    assert not np.asarray(g_q.data.astype(jnp.float32)).any()


def test_carrier_costs_nothing(make_mesh):
    """The compiled program with a carrier is the one without."""
    x = np.zeros((8, 256), np.float32)

    def run(with_carrier):
        def f(x):
            q = jax_ep.quantize(x.astype(jnp.bfloat16))
            if not with_carrier:
                q = jax_ep.Quantized(q.data, q.scale)
            return q.dequantize(jnp.float16)

        text = jax.jit(f).lower(x).compile().as_text()
        return re.sub(r", metadata=\{[^}]*\}", "", text[text.index("\n%") :])

    assert run(True) == run(False)
    assert "bf16[8,256]" in run(True)  # the rounding of x, so that the comparison means something

    def local(x):  # in a shard_map that tracks which values vary, too
        return jax.grad(lambda x: jnp.sum(jax_ep.quantize(x).dequantize() ** 2))(x)

    testing.on_ranks(local, make_mesh(2))(x.reshape(2, 4, 256))


def test_leading_dimensions_and_other_blocks():
    """[experts, rows, hidden] as in batched layouts; a pair of other blocks or types dequantises too."""
    x = testing.random_rows((2, 3, 128))
    q = jax_ep.quantize(x)
    assert q.data.shape == (2, 3, 128) and q.scale.shape == (2, 3, 1)
    data = np.full((2, 64), 2, ml_dtypes.float8_e5m2)
    scale = np.array([[1, 2], [0.5, 4]], ml_dtypes.float8_e8m0fnu)
    back = jax_ep.Quantized(data, scale).dequantize(jnp.float16)
    testing.same_bits(back, np.repeat(2 * scale.astype(np.float16), 32, -1))
    scale.view(np.uint8)[0] = 0, 255
    back = jax_ep.Quantized(data, scale).dequantize(jnp.float32)
    assert not back[0, :32].any() and np.isnan(back[0, 32:]).all()


def test_mistakes():
    """What was got, what was expected."""
    with pytest.raises(ValueError, match=r"shape \(2, 192\) to quantise.*multiple of 128.*pad it to 256"):
        jax_ep.quantize(jnp.zeros((2, 192)))
    with pytest.raises(ValueError, match="quantize='fp4', expected 'fp8' or 'fp8_ue8m0'"):
        jax_ep.quantize(jnp.zeros((2, 128)), "fp4")
    with pytest.raises(TypeError, match="dtype int32, expected one of bfloat16"):
        jax_ep.quantize(jnp.zeros((2, 128), jnp.int32))
    opaque = jax_ep.Quantized(jnp.zeros((2, 64), jnp.uint8), jnp.zeros((2, 8), jnp.uint8))
    with pytest.raises(TypeError, match="no carrier.*pass dtype="):
        opaque.dequantize()
    with pytest.raises(TypeError, match="data of dtype uint8.*opaque"):
        opaque.dequantize(jnp.float32)
    with pytest.raises(TypeError, match="scale of None"):
        jax_ep.Quantized(jnp.zeros((2, 64)), None).dequantize(jnp.float32)
    with pytest.raises(ValueError, match="num_blocks divides hidden"):
        jax_ep.Quantized(jnp.zeros((2, 64)), jnp.zeros((2, 3))).dequantize(jnp.float32)
    with pytest.raises(ValueError, match=r"carrier of shape \(2, 128\), expected equal shapes"):
        jax_ep.Quantized(jnp.zeros((2, 64)), jnp.zeros((2, 1)), jnp.zeros((2, 128))).dequantize()
    with pytest.raises(TypeError, match="dtype=int8"):
        jax_ep.Quantized(jnp.zeros((2, 64)), jnp.zeros((2, 1))).dequantize(jnp.int8)
