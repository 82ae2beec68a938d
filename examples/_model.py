"""Small decoder-only language model with Mixture-of-Experts layers (Flax NNX)."""

import dataclasses

import jax
import jax.numpy as jnp
from flax import nnx

from jax_ep.nn import MoE, MoEConfig


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    vocabulary: int
    num_layers: int
    num_heads: int
    moe: MoEConfig


def rotate(x: jax.Array) -> jax.Array:
    """Rotary position embedding of x [batch, length, heads, size]."""
    half = x.shape[-1] // 2
    frequency = 10_000.0 ** (-jnp.arange(half) / half)
    angle = jnp.arange(x.shape[1])[:, None, None] * frequency
    a, b = x[..., :half].astype(jnp.float32), x[..., half:].astype(jnp.float32)
    cos, sin = jnp.cos(angle), jnp.sin(angle)
    return jnp.concatenate([a * cos - b * sin, a * sin + b * cos], axis=-1).astype(x.dtype)


class Block(nnx.Module):
    """Causal attention and a MoE layer, each after a norm and with a residual connection."""

    def __init__(self, config: ModelConfig, mesh, dtype, rngs: nnx.Rngs):
        hidden = config.moe.hidden
        self.num_heads = config.num_heads
        self.attention_norm = nnx.RMSNorm(hidden, dtype=dtype, rngs=rngs)
        self.qkv = nnx.Linear(hidden, 3 * hidden, use_bias=False, dtype=dtype, rngs=rngs)
        self.out = nnx.Linear(hidden, hidden, use_bias=False, dtype=dtype, rngs=rngs)
        self.moe_norm = nnx.RMSNorm(hidden, dtype=dtype, rngs=rngs)
        self.moe = MoE(config.moe, mesh=mesh, rngs=rngs)

    def __call__(self, x):
        batch, length, hidden = x.shape
        heads = self.qkv(self.attention_norm(x)).reshape(batch, length, 3, self.num_heads, -1)
        q, k, v = rotate(heads[:, :, 0]), rotate(heads[:, :, 1]), heads[:, :, 2]
        attended = jax.nn.dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.reshape(batch, length, hidden))
        y, aux = self.moe(self.moe_norm(x))
        return x + y, aux


class LanguageModel(nnx.Module):
    """Bytes [batch, length] to logits [batch, length, vocabulary] in f32, and one MoEAux per layer."""

    def __init__(self, config: ModelConfig, *, mesh, dtype, rngs: nnx.Rngs):
        hidden = config.moe.hidden
        self.embed = nnx.Embed(config.vocabulary, hidden, dtype=dtype, rngs=rngs)
        self.blocks = nnx.List([Block(config, mesh, dtype, rngs) for _ in range(config.num_layers)])
        self.norm = nnx.RMSNorm(hidden, dtype=dtype, rngs=rngs)
        self.head = nnx.Linear(hidden, config.vocabulary, use_bias=False, dtype=dtype, rngs=rngs)

    def __call__(self, tokens):
        x = self.embed(tokens)
        aux = []
        for block in self.blocks:
            x, layer_aux = block(x)
            aux.append(layer_aux)
        return self.head(self.norm(x)).astype(jnp.float32), aux
