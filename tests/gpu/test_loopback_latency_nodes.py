"""Kernels of latency mode over several nodes, without XLA: the cases of test_loopback_nodes.py, fused and split, over
the test transport, against the NumPy oracle of the same rounding tree.

So all results are bit-equal to throughput mode over nodes. Puts are done in order, and late and in any order, but for a
put before its own word. Also: late ranks, many calls, credits that cross nodes, ranks that never come, programs that
differ; puts are counted.
Run it alone: `JAX_PLATFORMS=cpu pytest --device gpu tests/gpu/test_loopback_latency_nodes.py`.
"""

import dataclasses
import time

import numpy as np
import pytest
from test_loopback import (
    NUM_SEEDS,
    Case,
    check,
    check_calls_1_and_1000,
    check_with_delays,
    cuda,
    inputs,
    make,
    most_experts,
)
from test_loopback_latency import check_credits, failures, loaded
from test_loopback_nodes import CASES, EIGHT, SMALL

pytestmark = pytest.mark.skipif(cuda.num_devices() == 0, reason="needs a CUDA device")


def _fits(case: Case) -> bool:
    return not case.crosses_once and case.experts <= cuda.max_latency_experts(case.ranks)


CASES_HERE = {name: case for name, case in CASES.items() if _fits(case)} | {
    "most experts": dataclasses.replace(SMALL, experts=most_experts(4, cuda.max_latency_experts), topk=4),
    # A row in as many pieces as it can have, sums of many ranks a node, and blocks fewer and more than puts of a slot.
    "14 pieces and a side": Case(
        ranks=4, nodes=2, tokens=2, topk=2, hidden=7168, sms=16, side=7, layout="token", weights=False
    ),
    "3 pieces of 7 scales": Case(
        ranks=2, nodes=2, tokens=2, topk=2, experts=4, hidden=2688, sms=16, quantize="fp8_ue8m0", weights=False
    ),
    "2 x 10": Case(ranks=20, nodes=2, tokens=7, topk=12, experts=40, sms=3, bias=True, routing="mixed"),
    # Bitmaps that find no room: rows are put where their tokens are.
    "20 ranks, many tokens": Case(
        ranks=20, nodes=2, tokens=1000, topk=2, experts=20, hidden=8, sms=2, layout="token", weights=False
    ),
    "20 ranks, some tokens": Case(
        ranks=20, nodes=2, tokens=700, topk=2, experts=20, hidden=8, sms=2, capacity=900, window=1, layout="token"
    ),
    "10 x 2, fp8 wire": Case(
        ranks=20, nodes=10, tokens=7, topk=12, experts=40, hidden=640, sms=1, wire="fp8_wire", layout="token"
    ),
}


@pytest.mark.parametrize("way", ["fused", "fused, late", "split, late"])
@pytest.mark.parametrize("bulk", [True, False], ids=["bulk", "vector"])
@pytest.mark.parametrize("name", CASES_HERE)
def test_equals_reference(name, bulk, way):
    split = way.startswith("split")
    delay = 20_000 if way.endswith("late") else 0
    case = dataclasses.replace(CASES_HERE[name], bulk=bulk, slots=4 if split else 2, split=split, put_delay_ns=delay)
    ranks = make(case)
    for seed in range(NUM_SEEDS):
        check(case, ranks, seed)


@pytest.mark.parametrize("split", [False, True], ids=["fused", "split"])
@pytest.mark.parametrize("carriers", [1, 3])
@pytest.mark.parametrize(("num_ranks", "nodes"), [(4, 2), (8, 2), (8, 4)])
def test_random_delays_and_many_calls(num_ranks, nodes, carriers, split):
    """Ranks late by up to 200 us, puts by up to 50: slots and what is put from them are used again and again."""
    check_with_delays(
        dataclasses.replace(
            EIGHT, ranks=num_ranks, nodes=nodes, layout="token", carriers=carriers, put_delay_ns=50_000,
            slots=3 if split else 2, split=split,
        )
    )  # fmt: skip


@pytest.mark.parametrize("late", [False, True], ids=["in order", "late"])
def test_call_1000_equals_call_1(late):
    case = dataclasses.replace(EIGHT, nodes=2, hidden=64, layout="token", slots=2, put_delay_ns=5_000 if late else 0)
    check_calls_1_and_1000(case)


def test_starts_wait_for_the_credits_of_late_ranks():
    """Credits come by puts here, late and in any order."""
    check_credits(dataclasses.replace(SMALL, tokens=48, hidden=512, slots=2, split=True, put_delay_ns=30_000))


@pytest.mark.parametrize("late", [False, True], ids=["in order", "late"])
@pytest.mark.parametrize("op", ["dispatch", "redispatch", "combine"])
@pytest.mark.parametrize("absent", [0, 3])
def test_absent_rank_is_named_on_every_node(absent, op, late):
    """On its node and on the other one; carriers of calls that fail end, too."""
    case = dataclasses.replace(SMALL, layout="token", tokens=16, slots=2, put_delay_ns=20_000 if late else 0)
    ranks = loaded(case, timeout_s=0.5)
    ranks.launch("dispatch")
    ranks.synchronize()
    assert not any(f["code"] for f in failures(ranks, case))
    result = "out" if op == "combine" else "recv_x"
    begin = time.monotonic()
    ranks.launch(op, absent=[absent])
    ranks.synchronize()
    others = [rank for rank in range(4) if rank != absent]
    for rank in others:
        failure = ranks.failure(rank)
        assert (failure["code"], failure["peer"], failure["rank"]) == (1, absent, rank), failure  # PeerTimeout
        assert set(ranks.read(result, rank)) == {0xFF}  # NaN
    # What the others sent before they left waits for the late rank, which completes this call and learns in the next.
    ranks.launch(op, absent=others)
    ranks.synchronize()
    assert ranks.failure(absent)["code"] == 0, ranks.failure(absent)
    ranks.launch(op)
    ranks.synchronize()
    assert ranks.failure(absent)["code"] == 4, ranks.failure(absent)  # PeerFailed
    for rank in range(case.ranks):
        assert set(ranks.read(result, rank)) == {0xFF}
    assert time.monotonic() - begin < 4, "a carrier waited for a call that had ended"  # it gives up after 16 limits
    ranks.reset()
    check(case, ranks, 0)


@pytest.mark.parametrize("differs", [0, 3])
def test_ranks_that_run_different_programs(differs):
    """Another window on one rank: all find a flag with another tag, across nodes, too."""
    case = dataclasses.replace(SMALL, tokens=8, hidden=64, slots=2, window=0)
    ranks = loaded(case, timeout_s=5)
    ranks.write("window", differs, np.array([1], np.int32).tobytes())
    ranks.launch("dispatch")
    ranks.synchronize()
    assert all(f["code"] == 3 for f in failures(ranks, case)), failures(ranks, case)


def test_a_done_runs_once():
    """Sources overwrite what was received once."""
    case = dataclasses.replace(SMALL, tokens=8, hidden=64, slots=3)
    ranks = loaded(case, timeout_s=5)
    for name in ("dispatch_start", "dispatch_done"):
        ranks.launch(name)
    ranks.synchronize()
    assert not any(f["code"] for f in failures(ranks, case))
    ranks.launch("dispatch_done")
    ranks.synchronize()
    assert all(f["code"] == 3 for f in failures(ranks, case)), failures(ranks, case)  # Mismatch


@pytest.mark.parametrize("split", [False, True], ids=["fused", "split"])
@pytest.mark.parametrize("layout", ["expert", "token", "batched"])
@pytest.mark.parametrize(("num_ranks", "nodes"), [(4, 2), (8, 4)])
def test_one_row_per_token_and_rank(num_ranks, nodes, layout, split):
    """Rows of dispatch and sums of combine that each rank puts are as many as tokens reach ranks of other nodes."""
    case = dataclasses.replace(
        EIGHT, ranks=num_ranks, nodes=nodes, layout=layout, routing="mixed", slots=3 if split else 2
    )
    ranks = loaded(case, timeout_s=20)
    ids = inputs(case, 0)["topk_idx"]
    is_routed = (ids >= 0) & (ids < case.experts)
    rank_of = np.where(is_routed, ids // (case.experts // num_ranks), -1)
    reached = np.stack([(rank_of == r).any(-1).sum(1) for r in range(num_ranks)], -1)  # [source, rank] tokens
    node = np.arange(num_ranks) // (num_ranks // nodes)
    reached[node[:, None] == node] = 0
    for op, wanted in (("dispatch", reached.sum(1)), ("combine", reached.sum(0)), ("redispatch", reached.sum(1))):
        before = [ranks.rows_put(rank) for rank in range(num_ranks)]
        for part in (f"{op}_start", f"{op}_done") if split else (op,):
            ranks.launch(part)
        ranks.synchronize()
        assert not any(f["code"] for f in failures(ranks, case)), failures(ranks, case)
        assert [ranks.rows_put(rank) - before[rank] for rank in range(num_ranks)] == wanted.tolist(), op
