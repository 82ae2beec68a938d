"""Transport "nvshmem": NVSHMEM's library, its set-up, and where arenas lie in its symmetric heap.

Nothing is loaded at import. Once per process, when the first group needs it (`place`): the environment that NVSHMEM
reads, the wheel's library, the module ``jax_ep._nvshmem``, a unique id through the coordination service, and one
symmetric region of all processes of the job. Arenas are cut from it by a list that the processes keep together in the
coordination service (`_offset`), so that they lie at one offset everywhere, in whatever order the processes compile
their programs.
"""

from __future__ import annotations

import atexit
import ctypes
import functools
import importlib
import importlib.metadata
import importlib.util
import json
import logging
import os
import pathlib
import threading
import time
from types import ModuleType

from jax_ep import _ffi, errors, records
from jax_ep.config import Config

OLDEST = (3, 4, 5)
_WHEELS = {13: "nvidia-nvshmem-cu13", 12: "nvidia-nvshmem-cu12"}  # by CUDA's major version
_WANTED = f">={'.'.join(map(str, OLDEST))},<4"
_INSTALL = f"pip install 'nvidia-nvshmem-cu13{_WANTED}' (nvidia-nvshmem-cu12 for CUDA 12)"
_LIBRARY = "libnvshmem_host.so.3"
_ARENAS = 4  # that the region has room for when Config.nvshmem_bytes does not say: some size classes, another group
_UNIT = 1 << 20
_END_S = 5.0  # that a process waits for the others when it ends

logger = logging.getLogger("jax_ep")


def problem(num_processes: int) -> str:
    """Why this process of a job of `num_processes` cannot use NVSHMEM, or "".

    Looks at files and loads none of them, but for one case: no wheel is there and the job might use NVSHMEM. Only the
    loader knows then whether it finds a library, and all processes must know before they choose an implementation.
    """
    reason = _files_problem()
    if reason or num_processes == 1 or _wheel_library() is not None:
        return reason
    try:
        load()
    except errors.SetupError as error:
        return str(error)
    return ""


def _files_problem() -> str:
    if importlib.util.find_spec("jax_ep._nvshmem") is None:
        return (
            "the transport nvshmem is not built: "
            f"{_INSTALL}, then install jax_ep from source, with nvcc on the PATH and pip's --no-build-isolation"
        )
    found = _wheel_version()
    if found is None:
        return ""  # a library of the system: its version is looked at when it is loaded
    return version_problem(found) or _cuda_problem(_ffi.cuda_major())


def version_problem(found: tuple[int, ...], built: tuple[int, ...] = OLDEST) -> str:
    """Why the library of version `found` cannot serve a module that was built against `built`, or ""."""
    least = max(OLDEST, tuple(built))  # an old build runs on a newer library, never the reverse
    if least <= tuple(found) < (least[0] + 1,):
        return ""
    needed = f">={'.'.join(map(str, least))},<{least[0] + 1}"
    return (
        f"NVSHMEM {'.'.join(map(str, found))} was found, {needed} is needed: "
        f"pip install 'nvidia-nvshmem-cu13{needed}' (nvidia-nvshmem-cu12 for CUDA 12)"
    )


def _cuda_problem(built: int) -> str:
    """Why the wheels that are there do not serve an extension that was built with CUDA `built`, or ""."""
    there = [major for major, name in _WHEELS.items() if _version_of(name)]
    if not there or built in there or built not in _WHEELS:
        return ""
    return (
        f"jax_ep was built with CUDA {built}, and {_WHEELS[there[0]]} is installed, which is for CUDA {there[0]}: "
        f"pip uninstall {_WHEELS[there[0]]}; pip install '{_WHEELS[built]}{_WANTED}'"
    )


def _wheel_version() -> tuple[int, ...] | None:
    return next(filter(None, map(_version_of, _WHEELS.values())), None)


def _version_of(wheel: str) -> tuple[int, ...] | None:
    try:
        return tuple(int(part) for part in importlib.metadata.version(wheel).split(".")[:3])
    except (importlib.metadata.PackageNotFoundError, ValueError):
        return None


def _wheel_library() -> str | None:
    try:
        spec = importlib.util.find_spec("nvidia.nvshmem")
    except ModuleNotFoundError:
        return None
    for folder in (spec.submodule_search_locations or ()) if spec else ():
        path = pathlib.Path(folder) / "lib" / _LIBRARY
        if path.exists():
            return str(path)
    return None


@functools.cache
def load() -> ModuleType:
    """The module ``jax_ep._nvshmem``.

    Raises:
      SetupError: it is not built, or does not load, or NVSHMEM has another version; the text says what to do.
    """
    reason = _files_problem()
    if reason:
        raise errors.SetupError(reason)
    try:
        library = _wheel_library()
        if library is not None:  # else the loader's own search finds it, or says that it does not
            ctypes.CDLL(library)
        module = importlib.import_module("jax_ep._nvshmem")
    except (ImportError, OSError) as error:
        raise errors.SetupError(f"the transport nvshmem does not load ({error}); {_INSTALL}") from error
    reason = version_problem(module.loaded_version(), module.built_version)
    if reason:
        raise errors.SetupError(reason)
    return module


def environment(config: Config, *, is_one_host: bool, region_bytes: int) -> dict[str, str]:
    """NVSHMEM's variables for what `config` says, and for what is known of the job."""
    variables = {
        "NVSHMEM_DISABLE_NVLS": "1",  # multicast: nothing here uses it, and it takes memory of the switch
        "NVSHMEM_SYMMETRIC_SIZE": str(region_bytes),
    }
    if is_one_host:
        variables["NVSHMEM_REMOTE_TRANSPORT"] = "none"
    if config.nvshmem_qps is not None:
        variables["NVSHMEM_IB_ENABLE_IBGDA"] = "1"
        variables["NVSHMEM_IBGDA_NUM_RC_PER_PE"] = str(config.nvshmem_qps)
    for name, value in (
        ("NVSHMEM_QP_DEPTH", config.nvshmem_qp_depth),
        ("NVSHMEM_IB_SL", config.nvshmem_service_level),
        ("NVSHMEM_IB_TRAFFIC_CLASS", config.nvshmem_traffic_class),
        ("NVSHMEM_HCA_LIST", ",".join(config.nvshmem_hcas) or None),
        ("NVSHMEM_ENABLE_NIC_PE_MAPPING", "1" if config.nvshmem_hcas else None),  # else the list may go unread
    ):
        if value is not None:
            variables[name] = str(value)
    return variables


def set_environment(variables: dict[str, str]) -> dict[str, str]:
    """Sets those of `variables` that the user has not set, and returns what NVSHMEM will read.

    A variable that the user has set otherwise is left alone and logged.
    """
    for name, value in variables.items():
        if os.environ.setdefault(name, value) != value:
            logger.info("%s=%s of the environment goes before %s, which Config says", name, os.environ[name], value)
    return {name: os.environ[name] for name in variables}


class _World:
    """NVSHMEM in this process: one instance, one region. Made once; a failure lasts."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.config = Config()
        self.job: records.World | None = None
        self.bytes = 0
        self.seconds = 0.0  # of all of set-up
        self.init_s = 0.0  # of NVSHMEM's own part in it
        self.entries: list[tuple[str, int]] = []  # of the list in the coordination service, as far as it was read
        self._error: errors.EpError | None = None

    def start(self, job: records.World, device: int, is_one_host: bool, arena_bytes: int, deadline: float) -> None:
        if self._error is not None:
            raise self._error
        if self.job is not None:
            if self.job != job:
                raise errors.SetupError("NVSHMEM belongs to an earlier job of this process; restart the process")
            return
        begin = time.monotonic()
        try:
            self._start(job, device, is_one_host, arena_bytes, deadline)
        except errors.EpError as error:
            self._error = error
            raise
        except RuntimeError as error:  # of the module, with a type's name first
            self._error = errors.SetupError(str(error).removeprefix("SetupError: "))
            raise self._error from error
        self.job, self.seconds = job, time.monotonic() - begin

    def _start(self, job, device, is_one_host, arena_bytes, deadline) -> None:
        module = load()
        wanted = self.config.nvshmem_bytes or _ARENAS * arena_bytes
        wanted = -(-wanted // _UNIT) * _UNIT
        # All processes take the numbers of one, which may compile another program first than this one.
        if job.process_index == 0:
            set_environment(environment(self.config, is_one_host=is_one_host, region_bytes=wanted))
            text = json.dumps({"unique_id": module.unique_id().hex(), "bytes": wanted})
            records.publish_text(job, "nvshmem/world", text)
        else:
            text = records.collect_text(job, "nvshmem/world", deadline)
            if text is None:
                raise errors.SetupTimeout(_not_all(job))
            set_environment(environment(self.config, is_one_host=is_one_host, region_bytes=json.loads(text)["bytes"]))
        agreed = json.loads(text)
        _wait(job, deadline)  # what follows waits for all processes without an end
        begin = time.monotonic()
        module.init(job.process_index, job.num_processes, bytes.fromhex(agreed["unique_id"]), device)
        self.init_s = time.monotonic() - begin
        if not is_one_host and not module.orders_network_writes(device):
            raise errors.SetupError(
                "this GPU does not order what a network card writes; use one of compute capability 9.0"
            )
        base = module.allocate(agreed["bytes"], device)
        at = module.reachable(base, job.num_processes)
        _wait(job, deadline)  # the region is zeroed everywhere before anybody puts into it
        self.bytes = agreed["bytes"]
        _ffi.module().set_symmetric_heap(base, self.bytes, device, module.carrier, module.params_bytes, at)
        atexit.register(_finish, job, module, device)


_world = _World()


def configure(config: Config) -> None:
    """Takes the settings of the first program over nodes; NVSHMEM reads them once, when the first group is bound."""
    if _world.job is None:
        _world.config = config


def place(job: records.World, key: str, arena_bytes: int, device: int, is_one_host: bool, deadline: float) -> int:
    """Offset of the arena `key` in the symmetric region, the same in all processes. Sets NVSHMEM up at first.

    Raises:
      SetupError: NVSHMEM cannot be used, or the region is full.
      SetupTimeout: not all processes of the job came.
    """
    with _world.lock:
        _world.start(job, device, is_one_host, arena_bytes, deadline)
        return _offset(_world.entries, _world.bytes, job, key, arena_bytes)


def _offset(entries: list[tuple[str, int]], region: int, job: records.World, key: str, arena_bytes: int) -> int:
    """Finds `key` in the list of all processes, or appends it: whoever writes a place of the list first has it."""
    offset = number = 0
    while True:
        if number == len(entries):
            other, size = records.claim_text(job, f"nvshmem/arena/{number}", f"{key} {arena_bytes}").split()
            entries.append((other, int(size)))
        other, size = entries[number]
        if other == key:
            break
        offset, number = offset + size, number + 1
    if size != arena_bytes:
        raise errors.SetupError(f"arena {key} has {arena_bytes} bytes here and {size} in another process")
    if offset + size > region:
        raise errors.SetupError(
            f"the symmetric region of {region >> 20} MiB has no room for an arena of {size >> 20} MiB beside "
            f"{offset >> 20} MiB of others; give Config.nvshmem_bytes at least {offset + size}"
        )
    return offset


def is_set_up() -> bool:
    """Whether NVSHMEM is there, in this process and so in all of the job."""
    return _world.job is not None


def setup_ms() -> dict[str, float]:
    """Milliseconds by phase: NVSHMEM's own initialisation, and all else.

    That is loading, waiting for the other processes, and the symmetric region.
    """
    init_s = _world.init_s if is_set_up() else 0.0
    return {"nvshmem_init": init_s * 1e3, "nvshmem": (_world.seconds - init_s) * 1e3}


def _not_all(job: records.World) -> str:
    return (
        f"not all {job.num_processes} processes of the job set NVSHMEM up in time; each of them must compile a program "
        "with a group over nodes, the first one on all processes"
    )


def _wait(job: records.World, deadline: float) -> None:
    try:
        records.barrier(job, "nvshmem", deadline - time.monotonic())
    except errors.SetupTimeout as error:
        raise errors.SetupTimeout(_not_all(job)) from error


def _finish(job: records.World, module: ModuleType, device: int) -> None:
    """At exit: NVSHMEM's own end waits for all processes, so it is left out when one of them is gone."""
    try:
        if _ffi.module().failures():
            return
        records.barrier(job, "nvshmem end", _END_S)
        module.finalize(device)
    except (errors.EpError, RuntimeError) as error:
        logger.debug("NVSHMEM was not finalised: %s", error)
