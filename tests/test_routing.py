"""routing_layout against NumPy counts, for every routing and group size."""

import doctest

import numpy as np
import pytest

import jax_ep
from jax_ep import testing


def test_example():
    """The worked example of the docstring."""
    run_example(jax_ep.routing_layout)


def run_example(function):
    (example,) = doctest.DocTestFinder().find(function, function.__name__, globs={})
    assert example.examples
    result = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS).run(example)
    assert result.failed == 0


@pytest.mark.parametrize("kind", testing.ROUTINGS)
def test_counts(make_mesh, num_ranks, kind):
    """B07: -1 and invalid ids are counted nowhere; an expert twice in a token is one token and two entries."""
    num_experts = 3 * num_ranks
    idx = testing.routing(kind, num_ranks=num_ranks, num_tokens=9, num_topk=3, num_experts=num_experts)
    layout = run(make_mesh(num_ranks), num_experts)(idx)
    for rank in range(num_ranks):
        valid = [[e for e in token if 0 <= e < num_experts] for token in idx[rank]]
        entries = [e for token in valid for e in token]
        assert layout.num_tokens_per_expert[rank].tolist() == [entries.count(e) for e in range(num_experts)]
        here = np.array([[any(e // 3 == d for e in token) for d in range(num_ranks)] for token in valid])
        assert (np.asarray(layout.is_token_in_rank[rank]) == here).all()
        assert layout.num_tokens_per_rank[rank].tolist() == here.sum(0).tolist()


def test_agrees_with_dispatch(make_mesh):
    """The counts of all ranks, summed, are what dispatch delivers."""
    idx = testing.routing("masked", num_ranks=4, num_tokens=9, num_topk=3, num_experts=12)
    layout = run(make_mesh(4), 12)(idx)
    oracle = testing.oracle_dispatch(np.zeros((4, 9, 4), np.float32), idx, num_experts=12)
    assert (np.asarray(layout.num_tokens_per_expert).sum(0).reshape(4, 3) == oracle.counts).all()
    assert (np.asarray(layout.num_tokens_per_rank).T.cumsum(1) == oracle.recv_offsets[:, 1:]).all()


def test_no_tokens(make_mesh):
    """B01: literally no token."""
    layout = run(make_mesh(2), 4)(np.zeros((2, 0, 2), np.int32))
    assert layout.num_tokens_per_rank.tolist() == [[0, 0], [0, 0]]
    assert layout.is_token_in_rank.shape == (2, 0, 2) and not layout.num_tokens_per_expert.any()


def run(mesh, num_experts):
    return testing.on_ranks(lambda i: jax_ep.routing_layout(i, num_experts=num_experts, axis_name="ep"), mesh)
