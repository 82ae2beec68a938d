"""Static rules: each mistake raises while tracing, saying what was got, what was expected and what to change.

Nothing here compiles or runs a program: everything goes through `jax.eval_shape`.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, PartitionSpec

import jax_ep
from jax_ep import shapes, testing

X = np.zeros((2, 4, 16), np.float32)
IDX = np.zeros((2, 4, 2), np.int32)


def trace(make_mesh, fn, *args, num_ranks=2):
    """Result types of `fn` on one rank, without compiling."""
    return jax.eval_shape(testing.on_ranks(fn, make_mesh(num_ranks)), *args)


def send(x, idx, weights=None, **kwargs):
    return jax_ep.dispatch(x, idx, weights, **{"num_experts": 4, "axis_name": "ep", **kwargs})


# (argument changes, exception, words of the message: got, expected, remedy)
DISPATCH_MISTAKES = {
    "x rank": ({"x": X[..., 0]}, ValueError, ["shape (4,)", "[num_tokens, hidden]", "reshape"]),
    "x pytree": ({"x": (X, X)}, TypeError, ["x of type tuple", "an array [num_tokens, hidden]"]),
    "x dtype int8": ({"x": X.astype(np.int8)}, TypeError, ["int8", "bfloat16, float16, float32", "cast"]),
    "x row bytes": ({"x": X[..., :6]}, ValueError, ["24 bytes", "16 bytes", "multiple of 4, e.g. 8"]),
    "x no columns": ({"x": X[..., :0]}, ValueError, ["0 bytes", "positive multiple"]),
    "ids missing": ({"idx": None}, TypeError, ["topk_idx is missing"]),
    "ids float": ({"idx": IDX.astype(np.float32)}, TypeError, ["float32", "integer", "cast"]),
    "ids bool": ({"idx": IDX.astype(bool)}, TypeError, ["bool", "integer"]),
    "ids rank": ({"idx": IDX[..., 0]}, ValueError, ["shape (4,)", "[4, num_topk]"]),
    "ids other tokens": ({"idx": IDX[:, :3]}, ValueError, ["shape (3, 2)", "[4, num_topk]"]),
    "no topk": ({"idx": IDX[..., :0]}, ValueError, ["num_topk=0", "1 to 4"]),
    "topk over experts": (
        {"idx": np.zeros((2, 4, 5), np.int32)},
        ValueError,
        ["num_topk=5", "1 to 4", "num_experts=4"],
    ),
    "topk over limit": (
        {"idx": np.zeros((2, 4, 33), np.int32), "num_experts": 64},
        ValueError,
        ["num_topk=33", "1 to 32", "fewer experts"],
    ),
    "weights shape": ({"weights": np.zeros((2, 4, 1), np.float32)}, ValueError, ["(4, 1)", "(4, 2)"]),
    "weights int": ({"weights": IDX}, TypeError, ["int32", "float", "cast"]),
    "experts missing": ({"num_experts": None}, TypeError, ["num_experts is missing"]),
    "experts traced": ({"num_experts": 4.0}, TypeError, ["num_experts=4.0", "static int"]),
    "experts zero": ({"num_experts": 0}, ValueError, ["num_experts=0", "multiple of 2"]),
    "experts odd": ({"num_experts": 5}, ValueError, ["num_experts=5", "2 ranks", "'ep'", "e.g. 6"]),
    "axis missing": ({"axis_name": None}, TypeError, ["axis_name=None", "expected", '"ep"']),
    "axis twice": ({"axis_name": ("ep", "ep")}, ValueError, ["('ep', 'ep')", "distinct"]),
    "axis unknown": ({"axis_name": "tp"}, ValueError, ["'tp' is not bound", "shard_map"]),
    "layout": ({"layout": "row"}, ValueError, ["'row'", '"expert", "token" or "batched"']),
    "mode": ({"mode": "fast"}, ValueError, ["'fast'", '"auto", "throughput" or "latency"']),
    "implementation": ({"implementation": "nccl"}, ValueError, ["'nccl'", '"cuda", "xla" or None']),
    "config": ({"config": {"num_sms": 4}}, TypeError, ["dict", "jax_ep.Config"]),
    "capacity alignment": ({"capacity": 20, "expert_alignment": 8}, ValueError, ["20", "multiple", "capacity=24"]),
    "capacity zero": ({"capacity": 0}, ValueError, ["capacity=0", "1 to"]),
    "capacity float": ({"capacity": 1.5}, TypeError, ["capacity=1.5", "static int"]),
    "alignment zero": ({"expert_alignment": 0}, ValueError, ["expert_alignment=0", "1 or more"]),
    "alignment float": ({"expert_alignment": 8.0}, TypeError, ["expert_alignment=8.0", "static int"]),
    "alignment in token layout": (
        {"layout": "token", "expert_alignment": 8},
        ValueError,
        ["expert_alignment=8", '"token"', "leave it 1"],
    ),
    "alignment in batched layout": (
        {"layout": "batched", "expert_alignment": 8},
        ValueError,
        ["expert_alignment=8", '"batched"', "leave it 1"],
    ),
    "zero_tail": ({"zero_tail": "no"}, TypeError, ["zero_tail='no'", "True or False"]),
    "window negative": ({"window": -1}, ValueError, ["window=-1", "0 or more", "None"]),
    "window float": ({"window": 0.5}, TypeError, ["float64", "integer scalar", "num_windows"]),
    "window rank": ({"window": np.zeros(1, np.int32)}, TypeError, ["shape (1,)", "integer scalar"]),
    "rows of all experts": (
        {"layout": "batched", "capacity": 1 << 30},
        ValueError,
        [f"capacity={1 << 30}", f"1 to {(1 << 30) - 1}"],
    ),
}


@pytest.mark.parametrize("name", DISPATCH_MISTAKES)
def test_dispatch_mistakes(make_mesh, name):
    """B12, B13, B16, B17, B21: bad rank, dtype, size, divisibility, axis."""
    changes, error, words = DISPATCH_MISTAKES[name]
    arguments = {"x": X, "idx": IDX, "weights": None, **changes}
    arrays = {k: arguments.pop(k) for k in ("x", "idx", "weights")}
    present = {k: v for k, v in arrays.items() if v is not None}

    def run(arrays):
        return send(arrays.get("x"), arrays.get("idx"), arrays.get("weights"), **arguments)

    with pytest.raises(error) as caught:
        trace(make_mesh, run, present)
    assert str(caught.value).startswith("dispatch: ")
    for word in words:
        assert word in str(caught.value)


COMBINE_MISTAKES = {
    "rows of another dispatch": ({"y": np.zeros((2, 15, 16), np.float32)}, ValueError, ["(15, 16)", "[16, hidden]"]),
    "y rank": ({"y": X[..., 0]}, ValueError, ["shape (4,)", "[capacity, hidden]"]),
    "y dtype": ({"y": np.zeros((2, 16, 16), np.int32)}, TypeError, ["int32", "bfloat16"]),
    "y row bytes": ({"y": np.zeros((2, 16, 3), np.float32)}, ValueError, ["12 bytes", "16 bytes"]),
    "source weights": ({"weights": np.zeros((2, 4, 2), np.float32)}, ValueError, ["(4, 2)", "(16,)", "recv.weights"]),
    "weights int": ({"weights": np.zeros((2, 16), np.int32)}, TypeError, ["int32", "float"]),
    "bias shape": ({"bias": np.zeros((2, 16), np.float32)}, ValueError, ["(16,)", "(4, 16)"]),
    "bias dtype": ({"bias": np.zeros((2, 4, 16), np.float16)}, TypeError, ["float16", "float32", "cast"]),
}


@pytest.mark.parametrize("name", COMBINE_MISTAKES)
def test_combine_mistakes(make_mesh, name):
    """B44: wrong rows, the source's weights instead of the received ones, a bias that does not fit."""
    changes, error, words = COMBINE_MISTAKES[name]
    arguments = {"y": np.zeros((2, 16, 16), np.float32), **changes}

    def run(x, idx, arguments):
        return jax_ep.combine(handle=send(x, idx).handle, **arguments)

    with pytest.raises(error) as caught:
        trace(make_mesh, run, X, IDX, arguments)
    assert str(caught.value).startswith("combine: ")
    for word in words:
        assert word in str(caught.value)


@pytest.mark.parametrize(
    ("y", "words"),
    [
        (np.zeros((2, 16, 16), np.float32), ["shape (16, 16)", "[num_local_experts, capacity, hidden]", "reshape"]),
        (np.zeros((2, 2, 7, 16), np.float32), ["shape (2, 7, 16)", "[2, 8, hidden]", "handle"]),
    ],
    ids=["flat", "other capacity"],
)
def test_combine_mistakes_in_batched_layout(make_mesh, y, words):
    """Rows there are [num_local_experts, capacity, hidden]."""
    with pytest.raises(ValueError) as caught:
        trace(make_mesh, lambda x, idx, y: jax_ep.combine(y, send(x, idx, layout="batched").handle), X, IDX, y)
    for word in ("combine: ", *words):
        assert word in str(caught.value)


def test_combine_weights_in_token_layout(make_mesh):
    def run(x, idx, w):
        recv = send(x, idx, w, layout="token")
        return jax_ep.combine(recv.x, recv.handle, weights=recv.weights)

    with pytest.raises(TypeError, match=r'weights with layout="token".*expert computation'):
        trace(make_mesh, run, X, IDX, np.zeros(IDX.shape, np.float32))


def test_recv_instead_of_handle(make_mesh):
    with pytest.raises(TypeError, match=r"pass recv\.handle"):
        trace(make_mesh, lambda x, idx: jax_ep.combine(x, send(x, idx)), X, IDX)
    with pytest.raises(TypeError, match="handle of type tuple"):
        trace(make_mesh, lambda x, idx: jax_ep.dispatch(x, handle=(1, 2)), X, IDX)


@pytest.mark.parametrize(
    "extra",
    [
        {"topk_idx": IDX[0]},
        {"topk_weights": X[0, :, :2]},
        {"num_experts": 4},
        {"axis_name": "ep"},
        {"layout": "token"},
        {"mode": "throughput"},
        {"capacity": 8},
        {"expert_alignment": 2},
        {"window": 0},
        {"config": jax_ep.Config()},
        {"implementation": "xla"},
    ],
    ids=lambda extra: next(iter(extra)),
)
def test_routing_arguments_beside_a_handle(make_mesh, extra):
    """With handle= only x, quantize and zero_tail may be given."""
    with pytest.raises(TypeError, match=rf"{next(iter(extra))}= beside handle="):
        trace(make_mesh, lambda x, idx: jax_ep.dispatch(x, handle=send(x, idx).handle, **extra).x, X, IDX)


def test_second_tensor_with_other_tokens(make_mesh):
    """B44: another T."""
    with pytest.raises(ValueError, match=r"\(3, 16\), expected \[4, hidden\]"):
        trace(make_mesh, lambda x, idx: jax_ep.dispatch(x[:3], handle=send(x, idx).handle), X, IDX)


HANDLES = {
    "all ranks' arrays": lambda a: jnp.concatenate([a, a]),
    "stacked": lambda a: jnp.stack([a, a]),
}


@pytest.mark.parametrize("layout", ("expert", "token", "batched"))
@pytest.mark.parametrize("name", HANDLES)
def test_handle_of_several_ranks(make_mesh, name, layout):
    """A handle that came into shard_map by other specs than it left by, or was stacked by a scan."""

    def run(x, idx, use):
        recv = send(x, idx, layout=layout)
        return use(x, recv, jax.tree.map(HANDLES[name], recv.handle))

    uses = {
        "dispatch": lambda x, recv, handle: jax_ep.dispatch(jnp.concatenate([x, x]), handle=handle).x,
        "combine": lambda x, recv, handle: jax_ep.combine(recv.x, handle),
    }
    for op, use in uses.items():
        with pytest.raises(
            ValueError, match=rf"^{op}: got a handle whose \w+ has shape .*, expected .* specs by which"
        ):
            trace(make_mesh, functools.partial(run, use=use), X, IDX)


def test_handle_of_another_group(make_mesh):
    """B44: a handle that left its shard_map."""
    handle = trace(make_mesh, lambda x, idx: send(x, idx).handle, X, IDX)
    handle = jax.tree.map(lambda a: np.zeros((4, *a.shape[1:]), a.dtype), handle)
    with pytest.raises(ValueError, match=r"handle of 2 ranks.*has 4 here"):
        trace(
            make_mesh, lambda x, h: jax_ep.dispatch(x, handle=h), np.zeros((4, 4, 16), np.float32), handle, num_ranks=4
        )


@pytest.mark.parametrize(("num_ranks", "num_experts"), [(3, 256), (4, 10), (4, 2)])
def test_experts_that_ranks_do_not_divide(make_mesh, num_ranks, num_experts):
    """B13: names the number, the axis and its size."""
    x, idx = np.zeros((num_ranks, 4, 16), np.float32), np.zeros((num_ranks, 4, 1), np.int32)
    with pytest.raises(ValueError, match=rf"num_experts={num_experts} over {num_ranks} ranks \(axis 'ep'\)"):
        trace(make_mesh, lambda x, i: send(x, i, num_experts=num_experts), x, idx, num_ranks=num_ranks)


def test_experts_divide_by_the_group_not_the_world(make_mesh):
    """B13: 12 experts on dp 2 x ep 4 work, though 8 devices do not divide them."""
    mesh = make_mesh(2, 4, axis_names=("dp", "ep"))
    spec = PartitionSpec(("dp", "ep"))
    run = jax.shard_map(lambda x, i: send(x, i, num_experts=12).counts, mesh=mesh, in_specs=spec, out_specs=spec)
    assert jax.eval_shape(run, np.zeros((32, 16), np.float32), np.zeros((32, 2), np.int32)).shape == (8 * 3,)


def test_outside_shard_map():
    """B49: names the axis and the remedy, eager and under jit."""
    for call in (send, jax.jit(send)):
        with pytest.raises(ValueError, match=r"'ep' is not bound here; call dispatch inside jax\.shard_map"):
            call(X[0], IDX[0])
    with pytest.raises(ValueError, match=r"routing_layout inside jax\.shard_map"):
        jax_ep.routing_layout(IDX[0], num_experts=4, axis_name="ep")


def test_axis_left_automatic(make_mesh):
    """B49: the axis exists in the mesh, but this shard_map does not bind it."""
    mesh = make_mesh(2, 2, axis_names=("dp", "ep"))
    run = jax.shard_map(
        lambda x: send(x, jnp.zeros((x.shape[0], 1), jnp.int32)).x,
        mesh=mesh,
        in_specs=PartitionSpec("dp"),
        out_specs=PartitionSpec("dp"),
        axis_names={"dp"},
    )
    with pytest.raises(ValueError, match=r"'ep' is not bound here.*axis_names"):
        jax.eval_shape(jax.jit(run), X[0])


def test_explicit_axis_left_automatic():
    """Rows that another explicit mesh axis shards would be exchanged in pieces: refused with the remedy."""
    mesh = jax.make_mesh((2, 2), ("tp", "ep"), axis_types=(AxisType.Explicit, AxisType.Explicit))
    x = jax.device_put(X[0], jax.NamedSharding(mesh, PartitionSpec("ep", "tp")))
    idx = jax.device_put(IDX[0], jax.NamedSharding(mesh, PartitionSpec("ep")))
    spec = PartitionSpec("ep")
    run = jax.shard_map(lambda x, i: send(x, i).x, mesh=mesh, in_specs=spec, out_specs=spec, axis_names={"ep"})
    with pytest.raises(ValueError, match=r"x sharded over explicit mesh axes tp.*axis_names"):
        jax.eval_shape(jax.jit(run), x, idx)


def test_cuda_is_refused_on_cpu(make_mesh):
    """implementation="cuda" never falls back."""
    program = testing.on_ranks(lambda x, i: send(x, i, implementation="cuda").x, make_mesh(2))
    with pytest.raises(ValueError, match=r'implementation="cuda".*lowered for cpu.*None or "xla"'):
        program.lower(X, IDX)


def test_result_types(make_mesh):
    """Shapes and dtypes of every field, all layouts."""
    recv = trace(make_mesh, lambda x, i, w: send(x, i, w, expert_alignment=8), X.astype(np.float16), IDX, X[..., :2])
    capacity = 32  # round_up(2 * 4 * 2 + 2 * 7, 8)
    assert (recv.x.shape, recv.x.dtype) == ((2, capacity, 16), np.float16)
    assert (recv.weights.shape, recv.weights.dtype) == ((2, capacity), np.float32)
    assert recv.topk_idx is None and recv.group_sizes.shape == recv.counts.shape == (2, 2)
    recv = trace(make_mesh, lambda x, i, w: send(x, i, w, layout="token"), X, IDX, X[..., :2])
    assert (recv.x.shape, recv.weights.shape, recv.topk_idx.shape) == ((2, 8, 16), (2, 8, 2), (2, 8, 2))
    assert recv.group_sizes is None and recv.counts.dtype == recv.demand.dtype == np.int32
    recv = trace(make_mesh, lambda x, i, w: send(x, i, w, layout="batched"), X, IDX, X[..., :2])
    assert (recv.x.shape, recv.weights.shape, recv.counts.shape) == ((2, 2, 8, 16), (2, 2, 8), (2, 2))
    assert recv.group_sizes is None and recv.topk_idx is None
    recv = trace(make_mesh, lambda x, i: send(x, i), X, IDX)
    assert recv.weights is None


def test_default_capacity_is_exact_arithmetic():
    """B26: sizes are Python ints, far beyond 32 bits, and i32 row numbers are refused where they would wrap."""
    assert shapes.default_capacity("expert", 64, 4096, 8, 4) == 64 * 4096 * 8
    assert shapes.default_capacity("expert", 8, 4096, 8, 32, 128) == 266240
    assert shapes.default_capacity("token", 64, 4096, 8, 4) == 262144
    assert shapes.default_capacity("batched", 64, 4096, 8, 4) == 262144
    assert shapes.default_capacity("expert", 8192, 1 << 20, 32, 1) == 1 << 38
    x = jax.ShapeDtypeStruct((2, 1 << 26, 16), jnp.bfloat16)
    idx = jax.ShapeDtypeStruct((2, 1 << 26, 16), jnp.int32)
    run = jax.shard_map(
        lambda x, i: send(x[0], i[0], num_experts=16).counts,
        mesh=jax.sharding.Mesh(jax.devices()[:2], ("ep",)),
        in_specs=PartitionSpec("ep"),
        out_specs=PartitionSpec("ep"),
    )
    with pytest.raises(ValueError, match=f"{1 << 31} rows.*at most {(1 << 31) - 1}.*fewer tokens"):
        jax.eval_shape(run, x, idx)


@pytest.mark.parametrize("dtype", ["int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64"])
def test_integer_ids_of_any_width(dtype):
    """B21: equal ids from every integer type; -1 only from signed ones, and nothing wraps to it."""
    with jax.enable_x64(True):
        info = np.iinfo(dtype)
        values = np.array([[0, 3], [5, 7]], dtype)
        for ids in (values, jnp.asarray(values)):
            assert shapes.topk_idx("dispatch", ids, 8).tolist() == values.tolist()
            assert shapes.topk_idx("dispatch", ids, 8).dtype == jnp.int32
        if info.min < 0:
            assert shapes.topk_idx("dispatch", jnp.asarray(values - 4), 8).tolist() == [[-4, -1], [1, 3]]
        extreme = np.array([[info.max, info.min]], dtype)
        for ids in (extreme, jnp.asarray(extreme)):
            high, low = shapes.topk_idx("dispatch", ids, 8).tolist()[0]
            assert high >= 8 and (low == 0 if info.min == 0 else low < -1)


def test_wide_ids_without_x64():
    """B21: NumPy int64 ids are narrowed by us, not by JAX, which would wrap 2**32 - 1 to -1."""
    ids = np.array([[2**32 - 1, 2**32, -(2**32), -1]], np.int64)
    assert not jax.config.jax_enable_x64
    assert shapes.topk_idx("dispatch", ids, 8).tolist() == [[2**31 - 1, 2**31 - 1, -(2**31), -1]]


def test_spec_is_a_value():
    """Static metadata hashes and compares by value: equal calls compile once."""
    spec = jax_ep.layout.Spec(("ep",), 2, 4, "expert", 16, 1, True, "auto", None, jax_ep.Config())
    assert spec == dataclasses.replace(spec) and hash(spec) == hash(dataclasses.replace(spec))
    assert spec != dataclasses.replace(spec, zero_tail=False)
