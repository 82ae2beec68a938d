"""The kernels under compute-sanitizer: `python tests/gpu/sanitize.py --logs gpu-logs` (nine minutes at most).

memcheck (bounds and alignment of every access), synccheck (barriers), racecheck (shared memory) and initcheck (reads of
device memory that nobody wrote) over R = 2 and 4 ranks on the streams of one process: all layouts, bulk and vector
copies, direct and staged, rows that cross once, latency mode fused and split, several nodes in both modes, FP8 in
dispatch and combine, windows, side arrays, -1 and invalid ids, drops, idle ranks, no tokens. Every stage has its own
time limit and log, as in run.py.
A tool that lets one kernel run at a time cannot run ranks that wait for each other: those stages say "not run".
"""

from __future__ import annotations

import shutil
import sys

import run

from jax_ep.cli import launch

# Cases of test_loopback.py: small ones that have every branch of the kernels between them. One routing each.
CASES = {
    2: (
        "many experts", "31 of 64", "long rows", "ue8m0, long", "unusual, two ranks", "crosses once, two ranks",
        "crosses once, fp8",
    ),
    4: (
        "mixed ids", "mixed ids, token", "dropped", "batched, dropped", "idle ranks", "no tokens", "window 2",
        "window 1, token", "window 1, batched", "side of bytes", "fp8", "fp8 wire", "fp8 wire, token",
        "crosses once, dropped", "crosses once, batched",
    ),
}  # fmt: skip
# Those that latency mode's kernels are run with, and cases of test_loopback_latency.py itself, all with R = 2.
LATENCY = {
    2: ("31 of 64", "ue8m0, long", "unusual, two ranks"),
    4: (
        "mixed ids", "mixed ids, token", "batched, dropped", "idle ranks", "no tokens", "window 1, token",
        "side of bytes", "fp8", "fp8 wire", "fp8 wire, token",
    ),
}  # fmt: skip
PIECES = ("segments", "14 pieces and a side", "3 pieces of 7 scales", "14 pieces of 2 scales")
# Cases of test_loopback_nodes.py, and of test_loopback_latency_nodes.py but for those that cross once.
NODES = (
    "one rank a node", "two ranks, two nodes", "mixed ids", "mixed ids, token", "dropped, batched", "idle ranks",
    "no tokens", "window 1, token", "side of bytes", "fp8", "fp8 wire", "crosses once",
)  # fmt: skip
# For tools under which a kernel takes a hundred times as long as alone.
FEW = {
    2: ("31 of 64", "crosses once, fp8"),
    4: ("mixed ids", "batched, dropped", "fp8 wire", "crosses once, batched"),
}
FEW_LATENCY = {2: ("unusual, two ranks",), 4: ("mixed ids", "fp8")}
FEW_PIECES = ("3 pieces of 7 scales",)


def _throughput(cases: dict, ranks: int, is_short: bool) -> list[str]:
    ways = [("bulk", "direct"), ("vector", "staged")]
    ways += [] if is_short else [("bulk", "staged"), ("vector", "direct")]
    return [f"test_loopback.py::test_equals_reference[{case}-{a}-{b}]" for case in cases[ranks] for a, b in ways]


def _latency(cases: dict, pieces: tuple[str, ...]) -> list[str]:
    named = [("test_equals_reference", case) for of_ranks in cases.values() for case in of_ranks]
    named += [("test_more_ranks_segments_and_pieces", case) for case in pieces]
    ways = [("bulk", "fused"), ("vector", "split")]
    return [f"test_loopback_latency.py::{test}[{case}-{a}-{b}]" for test, case in named for a, b in ways]


def _nodes() -> list[str]:
    ways = [("bulk", "in order"), ("vector", "late")]
    tests = [f"test_loopback_nodes.py::test_equals_reference[{case}-{a}-{b}]" for case in NODES for a, b in ways]
    ways, cases = [("bulk", "fused"), ("vector", "split, late")], [case for case in NODES if "crosses" not in case]
    return tests + [
        f"test_loopback_latency_nodes.py::test_equals_reference[{case}-{a}-{b}]" for case in cases for a, b in ways
    ]


def stages(sanitizer: str) -> list[run.Stage]:
    """By tool, the most telling first; the time that a stage leaves over goes to later ones."""
    env = run.NO_XLA | {"LOOPBACK_SEEDS": "1", "CUDA_DEVICE_MAX_CONNECTIONS": "32"}  # carriers have streams, too
    latency, few_latency = _latency(LATENCY, PIECES), _latency(FEW_LATENCY, FEW_PIECES)
    plan = [
        ("memcheck", "R=2", 90, _throughput(CASES, 2, is_short=False)),
        ("memcheck", "R=4", 120, _throughput(CASES, 4, is_short=False)),
        ("memcheck", "latency", 90, latency),
        ("memcheck", "nodes", 90, _nodes()),
        ("synccheck", "R=2", 60, _throughput(CASES, 2, is_short=True)),
        ("synccheck", "R=4", 90, _throughput(CASES, 4, is_short=True)),
        ("synccheck", "latency", 90, latency),
        ("synccheck", "nodes", 90, _nodes()),
        ("racecheck", "R=2", 90, _throughput(FEW, 2, is_short=True)),
        ("racecheck", "R=4", 90, _throughput(FEW, 4, is_short=True)),
        ("racecheck", "latency", 90, few_latency),
        ("initcheck", "R=2", 60, _throughput(FEW, 2, is_short=True)),
        ("initcheck", "R=4", 60, _throughput(FEW, 4, is_short=True)),
        ("initcheck", "latency", 60, few_latency),
    ]

    def prefix(tool: str) -> tuple[str, ...]:
        # Fifteen warps of every block have two barriers each, of every rank: more than synccheck tracks unless told.
        more = ("--num-cuda-barriers", "65536") if tool == "synccheck" else ()
        return (sanitizer, "--tool", tool, *more, "--error-exitcode", "9", "--target-processes", "application-only")

    return [
        run.Stage(f"{tool} {what}", None, limit_s, ("--maxfail", "2", *tests), env, prefix(tool))
        for tool, what, limit_s, tests in plan
    ]


def main() -> int:
    """Runs all stages, or those whose names contain an `--only`, and prints the table."""
    args = run.arguments(__doc__.splitlines()[0], limit_s=540)
    sanitizer = shutil.which("compute-sanitizer")
    if not sanitizer:
        print("compute-sanitizer is not on PATH; the CUDA toolkit has it, and pip's nvidia-cuda-sanitizer-api")
        return 1
    if launch.num_gpus() == 0:
        print("no CUDA device is visible")
        return 1
    plan = run.chosen(stages(sanitizer), args.only)
    return run.run_all(plan, args.logs, args.limit, run.visible_cards() if args.cards else ())


if __name__ == "__main__":
    sys.exit(main())
