"""FP8 and opaque rows in dispatch and combine, beyond the cases of exchange_cases.py (which compare every bit).

Straight-through gradients of a layer, transformations, what the carrier costs, pairs of other formats, NaN and infinite
tokens, products that stay apart from sums, mistakes.
"""

import functools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from exchange_cases import QUICK_COMPILE

import jax_ep
from jax_ep import quantize_shapes, shapes, testing

RANKS, TOKENS, TOPK, HIDDEN, EXPERTS = 2, 6, 2, 128, 4


@pytest.fixture(scope="module")
def data():
    x = testing.random_rows((RANKS, TOKENS, HIDDEN)) / 16
    idx = testing.routing("masked", num_ranks=RANKS, num_tokens=TOKENS, num_topk=TOPK, num_experts=EXPERTS)
    return x, idx


def send(x, idx, w=None, **kwargs):
    return jax_ep.dispatch(x, idx, w, num_experts=EXPERTS, axis_name="ep", **kwargs)


def rows_of(recv, quantize):
    return recv.x.dequantize() if quantize in quantize_shapes.KINDS else recv.x


@pytest.mark.parametrize(
    ("layout", "quantize"),
    [*((layout, "fp8") for layout in shapes.LAYOUTS), ("token", "fp8_ue8m0"), ("token", "fp8_wire")],
)
def test_layer_is_differentiated_straight_through(make_mesh, data, layout, quantize):
    """Value and gradients are those of the layer without FP8 on rows that were quantised before."""
    x, idx = data
    w = np.random.default_rng(0).standard_normal((RANKS, HIDDEN, HIDDEN)).astype(np.float32) / 16

    def gradients(quantize, x, idx, w):
        def loss(x, w):
            recv = send(x, idx, layout=layout, quantize=quantize)
            out = jax_ep.combine(jnp.tanh(rows_of(recv, quantize) @ w), recv.handle)
            return jnp.sum(out**2)

        return jax.value_and_grad(loss, (0, 1))(x, w)

    run = lambda quantize: jax.jit(
        testing.on_ranks(functools.partial(gradients, quantize), make_mesh(RANKS), jit=False),
        compiler_options=QUICK_COMPILE,
    )
    got = run(quantize)(x, idx, w)
    pair = testing.oracle_quantize(x, "fp8" if quantize == "fp8_wire" else quantize)
    expected = run(None)(testing.oracle_dequantize(*pair), idx, w)
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-6, atol=1e-6), got, expected)
    assert np.asarray(got[1][0]).any()


SCALES = np.linspace(0.5, 1.5, 3, dtype=np.float32)
POLICIES = {
    "recompute": jax.checkpoint_policies.nothing_saveable,
    "names": jax.checkpoint_policies.save_only_these_names("jax_ep_handle", "jax_ep_recv"),
}


@pytest.mark.parametrize(("policy", "check_vma"), [(None, True), ("recompute", True), ("names", False)])
def test_scan_of_layers(make_mesh, data, policy, check_vma):
    """B45, B47: scan over layers with and without vma and jax.checkpoint, against a dense straight-through layer.

    What jax.checkpoint saves under our name are bytes: it would turn codes of 256 and more into NaN.
    """

    def layer(x, idx, scale):
        recv = send(x, idx, quantize="fp8")
        return x + jax_ep.combine(jnp.tanh(recv.x.dequantize()) * scale, recv.handle, quantize="fp8_wire")

    def dense(x, idx, scale):
        rows = jnp.tanh(jax_ep.quantize(x).dequantize()) * scale
        for rank in range(RANKS):  # the sum of a rank's experts crosses quantised
            count = jnp.sum((idx >= 0) & (idx // (EXPERTS // RANKS) == rank), -1, keepdims=True)
            x = x + jax_ep.quantize(rows * count).dequantize()
        return x

    def gradient(layer, x, idx):
        loss = lambda x: jnp.sum(jax.lax.scan(lambda c, s: (layer(c, idx, s), None), x, SCALES)[0] ** 2)
        return jax.value_and_grad(loss)(x)

    step = layer if policy is None else jax.checkpoint(layer, policy=POLICIES[policy])
    run = testing.on_ranks(functools.partial(gradient, step), make_mesh(RANKS), jit=False, check_vma=check_vma)
    value, grad = jax.jit(run, compiler_options=QUICK_COMPILE)(*data)
    expected_value, expected = jax.jit(functools.partial(gradient, dense))(*data)
    np.testing.assert_allclose(value.sum(), expected_value, rtol=1e-4)
    # A value beside a rounding border may quantise otherwise after a last bit that differs: few, and by a step.
    is_close = np.isclose(grad, expected, rtol=1e-4, atol=1e-5)
    assert is_close.mean() > 0.98 and np.allclose(grad, expected, rtol=0.1, atol=0.1)


def test_carrier_costs_nothing(make_mesh, data):
    """No array of its shape and dtype in the compiled program, and no name under which it would be saved."""
    x, idx = data[0].astype(np.float16), data[1]
    capacity = 13
    forward = lambda x, idx: send(x, idx, capacity=capacity, quantize="fp8").x.dequantize(jnp.float32)
    text = testing.on_ranks(forward, make_mesh(RANKS)).lower(x, idx).compile().as_text()
    assert f"f8e4m3fn[{capacity},{HIDDEN}]" in text and f"f16[{capacity},{HIDDEN}]" not in text

    backward = lambda x, idx: jax.grad(lambda x: jnp.sum(forward(x, idx)))(x)
    jaxpr = str(jax.make_jaxpr(testing.on_ranks(backward, make_mesh(RANKS)))(x, idx))
    named = [line for line in jaxpr.splitlines() if "name=jax_ep_recv" in line]
    assert named and not any(f"f16[{capacity}" in line.replace("bf16", "") for line in named)
    assert {op: jaxpr.count(f"= jax_ep_{op}[") for op in ("dispatch", "combine")} == {"dispatch": 1, "combine": 1}


def test_pairs_of_other_formats(make_mesh, data):
    """Packed codes beside a carrier of another width, no scale, no carrier; gradients of carrier and weights."""
    idx, rng = data[1], np.random.default_rng(0)
    codes = rng.integers(0, 256, (RANKS, TOKENS, 64)).astype(np.uint8)
    scale = rng.integers(0, 256, (RANKS, TOKENS, 9)).astype(np.uint8).view(ml_dtypes.float8_e8m0fnu)
    carrier = np.zeros((RANKS, TOKENS, 128), ml_dtypes.bfloat16)
    w = rng.random(idx.shape).astype(np.float32)

    def run(codes, scale, carrier, idx, w):
        def f(carrier, w):
            recv = send(jax_ep.Quantized(codes, scale, carrier), idx, w)
            return jnp.sum(recv.x.carrier * jnp.bfloat16(3)) + jnp.sum(recv.weights).astype(jnp.bfloat16), recv.x

        def bare(w):
            recv = send(jax_ep.Quantized(codes, None), idx, w)
            assert recv.x.scale is None and recv.x.carrier is None
            return jnp.sum(recv.weights * 2), (recv.x.data, recv.handle)

        grads, pair = jax.grad(f, (0, 1), has_aux=True)(carrier, w)
        g_bare, (bare, handle) = jax.grad(bare, has_aux=True)(w)
        again = jax_ep.dispatch(jax_ep.Quantized(codes, scale), handle=handle).x
        return grads, pair, g_bare, bare, again

    result = testing.on_ranks(run, make_mesh(RANKS))(codes, scale, carrier, idx, w)
    (g_carrier, g_w), pair, g_bare, bare, again = jax.tree.map(np.asarray, result)
    oracle = testing.oracle_dispatch(codes, idx, num_experts=EXPERTS)
    for got in (pair.data, bare, again.data):
        testing.same_bits(got, oracle.x)
    for got in (pair.scale, again.scale):
        testing.same_bits(got, testing.oracle_redispatch(oracle, scale))
    assert pair.carrier.shape == (*oracle.x.shape[:2], 128) and again.carrier is None
    num_rows = (idx >= 0).sum(-1, keepdims=True)
    testing.same_bits(g_carrier, np.broadcast_to(3 * num_rows, carrier.shape).astype(carrier.dtype))
    testing.same_bits(g_w, (idx >= 0).astype(np.float32))
    testing.same_bits(g_bare, 2 * (idx >= 0).astype(np.float32))


def check_products(mesh, num_ranks, dtype):
    """The scaled partial sums are rounded before they are added, as users compile: no fused multiply-add."""
    kwargs = dict(num_experts=2 * num_ranks, layout="token")
    column = np.arange(2, dtype=np.int32)  # on two ranks where there are so many, whose products are added
    idx = np.tile(2 * ((np.arange(32, dtype=np.int32)[:, None] + column) % num_ranks) + column, (num_ranks, 1, 1))
    x, bias = (testing.random_rows((num_ranks, 32, HIDDEN), dtype, seed) for seed in (0, 1))
    oracle = testing.oracle_dispatch(x, idx, **kwargs)
    y = testing.random_rows(oracle.x.shape, dtype, 2)

    def run(x, idx, y, bias):
        handle = jax_ep.dispatch(x, idx, axis_name="ep", implementation="xla", **kwargs).handle
        return jax_ep.combine(y, handle, bias=bias, quantize="fp8_wire")

    out = testing.on_ranks(run, mesh)(x, idx, y, bias)
    expected = testing.oracle_combine(oracle, y, bias=bias, quantize="fp8_wire")
    testing.same_bits(out, expected)
    if dtype == "float32" and num_ranks == 1:  # a fused multiply-add would have been noticed
        codes, scale = testing.oracle_quantize(y)
        exact = codes.astype(np.float64) * np.repeat(scale.astype(np.float64), 128, -1) + bias
        assert (exact.astype(np.float32) != expected).any()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_products_stay_apart_from_sums(make_mesh, num_ranks, dtype):
    """`check_products` with one rank, where the compiler sees through the loop over ranks, and with more."""
    check_products(make_mesh(num_ranks), num_ranks, dtype)


@pytest.mark.parametrize("quantize", ["fp8", "fp8_ue8m0"])
def test_bad_tokens_spoil_no_others(make_mesh, data, quantize):
    """B28: NaN, infinities and the largest number in single tokens; all others as without them, forward and back."""
    x, idx = data[0].astype(ml_dtypes.bfloat16), data[1]
    bad = x.copy()
    for token, value in enumerate((np.nan, np.inf, -np.inf, ml_dtypes.finfo(ml_dtypes.bfloat16).max)):
        bad[0, token, token::7] = value

    def run(x, idx):
        recv = send(x, idx, quantize=quantize)
        return recv.x.data, jax_ep.combine(recv.x.dequantize(), recv.handle, quantize="fp8_wire")

    program = testing.on_ranks(run, make_mesh(RANKS))
    (data_bad, out_bad), (data_good, out_good) = program(bad, idx), program(x, idx)
    oracle = testing.oracle_dispatch(x, idx, num_experts=EXPERTS)
    fine = np.ones(oracle.x.shape[:2], bool)
    for source, token, _, rank, row in oracle.entries():
        fine[rank, row] = source > 0 or token > 3
    testing.same_bits(np.asarray(data_bad)[fine], np.asarray(data_good)[fine])
    out_bad, out_good = np.asarray(out_bad), np.asarray(out_good)
    testing.same_bits(out_bad[1:], out_good[1:])
    testing.same_bits(out_bad[0, 4:], out_good[0, 4:])
    is_nan = np.isnan(np.asarray(data_bad).astype(np.float32))
    assert is_nan.any() == (idx[0, 0] >= 0).any() and not is_nan[fine].any()


@pytest.mark.parametrize("layout", shapes.LAYOUTS)
def test_no_tokens(make_mesh, layout):
    """B01, B27: no token at all."""

    def run(x, idx):
        recv = send(x, idx, layout=layout, quantize="fp8_ue8m0", capacity=4)
        grad = jax.grad(lambda x: jnp.sum(send(x, idx, layout=layout, quantize="fp8_wire", capacity=4).x))(x)
        return recv.x, grad, jax_ep.combine(recv.x.dequantize(), recv.handle, quantize="fp8_wire")

    x, idx = np.zeros((RANKS, 0, HIDDEN), np.float32), np.zeros((RANKS, 0, TOPK), np.int32)
    pair, grad, out = testing.on_ranks(run, make_mesh(RANKS))(x, idx)
    assert grad.shape == out.shape == x.shape
    assert not np.asarray(pair.data).view(np.uint8).any() and not np.asarray(pair.scale).view(np.uint8).any()


def test_mistakes(make_mesh, data):
    """What was got, what was expected, what to change."""
    idx = data[1]

    def trace(run, x=data[0]):
        testing.on_ranks(run, make_mesh(RANKS)).trace(x, idx)

    def pair(**parts):
        def run(x, idx):
            q = jax_ep.quantize(x)
            return send(jax_ep.Quantized(**{"data": q.data, "scale": q.scale, **parts}), idx).x.data

        return run

    with pytest.raises(ValueError, match="quantize='fp4', expected 'fp8' or 'fp8_ue8m0' or 'fp8_wire'"):
        trace(lambda x, idx: send(x, idx, quantize="fp4").x)
    with pytest.raises(ValueError, match="dispatch: .* to quantise.*multiple of 128"):
        trace(lambda x, idx: send(x[:, :64], idx, quantize="fp8").x)
    with pytest.raises(ValueError, match="quantize='fp8' for x that is Quantized already.*x.dequantize"):
        trace(lambda x, idx: send(jax_ep.quantize(x), idx, quantize="fp8").x)
    with pytest.raises(ValueError, match="quantize='fp8', expected 'fp8_wire'"):
        trace(lambda x, idx: jax_ep.combine(x, send(x, idx, capacity=TOKENS).handle, quantize="fp8"))
    with pytest.raises(ValueError, match="combine: got y .* to quantise"):
        trace(lambda x, idx: jax_ep.combine(x[:, :64], send(x, idx, capacity=TOKENS).handle, quantize="fp8_wire"))
    with pytest.raises(TypeError, match=r"y of type Quantized, expected an array; pass y.dequantize\(\)"):
        trace(lambda x, idx: jax_ep.combine(jax_ep.quantize(x), send(x, idx, capacity=TOKENS).handle))
    with pytest.raises(ValueError, match=r"x.scale of shape \(5, 1\), expected \[6, width\]"):
        trace(pair(scale=jnp.zeros((5, 1))))
    with pytest.raises(ValueError, match=r"x.data of shape \(6, 24\).*rows of 24 bytes"):
        trace(pair(data=jnp.zeros((6, 24), jnp.uint8)))
    with pytest.raises(TypeError, match=r"x.data of dtype int4.*pack it into uint8"):
        trace(pair(data=jnp.zeros((6, 64), jnp.int4)))
    with pytest.raises(ValueError, match=r"x.carrier of shape \(5, 8\), expected \[6, hidden\]"):
        trace(pair(carrier=jnp.zeros((5, 8))))
    with pytest.raises(TypeError, match="x.carrier of dtype int32"):
        trace(pair(carrier=jnp.zeros((6, 8), jnp.int32)))
    with pytest.raises(ValueError, match=r"x of shape \(5, 128\), expected \[6, hidden\]"):
        trace(lambda x, idx: jax_ep.dispatch(jax_ep.quantize(x[:5]), handle=send(x, idx).handle).x.data)
