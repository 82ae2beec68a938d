"""jax_ep.cli.bench and doctor: byte rules, the baselines' results, and one run of each command on the CPU."""

import dataclasses
import functools
import json
import re
import subprocess
import sys
import time

import jax
import numpy as np
import pytest
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from jax_ep import bootstrap, lowering, tuning
from jax_ep.cli import bench
from jax_ep.cli.benchlib import findings, host, implementations, measure, report, timing, workloads
from jax_ep.cli.benchlib.plan import Plan
from jax_ep.cli.benchlib.workloads import WORKLOADS, Traffic, Workload

TINY = Workload("tiny", 12, hidden=16, num_topk=3, num_experts=8, dtype="float32")
PLAN = Plan(
    workloads=(TINY, WORKLOADS["W1"]),
    implementations=("cuda",),
    layouts=("token",),
    capacities=("demand", "default"),
    modes=("latency", "throughput"),
    num_sms=(16, 8),
    ops=("dispatch", "again", "combine"),
    num_calls=4,
    repeats=3,
    ranks_per_device=8,
    is_split=False,
    is_recorded=False,
    is_host_timed=False,
    is_first_call=True,
    is_setup=False,
    ranks_per_node=(4,),
    transports=("auto", "nvshmem"),
    suffix="",
    json_path="a.json",
    png_path=None,
)


@pytest.fixture
def four_ranks():
    return Mesh(np.array(jax.devices()[:4]), ("ep",))


def test_traffic_counts_rows_as_a_loop_does():
    idx = workloads.topk_idx(workloads.custom(TINY, routing="masked"), 4)
    sent, rows, several = (np.zeros((4, 4), int) for _ in range(3))
    per_expert = np.zeros(TINY.num_experts, int)
    for source in range(4):
        for token in range(TINY.num_tokens):
            there = [e // 2 for e in idx[source, token] if e >= 0]
            for rank in there:
                rows[source, rank] += 1
            for rank in set(there):
                sent[source, rank] += 1
                several[source, rank] += there.count(rank) > 1
            for expert in idx[source, token][idx[source, token] >= 0]:
                per_expert[expert] += 1
    traffic = Traffic.of(idx, TINY.num_experts)
    assert (traffic.sent == sent).all() and (traffic.rows == rows).all() and (traffic.several == several).all()
    assert traffic.demand("token") == sent.sum(0).max() and traffic.demand("expert") == rows.sum(0).max()
    assert traffic.demand("batched") == per_expert.max()
    assert traffic.tail_rows("expert", 40) == (40 - rows.sum(0)).clip(0).sum()


def test_limits_of_w1_on_one_gpu():
    """8 ranks on one GPU, 4300 GB/s: 5.29 ranks per token, of which 2.1 hold several of its experts."""
    traffic = Traffic.of(workloads.topk_idx(WORKLOADS["W1"], 8), 256)
    assert traffic.sent.sum() / (8 * 4096) == pytest.approx(5.29, abs=0.01)
    assert traffic.several.sum() / (8 * 4096) == pytest.approx(2.11, abs=0.01)

    def us(name, op, layout):
        return traffic.memory_bytes(op, layout, WORKLOADS[name]) / 4300e3

    assert us("W1", "dispatch", "token") == us("W1", "combine", "token") == pytest.approx(687, rel=0.01)
    assert us("W1", "dispatch", "expert") == us("W1", "again", "batched") == pytest.approx(1210, rel=0.01)
    assert us("W1", "combine", "expert") == pytest.approx((8 + 2 * 2.11 + 1) * 32768 * 14336 / 4300e3, rel=0.01)
    assert us("W1f", "dispatch", "token") == pytest.approx(354, rel=0.01)
    assert us("W1q", "dispatch", "token") == pytest.approx(407, rel=0.01)
    # FP8 on combine's way: a row is read, written and read as FP8, and one row per token written.
    wire = (8 * 14336 + 2 * 5.29 * 7392 + 14336) * 32768 / 4300e3
    assert us("W1f", "combine fp8", "expert") == pytest.approx(wire, rel=0.01)


def test_default_capacity_has_a_limit_of_its_own(four_ranks):
    plan = dataclasses.replace(PLAN, ranks_per_device=4)
    setting = measure.Setting.of(TINY, four_ranks)
    machine = measure.Machine(copy_gb_s=1.0, link_gb_s=None)
    least, default = (measure.Case(setting, "xla", "token", choice) for choice in ("demand", "default"))
    tail = (4 * 48 - setting.traffic.sent.sum()) * 64
    added_us = machine.limit_us(plan, default, "dispatch") - machine.limit_us(plan, least, "dispatch")
    assert added_us == pytest.approx(tail / 1e3)
    assert machine.limit_us(plan, default, "combine") == machine.limit_us(plan, least, "combine")
    assert default.capacity == 48 and default.implementation().zero_tail and not least.implementation().zero_tail


def test_what_does_not_fit_is_not_tried(four_ranks, monkeypatch):
    case = measure.Case(measure.Setting.of(TINY, four_ranks), "xla", "batched", "default")
    assert case.num_bytes == (2 * 2 * 48 + 48 + 4 * 12) * 64 and not measure._too_large(case)
    monkeypatch.setattr(measure.timing, "exchange", lambda limits: [[case.num_bytes - 1]])
    assert "not tried" in measure._too_large(case)


def test_limit_over_links_is_that_of_the_busiest_rank(four_ranks):
    setting = measure.Setting.of(workloads.custom(TINY, routing="one_rank"), four_ranks)
    case = measure.Case(setting, "xla", "token", "demand")
    machine = measure.Machine(copy_gb_s=1.0, link_gb_s=2.0)
    assert machine.limit_us(PLAN, case, "dispatch") == pytest.approx(3 * 12 * 64 / 2e3)


@pytest.mark.parametrize(
    ("name", "layout", "sent", "routing"),
    [
        *((name, "token", "rows", "masked") for name in ("dense", "ring")),
        *((name, "token", "rows", "one_rank") for name in ("dense", "ring")),
        *((name, "token", "pair", "uniform") for name in ("dense", "ring")),
        ("dense", "token", "fp8", "uniform"),
        *(("xla", layout, "rows", "half_empty") for layout in ("expert", "token", "batched")),
        *(("xla", layout, "pair", "uniform") for layout in ("token", "batched")),
        ("xla", "expert", "fp8", "empty_ranks"),
    ],
)
def test_implementations_bring_every_token_back(four_ranks, name, layout, sent, routing):
    workload = workloads.custom(TINY, routing=routing, sent=sent, hidden=TINY.hidden if sent == "rows" else 128)
    setting = measure.Setting.of(workload, four_ranks)
    impl = measure.Case(setting, name, layout, "demand").implementation()
    _, _, error = measure.prepare(impl, measure.compiler(four_ranks), setting.args)
    # What was quantised before is expected as such; what dispatch or combine quantises is 1/16 off at most.
    assert error < (0.13 if sent == "fp8" or (sent == "pair" and name == "xla") else 1e-5)


def test_alone_is_compared_with_groups_of_one(four_ranks):
    setting = measure.Setting.of(workloads.custom(TINY, routing="alone", num_topk=2), four_ranks)
    plan = dataclasses.replace(PLAN, implementations=("xla", "ring"), layouts=("token",), capacities=("demand",))
    plan = dataclasses.replace(plan, modes=("latency",))
    assert [(c.name, c.setting.traffic.num_ranks) for c in measure._cases(plan, setting)] == [
        ("xla", 4),
        ("xla", 1),
        ("ring", 4),
    ]
    assert setting.traffic.sent.tolist() == [[12, 0, 0, 0]] + 3 * [[0] * 4]
    if len(jax.devices()) != 4:
        setting = measure.Setting.of(setting.workload, measure.mesh())
    one = setting.of_one()
    assert one.traffic.sent.tolist() == [[12]] and one.workload.num_experts == 8 // len(jax.devices())


def test_numbers_of_sms():
    assert measure.sms_values((), None, None) == [None]
    assert measure.sms_values((), 12, 16) == [12]
    assert measure.sms_values((24,), 12, 16) == [24]  # asked for: refused by the call
    assert measure.sms_values((4, 16, 48), 12, 16) == [4, 12, 16]
    assert measure.sms_values((4, 8), None, None) == [4, 8]


def _row(
    us, op="dispatch", mode="throughput", *, workload=WORKLOADS["W1"], num_ranks=8, num_sms=16, is_default=False,
    limit_us=100.0,
):  # fmt: skip
    row = {"workload": workload.name, "implementation": "cuda", "layout": "token", "capacity": "demand", "op": op}
    row |= {"mode": mode, "chosen_mode": "latency" if mode == "auto" else mode}
    row |= {"num_ranks": num_ranks, "num_sms": num_sms, "is_default": is_default, "of": dataclasses.asdict(workload)}
    return row | {"us": us, "limit_us": limit_us, "wire_gb_s": 0.0, "percent_of_limit": 0.0, "error": ""}


def test_what_follows_from_the_rows():
    alone = WORKLOADS["W6-alone"]
    rows = [
        *(_row(us, num_sms=n, is_default=n == 12) for n, us in ((8, 300.0), (12, 220.0), (16, 200.0))),
        _row(260.0, workload=WORKLOADS["W6-zipf"], limit_us=65.0),
        _row(58.0, workload=alone, limit_us=10.0),
        _row(51.0, workload=dataclasses.replace(alone, num_experts=32), num_ranks=1, limit_us=10.0),
        _row(1.0, "combine") | {"error": "out of memory"},
    ]
    sms, skew, empty = findings.notes(rows)
    assert "default 12 SMs 220 us, best 16 SMs 200 us, ratio 1.10" in sms
    assert rows[3]["per_byte_of_uniform"] == pytest.approx(260 / 65 / (200 / 100)) and "2.00 of uniform W1" in skew
    assert rows[4]["empty_peer_us"] == pytest.approx(1.0) and "an empty peer costs 1.00 us" in empty


def test_auto_is_compared_with_the_better_mode():
    w2, split = WORKLOADS["W2"], "dispatch split"
    rows = [
        *(_row(us, mode=mode, workload=w2) for mode, us in (("throughput", 50.0), ("latency", 20.0), ("auto", 21.0))),
        # Of several numbers of SMs each mode's default counts.
        *(_row(us, "combine", "throughput", num_sms=n, is_default=n == 8) for n, us in ((8, 10.0), (16, 9.0))),
        _row(30.0, "combine", "latency", num_sms=4, is_default=True),
        *(_row(us, "combine", "auto", num_sms=n, is_default=n == 8) for n, us in ((8, 12.0), (4, 11.0))),
        _row(5.0, split, "latency", workload=w2),
        *(_row(9.0, "again", mode) for mode in ("throughput", "auto")),
    ]
    dispatch, combine, most = findings._auto(rows)
    assert dispatch.startswith("W2 cuda token demand dispatch: ") and dispatch.endswith("better mode 1.05")
    assert "auto (latency) 21.0 us" in dispatch and combine.endswith("better mode 1.20")
    assert most == "auto ÷ better mode: at most 1.20"
    assert rows[2]["auto_over_better"] == pytest.approx(1.05) and "auto_over_better" not in rows[0]
    assert not [*findings._auto(rows[:2])]
    at = report.HEADER.index("mode ")
    assert report.format_row(rows[2])[at:].split()[0] == "auto=latency"


def test_runs_of_several_numbers_of_ranks_become_one_file(tmp_path, monkeypatch):
    """Rows of the processes with another flag join those of the same ranks; a failure loses nothing measured."""

    def measured(plan, how):
        if how.ranks == 4:
            return {}, 7
        return {"num_ranks": how.ranks, "rows": [plan.implementations[0] + plan.suffix, plan.ranks_per_device]}, 0

    monkeypatch.setattr(bench, "_measured", measured)
    out = tmp_path / "all.json"
    words = "--ranks 2,4,8 --platform cpu --implementation cuda,ragged-decomposed --json"
    assert bench.main([*words.split(), str(out)]) == 7
    assert [(r["num_ranks"], r["rows"]) for r in bench._results(str(out))] == [
        (n, ["cuda", n, "ragged-decomposed", n]) for n in (2, 8)
    ]


def _parsed(*words):
    return bench._plan(bench._parser().parse_args(words))


def test_tokens_in_a_list_are_workloads():
    plan = _parsed("--tokens", "128,8192", "--workload", "W1,W6-one", "--quick")
    assert [(w.name, w.num_tokens) for w in plan.workloads] == [("W1-128", 128), ("W1-8192", 8192), ("W6-one", 4096)]
    assert (plan.num_calls, plan.repeats) == (6, 5)
    assert _parsed("--tokens", "16").workloads[0] == workloads.custom(WORKLOADS["W1"], num_tokens=16)


def test_ragged_with_its_best_flag_runs_in_processes_of_its_own(monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", "--xla_a=1")
    ours, decomposed = bench._parts(_parsed("--implementation", "cuda,ragged-decomposed,ring"))
    assert ours[0].implementations == ("cuda", "ring") and ours[1] == ()
    assert decomposed[0].implementations == ("ragged",) and decomposed[0].suffix == "-decomposed"
    assert dict(decomposed[1])["XLA_FLAGS"] == f"--xla_a=1 {bench.DECOMPOSER_FLAG}"
    assert [part.implementations for part, _ in bench._parts(_parsed())] == [()]


def test_ragged_lowers_for_gpus():
    """XLA:CPU cannot run ragged_all_to_all, so its program is only built here."""
    mesh = AbstractMesh((4,), ("ep",))
    sharding = NamedSharding(mesh, PartitionSpec("ep"))
    idx = workloads.topk_idx(TINY, 4)
    traffic = Traffic.of(idx, TINY.num_experts)
    impl = implementations.make("ragged", TINY, traffic, "token", 128, False)
    args = [
        jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)
        for shape, dtype in (((48, 16), "float32"), ((48, 3), "int32"), ((48, 3), "float32"))
    ]

    def roundtrip(*args):
        return impl.combine(*impl.dispatch(*args))

    text = measure.compiler(mesh)(roundtrip).trace(*args).lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("ragged_all_to_all") == 2


def test_steady_time_is_that_of_calls_alone(monkeypatch):
    """What a program costs beside its calls cancels, and a short program runs often enough for a steady median."""
    runs = []

    def seconds(fn, args):
        num_calls = fn(*args)
        runs.append(num_calls)
        return 300e-6 + num_calls * 30e-6 + (5e-3 if len(runs) % 9 == 8 else 0)  # now and then something intervenes

    monkeypatch.setattr(timing, "chain", lambda step, num_calls, num_linked: lambda: num_calls)
    monkeypatch.setattr(timing, "seconds", seconds)
    for num_calls, few in ((6, 2), (3, 2), (2, 1)):
        runs.clear()
        assert timing.steady_us(lambda fn: fn, None, (), num_calls, repeats=5) == pytest.approx(30)
        assert set(runs) == {num_calls, few} and len(runs) > 300
    runs.clear()
    monkeypatch.setattr(timing, "seconds", lambda fn, args: 1e-3)
    with pytest.raises(timing.TooNoisy, match="6 calls were no slower than 2"):
        timing.steady_us(lambda fn: fn, None, (), 6, repeats=5)


@pytest.mark.parametrize(
    ("repeats", "run_s", "expected"), [(5, 1e-4, 200), (5, 2e-3, 50), (15, 0.03, 15), (15, 0.4, 5), (15, 1.5, 3)]
)
def test_number_of_runs(repeats, run_s, expected):
    assert timing.num_runs(repeats, run_s) == expected


def test_chained_calls_are_neither_merged_nor_dropped(four_ranks):
    idx = workloads.topk_idx(TINY, 4)
    traffic = Traffic.of(idx, TINY.num_experts)
    compile_, args = measure.compiler(four_ranks), measure.inputs(TINY, idx, four_ranks)
    impl = implementations.make("dense", TINY, traffic, "token", 128, False)
    for step, operands, num_linked in (
        (impl.dispatch, args, 2),
        (lambda *a: (impl.combine(*a),), compile_(impl.dispatch)(*args), 1),
    ):
        hlo = compile_(timing.chain(step, 5, num_linked)).lower(*operands).compile().as_text()
        assert sum(" all-to-all(" in line for line in hlo.splitlines()) == 5


def test_reused_handles_are_chained_with_the_sms_asked_for(four_ranks):
    setting = measure.Setting.of(workloads.custom(TINY, sent="pair", hidden=128), four_ranks)
    impl, compile_ = measure.Case(setting, "xla", "batched", "demand").implementation(), measure.compiler(four_ranks)
    ready = measure.prepare(impl, compile_, setting.args)
    steps = measure._steps(PLAN, impl, setting.args, ready)
    assert [step[0] for step in steps] == ["dispatch", "again", "combine", "combine fp8"]
    for op, step, operands, num_linked in steps:
        chosen = dataclasses.replace(impl, num_sms=5)
        program = compile_(timing.chain(functools.partial(step, chosen), 2, num_linked))
        specs = [e.params["spec"] for e in _equations(program.trace(*operands).jaxpr.jaxpr) if "spec" in e.params]
        assert [spec.config.num_sms for spec in specs] == [5, 5], op


def _equations(jaxpr):
    for equation in jaxpr.eqns:
        yield equation
        for value in equation.params.values():
            inner = getattr(value, "jaxpr", value)
            if hasattr(inner, "eqns"):
                yield from _equations(inner)


def test_plan_survives_a_command_line():
    assert Plan.from_json(PLAN.to_json()) == PLAN


def _jax_ep(*words, cwd):
    command = [sys.executable, "-m", "jax_ep", *words]
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=300)


def test_every_mode_is_a_case_and_halves_are_one(four_ranks):
    setting = measure.Setting.of(TINY, four_ranks)
    plan = dataclasses.replace(PLAN, implementations=("xla", "ring"), layouts=("token",), capacities=("demand",))
    plan = dataclasses.replace(
        plan, modes=("throughput", "auto"), is_split=True, ops=("combine",), num_sms=(), num_calls=2
    )
    cases = [*measure._cases(plan, setting)]
    assert [(case.name, case.mode) for case in cases] == [("xla", "throughput"), ("xla", "auto"), ("ring", "")]
    machine = measure.Machine(copy_gb_s=1.0, link_gb_s=None)
    rows = [row for case in cases for row in measure._case_rows(plan, machine, case, setting)]
    assert [(row["op"], row["mode"], row["chosen_mode"]) for row in rows] == [
        ("combine", "throughput", "throughput"),
        ("combine split", "latency", "latency"),
        ("combine", "auto", "auto"),  # pure JAX has no modes to choose from
        ("combine", "", ""),
    ]
    assert all(row["us"] > 0 if not row["error"] else "too noisy" in row["error"] for row in rows)


@pytest.mark.parametrize("layout", ["token", "batched"])
def test_halves_do_what_the_whole_does(four_ranks, layout):
    workload = workloads.custom(TINY, sent="fp8", hidden=128)
    setting = measure.Setting.of(workload, four_ranks)
    impl, compile_ = measure.Case(setting, "xla", layout, "demand").implementation(), measure.compiler(four_ranks)

    def differences(x, idx, weights):
        (rows, state), (rows2, state2) = impl.dispatch(x, idx, weights), impl.dispatch_split(x, idx, weights)
        y = impl.expert(rows, state)
        pairs = (
            (impl.combine(y, state), impl.combine_split(y, state2)),
            (rows.data.astype(x.dtype), rows2.data.astype(x.dtype)),
        )
        return jax.numpy.stack([(a != b).sum() for a, b in pairs])[None], y.sum()[None]

    different, total = compile_(differences)(*setting.args)
    assert not different.any() and (total != 0).all()
    steps = measure._steps(PLAN, impl, setting.args, measure.prepare(impl, compile_, setting.args, True), True)
    assert [step[0] for step in steps][-2:] == ["dispatch split", "combine split"]
    for _, step, operands, num_linked in steps[-2:]:
        program = compile_(timing.chain(functools.partial(step, impl), 2, num_linked)).trace(*operands)
        names = [e.primitive.name for e in _equations(program.jaxpr.jaxpr) if e.primitive.name.startswith("jax_ep")]
        assert [name.rsplit("_", 1)[1] for name in names] == ["start", "done"] * 2


def test_host_time_of_a_pair():
    """On the CPU nothing says when it is launched: a clock stands in, which makes host and wall time nearly one."""
    entry = host.of_mode("latency", "xla", 5, time.monotonic_ns)
    assert entry["mode"] == "latency" and entry["num_ranks"] == len(jax.devices())
    assert entry["host_us"] == pytest.approx(entry["wall_us"], rel=0.5, abs=20)
    assert 0 < entry["start_us"] and entry["host_us"] > 0
    replayed = host.of_mode("latency", "xla", 5, lambda: 1)  # the last launch was before all executions
    assert replayed["host_us"] is None and replayed["start_us"] is None and replayed["wall_us"] > 0
    text = host.format_entry(replayed | {"error": ""})
    assert text.startswith("host, mode latency: nothing to launch") and f"take {replayed['wall_us']:.1f} us" in text
    text = host.format_entry(entry | {"error": ""})
    assert text.startswith("host, mode latency: ") and f"{entry['host_us']:.1f} us to launch" in text
    said = []
    assert host.lines(dataclasses.replace(PLAN, implementations=("xla",)), said.append) == []
    assert "not measured" in said[0]


def test_modes_on_the_command_line(capsys):
    plan = _parsed("--mode", "throughput,latency,auto", "--split", "--host", "--workload", "W2,W2q,W2-1")
    assert plan.modes == bench.MODES and plan.is_split and plan.is_host_timed
    assert [(w.num_tokens, w.sent) for w in plan.workloads] == [(128, "rows"), (128, "fp8"), (1, "rows")]
    assert _parsed().modes == ("throughput",) and not _parsed().is_split
    assert _parsed().is_recorded is None
    assert _parsed("--command-buffers").is_recorded is True and _parsed("--no-command-buffers").is_recorded is False
    with pytest.raises(SystemExit):
        bench.main(["--ranks", "2", "--first-call", "1", "--mode", "latency,auto"])
    assert "one --mode" in capsys.readouterr().err


@pytest.mark.multiprocess
def test_bench_command_on_two_processes(tmp_path):
    done = _jax_ep(
        *("bench", "--ranks", "2", "--platform", "cpu", "--workload", "small", "--tokens", "16", "--sent", "pair"),
        *("--implementation", "xla,ring", "--layout", "token", "--num-sms", "4,8", "--op", "combine"),
        *("--calls", "6", "--repeats", "3", "--mode", "latency,throughput"),
        *("--json", str(tmp_path / "b.json"), "--png", str(tmp_path / "b.png")),
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    result = json.loads((tmp_path / "b.json").read_text())
    assert result["num_ranks"] == 2 and result["num_processes"] == 2
    assert [(r["implementation"], r["op"], r["num_sms"]) for r in result["rows"]] == [
        *(("xla", op, sms) for _ in range(2) for op in ("combine", "combine fp8") for sms in (4, 8)),
        ("ring", "combine", None),
    ]
    for row in result["rows"]:
        # A loaded machine may be too noisy for a difference of times; it is said then, never shown as a number.
        assert row["us"] > 0 if not row["error"] else "too noisy" in row["error"]
    assert (tmp_path / "b.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.multiprocess
@pytest.mark.parametrize("processes", ["--ranks 2", "--cpu-devices 2"])
def test_first_call_command(tmp_path, processes):
    """Two processes with a rank each, one process with two ranks."""
    done = _jax_ep(
        *("bench", *processes.split(), "--platform", "cpu", "--workload", "small", "--implementation", "xla"),
        *("--first-call", "1", "--repeats", "3", "--mode", "latency", "--json", str(tmp_path / "f.json")),
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    result = json.loads((tmp_path / "f.json").read_text())
    assert set(result["median_ratio"]) == {"ours", "control"}
    (start,) = result["starts"]
    assert all(start[key]["paused_us"] > 0 for key in ("ours", "control")) and "us after a pause" in done.stdout
    assert len(start["ours"]["calls_us"]) == 8 and start["mode"] == "latency" and start["num_ranks"] == 2


def test_doctor_command(tmp_path):
    done = _jax_ep("doctor", cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "implementation" in done.stdout and f"jax, jaxlib         {jax.__version__}" in done.stdout


def test_unknown_command_shows_the_known_ones(tmp_path):
    done = _jax_ep("dance", cwd=tmp_path)
    assert done.returncode == 2 and all(word in done.stdout for word in ("doctor", "launch", "bench"))


@pytest.mark.parametrize("mode", bench.MODES)
def test_marked_numbers_of_sms_are_those_that_calls_take(four_ranks, monkeypatch, mode):
    """Lowered for CUDA with set-up replaced by its answers, as in test_lowering.py."""
    monkeypatch.setattr(bootstrap, "can_use_cuda", lambda groups, config=None, num_nodes=1: "")
    monkeypatch.setattr(bootstrap, "prepare", lambda groups, config=None, num_nodes=1: None)
    monkeypatch.setattr(bootstrap, "bind", lambda *call_site: None)
    monkeypatch.setattr(bootstrap, "placement", lambda groups, config=None: tuning.Placement(48, 1, 1))
    monkeypatch.setattr(lowering._ffi, "arena_shape", lambda *sizes: (8, 1 << 20, 0, 1))
    monkeypatch.setattr(lowering._ffi, "latency_arena_shape", lambda *sizes: (8, 2 << 20, sizes[-1], sizes[1]))
    workload = WORKLOADS["W1q"]
    sizes = {"x": ((4 * 4096, 7168), "bfloat16"), "idx": ((4 * 4096, 8), "int32"), "w": ((4 * 4096, 8), "float32")}
    args = tuple(jax.ShapeDtypeStruct(*size) for size in sizes.values())
    traffic = Traffic.of(workloads.topk_idx(workload, 4), workload.num_experts)
    setting = measure.Setting(workload, traffic, four_ranks, args)
    case, compile_ = measure.Case(setting, "cuda", "expert", "demand", mode), measure.compiler(four_ranks)
    impl = case.implementation()

    def received(*args):
        rows, state = impl.dispatch(*args)
        return impl.expert(rows, state), state

    # "auto": what crosses in FP8 takes latency mode, the others do not.
    monkeypatch.setattr(tuning, "prefers_latency", lambda *a, **sizes: sizes["row_bytes"] < 14336)
    taken, chosen = {}, {}
    ready = (*jax.eval_shape(compile_(received), *args), 0.0)
    for op, step, operands, _ in measure._steps(PLAN, impl, args, ready, is_split=True):
        program = compile_(functools.partial(step, impl)).trace(*operands)
        text = program.lower(lowering_platforms=("cuda",)).as_text()
        taken[op] = [int(n) for n in re.findall(r"num_sms = (\d+)", text)]
        chosen[op] = measure.chosen_mode(case, op, compile_, functools.partial(step, impl), operands)
        assert set(taken[op]) == {measure.default_num_sms(setting, "expert", op, chosen[op])[0]}, op
    assert [chosen.pop(f"{op} split") for op in ("dispatch", "combine")] == ["latency"] * 2
    if mode == "auto":
        assert set(chosen.values()) == {"latency", "throughput"} and chosen["dispatch"] != chosen["combine"]
    else:
        assert set(chosen.values()) == {mode}
    assert mode == "latency" or taken["dispatch"] != taken["combine"]  # or the test says little
