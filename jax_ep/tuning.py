"""Which mode a call takes with mode="auto", and how many SMs by default.

Pure functions of the set-up records and of static shapes, so that all ranks choose alike.

SMs in throughput mode: the fewest that reach what the link or the memory allows. Per rank and call::

    touched = num_tokens * row_bytes * (rows read and written per token)        what its SMs move
    crossed = num_tokens * row_bytes * (expected ranks on other GPUs per token) what goes over the link
    limit   = max(ranks_on_gpu * touched / DEVICE_RATE, ranks_on_gpu * crossed / LINK_RATE, FIXED_S)
    num_sms = headroom * max(touched / SM_RATE, crossed / SM_LINK_RATE) / limit

rounded up, at least LEAST_SMS, at most MOST_SMS and the GPU's SMs over the ranks on it. Routing is taken as uniform.
docs/performance.md says where the constants come from.
"""

from __future__ import annotations

import dataclasses
import math

# Measured on an H200; other GPUs are taken to have the same ratios.
DEVICE_RATE = 4300e9  # bytes/s of device memory, read plus write
LINK_RATE = 344e9  # bytes/s over NVLink each way, both directions busy
SM_RATE = 74e9  # bytes/s that one SM moves, read plus write
SM_LINK_RATE = 25e9  # bytes/s that one SM sends to (or fetches from) other GPUs
FIXED_S = 20e-6  # what a call takes however little it moves: SMs that only shorten the rest are not worth it
LINK_HEADROOM = 1.1  # the link saturates sharply,
DEVICE_HEADROOM = 2.1  # memory gradually
LEAST_SMS, MOST_SMS = 4, 48

# Latency mode: up to how many bytes that a rank sends it is preferred, and how much memory its slots may take; SMs by
# the pieces (tokens times ranks) that each takes. Rows pass through memory once more, which ranks that share a GPU feel
# early; combine has no routing to win on. With GPUs of their own the limit is not fitted to measurements yet.
LATENCY_BYTES_SHARED = {"dispatch": 5 << 19, "combine": 1 << 19}
LATENCY_BYTES_ALONE = 12 << 20
LATENCY_SLOTS_BYTES = 64 << 20
LATENCY_PIECES_PER_SM = 8
LATENCY_MOST_SMS = 32

# Whether XLA may record calls into command buffers where Config.command_buffers is None: it is faster
# (docs/performance.md). Where it is not done whatever this says: lowering.py.
COMMAND_BUFFERS = True

# Several nodes: the most SMs that carry chunks, what is taken where nothing is known, and the kernels' most blocks.
NODE_MOST_SMS = 16
NODE_FALLBACK_SMS = 2
NODE_MOST_BLOCKS = 64
NODE_LATENCY_SMS = 4  # carriers in latency mode, as many as puts of a slot's rows (kSlotPuts of cuda/layout.h)


@dataclasses.dataclass(frozen=True)
class Placement:
    """Where the ranks of a mesh are; a pure function of the records (`records.placement`)."""

    max_num_sms: int  # SMs of a GPU over the ranks on it: what keeps all ranks' blocks resident together
    ranks_on_gpu: int  # of all groups of the mesh, on the GPU that has most
    group_on_gpu: int  # of one group, on one GPU, where they are fewest: num_ranks when nothing crosses a link


def ranks_per_token(num_ranks: int, num_experts: int, num_topk: int) -> tuple[float, float]:
    """Expected ranks that a token reaches, and those of them that hold several of its experts, uniform routing."""
    num_local = num_experts // num_ranks
    num_topk = min(num_topk, num_experts)
    ways = math.comb(num_experts, num_topk)
    none = math.comb(num_experts - num_local, num_topk) / ways
    one = num_local * math.comb(num_experts - num_local, num_topk - 1) / ways
    return num_ranks * (1 - none), num_ranks * max(0.0, 1 - none - one)


def rows_touched(op: str, layout: str, num_ranks: int, num_experts: int, num_topk: int) -> float:
    """Rows that all SMs together read and write per token of a rank.

    op "dispatch" reads a row and writes it once per rank; where rows lie by expert the receiver then copies it for
    the other experts. "combine" reads them; where they lie by expert the holder first writes one sum per rank that
    holds several of them.
    """
    reached, several = ranks_per_token(num_ranks, num_experts, num_topk)
    if layout == "token":
        return 1 + reached
    return num_topk + 2 * several + 1 if op == "combine" else 1 + num_topk + several


def default_num_sms(
    placement: Placement,
    *,
    op: str,
    layout: str,
    num_ranks: int,
    num_experts: int,
    num_topk: int,
    num_tokens: int,
    row_bytes: int,
) -> int:
    """SMs of one call. `op` is "dispatch" (also along a handle) or "combine"; `row_bytes` are those on the wire."""
    payload = num_tokens * row_bytes
    reached, _ = ranks_per_token(num_ranks, num_experts, num_topk)
    touched = payload * rows_touched(op, layout, num_ranks, num_experts, num_topk)
    crossed = payload * reached * (1 - placement.group_on_gpu / num_ranks)
    device_s = placement.ranks_on_gpu * touched / DEVICE_RATE
    link_s = placement.ranks_on_gpu * crossed / LINK_RATE
    headroom = DEVICE_HEADROOM if device_s > link_s else LINK_HEADROOM
    wanted = headroom * max(touched / SM_RATE, crossed / SM_LINK_RATE) / max(device_s, link_s, FIXED_S)
    return min(max(math.ceil(wanted), LEAST_SMS), MOST_SMS, placement.max_num_sms)


def prefers_latency(
    placement: Placement,
    *,
    op: str,
    num_ranks: int,
    num_experts: int,
    num_topk: int,
    num_tokens: int,
    row_bytes: int,
    slots_bytes: int,
) -> bool:
    """Whether mode="auto" means latency mode.

    `op` is "dispatch" (also along a handle) or "combine"; `row_bytes` are those on the wire, `slots_bytes` those of all
    slots.
    """
    reached, _ = ranks_per_token(num_ranks, num_experts, num_topk)
    limit = LATENCY_BYTES_SHARED[op] if placement.ranks_on_gpu > 1 else LATENCY_BYTES_ALONE
    return num_tokens * row_bytes * reached <= limit and slots_bytes <= LATENCY_SLOTS_BYTES


def latency_num_sms(placement: Placement, *, num_ranks: int, num_tokens: int) -> int:
    """SMs of one call in latency mode: enough warps that each has little to do."""
    wanted = math.ceil(num_tokens * num_ranks / LATENCY_PIECES_PER_SM)
    return min(max(wanted, LEAST_SMS), LATENCY_MOST_SMS, placement.max_num_sms)


def node_rows(
    op: str, layout: str, num_ranks: int, num_nodes: int, num_experts: int, num_topk: int
) -> tuple[float, float]:
    """Rows per token of a rank over several nodes: those that SMs of calls read and write, and those of carriers.

    With X, the other nodes that a token reaches: a carrier reads and writes each. dispatch packs each, and the partner
    reads it; combine writes and reads each sum, and adds up more than on one node, which is taken for two rows more:
    with 8 ranks 13 + 3 SMs were faster than 12 + 4.
    """
    reached, _ = ranks_per_token(num_nodes, num_experts, num_topk)
    others = reached * (num_nodes - 1) / num_nodes
    own = 2.0 if op == "combine" else 0.0
    return rows_touched(op, layout, num_ranks, num_experts, num_topk) + own + 2 * others, 2 * others


def node_sms(
    placement: Placement | None,
    asked: int | None,
    num_sms: int | None = None,
    *,
    op: str,
    layout: str,
    num_nodes: int,
    num_tokens: int,
    row_bytes: int,
    **sizes: int,
) -> int:
    """SMs of a rank that carry chunks to other nodes, beside the call's: as many as keep pace with those.

    An SM that carries is taken to move as much as one that moves rows, as both use the copy engine. `asked` and
    `num_sms`: of `Config`. `sizes`: num_ranks, num_experts and num_topk.
    """
    if asked:
        return asked
    if placement is None:
        return NODE_FALLBACK_SMS
    moved, carried = node_rows(op, layout, num_nodes=num_nodes, **sizes)
    per_sm = carried / moved  # carriers per SM of the call
    wanted = num_sms or default_num_sms(
        placement, op=op, layout=layout, num_tokens=num_tokens, row_bytes=row_bytes, **sizes
    )
    carriers = wanted * per_sm
    if not num_sms:  # both share what there is
        carriers = min(carriers, placement.max_num_sms * per_sm / (1 + per_sm))
    return max(1, min(round(carriers), NODE_MOST_SMS, placement.max_num_sms - (num_sms or 1)))


def latency_node_sms(placement: Placement | None, asked: int | None, num_sms: int | None = None) -> int:
    """The same in latency mode: each put of a slot's rows at once, with at most a quarter of what there is."""
    if asked:
        return asked
    if placement is None:
        return NODE_FALLBACK_SMS
    return max(1, min(NODE_LATENCY_SMS, placement.max_num_sms // 4, placement.max_num_sms - (num_sms or 1)))


def node_num_sms(placement: Placement, num_sms: int, num_carriers: int) -> int:
    """SMs of one call over several nodes, of which `num_sms` would be taken on one."""
    return max(1, min(num_sms, placement.max_num_sms - num_carriers, NODE_MOST_BLOCKS))
