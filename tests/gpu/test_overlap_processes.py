"""Between start and done the whole GPU is free: matrix products there take what they take alone.

Two processes on one GPU. Rank 0 computes; rank 1 only exchanges, so that "alone" means alone: products of both ranks
would share the GPU and slow each other down. Both ranks compile all programs, and then run different ones. Before each
the host of rank 1 waits for that of rank 0: its next call would wait in a kernel, on SMs, while rank 0 still computes.
That very case is the control: it must show.

A product takes (T(MANY) - T(FEW)) / (MANY - FEW), T(n) being the time of a program with n of them. What launches,
exchanges and waits take is the same in both and cancels; a kernel that stays on SMs between start and done does not.
Programs take turns, so that clocks and other load hit all alike.
"""

import pathlib
import statistics
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import ranks
from jax import lax

import jax_ep
from jax_ep import testing

sys.path.insert(0, str(pathlib.Path(__file__).parents[2] / "examples"))

NUM_TOKENS, NUM_TOPK, NUM_EXPERTS, HIDDEN = 128, 8, 64, 7168
FEW, MANY, REPEATS = 2, 8, 40
TOLERANCE = 0.03
SIZE = {"cuda": 8192, "xla": 64}  # of the matrices: 1.6 ms a product on an H200
WAYS = ("alone", "between", "after", "before")  # where the products are: no exchange, in its middle, behind it, before


@pytest.fixture
def implementation(request):
    if jax.device_count() != 2:
        pytest.skip("needs 2 ranks")
    return request.config.getoption("--implementation")


def _program(implementation, way, num_products):
    """(x, topk_idx, a, b) -> (received rows, or none, and the product)."""
    config = jax_ep.Config(num_sms=32, first_call_timeout_s=60.0, timeout_s=20.0)
    settings = dict(num_experts=NUM_EXPERTS, axis_name="ep", layout="token", config=config)
    settings["implementation"] = implementation

    def products(a, b):
        for _ in range(num_products):
            a = a @ b
        return a

    def run(x, idx, a, b):
        if way == "alone":
            return x[:0], products(a, b)
        if way == "between":
            pending = jax_ep.dispatch_start(x, idx, **settings)
            pending, a = lax.optimization_barrier((pending, a))
            pending, a = lax.optimization_barrier((pending, products(a, b)))
            return jax_ep.dispatch_done(pending).x, a
        if way == "after":
            rows, a = lax.optimization_barrier((jax_ep.dispatch(x, idx, **settings).x, a))
            return rows, products(a, b)
        x, a = lax.optimization_barrier((x, products(a, b)))
        return jax_ep.dispatch(x, idx, **settings).x, a

    return testing.on_ranks(run, ranks.mesh())


def _operands(size):
    """Rows and ids, as NumPy too, and two square matrices on each rank."""
    on, num_ranks = ranks.mesh(), jax.device_count()
    x = testing.random_rows((num_ranks, NUM_TOKENS, HIDDEN), "bfloat16")
    sizes = dict(num_ranks=num_ranks, num_tokens=NUM_TOKENS, num_topk=NUM_TOPK, num_experts=NUM_EXPERTS)
    idx = testing.routing("uniform", **sizes)

    def matrices(rank):  # products of them neither grow nor vanish: zeros would cost less power
        draw = lambda n: jax.random.normal(jax.random.key(2 * rank + n), (size, size), jnp.bfloat16)
        return draw(0), draw(1) * size**-0.5

    *tokens, rank = ranks.place(on, (x, idx, np.arange(num_ranks, dtype=np.int32)))
    return (*tokens, *testing.on_ranks(matrices, on)(rank)), (x, idx)


def _order(program):
    """Exchanges and products in the order in which XLA runs them."""
    import overlap

    return [name.removesuffix("_latency") for name in overlap.schedule(program.as_text())]


def _seconds(implementation, programs, args, expected):
    """Of each run of each program that has products, on rank 0; results are checked now and then."""
    is_rank_0 = jax.process_index() == 0
    times = {key: [] for key in programs if key[1] > 0}
    repeats = REPEATS if implementation == "cuda" else 2
    for turn in range(repeats + 2):
        for way, num_products in times:
            # In pure JAX exchanges are XLA's collectives, for which all ranks must run one program.
            is_mine = is_rank_0 or implementation == "xla"
            program = programs[way, num_products if is_mine else 0]
            ranks.barrier()  # of the hosts, within a millisecond; then on the device, within microseconds
            jax.block_until_ready(programs["after", 0](*args))
            start = time.perf_counter()
            rows, _ = jax.block_until_ready(program(*args))
            times[way, num_products].append(time.perf_counter() - start)
            if way != "alone" and turn in (0, repeats + 1):
                testing.same_bits(ranks.local(rows), expected, way)
    return {key: of[2:] for key, of in times.items()}


def test_products_between_start_and_done_take_their_time_alone(implementation, capsys):
    """Within 3 %; what overlapping saves is printed. Of pure JAX only results are compared."""
    args, (x, idx) = _operands(SIZE[implementation])
    programs = {
        (way, n): _program(implementation, way, n).lower(*args).compile() for way in WAYS for n in (0, FEW, MANY)
    }
    if implementation == "cuda":
        products = ["gemm"] * MANY
        order = {way: _order(programs[way, MANY]) for way in WAYS}
        assert order["alone"] == products and order["between"] == ["dispatch_start", *products, "dispatch_done"]
        assert order["after"] == ["dispatch", *products] and order["before"] == [*products, "dispatch"]
    oracle = testing.oracle_dispatch(x, idx, num_experts=NUM_EXPERTS, layout="token")
    times = _seconds(implementation, programs, args, oracle.x[jax.process_index()])
    jax_ep.check()
    ranks.barrier()
    if implementation == "xla" or jax.process_index() != 0:
        return

    def us(way):
        apart = [(many - few) * 1e6 for many, few in zip(times[way, MANY], times[way, FEW], strict=True)]
        return statistics.median(apart) / (MANY - FEW)

    alone, between, after, beside = (us(way) for way in WAYS)
    saved = [(whole - split) * 1e6 for whole, split in zip(times["after", FEW], times["between", FEW], strict=True)]
    with capsys.disabled():
        print(
            f"\na product: {alone:.0f} us alone, {between:.0f} between start and done ({between / alone:.3f}), "
            f"{after:.0f} after a whole dispatch ({after / alone:.3f}), {beside:.0f} beside one that waits on 32 SMs "
            f"({beside / alone:.3f}); {FEW} products in the middle of a dispatch instead of behind it save "
            f"{statistics.median(saved):.0f} us of {statistics.median(times['after', FEW]) * 1e6:.0f}"
        )
    assert beside > (1 + TOLERANCE) * alone, "the control shows nothing: too noisy, or the products leave SMs idle"
    assert abs(between / alone - 1) <= TOLERANCE
