"""Set-up between processes, all of it while a program compiles.

Every process publishes **one** record in the job's coordination service (`records`): where its service is, and
what its devices are. Whether the CUDA path can be used, and with how many SMs, is a pure function of the records
of the mesh's processes, so all ranks choose alike. When a program is lowered, a background thread makes XLA's
pools known, publishes, and loads the kernels; the lowering of each call then joins it and binds the call site's
arena (`bind`). XLA's instantiate, and initialize before the first execution, call the same through
`bind_callback`, for executables that were not lowered here.
Compile time waits for records, never for a peer's kernel or compile.

After set-up: `check` raises the typed error of a failed call, a watcher thread logs it, `reset` repairs.
"""

from __future__ import annotations

import concurrent.futures
import functools
import logging
import secrets
import threading
import time
from typing import Any

import jax
import numpy as np

from jax_ep import _ffi, debug_checks, errors, group, nvshmem, records, tuning
from jax_ep.group import Groups

_LARGE_BUFFER_BYTES = 4 << 20  # more than a growing pool's first region holds
_SETUP_TIMEOUT_S = 300.0

logger = logging.getLogger("jax_ep")


class _Process:
    """This process's part in one job: its service, pools, record and kernels. Work is done once, in `_run`."""

    def __init__(self, world: records.World):
        self.world = world
        self.nonce = _nonce()
        self.records_s = 0.0
        self._known: dict[int, dict[str, Any]] = {}
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._published = threading.Event()
        self._warm = threading.Event()
        self._error: Exception | None = None

    def start(self) -> None:
        with self._lock:
            if self._thread is None:
                # Not a daemon: the interpreter must not end in the middle of a CUDA call.
                self._thread = threading.Thread(target=self._run, name="jax_ep-setup", daemon=False)
                self._thread.start()

    def _run(self) -> None:
        """In a thread of its own, so that no trace, mesh or default device of the caller is in force."""
        try:
            record: dict[str, Any] = {"reason": _local_problem()}
            ordinals: list[int] = []
            if not record["reason"]:
                devices = _jax_devices()
                ordinals = [d.local_hardware_id for d in devices]
                address = ""
                if self.world.num_processes > 1:  # one process has plain addresses: no pool to hand out
                    for device in devices:
                        _register_pool(device)
                    address = _ffi.module().start_service(self.nonce)
                unusable = nvshmem.problem(self.world.num_processes)
                record = records.describe_process(_ffi.module(), ordinals, address, self.nonce, unusable)
                _log_translation(record["devices"])
                _start_watcher()
            self._known[self.world.process_index] = record
            records.publish(self.world, record)
            self._published.set()
            if ordinals:
                with concurrent.futures.ThreadPoolExecutor(len(ordinals)) as pool:
                    list(pool.map(lambda ordinal: _ffi.module().warm_up([ordinal]), ordinals))
        except Exception as error:
            self._error = error
            if not self._published.is_set():  # others decide without us instead of waiting for us
                records.publish(self.world, {"reason": f"set-up failed ({error})"})
        finally:
            self._published.set()
            self._warm.set()

    def wait_warm(self, deadline: float) -> None:
        self._wait(self._warm, "loading the kernels", deadline)

    def _wait(self, event: threading.Event, what: str, deadline: float) -> None:
        self.start()
        if not event.wait(max(0.0, deadline - time.monotonic())):
            raise errors.SetupTimeout(f"{what} did not end in time on process {self.world.process_index}")
        if self._error is not None:
            raise _typed(self._error)

    def read_records(self, processes: tuple[int, ...], deadline: float) -> dict[int, dict[str, Any]]:
        """Records of `processes`; publishes the own one first, so that no two processes wait for each other."""
        self._wait(self._published, "publishing the set-up record", deadline)
        start = time.monotonic()
        for process in processes:
            if process not in self._known:
                self._known[process] = records.collect(self.world, process, deadline)
        self.records_s += time.monotonic() - start
        return {p: self._known[p] for p in processes}

    def has(self, groups: Groups) -> bool:
        """Whether `groups` lie in this job, with this process's devices; else they are another machine's."""
        index = self.world.process_index
        if any(p >= self.world.num_processes for p in group.processes(groups)):
            return False
        return set(group.local_devices(groups, index)) <= set(range(len(_jax_devices())))


@functools.cache
def _nonce() -> bytes:
    return secrets.token_bytes(16)


_process: _Process | None = None
_process_lock = threading.Lock()


def _this_process() -> _Process:
    """The state of the present job; a new one after another jax.distributed.initialize."""
    global _process
    world = records.current_world()
    with _process_lock:
        if _process is None or _process.world != world:
            _process = _Process(world)
        return _process


def _local_problem() -> str:
    """Why this process cannot take part, whatever the mesh."""
    if _ffi.available():
        return _ffi.available()
    if _ffi.num_devices() == 0 or not _jax_devices():
        return "no CUDA device in this process"
    return ""


def _jax_devices() -> list[Any]:
    try:
        return sorted(jax.local_devices(backend="cuda"), key=lambda d: d.id)  # group.member's order
    except RuntimeError:  # JAX has no CUDA backend here
        return []


def _register_pool(device: Any) -> None:
    """Forces XLA's preallocated pool and tells the runtime about it (memory.h says how it is recognised)."""
    with jax.transfer_guard("allow"):
        buffers = [jax.device_put(np.zeros(n, np.uint8), device) for n in (256, _LARGE_BUFFER_BYTES)]
    for buffer in buffers:
        buffer.block_until_ready()
    small, large = (buffer.unsafe_buffer_pointer() for buffer in buffers)
    pool = _ffi.module().register_pool(device.local_hardware_id, small, large)
    if not pool["exportable"]:
        logger.warning(
            "XLA's memory pool of device %d is not one preallocated region (XLA_PYTHON_CLIENT_PREALLOCATE or "
            "another allocator): rows from other processes go through staging buffers, which is slower",
            device.local_hardware_id,
        )


def _log_translation(devices: list[dict[str, Any]]) -> None:
    built = _ffi.module().machine_code
    for capability in sorted({tuple(device["compute_capability"]) for device in devices}):
        if not _ffi.has_machine_code(capability, built):
            logger.warning(
                "no kernel was built for compute capability %d.%d (only for %s): the driver translates them from PTX "
                "while the first program compiles; rebuild with -DJAX_EP_CUDA_ARCHS=%d%d",
                *capability, ", ".join(map(str, built)), *capability,
            )  # fmt: skip


def _deadline(config: Any) -> float:
    return time.monotonic() + (config.setup_timeout_s if config is not None else _SETUP_TIMEOUT_S)


def can_use_cuda(groups: Groups, config: Any = None, num_nodes: int = 1) -> str:
    """Why the CUDA path cannot serve `groups`, or "". The same answer on every rank.

    Starts this process's set-up in the background, and waits (``config.setup_timeout_s``) until the records of
    the mesh's processes are there: each publishes when it lowers the program.

    Raises:
      SetupTimeout: a process of the mesh published nothing in time.
    """
    process = _this_process()
    problem = _local_problem()
    if problem:
        if process.world.num_processes > 1:
            process.start()  # tells the others, who would wait
        return problem
    if not process.has(groups):
        return (
            "the mesh has devices that this process does not have (to compile ahead of time for another machine, "
            "pass implementation='cuda')"
        )
    mesh_processes = group.processes(groups)
    known = process.read_records(mesh_processes, _deadline(config))
    is_over = _is_over_nvshmem(groups, known, config, num_nodes)
    problem = _why_not(groups, known, num_nodes, over_nvshmem=is_over)
    return problem or (_why_not_first(process.world, mesh_processes) if is_over else "")


def _why_not(groups: Groups, known: dict[int, records.Record], num_nodes: int, *, over_nvshmem: bool) -> str:
    problem = records.why_not(groups, known, num_nodes)
    if not problem and num_nodes > 1:
        problem = records.why_not_over_nodes(groups, known)
    return problem or (records.why_not_nvshmem(known) if over_nvshmem else "")


def _is_over_nvshmem(groups: Groups, known: dict[int, records.Record], config: Any, num_nodes: int) -> bool:
    if num_nodes == 1 or any(record["reason"] for record in known.values()):
        return False  # nobody uses CUDA
    return config.transport == "nvshmem" or records.num_hosts(groups, known) > 1


def _why_not_first(world: records.World, mesh_processes: tuple[int, ...]) -> str:
    if nvshmem.is_set_up() or len(mesh_processes) == world.num_processes:
        return ""
    return (
        f"the mesh has {len(mesh_processes)} of the job's {world.num_processes} processes, and all of them must set "
        "NVSHMEM up together: compile a program over nodes on the whole job first"
    )


def over_nvshmem(groups: Groups, config: Any, num_nodes: int) -> bool:
    """Whether rows of `groups` cross between nodes by NVSHMEM, the same answer on every rank.

    Raises:
      SetupTimeout: a process of the mesh published nothing in time.
    """
    process = _this_process()
    if num_nodes == 1 or config.transport == "nvshmem":
        return num_nodes > 1
    if _local_problem() or not process.has(groups):
        return False  # of a program for another machine nobody knows the hosts: Config.transport says
    known = process.read_records(group.processes(groups), _deadline(config))
    return _is_over_nvshmem(groups, known, config, num_nodes)


def prepare(groups: Groups, config: Any = None, num_nodes: int = 1) -> None:
    """Starts set-up for `groups` in the background; a program that is compiled for another machine starts nothing.

    Raises:
      SetupError: the CUDA path is impossible; the text says why.
      SetupTimeout: a process of the mesh published nothing in time.
      ValueError: ``config.num_sms``, with ``config.node_sms`` where there are nodes, is more than keeps all ranks'
        blocks resident together.
    """
    _ffi.module()
    process = _this_process()
    if _ffi.num_devices() == 0 or not process.has(groups):
        return
    reason = can_use_cuda(groups, config, num_nodes)
    if reason:
        raise errors.SetupError(f"implementation='cuda' is not possible: {reason}")
    if num_nodes > 1:
        nvshmem.configure(config)
    num_sms, node_sms = (getattr(config, name, None) for name in ("num_sms", "node_sms"))
    if num_sms is None and (num_nodes == 1 or node_sms is None):
        return
    known = process.read_records(group.processes(groups), _deadline(config))
    placed = records.placement(groups, known)
    if num_nodes > 1:
        num_sms = (num_sms or 1) + (node_sms or 1)  # a carrier by default takes what is left
    records.check_num_sms(num_sms, placed.max_num_sms, num_nodes)


def placement(groups: Groups, config: Any = None) -> tuning.Placement | None:
    """Where the ranks of `groups` are, the same answer on every rank; None for another machine's program.

    Raises:
      SetupTimeout: a process of the mesh published nothing in time.
    """
    process = _this_process()
    if _local_problem() or not process.has(groups):
        return None
    return records.placement(groups, process.read_records(group.processes(groups), _deadline(config)))


def why_not_recorded(groups: Groups, config: Any = None) -> str:
    """What in their processes keeps calls of `groups` from being recorded, or "". The same answer on every rank.

    Raises:
      SetupTimeout: a process of the mesh published nothing in time.
    """
    process = _this_process()
    if _local_problem() or not process.has(groups):
        return ""  # of a program for another machine nobody knows
    return records.why_not_recorded(process.read_records(group.processes(groups), _deadline(config)))


def bind(
    key: str,
    groups: Any,
    num_ranks: int,
    count_words: int,
    staging_bytes: int,
    num_slots: int,
    num_nodes: int,
    num_sms: int,
    timeout_s: float,
) -> None:
    """Binds the arena of a call site; does nothing for a program that is compiled for another machine.

    Raises:
      SetupError, SetupTimeout, ValueError: as `prepare` does.
    """
    deadline = time.monotonic() + timeout_s
    process = _this_process()
    index = process.world.process_index
    if _local_problem() or not process.has(groups) or not group.local_devices(groups, index):
        return  # execution there finds its own binding
    module = _ffi.module()
    if module.attach(key, num_sms):  # another call site has bound it: nothing to wait for
        return
    known = process.read_records(group.processes(groups), deadline)
    is_over_nvshmem = group.is_over_nvshmem(key)
    reason = _why_not(groups, known, num_nodes, over_nvshmem=is_over_nvshmem)
    if reason:  # seldom: lowering asked already, but a deserialised program had no lowering
        raise errors.SetupError(reason)
    most = records.max_num_sms(groups, known)
    records.check_num_sms(num_sms, most, num_nodes)
    for other, record in known.items():
        if other != index and record["host"] == known[index]["host"]:  # over hosts nobody maps anything
            module.add_process(other, record["address"], bytes.fromhex(record["nonce"]))
    process.wait_warm(deadline)
    in_heap = ()
    if is_over_nvshmem:
        size = module.heap_arena_bytes(num_ranks, count_words, staging_bytes, num_slots, num_nodes)
        ordinal = known[index]["devices"][0]["local_hardware_id"]
        is_one_host = nvshmem.is_set_up() or _is_job_on_one_host(process, deadline)  # asked for by set-up only
        in_heap = (nvshmem.place(process.world, key, size, ordinal, is_one_host, deadline),)
    left = max(0.001, deadline - time.monotonic())
    members, gpus = records.with_ordinals(groups, known), records.gpu_numbers(groups, known)
    module.bind(
        key, members, index, num_ranks, count_words, staging_bytes, num_slots, num_nodes, most, left, gpus, *in_heap
    )


def _is_job_on_one_host(process: _Process, deadline: float) -> bool:
    """Of the whole job, which is NVSHMEM's world, whichever part of it the mesh is."""
    everybody = process.read_records(tuple(range(process.world.num_processes)), deadline)
    reason = records.why_not_nvshmem(everybody)
    if reason:
        raise errors.SetupError(reason)
    return records.num_job_hosts(everybody) == 1


def bind_callback(*call_site: Any) -> str:
    """`bind` as XLA's instantiate calls it, on any thread: returns "" or an error text."""
    try:
        bind(*call_site)
        return ""
    except Exception as error:
        return _error_text(error)


def _error_text(error: Exception) -> str:
    """With a type's name first, as FFI errors of this project have it."""
    typed = _typed(error)
    return f"{type(typed).__name__}: {typed}"


def _typed(error: Exception) -> Exception:
    """The exception that a text of the runtime ("SetupTimeout: ...") stands for."""
    if isinstance(error, (errors.EpError, ValueError)):
        return error
    name, _, text = str(error).partition(": ")
    kind = ValueError if name == "ValueError" else getattr(errors, name, None)
    if isinstance(kind, type) and issubclass(kind, Exception):
        return kind(text)
    return errors.SetupError(f"{type(error).__name__}: {error}")


def records_ms() -> float:
    """Milliseconds that this process waited for the records of others."""
    return _process.records_s * 1e3 if _process is not None else 0.0


# What a failure means to others decides which one is raised first: others are often its consequences.
_SEVERITY = ("PeerLost", "MismatchError", "PeerTimeout", "PeerFailed", "InvalidIdError")


def _failure_error(failure: dict[str, Any]) -> errors.EpError:
    kind = getattr(errors, failure["error"], errors.EpError)
    text = failure["text"].partition(": ")[2]
    return kind(
        text,
        op=failure["op"],
        rank=failure["rank"],
        peer=failure["peer"],
        call=failure["call"],
        phase=failure["phase"],
    )


def most_severe(failures: list[dict[str, Any]]) -> dict[str, Any]:
    """The failure to raise, of several."""
    order = {name: place for place, name in enumerate(_SEVERITY)}
    return min(failures, key=lambda failure: order.get(failure["error"], len(order)))


def check() -> None:
    """Raises the typed error if a call of this process has failed.

    A call that fails on the device (a peer did not come, ran another program, or failed itself) ends with NaN
    outputs and sizes of 0, and its group stays unusable until `reset`. Results are asynchronous: wait for them
    (``jax.block_until_ready``) before asking. What `Config.debug_checks` finds is raised here, too.

    Example: see `jax_ep.errors.InvalidIdError`.

    Raises:
      PeerTimeout, PeerLost, MismatchError, PeerFailed: with the operation, ranks, call number and phase.
      InvalidIdError: under `Config.debug_checks` only.
    """
    failures = debug_checks.failures() if _ffi.available() else [*_ffi.module().failures(), *debug_checks.failures()]
    if failures:
        raise _failure_error(most_severe(failures))


def reset(timeout_s: float = _SETUP_TIMEOUT_S) -> None:
    """Repairs groups after a failed call: clears all flags and failure records. Collective over the job.

    Every process must call it, after the same call of the program; calls of jax_ep that are under way end first.
    Without a failure it does nothing visible.

    Example: see `jax_ep.errors.InvalidIdError`.

    Args:
      timeout_s: seconds to wait for the other processes.

    Raises:
      PeerLost: a peer may still write into this process's memory: only a restart is safe.
      SetupTimeout: another process did not call reset in time.
    """
    if _ffi.available() or _ffi.num_devices() == 0:
        debug_checks.clear()
        return
    module = _ffi.module()
    world = records.current_world()
    try:
        module.synchronize()  # a call that is leaving may still find its peer lost
        lost = [f for f in module.failures() if f["error"] == "PeerLost"]
        if lost:  # what the peer wrote after we left may be anywhere in XLA's memory by now
            raise _failure_error(lost[0])
        records.barrier(world, "reset", timeout_s)  # nobody launches or stores any more
        module.reset_local()
        debug_checks.clear()
        records.barrier(world, "reset", timeout_s)  # nobody starts before all flags are clear
    except errors.EpError:
        raise
    except RuntimeError as error:
        raise _typed(error) from error
    _logged.clear()


_logged: set[tuple[str, int]] = set()


@functools.cache
def _start_watcher() -> None:
    threading.Thread(target=_watch, name="jax_ep-watcher", daemon=True).start()


def _watch(poll_s: float = 0.1) -> None:
    """Logs each failure once: a program may run on with NaN for long before somebody calls `check`."""
    while True:
        log_failures(_ffi.module().failures())
        time.sleep(poll_s)


def log_failures(failures: list[dict[str, Any]]) -> None:
    """Logs those that were not logged before."""
    for failure in failures:
        at = (failure["key"], failure["device"])
        if at not in _logged:
            _logged.add(at)
            logger.error("%s", failure["text"])


def set_up() -> None:
    """At import: XLA's instantiate finds Python here."""
    if not _ffi.available():
        _ffi.module().set_bind_callback(bind_callback)


set_up()
