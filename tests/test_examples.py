"""The examples as a user runs them, in short form: a fresh process each, with the script's own choice of devices.

Covers: the worked example's numbers; training lowers the loss; plot, loss log, checkpoint and restore; the same losses
from one process with eight devices and from two processes, and in two layouts; layout "batched" with FP8 rows.
"""

import json
import os
import pathlib
import re
import subprocess
import sys

import numpy as np
import pytest

ROOT = pathlib.Path(__file__).parent.parent
EXAMPLES = ROOT / "examples"
# No capacity, so that nothing is dropped and losses do not depend on the number of devices.
SMALL = "--hidden 32 --ffn 32 --layers 1 --batch 8 --length 32 --capacity-factor 0 --steps 40".split()


def run(*command):
    """Output of `python *command` in an environment without this test suite's devices."""
    env = {k: v for k, v in os.environ.items() if k not in ("XLA_FLAGS", "JAX_PLATFORMS")}
    env |= {"PYTHONPATH": os.pathsep.join(filter(None, (str(ROOT), env.get("PYTHONPATH")))), "JAX_PLATFORMS": "cpu"}
    done = subprocess.run(
        [sys.executable, *map(str, command)], env=env, capture_output=True, text=True, errors="replace", timeout=600
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


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
