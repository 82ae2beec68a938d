"""The whole GPU suite on one card: `python tests/gpu/run.py --logs gpu-logs` (half an hour on an H200).

Each stage is a fresh set of processes with its own time limit: the kernels alone (R ranks on R streams of one process),
then R = 1, 2, 3, 4 and 8 processes, one rank each, that share the card under MPS. A stage passes when every rank's
pytest does. Needs jax_ep installed with its CUDA extension, or the checkout on PYTHONPATH after a developer build.
On a host with several GPUs `--cards` runs the same stages side by side, on one GPU each, in as many times less.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import multiprocessing
import os
import pathlib
import re
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from jax_ep import nvshmem
from jax_ep.cli import launch

HERE = pathlib.Path(__file__).parent
ROOT = HERE.parent.parent
# For the kernels without XLA, which must not take the GPU's memory then.
NO_XLA = {"JAX_PLATFORMS": "cpu"}
PYTEST = ("-m", "pytest", "-q", "-p", "no:cacheprovider", "--durations=5")


@dataclass(frozen=True)
class Stage:
    """`ranks` None: one process without jax.distributed. `tests`: arguments of pytest."""

    name: str
    ranks: int | None
    limit_s: float
    tests: tuple[str, ...]
    env: dict[str, str] = field(default_factory=dict)
    prefix: tuple[str, ...] = ()  # in front of python
    after: str = ""  # the stage that must be over before
    takes_all: bool = False  # GPUs; it runs when no other stage does


def stages(cache: str) -> list[Stage]:
    """All stages in their order: the narrow ones first, so that a broken kernel is found in seconds."""
    exchange, programs = "test_exchange_processes.py", "test_programs_processes.py"
    cached = {"JAX_COMPILATION_CACHE_DIR": cache, "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0"}
    # Processes that compile different programs at one time wait for each other in XLA, with or without our calls;
    # with this flag ours do not (docs/sharp_bits.md).
    alone = {"XLA_FLAGS": "--xla_gpu_shard_autotuning=false"}
    # One rank count runs every case; the others run every routing, and the cases that depend on the rank count.
    some = ("-k", "routings or OtherWays or recorded or vector")
    plan = [Stage("loopback", None, 300, ("test_loopback.py",), NO_XLA)]
    plan += [Stage("loopback latency", None, 200, ("test_loopback_latency.py",), NO_XLA)]
    streams = NO_XLA | {"CUDA_DEVICE_MAX_CONNECTIONS": "32"}  # carriers have some, too
    plan += [Stage("loopback nodes", None, 300, ("test_loopback_nodes.py",), streams)]
    plan += [Stage("loopback latency nodes", None, 300, ("test_loopback_latency_nodes.py",), streams)]
    plan += [Stage("loopback fuzz", None, 120, ("test_fuzz_loopback.py",), NO_XLA)]
    latency = ("--mode", "latency")
    plan += [Stage("loopback fuzz latency", None, 120, ("test_fuzz_loopback.py", *latency), NO_XLA)]
    late = ("--ranks-per-node", "2", "--put-delay", "2e-5")
    plan += [Stage("loopback fuzz nodes", None, 150, ("test_fuzz_loopback.py", *late), streams)]
    plan += [Stage("loopback fuzz latency nodes", None, 150, ("test_fuzz_loopback.py", *latency, *late), streams)]
    plan += [Stage("quantiser", None, 120, ("test_quantize_device.py",))]
    plan += [Stage("R=1", 1, 60, (exchange, programs, "-k", "routings or direct or 1000_are or recorded"))]
    plan += [Stage(f"R={r}", r, 90, (exchange, *some)) for r in (2, 3)]
    plan += [Stage("R=4 all cases", 4, 200, (exchange,)), Stage("R=8", 8, 120, (exchange, *some))]
    plan += [Stage("R=16", 16, 150, (exchange, "-k", "(routings and uniform) or recorded"))]
    # What GPUs older than sm_90 do, forced.
    vector = (exchange, "--copies", "vector")
    plan += [Stage("R=4 vector", 4, 200, vector), Stage("R=2 vector", 2, 90, (*vector, *some))]
    plan += [Stage(f"R={r} latency", r, 120, (exchange, *latency, "-k", "TestExchange")) for r in (2, 3, 4, 8)]
    plan += [Stage("R=4 split", 4, 120, (exchange, "--split", "-k", "TestExchange"))]
    nodes = (exchange, "-k", "TestExchange or used or recorded", "--ranks-per-node")
    plan += [
        Stage("R=4 nodes", 4, 150, (*nodes, "2")),
        Stage("R=8 nodes", 8, 150, (*nodes, "4", "--put-delay", "2e-5")),
    ]
    plan += [Stage("R=8 four nodes", 8, 150, (*nodes, "2"))]
    by_slots = (*latency, *nodes)
    plan += [
        Stage("R=4 latency nodes", 4, 150, (*by_slots, "2")),
        Stage("R=8 latency nodes", 8, 150, (*by_slots, "4", "--put-delay", "2e-5")),
        Stage("R=8 latency four nodes", 8, 150, (*by_slots, "2")),
        Stage("R=4 split nodes", 4, 150, ("--split", *nodes, "2", "--put-delay", "2e-5")),
    ]
    put = ("-s", "--transport", "nvshmem", *nodes)
    plan += [
        Stage("R=4 nodes nvshmem", 4, 150, (*put, "2")),
        Stage("R=8 nodes nvshmem", 8, 150, (*put, "4")),
        Stage("R=8 four nodes nvshmem", 8, 150, (*put, "2")),
        Stage("R=4 latency nodes nvshmem", 4, 150, (*latency, *put, "2")),
        Stage("R=8 latency nodes nvshmem", 8, 150, (*latency, *put, "4")),
        Stage("R=8 latency four nodes nvshmem", 8, 150, (*latency, *put, "2")),
    ]
    plan += [Stage("R=2 programs", 2, 160, (programs,), alone)]
    plan += [Stage("R=4 programs", 4, 200, (programs, "-k", "not longer"), alone)]
    plan += [Stage("R=8 programs", 8, 180, (programs, "-k", "not 10000 and not longer"), alone)]
    plan += [Stage("R=2 programs latency", 2, 160, (programs, *latency, "-k", "not 10000"), alone)]
    some_programs = "groups or rotating or older or donated or recorded"
    plan += [Stage("R=4 programs latency", 4, 120, (programs, *latency, "-k", some_programs), alone)]
    # Over nodes, where combine's tree is another one. Those that need a direct path or a time-out of their own are not.
    few, most = "10000 or large_batches or micro_batches or recorded", "not (10000 or longer or direct or large)"
    plan += [
        Stage("R=4 programs nodes", 4, 150, (programs, *late, "-k", few), alone),
        Stage("R=8 programs nodes", 8, 180, (programs, *late, "-k", most), alone),
    ]
    # In the groups of some meshes ranks are not the numbers of processes, which NVSHMEM goes by.
    some_nodes = "groups or micro_batches or older or rotating or recorded"
    put = (programs, "-s", "--transport", "nvshmem", "--ranks-per-node", "2", "-k", some_nodes)
    plan += [Stage("R=8 programs nvshmem", 8, 150, put, alone)]
    plan += [Stage("R=4 modes, halves", 4, 150, ("test_split_processes.py",), alone)]
    plan += [Stage(f"R={r} windows", r, 90, ("test_windows_processes.py",)) for r in (2, 4)]
    plan += [Stage("R=2 overlap", 2, 120, ("test_overlap_processes.py",))]
    plan += [
        Stage(f"R=2 example {name}", 2, 40, ("test_examples_processes.py", "-k", name))
        for name in ("decode", "overlap")
    ]
    # TF32 products, XLA's default for f32, turn a last bit that differs into one of 2^-11, which changes routings.
    exact = {"JAX_DEFAULT_MATMUL_PRECISION": "highest"}
    plan += [Stage("R=8 training", 8, 240, ("test_training_processes.py",), exact)]
    multihost = ("-s", "test_multihost_processes.py")
    plan += [Stage("R=8 example multihost", None, 90, multihost, NO_XLA | exact)]
    # The slots of latency mode, 16 GiB a rank there, lie outside XLA's pool.
    plan += [Stage("R=2 large", 2, 180, ("test_large_processes.py",), {"XLA_PYTHON_CLIENT_MEM_FRACTION": "0.25"})]
    # Every launch waits for its kernel, and all code is loaded when the process starts.
    blocking = {"CUDA_LAUNCH_BLOCKING": "1", "CUDA_MODULE_LOADING": "EAGER"}
    plan += [
        Stage(f"R=2 blocking{name}", 2, 60, (exchange, *mode, "-k", "(routings and zipf) or recorded"), blocking)
        for name, mode in (("", ()), (" latency", latency))
    ]
    # XLA may record calls into command buffers, the default: as it does by itself, in turns with launched calls of the
    # same programs; then whatever it may, however short; then none of our calls.
    some_programs = "1000_are or micro_batches or was_recorded"
    plan += [Stage("R=2 graphs", 2, 120, ("test_graphs_processes.py",))]
    graphs = "FUSION,CUBLAS,CUBLASLT,CUSTOM_CALL,COLLECTIVES"
    graphs = {"XLA_FLAGS": f"--xla_gpu_enable_command_buffer={graphs} --xla_gpu_graph_min_graph_size=1"}
    recorded, launched = ("--command-buffers", "on"), ("--command-buffers", "off")
    plan += [Stage("R=2 short graphs", 2, 90, (programs, *recorded, "-k", some_programs), graphs)]
    plan += [Stage("R=2 short graphs latency", 2, 90, (programs, *latency, *recorded, "-k", some_programs), graphs)]
    some_programs += " or targets_are"
    plan += [Stage("R=2 launched", 2, 90, (programs, *launched, "-k", some_programs), graphs)]
    plan += [Stage("R=2 launched latency", 2, 90, (programs, *latency, *launched, "-k", some_programs), graphs)]
    plan += [Stage("R=2 launched cases", 2, 90, (exchange, *launched, *some))]
    plan += [Stage("faults", 3, 120, ("test_faults_processes.py",))]
    plan += [Stage("faults latency", 3, 120, ("test_faults_processes.py", *latency))]
    nodes = ("test_faults_processes.py", "--ranks-per-node", "2")
    plan += [Stage("faults nodes", 4, 120, (*nodes, "--put-delay", "2e-5"))]
    plan += [Stage("faults nodes nvshmem", 4, 120, ("-s", "--transport", "nvshmem", *nodes))]
    plan += [Stage("whole jobs", None, 220, ("test_whole_jobs.py",), NO_XLA)]
    plan += [Stage("growing pool", 2, 60, ("test_pool_processes.py",), {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"})]
    for allocator in ("cuda_async", "platform"):
        other = {"XLA_PYTHON_CLIENT_ALLOCATOR": allocator}
        plan += [Stage(f"allocator {allocator}", 2, 60, ("test_pool_processes.py",), other)]
    for how, after in (("compiled", ""), ("cached", "memory, compiled")):
        plan += [Stage(f"memory, {how}", 8, 60, ("test_memory_processes.py",), cached, after=after)]
    plan += [Stage("ahead of time", None, 120, ("test_ahead_of_time.py",))]
    if launch.num_gpus() > 1:
        plan += [Stage("one process, all GPUs", None, 150, ("test_exchange_devices.py",), takes_all=True)]
    return plan


@dataclass
class Outcome:
    """What a stage came to. `state`: passed, FAILED, TIME-OUT, or not run (with the reason in `note`)."""

    state: str
    seconds: float
    note: str


def run(stage: Stage, limit_s: float, log: pathlib.Path) -> Outcome:
    """Runs one stage and writes its output to `log`."""
    start = time.monotonic()
    tests = [str(HERE / t) if is_test(t) else t for t in stage.tests]
    with log.open("w") as out:

        def write(line: str) -> None:
            out.write(line + "\n")
            out.flush()

        if stage.ranks is None:
            status = _alone(stage, [*PYTEST, "--device", "gpu", *tests], limit_s, out)
        else:
            how = launch.Launch(stage.ranks, limit_s, platform="cuda", grace_s=20, env=tuple(stage.env.items()))
            status = launch.run([*PYTEST, "--device", "gpu", *tests], how, write)
    return _outcome(status, time.monotonic() - start, log.read_text(), stage)


def is_test(argument: str) -> bool:
    """Whether an argument of pytest names a file, or tests of one."""
    return argument.partition("::")[0].endswith(".py")


def _alone(stage: Stage, command: list[str], limit_s: float, out) -> int:
    process = subprocess.Popen(
        [*stage.prefix, sys.executable, *command],
        cwd=ROOT,
        env=os.environ | stage.env,
        stdin=subprocess.DEVNULL,
        stdout=out,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )
    try:
        return process.wait(timeout=limit_s)
    except subprocess.TimeoutExpired:
        return launch.TIMED_OUT
    finally:
        launch.kill([process])


def _outcome(status: int, seconds: float, text: str, stage: Stage) -> Outcome:
    # pytest's closing line, one per rank: "12 passed, 3 skipped in 9.87s"
    closing = re.findall(r"^(?:\[(\d+)\] )?=*\s*((?:\d+ \w+(?:, )?)+) in [\d.]+s", text, re.MULTILINE)
    note = closing[0][1] if closing else ""
    findings = re.findall(r"^=+ ((?:ERROR|RACECHECK) SUMMARY: .*)$", text, re.MULTILINE)  # compute-sanitizer's
    if stage.prefix:
        if re.search("Device not supported|Unable to find|not supported on this", text):
            return Outcome("not run", seconds, "compute-sanitizer does not accept this device")
        waited = re.findall(r"^E +AssertionError: \{'code': 1,", text, re.MULTILINE)
        if note.startswith(f"{len(waited)} failed") and "passed" not in note and all(" 0 " in f for f in findings):
            return Outcome("not run", seconds, "ranks waited in vain: kernels do not run side by side under this tool")
    note = ", ".join(filter(None, (note, *findings)))
    if status == 0 and closing:
        return Outcome("passed", seconds, note)
    failed = re.findall(r"^(?:\[\d+\] )?((?:FAILED|ERROR) \S+)", text, re.MULTILINE)
    note = "; ".join([*dict.fromkeys(failed), *findings]) or note or f"status {status}, see its log"
    return Outcome("TIME-OUT" if status == launch.TIMED_OUT else "FAILED", seconds, note)


def run_all(plan: Sequence[Stage], logs: pathlib.Path, limit_s: float, cards: Sequence[str] = ()) -> int:
    """Runs the stages and prints the table; 0 when none failed.

    One after the other, with all GPUs that are visible, or, with `cards` (UUIDs of GPUs), side by side: each card takes
    the next stage when it is free.
    """
    logs.mkdir(parents=True, exist_ok=True)
    start = time.monotonic()
    todo, outcomes, changed = list(plan), {}, threading.Condition()
    names = {stage.name for stage in plan}

    def work(runner: Callable, kinds: tuple[bool, ...]) -> None:
        """Until no stage of these kinds is left. `kinds`: whether it takes all GPUs."""
        while True:
            with changed:
                while True:
                    mine = [stage for stage in todo if stage.takes_all in kinds]
                    ready = [stage for stage in mine if stage.after not in names or stage.after in outcomes]
                    if ready or not mine:
                        break
                    changed.wait()
                if not mine:
                    return
                todo.remove(ready[0])
            stage, left = ready[0], start + limit_s - time.monotonic()
            log = logs / (re.sub(r"\W+", "-", stage.name) + ".log")
            outcome = Outcome("FAILED", 0.0, "no time left")
            if left >= 10:
                try:
                    outcome = runner(stage, min(stage.limit_s, left), log)
                except Exception as error:  # or other cards would wait for this stage
                    outcome = Outcome("FAILED", 0.0, repr(error))
            with changed:
                outcomes[stage.name] = outcome
                print(_line(stage, outcome), flush=True)
                changed.notify_all()

    def work_on(card: str) -> None:
        # A process of its own: what it starts finds the card in its environment.
        spawn = multiprocessing.get_context("spawn")
        with concurrent.futures.ProcessPoolExecutor(1, spawn, _take, (card,)) as process:
            work(lambda *args: process.submit(run, *args).result(), (False,))

    if len(cards) > 1:
        with concurrent.futures.ThreadPoolExecutor(len(cards)) as threads:
            list(threads.map(work_on, cards))
    work(run, (False, True))
    bad = [name for name, outcome in outcomes.items() if outcome.state not in ("passed", "not run")]
    print(f"{len(outcomes)} stages, {len(bad)} failed, {time.monotonic() - start:.0f} s; logs in {logs}")
    return 1 if bad or not outcomes else 0


_VISIBLE = "CUDA_VISIBLE_DEVICES"


def _take(card: str) -> None:
    os.environ[_VISIBLE] = card


def visible_cards() -> list[str]:
    """UUIDs of the GPUs that a process started here would see; numbers would mean others to clients of MPS."""
    query = ("nvidia-smi", "--query-gpu=uuid", "--format=csv,noheader")
    found = subprocess.run(query, capture_output=True, text=True, timeout=60, check=True).stdout.split()
    if _VISIBLE not in os.environ:
        return found
    named = [name.strip() for name in os.environ[_VISIBLE].split(",") if name.strip()]
    return [found[int(name)] if name.isdigit() else name for name in named]


def arguments(description: str, limit_s: float, has_cards: bool = True) -> argparse.Namespace:
    """Of a script that runs stages, on one card each if `has_cards`."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--logs", type=pathlib.Path, default=ROOT / "gpu-logs", help="folder; default: %(default)s")
    parser.add_argument("--only", action="append", default=[], metavar="TEXT", help="stages with this in their name")
    parser.add_argument("--limit", type=float, default=limit_s, metavar="S", help="in all; default: %(default)s")
    if has_cards:
        parser.add_argument("--cards", action="store_true", help="with several GPUs: stages side by side, each on one")
    return parser.parse_args()


def chosen(plan: list[Stage], only: list[str]) -> list[Stage]:
    """The stages whose names contain one of `only`, or all."""
    return [stage for stage in plan if not only or any(text in stage.name for text in only)]


def main() -> int:
    """Runs all stages, or those whose names contain an `--only`, and prints the table."""
    args = arguments(__doc__.splitlines()[0], limit_s=2400)
    if launch.num_gpus() == 0:
        print("no CUDA device is visible")
        return 1
    with tempfile.TemporaryDirectory(prefix="jax_ep_cache_") as cache:
        plan = chosen(stages(cache), args.only)
        unusable = nvshmem.problem(2)
        if unusable:
            print(f"stages over NVSHMEM are left out: {unusable}")
            plan = [stage for stage in plan if "nvshmem" not in stage.name]
        return run_all(plan, args.logs, args.limit, visible_cards() if args.cards else ())


def _line(stage: Stage, outcome: Outcome) -> str:
    return f"{stage.name:<18}{outcome.state:<10}{outcome.seconds:>6.1f} s  {outcome.note[:200]}"


if __name__ == "__main__":
    sys.exit(main())
