"""Quantisers on a GPU: the bits of the NumPy oracle, as on a CPU.

One process, one device. The pure-JAX one as XLA compiles it there (what the kernels are compared with must itself be
exact), and that of the kernels, in dispatch and in combine, without XLA: every bfloat16 and float16 pattern in blocks
of several largest values, and float32 values with ties between codes.
"""

import functools

import jax
import numpy as np
import pytest
from test_fp8 import check_products
from test_quantize import KINDS, check_bits, every_pattern, float32_values

from jax_ep import testing

DTYPES = {"bfloat16": 0, "float16": 1, "float32": 2}  # the kernels' codes
QUANTIZE = {None: 0, "fp8": 1, "fp8_ue8m0": 2, "fp8_wire": 3}


@pytest.fixture(autouse=True)
def _needs_gpu():
    if jax.default_backend() != "gpu":
        pytest.skip("needs a CUDA device")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", KINDS)
def test_every_bit(kind, dtype):
    """B27: no division, contraction or flush to zero of this backend reaches a result."""
    check_bits(kind, dtype)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_products_of_one_rank(dtype):
    """Combine adds rounded products here, too."""
    check_products(jax.sharding.Mesh(np.array(jax.local_devices()[:1]), ("ep",)), 1, dtype)


@functools.cache
def rows(dtype: str, hidden: int) -> np.ndarray:
    """The values of tests/test_quantize.py in rows of `hidden` channels."""
    x = float32_values() if dtype == "float32" else every_pattern(np.dtype(dtype))
    return np.resize(x, (-(-x.size // hidden), hidden))


def one_rank(x: np.ndarray, bulk: bool, quantize: str | None = None, wire: str | None = None):
    """A rank that sends the rows of x to itself and combines them, in the token layout: all keep their places."""
    cuda = pytest.importorskip("jax_ep._cuda", reason="needs the CUDA extension")
    rank = cuda.Loopback(
        num_ranks=1, num_tokens=len(x), num_topk=1, num_experts=1, row_bytes=x[0].nbytes, capacity=len(x), layout=1,
        dtype=DTYPES[str(x.dtype)], has_weights=False, use_bulk=bulk, quantize=QUANTIZE[quantize], wire=QUANTIZE[wire],
    )  # fmt: skip
    rank.write("topk_idx", 0, np.zeros(len(x), np.int32).tobytes())
    for name in ("x", "y"):
        rank.write(name, 0, x.tobytes())
    for name in ("recv_x", "recv_side", "partial", "out"):
        if rank.bytes(name):
            rank.fill(name, 0xAB)
    for op in ("dispatch", "combine"):
        rank.launch(op)
    rank.synchronize()
    assert rank.failure(0)["code"] == 0

    def result(name, shape, dtype):
        return np.frombuffer(rank.read(name, 0), dtype).reshape(shape)

    return result


@pytest.mark.parametrize("bulk", [True, False], ids=["bulk", "vector"])
@pytest.mark.parametrize("hidden", [384, 7168])  # less than a step of a warp, and several parts of a row
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", KINDS)
def test_dispatch_kernel(kind, dtype, hidden, bulk):
    """B27, B28: dispatch(quantize=) as the kernel does it."""
    x = rows(dtype, hidden)
    data, scale = testing.oracle_quantize(x, kind)
    result = one_rank(x, bulk, quantize=kind)
    testing.same_bits(result("recv_x", data.shape, data.dtype), data, "data")
    testing.same_bits(result("recv_side", scale.shape, scale.dtype), scale, "scale")


@pytest.mark.parametrize("bulk", [True, False], ids=["bulk", "vector"])
@pytest.mark.parametrize("hidden", [384, 7168])
@pytest.mark.parametrize("dtype", DTYPES)
def test_combine_kernel(dtype, hidden, bulk):
    """B27, B28: combine(quantize="fp8_wire"): what crosses, and what it becomes. Sums begin at +0, so -0 becomes +0."""
    x = rows(dtype, hidden)
    with np.errstate(invalid="ignore"):  # signalling NaN
        data, scale = testing.oracle_quantize((x.astype(np.float32) + np.float32(0)).astype(x.dtype))
    result = one_rank(x, bulk, wire="fp8_wire")
    # Groups of 512 channels: codes, then four scales; the last one may be half empty.
    num_groups = -(-hidden // 512)
    groups = result("partial", (len(x), num_groups, 528), np.uint8)
    codes = groups[..., :512].reshape(len(x), -1)[:, :hidden]
    scales = np.ascontiguousarray(groups[..., 512:]).view(np.float32).reshape(len(x), -1)[:, : hidden // 128]
    testing.same_bits(codes, data.view(np.uint8), "data")
    testing.same_bits(scales, scale, "scale")
    with np.errstate(over="ignore"):
        expected = (testing.oracle_dequantize(data, scale) + np.float32(0)).astype(x.dtype)
    out = result("out", x.shape, x.dtype)
    is_nan = np.isnan(expected.astype(np.float32))
    assert (np.isnan(out.astype(np.float32)) == is_nan).all()
    testing.same_bits(out[~is_nan], expected[~is_nan], "sums")
