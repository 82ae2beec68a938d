"""Replicas of experts: which one serves an entry, how many each expert gets and where, and their weights.

An `expert_map` i32 [num_experts, max_replicas] names the physical experts that hold each logical expert's weights;
anything outside [0, num_physical_experts) is no replica (padding is -1, and may stand in any column). Physical expert
p lives on rank p // (num_physical_experts / num_ranks). The router and the training state know logical experts
only.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jax_ep import _compat, shapes
from jax_ep import layout as layout_lib
from jax_ep.layout import Handle

# An id that stays invalid, so that dispatch counts it: below -1, since what is past the logical experts may well be a
# physical one.
_INVALID = -2


def choose_replicas(
    topk_idx: jax.Array, expert_map: jax.Array, num_physical_experts: int, axis_name: tuple[str, ...]
) -> tuple[jax.Array, jax.Array]:
    """Physical ids of logical ones, and how many entries have an expert without a replica (they become -1).

    Entry (t, k) of rank r takes replica number (r + t) % count of its expert, counting the replicas in the order of
    their columns: a source's tokens go round the replicas, and each source starts at another one. It needs no
    communication, and an expert that a token names twice is the same replica twice.
    """
    num_experts = expert_map.shape[0]
    idx, _ = layout_lib.sanitise(topk_idx, num_experts)
    is_replica = (expert_map >= 0) & (expert_map < num_physical_experts)
    order = jnp.argsort(~is_replica, axis=1, stable=True)
    replicas = jnp.take_along_axis(expert_map, order, axis=1)
    expert = jnp.maximum(idx, 0)
    count = jnp.sum(is_replica, axis=1, dtype=jnp.int32)[expert]
    turn = lax.axis_index(axis_name).astype(jnp.int32) + jnp.arange(idx.shape[0], dtype=jnp.int32)[:, None]
    physical = replicas[expert, turn % jnp.maximum(count, 1)]
    is_masked = (idx >= 0) & (count == 0)
    physical = jnp.where(is_masked, -1, physical)
    physical = jnp.where(idx >= 0, physical, jnp.where(topk_idx == -1, -1, _INVALID))
    return physical, jnp.sum(is_masked, dtype=jnp.int32)


def with_load(handle: Handle, topk_idx: jax.Array, num_experts: int, num_masked: jax.Array | None) -> Handle:
    """`handle` with the load per logical expert and the entries that found no replica.

    The load is counted from the logical ids, beside the exchange: XLA drops it from programs that do not read it.
    """
    idx, _ = layout_lib.sanitise(topk_idx, num_experts)
    load, handle = _compat.vary_with_handle((layout_lib.count_experts(idx, num_experts),), handle)
    stats = handle.stats
    if num_masked is not None:
        stats = stats.at[layout_lib.NUM_MASKED].add(num_masked)
    return dataclasses.replace(handle, stats=stats, load=load)


def balance(load, num_replicas: int, *, num_ranks: int = 1) -> np.ndarray:
    """Gives busy experts more replicas and spreads all replicas over the ranks, greedily.

    Every expert gets one replica; then, until `num_replicas` are given, one more goes to the expert with the largest
    load per replica. This makes the largest load per replica as small as it can be, at most
    sum(load) / (num_replicas - num_experts + 1). Then the replicas, largest load first, go each to the rank with the
    smallest load that has room; every rank gets num_replicas / num_ranks of them. Ties go to the expert with fewer
    replicas, then to the lower number; between ranks to one without this expert, then to the lower number.

    Example:
      Expert 0 has most of the work: of six replicas on two ranks it gets three. Both ranks then have a load of 70.

      >>> import jax_ep
      >>> expert_map = jax_ep.balance([90, 20, 10, 20], 6, num_ranks=2)
      >>> expert_map.tolist()  # rank 0 holds physical experts 0, 1, 2, rank 1 holds 3, 4, 5
      [[0, 1, 3], [4, -1, -1], [2, -1, -1], [5, -1, -1]]

    Args:
      load: [num_experts] numbers >= 0, concrete: how much work each logical expert has, e.g. recv.load summed over
        ranks (`jax.lax.psum`) and steps.
      num_replicas: physical experts in total, at least num_experts and a multiple of num_ranks; what `dispatch`
        takes as num_physical_experts.
      num_ranks: size of the expert-parallel group.

    Returns:
      NumPy i32 [num_experts, num_replicas - num_experts + 1]: the `expert_map` of `dispatch`. Row e holds the
      physical ids of expert e, ascending, then -1. The shape depends on the sizes only, so that a new map does not
      compile a new program.

    Raises:
      ValueError, TypeError: the sizes do not fit, or a load is negative, not finite or traced.

    Notes:
      Runs on the host, outside `jax.jit`, in O(num_replicas * (num_experts + num_ranks)). Deterministic: equal loads
      give equal maps, so every process may compute its own. New maps move weights: see `gather_replicas`.

    Source:
      Greedy replication (minimax apportionment) and longest processing time first scheduling (Graham 1969), as
      DeepSeek's EPLB (https://github.com/deepseek-ai/EPLB) combines them for the same purpose.
    """
    load, num_replicas, num_ranks = shapes.balance("balance", load, num_replicas, num_ranks)
    num_experts = load.shape[0]
    count = np.ones(num_experts, np.int64)
    for _ in range(num_replicas - num_experts):
        per_replica = load / count
        busiest = np.flatnonzero(per_replica == per_replica.max())
        count[busiest[np.argmin(count[busiest])]] += 1

    share = load / count
    room = num_replicas // num_ranks
    rank_load = np.zeros(num_ranks)
    held: list[list[int]] = [[] for _ in range(num_ranks)]  # logical experts of each rank
    for expert in np.argsort(-share, kind="stable"):
        for _ in range(count[expert]):
            rank = min(
                (r for r in range(num_ranks) if len(held[r]) < room), key=lambda r: (rank_load[r], expert in held[r], r)
            )
            held[rank].append(int(expert))
            rank_load[rank] += share[expert]

    expert_map = np.full((num_experts, num_replicas - num_experts + 1), -1, np.int32)
    given = np.zeros(num_experts, np.int64)
    physical = 0
    for experts in held:
        for expert in sorted(experts):
            expert_map[expert, given[expert]] = physical
            given[expert] += 1
            physical += 1
    return expert_map


def gather_replicas(params, expert_map: jax.Array, num_physical_experts: int):
    """Weights of the physical experts from those of the logical ones.

    Along the leading axis of every array::

        out[p] = params[e] where p is in expert_map[e], and 0 where p is in no row

    The gradient of a logical expert is the sum over its replicas.

    Example:
      >>> import jax, jax.numpy as jnp, jax_ep
      >>> expert_map = jnp.array([[0, 2], [1, -1], [3, -1]])  # expert 0 has two replicas
      >>> params = {"scale": jnp.array([10.0, 20.0, 30.0])}
      >>> jax_ep.gather_replicas(params, expert_map, 4)["scale"].tolist()
      [10.0, 20.0, 10.0, 30.0]
      >>> grad = jax.grad(lambda p: jnp.sum(jax_ep.gather_replicas(p, expert_map, 4)["scale"]))(params)
      >>> grad["scale"].tolist()
      [2.0, 1.0, 1.0]

    Args:
      params: pytree of arrays [num_experts, ...].
      expert_map: integers [num_experts, max_replicas], as `dispatch` takes it; no id may be there twice. May be traced.
      num_physical_experts: static int.

    Returns:
      A pytree like params with arrays [num_physical_experts, ...].

    Raises:
      ValueError, TypeError: an array or the map has another shape or type than stated.

    Notes:
      It needs the weights of all experts. Call it on global arrays, outside `jax.shard_map`, under `jax.jit` if you
      like: XLA then moves the weights between ranks (with experts sharded over the leading axis it may gather
      all of them on each rank first). Inside shard_map it works on weights that every rank holds completely,
      never on a rank's slice. When the map changes seldom, gather once and keep the result; while
      training, calling it in every step lets the gradients of the replicas sum into the logical experts.
    """
    expert_map = shapes.expert_ids("gather_replicas", expert_map, None)
    num_experts, max_replicas = expert_map.shape
    num_physical_experts = shapes.positive_int("gather_replicas", "num_physical_experts", num_physical_experts)
    # Where no replica is, and everything out of range, is dropped; negative ids would count from the end.
    target = jnp.where(expert_map < 0, num_physical_experts, expert_map)
    logical = jnp.broadcast_to(jnp.arange(num_experts, dtype=jnp.int32)[:, None], (num_experts, max_replicas))
    source = jnp.full(num_physical_experts, num_experts, jnp.int32).at[target].set(logical, mode="drop")

    def gather(a):
        return shapes.expert_params("gather_replicas", a, num_experts).at[source].get(mode="fill", fill_value=0)

    return jax.tree.map(gather, params)
