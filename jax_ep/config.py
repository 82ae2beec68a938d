"""Tuning knobs of one call. jax_ep reads no environment variables; NVSHMEM, which it may load, does."""

from __future__ import annotations

import dataclasses
import numbers

_MOST_PENDING = 64


@dataclasses.dataclass(frozen=True)
class Config:
    """Knobs of the CUDA implementation, and how ranks form nodes; the defaults suit most programs.

    A frozen, hashable value: equal configs compile once, and every rank of a group must use the same one.

    Example:
      `jax_ep.dispatch(..., config=config)` takes it; combine and the backward pass inherit it through the handle.

      >>> import jax_ep
      >>> config = jax_ep.Config(num_sms=16, timeout_s=10.0)
      >>> config == jax_ep.Config(timeout_s=10, num_sms=16)
      True
      >>> jax_ep.Config(num_sms=0)
      Traceback (most recent call last):
      ValueError: Config: got num_sms=0, expected a positive int, or None for the default

    Args:
      num_sms: SMs (= thread blocks) that one call uses. None: chosen per call, 4 to 48, from its sizes and from
        where the ranks are: the fewest that a model of link and memory asks for (docs/performance.md). All ranks'
        blocks must fit on their GPU together, over several nodes with those of `node_sms`; asking for more is a
        ValueError. Over several nodes at most 64.
      setup_timeout_s: seconds to wait at compile time for the peers' set-up records and memory.
      first_call_timeout_s: seconds that a rank waits for its peers in a group's first call (they may still
        be compiling).
      timeout_s: the same for every later call.
      staging: "auto" sends rows straight into the peers' buffers where that is safe, else through own
        memory; "always" forces own memory (a test aid).
      copies: "auto" moves rows with the copy engine where the GPU has one (compute capability 9.0 and newer);
        "vector" forces what older GPUs do (a test aid).
      staging_bytes: own memory per rank and group for staged rows, both windows.
      max_pending: how many exchanges of a group, and of a size class of rows, may be between their start and their
        done at a time (`dispatch_start`, `combine_start`). Memory for twice as many, at least 3, is kept, see
        `buffer_bytes`; they take turns, so fewer starts than that may lie between a start and its done, whether these
        are pending or not. One more fails. 1 to 64.
      command_buffers: True: XLA may record the calls, with what stands around them, into command buffers (CUDA graphs)
        and replay those, which saves the host's time for each call (docs/concepts.md, Command buffers). Not calls over
        several nodes, nor where a process has several devices of the mesh, CUDA_LAUNCH_BLOCKING, or XLA's flag that
        drops the order in such buffers: these stay as they are, which one line says. False: every call is launched by
        the host. None: as True, without that line.
      debug_checks: True: ids outside [-1, num_experts), otherwise only counted in `recv.num_invalid`, are logged, and
        `jax_ep.check()` raises `InvalidIdError`. And ranks that meet with different calls in the pure-JAX
        implementation get `MismatchError`, as they always do on CUDA devices, before XLA's collectives abort or hang.
        Results are the same. It costs a callback to the host in every dispatch, in pure JAX also an all-gather of 512
        bytes and a callback in every call and its backward pass; steps wait for them (on CPU devices 1 to 2 ms per call
        and rank). JAX does not export such programs, and needs "cpu" in JAX_PLATFORMS where that is set.
      ranks_per_node: makes nodes, on one host or several: rank r belongs to node r // ranks_per_node, and the last
        has fewer ranks where the number does not divide the group's. combine, and so the gradient of dispatch, then
        sums within each node first (docs/concepts.md, Rounding); dispatch gives the same results. None, or the group's
        size and more: one node. The CUDA kernels serve up to 32 nodes of equally many ranks (docs/multihost.md); the
        rest is the pure-JAX implementation's, and raises NotImplementedError with `implementation="cuda"` when the
        program is lowered. All that follow are about several nodes only.
      node_bytes: own memory per rank and group for the chunks in which tokens cross nodes, all directions. Latency mode
        has slots instead.
      node_sms: SMs per rank, beside `num_sms`, that do nothing but carry chunks to other nodes, 1 to 16. None: as many
        as keep pace with the others, from the bytes that cross nodes and those that they move (docs/performance.md).
      node_chunk: most tokens of a chunk; each SM has two on their way to a node at a time. None: as many as
        `node_bytes` holds.
      put_delay_s: a test aid: what crosses nodes is late by up to this much at random, and in any order; 0: it is not.
      transport: what carries rows between nodes. "auto": NVSHMEM where a group is on several hosts, stores on one host.
        "nvshmem": NVSHMEM everywhere. The next six are NVSHMEM's settings. It reads them once in a process, those of
        the first program over nodes; a variable that is set in the environment goes first (docs/multihost.md).
      nvshmem_bytes: own symmetric memory per rank that all groups' arenas over NVSHMEM are cut from. None: four times
        the first arena. NVSHMEM rounds it up to NVSHMEM_CUMEM_GRANULARITY (512 MiB).
      nvshmem_qps: queue pairs to each other rank, 1 to 64; the GPU then drives the network card itself
        (NVSHMEM_IB_ENABLE_IBGDA, NVSHMEM_IBGDA_NUM_RC_PER_PE). None: NVSHMEM's default, a thread of the host drives it.
      nvshmem_qp_depth: requests under way in a queue pair, a power of two from 128 to 32768 (NVSHMEM_QP_DEPTH). None:
        1024.
      nvshmem_service_level: of InfiniBand, 0 to 15, to keep this traffic apart from other (NVSHMEM_IB_SL). None: 0.
      nvshmem_traffic_class: of RoCE, 0 to 255 (NVSHMEM_IB_TRAFFIC_CLASS). None: 0.
      nvshmem_hcas: names of the network cards to use, such as ("mlx5_0", "mlx5_1:1") (NVSHMEM_HCA_LIST, and
        NVSHMEM_ENABLE_NIC_PE_MAPPING=1, with which it is read). Empty: those that NVSHMEM finds close to the GPU.

    Raises:
      ValueError, TypeError: a value outside its range.
    """

    num_sms: int | None = None
    setup_timeout_s: float = 300.0
    first_call_timeout_s: float = 300.0
    timeout_s: float = 100.0
    staging: str = "auto"
    staging_bytes: int = 16 << 20
    max_pending: int = 2
    copies: str = "auto"
    command_buffers: bool | None = None
    debug_checks: bool = False
    ranks_per_node: int | None = None
    node_bytes: int = 64 << 20
    node_sms: int | None = None
    node_chunk: int | None = None
    put_delay_s: float = 0.0
    transport: str = "auto"
    nvshmem_bytes: int | None = None
    nvshmem_qps: int | None = None
    nvshmem_qp_depth: int | None = None
    nvshmem_service_level: int | None = None
    nvshmem_traffic_class: int | None = None
    nvshmem_hcas: tuple[str, ...] = ()

    def __post_init__(self):
        if self.num_sms is not None:
            _positive("num_sms", self.num_sms, numbers.Integral, "a positive int, or None for the default")
        for name in ("setup_timeout_s", "first_call_timeout_s", "timeout_s"):
            _positive(name, getattr(self, name), numbers.Real, "a positive number of seconds")
        _positive("staging_bytes", self.staging_bytes, numbers.Integral, "a positive number of bytes")
        _positive("max_pending", self.max_pending, numbers.Integral, f"1 to {_MOST_PENDING}", _MOST_PENDING)
        if self.staging not in ("auto", "always"):
            raise ValueError(f'Config: got staging={self.staging!r}, expected "auto" or "always"')
        if self.copies not in ("auto", "vector"):
            raise ValueError(f'Config: got copies={self.copies!r}, expected "auto" or "vector"')
        if not isinstance(self.command_buffers, bool | None):
            raise TypeError(f"Config: got command_buffers={self.command_buffers!r}, expected True, False or None")
        if not isinstance(self.debug_checks, bool):
            raise TypeError(f"Config: got debug_checks={self.debug_checks!r}, expected True or False")
        if self.ranks_per_node is not None:
            _positive("ranks_per_node", self.ranks_per_node, numbers.Integral, "a positive int, or None for one node")
        _positive("node_bytes", self.node_bytes, numbers.Integral, "a positive number of bytes")
        if self.node_sms is not None:
            _positive("node_sms", self.node_sms, numbers.Integral, "1 to 16, or None for the default", 16)
        if self.node_chunk is not None:
            _positive("node_chunk", self.node_chunk, numbers.Integral, "a positive int, or None for what fits")
        if self.put_delay_s:
            _positive("put_delay_s", self.put_delay_s, numbers.Real, "0 to 1 seconds", 1.0)
        self._check_transport()

    def _check_transport(self):
        if self.transport not in ("auto", "nvshmem"):
            raise ValueError(f'Config: got transport={self.transport!r}, expected "auto" or "nvshmem"')
        if self.transport == "nvshmem" and self.put_delay_s:
            raise ValueError(f"Config: got put_delay_s={self.put_delay_s!r}, expected 0 with transport='nvshmem'")
        if self.nvshmem_bytes is not None:
            _positive("nvshmem_bytes", self.nvshmem_bytes, numbers.Integral, "a positive number of bytes, or None")
        if self.nvshmem_qps is not None:
            _positive("nvshmem_qps", self.nvshmem_qps, numbers.Integral, "1 to 64, or None for NVSHMEM's default", 64)
        depth = self.nvshmem_qp_depth
        if depth is not None:
            expected = "a power of two from 128 to 32768, or None for NVSHMEM's default"
            _positive("nvshmem_qp_depth", depth, numbers.Integral, expected, 1 << 15)
            if depth < 128 or depth & (depth - 1):
                raise ValueError(f"Config: got nvshmem_qp_depth={depth!r}, expected {expected}")
        for name, most in (("nvshmem_service_level", 15), ("nvshmem_traffic_class", 255)):
            value = getattr(self, name)
            if value is None or (value == 0 and type(value) is int):
                continue
            _positive(name, value, numbers.Integral, f"0 to {most}, or None for NVSHMEM's default", most)
        hcas = self.nvshmem_hcas
        if not isinstance(hcas, tuple) or not all(isinstance(name, str) and name for name in hcas):
            raise TypeError(f"Config: got nvshmem_hcas={hcas!r}, expected a tuple of names of network cards")
        if any(set(name) & set(", ^") for name in hcas):
            raise ValueError(f"Config: got nvshmem_hcas={hcas!r}, expected names alone, without commas and spaces")


def _positive(name: str, value, kind: type, expected: str, most: float = float("inf")) -> None:
    if isinstance(value, bool) or not isinstance(value, kind):
        raise TypeError(f"Config: got {name}={value!r} ({type(value).__name__}), expected {expected}")
    if not 0 < value <= most or value == float("inf"):
        raise ValueError(f"Config: got {name}={value!r}, expected {expected}")
