"""Drawn routings and the data to send along them, for the fuzz tests on CPU and on a GPU.

A routing is drawn as a few decisions (skew, masked share, silent ranks, ...) with a handful of single ids on top, so
that hypothesis shrinks a failure to the decisions that matter. The data is chosen such that sums of products are exact:
what elsewhere may differ by a fused multiply-add is compared bit for bit here.
"""

import dataclasses

import numpy as np
from exchange_cases import Inputs, Sizes, make_inputs
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st

from jax_ep import testing

# What hypothesis draws depends on `seed(...)` of the test alone: a failure is the same on every machine.
REPRODUCIBLE = settings(
    deadline=None,  # the first example of a signature compiles
    database=None,
    phases=(Phase.generate, Phase.shrink),
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)


@st.composite
def routings(draw, sizes: Sizes) -> np.ndarray:
    """topk_idx i32 [num_ranks, num_tokens, num_topk]: skew, duplicates, -1, invalid ids, silent and deaf ranks."""
    s = sizes
    shape = (s.num_ranks, s.num_tokens, s.num_topk)
    rng = np.random.default_rng(draw(st.integers(0, 2**16), label="seed"))

    skew = draw(st.sampled_from((0.0, 1.0, 4.0)), label="skew")
    popularity = (1.0 + rng.permutation(s.num_experts)) ** -skew
    if draw(st.booleans(), label="an expert may repeat within a token"):
        idx = rng.choice(s.num_experts, shape, p=popularity / popularity.sum())
    else:
        noise = rng.gumbel(size=(*shape[:2], s.num_experts)) + np.log(popularity)
        idx = np.argsort(-noise, axis=-1)[..., : s.num_topk]
    idx = idx.astype(np.int64)

    ranks = st.sets(st.integers(0, s.num_ranks - 1), max_size=s.num_ranks)
    for rank in draw(ranks, label="ranks that receive nothing"):
        idx[idx // (s.num_experts // s.num_ranks) == rank] = -1
    for share, ids in (
        (draw(st.sampled_from((0.0, 0.1, 0.5, 0.95)), label="masked share"), (-1,)),
        (draw(st.sampled_from((0.0, 0.0, 0.05, 0.5)), label="invalid share"), _invalid_ids(s)),
    ):
        idx = np.where(rng.random(shape) < share, rng.choice(np.array(ids), shape), idx)
    for rank in draw(ranks, label="ranks with few tokens"):
        idx[rank, draw(st.integers(0, s.num_tokens), label="their number") :] = -1

    at = st.tuples(*(st.integers(0, n - 1) for n in shape))
    ids = st.sampled_from((-1, 0, s.num_experts - 1, *_invalid_ids(s)))
    for where, value in draw(st.lists(st.tuples(at, ids), max_size=4), label="single entries"):
        idx[where] = value
    return idx.astype(np.int32)


def exact_inputs(
    sizes: Sizes, topk_idx: np.ndarray, seed: int, window: int | None = None
) -> tuple[Inputs, testing.Oracle]:
    """`make_inputs` with integers for the rows that are weighted and powers of two for their weights.

    Products and their f32 sums are exact then, in any order, fused or not; the large integers still make every payload
    dtype but f32 round the sums. None is 0, so that no sum of zeros can differ in its sign.
    """
    inputs, oracle = make_inputs(sizes, topk_idx, seed, window)
    rng = np.random.default_rng([seed, 1])

    def like(old, values):  # NaN stays where nothing is read
        return np.where(np.isnan(old.astype(np.float32)), np.float32(np.nan), values).astype(old.dtype)

    def integers(old, largest):
        return rng.integers(1, largest + 1, old.shape) * rng.choice((-1, 1), old.shape)

    large = np.where(rng.random(inputs.y.shape) < 0.2, 2048 if sizes.dtype == "float16" else 256, 0)
    powers = 2.0 ** rng.integers(-2, 3, inputs.weights.shape) * rng.choice((-1, 1), inputs.weights.shape)
    inputs = dataclasses.replace(
        inputs,
        y=like(inputs.y, integers(inputs.y, 8) + large * rng.choice((-1, 1), large.shape)),
        weights=like(inputs.weights, powers),
        g_out=integers(inputs.g_out, 8).astype(inputs.g_out.dtype),
    )
    return inputs, oracle


def _invalid_ids(sizes: Sizes) -> tuple[int, ...]:
    return (sizes.num_experts, sizes.num_experts + 1, *testing.INVALID_IDS)
