"""The reference between 2 to 4 CPU processes: equal to the oracle, and bit-equal to virtual devices of one process."""

import dataclasses
import pathlib
import pickle

import exchange_cases
import jax
import numpy as np
import pytest
from exchange_cases import ExchangeCases, Inputs, Sizes

from jax_ep import testing
from jax_ep.cli import launch

HERE = pathlib.Path(__file__).parent


@pytest.mark.multiprocess
@pytest.mark.parametrize(
    ("processes", "devices", "layout"),
    [(2, 2, "expert"), (3, 1, "expert"), (4, 1, "token")],
    ids=["2x2 expert", "3x1 expert", "4x1 token"],
)
def test_processes_equal_one_process(tmp_path, make_mesh, processes, devices, layout):
    """All operations and gradients; one process x N devices, N processes x 1, and a mix give the same bits."""
    num_ranks = processes * devices
    sizes = Sizes(num_ranks, 2 * num_ranks, layout=layout)
    idx = ExchangeCases().routing("masked", sizes)
    inputs, oracle = exchange_cases.make_inputs(sizes, idx)
    job = tmp_path / "job"
    job.write_bytes(pickle.dumps((sizes, idx)))

    lines = []
    command = [str(HERE / "exchange_rank.py"), str(HERE.parent), str(job), str(tmp_path)]
    how = launch.Launch(ranks=processes, timeout_s=300, platform="cpu", cpu_devices=devices)
    assert launch.run(command, how, lines.append) == 0, "\n".join(lines)
    parts = {}
    for process in range(processes):
        own = pickle.loads((tmp_path / f"process{process}").read_bytes())
        assert len(own) == devices
        parts |= own
    result = jax.tree.map(lambda *a: np.concatenate(a), *(parts[rank] for rank in range(num_ranks)))
    exchange_cases.check(sizes, result, inputs, oracle)

    program = testing.on_ranks(lambda *a: exchange_cases.exchange(sizes, Inputs(*a)), make_mesh(num_ranks))
    jax.tree.map(testing.same_bits, result, program(*dataclasses.astuple(inputs)))
