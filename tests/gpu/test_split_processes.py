"""Modes and halves of exchanges as programs use them, one process per rank: in turns, several pending, under gradients.

Every case of exchange_cases.py in halves is `test_exchange_processes.py --split`, in latency mode `--mode latency`.
"""

import collections
import functools
import random
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import ranks
from jax import lax

import jax_ep
from jax_ep import testing

NUM_TOKENS, NUM_TOPK, HIDDEN = 48, 3, 64


@pytest.fixture
def settings(request):
    return dict(
        num_experts=3 * jax.device_count(),
        axis_name="ep",
        config=ranks.CONFIG,
        implementation=request.config.getoption("--implementation"),
    )


def _routing(kind="masked", seed=0):
    size = jax.device_count()
    kwargs = dict(num_ranks=size, num_tokens=NUM_TOKENS, num_topk=NUM_TOPK, num_experts=3 * size)
    return testing.routing(kind, **kwargs, seed=seed)


def _rows(seed=0, dtype="float32"):
    return testing.random_rows((jax.device_count(), NUM_TOKENS, HIDDEN), dtype, seed)


def _each_time(settings, program, args, check, calls):
    """Runs a compiled program with every rank late at random; looks at the first results and the last."""
    rng = random.Random(jax.process_index())
    calls = calls if settings["implementation"] == "cuda" else 5
    for call in range(calls):
        ranks.random_delay(rng)
        if call < 3 or call % 50 == 0:
            ranks.poison()
        result = program(*args)
        if call in (0, 1, 2, calls - 1):
            check(ranks.stacked(ranks.mesh(), result))
    jax_ep.check()


def test_modes_in_turns(settings):
    """B40: throughput, latency and halves of it in one program, each several times and next to each of the others."""
    order = ("throughput", "latency", "latency", "halves", "throughput", "halves", "halves", "latency", "throughput")

    def there_and_back(how, x, idx):
        if how == "halves":
            recv = jax_ep.dispatch_done(jax_ep.dispatch_start(x, idx, **settings))
            return jax_ep.combine_done(jax_ep.combine_start(recv.x * 0.5, recv.handle))
        recv = jax_ep.dispatch(x, idx, mode=how, **settings)
        return jax_ep.combine(recv.x * 0.5, recv.handle)

    def run(x, idx):
        outs = []
        for how in order:
            x = there_and_back(how, x, idx)
            outs.append(x)
        return outs

    x, idx = _rows(dtype="bfloat16"), _routing()
    expected = [x]
    for _ in order:
        oracle = testing.oracle_dispatch(expected[-1], idx, num_experts=settings["num_experts"])
        expected.append(testing.oracle_combine(oracle, (oracle.x * np.asarray(0.5, oracle.x.dtype))))

    def check(outs):
        for how, out, right in zip(order, outs, expected[1:], strict=True):
            testing.same_bits(out, right, how)

    args = ranks.place(ranks.mesh(), (x, idx))
    program = testing.on_ranks(run, ranks.mesh()).lower(*args).compile()
    _each_time(settings, program, args, check, calls=200)


@pytest.mark.parametrize("order", [(0, 1), (1, 0)], ids=["first first", "last first"])
def test_two_pending_exchanges(settings, order):
    """B36: two dispatches of other layouts started, then both done, in either order; then their combines."""
    layouts = ("expert", "token")

    def after(pending, *others):
        return lax.optimization_barrier((pending, *others))

    def run(xs, ids):
        first = jax_ep.dispatch_start(xs[0], ids[0], layout=layouts[0], **settings)
        first, x = after(first, xs[1])
        pending = after([first, jax_ep.dispatch_start(x, ids[1], layout=layouts[1], **settings)])[0]
        recvs = [None, None]
        recvs[order[0]] = jax_ep.dispatch_done(pending[order[0]])
        # The second done waits for the first one's result.
        late, recvs[order[0]] = after(pending[order[1]], recvs[order[0]])
        recvs[order[1]] = jax_ep.dispatch_done(late)
        pending = after([jax_ep.combine_start(recv.x, recv.handle) for recv in recvs])[0]
        outs = [None, None]
        outs[order[0]] = jax_ep.combine_done(pending[order[0]])
        late, outs[order[0]] = after(pending[order[1]], outs[order[0]])
        outs[order[1]] = jax_ep.combine_done(late)
        return recvs, outs

    xs, ids = [_rows(n, "bfloat16") for n in range(2)], [_routing(kind) for kind in ("zipf", "masked")]

    def check(result):
        for recv, out, x, idx, layout in zip(*result, xs, ids, layouts, strict=True):
            oracle = testing.oracle_dispatch(x, idx, num_experts=settings["num_experts"], layout=layout)
            testing.check_recv(recv, oracle)
            testing.same_bits(out, testing.oracle_combine(oracle, oracle.x), layout)

    args = ranks.place(ranks.mesh(), (xs, ids))
    program = testing.on_ranks(run, ranks.mesh()).lower(*args).compile()
    _each_time(settings, program, args, check, calls=200)


def test_100000_calls_with_late_ranks(settings):
    """B41: whole calls of both modes and halves in turns, rows and routing other ones each time, in one program.

    In one round of a hundred a rank is late by up to some 10 ms, in the others all are by up to some 50 us. Integers,
    so that every sum is exact.
    """
    num_calls = 100_000 if settings["implementation"] == "cuda" else 60
    num_ranks, num_experts = jax.device_count(), settings["num_experts"]

    def late(round_, x):
        rank = lax.axis_index("ep")
        key = jax.random.fold_in(jax.random.key(0), round_)
        is_long = jax.random.randint(key, (), 0, 100) == 0
        unlucky = jax.random.randint(jax.random.fold_in(key, 1), (), 0, num_ranks)
        most = jnp.where(is_long, jnp.where(rank == unlucky, 300, 0), 2)  # turns of a loop, some 30 us each
        turns = jax.random.randint(jax.random.fold_in(key, 2 + rank), (), 0, most + 1)
        return lax.while_loop(lambda c: c[0] < turns, lambda c: (c[0] + 1, c[1] * 1.0), (0, x))[1]

    def run(x, idx):
        weight = jnp.sum(idx >= 0, axis=1, dtype=x.dtype)[:, None]

        def turn(round_, num_wrong):
            ids = jnp.where(idx >= 0, (idx + round_) % num_experts, -1)
            for number, how in enumerate(("latency", "halves", "throughput")):
                rows = late(3 * round_ + number, x + round_ % 997 + number)
                if how == "halves":
                    recv = jax_ep.dispatch_done(jax_ep.dispatch_start(rows, ids, **settings))
                    out = jax_ep.combine_done(jax_ep.combine_start(recv.x, recv.handle))
                else:
                    recv = jax_ep.dispatch(rows, ids, mode=how, **settings)
                    out = jax_ep.combine(recv.x, recv.handle)
                num_wrong += jnp.sum(out != rows * weight, dtype=jnp.int32)
            return num_wrong

        start = lax.pcast(jnp.zeros((), jnp.int32), "ep", to="varying")
        return lax.fori_loop(0, num_calls // 6, turn, start)

    x = np.broadcast_to(np.arange(NUM_TOKENS, dtype=np.float32)[None, :, None], (num_ranks, NUM_TOKENS, HIDDEN))
    args = ranks.place(ranks.mesh(), (x + 100 * np.arange(num_ranks)[:, None, None], _routing("duplicates")))
    program = testing.on_ranks(run, ranks.mesh()).lower(*args).compile()
    assert not ranks.stacked(ranks.mesh(), program(*args)).any()
    jax_ep.check()


def _layer(is_split, settings, x, idx, w, scale):
    """A layer with something else to compute, between start and done where it is split."""
    if not is_split:
        recv = jax_ep.dispatch(x, idx, w, **settings)
        shared = jnp.tanh(x * scale)
        return shared + jax_ep.combine(recv.x * scale, recv.handle, weights=recv.weights)
    pending = jax_ep.dispatch_start(x, idx, w, **settings)
    pending, shared = lax.optimization_barrier((pending, x))
    pending, shared = lax.optimization_barrier((pending, jnp.tanh(shared * scale)))
    recv = jax_ep.dispatch_done(pending)
    pending = jax_ep.combine_start(recv.x * scale, recv.handle, weights=recv.weights)
    pending, shared = lax.optimization_barrier((pending, shared))
    return shared + jax_ep.combine_done(pending)


def _num_calls(program: str) -> collections.Counter:
    """Our custom calls by name, in StableHLO or in HLO."""
    found = re.findall(r'custom_call @(jax_ep_\w+)|custom_call_target="(jax_ep_\w+)"', program)
    return collections.Counter(a or b for a, b in found)


@pytest.mark.parametrize("is_checkpointed", [False, True], ids=["kept", "checkpoint"])
def test_gradients_of_a_scan_over_layers(settings, is_checkpointed):
    """B45: more layers than latency slots, twelve; equal gradients in halves and whole, on every call."""

    def step(is_split, x, idx, w):
        layer = functools.partial(_layer, is_split, settings)
        layer = jax.checkpoint(layer) if is_checkpointed else layer

        def loss(x, w):
            scales = jnp.linspace(0.5, 1.0, 12, dtype=x.dtype)
            return jnp.sum(lax.scan(lambda x, scale: (layer(x, idx, w, scale), None), x, scales)[0] ** 2)

        return jax.grad(loss, (0, 1))(x, w)

    idx = _routing()
    args = ranks.place(ranks.mesh(), (_rows(), idx, np.random.default_rng(0).random(idx.shape).astype(np.float32)))
    lowered = [testing.on_ranks(functools.partial(step, is_split), ranks.mesh()).lower(*args) for is_split in (0, 1)]
    whole, split = [program.compile() for program in lowered]
    for program, compiled in zip(lowered, (whole, split), strict=True):
        # XLA may run a call twice when a scan keeps its results and others use them, which a done does not survive.
        assert _num_calls(compiled.as_text()) == _num_calls(program.as_text())
    expected = ranks.stacked(ranks.mesh(), whole(*args))
    assert all(np.abs(g).max() > 0 for g in expected)

    def check(got):
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4), got, expected)

    _each_time(settings, split, args, check, calls=50)
