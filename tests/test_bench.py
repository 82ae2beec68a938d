"""jax_ep.cli.bench and doctor: byte rules, the baselines' results, and one run of each command on the CPU."""

import json
import subprocess
import sys

import jax
import numpy as np
import pytest
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from jax_ep.cli.benchlib import implementations, measure, timing, workloads
from jax_ep.cli.benchlib.plan import Plan
from jax_ep.cli.benchlib.workloads import WORKLOADS, Traffic, Workload

TINY = Workload("tiny", 12, hidden=16, num_topk=3, num_experts=8, dtype="float32")


@pytest.fixture
def four_ranks():
    return Mesh(np.array(jax.devices()[:4]), ("ep",))


def test_traffic_counts_rows_as_a_loop_does():
    idx = workloads.topk_idx(workloads.custom(TINY, routing="masked"), 4)
    sent, rows = np.zeros((4, 4), int), np.zeros((4, 4), int)
    for source in range(4):
        for token in range(TINY.num_tokens):
            there = [e // 2 for e in idx[source, token] if e >= 0]
            for rank in there:
                rows[source, rank] += 1
            for rank in set(there):
                sent[source, rank] += 1
    traffic = Traffic.of(idx, TINY.num_experts)
    assert (traffic.sent == sent).all() and (traffic.rows == rows).all()
    assert traffic.demand("token") == sent.sum(0).max() and traffic.demand("expert") == rows.sum(0).max()


def test_limit_of_w1_on_one_gpu():
    """8 ranks on one GPU: 5.29 ranks per token; 687 us at 4300 GB/s for the token layout."""
    traffic = Traffic.of(workloads.topk_idx(WORKLOADS["W1"], 8), 256)
    assert traffic.sent.sum() / (8 * 4096) == pytest.approx(5.29, abs=0.01)
    us = traffic.memory_rows("dispatch", "token", 4096) * WORKLOADS["W1"].row_bytes / 4300e3
    assert us == pytest.approx(687, rel=0.01)


@pytest.mark.parametrize("routing", ["uniform", "masked", "one_rank", "empty_ranks"])
@pytest.mark.parametrize("name", ["xla", "dense", "ring"])
def test_implementations_bring_every_token_back(four_ranks, name, routing):
    workload = workloads.custom(TINY, routing=routing)
    idx = workloads.topk_idx(workload, 4)
    traffic = Traffic.of(idx, workload.num_experts)
    args = measure.inputs(workload, idx, four_ranks)
    for layout in ("expert", "token") if name == "xla" else ("token",):
        capacity = workloads.capacity(workload, traffic, layout, "demand", 4)
        impl = implementations.make(name, workload, traffic, layout, capacity, None)
        assert measure.check(impl, measure.compiler(four_ranks), args) < 1e-5


def test_ragged_lowers_for_gpus():
    """XLA:CPU cannot run ragged_all_to_all, so its program is only built here."""
    mesh = AbstractMesh((4,), ("ep",))
    sharding = NamedSharding(mesh, PartitionSpec("ep"))
    idx = workloads.topk_idx(TINY, 4)
    traffic = Traffic.of(idx, TINY.num_experts)
    impl = implementations.make("ragged", TINY, traffic, "token", 128, None)
    args = [
        jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)
        for shape, dtype in (((48, 16), "float32"), ((48, 3), "int32"), ((48, 3), "float32"))
    ]

    def roundtrip(*args):
        return impl.combine(*impl.dispatch(*args))

    text = measure.compiler(mesh)(roundtrip).trace(*args).lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("ragged_all_to_all") == 2


def test_chained_calls_are_neither_merged_nor_dropped(four_ranks):
    idx = workloads.topk_idx(TINY, 4)
    traffic = Traffic.of(idx, TINY.num_experts)
    compile_, args = measure.compiler(four_ranks), measure.inputs(TINY, idx, four_ranks)
    impl = implementations.make("dense", TINY, traffic, "token", 128, None)
    for step, operands, num_linked in (
        (impl.dispatch, args, 2),
        (lambda *a: (impl.combine(*a),), compile_(impl.dispatch)(*args), 1),
    ):
        hlo = compile_(timing.chain(step, 5, num_linked)).lower(*operands).compile().as_text()
        assert sum(" all-to-all(" in line for line in hlo.splitlines()) == 5


def test_plan_survives_a_command_line():
    plan = Plan(
        (TINY, WORKLOADS["W1"]), ("cuda",), ("token",), ("demand", "default"), 16, 4, 3, 8, True, "a.json", None
    )
    assert Plan.from_json(plan.to_json()) == plan


def _jax_ep(*words, cwd):
    command = [sys.executable, "-m", "jax_ep", *words]
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=300)


@pytest.mark.multiprocess
def test_bench_command_on_two_processes(tmp_path):
    done = _jax_ep(
        *("bench", "--ranks", "2", "--platform", "cpu", "--workload", "small", "--tokens", "16"),
        *("--implementation", "xla,ring", "--layout", "token", "--calls", "20", "--repeats", "3"),
        *("--json", str(tmp_path / "b.json"), "--png", str(tmp_path / "b.png")),
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    result = json.loads((tmp_path / "b.json").read_text())
    assert result["num_ranks"] == 2 and result["num_processes"] == 2
    assert [(r["implementation"], r["op"]) for r in result["rows"]] == [
        (name, op) for name in ("xla", "ring") for op in ("dispatch", "combine")
    ]
    for row in result["rows"]:
        # A loaded machine may be too noisy for a difference of times; it is said then, never shown as a number.
        assert row["us"] > 0 if not row["error"] else "too noisy" in row["error"]
    assert (tmp_path / "b.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.multiprocess
def test_first_call_command(tmp_path):
    done = _jax_ep(
        *("bench", "--ranks", "2", "--platform", "cpu", "--workload", "small", "--implementation", "xla"),
        *("--first-call", "1", "--repeats", "3", "--json", str(tmp_path / "f.json")),
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    result = json.loads((tmp_path / "f.json").read_text())
    assert set(result["median_ratio"]) == {"ours", "control"}
    assert len(result["starts"][0]["ours"]["calls_us"]) == 8


def test_doctor_command(tmp_path):
    done = _jax_ep("doctor", cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "implementation" in done.stdout and f"jax, jaxlib         {jax.__version__}" in done.stdout


def test_unknown_command_shows_the_known_ones(tmp_path):
    done = _jax_ep("dance", cwd=tmp_path)
    assert done.returncode == 2 and all(word in done.stdout for word in ("doctor", "launch", "bench"))
