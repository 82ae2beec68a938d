"""Jobs that this process starts and watches: ranks that die, and a program that one job hands to the next.

This process leaves the GPU alone. Every job begins on the GPU that the one before left, so a process that stayed and
kept its memory is found. `--implementation xla` tries the jobs without a GPU, as far as that goes.
"""

import json
import os
import pathlib
import re
import tempfile
import time

import pytest

from jax_ep.cli import launch

SCRIPT = pathlib.Path(__file__).with_name("whole_job.py")


@pytest.fixture
def run(request, tmp_path):
    """`run(way, ranks, kernels)`: exit status, what each rank reported, all lines, and seconds."""
    implementation = request.config.getoption("--implementation")

    def start(way: str, ranks: int, kernels: str = "throughput", use_mps: bool = True):
        lines = []
        platform = "cuda" if implementation == "cuda" else "cpu"
        how = launch.Launch(ranks, 45, platform, use_mps=use_mps, grace_s=15)
        begin = time.monotonic()
        status = launch.run([str(SCRIPT), way, str(tmp_path), implementation, kernels], how, lines.append)
        reports = [re.match(r"\[(\d+)\] REPORT(.*)", line) for line in lines]
        reports = {int(found[1]): json.loads(found[2]) for found in reports if found}
        return status, reports, "\n".join(lines), time.monotonic() - begin

    return start


@pytest.mark.parametrize(
    ("way", "ranks", "kernels"),
    [
        ("killed", 3, "throughput"),
        ("raises", 3, "throughput"),
        ("killed inside", 2, "throughput"),
        ("killed", 3, "latency"),
        ("killed", 4, "nodes"),
    ],
    ids=["killed", "raises", "killed inside", "killed, latency", "killed, nodes"],
)
def test_a_rank_that_dies(run, request, way, ranks, kernels):
    """B62: the others say whom they miss within the set time, and end; nobody stays. (Without MPS, whose clients can
    disturb each other when one dies in a kernel.)"""
    if request.config.getoption("--implementation") != "cuda":
        pytest.skip("needs a CUDA device")
    status, reports, text, seconds = run(way, ranks, kernels, use_mps=way != "killed inside")
    limit = 1.0 if way == "killed" else 2.0
    assert status != 0 and "not finished within" not in text, text
    assert seconds < 40, text
    assert set(reports) == set(range(ranks)) - {1}, text
    for rank, facts in reports.items():
        assert facts["kind"] in ("PeerTimeout", "PeerLost") and facts["peer"] == 1 and facts["rank"] == rank, facts
        assert facts["op"] == "dispatch" and facts["phase"], facts
        most = 2 * limit if way == "killed inside" else limit  # a peer that had begun has a second limit
        assert limit * 0.9 < facts["waited"] < most + 5, facts


def test_a_job_leaves_nothing_behind(run, monkeypatch):
    """B61: after the jobs above the GPU is free; a good job ends with status 0 and leaves no file."""

    def shared():
        return {n for n in os.listdir("/dev/shm") if not n.startswith(("cuda", "nccl", "nvidia", "sem.cuda"))}

    before = shared()
    # Of its own, since other jobs have files in the usual one; and short, for MPS has sockets there.
    with tempfile.TemporaryDirectory() as folder:
        monkeypatch.setenv("TMPDIR", folder)
        monkeypatch.setattr(tempfile, "tempdir", folder)
        status, reports, text, _ = run("nobody", 3)
        left = [name for name in os.listdir(folder) if name.startswith("jax_ep") and "cache" not in name]
    assert status == 0 and reports == {rank: {"right": True} for rank in range(3)}, text
    assert not left and shared() <= before


def test_an_exported_program_in_another_job(run, request):
    """B52: written by one job, read by the next: equal results, our calls of both modes in it, rows straight to their
    buffers."""
    status, reports, text, _ = run("write", 2)
    assert status == 0 and all(facts["right"] for facts in reports.values()) and len(reports) == 2, text
    is_ours = request.config.getoption("--implementation") == "cuda"
    assert all((facts["calls"] > 0) == is_ours for facts in reports.values()), text
    status, reports, text, _ = run("read", 2)
    assert status == 0 and len(reports) == 2, text
    for facts in reports.values():
        assert facts == {"right": True, "calls": 4 if is_ours else 0, "staged": 0}, text
