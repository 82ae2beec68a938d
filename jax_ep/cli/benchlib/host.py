"""What the host does for a call, which the device waits for where it has little to do itself.

A program of N pairs dispatch, combine on one token a rank, where each pair's result is the next one's x, so that
nothing else is between the calls. XLA launches one after the other without waiting for the device. With E(N) the time
from the call of the program to the launch of its last dispatch, the host needs (E(N) - E(1)) / (N - 1) for a pair.

Where XLA replays the program from a command buffer, no call is launched: the difference of the wall times is left.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from functools import partial

import jax

import jax_ep
from jax_ep.cli.benchlib import measure, timing
from jax_ep.cli.benchlib.plan import Plan
from jax_ep.cli.benchlib.workloads import Workload

NUM_PAIRS = 17


def pairs(impl, num_pairs: int) -> Callable:
    """`num_pairs` times dispatch and combine in one function of x, topk_idx and topk_weights."""

    def program(x, idx, weights):
        for _ in range(num_pairs):
            x = impl.combine(*impl.dispatch(x, idx, weights))
        return x

    return program


def launched_us(fn: Callable, args, repeats: int, entered_ns: Callable[[], int]) -> tuple[float | None, float]:
    """Medians of the slowest process: us from the call of `fn` to what `entered_ns` then says, and to its end.

    The first is None if a dispatch was not launched, but replayed from a command buffer, in any process.
    """
    times = []
    for _ in range(repeats):
        timing.barrier()
        call = time.monotonic_ns()
        jax.block_until_ready(fn(*args))
        times.append((entered_ns() - call, time.monotonic_ns() - call))
    launched, ended = (max(timing.exchange(statistics.median(t) / 1e3)) for t in zip(*times, strict=True))
    is_replayed = any(timing.exchange(any(launched < 0 for launched, _ in times)))
    return None if is_replayed else launched, ended


def of_mode(mode: str, name: str, repeats: int, entered_ns: Callable[[], int], is_recorded: bool = False) -> dict:
    """Host and wall time of a pair, and what comes before the first launch, in us; None: of what XLA replays."""
    over = measure.mesh()
    num_ranks, compile_ = over.devices.size, measure.compiler(over)
    setting = measure.Setting.of(Workload("host", 1, hidden=128, num_topk=1, num_experts=num_ranks), over)
    impl = measure.Case(setting, name, "token", "demand", mode, is_recorded).implementation()
    one, many = (compile_(pairs(impl, n)).lower(*setting.args).compile() for n in (1, NUM_PAIRS))
    for fn in (one, many):
        launched_us(fn, setting.args, 2, entered_ns)  # the first executions are another matter
    (first, one_us), (last, many_us) = (launched_us(fn, setting.args, repeats, entered_ns) for fn in (one, many))
    host_us = None if first is None or last is None else (last - first) / (NUM_PAIRS - 1)
    wall_us = (many_us - one_us) / (NUM_PAIRS - 1)
    return {"mode": mode, "start_us": first, "host_us": host_us, "wall_us": wall_us, "num_ranks": num_ranks}


def _entered_ns() -> int:
    return jax_ep.debug.stats()["dispatch_entered_ns"]


def lines(plan: Plan, say: Callable[[str], None]) -> list[dict]:
    """A line and an entry for each mode; [] without CUDA calls, as only they say when they are launched."""
    if "cuda" not in plan.implementations:
        say("host: not measured; only calls of the CUDA implementation say when they are launched")
        return []
    entries = []
    for mode in plan.modes:
        entry, problem = measure.attempt(
            partial(of_mode, mode, "cuda", plan.repeats, _entered_ns, bool(plan.is_recorded))
        )
        entries.append({"mode": mode, "error": problem} if problem else entry | {"error": ""})
        say(format_entry(entries[-1]))
    return entries


def format_entry(entry: dict) -> str:
    """One line."""
    if entry["error"]:
        return f"host, mode {entry['mode']}: {entry['error']}"
    if entry["host_us"] is None:
        return (
            f"host, mode {entry['mode']}: nothing to launch, as XLA replays the calls from a command buffer; "
            f"dispatch and combine, of one token a rank, take {entry['wall_us']:.1f} us"
        )
    return (
        f"host, mode {entry['mode']}: {entry['host_us']:.1f} us to launch dispatch and combine, of one token a rank, "
        f"which take {entry['wall_us']:.1f} us; {entry['start_us']:.0f} us from Python to the first launch"
    )
