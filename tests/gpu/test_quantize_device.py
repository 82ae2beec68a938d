"""The pure-JAX quantiser as XLA compiles it for a GPU: the bits of the NumPy oracle, as on a CPU.

One process, one device, no extension: what the fused kernels are compared with must itself be exact there.
"""

import jax
import numpy as np
import pytest
from test_fp8 import check_products
from test_quantize import KINDS, check_bits


@pytest.fixture(autouse=True)
def _needs_gpu():
    if jax.default_backend() != "gpu":
        pytest.skip("needs a CUDA device")


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("kind", KINDS)
def test_every_bit(kind, dtype):
    """B27: no division, contraction or flush to zero of this backend reaches a result."""
    check_bits(kind, dtype)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_products_of_one_rank(dtype):
    """Combine adds rounded products here, too."""
    check_products(jax.sharding.Mesh(np.array(jax.local_devices()[:1]), ("ep",)), 1, dtype)
