"""Kernels over several nodes, without XLA: R ranks on R streams of one process over the test transport, against the
NumPy oracle of the same rounding tree.

What crosses nodes goes through puts, which are done late and in any order, but for a put before its own word. Covers
2 x 2, 2 x 4, 4 x 2 and 3 x 3 ranks, all layouts and payload types, bulk and vector copies, drops, windows, alignment,
-1 and invalid ids, duplicates, idle ranks, no tokens, handle reuse, side arrays, FP8 in dispatch and combine, bias,
weights and their cotangents, several rounds, late ranks, repeated calls, time-outs; puts are counted.
Run it alone: `JAX_PLATFORMS=cpu pytest --device gpu tests/gpu/test_loopback_nodes.py`.
"""

import dataclasses

import numpy as np
import pytest
from test_loopback import (
    NUM_SEEDS,
    Case,
    check,
    check_calls_1_and_1000,
    check_with_delays,
    cuda,
    expected,
    inputs,
    make,
    most_experts,
    same,
)
from test_loopback import read as read_buffer

pytestmark = pytest.mark.skipif(cuda.num_devices() == 0, reason="needs a CUDA device")

SMALL = Case(ranks=4, nodes=2, chunk=2, weights=False)  # a block of 8 or 9 tokens has five rounds
EIGHT = dataclasses.replace(SMALL, ranks=8, tokens=65, experts=32, topk=8, hidden=512, chunk=5)
CASES = {
    "expert": dataclasses.replace(SMALL, weights=True),
    "token": dataclasses.replace(SMALL, layout="token", weights=True),
    "batched": dataclasses.replace(SMALL, layout="batched", weights=True),
    "one rank a node": dataclasses.replace(SMALL, nodes=4, bias=True),
    "two ranks, two nodes": dataclasses.replace(SMALL, ranks=2, nodes=2, layout="token"),
    "2 x 4, expert": dataclasses.replace(EIGHT, nodes=2, alignment=8),
    "2 x 4, token": dataclasses.replace(EIGHT, nodes=2, layout="token", weights=True),
    "2 x 4, batched": dataclasses.replace(EIGHT, nodes=2, layout="batched", bias=True),
    "4 x 2, expert": dataclasses.replace(EIGHT, nodes=4, bias=True),
    "4 x 2, token": dataclasses.replace(EIGHT, nodes=4, layout="token"),
    "4 x 2, batched": dataclasses.replace(EIGHT, nodes=4, layout="batched", weights=True, dtype="f32"),
    "3 x 3": dataclasses.replace(SMALL, ranks=9, nodes=3, experts=18, topk=5),
    "f32": dataclasses.replace(SMALL, dtype="f32", bias=True),
    "f16, token": dataclasses.replace(SMALL, dtype="f16", layout="token", bias=True),
    "mixed ids": dataclasses.replace(SMALL, routing="mixed", alignment=16),
    "mixed ids, token": dataclasses.replace(SMALL, routing="mixed", layout="token", weights=True),
    "dropped": dataclasses.replace(SMALL, capacity=48, alignment=16, routing="mixed"),
    "dropped, token": dataclasses.replace(SMALL, capacity=40, layout="token", routing="mixed"),
    "dropped, batched": dataclasses.replace(SMALL, layout="batched", routing="mixed", capacity=9),
    "hot": dataclasses.replace(SMALL, routing="hot", ranks=8, nodes=4, topk=1),
    "hot, 2304 tokens": dataclasses.replace(SMALL, routing="hot", tokens=2304, hidden=8, sms=8, chunk=0),  # B10
    "idle ranks": dataclasses.replace(SMALL, routing="idle", layout="token"),
    "nothing routed": dataclasses.replace(SMALL, routing="none"),
    "no tokens": dataclasses.replace(SMALL, tokens=0, capacity=8, alignment=8),
    "one token": dataclasses.replace(SMALL, ranks=8, nodes=4, tokens=1, topk=8, layout="token"),
    "fewer tokens than blocks": dataclasses.replace(SMALL, tokens=3, sms=8),
    "32 of 32": dataclasses.replace(SMALL, experts=32, topk=32, tokens=9),
    "many experts": dataclasses.replace(SMALL, experts=1000, topk=4, layout="token"),
    "most experts": dataclasses.replace(SMALL, experts=most_experts(4), topk=4),
    "one long row a chunk": dataclasses.replace(SMALL, hidden=16392, tokens=5, dtype="f32", staging_bytes=1),
    "window 2": dataclasses.replace(SMALL, capacity=32, alignment=8, window=2, routing="mixed"),
    "window 1, token": dataclasses.replace(SMALL, capacity=40, window=1, layout="token", routing="mixed"),
    "side of words": dataclasses.replace(SMALL, side=36, layout="token"),
    "side of vectors": dataclasses.replace(SMALL, side=48, topk=4, routing="mixed", tokens=65),
    "side of bytes": dataclasses.replace(SMALL, side=7, alignment=4),
    "fp8": dataclasses.replace(SMALL, quantize="fp8", hidden=640, layout="token"),
    "fp8 of f32": dataclasses.replace(SMALL, quantize="fp8", hidden=384, dtype="f32", alignment=8),
    "ue8m0 of f16": dataclasses.replace(SMALL, quantize="fp8_ue8m0", hidden=128, dtype="f16", layout="batched"),
    "fp8 wire": dataclasses.replace(SMALL, wire="fp8_wire", hidden=640, bias=True),
    "fp8 wire, token": dataclasses.replace(SMALL, wire="fp8_wire", hidden=1024, layout="token", routing="mixed"),
    "crosses once": dataclasses.replace(SMALL, crosses_once=True, routing="mixed", topk=8, tokens=40, side=12),
    "crosses once, 4 x 2": dataclasses.replace(EIGHT, nodes=4, crosses_once=True, capacity=640, alignment=8),
    "unusual": dataclasses.replace(SMALL, unusual=True, bias=True),
    "unusual, fp8": dataclasses.replace(SMALL, unusual=True, quantize="fp8", hidden=256, layout="token"),
    "unusual, fp8 wire": dataclasses.replace(SMALL, unusual=True, wire="fp8_wire", hidden=640, alignment=128),
    "long rows": dataclasses.replace(SMALL, hidden=7168, topk=8, experts=16, tokens=24, chunk=0),
    "as much as fits": dataclasses.replace(SMALL, tokens=700, hidden=64, sms=2, chunk=0, staging_bytes=1),
    "many tokens": dataclasses.replace(SMALL, tokens=600, hidden=64, sms=1, chunk=0, staging_bytes=1 << 22),
    "16 blocks": dataclasses.replace(EIGHT, nodes=2, sms=12, tokens=257, layout="token"),
}  # fmt: skip


@pytest.mark.parametrize("late", [False, True], ids=["in order", "late"])
@pytest.mark.parametrize("bulk", [True, False], ids=["bulk", "vector"])
@pytest.mark.parametrize("name", CASES)
def test_equals_reference(name, bulk, late):
    case = dataclasses.replace(CASES[name], bulk=bulk, put_delay_ns=20_000 if late else 0)
    ranks = make(case)
    for seed in range(NUM_SEEDS):
        check(case, ranks, seed)


@pytest.mark.parametrize("carriers", [1, 3])
@pytest.mark.parametrize(("num_ranks", "nodes"), [(4, 2), (8, 2), (8, 4)])
def test_random_delays_and_many_calls(num_ranks, nodes, carriers):
    """Ranks late by up to 200 us, puts by up to 50."""
    check_with_delays(
        dataclasses.replace(EIGHT, ranks=num_ranks, nodes=nodes, layout="token", carriers=carriers, put_delay_ns=50_000)
    )


@pytest.mark.parametrize("late", [False, True], ids=["in order", "late"])
def test_call_1000_equals_call_1(late):
    case = dataclasses.replace(EIGHT, nodes=2, hidden=64, layout="token", put_delay_ns=5_000 if late else 0)
    check_calls_1_and_1000(case)


@pytest.mark.parametrize("layout", ["expert", "token", "batched"])
@pytest.mark.parametrize(("num_ranks", "nodes"), [(4, 2), (8, 2), (8, 4)])
def test_one_put_per_token_and_node(num_ranks, nodes, layout):
    """Rows of dispatch and sums of combine, by each rank, are as many as the routing has tokens times other nodes."""
    case = dataclasses.replace(EIGHT, ranks=num_ranks, nodes=nodes, layout=layout, routing="mixed")
    ranks = make(case)
    data, _ = expected(_plain(case), 0)
    ids = data["topk_idx"]
    per_node = num_ranks // nodes
    node = np.where((ids < 0) | (ids >= case.experts), -1, ids // (case.experts // num_ranks) // per_node)
    reached = np.stack([(node == n).any(-1).sum(1) for n in range(nodes)], -1)  # [rank, node] tokens
    own = np.arange(num_ranks) // per_node
    sent = reached.sum(1) - reached[np.arange(num_ranks), own]
    # A rank answers its partners: those with its place on the other nodes.
    place = np.arange(num_ranks) % per_node
    partners = [[s for s in range(num_ranks) if place[s] == place[r] and own[s] != own[r]] for r in range(num_ranks)]
    answered = [sum(reached[s, own[r]] for s in partners[r]) for r in range(num_ranks)]
    for op, by_rank in (("dispatch", sent), ("combine", answered), ("redispatch", sent)):
        before = [ranks.rows_put(r) for r in range(num_ranks)]
        for name in ("x", "topk_idx", "weights", "y", "y_weights"):
            for r in range(num_ranks):
                if ranks.bytes(name):
                    ranks.write(name, r, np.ascontiguousarray(data[name][r]).tobytes())
        ranks.launch(op)
        ranks.synchronize()
        assert [ranks.rows_put(r) - before[r] for r in range(num_ranks)] == [int(n) for n in by_rank], op


def _plain(case):
    """As `check` asks the oracle."""
    return dataclasses.replace(
        case, bulk=True, sms=1, staging_bytes=0, crosses_once=False, carriers=1, chunk=0, put_delay_ns=0
    )


@pytest.mark.parametrize("op", ["dispatch", "combine"])
@pytest.mark.parametrize("absent", [0, 3])
def test_absent_rank_is_named_on_every_node(op, absent):
    """2 x 2 ranks; partner or not, on the same node or not: everyone names the rank that did not come; then a reset."""
    case = dataclasses.replace(SMALL, layout="token", tokens=16)
    ranks = make(case, timeout_s=0.5)
    check(case, ranks, 0)
    result = "recv_x" if op == "dispatch" else "out"
    ranks.launch(op, absent=[absent])
    ranks.synchronize()
    for r in set(range(4)) - {absent}:
        failure = ranks.failure(r)
        assert (failure["code"], failure["peer"], failure["rank"]) == (1, absent, r), failure
        assert set(ranks.read(result, r)) == {0xFF}  # poisoned
    before = [ranks.read(result, r) for r in range(4)]
    ranks.launch(op, absent=[r for r in range(4) if r != absent])  # it comes after the others left
    ranks.synchronize()
    assert ranks.failure(absent)["code"] in (1, 4)
    assert [ranks.read(result, r) for r in range(4) if r != absent] == [b for r, b in enumerate(before) if r != absent]
    ranks.launch("dispatch")  # a broken group poisons and returns at once
    ranks.synchronize()
    ranks.reset()
    check(case, ranks, 3)


@pytest.mark.parametrize("differs", [0, 3])
def test_mismatch_is_found_across_nodes(differs):
    case = dataclasses.replace(SMALL, layout="token", tokens=16)
    ranks = make(case, timeout_s=0.5)
    check(case, ranks, 0)
    others = [r for r in range(4) if r != differs]
    ranks.launch("combine", absent=others)
    ranks.launch("dispatch", absent=[differs])
    ranks.synchronize()
    assert [ranks.failure(r)["code"] for r in range(4)] == [3] * 4, [ranks.failure(r) for r in range(4)]


def test_buffers_are_read_and_written_within_bounds():
    """Odd shares of tokens, rows that are no multiple of a vector times lanes, operands that stay as they are."""
    case = dataclasses.replace(SMALL, tokens=37, sms=5, topk=7, hidden=136, layout="expert", side=20)
    ranks = make(case)
    for seed in range(3):
        check(case, ranks, seed)
        data, want = expected(_plain(case), seed)
        same(read_buffer(ranks, case, "slot_token", want["slot_token"]), want["slot_token"], "slot_token")
        assert inputs(case, seed)["x"].tobytes() == data["x"].tobytes()
