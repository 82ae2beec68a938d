"""Config.command_buffers: which calls say that XLA may record them, read in the lowered text.

That XLA then does: tests/gpu/test_ahead_of_time.py. That replays are right: tests/gpu/test_graphs_processes.py.
"""

import logging

import numpy as np
import pytest
from jax.sharding import Mesh
from lowered_calls import calls, lowered
from test_lowering import split_calls

import jax_ep
from jax_ep import bootstrap, group, lowering, tuning

OPS = ("dispatch", "redispatch", "combine")
RECORDED, LAUNCHED = jax_ep.Config(command_buffers=True), jax_ep.Config(command_buffers=False)


@pytest.fixture
def one_each(monkeypatch, usable):
    """Every device as a process of its own."""
    monkeypatch.setattr(group, "member", lambda device: (device.id, 0))
    lowering._log_once.cache_clear()


def targets(found):
    return {target for target, *_ in found}


def test_every_form_of_a_call(make_mesh, one_each):
    """Both modes, the halves, backward passes included; operands, results and attributes stay what they are."""
    for mode, suffix in (("throughput", ""), ("latency", "_latency")):
        plain, recorded = (sorted(calls(lowered(make_mesh(2), mode=mode, config=c))) for c in (LAUNCHED, RECORDED))
        assert targets(plain) == {f"jax_ep_{op}{suffix}" for op in OPS}
        assert recorded == sorted((f"{target}_graph", *rest) for target, *rest in plain)
    expected = {f"jax_ep_{op}_{half}_graph" for op in OPS for half in ("start", "done")}
    assert expected < targets(split_calls(make_mesh(2), config=RECORDED))


@pytest.mark.parametrize("by_default", [None, False, True])
def test_what_was_not_said_is_the_default(make_mesh, one_each, monkeypatch, by_default):
    if by_default is not None:
        monkeypatch.setattr(tuning, "COMMAND_BUFFERS", by_default)
    else:
        by_default = True
    for wanted in (None, False, True):
        found = targets(calls(lowered(make_mesh(2), config=jax_ep.Config(command_buffers=wanted))))
        is_recorded = by_default if wanted is None else wanted
        assert {target.endswith("_graph") for target in found} == {is_recorded}


def test_who_is_launched_all_the_same(make_mesh, one_each, monkeypatch, caplog):
    """Calls over several nodes, several devices in one process, processes with a setting that does not go with it: one
    line says why, if it was asked for."""
    over_nodes = jax_ep.Config(command_buffers=True, ranks_per_node=1)
    with caplog.at_level(logging.WARNING, logger="jax_ep"):
        for _ in range(2):
            found = targets(calls(lowered(make_mesh(2), config=over_nodes)))
            assert found == {f"jax_ep_{op}" for op in OPS}
        monkeypatch.setattr(group, "member", lambda device: (device.id // 2, device.id % 2))
        mesh = make_mesh(4)
        pairs = Mesh(np.array(mesh.devices)[[0, 2]], ("ep",))  # processes of two devices, of which the mesh has one
        assert targets(calls(lowered(pairs, config=RECORDED))) == {f"jax_ep_{op}_graph" for op in OPS}
        assert targets(calls(lowered(make_mesh(2), config=RECORDED))) == {f"jax_ep_{op}" for op in OPS}
        monkeypatch.setattr(bootstrap, "why_not_recorded", lambda groups, config=None: "process 1 has a reason")
        for config in (RECORDED, jax_ep.Config()):
            assert targets(calls(lowered(pairs, config=config))) == {f"jax_ep_{op}" for op in OPS}
        lowered(make_mesh(2))  # nobody asked: nothing to say
        lowered(make_mesh(2), config=jax_ep.Config(ranks_per_node=1))
    said = [record.getMessage() for record in caplog.records]
    assert len(said) == 3 and "over several nodes" in said[0] and "several devices of the mesh" in said[1]
    assert said[2].endswith("process 1 has a reason")
    assert all(line.startswith("Config(command_buffers=True) has no effect: ") for line in said)
