"""Drawn routings, forward and gradient, bit for bit against the NumPy oracle: 16 through each of few compiled programs.

Every program is compiled once; group sizes, top-k, experts, capacities, alignments, dtypes, hidden sizes and layouts
vary over the programs, everything else over the routings (routing_fuzz.py). A failure names the decisions that made it.
"""

import dataclasses
import zlib

import jax
import numpy as np
import pytest
from exchange_cases import QUICK_COMPILE, Inputs, Sizes, check, exchange
from hypothesis import given, seed, settings
from hypothesis import strategies as st
from routing_fuzz import REPRODUCIBLE, exact_inputs, routings

from jax_ep import testing

ROUTINGS_PER_PROGRAM = 16

# num_ranks, num_experts, num_tokens, num_topk, hidden, dtype
PROGRAMS = [
    Sizes(1, 6, 9, 4, 24, "float32", expert_alignment=4),
    Sizes(1, 40, 3, 32, 8, "float16", capacity=64, expert_alignment=2),
    Sizes(1, 5, 8, 3, 8, "bfloat16", layout="token"),
    Sizes(1, 4, 9, 2, 4, "float32", layout="token", capacity=4),
    Sizes(2, 2, 7, 2, 8, "bfloat16"),
    Sizes(2, 4, 1, 4, 16, "float16"),
    Sizes(2, 12, 13, 3, 40, "float32", expert_alignment=16),
    Sizes(2, 8, 9, 2, 136, "bfloat16", capacity=12, expert_alignment=3),
    Sizes(2, 64, 5, 9, 8, "bfloat16", capacity=40, zero_tail=False),
    Sizes(1, 3, 9, 2, 8, "float32", layout="batched", capacity=5),
    Sizes(2, 6, 7, 3, 16, "bfloat16", layout="batched", zero_tail=False),
    Sizes(4, 12, 6, 4, 8, "float16", layout="batched", capacity=6),
    Sizes(8, 16, 5, 2, 8, "float32", layout="batched"),
    Sizes(2, 6, 7, 5, 24, "bfloat16", layout="token", capacity=9),
    Sizes(3, 9, 11, 3, 16, "bfloat16", expert_alignment=8),
    Sizes(3, 12, 7, 4, 8, "float16", capacity=20, expert_alignment=5),
    Sizes(3, 6, 5, 2, 12, "float32", capacity=1),
    Sizes(3, 9, 8, 3, 8, "bfloat16", layout="token", zero_tail=False),
    Sizes(3, 30, 6, 8, 8, "float32", layout="token", capacity=7),
    Sizes(4, 4, 6, 4, 8, "float32", expert_alignment=128),
    Sizes(4, 16, 8, 6, 8, "float16", capacity=48, expert_alignment=16),
    Sizes(4, 12, 5, 3, 20, "float32", capacity=11, zero_tail=False),
    Sizes(4, 8, 9, 8, 8, "bfloat16", layout="token"),
    Sizes(4, 32, 7, 4, 32, "float16", layout="token", capacity=8),
    Sizes(5, 10, 5, 2, 8, "bfloat16", capacity=6, expert_alignment=2),
    Sizes(6, 18, 3, 4, 8, "float32", layout="token"),
    Sizes(7, 14, 4, 3, 8, "float16", expert_alignment=7),
    Sizes(8, 8, 5, 1, 8, "bfloat16"),
    Sizes(8, 16, 6, 8, 8, "bfloat16", capacity=32, expert_alignment=8),
    Sizes(8, 24, 4, 3, 4, "float32", expert_alignment=4, zero_tail=False),
    Sizes(8, 32, 5, 6, 8, "float16", layout="token"),
    Sizes(8, 8, 7, 2, 8, "bfloat16", layout="token", capacity=10),
    Sizes(3, 6, 5, 2, 128, "bfloat16", expert_alignment=4, quantize="fp8"),
    Sizes(2, 8, 6, 3, 256, "float32", layout="token", capacity=7, quantize="fp8_ue8m0"),
    Sizes(4, 8, 5, 2, 128, "float16", layout="batched", quantize="fp8_wire"),
    Sizes(4, 8, 7, 6, 8, "bfloat16", layout="token", ranks_per_node=2),
    Sizes(8, 16, 5, 9, 8, "float16", capacity=40, expert_alignment=4, ranks_per_node=3),
]

# Called with a window that is drawn too.
WINDOWED = [
    Sizes(2, 6, 7, 3, 8, "bfloat16", capacity=8, expert_alignment=4),
    Sizes(3, 9, 6, 2, 8, "float32", layout="batched", capacity=2, zero_tail=False),
    Sizes(4, 8, 5, 4, 8, "float16", layout="token", capacity=6),
    Sizes(8, 16, 3, 2, 8, "float32", capacity=3),
    Sizes(2, 6, 6, 2, 128, "bfloat16", capacity=6, quantize="opaque"),
]


def name(sizes: Sizes) -> str:
    """What differs from the defaults, for the test's id."""
    fields = {f.name: getattr(sizes, f.name) for f in dataclasses.fields(sizes) if getattr(sizes, f.name) != f.default}
    short = {"num_ranks": "R", "num_experts": "E", "num_tokens": "T", "num_topk": "K", "hidden": "H"}
    return "-".join(
        f"{short[field]}{value}" if field in short else f"{field}={value}" for field, value in fields.items()
    )


def test_enough_routings_over_few_programs():
    programs = PROGRAMS + WINDOWED
    assert len(set(programs)) == len(programs) <= 42
    assert len(programs) * ROUTINGS_PER_PROGRAM >= 500


def check_exactly(sizes, result, inputs, oracle):
    """`check` without the tolerance of the contract, which the data here does not need."""
    check(sizes, result, inputs, oracle)
    if "weighted" in result:
        expected = testing.oracle_combine(
            oracle, inputs.y, inputs.weights, quantize=sizes.wire, ranks_per_node=sizes.ranks_per_node
        )
        testing.same_bits(result["weighted"], expected, "weighted")
        _, g_weights = testing.oracle_combine_grad(oracle, inputs.y, inputs.g_out, inputs.weights)
        testing.same_bits(result["g_weights"], g_weights, "gradient of weights")


def drawn(sizes: Sizes, mesh, step, windows):
    """Runs `step`, compiled once, on drawn routings, data and windows."""
    program = jax.jit(testing.on_ranks(step, mesh, jit=False), compiler_options=QUICK_COMPILE)

    @seed(zlib.crc32(name(sizes).encode()))
    @settings(REPRODUCIBLE, max_examples=ROUTINGS_PER_PROGRAM)
    @given(routings(sizes), st.integers(0, 99), windows)
    def run(topk_idx, data_seed, window):
        inputs, oracle = exact_inputs(sizes, topk_idx, data_seed, window)
        windows = () if window is None else (np.full(sizes.num_ranks, window, np.int32),)
        check_exactly(sizes, program(*windows, *dataclasses.astuple(inputs)), inputs, oracle)

    run()
    assert program._cache_size() == 1


@pytest.mark.parametrize("sizes", PROGRAMS, ids=name)
def test_drawn_routings(make_mesh, sizes):
    """B01, B03, B07, B08, B10, B23: results, handle, statistics and all gradients equal the oracle's bits."""
    drawn(sizes, make_mesh(sizes.num_ranks), lambda *a: exchange(sizes, Inputs(*a)), st.none())


@pytest.mark.parametrize("sizes", WINDOWED, ids=name)
def test_drawn_windows(make_mesh, sizes):
    """B23: the same of one window of the rows, the first ones and some past the end."""
    step = lambda window, *a: exchange(sizes, Inputs(*a), window)
    drawn(sizes, make_mesh(sizes.num_ranks), step, st.sampled_from((0, 1, 1, 2, 3, 1000)))
