"""What the tests of several processes share. Every process runs the same tests in the same order, as one rank.

Start them with the launcher (tests/gpu/run.py does): nothing here waits for a rank that runs something else.

    python -m jax_ep launch --ranks 4 -m pytest --device gpu tests/gpu/test_exchange_processes.py

With `--implementation xla` and `--platform cpu` the same tests try the harness on a machine without a GPU.
"""

import ctypes
import functools
import itertools
import pathlib
import pickle
import random
import tempfile
import time

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import jax_ep
from jax_ep import testing
from jax_ep.cli.benchlib.timing import barrier, exchange

# A rank that fails must not keep the others for minutes.
CONFIG = jax_ep.Config(first_call_timeout_s=60.0, timeout_s=20.0)

mode = "throughput"  # of dispatch: test files that heed --mode set it

_sequence = itertools.count()


def command_buffers(pytest_config) -> bool | None:
    """`Config.command_buffers` of --command-buffers."""
    return {"default": None, "on": True, "off": False}[pytest_config.getoption("--command-buffers")]


def combined(oracle, y):
    """What combine makes of y, in the nodes that CONFIG makes."""
    return testing.oracle_combine(oracle, y, ranks_per_node=CONFIG.ranks_per_node)


def mesh(num_ranks: int | None = None) -> Mesh:
    """The first `num_ranks` devices (default: all) as one EP group."""
    return Mesh(np.array(jax.devices()[:num_ranks]), ("ep",))


def call(program, on: Mesh, arrays):
    """`program(on, empty)` of arrays stacked over ranks, on the device. `empty`: which of them have no elements.

    Those come with one row, which the program takes away (`without_rows`): XLA of jax 0.11.2 ends the process over an
    operand without elements that several GPUs share.
    """
    empty = tuple(a.size == 0 for a in arrays)
    arrays = [np.zeros((len(a), 1, *a.shape[2:]), a.dtype) if e else a for a, e in zip(arrays, empty, strict=True)]
    arrays = place(on, arrays)
    poison()
    return program(on, empty)(*arrays)


def without_rows(arrays, empty):
    """Within a program for `call`."""
    return [a[:0] if e else a for a, e in zip(arrays, empty, strict=True)]


def takes_part(on: Mesh) -> bool:
    return any(d.process_index == jax.process_index() for d in on.devices.flat)


def is_my_turn() -> bool:
    """True on one process, another one at every call: spreads work that one process can do for all."""
    return next(_sequence) % jax.process_count() == jax.process_index()


def place(on: Mesh, arrays, axes=("ep",)):
    """NumPy arrays stacked over ranks as global arrays; every process has them all and gives its own part."""
    sharding = NamedSharding(on, PartitionSpec(axes))
    return jax.tree.map(lambda a: jax.make_array_from_callback(a.shape, sharding, lambda at: a[at]), arrays)


def local(tree):
    """This process's rank of global arrays stacked over ranks, as NumPy."""
    return jax.tree.map(lambda a: np.asarray(a.addressable_shards[0].data)[0], tree)


@functools.cache
def _folder() -> pathlib.Path:
    mine = tempfile.mkdtemp(prefix="jax_ep_test_") if jax.process_index() == 0 else ""
    return pathlib.Path(exchange(mine)[0])


def stacked(on: Mesh, result):
    """`result` of all ranks of `on` as NumPy, in every process; processes without a rank give None."""
    number = next(_sequence)

    def own(a):
        if a.size:
            return np.asarray(a.addressable_shards[0].data)
        return np.zeros((a.shape[0] // on.devices.size, *a.shape[1:]), a.dtype)  # JAX does not shard what is empty

    if takes_part(on):
        shard = next(a for a in jax.tree.leaves(result) if a.size).addressable_shards[0]
        data = shard.index[0].start or 0, jax.tree.map(own, result)
        (_folder() / f"{number}.{jax.process_index()}").write_bytes(pickle.dumps(data))
    else:
        _folder()
    barrier()
    parts = sorted((pickle.loads(f.read_bytes()) for f in _folder().glob(f"{number}.*")), key=lambda part: part[0])
    barrier()
    if takes_part(on):
        (_folder() / f"{number}.{jax.process_index()}").unlink()
    assert len(parts) == on.devices.size
    return jax.tree.map(lambda *a: np.concatenate(a), *(part[1] for part in parts))


def poison() -> None:
    """Leaves NaN patterns in the memory that XLA hands out next: fresh memory is often zero and hides a missing row."""
    jax.block_until_ready(_poison())


@functools.cache
def _poisoner():
    words = [8 << 20] * 3 + [64 << 10] * 16 + [1 << 10] * 32
    return jax.jit(lambda: [jnp.full(n, 0xFFFFFFFF, jnp.uint32) for n in words])


def _poison():
    with jax.default_device(jax.local_devices()[0]):
        return _poisoner()()


def random_delay(rng: random.Random) -> None:
    """Now and then makes this rank late: on the host by a sleep, on the device by work queued before the next call."""
    if rng.random() < 0.03:
        time.sleep(rng.random() * 3e-3)
    if rng.random() < 0.1:
        with jax.default_device(jax.local_devices()[0]):
            _busy(rng.randrange(1, 30))


@jax.jit
def _busy(rounds):
    a = jnp.full((512, 512), 1e-3, jnp.float32)
    return jax.lax.fori_loop(0, rounds, lambda _, b: a @ b, a)


def free_device_bytes() -> int:
    """Free memory of this process's GPU as the driver counts it, other processes included."""
    cuda = ctypes.CDLL("libcuda.so.1")
    device, context, previous = ctypes.c_int(), ctypes.c_void_p(), ctypes.c_void_p()
    free, total = ctypes.c_size_t(), ctypes.c_size_t()

    def do(status: int) -> None:
        assert status == 0, f"CUDA driver error {status}"

    do(cuda.cuInit(0))
    do(cuda.cuDeviceGet(ctypes.byref(device), jax.local_devices()[0].local_hardware_id))
    do(cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), device))
    do(cuda.cuCtxPushCurrent_v2(context))
    do(cuda.cuMemGetInfo_v2(ctypes.byref(free), ctypes.byref(total)))
    do(cuda.cuCtxPopCurrent_v2(ctypes.byref(previous)))
    do(cuda.cuDevicePrimaryCtxRelease_v2(device))
    return free.value


def has_xla_collectives() -> str:
    """ "" or why `lax` collectives do not work between these ranks (NCCL refuses some setups)."""
    try:
        on = mesh()
        add = jax.jit(
            jax.shard_map(
                lambda x: jax.lax.psum(x, "ep"), mesh=on, in_specs=PartitionSpec("ep"), out_specs=PartitionSpec()
            )
        )
        jax.block_until_ready(add(*place(on, (np.ones((on.devices.size, 4), np.float32),))))
        problem = ""
    except jax.errors.JaxRuntimeError as error:
        problem = str(error).splitlines()[0]
    return next((p for p in exchange(problem) if p), "")
