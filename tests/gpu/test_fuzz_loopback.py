"""Drawn routings through the kernels without XLA, forward and gradient, bit for bit against the NumPy oracle.

The GPU twin of tests/test_fuzz.py: 17 routings through each of 12 sets of R ranks on R streams of one process. Every
output is poisoned before every call. Bulk and vector copies and direct and staged moves take turns over the sets;
test_loopback.py has every case on all of them, and says how such a file runs alone. Sizes that are not drawn (tokens,
hidden, experts) go through in steps. `--mode latency` does all of it with the kernels of latency mode, and
`--ranks-per-node 2` with those for several nodes, over the test transport.
"""

import dataclasses

import numpy as np
import pytest
import test_loopback as loopback
from exchange_cases import Sizes
from hypothesis import given, seed, settings
from hypothesis import strategies as st
from routing_fuzz import REPRODUCIBLE, exact_inputs, routings
from test_loopback import Case

from jax_ep import testing

pytestmark = loopback.pytestmark
ROUTINGS_PER_CASE = 17
num_slots = 0  # of latency mode, which it means unless it is 0
ranks_per_node = put_delay_ns = 0  # several nodes, unless it is 0
DTYPES = {"bf16": "bfloat16", "f16": "float16", "f32": "float32"}

CASES = [
    Case(ranks=1, experts=6, topk=4, tokens=40, bias=True),
    Case(ranks=2, experts=12, topk=3, tokens=65, alignment=16, dtype="f32", bulk=False),
    Case(ranks=2, experts=64, topk=9, tokens=33, capacity=200, dtype="f16", staged=True),
    Case(ranks=2, experts=8, topk=2, tokens=70, layout="token", bulk=False, staged=True),
    Case(ranks=3, experts=9, topk=9, tokens=20, hidden=136, capacity=120, alignment=5, bulk=False),
    Case(ranks=3, experts=30, topk=4, tokens=31, layout="token", dtype="f16", capacity=40, sms=2),
    Case(ranks=4, experts=16, topk=6, tokens=33, hidden=520, capacity=160, alignment=16),
    Case(ranks=4, experts=8, topk=2, tokens=37, weights=False, bias=True, bulk=False, staged=True),
    Case(ranks=4, experts=32, topk=8, tokens=29, layout="token", dtype="f32", bias=True, staged=True),
    Case(ranks=5, experts=20, topk=3, tokens=17, hidden=8, alignment=7, dtype="f32", sms=3),
    Case(ranks=8, experts=16, topk=5, tokens=19, capacity=96, alignment=32, staged=True),
    Case(ranks=8, experts=64, topk=8, tokens=23, layout="token", capacity=100, bulk=False, sms=8),
]


@pytest.fixture(autouse=True, scope="module")
def _mode(request):
    global num_slots, ranks_per_node, put_delay_ns
    option = request.config.getoption
    num_slots = 2 if option("--mode") == "latency" else 0
    ranks_per_node, put_delay_ns = option("--ranks-per-node") or 0, round(option("--put-delay") * 1e9)


def with_nodes(case: Case) -> Case:
    """Nodes of as many ranks as asked for, or of one where that does not divide or is all; nothing is staged there."""
    if not ranks_per_node or case.ranks == 1:
        return case
    is_split = case.ranks > ranks_per_node and case.ranks % ranks_per_node == 0
    nodes, chunk = case.ranks // (ranks_per_node if is_split else 1), 3 if put_delay_ns else 0
    return dataclasses.replace(case, nodes=nodes, staged=False, chunk=chunk, put_delay_ns=put_delay_ns)


def sizes_of(case: Case) -> Sizes:
    return Sizes(
        case.ranks,
        case.experts,
        case.tokens,
        case.topk,
        case.hidden,
        DTYPES[case.dtype],
        layout=case.layout,
        capacity=case.capacity,
        expert_alignment=case.alignment,
    )


class Ranks:
    """The ranks of one case, repaired after a failed call, so that hypothesis can shrink what failed."""

    def __init__(self, case: Case):
        self.case = with_nodes(dataclasses.replace(case, slots=num_slots))
        self.ranks = loopback.make(self.case)

    def begin(self) -> None:
        if any(self.ranks.failure(r)["code"] for r in range(self.case.ranks)):
            self.ranks.reset()

    def put(self, **operands) -> None:
        for name, value in operands.items():
            if self.ranks.bytes(name):
                for r in range(self.case.ranks):
                    self.ranks.write(name, r, np.ascontiguousarray(value[r]).tobytes())

    def call(self, op: str, results) -> None:
        for name in results:
            self.ranks.fill(name, 0xAB)
        self.ranks.launch(op)
        self.ranks.synchronize()
        for r in range(self.case.ranks):
            assert self.ranks.failure(r)["code"] == 0, self.ranks.failure(r)

    def same(self, name: str, expected: np.ndarray, what: str = "") -> None:
        if self.ranks.bytes(name):
            got = loopback.read(self.ranks, self.case, name, expected)
            testing.same_bits(got, expected, what or name)


def check(ranks: Ranks, topk_idx: np.ndarray, data_seed: int) -> None:
    case = ranks.case
    i, oracle = exact_inputs(sizes_of(case), topk_idx, data_seed)
    is_weighted = case.weights and case.layout != "token"
    nodes = dict(ranks_per_node=case.ranks // case.nodes)
    ranks.begin()

    ranks.put(x=i.x, topk_idx=i.topk_idx, weights=i.topk_weights)
    ranks.call("dispatch", loopback.RESULTS)
    renamed = {"recv_x": "x", "recv_weights": "weights", "topk_clean": "topk_idx"}
    for name in (n for n in loopback.RESULTS if n != "recv_side"):  # nothing travels beside these rows
        ranks.same(name, getattr(oracle, renamed.get(name, name)))

    ranks.put(y=i.y, y_weights=i.weights, bias=i.bias, scalars=i.g_recv_weights)
    ranks.call("combine", ("out", "out_scalars", "partial"))
    operands = i.weights if is_weighted else None, i.bias if case.bias else None
    out = testing.oracle_combine(oracle, i.y, *operands, **nodes)
    ranks.same("out", out)
    g_x, g_topk_weights = testing.oracle_dispatch_grad(oracle, i.g_recv_x, i.g_recv_weights, **nodes)
    ranks.same("out_scalars", g_topk_weights, "gradient of topk_weights")

    # Backward, dispatch is a plain sum of rows that need rounding, and combine a dispatch along the handle.
    ranks.put(y=i.g_recv_x, y_weights=np.where(np.isnan(i.weights), np.nan, 1).astype(np.float32), bias=0 * i.g_out)
    ranks.call("combine", ("out", "out_scalars", "partial"))
    ranks.same("out", g_x, "gradient of x")
    ranks.put(x=i.g_out)
    ranks.call("redispatch", ("recv_x", "recv_weights"))
    ranks.same("recv_x", testing.oracle_redispatch(oracle, i.g_out), "gradient of y")
    ranks.same("recv_weights", oracle.weights, "weights along the handle")


def check_once(case: Case) -> None:
    ranks, sizes = Ranks(case), sizes_of(case)
    for n, kind in enumerate(("duplicates", "masked")):
        routing = dict(num_ranks=case.ranks, num_tokens=case.tokens, num_topk=case.topk, num_experts=case.experts)
        check(ranks, testing.routing(kind, **routing, seed=n), sizes.num_tokens + n)


@pytest.mark.parametrize("layout", ["expert", "token"])
@pytest.mark.parametrize("tokens", [1, 2, 3, 4, 8, 16, 31, 32, 33, 63, 64, 65, 127, 128, 129, 255, 256, 257, 672])
def test_token_counts(tokens, layout):
    """B05, B25: around every unit in which tokens may be counted; capacities are the default ones."""
    check_once(Case(ranks=2, experts=8, topk=2, tokens=tokens, hidden=64, layout=layout, staged=tokens % 2 == 0))


@pytest.mark.parametrize("bulk", [True, False], ids=["bulk", "vector"])
@pytest.mark.parametrize(
    "hidden",
    [8, 24, 32, 64, 120, 128, 192, 520, 1536, 2048, 2560, 2880, 3072, 4096, 5120, 6144, 7168, 8192, 16384],
)  # fmt: skip
def test_hidden_sizes(hidden, bulk):
    """B16: to the last column, whatever the row's size; nothing lies between two rows, so a long copy shows."""
    check_once(
        Case(ranks=2, experts=4, topk=2, tokens=17, hidden=hidden, layout="token", bulk=bulk, staging_bytes=1 << 16)
    )


@pytest.mark.parametrize(("experts", "tokens"), [(2, 1), (4, 128), (64, 1), (128, 128), (256, 5), (512, 1), (512, 128)])
def test_expert_counts(experts, tokens):
    """B20: fewer and more experts than threads of a block, one token and many."""
    check_once(Case(ranks=2, experts=experts, topk=2, tokens=tokens, hidden=64, sms=1 + experts % 3))


def test_enough_routings_over_few_cases():
    assert len(set(CASES)) == len(CASES) <= 12 and len(CASES) * ROUTINGS_PER_CASE >= 200


@pytest.mark.parametrize("number", range(len(CASES)))
def test_drawn_routings(number):
    case = CASES[number]
    ranks = Ranks(case)

    @seed(number)
    @settings(REPRODUCIBLE, max_examples=ROUTINGS_PER_CASE)
    @given(routings(sizes_of(case)), st.integers(0, 99))
    def run(topk_idx, data_seed):
        check(ranks, topk_idx, data_seed)

    run()
