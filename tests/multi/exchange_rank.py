"""What each process of test_processes.py runs: the exchange of exchange_cases.py on the devices of all processes.

Arguments: folder of exchange_cases.py, file of (sizes, topk_idx), folder for results.
"""

import dataclasses
import pathlib
import pickle
import sys

import jax
import numpy as np

cases, job, results = sys.argv[1:]
sys.path.insert(0, cases)

from exchange_cases import Inputs, exchange, make_inputs  # noqa: E402

from jax_ep import testing  # noqa: E402

sizes, idx = pickle.loads(pathlib.Path(job).read_bytes())
mesh = jax.sharding.Mesh(np.array(jax.devices()), ("ep",))
sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("ep"))
inputs, _ = make_inputs(sizes, idx)
arrays = [jax.make_array_from_callback(a.shape, sharding, lambda at, a=a: a[at]) for a in dataclasses.astuple(inputs)]
result = testing.on_ranks(lambda *a: exchange(sizes, Inputs(*a)), mesh)(*arrays)
parts = {}  # rank -> results
for rank, device in enumerate(mesh.devices):
    if device.process_index == jax.process_index():
        own = lambda a, device=device: next(np.asarray(s.data) for s in a.addressable_shards if s.device == device)
        parts[rank] = jax.tree.map(own, result)
(pathlib.Path(results) / f"process{jax.process_index()}").write_bytes(pickle.dumps(parts))
