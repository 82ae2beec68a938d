"""Devices, fixtures and the skip rule of the test suite.

Without options the suite runs on eight virtual CPU devices. `--device gpu` leaves JAX's environment alone and collects
tests/gpu only (see tests/gpu/run.py, which runs the whole GPU suite on one card).
"""

import importlib
import os
import pathlib
import sys

import pytest

NUM_CPU_DEVICES = 8
GPU_TESTS = pathlib.Path(__file__).parent / "gpu"

# A skip is a failure unless its reason begins with one of these: a test that silently never runs proves nothing.
EXPECTED_SKIPS = (
    "needs nvcc",
    "needs cmake",
    "needs the CUDA extension",
    "needs a CUDA device",
    "needs jax's CUDA plugin",
    "needs 2 ranks",
    "needs 3 ranks",
    "needs 4 ranks",
    "needs NCCL between these ranks",
    "needs jax >=",
    "needs Python >=",
    "needs compute-sanitizer",
    "needs a machine without a GPU",
)


@pytest.fixture
def gpu_scripts(monkeypatch):
    """`load(*names)`: scripts of tests/gpu as modules; they stand beside each other, not on the path."""
    monkeypatch.syspath_prepend(str(GPU_TESTS))
    before = set(sys.modules)
    yield lambda *names: [importlib.import_module(name) for name in names]
    for name in set(sys.modules) - before:
        if pathlib.Path(getattr(sys.modules[name], "__file__", None) or "").parent == GPU_TESTS:
            del sys.modules[name]


def pytest_addoption(parser):
    parser.addoption("--device", choices=("cpu", "gpu"), default="cpu", help="run the CPU suite or tests/gpu")
    parser.addoption("--implementation", choices=("cuda", "xla"), default="cuda", help="that tests/gpu runs")
    parser.addoption("--mode", choices=("auto", "throughput", "latency"), default="throughput", help="of dispatch")
    parser.addoption("--split", action="store_true", help="start and done instead of one call")
    parser.addoption(
        "--ranks-per-node", type=int, help="nodes of the exchange tests; its largest divisor where it must divide"
    )
    parser.addoption("--transport", choices=("auto", "nvshmem"), default="auto", help="between these nodes")
    parser.addoption("--put-delay", type=float, default=0.0, help="Config.put_delay_s of the exchange tests")
    parser.addoption(
        "--command-buffers",
        choices=("default", "on", "off"),
        default="default",
        help="Config.command_buffers of the programs' and the exchange tests",
    )
    parser.addoption("--copies", choices=("auto", "vector"), default="auto", help="Config.copies of the exchange tests")


def pytest_configure(config):
    # Before any test module imports jax, which reads both variables when its backend starts.
    if config.getoption("--device") == "cpu":
        os.environ["JAX_PLATFORMS"] = "cpu"
        flag = f"--xla_force_host_platform_device_count={NUM_CPU_DEVICES}"
        os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {flag}".strip()


def pytest_ignore_collect(collection_path, config):
    is_gpu_test = GPU_TESTS in (collection_path, *collection_path.parents)
    is_gpu_run = config.getoption("--device") == "gpu"
    if collection_path.is_file() and is_gpu_test != is_gpu_run:
        return True
    return None


def _fail_unexpected_skip(report):
    if report.skipped and not hasattr(report, "wasxfail"):
        reason = report.longrepr[2].removeprefix("Skipped: ")
        if not reason.startswith(EXPECTED_SKIPS):
            report.outcome = "failed"
            report.longrepr = f"unexpected skip: {reason!r} is not in EXPECTED_SKIPS of tests/conftest.py"
    return report


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    return _fail_unexpected_skip((yield))


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(collector):  # a whole module that skips itself (importorskip)
    return _fail_unexpected_skip((yield))


@pytest.fixture
def make_mesh():
    """`make_mesh(4)` or `make_mesh(2, 4, axis_names=("dp", "ep"))`: a mesh over the first devices."""
    import jax
    import numpy as np

    def make(*shape, axis_names=("ep",)):
        count = int(np.prod(shape))
        devices = jax.devices()
        assert len(devices) >= count, f"{count} devices wanted, {len(devices)} there"
        return jax.sharding.Mesh(np.array(devices[:count]).reshape(shape), axis_names)

    return make


@pytest.fixture(params=(1, 2, 3, 4, 8), ids=lambda n: f"R{n}")
def num_ranks(request):
    """The group sizes that the suite runs; 3 is there because nothing may need a power of two."""
    return request.param


@pytest.fixture
def usable(monkeypatch):
    """CUDA as if every rank could use it; records what set-up was asked for."""
    from jax_ep import bootstrap, lowering  # not before pytest_configure has set JAX's environment

    asked = []
    monkeypatch.setattr(bootstrap, "can_use_cuda", lambda groups, config=None, num_nodes=1: "")
    monkeypatch.setattr(bootstrap, "prepare", lambda groups, config=None, num_nodes=1: asked.append((groups, config)))
    monkeypatch.setattr(bootstrap, "why_not_recorded", lambda groups, config=None: "")
    monkeypatch.setattr(bootstrap, "bind", lambda *call_site: asked.append(call_site))
    monkeypatch.setattr(lowering._ffi, "arena_shape", lambda *sizes: (8, 1 << 20, 0, 1))
    monkeypatch.setattr(lowering._ffi, "latency_arena_shape", lambda *sizes: (8, 2 << 20, sizes[-1], sizes[1]))
    monkeypatch.setattr(lowering._ffi, "node_arena_shape", lambda *sizes: (8, sizes[-1], 0, sizes[1]))
    monkeypatch.setattr(lowering._ffi, "protocol", lambda: 1)
    return asked
