"""Mixture-of-Experts layer for Flax NNX over `dispatch` and `combine`.

`moe_block` is the functional core and runs inside `shard_map`. `MoE` holds the parameters with their sharding and
calls the core, from inside the caller's `shard_map` or from one of its own.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jax.sharding import Mesh, PartitionSpec

from jax_ep import _compat, shapes
from jax_ep.combine import combine
from jax_ep.config import Config
from jax_ep.dispatch import dispatch
from jax_ep.experts import gather_replicas
from jax_ep.layout import Recv
from jax_ep.nn_experts import apply_experts
from jax_ep.quantize import Quantized

ACTIVATIONS = ("swiglu", "gelu")
LAYOUTS = ("expert", "token", "batched")


@dataclasses.dataclass(frozen=True)
class MoEConfig:
    """Static facts of a MoE layer.

    Args:
      hidden: size of a token.
      ffn: inner size of one expert.
      num_experts: experts over the whole group; a multiple of the size of `axis_name`.
      num_topk: experts per token.
      activation: `"swiglu"`, `(silu(x w_gate) * (x w_up)) w_down`, or `"gelu"`, `gelu(x w_up) w_down`.
      normalize_weights: scale a token's top-k router probabilities so that they sum to 1.
      axis_name: mesh axis, or axes, over which the experts are spread.
      data_axes: further mesh axes over which tokens are split; the experts are replicated over them.
      layout: how rows arrive. `"expert"`: sorted by expert, for a grouped matrix product. `"batched"`: equally many
        rows for each local expert, for a batched one. `"token"`: one row per token; the layer sorts them. None (what
        it then is stands in the attribute): "batched" with a capacity or capacity_factor, which is the fastest on
        an H200 (docs/performance.md, W8), and "expert" without, where "batched" would take the worst case per expert.
      capacity: rows that a rank receives ("batched": that each of its experts does); rows beyond it are dropped and
        counted in `MoEAux.num_dropped`. None, without capacity_factor too: the worst case, which drops nothing. In
        layout "batched" that is `num_ranks * num_tokens` rows for *each* local expert, num_local_experts /
        num_topk times that of "expert": choose one of the two there.
      capacity_factor: instead, the capacity as a multiple of the mean number of rows (`mean_rows`), rounded up; 1.25
        to 2 is usual. The mean of one expert ("batched") is exceeded sooner than that of a rank.
      expert_alignment: rows of each local expert are padded to a multiple of it (layout "expert").
      quantize: `"fp8"`, `"fp8_ue8m0"` or None: rows cross in FP8 and are dequantised before the experts, see
        `jax_ep.dispatch`; hidden is then a multiple of 128. The backward pass is not quantised.
      quantize_combine: `"fp8_wire"` or None: likewise for the sums that return, see `jax_ep.combine`.
      mode: protocol of dispatch and combine, `"auto"`, `"throughput"` or `"latency"`: see `jax_ep.dispatch`.
      num_physical_experts: copies of experts over the whole group, for calls with an `expert_map`; None: no map.
      implementation: of dispatch and combine: `"cuda"`, `"xla"` or None (the best that there is).
      grouped_matmul: of the expert computation, see `jax_ep.grouped_gemm.grouped_matmul`.
      config: tuning knobs of dispatch and combine.

    Raises:
      ValueError: a value outside its range.
    """

    hidden: int
    ffn: int
    num_experts: int
    num_topk: int = 2
    activation: str = "swiglu"
    normalize_weights: bool = True
    axis_name: str | tuple[str, ...] = "expert"
    data_axes: tuple[str, ...] = ()
    layout: str | None = None
    capacity: int | None = None
    capacity_factor: float | None = None
    expert_alignment: int = 1
    quantize: str | None = None
    quantize_combine: str | None = None
    mode: str = "auto"
    num_physical_experts: int | None = None
    implementation: str | None = None
    grouped_matmul: str | None = None
    config: Config | None = None

    def __post_init__(self):
        if self.activation not in ACTIVATIONS:
            raise ValueError(f"MoEConfig: got activation={self.activation!r}, expected one of {ACTIVATIONS}")
        if self.layout is None:
            has_capacity = self.capacity is not None or self.capacity_factor is not None
            object.__setattr__(self, "layout", "batched" if has_capacity else "expert")
        if self.layout not in LAYOUTS:
            raise ValueError(f"MoEConfig: got layout={self.layout!r}, expected one of {LAYOUTS}")
        if self.capacity_factor is not None and self.capacity is not None:
            raise ValueError(
                f"MoEConfig: got capacity={self.capacity} and capacity_factor={self.capacity_factor}, expected at most "
                "one of them; leave out the other"
            )
        if self.capacity_factor is not None and not self.capacity_factor > 0:
            raise ValueError(f"MoEConfig: got capacity_factor={self.capacity_factor}, expected more than 0, or None")
        if not 1 <= self.num_topk <= self.num_experts:
            raise ValueError(f"MoEConfig: got num_topk={self.num_topk}, expected 1 to num_experts={self.num_experts}")

    @property
    def expert_axes(self) -> tuple[str, ...]:
        return (self.axis_name,) if isinstance(self.axis_name, str) else tuple(self.axis_name)

    @property
    def token_axes(self) -> tuple[str, ...]:
        """All mesh axes over which tokens are split, data axes first."""
        return (*self.data_axes, *self.expert_axes)

    def mean_rows(self, num_tokens: int, num_ranks: int) -> float:
        """Rows that a rank ("batched": one of its experts) receives when all experts get equally many.

        `num_tokens` is per rank. In layout "token" it is an upper bound of that mean: a token with several experts on
        one rank is one row there.
        """
        if self.layout == "token":
            return num_tokens * min(self.num_topk, num_ranks)
        rows = num_tokens * self.num_topk
        return rows * num_ranks / (self.num_physical_experts or self.num_experts) if self.layout == "batched" else rows

    def num_rows(self, num_tokens: int, num_ranks: int) -> int | None:
        """What `dispatch` gets as capacity: never more than the worst case, a multiple of expert_alignment."""
        if self.capacity_factor is None:
            return self.capacity
        num_local = (self.num_physical_experts or self.num_experts) // num_ranks
        worst = shapes.default_capacity(
            self.layout, num_ranks, num_tokens, self.num_topk, num_local, self.expert_alignment
        )
        rows = max(math.ceil(self.mean_rows(num_tokens, num_ranks) * self.capacity_factor), 1)
        return min(shapes.round_up(rows, self.expert_alignment), worst)


class MoEParams(NamedTuple):
    """Parameters of one layer. Inside `shard_map` the expert arrays hold the local experts only."""

    router: jax.Array  # [hidden, num_experts]
    w_gate: jax.Array | None  # [num_local_experts, hidden, ffn]; None for "gelu"
    w_up: jax.Array  # [num_local_experts, hidden, ffn]
    w_down: jax.Array  # [num_local_experts, ffn, hidden]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class MoEAux:
    """What a layer reports beside its output, over all tokens of all ranks, equal on every rank."""

    load_balancing_loss: jax.Array  # f32 scalar, 1 when tokens and probabilities are spread evenly
    z_loss: jax.Array  # f32 scalar, mean of logsumexp(router logits)^2
    load: jax.Array  # f32 [num_experts], share of the (token, k) entries that chose each expert; sums to 1
    num_dropped: jax.Array  # i32 scalar, rows that did not fit into the capacity


class Routing(NamedTuple):
    """Router's choice for the tokens of one rank."""

    topk_idx: jax.Array  # i32 [num_tokens, num_topk], -1 for masked tokens
    topk_weights: jax.Array  # f32 [num_tokens, num_topk]
    probs: jax.Array  # f32 [num_tokens, num_experts]
    log_z: jax.Array  # f32 [num_tokens], logsumexp of the logits


def route(router: jax.Array, x: jax.Array, config: MoEConfig, mask: jax.Array | None = None) -> Routing:
    """Chooses `num_topk` experts per token by softmax of `x @ router`, all in f32.

    Args:
      router: `[hidden, num_experts]`.
      x: `[num_tokens, hidden]`.
      config: the layer's.
      mask: bool `[num_tokens]`; tokens with False are routed nowhere (`topk_idx` -1).

    Returns:
      A `Routing`. Differentiable with respect to `router` and `x` through weights, probs and log_z.
    """
    logits = jnp.dot(x.astype(jnp.float32), router.astype(jnp.float32), precision=lax.Precision.HIGHEST)
    log_z = jax.nn.logsumexp(logits, axis=-1)
    probs = jnp.exp(logits - log_z[:, None])
    topk_weights, topk_idx = lax.top_k(probs, config.num_topk)
    if config.normalize_weights:
        topk_weights = topk_weights / jnp.sum(topk_weights, axis=-1, keepdims=True)
    if mask is not None:
        topk_idx = jnp.where(mask[:, None], topk_idx, -1)
    return Routing(topk_idx.astype(jnp.int32), topk_weights, probs, log_z)


def moe_block(
    params: MoEParams,
    x: jax.Array,
    config: MoEConfig,
    mask: jax.Array | None = None,
    expert_map: jax.Array | None = None,
) -> tuple[jax.Array, MoEAux]:
    """Routes tokens to experts over the mesh axis, applies them, and sums their weighted outputs.

    `y[t] = sum_k w[t, k] * expert_{idx[t, k]}(x[t])`, where `idx, w` are the router's top-k. Experts that dropped the
    token and masked tokens contribute 0.

    Args:
      params: `MoEParams` of this rank; `router` equal on all ranks.
      x: `[num_tokens, hidden]` this rank's tokens, bf16, f16 or f32; the experts compute in this dtype.
      config: static facts.
      mask: bool `[num_tokens]` or None; tokens with False (padding) are sent nowhere and count in no statistic.
      expert_map: integers `[num_experts, max_replicas]` or None, see `jax_ep.dispatch`; goes with
        `config.num_physical_experts`. The expert arrays of `params` then hold this rank's share of what
        `jax_ep.gather_replicas` makes. Experts without a replica contribute 0.

    Returns:
      y: `[num_tokens, hidden]` of `x`' dtype.
      aux: `MoEAux`. Add `c * aux.load_balancing_loss` (c about 0.01) to the loss so that experts get equal work.

    Raises:
      ValueError, TypeError: as `jax_ep.dispatch` does.

    Notes:
      Call inside `shard_map` over `config.token_axes`. Communication: one dispatch, one combine and one small psum;
      backward one combine and one dispatch. Differentiable in `params` and `x`, deterministic. Works under
      `jax.checkpoint` and `lax.scan`.

    Source: load-balancing loss of Switch Transformer (Fedus et al. 2021, eq. 4-6), extended to top-k by counting all
    (token, k) entries; z-loss of ST-MoE (Zoph et al. 2022, eq. 5).
    """
    routing = route(params.router, x, config, mask)
    recv = dispatch_tokens(x, routing, config, expert_map)
    y = combine_outputs(apply_experts(params, recv, config), recv, config)
    return y, _aux(routing, recv.num_dropped, config, mask)


def dispatch_tokens(x: jax.Array, routing: Routing, config: MoEConfig, expert_map: jax.Array | None = None) -> Recv:
    """`dispatch` as the layer's config says; recv.x is in the dtype of `x` and is what `apply_experts` takes."""
    recv = dispatch(
        x,
        routing.topk_idx,
        routing.topk_weights,
        num_experts=config.num_experts,
        axis_name=config.axis_name,
        layout=config.layout,
        mode=config.mode,
        capacity=config.num_rows(x.shape[0], shapes.num_ranks("moe_block", config.expert_axes)),
        expert_alignment=config.expert_alignment,
        quantize=config.quantize,
        # Grouped products skip the rows past the last group, whatever they hold. A batched product reads every row,
        # and the gradient of its weights would multiply undefined ones by 0, which keeps a NaN.
        zero_tail=config.layout == "batched",
        expert_map=expert_map,
        num_physical_experts=config.num_physical_experts,
        config=config.config,
        implementation=config.implementation,
    )
    if isinstance(recv.x, Quantized):
        recv = dataclasses.replace(recv, x=recv.x.dequantize())
    return recv


def combine_outputs(rows: jax.Array, recv: Recv, config: MoEConfig) -> jax.Array:
    """`combine` of what `apply_experts` made of `recv`."""
    # In layout "token" the experts have applied the weights.
    weights = None if config.layout == "token" else recv.weights
    return combine(rows, recv.handle, weights=weights, quantize=config.quantize_combine)


def _aux(routing: Routing, num_dropped: jax.Array, config: MoEConfig, mask: jax.Array | None) -> MoEAux:
    """Statistics over all ranks, by a single psum of a short vector."""
    is_token = jnp.ones(routing.log_z.shape, jnp.float32) if mask is None else mask.astype(jnp.float32)
    flat = jnp.where(routing.topk_idx < 0, config.num_experts, routing.topk_idx).reshape(-1)
    chosen = jnp.zeros(config.num_experts, jnp.float32).at[flat].add(1.0, mode="drop")
    local = jnp.concatenate(
        [
            chosen,
            is_token @ routing.probs,
            jnp.sum(is_token * jnp.square(routing.log_z), keepdims=True),
            jnp.sum(is_token, keepdims=True),
            num_dropped.astype(jnp.float32)[None],
        ]
    )
    (local,) = _compat.vary_together((local,), config.token_axes)
    total = lax.psum(local, config.token_axes)
    chosen, probs, z, num_tokens, dropped = jnp.split(total, [n := config.num_experts, 2 * n, 2 * n + 1, 2 * n + 2])
    num_tokens = jnp.maximum(num_tokens[0], 1.0)
    load = chosen / (num_tokens * config.num_topk)
    return MoEAux(
        load_balancing_loss=config.num_experts * jnp.dot(load, probs / num_tokens),
        z_loss=z[0] / num_tokens,
        load=load,
        num_dropped=jnp.round(dropped[0]).astype(jnp.int32),
    )


class MoE(nnx.Module):
    """Mixture-of-Experts layer; see `moe_block` for what it computes.

    Parameters are global arrays whose Flax metadata shards the experts over `config.axis_name`:
    `nnx.get_partition_spec` gives the specs, and with `mesh` they are placed at creation.

    Called outside `shard_map` (under `jit`, `grad`), the layer makes its own over `mesh`: `x` is `[..., hidden]`, and
    its flattened leading axes are split over `config.token_axes`. With `expert_map` (traced or not, see `moe_block`)
    the replicas' weights are gathered in the call, and their gradients summed. Called inside a `shard_map` over those
    axes, where the parameters are the local shards, it runs `moe_block` on the local tokens.

    Args:
      config: static facts.
      mesh: concrete mesh with the axes of `config.token_axes`; may be None when all calls are inside `shard_map`.
      param_dtype: dtype of the parameters; the experts compute in the dtype of `x`.
      rngs: Flax random streams; `params` is used.

    Returns (call):
      `(y, aux)`: y of the shape of `x`, aux as `MoEAux`.

    Raises:
      ValueError: called outside `shard_map` without a mesh, or inside with an `expert_map`; mesh and config do not
        fit.
    """

    def __init__(self, config: MoEConfig, *, mesh: Mesh | None = None, param_dtype=jnp.float32, rngs: nnx.Rngs):
        if mesh is not None:
            _check_mesh(config, mesh)
        self.config = config
        self.mesh = mesh
        experts = config.axis_name if isinstance(config.axis_name, str) else tuple(config.axis_name)
        place = {"eager_sharding": False} if mesh is None else {"mesh": mesh}

        def param(*shape, spec):
            scale = 1.0 / math.sqrt(shape[-2])
            value = scale * jax.random.normal(rngs.params(), shape, param_dtype)
            return nnx.Param(value, out_sharding=spec, **place)

        num, hidden, ffn = config.num_experts, config.hidden, config.ffn
        self.router = param(hidden, num, spec=(None, None))
        self.w_gate = param(num, hidden, ffn, spec=(experts, None, None)) if config.activation == "swiglu" else None
        self.w_up = param(num, hidden, ffn, spec=(experts, None, None))
        self.w_down = param(num, ffn, hidden, spec=(experts, None, None))

    def __call__(
        self, x: jax.Array, mask: jax.Array | None = None, expert_map: jax.Array | None = None
    ) -> tuple[jax.Array, MoEAux]:
        tokens = x.reshape(-1, x.shape[-1])
        mask = None if mask is None else mask.reshape(-1)
        run, params = moe_block, self._params()
        if not self._is_inside_shard_map():
            run = self._sharded_block()
            if expert_map is not None:
                replicas = gather_replicas(params[1:], expert_map, self.config.num_physical_experts)
                params = MoEParams(params.router, *replicas)
        elif expert_map is not None:
            raise ValueError(
                "MoE: got expert_map inside shard_map, where a rank has only its own experts' weights to copy; call "
                "the layer outside, or gather_replicas outside and moe_block inside"
            )
        y, aux = run(params, tokens, self.config, mask, expert_map)
        return y.reshape(x.shape), aux

    def _params(self) -> MoEParams:
        w_gate = None if self.w_gate is None else self.w_gate[...]
        return MoEParams(self.router[...], w_gate, self.w_up[...], self.w_down[...])

    def _is_inside_shard_map(self) -> bool:
        manual = jax.sharding.get_abstract_mesh().manual_axes
        return set(self.config.expert_axes) <= set(manual)

    def _sharded_block(self) -> Callable:
        if self.mesh is None:
            raise ValueError(
                f"MoE: called outside shard_map over {self.config.expert_axes} and made without a mesh; call it "
                "inside jax.shard_map, or make the layer with mesh="
            )
        experts, tokens = PartitionSpec(self.config.expert_axes), PartitionSpec(self.config.token_axes)
        w_gate = None if self.w_gate is None else experts
        param_specs = MoEParams(PartitionSpec(), w_gate, experts, experts)

        def block(params, x, config, mask, expert_map):
            return jax.shard_map(
                lambda params, x, mask, expert_map: moe_block(params, x, config, mask, expert_map),
                mesh=self.mesh,
                in_specs=(param_specs, tokens, None if mask is None else tokens, PartitionSpec()),
                out_specs=(tokens, PartitionSpec()),
            )(params, x, mask, expert_map)

        return block


def _check_mesh(config: MoEConfig, mesh: Mesh) -> None:
    missing = [name for name in config.token_axes if name not in mesh.axis_names]
    if missing:
        raise ValueError(
            f"MoE: the mesh has axes {mesh.axis_names}, expected also {tuple(missing)}; rename its axes, or set "
            "MoEConfig.axis_name and data_axes"
        )
    num_ranks = math.prod(mesh.shape[name] for name in config.expert_axes)
    if config.num_experts % num_ranks:
        raise ValueError(
            f"MoE: got num_experts={config.num_experts} over {num_ranks} ranks of {config.expert_axes}, expected a "
            "multiple; change num_experts or the mesh"
        )
