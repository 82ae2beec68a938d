"""Simulated nodes (`Config.ranks_per_node`): combine sums per node, rounds, and then sums over the nodes.

Bit for bit against the oracle of that tree, gradients included, on data that the tree of one node rounds otherwise:
two, three and four nodes, uneven ones, every layout, each dtype and FP8 sums. Also what one node means.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from exchange_cases import QUICK_COMPILE, ExchangeCases, Sizes, make_inputs

import jax_ep
from jax_ep import testing


def layer(ranks_per_node, x, idx, y, g):
    """combine of y, and the gradient of dispatch for the cotangent g."""
    config = jax_ep.Config(ranks_per_node=ranks_per_node)

    def send(x):
        recv = jax_ep.dispatch(x, idx, num_experts=8, axis_name="ep", config=config)
        return recv.x, recv.handle

    _, pullback, handle = jax.vjp(send, x, has_aux=True)
    return jax_ep.combine(y, handle), pullback(g)[0]


def program(fn, num_ranks):
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:num_ranks]), ("ep",))
    return jax.jit(testing.on_ranks(fn, mesh, jit=False), compiler_options=QUICK_COMPILE)


def test_by_hand():
    """Three tokens of one rank, each for all four ranks, whose sums are written out."""
    expected = {
        None: [260, 4, 258],  # 259 lies half way between bfloat16 neighbours, of which 260 is even
        1: [260, 4, 258],
        2: [256 + 2, 260 - 255, 256],  # 257 rounds to 256, and so does 256 + 1
        3: [260, 3 + 1, 256],  # 258 + 1 rounds to 260; 257 rounds to 256, and so does 256 + 1
        4: [260, 4, 258],
    }
    sums = np.array([[256, 1, 1, 1], [256, 3, -256, 1], [256, 1, 0, 1]], np.float32).T  # [rank, token]
    idx = np.full((4, 3, 4), -1, np.int32)
    idx[0] = np.arange(4) * 2
    x = np.zeros((4, 3, 8), jnp.bfloat16)
    oracle = testing.oracle_dispatch(x, idx, num_experts=8)
    y = np.zeros(oracle.x.shape, jnp.bfloat16)
    for _, token, _, rank, row in oracle.entries():
        y[rank, row] = sums[rank, token]
    # Distinct calls of one program, which differ in their config alone.
    outs = program(lambda *a: [layer(n, *a) for n in expected], 4)(x, idx, y, y)
    for of_program, (ranks_per_node, values) in zip(outs, expected.items(), strict=True):
        of_oracle = testing.oracle_combine(oracle, y, ranks_per_node=ranks_per_node)
        for out in (*of_program, of_oracle):
            assert np.asarray(out)[0, :, 0].astype(np.float32).tolist() == values, ranks_per_node


CASES = [
    (2, Sizes(4, 8, num_topk=6)),
    (4, Sizes(8, 16, num_topk=9, num_tokens=5, expert_alignment=4, dtype="float16")),
    (2, Sizes(8, 16, num_topk=9, num_tokens=5, hidden=8, layout="token")),
    (3, Sizes(4, 8, num_topk=6, layout="batched", capacity=8)),
    (3, Sizes(8, 16, num_topk=9, num_tokens=5, hidden=8, dtype="float32")),
    (3, Sizes(4, 8, num_topk=6, hidden=128, quantize="fp8_wire")),
]


def case_name(value):
    return f"R{value.num_ranks}-{value.dtype}-{value.layout}" if isinstance(value, Sizes) else f"by{value}"


@pytest.mark.parametrize(("ranks_per_node", "sizes"), CASES, ids=case_name)
def test_tree_of_several_nodes(ranks_per_node, sizes):
    """Results and gradients are the oracle's of this tree, and not those of one level; dispatch is as ever."""
    cases = ExchangeCases()
    cases.implementation = "xla"
    sizes = dataclasses.replace(sizes, ranks_per_node=ranks_per_node)
    for kind in ("uniform", "masked"):
        idx = cases.routing(kind, sizes)
        result = cases.run(sizes, idx)
        inputs, oracle = make_inputs(sizes, idx)
        one_level = testing.oracle_combine(oracle, inputs.y, bias=inputs.bias, quantize=sizes.wire)
        assert (np.asarray(result["sum"]) != one_level).any()
        assert (np.asarray(result["g_x"]) != testing.oracle_dispatch_grad(oracle, inputs.g_recv_x)[0]).any()


def test_one_node_and_one_rank_per_node():
    """As many ranks per node as there are, and more, is the program of one node; one rank per node has its bits."""
    idx = testing.routing("uniform", num_ranks=4, num_tokens=7, num_topk=6, num_experts=8)
    x = testing.random_rows((4, 7, 16), "bfloat16")
    shape = testing.oracle_dispatch(x, idx, num_experts=8).x.shape
    args = x, idx, testing.random_rows(shape, "bfloat16", 1), testing.random_rows(shape, "bfloat16", 2)
    lowered = {n: program(lambda *a, n=n: layer(n, *a), 4).lower(*args) for n in (None, 4, 5, 1, 2)}
    assert lowered[None].as_text() == lowered[4].as_text() == lowered[5].as_text()
    one_node, rank_nodes, pairs = (lowered[n].compile()(*args) for n in (None, 1, 2))
    jax.tree.map(testing.same_bits, one_node, rank_nodes)
    assert all((np.asarray(a) != np.asarray(b)).any() for a, b in zip(one_node, pairs, strict=True))


def test_nodes_of_fp8_sums_are_rounded_once_more(make_mesh):
    """A dequantised sum is no number of the payload dtype: one rank per node rounds it, one node does not."""
    sizes = Sizes(2, 4, num_topk=4, hidden=128, quantize="fp8_wire")
    idx = ExchangeCases().routing("uniform", sizes)
    inputs, oracle = make_inputs(sizes, idx)

    def run(x, idx, y):
        handles = [
            jax_ep.dispatch(x, idx, num_experts=4, axis_name="ep", config=jax_ep.Config(ranks_per_node=n)).handle
            for n in (None, 1)
        ]
        return [jax_ep.combine(y, handle, quantize="fp8_wire") for handle in handles]

    outs = testing.on_ranks(run, make_mesh(2))(inputs.x, idx, inputs.y)
    for out, ranks_per_node in zip(outs, (None, 1), strict=True):
        expected = testing.oracle_combine(oracle, inputs.y, quantize="fp8_wire", ranks_per_node=ranks_per_node)
        testing.same_bits(out, expected, f"ranks_per_node={ranks_per_node}")
    assert (np.asarray(outs[0]) != np.asarray(outs[1])).any()


def test_windows_of_several_nodes():
    """`windowed` hands the config on: one window has the bits of dispatch and combine, forward and backward."""
    config = jax_ep.Config(ranks_per_node=3)
    kwargs = dict(num_experts=8, axis_name="ep", capacity=64, config=config)
    experts = lambda params, recv: recv.x * params

    def windowed(x, idx, w, scale):
        return jax_ep.windowed(experts, scale, x, idx, w, **kwargs)

    def plain(x, idx, w, scale):
        recv = jax_ep.dispatch(x, idx, w, **kwargs)
        return jax_ep.combine(experts(scale, recv), recv.handle, weights=recv.weights)

    def run(x, idx, w, scale, g):
        forms = [jax.vjp(lambda x, f=f: f(x, idx, w, scale), x) for f in (windowed, plain)]
        return [(out, pullback(g)) for out, pullback in forms]

    x, g = (testing.random_rows((4, 5, 8), "bfloat16", seed) for seed in (1, 2))
    idx = testing.routing("uniform", num_ranks=4, num_tokens=5, num_topk=3, num_experts=8)
    w = np.full(idx.shape, 0.5, np.float32)
    scale = np.full((4, 1), 1.25, jnp.bfloat16)
    jax.tree.map(testing.same_bits, *program(run, 4)(x, idx, w, scale, g))
