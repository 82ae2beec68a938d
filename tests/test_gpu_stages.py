"""Scripts of tests/gpu: what a stage of run.py and sanitize.py came to, read from its log; what several.py runs, how
long, and what it makes of it; what time_kernels.py asks of the kernels and prints. Nothing is run on a GPU here."""

import ast
import pathlib

import pytest

from jax_ep.cli import bench
from jax_ep.cli.benchlib import block_plan

GPU = pathlib.Path(__file__).parent / "gpu"


@pytest.fixture
def scripts(gpu_scripts):
    return gpu_scripts("run", "sanitize")


CLEAN = "========= ERROR SUMMARY: 0 errors\n"
WAITED = "E       AssertionError: {'code': 1, 'phase': 2}\n"
LOGS = {
    # log, exit status, state, words of the note
    "good": (
        "....\n20 passed, 9 deselected in 33.10s\n" + CLEAN,
        0,
        "passed",
        "20 passed, 9 deselected, ERROR SUMMARY",
    ),
    "two ranks": ("[0] 3 passed in 1.00s\n[1] 3 passed in 1.20s\n", 0, "passed", "3 passed"),
    "no test ran": ("Traceback\n", 0, "FAILED", "see its log"),
    "a test failed": ("FAILED a.py::b - x\n1 failed, 3 passed in 2.0s\n", 1, "FAILED", "FAILED a.py::b"),
    "a bad access": ("20 passed in 3.1s\n========= ERROR SUMMARY: 3 errors\n", 9, "FAILED", "ERROR SUMMARY: 3 errors"),
    "out of time": ("....", -1, "TIME-OUT", ""),
    "other device": ("========= Error: Device not supported\n", 1, "not run", "does not accept"),
    "one kernel at a time": (WAITED * 2 + "2 failed, 9 deselected in 41.0s\n" + CLEAN, 1, "not run", "side by side"),
    "one test timed out": (WAITED + "FAILED a.py::b\n1 failed, 3 passed in 41.0s\n" + CLEAN, 1, "FAILED", "a.py::b"),
    "another fault": (WAITED + "FAILED a.py::b\n2 failed in 41.0s\n" + CLEAN, 1, "FAILED", "a.py::b"),
}


@pytest.mark.parametrize("case", LOGS)
def test_outcome_of_a_log(scripts, case):
    run, sanitize = scripts
    text, status, state, words = LOGS[case]
    stage = sanitize.stages("compute-sanitizer")[0]
    outcome = run._outcome(run.launch.TIMED_OUT if status < 0 else status, 1.0, text, stage)
    assert outcome.state == state and words in outcome.note


def test_plain_stages_are_never_excused(scripts):
    """ "not run" is for tools that cannot run; the suite itself has no such way out."""
    run, _ = scripts
    text, status, *_ = LOGS["one kernel at a time"]
    assert run._outcome(status, 1.0, text, run.Stage("plain", None, 9, ())).state == "FAILED"


def test_stages_name_files_that_exist(scripts):
    run, sanitize = scripts
    plan = [*run.stages("cache"), *sanitize.stages("compute-sanitizer")]
    named = {t.partition("::")[0] for stage in plan for t in stage.tests if run.is_test(t)}
    assert named and all((GPU / t).is_file() for t in named)
    alone = {"test_exchange_devices.py"}  # only where there are several GPUs
    assert {p.name for p in GPU.glob("test_*.py")} == named | alone
    assert len({stage.name for stage in plan}) == len(plan)


def _stage(run, name, status=0, **options):
    """One whose "python" is a shell: it says which card it sees, and when it began and ended."""
    script = "date +begin=%s.%N; echo card=$CUDA_VISIBLE_DEVICES=; sleep 0.4; date +end=%s.%N; echo '1 passed in 0.1s'"
    script += f"; exit {status}"
    return run.Stage(name, None, 30, (), prefix=("sh", "-c", script), **options)


def _facts(logs, name):
    return dict(line.split("=")[:2] for line in (logs / f"{name}.log").read_text().splitlines() if "=" in line)


def test_stages_side_by_side(scripts, tmp_path, monkeypatch, capsys):
    """With two cards each stage has one of them, in an order that heeds `after`; the rest comes when both are free."""
    run, _ = scripts
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "all")
    plan = [_stage(run, name) for name in ("a", "b", "c")]
    plan += [_stage(run, "late", after="c"), _stage(run, "wide", takes_all=True), _stage(run, "d", after="unknown")]
    assert run.run_all(plan, tmp_path, 60, ("one", "two")) == 0
    facts = {stage.name: _facts(tmp_path, stage.name) for stage in plan}
    assert {fact["card"] for name, fact in facts.items() if name != "wide"} == {"one", "two"}
    assert facts["wide"]["card"] == "all" and facts["late"]["begin"] >= facts["c"]["end"]
    assert facts["wide"]["begin"] >= max(fact["end"] for name, fact in facts.items() if name != "wide")
    assert facts["b"]["begin"] < facts["a"]["end"]  # side by side
    assert capsys.readouterr().out.splitlines()[-1].startswith("6 stages, 0 failed")

    assert run.run_all([*plan[:2], _stage(run, "bad", status=1)], tmp_path / "one", 60) == 1
    assert all(_facts(tmp_path / "one", name)["card"] == "all" for name in ("a", "b", "bad"))
    assert run.run_all(plan[:1], tmp_path / "none", 5, ("one", "two")) == 1  # no time left
    assert run.run_all([], tmp_path / "empty", 60) == 1


def test_a_stage_that_breaks_holds_nobody_up(scripts, tmp_path, capsys):
    """One that cannot even be started fails, and what waits for it runs."""
    run, _ = scripts
    broken = run.Stage("broken", None, 30, (), prefix=("/no/such/program",))
    assert run.run_all([broken, _stage(run, "next", after="broken")], tmp_path, 60, ("one", "two")) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split()[:2] == ["broken", "FAILED"] and "FileNotFoundError" in lines[0]
    assert lines[1].split()[:2] == ["next", "passed"]


@pytest.mark.parametrize(("visible", "expected"), [(None, "GPU-a GPU-b"), ("1", "GPU-b"), ("GPU-x, 0", "GPU-x GPU-a")])
def test_visible_cards(scripts, tmp_path, monkeypatch, visible, expected):
    run, _ = scripts
    program = tmp_path / "nvidia-smi"
    program.write_text("#!/bin/sh\necho GPU-a\necho GPU-b\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    if visible is None:
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    else:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert run.visible_cards() == expected.split()


def _cases(file, name):
    """Source of each case of a dict of cases."""
    tree = ast.parse((GPU / file).read_text())
    (cases,) = (n.value for n in tree.body if isinstance(n, ast.Assign) and n.targets[0].id == name)
    return {key.value: ast.unparse(value) for key, value in zip(cases.keys, cases.values, strict=True)}


def test_files_that_heed_a_mode_run_in_both(scripts):
    """A test file that asks for --mode has stages in each."""
    run, _ = scripts
    by_mode = {"throughput": set(), "latency": set()}
    for stage in run.stages("cache"):
        files = {t.partition("::")[0] for t in stage.tests if run.is_test(t)}
        by_mode["latency" if "--mode" in stage.tests else "throughput"] |= files
    heeding = {p.name for p in GPU.glob("test_*.py") if '"--mode"' in p.read_text()}
    heeding -= {"test_exchange_devices.py"}  # of several GPUs
    assert len(heeding) >= 4 and by_mode["latency"] == heeding <= by_mode["throughput"]


def test_files_that_heed_command_buffers_run_with_and_without(scripts):
    """Recording is the default; launched calls, which it leaves to calls over nodes and to programs with several
    devices a process, have stages of their own in every file that takes them."""
    run, _ = scripts
    by_choice = {"default": set(), "on": set(), "off": set()}
    for stage in run.stages("cache"):
        at = stage.tests.index("--command-buffers") + 1 if "--command-buffers" in stage.tests else None
        by_choice[stage.tests[at] if at else "default"] |= {t for t in stage.tests if run.is_test(t)}
    heeding = {p.name for p in GPU.glob("test_*.py") if "ranks.command_buffers(" in p.read_text()}
    assert len(heeding) == 2 and heeding <= by_choice["default"] and by_choice["off"] == heeding
    assert by_choice["on"] == {"test_programs_processes.py"}


def test_sanitised_cases_exist_and_cover_the_kernels(scripts):
    """A name that no case has would end the stage; a layout or path that no case has would never be sanitised."""
    _, sanitize = scripts
    source = _cases("test_loopback.py", "CASES")
    for by_ranks in (sanitize.CASES, sanitize.LATENCY, sanitize.FEW, sanitize.FEW_LATENCY):
        for ranks, names in by_ranks.items():
            for name in names:
                assert (f"ranks={ranks}" in source[name]) if ranks != 4 else ("ranks" not in source[name]), name
    for ranks, names in sanitize.CASES.items():
        text = " ".join(source[name] for name in names)
        words = ["layout='token'", "layout='batched'", "crosses_once=True", "quantize='fp8", "wire='fp8_wire'"]
        words += ["window=", "capacity=", "routing='idle'", "tokens=0"] if ranks == 4 else ["dtype='f32'"]
        assert not [word for word in words if word not in text], (ranks, words)
    pieces = _cases("test_loopback_latency.py", "CASES_HERE")
    for by_ranks, own in ((sanitize.LATENCY, sanitize.PIECES), (sanitize.FEW_LATENCY, sanitize.FEW_PIECES)):
        text = " ".join(
            [source[name] for names in by_ranks.values() for name in names] + [pieces[name] for name in own]
        )
        assert "crosses_once" not in text  # latency mode has no such way
        assert "quantize='fp8" in text and "wire='fp8_wire'" in text and "layout='batched'" in text
    assert "layout='token'" in text and "routing='mixed'" in text
    nodes = _cases("test_loopback_nodes.py", "CASES")
    text = " ".join(nodes[name] for name in sanitize.NODES)
    words = ["layout='token'", "layout='batched'", "quantize='fp8", "wire='fp8_wire'", "routing='mixed'", "tokens=0"]
    assert not [word for word in words if word not in text] and "ranks=8" not in text


def test_every_tool_runs_every_path(scripts):
    """Bulk and vector copies, direct and staged, fused and split: under each tool, in stages that leave time over."""
    _, sanitize = scripts
    plan = sanitize.stages("compute-sanitizer")
    for tool in ("memcheck", "synccheck", "racecheck", "initcheck"):
        mine = [stage for stage in plan if stage.name.startswith(tool)]
        assert all(tool in stage.prefix and stage.env["LOOPBACK_SEEDS"] == "1" for stage in mine)
        words = {w for stage in mine for t in stage.tests for w in t.rstrip("]").split("-")[-2:]}
        assert {"bulk", "vector", "direct", "staged", "fused", "split"} <= words, tool
        over_nodes = ["nodes"] if tool in ("memcheck", "synccheck") else []
        assert [stage.name.partition(" ")[2] for stage in mine] == ["R=2", "R=4", "latency", *over_nodes]
        assert all(stage.tests[:2] == ("--maxfail", "2") and len(stage.tests) > 4 for stage in mine)


@pytest.fixture
def several(gpu_scripts):
    return gpu_scripts("several")[0]


def test_everything_about_several_gpus_is_bounded(several, tmp_path):
    """Ten minutes in all, six for correctness; a section ends with steps of its own; every command's bounds hold."""
    assert sum(several.SECTIONS.values()) <= 600 and several.SECTIONS["correctness"] <= 360
    for gpus in (2, 4):
        plan = several.plan(gpus, tmp_path)
        assert list(dict.fromkeys(several.section(step) for step in plan)) == list(several.SECTIONS)
        assert len({step.name for step in plan}) == len(plan)
        for name in several.SECTIONS:  # --only a section takes nothing of another one along
            assert {several.section(step) for step in several.run.chosen(plan, [name])} == {name}
        assert [s.ranks for s in plan if isinstance(s, several.run.Stage)] == [
            *(None, gpus, 2 * gpus, 4 * gpus),
            *(gpus, None),  # latency mode
        ]
        for step in plan:
            assert step.limit_s <= several.SECTIONS[several.section(step)]
            if isinstance(step, several.Command) and "--timeout" in step.words:
                assert float(step.words[step.words.index("--timeout") + 1]) < step.limit_s


def test_commands_about_several_gpus_are_understood(several, tmp_path):
    """By the parsers of what they start; every workload, routing and implementation wanted is in one of them."""
    commands = [step for step in several.plan(2, tmp_path) if isinstance(step, several.Command)]
    benches = [c.words[3:] for c in commands if c.words[:3] == ("-m", "jax_ep", "bench")]
    parsed = [bench._parser().parse_args(words) for words in benches]
    named = {(workload, name) for args in parsed for workload in args.workload for name in args.implementation}
    assert {(w, i) for w in ("W1", "W3", "W1f", "W2") for i in ("cuda", "ragged-decomposed", "dense", "ring")} <= named
    assert {("W1", "ragged"), *((f"W6-{r}", "cuda") for r in ("one", "zipf", "half", "alone"))} <= named
    assert [(args.ranks, args.mode) for args in parsed if args.first_call] == [
        *((ranks, (mode,)) for mode in ("latency", "throughput") for ranks in ((2,), None))
    ]
    assert {"auto", "latency", "throughput"} in [set(args.mode) for args in parsed]
    assert any({4, 48} <= set(args.num_sms) for args in parsed)
    for args in parsed:
        is_block = args.workload == ("W8",)
        assert block_plan.plan(bench._parser(), args) if is_block else bench._plan(args)
    trainings = [c for c in commands if c.out.name.startswith("losses-")]
    endings = [c.words[[w.endswith("train_moe.py") for w in c.words].index(True) :] for c in trainings]
    assert len({words[1:-1] for words in endings}) == 2  # they differ in the implementation alone
    assert trainings[0].words[:4] == ("-m", "jax_ep", "launch", "--ranks") and trainings[0].words[4] == "1"
    source = (GPU.parent.parent / "examples" / "_training.py").read_text() + pathlib.Path(endings[0][0]).read_text()
    assert all(f'add("{word}"' in source for word in endings[0] if word.startswith("--"))


def test_chosen_tests_exist(several, tmp_path):
    """Every word of a -k is in the name of a test of the stage's files, or the stage would be shorter than it says."""
    cases = (GPU.parent / "exchange_cases.py").read_text()
    for stage in several.correctness(2):
        text = "".join((GPU / t).read_text() for t in stage.tests if several.run.is_test(t)) + cases
        (words,) = (b for a, b in zip(stage.tests, stage.tests[1:], strict=False) if a == "-k")
        for word in words.split(" or "):
            assert any(word in line for line in text.splitlines() if "def test_" in line), (stage.name, word)


def test_several_gpus_outcomes(several, tmp_path, capsys):
    """Failures of ours, of a command and of its time are told; opponents' are not; time is kept for later sections."""

    def command(name, code, limit_s=60):
        out = tmp_path / f"{name.partition(', ')[2].replace(' ', '-')}.json"
        code = f"out = {str(out)!r}; import json; write = lambda x: open(out, 'w').write(json.dumps(x)); {code}"
        return several.Command(name, limit_s, ("-c", code), out)

    def row(implementation, error):
        return {"workload": "W1", "layout": "token", "op": "dispatch", "implementation": implementation, "error": error}

    steps = [
        command("speed, good", f"write({{'rows': [{row('cuda', '')}, {row('ragged', 'refused')}]}}); print('W1 5.0')"),
        command("speed, bad", f"write({{'rows': [{row('cuda', 'wrong result')}]}})"),
        command("first call, dies", "raise SystemExit(3)"),
        command("training, hangs", "import time; print('so far'); time.sleep(60)", 10.5),
        command("training, losses-one GPU", f"write({{'losses': {[3.0] * 50}}})"),
        command("training, losses-cuda", f"write({{'losses': {[3.01] * 50}}}); print('step 5 dropped 0.00%  7 ms')"),
        command("training, losses-xla", f"write({{'losses': {[3.03] * 50}}})"),
    ]
    (tmp_path / "training-cuda.log").write_text("".join(f"[0] loss 3 dropped 0.00%  {ms} ms\n" for ms in (9, 8, 5, 7)))
    (tmp_path / "training-xla.log").write_text("")
    assert several.run_all(steps, tmp_path, 540) == 1
    lines = capsys.readouterr().out.splitlines()
    states = {
        line[:36].strip(): line[36:].split()
        for line in lines
        if line[36:46].strip() in ("passed", "FAILED", "TIME-OUT")
    }
    assert {name: words[0] for name, words in states.items()} == {
        "speed, good": "passed",
        "speed, bad": "FAILED",
        "first call, dies": "FAILED",
        "training, hangs": "TIME-OUT",
        "training, losses-one GPU": "passed",
        "training, losses-cuda": "passed",
        "training, losses-xla": "passed",
        "training, losses cuda": "passed",
        "training, losses xla": "FAILED",
    }
    assert "  W1 5.0" in lines and "  so far" in lines and "wrong result" in " ".join(states["speed, bad"])
    assert states["training, losses cuda"][-4:] == ["6", "ms", "a", "step"]
    assert lines[-1].startswith("7 steps, 4 failed")
    assert several.run_all([steps[0], steps[-1]], tmp_path, several.SECTIONS["training"] + 5) == 1
    assert "no time left" in capsys.readouterr().out


class FakeKernels:
    """Stands in for `jax_ep._cuda.Loopback`: a call takes as many us as a rank has SMs, a redispatch half of it."""

    def __init__(self, **shape):
        self.shape, self.calls = shape, []

    def bytes(self, name):
        return self.shape["side_bytes"] if name == "side" else 16

    def write(self, name, rank, data):
        shape = self.shape
        assert name == "topk_idx" and len(data) == shape["num_tokens"] * shape["num_topk"] * 4

    def fill(self, name, byte):
        assert self.bytes(name)

    def launch(self, op):
        self.calls.append(op)

    def synchronize(self):
        pass

    def time(self, op, calls):
        assert self.calls == ["dispatch"]
        return self.shape["num_sms"] / (2 if op == "redispatch" else 1)

    def failure(self, rank):
        return {"code": 0}


def test_kernels_are_timed_for_every_combination(gpu_scripts, capsys):
    (time_kernels,) = gpu_scripts("time_kernels")
    made = []

    def loopback(**shape):
        made.append(FakeKernels(**shape))
        return made[-1]

    def lines_of(words):
        time_kernels.main(words.split(), loopback)
        return [line.split() for line in capsys.readouterr().out.splitlines()]

    header, *lines = lines_of("--ranks 2,4 --sms 8 --tokens 64 --layout token,batched --bulk both --wire fp8_wire")
    assert header[:8] == ["work", "R", "SMs", "tokens", "layout", "copies", "wire", "capacity"]
    assert header[8:] == ["dispatch", "GB/s", "again", "GB/s", "combine", "GB/s"]
    assert [line[:7] for line in lines] == [
        ["W1", ranks, "8", "64", layout, copies, "fp8_wire"]
        for ranks in ("2", "4")
        for layout in ("token", "batched")
        for copies in ("bulk", "vector")
    ]
    assert all(line[8::2] == ["8.0", "4.0", "8.0"] for line in lines)
    shape = made[0].shape
    assert (shape["quantize"], shape["wire"], shape["layout"], shape["row_bytes"]) == (0, 3, 1, 14336)
    assert shape["capacity"] == 128  # 64 tokens from each of two ranks at most

    # Every token goes to its only rank: a row of 14336 bytes is read, one of 7392 written (or read, of a pair).
    made.clear()
    _, quantised, pair = lines_of("--on 1x4 --workload W1q,W1f --tokens 1000 --layout token --ops dispatch,combine")
    assert quantised[8:10] == ["4.0", f"{(14336 + 7392) * 1000 / 4e3:.0f}"]
    assert pair[8:] == ["4.0", f"{2 * 7392 * 1000 / 4e3:.0f}", "-", "-"]
    shapes = [[fake.shape[name] for name in ("quantize", "side_bytes", "row_bytes")] for fake in made]
    assert shapes == [[1, 0, 14336], [0, 224, 7168]]
    # Over nodes every chunk and number of carriers that fits on the GPU; on one node they mean nothing.
    made.clear()
    words = "--on 8x12,4x28 --nodes 1,2 --carriers 4,8 --chunk 0,16 --tokens 64 --layout token --ops dispatch"
    lines = [line[8:-2] for line in lines_of(words)[1:]]
    assert lines == [[], ["2", "nodes", "+4", "-"], ["2", "nodes", "+4", "16"]] * 2
    shapes = [[fake.shape[name] for name in ("num_nodes", "num_carriers", "chunk_tokens")] for fake in made]
    assert shapes == [[1, 1, 0], [2, 4, 0], [2, 4, 16]] * 2
    for words in ("--layout rows", "--workload W9", "--ops send", "--wire fp8"):
        with pytest.raises(SystemExit):
            time_kernels.main(words.split(), loopback)
