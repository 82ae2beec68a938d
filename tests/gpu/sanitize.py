"""The kernels under compute-sanitizer: `python tests/gpu/sanitize.py --logs gpu-logs` (about ten minutes).

memcheck (bounds and alignment of every access), synccheck (barriers) and racecheck (shared memory) over R = 2 and 4
ranks on the streams of one process: all layouts, bulk and vector copies, direct and staged, rows that cross once, FP8
in dispatch and combine, windows, side arrays, -1 and invalid ids, drops, idle ranks, no tokens. Every tool and group
size is a stage of its own, with its own time limit and log, as in run.py. A tool that lets one kernel run at a time
cannot run ranks that wait for each other: those stages say "not run".
"""

from __future__ import annotations

import shutil
import sys

import run

from jax_ep.cli import launch

# Seconds for one group size; under racecheck a kernel takes a hundred times as long as alone.
TOOLS = {"memcheck": 180, "synccheck": 180, "racecheck": 240}
# Cases of test_loopback.py: small ones that have every branch of the kernels between them. Each runs with bulk and
# vector copies, direct and staged, with one routing.
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
RACECHECK = {
    2: ("31 of 64", "crosses once, fp8"),
    4: ("mixed ids", "batched, dropped", "fp8 wire", "crosses once, batched"),
}


def stages(sanitizer: str) -> list[run.Stage]:
    """One per tool and group size."""
    plan = []
    env = run.NO_XLA | {"LOOPBACK_SEEDS": "1"}
    for tool, limit_s in TOOLS.items():
        prefix = (sanitizer, "--tool", tool, "--error-exitcode", "9", "--target-processes", "application-only")
        for ranks, cases in (RACECHECK if tool == "racecheck" else CASES).items():
            tests = [
                f"test_loopback.py::test_equals_reference[{case}-{copies}-{path}]"
                for case in cases
                for copies in ("bulk", "vector")
                for path in ("direct", "staged")
            ]
            plan.append(run.Stage(f"{tool} R={ranks}", None, limit_s, ("--maxfail", "2", *tests), env, prefix))
    return plan


def main() -> int:
    """Runs all stages, or those whose names contain an `--only`, and prints the table."""
    args = run.arguments(__doc__.splitlines()[0], limit_s=1200)
    sanitizer = shutil.which("compute-sanitizer")
    if not sanitizer:
        print("compute-sanitizer is not on PATH; the CUDA toolkit has it, and pip's nvidia-cuda-sanitizer-api")
        return 1
    if launch.num_gpus() == 0:
        print("no CUDA device is visible")
        return 1
    return run.run_all(run.chosen(stages(sanitizer), args.only), args.logs, args.limit)


if __name__ == "__main__":
    sys.exit(main())
