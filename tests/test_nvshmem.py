"""Transport "nvshmem" without a GPU: versions and errors, variables that NVSHMEM reads, offsets in the symmetric
region, records that allow it, and the choice of it. tests/gpu/run.py has the stages that put with it."""

import importlib.metadata
import importlib.util
import itertools
import subprocess
import sys
import time
import types

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

import jax_ep
from jax_ep import _ffi, bootstrap, errors, group, nvshmem, records

PAIR = (((0, 0), (1, 0)),)


class Service:
    """The coordination service's client; `before_write` may let another process go first."""

    def __init__(self):
        self.values, self.before_write = {}, lambda key: None

    def key_value_set(self, key, value, allow_overwrite=False):
        self.before_write(key)
        if key in self.values and not allow_overwrite:
            raise RuntimeError(f"ALREADY_EXISTS: {key}")
        self.values[key] = value

    def blocking_key_value_get(self, key, timeout_ms):
        return self.values[key]


def record(host, *, gpus=1, nvshmem=""):
    device = {"uuid": "GPU", "num_sms": 132, "compute_capability": [9, 0], "pool_exportable": True, "no_access": []}
    devices = [device | {"uuid": f"GPU-{host}{i}", "local_hardware_id": i} for i in range(gpus)]
    same = {"reason": "", "protocol": 1, "launches_block": False, "address": "", "nonce": ""}
    return same | {"host": host, "devices": devices, "nvshmem": nvshmem}


# --- the library ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("found", "built", "is_good"),
    [
        ((3, 4, 5), (3, 4, 5), True),
        ((3, 8, 0), (3, 4, 5), True),
        ((3, 4, 5), (3, 8, 0), False),  # a new build on an older library has symbols that are not there
        ((3, 3, 20), (3, 4, 5), False),
        ((4, 0, 0), (3, 4, 5), False),
    ],
)
def test_versions(found, built, is_good):
    problem = nvshmem.version_problem(found, built)
    assert (problem == "") == is_good
    if not is_good:
        needed = ".".join(map(str, max(built, nvshmem.OLDEST)))
        assert f"NVSHMEM {'.'.join(map(str, found))} was found" in problem and f">={needed},<4 is needed" in problem
        assert "pip install 'nvidia-nvshmem-cu13" in problem


def test_without_the_module_or_with_an_old_wheel_the_reason_says_what_to_install(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert "not built: pip install 'nvidia-nvshmem-cu13>=3.4.5,<4'" in nvshmem.problem(2)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    monkeypatch.setattr(nvshmem, "_wheel_version", lambda: (3, 3, 20))
    assert "3.3.20 was found" in nvshmem.problem(2)
    with pytest.raises(errors.SetupError, match=r"3\.3\.20"):
        nvshmem.load.__wrapped__()


@pytest.mark.parametrize(
    ("built", "installed", "problem"),
    [
        (13, (13,), ""),
        (13, (12, 13), ""),
        (0, (12,), ""),  # no extension: nothing to serve
        (13, (), ""),  # a library of the system
        (13, (12,), "pip uninstall nvidia-nvshmem-cu12; pip install 'nvidia-nvshmem-cu13>=3.4.5,<4'"),
        (12, (13,), "pip uninstall nvidia-nvshmem-cu13; pip install 'nvidia-nvshmem-cu12>=3.4.5,<4'"),
    ],
)
def test_a_wheel_for_another_cuda_is_a_reason(monkeypatch, built, installed, problem):
    """Both wheels have the library under one name, which loads on one CUDA only."""

    def version(name):
        if int(name[-2:]) not in installed:
            raise importlib.metadata.PackageNotFoundError(name)
        return "3.4.5"

    monkeypatch.setattr(importlib.metadata, "version", version)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    monkeypatch.setattr(_ffi, "_module", types.SimpleNamespace(cuda_major=built) if built else None)
    found = nvshmem._files_problem()
    assert (found == "") == (problem == "") and problem in found


@pytest.fixture
def built_alone(monkeypatch, tmp_path):
    """The module is built and does not load, as where the loader does not find NVSHMEM; no wheel."""
    (tmp_path / "_nvshmem.so").write_bytes(b"no library")
    monkeypatch.setattr(jax_ep, "__path__", [str(tmp_path), *jax_ep.__path__])
    monkeypatch.delitem(sys.modules, "jax_ep._nvshmem", raising=False)
    monkeypatch.setattr(nvshmem, "_wheel_version", lambda: None)
    monkeypatch.setattr(nvshmem, "_wheel_library", lambda: None)
    nvshmem.load.cache_clear()
    yield
    nvshmem.load.cache_clear()


def test_a_module_without_its_library_is_a_reason_before_anybody_waits(built_alone, monkeypatch):
    problem = nvshmem.problem(2)
    assert "does not load" in problem and "_nvshmem.so" in problem and "pip install 'nvidia-nvshmem-cu13" in problem
    assert nvshmem.problem(1) == ""  # one process never uses it, and loads nothing
    monkeypatch.setattr(nvshmem, "_wheel_version", lambda: (3, 4, 5))
    assert "does not load" in nvshmem.problem(2)  # a wheel whose files are gone
    monkeypatch.setattr(nvshmem, "_wheel_library", lambda: "a file")
    assert nvshmem.problem(2) == ""  # and is not loaded yet


def test_an_old_library_of_the_system_is_a_reason(built_alone, monkeypatch):
    module = types.SimpleNamespace(loaded_version=lambda: (3, 4, 5), built_version=(3, 8, 0))
    monkeypatch.setitem(sys.modules, "jax_ep._nvshmem", module)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    assert "3.4.5 was found, >=3.8.0,<4 is needed" in nvshmem.problem(2)
    module.built_version = (3, 4, 5)
    assert nvshmem.problem(2) == ""


@pytest.mark.parametrize("num_processes", [1, 2])
def test_the_record_says_that_the_library_is_missing(built_alone, monkeypatch, num_processes):
    cuda = Module()
    cuda.protocol, cuda.start_service = 1, lambda nonce: "address"
    monkeypatch.setattr(_ffi, "_module", cuda)
    monkeypatch.setattr(bootstrap, "_local_problem", lambda: "")
    monkeypatch.setattr(bootstrap, "_jax_devices", lambda: [])
    monkeypatch.setattr(bootstrap, "_log_translation", lambda devices: None)
    monkeypatch.setattr(bootstrap, "_start_watcher", lambda: None)
    process = bootstrap._Process(records.World(0, num_processes, Service()))
    process._run()
    found = process.read_records((0,), time.monotonic() + 10)[0]
    assert found["reason"] == "" and ("does not load" in found["nvshmem"]) == (num_processes == 2)


def test_import_loads_nothing():
    script = (
        "import sys, jax_ep, jax_ep.nvshmem; assert 'jax_ep._nvshmem' not in sys.modules; "
        "assert 'libnvshmem' not in open('/proc/self/maps').read()"
    )
    out = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120)
    assert out.returncode == 0, out.stderr


# --- variables --------------------------------------------------------------------------------------------------

READ_BACK = """
import ctypes, os, sys
os.environ.update({user!r})
from jax_ep import nvshmem
from jax_ep.config import Config
nvshmem.set_environment(nvshmem.environment({config}, is_one_host={is_one_host}, region_bytes={region}))
getenv = ctypes.CDLL(None).getenv
getenv.restype = ctypes.c_char_p
for name in {names!r}:
    value = getenv(name.encode())
    print(name, value.decode() if value is not None else None)
"""
NAMES = [
    "NVSHMEM_" + name
    for name in (
        "DISABLE_NVLS", "REMOTE_TRANSPORT", "SYMMETRIC_SIZE", "QP_DEPTH", "IB_SL", "IB_TRAFFIC_CLASS", "HCA_LIST",
        "ENABLE_NIC_PE_MAPPING", "IB_ENABLE_IBGDA", "IBGDA_NUM_RC_PER_PE",
    )
]  # fmt: skip


@pytest.mark.parametrize(
    ("config", "user", "is_one_host", "expected"),
    [
        ("Config()", {}, True, {"DISABLE_NVLS": "1", "REMOTE_TRANSPORT": "none", "SYMMETRIC_SIZE": "1048576"}),
        ("Config()", {}, False, {"DISABLE_NVLS": "1", "SYMMETRIC_SIZE": "1048576"}),
        (
            "Config(nvshmem_qps=4, nvshmem_qp_depth=2048, nvshmem_service_level=3, nvshmem_traffic_class=104,"
            " nvshmem_hcas=('mlx5_0', 'mlx5_1:1'))",
            {},
            False,
            {
                "DISABLE_NVLS": "1", "SYMMETRIC_SIZE": "1048576", "IB_ENABLE_IBGDA": "1", "IBGDA_NUM_RC_PER_PE": "4",
                "QP_DEPTH": "2048", "IB_SL": "3", "IB_TRAFFIC_CLASS": "104", "HCA_LIST": "mlx5_0,mlx5_1:1",
                "ENABLE_NIC_PE_MAPPING": "1",
            },
        ),
        (
            "Config(nvshmem_service_level=0, nvshmem_qp_depth=256)",
            {"NVSHMEM_QP_DEPTH": "512", "NVSHMEM_REMOTE_TRANSPORT": "ucx", "NVSHMEM_SYMMETRIC_SIZE": "1G"},
            True,
            {"DISABLE_NVLS": "1", "REMOTE_TRANSPORT": "ucx", "SYMMETRIC_SIZE": "1G", "QP_DEPTH": "512", "IB_SL": "0"},
        ),
    ],
)  # fmt: skip
def test_a_child_process_reads_back_what_nvshmem_gets(config, user, is_one_host, expected, monkeypatch):
    """With C's getenv, as the library does."""
    for name in NAMES:
        monkeypatch.delenv(name, raising=False)
    script = READ_BACK.format(config=config, user=user, is_one_host=is_one_host, region=1 << 20, names=NAMES)
    out = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120)
    assert out.returncode == 0, out.stderr
    found = dict(line.split(" ") for line in out.stdout.splitlines())
    assert found == {name: str(expected.get(name.removeprefix("NVSHMEM_"))) for name in NAMES}


# --- arenas -----------------------------------------------------------------------------------------------------


def test_offsets_agree_in_any_order():
    """Three processes ask for three arenas, each in another order; one of them for two only."""
    sizes = {"a": 1024, "b": 4096, "c": 2048}
    for orders in itertools.product(itertools.permutations("abc"), repeat=2):
        service, found = Service(), {}
        lists = {p: [] for p in range(3)}
        for step in range(3):
            for p, order in enumerate((*orders, "ca")):
                if step < len(order):
                    key = order[step]
                    job = records.World(p, 3, service)
                    at = nvshmem._offset(lists[p], 1 << 20, job, key, sizes[key])
                    assert found.setdefault(key, at) == at
        ends = sorted((at, at + sizes[key]) for key, at in found.items())
        assert ends[0][0] == 0 and all(end == begin for (_, end), (begin, _) in itertools.pairwise(ends))


def test_two_that_write_one_place_of_the_list_at_a_time():
    service = Service()

    def other_goes_first(key):
        service.before_write = lambda key: None
        service.values[key] = "theirs 4096"

    service.before_write = other_goes_first
    job = records.World(0, 2, service)
    assert nvshmem._offset([], 1 << 20, job, "mine", 1024) == 4096
    assert nvshmem._offset([], 1 << 20, job, "theirs", 4096) == 0


def test_a_place_of_another_that_cannot_be_read_is_a_time_out():
    """Not an own place, which would differ from the others'."""
    service = Service()
    service.values["jax_ep/nvshmem/arena/0"] = "theirs 4096"

    def late(key, timeout_ms):
        raise RuntimeError("DEADLINE_EXCEEDED")

    service.blocking_key_value_get = late
    entries = []
    with pytest.raises(errors.SetupTimeout, match=r"another process wrote nvshmem/arena/0 first"):
        nvshmem._offset(entries, 1 << 20, records.World(0, 2, service), "mine", 1024)
    assert entries == []


def test_a_full_region_and_another_size_are_errors():
    job = records.World(0, 2, Service())
    entries = []
    assert nvshmem._offset(entries, 8 << 20, job, "a", 6 << 20) == 0
    with pytest.raises(errors.SetupError, match=rf"8 MiB has no room .* Config.nvshmem_bytes at least {12 << 20}"):
        nvshmem._offset(entries, 8 << 20, job, "b", 6 << 20)
    with pytest.raises(errors.SetupError, match="in another process"):
        nvshmem._offset([], 8 << 20, job, "a", 5 << 20)


class Module:
    """jax_ep._nvshmem and jax_ep._cuda of one process, as far as set-up uses them."""

    carrier, params_bytes = 7, 96

    def __init__(self):
        self.calls = []

    def unique_id(self):
        return b"\1" * 128

    def init(self, *args):
        self.calls.append(("init", *args))
        time.sleep(0.02)

    def allocate(self, size, device):
        time.sleep(0.06)
        return 1 << 40

    def reachable(self, base, num_pes):
        return [base] + [0] * (num_pes - 1)

    def __getattr__(self, name):
        return lambda *args: self.calls.append((name, *args))


def test_set_up_of_two_processes(monkeypatch):
    """Process 1 takes id and size of process 0; settings are those of the first program; a failure lasts."""
    service = Service()
    barriers = []
    service.wait_at_barrier = lambda name, timeout_ms: barriers.append(name)
    soon = time.monotonic() + 20
    monkeypatch.setattr(nvshmem, "set_environment", lambda variables: variables)
    monkeypatch.setattr(nvshmem.atexit, "register", lambda *args: None)
    for p, size in ((0, 3 << 20), (1, 5 << 20)):
        module = Module()
        monkeypatch.setattr(nvshmem, "_world", nvshmem._World())
        monkeypatch.setattr(nvshmem, "load", lambda module=module: module)
        monkeypatch.setattr(_ffi, "_module", module)
        assert not nvshmem.is_set_up()
        nvshmem.configure(jax_ep.Config(nvshmem_bytes=16 << 20 if p == 0 else None))
        at = nvshmem.place(records.World(p, 2, service), f"key{p}", size, 0, True, soon)
        assert at == (0, 3 << 20)[p] and nvshmem.is_set_up()
        ms = nvshmem.setup_ms()
        assert ms["nvshmem_init"] >= 20 and ms["nvshmem"] >= 60
        assert sum(ms.values()) == pytest.approx(nvshmem._world.seconds * 1e3)
        nvshmem.configure(jax_ep.Config(nvshmem_bytes=1 << 30))  # too late: it is read once
        assert ("init", p, 2, b"\1" * 128, 0) in module.calls
        assert ("set_symmetric_heap", 1 << 40, 16 << 20, 0, 7, 96, [1 << 40, 0]) in module.calls
        assert len(barriers) == 2 * (p + 1)
    with pytest.raises(errors.SetupError, match="earlier job"):
        nvshmem.place(records.World(0, 4, service), "key", 1 << 20, 0, True, soon)


def test_a_process_that_does_not_come_is_a_time_out(monkeypatch):
    service = Service()

    def nobody(name, timeout_ms):
        raise RuntimeError("DEADLINE_EXCEEDED")

    service.wait_at_barrier = nobody
    monkeypatch.setattr(nvshmem, "_world", nvshmem._World())
    monkeypatch.setattr(nvshmem, "load", Module)
    monkeypatch.setattr(nvshmem, "set_environment", lambda variables: variables)
    for _ in range(2):
        with pytest.raises(errors.SetupTimeout, match="not all 2 processes of the job set NVSHMEM up"):
            nvshmem.place(records.World(0, 2, service), "key", 1 << 20, 0, True, time.monotonic() + 1)


# --- the choice -------------------------------------------------------------------------------------------------


def test_nodes_on_hosts():
    groups = (((0, 0), (1, 0), (2, 0), (3, 0)),)
    known = {p: record("a" if p < 2 else "b") for p in range(4)}
    assert "2 hosts" in records.why_not(groups, known) and "ranks_per_node" in records.why_not(groups, known)
    assert records.why_not(groups, known, num_nodes=2) == ""
    assert records.why_not(groups, known, num_nodes=4) == ""
    mixed = (((0, 0), (2, 0), (1, 0), (3, 0)),)
    assert "2 hosts" in records.why_not(mixed, known, num_nodes=2)
    assert records.num_hosts(groups, known) == 2 and records.num_hosts(groups[:1], dict.fromkeys(known, known[0])) == 1


def test_records_that_forbid_nvshmem():
    assert records.why_not_nvshmem({0: record("a"), 1: record("b")}) == ""
    assert records.why_not_nvshmem({0: record("a"), 1: record("b", nvshmem="x")}) == "process 1: x"
    assert records.why_not_nvshmem({0: record("a"), 1: {"reason": "no GPU"}}) == "process 1: no GPU"
    assert "process 0 has 2 GPUs" in records.why_not_nvshmem({0: record("a", gpus=2), 1: record("b")})


@pytest.fixture
def pair(monkeypatch):
    """Two processes whose records are `known`."""
    known = {0: record("a"), 1: record("a")}
    process = types.SimpleNamespace(
        world=records.World(0, 2, None), has=lambda groups: True, read_records=lambda processes, deadline: known
    )
    monkeypatch.setattr(bootstrap, "_this_process", lambda: process)
    monkeypatch.setattr(bootstrap, "_local_problem", lambda: "")
    return known


def test_transport_by_hosts_and_config(pair, monkeypatch):
    auto, forced = jax_ep.Config(ranks_per_node=1), jax_ep.Config(ranks_per_node=1, transport="nvshmem")
    assert not bootstrap.over_nvshmem(PAIR, auto, 2) and not bootstrap.over_nvshmem(PAIR, forced, 1)
    assert bootstrap.over_nvshmem(PAIR, forced, 2)
    pair[1]["nvshmem"] = "install it"
    assert bootstrap.can_use_cuda(PAIR, auto, 2) == ""  # one host needs no NVSHMEM
    assert bootstrap.can_use_cuda(PAIR, forced, 2) == "process 1: install it"
    pair[1] |= record("b", nvshmem="install it")
    assert bootstrap.over_nvshmem(PAIR, auto, 2)
    assert bootstrap.can_use_cuda(PAIR, auto, 2) == "process 1: install it"
    monkeypatch.setattr(_ffi, "_module", types.SimpleNamespace(num_devices=lambda: 1))
    with pytest.raises(errors.SetupError, match="implementation='cuda' is not possible: process 1: install it"):
        bootstrap.prepare(PAIR, auto, 2)


def test_a_mesh_of_some_processes_cannot_be_the_first(pair):
    bootstrap._this_process().world = records.World(0, 3, None)
    forced = jax_ep.Config(ranks_per_node=1, transport="nvshmem")
    assert "2 of the job's 3 processes" in bootstrap.can_use_cuda(PAIR, forced, 2)


HALF, BOTH = (((0, 0), (1, 0)),), (((0, 0), (1, 0)), ((2, 0), (3, 0)))


@pytest.mark.parametrize("groups", [HALF, BOTH])
@pytest.mark.parametrize(("hosts", "is_one_host"), [("aabb", False), ("aaaa", True)])
def test_one_host_is_asked_of_the_whole_job(monkeypatch, groups, hosts, is_one_host):
    """Groups within hosts, of all processes or of some: NVSHMEM's world is the job."""
    known = {p: record(host) for p, host in enumerate(hosts)}
    process = types.SimpleNamespace(
        world=records.World(0, 4, None),
        has=lambda groups: True,
        read_records=lambda processes, deadline: {p: known[p] for p in processes},
        wait_warm=lambda deadline: None,
    )
    monkeypatch.setattr(bootstrap, "_this_process", lambda: process)
    monkeypatch.setattr(bootstrap, "_local_problem", lambda: "")
    monkeypatch.setattr(nvshmem, "_world", nvshmem._World())
    placed = []
    monkeypatch.setattr(nvshmem, "place", lambda job, key, size, device, one_host, deadline: placed.append(one_host))
    module = Module()
    module.attach = lambda key, num_sms: False
    monkeypatch.setattr(_ffi, "_module", module)

    def bind():
        bootstrap.bind("nvshmem-key", groups, 2, 64, 0, 2, 2, 4, 20.0)

    bind()
    assert placed == [is_one_host] and module.calls[-1][:2] == ("bind", "nvshmem-key")
    known[3] = {"reason": "no CUDA device"}  # of no group here, and still needed
    if groups == HALF:
        with pytest.raises(errors.SetupError, match="process 3: no CUDA device"):
            bind()
        nvshmem._world.job = process.world  # set up: a later group needs nobody else
        bind()
        assert len(placed) == 2


def test_calls_over_nvshmem_have_arenas_of_their_own(usable, make_mesh):
    """By the key alone, which XLA's instantiate hands to Python."""
    keys = {}
    for transport in ("auto", "nvshmem"):
        config = jax_ep.Config(ranks_per_node=1, transport=transport)

        def fn(x, idx, config=config):
            recv = jax_ep.dispatch(x, idx, num_experts=4, axis_name="ep", config=config, implementation="cuda")
            return jax_ep.combine(recv.x, recv.handle)

        run = jax.shard_map(fn, mesh=make_mesh(2), in_specs=P("ep"), out_specs=P("ep"))
        del usable[:]
        jax.jit(run).trace(jnp.ones((8, 16), jnp.bfloat16), jnp.zeros((8, 2), jnp.int32)).lower(
            lowering_platforms=("cuda",)
        )
        keys[transport] = {call[0] for call in usable if isinstance(call[0], str)}
        assert keys[transport] and all(
            group.is_over_nvshmem(key) == (transport == "nvshmem") for key in keys[transport]
        )
    assert len("nvshmem-") + 32 == len(next(iter(keys["nvshmem"]))) < 64
