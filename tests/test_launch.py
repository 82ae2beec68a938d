"""jax_ep.cli.launch and mps: ranks start, talk, fail together and leave nothing behind."""

import os
import pathlib
import signal
import subprocess
import sys
import textwrap
import time

import pytest

from jax_ep.cli import launch, mps
from jax_ep.cli.launch import Launch

pytestmark = pytest.mark.multiprocess

SCRIPT = """
import jax, os, signal, sys, time
print("rank", jax.process_index(), "of", jax.process_count(), "args", sys.argv[1:], flush=True)
what = sys.argv[1]
if what == "fail" and jax.process_index() == 1:
    sys.exit(7)
if what in ("fail", "hang", "stay"):
    open(sys.argv[2] + str(jax.process_index()), "w").write(str(os.getpid()))
    time.sleep(600)
"""


@pytest.fixture
def script(tmp_path):
    path = tmp_path / "script.py"
    path.write_text(SCRIPT)
    return str(path)


def _run(command, **options):
    lines = []
    status = launch.run(command, Launch(platform="cpu", **options), lines.append)
    return status, lines


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return "Z" not in pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


def _pids(prefix: str, count: int) -> list[int]:
    end = time.monotonic() + 60
    while time.monotonic() < end:
        texts = [pathlib.Path(prefix + str(r)).read_text() for r in range(count) if os.path.exists(prefix + str(r))]
        if len(texts) == count and all(texts):
            return [int(t) for t in texts]
        time.sleep(0.1)
    raise AssertionError("the ranks did not start")


def test_ranks_run_the_script_with_jax_distributed_initialised(script):
    status, lines = _run([script, "ok", "--option", "2"], ranks=2, timeout_s=120)
    assert status == 0
    for rank in (0, 1):
        assert f"[{rank}] rank {rank} of 2 args ['ok', '--option', '2']" in lines


def test_a_module_runs_too():
    status, lines = _run(["-m", "platform"], ranks=1, timeout_s=120)
    assert status == 0 and any("Linux" in line for line in lines)


def test_one_failure_ends_all(script, tmp_path):
    prefix = str(tmp_path / "pid")
    start = time.monotonic()
    status, lines = _run([script, "fail", prefix], ranks=2, timeout_s=300, grace_s=1)
    assert status == 7 and time.monotonic() - start < 120
    assert any("rank 1 ended with status 7" in line for line in lines)
    assert not any(_is_alive(pid) for pid in _pids(prefix, 1))


def test_the_time_limit_ends_all_and_shows_where_they_were(script, tmp_path):
    prefix = str(tmp_path / "pid")
    status, lines = _run([script, "hang", prefix], ranks=2, timeout_s=20)
    assert status == launch.TIMED_OUT
    assert sum("script.py" in line and "line 9" in line for line in lines) == 2, "a stack of each rank"
    assert not any(_is_alive(pid) for pid in _pids(prefix, 2))


def test_a_killed_launcher_leaves_no_ranks(script, tmp_path):
    prefix = str(tmp_path / "pid")
    command = [sys.executable, "-m", "jax_ep", "launch", "--ranks", "2", "--platform", "cpu", script, "stay", prefix]
    parent = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    pids = _pids(prefix, 2)
    parent.send_signal(signal.SIGKILL)
    parent.wait()
    end = time.monotonic() + 20
    while any(map(_is_alive, pids)) and time.monotonic() < end:
        time.sleep(0.1)
    assert not any(map(_is_alive, pids))


def test_environment_of_ranks_that_share_gpus(monkeypatch):
    for name in launch.MEM_FRACTION:
        monkeypatch.delenv(name, raising=False)
    five_on_two = [launch.rank_env(Launch(5), rank, gpus=2) for rank in range(5)]
    fractions = [env["XLA_PYTHON_CLIENT_MEM_FRACTION"] for env in five_on_two]
    assert fractions == ["0.2667", "0.4000", "0.2667", "0.4000", "0.2667"]
    assert len({env["NCCL_HOSTID"] for env in five_on_two}) == 5
    alone = launch.rank_env(Launch(2), 1, gpus=2)
    assert "NCCL_HOSTID" not in alone and "XLA_PYTHON_CLIENT_MEM_FRACTION" not in alone
    monkeypatch.setenv("XLA_CLIENT_MEM_FRACTION", "0.1")
    assert "XLA_PYTHON_CLIENT_MEM_FRACTION" not in launch.rank_env(Launch(2), 0, gpus=1)


def test_cuda_without_a_gpu_is_refused():
    if launch.num_gpus():
        pytest.skip("needs a machine without a GPU")
    with pytest.raises(RuntimeError, match="no CUDA device"):
        launch.run(["x.py"], Launch(2, platform="cuda"))


@pytest.fixture
def fake_mps(tmp_path, monkeypatch):
    """A stand-in for nvidia-cuda-mps-control with the same manners: a daemon, a pid file, `quit` on its input."""
    control = tmp_path / "bin" / mps.CONTROL
    control.parent.mkdir()
    control.write_text(
        textwrap.dedent(
            f"""\
            #!/bin/bash
            pid_file=$CUDA_MPS_PIPE_DIRECTORY/{mps.CONTROL}.pid
            if [ "$1" = -d ]; then
                [ -e {tmp_path}/refuse ] && {{ echo "no permission"; exit 1; }}
                sleep 600 >/dev/null 2>&1 & echo $! >"$pid_file"
                cp "$pid_file" {tmp_path}/started
            else
                read word
                [ -e {tmp_path}/deaf ] || {{ [ "$word" = quit ] && kill "$(cat "$pid_file")"; }}
            fi
            """
        )
    )
    control.chmod(0o755)
    monkeypatch.setenv("PATH", f"{control.parent}:{os.environ['PATH']}")
    monkeypatch.delenv("CUDA_MPS_PIPE_DIRECTORY", raising=False)
    return tmp_path


@pytest.mark.parametrize("manners", ["obedient", "deaf"])
def test_mps_ends_with_the_block(fake_mps, manners):
    (fake_mps / manners).touch()
    with mps.service(print) as env:
        pid = int((fake_mps / "started").read_text())
        assert _is_alive(pid) and os.path.isdir(env["CUDA_MPS_PIPE_DIRECTORY"])
    time.sleep(0.2)
    assert not _is_alive(pid) and not os.path.exists(env["CUDA_MPS_PIPE_DIRECTORY"])


def test_mps_that_cannot_start_is_said_and_done_without(fake_mps):
    (fake_mps / "refuse").touch()
    said = []
    with mps.service(said.append) as env:
        assert env == {}
    assert "no permission" in said[0]


def test_a_running_mps_is_left_alone(fake_mps, monkeypatch):
    monkeypatch.setenv("CUDA_MPS_PIPE_DIRECTORY", "/elsewhere")
    with mps.service(lambda line: None) as env:
        assert env == {}
    assert not (fake_mps / "started").exists()
