"""What set-up takes: by phase, in fresh starts, for several numbers of ranks and of nodes.

On a rank: a program of one dispatch and one combine is compiled, all ranks beginning together, and run once. The phases
are those of `jax_ep.debug.stats()["setup_ms"]`; what one waits for, another may be doing, and kernels load beside the
rest. So the same program is compiled a second time, when everything is there: the difference is the most that set-up
can have added, whatever the phases miss or count twice. JAX and XLA, too, are faster a second time.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import jax

import jax_ep
from jax_ep.cli.benchlib import findings, measure, timing
from jax_ep.cli.benchlib.plan import Plan

APART = "nvshmem_init"  # NVSHMEM's own part, which no code of ours can shorten


def run(plan: Plan) -> dict:
    """Sets up, in this process, which has not yet; all processes alike."""
    over = measure.mesh()
    setting = measure.Setting.of(plan.workloads[0], over)
    case = measure.Case.first(plan, setting)
    jax.block_until_ready(setting.args)  # XLA's pool is there, and its compiler has compiled before
    impl = case.implementation()
    program, first_ms = _compiled(impl, over, setting.args)
    jax.block_until_ready(program(*setting.args))
    stats = jax_ep.debug.stats()
    _, again_ms = _compiled(impl, over, setting.args)
    jax_ep.check()
    phases, first, again = zip(*timing.exchange((stats["setup_ms"], first_ms, again_ms)), strict=True)
    return {
        "num_ranks": over.devices.size,
        "ranks_per_node": case.ranks_per_node,
        "transport": case.transport,
        "workload": setting.workload.name,
        "implementation": case.name,
        "unavailable": stats["unavailable"],
        "phases_ms": phases,
        "compile_ms": max(first),
        "compile_again_ms": max(again),
    }


def _compiled(impl, over, args):
    """A new compilation, and its ms since all processes were ready for it."""
    lowered = measure.compiler(over)(measure.exchange_of(impl))
    timing.barrier()
    start = time.monotonic()
    program = lowered.lower(*args).compile()
    return program, 1e3 * (time.monotonic() - start)


def total_ms(phases: dict) -> float:
    """Of one rank, without NVSHMEM's own initialisation."""
    return sum(ms for phase, ms in phases.items() if phase != APART)


def slowest(start: dict) -> dict:
    """Phases of the rank of a start that took longest."""
    return max(start["phases_ms"], key=total_ms)


def apart_ms(start: dict) -> float:
    """NVSHMEM's own initialisation, of the rank where it took longest."""
    return max(phases.get(APART, 0.0) for phases in start["phases_ms"])


def median(starts: list[dict]) -> dict:
    """The start whose total is the median (of two in the middle the lower), so that its phases add up to it."""
    return sorted(starts, key=lambda start: total_ms(slowest(start)))[(len(starts) - 1) // 2]


def describe(start: dict) -> str:
    """What was set up: "8 ranks", "8 ranks as 2x4 nvshmem"."""
    nodes = findings.nodes(start)
    return f"{start['num_ranks']} ranks" + (f" as {nodes}" if nodes else "")


def format_start(start: dict) -> str:
    """One line."""
    phases = ", ".join(f"{phase} {ms:.0f}" for phase, ms in slowest(start).items())
    return f"{describe(start)}: {total_ms(slowest(start)):.0f} ms, of these {phases}"


def table(columns: list[dict]) -> list[str]:
    """A column for each start, in the order measured; phases of the slowest rank in ms, and their total."""
    phases = [phase for phase in slowest(columns[0]) if phase != APART]
    heads: list[tuple[str, Callable[[dict], str]]] = [
        ("set-up, ms, of the slowest of ranks", lambda c: str(c["num_ranks"])),
        ("over nodes", lambda c: findings.nodes(c).partition(" ")[0]),
        ("by transport", lambda c: c["transport"] if findings.nodes(c) else ""),
    ]
    times: list[tuple[str, Callable[[dict], float]]] = [
        *((phase, lambda c, phase=phase: slowest(c).get(phase, 0.0)) for phase in phases),
        ("total", lambda c: total_ms(slowest(c))),
        ("NVSHMEM's own initialisation", apart_ms),
        ("first compilation, with all of it", lambda c: c["compile_ms"]),
        ("the same again, all of it there", lambda c: c["compile_again_ms"]),
        ("difference: set-up took no more", lambda c: c["compile_ms"] - c["compile_again_ms"]),
    ]
    heads = heads if any(map(findings.nodes, columns)) else heads[:1]
    lines = [f"{name:<36}" + "".join(f"{of(c):>10}" for c in columns) for name, of in heads]
    return lines + [f"{name:<36}" + "".join(f"{of(c):>10.1f}" for c in columns) for name, of in times]


def growth(columns: list[dict]) -> list[str]:
    """How the total grows with the ranks, from the fewest of one kind of nodes on."""
    series: dict[tuple, list[dict]] = {}
    for column in sorted(columns, key=lambda c: c["num_ranks"]):
        series.setdefault((column["ranks_per_node"], column["transport"]), []).append(column)
    lines = []
    for first, *others in series.values():
        for other in others:
            base, ratio = total_ms(slowest(first)), other["num_ranks"] / first["num_ranks"]
            if base <= 0:
                continue
            grown = total_ms(slowest(other)) / base
            verdict = "not above linear" if grown <= ratio else "ABOVE LINEAR"
            lines.append(
                f"growth: {describe(other)} take {grown:.2f} times as long as {describe(first)}, "
                f"{ratio:.2f} would be linear: {verdict}"
            )
    if not any(total_ms(phases) for column in columns for phases in column["phases_ms"]):
        lines.append(f"nothing was set up: {columns[0]['unavailable'] or columns[0]['implementation']}")
    return lines
