"""What several GPUs of one host are needed for: `python tests/gpu/several.py --logs gpu-logs` (ten minutes on two).

Sections, each with its own share of the time; what one leaves over goes to the next. `--only speed` runs one.

    correctness  one process with all N GPUs, N processes, 2N and 4N of them under MPS: cases against the oracle,
                 1000 calls with random delays, forced staging, latency mode in N processes and in one
    speed        all implementations on W1, W3, W1f, W2; skewed routings; a sweep of SMs; layouts
    modes        "auto" over the better mode on both sides of where it changes over; the first call of latency mode
    first call   over steady calls, in fresh starts of N processes and of one
    training     50 steps against one GPU's losses, step by step; W8

A table is printed as soon as it is there, and is a JSON file beside the log. An error of ours in a table is a failure,
one of an opponent is not. Any N >= 2. NVLink multicast stays off: it is a resource that a host's jobs share.
"""

from __future__ import annotations

import json
import math
import os
import pathlib
import re
import statistics
import sys
import time
from dataclasses import dataclass, field

import run

from jax_ep.cli import launch

# Seconds of a section when all are run; 600 together.
SECTIONS = {"correctness": 200, "speed": 170, "modes": 60, "first call": 75, "training": 95}
NO_MULTICAST = {"NCCL_NVLS_ENABLE": "0", "NVSHMEM_DISABLE_NVLS": "1"}
TOLERANCE = 0.02  # of a step's loss
NUM_STEPS = 50
OPPONENTS = "ragged-decomposed,dense,ring"


@dataclass(frozen=True)
class Command:
    """A command that is no test: `words` follow `python`, `out` is the file that it writes."""

    name: str
    limit_s: float
    words: tuple[str, ...]
    out: pathlib.Path
    env: dict[str, str] = field(default_factory=dict)


def correctness(num_gpus: int) -> list[run.Stage]:
    """Stages of run.py's kind. What one GPU can show just as well is left to run.py."""
    exchange, programs = "test_exchange_processes.py", "test_programs_processes.py"
    cases = "routings or test_quantised or test_staged"
    # Processes that compile different programs at one time would wait for each other (docs/sharp_bits.md).
    alone = {"XLA_FLAGS": "--xla_gpu_shard_autotuning=false"}
    plan = [
        run.Stage("correctness, one process", None, 100, ("test_exchange_devices.py", "-k", f"{cases} or 1000_are"))
    ]
    for ranks, limit_s in ((num_gpus, 70), (2 * num_gpus, 80), (4 * num_gpus, 100)):
        these = cases if ranks <= 2 * num_gpus else "routings or test_staged"  # others use few of so many ranks
        tests = (exchange, programs, "-k", f"{these} or 1000_are or recorded")
        plan += [run.Stage(f"correctness, {ranks} ranks", ranks, limit_s, tests, alone)]
    latency = (exchange, "--mode", "latency", "-k", "test_routings or recorded")
    plan += [run.Stage("correctness, latency", num_gpus, 50, latency)]
    latency = ("test_exchange_devices.py", "--mode", "latency", "-k", "test_routings or test_quantised")
    return [*plan, run.Stage("correctness, one process latency", None, 50, latency)]


def _bench(name: str, limit_s: float, logs: pathlib.Path, options: str) -> Command:
    out = logs / (re.sub(r"\W+", "-", name) + ".json")
    return Command(name, limit_s, ("-m", "jax_ep", "bench", *options.split(), "--json", str(out)), out)


def speed(num_gpus: int, logs: pathlib.Path) -> list[Command]:
    """Ours beside XLA's collectives, in the same run."""
    start = f"--ranks {num_gpus} --quick --timeout"
    return [
        _bench("speed, all", 75, logs, f"{start} 72 --workload W1,W3,W1f --layout token --op dispatch,combine "
               f"--implementation cuda,{OPPONENTS}"),
        _bench("speed, decode", 45, logs, f"{start} 42 --workload W2 --layout token --op dispatch,combine "
               f"--mode throughput,latency --implementation cuda,{OPPONENTS}"),
        _bench("speed, SMs", 60, logs, f"{start} 57 --workload W1 --layout token --implementation cuda "
               "--num-sms 4,8,12,16,24,32,48"),
        _bench("speed, skew", 45, logs, f"{start} 42 --workload W1,W6-one,W6-zipf,W6-half,W6-alone --layout token "
               "--op dispatch,combine --implementation cuda"),
        _bench("speed, layouts", 35, logs, f"{start} 32 --workload W1 --layout expert,batched --implementation cuda"),
        _bench("speed, ragged", 30, logs, f"{start} 27 --workload W1,W6-one --op dispatch,combine "
               "--implementation ragged"),
    ]  # fmt: skip


def modes(num_gpus: int, logs: pathlib.Path) -> list[Command]:
    """Two numbers of tokens: "auto" takes latency mode for the smaller one. A picture of more is in performance.md."""
    latency = "--workload W2 --layout token --mode latency --implementation cuda --first-call"
    return [
        _bench("modes, auto", 45, logs, f"--ranks {num_gpus} --quick --timeout 42 --mode throughput,latency,auto "
               "--tokens 128,512 --layout token --op dispatch,combine --implementation cuda"),
        _bench("modes, latency starts", 30, logs, f"--ranks {num_gpus} {latency} 2 --timeout 20"),
        _bench("modes, latency start of one process", 25, logs, f"{latency} 1 --timeout 20"),
    ]  # fmt: skip


def first_call(num_gpus: int, logs: pathlib.Path) -> list[Command]:
    """Both ways to have N ranks."""
    options = "--workload W1 --layout token --implementation cuda --first-call 3 --timeout 30"
    return [
        _bench("first call, processes", 60, logs, f"--ranks {num_gpus} {options}"),
        _bench("first call, one process", 60, logs, options),
    ]


def training(num_gpus: int, logs: pathlib.Path) -> list[Command]:
    """The same batches on one GPU and on all. In full precision, without drops: only the order of sums may differ."""
    exact = {"JAX_DEFAULT_MATMUL_PRECISION": "highest"}

    def train(how: str, limit_s: float, start: tuple[str, ...], implementation: str) -> Command:
        words = [str(run.ROOT / "examples" / "train_moe.py"), "--steps", str(NUM_STEPS), "--dtype", "f32"]
        words += ["--implementation", implementation, "--capacity-factor", "0", "--sample-bytes", "0"]
        out = logs / f"losses-{how.replace(' ', '-')}.json"
        words += ["--no-checkpoint", "--out", str(logs / "train"), "--log-losses", str(out)]
        return Command(f"training, {how}", limit_s, (*start, *words), out, exact)

    def ranks(count: int) -> tuple[str, ...]:
        return ("-m", "jax_ep", "launch", "--ranks", str(count), "--timeout", "55")

    return [
        train("one GPU", 60, ranks(1), "cuda"),
        train("cuda", 60, ranks(num_gpus), "cuda"),
        _bench("training, W8", 75, logs, f"--ranks {num_gpus} --quick --timeout 72 --workload W8"),
        train("xla", 60, ranks(num_gpus), "xla"),
        train("one process", 60, (), "cuda"),
    ]


def plan(num_gpus: int, logs: pathlib.Path) -> list[run.Stage | Command]:
    """All steps, section by section."""
    return [
        *correctness(num_gpus), *speed(num_gpus, logs), *modes(num_gpus, logs), *first_call(num_gpus, logs),
        *training(num_gpus, logs),
    ]  # fmt: skip


def section(step: run.Stage | Command) -> str:
    """The first word or words of its name."""
    return step.name.partition(",")[0]


def run_command(command: Command, limit_s: float, log: pathlib.Path) -> run.Outcome:
    """Runs one command, writes its output to `log` and shows what of it is a result."""
    start = time.monotonic()
    command.out.unlink(missing_ok=True)  # an earlier run's would be taken for this one's
    with log.open("w") as out:
        # run.py's stages without ranks are single processes, too.
        stage = run.Stage(command.name, None, limit_s, (), command.env)
        status = run._alone(stage, list(command.words), limit_s, out)
    text = log.read_text()
    for line in results(text):
        print("  " + line)
    seconds = time.monotonic() - start
    found = [f"status {status}, see its log"] if status else []
    found += problems(json.loads(command.out.read_text())) if command.out.exists() else []
    state = "TIME-OUT" if status == launch.TIMED_OUT else "FAILED" if found else "passed"
    return run.Outcome(state, seconds, "; ".join(found))


def results(text: str) -> list[str]:
    """Lines of a log without those of XLA's and other libraries' loggers."""
    noise = re.compile(r"^(\[\d+\] )?([EFIW]\d{4} |WARNING|\S*Warning|\[Gloo\]|20\d\d-\d\d-\d\d |training |\s*$)")
    return [line[:180] for line in text.splitlines() if not noise.match(line)][-60:]


def problems(content: dict) -> list[str]:
    """Rows of ours that failed, in what the bench wrote."""
    rows = (*content.get("rows", ()), *content.get("blocks", ()))
    failed = [row for row in rows if row["error"] and row["implementation"] == "cuda"]
    return [" ".join((row["workload"], row["layout"], row.get("op", ""), row["error"])) for row in failed]


def compare(commands: list[Command], logs: pathlib.Path) -> list[tuple[str, run.Outcome]]:
    """Losses of every way to train against those of the first, one GPU's, with the step's time from its log."""
    files = [command.out for command in commands if command.out.name.startswith("losses-")]
    if not files or not files[0].name.endswith("one-GPU.json") or not files[0].exists():
        return []
    expected, *others = (json.loads(path.read_text())["losses"] for path in files if path.exists())
    outcomes = []
    for path, losses in zip((path for path in files[1:] if path.exists()), others, strict=True):
        apart = [abs(a - b) for a, b in zip(losses, expected, strict=True)]
        is_good = len(losses) == NUM_STEPS and all(map(math.isfinite, losses)) and max(apart) <= TOLERANCE
        how = path.stem.removeprefix("losses-")
        note = f"largest difference of a step's loss {max(apart):.5f}, allowed {TOLERANCE}"
        log = logs / f"training-{how}.log"
        times = [int(ms) for ms in re.findall(r"dropped .*% +(\d+) ms", log.read_text())[2:]]  # less the first two
        note += f"; {statistics.median(times):g} ms a step" if times else ""
        outcomes.append((f"training, losses {how}", run.Outcome("passed" if is_good else "FAILED", 0.0, note)))
    return outcomes


def run_all(steps: list[run.Stage | Command], logs: pathlib.Path, limit_s: float) -> int:
    """Runs the steps in their order; 0 when none failed. A section may take what the later ones do not need."""
    logs.mkdir(parents=True, exist_ok=True)
    start, bad = time.monotonic(), []

    def show(name: str, outcome: run.Outcome) -> None:
        print(f"{name:<36}{outcome.state:<10}{outcome.seconds:>6.1f} s  {outcome.note[:200]}", flush=True)
        bad.extend([name] if outcome.state != "passed" else [])

    wanted = list(dict.fromkeys(section(step) for step in steps))
    for step in steps:
        later = sum(SECTIONS[name] for name in wanted[wanted.index(section(step)) + 1 :])
        left = min(step.limit_s, start + limit_s - later - time.monotonic())
        log = logs / (re.sub(r"\W+", "-", step.name) + ".log")
        if left < 10:
            show(step.name, run.Outcome("FAILED", 0.0, "no time left"))
        else:
            show(step.name, (run_command if isinstance(step, Command) else run.run)(step, left, log))
    for name, outcome in compare([step for step in steps if isinstance(step, Command)], logs):
        show(name, outcome)
    print(f"{len(steps)} steps, {len(bad)} failed, {time.monotonic() - start:.0f} s; logs in {logs}")
    return 1 if bad or not steps else 0


def main() -> int:
    """Runs all steps, or those whose names contain an `--only`."""
    args = run.arguments(__doc__.splitlines()[0], limit_s=sum(SECTIONS.values()), has_cards=False)
    num_gpus = launch.num_gpus()
    if num_gpus < 2:
        print(f"{num_gpus} CUDA devices are visible, expected at least 2; tests/gpu/run.py is for one")
        return 1
    os.environ |= NO_MULTICAST
    logs = args.logs.absolute()
    return run_all(run.chosen(plan(num_gpus, logs), args.only), logs, args.limit)


if __name__ == "__main__":
    sys.exit(main())
