"""Every static rule of the contract, each once; the errors say what was got, what was expected, what to change.

All of them run at trace time, so a mistake never reaches a device. Those of FP8 are in quantize_shapes.py.
"""

from __future__ import annotations

import numbers

import jax
import jax.numpy as jnp
import numpy as np

from jax_ep import _compat
from jax_ep.config import Config
from jax_ep.layout import Handle, Recv, Spec

MAX_TOPK = 32
ROW_UNIT_BYTES = 16
PAYLOAD_DTYPES = ("bfloat16", "float16", "float32")
LAYOUTS = ("expert", "token", "batched")
_INT32_MAX = 2**31 - 1


def round_up(n: int, unit: int) -> int:
    """Smallest multiple of `unit` that is at least `n`."""
    return -(-n // unit) * unit


def default_capacity(
    layout: str, num_ranks: int, num_tokens: int, num_topk: int, num_local_experts: int, expert_alignment: int = 1
) -> int:
    """Rows of the receive array (batched: of each expert) that hold any routing: nothing is dropped."""
    if layout != "expert":  # batched: an expert that repeats within a token may get more rows, and drop them
        return num_ranks * num_tokens
    rows = num_ranks * num_tokens * num_topk + num_local_experts * (expert_alignment - 1)
    return round_up(rows, expert_alignment)


def axis_names(op: str, axis_name) -> tuple[str, ...]:
    """`axis_name` as a tuple of distinct mesh axis names."""
    names = tuple(axis_name) if isinstance(axis_name, (tuple, list)) else (axis_name,)
    if not names or not all(isinstance(n, str) for n in names):
        raise TypeError(
            f"{op}: got axis_name={axis_name!r}, expected the name of the expert-parallel mesh axis, "
            'or a tuple of names, e.g. axis_name="ep"'
        )
    if len(set(names)) != len(names):
        raise ValueError(f"{op}: got axis_name={axis_name!r}, expected distinct names")
    return names


def num_ranks(op: str, names: tuple[str, ...]) -> int:
    """Size of the group; the axes must be bound by a surrounding shard_map."""
    size = _compat.axis_size(names)
    if size is None:
        raise ValueError(
            f"{op}: axis_name={_spell(names)} is not bound here; call {op} inside jax.shard_map over a mesh "
            f"that has axis {_spell(names)}, and among its axis_names if those are given"
        )
    return size


def num_experts(op: str, value, size: int, names: tuple[str, ...], name: str = "num_experts") -> int:
    """Experts of the whole group; every rank holds the same number."""
    if value is None:
        raise TypeError(f"{op}: {name} is missing; pass the number of experts of the whole group")
    value = positive_int(op, name, value, f"a positive multiple of {size}")
    if value % size:
        raise ValueError(
            f"{op}: got {name}={value} over {size} ranks (axis {_spell(names)}), expected a positive multiple "
            f"of {size}; change {name} to e.g. {round_up(value, size)}, or the axis"
        )
    if value > _INT32_MAX // 2:
        raise ValueError(f"{op}: got {name}={value}, expected at most {_INT32_MAX // 2}")
    return value


def positive_int(op: str, name: str, value, expected: str = "1 or more") -> int:
    """A static positive int."""
    if isinstance(value, bool) or not isinstance(value, numbers.Integral):
        raise TypeError(f"{op}: got {name}={value!r}, expected a static int")
    if value < 1:
        raise ValueError(f"{op}: got {name}={value}, expected {expected}")
    return int(value)


def physical_experts(
    op: str, expert_map, value, experts: int | None, size: int, names: tuple[str, ...]
) -> tuple[jax.Array | None, int, int]:
    """The map or None, the logical and the physical number of experts; both are equal without a map."""
    if expert_map is None:
        if value is not None:
            raise TypeError(
                f"{op}: got num_physical_experts={value!r} without expert_map=, expected both or neither; "
                "pass the map, or only num_experts"
            )
        experts = num_experts(op, experts, size, names)
        return None, experts, experts
    if value is None:
        raise TypeError(f"{op}: got expert_map= without num_physical_experts=; pass the static number of its ids")
    experts = num_experts(op, experts, 1, names)  # the ranks divide the physical experts
    return expert_ids(op, expert_map, experts), experts, num_experts(op, value, size, names, "num_physical_experts")


def expert_ids(op: str, expert_map, experts: int | None) -> jax.Array:
    """An expert map as i32 [num_experts, max_replicas]."""
    expert_map = expert_map if isinstance(expert_map, (np.ndarray, jax.Array)) else jnp.asarray(expert_map)
    rows = "num_experts" if experts is None else experts
    if not jnp.issubdtype(expert_map.dtype, jnp.integer):
        raise TypeError(f"{op}: got expert_map of dtype {expert_map.dtype}, expected an integer type; cast it to int32")
    if expert_map.ndim != 2 or 0 in expert_map.shape or (experts is not None and expert_map.shape[0] != experts):
        raise ValueError(
            f"{op}: got expert_map of shape {expert_map.shape}, expected [{rows}, max_replicas]: the physical ids of "
            "each logical expert, padded with -1"
        )
    return _int32(op, "expert_map", expert_map)


def balance(op: str, load, replicas, ranks) -> tuple[np.ndarray, int, int]:
    """Loads as float64 [num_experts], and how many replicas on how many ranks."""
    if isinstance(load, jax.core.Tracer):
        raise TypeError(f"{op}: got a traced load, expected concrete numbers; call it outside jax.jit and shard_map")
    load = np.asarray(load).astype(np.float64)
    if load.ndim != 1 or load.size == 0:
        raise ValueError(f"{op}: got load of shape {load.shape}, expected [num_experts]; sum it over ranks and steps")
    if not np.all(np.isfinite(load) & (load >= 0)):
        raise ValueError(f"{op}: got a load that is negative or not finite, expected numbers >= 0")
    ranks = positive_int(op, "num_ranks", ranks)
    replicas = positive_int(op, "num_replicas", replicas)
    if replicas < load.size or replicas % ranks:
        least = round_up(load.size, ranks)
        raise ValueError(
            f"{op}: got num_replicas={replicas} for {load.size} experts on {ranks} ranks, expected a multiple of "
            f"{ranks} that is at least {load.size}; use e.g. {max(least, round_up(replicas, ranks))}"
        )
    return load, replicas, ranks


def expert_params(op: str, a, experts: int) -> jax.Array:
    """An array of one row per logical expert."""
    a = jnp.asarray(a)
    if a.ndim == 0 or a.shape[0] != experts:
        raise ValueError(
            f"{op}: got an array of shape {a.shape} in params, expected [{experts}, ...] like the rows of expert_map; "
            "call it on the weights of all experts, outside shard_map, and leave out what is no expert's"
        )
    return a


def payload(op: str, name: str, x, shape: str, ndim: int = 2) -> jax.Array:
    """An array of rows that can travel and be summed."""
    if hasattr(x, "dequantize"):
        raise TypeError(f"{op}: got {name} of type {type(x).__name__}, expected an array; pass {name}.dequantize()")
    if x is None or isinstance(x, (dict, tuple)):
        raise TypeError(f"{op}: got {name} of type {type(x).__name__}, expected an array {shape}")
    x = jnp.asarray(x)
    if x.dtype.name not in PAYLOAD_DTYPES:
        raise TypeError(f"{op}: got {name} of dtype {x.dtype}, expected one of {', '.join(PAYLOAD_DTYPES)}; cast it")
    return _rows(op, name, x, shape, ndim)


def opaque_rows(op: str, name: str, data, scale, carrier, quantize) -> tuple:
    """Data, scale and carrier of a `Quantized` that travels as bytes."""
    if quantize is not None:
        raise ValueError(
            f"{op}: got quantize={quantize!r} for {name} that is Quantized already, expected None; remove it, "
            f"or pass {name}.dequantize()"
        )
    data, scale, carrier = jax.tree.map(jnp.asarray, (data, scale, carrier))
    for part, array in (("data", data), ("scale", scale)):
        if array is not None and not _has_whole_bytes(array.dtype):
            raise TypeError(
                f"{op}: got {name}.{part} of dtype {array.dtype}, expected an integer or float type of whole bytes; "
                "pack it into uint8"
            )
    data = _rows(op, f"{name}.data", data, "[num_tokens, hidden]", 2)
    if scale is not None:
        if scale.ndim != 2 or scale.shape[0] != data.shape[0] or scale.shape[1] == 0:
            raise ValueError(
                f"{op}: got {name}.scale of shape {scale.shape}, expected [{data.shape[0]}, width] with a row for each "
                "of data and a width of 1 or more, or None"
            )
        _no_explicit_sharding(op, f"{name}.scale", scale)
    if carrier is not None:
        carrier = payload(op, f"{name}.carrier", carrier, "[num_tokens, hidden]")
        if carrier.shape[0] != data.shape[0]:
            raise ValueError(
                f"{op}: got {name}.carrier of shape {carrier.shape}, expected [{data.shape[0]}, hidden], a row for "
                "each of data"
            )
    return data, scale, carrier


def _has_whole_bytes(dtype) -> bool:
    is_number = jnp.issubdtype(dtype, jnp.integer) or jnp.issubdtype(dtype, jnp.floating)
    return is_number and jax.dtypes.itemsize_bits(dtype) % 8 == 0


def _rows(op: str, name: str, x: jax.Array, shape: str, ndim: int) -> jax.Array:
    if x.ndim != ndim:
        raise ValueError(f"{op}: got {name} of shape {x.shape}, expected {shape}; reshape it to {ndim} dimensions")
    row_bytes = x.shape[-1] * x.dtype.itemsize
    if row_bytes == 0 or row_bytes % ROW_UNIT_BYTES:
        unit = ROW_UNIT_BYTES // x.dtype.itemsize
        raise ValueError(
            f"{op}: got {name} of shape {x.shape} {x.dtype}, rows of {row_bytes} bytes, expected a positive multiple "
            f"of {ROW_UNIT_BYTES} bytes; pad hidden to a multiple of {unit}, e.g. {round_up(max(x.shape[-1], 1), unit)}"
        )
    _no_explicit_sharding(op, name, x)
    return x


def topk_idx(op: str, idx, experts: int, num_tokens: int | None = None) -> jax.Array:
    """The ids as int32 [num_tokens, num_topk]; an id that int32 cannot hold becomes one that is invalid too."""
    if idx is None:
        raise TypeError(f"{op}: topk_idx is missing; pass int ids [num_tokens, num_topk], -1 = not routed")
    idx = idx if isinstance(idx, (np.ndarray, jax.Array)) else jnp.asarray(idx)
    if not jnp.issubdtype(idx.dtype, jnp.integer):
        raise TypeError(f"{op}: got topk_idx of dtype {idx.dtype}, expected an integer type; cast it to int32")
    if idx.ndim != 2 or (num_tokens is not None and idx.shape[0] != num_tokens):
        rows = "num_tokens" if num_tokens is None else num_tokens
        raise ValueError(f"{op}: got topk_idx of shape {idx.shape}, expected [{rows}, num_topk], one row per token")
    limit = min(MAX_TOPK, experts)
    if not 1 <= idx.shape[1] <= limit:
        raise ValueError(
            f"{op}: got num_topk={idx.shape[1]} (topk_idx of shape {idx.shape}), expected 1 to {limit} "
            f"(at most {MAX_TOPK}, and at most num_experts={experts}); route each token to fewer experts"
        )
    return _int32(op, "topk_idx", idx)


def topk_weights(op: str, weights, shape: tuple[int, int]) -> jax.Array:
    """The weights as f32 [num_tokens, num_topk]; absent weights are f32 [0, num_topk]."""
    if weights is None:
        return jnp.zeros((0, shape[1]), jnp.float32)
    return _floats(op, "topk_weights", weights, shape, "the shape of topk_idx")


def window(op: str, value) -> jax.Array:
    """i32 [1]; -1 when absent."""
    if value is None:
        return jnp.full(1, -1, jnp.int32)
    value = value if isinstance(value, jax.Array) else np.asarray(value)
    if value.shape != () or not jnp.issubdtype(value.dtype, jnp.integer):
        raise TypeError(
            f"{op}: got window of shape {value.shape} {value.dtype}, expected an int or an integer scalar, "
            "from 0 to recv.num_windows - 1"
        )
    if not isinstance(value, jax.core.Tracer) and value < 0:
        raise ValueError(f"{op}: got window={value}, expected 0 or more; None delivers the first rows")
    return jnp.maximum(_int32(op, "window", value), 0).reshape(1)


def layout(op: str, value) -> str:
    """A layout that exists."""
    if value not in LAYOUTS:
        raise ValueError(f'{op}: got layout={value!r}, expected "expert", "token" or "batched"')
    return value


def mode(op: str, value) -> str:
    """A mode that exists."""
    if value not in ("auto", "throughput", "latency"):
        raise ValueError(f'{op}: got mode={value!r}, expected "auto", "throughput" or "latency"')
    return value


def implementation(op: str, value) -> str | None:
    """An implementation by name, or None to choose when the program is lowered."""
    if value not in (None, "cuda", "xla"):
        raise ValueError(f'{op}: got implementation={value!r}, expected "cuda", "xla" or None')
    return value


def zero_tail(op: str, value) -> bool:
    """A static bool."""
    if not isinstance(value, (bool, np.bool_)):
        raise TypeError(f"{op}: got zero_tail={value!r}, expected True or False")
    return bool(value)


def config(op: str, value) -> Config:
    """The config, or the default one."""
    if value is None:
        return Config()
    if not isinstance(value, Config):
        raise TypeError(f"{op}: got config of type {type(value).__name__}, expected jax_ep.Config")
    return value


def capacity(
    op: str, value, alignment, layout_: str, size: int, num_tokens: int, num_topk: int, num_local_experts: int
) -> int:
    """Rows of the receive array; also checks `expert_alignment` and that i32 can number the rows."""
    if isinstance(alignment, bool) or not isinstance(alignment, numbers.Integral):
        raise TypeError(f"{op}: got expert_alignment={alignment!r}, expected a static int")
    if alignment < 1:
        raise ValueError(f"{op}: got expert_alignment={alignment}, expected 1 or more")
    if layout_ != "expert" and alignment != 1:
        why = "are not grouped by expert" if layout_ == "token" else "begin at a place of their own for each expert"
        raise ValueError(
            f'{op}: got expert_alignment={alignment} with layout="{layout_}", whose rows {why}; '
            'leave it 1, or use layout="expert"'
        )
    worst = default_capacity("expert", size, num_tokens, num_topk, num_local_experts, alignment)
    if worst > _INT32_MAX:
        raise ValueError(
            f"{op}: got {size} ranks x {num_tokens} tokens x top-{num_topk} = up to {worst} rows on one rank, "
            f"expected at most {_INT32_MAX}; send fewer tokens per call"
        )
    # Every local expert has `capacity` rows of its own in layout "batched", and i32 numbers them all.
    most = _INT32_MAX // num_local_experts if layout_ == "batched" else _INT32_MAX
    if value is None:
        value = default_capacity(layout_, size, num_tokens, num_topk, num_local_experts, alignment)
        if value > most:
            raise ValueError(
                f"{op}: got capacity=None, {value} rows for each of {num_local_experts} local experts, expected at "
                f"most {most}; pass a smaller capacity, or send fewer tokens per call"
            )
        return value
    if isinstance(value, bool) or not isinstance(value, numbers.Integral):
        raise TypeError(f"{op}: got capacity={value!r}, expected a static int or None")
    if not 1 <= value <= most:
        raise ValueError(f"{op}: got capacity={value}, expected 1 to {most}, or None for the worst case")
    if value % alignment:
        raise ValueError(
            f"{op}: got capacity={value} with expert_alignment={alignment}, expected a multiple; "
            f"use capacity={round_up(value, alignment)}"
        )
    return int(value)


def handle(op: str, value) -> Handle:
    """A handle whose group is the one bound here."""
    if isinstance(value, Recv):
        raise TypeError(f"{op}: got a Recv, expected its handle; pass recv.handle")
    if not isinstance(value, Handle):
        raise TypeError(f"{op}: got handle of type {type(value).__name__}, expected recv.handle of a dispatch")
    names = value.spec.axis_name
    size = num_ranks(op, names)
    if size != value.spec.num_ranks:
        raise ValueError(
            f"{op}: got a handle of {value.spec.num_ranks} ranks, but axis {_spell(names)} has {size} here; "
            "use the handle inside the shard_map that made it"
        )
    _arrays_of_rank(op, value)
    return value


def _arrays_of_rank(op: str, value: Handle) -> None:
    # Outside of shard_map a handle's arrays are those of all ranks, or stacked by a scan; nothing else tells.
    spec = value.spec
    num_tokens = value.topk_idx.shape[0] if value.topk_idx.ndim else 0
    num_topk = value.topk_idx.shape[-1] if value.topk_idx.ndim else 0
    num_slots = spec.num_slots(num_tokens)
    expected = dict(
        topk_idx=(num_tokens, num_topk),
        slot=(num_tokens, spec.num_ranks),
        dst_row=(num_tokens, num_topk),
        slot_meta=(num_slots, num_topk),
        slot_token=(num_slots,),
        recv_offsets=(spec.num_ranks + 1,),
        counts=(spec.num_local_experts,),
    )
    for name, shape in expected.items():
        got = getattr(value, name).shape
        if got != shape:
            raise ValueError(
                f"{op}: got a handle whose {name} has shape {got}, expected {shape} on each of {spec.num_ranks} ranks; "
                "bring its arrays into shard_map by the specs by which they left it, and take one of stacked handles"
            )


def rows_of_handle(op: str, name: str, x, rows: int, what: str) -> jax.Array:
    """`x` must have the rows that the handle was made for."""
    x = payload(op, name, x, f"[{what}, hidden]")
    num_rows_of_handle(op, name, x.shape, rows, what)
    return x


def num_rows_of_handle(op: str, name: str, shape: tuple[int, ...], rows: int, what: str) -> None:
    """An array of `shape` must have the rows that the handle was made for."""
    if shape[0] != rows:
        raise ValueError(
            f"{op}: got {name} of shape {shape}, expected [{rows}, hidden] ({what} of this handle); "
            "pass the handle of the dispatch that belongs to it"
        )


def expert_rows(op: str, y, spec: Spec) -> jax.Array:
    """The rows of all experts, flat [num_rows, hidden], from an array that is shaped like recv.x."""
    if spec.layout != "batched":
        return rows_of_handle(op, "y", y, spec.capacity, "capacity")
    y = payload(op, "y", y, "[num_local_experts, capacity, hidden]", 3)
    expected = (spec.num_local_experts, spec.capacity)
    if y.shape[:2] != expected:
        raise ValueError(
            f"{op}: got y of shape {y.shape}, expected [{expected[0]}, {expected[1]}, hidden] (num_local_experts, "
            "capacity of this handle); pass the handle of the dispatch that belongs to it"
        )
    return y.reshape(spec.num_rows, y.shape[2])


def combine_weights(op: str, weights, spec: Spec) -> jax.Array:
    """f32 [num_rows], flat, or f32 [0] when absent."""
    if weights is None:
        return jnp.zeros(0, jnp.float32)
    if spec.layout == "token":
        raise TypeError(
            f'{op}: got weights with layout="token", expected None: a row there is already the sum over its '
            "local experts; apply recv.weights in the expert computation"
        )
    shape = (spec.num_local_experts, spec.capacity) if spec.layout == "batched" else (spec.capacity,)
    return _floats(op, "weights", weights, shape, "the shape of recv.weights").reshape(-1)


def bias(op: str, value, num_tokens: int, y: jax.Array) -> jax.Array:
    """[num_tokens, hidden] in y's dtype, or [0, hidden] when absent."""
    if value is None:
        return jnp.zeros((0, y.shape[1]), y.dtype)
    value = jnp.asarray(value)
    expected = (num_tokens, y.shape[1])
    if value.shape != expected:
        raise ValueError(f"{op}: got bias of shape {value.shape}, expected {expected} ([num_tokens, hidden])")
    if value.dtype != y.dtype:
        raise TypeError(f"{op}: got bias of dtype {value.dtype}, expected {y.dtype} like y; cast it")
    _no_explicit_sharding(op, "bias", value)
    return value


def only_with_routing(op: str, **arguments) -> None:
    """`dispatch(x, handle=)` takes its routing and settings from the handle."""
    for name, (value, default) in arguments.items():
        if value is not None if default is None else value != default:
            raise TypeError(
                f"{op}: got {name}= beside handle=, expected only x, quantize and zero_tail: "
                f"the handle carries routing and settings; remove {name}="
            )


def _int32(op: str, name: str, idx) -> jax.Array:
    # A plain cast would wrap: uint32 2**32 - 1 would become -1, "not routed", without a word.
    info = jnp.iinfo(idx.dtype)
    if info.max > _INT32_MAX or info.min < -_INT32_MAX - 1:
        xp = np if isinstance(idx, np.ndarray) else jnp
        low = max(int(info.min), -_INT32_MAX - 1)
        idx = xp.clip(idx, xp.asarray(low, idx.dtype), xp.asarray(_INT32_MAX, idx.dtype))
    idx = jnp.asarray(idx.astype(np.int32))
    _no_explicit_sharding(op, name, idx)
    return idx


def _floats(op: str, name: str, value, shape: tuple[int, ...], why: str) -> jax.Array:
    value = jnp.asarray(value)
    if not jnp.issubdtype(value.dtype, jnp.floating):
        raise TypeError(f"{op}: got {name} of dtype {value.dtype}, expected a float type (used as float32); cast it")
    if value.shape != shape:
        raise ValueError(f"{op}: got {name} of shape {value.shape}, expected {shape} ({why})")
    _no_explicit_sharding(op, name, value)
    return value.astype(jnp.float32)


def _no_explicit_sharding(op: str, name: str, x) -> None:
    axes = _compat.explicit_axes(x)
    if axes:
        raise ValueError(
            f"{op}: got {name} sharded over explicit mesh axes {', '.join(axes)} that the surrounding shard_map leaves "
            "automatic; name them in its axis_names (make them manual), or reshard the array to be replicated over them"
        )


def _spell(names: tuple[str, ...]) -> str:
    return repr(names[0]) if len(names) == 1 else repr(names)
