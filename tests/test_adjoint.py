"""<D x, y> = <x, D^T y>, exactly: every operation is linear, and its backward pass is its transpose.

Small integers make every product and sum exact in every dtype, so the two sides are equal, not close. Covers dispatch
(rows and weights), a second tensor along the handle, combine in its rows, its bias and its weights; every layout, with
dropping and without; and that dispatch and combine are each other's transpose as the user calls them. Rows that hold
no token are not 0 here: both directions must ignore them.
"""

import jax
import numpy as np
import pytest
from exchange_cases import LAYOUTS, QUICK_COMPILE

import jax_ep
from jax_ep import testing

TOKENS, TOPK, HIDDEN = 6, 3, 8
# Less than a rank is sent, in whole groups of four where rows are aligned.
SMALL_CAPACITY = {"expert": 8, "token": 4, "batched": 2}
WEIGHTED = ("expert", "batched")  # layouts whose combine takes weights


def inner(a, b) -> float:
    """Inner product over all ranks, exact."""
    pairs = zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
    return float(sum(np.vdot(np.asarray(p, np.float64), np.asarray(q, np.float64)) for p, q in pairs))


def routing(num_ranks: int) -> np.ndarray:
    """Duplicates within a token, and a third of the entries not routed."""
    sizes = dict(num_ranks=num_ranks, num_tokens=TOKENS, num_topk=TOPK, num_experts=3 * num_ranks)
    idx = testing.routing("duplicates", **sizes)
    return np.where(np.random.default_rng(num_ranks).random(idx.shape) < 1 / 3, -1, idx).astype(np.int32)


@pytest.mark.parametrize("is_dropping", [False, True], ids=["dropless", "dropping"])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("num_ranks", "dtype"), [(1, "float32"), (2, "bfloat16"), (3, "float32"), (8, "bfloat16")])
def test_transposes_are_exact(make_mesh, num_ranks, dtype, layout, is_dropping):
    """B34: each operation against its own backward pass, and dispatch against combine."""
    # An expert may repeat within a token here, which the default capacity of "batched" does not hold.
    dropless = num_ranks * TOKENS * TOPK if layout == "batched" else None
    kwargs = dict(
        num_experts=3 * num_ranks,
        axis_name="ep",
        layout=layout,
        capacity=SMALL_CAPACITY[layout] if is_dropping else dropless,
        expert_alignment=4 if layout == "expert" else 1,
    )

    def run(idx, x, w, y, v, row_weights, tokens):
        """Pairs (D x, y, x, D^T y) by name; y, v and row_weights are rows, the others tokens."""
        pairs = {}

        def transpose(name, f, operands, cotangents):
            results, pullback = jax.vjp(f, *operands)
            pairs[name] = results, cotangents, operands, pullback(cotangents)

        def send(x, w):
            recv = jax_ep.dispatch(x, idx, w, **kwargs)
            return recv.x, recv.weights

        transpose("dispatch", send, (x, w), (y, v))
        recv = jax_ep.dispatch(x, idx, w, **kwargs)
        handle = recv.handle
        transpose("second tensor", lambda x: jax_ep.dispatch(x, handle=handle).x, (tokens,), y)
        transpose("combine", lambda y, b: jax_ep.combine(y, handle, bias=b), (y, x), tokens)
        pairs["dispatch and combine"] = recv.x, y, x, jax_ep.combine(y, handle)
        pairs["second tensor and combine"] = (
            jax_ep.dispatch(tokens, handle=handle).x,
            y,
            tokens,
            pairs["combine"][0] - x,
        )
        if layout in WEIGHTED:
            in_rows = lambda y: jax_ep.combine(y, handle, weights=row_weights)
            transpose("weighted combine in rows", in_rows, (y,), tokens)
            in_weights = lambda w: jax_ep.combine(y, handle, weights=w)
            transpose("weighted combine in weights", in_weights, (row_weights,), tokens)
        return pairs, recv.num_dropped

    rng = np.random.default_rng([num_ranks, LAYOUTS.index(layout)])
    integers = lambda shape: (rng.integers(1, 4, shape) * rng.choice((-1, 1), shape)).astype(np.float32)
    idx = routing(num_ranks)
    rows = testing.oracle_dispatch(
        integers((num_ranks, TOKENS, HIDDEN)),
        idx,
        integers(idx.shape),
        **{k: v for k, v in kwargs.items() if k != "axis_name"},
    )
    payload = lambda shape: integers(shape).astype(jax.numpy.dtype(dtype))
    row_shape = (num_ranks, 3, -1) if layout == "batched" else rows.x.shape[:2]
    x, tokens, y = (payload(shape) for shape in [(num_ranks, TOKENS, HIDDEN)] * 2 + [rows.x.shape])
    y = y.reshape(*row_shape, HIDDEN)
    row_weights = integers(rows.weights.shape)
    row_weights = row_weights.reshape(row_shape) if layout == "batched" else row_weights
    program = jax.jit(testing.on_ranks(run, make_mesh(num_ranks), jit=False), compiler_options=QUICK_COMPILE)
    args = idx, x, integers(idx.shape), y, row_weights, integers(y.shape[:-1]), tokens
    pairs, num_dropped = program(*args)
    assert (int(num_dropped.sum()) > 0) == is_dropping
    assert len(pairs) == (7 if layout in WEIGHTED else 5)
    for name, (results, cotangents, operands, back) in pairs.items():
        forward, backward = inner(results, cotangents), inner(operands, back)
        assert forward == backward, name
        assert forward != 0, name
    jax.tree.map(testing.same_bits, program(*args)[0], pairs)
