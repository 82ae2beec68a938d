"""Three CPU processes, one of which calls with something else: under debug_checks all of them say what, and go on.

Without it XLA's collectives end the process, hang, or mix up the rows (gloo ends it)."""

import json
import pathlib
import re

import pytest

from jax_ep.cli import launch

SCRIPT = pathlib.Path(__file__).with_name("mismatch_rank.py")
NAMES = ("num_tokens=16", "dtype=bfloat16", "layout=token", "capacity=12", "op=redispatch")


@pytest.mark.multiprocess
def test_ranks_that_call_differently():
    """B04: an error on every rank that names the difference, not a hang; the next step is right."""
    lines = []
    how = launch.Launch(ranks=3, timeout_s=240, platform="cpu")
    assert launch.run([str(SCRIPT)], how, lines.append) == 0, "\n".join(lines)
    for rank in range(3):
        ways = [json.loads(found[1]) for line in lines if (found := re.match(rf"\[{rank}\] WAY(.*)", line))]
        assert len(ways) == len(NAMES) + 1
        for error, name in zip(ways, NAMES, strict=False):
            assert error["kind"] == "MismatchError" and name in error["text"], (rank, name, error)
            assert (error["rank"], error["peer"]) == (rank, 0 if rank == 1 else 1)
            assert "make the same calls" in error["text"]
        assert ways[-1] is None
