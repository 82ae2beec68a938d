"""What each rank of the jobs of test_whole_jobs.py runs; arguments: the way, a folder, the implementation, the kernels.

Prints lines that begin with REPORT, in JSON. A rank whose call failed waits a little before it ends, so that the others
can report, too: when the process that holds JAX's coordination service ends, the others end with it.
"""

import json
import os
import pathlib
import signal
import sys
import time

import jax
import numpy as np

import jax_ep
from jax_ep import testing

WAY, FOLDER, IMPLEMENTATION, KERNELS = sys.argv[1], pathlib.Path(sys.argv[2]), sys.argv[3], sys.argv[4]
MODE, RANKS_PER_NODE = "latency" if KERNELS == "latency" else "throughput", 2 if KERNELS == "nodes" else None
TIMEOUT_S = 1.0 if WAY == "killed" else 2.0
NUM_TOKENS, NUM_TOPK, HIDDEN = 32, 2, 64
SUFFIXES = ("", "_graph", "_latency", "_latency_graph")
TARGETS = [f"jax_ep_{op}{suffix}" for op in ("dispatch", "redispatch", "combine") for suffix in SUFFIXES]
me, num_ranks = jax.process_index(), jax.process_count()
mesh = jax.sharding.Mesh(np.array(jax.devices()), ("ep",))
sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("ep"))


def place(array):
    return jax.make_array_from_callback(array.shape, sharding, lambda at: array[at])


def report(**facts):
    print("REPORT" + json.dumps(facts), flush=True)


def layer(x, idx, mode=MODE):
    config = jax_ep.Config(first_call_timeout_s=60.0, timeout_s=TIMEOUT_S, ranks_per_node=RANKS_PER_NODE)
    options = dict(axis_name="ep", mode=mode, config=config, implementation=IMPLEMENTATION)
    recv = jax_ep.dispatch(x, idx, num_experts=4 * num_ranks, **options)
    return jax_ep.combine(recv.x, recv.handle)


def both_modes(x, idx):
    return layer(x, idx, "latency") + layer(x, idx, "throughput")


def data():
    sizes = dict(num_ranks=num_ranks, num_tokens=NUM_TOKENS, num_topk=NUM_TOPK, num_experts=4 * num_ranks)
    x, idx = testing.code_rows(num_ranks, NUM_TOKENS, HIDDEN), testing.routing("uniform", **sizes)
    return (place(x), place(idx)), x[me] * NUM_TOPK


def is_right(out, expected) -> bool:
    return np.array_equal(np.asarray(out.addressable_shards[0].data)[0], expected)


def wait_for(name: str) -> None:
    end = time.monotonic() + 30
    while not (FOLDER / name).exists():
        assert time.monotonic() < end, name
        time.sleep(0.01)


def run_while_one_dies() -> None:
    """Five steps of all ranks; then rank 1 dies in its way, and what the others see is reported."""
    args, expected = data()
    program = testing.on_ranks(layer, mesh).lower(*args).compile()
    for _ in range(5):
        out = program(*args)
        assert is_right(out, expected)
    jax_ep.check()
    (FOLDER / f"ready{me}").touch()
    for rank in range(num_ranks):
        wait_for(f"ready{rank}")
    if WAY == "nobody":
        return report(right=True)
    if me == 1:
        if WAY == "raises":
            raise RuntimeError("a mistake of the program, before its sixth call")
        if WAY == "killed inside":
            program(*args)  # the others have not begun: this call waits for them
            time.sleep(0.5)
        (FOLDER / "dying").touch()
        os.kill(os.getpid(), signal.SIGKILL)
    if WAY != "raises":
        wait_for("dying")
        time.sleep(0.5)
    start, problem = time.monotonic(), None
    try:
        jax.block_until_ready(program(*args))
    except jax.errors.JaxRuntimeError as error:  # combine may be launched after dispatch's failure was recorded
        problem = error
    waited = time.monotonic() - start
    try:
        jax_ep.check()
    except jax_ep.errors.EpError as error:
        report(
            kind=type(error).__name__, peer=error.peer, rank=error.rank, op=error.op, phase=error.phase, waited=waited
        )
        time.sleep(3)
        raise
    report(kind=None, problem=repr(problem))


def write() -> None:
    """An exported program and what it gives."""
    args, expected = data()
    program = testing.on_ranks(both_modes, mesh)
    checks = [jax.export.DisabledSafetyCheck.custom_call(name) for name in TARGETS]
    exported = jax.export.export(program, disabled_checks=checks)(*args)
    if me == 0:
        (FOLDER / "program").write_bytes(exported.serialize())
    report(right=is_right(program(*args), 2 * expected), calls=exported.mlir_module().count("custom_call @jax_ep_"))


def read() -> None:
    """The same from the file, in another job: nothing of ours is traced or lowered here."""
    args, expected = data()
    exported = jax.export.deserialize(bytearray((FOLDER / "program").read_bytes()))
    program = jax.jit(exported.call).lower(*args).compile()
    right = [is_right(program(*args), 2 * expected)]
    calls = jax_ep.debug.stats()["calls"]  # XLA may record and replay those of later executions
    right += [is_right(program(*args), 2 * expected) for _ in range(2)]
    jax_ep.check()
    report(right=all(right), staged=jax_ep.debug.stats()["staged_calls"], calls=calls)


if __name__ == "__main__":
    {"write": write, "read": read}.get(WAY, run_while_one_dies)()
