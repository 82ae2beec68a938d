"""The kernels of latency mode without XLA: the cases of test_loopback.py, fused and split, against the same reference.

So all results are bit-equal to throughput mode. Every output is poisoned before every call. Also: random delays, many
calls, starts that run ahead of their dones, ranks that never come, tickets that are used twice.
Run it like test_loopback.py.
"""

import dataclasses

import numpy as np
import pytest
import test_loopback
from test_loopback import CASES, Case, check, cuda, inputs, make, read, same

pytestmark = test_loopback.pytestmark


def _fits(case: Case) -> bool:
    return case.experts <= cuda.max_latency_experts(case.ranks)


@pytest.mark.parametrize("split", [False, True], ids=["fused", "split"])
@pytest.mark.parametrize("bulk", [True, False], ids=["bulk", "vector"])
@pytest.mark.parametrize("name", [name for name, case in CASES.items() if _fits(case) and not case.crosses_once])
def test_equals_reference(name, bulk, split):
    case = dataclasses.replace(CASES[name], bulk=bulk, slots=4 if split else 2, split=split)
    ranks = make(case)
    for seed in range(3):
        check(case, ranks, seed)


@pytest.mark.parametrize("split", [False, True], ids=["fused", "split"])
@pytest.mark.parametrize("layout", ["expert", "token", "batched"])
def test_random_delays_and_many_calls(layout, split):
    case = Case(ranks=4, tokens=64, topk=4, experts=16, hidden=256, layout=layout, weights=False, slots=2, split=split)
    ranks = make(case)
    rng = np.random.default_rng(0)
    for call in range(60):
        delays = rng.integers(0, 200_000, case.ranks) if call % 2 else []
        check(case, ranks, call % 5, [int(d) for d in delays])


def test_call_1000_equals_call_1():
    case = Case(ranks=4, tokens=64, topk=4, experts=16, hidden=256, layout="token", slots=2)
    ranks = make(case)
    check(case, ranks, 0)
    for _ in range(330):
        for op in ("dispatch", "combine", "redispatch", "dispatch_start", "dispatch_done"):
            ranks.launch(op)
    ranks.synchronize()
    check(case, ranks, 1)
    check(case, ranks, 0)


def test_starts_run_ahead_of_their_dones():
    """Ranks are delayed by different times between start and done: rows of the next start wait in the next slot."""
    case = Case(ranks=4, tokens=48, topk=4, experts=16, hidden=512, weights=False, slots=4, split=True)
    ranks = make(case)
    rng = np.random.default_rng(3)
    for call in range(40):
        check(case, ranks, call % 4, [int(d) for d in rng.integers(0, 2_000_000 if call % 10 == 0 else 50_000, 4)])


def _failures(ranks, case):
    return [ranks.failure(rank) for rank in range(case.ranks)]


def _loaded(case: Case, timeout_s: float):
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
    ranks = _loaded(case, timeout_s=0.5)
    ranks.launch("dispatch")
    ranks.synchronize()
    assert not any(f["code"] for f in _failures(ranks, case))
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


def test_ticket_of_another_call_is_refused():
    case = Case(ranks=2, tokens=8, hidden=64, slots=2)
    ranks = _loaded(case, timeout_s=5)
    ranks.launch("dispatch_start")
    ranks.launch("dispatch_done")
    ranks.synchronize()
    assert not any(f["code"] for f in _failures(ranks, case))
    kept = [ranks.read("ticket", rank) for rank in range(2)]
    for _ in range(2):
        ranks.launch("dispatch")
    ranks.synchronize()
    assert not any(f["code"] for f in _failures(ranks, case))
    for rank in range(2):  # the slot holds another call by now
        ranks.write("ticket", rank, kept[rank])
    ranks.launch("dispatch_done")
    ranks.synchronize()
    assert all(f["code"] == 3 for f in _failures(ranks, case)), _failures(ranks, case)  # Mismatch
    ranks.reset()
    for rank in range(2):  # of a start that never was
        ranks.write("ticket", rank, np.array([9, 0], np.int32).tobytes())
    ranks.launch("dispatch_done")
    ranks.synchronize()
    assert all(f["code"] == 3 for f in _failures(ranks, case)), _failures(ranks, case)


def test_ranks_that_run_different_programs():
    """Another window on one rank: the tags in the flags differ, and both sides say so."""
    case = Case(ranks=2, tokens=8, hidden=64, slots=2, window=0, weights=False)
    ranks = _loaded(case, timeout_s=5)
    ranks.write("window", 1, np.array([1], np.int32).tobytes())
    ranks.launch("dispatch")
    ranks.synchronize()
    assert all(f["code"] == 3 for f in _failures(ranks, case)), _failures(ranks, case)


def test_more_pending_calls_than_slots_fail_at_once():
    """A start needs the slot of a call whose done comes later in its own stream."""
    case = Case(ranks=2, tokens=8, hidden=64, slots=2)
    ranks = _loaded(case, timeout_s=9e9)
    for _ in range(3):
        ranks.launch("dispatch_start")
    ranks.synchronize()
    assert all(f["code"] in (1, 4) for f in _failures(ranks, case)), _failures(ranks, case)


def test_two_pending_calls_are_received_in_either_order():
    case = Case(ranks=3, tokens=16, experts=9, hidden=64, weights=False, slots=4)
    ranks = _loaded(case, timeout_s=5)
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
        assert not any(f["code"] for f in _failures(ranks, case))
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
