"""Forward and backward pass of a block of `jax_ep.nn` on one rank, whole and in parts, and how they are timed.

Every part is the layer's own function, run forward and backward on its own; cotangents are the forward results, which
cost nothing to make. `statistics` is the exception: the block with its auxiliary losses, of which the block without
them is subtracted, because their sum over ranks cannot be told from waiting for the ranks.

    router      logits, softmax, top-k
    dispatch    dispatch; backward, its transpose
    experts     matrix products and activation; backward with the gradients of the weights
    combine     combine with weights; backward, its transpose and the products with weights and rows
    block       all of it in one program; what it takes beyond the parts is called rest

A program holds a loop of calls. Each depends on the one before through one element of every operand, so that XLA can
neither merge, drop, overlap nor move out of the loop any of it; operands are donated and go round in place. Executions
follow each other without a pause: T(3 executions) - T(1) is the time of two loops, without what starting them costs.
"""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

from jax_ep import nn
from jax_ep.cli.benchlib import timing

_BUDGET_S = 1.0  # of one part, unless its fewest executions take longer
_SLOW_S = 0.1  # from here on the start of a program is no part of its time worth a difference


def block(config: nn.MoEConfig) -> Callable:
    """(params, x, cotangent of y) -> y and gradients, without the auxiliary losses."""

    def step(params, x, g):
        y, vjp = jax.vjp(lambda params, x: nn.moe_block(params, x, config)[0], params, x)
        return y, vjp(g)

    return step


def block_with_statistics(config: nn.MoEConfig) -> Callable:
    """As `block`, with the auxiliary losses and all that `MoEAux` holds."""

    def step(params, x, g):
        def fn(params, x):
            y, aux = nn.moe_block(params, x, config)
            return (y, 0.01 * aux.load_balancing_loss + 0.001 * aux.z_loss), aux

        (y, loss), vjp, aux = jax.vjp(fn, params, x, has_aux=True)
        return y, vjp((g, jnp.ones_like(loss))), aux

    return step


def router(config: nn.MoEConfig) -> Callable:
    """(params, x) -> the choice and gradients."""

    def step(params, x):
        def fn(router, x):
            routing = nn.route(router, x, config)
            return routing.topk_weights, routing.topk_idx

        weights, vjp, idx = jax.vjp(fn, params.router, x, has_aux=True)
        return vjp(lax.optimization_barrier(weights)), idx

    return step


def dispatch(config: nn.MoEConfig) -> Callable:
    """(x, routing) -> what arrives and gradients."""

    def step(x, routing):
        def fn(x, weights):
            recv = nn.dispatch_tokens(x, routing._replace(topk_weights=weights), config)
            return (recv.x, recv.weights), recv

        out, vjp, recv = jax.vjp(fn, x, routing.topk_weights, has_aux=True)
        return recv, vjp(lax.optimization_barrier(out))

    return step


def experts(config: nn.MoEConfig) -> Callable:
    """(params, packed recv) -> rows and gradients."""

    def step(params, recv):
        recv = unpack(recv)

        def fn(params, x, weights):
            return nn.apply_experts(params, dataclasses.replace(recv, x=x, weights=weights), config)

        rows, vjp = jax.vjp(fn, params, recv.x, recv.weights)
        return rows, vjp(lax.optimization_barrier(rows))

    return step


def combine(config: nn.MoEConfig) -> Callable:
    """(packed recv) -> y and gradients; the rows are those that arrived."""

    def step(recv):
        recv = unpack(recv)

        def fn(rows, weights):
            return nn.combine_outputs(rows, dataclasses.replace(recv, weights=weights), config)

        y, vjp = jax.vjp(fn, recv.x, recv.weights)
        return y, vjp(lax.optimization_barrier(y))

    return step


def prepare(config: nn.MoEConfig) -> Callable:
    """(params, x) -> routing and packed recv: operands of the parts."""

    def step(params, x):
        routing = nn.route(params.router, x, config)
        return routing, pack(nn.dispatch_tokens(x, routing, config))

    return step


def pack(tree):
    """Every array with a leading axis of 1, along which ranks are put together: scalars have none."""
    return jax.tree.map(lambda a: a[None], tree)


def unpack(tree):
    """The inverse of `pack`."""
    return jax.tree.map(lambda a: a[0], tree)


def loop(step: Callable, num_calls: int) -> Callable:
    """`(token, args) -> (token, args)` of one rank: `num_calls` calls of `step(*args)`, each after the one before."""

    def call(_, carry):
        token, args = carry
        args = timing.after(token, args, len(jax.tree.leaves(args)))
        # One element of every result: XLA drops what nobody reads, and without the barrier computes what is read only.
        outs = jax.tree.leaves(lax.optimization_barrier(step(*args)))
        return sum(out.reshape(-1)[:1].astype(jnp.float32) for out in outs) + jnp.zeros_like(token), args

    return lambda token, args: lax.fori_loop(0, num_calls, call, (token, args))


class Clock:
    """Times parts; keeps the operands, which go round from program to program.

    Args:
      compile_: wraps a per-rank function `(token, args)` in shard_map and jit, and donates args.
      operands: by name, sharded over the ranks along their first axis.
      token: f32 [num_ranks], sharded likewise.
      num_calls: in one program.
      repeats: most executions of either length.
    """

    def __init__(self, compile_: Callable, operands: dict, token: jax.Array, num_calls: int, repeats: int):
        self._compile, self.operands, self._token = compile_, operands, token
        self._num_calls, self._repeats = num_calls, repeats

    def us(self, step: Callable, *names: str, is_slow: bool = False) -> float:
        """µs of one call of `step` on the operands `names`, of the slowest process; `is_slow`: one call a program."""
        num_calls = 1 if is_slow else self._num_calls
        run = self._compile(loop(step, num_calls))
        args = tuple(self.operands[name] for name in names)

        def seconds(executions: int) -> float:
            nonlocal args
            timing.barrier()
            start = time.perf_counter()
            for _ in range(executions):
                self._token, args = run(self._token, args)
            jax.block_until_ready((self._token, args))
            return time.perf_counter() - start

        try:
            seconds(1)  # compiles
            probe_s = max(timing.exchange(seconds(1)))  # all processes decide alike
            if probe_s / num_calls > _SLOW_S:
                us = min(probe_s, max(timing.exchange(seconds(1)))) / num_calls * 1e6
            else:
                repeats = max(2, min(self._repeats, int(_BUDGET_S / (4 * probe_s))))
                times = [(seconds(3), seconds(1)) for _ in range(repeats)]
                t_three, t_one = (statistics.median(t) for t in zip(*times, strict=True))
                us = max(timing.exchange((t_three - t_one) / (2 * num_calls) * 1e6))
        finally:  # what was donated is gone
            self.operands.update(zip(names, args, strict=True))
        if us <= 0:
            raise RuntimeError("three executions were no slower than one: the machine is too noisy; raise --calls")
        return us
