"""The bench over simulated nodes: which cases there are, what a row says of them, and the ratio to one node."""

import dataclasses
import functools
import json
import re

import jax
import numpy as np
import pytest
from jax.sharding import Mesh
from test_bench import PLAN, TINY, _jax_ep, _parsed, _row

from jax_ep import bootstrap, tuning
from jax_ep.cli import bench
from jax_ep.cli.benchlib import findings, measure, plots, report, workloads
from jax_ep.cli.benchlib.workloads import WORKLOADS, Traffic


@pytest.fixture
def four_ranks():
    return Mesh(np.array(jax.devices()[:4]), ("ep",))


def _over(us, per_node, transport="auto", **row):
    return _row(us, **row) | {"ranks_per_node": per_node, "transport": transport, "node_sms": 4}


def test_nodes_are_cases_beside_one_node(four_ranks):
    """Ours only, and only where a node has fewer ranks than the group."""
    plan = dataclasses.replace(PLAN, implementations=("xla", "ring"), capacities=("demand",), ranks_per_node=(2, 4, 8))
    assert plan.nodes(4) == [(None, "auto"), (2, "auto"), (2, "nvshmem")]
    cases = [*measure._cases(plan, measure.Setting.of(TINY, four_ranks))]
    assert [(case.name, case.mode, case.ranks_per_node, case.transport) for case in cases] == [
        *(("xla", mode, *nodes) for mode in ("latency", "throughput") for nodes in plan.nodes(4)),
        ("ring", "", None, "auto"),
    ]
    configs = [case.implementation()._config for case in cases[:3]]
    assert [(c.ranks_per_node, c.transport) for c in configs] == plan.nodes(4)
    # A row of the table says it; halves are measured on one node only.
    plan = dataclasses.replace(plan, modes=("throughput",), num_sms=(), num_calls=2, is_split=True, ops=("combine",))
    machine, setting = measure.Machine(copy_gb_s=1.0, link_gb_s=None), cases[0].setting
    of = [[*measure._case_rows(plan, machine, case, setting)] for case in cases[3:5]]
    assert [[(row["op"], findings.nodes(row)) for row in rows] for rows in of] == [
        [("combine", ""), ("combine split", "")],
        [("combine", "2x2")],
    ]


def test_first_call_and_set_up_take_the_nodes_asked_for(four_ranks):
    setting = measure.Setting.of(TINY, four_ranks)
    plan = dataclasses.replace(PLAN, implementations=("xla",), ranks_per_node=(2,), transports=("nvshmem",))
    case = measure.Case.first(plan, setting)
    assert (case.ranks_per_node, case.transport, case.mode) == (2, "nvshmem", "latency")
    assert measure.Case.first(dataclasses.replace(plan, ranks_per_node=()), setting).ranks_per_node is None


def test_ratio_to_one_node():
    rows = [
        *(_row(us, num_sms=n, is_default=n == 16) for n, us in ((12, 1000.0), (16, 900.0))),
        _over(1800.0, 4, num_sms=12, is_default=True),  # by default both: with the carrier's as many SMs
        _over(2200.0, 2, "nvshmem", num_sms=12),
        _over(5.0, 2, num_sms=8),  # nothing to compare with
        _over(1.0, 2, mode="auto", num_sms=12),
    ]
    default, nvshmem, most = findings._nodes(rows)
    assert default.endswith("1800 us over 2x4, 900 us on one node, ratio 2.00") and default.startswith("W1 2x4 cuda ")
    assert nvshmem.endswith("2200 us over 4x2 nvshmem, 1000 us on one node, ratio 2.20")
    assert most == "several nodes ÷ one: at most 2.20" and rows[3]["over_one_node"] == pytest.approx(2.2)
    assert "over_one_node" not in rows[0] and "over_one_node" not in rows[4]
    assert not [*findings._nodes(rows[:2])]
    words = report.format_row(rows[3]).split()
    assert words[:4] == ["W1", "4x2", "nvshmem", "cuda"] and "12+4" in words
    assert "12+4*" in report.format_row(rows[2]).split()
    # Other findings keep nodes apart: neither a sweep of SMs nor a skew mixes them with one node.
    rows = [_row(200.0), _over(400.0, 4), _over(300.0, 4, workload=WORKLOADS["W6-one"], limit_us=50.0)]
    assert not [*findings._default_sms(rows)]
    (skew,) = findings._skew(rows)
    assert rows[2]["per_byte_of_uniform"] == pytest.approx(300 / 50 / (400 / 100)) and "W6-one 2x4" in skew


def test_pictures_name_nodes():
    rows = [make(4.0 * n, num_ranks=n) for n in (4, 8) for make in (_row, lambda us, **k: _over(us, 2, "nvshmem", **k))]
    ((_, curves),) = plots.points(rows, "ranks", 2)
    assert [label for _, label in curves] == ["cuda token demand", "cuda token demand nodes of 2 nvshmem"]
    assert [len(curve) for curve in curves.values()] == [2, 2]
    assert plots._bar_label(rows[1], False) == "cuda token demand 2x2 nvshmem 16 + 4 SMs"


@pytest.mark.parametrize(("asked_mode", "mode"), [("auto", "throughput"), ("latency", "latency")])
def test_marked_numbers_of_sms_over_nodes(four_ranks, usable, monkeypatch, asked_mode, mode):
    """The table's numbers are those of the lowered calls, and of their carrier: by default, and where asked for."""
    monkeypatch.setattr(bootstrap, "placement", lambda groups, config=None: tuning.Placement(33, 4, 4))
    workload = WORKLOADS["W1"]
    sizes = {"x": ((4 * 4096, 7168), "bfloat16"), "idx": ((4 * 4096, 8), "int32"), "w": ((4 * 4096, 8), "float32")}
    args = tuple(jax.ShapeDtypeStruct(*size) for size in sizes.values())
    traffic = Traffic.of(workloads.topk_idx(workload, 4), workload.num_experts)
    setting = measure.Setting(workload, traffic, four_ranks, args)
    case = measure.Case(setting, "cuda", "token", "demand", asked_mode, ranks_per_node=2)
    impl, compile_ = case.implementation(), measure.compiler(four_ranks)
    ready = (*jax.eval_shape(compile_(impl.dispatch), *args), 0.0)
    for op, step, operands, _ in measure._steps(PLAN, impl, args, ready):
        assert measure.chosen_mode(case, op, compile_, functools.partial(step, impl), operands) == mode
        chosen, most = measure.default_num_sms(setting, "token", op, mode, 2)
        assert chosen < most == 32
        for asked in (None, 5, most):
            of = functools.partial(step, dataclasses.replace(impl, num_sms=asked))
            text = compile_(of).trace(*operands).lower(lowering_platforms=("cuda",)).as_text()
            taken = [int(re.search(rf"{name} = (\d+)", text)[1]) for name in ("num_sms", "num_carriers")]
            assert taken == [asked or chosen, measure.num_carriers(setting, "token", op, 2, asked, mode)], (op, asked)
            assert sum(taken) <= 33 and measure.num_carriers(setting, "token", op, None, asked) is None


def test_nodes_on_the_command_line(capsys):
    plan = _parsed("--ranks-per-node", "4,2", "--transport", "auto,nvshmem")
    assert plan.ranks_per_node == (4, 2) and plan.transports == bench.TRANSPORTS
    assert _parsed().ranks_per_node == () and _parsed().transports == ("auto",)
    for words in (
        "--transport tcp",
        "--transport nvshmem",
        "--first-call 1 --ranks 4 --ranks-per-node 2,1",
        "--workload W8 --ranks-per-node 2",
    ):
        with pytest.raises(SystemExit):
            bench.main(words.split())
    error = capsys.readouterr().err
    assert "none of auto, nvshmem" in error and "between nodes: give --ranks-per-node" in error
    assert "one --ranks-per-node" in error and "got --ranks-per-node" in error


@pytest.mark.multiprocess
def test_bench_command_over_nodes(tmp_path):
    done = _jax_ep(
        *("bench", "--ranks", "2", "--platform", "cpu", "--workload", "small", "--tokens", "16", "--op", "combine"),
        *("--implementation", "xla", "--layout", "token", "--ranks-per-node", "1,2", "--calls", "8", "--repeats", "3"),
        *("--json", str(tmp_path / "n.json")),
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    rows = json.loads((tmp_path / "n.json").read_text())["rows"]
    assert [(row["op"], findings.nodes(row)) for row in rows] == [("combine", ""), ("combine", "2x1")]
    if not any(row["error"] for row in rows):  # a loaded machine may be too noisy for a difference of times
        ratio = rows[1]["us"] / rows[0]["us"]
        assert rows[1]["over_one_node"] == pytest.approx(ratio) and f"ratio {ratio:.2f}" in done.stdout
