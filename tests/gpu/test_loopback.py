"""Kernels without XLA: R ranks on R streams of one process, against the NumPy oracle of `jax_ep.testing`.

Every output is poisoned before every call; bytes are compared, so a row that nobody wrote is found. Covers direct
and staged moves, all layouts and payload types, bulk and vector copies, drops, windows, alignment, -1 and invalid ids,
duplicates, empty ranks, handle reuse, side arrays, FP8 in dispatch and combine, zero, tiny and non-finite values, bias,
weights and their cotangents, delays, repeated calls, time-outs.
Run it alone: `JAX_PLATFORMS=cpu pytest --device gpu tests/gpu/test_loopback.py`; sanitize.py runs some of it under
compute-sanitizer.
"""

import dataclasses
import functools
import os

import ml_dtypes
import numpy as np
import pytest

from jax_ep import testing

cuda = pytest.importorskip("jax_ep._cuda", reason="needs the CUDA extension")
pytestmark = pytest.mark.skipif(cuda.num_devices() == 0, reason="needs a CUDA device")

DTYPES = {"bf16": ml_dtypes.bfloat16, "f16": np.float16, "f32": np.float32}
CODES = {"bf16": 0, "f16": 1, "f32": 2}
LAYOUTS = {"expert": 0, "token": 1, "batched": 2}
NUM_SEEDS = int(os.environ.get("LOOPBACK_SEEDS", 3))  # sanitize.py is content with one
QUANTIZE = {None: 0, "fp8": 1, "fp8_ue8m0": 2, "fp8_wire": 3}


@dataclasses.dataclass(frozen=True)
class Case:
    ranks: int = 4
    tokens: int = 33
    topk: int = 3
    experts: int = 8
    hidden: int = 72
    capacity: int | None = None
    alignment: int = 1
    layout: str = "expert"
    dtype: str = "bf16"
    routing: str = "uniform"
    weights: bool = True
    bias: bool = False
    bulk: bool = True
    staged: bool = False
    sms: int = 4
    staging_bytes: int = 1 << 14
    window: int = -1
    side: int = 0  # bytes that travel beside a row
    quantize: str | None = None  # of dispatch
    wire: str | None = None  # of combine
    crosses_once: bool = False  # as between GPUs: a row crosses once, the receiver copies it
    unusual: bool = False  # values: see `unusual`
    slots: int = 0  # latency mode, with so many slots
    split: bool = False  # start and done by themselves
    nodes: int = 1  # over the test transport
    carriers: int = 1
    chunk: int = 0  # tokens of a block at a time, at most
    put_delay_ns: int = 0  # at most; then in any order, too

    @property
    def rows(self):
        """Capacity; in the batched layout that of one expert."""
        if self.capacity is not None:
            return self.capacity
        if self.layout in ("token", "batched"):
            return self.ranks * self.tokens
        wanted = self.ranks * self.tokens * self.topk + self.experts // self.ranks * (self.alignment - 1)
        return -(-wanted // self.alignment) * self.alignment


def route(case: Case, seed: int) -> np.ndarray:
    rng = np.random.default_rng(seed)
    shape = (case.ranks, case.tokens, case.topk)
    if case.routing == "uniform":
        scores = rng.random((case.ranks, case.tokens, case.experts))
        return np.argsort(scores, axis=-1)[..., : case.topk].astype(np.int32)
    if case.routing == "mixed":  # -1, duplicates, ids out of range
        ids = rng.integers(-1, case.experts, shape)
        wrong = rng.random(shape) < 0.05
        return np.where(wrong, rng.choice([case.experts, 2**31 - 1, -2, -(2**31)], shape), ids).astype(np.int32)
    if case.routing == "hot":
        return np.zeros(shape, np.int32) + np.arange(case.topk, dtype=np.int32) % (case.experts // case.ranks)
    if case.routing == "none":
        return np.full(shape, -1, np.int32)
    ids = rng.integers(0, case.experts, shape).astype(np.int32)  # "idle": one rank sends nothing, one receives nothing
    ids[0] = -1
    return np.where(ids // (case.experts // case.ranks) == case.ranks - 1, -1, ids)


@functools.lru_cache(maxsize=8)  # of one case, a few seeds
def expected(case: Case, seed: int) -> tuple[dict, dict]:
    """Operands, and every result of every operation by the NumPy oracle, [R, ...]; nothing is compiled for it."""
    with np.errstate(all="ignore"):
        return _expected(case, inputs(case, seed))


def _expected(case: Case, i: dict) -> tuple[dict, dict]:
    given = testing.oracle_dispatch(
        i["x"], i["topk_idx"], i["weights"] if case.weights else None, num_experts=case.experts, layout=case.layout,
        capacity=case.rows, expert_alignment=case.alignment, window=None if case.window < 0 else case.window,
    )  # fmt: skip

    def sent(x):  # rows and what lies beside them
        return testing.oracle_quantize(x, case.quantize) if case.quantize else (x, i["side"])

    names = "slot_meta slot_token group_sizes counts stats slot dst_row recv_offsets".split()
    want = {name: getattr(given, name) for name in names} | {"topk_clean": given.topk_idx}
    rows, side = sent(i["x"])
    want["recv_x"] = testing.oracle_redispatch(given, rows)
    if side.shape[-1]:
        want["recv_side"] = testing.oracle_redispatch(given, side)
    want["second"] = testing.oracle_redispatch(given, sent(i["x2"])[0])
    factors = i["y_weights"] if case.weights and case.layout != "token" else None
    want["out"] = testing.oracle_combine(
        given, i["y"], factors, i["bias"] if case.bias else None, case.wire, ranks_per_node=case.ranks // case.nodes
    )
    if case.weights:
        want["recv_weights"] = given.weights
        want["out_scalars"] = np.zeros(i["topk_idx"].shape, np.float32)
        for source, token, k, rank, row in given.entries():
            value = i["scalars"][rank, row]
            want["out_scalars"][source, token, k] = value[k] if case.layout == "token" else value
    return i, want


def make(case: Case, timeout_s: float = 20.0):
    return cuda.Loopback(
        num_ranks=case.ranks, num_tokens=case.tokens, num_topk=case.topk, num_experts=case.experts,
        row_bytes=case.hidden * np.dtype(DTYPES[case.dtype]).itemsize, capacity=case.rows, alignment=case.alignment,
        layout=LAYOUTS[case.layout], dtype=CODES[case.dtype], has_weights=case.weights, has_bias=case.bias,
        use_bulk=case.bulk, force_staged=case.staged, num_sms=case.sms, staging_bytes=case.staging_bytes,
        timeout_s=timeout_s, side_bytes=case.side, window=case.window, quantize=QUANTIZE[case.quantize],
        wire=QUANTIZE[case.wire], crosses_once=case.crosses_once, num_slots=case.slots,
        num_nodes=case.nodes, num_carriers=case.carriers, chunk_tokens=case.chunk, max_delay_ns=case.put_delay_ns,
    )  # fmt: skip


def unusual(rows: np.ndarray) -> np.ndarray:
    """B27, B28: each rank's first twelve rows become zeros of both signs, a block of zeros, tiny, not finite, largest,
    negative, and some with 448 times a power of two as the largest of a block."""
    limits = ml_dtypes.finfo(rows.dtype)
    rows[:, 0], rows[:, 1], rows[:, 2, :128] = 0, -0.0, 0
    rows[:, 3] *= limits.smallest_normal
    rows[:, 4, ::5] = limits.smallest_subnormal
    for row, value in enumerate((np.nan, np.inf, -np.inf, limits.max, -limits.max), start=5):
        rows[:, row, 3::17] = value
    rows[:, 10] = -np.abs(rows[:, 10])
    rows[:, 11] = np.clip(rows[:, 11].astype(np.float32), -27, 27)
    rows[:, 11, ::128] = 28
    return rows


def inputs(case: Case, seed: int) -> dict:
    rng = np.random.default_rng(seed + 1)
    num_rows = case.rows * (case.experts // case.ranks if case.layout == "batched" else 1)
    shape_w = (case.ranks, num_rows) + ((case.topk,) if case.layout == "token" else ())

    def rows(n):
        values = rng.standard_normal((case.ranks, n, case.hidden), np.float32).astype(DTYPES[case.dtype])
        return unusual(values) if case.unusual else values

    ids = route(case, seed)
    weights = rng.random(ids.shape, np.float32)
    weights[(ids < 0) | (ids >= case.experts)] = np.nan  # must never be read
    return dict(
        x=rows(case.tokens), topk_idx=ids, weights=weights, x2=rows(case.tokens), y=rows(num_rows),
        y_weights=rng.random((case.ranks, num_rows), np.float32), scalars=rng.random(shape_w, np.float32),
        bias=rows(case.tokens), side=rng.integers(0, 256, (case.ranks, case.tokens, case.side), np.uint8),
    )  # fmt: skip


RESULTS = (
    "recv_x recv_side recv_weights slot_meta slot_token group_sizes counts stats topk_clean slot dst_row "
    "recv_offsets".split()
)


def read(ranks, case, name, like):
    raw = [np.frombuffer(ranks.read(name, r), np.uint8) for r in range(case.ranks)]
    return np.stack(raw).view(like.dtype).reshape(like.shape)


def same(got, want, name):
    got, want = np.asarray(got), np.asarray(want)
    bits = {1: np.uint8, 2: np.uint16, 4: np.uint32}[want.dtype.itemsize]
    differs = got.view(bits) != want.view(bits)
    if name == "out":  # a sum that is NaN may be any NaN
        differs &= ~(np.isnan(got) & np.isnan(want))
    wrong = np.argwhere(differs)
    if len(wrong):
        at = tuple(wrong[0])
        raise AssertionError(f"{name}: {len(wrong)} of {want.size} differ, first at {at}: {got[at]} for {want[at]}")


def check(case: Case, ranks, seed: int, delays=()):
    # Copies, paths, modes and numbers of blocks make no difference.
    plain = dataclasses.replace(
        case, bulk=True, staged=False, sms=1, staging_bytes=0, crosses_once=False, slots=0, split=False, carriers=1,
        chunk=0, put_delay_ns=0,
    )  # fmt: skip
    data, want = expected(plain, seed)

    def put(name, value):
        if ranks.bytes(name):
            for r in range(case.ranks):
                ranks.write(name, r, np.ascontiguousarray(value[r]).tobytes())

    def run(op, results):
        for name in results:
            ranks.fill(name, 0xAB)
        if case.split:
            ranks.launch(f"{op}_start", list(delays))
        ranks.launch(f"{op}_done" if case.split else op, list(delays))
        ranks.synchronize()
        for r in range(case.ranks):
            assert ranks.failure(r)["code"] == 0, ranks.failure(r)

    for name in ("x", "topk_idx", "weights", "y", "y_weights", "scalars", "bias", "side"):
        put(name, data[name])
    run("dispatch", RESULTS)
    for name in RESULTS:
        if name in want:
            same(read(ranks, case, name, want[name]), want[name], name)
    run("combine", ["out", "out_scalars", "partial"])
    same(read(ranks, case, "out", want["out"]), want["out"], "out")
    if case.weights:
        same(read(ranks, case, "out_scalars", want["out_scalars"]), want["out_scalars"], "out_scalars")
    put("x", data["x2"])
    run("redispatch", ["recv_x", "recv_side", "recv_weights"])
    same(read(ranks, case, "recv_x", want["second"]), want["second"], "recv_x of a reused handle")


def check_calls_1_and_1000(case: Case, ops=("dispatch", "combine", "redispatch")):
    """The same after 990 calls and more that nobody looks at, and with other data."""
    ranks = make(case)
    check(case, ranks, 0)
    for _ in range(330):
        for op in ops:
            ranks.launch(op)
    ranks.synchronize()
    check(case, ranks, 1)
    check(case, ranks, 0)


def check_with_delays(case: Case):
    """Sixty calls of each kind on one arena, every rank late by up to 200 us in half of them."""
    ranks = make(case)
    rng = np.random.default_rng(0)
    for call in range(60):
        delays = rng.integers(0, 200_000, case.ranks) if call % 2 else []
        check(case, ranks, call % 5, [int(d) for d in delays])


def most_experts(num_ranks: int, limit=cuda.max_experts) -> int:
    """As many as the kernels take."""
    return limit(num_ranks) // num_ranks * num_ranks


SMALL = Case()
CASES = {
    "expert": SMALL,
    "token": dataclasses.replace(SMALL, layout="token"),
    "token, no weights, bias": dataclasses.replace(SMALL, layout="token", weights=False, bias=True),
    "expert, no weights, bias": dataclasses.replace(SMALL, weights=False, bias=True, dtype="f16"),
    "f32": dataclasses.replace(SMALL, dtype="f32", weights=False, bias=True),
    "f16 token": dataclasses.replace(SMALL, dtype="f16", layout="token"),
    "aligned": dataclasses.replace(SMALL, alignment=16, routing="mixed"),
    "aligned to 128": dataclasses.replace(SMALL, alignment=128, routing="mixed", weights=False),
    "aligned to 256, dropped": dataclasses.replace(SMALL, alignment=256, capacity=256),
    "mixed ids": dataclasses.replace(SMALL, routing="mixed", weights=False),
    "mixed ids, token": dataclasses.replace(SMALL, routing="mixed", layout="token"),
    "dropped": dataclasses.replace(SMALL, capacity=48, alignment=16, weights=False),
    "dropped, token": dataclasses.replace(SMALL, capacity=40, layout="token", routing="mixed"),
    "hot": dataclasses.replace(SMALL, routing="hot", ranks=8, topk=1, weights=False),
    "idle ranks": dataclasses.replace(SMALL, routing="idle", layout="token"),
    "nothing routed": dataclasses.replace(SMALL, routing="none"),
    # Handlers pass no weights where there are no tokens.
    "no tokens": dataclasses.replace(SMALL, tokens=0, capacity=8, alignment=8, weights=False),
    "one rank": dataclasses.replace(SMALL, ranks=1, weights=False),
    "three ranks": dataclasses.replace(SMALL, ranks=3, experts=9, topk=9, weights=False),
    "eight ranks": dataclasses.replace(SMALL, ranks=8, tokens=130, experts=64, topk=8, hidden=512, layout="token"),
    "eight ranks, expert": dataclasses.replace(
        SMALL, ranks=8, tokens=130, experts=64, topk=8, hidden=512, weights=False, alignment=8
    ),
    "hot, 2304 tokens": dataclasses.replace(  # B10
        SMALL, routing="hot", tokens=2304, topk=8, experts=32, hidden=8, weights=False, sms=8
    ),
    "31 of 64": dataclasses.replace(SMALL, ranks=2, experts=64, topk=31, tokens=9),
    "32 of 32": dataclasses.replace(SMALL, ranks=2, experts=32, topk=32, weights=False, tokens=9),
    "one token": dataclasses.replace(SMALL, ranks=8, tokens=1, topk=8, layout="token"),
    "long rows": dataclasses.replace(SMALL, ranks=2, hidden=16392, tokens=5, layout="token", dtype="f32"),
    "many experts": dataclasses.replace(SMALL, ranks=2, experts=1000, topk=4),
    "thousands of experts": dataclasses.replace(SMALL, ranks=8, experts=4000, topk=4, layout="token"),
    "most experts": dataclasses.replace(SMALL, ranks=2, experts=most_experts(2), topk=4),
    "batched": dataclasses.replace(SMALL, layout="batched"),
    "batched, dropped": dataclasses.replace(SMALL, layout="batched", routing="mixed", capacity=9, weights=False),
    "batched, eight ranks": dataclasses.replace(SMALL, layout="batched", ranks=8, experts=64, topk=8, bias=True),
    "window 0": dataclasses.replace(SMALL, capacity=32, alignment=8, window=0, weights=False),
    "window 2": dataclasses.replace(SMALL, capacity=32, alignment=8, window=2, routing="mixed", weights=False),
    "window past the end": dataclasses.replace(SMALL, capacity=64, window=40),
    "window 1, token": dataclasses.replace(SMALL, capacity=40, window=1, layout="token", routing="mixed"),
    "window 1, batched": dataclasses.replace(SMALL, capacity=7, window=1, layout="batched", weights=False),
    "side of words": dataclasses.replace(SMALL, side=36, layout="token"),
    "side of vectors": dataclasses.replace(SMALL, side=48, topk=4, routing="mixed", sms=1, tokens=65),
    "wide side": dataclasses.replace(SMALL, side=2064, layout="token"),
    "side of bytes": dataclasses.replace(SMALL, side=7, weights=False, alignment=4),
    "fp8": dataclasses.replace(SMALL, quantize="fp8", hidden=640, layout="token"),
    "fp8 of f32": dataclasses.replace(SMALL, quantize="fp8", hidden=384, dtype="f32", alignment=8, weights=False),
    "ue8m0 of f16": dataclasses.replace(SMALL, quantize="fp8_ue8m0", hidden=128, dtype="f16", layout="batched"),
    "ue8m0, long": dataclasses.replace(SMALL, quantize="fp8_ue8m0", hidden=7168, layout="token", ranks=2, tokens=20),
    "fp8 wire": dataclasses.replace(SMALL, wire="fp8_wire", hidden=640, weights=False, bias=True),
    "fp8 wire, token": dataclasses.replace(SMALL, wire="fp8_wire", hidden=1024, layout="token", routing="mixed"),
    "fp8, short rows": dataclasses.replace(  # many of them for a warp
        SMALL, quantize="fp8", hidden=512, tokens=130, layout="token", sms=1
    ),
    "ue8m0, side of vectors": dataclasses.replace(
        SMALL, quantize="fp8_ue8m0", hidden=2048, tokens=40, sms=1, dtype="f32"
    ),
    "fp8, long": dataclasses.replace(SMALL, quantize="fp8", hidden=7168, layout="token", ranks=2, tokens=20),
    "fp8 wire, long": dataclasses.replace(
        SMALL, wire="fp8_wire", hidden=7168, layout="token", ranks=2, topk=2, tokens=20, dtype="f16"
    ),
    "fp8 wire of f32": dataclasses.replace(SMALL, wire="fp8_wire", hidden=128, dtype="f32", weights=False),
    "fp8 wire, weights": dataclasses.replace(SMALL, wire="fp8_wire", hidden=512, dtype="f16"),
    "crosses once": dataclasses.replace(SMALL, crosses_once=True, routing="mixed", topk=8, tokens=40),
    "crosses once, dropped": dataclasses.replace(
        SMALL, crosses_once=True, routing="hot", topk=2, capacity=48, alignment=16, weights=False, side=12
    ),
    "crosses once, side of vectors": dataclasses.replace(SMALL, crosses_once=True, topk=6, side=32, routing="mixed"),
    "crosses once, batched": dataclasses.replace(SMALL, crosses_once=True, layout="batched", topk=6, side=5),
    "crosses once, fp8": dataclasses.replace(SMALL, crosses_once=True, quantize="fp8", hidden=640, topk=8, ranks=2),
    "crosses once, eight ranks": dataclasses.replace(
        SMALL, crosses_once=True, ranks=8, tokens=130, experts=32, topk=8, hidden=4104, sms=8, alignment=8,
        capacity=1536,
    ),
    "crosses once, two ranks": dataclasses.replace(
        SMALL, crosses_once=True, ranks=2, routing="mixed", topk=4, side=12, weights=False
    ),
    "unusual": dataclasses.replace(SMALL, unusual=True, weights=False, bias=True),
    "unusual, f16 token": dataclasses.replace(SMALL, unusual=True, dtype="f16", layout="token"),
    "unusual, two ranks": dataclasses.replace(
        SMALL, unusual=True, ranks=2, quantize="fp8", wire="fp8_wire", hidden=256, layout="batched", weights=False
    ),
    "unusual, fp8": dataclasses.replace(SMALL, unusual=True, quantize="fp8", hidden=256, layout="token"),
    "unusual, fp8 of f32": dataclasses.replace(SMALL, unusual=True, quantize="fp8", hidden=384, dtype="f32"),
    "unusual, ue8m0 of f16": dataclasses.replace(
        SMALL, unusual=True, quantize="fp8_ue8m0", hidden=128, dtype="f16", layout="batched"
    ),
    "unusual, fp8 wire": dataclasses.replace(SMALL, unusual=True, wire="fp8_wire", hidden=640, weights=False),
    "unusual, fp8 wire of f32": dataclasses.replace(
        SMALL, unusual=True, wire="fp8_wire", hidden=128, dtype="f32", layout="token"
    ),
    "fp8, fewer warps than planned": dataclasses.replace(  # their room holds a row's scales
        SMALL, quantize="fp8", hidden=262144, tokens=17, ranks=2, experts=4, topk=2, layout="token", sms=1
    ),
    "steps and rounds": dataclasses.replace(  # several steps of a sum; staged: several rounds
        SMALL, hidden=7168, topk=8, experts=16, tokens=24, staging_bytes=1 << 19, weights=False
    ),
    "one block": dataclasses.replace(SMALL, sms=1),
    "16 blocks": dataclasses.replace(SMALL, ranks=8, sms=16, tokens=257, layout="token"),
}  # fmt: skip


@pytest.mark.parametrize("staged", [False, True], ids=["direct", "staged"])
@pytest.mark.parametrize("bulk", [True, False], ids=["bulk", "vector"])
@pytest.mark.parametrize("name", CASES)
def test_equals_reference(name, bulk, staged):
    case = dataclasses.replace(CASES[name], bulk=bulk, staged=staged)
    ranks = make(case)
    for seed in range(NUM_SEEDS):
        check(case, ranks, seed)


@pytest.mark.parametrize("staged", [False, True], ids=["direct", "staged"])
@pytest.mark.parametrize("layout", ["expert", "token"])
def test_random_delays_and_many_calls(layout, staged):
    check_with_delays(
        Case(ranks=4, tokens=64, topk=4, experts=16, hidden=256, layout=layout, weights=False, staged=staged)
    )


def test_call_1000_equals_call_1():
    case = Case(ranks=4, tokens=64, topk=4, experts=16, hidden=256, layout="token")
    check_calls_1_and_1000(case)


def _ready(case, timeout_s):
    """Ranks that have routed once, with operands for every operation."""
    ranks = make(case, timeout_s=timeout_s)
    data = inputs(case, 0)
    for name in ("x", "topk_idx", "weights", "y", "scalars"):
        for r in range(case.ranks):
            ranks.write(name, r, np.ascontiguousarray(data[name][r]).tobytes())
    ranks.launch("dispatch")
    ranks.synchronize()
    return ranks


@pytest.mark.parametrize("op", ["dispatch", "combine"])
def test_absent_rank_is_named_and_late_rank_writes_nothing(op):
    case = Case(ranks=3, experts=9, layout="token", tokens=16)
    ranks = _ready(case, timeout_s=0.5)
    result = "recv_x" if op == "dispatch" else "out"
    ranks.launch(op, absent=[2])
    ranks.synchronize()
    before = [ranks.read(result, r) for r in range(3)]
    for r in (0, 1):
        failure = ranks.failure(r)
        assert (failure["code"], failure["peer"], failure["rank"]) == (1, 2, r)
        assert set(before[r]) == {0xFF}  # poisoned
    ranks.launch(op, absent=[0, 1])  # rank 2 comes after the others left
    ranks.synchronize()
    assert ranks.failure(2)["code"] == 4
    assert [ranks.read(result, r) for r in (0, 1)] == before[:2]
    ranks.launch("dispatch")  # a broken group poisons and returns at once
    ranks.synchronize()
    ranks.reset()
    check(case, ranks, 3)


@pytest.mark.parametrize("order", [(0, 1, 2), (0, 2, 1), (2, 0, 1)])
def test_all_name_the_late_rank(order):
    """One rank leaves, a second comes, waits and leaves, the third comes too late: nobody blames the healthy ones."""
    first, second, late = order
    ranks = _ready(Case(ranks=3, experts=9, layout="token", tokens=16), timeout_s=0.3)
    delays = [0, 0, 0]
    delays[second], delays[late] = 150_000_000, 380_000_000
    ranks.launch("dispatch", delays)
    ranks.synchronize()
    assert ranks.failure(late)["code"] == 4  # PeerFailed: it came too late
    for r in (first, second):
        assert (ranks.failure(r)["code"], ranks.failure(r)["peer"]) == (1, late), ranks.failure(r)


@pytest.mark.parametrize("skew_us", [0, 50, 5000])
def test_both_sides_see_the_mismatch(skew_us):
    ranks = _ready(Case(ranks=2, experts=8, layout="token", tokens=16), timeout_s=0.5)
    ranks.launch("dispatch", [skew_us * 1000, 0], absent=[1])
    ranks.launch("combine", absent=[0])
    ranks.synchronize()
    assert [ranks.failure(r)["code"] for r in range(2)] == [3, 3]
    assert [ranks.failure(r)["peer"] for r in range(2)] == [1, 0]


def test_windows_that_differ_are_a_mismatch():
    """The window is data, so a program cannot be refused for it; ranks must still not deliver different ones."""
    ranks = _ready(Case(ranks=2, experts=8, window=0, capacity=16), timeout_s=0.5)
    ranks.write("window", 1, np.int32(1).tobytes())
    ranks.launch("dispatch")
    ranks.synchronize()
    assert [ranks.failure(r)["code"] for r in range(2)] == [3, 3]


def test_a_limit_that_never_ends():
    case = Case(ranks=2, layout="token")
    check(case, make(case, timeout_s=9e9), 0)
