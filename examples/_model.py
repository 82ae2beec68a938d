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


def rotate(x: jax.Array, position: jax.Array) -> jax.Array:
    """Rotary position embedding of x [..., length, heads, size] at `position` [..., length]."""
    half = x.shape[-1] // 2
    frequency = 10_000.0 ** (-jnp.arange(half) / half)
    angle = position[..., None, None] * frequency
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
        q, k, v = self._heads(x, jnp.arange(x.shape[1]))
        attended = jax.nn.dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.reshape(x.shape))
        y, aux = self.moe(self.moe_norm(x))
        return x + y, aux

    def _heads(self, x, position):
        """Queries, keys and values [batch, length, heads, size], rotated."""
        heads = self.qkv(self.attention_norm(x)).reshape(*x.shape[:2], 3, self.num_heads, -1)
        return rotate(heads[:, :, 0], position), rotate(heads[:, :, 1], position), heads[:, :, 2]

    def decode(self, x, position, cache):
        """One token of each sequence: x [batch, hidden] at `position` i32 [batch], -1 where a sequence is missing.

        `cache` is a pair of keys and values [slots, length, heads, size] of the tokens before, slots >= batch; the new
        one gets this token's too.
        """
        is_there = position >= 0
        q, k, v = self._heads(x[:, None], position[:, None])
        # What is missing is written past the end, that is: not.
        place = jnp.arange(x.shape[0]), jnp.where(is_there, position, cache[0].shape[1])
        keys, values = (old.at[place].set(new[:, 0], mode="drop") for old, new in zip(cache, (k, v), strict=True))
        known = (keys[: x.shape[0]], values[: x.shape[0]])
        lengths = jnp.maximum(position, 0) + 1
        attended = jax.nn.dot_product_attention(q, *known, key_value_seq_lengths=lengths)
        x = x + self.out(attended.reshape(x.shape))
        y, _ = self.moe(self.moe_norm(x), mask=is_there)
        return x + y, (keys, values)


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

    def decode(self, tokens, position, caches):
        """Logits [batch, vocabulary] after one token of each sequence, and the new caches; see `Block.decode`."""
        x, new = self.embed(tokens), []
        for block, cache in zip(self.blocks, caches, strict=True):
            x, cache = block.decode(x, position, cache)
            new.append(cache)
        return self.head(self.norm(x)).astype(jnp.float32), new
