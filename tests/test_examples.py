"""The examples as a user runs them, in short form: a fresh process each, with the script's own choice of devices.

Covers: the worked example's numbers; training lowers the loss; plot, loss log, checkpoint and restore; the same losses
from one process with eight devices and from two processes, and in two layouts; layout "batched" with FP8 rows; training
over several processes that Slurm's variables, the launcher or arguments bring together, and its restart; decoding gives
what the whole model gives, compiles nothing on the way and takes checkpoints; overlapped layers equal the others.
"""

import json
import os
import pathlib
import re
import shutil
import socket
import subprocess
import sys

import jax
import numpy as np
import pytest

ROOT = pathlib.Path(__file__).parent.parent
EXAMPLES = ROOT / "examples"
# No capacity, so that nothing is dropped and losses do not depend on the number of devices.
SMALL = "--hidden 32 --ffn 32 --layers 1 --batch 8 --length 32 --capacity-factor 0 --steps 40".split()


def start(*command, **variables):
    """`python *command` with these variables, in an environment without this test suite's devices."""
    env = {k: v for k, v in os.environ.items() if k not in ("XLA_FLAGS", "JAX_PLATFORMS")}
    env |= {"PYTHONPATH": os.pathsep.join(filter(None, (str(ROOT), env.get("PYTHONPATH")))), "JAX_PLATFORMS": "cpu"}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, "errors": "replace"}
    return subprocess.Popen([sys.executable, *map(str, command)], env=env | variables, **pipes)


def outputs(processes):
    """What each process wrote, once all have ended well; none is left behind."""
    try:
        texts = [process.communicate(timeout=600) for process in processes]
    finally:
        for process in processes:
            process.kill()
    for process, (out, error) in zip(processes, texts, strict=True):
        assert process.returncode == 0, out + error
    return [out for out, _ in texts]


def run(*command, **variables):
    return outputs([start(*command, **variables)])[0]


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """(folder, output, losses) of a short training run in one process."""
    out = tmp_path_factory.mktemp("train")
    log = out / "losses.json"
    text = run(EXAMPLES / "train_moe.py", *SMALL, "--out", out, "--log-losses", log, "--sample-bytes", 8)
    return out, text, json.loads(log.read_text())


def test_dispatch_combine():
    text = run(EXAMPLES / "dispatch_combine.py")
    assert "4 devices, 8 experts" in text
    got = dict(re.findall(r"(\d+): (\S+)", text.split("result", 1)[1]))
    # Token 5 (all values 5): 0.5 * 6 * 5 from expert 5, 0.5 * 8 * 5 from expert 7.
    assert got["5"] == "35" and got["0"] == "0" and len(got) == 12


@pytest.mark.slow
def test_training(trained):
    out, text, log = trained
    losses = log["losses"]
    assert log["first_step"] == 0 and len(losses) == 40
    assert np.mean(losses[-5:]) < losses[0] - 1.0
    assert "8 devices (cpu), mesh data 1 x expert 8" in text
    assert (out / "loss.png").read_bytes().startswith(b"\x89PNG")
    assert "def " in text.split("sample:", 1)[1]
    final, entropy = re.search(r"final loss (\S+) nats per byte .*unigram entropy (\S+)", text).groups()
    assert float(final) == pytest.approx(np.mean(losses[-20:]), abs=1e-3)
    assert float(entropy) == pytest.approx(log["entropy"], abs=1e-3)


@pytest.mark.slow
def test_restore(trained):
    """A restored run goes on from the saved step with the saved parameters, and writes no checkpoint when told so."""
    out, _, log = trained
    more = ["--steps", 43, "--restore", "--no-checkpoint", "--sample-bytes", 0]
    text = run(EXAMPLES / "train_moe.py", *SMALL, *more, "--out", out, "--log-losses", out / "more.json")
    restored = json.loads((out / "more.json").read_text())
    assert restored["first_step"] == 40 and len(restored["losses"]) == 3
    assert abs(np.mean(restored["losses"]) - np.mean(log["losses"][-5:])) < 0.5
    assert [p.name for p in (out / "checkpoint").iterdir() if p.name.isdigit()] == ["40"]
    assert "sample" not in text


@pytest.mark.slow
@pytest.mark.multiprocess
def test_two_processes_give_the_same_losses(trained, tmp_path):
    _, _, log = trained
    command = ["-m", "jax_ep", "launch", "--ranks", 2, "--platform", "cpu", EXAMPLES / "train_moe.py", *SMALL]
    options = ["--layout", "token", "--no-checkpoint", "--sample-bytes", 0]
    text = run(*command, *options, "--out", tmp_path, "--log-losses", tmp_path / "losses.json")
    assert "2 devices (cpu), mesh data 1 x expert 2" in text
    losses = json.loads((tmp_path / "losses.json").read_text())["losses"]
    np.testing.assert_allclose(losses, log["losses"], atol=2e-3)


@pytest.mark.slow
def test_batched_layout_with_fp8_rows(tmp_path):
    """Few steps that drop rows (each expert keeps its own) already lower the loss."""
    sizes = "--hidden 128 --ffn 32 --layers 1 --batch 8 --length 32 --steps 12 --cpu-devices 2".split()
    more = ["--no-checkpoint", "--sample-bytes", 0, "--out", tmp_path, "--log-losses", tmp_path / "losses.json"]
    text = run(EXAMPLES / "train_moe.py", *sizes, "--layout", "batched", "--capacity-factor", 1, "--quantize", *more)
    losses = json.loads((tmp_path / "losses.json").read_text())["losses"]
    assert max(float(d) for d in re.findall(r"dropped (\S+)%", text)) > 0
    assert np.all(np.isfinite(losses)) and losses[-1] < losses[0] - 0.2


@pytest.mark.slow
@pytest.mark.multiprocess
def test_training_over_processes_and_restart(tmp_path):
    """Six steps equal three, a restart and three: on the same mesh bit by bit, on other processes closely."""
    sizes = "--hidden 16 --ffn 16 --heads 2 --layers 1 --batch 8 --length 16 --capacity-factor 0 --warmup 2".split()
    common = [EXAMPLES / "train_multihost.py", *sizes, "--steps", 6, "--ep", 2]
    fast = {"JAX_DISABLE_MOST_OPTIMIZATIONS": "1"}  # of the compiler, for which most of the time goes
    folder, other, logs = tmp_path / "run", tmp_path / "other", [tmp_path / f"{i}.json" for i in range(3)]

    def slurm(process):  # what srun sets, for four tasks of one node
        names = {"JOB_ID": 7, "STEP_NODELIST": "localhost", "NTASKS": 4, "PROCID": process, "LOCALID": process}
        return {f"SLURM_{name}": str(value) for name, value in names.items()} | {"JAX_COORDINATOR_PORT": str(port)}

    port = free_port()
    whole = [*common, "--checkpoint-every", 3, "--out", folder, "--log-losses", logs[0]]
    text = outputs([start(*whole, **fast, **slurm(process)) for process in range(4)])[0]
    assert "4 devices (cpu), mesh data 2 x expert 2" in text
    assert "processes: 4, hosts: 1, hosts of one expert group: 1" in text
    assert "2 of 8 sequences are read by process 0" in text
    steps = sorted(p.name for p in (folder / "checkpoint").iterdir() if p.name.isdigit())
    assert steps == ["3", "6"]

    shutil.rmtree(folder / "checkpoint" / "6")  # as if the job had ended before it
    shutil.copytree(folder, other)
    launch = ["-m", "jax_ep", "launch", "--ranks", 4, "--platform", "cpu"]
    run(*launch, *common, "--resume", "--out", folder, "--log-losses", logs[1], **fast)

    address = f"127.0.0.1:{free_port()}"
    two = [*common, "--resume", "--shard-rest", "--ranks-per-node", 1, "--out", other, "--log-losses", logs[2]]
    two += ["--coordinator", address, "--num-processes", 2, "--process-id"]
    devices = {"XLA_FLAGS": "--xla_force_host_platform_device_count=2"}
    text = outputs([start(*two, process, **fast, **devices) for process in range(2)])[0]
    assert "processes: 2, hosts: 1" in text and "4 of 8 sequences are read by process 0" in text

    straight, resumed, elsewhere = (json.loads(log.read_text()) for log in logs)
    assert straight["first_step"] == 0 and resumed["first_step"] == elsewhere["first_step"] == 3
    assert len(straight["losses"]) == 6 and straight["losses"][-1] < straight["losses"][0]
    assert resumed["losses"] == straight["losses"][3:]
    np.testing.assert_allclose(elsewhere["losses"], straight["losses"][3:], rtol=1e-5)


@pytest.fixture
def decode(monkeypatch):
    monkeypatch.syspath_prepend(str(EXAMPLES))
    import decode

    return decode


TINY = "--hidden 32 --ffn 32 --layers 2 --heads 2 --experts 4 --requests 7 --new-tokens 6 --prompt 6".split()


def test_decoding_is_the_whole_model(decode, make_mesh):
    """Each token drawn is the likeliest of the model that sees the whole text at once, whatever batch it was in."""
    import _data

    args = decode.parse_args([*TINY, "--batches", "1,3", "--temperature", "0"])
    mesh = make_mesh(1, 2, axis_names=decode.AXES)
    decoder = decode.Decoder(args, mesh, mode="latency")
    params = jax.jit(decoder.new_params, out_shardings=decoder.param_shardings)()
    done = []
    requests = decode.make_requests(args, _data.load_corpus(), num_slots=6)
    report = decode.serve(decoder, params, decoder.warm_up(params, decoder.init()), requests, done.append)
    assert sorted(r.number for r in done) == list(range(7)) and len(report.sizes) > 1
    assert len(report.step_ms) == sum(report.sizes.values())

    texts = np.zeros((8, decoder.length), np.int32)
    for request in requests:
        assert args.new_tokens >= len(request.drawn) == request.new_tokens >= args.new_tokens / 2
        text = [*request.prompt, *request.drawn]
        texts[request.number, : len(text)] = text
    logits = np.asarray(jax.jit(lambda params, texts: decoder.bind(params)(texts)[0])(params, texts))
    for request in requests:
        first = len(request.prompt) - 1
        here = logits[request.number, first : first + request.new_tokens]
        assert np.all(here[np.arange(request.new_tokens), request.drawn] >= here.max(axis=1) - 1e-4)
    assert len({tuple(r.drawn) for r in requests}) > 1


def test_slots_are_filled_from_below(decode):
    request = lambda number: decode.Request(number, np.array([65, 66], np.int32), new_tokens=1, arrival=0)
    slots = decode.Slots(num_devices=2, batches=[1, 3])
    first = [request(n) for n in range(3)]
    assert all(slots.admit(r) for r in first) and slots.num_lines == 2
    batch, taken = slots.advance()
    assert batch[0].tolist() == [[65, 0, 0], [65, 0, 2], [-1, -1, -1]]
    assert batch[1].tolist() == [[65, 0, 1], [-1, -1, -1], [-1, -1, -1]]
    assert [(r.number, slot, device, *flags) for r, slot, device, *flags in taken] == [
        (0, 0, 0, False, False), (1, 0, 1, False, False), (2, 1, 0, False, False),
    ]  # fmt: skip
    assert all(slots.admit(request(n)) for n in (3, 4, 5)) and not slots.admit(request(6))
    batch, taken = slots.advance()  # the first three are done with it and leave
    assert [flags for r, _, _, *flags in taken if r.number < 3] == [[True, True]] * 3
    assert slots.num_lines == 3 and slots.admit(request(6)) and slots.held[0][0].number == 6


@pytest.mark.slow
def test_decode():
    """The command in short form: several sizes of batch, each compiled before the first request."""
    sizes = [*TINY, "--batches", "1,2", "--cpu-devices", 2]
    text = run(EXAMPLES / "decode.py", *sizes, "--compare")
    assert "weights are new" in text and "2 devices (cpu), mesh data 1 x expert 2" in text
    for name in ("latency mode", "throughput mode", "XLA collectives"):
        assert re.search(rf"^{name}: programs for batches of 2, 4, \S+ s; 0 compiled after that$", text, re.M)
        assert re.search(rf"^│ {name} .* 7 of 7 │$", text, re.M)
    assert len(re.findall(r"steps by size of their batch: 2: \d+, 4: \d+", text)) == 3


@pytest.mark.slow
@pytest.mark.multiprocess
def test_decode_a_checkpoint_over_processes(trained, tmp_path):
    out, *_ = trained
    model = "--hidden 32 --ffn 32 --layers 1 --requests 4 --new-tokens 4".split()
    launch = ["-m", "jax_ep", "launch", "--ranks", 2, "--platform", "cpu", EXAMPLES / "decode.py"]
    text = run(*launch, *model, "--checkpoint", out, "--compare")  # as docs/performance.md has it
    assert "weights are new" not in text and "2 devices (cpu), mesh data 1 x expert 2" in text
    assert text.count("0 compiled after that") == 3 and "request 0:" in text
    assert len(re.findall(r"│ (?:latency mode|throughput mode|XLA collectives) .* (\d) of \1 │", text)) == 3
    process = start(EXAMPLES / "decode.py", *model, "--checkpoint", tmp_path)
    _, error = process.communicate(timeout=600)
    assert process.returncode == 1 and "train with train_moe.py first" in error


def test_a_compilation_on_the_way_is_noticed(decode):
    counter = decode.compilations()
    before = counter["programs"]
    jax.jit(lambda x: x + 1)(np.ones(3)).block_until_ready()
    jax.jit(lambda x: x + 1)(np.ones(4)).block_until_ready()
    assert counter["programs"] == before + 2 and decode.compilations() is counter


def test_overlap():
    sizes = "--tokens 16 --hidden 32 --ffn 32 --experts 2 --topk 2 --layers 2 --cpu-devices 2".split()
    text = run(EXAMPLES / "overlap.py", *sizes)
    assert "2 devices (cpu), 2 layers" in text and "nothing overlaps" in text
    assert float(re.search(r"results differ by (\S+) at most", text)[1]) < 1e-4


@pytest.mark.parametrize("suffix", ["", "_graph"])
def test_overlap_reads_the_schedule(monkeypatch, suffix):
    """What was written is recognised, and what was not is an error. A real one: tests/gpu/test_ahead_of_time.py."""
    monkeypatch.syspath_prepend(str(EXAMPLES))
    import overlap

    products = ("__cublas$gemm", "__cublas$lt$matmul")
    call = '  %c.{0} = s32[2]{{0}} custom-call(%p), custom_call_target="{1}"'.format
    product = "  %g.{0} = bf16[8]{{0}} fusion(%p), kind=kCustom, calls=%fused_computation.gemm_fusion_dot.{0}".format
    lines = []
    for part in overlap.PARTS:
        op = part.split()[0]
        lines += [
            product(7),
            call(0, f"jax_ep_{op}_start{suffix}"),
            product(1),
            "  %f = f32[] fusion(%p), kind=kLoop, calls=%x",
        ]
        lines += [call(2, products[len(lines) % 2]), call(3, f"jax_ep_{op}_done{suffix}")]
    hlo = "\n".join(["HloModule m, is_scheduled=true", "", "ENTRY %main {", *lines, "}"])
    order, said = overlap.schedule(hlo), []
    assert order[:5] == ["gemm", "dispatch_start", "gemm", "gemm", "dispatch_done"] and len(order) == 20
    overlap.show_schedule(order, 1, said.append)
    assert said == [f"  {p}: {p.split()[0]}_start gemm gemm {p.split()[0]}_done" for p in overlap.PARTS]
    moved = order[:2] + order[3:5] + ["gemm"] + order[5:]
    with pytest.raises(
        SystemExit, match="did not keep the schedule in layer 0: dispatch a is dispatch_start gemm disp"
    ):
        overlap.show_schedule(moved, 1, said.append)
    with pytest.raises(SystemExit, match="found 8 halves, expected 16"):
        overlap.show_schedule(order, 2, said.append)


def test_launchers_that_jax_knows(monkeypatch):
    monkeypatch.syspath_prepend(str(EXAMPLES))
    import _training

    for names in _training.LAUNCHERS.values():
        for name in names:
            monkeypatch.delenv(name, raising=False)
    assert _training.find_launcher() is None
    for launcher, names in _training.LAUNCHERS.items():
        with monkeypatch.context() as patch:
            for name in names:
                assert _training.find_launcher() is None
                patch.setenv(name, "2")
            assert _training.find_launcher() == launcher
    with monkeypatch.context() as patch:  # a shell of one task is no job of several processes
        for name in _training.LAUNCHERS["Slurm"]:
            patch.setenv(name, "1")
        assert _training.find_launcher() is None


def test_job_files(monkeypatch):
    """docs/multihost.md: shell and manifest can be read, and name options and settings that there are."""
    monkeypatch.syspath_prepend(str(EXAMPLES))
    import train_multihost
    import yaml

    import jax_ep

    text = (ROOT / "docs" / "multihost.md").read_text()
    shell, manifests = (re.findall(rf"```{kind}\n(.*?)```", text, re.DOTALL) for kind in ("bash", "yaml"))
    for script in shell:
        subprocess.run(["bash", "-n"], input=script, text=True, check=True)
    commands = [c for script in shell for c in re.findall(r"train_multihost\.py(?:[^\n]*\\\n)*[^\n]*", script)]
    commands += re.findall(r"train_multihost\.py([^`]*)`", text.split("## What to check", 1)[1])
    service, job = yaml.safe_load_all(manifests[0])
    (container,) = job["spec"]["template"]["spec"]["containers"]
    commands.append(" ".join(container["args"]))
    assert len(commands) >= 6
    for command in commands:
        words = re.sub(r"\$\w+", "1", command.replace("\\\n", " ")).replace("'", "").split()
        args = train_multihost.parse_args([w for w in words if not w.endswith("train_multihost.py")])
        assert args.experts % args.ep == 0 and args.steps > 0
    assert set(re.findall(r"Config\.(\w+)", text)) <= set(jax_ep.Config.__dataclass_fields__)

    pods = job["spec"]
    assert pods["completionMode"] == "Indexed" and pods["completions"] == pods["parallelism"]
    assert service["spec"]["clusterIP"] == "None" and service["spec"]["selector"] == {
        "job-name": job["metadata"]["name"]
    }
    env = {variable["name"]: variable.get("value") for variable in container["env"]}
    assert int(env["JAX_NUM_PROCESSES"]) == pods["completions"]
    name, subdomain = job["metadata"]["name"], pods["template"]["spec"]["subdomain"]
    assert (
        env["JAX_COORDINATOR_ADDRESS"].startswith(f"{name}-0.{subdomain}:") and subdomain == service["metadata"]["name"]
    )
    volumes = [volume["name"] for volume in pods["template"]["spec"]["volumes"]]
    assert volumes == [mount["name"] for mount in container["volumeMounts"]]


def test_corpus_is_python_source(monkeypatch):
    monkeypatch.syspath_prepend(str(EXAMPLES))
    import _data

    corpus = _data.load_corpus()
    assert corpus.size > 1 << 20 and b"def __init__(self" in corpus.tobytes()
    assert _data.unigram_entropy(np.frombuffer(b"aabb", np.uint8)) == pytest.approx(np.log(2))
    batch = _data.batch_at(corpus, step=3, batch=4, length=16, seed=1)
    assert batch.shape == (4, 17) and batch.dtype == np.int32
    assert all(row.astype(np.uint8).tobytes() in corpus.tobytes() for row in batch)
    np.testing.assert_array_equal(batch, _data.batch_at(corpus, step=3, batch=4, length=16, seed=1))
    assert np.any(batch != _data.batch_at(corpus, step=4, batch=4, length=16, seed=1))
    part = _data.batch_at(corpus, step=3, batch=4, length=16, seed=1, rows=np.array([1, 3]))
    np.testing.assert_array_equal(part, batch[[1, 3]])
