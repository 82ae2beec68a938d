"""Command buffers (CUDA graphs), one process per rank: calls are replayed, and nobody notices but the clock.

Every program is compiled twice, with and without `Config.command_buffers`, and both run in turns in one arena: each
step has another routing, while addresses mostly stay, so that XLA replays instead of recording anew.
"""

import dataclasses
import random
import re
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import ranks
from jax import lax

import jax_ep
from jax_ep import testing

NUM_TOKENS, NUM_TOPK, HIDDEN, NUM_LAYERS, NUM_STEPS, NUM_CALLS = 48, 3, 64, 3, 8, 200
TIMEOUT_S = 3.0
CONFIG = jax_ep.Config(first_call_timeout_s=60.0, timeout_s=TIMEOUT_S)
HOW = ("throughput", "latency", "halves")
ROUTINGS = ("masked", "zipf", "uniform", "one_expert")


@pytest.fixture
def implementation(request):
    return request.config.getoption("--implementation")


def _exchange(how, implementation, is_recorded):
    """A layer: a dispatch, something that XLA computes, and a combine."""
    settings = dict(
        num_experts=3 * jax.device_count(),
        axis_name="ep",
        config=dataclasses.replace(CONFIG, command_buffers=is_recorded),
        implementation=implementation,
    )

    def layer(x, idx, w):
        if how == "halves":
            recv = jax_ep.dispatch_done(jax_ep.dispatch_start(x, idx, w, **settings))
            return jax_ep.combine_done(jax_ep.combine_start(recv.x * 0.5, recv.handle, weights=recv.weights))
        recv = jax_ep.dispatch(x, idx, w, mode=how, **settings)
        return jax_ep.combine(recv.x * 0.5, recv.handle, weights=recv.weights)

    return layer


def _data():
    """Rows, ids and weights for NUM_STEPS steps, [num_ranks, NUM_STEPS, ...]: every step another routing."""
    size = jax.device_count()
    sizes = dict(num_ranks=size, num_tokens=NUM_TOKENS, num_topk=NUM_TOPK, num_experts=3 * size)
    x = [testing.random_rows((size, NUM_TOKENS, HIDDEN), "bfloat16", step) for step in range(NUM_STEPS)]
    idx = [testing.routing(ROUTINGS[step % len(ROUTINGS)], **sizes, seed=step) for step in range(NUM_STEPS)]
    rng = np.random.default_rng(1)
    w = rng.choice(np.float32([0.25, 0.5, 1.0]), (size, NUM_STEPS, NUM_TOKENS, NUM_TOPK))  # products are exact
    return np.stack(x, 1), np.stack(idx, 1), w


def _program(how, implementation, is_recorded, args, gradient=False):
    """Compiled: some layers, of the step that its last operand says; the rows, or the gradients of rows and weights."""
    layer = _exchange(how, implementation, is_recorded)

    def forward(x, w, idx):
        for _ in range(NUM_LAYERS):
            x = layer(x, idx, w)
        return x

    def run(xs, ids, ws, step):
        x, idx, w = (lax.dynamic_index_in_dim(a, step[0], keepdims=False) for a in (xs, ids, ws))
        if not gradient:
            return forward(x, w, idx)
        return jax.grad(lambda x, w: jnp.sum(forward(x, w, idx).astype(jnp.float32) ** 2), (0, 1))(x, w)

    return testing.on_ranks(run, ranks.mesh()).lower(*args).compile()


def _place(arrays):
    """Operands, and each step's number, placed once: the addresses of later executions are those of earlier ones."""
    data = ranks.place(ranks.mesh(), arrays)
    size = jax.device_count()
    return data, [ranks.place(ranks.mesh(), np.full((size, 1), step, np.int32)) for step in range(NUM_STEPS)]


def _counts():
    stats = jax_ep.debug.stats()
    return np.array([stats["calls"], stats["recorded_calls"]])


def _check_replayed(implementation, counts, num_executed):
    """Far fewer calls passed through the host than ran: their results say that they ran."""
    launched, recorded = counts
    if implementation != "cuda":
        return
    print(f"of {num_executed} calls {launched} were launched and {recorded} recorded, the rest was replayed")
    assert recorded > 0, "XLA recorded none of our calls"
    assert launched + recorded < num_executed / 2


@pytest.mark.parametrize("how", HOW)
def test_replays_follow_the_routing(implementation, how):
    """B59: the same bits as launched calls, and the oracle's, whatever the routing; every rank late at random."""
    arrays = _data()
    data, steps = _place(arrays)
    launched, recorded = (_program(how, implementation, r, (*data, steps[0])) for r in (False, True))
    if implementation == "cuda":
        for program, is_recorded in ((launched, False), (recorded, True)):
            targets = re.findall(r'custom_call_target="(jax_ep_\w+)"', program.as_text())
            assert targets and all(target.endswith("_graph") == is_recorded for target in targets), targets
    rng, counts, seen = random.Random(jax.process_index()), np.zeros(2, int), {}
    num_calls = NUM_CALLS if implementation == "cuda" else 10
    for call in range(num_calls):
        ranks.random_delay(rng)
        step = (5 * call) % NUM_STEPS
        before = _counts()
        out = ranks.local(recorded(*data, steps[step]))
        counts += _counts() - before
        testing.same_bits(out, ranks.local(launched(*data, steps[step])), f"call {call}")
        seen[step] = out
    _check_replayed(implementation, counts, num_calls * 2 * NUM_LAYERS)
    x, idx, w = (np.moveaxis(a, 1, 0) for a in arrays)
    for step, out in seen.items():
        rows = x[step]
        for _ in range(NUM_LAYERS):
            oracle = testing.oracle_dispatch(rows, idx[step], w[step], num_experts=3 * len(rows))
            half = oracle.x * np.asarray(0.5, oracle.x.dtype)
            rows = testing.oracle_combine(oracle, half, weights=oracle.weights)
        testing.same_bits(out, rows[jax.process_index()], f"step {step}")
    jax_ep.check()


@pytest.mark.parametrize("how", HOW)
def test_buffers_that_move(implementation, how):
    """XLA records anew what has moved: every result is kept, so each execution writes where none did before, and every
    fourth also reads there. A replay of what was recorded for other addresses would leave its own result as it was, and
    spoil an older one."""
    arrays = _data()
    data, steps = _place(arrays)
    launched, recorded = (_program(how, implementation, r, (*data, steps[0])) for r in (False, True))
    expected = [ranks.local(launched(*data, step)) for step in steps]
    before, kept = _counts(), []
    for call in range(24 if implementation == "cuda" else 2):
        if call % 4 == 3:
            data, steps = _place(arrays)
            kept.append((data, None))  # the addresses that these had before are not free
        kept.append((recorded(*data, steps[call % NUM_STEPS]), call % NUM_STEPS))
    for out, step in kept:
        if step is not None:
            testing.same_bits(ranks.local(out), expected[step], f"step {step}")
    addresses = {out.addressable_shards[0].data.unsafe_buffer_pointer() for out, step in kept if step is not None}
    assert len(addresses) == sum(step is not None for _, step in kept)
    assert implementation != "cuda" or (_counts() - before)[1] > 2 * NUM_LAYERS, "nothing was recorded anew"
    jax_ep.check()


@pytest.mark.parametrize("how", HOW)
def test_gradients_are_those_of_launched_calls(implementation, how):
    """Forward and backward pass in one command buffer, bit by bit."""
    data, steps = _place(_data())
    launched, recorded = (_program(how, implementation, r, (*data, steps[0]), gradient=True) for r in (False, True))
    counts = np.zeros(2, int)
    num_calls = 50 if implementation == "cuda" else 2
    for call in range(num_calls):
        step = steps[(3 * call) % NUM_STEPS]
        before = _counts()
        gradients = ranks.local(recorded(*data, step))
        counts += _counts() - before
        for got, expected in zip(gradients, ranks.local(launched(*data, step)), strict=True):
            testing.same_bits(got, expected, f"call {call}")
            assert np.abs(got.astype(np.float32)).max() > 0
    _check_replayed(implementation, counts, num_calls * 4 * NUM_LAYERS)


@pytest.mark.parametrize("how", HOW)
def test_a_rank_that_never_comes_to_a_replay(implementation, how):
    """The others stop after the set time and name it, the next execution raises although nothing of ours would be
    launched, and after reset() the same recording is right again."""
    if implementation != "cuda":
        pytest.skip("needs a CUDA device")
    if jax.device_count() < 2:
        pytest.skip("needs 2 ranks")
    data, steps = _place(_data())
    launched, recorded = (_program(how, implementation, r, (*data, steps[0])) for r in (False, True))
    expected = ranks.local(launched(*data, steps[0]))  # the arena's first call, which waits longer, is not recorded
    for _ in range(4):
        testing.same_bits(ranks.local(recorded(*data, steps[0])), expected)
    jax_ep.check()
    ranks.barrier()
    if jax.process_index() != 1:
        before, start = _counts(), time.monotonic()
        out = jax.block_until_ready(recorded(*data, steps[0]))
        waited = time.monotonic() - start
        assert not (_counts() - before)[0], "it was launched, not replayed"
        assert TIMEOUT_S * 0.9 < waited < TIMEOUT_S + 5
        assert np.isnan(ranks.local(out).astype(np.float32)).all()
        with pytest.raises(jax_ep.errors.PeerTimeout) as caught:
            jax_ep.check()
        assert caught.value.peer == 1 and caught.value.op == "dispatch" and caught.value.rank == jax.process_index()
        before = _counts()
        with pytest.raises(jax.errors.JaxRuntimeError, match="PeerTimeout: "):
            jax.block_until_ready(recorded(*data, steps[0]))
        assert not (_counts() - before).any()
    ranks.barrier()
    jax_ep.reset(timeout_s=60)
    for step in (0, 1, 2, 0):
        for program in (recorded, launched):
            out = ranks.local(program(*data, steps[step]))
        testing.same_bits(ranks.local(recorded(*data, steps[step])), out)
    testing.same_bits(ranks.local(recorded(*data, steps[0])), expected)
    jax_ep.check()
    ranks.barrier()
