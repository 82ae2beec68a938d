"""The kernels of latency mode without XLA: the cases of test_loopback.py, fused and split, against the same reference.

So all results are bit-equal to throughput mode. Every output is poisoned before every call. Also: random delays, many
calls, starts that run ahead of their dones, ranks that never come, tickets that are used twice.
Run it like test_loopback.py.
"""

import dataclasses
import time

import numpy as np
import pytest
import test_loopback
from test_loopback import (
    CASES,
    NUM_SEEDS,
    Case,
    check,
    check_calls_1_and_1000,
    check_with_delays,
    cuda,
    inputs,
    make,
    most_experts,
    read,
    same,
)

pytestmark = test_loopback.pytestmark


def _fits(case: Case) -> bool:
    return case.experts <= cuda.max_latency_experts(case.ranks)


@pytest.mark.parametrize("split", [False, True], ids=["fused", "split"])
@pytest.mark.parametrize("bulk", [True, False], ids=["bulk", "vector"])
@pytest.mark.parametrize("name", [name for name, case in CASES.items() if _fits(case) and not case.crosses_once])
def test_equals_reference(name, bulk, split):
    case = dataclasses.replace(CASES[name], bulk=bulk, slots=4 if split else 2, split=split)
    ranks = make(case)
    for seed in range(NUM_SEEDS):
        check(case, ranks, seed)


WIDE = Case(ranks=40, experts=80, topk=6, tokens=5, hidden=64, sms=2)  # more ranks than lanes
LONG = Case(ranks=2, tokens=1100, topk=4, experts=8, hidden=8, routing="mixed")  # segments of 512, ids that repeat
FEW = Case(ranks=2, tokens=2, topk=2, experts=4, sms=16)  # a row in as many pieces as it can have
CASES_HERE = {
    "forty ranks": dataclasses.replace(WIDE, alignment=4),
    "forty ranks, token": dataclasses.replace(WIDE, layout="token", capacity=50, routing="mixed"),
    "segments": LONG,
    "segments, token": dataclasses.replace(LONG, layout="token", capacity=900, window=1),
    "segments, batched": dataclasses.replace(LONG, layout="batched", capacity=700, weights=False, sms=1),
    "most experts": dataclasses.replace(FEW, tokens=33, topk=4, experts=most_experts(2, cuda.max_latency_experts)),
    "short segments": dataclasses.replace(LONG, tokens=600, experts=2000, layout="token"),
    "14 pieces and a side": dataclasses.replace(FEW, hidden=7168, side=7, layout="token"),
    "3 pieces and a side": dataclasses.replace(FEW, hidden=4104, side=36, tokens=1, layout="batched"),
    "3 pieces of 7 scales": dataclasses.replace(FEW, hidden=2688, quantize="fp8_ue8m0"),
    "14 pieces of 2 scales": dataclasses.replace(FEW, hidden=3584, dtype="f32", quantize="fp8", layout="token"),
}


@pytest.mark.parametrize("split", [False, True], ids=["fused", "split"])
@pytest.mark.parametrize("bulk", [True, False], ids=["bulk", "vector"])
@pytest.mark.parametrize("name", CASES_HERE)
def test_more_ranks_segments_and_pieces(name, bulk, split):
    case = dataclasses.replace(CASES_HERE[name], bulk=bulk, slots=3 if split else 2, split=split)
    ranks = make(case)
    for seed in range(min(NUM_SEEDS, 2)):
        check(case, ranks, seed)


@pytest.mark.parametrize("split", [False, True], ids=["fused", "split"])
@pytest.mark.parametrize("layout", ["expert", "token", "batched"])
def test_random_delays_and_many_calls(layout, split):
    check_with_delays(
        Case(ranks=4, tokens=64, topk=4, experts=16, hidden=256, layout=layout, weights=False, slots=2, split=split)
    )


def test_call_1000_equals_call_1():
    case = Case(ranks=4, tokens=64, topk=4, experts=16, hidden=256, layout="token", slots=2)
    check_calls_1_and_1000(case, ("dispatch", "combine", "redispatch", "dispatch_start", "dispatch_done"))


def test_starts_run_ahead_of_their_dones():
    """Ranks are delayed by different times between start and done: rows of the next start wait in the next slot."""
    case = Case(ranks=4, tokens=48, topk=4, experts=16, hidden=512, weights=False, slots=4, split=True)
    ranks = make(case)
    rng = np.random.default_rng(3)
    for call in range(40):
        check(case, ranks, call % 4, [int(d) for d in rng.integers(0, 2_000_000 if call % 10 == 0 else 50_000, 4)])


def check_credits(case: Case):
    """Two exchanges pending, then a third in the slot of the first, whose rows late ranks have yet to read."""
    ranks = make(case)
    check(case, ranks, 0)
    want = {name: [ranks.read(name, rank) for rank in range(case.ranks)] for name in ("out", "recv_x")}
    rng = np.random.default_rng(5)
    for _ in range(60):
        for name in want:
            ranks.fill(name, 0xAB)
        ranks.launch("combine_start")
        ranks.launch("redispatch_start2")
        ranks.launch("combine_done", [int(d) for d in rng.integers(0, 300_000, 4)])
        ranks.launch("redispatch_start")
        ranks.launch("redispatch_done2")
        ranks.launch("redispatch_done")
        ranks.synchronize()
        assert not any(f["code"] for f in failures(ranks, case)), failures(ranks, case)
        for name, bytes_ in want.items():
            assert [ranks.read(name, rank) for rank in range(case.ranks)] == bytes_, name


def test_starts_wait_for_the_credits_of_late_ranks():
    check_credits(Case(ranks=4, tokens=48, topk=4, experts=16, hidden=512, weights=False, slots=2, split=True))


def failures(ranks, case):
    return [ranks.failure(rank) for rank in range(case.ranks)]


def loaded(case: Case, timeout_s: float):
    ranks = make(case, timeout_s)
    data = inputs(case, 0)
    for name in ("x", "topk_idx", "weights", "y", "y_weights", "scalars"):
        for rank in range(case.ranks):
            if ranks.bytes(name):
                ranks.write(name, rank, np.ascontiguousarray(data[name][rank]).tobytes())
    return ranks


@pytest.mark.parametrize("op", ["dispatch", "redispatch", "combine"])
def test_absent_rank_is_named(op):
    case = Case(ranks=4, tokens=16, hidden=64, layout="token", slots=2)
    ranks = loaded(case, timeout_s=0.5)
    ranks.launch("dispatch")
    ranks.synchronize()
    assert not any(f["code"] for f in failures(ranks, case))
    result = "out" if op == "combine" else "recv_x"
    ranks.launch(op, absent=[2])
    ranks.synchronize()
    for rank in (0, 1, 3):
        failure = ranks.failure(rank)
        assert failure["code"] == 1 and failure["peer"] == 2, failure  # PeerTimeout
        assert set(ranks.read(result, rank)) == {0xFF}  # NaN
    # What the others sent before they left waits for the late rank, which completes this call. In the next one it
    # learns at once that they have left, without a time-out of its own.
    ranks.launch(op, absent=[0, 1, 3])
    ranks.synchronize()
    assert ranks.failure(2)["code"] == 0, ranks.failure(2)
    ranks.launch(op)
    ranks.synchronize()
    assert ranks.failure(2)["code"] == 4, ranks.failure(2)  # PeerFailed
    for rank in range(case.ranks):
        assert set(ranks.read(result, rank)) == {0xFF}
    ranks.reset()
    check(case, ranks, 0)


@pytest.mark.parametrize("op", ["dispatch", "redispatch", "combine"])
def test_a_done_runs_once(op):
    """Sources overwrite what was received once."""
    case = Case(ranks=3, tokens=8, experts=9, hidden=64, slots=3)
    ranks = loaded(case, timeout_s=5)
    for name in ("dispatch_start", "dispatch_done", f"{op}_start", f"{op}_done"):
        ranks.launch(name)
    ranks.synchronize()
    assert not any(f["code"] for f in failures(ranks, case))
    ranks.launch(f"{op}_done")
    ranks.synchronize()
    assert all(f["code"] == 3 for f in failures(ranks, case)), failures(ranks, case)  # Mismatch
    result = "out" if op == "combine" else "recv_x"
    assert all(set(ranks.read(result, rank)) == {0xFF} for rank in range(case.ranks))


@pytest.mark.parametrize("slots", [0, 2, 3], ids=["throughput", "fused", "split"])
@pytest.mark.parametrize("op", ["redispatch", "combine"])
def test_handle_of_a_dispatch_that_failed(op, slots):
    """In an arena that is not broken, as here after a reset, calls along it fail on all ranks; none sums old rows."""
    case = Case(ranks=3, tokens=16, experts=9, hidden=64, layout="token", slots=slots)
    ranks = loaded(case, timeout_s=0.5)
    ranks.launch("dispatch")
    ranks.launch(op)
    ranks.launch("dispatch", absent=[2])
    ranks.synchronize()
    assert all(ranks.failure(rank)["code"] for rank in (0, 1))
    ranks.reset()  # rank 2 has its handle of the first dispatch, which is a good one
    for half in (f"{op}_start", f"{op}_done") if slots == 3 else (op,):
        ranks.launch(half)
    ranks.synchronize()
    assert all(f["code"] == 4 for f in failures(ranks, case)), failures(ranks, case)  # PeerFailed
    result = "out" if op == "combine" else "recv_x"
    assert all(set(ranks.read(result, rank)) == {0xFF} for rank in range(case.ranks))
    ranks.reset()
    check(dataclasses.replace(case, split=slots == 3), ranks, 0)


def test_ticket_of_another_call_is_refused():
    case = Case(ranks=2, tokens=8, hidden=64, slots=2)
    ranks = loaded(case, timeout_s=5)
    ranks.launch("dispatch_start")
    ranks.launch("dispatch_done")
    ranks.synchronize()
    assert not any(f["code"] for f in failures(ranks, case))
    kept = [ranks.read("ticket", rank) for rank in range(2)]
    for _ in range(2):
        ranks.launch("dispatch")
    ranks.synchronize()
    assert not any(f["code"] for f in failures(ranks, case))
    for rank in range(2):  # the slot holds another call by now
        ranks.write("ticket", rank, kept[rank])
    ranks.launch("dispatch_done")
    ranks.synchronize()
    assert all(f["code"] == 3 for f in failures(ranks, case)), failures(ranks, case)  # Mismatch
    ranks.reset()
    for rank in range(2):  # of a start that never was
        ranks.write("ticket", rank, np.array([9, 0], np.int32).tobytes())
    ranks.launch("dispatch_done")
    ranks.synchronize()
    assert all(f["code"] == 3 for f in failures(ranks, case)), failures(ranks, case)


def test_ranks_that_run_different_programs():
    """Another window on one rank: the tags in the flags differ, and both sides say so."""
    case = Case(ranks=2, tokens=8, hidden=64, slots=2, window=0, weights=False)
    ranks = loaded(case, timeout_s=5)
    ranks.write("window", 1, np.array([1], np.int32).tobytes())
    ranks.launch("dispatch")
    ranks.synchronize()
    assert all(f["code"] == 3 for f in failures(ranks, case)), failures(ranks, case)


def test_more_pending_calls_than_slots_fail_at_once():
    """A start needs the slot of a call whose done comes later in its own stream."""
    case = Case(ranks=2, tokens=8, hidden=64, slots=2)
    ranks = loaded(case, timeout_s=20)
    begin = time.monotonic()
    for _ in range(3):
        ranks.launch("dispatch_start")
    ranks.synchronize()
    assert time.monotonic() - begin < 10
    assert all(f["code"] in (1, 4) for f in failures(ranks, case)), failures(ranks, case)


def test_two_pending_calls_are_received_in_either_order():
    case = Case(ranks=3, tokens=16, experts=9, hidden=64, weights=False, slots=4)
    ranks = loaded(case, timeout_s=5)
    first = inputs(case, 0)
    ranks.launch("dispatch")
    ranks.synchronize()
    want = read(ranks, case, "recv_x", np.zeros((3, case.rows, case.hidden), first["x"].dtype))
    other = np.ascontiguousarray(first["x"][:, ::-1])

    def put(x):
        for rank in range(case.ranks):
            ranks.write("x", rank, np.ascontiguousarray(x[rank]).tobytes())

    def start(x):
        put(x)
        ranks.launch("redispatch_start")
        ranks.synchronize()
        return [ranks.read("ticket", rank) for rank in range(case.ranks)]

    def done(x, tickets):
        put(x)  # a rank's own rows are read from the operand
        for rank, ticket in enumerate(tickets):
            ranks.write("ticket", rank, ticket)
        ranks.fill("recv_x", 0xAB)
        ranks.launch("redispatch_done")
        ranks.synchronize()
        assert not any(f["code"] for f in failures(ranks, case))
        return read(ranks, case, "recv_x", want)

    put(other)
    ranks.launch("redispatch")
    ranks.synchronize()
    want_other = read(ranks, case, "recv_x", want)
    assert (want_other.view(np.uint16) != want.view(np.uint16)).any()
    for order in ((0, 1), (1, 0)):
        xs, wants = (first["x"], other), (want, want_other)
        tickets = [start(x) for x in xs]
        for i in order:
            same(done(xs[i], tickets[i]), wants[i], f"call {i} of order {order}")
