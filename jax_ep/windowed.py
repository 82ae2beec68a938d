"""windowed: an expert layer in bounded memory, whatever the skew: window after window until all rows are served."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jax_ep import _compat, experts, shapes
from jax_ep.combine import combine
from jax_ep.config import Config
from jax_ep.dispatch import dispatch
from jax_ep.layout import Recv


def windowed(
    expert_fn: Callable[[Any, Recv], jax.Array],
    params: Any,
    x: jax.Array,
    topk_idx: jax.Array,
    topk_weights: jax.Array | None,
    *,
    num_experts: int,
    axis_name: str | tuple[str, ...],
    capacity: int | None,
    layout: str = "expert",
    mode: str = "auto",
    expert_alignment: int = 1,
    bias: jax.Array | None = None,
    expert_map: jax.Array | None = None,
    num_physical_experts: int | None = None,
    config: Config | None = None,
    implementation: str | None = None,
) -> jax.Array:
    """Dispatches, runs the experts and combines, `capacity` rows at a time: nothing is ever dropped.

    ::

        out, window = 0, 0  # float32
        repeat:
            recv = dispatch(x, topk_idx, topk_weights, window=window, ...)
            out += combine(expert_fn(params, recv), recv.handle, weights=recv.weights)  # no weights in layout "token"
            window += 1
        until window == recv.num_windows
        return (out + bias) rounded to the dtype of the expert outputs

    All ranks run equally many windows, as many as the fullest of them needs. With one window and without bias this
    is dispatch and combine, bit for bit. With several, a sum of a rank that falls into two windows is rounded to the
    payload dtype in each; in float32 the result differs from a large enough capacity by the order of sums alone.

    Example:
      The layer of `combine`'s example, where rank 0 wants four rows and rank 1 three: two windows of two rows.

      >>> import jax, jax.numpy as jnp, jax_ep
      >>> from jax.sharding import Mesh, PartitionSpec as P
      >>> x = jnp.array([[1.0] * 4, [2.0] * 4, [3.0] * 4, [4.0] * 4])
      >>> topk_idx = jnp.array([[0, 2], [1, 0], [3, -1], [0, 3]])
      >>> topk_weights = jnp.array([[0.75, 0.25], [0.5, 0.5], [1.0, 0.0], [0.25, 0.75]])
      >>> scale = jnp.array([1.0, 2.0, 3.0, 4.0])  # of experts 0 and 1 on rank 0, of 2 and 3 on rank 1
      >>> def experts(scale, recv):
      ...     return recv.x * jnp.repeat(scale, recv.group_sizes, total_repeat_length=len(recv.x))[:, None]
      >>> def layer(scale, *tokens):
      ...     return jax_ep.windowed(experts, scale, *tokens, num_experts=4, axis_name="ep", capacity=2)
      >>> mesh = Mesh(jax.devices()[:2], ("ep",))
      >>> run = jax.jit(jax.shard_map(layer, mesh=mesh, in_specs=P("ep"), out_specs=P("ep")))
      >>> run(scale, x, topk_idx, topk_weights)[:, 0].tolist()
      [1.5, 3.0, 12.0, 13.0]
      >>> loss = lambda scale: run(scale, x, topk_idx, topk_weights)[:, 0].sum()
      >>> jax.grad(loss)(scale).tolist()  # of each expert: the sum of weight * x
      [2.75, 1.0, 0.25, 6.0]

    Args:
      expert_fn: `y = expert_fn(params, recv)` with `recv` as of `dispatch`, one window of rows; y has the shape of
        recv.x, where hidden may differ, in bfloat16, float16 or float32. A row of y must depend on its own row (and
        expert) only. It must contain no collective (psum, another dispatch, ...), not even over other mesh axes,
        whose ranks may run another number of windows. In layout "token" it applies recv.weights, in the others
        combine does. It is traced once, and what it closes over is not differentiated: where that would have to be,
        it is a TypeError.
      params: any pytree of arrays; of this rank's experts, or whatever else `expert_fn` is to be differentiated in.
      x: [num_tokens, hidden] as for `dispatch`.
      topk_idx: [num_tokens, num_topk] as for `dispatch`.
      topk_weights: [num_tokens, num_topk] as for `dispatch`; None: recv.weights is None, and rows are summed as they
        are.
      num_experts: experts of the whole group.
      axis_name: mesh axis of the group, or a tuple of axes.
      capacity: rows of one window, which is what bounds the memory ("batched": of each local expert). A little above
        the usual recv.demand, so that one window is the rule. None: the worst case of `dispatch`.
      layout: "expert", "token" or "batched". Default "expert".
      mode: as for `dispatch`, of every window both ways. "latency" keeps its slots for all tokens, num_ranks *
        num_tokens rows and more, however small a window is; "auto" takes it only while they are small.
      expert_alignment: as for `dispatch`; capacity is a multiple of it.
      bias: [num_tokens, hidden of y] in y's dtype, added once in float32; None: nothing.
      expert_map: as for `dispatch`. `expert_fn` then works on physical experts, and its recv knows no others
        (recv.load counts physical ones there).
      num_physical_experts: as for `dispatch`.
      config: as for `dispatch`.
      implementation: as for `dispatch`.

    Returns:
      [num_tokens, hidden of y] in y's dtype, on the rank that holds the tokens.

    Raises:
      ValueError, TypeError: while tracing, for static mistakes; the text says what was got, what was expected
        and what to change.
      NotImplementedError: under vmap (use `jax.lax.map`).
      EpError: see `jax_ep.errors`; from a call on CUDA devices that fails at run time, or from its set-up.

    Notes:
      Call it inside `jax.shard_map` that binds `axis_name`.
      Differentiable in params, x, topk_weights and bias, reverse mode, once: the number of windows is known at run
        time only, and such a loop has no second derivative. The backward pass runs every window again (dispatch of x,
        `expert_fn`, dispatch of the cotangents, combine of theirs) and sums the gradients over windows in float32.
        For a step with one window that is one dispatch and one `expert_fn` more than dispatch and combine with their
        residuals kept.
      Deterministic: equal inputs give equal bits on every run.
      Memory: what dispatch, `expert_fn` and combine take for `capacity` rows, forward and backward alike: it grows
        neither with the skew nor with the number of windows, and no received row is kept from forward to backward.
        Beside it the slots of latency mode, and the sum [num_tokens, hidden] in float32; backward the sums of all
        gradients in float32, so those of params too.

    Source:
      Own design; the windows are those of `dispatch(window=)`.
    """
    names = shapes.axis_names("windowed", axis_name)
    expert_map, num_experts, num_physical = shapes.physical_experts(
        "windowed", expert_map, num_physical_experts, num_experts, shapes.num_ranks("windowed", names), names
    )
    x = shapes.payload("windowed", "x", x, "[num_tokens, hidden]")
    topk_idx = shapes.topk_idx("windowed", topk_idx, num_experts, x.shape[0])
    if topk_weights is not None:
        topk_weights = shapes.topk_weights("windowed", topk_weights, topk_idx.shape)
    if expert_map is not None:  # once, for all windows and both directions
        topk_idx, _ = experts.choose_replicas(topk_idx, expert_map, num_physical, names)
    leaves, treedef = jax.tree.flatten(params)
    plan = _Plan(
        expert_fn,
        treedef,
        dict(
            num_experts=num_physical,
            axis_name=names,
            capacity=capacity,
            layout=shapes.layout("windowed", layout),
            mode=shapes.mode("windowed", mode),
            expert_alignment=expert_alignment,
            config=config,
            implementation=implementation,
        ),
    )
    # One set of axes for all, so that gradients of what other axes share are summed over them after the loops: ranks
    # of another group may run another number of windows.
    arrays, tree = jax.tree.flatten(([jnp.asarray(a) for a in leaves], x, topk_idx, topk_weights))
    arrays = jax.tree.unflatten(tree, _compat.vary_together(tuple(arrays), names))
    # As a jaxpr, what expert_fn closes over is an operand too: the backward pass may run where it is out of scope.
    window, result = jax.make_jaxpr(functools.partial(_one_window, plan), return_shape=True)(jnp.int32(0), *arrays)
    plan = dataclasses.replace(plan, window=window.jaxpr)
    out = result[0]
    bias = shapes.bias("windowed", bias, out.shape[0], out)
    total = _serve(plan, (out.shape, out.dtype), _closed_over(window.consts), *arrays)
    if bias.shape[0] > 0:
        total, bias = _compat.vary_together((total, bias), names)
        total = total + bias.astype(jnp.float32)
    return total.astype(out.dtype)


@dataclasses.dataclass(frozen=True, eq=False)
class _Plan:
    """What is static: how a window is served."""

    expert_fn: Callable[[Any, Recv], jax.Array]
    treedef: Any  # of params
    settings: dict[str, Any]  # of dispatch
    window: Any = None  # jaxpr of `_one_window`

    def serve(self, closed_over, window, *arrays) -> tuple[jax.Array, jax.Array]:
        """What `_one_window` gives."""
        return jax.core.eval_jaxpr(self.window, closed_over, window, *jax.tree.leaves(arrays))


def _one_window(plan: _Plan, window, leaves, x, topk_idx, weights) -> tuple[jax.Array, jax.Array]:
    """What this window adds to the result, and how many windows there are."""
    recv = dispatch(x, topk_idx, weights, window=window, **plan.settings)
    y = plan.expert_fn(jax.tree.unflatten(plan.treedef, leaves), recv)
    row_weights = None if plan.settings["layout"] == "token" else recv.weights
    return combine(y, recv.handle, weights=row_weights), recv.num_windows


def _over_windows(plan: _Plan, one_window: Callable, like: jax.Array, sums: Any) -> Any:
    """Adds what `one_window(i)` gives for every i below the number of windows, its second result, to `sums`."""
    # What the loop carries varies as the tokens do from the start; so does the number of windows, though equal.
    axes = (*plan.settings["axis_name"], *_compat.varying_axes(like))
    vary = lambda tree: jax.tree.map(lambda a: _compat.vary_together((a,), axes)[0], tree)

    def body(carry):
        window, _, sums = carry
        terms, num_windows = one_window(window)
        sums = jax.tree.map(lambda s, term: s + term.astype(s.dtype), sums, terms)
        return window + 1, *vary((num_windows, sums))

    start = (jnp.int32(0), *vary((jnp.int32(1), sums)))
    return lax.while_loop(lambda carry: carry[0] < carry[1], body, start)[2]


@jax.custom_vjp
def _closed_over(consts: list) -> list:
    """`consts`, which have no derivative: to want one is an error, not 0."""
    return consts


def _closed_over_fwd(consts):
    if any(c.perturbed for c in consts if jnp.issubdtype(c.value.dtype, jnp.inexact)):
        raise TypeError(
            "windowed: expert_fn closes over an array that depends on what is differentiated, expected such arrays in "
            "params; pass it there, or close over jax.lax.stop_gradient of it"
        )
    return [c.value for c in consts], None


_closed_over.defvjp(_closed_over_fwd, lambda _, g: (None,), symbolic_zeros=True)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _serve(plan: _Plan, result: tuple, closed_over, leaves, x, topk_idx, weights) -> jax.Array:
    """The sum over all windows in float32. `result`: shape and dtype of a window's term."""
    one_window = lambda window: plan.serve(closed_over, window, leaves, x, topk_idx, weights)
    return _over_windows(plan, one_window, x, jnp.zeros(result[0], jnp.float32))


def _serve_fwd(plan, result, *operands):
    return _serve(plan, result, *operands), operands


def _serve_bwd(plan, result, residuals, g):
    closed_over, leaves, x, topk_idx, weights = residuals
    g = g.astype(result[1])  # exact: it was widened from there
    is_float = [jnp.issubdtype(a.dtype, jnp.inexact) for a in leaves]

    def one_window(window):
        def serve(floats, x, weights):
            floats = iter(floats)
            merged = [next(floats) if f else a for f, a in zip(is_float, leaves, strict=True)]
            return plan.serve(closed_over, window, merged, x, topk_idx, weights)

        _, pullback, num_windows = jax.vjp(serve, *operands, has_aux=True)
        return pullback(g), num_windows

    operands = [a for f, a in zip(is_float, leaves, strict=True) if f], x, weights
    sums = jax.tree.map(lambda a: jnp.zeros(a.shape, jnp.promote_types(a.dtype, jnp.float32)), operands)
    sums = _over_windows(plan, one_window, x, sums)
    g_floats, g_x, g_weights = jax.tree.map(lambda s, a: s.astype(a.dtype), sums, operands)
    g_floats = iter(g_floats)
    return None, [next(g_floats) if f else None for f in is_float], g_x, None, g_weights


_serve.defvjp(_serve_fwd, _serve_bwd)
