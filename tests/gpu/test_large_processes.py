"""One array of more than 2**31 elements and 2**32 bytes: no row's place wraps (B26). One process per rank.

All tokens of all ranks go to rank 0, whose result has 64 rows more than 4 GiB hold; in both modes, and over two nodes.
Rows are made and checked on the device; each names its source and token in every column. A CPU runs a small size, which
tries the test itself.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import ranks

import jax_ep
from jax_ep import testing

HIDDEN = 8192


def code(source, token):
    """Rows [n, HIDDEN] bf16 of the tokens given by source and number; small integers, so exact."""
    start = source * 83 + token * 29 + token // 251
    return ((start[:, None] + jnp.arange(HIDDEN) * 5) % 251 - 125).astype(jnp.bfloat16)


@pytest.mark.parametrize(
    ("layout", "how"),
    [
        ("token", "throughput"),
        ("expert", "throughput"),
        ("token", "latency"),  # slots of more than 4 GiB, too
        ("token", "nodes"),
        ("expert", "nodes"),
    ],
)
def test_rows_beyond_4_gib(request, layout, how):
    mode = "latency" if how == "latency" else "throughput"
    config = dataclasses.replace(ranks.CONFIG, ranks_per_node=1 if how == "nodes" else None)
    implementation = request.config.getoption("--implementation")
    on = ranks.mesh()
    size = on.devices.size
    num_rows = (1 << 32) // (2 * HIDDEN) + 64 if implementation == "cuda" else 128
    num_tokens = num_rows // size
    num_rows = num_tokens * size

    def run(idx):
        rank = jax.lax.axis_index("ep")
        token = jnp.arange(num_tokens)
        x = code(rank, token)
        recv = jax_ep.dispatch(
            x,
            idx,
            num_experts=size,
            axis_name="ep",
            layout=layout,
            mode=mode,
            config=config,
            implementation=implementation,
        )
        row = jnp.arange(num_rows)
        expected = jnp.where(rank == 0, code(row // num_tokens, row % num_tokens), 0)
        wrong = (recv.x != expected).any(1)
        out = jax_ep.combine(recv.x, recv.handle)
        return dict(
            rows=wrong.sum(),
            first=jnp.where(wrong.any(), jnp.argmax(wrong), -1),
            sums=(out != code(rank, token)).any(1).sum(),
            count=recv.counts[0],
            dropped=recv.num_dropped,
        )

    program = testing.on_ranks(run, on, check_vma=False)
    got = ranks.local(program(*ranks.place(on, (np.zeros((size, num_tokens, 1), np.int32),))))
    count = num_rows if jax.process_index() == 0 else 0
    assert {k: int(v) for k, v in got.items()} == dict(rows=0, first=-1, sums=0, count=count, dropped=0)
    jax_ep.check()
