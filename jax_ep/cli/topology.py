"""`python -m jax_ep topology`: which rank is where, how pairs of ranks are linked, and how fast they are.

    python -m jax_ep launch --ranks 4 -m jax_ep topology
    srun python -m jax_ep topology --distributed         # or any launcher that jax.distributed knows; else
        # JAX_COORDINATOR_ADDRESS, JAX_NUM_PROCESSES and JAX_PROCESS_ID in the environment

Ranks are numbered as in ``jax_ep.make_mesh({"ep": num_ranks})``. "link" is what NVML tells of two GPUs of a host
(package nvidia-ml-py), "transport" what dispatch and combine would use between the two: "peer" is jax_ep's CUDA
kernels, "xla" the pure-JAX implementation on XLA's collectives. GB/s is measured with XLA: a buffer goes back and
forth between the two ranks (`lax.ppermute`) while the others wait; bytes one way over half the time of a round trip.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import json
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

from jax_ep import _ffi, bootstrap, errors, group, records, topology
from jax_ep.cli import _links

ROUND_TRIPS = {"cpu": 4, "gpu": 32}  # in one program, so that launching it hardly counts
REPEATS = 3  # the best counts
PATIENCE_S = 180.0  # for one step of set-up or one pair, its compilation and XLA's set-up included
STUCK = 124  # exit status, as timeout(1) says it
NONE = "-"

_runs = itertools.count()  # names in the coordination service serve once


class _Job:
    """This process's part in a run of the command."""

    def __init__(self) -> None:
        self.world = records.current_world()
        self.prefix = f"topology/{next(_runs)}"
        self.is_first = self.world.process_index == 0

    def say(self, name: str, value: Any) -> None:
        records.publish_text(self.world, f"{self.prefix}/{name}", json.dumps(value))

    def hear(self, name: str, timeout_s: float) -> Any:
        text = records.collect_text(self.world, f"{self.prefix}/{name}", time.monotonic() + timeout_s)
        if text is None:
            raise errors.SetupTimeout(f"another process did not come to {name!r} within {timeout_s:g} s")
        return json.loads(text)

    def agree(self, name: str, decide: Callable[[], Any]) -> Any:
        """What the first process decides."""
        if not self.is_first:
            return self.hear(name, PATIENCE_S)
        value = decide()
        self.say(name, value)
        return value


def _describe_process() -> dict[str, Any]:
    """What the first process needs to know of this one: host name, devices by position, links of its GPUs."""
    devices = []
    for device in sorted(jax.local_devices(), key=lambda d: d.id):  # positions as group.member counts them
        uuid = ""
        if device.platform == "gpu" and not _ffi.available():
            uuid = _ffi.module().device_info(device.local_hardware_id)["uuid"]
        devices.append({"kind": device.device_kind, "platform": device.platform, "uuid": uuid})
    uuids = [device["uuid"] for device in devices if device["uuid"]]
    return {"hostname": socket.gethostname(), "devices": devices, "links": _links.links(uuids)}


def _ping_pong(mesh: jax.sharding.Mesh, one: int, other: int, round_trips: int) -> Callable[[jax.Array], jax.Array]:
    def there_and_back(_, x):
        return lax.ppermute(lax.ppermute(x, "ep", [(one, other)]), "ep", [(other, one)])

    body = functools.partial(lax.fori_loop, 0, round_trips, there_and_back)
    return jax.jit(jax.shard_map(body, mesh=mesh, in_specs=PartitionSpec("ep"), out_specs=PartitionSpec("ep")))


def _measure(mesh: jax.sharding.Mesh, x: jax.Array, one: int, other: int) -> float:
    """GB/s from rank `one` to rank `other` and back, as this process sees it. Collective over the mesh."""
    round_trips = ROUND_TRIPS.get(mesh.devices[one].platform, ROUND_TRIPS["cpu"])
    program = _ping_pong(mesh, one, other, round_trips)
    jax.block_until_ready(program(x))  # compiles, and sets up the link
    best = float("inf")
    for _ in range(REPEATS):
        start = time.perf_counter()
        jax.block_until_ready(program(x))
        best = min(best, time.perf_counter() - start)
    return 2 * round_trips * x.nbytes / mesh.size / best / 1e9


def may_go_on(deadline: float, number: int) -> bool:
    """Whether the first process begins with pair `number`."""
    return time.monotonic() < deadline


def _measured(
    job: _Job, mesh: jax.sharding.Mesh, num_bytes: int, seconds: float, feed: Callable[[str], None]
) -> Iterator[tuple[tuple[int, int], float]]:
    """GB/s of each pair, near pairs first, until the time is over. Collective; only the first process hears them."""
    deadline = time.monotonic() + seconds
    sharding = NamedSharding(mesh, PartitionSpec("ep"))
    row = np.ones((1, max(1, num_bytes // 4)), np.float32)
    x = jax.make_array_from_callback((mesh.size, row.shape[1]), sharding, lambda _: row)
    for number, (one, other) in enumerate(_pairs(mesh.size)):
        if not job.agree(f"go/{number}", lambda number=number: may_go_on(deadline, number)):
            break
        feed(f"ranks {one} and {other}")
        speed = _measure(mesh, x, one, other)
        owner = mesh.devices[one].process_index  # a process with one of the two ranks sees the time of the exchange
        if owner == job.world.process_index:
            job.say(f"speed/{number}", speed)
        if job.is_first:
            yield (one, other), speed if owner == 0 else job.hear(f"speed/{number}", PATIENCE_S)


def _pairs(num_ranks: int) -> Iterator[tuple[int, int]]:
    """Near ones first, so that a run that is cut short has seen every rank."""
    for distance in range(1, num_ranks):
        for one in range(num_ranks - distance):
            yield one, one + distance


def _show(title: str, columns: list[str], rows: list[list[str]]) -> None:
    """A table: by rich if it is installed, else plain."""
    try:
        from rich.box import SIMPLE_HEAD
        from rich.console import Console
        from rich.table import Table
    except ImportError:
        widths = [max(map(len, column)) for column in zip(columns, *rows, strict=True)]
        print(title)
        for line in (columns, *rows):
            print("  " + "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip())
        return
    table = Table(title=title, title_justify="left", box=SIMPLE_HEAD)
    for column in columns:
        table.add_column(column, no_wrap=True)
    for row in rows:
        table.add_row(*row)
    console = Console()
    if not console.is_terminal:  # a log, or a launcher that passes lines on: as wide as the table is
        console = Console(width=250)
    console.print(table)


def _count(number: int, one: str, more: str) -> str:
    return f"{number} {one if number == 1 else more}"


class _Watchdog:
    """Ends the process when a step hangs, e.g. in a collective that a peer never joins; nothing else can."""

    def __init__(self) -> None:
        self._timer: threading.Timer | None = None

    def feed(self, what: str) -> None:
        """The step `what` begins; the one before is over."""
        self.end()
        self._timer = threading.Timer(PATIENCE_S, self._leave, [what])
        self._timer.daemon = True
        self._timer.start()

    def end(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def _leave(self, what: str) -> None:
        print(f"topology: stuck for {PATIENCE_S:g} s at {what}", file=sys.stderr, flush=True)
        os._exit(STUCK)


def _run(num_bytes: int, seconds: float, feed: Callable[[str], None]) -> None:
    feed("the exchange of host identities")
    job = _Job()
    mesh = topology.make_mesh({"ep": jax.device_count()}, timeout_s=PATIENCE_S)
    (hosts,) = topology.mesh_hosts(mesh, timeout_s=PATIENCE_S).tolist()
    ((*members,),) = group.mesh_groups(mesh, "ep")
    job.say(f"process/{job.world.process_index}", _describe_process())
    bootstrap.can_use_cuda(((*members,),))  # publishes this process's record, which the first one reads
    if job.is_first:
        processes = {
            p: _describe_process() if p == 0 else job.hear(f"process/{p}", PATIENCE_S) for p in {p for p, _ in members}
        }
        _show_ranks(members, hosts, processes)
        sys.stdout.flush()
    speeds: dict[tuple[int, int], float] = {}
    try:
        for pair, speed in _measured(job, mesh, num_bytes, seconds, feed):
            speeds[pair] = speed
    finally:  # also when XLA's collectives fail: links, transports and what was measured so far are worth more then
        if job.is_first and len(members) > 1:
            _show_pairs(members, hosts, processes, speeds)
            total = len(members) * (len(members) - 1) // 2
            if len(speeds) < total:
                print(f"{total - len(speeds)} of {total} pairs were not measured (--seconds {seconds:g})")


def _show_ranks(members: list[group.Member], hosts: list[int], processes: dict[int, Any]) -> None:
    title = ", ".join(
        (
            _count(len(members), "rank", "ranks"),
            _count(len(processes), "process", "processes"),
            _count(len(set(hosts)), "host", "hosts"),
        )
    )
    rows = []
    for rank, (process, position) in enumerate(members):
        device = processes[process]["devices"][position]
        host = f"{hosts[rank]} ({processes[process]['hostname']})"
        rows.append([str(rank), host, str(process), f"{device['platform']}:{position}", device["kind"]])
    _show(title, ["rank", "host", "process", "device", "kind"], rows)


def _show_pairs(
    members: list[group.Member], hosts: list[int], processes: dict[int, Any], speeds: dict[tuple[int, int], float]
) -> None:
    rows, reasons = [], {}
    for one, other in itertools.combinations(range(len(members)), 2):
        reason = bootstrap.can_use_cuda(((members[one], members[other]),))
        reasons.setdefault(reason, f"{one}-{other}")
        row = [f"{one}-{other}", "same" if hosts[one] == hosts[other] else f"{hosts[one]}, {hosts[other]}"]
        row += [_link(members[one], members[other], processes), "xla" if reason else "peer"]
        speed = speeds.get((one, other))
        rows.append([*row, NONE if speed is None else f"{speed:.3g}"])
    _show("pairs", ["ranks", "hosts", "link", "transport", "GB/s"], rows)
    for reason, example in reasons.items():
        if reason:
            print(f"xla instead of CUDA kernels, e.g. between ranks {example}: {reason}")


def _link(one: group.Member, other: group.Member, processes: dict[int, Any]) -> str:
    uuids = [processes[process]["devices"][position]["uuid"] for process, position in (one, other)]
    if uuids[0] and uuids[0] == uuids[1]:
        return "one GPU"
    return processes[one[0]]["links"].get(uuids[0], {}).get(uuids[1], NONE)


def _numbers() -> dict[str, int]:
    """What JAX_NUM_PROCESSES and JAX_PROCESS_ID say; JAX itself reads JAX_COORDINATOR_ADDRESS alone."""
    names = {"num_processes": "JAX_NUM_PROCESSES", "process_id": "JAX_PROCESS_ID"}
    return {argument: int(os.environ[name]) for argument, name in names.items() if name in os.environ}


def main(argv: list[str]) -> int:
    """The command."""
    parser = argparse.ArgumentParser(
        prog="python -m jax_ep topology", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--mib", type=float, default=8.0, metavar="N", help="size of the buffer; default: %(default)g")
    parser.add_argument(
        "--seconds", type=float, default=60.0, metavar="S", help="begin no pair after this; default: %(default)g"
    )
    parser.add_argument(
        "--distributed", action="store_true", help="call jax.distributed.initialize() first; launch has done it already"
    )
    args = parser.parse_args(argv)
    if args.mib <= 0 or args.seconds < 0:
        parser.error("--mib must be positive, and --seconds not negative")
    if args.distributed:
        jax.distributed.initialize(**_numbers())
    watchdog = _Watchdog()
    try:
        _run(int(args.mib * 2**20), args.seconds, watchdog.feed)
    finally:
        watchdog.end()
    return 0
