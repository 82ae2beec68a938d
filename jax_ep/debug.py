"""What the library holds and has done in this process."""

from __future__ import annotations

from typing import Any

from jax_ep import _ffi, bootstrap, nvshmem


def stats() -> dict[str, Any]:
    """Counters of this process, since it began.

    Returns:
      A dict:

      - ``unavailable``: "" or why the CUDA extension is not in use here; then all numbers are 0.
      - ``groups``: bound groups (and size classes) with a rank in this process; ``arenas``: symmetric memories
        made here, by ourselves or for a peer; ``symmetric_bytes``: their device memory.
      - ``peers_mapped``, ``pools_mapped``: arenas and XLA pools of other processes that are mapped here;
        ``pools_registered``: own XLA pools that peers can map.
      - ``calls``: executions of dispatch and combine, one per local device, a split one when it starts;
        ``staged_calls``: rows went through staging windows, for at least one peer; ``direct_calls``: they did not, but
        straight into the receivers' buffers, or in latency mode into their slots; ``vector_calls``: of either kind,
        without bulk copies. Those that XLA replays from a command buffer are not among them, since no host code runs
        then; ``recorded_calls``: how often a call was recorded into one (`Config.command_buffers`), all kinds together.
      - ``rows_put``: rows of dispatch, and sums of combine, that left for other nodes: one per token and node,
        in latency mode per token and rank (since the last `reset`).
      - ``dispatch_entered_ns``: ``time.monotonic_ns()`` when XLA last launched a dispatch that routes, on any local
        device, and not from a command buffer: from there to the end of a program is device work, without what JAX and
        XLA do before.
      - ``attached``: how often a call site found its arena already bound, while its program was lowered or loaded.
      - ``setup_ms``: time by phase: ``memory``, ``kernels``, ``peers``, ``records`` (waiting for other processes),
        ``attach`` (of all ``attached`` together), ``nvshmem_init`` (NVSHMEM's own initialisation),
        ``nvshmem`` (loading it, waiting for others to do so, its symmetric region).

    Example: after one compiled program with a dispatch and a combine ran once on 2 GPUs of one process,
    ``stats()["calls"] == 4`` and ``stats()["staged_calls"] == 0``.
    """
    if _ffi.available():
        counts = dict.fromkeys(_COUNTS, 0)
        return {"unavailable": _ffi.available(), **counts, "setup_ms": dict.fromkeys(_PHASES, 0.0)}
    numbers = _ffi.module().stats()
    setup_ms = {**numbers.pop("setup_ms"), "records": bootstrap.records_ms(), **nvshmem.setup_ms()}
    return {"unavailable": "", **numbers, "setup_ms": setup_ms}


_COUNTS = (
    "groups",
    "arenas",
    "symmetric_bytes",
    "peers_mapped",
    "pools_mapped",
    "pools_registered",
    "calls",
    "direct_calls",
    "staged_calls",
    "vector_calls",
    "recorded_calls",
    "rows_put",
    "dispatch_entered_ns",
    "attached",
)
_PHASES = ("memory", "kernels", "peers", "records", "attach", "nvshmem_init", "nvshmem")
