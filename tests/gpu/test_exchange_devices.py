"""One process with several GPUs: every case of tests/exchange_cases.py, one rank per local GPU, against the oracle.

Run by tests/gpu/run.py where the process sees at least two GPUs:
`python -m pytest --device gpu tests/gpu/test_exchange_devices.py`. No launcher, no jax.distributed.
"""

import dataclasses
import functools
import random

import jax
import numpy as np
import pytest
import ranks
from exchange_cases import ExchangeCases, Inputs, Sizes, check, exchange, make_inputs

import jax_ep
from jax_ep import testing


@pytest.fixture(autouse=True)
def _several_devices():
    if jax.local_device_count() < 2:
        pytest.skip("needs 2 ranks")


@pytest.fixture
def num_ranks():
    return jax.local_device_count()


@functools.cache
def _program(sizes: Sizes, on, empty):
    return testing.on_ranks(lambda *arrays: exchange(sizes, Inputs(*ranks.without_rows(arrays, empty))), on)


class _Devices(ExchangeCases):
    config = ranks.CONFIG
    mode, is_split = "throughput", False

    @pytest.fixture(autouse=True)
    def _mode(self, request):
        self.mode, self.is_split = (request.config.getoption(name) for name in ("--mode", "--split"))

    def run(self, sizes, topk_idx, seed=0):
        if sizes.num_ranks > jax.local_device_count():
            pytest.skip(f"needs {sizes.num_ranks} ranks")
        sizes = dataclasses.replace(sizes, implementation="cuda", config=self.config)
        sizes = dataclasses.replace(sizes, mode=self.mode, is_split=self.is_split)
        on = ranks.mesh(sizes.num_ranks)
        inputs, oracle = make_inputs(sizes, topk_idx, seed)
        result = ranks.call(functools.partial(_program, sizes), on, dataclasses.astuple(inputs))
        result = jax.tree.map(np.asarray, result)
        check(sizes, result, inputs, oracle)
        return result


class TestExchange(_Devices):
    """Straight into the other GPUs' buffers, which one process can always reach."""


@pytest.mark.parametrize("layout", ["expert", "token"])
def test_staged(layout, num_ranks):
    cases = _Devices()
    cases.config = dataclasses.replace(ranks.CONFIG, staging="always", staging_bytes=16 << 10)
    before = jax_ep.debug.stats()["staged_calls"]
    sizes = Sizes(num_ranks, 3 * num_ranks, num_tokens=65, layout=layout)
    for kind in ("uniform", "masked", "empty_ranks"):
        cases.run(sizes, cases.routing(kind, sizes))
    assert jax_ep.debug.stats()["staged_calls"] > before


@pytest.mark.parametrize("layout", ["expert", "token"])
def test_calls_1_and_1000_are_equal(layout, num_ranks):
    """Each GPU late at random: the same bits every time."""
    sizes = dataclasses.replace(
        Sizes(num_ranks, 4 * num_ranks, num_tokens=256, layout=layout), implementation="cuda", config=ranks.CONFIG
    )
    cases, on, rng = _Devices(), ranks.mesh(num_ranks), random.Random(0)
    inputs, oracle = make_inputs(sizes, cases.routing("masked", sizes), 0)
    args = ranks.place(on, dataclasses.astuple(inputs))
    program = _program(sizes, on, (False,) * len(args)).lower(*args).compile()
    first = None
    for call in range(1000):
        for device in jax.local_devices():
            if rng.random() < 0.05:
                with jax.default_device(device):
                    ranks._busy(rng.randrange(1, 30))
        if call % 100 == 0:
            ranks.poison()
        result = program(*args)
        if call in (0, 1, 2, 999):
            result = jax.tree.map(np.asarray, result)
            check(sizes, result, inputs, oracle)
            first = first or jax.tree.leaves(result)
            for got, expected in zip(jax.tree.leaves(result), first, strict=True):
                testing.same_bits(got, expected)
    jax_ep.check()
