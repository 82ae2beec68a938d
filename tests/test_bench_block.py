"""`bench --workload W8`: its parts are those of the layer, its loops keep what they time, one run of the command."""

import dataclasses
import json
import re
import subprocess
import sys

import jax
import numpy as np
import pytest
from jax.sharding import Mesh

from jax_ep import nn
from jax_ep.cli import bench
from jax_ep.cli.benchlib import block, block_parts
from jax_ep.cli.benchlib.block_plan import BLOCKS, Block, BlockPlan

TINY = Block("tiny", 24, hidden=16, ffn=8, num_topk=2, num_experts=4, dtype="float32")
CONFIG = nn.MoEConfig(TINY.hidden, TINY.ffn, TINY.num_experts, TINY.num_topk, axis_name=block.AXIS, layout="batched")


@pytest.fixture(scope="module")
def compile_():
    return block.compiler(Mesh(np.array(jax.devices()[:2]), (block.AXIS,)))


@pytest.fixture(scope="module")
def operands(compile_):
    mesh = Mesh(np.array(jax.devices()[:2]), (block.AXIS,))
    made = block._operands(TINY, 12, mesh, compile_)
    made["routing"], made["recv"] = compile_(block_parts.prepare(CONFIG))(made["params"], made["x"])
    return made


def test_parts_in_sequence_are_the_block(compile_, operands):
    """The parts' forward results, one after the other, give the block's y."""
    params, x, g = (operands[name] for name in ("params", "x", "g"))

    def parts(params, recv):
        rows, _ = block_parts.experts(CONFIG)(params, recv)
        return nn.combine_outputs(rows, block_parts.unpack(recv), CONFIG)

    y = compile_(parts)(params, operands["recv"])
    want, (g_params, g_x) = compile_(block_parts.block(CONFIG))(params, x, g)
    np.testing.assert_allclose(y, want, rtol=1e-6, atol=1e-6)
    assert all(np.any(np.asarray(a) != 0) for a in jax.tree.leaves((g_params, g_x)))


def operations(program):
    """How often each operation that counts is in a compiled program: exchanges, their sum, matrix products."""
    names = ("all-reduce", "all-gather", "all-to-all", "dot")
    return {name: len(re.findall(rf" {name}(?:-start)?\(", program.as_text())) for name in names}


def test_loops_hold_all_of_a_block(compile_, operands):
    """Nothing that a block computes is dropped from its loop, and only the auxiliary losses are summed over ranks."""
    args, token = tuple(operands[name] for name in ("params", "x", "g")), np.zeros(2, np.float32)
    counts = []
    for step in (block_parts.block(CONFIG), block_parts.block_with_statistics(CONFIG)):
        # Packed, because scalars have no axis along which ranks could be put together.
        whole = compile_(lambda *args, step=step: block_parts.pack(step(*args)))
        counts.append(operations(whole.lower(*args).compile()))
        assert operations(compile_(block_parts.loop(step, 3)).lower(token, args).compile()) == counts[-1]
    block_only, both = counts
    assert block_only["dot"] == 3 + 1 + 6 + 2  # experts and router, forward and backward
    assert block_only["all-reduce"] == 0 and both["all-reduce"] > 0
    assert all(block_only[name] == both[name] > 0 for name in ("all-gather", "all-to-all"))


def test_loop_keeps_its_operands_and_its_work(compile_, operands):
    """Operands come back with the same bits; the exchange stays in the loop, though nothing it needs changes."""
    args = (operands["x"], operands["routing"])
    run = compile_(block_parts.loop(block_parts.dispatch(CONFIG), 3)).lower(np.zeros(2, np.float32), args).compile()
    _, out = run(np.zeros(2, np.float32), args)
    for got, want in zip(jax.tree.leaves(out), jax.tree.leaves(args), strict=True):
        np.testing.assert_array_equal(got, want)
    text = run.as_text()
    entry = text[text.index("ENTRY") :]
    assert "all-gather" in text.replace(entry, "") and "all-gather" not in entry and " while(" in entry


def test_capacity_is_the_fullest():
    loads = np.array([[3, 200], [90, 5]])
    for layout, choice, want in (
        ("expert", "demand", 256),
        ("batched", "demand", 256),
        ("expert", "default", 2 * 100 * 2),
        ("batched", "default", 2 * 100),
    ):
        assert block._capacity(loads, layout, choice, num_tokens=100, num_topk=2) == want


def test_plan_survives_a_command_line():
    plan = BlockPlan(BLOCKS["W8"], None, ("cuda",), ("batched",), ("demand",), 16, 4, 3, "a.json", None)
    assert BlockPlan.from_json(plan.to_json()) == plan


@pytest.mark.parametrize(
    "words", ["W8,W1", "W8 --first-call 1", "W8 --tokens 8,16", "W8 --implementation ring", "W1 --ffn 8"]
)
def test_options_that_do_not_fit(words, capsys):
    with pytest.raises(SystemExit):
        bench.main(["--workload", *words.split()])
    assert "W8" in capsys.readouterr().err


def test_rows_with_everything_without_statistics_and_with_an_error():
    us = dict.fromkeys((*block.PARTS, "block"), 1.5) | {"statistics": 2.5}
    row = {"workload": "W8", "implementation": "xla", "experts": "batched + einsum", "capacity": "demand"}
    row |= {"capacity_rows": 128, "error": "", "us": us, "rest_percent": 20.0}
    assert block.format_row(row).split()[-3:] == ["1.5", "20.0", "2.5"]
    assert block.format_row(row | {"us": us | {"statistics": None}}).split()[-2:] == ["20.0", "-"]
    assert block.format_row(row | {"error": "Nope: reason"}).endswith("128        Nope: reason")


@pytest.mark.multiprocess
def test_command_on_two_processes(tmp_path):
    words = "--workload W8 --tokens 8 --hidden 16 --ffn 8 --experts 4 --layout batched --calls 2 --repeats 2".split()
    files = ("--json", str(tmp_path / "b.json"), "--png", str(tmp_path / "b.png"))
    done = subprocess.run(
        [sys.executable, "-m", "jax_ep", "bench", "--ranks", "2", "--platform", "cpu", *words, *files],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    result = json.loads((tmp_path / "b.json").read_text())
    (row,) = result["blocks"]
    assert (row["workload"], row["experts"], row["capacity_rows"]) == ("custom", "batched + einsum", 128)
    # A loaded machine may be too noisy for a difference of times; it is said then, never shown as a number.
    if row["error"]:
        assert "too noisy" in row["error"]
    else:
        us = row["us"]
        assert us["block"] == pytest.approx(sum(us[part] for part in block.PARTS))
    assert (tmp_path / "b.png").read_bytes().startswith(b"\x89PNG")


def test_every_layout_has_parts(compile_, operands):
    """Layouts "expert" and "token" trace too: what the option --layout takes."""
    for layout in ("expert", "token"):
        config = dataclasses.replace(CONFIG, layout=layout)
        routing, recv = jax.eval_shape(compile_(block_parts.prepare(config)), operands["params"], operands["x"])
        for step, args in (
            (block_parts.experts(config), (operands["params"], recv)),
            (block_parts.combine(config), (recv,)),
            (block_parts.dispatch(config), (operands["x"], routing)),
        ):
            jax.eval_shape(compile_(block_parts.loop(step, 2)), np.zeros(2, np.float32), args)
