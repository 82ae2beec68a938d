"""The cases that every implementation must pass, against the NumPy oracle.

`ExchangeCases` holds them; a subclass names the implementation and where it runs. Coverage: row order, counts, handle,
dropping, padding, tail, combine's rounding tree and all gradients, over routings, group sizes, layouts, dtypes, FP8,
capacities and alignments. Integers, moved rows and unweighted sums are compared bit for bit.
"""

import dataclasses
import functools

import jax
import numpy as np
import pytest

import jax_ep
from jax_ep import testing

# Compiling is what takes the time on CPU; the tests of single operations compile as users do.
QUICK_COMPILE = {"xla_backend_optimization_level": 0}
LAYOUTS = ("expert", "token", "batched")


@dataclasses.dataclass(frozen=True)
class Sizes:
    """Static sizes of one program; programs are compiled once per value."""

    num_ranks: int
    num_experts: int
    num_tokens: int = 7
    num_topk: int = 3
    hidden: int = 16
    dtype: str = "bfloat16"
    layout: str = "expert"
    capacity: int | None = None
    expert_alignment: int = 1
    zero_tail: bool = True
    quantize: str | None = None  # of dispatch, and "opaque": x travels as a pair of bytes; combine then has "fp8_wire"
    mode: str = "auto"
    is_split: bool = False  # start and done instead of one call
    implementation: str | None = "xla"
    config: jax_ep.Config | None = None
    ranks_per_node: int | None = None  # of the config

    @property
    def wire(self) -> str | None:
        """What combine takes as quantize."""
        return None if self.quantize is None else "fp8_wire"


@dataclasses.dataclass(frozen=True)
class Inputs:
    """Arrays of all ranks for one run."""

    x: np.ndarray
    topk_idx: np.ndarray
    topk_weights: np.ndarray
    x2: np.ndarray
    y: np.ndarray
    weights: np.ndarray
    bias: np.ndarray
    g_recv_x: np.ndarray
    g_recv_weights: np.ndarray
    g_out: np.ndarray


def make_inputs(
    sizes: Sizes, topk_idx: np.ndarray, seed: int = 0, window: int | None = None
) -> tuple[Inputs, testing.Oracle]:
    """Inputs with NaN wherever the contract says that nothing is read, and what dispatch must make of them."""
    s = sizes
    rng = np.random.default_rng(seed)
    x = testing.code_rows(s.num_ranks, s.num_tokens, s.hidden, s.dtype)
    topk_weights = rng.random(topk_idx.shape).astype(np.float32)
    topk_weights[(topk_idx < 0) | (topk_idx >= s.num_experts)] = np.nan
    oracle = testing.oracle_dispatch(
        x,
        topk_idx,
        topk_weights,
        num_experts=s.num_experts,
        layout=s.layout,
        capacity=s.capacity,
        expert_alignment=s.expert_alignment,
        window=window,
    )
    held = np.zeros(oracle.x.shape[:2], bool)
    for *_, rank, row in oracle.entries():
        held[rank, row] = True

    def rows(number):
        values = testing.random_rows(oracle.x.shape, s.dtype, seed + number)
        values[~held] = np.nan
        return values

    weights = rng.random(held.shape).astype(np.float32)
    weights[~held] = np.nan
    g_recv_weights = rng.standard_normal(oracle.weights.shape).astype(np.float32)
    if s.layout == "token":
        g_recv_weights[oracle.slot_meta < 0] = np.nan
    else:
        g_recv_weights[~held] = np.nan
    tokens = x.shape
    inputs = Inputs(
        x=x,
        topk_idx=topk_idx,
        topk_weights=topk_weights,
        x2=testing.random_rows(tokens, s.dtype, seed + 1),
        y=rows(2),
        weights=weights,
        bias=testing.random_rows(tokens, s.dtype, seed + 3),
        g_recv_x=rows(4),
        g_recv_weights=g_recv_weights,
        g_out=testing.random_rows(tokens, s.dtype, seed + 5),
    )
    return inputs, oracle


def as_pair(x) -> jax_ep.Quantized:
    """The bits of x as an opaque pair: integers of x's width, and a side array of three bytes a row."""
    bits = jax.lax.bitcast_convert_type(x, f"uint{8 * x.dtype.itemsize}")
    return jax_ep.Quantized(bits, bits[:, :3].astype("uint8"), x)


def delivered(sizes: Sizes, oracle: testing.Oracle, x: np.ndarray) -> list[np.ndarray]:
    """What dispatch makes of x: rows, or rows and side array."""
    if sizes.quantize is None:
        return [testing.oracle_redispatch(oracle, x)]
    if sizes.quantize == "opaque":
        bits = x.view(f"uint{8 * x.dtype.itemsize}")
        return [testing.oracle_redispatch(oracle, a) for a in (bits, bits[..., :3].astype(np.uint8))]
    data, scale = testing.oracle_quantize(x, "fp8" if sizes.quantize == "fp8_wire" else sizes.quantize)
    data, scale = testing.oracle_redispatch(oracle, data), testing.oracle_redispatch(oracle, scale)
    if sizes.quantize == "fp8_wire":
        return [testing.oracle_dequantize(data, scale, x.dtype)]
    return [data, scale]


def split_dispatch(*args, **kwargs) -> jax_ep.Recv:
    """`dispatch` in two halves."""
    return jax_ep.dispatch_done(jax_ep.dispatch_start(*args, **kwargs))


def split_combine(*args, **kwargs) -> jax.Array:
    """`combine` likewise."""
    return jax_ep.combine_done(jax_ep.combine_start(*args, **kwargs))


def exchange(sizes: Sizes, i: Inputs, window: jax.Array | None = None) -> dict:
    """On one rank: every operation and its gradients."""
    kwargs = dict(
        num_experts=sizes.num_experts,
        axis_name="ep",
        layout=sizes.layout,
        capacity=sizes.capacity,
        expert_alignment=sizes.expert_alignment,
        zero_tail=sizes.zero_tail,
        window=window,
        mode=sizes.mode,
        implementation=sizes.implementation,
        config=sizes.config,
    )
    if sizes.ranks_per_node is not None:
        kwargs["config"] = dataclasses.replace(sizes.config or jax_ep.Config(), ranks_per_node=sizes.ranks_per_node)
    dispatch, combine = (split_dispatch, split_combine) if sizes.is_split else (jax_ep.dispatch, jax_ep.combine)
    result = {}
    quantize = None if sizes.quantize == "opaque" else sizes.quantize

    def send(x, topk_weights):
        rows = as_pair(x) if sizes.quantize == "opaque" else x
        recv = dispatch(rows, i.topk_idx, topk_weights, quantize=quantize, **kwargs)
        has_carrier = isinstance(recv.x, jax_ep.Quantized)
        return (recv.x.carrier if has_carrier else recv.x, recv.weights), recv

    def rows(flat):  # the inputs and what `check` compares number rows flat in every layout
        return flat.reshape(*jax.tree.leaves(recv.x)[0].shape[:-1], *flat.shape[1:])

    _, pullback, recv = jax.vjp(send, i.x, i.topk_weights, has_aux=True)
    result["recv"] = recv
    result["g_x"], result["g_topk_weights"] = pullback((rows(i.g_recv_x), rows(i.g_recv_weights)))

    x2 = as_pair(i.x2) if sizes.quantize == "opaque" else i.x2
    again = dispatch(x2, handle=recv.handle, quantize=quantize, zero_tail=sizes.zero_tail).x
    result["x2"] = jax.tree.map(lambda a: a.reshape(len(i.y), -1), again)

    combine = functools.partial(combine, handle=recv.handle, quantize=sizes.wire)
    result["sum"], pullback = jax.vjp(lambda y, b: combine(rows(y), bias=b), i.y, i.bias)
    result["g_y"], result["g_bias"] = pullback(i.g_out)
    if sizes.layout != "token":
        weighted = lambda y, w: combine(rows(y), weights=rows(w))
        result["weighted"], pullback = jax.vjp(weighted, i.y, i.weights)
        result["g_y_weighted"], result["g_weights"] = pullback(i.g_out)
    return result


def check(sizes: Sizes, result: dict, inputs: Inputs, oracle: testing.Oracle) -> None:
    """Compares the result of `exchange`, stacked over ranks, with the oracle."""
    i, same = inputs, testing.same_bits
    # Indexing a sharded array sums over devices, which keeps neither -0 nor a type without zero.
    result = jax.tree.map(np.asarray, result)
    recv = result["recv"]
    x, *scale = delivered(sizes, oracle, i.x)
    rows = recv.x.data if scale else recv.x
    testing.check_recv(dataclasses.replace(recv, x=rows), dataclasses.replace(oracle, x=x), zero_tail=sizes.zero_tail)
    moved = [("scale", recv.x.scale.reshape(scale[0].shape), *scale)] if scale else []
    x2, *scale2 = delivered(sizes, oracle, i.x2)
    moved.append(("x2", result["x2"].data if scale2 else result["x2"], x2))
    moved += [("scale of x2", result["x2"].scale, *scale2)] if scale2 else []
    moved.append(("g_y", result["g_y"], testing.oracle_redispatch(oracle, i.g_out)))
    for name, got, expected in moved:
        for rank, seen in enumerate(oracle.is_defined | (sizes.zero_tail or name == "g_y")):
            same(got[rank, seen], expected[rank, seen], f"{name} of rank {rank}")
    nodes = dict(ranks_per_node=sizes.ranks_per_node)
    g_x, g_topk_weights = testing.oracle_dispatch_grad(oracle, i.g_recv_x, i.g_recv_weights, **nodes)
    same(result["g_x"], g_x, "gradient of x")
    same(result["g_topk_weights"], g_topk_weights, "gradient of topk_weights")
    expected = testing.oracle_combine(oracle, i.y, bias=i.bias, quantize=sizes.wire, **nodes)
    same(result["sum"], expected, "combine with bias")
    if sizes.wire is not None:
        plain = testing.oracle_combine(oracle, i.y, bias=i.bias, **nodes)
        allowed = testing.wire_tolerance(oracle, i.y, bias=i.bias, **nodes)
        testing.within(result["sum"], plain, allowed, "combine with bias against the unquantised")
    same(result["g_bias"], i.g_out, "gradient of bias")
    if sizes.layout != "token":
        expected = testing.oracle_combine(oracle, i.y, i.weights, **nodes)
        allowed = testing.combine_tolerance(oracle, i.y, i.weights, **nodes)
        if sizes.wire is not None:
            allowed = allowed + testing.wire_tolerance(oracle, i.y, i.weights, **nodes)
        testing.within(result["weighted"], expected, allowed, "weighted combine")
        g_y, g_weights = testing.oracle_combine_grad(oracle, i.y, i.g_out, i.weights)
        same(result["g_y_weighted"], g_y, "gradient of y")
        size = np.abs(i.y.astype(np.float64)) * np.abs(testing.oracle_redispatch(oracle, i.g_out).astype(np.float64))
        allowed = sizes.hidden * 2.0**-22 * np.nansum(size, -1)
        testing.within(result["g_weights"], g_weights, allowed, "gradient of weights")


class ExchangeCases:
    """Subclass it with `implementation`, and `mesh(num_ranks)` where the default does not do."""

    implementation: str | None = None

    def mesh(self, num_ranks: int) -> jax.sharding.Mesh:
        return jax.sharding.Mesh(np.array(jax.devices()[:num_ranks]), ("ep",))

    def run(self, sizes: Sizes, topk_idx: np.ndarray, seed: int = 0) -> dict:
        sizes = dataclasses.replace(sizes, implementation=self.implementation)
        inputs, oracle = make_inputs(sizes, topk_idx, seed)
        program = _program(sizes, self.mesh(sizes.num_ranks))
        result = program(*dataclasses.astuple(inputs))
        check(sizes, result, inputs, oracle)
        return result

    def routing(self, kind: str, sizes: Sizes, seed: int = 0) -> np.ndarray:
        s = sizes
        return testing.routing(
            kind,
            num_ranks=s.num_ranks,
            num_tokens=s.num_tokens,
            num_topk=s.num_topk,
            num_experts=s.num_experts,
            seed=seed,
        )

    @pytest.mark.parametrize("kind", testing.ROUTINGS)
    @pytest.mark.parametrize("layout", LAYOUTS)
    def test_routings(self, num_ranks, layout, kind):
        """B07, B08, B10: every routing on every group size; three experts a rank where 2 and 4 would be easy."""
        sizes = Sizes(num_ranks, 3 * num_ranks, layout=layout, expert_alignment=4 if layout == "expert" else 1)
        self.run(sizes, self.routing(kind, sizes))

    @pytest.mark.parametrize("layout", LAYOUTS)
    def test_minus_one_in_each_column(self, layout):
        """B07: -1 in the first, middle and last column, and whole tokens."""
        sizes = Sizes(3, 9, layout=layout, expert_alignment=4 if layout == "expert" else 1)
        idx = self.routing("uniform", sizes)
        for token in range(sizes.num_topk):
            idx[:, token, token] = -1
        idx[:, -1] = -1
        self.run(sizes, idx)

    @pytest.mark.parametrize("idle", ["first sends none", "last sends none", "none sends"])
    def test_rank_without_tokens(self, idle):
        """B01: a rank without tokens takes part, receives and computes for the others."""
        sizes = Sizes(4, 12, expert_alignment=4)
        idx = self.routing("uniform", sizes)
        idx[{"first sends none": 0, "last sends none": -1, "none sends": slice(None)}[idle]] = -1
        for seed in range(3):
            self.run(sizes, idx, seed)

    def test_valid_tokens_differ_between_ranks(self):
        """B05: ragged inputs, as -1 rows."""
        sizes = Sizes(4, 12, expert_alignment=4)
        idx = self.routing("uniform", sizes)
        for rank, num_valid in enumerate((7, 1, 5, 3)):
            idx[rank, num_valid:] = -1
        self.run(sizes, idx)

    @pytest.mark.parametrize("num_tokens", [1, 2, 33])
    def test_token_counts(self, num_tokens):
        """B05, B25: any number of tokens, no multiple of anything."""
        sizes = Sizes(2, 4, num_tokens=num_tokens, num_topk=2, expert_alignment=2)
        self.run(sizes, self.routing("masked", sizes))

    @pytest.mark.parametrize(
        ("layout", "quantize"), [("expert", None), ("token", "fp8_wire"), ("batched", "fp8_ue8m0"), ("token", "opaque")]
    )
    def test_arrays_without_tokens(self, layout, quantize):
        """B01, B27: arrays of literally no token, which XLA hands over as null; received rows there are, all zero."""
        capacity = None if layout == "expert" else 4
        sizes = Sizes(2, 4, num_tokens=0, num_topk=2, hidden=128, layout=layout, quantize=quantize, capacity=capacity)
        sizes = dataclasses.replace(sizes, expert_alignment=4 if layout == "expert" else 1)
        self.run(sizes, self.routing("uniform", sizes))

    @pytest.mark.parametrize("num_topk", [1, 9, 32])
    def test_topk_up_to_the_limit(self, num_topk):
        """B12: k = 1, more than 8, the limit, which is num_experts here."""
        sizes = Sizes(2, 32, num_tokens=5, num_topk=num_topk)
        self.run(sizes, self.routing("uniform", sizes))

    def test_many_experts(self):
        """B20: many more experts than tokens."""
        sizes = Sizes(2, 512, num_tokens=16, num_topk=2)
        self.run(sizes, self.routing("uniform", sizes))

    @pytest.mark.parametrize(
        ("dtype", "layout", "num_ranks"),
        [
            ("float16", "expert", 1),
            ("float16", "token", 3),
            ("float16", "batched", 3),
            ("float32", "expert", 3),
            ("float32", "token", 1),
        ],
    )
    def test_payload_dtypes(self, dtype, layout, num_ranks):
        """B17, B30: each dtype keeps its bits and its own rounding; R = 1 leaves XLA most room to keep precision."""
        sizes = Sizes(num_ranks, 6, dtype=dtype, hidden=8, layout=layout)
        for kind in ("zipf", "duplicates"):
            self.run(sizes, self.routing(kind, sizes))

    @pytest.mark.parametrize("kind", ["one_rank", "zipf", "uniform"])
    @pytest.mark.parametrize(
        ("layout", "capacity", "alignment"),
        [("expert", 16, 16), ("expert", 8, 1), ("token", 5, 1), ("batched", 3, 1)],
    )
    def test_too_little_capacity(self, layout, capacity, alignment, kind):
        """B23: rows beyond the capacity go in the sorted order, are counted, and give 0 in sums and gradients."""
        sizes = Sizes(4, 8, layout=layout, capacity=capacity, expert_alignment=alignment)
        result = self.run(sizes, self.routing(kind, sizes))
        if kind == "one_rank":
            assert int(result["recv"].num_dropped[-1]) > 0

    def test_capacity_exactly_at_demand(self):
        """B23: demand == capacity loses nothing; one unit less drops."""
        alignment = 8
        sizes = Sizes(2, 4, num_topk=2, expert_alignment=alignment)
        idx = self.routing("one_rank", sizes)
        rows = np.bincount(idx.reshape(-1), minlength=4)
        demand = int(sum(-(-n // alignment) * alignment for n in rows))
        exact = self.run(dataclasses.replace(sizes, capacity=demand), idx)
        assert int(exact["recv"].demand[1]) == demand and int(exact["recv"].num_dropped[1]) == 0
        less = self.run(dataclasses.replace(sizes, capacity=demand - alignment), idx)
        assert int(less["recv"].num_dropped[1]) > 0

    def test_padding_alone_exceeds_capacity(self):
        """B23: padded demand > capacity >= raw demand."""
        sizes = Sizes(2, 4, num_topk=2, expert_alignment=16, capacity=16)
        idx = np.full((2, sizes.num_tokens, 2), -1, np.int32)
        idx[0, :3, 0], idx[1, :2, 1] = 0, 1
        recv = self.run(sizes, idx)["recv"]
        assert recv.demand.tolist() == [32, 0] and recv.num_dropped.tolist() == [2, 0]

    @pytest.mark.parametrize("layout", LAYOUTS)
    def test_undefined_tail(self, layout):
        """zero_tail=False leaves rows past the last group (of every expert: batched) undefined, gradients exact."""
        sizes = Sizes(2, 6, layout=layout, zero_tail=False)
        self.run(sizes, self.routing("masked", sizes))

    @pytest.mark.parametrize(
        ("quantize", "layout", "num_ranks", "dtype"),
        [
            ("fp8", "expert", 3, "bfloat16"),
            ("fp8", "batched", 2, "float16"),
            ("fp8_ue8m0", "expert", 1, "float32"),
            ("fp8_ue8m0", "token", 2, "bfloat16"),
            ("fp8_wire", "batched", 1, "bfloat16"),
            ("fp8_wire", "token", 4, "float16"),
            ("opaque", "expert", 4, "bfloat16"),
            ("opaque", "token", 3, "float32"),
        ],
    )
    def test_quantised(self, quantize, layout, num_ranks, dtype):
        """B27: FP8 rows with their scales and opaque pairs, with padding, empty ranks and drops; exact gradients."""
        sizes = Sizes(num_ranks, 3 * num_ranks, hidden=256, dtype=dtype, layout=layout, quantize=quantize)
        capacity = 16 if num_ranks > 1 else None
        sizes = dataclasses.replace(sizes, capacity=capacity, expert_alignment=4 if layout == "expert" else 1)
        for kind in ("masked", "one_rank", "empty_ranks" if num_ranks > 1 else "duplicates"):
            self.run(sizes, self.routing(kind, sizes))

    def test_repeated_calls(self):
        """Call 1, 2, 3 of one program with changing routing: fresh memory is often zero, so the first proves little."""
        sizes = Sizes(3, 9, expert_alignment=4)
        for seed in range(3):
            self.run(sizes, self.routing("zipf", sizes, seed), seed)


@functools.cache
def _program(sizes: Sizes, mesh: jax.sharding.Mesh):
    run = testing.on_ranks(lambda *arrays: exchange(sizes, Inputs(*arrays)), mesh, jit=False)
    return jax.jit(run, compiler_options=QUICK_COMPILE)
