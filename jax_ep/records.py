"""What processes tell each other before they share memory: one record each, in the job's coordination service.

A record is JSON::

    {"reason": "" or why this process cannot use CUDA, "protocol": 1, "host": "...",
     "launches_block": false, "reorders_graphs": false, "address": "...", "nonce": "hex",
     "nvshmem": "" or why this process cannot use it,
     "devices": [{"local_hardware_id": 0, "uuid": "GPU-...", "num_sms": 132, "compute_capability": [9, 0],
                  "pool_exportable": true, "no_access": ["GPU-..."]}]}

`why_not`, `max_num_sms` and `placement` are pure functions of the records, so all ranks come to the same answer.
"""

from __future__ import annotations

import dataclasses
import json
import os
import re
import time
from collections import Counter
from collections.abc import Mapping
from typing import Any

from jax_ep import errors, tuning
from jax_ep.group import Groups

Record = dict[str, Any]
_OLDEST_CAPABILITY = (8, 0)
_CLAIM_S = 60.0  # for reading what is known to be there
_CONCURRENT = re.compile("--xla_gpu_command_buffer_scheduling_mode=CONCURRENT", re.IGNORECASE)


@dataclasses.dataclass(frozen=True)
class World:
    """The job as ``jax.distributed`` knows it; asking starts no backend."""

    process_index: int
    num_processes: int
    client: Any  # of the coordination service; None in a job of one process


def current_world() -> World:
    """The job that this process belongs to now."""
    from jax._src import distributed  # there is no public access to the coordination service

    state = distributed.global_state
    return World(state.process_id or 0, state.num_processes or 1, state.client)


def host_identity() -> str:
    """Equal for two processes that can meet on an abstract Unix socket: one boot, one network namespace."""
    with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
        boot = file.read().strip()
    return f"{boot}/{os.readlink('/proc/self/ns/net')}"


def describe_process(module: Any, ordinals: list[int], address: str, nonce: bytes, nvshmem: str = "") -> Record:
    """The record of this process. `module` is the extension, `ordinals` the devices that JAX uses here.

    `nvshmem`: "" or why it cannot be used.
    """
    devices = []
    for ordinal in ordinals:
        info = module.device_info(ordinal)
        blocked = [o for o in range(module.num_devices()) if not module.can_access_peer(ordinal, o)]
        devices.append(
            {
                "local_hardware_id": ordinal,
                "uuid": info["uuid"],
                "num_sms": info["num_sms"],
                "compute_capability": list(info["compute_capability"]),
                "pool_exportable": module.register_pool(ordinal, 0, 0)["exportable"],
                "no_access": [module.device_info(o)["uuid"] for o in blocked],
            }
        )
    return {
        "reason": "",
        "protocol": module.protocol,
        "host": host_identity(),
        "launches_block": os.environ.get("CUDA_LAUNCH_BLOCKING", "0") not in ("", "0"),
        "reorders_graphs": bool(_CONCURRENT.search(os.environ.get("XLA_FLAGS", ""))),
        "address": address,
        "nonce": nonce.hex(),
        "nvshmem": nvshmem,
        "devices": devices,
    }


def _key(process: int) -> str:
    # Without the protocol, so that a process of another version is read and named instead of waited for.
    return f"record/{process}"


def publish_text(world: World, name: str, text: str) -> None:
    """Makes `text` known to the other processes of the job under `name`."""
    if world.client is not None and world.num_processes > 1:
        world.client.key_value_set(f"jax_ep/{name}", text, allow_overwrite=True)


def collect_text(world: World, name: str, deadline: float) -> str | None:
    """What was published under `name`; None when ``time.monotonic()`` reaches `deadline` before.

    Raises:
      SetupError: the coordination service failed otherwise.
    """
    left_ms = max(1, int((deadline - time.monotonic()) * 1000))
    try:
        return world.client.blocking_key_value_get(f"jax_ep/{name}", left_ms)
    except Exception as error:
        if "DEADLINE_EXCEEDED" in str(error):
            return None
        raise errors.SetupError(f"{name} could not be read from the coordination service: {error}") from error


def claim_text(world: World, name: str, text: str) -> str:
    """Writes `text` under `name` unless something stands there, and returns what stands there then.

    Raises:
      SetupError: the coordination service failed.
      SetupTimeout: something else stands there and could not be read in time.
    """
    try:
        world.client.key_value_set(f"jax_ep/{name}", text, allow_overwrite=False)
        return text
    except Exception as error:
        if "ALREADY_EXISTS" not in str(error):
            raise errors.SetupError(f"{name} could not be written to the coordination service: {error}") from error
    found = collect_text(world, name, time.monotonic() + _CLAIM_S)
    if found is None:  # never `text`: two processes would each think that the place is theirs
        raise errors.SetupTimeout(
            f"another process wrote {name} first, and the coordination service did not return it within "
            f"{_CLAIM_S:g} s; see whether process 0, which runs the service, is alive and reachable"
        )
    return found


def publish(world: World, record: Record) -> None:
    """Makes this process's record known to the others."""
    publish_text(world, _key(world.process_index), json.dumps(record))


def collect(world: World, process: int, deadline: float) -> Record:
    """The record of `process`; waits until ``time.monotonic()`` reaches `deadline`."""
    if world.client is None:
        raise errors.SetupError(
            f"the mesh has devices of process {process}, but this process is in no job; "
            "call jax.distributed.initialize first"
        )
    text = collect_text(world, _key(process), deadline)
    if text is None:
        raise errors.SetupTimeout(
            f"process {process} published no set-up record in time; every process of the mesh must compile a "
            "program with jax_ep calls on it"
        )
    return json.loads(text)


def barrier(world: World, name: str, timeout_s: float) -> None:
    """Waits for all processes of the job. Names are numbered, because a barrier serves once."""
    if world.client is None or world.num_processes == 1:
        return
    number = _barriers[name]
    _barriers[name] += 1
    try:
        world.client.wait_at_barrier(f"jax_ep/{name}/{number}", max(1, int(timeout_s * 1000)))
    except Exception as error:
        raise errors.SetupTimeout(
            f"not all {world.num_processes} processes called jax_ep.{name}() within {timeout_s:g} s: {error}"
        ) from error


_barriers: Counter[str] = Counter()


def _devices(groups: Groups, records: Mapping[int, Record]) -> dict[tuple[int, int], Record]:
    """Device entries of all members; a member without an entry is missing."""
    found = {}
    for process, record in records.items():
        for position, device in enumerate(record.get("devices", ())):
            found[process, position] = device
    return {member: found[member] for one in groups for member in map(tuple, one) if member in found}


def with_ordinals(groups: Groups, records: Mapping[int, Record]) -> list[list[tuple[int, int]]]:
    """`groups` with each member's CUDA ordinal in its own process instead of its position."""
    devices = _devices(groups, records)
    return [[(int(p), devices[int(p), int(d)]["local_hardware_id"]) for p, d in one] for one in groups]


def gpu_numbers(groups: Groups, records: Mapping[int, Record]) -> list[list[int]]:
    """A number per member; equal numbers mean the same physical GPU."""
    devices = _devices(groups, records)
    numbers: dict[str, int] = {}
    return [[numbers.setdefault(devices[int(p), int(d)]["uuid"], len(numbers)) for p, d in one] for one in groups]


def why_not(groups: Groups, records: Mapping[int, Record], num_nodes: int = 1) -> str:
    """Why `groups` cannot exchange rows over CUDA, or "". Takes the records of all processes in `groups`.

    `num_nodes`: each of as many consecutive ranks, which must be on one host.
    """
    for process in sorted(records):
        if records[process]["reason"]:
            return f"process {process}: {records[process]['reason']}"
    protocols = {p: r["protocol"] for p, r in records.items()}
    if len(set(protocols.values())) > 1:
        return f"the processes have different versions of jax_ep (protocols {protocols})"
    devices = _devices(groups, records)
    for one in groups:
        members = [(int(p), int(d)) for p, d in one]
        hosts = {records[p]["host"] for p, _ in members}
        per_node = -(-len(members) // num_nodes)
        nodes = (members[first : first + per_node] for first in range(0, len(members), per_node))
        if len(hosts) > 1 and any(len({records[p]["host"] for p, _ in node}) > 1 for node in nodes):
            return (
                f"ranks of one group are on {len(hosts)} hosts (or network namespaces); Config(ranks_per_node=N) must "
                "make nodes of N consecutive ranks, each on one host"
            )
        for member in members:
            if member not in devices:
                return f"process {member[0]} has no CUDA device {member[1]}"
            capability = tuple(devices[member]["compute_capability"])
            if capability < _OLDEST_CAPABILITY:
                return f"device {member} has compute capability {capability}, {_OLDEST_CAPABILITY} is needed"
            blocked = set(devices[member]["no_access"])
            for peer in members:
                if peer in devices and devices[peer]["uuid"] in blocked:
                    return f"device {member} has no peer access to device {peer}"
    if max_num_sms(groups, records) < 1:
        return "more ranks share a GPU than it has SMs"
    return ""


def why_not_over_nodes(groups: Groups, records: Mapping[int, Record]) -> str:
    """What else keeps `groups` from exchanging rows over several nodes, where nothing is staged."""
    devices = _devices(groups, records)
    for process in sorted(records):
        # The launch of the carrier would wait for the call, which is launched after it.
        if records[process]["launches_block"]:
            return (
                f"process {process} has CUDA_LAUNCH_BLOCKING set, and over nodes a call is two kernels that wait for "
                "each other; unset it"
            )
    for one in groups:
        several = len({int(process) for process, _ in one}) > 1
        for member in map(tuple, one):
            if several and not devices[member]["pool_exportable"]:
                return (
                    f"XLA's memory pool of device {member} is not one preallocated region, and nothing is staged over "
                    "nodes; leave XLA_PYTHON_CLIENT_PREALLOCATE and XLA_PYTHON_CLIENT_ALLOCATOR alone"
                )
    if max_num_sms(groups, records) < 2:
        return "ranks over several nodes need two SMs each, and more share a GPU than that allows"
    return ""


def why_not_recorded(records: Mapping[int, Record]) -> str:
    """What keeps XLA from recording the calls of these processes into command buffers."""
    for process in sorted(records):
        if records[process]["launches_block"]:
            return f"process {process} has CUDA_LAUNCH_BLOCKING set, with which every launch is waited for by itself"
        if records[process]["reorders_graphs"]:
            return (
                f"process {process} has --xla_gpu_command_buffer_scheduling_mode=CONCURRENT in XLA_FLAGS, which drops "
                "the order of calls in a command buffer"
            )
    return ""


def num_hosts(groups: Groups, records: Mapping[int, Record]) -> int:
    """The most hosts that one of `groups` is on."""
    return max(len({records[int(process)]["host"] for process, _ in one}) for one in groups)


def num_job_hosts(records: Mapping[int, Record]) -> int:
    """The hosts of all `records` together; takes those that `why_not_nvshmem` has nothing against."""
    return len({record["host"] for record in records.values()})


def why_not_nvshmem(records: Mapping[int, Record]) -> str:
    """What keeps the processes of `records` from the transport nvshmem."""
    for process in sorted(records):
        record = records[process]
        if record["reason"]:
            return f"process {process}: {record['reason']}"
        if record.get("nvshmem"):
            return f"process {process}: {record['nvshmem']}"
        if len(record["devices"]) != 1:
            return (
                f"process {process} has {len(record['devices'])} GPUs, and NVSHMEM wants a process for each: give "
                "every process one (JAX_LOCAL_DEVICE_IDS)"
            )
    return ""


def max_num_sms(groups: Groups, records: Mapping[int, Record]) -> int:
    """SMs that each rank may use so that all ranks' blocks are resident together: the smallest share of a GPU."""
    devices = _devices(groups, records)
    num_ranks = Counter(device["uuid"] for device in devices.values())
    return min(device["num_sms"] // num_ranks[device["uuid"]] for device in devices.values())


def placement(groups: Groups, records: Mapping[int, Record]) -> tuning.Placement:
    """What the default number of SMs depends on; takes records that `why_not` has nothing against."""
    devices = _devices(groups, records)
    uuids = [[devices[int(p), int(d)]["uuid"] for p, d in one] for one in groups]
    return tuning.Placement(
        max_num_sms=max_num_sms(groups, records),
        ranks_on_gpu=max(Counter(device["uuid"] for device in devices.values()).values()),
        group_on_gpu=min(count for one in uuids for count in Counter(one).values()),
    )


def check_num_sms(num_sms: int, most: int, num_nodes: int = 1) -> None:
    """Raises ValueError when `num_sms` is more than `max_num_sms` allows.

    0: the default. With several nodes: of a call and its carrier together.
    """
    if num_sms <= most:
        return
    got, remedy = f"Config.num_sms={num_sms}", "num_sms or leave it out"
    if num_nodes > 1:
        got = f"Config.num_sms (at least 1) and Config.node_sms take {num_sms} SMs together"
        remedy = "num_sms and node_sms or leave them out"
    raise ValueError(
        f"{got}, but all ranks' blocks must be resident together, and the GPU's SMs divided by the ranks on it give "
        f"{most}; lower {remedy}"
    )
