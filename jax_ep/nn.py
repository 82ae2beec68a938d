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

    Example:
      Eight tokens on each of two ranks, two of four experts each: an expert gets eight rows on average.

      >>> from jax_ep import nn
      >>> config = nn.MoEConfig(hidden=8, ffn=16, num_experts=4, num_topk=2, capacity_factor=1.5)
      >>> config.layout, config.mean_rows(num_tokens=8, num_ranks=2), config.num_rows(num_tokens=8, num_ranks=2)
      ('batched', 8.0, 12)

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
      ValueError, TypeError: a value outside its range. What goes to dispatch, combine and grouped_matmul as it is
        (quantize, mode, implementation, ...) is checked by them when the layer is called.
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
        for name in ("hidden", "ffn", "num_experts", "num_topk"):
            shapes.positive_int("MoEConfig", name, getattr(self, name))
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
        if self.capacity_factor is not None and not 0 < self.capacity_factor < math.inf:
            raise ValueError(f"MoEConfig: got capacity_factor={self.capacity_factor}, expected > 0 and finite, or None")
        if self.num_topk > self.num_experts:
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
        # Without tokens the worst case is none, and a capacity is at least one row.
        return max(min(shapes.round_up(rows, self.expert_alignment), worst), self.expert_alignment)


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

    Example:
      A token whose router probabilities are 0.2, 0.5 and 0.3; the chosen two are scaled to sum to 1.

      >>> import jax.numpy as jnp
      >>> from jax_ep import nn
      >>> config = nn.MoEConfig(hidden=3, ffn=1, num_experts=3, num_topk=2)
      >>> routing = nn.route(jnp.eye(3), jnp.log(jnp.array([[0.2, 0.5, 0.3]])), config)
      >>> routing.topk_idx.tolist(), [round(float(w), 3) for w in routing.topk_weights[0]]
      ([[1, 2]], [0.625, 0.375])

    Args:
      router: `[hidden, num_experts]`, any float type.
      x: `[num_tokens, hidden]`, any float type.
      config: the layer's.
      mask: bool `[num_tokens]`; tokens with False are routed nowhere (`topk_idx` -1).

    Returns:
      A `Routing`. Differentiable with respect to `router` and `x` through weights, probs and log_z.
    """
    if mask is not None:  # what padding holds, NaN included, reaches no statistic and no gradient
        x = jnp.where(mask[:, None], x, jnp.zeros((), x.dtype))
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

    Example:
      Two ranks with two tokens each and four experts, of which expert e multiplies by e + 1.

      >>> import jax, jax.numpy as jnp
      >>> from jax.sharding import Mesh, PartitionSpec as P
      >>> from jax_ep import nn
      >>> config = nn.MoEConfig(hidden=4, ffn=4, num_experts=4, num_topk=1, activation="gelu", axis_name="ep")
      >>> eye = jnp.eye(4)
      >>> w_down = jnp.arange(1.0, 5.0)[:, None, None] * eye
      >>> params = nn.MoEParams(router=eye, w_gate=None, w_up=jnp.stack([eye] * 4), w_down=w_down)
      >>> x = 16 * eye[jnp.array([0, 2, 3, 0])]  # the router chooses these; gelu(16) is 16
      >>> mesh = Mesh(jax.devices()[:2], ("ep",))
      >>> specs = nn.MoEParams(router=P(), w_gate=None, w_up=P("ep"), w_down=P("ep"))
      >>> block = lambda params, x: nn.moe_block(params, x, config)
      >>> run = jax.shard_map(block, mesh=mesh, in_specs=(specs, P("ep")), out_specs=(P("ep"), P()))
      >>> y, aux = jax.jit(run)(params, x)
      >>> y.max(axis=1).tolist(), aux.load.tolist(), int(aux.num_dropped)
      ([16.0, 48.0, 64.0, 16.0], [0.5, 0.0, 0.25, 0.25], 0)

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
      ValueError, TypeError: x, mask and expert_map do not fit the config; and as `jax_ep.dispatch` does.

    Notes:
      Call inside `shard_map` over `config.token_axes`. Communication: one dispatch, one combine and one small psum;
      backward one combine and one dispatch. Differentiable in `params` and `x`, deterministic. Works under
      `jax.checkpoint` and `lax.scan`.

    Source: load-balancing loss of Switch Transformer (Fedus et al. 2021, eq. 4-6), extended to top-k by counting all
    (token, k) entries; z-loss of ST-MoE (Zoph et al. 2022, eq. 5).
    """
    _check_tokens("moe_block", x, mask, expert_map, config)
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

    Example:
      A layer whose four experts are spread over two devices, and a step that trains it.

      >>> import jax, jax.numpy as jnp, jax_ep, optax
      >>> from flax import nnx
      >>> from jax_ep import nn
      >>> mesh = jax_ep.make_mesh({"expert": 2}, "expert", devices=jax.devices()[:2])
      >>> layer = nn.MoE(nn.MoEConfig(hidden=8, ffn=16, num_experts=4), mesh=mesh, rngs=nnx.Rngs(0))
      >>> w_up = layer.w_up[...]
      >>> w_up.shape, w_up.sharding.shard_shape(w_up.shape)
      ((4, 8, 16), (2, 8, 16))
      >>> optimizer = nnx.Optimizer(layer, optax.adam(1e-2), wrt=nnx.Param)
      >>> @nnx.jit
      ... def train_step(layer, optimizer, x):
      ...     def loss_fn(layer):
      ...         y, aux = layer(x)
      ...         return jnp.mean((y - x) ** 2) + 0.01 * aux.load_balancing_loss
      ...     loss, grads = nnx.value_and_grad(loss_fn)(layer)
      ...     optimizer.update(layer, grads)
      ...     return loss
      >>> x = jax.random.normal(jax.random.key(1), (4, 3, 8))  # 12 tokens, six on each device
      >>> losses = [float(train_step(layer, optimizer, x)) for _ in range(20)]
      >>> losses[-1] < losses[0]
      True

    Args:
      config: static facts.
      mesh: concrete mesh with the axes of `config.token_axes`; may be None when all calls are inside `shard_map`.
      param_dtype: dtype of the parameters; the experts compute in the dtype of `x`.
      rngs: Flax random streams; `params` is used.

    Args (call):
      x: `[..., hidden]` bf16, f16 or f32; outside `shard_map` the size of `config.token_axes` divides the number of
        tokens.
      mask: bool, an entry per token, or None; tokens with False are sent nowhere, get 0 and count in no statistic.
      expert_map: as for `moe_block`.

    Returns (call):
      `(y, aux)`: y of the shape and dtype of `x`, aux as `MoEAux`.

    Raises:
      ValueError, TypeError: called outside `shard_map` without a mesh, or inside with an `expert_map`; mesh and config,
        or operands and config, do not fit; and as `jax_ep.dispatch` does.
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
        is_inside = self._is_inside_shard_map()
        if is_inside and expert_map is not None:
            raise ValueError(
                "MoE: got expert_map inside shard_map, where a rank has only its own experts' weights to copy; call "
                "the layer outside, or gather_replicas outside and moe_block inside"
            )
        run = moe_block if is_inside else self._sharded_block()
        num_shards = 1 if is_inside else math.prod(self.mesh.shape[name] for name in self.config.token_axes)
        _check_tokens("MoE", x, mask, expert_map, self.config, num_shards)
        tokens = x.reshape(-1, x.shape[-1])
        mask = None if mask is None else mask.reshape(-1)
        params = self._params()
        if expert_map is not None:
            replicas = gather_replicas(params[1:], expert_map, self.config.num_physical_experts)
            params = MoEParams(params.router, *replicas)
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


def _check_tokens(op: str, x, mask, expert_map, config: MoEConfig, num_shards: int = 1) -> None:
    """What is called must fit the config; `num_shards`: the devices over which the tokens are split here."""
    if x.shape[-1:] != (config.hidden,):
        raise ValueError(
            f"{op}: got x of shape {x.shape}, expected [..., hidden={config.hidden}]; change MoEConfig.hidden, or x"
        )
    num_tokens = math.prod(x.shape[:-1])
    if num_tokens % num_shards:
        raise ValueError(
            f"{op}: got x of shape {x.shape}, {num_tokens} tokens over {num_shards} devices of {config.token_axes}, "
            "expected a multiple; pad the tokens, and pass a mask that is False there"
        )
    if mask is not None and mask.dtype != bool:
        raise TypeError(f"{op}: got mask of dtype {mask.dtype}, expected bool; pass mask.astype(bool)")
    if mask is not None and mask.size != num_tokens:
        raise ValueError(f"{op}: got mask of shape {mask.shape}, expected {x.shape[:-1]}, an entry per token of x")
    if (expert_map is None) != (config.num_physical_experts is None):
        given = "no expert_map" if expert_map is None else "an expert_map"
        raise ValueError(
            f"{op}: got {given} and MoEConfig.num_physical_experts={config.num_physical_experts}, expected both or "
            "neither; the number is what jax_ep.balance was given as num_replicas"
        )


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
