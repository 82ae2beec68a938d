"""Programs lowered for CUDA without a GPU, and our custom calls in their text."""

import re

import jax
import jax.numpy as jnp
import numpy as np

import jax_ep
from jax_ep import testing

X, IDX, W = np.zeros((2, 4, 16), np.float32), np.zeros((2, 4, 2), np.int32), np.zeros((2, 4, 2), np.float32)


def layer(x, idx, w, **kwargs):
    """A dispatch with weights, a second tensor, and a weighted sum with bias, backward included."""

    def loss(x, w):
        recv = jax_ep.dispatch(x, idx, w, num_experts=4, axis_name="ep", **kwargs)
        again = jax_ep.dispatch(x, handle=recv.handle)
        is_token = kwargs.get("layout", "expert") == "token"
        y = recv.x + again.x
        out = jax_ep.combine(y, recv.handle, weights=None if is_token else recv.weights, bias=x)
        return jnp.sum(out) + jnp.sum(recv.weights)

    return jax.value_and_grad(loss, (0, 1))(x, w)


def lowered(mesh, **kwargs):
    program = testing.on_ranks(lambda *a: layer(*a, **kwargs), mesh)
    return program.trace(X, IDX, W).lower(lowering_platforms=("cuda",)).as_text()


def calls(text):
    """(target, operand types, result types, attributes text) of every custom call of ours."""
    found = []
    for line in text.splitlines():
        match = re.search(r"custom_call @(jax_ep_\w+)\(.*?\) \{(.*)\} : \((.*)\) -> (.*)$", line)
        if match:
            target, attributes, operands, results = match.groups()
            types = lambda s: re.findall(r"tensor<([^>]*)>", s)
            found.append((target, types(operands), types(results), attributes))
    return found


def numbers_of(attributes):
    return {name: int(n) for name, n in re.findall(r"(\w+) = (-?\d+) : i64", attributes)}
