"""A rank that never comes, one that comes too late, one that runs another program, one with invalid ids under
debug_checks: they say so and can go on. With --ranks-per-node, and --put-delay or --transport, over several nodes.

One process per rank, at least three; each test begins and ends with a group that works.
"""

import dataclasses
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import ranks

import jax_ep
from jax_ep import testing

NUM_TOKENS, NUM_TOPK, HIDDEN, TIMEOUT_S = 32, 2, 64, 3.0
CONFIG = jax_ep.Config(first_call_timeout_s=60.0, timeout_s=TIMEOUT_S)
CUDA = dict(config=CONFIG, implementation="cuda")


@pytest.fixture(autouse=True)
def _three_ranks(request):
    if jax.device_count() < 3:
        pytest.skip("needs 3 ranks")
    assert request.config.getoption("--implementation") == "cuda"
    ranks.mode = request.config.getoption("--mode")
    per_node, delay, transport = (
        request.config.getoption(name) for name in ("--ranks-per-node", "--put-delay", "--transport")
    )
    CUDA["config"] = dataclasses.replace(
        CONFIG, ranks_per_node=per_node, put_delay_s=delay, transport=transport, nvshmem_bytes=1 << 28
    )


def _program(num_tokens=NUM_TOKENS, with_combine=True, **config):
    """(compiled program, operands, what combine must return): dispatch, or dispatch and combine."""
    on = ranks.mesh()
    size = on.devices.size
    num_experts = 4 * size
    idx = testing.routing("uniform", num_ranks=size, num_tokens=num_tokens, num_topk=NUM_TOPK, num_experts=num_experts)
    x = testing.code_rows(size, num_tokens, HIDDEN, "float32")
    cuda = {**CUDA, "config": dataclasses.replace(CUDA["config"], **config)}

    def fn(x, idx):
        recv = jax_ep.dispatch(x, idx, num_experts=num_experts, axis_name="ep", mode=ranks.mode, **cuda)
        if not with_combine:
            return recv.x, recv.counts
        return recv.x, recv.counts, jax_ep.combine(recv.x, recv.handle)

    args = ranks.place(on, (x, idx))
    return testing.on_ranks(fn, on).lower(*args).compile(), args, x[jax.process_index()] * NUM_TOPK


def _works(program, args, expected):
    for _ in range(3):
        testing.same_bits(ranks.local(program(*args)[2]), expected)
    jax_ep.check()
    ranks.barrier()


def _bits(array):
    """The bytes that are in the array's buffer now (NumPy views of a jax.Array are cached)."""
    data = array.addressable_shards[0].data
    return np.asarray(jnp.copy(data)).tobytes()


def test_a_rank_that_never_comes():
    """The others stop after the set time, name it, and after reset() the next step is right."""
    program, args, expected = _program()
    dispatch, dispatch_args, _ = _program(with_combine=False)
    _works(program, args, expected)
    jax.block_until_ready(dispatch(*dispatch_args))
    ranks.barrier()
    if jax.process_index() != 1:
        start = time.monotonic()
        rows, counts = dispatch(*dispatch_args)
        jax.block_until_ready(rows)
        waited = time.monotonic() - start
        assert TIMEOUT_S * 0.9 < waited < TIMEOUT_S + 5
        assert np.isnan(ranks.local(rows)).all() and not ranks.local(counts).any()
        with pytest.raises(jax_ep.errors.PeerTimeout) as caught:
            jax_ep.check()
        assert caught.value.peer == 1 and caught.value.op == "dispatch"
        assert caught.value.rank == jax.process_index()
        with pytest.raises(jax.errors.JaxRuntimeError, match="PeerTimeout: "):
            jax.block_until_ready(dispatch(*dispatch_args))
    ranks.barrier()
    jax_ep.reset(timeout_s=60)
    _works(program, args, expected)


def test_a_rank_that_comes_after_the_others_gave_up():
    """It changes no byte of theirs and raises, too: in throughput mode at once, since its announce was revoked; in
    latency mode what they had sent waits for it and completes this call, and the next one finds them gone."""
    program, args, expected = _program()
    dispatch, dispatch_args, _ = _program(with_combine=False)
    _works(program, args, expected)
    jax.block_until_ready(dispatch(*dispatch_args))
    ranks.barrier()
    is_late = jax.process_index() == 1
    if not is_late:
        rows, counts = dispatch(*dispatch_args)
        jax.block_until_ready(rows)
        left = [_bits(rows), _bits(counts)]
    ranks.barrier()
    if is_late:
        start = time.monotonic()
        jax.block_until_ready(dispatch(*dispatch_args))
        if ranks.mode == "latency":
            jax_ep.check()
            jax.block_until_ready(dispatch(*dispatch_args))
        assert time.monotonic() - start < 2 * TIMEOUT_S + 5
        with pytest.raises(jax_ep.errors.EpError):
            jax_ep.check()
    ranks.barrier()
    if not is_late:
        assert [_bits(rows), _bits(counts)] == left
    jax_ep.reset(timeout_s=60)
    _works(program, args, expected)


def test_a_rank_that_runs_another_program():
    """Another number of tokens under the same group is found at the announce, not computed with."""
    program, args, expected = _program()
    _differs(_program(num_tokens=NUM_TOKENS // 2), program, args, expected)


@pytest.mark.parametrize("one, other", [((2, 4), (4, 2)), ((2, 2), (4, 4))])
def test_a_rank_with_other_blocks_and_chunks(request, one, other):
    """B04: over nodes (SMs, tokens of a chunk) go in pairs; those that a hash might take for each other. In latency
    mode each SM has flags of its own."""
    if not request.config.getoption("--ranks-per-node") and ranks.mode != "latency":
        return  # within a node nothing depends on either
    program, args, expected = _program(num_sms=one[0], node_chunk=one[1])
    _differs(_program(num_sms=other[0], node_chunk=other[1]), program, args, expected)


def _differs(others, program, args, expected):
    """Rank 1 runs another program than its peers."""
    other, other_args, _ = others
    _works(program, args, expected)
    jax.block_until_ready(other(*other_args))
    ranks.barrier()
    mine, mine_args = (other, other_args) if jax.process_index() == 1 else (program, args)
    try:
        jax.block_until_ready(mine(*mine_args))
    except jax.errors.JaxRuntimeError as error:  # combine may be launched after dispatch's failure was recorded
        assert "MismatchError: " in str(error) or "PeerFailed: " in str(error) or "PeerTimeout: " in str(error)
    with pytest.raises(jax_ep.errors.EpError) as caught:
        jax_ep.check()
    kinds = ranks.exchange(type(caught.value).__name__)
    assert "MismatchError" in kinds, kinds
    jax_ep.reset(timeout_s=60)
    _works(program, args, expected)


def test_invalid_ids_under_debug_checks():
    """B08: the rank whose ids they are says so; results are those of -1, and the group goes on."""
    on = ranks.mesh()
    size = on.devices.size
    config = dataclasses.replace(CUDA["config"], debug_checks=True)
    idx = testing.routing("uniform", num_ranks=size, num_tokens=NUM_TOKENS, num_topk=NUM_TOPK, num_experts=4 * size)
    x = testing.code_rows(size, NUM_TOKENS, HIDDEN, "float32")

    def fn(x, idx):
        options = dict(axis_name="ep", mode=ranks.mode, config=config, implementation="cuda")
        recv = jax_ep.dispatch(x, idx, num_experts=4 * size, **options)
        return jax_ep.combine(recv.x, recv.handle)

    program = testing.on_ranks(fn, on)
    jax.block_until_ready(program(*ranks.place(on, (x, idx))))
    jax_ep.check()
    idx[1, 5, 1] = 4 * size
    for _ in range(3):
        out = ranks.local(program(*ranks.place(on, (x, idx))))
    num_valid = ((idx >= 0) & (idx < 4 * size)).sum(-1)[..., None]
    testing.same_bits(out, (x * num_valid)[jax.process_index()].astype(np.float32))
    if jax.process_index() == 1:
        with pytest.raises(jax_ep.errors.InvalidIdError, match=rf"the first is {4 * size} \(token 5, k 1\)"):
            jax_ep.check()
    else:
        jax_ep.check()
    ranks.barrier()
    jax_ep.reset(timeout_s=60)
    idx[1, 5, 1] = -1
    testing.same_bits(ranks.local(program(*ranks.place(on, (x, idx)))), out)
    jax_ep.check()
