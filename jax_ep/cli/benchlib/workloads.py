"""Workloads: shapes, routing, and how many bytes an exchange of them cannot avoid moving."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from jax_ep import testing

# again: a second tensor along the handle; split: start and done
OPS = ("dispatch", "again", "combine", "combine fp8", "dispatch split", "combine split")
SENT = ("rows", "fp8", "pair")  # rows of dtype; quantised by dispatch; quantised before it, opaque to it
ROUTINGS = (
    *testing.ROUTINGS,
    "half_empty",  # the first half of the ranks (rounded up) among themselves; the others neither send nor receive
    "alone",  # rank 0 sends to itself; all others neither send nor receive
)


@dataclass(frozen=True)
class Workload:
    """One exchange."""

    name: str
    num_tokens: int  # per rank
    hidden: int = 7168
    num_topk: int = 8
    num_experts: int = 256
    dtype: str = "bfloat16"
    routing: str = "uniform"  # one of ROUTINGS
    sent: str = "rows"  # one of SENT

    @property
    def row_bytes(self) -> int:
        """A row of x (before quantising), of y and of the result."""
        return self.hidden * (4 if self.dtype == "float32" else 2)

    @property
    def fp8_bytes(self) -> int:
        """A quantised row with its float32 scales, one per 128 channels."""
        return self.hidden + self.hidden // 32

    def crossing_bytes(self, op: str) -> int:
        """Of a row on its way from rank to rank."""
        is_narrow = op == "combine fp8" or (not op.startswith("combine") and self.sent != "rows")
        return self.fp8_bytes if is_narrow else self.row_bytes


WORKLOADS = {
    w.name: w
    for w in (
        Workload("W1", 4096),
        Workload("W1f", 4096, sent="pair"),
        Workload("W1q", 4096, sent="fp8"),
        Workload("W1-1024", 1024),
        Workload("W2", 128),
        Workload("W2q", 128, sent="fp8"),
        Workload("W2-1", 1),
        Workload("W2-8", 8),
        Workload("W2-32", 32),
        Workload("W3", 8192),
        Workload("W6-zipf", 4096, routing="zipf"),
        Workload("W6-one", 4096, routing="one_rank"),
        Workload("W6-half", 4096, routing="half_empty"),
        Workload("W6-empty", 4096, routing="empty_ranks"),
        Workload("W6-alone", 4096, routing="alone"),
        Workload("small", 64, hidden=128, num_topk=4, num_experts=16),
    )
}


def topk_idx(workload: Workload, num_ranks: int) -> np.ndarray:
    """Routing of all ranks, i32 [num_ranks, num_tokens, num_topk]."""
    shape = {"num_tokens": workload.num_tokens, "num_topk": workload.num_topk}
    busy = {"half_empty": -(-num_ranks // 2), "alone": 1}.get(workload.routing)
    if busy is None:
        return testing.routing(workload.routing, num_ranks=num_ranks, num_experts=workload.num_experts, **shape)
    idx = np.full((num_ranks, *shape.values()), -1, np.int32)
    experts = workload.num_experts // num_ranks * busy
    idx[:busy] = testing.routing("uniform", num_ranks=busy, num_experts=experts, **shape)
    return idx


@dataclass(frozen=True)
class Traffic:
    """What a routing moves, from source (first axis) to destination."""

    sent: np.ndarray  # [R, R] distinct (token, destination) pairs
    rows: np.ndarray  # [R, R] (token, k) entries
    several: np.ndarray  # [R, R] those of `sent` that stand for two or more rows
    fullest_expert: int  # rows of the expert that has most

    @staticmethod
    def of(idx: np.ndarray, num_experts: int) -> Traffic:
        """Counts `topk_idx`'s result."""
        num_ranks = idx.shape[0]
        rank = np.where(idx < 0, num_ranks, idx // (num_experts // num_ranks))
        entries = (rank[..., None] == np.arange(num_ranks)).sum(2)  # [R, T, R]
        fullest = np.bincount(idx[idx >= 0], minlength=num_experts).max()
        return Traffic((entries > 0).sum(1), entries.sum(1), (entries > 1).sum(1), int(fullest))

    @property
    def num_ranks(self) -> int:
        """Size of the group."""
        return self.sent.shape[0]

    def demand(self, layout: str) -> int:
        """Receive rows of the fullest rank ("batched": of the fullest expert), expert_alignment 1."""
        if layout == "batched":
            return self.fullest_expert
        return int((self.rows if layout == "expert" else self.sent).sum(0).max())

    def wire_rows(self) -> int:
        """Rows that cross to or from the busiest rank, each once per destination."""
        crossing = self.sent - np.diag(np.diag(self.sent))
        return int(max(crossing.sum(0).max(), crossing.sum(1).max()))

    def memory_bytes(self, op: str, layout: str, workload: Workload) -> int:
        """Bytes read plus bytes written by all ranks together: what limits ranks that share one GPU.

        A row is read once and written once per destination. Where rows lie by expert a token with several experts on a
        rank crosses once, so dispatch reads it again to copy it, and combine first writes the sum of these rows; a
        token's only row on a rank is read where it is. FP8 on combine's way is another row in any case.
        """
        tokens, sent = workload.num_tokens * self.num_ranks, int(self.sent.sum())
        rows, several = (sent, 0) if layout == "token" else (int(self.rows.sum()), int(self.several.sum()))
        row_bytes, crossing = workload.row_bytes, workload.crossing_bytes(op)
        if op in ("combine", "combine split"):
            return (rows + 2 * several + tokens) * row_bytes
        if op == "combine fp8":
            return (rows + tokens) * row_bytes + 2 * sent * crossing
        return tokens * (crossing if workload.sent == "pair" else row_bytes) + (rows + several) * crossing

    def tail_rows(self, layout: str, num_rows: int) -> int:
        """Rows of all ranks' receive arrays of `num_rows` that hold no token."""
        received = (self.sent if layout == "token" else self.rows).sum(0)
        return int(np.maximum(num_rows - received, 0).sum())


def capacity(workload: Workload, traffic: Traffic, layout: str, choice: str) -> int:
    """Of a call: "demand" is that of the fullest rank (or expert), rounded up to 128; "default" the worst case."""
    if choice == "demand":
        return max(-(-traffic.demand(layout) // 128) * 128, 128)
    worst = traffic.num_ranks * workload.num_tokens
    return worst * workload.num_topk if layout == "expert" else worst


def num_rows(workload: Workload, traffic: Traffic, layout: str, capacity: int) -> int:
    """Rows of a rank's receive array."""
    return capacity * (workload.num_experts // traffic.num_ranks if layout == "batched" else 1)


def custom(base: Workload, **changes) -> Workload:
    """`base` with every change that is not None, renamed when there is one."""
    changes = {k: v for k, v in changes.items() if v is not None}
    return replace(base, name="custom", **changes) if changes else base


def with_tokens(base: Workload, num_tokens: int) -> Workload:
    """`base` with other rows per rank, named after both: one point of a plot."""
    return replace(base, name=f"{base.name}-{num_tokens}", num_tokens=num_tokens)
