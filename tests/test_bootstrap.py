"""jax_ep/_ffi.py, records.py, bootstrap.py, debug.py and the parts of cuda/runtime that need no GPU.

Covers: import without a GPU, FFI API versions, what records allow or forbid, publishing and collecting through
a coordination service, barriers, typed errors out of the runtime's texts, failures logged once, programs for
another machine, the socket service and the rendezvous (a C++ test), the built module without a GPU.
"""

import json
import logging
import pathlib
import shutil
import subprocess
import sys
import time
import types

import pytest

import jax_ep
from jax_ep import _ffi, bootstrap, debug, errors, records, tuning

ROOT = pathlib.Path(jax_ep.__file__).parent.parent
needs_extension = pytest.mark.skipif(bool(_ffi.available()), reason="needs the CUDA extension")


def test_import_starts_no_backend():
    script = (
        "import jax_ep, jax_ep.debug; from jax._src import xla_bridge; assert not xla_bridge._backends; "
        "print(jax_ep.debug.stats()['calls'])"
    )
    out = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert out.returncode == 0, out.stderr
    assert out.stdout.strip() == "0"


# --- the extension ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("built", "runtime", "is_good"),
    [
        ((0, 1), (0, 1), True),
        ((0, 1), (0, 5), True),
        ((0, 1), None, True),  # no header found: XLA decides
        ((0, 5), (0, 3), False),
        ((1, 0), (0, 5), False),
        ((0, 1), (1, 0), False),
    ],
)
def test_ffi_versions(built, runtime, is_good):
    problem = _ffi.version_problem(built, runtime)
    assert (problem == "") == is_good
    assert is_good or ("rebuild" in problem and f"{built[0]}.{built[1]}" in problem)


def test_runtime_version_is_found():
    version = _ffi.runtime_api_version()
    assert version is not None and version[0] == 0 and version[1] >= 1


def test_without_extension_everything_has_a_reason(monkeypatch):
    monkeypatch.setattr(_ffi, "_module", None)
    monkeypatch.setattr(_ffi, "_reason", "not built")
    groups = (((0, 0), (0, 1)),)
    assert bootstrap.can_use_cuda(groups) == "not built"
    with pytest.raises(errors.SetupError, match="not built"):
        bootstrap.prepare(groups)
    with pytest.raises(errors.SetupError, match="not built"):
        _ffi.arena_shape(2, 8, 256, 2, 1 << 20)
    assert _ffi.protocol() == 0 and _ffi.num_devices() == 0
    bootstrap.check()
    bootstrap.reset()
    stats = debug.stats()
    assert stats["unavailable"] == "not built" and stats["calls"] == 0
    assert set(stats["setup_ms"]) == {"memory", "kernels", "peers", "records", "attach", "nvshmem", "nvshmem_init"}


@needs_extension
def test_module_without_a_gpu():
    module = _ffi.module()
    assert _ffi.arena_shape(8, 256, 14336, 8, 16 << 20) == (512, 16 << 20, 0, 1)
    assert _ffi.latency_arena_shape(8, 1, 256, 14336, 8, 128, 2) == (512, 32 << 20, 2, 1)
    assert _ffi.latency_arena_shape(8, 2, 256, 14336, 8, 128, 2) == (512, 64 << 20, 2, 2)
    targets = module.targets()
    parts = ("", "_latency", "_start", "_done")
    names = {f"jax_ep_{op}{part}" for op in ("dispatch", "redispatch", "combine") for part in parts}
    assert set(targets) == names | {f"{name}_graph" for name in names}
    assert all("execute" in stages and "instantiate" in stages for stages in targets.values())
    assert module.ffi_api_version <= _ffi.runtime_api_version()
    assert set(debug.stats()) == {"unavailable", "setup_ms", *debug._COUNTS}
    if _ffi.num_devices() == 0:
        groups = (((0, 0), (0, 1)),)
        assert bootstrap.can_use_cuda(groups) == "no CUDA device in this process"
        bootstrap.prepare(groups)  # compiling for another machine
        with pytest.raises(RuntimeError, match="^SetupError: this process has no CUDA device 0"):
            module.warm_up([0])


# --- records ----------------------------------------------------------------------------------------------------


def record(*uuids, **changes):
    device = {"num_sms": 132, "compute_capability": [9, 0], "pool_exportable": True, "no_access": []}
    devices = [{**device, "local_hardware_id": i, "uuid": uuid} for i, uuid in enumerate(uuids)]
    same = {"reason": "", "protocol": 1, "host": "h", "address": "a", "nonce": ""}
    same |= {"launches_block": False, "reorders_graphs": False}
    return {**same, "devices": devices} | changes


PAIR = (((0, 0), (1, 0)),)


def test_good_records():
    assert records.why_not(PAIR, {0: record("x"), 1: record("y")}) == ""
    assert records.why_not(PAIR, {0: record("x"), 1: record("x")}) == ""  # two processes on one GPU
    assert records.why_not([[(0, 0), (0, 1)]], {0: record("x", "y")}) == ""


@pytest.mark.parametrize(
    ("second", "reason"),
    [
        (record("y", reason="not built"), "process 1: not built"),
        ({"reason": "no CUDA device in this process"}, "process 1: no CUDA device"),
        (record("y", protocol=2), "different versions"),
        (record("y", host="other"), "2 hosts"),
        (record(), "process 1 has no CUDA device 0"),
    ],
)
def test_bad_records(second, reason):
    both = {0: record("x"), 1: second}
    assert reason in records.why_not(PAIR, both)
    published = {process: json.loads(json.dumps(one)) for process, one in both.items()}  # as the others read it
    assert records.why_not(PAIR, published) == records.why_not(PAIR, both)


def test_old_device_and_missing_peer_access():
    old = record("y")
    old["devices"][0]["compute_capability"] = [7, 5]
    assert "compute capability (7, 5)" in records.why_not(PAIR, {0: record("x"), 1: old})
    blocked = record("y")
    blocked["devices"][0]["no_access"] = ["x"]
    assert "no peer access" in records.why_not(PAIR, {0: record("x"), 1: blocked})
    assert records.why_not((((0, 0),), ((1, 0),)), {0: record("x"), 1: blocked}) == ""  # not in one group


def test_hosts_matter_inside_a_group_only():
    both = {0: record("x", "y", host="h0"), 1: record("z", "w", host="h1")}
    assert records.why_not((((0, 0), (0, 1)), ((1, 0), (1, 1))), both) == ""
    assert "hosts" in records.why_not((((0, 0), (1, 0)), ((0, 1), (1, 1))), both)


def test_ordinals_replace_positions():
    both = {0: record("x", "y"), 1: record("z")}
    both[0]["devices"][1]["local_hardware_id"] = 6
    both[1]["devices"][0]["local_hardware_id"] = 3
    assert records.with_ordinals((((0, 0), (1, 0)),), both) == [[(0, 0), (1, 3)]]
    assert records.with_ordinals((((0, 1), (1, 0)),), both) == [[(0, 6), (1, 3)]]


def test_placement():
    """Two groups of three on two GPUs: four ranks share the first, one of a group is alone on the second."""
    known = {p: record("x" if p < 4 else "y") for p in range(6)}
    groups = (((0, 0), (1, 0), (4, 0)), ((2, 0), (3, 0), (5, 0)))
    assert records.placement(groups, known) == tuning.Placement(max_num_sms=33, ranks_on_gpu=4, group_on_gpu=1)
    assert records.placement(PAIR, {0: record("x"), 1: record("x")}) == tuning.Placement(66, 2, 2)


def test_no_placement_for_another_machine(monkeypatch):
    monkeypatch.setattr(bootstrap, "_local_problem", lambda: "no GPU")
    assert bootstrap.placement(PAIR) is None
    monkeypatch.setattr(bootstrap, "_local_problem", lambda: "")
    monkeypatch.setattr(bootstrap, "_jax_devices", lambda: [])
    assert bootstrap.placement(PAIR) is None


def test_what_calls_over_nodes_need_beside():
    growing, few = record("y"), record("x")
    growing["devices"][0]["pool_exportable"] = False
    few["devices"][0]["num_sms"] = 3  # two ranks share them
    assert records.why_not_over_nodes(PAIR, {0: record("x"), 1: record("y")}) == ""
    assert "pool of device (1, 0)" in records.why_not_over_nodes(PAIR, {0: record("x"), 1: growing})
    assert records.why_not_over_nodes([[(1, 0)]], {1: growing}) == ""  # one process reaches all it has
    assert "two SMs each" in records.why_not_over_nodes(PAIR, {0: few, 1: few})
    blocking = record("y", launches_block=True)
    assert "process 1 has CUDA_LAUNCH_BLOCKING" in records.why_not_over_nodes(PAIR, {0: record("x"), 1: blocking})
    assert records.why_not(PAIR, {0: record("x"), 1: blocking}) == ""  # one kernel each within a node


@pytest.mark.parametrize(("value", "expected"), [(None, False), ("", False), ("0", False), ("1", True)])
def test_launches_that_block_are_in_the_record(monkeypatch, value, expected):
    monkeypatch.delenv("CUDA_LAUNCH_BLOCKING", raising=False)
    if value is not None:
        monkeypatch.setenv("CUDA_LAUNCH_BLOCKING", value)
    assert records.describe_process(FakeCuda(0), [], "", b"")["launches_block"] is expected


CONCURRENT = "--xla_gpu_command_buffer_scheduling_mode=CONCURRENT"


@pytest.mark.parametrize(
    ("value", "expected"), [(None, False), (f"--a=1 {CONCURRENT} --b", True), (CONCURRENT[:-10] + "LHS", False)]
)
def test_graphs_without_order_are_in_the_record(monkeypatch, value, expected):
    monkeypatch.delenv("XLA_FLAGS", raising=False)
    if value is not None:
        monkeypatch.setenv("XLA_FLAGS", value)
    assert records.describe_process(FakeCuda(0), [], "", b"")["reorders_graphs"] is expected


def test_what_keeps_calls_from_being_recorded(monkeypatch):
    """The same on all ranks, whichever process has the setting; nobody knows it of another machine."""
    assert records.why_not_recorded({0: record("x"), 1: record("y")}) == ""
    for change, words in (("launches_block", "CUDA_LAUNCH_BLOCKING"), ("reorders_graphs", "CONCURRENT")):
        reason = records.why_not_recorded({0: record("x"), 1: record("y", **{change: True})})
        assert reason.startswith("process 1 has ") and words in reason
    monkeypatch.setattr(bootstrap, "_local_problem", lambda: "no CUDA device in this process")
    assert bootstrap.why_not_recorded(PAIR) == ""


def test_num_sms_is_the_smallest_share():
    uneven = {0: record("x"), 1: record("x"), 2: record("x"), 3: record("y")}
    groups = (((0, 0), (1, 0)), ((2, 0), (3, 0)))
    assert records.max_num_sms(groups, uneven) == 132 // 3  # other groups run at the same time
    records.check_num_sms(44, 44)
    records.check_num_sms(0, 44)
    with pytest.raises(ValueError, match="num_sms=45.* 44"):
        records.check_num_sms(45, 44)
    records.check_num_sms(44, 44, num_nodes=2)
    with pytest.raises(ValueError, match=r"num_sms .*node_sms take 45 SMs together.* 44; lower num_sms and node_sms"):
        records.check_num_sms(45, 44, num_nodes=2)
    few = record("x")
    few["devices"][0]["num_sms"] = 1
    assert "more ranks share a GPU" in records.why_not(PAIR, {0: few, 1: few})


def test_nodes_need_room_for_carriers_and_pools(monkeypatch):
    """16 ranks of one GPU, 8 SMs each; asked for while lowering, and by programs that were never lowered here."""
    known = {p: record("x") for p in range(16)}
    groups = (tuple((p, 0) for p in range(16)),)
    process = types.SimpleNamespace(
        world=types.SimpleNamespace(process_index=0), has=lambda groups: True, wait_warm=lambda deadline: None,
        read_records=lambda processes, deadline: known,
    )  # fmt: skip
    bound = []
    module = types.SimpleNamespace(
        attach=lambda *a: False, add_process=lambda *a: None, bind=lambda *a: bound.append(a)
    )
    monkeypatch.setattr(bootstrap, "_this_process", lambda: process)
    monkeypatch.setattr(bootstrap, "_local_problem", lambda: "")
    monkeypatch.setattr(_ffi, "_module", module)
    monkeypatch.setattr(_ffi, "num_devices", lambda: 1)
    monkeypatch.setattr(bootstrap, "can_use_cuda", lambda *a: "")

    def prepare(num_nodes, **config):
        bootstrap.prepare(groups, jax_ep.Config(**config), num_nodes)

    def bind(num_nodes, num_sms):
        bootstrap.bind("key", groups, 16, 64, 1 << 20, 0, num_nodes, num_sms, 5.0)

    prepare(4)
    prepare(4, node_sms=7)
    prepare(4, num_sms=6, node_sms=2)
    prepare(4, num_sms=7)  # what is left carries
    prepare(1, node_sms=16)  # means nothing on one node
    for config in (dict(node_sms=8), dict(num_sms=6, node_sms=3), dict(num_sms=8)):  # one must carry
        with pytest.raises(ValueError, match="take 9 SMs together.* 8; lower"):
            prepare(4, **config)
    bind(4, 8)
    assert [b[0] for b in bound] == ["key"]
    with pytest.raises(ValueError, match="take 9 SMs together"):
        bind(4, 9)
    known[5]["devices"][0]["pool_exportable"] = False
    bind(1, 8)  # staged
    with pytest.raises(errors.SetupError, match="pool of device"):
        bind(4, 8)
    assert len(bound) == 2


class FakeService:
    """The coordination service's client, as far as records.py uses it."""

    def __init__(self):
        self.values = {}
        self.barriers = []

    def key_value_set(self, key, value, allow_overwrite=False):
        assert allow_overwrite or key not in self.values
        self.values[key] = value

    def blocking_key_value_get(self, key, timeout_ms):
        if key not in self.values:
            raise RuntimeError(f"DEADLINE_EXCEEDED: {key} after {timeout_ms} ms")
        return self.values[key]

    def wait_at_barrier(self, name, timeout_ms):
        self.barriers.append(name)
        if timeout_ms < 1000:
            raise RuntimeError("DEADLINE_EXCEEDED: Barrier timed out")


def test_publish_and_collect():
    client = FakeService()
    zero, one = (records.World(index, 2, client) for index in (0, 1))
    soon = time.monotonic() + 1
    with pytest.raises(errors.SetupTimeout, match="process 1 published no set-up record"):
        records.collect(zero, 1, soon)
    records.publish(one, record("y"))
    records.publish(one, record("z"))  # after another lowering: the same call, no error
    assert records.collect(zero, 1, soon) == record("z")
    with pytest.raises(errors.SetupError, match=r"jax\.distributed\.initialize"):
        records.collect(records.World(0, 1, None), 1, soon)


def test_barriers_have_names_of_their_own():
    world = records.World(0, 2, FakeService())
    records.barrier(world, "reset", 5)
    with pytest.raises(errors.SetupTimeout, match=r"not all 2 processes called jax_ep\.reset\(\)"):
        records.barrier(world, "reset", 0.5)
    records.barrier(world, "reset", 5)
    assert len(set(world.client.barriers)) == 3
    records.barrier(records.World(0, 1, None), "reset", 5)


class FakeCuda:
    """The extension of one process, as far as set-up uses it."""

    protocol = 1
    machine_code = (80, 90)

    def __init__(self, process):
        self.process, self.calls = process, []

    def num_devices(self):
        return 2

    def device_info(self, ordinal):
        return {"uuid": f"GPU-{self.process}{ordinal}", "num_sms": 132, "compute_capability": (9, 0)}

    def can_access_peer(self, device, peer):
        return True

    def register_pool(self, ordinal, small, large):
        return {"base": 1, "bytes": 2, "exportable": True}

    def start_service(self, nonce):
        self.calls.append("start_service")
        return f"service-{self.process}"

    def failures(self):
        return []

    def attach(self, key, num_sms):
        return any(call[:2] == ("bind", key) and num_sms <= call[9] for call in self.calls)

    def __getattr__(self, name):
        return lambda *args: self.calls.append((name, *args))


def test_two_processes_set_up_and_bind(monkeypatch):
    # Process 1 uses its second GPU only: ranks are (0, first), (1, first), ordinals 0 and 1.
    client = FakeService()
    devices = {0: [types.SimpleNamespace(local_hardware_id=0)], 1: [types.SimpleNamespace(local_hardware_id=1)]}
    modules = {0: FakeCuda(0), 1: FakeCuda(1)}
    monkeypatch.setattr(bootstrap, "_local_problem", lambda: "")
    monkeypatch.setattr(bootstrap, "_register_pool", lambda device: None)
    monkeypatch.setattr(bootstrap, "_start_watcher", lambda: None)
    monkeypatch.setattr(bootstrap, "_process", None)

    def become(process):
        world = records.World(process, 2, client)
        monkeypatch.setattr(records, "current_world", lambda: world)
        monkeypatch.setattr(bootstrap, "_jax_devices", lambda: devices[process])
        monkeypatch.setattr(_ffi, "_module", modules[process])

    short = types.SimpleNamespace(setup_timeout_s=0.2, num_sms=None)
    become(0)
    with pytest.raises(errors.SetupTimeout, match="process 1"):  # it has not lowered the program yet
        bootstrap.can_use_cuda(PAIR, short)
    become(1)
    assert bootstrap.can_use_cuda(PAIR, short) == ""  # process 0 had published before it waited
    become(0)
    bootstrap.prepare(PAIR, short)
    with pytest.raises(ValueError, match="num_sms=133"):
        bootstrap.prepare(PAIR, types.SimpleNamespace(setup_timeout_s=5, num_sms=133))
    groups = [list(one) for one in PAIR]
    assert bootstrap.bind_callback("key", groups, 2, 512, 1 << 20, 4, 1, 0, 5.0) == ""
    assert bootstrap.bind_callback("key", groups, 2, 512, 1 << 20, 4, 1, 133, 5.0).startswith("ValueError: ")
    bootstrap._process._known[1]["launches_block"] = True  # a deserialised program was not lowered here: asked again
    assert "process 1 has CUDA_LAUNCH_BLOCKING" in bootstrap.why_not_recorded(groups)
    assert "CUDA_LAUNCH_BLOCKING" in bootstrap.bind_callback("nodes", groups, 2, 512, 1 << 20, 0, 2, 0, 5.0)
    calls = modules[0].calls
    nonce = bootstrap._nonce()
    assert ("warm_up", [0]) in calls and calls.index("start_service") < calls.index(("warm_up", [0]))
    assert ("add_process", 1, "service-1", nonce) in calls
    assert bootstrap.bind_callback("key", groups, 2, 512, 1 << 20, 4, 1, 0, 5.0) == ""  # attaches: no second bind
    (bind,) = [c for c in calls if c[0] == "bind"]
    assert bind[:10] == ("bind", "key", [[(0, 0), (1, 1)]], 0, 2, 512, 1 << 20, 4, 1, 132) and 0 < bind[10] <= 5
    assert bind[11] == [[0, 1]]  # two GPUs, by their UUIDs
    assert bootstrap.records_ms() >= 0


# --- errors and failures ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("raised", "kind", "text"),
    [
        (RuntimeError("SetupTimeout: no answer: late"), errors.SetupTimeout, "no answer: late"),
        (RuntimeError("SetupError: cuMemMap: bad"), errors.SetupError, "cuMemMap: bad"),
        (RuntimeError("ValueError: num_sms"), ValueError, "num_sms"),
        (ValueError("as it is"), ValueError, "as it is"),
        (KeyError("x"), errors.SetupError, "KeyError: 'x'"),
        (RuntimeError("annotations: not one of ours"), errors.SetupError, "RuntimeError: annotations: not one of ours"),
    ],
)
def test_texts_become_types_and_back(raised, kind, text):
    error = bootstrap._typed(raised)
    assert type(error) is kind and str(error) == text
    assert bootstrap._error_text(raised) == f"{kind.__name__}: {text}"


def failure(name, device=0, **changes):
    known = dict(op="dispatch", phase="announce", rank=2, peer=5, call=17, expected=1, seen=0, key="k", device=device)
    return {"error": name, "text": f"{name}: dispatch call 17: rank 2 waited: long", **known, **changes}


class FakeModule:
    def __init__(self, failures):
        self._failures = failures

    def failures(self):
        return self._failures


def test_check_raises_the_most_severe(monkeypatch):
    monkeypatch.setattr(_ffi, "_reason", "")
    monkeypatch.setattr(_ffi, "_module", FakeModule([]))
    bootstrap.check()
    monkeypatch.setattr(_ffi, "_module", FakeModule([failure("PeerFailed"), failure("PeerTimeout", 1)]))
    with pytest.raises(errors.PeerTimeout, match=r"^dispatch call 17: rank 2 waited: long$") as raised:
        bootstrap.check()
    error = raised.value
    assert (error.op, error.rank, error.peer, error.call, error.phase) == ("dispatch", 2, 5, 17, "announce")


def test_failures_are_logged_once(caplog, monkeypatch):
    monkeypatch.setattr(bootstrap, "_logged", set())
    with caplog.at_level(logging.ERROR, logger="jax_ep"):
        bootstrap.log_failures([failure("PeerTimeout", 0)])
        bootstrap.log_failures([failure("PeerTimeout", 0), failure("PeerFailed", 1)])
    assert [r.getMessage().split(":")[0] for r in caplog.records] == ["PeerTimeout", "PeerFailed"]


def test_program_for_another_machine_binds_nothing(monkeypatch):
    # Two processes' mesh, compiled in a job of one: instantiate must neither fail nor wait.
    monkeypatch.setattr(bootstrap, "_local_problem", lambda: "")
    monkeypatch.setattr(bootstrap, "_jax_devices", lambda: [])
    start = time.monotonic()
    assert bootstrap.bind_callback("key", [[(0, 0), (1, 0)]], 2, 512, 1 << 20, 0, 1, 0, 30.0) == ""
    assert bootstrap.bind_callback("key", [[(0, 0), (0, 1)]], 2, 512, 1 << 20, 0, 1, 0, 30.0) == ""
    assert time.monotonic() - start < 5


# --- C++ --------------------------------------------------------------------------------------------------------


def test_service_and_rendezvous(tmp_path):
    compiler = shutil.which("c++") or shutil.which("g++")
    if compiler is None:
        pytest.skip("needs nvcc's host compiler")
    program = tmp_path / "runtime_test"
    sources = ["cuda/tests/runtime_test.cc", "cuda/runtime/service.cc", "cuda/runtime/rendezvous.cc"]
    flags = ["-std=c++17", "-Wall", "-Wextra", "-Werror", "-pthread", "-I."]
    checkout = pathlib.Path(__file__).parent.parent  # an installed jax_ep has no sources beside it
    subprocess.run([compiler, *flags, *sources, "-o", program], cwd=checkout, check=True, timeout=300)
    out = subprocess.run([program], capture_output=True, text=True, timeout=120)
    assert out.returncode == 0 and out.stdout == "all passed\n", out.stdout + out.stderr


def test_machine_code_or_translation_from_ptx(monkeypatch, caplog):
    """Code for 8.0 runs on 8.6, not on 9.0; a device without any is named in the log before its first call."""
    assert _ffi.has_machine_code((8, 6), [80, 90]) and _ffi.has_machine_code((9, 0), [80, 90])
    assert not _ffi.has_machine_code((10, 0), [80, 90]) and not _ffi.has_machine_code((8, 0), [86])
    monkeypatch.setattr(_ffi, "module", lambda: types.SimpleNamespace(machine_code=[80, 90]))
    devices = [{"compute_capability": [9, 0]}, {"compute_capability": [12, 0]}, {"compute_capability": [12, 0]}]
    with caplog.at_level("WARNING", logger="jax_ep"):
        bootstrap._log_translation(devices)
    assert [r.message for r in caplog.records if "12.0" in r.message and "PTX" in r.message] == caplog.messages
    assert len(caplog.messages) == 1
