"""examples/train_moe.py on the CUDA path against the pure-JAX implementation: the same losses, step by step, on one
node and on several simulated ones.

One process per rank. In f32, with products in full precision (run.py): bf16 or TF32 would compare how two equally good
roundings drift apart, not two implementations.
"""

import json
import math
import pathlib
import sys

import jax
import pytest
import ranks

import jax_ep

sys.path.insert(0, str(pathlib.Path(__file__).parents[2] / "examples"))

NUM_STEPS = 50


def test_losses_are_those_of_the_reference(tmp_path):
    problem = ranks.has_xla_collectives()
    if problem:
        pytest.skip(f"needs NCCL between these ranks: {problem}")
    import train_moe

    losses = {}
    num_ranks = jax.device_count()
    runs = {"cuda": ("cuda", num_ranks), "xla": ("xla", num_ranks)}
    for per_node in (num_ranks // 2, num_ranks // 4):
        if per_node > 0:
            runs[f"nodes of {per_node}"] = ("cuda", per_node)
    for name, (implementation, per_node) in runs.items():
        before = jax_ep.debug.stats()
        log = tmp_path / f"{name}.json"
        train_moe.main(
            [
                *("--steps", str(NUM_STEPS), "--dtype", "f32", "--implementation", implementation, "--no-checkpoint"),
                *("--sample-bytes", "0", "--out", str(tmp_path), "--log-losses", str(log)),
                *("--ranks-per-node", str(per_node)),
            ]
        )
        after = jax_ep.debug.stats()
        assert (after["direct_calls"] > before["direct_calls"]) == (implementation == "cuda")
        assert after["staged_calls"] == before["staged_calls"]
        assert (after["rows_put"] > before["rows_put"]) == (per_node < num_ranks)
        ranks.barrier()
        if jax.process_index() == 0:
            losses[name] = json.loads(log.read_text())["losses"]
    jax_ep.check()
    if jax.process_index() == 0:
        assert len(losses["cuda"]) == NUM_STEPS and all(map(math.isfinite, losses["cuda"]))
        assert losses["cuda"][-1] < losses["cuda"][0] - 1
        for name, others in losses.items():
            apart = [abs(a - b) for a, b in zip(losses["cuda"], others, strict=True)]
            print(f"{name}: largest difference of a step's loss: {max(apart):.5f}")
            assert max(apart) <= 0.02, (name, apart)
