"""Where ranks are: hosts of a mesh's devices, a mesh whose EP groups stay inside hosts, and what crosses hosts.

A *host* is what ranks reach each other in by load and store: one machine and one network namespace, as
`records.host_identity` says it. Processes exchange these identities; numbers of processes or devices say nothing about
hosts, since launchers number processes as they like and hosts may have unequal numbers of devices.
"""

from __future__ import annotations

import dataclasses
import logging
import math
import time
from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from jax_ep import errors, group, records

logger = logging.getLogger("jax_ep")


def make_mesh(
    axis_sizes: Mapping[str, int],
    ep_axis: str | Sequence[str] = "ep",
    *,
    devices: Sequence[Any] | None = None,
    timeout_s: float = 300.0,
) -> jax.sharding.Mesh:
    """A mesh whose EP groups lie inside one host wherever the devices allow it.

    Rows that stay inside a host take NVLink or memory; those that leave it take the network. So each host forms as
    many EP groups of its own as it can, and the other axes run over what remains of the host and then over hosts.
    Devices that are left over on hosts, or all devices if no host holds a group, form groups over several hosts:
    whole hosts in order where they fill a group. `place` is the rule.

    Example:
      Four devices of one process, as two groups of two ranks:

      >>> import jax, jax_ep
      >>> mesh = jax_ep.make_mesh({"dp": 2, "ep": 2}, devices=jax.devices()[:4])
      >>> mesh.axis_names, [[device.id for device in row] for row in mesh.devices]
      (('dp', 'ep'), [[0, 1], [2, 3]])

      On two hosts whose processes are numbered in turns (0 and 2 on one, 1 and 3 on the other, a device each) the same
      call gives the groups (0, 2) and (1, 3), where `jax.make_mesh` would let both groups span the hosts.

    Args:
      axis_sizes: name and size of each mesh axis, in the order of the mesh; the product is the number of devices.
      ep_axis: the axis of the EP group, or several in rank order (major first): what `dispatch` takes as axis_name.
      devices: default: `jax.devices()`, those of all processes.
      timeout_s: seconds to wait for another process's host identity.

    Returns:
      A `jax.sharding.Mesh`, the same in every process whatever the order of `devices`. Inside a group, ranks of a
      host are neighbours, ordered by process and device id.

    Raises:
      ValueError: the sizes do not fit the devices, or `ep_axis` is not among the axes.
      SetupTimeout: a process that has devices in the mesh published no identity in time.
      SetupError: a device belongs to a process outside this job.

    Notes:
      Runs on the host, outside `jax.jit`. In a job of several processes every process with devices in the mesh has
      to call it, after ``jax.distributed.initialize``. Axes are of type Auto; for others make
      ``jax.sharding.Mesh(mesh.devices, mesh.axis_names, axis_types=...)`` of the result.

    Source:
      The aim is that of `jax.experimental.mesh_utils.create_hybrid_device_mesh`; hosts come from exchanged
      identities here, and may have unequal numbers of devices.
    """
    devices = sorted(jax.devices() if devices is None else devices, key=lambda d: (d.process_index, d.id))
    names, ep_axes = tuple(axis_sizes), group.axis_tuple(ep_axis)
    sizes = tuple(int(axis_sizes[name]) for name in names)
    if min(sizes, default=0) < 1 or math.prod(sizes) != len(devices):
        raise ValueError(
            f"axis_sizes={dict(axis_sizes)} makes a mesh of {math.prod(sizes)} devices, but there are {len(devices)}; "
            "choose positive sizes whose product is the number of devices, or pass devices="
        )
    if not ep_axes or len(set(ep_axes)) != len(ep_axes) or not set(ep_axes) <= set(names):
        raise ValueError(f"ep_axis={ep_axis!r} must name one or more distinct axes of axis_sizes, got axes {names}")
    by_process = exchange_hosts({d.process_index for d in devices}, timeout_s)
    hosts = [by_process[d.process_index] for d in devices]
    num_ranks = math.prod(sizes[names.index(a)] for a in ep_axes)
    groups = place(hosts, num_ranks)
    spanning = sum(len({hosts[i] for i in one}) > 1 for one in groups)
    if spanning and num_ranks <= max(map(hosts.count, hosts)):
        logger.warning(
            "%d of %d EP groups span hosts, although a host has room for %d ranks: the numbers of devices per host are "
            "no multiples of it",
            spanning, len(groups), num_ranks,
        )  # fmt: skip
    order = [a for a in names if a not in ep_axes] + list(ep_axes)
    grid = np.empty(len(devices), dtype=object)
    grid[:] = [devices[i] for one in groups for i in one]
    grid = grid.reshape([sizes[names.index(a)] for a in order]).transpose([order.index(a) for a in names])
    return jax.sharding.Mesh(grid, names)


def place(hosts: Sequence[Hashable], num_ranks: int) -> list[list[int]]:
    """Splits devices into groups of `num_ranks` that span as few hosts as a simple rule finds.

    First every host, in the order in which hosts appear, fills groups of its own. What is left on the hosts is put
    together, the largest remainder first: a group takes whole remainders while they fit (of equal ones the earlier),
    and only where none fits, a part of the smallest one. So if no host holds a group, groups take whole hosts in order.

    Example:
      >>> place(["a", "b", "a", "b"], 2)
      [[0, 2], [1, 3]]
      >>> place(["a", "a", "b", "b", "c", "c", "d", "d"], 4)  # no host holds a group
      [[0, 1, 2, 3], [4, 5, 6, 7]]

    Args:
      hosts: the host of each device, in device order; anything hashable.
      num_ranks: size of a group; divides the number of devices.

    Returns:
      Positions in `hosts`, one list per group; groups by their first device's host, devices in it by host, then as
      given. A pure function: equal arguments give equal groups.
    """
    if num_ranks < 1 or len(hosts) % num_ranks:
        raise ValueError(f"{len(hosts)} devices cannot be split into groups of num_ranks={num_ranks}")
    left: dict[Hashable, list[int]] = {}
    for device, host in enumerate(hosts):
        left.setdefault(host, []).append(device)
    host_order = {host: number for number, host in enumerate(left)}
    groups = []
    for members in left.values():
        while len(members) >= num_ranks:
            groups.append(members[:num_ranks])
            del members[:num_ranks]
    while any(left.values()):
        one: list[int] = []
        for members in sorted(left.values(), key=len, reverse=True):  # stable: equal ones in order
            if len(one) + len(members) <= num_ranks:
                one += members
                members.clear()
        if len(one) < num_ranks:
            part = min((m for m in left.values() if m), key=len)
            taken = num_ranks - len(one)
            one += part[:taken]
            del part[:taken]
        groups.append(sorted(one, key=lambda device: (host_order[hosts[device]], device)))
    return sorted(groups, key=lambda one: (host_order[hosts[one[0]]], one))


def exchange_hosts(processes: set[int], timeout_s: float = 300.0) -> dict[int, str]:
    """Host identity of each of `processes`; publishes this process's own one first.

    Raises:
      SetupTimeout, SetupError: as `make_mesh`.
    """
    world = records.current_world()
    own = records.host_identity()
    records.publish_text(world, f"host/{world.process_index}", own)
    deadline = time.monotonic() + timeout_s
    found = {}
    for process in sorted(processes):
        if process >= world.num_processes:
            raise errors.SetupError(
                f"the mesh has devices of process {process}, but this job has {world.num_processes} process(es); "
                "call jax.distributed.initialize first, or pass devices of this job"
            )
        if process == world.process_index:
            found[process] = own
            continue
        text = records.collect_text(world, f"host/{process}", deadline)
        if text is None:
            raise errors.SetupTimeout(
                f"process {process} published no host identity within {timeout_s:g} s; every process with devices in "
                "the mesh must call this function"
            )
        found[process] = text
    return found


def mesh_hosts(mesh: jax.sharding.Mesh, ep_axis: str | Sequence[str] = "ep", *, timeout_s: float = 300.0) -> np.ndarray:
    """The host of each rank of a mesh, as a number.

    Example:
      Two groups of two ranks, all in one process:

      >>> import jax, jax_ep
      >>> mesh = jax_ep.make_mesh({"dp": 2, "ep": 2}, devices=jax.devices()[:4])
      >>> jax_ep.topology.mesh_hosts(mesh).tolist()
      [[0, 0], [0, 0]]

      Of the second mesh in `make_mesh`'s example it gives [[0, 0], [1, 1]].

    Args:
      mesh: a concrete mesh.
      ep_axis: the axis of the EP group, or several in rank order (major first).
      timeout_s: seconds to wait for another process's host identity.

    Returns:
      NumPy i32 [num_groups, num_ranks], groups in the order of the other axes; hosts are numbered from 0 by their
      lowest process.

    Raises:
      ValueError: the mesh is abstract, or an axis is unknown or repeated.
      SetupTimeout, SetupError: as `make_mesh` raises them.

    Notes:
      Every process with devices in the mesh has to call it, as it has to call `make_mesh`.
    """
    groups = group.mesh_groups(mesh, ep_axis)
    by_process = exchange_hosts(set(group.processes(groups)), timeout_s)
    numbers: dict[str, int] = {}
    for process in sorted(by_process):
        numbers.setdefault(by_process[process], len(numbers))
    return np.array([[numbers[by_process[p]] for p, _ in one] for one in groups], np.int32)


@dataclasses.dataclass(frozen=True)
class Crossing:
    """What leaves the hosts in one dispatch, in rows; times the bytes of a row it is traffic between hosts.

    Attributes:
      num_rank_rows: pairs of a token and a rank on another host than the token's: what crosses if every rank gets a
        row of its own.
      num_host_rows: pairs of a token and another host: what crosses if a row is sent once per host and forwarded there.
    """

    num_rank_rows: int
    num_host_rows: int


def crossing(hosts: Any, topk_idx: Any, *, num_experts: int) -> Crossing:
    """Counts the rows of a routing that leave a host.

    Example:
      Two ranks with an expert each, on two hosts; one of rank 0's tokens goes to rank 1:

      >>> crossing([0, 1], [[[0], [1]], [[-1], [1]]], num_experts=2)
      Crossing(num_rank_rows=1, num_host_rows=1)

    Args:
      hosts: [..., num_ranks] numbers, the host of each rank; leading axes are groups (`mesh_hosts` gives them).
      topk_idx: [..., num_ranks, num_tokens, num_topk] integers: each rank's routing. Ids outside [0, num_experts)
        send nothing.
      num_experts: over the group; num_ranks divides it.

    Returns:
      `Crossing`, summed over groups and ranks.

    Raises:
      ValueError: shapes that do not belong together.
    """
    hosts, idx = np.asarray(hosts), np.asarray(topk_idx)
    if hosts.ndim < 1 or idx.shape[:-2] != hosts.shape or num_experts % hosts.shape[-1]:
        raise ValueError(
            f"got hosts of shape {hosts.shape}, topk_idx of shape {idx.shape} and num_experts={num_experts}; expected "
            "[..., num_ranks], [..., num_ranks, num_tokens, num_topk] and a multiple of num_ranks"
        )
    num_groups, num_ranks = math.prod(hosts.shape[:-1]), hosts.shape[-1]
    hosts, idx = hosts.reshape(num_groups, num_ranks), idx.reshape(num_groups, num_ranks, *idx.shape[-2:])
    rank_rows = host_rows = 0
    for its_hosts, its_idx in zip(hosts, idx, strict=True):
        is_routed = (its_idx >= 0) & (its_idx < num_experts)
        to_rank = np.where(is_routed, its_idx, 0) // (num_experts // num_ranks)
        is_reached = np.zeros((*its_idx.shape[:2], num_ranks), bool)  # [source rank, token, destination rank]
        source, token, entry = np.nonzero(is_routed)
        is_reached[source, token, to_rank[source, token, entry]] = True
        rank_rows += int(np.sum(is_reached & (its_hosts[:, None] != its_hosts)[:, None, :]))
        for host in np.unique(its_hosts):
            host_rows += int(np.sum(is_reached[its_hosts != host][..., its_hosts == host].any(-1)))
    return Crossing(rank_rows, host_rows)
