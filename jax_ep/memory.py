"""buffer_bytes: what one dispatch and its combine take, per rank and kind, before anything is compiled.

Results are counted by tracing the operations; the arena by the arithmetic of cuda/layout.h, repeated here (a test
compiles that header and compares).
"""

from __future__ import annotations

import concurrent.futures
import dataclasses

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, PartitionSpec

from jax_ep import shapes
from jax_ep.combine import combine
from jax_ep.config import Config
from jax_ep.dispatch import dispatch
from jax_ep.layout import FUSED_SLOTS, Handle, Recv, split_slots
from jax_ep.quantize import Quantized

_CONTROL_BYTES = _ANNOUNCE_BYTES = _FLAGS_UNIT = 128
_MAX_BLOCKS = 256
_STAGING_UNIT = 1024
_PARITIES = 2
_MAX_NODE_BLOCKS, _NODE_FLAGS, _PUT_BYTES, _PUTS_PER_SLOT = 64, 3, 64, 6


@dataclasses.dataclass(frozen=True)
class BufferBytes:
    """Bytes on one rank, by kind."""

    arena: int  # own symmetric memory: per group and size class, shared by all calls, made at compile time, kept
    recv: int  # what dispatch delivers: rows, with their scales if quantised, and weights
    handle: int  # the integer arrays of the handle; recv's sizes and counts are some of them
    scratch: int  # partial sums in combine, or narrow rows that "fp8_wire" widens: only while the call runs
    out: int  # what combine returns

    @property
    def total(self) -> int:
        """All kinds together."""
        return sum(dataclasses.astuple(self))


def buffer_bytes(
    *,
    num_tokens: int,
    hidden: int,
    num_topk: int,
    num_experts: int,
    num_ranks: int,
    dtype=jnp.bfloat16,
    layout: str = "expert",
    capacity: int | None = None,
    expert_alignment: int = 1,
    quantize: str | None = None,
    mode: str = "throughput",
    is_split: bool = False,
    config: Config | None = None,
) -> BufferBytes:
    """Bytes that one dispatch with weights and its combine take on a rank, exactly.

    Example:
      4096 tokens of 7168 bfloat16 on each of 8 ranks, 8 of 256 experts, room for twice the mean.

      >>> import jax_ep
      >>> sizes = dict(num_tokens=4096, hidden=7168, num_topk=8, num_experts=256, num_ranks=8)
      >>> taken = jax_ep.buffer_bytes(**sizes, capacity=2 * 4096 * 8)
      >>> [n >> 20 for n in (taken.arena, taken.recv, taken.scratch, taken.out)]  # MiB
      [16, 896, 448, 56]
      >>> jax_ep.buffer_bytes(**sizes).recv >> 20  # the default capacity, which no routing exceeds
      3585

    Args:
      num_tokens: of each rank.
      hidden: channels of x and of what the experts return.
      num_topk: columns of topk_idx.
      num_experts: of the whole group; with an expert_map num_physical_experts.
      num_ranks: size of the group.
      dtype: of x, and of what the experts return.
      layout: as `dispatch` takes it, with its default; so are the next three.
      capacity: likewise.
      expert_alignment: likewise.
      quantize: likewise.
      mode: "throughput" or "latency": whichever of the two `dispatch` is given, or makes of "auto".
      is_split: whether start and done are called, which take the slots of latency mode whatever `mode` is.
      config: as `dispatch` takes it.

    Returns:
      `BufferBytes`: arena, recv, handle, scratch, out, and their total.

    Raises:
      ValueError, TypeError, NotImplementedError: as `dispatch` raises them.

    Notes:
      Callable anywhere; no device is used. arena and scratch are those of the CUDA implementation, with a combine that
      does not quantise; the pure-JAX one has no arena and gathers [num_ranks * num_tokens, hidden] instead. The
      driver rounds the arena up to its unit, mostly 2 MiB. A backward pass takes scratch, recv and out once more; what
      it keeps from the forward pass is the handle and, for weighted sums, the experts' output. What XLA, the experts
      and CUDA itself take is not in it.
    """
    num_ranks = shapes.positive_int("buffer_bytes", "num_ranks", num_ranks)
    config = shapes.config("buffer_bytes", config)
    if shapes.mode("buffer_bytes", mode) == "auto":
        raise ValueError(
            'buffer_bytes: got mode="auto", expected "throughput" or "latency"; which of them it becomes depends on '
            "where the ranks are, so ask about both"
        )
    num_slots = split_slots(config) if is_split else FUSED_SLOTS if mode == "latency" else 0
    num_nodes = -(-num_ranks // min(config.ranks_per_node or num_ranks, num_ranks))
    is_wire = quantize == "fp8_wire"  # the rows arrive as in "fp8" and are then widened
    traced: dict = {}

    def layer(x, idx, weights):
        recv = dispatch(
            x, idx, weights, num_experts=num_experts, axis_name="ep", layout=layout, capacity=capacity,
            expert_alignment=expert_alignment, quantize="fp8" if is_wire else quantize, config=config,
        )  # fmt: skip
        rows = jnp.zeros(_parts(recv)[0].shape, dtype)
        traced.update(recv=recv, out=combine(rows, recv.handle))
        return x

    def tokens(width, dtype):
        return jax.ShapeDtypeStruct((num_tokens, width), dtype)

    same = PartitionSpec()  # on every rank: only shapes matter
    run = jax.shard_map(layer, mesh=AbstractMesh((num_ranks,), ("ep",)), in_specs=same, out_specs=same)
    args = tokens(hidden, dtype), tokens(num_topk, jnp.int32), tokens(num_topk, jnp.float32)
    # In a thread of its own no mesh or trace of the caller is in force.
    with concurrent.futures.ThreadPoolExecutor(1) as thread:
        thread.submit(jax.eval_shape, run, *args).result()

    recv, out = traced["recv"], traced["out"]
    handle: Handle = recv.handle
    data, scale = _parts(recv)
    row_bytes = hidden * out.dtype.itemsize
    sent_bytes = hidden * data.dtype.itemsize
    if scale is not None:
        sent_bytes += shapes.round_up(scale.shape[-1] * scale.dtype.itemsize, shapes.ROW_UNIT_BYTES)
    delivered = handle.spec.num_rows * row_bytes if is_wire else _bytes(data, scale)
    partials = 0 if layout == "token" or num_slots else handle.spec.num_slots(num_tokens) * row_bytes

    def shape(row_bytes):
        if num_slots:
            return latency_arena_shape(num_ranks, num_nodes, num_experts, row_bytes, num_topk, num_tokens, num_slots)
        if num_nodes > 1:
            return node_arena_shape(num_ranks, num_nodes, num_experts, row_bytes, num_topk, config.node_bytes)
        return arena_shape(num_ranks, num_experts, row_bytes, num_topk, config.staging_bytes)

    # Calls whose rows differ much in size may need two arenas.
    arenas = {shape(row_bytes) for row_bytes in (sent_bytes, row_bytes)}
    return BufferBytes(
        arena=sum(arena_bytes(num_ranks, *shape) for shape in arenas),
        recv=delivered + _bytes(recv.weights),
        handle=_bytes(*handle.arrays, handle.stats),
        scratch=max(partials, _bytes(data, scale) if is_wire else 0),
        out=_bytes(out),
    )


def arena_shape(
    num_ranks: int, num_experts: int, row_bytes: int, num_topk: int, staging_bytes: int
) -> tuple[int, int, int, int]:
    """`(count_words, staging_bytes, 0, 1)`: the size class that serves a call, as `arena_shape` of cuda/layout.h."""
    record_bytes = shapes.round_up(row_bytes + num_topk * 8 + 4, 16)
    while staging_bytes < _PARITIES * num_ranks * record_bytes:
        staging_bytes *= 2
    return _count_words(num_ranks, num_experts), staging_bytes, 0, 1


def latency_arena_shape(
    num_ranks: int, num_nodes: int, num_experts: int, row_bytes: int, num_topk: int, num_tokens: int, num_slots: int
) -> tuple[int, int, int, int]:
    """`(count_words, staging_bytes, num_slots, num_nodes)`, as `latency_arena_shape` of cuda/layout.h."""
    # Counts, tokens of the arrivals, their experts and places, weights, where rows lie, rows (SlotShape).
    tables = (num_tokens * 4, *3 * (num_tokens * num_topk * 4,), num_tokens * 4)
    parts = ((num_experts + num_ranks) * 4, *tables, num_tokens * row_bytes)
    source_bytes = sum(shapes.round_up(n, _FLAGS_UNIT) for n in parts) + 256
    remote_ranks = num_ranks - num_ranks // num_nodes if num_nodes > 1 else 0  # a slot has room for what is put to them
    staging_bytes = num_slots << 20
    while staging_bytes // num_slots // _STAGING_UNIT * _STAGING_UNIT < (num_ranks + remote_ranks) * source_bytes:
        staging_bytes *= 2
    return _count_words(num_ranks, num_experts), staging_bytes, num_slots, num_nodes


def node_arena_shape(
    num_ranks: int, num_nodes: int, num_experts: int, row_bytes: int, num_topk: int, node_bytes: int
) -> tuple[int, int, int, int]:
    """`(count_words, staging_bytes, 0, num_nodes)`, as `node_arena_shape` of cuda/layout.h."""
    # What a token of a block takes in a cell (NodeCell): a record each way, or a line and a sum each way.
    line_bytes = shapes.round_up((3 * num_topk + num_ranks // num_nodes + 1) * 4, 16)
    dispatch_bytes = 2 * (shapes.round_up(row_bytes + 16, 16) + line_bytes) + 4
    combine_bytes = 2 * (line_bytes + num_topk * 4 + row_bytes) + 4
    least = max(dispatch_bytes, combine_bytes) + 10 * _FLAGS_UNIT
    while node_bytes // (_MAX_NODE_BLOCKS * _PARITIES * num_nodes) // _FLAGS_UNIT * _FLAGS_UNIT < least:
        node_bytes *= 2
    return _count_words(num_ranks, num_experts), node_bytes, 0, num_nodes


def _count_words(num_ranks: int, num_experts: int) -> int:
    count_words = 1
    while count_words < num_experts + num_ranks + 1:
        count_words *= 2
    return count_words


def arena_bytes(num_ranks: int, count_words: int, staging_bytes: int, num_slots: int, num_nodes: int) -> int:
    """Symmetric memory of one rank, as `ArenaShape::bytes` of cuda/layout.h."""
    flags = 3 * shapes.round_up(num_ranks * 8, _FLAGS_UNIT)  # finish, ready, free
    flags += 2 * shapes.round_up(num_slots * num_ranks * 8, _FLAGS_UNIT)  # routed, credit
    flags += num_slots * num_ranks * _MAX_BLOCKS * 8  # sent
    if num_nodes > 1:
        words = 0 if num_slots else _NODE_FLAGS * _PARITIES * num_nodes * _MAX_NODE_BLOCKS
        puts = 3 * num_ranks + words + num_slots * num_ranks * _PUTS_PER_SLOT
        flags += words * 8 + _MAX_NODE_BLOCKS * 8 + puts * _PUT_BYTES  # flags, carried, puts
        if not num_slots:
            flags += _PARITIES * (_ANNOUNCE_BYTES + count_words * 4)  # outbox
    mailbox = _PARITIES * num_ranks * (_ANNOUNCE_BYTES + count_words * 4)
    workspace = _MAX_BLOCKS * count_words * 4
    return shapes.round_up(_CONTROL_BYTES + flags + mailbox + workspace, _STAGING_UNIT) + staging_bytes


def _parts(recv: Recv):
    """The rows and their scales, if they have any."""
    return (recv.x.data, recv.x.scale) if isinstance(recv.x, Quantized) else (recv.x, None)


def _bytes(*arrays) -> int:
    return sum(a.size * a.dtype.itemsize for a in arrays if a is not None)
