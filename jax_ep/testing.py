"""For tests: routings, rows that tell where they came from, tolerances, and an independent NumPy oracle.

The oracle follows the written contract with explicit loops and shares no code with the implementations. Arrays
of all ranks are stacked along a leading rank axis: x [R, T, H], topk_idx [R, T, K].

    case = testing.routing("zipf", num_ranks=4, num_tokens=16, num_topk=3, num_experts=8)
    run = testing.on_ranks(lambda x, idx: jax_ep.dispatch(x, idx, num_experts=8, axis_name="ep"), mesh)
    testing.check_recv(run(x, case), testing.oracle_dispatch(x, case, num_experts=8))
"""

from __future__ import annotations

import dataclasses

import jax
import ml_dtypes
import numpy as np
from jax.sharding import PartitionSpec

from jax_ep.layout import Recv
from jax_ep.testing_fp8 import oracle_dequantize as oracle_dequantize
from jax_ep.testing_fp8 import oracle_quantize as oracle_quantize

ROUTINGS = (
    "uniform",  # distinct experts, uniformly
    "zipf",  # distinct experts, popularity 1 / (e + 1)
    "one_expert",  # every entry of column 0 to expert 0, the others not routed
    "one_rank",  # every token to experts of the last rank only
    "empty_ranks",  # rank 0 sends nothing, and no token goes to the last rank
    "masked",  # half of all entries are -1, in any column
    "no_tokens",  # every entry is -1
    "duplicates",  # experts drawn with replacement, the first two columns equal
    "invalid",  # some entries outside [-1, num_experts)
)
INVALID_IDS = (1 << 20, 2**31 - 1, -2, -(2**31))


def routing(
    kind: str, *, num_ranks: int, num_tokens: int, num_topk: int, num_experts: int, seed: int = 0
) -> np.ndarray:
    """topk_idx i32 [num_ranks, num_tokens, num_topk] of one of `ROUTINGS`."""
    rng = np.random.default_rng([seed, num_ranks, num_tokens, num_topk, num_experts])
    shape = (num_ranks, num_tokens, num_topk)
    num_local = num_experts // num_ranks

    def distinct(popularity):
        noise = rng.gumbel(size=(num_ranks, num_tokens, num_experts)) + np.log(popularity)
        return np.argsort(-noise, axis=-1)[..., :num_topk].astype(np.int32)

    idx = distinct(np.ones(num_experts))
    if kind == "uniform":
        return idx
    if kind == "zipf":
        return distinct(1 / (1 + np.arange(num_experts)))
    if kind == "one_expert":
        idx[:] = -1
        idx[..., 0] = 0
        return idx
    if kind == "one_rank":
        return rng.integers(num_experts - num_local, num_experts, shape).astype(np.int32)
    if kind == "empty_ranks":
        idx[0] = -1
        return np.where(idx // num_local == num_ranks - 1, -1, idx).astype(np.int32)
    if kind == "masked":
        return np.where(rng.random(shape) < 0.5, -1, idx).astype(np.int32)
    if kind == "no_tokens":
        return np.full(shape, -1, np.int32)
    if kind == "duplicates":
        idx = rng.integers(0, num_experts, shape).astype(np.int32)
        idx[..., 1:2] = idx[..., :1]
        return idx
    if kind == "invalid":
        bad = np.array([num_experts, num_experts + 1, *INVALID_IDS], np.int64).astype(np.int32)
        return np.where(rng.random(shape) < 0.3, rng.choice(bad, shape), idx).astype(np.int32)
    raise ValueError(f"got routing {kind!r}, expected one of {', '.join(ROUTINGS)}")


def code_rows(num_ranks: int, num_tokens: int, hidden: int, dtype="float32") -> np.ndarray:
    """Rows x [R, T, H] that differ and name their (rank, token); exact in every payload dtype."""
    rank, token, column = np.ogrid[:num_ranks, :num_tokens, :hidden]
    values = (rank * 83 + token * 29 + (token // 7) * column + column * 5) % 251 - 125
    values = np.broadcast_to(values, (num_ranks, num_tokens, hidden)).copy()
    values[..., 0] = rank[..., 0]
    values[..., 1] = token[..., 0] % 256
    values[..., 2] = token[..., 0] // 256
    return values.astype(jax.numpy.dtype(dtype))


def random_rows(shape: tuple[int, ...], dtype="float32", seed: int = 0) -> np.ndarray:
    """Normal numbers with some large ones that cancel."""
    rng = np.random.default_rng([seed, *shape])
    values = rng.standard_normal(shape)
    values += np.where(rng.random(shape) < 0.1, rng.choice([-256.0, 256.0], shape), 0.0)
    return values.astype(np.float32).astype(jax.numpy.dtype(dtype))


def on_ranks(fn, mesh: jax.sharding.Mesh, axis_name="ep", *, jit: bool = True, check_vma: bool = True):
    """`fn` of one rank's arrays as a function of arrays stacked over ranks; results are stacked too."""
    spec = PartitionSpec(axis_name)

    def local(*args):
        args = jax.tree.map(lambda a: a[0], args)
        return jax.tree.map(lambda a: a[None], fn(*args))

    run = jax.shard_map(local, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=check_vma)
    return jax.jit(run) if jit else run


@dataclasses.dataclass(frozen=True)
class Oracle:
    """What dispatch must return, stacked over ranks; names and shapes as in `Recv` and `Handle`, but rows are flat.

    Row i of local expert l is l * capacity + i in layout "batched". The functions below take flat rows too.
    """

    x: np.ndarray  # [R, rows, H]; rows that hold no token are 0
    weights: np.ndarray | None
    group_sizes: np.ndarray  # zeros but in layout "expert"
    counts: np.ndarray
    stats: np.ndarray  # [R, 8]
    topk_idx: np.ndarray  # [R, T, K] with invalid ids replaced by -1
    slot: np.ndarray
    dst_row: np.ndarray
    slot_meta: np.ndarray
    slot_token: np.ndarray
    recv_offsets: np.ndarray
    layout: str

    @property
    def num_ranks(self) -> int:
        """Size of the group."""
        return self.topk_idx.shape[0]

    @property
    def num_local_experts(self) -> int:
        """Experts of each rank."""
        return self.counts.shape[1]

    @property
    def is_defined(self) -> np.ndarray:
        """Rows of recv.x that are not in a tail, bool [R, rows]; padding inside groups is defined."""
        if self.layout == "batched":
            capacity = self.x.shape[1] // self.num_local_experts
            return (np.arange(capacity) < self.counts[..., None]).reshape(self.num_ranks, -1)
        num_rows = self.group_sizes.sum(1) if self.layout == "expert" else self.recv_offsets[:, -1]
        return np.arange(self.x.shape[1]) < num_rows[:, None]

    def entries(self):
        """(source, token, k, rank, row) of every entry that arrives, in (source, token, k) order."""
        for (source, token, k), expert in np.ndenumerate(self.topk_idx):
            row = self.dst_row[source, token, k]
            if expert >= 0 and row >= 0:
                yield source, token, k, expert // self.num_local_experts, row


def oracle_dispatch(
    x: np.ndarray,
    topk_idx: np.ndarray,
    topk_weights: np.ndarray | None = None,
    *,
    num_experts: int,
    layout: str = "expert",
    capacity: int | None = None,
    expert_alignment: int = 1,
    window: int | None = None,
) -> Oracle:
    """What dispatch must return on all ranks, by loops over tokens and experts."""
    num_ranks, num_tokens, hidden = x.shape
    num_topk = topk_idx.shape[2]
    num_local = num_experts // num_ranks
    is_token = layout == "token"
    if capacity is None:
        capacity = num_ranks * num_tokens
        if layout == "expert":
            rows = capacity * num_topk + num_local * (expert_alignment - 1)
            capacity = -(-rows // expert_alignment) * expert_alignment
    num_slots = capacity if is_token else num_ranks * num_tokens
    num_rows = num_local * capacity if layout == "batched" else capacity
    first = (window or 0) * capacity

    valid = (topk_idx >= 0) & (topk_idx < num_experts)
    invalid = ~valid & (topk_idx != -1)
    idx = np.where(valid, topk_idx, -1).astype(np.int32)
    slot = np.full((num_ranks, num_tokens, num_ranks), -1, np.int32)
    dst_row = np.full(idx.shape, -1, np.int32)
    slot_meta = np.full((num_ranks, num_slots, num_topk), -1, np.int32)
    slot_token = np.full((num_ranks, num_slots), -1, np.int32)
    recv_offsets = np.zeros((num_ranks, num_ranks + 1), np.int32)
    group_sizes = np.zeros((num_ranks, num_local), np.int32)
    counts = np.zeros((num_ranks, num_local), np.int32)
    stats = np.zeros((num_ranks, 8), np.int32)
    recv_x = np.zeros((num_ranks, num_rows, hidden), x.dtype)
    recv_weights = np.zeros((num_ranks, num_rows, num_topk) if is_token else (num_ranks, num_rows), np.float32)

    for d in range(num_ranks):
        demand = outside = num_kept = 0
        for source in range(num_ranks):
            for token in range(num_tokens):
                here = [k for k in range(num_topk) if idx[source, token, k] // num_local == d]
                if not here:
                    continue
                s, demand = demand, demand + 1
                if is_token:
                    s -= first
                    if not 0 <= s < capacity:
                        outside += 1
                        continue
                num_kept += 1
                slot[source, token, d] = s
                slot_token[d, s] = token
                if is_token:
                    recv_x[d, s] = x[source, token]
                    for k in here:
                        local = idx[source, token, k] - d * num_local
                        slot_meta[d, s, k] = local
                        dst_row[source, token, k] = s
                        counts[d, local] += 1
                        if topk_weights is not None:
                            recv_weights[d, s, k] = topk_weights[source, token, k]
            recv_offsets[d, source + 1] = num_kept
        if not is_token:
            demand = 0
            for local in range(num_local):
                entries = np.argwhere(idx == d * num_local + local)  # in (source, token, k) order
                for n, (source, token, k) in enumerate(entries):
                    row = n - first if layout == "batched" else demand + n - first
                    if not 0 <= row < capacity:
                        outside += 1
                        continue
                    row += local * capacity if layout == "batched" else 0
                    counts[d, local] += 1
                    dst_row[source, token, k] = row
                    slot_meta[d, slot[source, token, d], k] = row
                    recv_x[d, row] = x[source, token]
                    if topk_weights is not None:
                        recv_weights[d, row] = topk_weights[source, token, k]
                if layout == "batched":
                    demand = max(demand, len(entries))
                    continue
                end = demand + -(-len(entries) // expert_alignment) * expert_alignment
                group_sizes[d, local] = sum(first <= row < first + capacity for row in range(demand, end))
                demand = end
        dropped = outside if window is None else 0  # another window carries the rest
        stats[d, :6] = demand, dropped, invalid[d].sum(), 0, 1, recv_offsets[d, -1]
    stats[:, 4] = max(1, -(-int(stats[:, 0].max()) // max(capacity, 1)))

    return Oracle(
        x=recv_x,
        weights=None if topk_weights is None else recv_weights,
        group_sizes=group_sizes,
        counts=counts,
        stats=stats,
        topk_idx=idx,
        slot=slot,
        dst_row=dst_row,
        slot_meta=slot_meta,
        slot_token=slot_token,
        recv_offsets=recv_offsets,
        layout=layout,
    )


def oracle_redispatch(oracle: Oracle, x: np.ndarray) -> np.ndarray:
    """The rows of a second tensor along the same routing, [R, rows, H]."""
    recv_x = np.zeros((*oracle.x.shape[:2], x.shape[-1]), x.dtype)
    for source, token, _, rank, row in oracle.entries():
        recv_x[rank, row] = x[source, token]
    return recv_x


def oracle_combine(
    oracle: Oracle,
    y: np.ndarray,
    weights: np.ndarray | None = None,
    bias: np.ndarray | None = None,
    quantize: str | None = None,
    ranks_per_node: int | None = None,
) -> np.ndarray:
    """What combine must return on all ranks: f32 sums per rank in k order, rounded, then f32 in rank order, rounded.

    With several nodes the latter are sums per node, rounded, and then f32 in node order. With quantize="fp8_wire" the
    rounded sums of a rank are quantised before they are summed over the ranks; those of nodes are not.
    """
    nodes = _node_sums(oracle, y, weights, quantize, ranks_per_node)
    if len(nodes) > 1:
        nodes = nodes.astype(y.dtype)
    out = np.zeros(nodes.shape[1:], np.float32)
    for node in nodes:
        out += node.astype(np.float32)
    if bias is not None:
        out += bias.astype(np.float32)
    return out.astype(y.dtype)


def oracle_dispatch_grad(
    oracle: Oracle, g_x: np.ndarray, g_weights: np.ndarray | None = None, ranks_per_node: int | None = None
):
    """Cotangents of x and (with `g_weights`, the cotangent of recv.weights) of topk_weights."""
    grad_x = oracle_combine(oracle, g_x, ranks_per_node=ranks_per_node)
    if g_weights is None:
        return grad_x, None
    grad_weights = np.zeros(oracle.topk_idx.shape, np.float32)
    for source, token, k, rank, row in oracle.entries():
        grad_weights[source, token, k] = g_weights[(rank, row, k) if oracle.layout == "token" else (rank, row)]
    return grad_x, grad_weights


def oracle_combine_grad(oracle: Oracle, y: np.ndarray, g_out: np.ndarray, weights: np.ndarray | None = None):
    """Cotangents of y and (with weights) of weights; the cotangent of the bias is `g_out`."""
    rows = oracle_redispatch(oracle, g_out)
    if weights is None:
        return rows, None
    is_kept = np.zeros(weights.shape, bool)
    for *_, rank, row in oracle.entries():
        is_kept[rank, row] = True
    grad_y = np.where(is_kept, weights, 0)[..., None].astype(np.float32) * rows.astype(np.float32)
    products = np.where(is_kept[..., None], y.astype(np.float32), 0) * rows.astype(np.float32)
    return grad_y.astype(y.dtype), products.sum(-1, dtype=np.float64).astype(np.float32)


def combine_tolerance(
    oracle: Oracle,
    y: np.ndarray,
    weights: np.ndarray | None = None,
    bias: np.ndarray | None = None,
    ranks_per_node: int | None = None,
) -> np.ndarray:
    """Largest difference allowed between two implementations of a weighted combine, [R, T, H].

    K * 2**-23 * sum |w * y| for products that one of them does not round, one payload ulp for each partial sum
    that may then round the other way, for each sum of a node, and for the result.
    """
    num_ranks, num_tokens, num_topk = oracle.topk_idx.shape
    allowed = np.zeros((num_ranks, num_tokens, y.shape[-1]))
    for partial, source, token, _, size in _partials(oracle, y, weights):
        allowed[source, token] += num_topk * 2.0**-23 * size + _ulp(partial)
    allowed = _with_nodes(allowed, _node_sums(oracle, y, weights, None, ranks_per_node), y.dtype)
    return allowed + _ulp(oracle_combine(oracle, y, weights, bias, ranks_per_node=ranks_per_node))


def wire_tolerance(
    oracle: Oracle,
    y: np.ndarray,
    weights: np.ndarray | None = None,
    bias: np.ndarray | None = None,
    ranks_per_node: int | None = None,
) -> np.ndarray:
    """Largest difference that quantize="fp8_wire" may make to a combine, [R, T, H].

    The error of quantising each partial sum, and one ulp for each sum of a node and for the result, which may then
    round the other way.
    """
    out = oracle_combine(oracle, y, weights, bias, ranks_per_node=ranks_per_node)
    allowed = np.zeros(out.shape)
    for partial, source, token, _, _ in _partials(oracle, y, weights):
        scale = np.repeat(oracle_quantize(partial)[1].astype(np.float64), 128, -1)
        exact = np.abs(partial.astype(np.float64))
        allowed[source, token] += np.maximum((2.0**-4 + 2.0**-13) * exact, (2.0**-10 + 2.0**-20) * scale)
    allowed = _with_nodes(allowed, _node_sums(oracle, y, weights, None, ranks_per_node), y.dtype)
    return allowed + _ulp((np.abs(out.astype(np.float64)) + allowed).astype(out.dtype))


def _with_nodes(allowed: np.ndarray, nodes: np.ndarray, dtype) -> np.ndarray:
    """`allowed` for the partial sums, and what the rounding of each node's sum may add to it."""
    if len(nodes) == 1:
        return allowed
    return allowed + sum(_ulp((np.abs(node) + allowed).astype(dtype)) for node in nodes)


def _node_sums(oracle: Oracle, y: np.ndarray, weights, quantize: str | None, ranks_per_node: int | None):
    """Sums in rank order of each node, f32 [nodes, R, T, H], not rounded."""
    num_ranks, num_tokens, _ = oracle.topk_idx.shape
    ranks_per_node = ranks_per_node or num_ranks
    nodes = np.zeros((-(-num_ranks // ranks_per_node), num_ranks, num_tokens, y.shape[-1]), np.float32)
    for partial, source, token, rank, _ in _partials(oracle, y, weights):
        if quantize is not None:
            partial = oracle_dequantize(*oracle_quantize(partial))
        nodes[rank // ranks_per_node, source, token] += partial.astype(np.float32)
    return nodes


def _partials(oracle: Oracle, y: np.ndarray, weights: np.ndarray | None):
    """(rounded partial sum, source, token, rank, sum of |term|) of each kept slot, per token in rank order."""
    num_ranks, num_tokens, num_topk = oracle.topk_idx.shape
    for source, token, rank in np.ndindex(num_ranks, num_tokens, num_ranks):
        slot = oracle.slot[source, token, rank]
        if slot < 0:
            continue
        if oracle.layout == "token":
            row = y[rank, slot]
            yield row, source, token, rank, np.abs(row.astype(np.float64))
            continue
        total = np.zeros(y.shape[-1], np.float32)
        size = np.zeros(y.shape[-1])
        for k in range(num_topk):
            row = oracle.slot_meta[rank, slot, k]
            if row >= 0:
                term = y[rank, row].astype(np.float32)
                if weights is not None:
                    term = np.float32(weights[rank, row]) * term
                total = total + term
                size += np.abs(term)
        yield total.astype(y.dtype), source, token, rank, size


def _ulp(values: np.ndarray) -> np.ndarray:
    """Distance to the next larger magnitude in the dtype of `values`."""
    info = ml_dtypes.finfo(values.dtype)
    magnitude = np.maximum(np.abs(values.astype(np.float64)), float(info.smallest_normal))
    return 2.0 ** (np.floor(np.log2(magnitude)) - info.nmant)


def same_bits(got, expected, what: str = "") -> None:
    """Asserts equal shape, dtype and bits, so -0.0 differs from 0.0 and a NaN equals itself."""
    got, expected = np.asarray(got), np.asarray(expected)
    assert got.dtype == expected.dtype, f"{what}: got dtype {got.dtype}, expected {expected.dtype}"
    assert got.shape == expected.shape, f"{what}: got shape {got.shape}, expected {expected.shape}"
    unsigned = np.dtype(f"u{got.dtype.itemsize}")
    differs = np.ascontiguousarray(got).view(unsigned) != np.ascontiguousarray(expected).view(unsigned)
    if differs.any():
        first = tuple(int(i) for i in np.argwhere(differs)[0])
        raise AssertionError(
            f"{what}: {differs.sum()} of {differs.size} values differ, first at {first}: "
            f"got {got[first]}, expected {expected[first]}"
        )


def within(got, expected, allowed, what: str = "") -> None:
    """Asserts |got - expected| <= allowed, element by element; NaN never passes."""
    difference = np.abs(np.asarray(got).astype(np.float64) - np.asarray(expected).astype(np.float64))
    bad = ~(difference <= allowed)
    if bad.any():
        first = tuple(int(i) for i in np.argwhere(bad)[0])
        raise AssertionError(
            f"{what}: {bad.sum()} of {bad.size} values differ by more than allowed, first at {first}: "
            f"got {np.asarray(got)[first]}, expected {np.asarray(expected)[first]}"
        )


def oracle_replicas(topk_idx: np.ndarray, expert_map: np.ndarray, num_physical_experts: int):
    """Physical ids [R, T, K] of logical ones, and per rank how many entries have an expert without a replica."""
    physical, num_masked = np.full_like(topk_idx, -1), np.zeros(topk_idx.shape[0], np.int32)
    for (rank, token, k), expert in np.ndenumerate(topk_idx):
        if 0 <= expert < len(expert_map):
            replicas = [p for p in expert_map[expert] if 0 <= p < num_physical_experts]
            num_masked[rank] += not replicas
            if replicas:
                physical[rank, token, k] = replicas[(rank + token) % len(replicas)]
    return physical, num_masked


def oracle_load(topk_idx: np.ndarray, num_experts: int) -> np.ndarray:
    """Entries of each rank per expert, i32 [R, num_experts]."""
    load = np.zeros((topk_idx.shape[0], num_experts), np.int32)
    for (rank, _, _), expert in np.ndenumerate(topk_idx):
        if 0 <= expert < num_experts:
            load[rank, expert] += 1
    return load


def check_recv(recv: Recv, oracle: Oracle, *, zero_tail: bool = True, load: np.ndarray | None = None) -> None:
    """Asserts that a `Recv` stacked over ranks equals the oracle, bit for bit, handle included.

    `load` is what recv.load must be; None: that of the oracle's ids (no expert_map).
    """
    layout, (num_ranks, num_rows) = oracle.layout, oracle.x.shape[:2]
    is_batched = layout == "batched"
    rows = (oracle.num_local_experts, num_rows // oracle.num_local_experts) if is_batched else (num_rows,)
    assert recv.x.shape == (num_ranks, *rows, oracle.x.shape[2]), f"recv.x: got shape {recv.x.shape}"
    recv_x = np.asarray(recv.x).reshape(oracle.x.shape)
    for rank, is_defined in enumerate(oracle.is_defined | zero_tail):
        same_bits(recv_x[rank, is_defined], oracle.x[rank, is_defined], f"recv.x of rank {rank}")
    assert (recv.weights is None) == (oracle.weights is None), "recv.weights is there with topk_weights only"
    if oracle.weights is not None:
        weights = oracle.weights.reshape(num_ranks, *rows) if is_batched else oracle.weights
        same_bits(recv.weights, weights, "recv.weights")
    assert (recv.topk_idx is None) == (layout != "token"), 'recv.topk_idx is there in layout "token" only'
    assert (recv.group_sizes is None) == (layout != "expert"), 'recv.group_sizes is there in layout "expert" only'
    if layout == "token":
        same_bits(recv.topk_idx, oracle.slot_meta, "recv.topk_idx")
    if layout == "expert":
        same_bits(recv.group_sizes, oracle.group_sizes, "recv.group_sizes")
    same_bits(recv.counts, oracle.counts, "recv.counts")
    for n, name in enumerate(("demand", "num_dropped", "num_invalid", "num_masked", "num_windows")):
        same_bits(getattr(recv, name), oracle.stats[:, n], f"recv.{name}")
    for name in ("topk_idx", "slot", "dst_row", "slot_meta", "slot_token", "recv_offsets", "group_sizes", "counts"):
        same_bits(getattr(recv.handle, name), getattr(oracle, name), f"handle.{name}")
    same_bits(recv.handle.stats, oracle.stats, "handle.stats")
    if load is None:
        load = oracle_load(oracle.topk_idx, oracle.num_ranks * oracle.num_local_experts)
    same_bits(recv.load, load, "recv.load")
