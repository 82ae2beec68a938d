"""The kernels under compute-sanitizer: `python tests/gpu/sanitize.py --logs gpu-logs` (about ten minutes).

memcheck (bounds and alignment of every access), synccheck (barriers) and racecheck (shared memory) over R = 2 and 4
ranks on the streams of one process: both layouts, bulk and vector copies, direct and staged, -1 and invalid ids, drops,
idle ranks. Every tool and group size is a stage of its own, with its own time limit and log, as in run.py. A tool that
lets one kernel run at a time cannot run ranks that wait for each other: those stages say "not run".
"""

from __future__ import annotations

import shutil
import sys

import run

from jax_ep.cli import launch

# Seconds for one group size.
TOOLS = {"memcheck": 180, "synccheck": 180, "racecheck": 240}
# Cases of test_loopback.py by the words of their names; each runs on every path, with three routings.
CASES = {2: "many or long", 4: "mixed or dropped or idle"}


def stages(sanitizer: str) -> list[run.Stage]:
    """One per tool and group size."""
    plan = []
    for tool, limit_s in TOOLS.items():
        prefix = (sanitizer, "--tool", tool, "--error-exitcode", "9", "--target-processes", "application-only")
        for ranks, cases in CASES.items():
            tests = ("test_loopback.py", "--maxfail", "2", "-k", f"equals_reference and ({cases})")
            plan.append(run.Stage(f"{tool} R={ranks}", None, limit_s, tests, run.NO_XLA, prefix))
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
