"""jax_ep.nn as its users meet it: the worked examples of its docstrings, and mistakes in configs and calls."""

import doctest

import jax.numpy as jnp
import pytest
from flax import nnx

from jax_ep import nn

CONFIG = dict(hidden=4, ffn=8, num_experts=4, axis_name="ep")


@pytest.mark.parametrize("name", ["MoEConfig", "route", "moe_block", "MoE"])
def test_examples(name):
    (example,) = (e for e in doctest.DocTestFinder().find(getattr(nn, name), name, globs={}) if e.name == name)
    assert example.examples and doctest.DocTestRunner().run(example).failed == 0


@pytest.mark.parametrize("name", ["hidden", "ffn", "num_experts", "num_topk"])
def test_sizes_of_a_config(name):
    with pytest.raises(ValueError, match=f"MoEConfig: got {name}=0, expected 1 or more"):
        nn.MoEConfig(**CONFIG | {name: 0})
    with pytest.raises(TypeError, match=f"MoEConfig: got {name}=2.0, expected a static int"):
        nn.MoEConfig(**CONFIG | {name: 2.0})


X = jnp.ones((2, 4, 4))
MASK = jnp.ones((2, 4), bool)
MAP = jnp.array([[0, 4], [1, 5], [2, -1], [3, -1]])


@pytest.mark.parametrize(
    ("changes", "call", "error", "text"),
    [
        ({}, (X[..., :2],), ValueError, r"got x of shape \(2, 4, 2\), expected \[..., hidden=4\]"),
        ({}, (X[:, :3, :][:1],), ValueError, r"3 tokens over 2 devices of \('ep',\), expected a multiple; pad the"),
        ({}, (X, MASK.astype(jnp.int32)), TypeError, r"got mask of dtype int32, expected bool"),
        ({}, (X, MASK[:, :3]), ValueError, r"got mask of shape \(2, 3\), expected \(2, 4\)"),
        ({}, (X, None, MAP), ValueError, r"an expert_map and MoEConfig.num_physical_experts=None, expected both or"),
        ({"num_physical_experts": 6}, (X,), ValueError, r"no expert_map and MoEConfig.num_physical_experts=6"),
    ],
)
def test_mistakes_of_a_call(changes, call, error, text, make_mesh):
    layer = nn.MoE(nn.MoEConfig(**CONFIG | changes), mesh=make_mesh(2), rngs=nnx.Rngs(0))
    with pytest.raises(error, match=f"MoE: .*{text}"):
        layer(*call)


def test_mistakes_fit_every_shape_of_tokens(make_mesh):
    """What is right passes: a token's axes in any number, masks flat or in the shape of the tokens."""
    layer = nn.MoE(nn.MoEConfig(**CONFIG), mesh=make_mesh(2), rngs=nnx.Rngs(0))
    same = [layer(X, MASK)[0], layer(X, MASK.reshape(-1))[0], layer(X.reshape(-1, 4))[0].reshape(X.shape)]
    assert all(y.shape == X.shape and (y == same[0]).all() for y in same)
