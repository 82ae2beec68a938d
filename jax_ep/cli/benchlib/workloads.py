"""Workloads: shapes, routing, and how many bytes an exchange of them cannot avoid moving."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from jax_ep import testing


@dataclass(frozen=True)
class Workload:
    """One exchange. `routing`: one of `jax_ep.testing.ROUTINGS`."""

    name: str
    num_tokens: int  # per rank
    hidden: int = 7168
    num_topk: int = 8
    num_experts: int = 256
    dtype: str = "bfloat16"
    routing: str = "uniform"

    @property
    def row_bytes(self) -> int:
        return self.hidden * (4 if self.dtype == "float32" else 2)


WORKLOADS = {
    w.name: w
    for w in (
        Workload("W1", 4096),
        Workload("W1-1024", 1024),
        Workload("W2", 128),
        Workload("W3", 8192),
        Workload("W6-zipf", 4096, routing="zipf"),
        Workload("W6-one", 4096, routing="one_rank"),
        Workload("W6-empty", 4096, routing="empty_ranks"),
        Workload("small", 64, hidden=128, num_topk=4, num_experts=16),
    )
}


def topk_idx(workload: Workload, num_ranks: int) -> np.ndarray:
    """Routing of all ranks, i32 [num_ranks, num_tokens, num_topk]."""
    return testing.routing(
        workload.routing,
        num_ranks=num_ranks,
        num_tokens=workload.num_tokens,
        num_topk=workload.num_topk,
        num_experts=workload.num_experts,
    )


@dataclass(frozen=True)
class Traffic:
    """Rows that a routing moves, per rank."""

    sent: np.ndarray  # [R, R] distinct (token, destination) pairs from source to destination
    rows: np.ndarray  # [R, R] (token, k) entries from source to destination

    @staticmethod
    def of(idx: np.ndarray, num_experts: int) -> Traffic:
        """Counts `topk_idx`'s result."""
        num_ranks = idx.shape[0]
        rank = np.where(idx < 0, num_ranks, idx // (num_experts // num_ranks))
        is_to = rank[..., None] == np.arange(num_ranks)  # [R, T, K, R]
        return Traffic(is_to.any(2).sum(1), is_to.sum((1, 2)))

    def demand(self, layout: str) -> int:
        """Receive rows of the fullest rank (expert_alignment 1)."""
        return int((self.rows if layout == "expert" else self.sent).sum(0).max())

    def wire_rows(self) -> int:
        """Rows that cross to or from the busiest rank, each once per destination."""
        crossing = self.sent - np.diag(np.diag(self.sent))
        return int(max(crossing.sum(0).max(), crossing.sum(1).max()))

    def memory_rows(self, op: str, layout: str, num_tokens: int) -> int:
        """Row reads plus row writes of all ranks together: what limits ranks that share one GPU.

        A row is read once and written once per destination. In the expert layout a token with several experts on a rank
        crosses once, so dispatch copies the other rows locally, and combine first sums a rank's rows for a token to a
        partial.
        """
        tokens, slots, rows = num_tokens * self.sent.shape[0], int(self.sent.sum()), int(self.rows.sum())
        if layout == "token":
            return tokens + slots
        if op == "dispatch":
            return tokens + rows + (rows - slots)
        return rows + slots + slots + tokens


def capacity(workload: Workload, traffic: Traffic, layout: str, choice: str, num_ranks: int) -> int:
    """Rows of the receive array: "demand" is the fullest rank's, rounded up to 128; "default" the worst case."""
    if choice == "demand":
        return -(-traffic.demand(layout) // 128) * 128
    worst = num_ranks * workload.num_tokens
    return worst * workload.num_topk if layout == "expert" else worst


def custom(base: Workload, **changes) -> Workload:
    """`base` with every change that is not None, renamed when there is one."""
    changes = {k: v for k, v in changes.items() if v is not None}
    return replace(base, name="custom", **changes) if changes else base
