"""How calls are timed.

Steady: N calls in one compiled program, each depending on the one before through one element: read from its result,
added as a 0 to the next operand. XLA can then neither merge, drop nor overlap them, and nothing of full size is moved.
The time of a call is (T(N) - T(2)) / (N - 2), medians over alternating runs: launch and Python costs of a program
cancel. Two calls and not one, as XLA records no program so short. The same chain around a step that does nothing shows
what the two tiny kernels between calls cost.

First call: wall clock of one host, from the moment when the last rank enters to the moment when the last one is done.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

BUDGET_S = 2.0  # for the runs of one program; XLA's ragged exchange takes 90 ms a call
# Programs of a few hundred us differ from run to run by as much as a call takes: they are run for so long at least.
LEAST_S, MOST_RUNS = 0.1, 200

_sequence = iter(range(1 << 62))


def _client():
    from jax._src import distributed

    return distributed.global_state.client


def exchange(value: Any, timeout_s: float = 300) -> list[Any]:
    """`value` (JSON) of every process, in process order; also a barrier. All processes call it in the same order."""
    client = _client()
    if client is None or jax.process_count() == 1:
        return [value]
    name = f"jax_ep_bench/{next(_sequence)}"
    client.key_value_set(f"{name}/{jax.process_index()}", json.dumps(value))
    timeout_ms = int(timeout_s * 1000)
    return [json.loads(client.blocking_key_value_get(f"{name}/{p}", timeout_ms)) for p in range(jax.process_count())]


def barrier(timeout_s: float = 300) -> None:
    """Returns when every process has entered; they leave within a millisecond of each other."""
    client = _client()
    if client is not None and jax.process_count() > 1:
        client.wait_at_barrier(f"jax_ep_bench/{next(_sequence)}", int(timeout_s * 1000))


def chain(step: Callable, num_calls: int, num_linked: int) -> Callable:
    """`num_calls` calls of `step(*args)` in one function, which returns a scalar that needs them all.

    The first `num_linked` arrays of `args` depend on the call before. What is computed from others alone is computed
    once: all that takes time must hang on the linked ones.
    """

    def program(*args):
        token = jnp.zeros(1, jnp.float32)
        for _ in range(num_calls):
            args = after(token, args, num_linked)
            outs = lax.optimization_barrier(step(*args))  # or XLA would compute the one element that is read
            token = token + jax.tree.leaves(outs)[0].reshape(-1)[:1].astype(jnp.float32)
        return token

    return program


def after(token, args, num_linked: int):
    """`args` with a 0 that XLA cannot foresee added to one element of each linked array: in place, no row moves."""
    leaves, tree = jax.tree.flatten(args)
    for i, leaf in enumerate(leaves[:num_linked]):
        corner = lax.slice(leaf, (0,) * leaf.ndim, (1,) * leaf.ndim)
        zero = (token > 3e38).astype(leaf.dtype).reshape(corner.shape)
        leaves[i] = lax.dynamic_update_slice(leaf, corner + zero, (0,) * leaf.ndim)
    return jax.tree.unflatten(tree, leaves)


def seconds(fn: Callable, args) -> float:
    """Wall time of one execution."""
    start = time.perf_counter()
    jax.block_until_ready(fn(*args))
    return time.perf_counter() - start


class TooNoisy(RuntimeError):
    """A difference of two times came out as nothing."""


def num_runs(repeats: int, run_s: float) -> int:
    """How often to run what takes `run_s`: `repeats` times, but 3 at least where that takes longer than BUDGET_S.

    More often what is over so soon that many runs cost nothing.
    """
    allowed = max(3, min(repeats, int(BUDGET_S / run_s)))
    return max(allowed, min(MOST_RUNS, int(LEAST_S / run_s)))


def steady_us(compile_, step: Callable, args, num_calls: int, repeats: int, num_linked: int = 1) -> float:
    """µs of one call of `step`, of the slowest process. `compile_` wraps a function in shard_map and jit.

    `num_calls` >= 2. Runs as often as `num_runs` says of `repeats`.
    """
    num_few = min(2, num_calls - 1)
    many, few = (compile_(chain(step, n, num_linked)) for n in (num_calls, num_few))
    for fn in (few, many):
        seconds(fn, args)
    run_s = max(exchange(seconds(many, args)))  # also a barrier
    times = [(seconds(many, args), seconds(few, args)) for _ in range(num_runs(repeats, run_s))]
    t_many, t_few = (statistics.median(t) for t in zip(*times, strict=True))
    us = max(exchange((t_many - t_few) / (num_calls - num_few) * 1e6))
    if us <= 0:
        raise TooNoisy(f"{num_calls} calls were no slower than {num_few}: the machine is too noisy; raise --calls")
    return us


def calls_us(fn: Callable, args, num_calls: int, entered_ns: Callable[[], int] = int) -> tuple[list, list]:
    """µs of the first `num_calls` executions of `fn` until the last rank's end.

    Args:
      fn: a compiled program.
      args: its operands.
      num_calls: how many.
      entered_ns: asked after each execution when XLA entered it, in `time.monotonic_ns`; 0, or a time before the
        execution (of a program that XLA replays): unknown.

    Returns:
      The times since the last rank called `fn`, and since the last rank's XLA entered it (0: unknown).
    """
    since_call, since_entry = [], []
    for _ in range(num_calls):
        barrier()
        call = time.monotonic_ns()
        jax.block_until_ready(fn(*args))
        spans = exchange((time.monotonic_ns(), call, entered_ns()))
        end, call, entry = (max(s[i] for s in spans) for i in range(3))
        since_call.append((end - call) / 1e3)
        since_entry.append((end - entry) / 1e3 if entry >= call else 0.0)
    return since_call, since_entry


def device_copy_gb_s(num_bytes: int) -> float:
    """GB/s, read plus write, of a copy kernel on one device, measured by process 0 while the others wait."""
    rate = 0.0
    barrier()
    if jax.process_index() == 0:
        device = jax.local_devices()[0]
        x = jax.device_put(jnp.zeros(num_bytes // 4, jnp.int32), device)
        copy = jax.jit(lambda x: x ^ 1)
        copy(x).block_until_ready()
        rates = []
        for _ in range(5):
            start = time.perf_counter()
            for _ in range(10):
                y = copy(x)
            y.block_until_ready()
            rates.append(10 * 2 * num_bytes / (time.perf_counter() - start) / 1e9)
        rate = statistics.median(rates)
    return exchange(rate)[0]


def link_gb_s(compile_, x, axis: str, num_ranks: int) -> float:
    """GB/s that each rank sends (and receives at the same time) in `lax.ppermute` around the ring."""
    ring = [(i, (i + 1) % num_ranks) for i in range(num_ranks)]
    us = steady_us(compile_, lambda x: (lax.ppermute(x, axis, ring),), (x,), num_calls=8, repeats=5)
    return x.nbytes / num_ranks / us / 1e3
