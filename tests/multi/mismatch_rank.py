"""What each process of test_mismatch.py runs: it meets the others with calls that differ in one thing, then with equal
ones. Prints a line of JSON for every way: kind, text, rank and peer of the error that `check` raises, or null."""

import json

import jax
import numpy as np

import jax_ep
from jax_ep import testing

me, num_ranks = jax.process_index(), jax.process_count()
mesh = jax.sharding.Mesh(np.array(jax.devices()), ("ep",))
sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("ep"))
place = lambda a: jax.make_array_from_callback(a.shape, sharding, lambda at: a[at])
local = lambda a: np.asarray(a.addressable_shards[0].data)


def run(num_tokens=8, dtype="float32", again=False, **options):
    """One step of this process; the defaults are what everybody else does."""
    x = testing.code_rows(num_ranks, num_tokens, 8, dtype)
    idx = testing.routing("uniform", num_ranks=num_ranks, num_tokens=num_tokens, num_topk=2, num_experts=6)

    def fn(x, idx):
        config = jax_ep.Config(debug_checks=True)
        recv = jax_ep.dispatch(x, idx, num_experts=6, axis_name="ep", config=config, **options)
        if again:  # where the others combine
            return recv.counts, jax_ep.dispatch(x, handle=recv.handle).x
        return recv.counts, jax_ep.combine(recv.x, recv.handle)

    counts, out = testing.on_ranks(fn, mesh)(place(x), place(idx))
    jax.block_until_ready(out)
    error = None
    try:
        jax_ep.check()
        testing.same_bits(local(out)[0], 2 * x[me])
    except jax_ep.errors.EpError as e:
        error = dict(kind=type(e).__name__, text=str(e), rank=e.rank, peer=e.peer)
        assert np.isnan(local(out)).all() and (e.op != "dispatch" or not local(counts).any())
    print("WAY" + json.dumps(error), flush=True)
    jax_ep.reset()


WAYS = (dict(num_tokens=16), dict(dtype="bfloat16"), dict(layout="token"), dict(capacity=12), dict(again=True))
if __name__ == "__main__":
    for way in WAYS:
        run(**way if me == 1 else {})
    run()
