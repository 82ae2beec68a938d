"""Every case of tests/exchange_cases.py with one process per rank, against the NumPy oracle.

All processes run the same test; groups smaller than the job leave the others watching. Memory is poisoned before every
call. Covers layouts, dtypes, odd shapes, -1 and invalid ids, empty ranks, drops, alignment, bias, weights, gradients,
handle reuse; straight into the peers' buffers, through staging, and XLA's collectives as a second opinion.
"""

import dataclasses
import functools
import math
import pathlib

import jax
import numpy as np
import pytest
import ranks
from exchange_cases import ExchangeCases, Inputs, Sizes, check, exchange, make_inputs

import jax_ep
from jax_ep import testing


@pytest.fixture
def num_ranks():
    return jax.device_count()


@functools.cache
def _program(sizes: Sizes, on, empty):
    return testing.on_ranks(lambda *arrays: exchange(sizes, Inputs(*ranks.without_rows(arrays, empty))), on)


class _Processes(ExchangeCases):
    config = ranks.CONFIG
    mode, is_split, ranks_per_node = "throughput", False, None

    @pytest.fixture(autouse=True)
    def _implementation(self, request):
        self.implementation = request.config.getoption("--implementation")
        self.mode, self.is_split = (request.config.getoption(name) for name in ("--mode", "--split"))
        self.ranks_per_node, delay = (request.config.getoption(name) for name in ("--ranks-per-node", "--put-delay"))
        transport = request.config.getoption("--transport")
        self.config = dataclasses.replace(
            self.config,
            copies=request.config.getoption("--copies"),
            command_buffers=ranks.command_buffers(request.config),
            put_delay_s=delay,
            node_chunk=3 if delay else None,
            transport=transport,
            nvshmem_bytes=1 << 30,
        )
        if (
            transport == "nvshmem"
            and self.implementation == "cuda"
            and jax_ep.debug.stats()["setup_ms"]["nvshmem"] == 0
        ):
            # All processes set it up together, before groups of some of them.
            sizes = Sizes(jax.device_count(), 3 * jax.device_count())
            self.run(sizes, self.routing("masked", sizes))

    def run(self, sizes, topk_idx, seed=0):
        if sizes.num_ranks > jax.device_count():
            pytest.skip(f"needs {sizes.num_ranks} ranks")
        sizes = dataclasses.replace(sizes, implementation=self.implementation, config=self.config)
        sizes = dataclasses.replace(sizes, mode=self.mode, is_split=self.is_split)
        if self.ranks_per_node:
            sizes = dataclasses.replace(sizes, ranks_per_node=math.gcd(sizes.num_ranks, self.ranks_per_node))
        on = ranks.mesh(sizes.num_ranks)
        inputs, oracle = make_inputs(sizes, topk_idx, seed)
        result = None
        if ranks.takes_part(on):
            result = ranks.call(functools.partial(_program, sizes), on, dataclasses.astuple(inputs))
        result = ranks.stacked(on, result)
        if ranks.is_my_turn():
            check(sizes, result, inputs, oracle)
        return result


class TestExchange(_Processes):
    """The default: straight into the peers' buffers where that is safe. --ranks-per-node: over the test transport, or
    that of --transport."""

    def test_one_put_per_token_and_node(self):
        """Over all ranks; every rank puts the rows of its tokens, and the sums of its partners'.

        In latency mode there is one per token and rank of another node."""
        if not self.ranks_per_node or self.implementation != "cuda":
            return  # one node puts nothing: test_puts_were_used_if_asked_for
        num_ranks = jax.device_count()
        sizes = Sizes(num_ranks, 3 * num_ranks, num_tokens=65, ranks_per_node=self.ranks_per_node)
        idx = self.routing("masked", sizes)
        per_node = math.gcd(num_ranks, self.ranks_per_node)
        experts_per_node = sizes.num_experts // num_ranks * per_node
        is_routed = (idx >= 0) & (idx < sizes.num_experts)
        by_rank = self.mode == "latency"
        per_place = experts_per_node // per_node if by_rank else experts_per_node
        places_of_node = per_node if by_rank else 1
        place = np.where(is_routed, idx // per_place, -1)
        crossing = sum(
            int((place[rank] == at).any(-1).sum())
            for rank in range(num_ranks)
            for at in range(sizes.num_experts // per_place)
            if at // places_of_node != rank // per_node
        )
        before = jax_ep.debug.stats()["rows_put"]
        self.run(sizes, idx)
        put = sum(ranks.exchange(jax_ep.debug.stats()["rows_put"] - before))
        # dispatch, redispatch of x2, and combine's sum forward; their gradients: two combines, one or two redispatches.
        # Halves go by slots, and their gradients by the mode.
        assert put > 0 and (put % crossing == 0 or (self.is_split and not by_rank)), (put, crossing)


@pytest.mark.parametrize("layout", ["expert", "token", "batched"])
class TestOtherWays:
    """The same exchange on other paths; one program per layout, several routings."""

    def _run(self, request, layout, implementation, config):
        cases = _Processes()
        cases.implementation, cases.config = implementation, config
        # More tokens than one round of the staging windows holds.
        sizes = Sizes(jax.device_count(), 3 * jax.device_count(), num_tokens=65, layout=layout)
        for kind in ("uniform", "masked", "empty_ranks", "one_rank"):
            cases.run(sizes, cases.routing(kind, sizes))

    def test_staged(self, request, layout):
        asked = dict(copies=request.config.getoption("--copies"), command_buffers=ranks.command_buffers(request.config))
        staged = dataclasses.replace(ranks.CONFIG, staging="always", staging_bytes=16 << 10, **asked)
        before = jax_ep.debug.stats()["staged_calls"]
        self._run(request, layout, request.config.getoption("--implementation"), staged)
        if jax.device_count() > 1 and request.config.getoption("--implementation") == "cuda":
            assert jax_ep.debug.stats()["staged_calls"] > before

    def test_xla_implementation(self, request, layout):
        """The reference of the same API meets the same oracle on this platform, so both agree with each other."""
        problem = ranks.has_xla_collectives()
        if problem:
            pytest.skip(f"needs NCCL between these ranks: {problem}")
        self._run(request, layout, "xla", None)


def test_no_failure_was_recorded():
    jax_ep.check()


def test_puts_were_used_if_asked_for(request):
    nodes = request.config.getoption("--ranks-per-node") is not None
    assert (jax_ep.debug.stats()["rows_put"] > 0) == (nodes and request.config.getoption("--implementation") == "cuda")


def test_nvshmem_was_used_if_asked_for(request):
    """After all others."""
    setup_ms = jax_ep.debug.stats()["setup_ms"]
    asked = request.config.getoption("--transport") == "nvshmem"
    asked = asked and request.config.getoption("--implementation") == "cuda"
    assert (setup_ms["nvshmem"] > 0) == (setup_ms["nvshmem_init"] > 0) == asked
    if asked:
        assert "libnvshmem_host" in pathlib.Path("/proc/self/maps").read_text()
        print("set-up, ms:", setup_ms)


def test_vector_copies_were_used_if_asked_for(request):
    """After all others: --copies vector is the path of GPUs older than compute capability 9.0."""
    stats = jax_ep.debug.stats()
    asked = request.config.getoption("--copies") == "vector"
    assert (stats["vector_calls"] > 0) == (asked and stats["calls"] > 0)
