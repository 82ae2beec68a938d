"""examples/train_multihost.py as a job of eight processes on one GPU, over two simulated nodes of four ranks; then a
second job that goes on from the first one's checkpoint.

The commands are those that a user types. This process leaves the GPU alone. `--implementation xla` tries the same on
CPU devices.
"""

import json
import pathlib
import shutil

import pytest

from jax_ep.cli import launch

SCRIPT = pathlib.Path(__file__).parents[2] / "examples" / "train_multihost.py"
NUM_RANKS, PER_NODE = 8, 4
NUM_STEPS, SAVED_STEP = 6, 3
# In f32 and without drops. Between jobs XLA may choose other products, and sums of gradients come in any order.
TOLERANCE = 1e-3
JOB = f"--ep {NUM_RANKS} --ranks-per-node {PER_NODE} --layers 1 --dtype f32 --capacity-factor 0 --warmup 2 --batch 8"


@pytest.fixture
def train(request, tmp_path):
    """`train(name, options)`: one job; its losses, with the step before the first, and all lines."""
    implementation = request.config.getoption("--implementation")

    def start(name: str, options: str):
        lines, log = [], tmp_path / f"{name}.json"
        words = f"{JOB} --steps {NUM_STEPS} --implementation {implementation} {options}".split()
        words += ["--out", str(tmp_path), "--log-losses", str(log)]
        if implementation == "cuda":  # two jobs within the stage's limit; a rank that hangs is named
            how = launch.Launch(NUM_RANKS, 42, "cuda", grace_s=5)
        else:
            how = launch.Launch(NUM_RANKS, 200, "cpu")
        status = launch.run([str(SCRIPT), *words], how, lines.append)
        text = "\n".join(lines)
        assert status == 0, text
        print(text)
        return json.loads(log.read_text()), text

    return start


def test_two_nodes_stop_and_go_on(train, tmp_path):
    straight, text = train("straight", f"--checkpoint-every {SAVED_STEP}")
    assert f"mesh data 1 x expert {NUM_RANKS}" in text and f"processes: {NUM_RANKS}, hosts: 1" in text
    folder = tmp_path / "checkpoint"
    saved = sorted(int(p.name) for p in folder.iterdir() if p.name.isdigit())
    assert saved == [SAVED_STEP, NUM_STEPS] and straight["first_step"] == 0 and len(straight["losses"]) == NUM_STEPS

    shutil.rmtree(folder / str(NUM_STEPS))  # as if the job had ended before it
    resumed, text = train("resumed", "--resume")
    assert resumed["first_step"] == SAVED_STEP and f"from step {SAVED_STEP}" in text
    expected = straight["losses"][SAVED_STEP:]
    assert resumed["losses"] == pytest.approx(expected, abs=TOLERANCE)
    # Which says something only if the state at another step, or a new one, would give other losses.
    assert min(abs(a - b) for a in straight["losses"][:SAVED_STEP] for b in expected) > 10 * TOLERANCE
    apart = [abs(a - b) for a, b in zip(resumed["losses"], expected, strict=True)]
    print(f"largest difference of a step's loss after the restart: {max(apart):.6f}")
