"""Sends tokens to experts on other devices and brings the weighted results back, on 2 to 8 devices."""

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, PartitionSpec

import jax_ep

jax.config.update("jax_num_cpu_devices", 4)  # without a GPU: four virtual devices
devices = jax.devices()[:8]
mesh = Mesh(np.array(devices), ("ep",))
num_experts, hidden = 2 * len(devices), 16

# Three tokens per device, each with two experts; -1 is "not routed".
x = jnp.arange(3 * len(devices), dtype=jnp.float32)[:, None] * jnp.ones(hidden)
topk_idx = jnp.arange(x.shape[0])[:, None] * jnp.array([1, 3]) % num_experts
topk_idx = topk_idx.at[0, 1].set(-1).astype(jnp.int32)
topk_weights = jnp.full(topk_idx.shape, 0.5)
scale = 1.0 + jnp.arange(num_experts)[:, None, None]  # expert e multiplies a token by e + 1
experts = scale * jnp.eye(hidden)


def layer(x, topk_idx, topk_weights, experts):  # runs on each device, on its tokens and its two experts
    recv = jax_ep.dispatch(x, topk_idx, topk_weights, num_experts=num_experts, axis_name="ep")
    y = jax.lax.ragged_dot(recv.x, experts, recv.group_sizes)
    return jax_ep.combine(y, recv.handle, weights=recv.weights)


spec = PartitionSpec("ep")
layer = jax.jit(jax.shard_map(layer, mesh=mesh, in_specs=spec, out_specs=spec))
out = layer(x, topk_idx, topk_weights, experts)
expected = x * jnp.where(topk_idx < 0, 0, topk_weights * (topk_idx + 1)).sum(axis=1, keepdims=True)
assert np.allclose(out, expected)
print(f"{len(devices)} devices, {num_experts} experts; token: result")
print("\n".join(f"{t:5d}: {float(out[t, 0]):g}" for t in range(x.shape[0])))
