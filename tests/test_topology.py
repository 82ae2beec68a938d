"""jax_ep/topology.py and the command of the same name.

Covers: groups on hosts of equal and unequal size, shuffled processes, groups larger than a host; what crosses hosts
before and after; meshes of this process's devices, mistakes; host identities exchanged between four processes; the
command on CPU processes, with rich and without; links as NVML tells them, from a stand-in.
"""

import doctest
import itertools
import os
import random
import re
import socket
import subprocess
import sys
import threading
import types

import jax
import numpy as np
import pytest

import jax_ep
from jax_ep import errors, records, testing, topology
from jax_ep.cli import _links, launch
from jax_ep.cli import topology as command


@pytest.mark.parametrize(
    "what", [topology.make_mesh, topology.mesh_hosts, topology.place, topology.crossing], ids=lambda f: f.__name__
)
def test_docstring_examples(what):
    (example,) = doctest.DocTestFinder().find(
        what, what.__name__, globs={"place": topology.place, "crossing": topology.crossing}
    )
    assert example.examples and doctest.DocTestRunner().run(example).failed == 0


# --- groups on hosts ---------------------------------------------------------------------------------------------


def _spans(hosts, groups):
    return [len({hosts[device] for device in one}) for one in groups]


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize(
    ("per_host", "num_ranks", "spans"),
    [
        ((8, 8), 8, [1, 1]),
        ((8, 8), 4, [1, 1, 1, 1]),
        ((4, 4, 4, 4), 8, [2, 2]),  # whole hosts
        ((3, 3), 2, [1, 1, 2]),  # one group has to span
        ((4, 6, 2), 4, [1, 1, 2]),
        ((6, 2, 2, 2), 4, [1, 2, 2]),
        ((2, 4, 4, 2), 6, [2, 2]),  # a large and a small host each, though the small ones come first and last
        ((5, 7), 3, [1, 1, 1, 2]),
        ((1, 1, 1, 1), 4, [4]),
        ((1, 2, 3), 1, [1] * 6),
    ],
    ids=str,
)
def test_groups_stay_inside_hosts(seed, per_host, num_ranks, spans):
    """Devices in any order: every one is in one group, and no more groups span hosts than must."""
    hosts = [f"h{host}" for host, count in enumerate(per_host) for _ in range(count)]
    random.Random(seed).shuffle(hosts)
    groups = topology.place(hosts, num_ranks)
    assert sorted(device for one in groups for device in one) == list(range(len(hosts)))
    assert all(len(one) == num_ranks for one in groups)
    assert sorted(_spans(hosts, groups)) == spans
    for one in groups:  # ranks of a host are neighbours
        changes = sum(hosts[a] != hosts[b] for a, b in itertools.pairwise(one))
        assert changes == len({hosts[d] for d in one}) - 1
    assert groups == topology.place([hash(h) for h in hosts], num_ranks), "names of hosts do not matter"


def test_large_groups_take_whole_hosts_in_order():
    hosts = ["c", "c", "a", "a", "d", "d", "b", "b"]
    assert topology.place(hosts, 4) == [[0, 1, 2, 3], [4, 5, 6, 7]]
    with pytest.raises(ValueError, match="8 devices cannot be split into groups of num_ranks=3"):
        topology.place(hosts, 3)


class FakeDevice:
    """What `make_mesh` reads of a device."""

    def __init__(self, process_index, number):
        self.process_index, self.id = process_index, number

    def __repr__(self):
        return f"{self.process_index}.{self.id}"


@pytest.fixture
def fake_hosts(monkeypatch):
    """`fake_hosts({process: host})`: a job of these processes; meshes may hold FakeDevices."""

    def use(hosts):
        monkeypatch.setattr(topology, "exchange_hosts", lambda processes, timeout_s: {p: hosts[p] for p in processes})
        monkeypatch.setattr(jax.sharding, "Mesh", lambda grid, names: types.SimpleNamespace(devices=grid, names=names))

    return use


def test_shuffled_processes_are_placed_right(fake_hosts):
    """Two hosts of four devices whose processes are numbered in turns: bytes across hosts before and after."""
    host_of = {process: f"host{process % 2}" for process in range(8)}
    fake_hosts(host_of)
    devices = [FakeDevice(process, 10 * process) for process in range(8)]
    random.Random(0).shuffle(devices)
    mesh = jax_ep.make_mesh({"dp": 2, "ep": 4}, devices=devices)
    after = np.array([[d.process_index for d in row] for row in mesh.devices])
    assert after.tolist() == [[0, 2, 4, 6], [1, 3, 5, 7]]

    idx = np.stack(
        [testing.routing("uniform", num_ranks=4, num_tokens=16, num_topk=2, num_experts=8, seed=s) for s in range(2)]
    )
    before = np.arange(8).reshape(2, 4)  # as jax.make_mesh orders them
    count = {
        name: topology.crossing(np.vectorize(lambda p: p % 2)(groups), idx, num_experts=8)
        for name, groups in (("before", before), ("after", after))
    }
    assert count["after"] == topology.Crossing(0, 0)
    assert 2 * 4 * 16 >= count["before"].num_rank_rows >= count["before"].num_host_rows > 0


def test_several_axes_in_any_order(fake_hosts):
    """The EP axes may stand anywhere and be several; the others run over the rest of the host first."""
    fake_hosts({process: process // 2 % 2 for process in range(8)})
    devices = [FakeDevice(process, process) for process in range(8)]
    mesh = jax_ep.make_mesh({"ep": 2, "dp": 2, "tp": 2}, devices=devices)
    groups = mesh.devices.transpose(1, 2, 0)
    assert [[d.id for d in one] for one in groups.reshape(4, 2)] == [[0, 1], [4, 5], [2, 3], [6, 7]]
    mesh = jax_ep.make_mesh({"b": 2, "dp": 2, "a": 2}, ("a", "b"), devices=devices)
    ranks = mesh.devices.transpose(1, 2, 0).reshape(2, 4)  # (dp, (a, b))
    assert [[d.id for d in one] for one in ranks] == [[0, 1, 4, 5], [2, 3, 6, 7]]


def test_a_group_that_spans_although_it_would_fit_is_said(fake_hosts, caplog):
    fake_hosts({process: process // 3 for process in range(6)})
    devices = [FakeDevice(process, process) for process in range(6)]
    jax_ep.make_mesh({"dp": 2, "ep": 3}, devices=devices)
    assert not caplog.records
    jax_ep.make_mesh({"dp": 3, "ep": 2}, devices=devices)
    assert "1 of 3 EP groups span hosts" in caplog.text


# --- what crosses --------------------------------------------------------------------------------------------------


def test_crossing_counts_ranks_and_hosts_once():
    """Four ranks with two experts each, two hosts."""
    idx = np.full((4, 3, 3), -1)
    idx[0, 0] = 4, 5, 6  # ranks 2, 2, 3: two rows to ranks, one to a host
    idx[0, 1] = 0, 2, -1  # stays
    idx[3, 0] = 1, 7, 99  # rank 0 crosses, 3 is its own, 99 is no expert
    assert topology.crossing([0, 0, 1, 1], idx, num_experts=8) == topology.Crossing(3, 2)
    assert topology.crossing([0, 0, 0, 0], idx, num_experts=8) == topology.Crossing(0, 0)
    assert topology.crossing([0, 1, 2, 3], idx, num_experts=8) == topology.Crossing(4, 4)
    assert topology.crossing(np.zeros((2, 0, 4)), np.zeros((2, 0, 4, 0, 1)), num_experts=4) == topology.Crossing(0, 0)
    with pytest.raises(ValueError, match="expected"):
        topology.crossing([0, 1], idx, num_experts=8)


# --- meshes of real devices ----------------------------------------------------------------------------------------


def test_one_process():
    mesh = jax_ep.make_mesh({"dp": 2, "ep": 4}, devices=jax.devices()[::-1])
    assert mesh.devices.ravel().tolist() == jax.devices()
    assert topology.mesh_hosts(mesh).tolist() == [[0] * 4] * 2


@pytest.mark.parametrize(
    ("sizes", "ep_axis", "message"),
    [
        ({"ep": 3}, "ep", "mesh of 3 devices, but there are 8"),
        ({"ep": -8, "dp": -1}, "ep", "positive sizes"),
        ({"dp": 8}, "ep", "got axes"),
        ({"ep": 8}, ("ep", "ep"), "distinct"),
    ],
)
def test_mistakes(sizes, ep_axis, message):
    with pytest.raises(ValueError, match=message):
        jax_ep.make_mesh(sizes, ep_axis)


class FakeClient:
    def __init__(self, known):
        self.known = known

    def key_value_set(self, key, text, allow_overwrite):
        self.known[key] = text

    def blocking_key_value_get(self, key, timeout_ms):
        if key not in self.known:
            raise RuntimeError("DEADLINE_EXCEEDED: no key")
        return self.known[key]


def test_exchange_of_host_identities(monkeypatch):
    client = FakeClient({"jax_ep/host/0": "first"})
    monkeypatch.setattr(records, "current_world", lambda: records.World(1, 3, client))
    own = records.host_identity()
    assert topology.exchange_hosts({0, 1}, 1) == {0: "first", 1: own}
    assert client.known["jax_ep/host/1"] == own
    with pytest.raises(errors.SetupTimeout, match="process 2 published no host identity within 1 s"):
        topology.exchange_hosts({0, 2}, 1)
    with pytest.raises(errors.SetupError, match="devices of process 3, but this job has 3"):
        topology.exchange_hosts({3}, 1)


RANK = """
import jax, jax_ep
from jax_ep import records, topology
# Hosts as a test wants them; how they are exchanged and used is as ever.
records.host_identity = lambda: "even" if jax.process_index() % 2 == 0 else "odd"
mesh = jax_ep.make_mesh({"dp": 2, "ep": 2})
print([[d.process_index for d in row] for row in mesh.devices], topology.mesh_hosts(mesh).tolist(), flush=True)
"""


@pytest.mark.multiprocess
def test_processes_agree(tmp_path):
    script = tmp_path / "rank.py"
    script.write_text(RANK)
    lines = []
    assert launch.run([str(script)], launch.Launch(ranks=4, timeout_s=120, platform="cpu"), lines.append) == 0, lines
    said = [line.partition("] ")[2] for line in lines if "[[" in line]
    assert said == ["[[0, 2], [1, 3]] [[0, 0], [1, 1]]"] * 4


# --- the command -----------------------------------------------------------------------------------------------------


@pytest.mark.multiprocess
def test_command_under_the_launcher():
    """Two processes with two devices: every pair is measured, and only process 0 prints."""
    lines = []
    how = launch.Launch(ranks=2, timeout_s=200, platform="cpu", cpu_devices=2)
    assert launch.run(["-m", "jax_ep", "topology", "--mib", "0.25"], how, lines.append) == 0, "\n".join(lines)
    text = "\n".join(lines)
    assert "4 ranks, 2 processes, 1 host" in text
    pairs = [line.split() for line in lines if re.match(r"\[0\]\s+\d-\d\s", line)]
    assert len(pairs) == 6 and all(float(line[-1]) > 0 for line in pairs), text
    assert not any("transport" in line or " host" in line for line in lines if line.startswith("[1]")), text


@pytest.mark.parametrize("has_rich", [True, False])
def test_command_in_one_process(capsys, monkeypatch, has_rich):
    """Time for one pair only: the table says which were not measured."""
    if not has_rich:
        monkeypatch.setitem(sys.modules, "rich.table", None)
        monkeypatch.setitem(sys.modules, "rich.console", None)
    monkeypatch.setattr(command, "may_go_on", lambda deadline, number: number < 1)
    assert command.main(["--mib", "0.1"]) == 0
    out = capsys.readouterr().out
    assert "8 ranks, 1 process, 1 host" in out and "27 of 28 pairs were not measured" in out
    assert ("━" in out or "─" in out) == has_rich
    pairs = {line.split()[0]: line.split()[1:] for line in out.splitlines() if re.match(r"\s+\d-\d\s", line)}
    assert len(pairs) == 28 and float(pairs["0-1"][-1]) > 0
    assert pairs["0-2"] == ["same", "-", "xla", "-"]


def test_one_pair_at_a_time(make_mesh):
    """The measured program sends the buffer of one rank away and back, and nothing else, as often as it says."""
    mesh = make_mesh(4)
    program = command._ping_pong(mesh, 1, 3, 5)
    x = np.arange(1, 5, dtype=np.float32)[:, None] * np.ones(3, np.float32)
    assert np.asarray(program(x)).tolist() == [[0] * 3, [2] * 3, [0] * 3, [0] * 3]
    text = program.lower(x).as_text()
    assert "[[1, 3]]" in text and "[[3, 1]]" in text and text.count('"stablehlo.collective_permute"(') == 2
    assert sorted(command._pairs(4)) == list(itertools.combinations(range(4), 2))


def test_a_step_that_hangs_ends_the_process(monkeypatch, capsys):
    left = threading.Event()
    monkeypatch.setattr(command, "PATIENCE_S", 0.05)
    monkeypatch.setattr(command.os, "_exit", lambda status: status == command.STUCK and left.set())
    watchdog = command._Watchdog()
    watchdog.feed("what is soon over")
    watchdog.feed("ranks 2 and 5")
    assert left.wait(10)
    watchdog.end()
    assert capsys.readouterr().err == "topology: stuck for 0.05 s at ranks 2 and 5\n"


def test_options(monkeypatch, capsys):
    called = []
    for name in ("JAX_NUM_PROCESSES", "JAX_PROCESS_ID"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(jax.distributed, "initialize", lambda: called.append("initialize"))
    monkeypatch.setattr(command, "_run", lambda *args: called.append(args[:2]))
    assert command.main(["--distributed", "--mib", "0.5", "--seconds", "7"]) == 0
    assert called == ["initialize", (2**19, 7.0)]
    with pytest.raises(SystemExit):
        command.main(["--mib", "0"])
    assert "--mib must be positive" in capsys.readouterr().err


@pytest.mark.multiprocess
def test_processes_that_no_launcher_has_started():
    """As docs/multihost.md starts them on Kubernetes: by variables, of which JAX itself reads the first only."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{probe.getsockname()[1]}"
    command = [sys.executable, "-m", "jax_ep", "topology", "--distributed", "--mib", "0.1"]
    variables = {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": "", "JAX_COORDINATOR_ADDRESS": address, "JAX_NUM_PROCESSES": "2"}
    processes = [
        subprocess.Popen(
            command,
            env=os.environ | variables | {"JAX_PROCESS_ID": str(i)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for i in range(2)
    ]
    try:
        outputs = [process.communicate(timeout=120)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert [process.returncode for process in processes] == [0, 0], outputs
    assert "2 ranks, 2 processes, 1 host" in outputs[0] and "0-1" in outputs[0]


def test_what_is_known_is_shown_when_a_pair_fails(monkeypatch, capsys):
    def measure(mesh, x, one, other):
        if (one, other) == (2, 3):
            raise RuntimeError("no way between them")
        return 12.5

    monkeypatch.setattr(command, "_measure", measure)
    with pytest.raises(RuntimeError, match="no way"):
        command.main([])
    out = capsys.readouterr().out
    assert out.count("12.5") == 2 and "26 of 28 pairs were not measured" in out


def test_links_without_nvml(monkeypatch):
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert _links.links(["GPU-a"]) == {}


@pytest.fixture
def nvml(monkeypatch):
    """Four GPUs: a and b behind a switch (18 links each), b and c with 2 links of their own, d on PCIe."""
    fake = types.ModuleType("pynvml")
    gpus = ["GPU-a", "GPU-b", "GPU-c", "GPU-d"]
    remote = {
        "GPU-b": ["bus-GPU-c"] * 2 + ["bus-switch"] * 16,
        "GPU-a": ["bus-switch"] * 18,
        "GPU-c": ["bus-GPU-b"] * 2,
    }

    class NVMLError(Exception):
        pass

    def link_state(gpu, link):
        if link >= len(remote.get(gpu, ())):
            raise NVMLError
        return 1

    def remote_end(gpu, link):
        if remote[gpu][link] == "bus-switch" and link % 2:  # some drivers do not say
            raise NVMLError
        return types.SimpleNamespace(busId=remote[gpu][link])

    fake.NVMLError, fake.NVML_NVLINK_MAX_LINKS = NVMLError, 36
    fake.NVML_P2P_CAPS_INDEX_NVLINK, fake.NVML_P2P_STATUS_OK = 2, 0
    fake.nvmlInit = fake.nvmlShutdown = lambda: None
    fake.nvmlDeviceGetCount = lambda: len(gpus)
    fake.nvmlDeviceGetHandleByIndex = lambda index: gpus[index]
    fake.nvmlDeviceGetUUID = lambda gpu: gpu
    fake.nvmlDeviceGetP2PStatus = lambda one, other, caps: 0 if "GPU-d" not in (one, other) else 5
    fake.nvmlDeviceGetNvLinkState = link_state
    fake.nvmlDeviceGetNvLinkRemotePciInfo = remote_end
    fake.nvmlDeviceGetPciInfo = lambda gpu: types.SimpleNamespace(busId=f"bus-{gpu}")
    fake.nvmlDeviceGetTopologyCommonAncestor = lambda one, other: 50
    monkeypatch.setitem(sys.modules, "pynvml", fake)
    return fake


def test_links_of_nvml(nvml):
    found = _links.links(["GPU-a", "GPU-b"])
    assert found["GPU-a"] == {"GPU-b": "NVLink x18", "GPU-c": "NVLink x18", "GPU-d": "PCIe, across sockets"}
    assert found["GPU-b"]["GPU-c"] == "NVLink x2"
    nvml.nvmlInit = lambda: (_ for _ in ()).throw(nvml.NVMLError("no driver"))
    assert _links.links(["GPU-a"]) == {}
