"""Calls that follow one another: other sizes, programs in unequal turns, resets, handles kept and pickled.

Nothing may survive from one call to the next but what flows through the arrays. Every result is compared with the
oracle, so a call that read another one's sizes or rows is found.
"""

import pickle

import jax
import numpy as np
import pytest
from exchange_cases import QUICK_COMPILE

import jax_ep
from jax_ep import testing

EXPERTS = 6


def data(num_ranks, num_tokens, num_topk, kind="zipf", seed=0):
    x = testing.code_rows(num_ranks, num_tokens, 8, "bfloat16")
    sizes = dict(num_ranks=num_ranks, num_tokens=num_tokens, num_topk=num_topk, num_experts=EXPERTS, seed=seed)
    return x, testing.routing(kind, **sizes)


def make_program(mesh, **kwargs):
    """Jitted (x, topk_idx) -> (recv, its rows summed back); compiled for every shape that comes."""

    def run(x, idx):
        recv = jax_ep.dispatch(x, idx, num_experts=EXPERTS, axis_name="ep", **kwargs)
        return recv, jax_ep.combine(recv.x, recv.handle)

    return jax.jit(testing.on_ranks(run, mesh, jit=False), compiler_options=QUICK_COMPILE)


def check(result, x, idx, **kwargs):
    oracle = testing.oracle_dispatch(x, idx, num_experts=EXPERTS, **kwargs)
    testing.check_recv(result[0], oracle)
    testing.same_bits(result[1], testing.oracle_combine(oracle, oracle.x))


def test_sizes_change(make_mesh):
    """B05, B22, B25: there is no declared maximum; more tokens, then fewer, then more, odd numbers and other top-k."""
    program = make_program(make_mesh(2))
    seen = [(8, 2), (64, 2), (16, 2), (8, 2), (33, 1), (1, 6), (1000, 2), (1, 6), (64, 2)]
    for call, (num_tokens, num_topk) in enumerate(seen):
        x, idx = data(2, num_tokens, num_topk, seed=call)
        check(program(x, idx), x, idx)
    assert program._cache_size() == len(set(seen))


def test_programs_in_unequal_turns(make_mesh):
    """B38: A, A, B, A, B, B, ... on one group, with other layouts, shapes and routings; each call is right."""
    mesh = make_mesh(3)
    kwargs = {"A": dict(expert_alignment=4), "B": dict(layout="token", capacity=5)}
    shapes = {"A": (7, 2), "B": (5, 3)}
    programs = {name: make_program(mesh, **kwargs[name]) for name in kwargs}
    for call, name in enumerate("AABABBBAABABAAAB"):
        x, idx = data(3, *shapes[name], "masked", call)
        check(programs[name](x, idx), x, idx, **kwargs[name])
    assert all(program._cache_size() == 1 for program in programs.values())


def test_reset_between_steps(make_mesh):
    """B61: reset, twice, and after an error while tracing; the same compiled program and another mesh go on."""
    program = make_program(make_mesh(2))
    x, idx = data(2, 7, 2)
    check(program(x, idx), x, idx)
    for _ in range(2):
        jax_ep.reset()
    check(program(x, idx), x, idx)
    with pytest.raises(ValueError, match="num_topk=7"):
        program(x, np.zeros((2, 7, 7), np.int32))
    jax_ep.reset()
    jax_ep.check()
    x, idx = data(3, 5, 2)
    check(make_program(make_mesh(3))(x, idx), x, idx)


def test_a_handle_is_plain_data(make_mesh):
    """B52: a handle can be kept, copied and pickled; what comes back serves combine and a second dispatch."""
    mesh = make_mesh(2)
    x, idx = data(2, 7, 2)
    recv, out = make_program(mesh)(x, idx)
    handle = pickle.loads(pickle.dumps(jax.tree.map(np.asarray, recv.handle)))
    assert handle.spec == recv.handle.spec

    def again(x, handle):
        second = jax_ep.dispatch(x * 2, handle=handle)
        return jax_ep.combine(second.x, second.handle)

    testing.same_bits(testing.on_ranks(again, mesh)(x, handle), np.asarray(out) * 2)


@pytest.mark.parametrize("kind", ["one expert", "experts of one rank", "skew"])
def test_nearly_all_tokens_to_the_same_experts(make_mesh, kind):
    """B10: exact counts, and every row names its origin: 8 ranks x 256 tokens to one expert, one rank, or by Zipf."""
    num_ranks, num_tokens, num_topk, num_experts = 8, 256, 1 if kind == "one expert" else 8, 64
    x = testing.code_rows(num_ranks, num_tokens, 8)
    sizes = dict(num_ranks=num_ranks, num_tokens=num_tokens, num_topk=num_topk, num_experts=num_experts)
    idx = np.broadcast_to(np.arange(8, 8 + num_topk, dtype=np.int32), (num_ranks, num_tokens, num_topk))
    if kind == "skew":
        idx = testing.routing("zipf", **sizes)
    send = lambda x, idx: jax_ep.dispatch(x, idx, num_experts=num_experts, axis_name="ep")
    program = jax.jit(testing.on_ranks(send, make_mesh(num_ranks), jit=False), compiler_options=QUICK_COMPILE)
    recv = program(x, idx)
    assert np.asarray(recv.counts).reshape(-1).tolist() == np.bincount(idx.reshape(-1), minlength=64).tolist()
    for d in range(num_ranks):
        local = [(e, s, t) for s, t, k in np.ndindex(idx.shape) for e in [idx[s, t, k]] if e // 8 == d]
        rows = np.asarray(recv.x)[d]
        assert rows[: len(local), :2].astype(int).tolist() == [[s, t] for _, s, t in sorted(local)]
        assert not rows[len(local) :].any()
