"""The pure-JAX implementation against the oracle (exchange_cases.py says what is covered), and the oracle itself."""

import math
import re

import jax.numpy as jnp
import numpy as np
import pytest
from exchange_cases import ExchangeCases, Sizes

import jax_ep
from jax_ep import testing


class TestReference(ExchangeCases):
    implementation = "xla"


def test_default_is_the_reference_on_cpu():
    """implementation=None takes what the platform has."""
    cases = ExchangeCases()
    sizes = Sizes(2, 4)
    cases.run(sizes, cases.routing("uniform", sizes))


def test_oracle_by_hand():
    """The worked example of the documentation, written out: the oracle is not only equal to what it checks."""
    x = np.arange(1, 5, dtype=np.float32).reshape(2, 2, 1) * np.ones(4, np.float32)
    idx = np.array([[[0, 2], [1, 0]], [[3, -1], [0, 3]]], np.int32)
    w = np.array([[[0.75, 0.25], [0.5, 0.5]], [[1, np.nan], [0.25, 0.75]]], np.float32)
    expert = testing.oracle_dispatch(x, idx, w, num_experts=4)
    assert expert.x[..., 0].tolist() == [[1, 2, 4, 2, 0, 0, 0, 0], [1, 3, 4, 0, 0, 0, 0, 0]]
    assert expert.group_sizes.tolist() == [[3, 1], [1, 2]]
    assert expert.dst_row.tolist() == [[[0, 0], [3, 1]], [[1, -1], [2, 2]]]
    token = testing.oracle_dispatch(x, idx, w, num_experts=4, layout="token")
    assert token.x[..., 0].tolist() == [[1, 2, 4, 0], [1, 3, 4, 0]]
    assert token.slot_meta.tolist() == [[[0, -1], [1, 0], [0, -1], [-1, -1]], [[-1, 0], [1, -1], [-1, 1], [-1, -1]]]
    y = expert.x * np.array([[1, 1, 1, 2, 1, 1, 1, 1], [3, 4, 4, 1, 1, 1, 1, 1]], np.float32)[..., None]
    assert testing.oracle_combine(expert, y, expert.weights)[..., 0].tolist() == [[1.5, 3], [12, 13]]


def test_checks_notice_one_wrong_row():
    """B41: the comparison itself must see a single stale row, a sign of zero, and a swapped pair."""
    good = testing.code_rows(2, 8, 16, "bfloat16")
    for damage in (lambda a: a[1, 3].fill(0), lambda a: a[0, [0, 1]].__setitem__(slice(None), a[0, [1, 0]])):
        bad = good.copy()
        damage(bad)
        if (bad == good).all():
            bad[0, [0, 1]] = bad[0, [1, 0]]
        with pytest.raises(AssertionError, match="values differ"):
            testing.same_bits(bad, good, "rows")
    with pytest.raises(AssertionError):
        testing.same_bits(np.float32([-0.0]), np.float32([0.0]))
    with pytest.raises(AssertionError):
        testing.within(np.float32([np.nan]), np.float32([0]), np.inf)


def test_memory_does_not_grow_with_experts(make_mesh):
    """No intermediate of the reference is [num_experts, rows]: the largest array stays the gathered rows."""

    def largest(num_experts):
        def send(x, idx):
            recv = jax_ep.dispatch(x, idx, num_experts=num_experts, axis_name="ep", layout="token")
            return jax_ep.combine(recv.x, recv.handle)

        x, idx = np.zeros((2, 64, 8), np.float32), np.zeros((2, 64, 2), np.int32)
        text = testing.on_ranks(send, make_mesh(2)).lower(x, idx).as_text()
        shapes = re.findall(r"tensor<((?:\d+x)+)[a-z]", text)
        return max(math.prod(int(n) for n in shape.split("x")[:-1]) for shape in shapes)

    assert largest(256) == largest(4) == 2 * 64 * 8


def test_rounding_is_not_kept_back(make_mesh):
    """XLA may keep f32 precision between converts; the result of combine is rounded all the same."""
    y = testing.random_rows((1, 14, 16), "bfloat16")

    def run(x, idx, w, y):
        recv = jax_ep.dispatch(x, idx, num_experts=2, axis_name="ep")
        out = jax_ep.combine(y * jnp.bfloat16(1.25), recv.handle, weights=w)
        return out, out.astype(jnp.float32)

    sizes = Sizes(1, 2, num_topk=2)
    idx = testing.routing("uniform", num_ranks=1, num_tokens=7, num_topk=2, num_experts=2)
    x = testing.code_rows(1, 7, 16, sizes.dtype)
    w = np.random.default_rng(0).random((1, 14)).astype(np.float32)
    out, wide = testing.on_ranks(run, make_mesh(1))(x, idx, w, y)
    testing.same_bits(wide, np.asarray(out).astype(np.float32))
    oracle = testing.oracle_dispatch(x, idx, num_experts=2)
    scaled = np.asarray(y * jnp.bfloat16(1.25))
    testing.within(
        out, testing.oracle_combine(oracle, scaled, w), testing.combine_tolerance(oracle, scaled, w), "combine"
    )


@pytest.mark.parametrize(("dtype", "side_dtype"), [("float8_e4m3fn", "float32"), ("uint8", "float8_e8m0fnu")])
@pytest.mark.parametrize("layout", ["expert", "token"])
def test_opaque_rows_and_their_side_array(make_mesh, layout, dtype, side_dtype):
    """Rows of a dtype that has no sums, every bit pattern of it, arrive unread, and so do the side rows with them."""
    kwargs = dict(num_experts=4, layout=layout, capacity=12)

    def send(x, side, idx):
        recv = jax_ep.dispatch(jax_ep.Quantized(x, side), idx, axis_name="ep", **kwargs)
        return recv.x, jax_ep.dispatch(jax_ep.Quantized(x, side), handle=recv.handle).x

    x = np.arange(2 * 7 * 32).astype(np.uint8).reshape(2, 7, 32)
    side = np.arange(2 * 7 * 3).reshape(2, 7, 3).astype(side_dtype)
    idx = testing.routing("masked", num_ranks=2, num_tokens=7, num_topk=2, num_experts=4)
    oracle = testing.oracle_dispatch(x, idx, **kwargs)
    for pair in testing.on_ranks(send, make_mesh(2))(x.view(dtype), side, idx):
        testing.same_bits(np.asarray(pair.data).view(np.uint8), oracle.x, "rows")
        testing.same_bits(pair.scale, testing.oracle_redispatch(oracle, side), "side")
