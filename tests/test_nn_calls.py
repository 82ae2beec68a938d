"""jax_ep.nn as its users meet it: the worked examples of its docstrings, mistakes in configs and calls, strict settings
of JAX, and what masked tokens may hold."""

import dataclasses
import doctest

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import test_nn
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
    for factor in (0, float("inf")):
        with pytest.raises(ValueError, match=f"MoEConfig: got capacity_factor={factor}, expected > 0 and finite"):
            nn.MoEConfig(**CONFIG, capacity_factor=factor)


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


@pytest.mark.parametrize("layout", nn.LAYOUTS)
def test_without_implicit_promotion(layout, make_mesh):
    """The layer is traced where ranks and dtypes may not be promoted."""
    loss = test_nn.sharded_loss(make_mesh(2), dataclasses.replace(test_nn.CONFIG, layout=layout))
    mask = jnp.arange(test_nn.TOKENS) % 3 != 0
    with jax.numpy_rank_promotion("raise"), jax.numpy_dtype_promotion("strict"):
        jax.eval_shape(
            jax.grad(loss, has_aux=True), test_nn.make_params(), test_nn.make_tokens(), mask, test_nn.make_tokens()
        )


@pytest.mark.parametrize("layout", nn.LAYOUTS)
def test_what_masked_tokens_hold_reaches_nothing(layout, make_mesh):
    """Padding may be NaN or infinite: output, statistics and gradients are those of padding that is 0."""
    mask = jnp.arange(test_nn.TOKENS) % 3 != 0
    run = test_nn.jit(
        jax.value_and_grad(
            test_nn.sharded_loss(make_mesh(2), dataclasses.replace(test_nn.CONFIG, layout=layout)),
            argnums=(0, 1),
            has_aux=True,
        )
    )
    results = []
    for padding in (0.0, np.nan, np.inf):
        x = jnp.where(mask[:, None], test_nn.make_tokens(), padding)
        results.append(run(test_nn.make_params(), x, mask, jnp.ones_like(x)))
    for result in results[1:]:
        for got, expected in zip(jax.tree.leaves(result), jax.tree.leaves(results[0]), strict=True):
            np.testing.assert_array_equal(got, expected)
