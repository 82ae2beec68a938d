"""What `Config(debug_checks=True)` adds: invalid expert ids, and ranks that meet with different calls, become errors.

Both are found on the device. The host hears of them through `jax.debug.callback` and keeps the first of each kind,
until `jax_ep.reset()`; `jax_ep.check()` raises it. A callback never raises itself: that would end one rank in the
middle of an exchange, and leave its peers waiting.

- Ids: every dispatch tells how many entries are invalid and which is the first. Results are those without the check.
- Calls: the CUDA kernels compare what ranks are about to do in every call, whatever the config. The pure-JAX
  implementation leaves that to XLA's collectives, which abort, hang or mix up rows; here it exchanges a line of text
  about each call first. Where lines differ no rank goes on: outputs are NaN, sizes 0.
"""

from __future__ import annotations

import functools
import logging
import threading
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jax_ep.layout import Spec

_LINE_BYTES = 512  # of the text about a call, the same on all ranks whatever they call
_SIZES = (5, 6, 7, 11)  # results of dispatch that are sizes: group_sizes, counts, stats, recv_offsets

_OPERANDS = {  # as far as they matter here
    "dispatch": ("x", "side", "topk_idx", "weights"),
    "redispatch": ("x", "side", "weights", "topk_idx"),
    "combine": ("y", "weights", "scalars", "bias", "topk_idx"),
}

_failures: dict[tuple[str, str, int], dict[str, Any]] = {}  # by kind, operation and rank
_lock = threading.Lock()


def failures() -> list[dict[str, Any]]:
    """What was found since `clear`, in the runtime's form of a failure."""
    with _lock:
        return list(_failures.values())


def clear() -> None:
    """Forgets what was found."""
    with _lock:
        _failures.clear()


def watch_ids(topk_idx: jax.Array, num_experts: int, axis_name: tuple[str, ...]) -> None:
    """Reports ids outside [-1, num_experts) when the program runs."""
    if topk_idx.size == 0:
        return
    flat = topk_idx.reshape(-1)
    is_invalid = (flat < -1) | (flat >= num_experts)
    first = jnp.argmax(is_invalid).astype(jnp.int32)
    found = jnp.stack([jnp.sum(is_invalid, dtype=jnp.int32), first, flat[first]])
    report = functools.partial(_report_ids, topk_idx.shape, num_experts)
    jax.debug.callback(report, lax.axis_index(axis_name), found)


def _report_ids(shape: tuple[int, int], num_experts: int, rank, found) -> None:
    num_invalid, first, value = np.asarray(found).tolist()
    if num_invalid:
        token, k = divmod(first, shape[1])
        _record(
            "InvalidIdError",
            "dispatch",
            int(rank),
            f"got {num_invalid} ids of {shape[0] * shape[1]} in topk_idx of rank {int(rank)} that are outside "
            f"[-1, {num_experts}), the first is {value} (token {token}, k {k}); they were not sent; "
            "correct the router, or use -1 for entries that are not routed",
        )


def same_call_first(op: str, implementation):
    """`implementation` of a primitive, which under debug_checks begins only when all ranks make the same call."""

    def run(*operands, spec: Spec, quantize: str | None):
        call = functools.partial(implementation, *operands, spec=spec, quantize=quantize)
        if not spec.config.debug_checks:
            return call()
        line = " ".join(f"{name}={value}" for name, value in _facts(op, operands, spec, quantize).items())
        own = jnp.asarray(np.frombuffer(line.encode()[:_LINE_BYTES].ljust(_LINE_BYTES), np.uint8))
        # A byte of data, which nobody compares, ties the line to its place in the program: after what made operands.
        table = lax.all_gather(jnp.append(own, _any_byte(operands)), spec.axis_name)[:, :_LINE_BYTES]
        # The table is the same on all ranks, so all take the same branch.
        is_same = jnp.all(table == table[:1])
        results = lax.cond(is_same, call, functools.partial(_nothing, op, jax.eval_shape(call)))
        # The host is handed a bit of every result, so that XLA keeps all collectives of this call also on ranks whose
        # program leaves some result unused.
        used = [a.reshape(-1)[:1] for a in results]
        jax.debug.callback(functools.partial(_report_calls, op), lax.axis_index(spec.axis_name), table, *used)
        return results

    return run


def _facts(op: str, operands, spec: Spec, quantize: str | None) -> dict[str, Any]:
    """What must be equal on all ranks, as users know it."""
    rows = operands[0]
    named = dict(zip(_OPERANDS[op], operands, strict=False))
    topk_idx = named["topk_idx"]
    return dict(
        op=op,
        num_tokens=topk_idx.shape[0],
        num_topk=topk_idx.shape[1],
        num_experts=spec.num_experts,
        hidden=rows.shape[1],
        dtype=rows.dtype,
        layout=spec.layout,
        mode=spec.mode,
        capacity=spec.capacity,
        expert_alignment=spec.expert_alignment,
        quantize=quantize,
        ranks_per_node=spec.ranks_per_node,
        operands=",".join(name for name, a in named.items() if a.shape[0] > 0),
        side_bytes=named["side"].shape[1] * named["side"].dtype.itemsize if "side" in named else 0,
    )


def _any_byte(operands) -> jax.Array:
    """A u8 that depends on every operand."""
    first = [lax.bitcast_convert_type(a.reshape(-1)[:1], jnp.uint8) for a in operands if a.size > 0]
    return sum((jnp.sum(a, dtype=jnp.uint8) for a in first), jnp.uint8(0))


def _nothing(op: str, results) -> list[jax.Array]:
    """NaN, -1 and sizes of 0 in the shapes of `results`."""
    sizes = _SIZES if op == "dispatch" else ()

    def fill(number, a):
        value = jnp.nan if jnp.issubdtype(a.dtype, jnp.floating) else 0 if number in sizes else -1
        return jnp.full(a.shape, jnp.asarray(value).astype(a.dtype), a.dtype)

    return [fill(number, a) for number, a in enumerate(results)]


def _report_calls(op: str, rank, table, *_) -> None:
    facts = [dict(f.split("=") for f in bytes(line).decode().split()) for line in np.asarray(table)]
    rank = int(rank)
    peer = next((r for r, other in enumerate(facts) if other != facts[rank]), None)
    if peer is not None:
        differing = [name for name in facts[rank] if facts[peer].get(name) != facts[rank][name]]
        mine, theirs = (", ".join(f"{name}={facts[r].get(name)}" for name in differing) for r in (rank, peer))
        _record(
            "MismatchError",
            op,
            rank,
            f"rank {rank} has {mine}, but rank {peer} has {theirs}; all ranks of a group make the same calls in the "
            "same order, with equal static arguments",
            peer,
        )


def _record(kind: str, op: str, rank: int, what: str, peer: int | None = None) -> None:
    text = f"{kind}: {op}: {what}"
    failure = dict(error=kind, text=text, op=op, rank=rank, peer=peer, call=None, phase="debug_checks")
    with _lock:
        is_new = (kind, op, rank) not in _failures
        _failures.setdefault((kind, op, rank), failure)
    if is_new:
        logging.getLogger("jax_ep").error("%s", text)
