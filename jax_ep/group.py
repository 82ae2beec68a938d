"""Which device is which rank: from a mesh and the EP axis names to groups of devices.

A *group* is a list of members ``(process_index, local position)`` in rank order; ``rank`` is the position
along the EP axes exactly as ``jax.lax.axis_index(axis_name)`` counts it (a tuple of axes counts major first).
One mesh gives as many groups as its other axes have positions. Members are never device ids: ids are not
contiguous across processes, and a compiled program carries positions, not devices.

Everything here is a pure function of the mesh.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

Member = tuple[int, int]  # (process_index, position among that process's devices)
Groups = tuple[tuple[Member, ...], ...]

_REMEDY = (
    "pass a concrete jax.sharding.Mesh as jax.shard_map(..., mesh=mesh), or make one current with "
    "jax.set_mesh(mesh) around the call"
)


def axis_tuple(axis_name: Any) -> tuple[str, ...]:
    """``axis_name`` as a tuple: a single name, or names in rank order (major first)."""
    return (axis_name,) if isinstance(axis_name, str) else tuple(axis_name)


def member(device: Any) -> Member:
    """``(process_index, position among the process's devices, by id)``: every process computes the same.

    Not ``local_hardware_id``: what one process sees of another's device is no ordinal there (seen on a GPU that
    several processes share).
    """
    try:
        siblings = [d.id for d in device.client.devices() if d.process_index == device.process_index]
    except Exception:  # devices of a topology description, which belong to no process yet
        return int(device.process_index), int(device.id)
    return int(device.process_index), sorted(siblings).index(device.id)


def _grouped_devices(mesh: jax.sharding.Mesh, axis_name: Any) -> np.ndarray:
    """Devices as ``[num_groups, num_ranks]``: the EP axes moved last, in the order of ``axis_name``."""
    axes = axis_tuple(axis_name)
    missing = [a for a in axes if a not in mesh.axis_names]
    if missing:
        raise ValueError(
            f"axis_name {missing[0]!r} is not an axis of the mesh; got axes {tuple(mesh.axis_names)}. "
            "Name the mesh axis (or axes) over which the experts are split."
        )
    if not axes or len(set(axes)) != len(axes):
        raise ValueError(f"axis_name must name one or more distinct mesh axes, got {axes}")
    devices = np.asarray(mesh.devices)
    names = list(mesh.axis_names)
    order = [names.index(a) for a in names if a not in axes] + [names.index(a) for a in axes]
    num_ranks = int(np.prod([devices.shape[names.index(a)] for a in axes]))
    return devices.transpose(order).reshape(-1, num_ranks)


def mesh_groups(mesh: Any, axis_name: Any) -> Groups:
    """The groups of ``mesh`` along ``axis_name``.

    Args:
      mesh: a concrete ``jax.sharding.Mesh``.
      axis_name: one axis name, or a tuple of names in rank order (major first). Any subset of the mesh's axes.

    Returns:
      One tuple of members per group, in rank order. Every device of the mesh is in exactly one group.

    Raises:
      ValueError: the mesh is abstract (it has no devices yet), or an axis is unknown or repeated.

    Example:
      A mesh of 4 devices with axes ``("dp", "ep")`` of size 2, 2, in one process::

        mesh_groups(mesh, "ep") == (((0, 0), (0, 1)), ((0, 2), (0, 3)))
        mesh_groups(mesh, "dp") == (((0, 0), (0, 2)), ((0, 1), (0, 3)))
    """
    if not isinstance(mesh, jax.sharding.Mesh):
        raise ValueError(
            f"the EP group over axis {', '.join(map(repr, axis_tuple(axis_name)))} needs to know its devices, "
            f"but the mesh found while lowering is {type(mesh).__name__} ({mesh}), which has none: {_REMEDY}."
        )
    return tuple(tuple(member(d) for d in row) for row in _grouped_devices(mesh, axis_name))


def lowering_mesh(axis_context: Any, axis_name: Any) -> jax.sharding.Mesh:
    """The concrete mesh of a lowering rule: ``ctx.module_context.axis_context`` inside ``jax.shard_map``.

    A nested or mesh-less ``shard_map`` leaves an abstract mesh there; the current ``jax.set_mesh`` then serves
    if it has the same axes.
    """
    axes = axis_tuple(axis_name)
    mesh = getattr(axis_context, "mesh", None)
    if isinstance(mesh, jax.sharding.Mesh):
        return mesh
    where = f"the EP group over axis {', '.join(map(repr, axes))}"
    if mesh is None:
        raise ValueError(f"{where} is used outside jax.shard_map: {_REMEDY}.")
    current = _current_mesh()
    if current is not None and tuple(current.shape.items()) == tuple(mesh.shape.items()):
        return current
    raise ValueError(
        f"{where} needs to know its devices, but jax.shard_map was given {type(mesh).__name__} with axes "
        f"{dict(mesh.shape)} and no mesh with these axes is current: {_REMEDY}."
    )


def _current_mesh() -> jax.sharding.Mesh | None:
    """The mesh of ``jax.set_mesh``, if one is active in this thread."""
    from jax._src import mesh as mesh_lib

    current = mesh_lib.get_concrete_mesh()
    return current if isinstance(current, jax.sharding.Mesh) and not current.empty else None


def lowering_groups(axis_context: Any, axis_name: Any) -> Groups:
    """``mesh_groups`` of the mesh under which a primitive is being lowered."""
    return mesh_groups(lowering_mesh(axis_context, axis_name), axis_name)


def automatic_axes(axis_context: Any) -> tuple[str, ...]:
    """Mesh axes of more than one device over which the enclosing ``shard_map`` leaves the work to XLA."""
    mesh, manual = axis_context.mesh, axis_context.manual_axes
    return tuple(axis for axis, size in mesh.shape.items() if size > 1 and axis not in manual)


def flat_groups(groups: Groups) -> np.ndarray:
    """``groups`` as the flat int64 attribute ``[num_groups * num_ranks * 2]`` of the FFI targets."""
    return np.asarray(groups, dtype=np.int64).reshape(-1)


def processes(groups: Sequence[Sequence[Member]]) -> tuple[int, ...]:
    """Processes that hold a member of any group, ascending."""
    return tuple(sorted({process for group in groups for process, _ in group}))


def local_devices(groups: Sequence[Sequence[Member]], process_index: int) -> tuple[int, ...]:
    """Positions of ``process_index``'s devices in any group, ascending."""
    return tuple(sorted({device for group in groups for process, device in group if process == process_index}))


def most_devices(groups: Sequence[Sequence[Member]]) -> int:
    """Devices in any group of the process that has most."""
    return max(len(local_devices(groups, process)) for process in processes(groups))


_NVSHMEM_KEY = "nvshmem-"


def is_over_nvshmem(key: str) -> bool:
    """Whether an arena lies in NVSHMEM's symmetric heap, by its name."""
    return key.startswith(_NVSHMEM_KEY)


def arena_key(groups: Groups, shape: Sequence[int], protocol: int | None = None, *, over_nvshmem: bool = False) -> str:
    """Name of the symmetric memory that serves ``groups``: equal in all processes, new for any other placement.

    Args:
      groups: from ``mesh_groups``. The *placement* is part of the key, because JAX's compilation cache ignores
        the device assignment and would otherwise hand an executable to other ranks.
      shape: ``(count_words, staging_bytes, num_slots, num_nodes)``, the size class from
        ``_ffi.arena_shape`` or its kin; calls of different shapes in one size class share an arena.
      protocol: of the extension (default: the one that is built); ranks of different protocols never meet.
      over_nvshmem: rows cross between nodes by NVSHMEM; XLA's instantiate knows it by the name alone.

    Returns:
      32 hexadecimal digits, after a word for those over NVSHMEM.
    """
    if protocol is None:
        from jax_ep import _ffi

        protocol = _ffi.protocol()
    placement = tuple(tuple((int(p), int(d)) for p, d in group) for group in groups)
    text = repr((int(protocol), placement, *(int(n) for n in shape)))
    return (_NVSHMEM_KEY if over_nvshmem else "") + hashlib.sha256(text.encode()).hexdigest()[:32]
