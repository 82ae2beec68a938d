"""`windowed` over processes: ranks run as many windows as the fullest one needs, each a call of ours in a loop, forward
and backward. Values and gradients are whole numbers, compared bit for bit with what they are by definition."""

import jax
import numpy as np
import pytest
import ranks

import jax_ep
from jax_ep import testing

NUM_TOKENS, NUM_TOPK, HIDDEN, LOCAL = 24, 4, 64, 4
CAPACITY = {"expert": 16, "batched": 3}  # of 96 rows a rank on average, 24 an expert


@pytest.fixture
def implementation(request):
    return request.config.getoption("--implementation")


@pytest.mark.parametrize("mode", ["throughput", "latency"])
@pytest.mark.parametrize("layout", CAPACITY)
def test_values_and_gradients(layout, mode, implementation):
    """B10: nothing is dropped under any skew, in memory for a few rows."""
    on = ranks.mesh()
    size = on.devices.size

    def step(x, idx, weights, scale, cotangent):
        def loss(x, weights, scale):
            out = jax_ep.windowed(
                lambda scale, recv: recv.x * scale, scale, x, idx, weights, num_experts=LOCAL * size, axis_name="ep",
                capacity=CAPACITY[layout], layout=layout, mode=mode, config=ranks.CONFIG, implementation=implementation,
            )  # fmt: skip
            return (out * cotangent).sum(), out

        (_, out), grads = jax.value_and_grad(loss, (0, 1, 2), has_aux=True)(x, weights, scale)
        return out, *grads

    program = testing.on_ranks(step, on)
    rng = np.random.default_rng(0)
    for call, kind in enumerate(("uniform", "one_rank", "masked", "zipf", "empty_ranks")):
        sizes = dict(num_ranks=size, num_tokens=NUM_TOKENS, num_topk=NUM_TOPK, num_experts=LOCAL * size)
        idx = testing.routing(kind, **sizes, seed=call)
        rows = (size, NUM_TOKENS, HIDDEN)
        x, cotangent = (rng.integers(-3, 4, rows).astype(np.float32) for _ in range(2))
        weights = rng.integers(-2, 3, idx.shape).astype(np.float32)
        scale = rng.integers(1, 4, (size, 1)).astype(np.float32)
        ranks.poison()
        got = ranks.stacked(on, program(*ranks.place(on, (x, idx, weights, scale, cotangent))))

        is_kept = idx >= 0
        holder = np.where(is_kept, idx // LOCAL, 0)
        of_entry = np.where(is_kept, scale[holder, 0], 0)
        total = (weights * of_entry).sum(-1, keepdims=True)
        dot = np.where(is_kept, (x * cotangent).sum(-1, keepdims=True), 0)
        of_scale = [[(np.where(holder == rank, weights, 0) * dot).sum()] for rank in range(size)]
        expected = (x * total, cotangent * total, of_entry * dot, np.asarray(of_scale, np.float32))
        for name, a, b in zip(("out", "x", "weights", "scale"), got, expected, strict=True):
            np.testing.assert_array_equal(np.asarray(a), b, f"{kind}, call {call}: {name}")
    jax_ep.check()
    assert (jax_ep.debug.stats()["calls"] > 0) == (implementation == "cuda")
