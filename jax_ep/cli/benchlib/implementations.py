"""Implementations that the bench compares: ours, and what XLA's collectives offer.

All run inside `jax.shard_map` over the axis "ep" and have the same three functions:

    rows, state = dispatch(x, topk_idx, topk_weights)
    rows = expert(rows, state)     # identity experts, result in the workload's dtype; applies the weights where combine
                                   # does not. Never timed.
    out = combine(rows, state)     # = sum over k of weight * x, when nothing is dropped

Ours also have `again(x, state)`, dispatch along the handle, `combine_fp8(rows, state)`, and `dispatch_split` and
`combine_split`, start and done right after each other.

The baselines move what they must and nothing else: none of them sorts the received rows by expert, which ours does.
FP8 rows and their scales are two arrays to them, sent one after the other.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import lax

import jax_ep
from jax_ep.cli.benchlib.workloads import Traffic, Workload

AXIS = "ep"
OURS = ("cuda", "xla")


@dataclass(frozen=True)
class JaxEp:
    """`jax_ep.dispatch` and `combine`."""

    workload: Workload
    layout: str
    capacity: int
    zero_tail: bool
    implementation: str  # "cuda" | "xla"
    num_sms: int | None = None  # None: by the model of tuning.py
    mode: str = "throughput"
    is_recorded: bool | None = None  # into command buffers, as XLA likes; None: by Config's default
    ranks_per_node: int | None = None  # None: one node
    transport: str = "auto"  # between nodes

    def dispatch(self, x, idx, weights):
        return _received(jax_ep.dispatch(x, idx, weights, **self._settings))

    def dispatch_split(self, x, idx, weights):
        return _received(jax_ep.dispatch_done(jax_ep.dispatch_start(x, idx, weights, **self._settings)))

    def again(self, x, state):
        handle = self._planned(state[0])
        return _without_carrier(jax_ep.dispatch(x, handle=handle, quantize=self._quantize, zero_tail=self.zero_tail).x)

    def expert(self, rows, state):
        rows = _dequantize(rows, self.workload)
        if self.layout == "token":
            return (rows * state[1].sum(1, keepdims=True)).astype(rows.dtype)
        return rows

    def combine(self, rows, state):
        return jax_ep.combine(rows, **self._outputs(state))

    def combine_fp8(self, rows, state):
        return jax_ep.combine(rows, **self._outputs(state), quantize="fp8_wire")

    def combine_split(self, rows, state):
        return jax_ep.combine_done(jax_ep.combine_start(rows, **self._outputs(state)))

    @property
    def _settings(self) -> dict:
        """Of a dispatch that routes."""
        return dict(
            num_experts=self.workload.num_experts,
            axis_name=AXIS,
            layout=self.layout,
            capacity=self.capacity,
            quantize=self._quantize,
            zero_tail=self.zero_tail,
            mode=self.mode,
            config=self._config,
            implementation=self.implementation,
        )

    def _outputs(self, state) -> dict:
        """What combine takes beside the rows."""
        handle, weights = state
        return {"handle": self._planned(handle), "weights": None if self.layout == "token" else weights}

    @property
    def _quantize(self) -> str | None:
        return "fp8" if self.workload.sent == "fp8" else None

    @property
    def _config(self) -> jax_ep.Config:
        return jax_ep.Config(
            num_sms=self.num_sms,
            command_buffers=self.is_recorded,
            ranks_per_node=self.ranks_per_node,
            transport=self.transport,
        )

    def _planned(self, handle):
        """The handle for calls with this object's SMs, whatever those were that made it."""
        return dataclasses.replace(handle, spec=dataclasses.replace(handle.spec, config=self._config))


def _received(recv: jax_ep.Recv):
    return _without_carrier(recv.x), (recv.handle, recv.weights)


def _without_carrier(rows):
    """The carrier of a gradient is zeros that nobody reads; as a program's result it would be written."""
    return jax_ep.Quantized(rows.data, rows.scale) if isinstance(rows, jax_ep.Quantized) else rows


def _dequantize(rows, workload: Workload):
    return rows.dequantize(workload.dtype) if isinstance(rows, jax_ep.Quantized) else rows


@dataclass(frozen=True)
class _KFold:
    """Common part of the baselines that send one row per (token, expert): entries sorted by expert."""

    workload: Workload
    num_ranks: int

    def _sort(self, idx):
        num_experts = self.workload.num_experts
        key = jnp.where(idx < 0, num_experts, idx).reshape(-1)
        order = jnp.argsort(key, stable=True).astype(jnp.int32)
        per_expert = jnp.zeros(num_experts, jnp.int32).at[key].add(1, mode="drop")
        return order, per_expert.reshape(self.num_ranks, -1).sum(1, dtype=jnp.int32)

    def expert(self, rows, state):
        return rows

    def _reduce(self, back, weights, dtype):
        """f32 sum over k of weight * row; `back` is [num_tokens, num_topk, hidden]."""
        return (back.astype(jnp.float32) * weights[..., None]).sum(1).astype(dtype)


@dataclass(frozen=True)
class Ragged(_KFold):
    """`lax.ragged_all_to_all` (no CPU lowering)."""

    capacity: int

    def dispatch(self, x, idx, weights):
        order, send = self._sort(idx)
        sizes = lax.all_gather(send, AXIS)  # [source, destination]
        me = lax.axis_index(AXIS)
        in_offsets, recv = jnp.cumsum(send) - send, sizes[:, me]
        out_offsets = (jnp.cumsum(sizes, 0) - sizes)[me]
        buffer = jnp.zeros((self.capacity, x.shape[1]), x.dtype)
        rows = lax.ragged_all_to_all(
            x[order // self.workload.num_topk], buffer, in_offsets, send, out_offsets, recv, axis_name=AXIS
        )
        return rows, (jnp.argsort(order), send, recv, sizes, jnp.where(idx < 0, 0, weights))

    def combine(self, rows, state):
        place, send, recv, sizes, weights = state
        me = lax.axis_index(AXIS)
        in_offsets = jnp.cumsum(recv) - recv
        out_offsets = (jnp.cumsum(sizes, 1) - sizes)[:, me]
        buffer = jnp.zeros((place.size, rows.shape[1]), rows.dtype)
        back = lax.ragged_all_to_all(rows, buffer, in_offsets, recv, out_offsets, send, axis_name=AXIS)
        back = back[place].reshape(*weights.shape, -1)
        return self._reduce(back, weights, rows.dtype)


@dataclass(frozen=True)
class Dense(_KFold):
    """`lax.all_to_all` of equal blocks, one per pair of ranks, large enough for the fullest pair."""

    block: int

    def dispatch(self, x, idx, weights):
        order, send = self._sort(idx)
        first = jnp.cumsum(send) - send
        place = jnp.arange(self.block, dtype=jnp.int32)
        entry = order.at[first[:, None] + place].get(mode="fill", fill_value=0)  # [R, block]
        is_row = place < send[:, None]
        rows = jnp.where(is_row[..., None], x[entry // self.workload.num_topk], 0)
        rows = lax.all_to_all(rows.reshape(-1, x.shape[1]), AXIS, 0, 0, tiled=True)
        # Row of every entry in the blocks that come back.
        rank_of = jnp.where(idx < 0, 0, idx // (self.workload.num_experts // self.num_ranks)).reshape(-1)
        place_of = jnp.argsort(order).astype(jnp.int32) - first[rank_of]
        row_of = jnp.where(idx.reshape(-1) < 0, 0, rank_of * self.block + place_of).reshape(idx.shape)
        return rows, (row_of, jnp.where(idx < 0, 0, weights))

    def combine(self, rows, state):
        row_of, weights = state
        back = lax.all_to_all(rows, AXIS, 0, 0, tiled=True)
        return self._reduce(back[row_of], weights, rows.dtype)


@dataclass(frozen=True)
class Ring:
    """`lax.all_gather` of all tokens, `lax.psum_scatter` of the local experts' sums."""

    workload: Workload
    num_ranks: int

    def dispatch(self, x, idx, weights):
        local = idx // (self.workload.num_experts // self.num_ranks)
        ranks = jnp.arange(self.num_ranks)
        is_there = (local[:, None, :] == ranks[:, None]) & (idx >= 0)[:, None]
        scale = jnp.where(is_there, weights[:, None], 0).sum(2)  # [T, R]: this token's weight on each rank
        scale = lax.all_to_all(scale, AXIS, 1, 0, tiled=True)  # [R * T, 1]
        return lax.all_gather(x, AXIS, tiled=True), (scale,)

    def expert(self, rows, state):
        return (rows * state[0]).astype(rows.dtype)

    def combine(self, rows, state):
        return lax.psum_scatter(rows, AXIS, tiled=True)


@dataclass(frozen=True)
class Fp8Rows:
    """A baseline for rows that cross in FP8: data as bytes, then scales, each as `base` sends rows."""

    workload: Workload
    base: Ragged | Dense | Ring

    def dispatch(self, x, idx, weights):
        if not isinstance(x, jax_ep.Quantized):
            x = jax_ep.quantize(x)
        data, state = self.base.dispatch(lax.bitcast_convert_type(x.data, jnp.uint8), idx, weights)
        scale, _ = self.base.dispatch(x.scale, idx, weights)
        return jax_ep.Quantized(lax.bitcast_convert_type(data, jnp.float8_e4m3fn), scale), state

    def expert(self, rows, state):
        return self.base.expert(_dequantize(rows, self.workload), state)

    def combine(self, rows, state):
        return self.base.combine(rows, state)


def choices(platform: str) -> tuple[str, ...]:
    """Names that `make` takes on this platform, in the order of the table."""
    return ("cuda", "ragged", "dense", "ring", "xla") if platform == "gpu" else ("xla", "dense", "ring")


def make(name: str, workload: Workload, traffic: Traffic, layout: str, capacity: int, zero_tail: bool, **ours):
    """The implementation `name`; what follows `traffic` concerns ours only. `ours`: further fields of `JaxEp`."""
    if name in OURS:
        return JaxEp(workload, layout, capacity, zero_tail, name, **ours)
    base = _baseline(name, workload, traffic)
    return base if workload.sent == "rows" else Fp8Rows(workload, base)


def _baseline(name: str, workload: Workload, traffic: Traffic) -> Ragged | Dense | Ring:
    num_ranks = traffic.num_ranks
    if name == "ragged":
        return Ragged(workload, num_ranks, capacity=max(traffic.demand("expert"), 1))
    if name == "dense":
        return Dense(workload, num_ranks, block=max(-(-int(traffic.rows.max()) // 8) * 8, 8))
    if name == "ring":
        return Ring(workload, num_ranks)
    raise ValueError(f"unknown implementation {name!r}; expected one of {choices(jax.default_backend())}")
