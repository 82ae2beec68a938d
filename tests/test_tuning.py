"""The default number of SMs and mode="auto": what the models give for known cases, and their limits.

How it reaches a call is tested in test_lowering.py, what it takes from records in test_bootstrap.py.
"""

import itertools
import math

import numpy as np
import pytest

from jax_ep import tuning
from jax_ep.tuning import Placement

W1 = dict(op="dispatch", layout="token", num_ranks=2, num_experts=256, num_topk=8, num_tokens=4096, row_bytes=14336)


def choose(placement, **changes):
    return tuning.default_num_sms(placement, **{**W1, **changes})


def nvlink(num_sms=132):
    """A GPU of its own for each rank."""
    return Placement(max_num_sms=num_sms, ranks_on_gpu=1, group_on_gpu=1)


def one_gpu(num_ranks, num_sms=132):
    return Placement(max_num_sms=num_sms // num_ranks, ranks_on_gpu=num_ranks, group_on_gpu=num_ranks)


@pytest.mark.parametrize(("num_ranks", "expected"), [(1, 1.0), (2, 1.99), (4, 3.61), (8, 5.29), (256, 8.0)])
def test_expected_ranks(num_ranks, expected):
    assert tuning.ranks_per_token(num_ranks, 256, 8)[0] == pytest.approx(expected, abs=0.01)


def test_expected_ranks_by_counting():
    """Over all choices of 3 of 6 experts on 3 ranks; also more entries than experts, which replicas allow."""
    choices = list(itertools.combinations(range(6), 3))
    held = [[sum(e // 2 == d for e in choice) for d in range(3)] for choice in choices]
    reached = np.mean([sum(n > 0 for n in ranks) for ranks in held])
    several = np.mean([sum(n > 1 for n in ranks) for ranks in held])
    assert tuning.ranks_per_token(3, 6, 3) == pytest.approx((reached, several))
    assert tuning.ranks_per_token(2, 2, 8) == (2.0, 0.0)


def test_rows_touched():
    """W1 at R = 8: what the limits of docs/performance.md count, in rows per token."""
    rows = lambda op, layout: tuning.rows_touched(op, layout, 8, 256, 8)
    assert rows("dispatch", "token") == rows("combine", "token") == pytest.approx(6.29, abs=0.01)
    assert rows("dispatch", "expert") == rows("dispatch", "batched") == pytest.approx(11.08, abs=0.1)
    assert rows("combine", "expert") == pytest.approx(13.2, abs=0.1)


@pytest.mark.parametrize("op", ["dispatch", "combine"])
@pytest.mark.parametrize("num_ranks", [2, 4, 8])
def test_nvlink(num_ranks, op):
    """Measured at R = 2: 12 SMs reach 93 % of what 32 do, 16 SMs 98 %, and 8 not two thirds."""
    assert 12 <= choose(nvlink(), num_ranks=num_ranks, op=op) <= 16


def test_one_gpu():
    """The ranks share its SMs, and together they ask for about what fills its memory's rate."""
    for num_ranks in (2, 4, 8):
        got = choose(one_gpu(num_ranks), num_ranks=num_ranks)
        assert 0.6 * 132 <= got * num_ranks <= 132


def test_decode():
    """Small calls are mostly protocol: few SMs, the fewest for a handful of tokens."""
    assert choose(nvlink(), num_tokens=128) <= 8
    for placement in (nvlink(), one_gpu(2)):
        assert choose(placement, num_tokens=16) == choose(placement, num_tokens=0) == tuning.LEAST_SMS


@pytest.mark.parametrize("op", ["dispatch", "combine"])
@pytest.mark.parametrize("layout", ["token", "expert", "batched"])
@pytest.mark.parametrize("placement", [nvlink(), one_gpu(2), one_gpu(8), Placement(66, 2, 1)], ids=str)
def test_limits_and_order(placement, layout, op):
    """Never less for more bytes; always within the limits, also where a GPU has fewer SMs than the least."""
    num_ranks = max(2, placement.group_on_gpu)
    given = dict(op=op, layout=layout, num_ranks=num_ranks)
    for name, values in (("num_tokens", [2**n for n in range(15)]), ("row_bytes", [2**n for n in range(4, 18)])):
        got = [choose(placement, **given, **{name: value}) for value in values]
        assert got == sorted(got)
        assert got[0] >= tuning.LEAST_SMS and got[-1] <= min(tuning.MOST_SMS, placement.max_num_sms)
    tight = Placement(3, placement.ranks_on_gpu, placement.group_on_gpu)
    assert choose(tight, **given) == 3


def test_one_rank():
    """A group of one moves rows within its GPU."""
    assert tuning.LEAST_SMS <= choose(Placement(132, 1, 1), num_ranks=1) <= tuning.MOST_SMS


def test_constants_are_of_one_measurement():
    """At W1 over NVLink, R = 2, both rates of an SM ask for about the same number: they were measured together."""
    payload = 4096 * 14336
    reached, _ = tuning.ranks_per_token(2, 256, 8)
    touched, crossed = payload * (1 + reached), payload * reached / 2
    assert math.isclose(touched / tuning.SM_RATE, crossed / tuning.SM_LINK_RATE, rel_tol=0.05)


W2 = dict(
    op="dispatch", num_ranks=8, num_experts=256, num_topk=8, num_tokens=128, row_bytes=14336, slots_bytes=32 << 20
)


def prefers_latency(placement, **changes):
    return tuning.prefers_latency(placement, **{**W2, **changes})


def test_mode_by_bytes_that_a_rank_sends():
    """128 tokens of 14 KiB to 5.29 of 8 ranks are 9.3 MiB; a GPU that ranks share prefers less, combine on it least."""
    assert prefers_latency(nvlink()) and not prefers_latency(nvlink(), num_tokens=256)
    assert not prefers_latency(one_gpu(8)) and prefers_latency(one_gpu(8), num_tokens=32)
    assert not prefers_latency(one_gpu(8), op="combine", num_tokens=32)
    sent = lambda placement, **op: max(
        n for n in range(1, 13000) if prefers_latency(placement, num_ranks=1, num_tokens=n, row_bytes=1024, **op)
    )
    assert sent(nvlink()) * 1024 == sent(nvlink(), op="combine") * 1024 == tuning.LATENCY_BYTES_ALONE
    for op, limit in tuning.LATENCY_BYTES_SHARED.items():
        assert sent(one_gpu(2), op=op) * 1024 == limit


def test_mode_by_bytes_of_slots():
    """Slots grow with ranks times tokens, whatever is sent."""
    few = dict(num_tokens=8, slots_bytes=tuning.LATENCY_SLOTS_BYTES)
    assert prefers_latency(nvlink(), **few)
    assert not prefers_latency(nvlink(), **{**few, "slots_bytes": tuning.LATENCY_SLOTS_BYTES + 1})


@pytest.mark.parametrize(
    ("num_tokens", "num_ranks", "placement", "expected"),
    [
        (0, 8, nvlink(), tuning.LEAST_SMS),
        (1, 1, nvlink(), tuning.LEAST_SMS),
        (32, 4, nvlink(), 32 * 4 // tuning.LATENCY_PIECES_PER_SM),
        (33, 4, nvlink(), 32 * 4 // tuning.LATENCY_PIECES_PER_SM + 1),
        (4096, 8, nvlink(), tuning.LATENCY_MOST_SMS),
        (4096, 16, one_gpu(16), 132 // 16),
        (4096, 2, nvlink(num_sms=2), 2),
    ],
)
def test_latency_num_sms(num_tokens, num_ranks, placement, expected):
    assert tuning.latency_num_sms(placement, num_ranks=num_ranks, num_tokens=num_tokens) == expected


NODES = dict(op="dispatch", layout="token", num_nodes=2, num_ranks=8, num_experts=256, num_topk=8)
CALL = dict(num_tokens=4096, row_bytes=14336)


def test_rows_over_nodes():
    """W1: what docs/performance.md counts, per token; the call's SMs and the carrier's together."""
    counted = {(8, 2): (10.3, 12.3), (8, 4): (17.1, 19.1), (4, 2): (8.6, 10.6)}
    for (num_ranks, num_nodes), expected in counted.items():
        for op, rows in zip(("dispatch", "combine"), expected, strict=True):
            got = tuning.node_rows(**{**NODES, "op": op, "num_ranks": num_ranks, "num_nodes": num_nodes})
            assert sum(got) == pytest.approx(rows, abs=0.05)
    assert tuning.node_rows(**{**NODES, "num_nodes": 4})[1] == pytest.approx(2 * 3 * 0.9035, abs=0.01)


@pytest.mark.parametrize(
    ("num_ranks", "num_nodes", "carriers", "beside"), [(8, 2, 3, 13), (8, 4, 5, 11), (4, 2, 8, 25)]
)
def test_carriers_keep_pace_and_share(num_ranks, num_nodes, carriers, beside):
    """W1 on one GPU: together with the call's SMs all that the rank has, in the ratio of their rows."""
    sizes = {**NODES, "num_ranks": num_ranks, "num_nodes": num_nodes}
    placement = one_gpu(num_ranks)
    assert tuning.node_sms(placement, None, **sizes, **CALL) == carriers
    num_sms = choose(placement, num_ranks=num_ranks)
    assert tuning.node_num_sms(placement, num_sms, carriers) == beside
    moved, carried = tuning.node_rows(**sizes)
    assert abs(carriers / beside - carried / moved) < 0.06


def test_carriers_beside_what_was_asked():
    """Config.node_sms goes first; beside Config.num_sms there is what is left, at least one."""
    placement = one_gpu(8)
    assert tuning.node_sms(placement, 9, **NODES, **CALL) == 9
    assert tuning.node_sms(placement, None, 12, **NODES, **CALL) == 3
    assert [tuning.node_sms(placement, None, n, **NODES, **CALL) for n in (4, 15, 16)] == [1, 1, 1]
    assert tuning.node_sms(None, None, **NODES, **CALL) == tuning.NODE_FALLBACK_SMS
    assert tuning.node_sms(nvlink(), None, 132 - 16, **{**NODES, "num_nodes": 8}, **CALL) == tuning.NODE_MOST_SMS


def test_carriers_of_latency_mode():
    """One for each put of a slot's rows where there is room; Config goes first, as in throughput mode."""
    got = [
        tuning.latency_node_sms(placement, None) for placement in (nvlink(), one_gpu(8), one_gpu(33), nvlink(num_sms=2))
    ]
    assert got == [4, 4, 1, 1]
    assert tuning.latency_node_sms(one_gpu(8), 9) == 9
    assert [tuning.latency_node_sms(one_gpu(8), None, n) for n in (13, 15, 16)] == [3, 1, 1]
    assert tuning.latency_node_sms(None, None) == tuning.NODE_FALLBACK_SMS
