"""How calls over several nodes become CUDA custom calls, when they do not, and why: read in the lowered text."""

import logging
import re

import pytest
from lowered_calls import calls, lowered, numbers_of

import jax_ep
from jax_ep import lowering


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        (dict(ranks_per_node=1, staging="always"), "nothing is staged"),
        (dict(ranks_per_node=1, num_sms=65), "at most 64 SMs"),
    ],
)
def test_what_nodes_the_kernels_do_not_serve(make_mesh, usable, caplog, changes, expected):
    """ "cuda" says why, None falls back with one line before set-up is asked."""
    nodes = jax_ep.Config(**changes)
    with caplog.at_level(logging.WARNING, logger="jax_ep"):
        assert not calls(lowered(make_mesh(2), config=nodes))
    (message,) = [r.getMessage() for r in caplog.records if re.search(expected, r.getMessage())]
    assert message.startswith("using the pure-JAX implementation") and "splits 2 ranks into 2 nodes" in message
    with pytest.raises(NotImplementedError, match=rf'implementation="cuda".*{expected}.*use implementation="xla"'):
        lowered(make_mesh(2), config=nodes, implementation="cuda")
    assert not calls(lowered(make_mesh(2), config=nodes, implementation="xla")) and not usable


@pytest.mark.parametrize(
    ("num_ranks", "ranks_per_node", "expected"), [(5, 2, "as many ranks on every node"), (66, 2, "at most 32")]
)
def test_how_many_nodes_the_kernels_serve(num_ranks, ranks_per_node, expected):
    spec = jax_ep.layout.Spec(
        ("ep",), num_ranks, num_ranks, "expert", 8, 1, True, "auto", None, jax_ep.Config(ranks_per_node=ranks_per_node)
    )
    assert expected in lowering._not_over_nodes(lowering.Call("dispatch", "", (), (), spec, None))


def test_latency_mode_over_nodes(make_mesh, usable):
    """Latency mode's targets and an arena with its slots, the halves likewise; "auto" stays with chunks of tokens."""
    nodes = jax_ep.Config(ranks_per_node=1, num_sms=9, node_sms=3, put_delay_s=2e-6)
    kwargs = dict(config=nodes, implementation="cuda")
    wanted = dict(num_nodes=2, num_carriers=3, put_delay_ns=2000, num_sms=9)
    for mode, suffix, num_slots in (("latency", "_latency", 2), ("auto", "", 0)):
        usable.clear()
        found = list(calls(lowered(make_mesh(2), **kwargs, mode=mode)))
        operations = ("dispatch", "redispatch", "combine")
        assert {name for name, *_ in found} == {f"jax_ep_{operation}{suffix}" for operation in operations}
        for *_, attributes in found:
            assert (wanted | dict(num_slots=num_slots)).items() <= numbers_of(attributes).items()
        assert {c[5:-1] for c in usable if len(c) == 9} == {(num_slots, 2, 12)}
    spec = jax_ep.layout.Spec(("ep",), 2, 2, "expert", 8, 1, True, "auto", None, nodes)
    assert all(
        not lowering._not_over_nodes(lowering.Call("dispatch", part, (), (), spec, None)) for part in ("start", "done")
    )


def test_several_nodes(make_mesh, usable):
    """The attributes of nodes, their own arena, and SMs for carriers; as many ranks a node as there are is one node."""
    config = jax_ep.Config(ranks_per_node=1, num_sms=9, node_sms=3, node_chunk=50, node_bytes=1 << 22, put_delay_s=2e-6)
    (name, _, _, attributes), *_ = calls(lowered(make_mesh(2), config=config, implementation="cuda"))
    wanted = dict(num_nodes=2, num_carriers=3, chunk_tokens=50, put_delay_ns=2000, staging_bytes=1 << 22, num_sms=9)
    assert name == "jax_ep_dispatch" and wanted.items() <= numbers_of(attributes).items()
    assert {c[2:-1] for c in usable if len(c) == 9} == {(2, 8, 1 << 22, 0, 2, 12)}  # the carriers count, too
    usable.clear()
    default = jax_ep.Config(ranks_per_node=1, node_sms=3)  # ... and with them one SM at least, whatever the default is
    lowered(make_mesh(2), config=default, implementation="cuda")
    assert {c[-2] for c in usable if len(c) == 9} == {4}
    for ranks_per_node in (2, 3):
        plain = jax_ep.Config(ranks_per_node=ranks_per_node)
        for *_, attributes in calls(lowered(make_mesh(2), config=plain, implementation="cuda")):
            assert numbers_of(attributes)["num_nodes"] == 1
