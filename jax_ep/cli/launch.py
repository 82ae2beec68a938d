"""`python -m jax_ep launch --ranks R script.py args...`: several processes of one host, one rank each.

Every process runs the script with `jax.distributed` already initialised (`jax.process_index()` is its rank), on GPU
`rank % number of GPUs`, or on CPU devices where there is no GPU. Output is passed on with the rank in front. The first
process that fails, or the time limit, ends them all.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import os
import pathlib
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import jax_ep
from jax_ep.cli import mps

MEM_FRACTION = ("XLA_PYTHON_CLIENT_MEM_FRACTION", "XLA_CLIENT_MEM_FRACTION")  # either; jaxlib refuses both
TIMED_OUT = 124  # as timeout(1) says it


@dataclass(frozen=True)
class Launch:
    """What `run` needs to know.

    Attributes:
      ranks: number of processes.
      timeout_s: wall-clock limit for all of them; None: no limit.
      platform: "cuda", "cpu", or None for cuda where there is a GPU.
      cpu_devices: virtual CPU devices per process (platform "cpu" only).
      use_mps: start MPS when ranks share a GPU.
      mem_fraction: of a GPU's memory, shared by XLA's pools of all ranks on it.
      grace_s: how long the others may go on after the first failure, to report theirs.
      env: further environment variables.
    """

    ranks: int
    timeout_s: float | None = None
    platform: str | None = None
    cpu_devices: int = 1
    use_mps: bool = True
    mem_fraction: float = 0.8
    grace_s: float = 5.0
    env: tuple[tuple[str, str], ...] = ()


def num_gpus() -> int:
    """GPUs that a process started here would see (CUDA_VISIBLE_DEVICES applies); 0 without a driver.

    Asked in a child process: a CUDA library that is initialised before MPS starts stays without it.
    """
    try:
        done = subprocess.run([sys.executable, "-c", _COUNT], capture_output=True, text=True, timeout=60, check=True)
    except (subprocess.SubprocessError, OSError):
        return 0
    return int(done.stdout)


_COUNT = """
import ctypes
cuda, n = ctypes.CDLL("libcuda.so.1"), ctypes.c_int()
assert cuda.cuInit(0) == 0 and cuda.cuDeviceGetCount(ctypes.byref(n)) == 0
print(n.value)
"""


def rank_env(launch: Launch, rank: int, gpus: int) -> dict[str, str]:
    """Environment that rank `rank` gets on top of ours."""
    # The ranks import this very jax_ep, not one that the working directory or an installation would offer.
    here = str(pathlib.Path(jax_ep.__file__).parent.parent)
    env = {"PYTHONUNBUFFERED": "1", "PYTHONPATH": os.pathsep.join(filter(None, (here, os.environ.get("PYTHONPATH"))))}
    if gpus == 0:
        flags = os.environ.get("XLA_FLAGS", "")
        flags = " ".join(f for f in flags.split() if "host_platform_device_count" not in f)
        count = f"--xla_force_host_platform_device_count={launch.cpu_devices}"
        env |= {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": f"{flags} {count}".strip()}
    else:
        on_this_gpu = len(range(rank % gpus, launch.ranks, gpus))
        env["JAX_PLATFORMS"] = "cuda,cpu"
        if on_this_gpu > 1:
            # NCCL refuses a GPU twice in a communicator unless the processes look like different hosts.
            env["NCCL_HOSTID"] = f"jax_ep-{rank}"
            # They then talk over sockets. With the default channels eight ranks on one card hung, with one they run;
            # why is not known.
            if "NCCL_MAX_NCHANNELS" not in os.environ:
                env["NCCL_MAX_NCHANNELS"] = "1"
            if not any(name in os.environ or name in dict(launch.env) for name in MEM_FRACTION):
                env[MEM_FRACTION[0]] = f"{launch.mem_fraction / on_this_gpu:.4f}"
    return env | dict(launch.env)


def run(command: Sequence[str], launch: Launch, write=None) -> int:
    """Runs `command` (a script and its arguments, or "-m", module, arguments) on `launch.ranks` local processes.

    Args:
      command: what follows `python` on a command line.
      launch: how.
      write: called with each line of output; default: print.

    Returns:
      0 when every rank returned 0, the first failing rank's status otherwise, 124 when the time was over.
    """
    write = write or (lambda line: print(line, flush=True))
    gpus = 0 if launch.platform == "cpu" else num_gpus()
    if launch.platform == "cuda" and gpus == 0:
        raise RuntimeError("no CUDA device is visible; leave --platform out to run on CPU devices")
    with socket.socket() as probe:  # a port that is free now; rank 0 listens on it
        probe.bind(("127.0.0.1", 0))
        coordinator = f"127.0.0.1:{probe.getsockname()[1]}"
    shared_gpu = 0 < gpus < launch.ranks
    with mps.service(write) if shared_gpu and launch.use_mps else contextlib.nullcontext({}) as mps_env:
        processes = []
        try:
            for rank in range(launch.ranks):
                local = str(rank % gpus) if gpus else "-"
                child = [sys.executable, "-P", "-m", "jax_ep.cli._rank"]
                child += [coordinator, str(launch.ranks), str(rank), local]
                env = os.environ | mps_env | rank_env(launch, rank, gpus)
                processes.append(
                    subprocess.Popen(
                        [*child, *command],
                        env=env,
                        stdin=subprocess.DEVNULL,
                        stdout=subprocess.PIPE,
                        stderr=subprocess.STDOUT,
                        text=True,
                        errors="replace",
                        start_new_session=True,
                    )
                )
            readers = [threading.Thread(target=_forward, args=(p, r, write)) for r, p in enumerate(processes)]
            for reader in readers:
                reader.start()
            status = _wait(processes, launch, write)
        finally:
            kill(processes)
        for reader in readers:
            reader.join(timeout=5)
        return status


def _forward(process: subprocess.Popen, rank: int, write) -> None:
    assert process.stdout is not None
    for line in process.stdout:
        write(f"[{rank}] {line.rstrip()}")


def _wait(processes: list[subprocess.Popen], launch: Launch, write) -> int:
    deadline = time.monotonic() + launch.timeout_s if launch.timeout_s else float("inf")
    status, end = 0, deadline
    while True:
        codes = [p.poll() for p in processes]
        if status == 0:
            failed = [(rank, code) for rank, code in enumerate(codes) if code]
            if failed:
                rank, code = failed[0]
                status = code if code > 0 else 128 - code
                write(f"launch: rank {rank} ended with status {code}; the others have {launch.grace_s:g} s left")
                end = min(deadline, time.monotonic() + launch.grace_s)
        if all(code is not None for code in codes):
            return status
        if time.monotonic() > end:
            running = [rank for rank, code in enumerate(codes) if code is None]
            if status == 0:
                write(f"launch: not finished within {launch.timeout_s:g} s: ranks {running}; their stacks follow")
                for rank in running:  # faulthandler is registered in jax_ep.cli._rank
                    processes[rank].send_signal(signal.SIGUSR1)
                time.sleep(2)
                status = TIMED_OUT
            return status
        time.sleep(0.05)


def kill(processes: list[subprocess.Popen]) -> None:
    """Ends what still runs: each rank is the leader of a process group of its own."""
    for sig, patience_s in ((signal.SIGTERM, 3.0), (signal.SIGKILL, 30.0)):
        running = [p for p in processes if p.poll() is None]
        for p in running:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(p.pid, sig)
        end = time.monotonic() + patience_s
        for p in running:
            with contextlib.suppress(subprocess.TimeoutExpired):
                p.wait(timeout=max(0.0, end - time.monotonic()))


def end_with_parent() -> None:
    """Asks Linux to kill this process when its parent dies, so that a killed launcher leaves no ranks behind."""
    pr_set_pdeathsig = 1
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGKILL)


def add_arguments(parser: argparse.ArgumentParser, ranks_type: Callable = int) -> None:
    """The options that every command which starts ranks shares."""
    parser.add_argument("--ranks", type=ranks_type, metavar="R", help="number of local processes")
    parser.add_argument("--timeout", type=float, metavar="S", help="wall-clock limit in seconds")
    parser.add_argument("--platform", choices=("cuda", "cpu"), help="default: cuda where there is a GPU")
    parser.add_argument("--cpu-devices", type=int, default=1, metavar="N", help="virtual CPU devices per process")
    parser.add_argument("--no-mps", action="store_true", help="do not start MPS when ranks share a GPU")


def from_arguments(args: argparse.Namespace) -> Launch:
    """`Launch` from the options of `add_arguments`."""
    return Launch(args.ranks, args.timeout, args.platform, args.cpu_devices, not args.no_mps)


def main(argv: list[str]) -> int:
    """The command."""
    parser = argparse.ArgumentParser(prog="python -m jax_ep launch", description=__doc__.splitlines()[0])
    add_arguments(parser)
    parser.add_argument("-m", dest="module", nargs=argparse.REMAINDER, help="module args..., instead of a script")
    parser.add_argument("script", nargs=argparse.REMAINDER, help="script.py args...")
    args = parser.parse_args(argv)
    if not args.ranks or args.ranks < 1:
        parser.error("--ranks R with R >= 1 is needed")
    command = ["-m", *args.module] if args.module else args.script
    if not command:
        parser.error("a script or a module to run is needed")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that `finally` ends the ranks
    return run(command, from_arguments(args))
