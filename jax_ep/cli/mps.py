"""NVIDIA's multi-process service (MPS): lets the kernels of several processes run on one GPU at the same time.

Without it processes that share a GPU are time-sliced (about 2 ms a slice): everything still works, but no timing means
anything. The daemon started here has its own directories, so it neither finds nor disturbs another one, and it is ended
with the block that started it.
"""

from __future__ import annotations

import contextlib
import os
import pathlib
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator

CONTROL = "nvidia-cuda-mps-control"


@contextlib.contextmanager
def service(log=print) -> Iterator[dict[str, str]]:
    """Environment for clients of an MPS daemon that lives as long as the block; {} when none can be had.

    A caller that already points at a daemon (CUDA_MPS_PIPE_DIRECTORY is set) keeps it.
    """
    if "CUDA_MPS_PIPE_DIRECTORY" in os.environ:
        log(f"MPS: using the daemon at {os.environ['CUDA_MPS_PIPE_DIRECTORY']}")
        yield {}
        return
    if shutil.which(CONTROL) is None:
        log(f"MPS: {CONTROL} is not installed; ranks that share a GPU are time-sliced and timings mean nothing")
        yield {}
        return
    with tempfile.TemporaryDirectory(prefix="jax_ep_mps_", ignore_cleanup_errors=True) as folder:
        pipe, logs = pathlib.Path(folder, "pipe"), pathlib.Path(folder, "log")
        pipe.mkdir()
        logs.mkdir()
        env = {"CUDA_MPS_PIPE_DIRECTORY": str(pipe), "CUDA_MPS_LOG_DIRECTORY": str(logs)}
        try:
            # -d returns once the daemon listens.
            started = subprocess.run(
                [CONTROL, "-d"], env=os.environ | env, capture_output=True, text=True, timeout=60, check=False
            )
            problem = (started.stderr or started.stdout).strip() if started.returncode else ""
        except subprocess.TimeoutExpired:
            problem = "it did not start within 60 s"
        if problem:
            log(f"MPS: not started ({problem}); ranks that share a GPU are time-sliced and timings mean nothing")
        try:
            yield {} if problem else env
        finally:
            _stop(env, pipe)


def _stop(env: dict[str, str], pipe: pathlib.Path) -> None:
    pid_file = pipe / f"{CONTROL}.pid"
    pid = int(pid_file.read_text()) if pid_file.exists() else None
    with contextlib.suppress(subprocess.TimeoutExpired, OSError):
        subprocess.run([CONTROL], input="quit\n", env=os.environ | env, capture_output=True, text=True, timeout=20)
    if pid is None:
        return
    for sig in (signal.SIGTERM, signal.SIGKILL):  # only if it did not quit by itself
        with contextlib.suppress(ProcessLookupError):
            for _ in range(20):
                os.kill(pid, 0)
                time.sleep(0.1)
            os.kill(pid, sig)
