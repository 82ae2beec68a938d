"""Trains the model of train_moe.py on several processes and hosts, seen as one program over global arrays.

    srun python examples/train_multihost.py --ep 8 --resume        # Slurm, Open MPI, Kubernetes: found by JAX
    python examples/train_multihost.py --coordinator host0:9876 --num-processes 2 --process-id 0      # and 1
    python -m jax_ep launch --ranks 4 examples/train_multihost.py --ep 2 --steps 20     # four processes of this machine

`jax.jit` partitions the step from the places of its operands: experts over the axis "expert", tokens over both axes.
Each process reads its own part of every batch. All processes write one checkpoint, to a folder that they share.
docs/multihost.md has complete job files.
"""

import json
import time

import _data
import jax
import numpy as np
import optax
from _training import AXES, Checkpoints, Trainer, make_mesh, make_training_parser, start_jax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jax_ep


def parse_args(argv=None):
    parser = make_training_parser(__doc__, steps=300, out="runs/train_multihost")
    add = parser.add_argument
    add("--dp", type=int, help="size of the data axis; default: what --ep leaves")
    add("--shard-rest", action="store_true", help="keep all other weights, and their moments, split over the data axis")
    add("--warmup", type=int, default=50, help="steps until the learning rate is reached; then it stays")
    add("--checkpoint-every", type=int, default=100, metavar="N", help="steps; 0: at the end only")
    add("--keep", type=int, default=2, metavar="N", help="checkpoints that stay")
    add("--resume", action="store_true", help="go on from the newest checkpoint in --out, if there is one")
    return parser.parse_args(argv)


class GlobalTrainer(Trainer):
    """The step as one computation on global arrays; XLA places the collectives."""

    def __init__(self, args, mesh: Mesh):
        """Nothing is computed yet."""
        # No decay: neither a restart nor another --steps changes what a step does.
        super().__init__(args, mesh, optax.warmup_constant_schedule(0, args.learning_rate, args.warmup))
        self.computed = jax.tree.map(lambda spec: NamedSharding(mesh, spec), self.specs)
        self.batch_shape = (args.batch, args.length + 1)
        self.batch_sharding = NamedSharding(mesh, P(AXES))
        places = self.batch_sharding.addressable_devices_indices_map(self.batch_shape).values()
        self.rows = np.unique(np.concatenate([np.arange(args.batch)[index[0]] for index in places]))

    def stored_spec(self, shape, spec: P) -> P:
        """With --shard-rest the largest dimension of a replicated weight is split over the data axis, if it can be."""
        size = self.mesh.shape["data"]
        if not self.args.shard_rest or any(spec) or not shape or max(shape) % size:
            return spec
        dimension = shape.index(max(shape))
        return P(*(["data" if i == dimension else None for i in range(len(shape))]))

    def read(self, corpus: np.ndarray, step: int) -> jax.Array:
        """The global batch of a step. This process reads the sequences of its own devices only."""
        args = self.args
        local = _data.batch_at(corpus, step, args.batch, args.length, args.seed, self.rows)
        return jax.make_array_from_process_local_data(self.batch_sharding, local, self.batch_shape)

    def _step(self, state, batch):
        def loss_fn(params):
            # Where the layers want the weights. With --shard-rest XLA gathers them here, and scatters the gradients.
            params = jax.lax.with_sharding_constraint(params, self.computed)
            logits, aux = self.bind(params)(batch[:, :-1])
            loss = optax.softmax_cross_entropy_with_integer_labels(logits, batch[:, 1:]).mean()
            balance = sum(a.load_balancing_loss for a in aux) / len(aux)
            z = sum(a.z_loss for a in aux) / len(aux)
            dropped = sum(a.num_dropped for a in aux) / (batch[:, 1:].size * len(aux) * self.args.topk)
            return loss + 0.02 * balance + 0.001 * z, {"loss": loss, "balance": balance, "dropped": dropped}

        grads, metrics = jax.grad(loss_fn, has_aux=True)(state["params"])
        return self.update(state, grads), metrics


def describe_hosts(mesh: Mesh) -> str:
    """Numbers of processes and hosts, and over how many hosts the experts of one group are spread. Collective."""
    hosts = jax_ep.topology.mesh_hosts(mesh, "expert")
    spans = max(len(set(group)) for group in hosts.tolist())
    return f"processes: {jax.process_count()}, hosts: {hosts.max() + 1}, hosts of one expert group: {spans}"


def train(args, trainer: GlobalTrainer, state, checkpoints: Checkpoints, corpus, say):
    """Returns the new state and the losses."""
    losses = []
    for step in range(int(state["step"]), args.steps):
        start = time.perf_counter()
        state, metrics = trainer.step(state, trainer.read(corpus, step))
        metrics = {name: float(value) for name, value in metrics.items()}
        losses.append(metrics["loss"])
        if len(losses) <= 2 or (step + 1) % max(1, args.steps // 10) == 0:
            say(
                f"step {step + 1:4d}  loss {metrics['loss']:.3f}  balance {metrics['balance']:.2f}  "
                f"dropped {100 * metrics['dropped']:.2f}%  {1e3 * (time.perf_counter() - start):.0f} ms"
            )
        if args.checkpoint_every and (step + 1) % args.checkpoint_every == 0:
            checkpoints.save(state)
    return state, losses


def main(argv=None):
    args = parse_args(argv)
    joined = start_jax(args, detect=True)
    is_first = jax.process_index() == 0
    say = (lambda text: print(text, flush=True)) if is_first else lambda _: None
    mesh = make_mesh(args)
    hosts = describe_hosts(mesh)
    corpus = _data.load_corpus()
    trainer = GlobalTrainer(args, mesh)
    checkpoints = Checkpoints(args.out, args.keep)
    state = checkpoints.restore(trainer) if args.resume else None
    if state is None:
        state = trainer.init()
    first = int(state["step"])
    say(trainer.describe(state["params"]))
    say(hosts)
    say(f"from step {first}; {len(trainer.rows)} of {args.batch} sequences are read by process 0")

    state, losses = train(args, trainer, state, checkpoints, corpus, say)
    if losses:
        checkpoints.save(state)
        say(f"final loss {losses[-1]:.3f} nats per byte")
    else:
        say(f"nothing to train: the checkpoint is at step {first}, --steps is {args.steps}")
    checkpoints.close()
    if is_first and args.log_losses:
        args.log_losses.write_text(json.dumps({"first_step": first, "losses": losses}))
    if joined:
        jax.distributed.shutdown()


if __name__ == "__main__":
    main()
