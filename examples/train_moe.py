"""Trains a small Mixture-of-Experts language model on the sources of Python's standard library.

    python examples/train_moe.py                                   # all GPUs, or 8 virtual CPU devices: < 6 minutes
    python examples/train_moe.py --steps 20                        # a short look
    python -m jax_ep launch --ranks 4 examples/train_moe.py        # four processes of this machine

The mesh is data x expert over all devices. Tokens are split over both axes, experts over the second. The global batch
does not depend on the number of devices, so losses are comparable.
"""

import dataclasses
import json
import pathlib
import time

import _data
import jax
import jax.numpy as jnp
import numpy as np
import optax
from _training import AXES, Checkpoints, Trainer, make_mesh, make_training_parser, start_jax
from flax import nnx
from jax import lax
from jax.flatten_util import ravel_pytree
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

PROMPT = b"def "


def parse_args(argv=None):
    parser = make_training_parser(__doc__, steps=300, out="runs/train_moe")
    add = parser.add_argument
    add("--restore", action="store_true", help="go on from the checkpoint in --out")
    add("--no-checkpoint", action="store_true")
    add("--sample-bytes", type=int, default=120, help="length of the text written at the end; 0: none")
    return parser.parse_args(argv)


class LocalTrainer(Trainer):
    """The step seen from one device: `shard_map` over local tokens and local experts, collectives written out."""

    def __init__(self, args, mesh: Mesh):
        """Nothing is computed yet."""
        warmup = min(50, args.steps // 4)
        super().__init__(args, mesh, optax.warmup_cosine_decay_schedule(0, args.learning_rate, warmup, args.steps))

    def put(self, batch: np.ndarray) -> jax.Array:
        """Global array of a batch that every process has whole."""
        return jax.make_array_from_callback(batch.shape, NamedSharding(self.mesh, P(AXES)), lambda i: batch[i])

    def _step(self, state, batch):
        gradients = jax.shard_map(
            self._gradients, mesh=self.mesh, in_specs=(self.specs, P(AXES)), out_specs=(self.specs, P())
        )
        grads, metrics = gradients(state["params"], batch)
        return self.update(state, grads), metrics

    def _gradients(self, params, batch):
        """Runs on each device: local tokens, local experts; the same gradients on all devices that share a weight."""

        def loss_fn(params):
            logits, aux = self.bind(params)(batch[:, :-1])
            loss = optax.softmax_cross_entropy_with_integer_labels(logits, batch[:, 1:]).mean()
            loss = lax.pmean(loss, AXES)
            balance = sum(a.load_balancing_loss for a in aux) / len(aux)
            z = sum(a.z_loss for a in aux) / len(aux)
            dropped = sum(a.num_dropped for a in aux) / (batch[:, 1:].size * self.mesh.size * len(aux) * self.args.topk)
            return loss + 0.02 * balance + 0.001 * z, {"loss": loss, "balance": balance, "dropped": dropped}

        # As "varying", a replicated weight gets the gradient of the local tokens only, and we sum all of them in one
        # collective; left alone, JAX would sum each weight by its own.
        leaves, tree = jax.tree.flatten(params)
        absent = [tuple(a for a in AXES if a not in spec) for spec in jax.tree.leaves(self.specs)]
        leaves = [lax.pcast(x, axes, to="varying") if axes else x for x, axes in zip(leaves, absent, strict=True)]
        grads, metrics = jax.grad(loss_fn, has_aux=True)(tree.unflatten(leaves))
        grads = jax.tree.leaves(grads)
        for axes in set(absent) - {()}:
            mine = [i for i, other in enumerate(absent) if other == axes]
            flat, unravel = ravel_pytree([grads[i] for i in mine])
            for i, grad in zip(mine, unravel(lax.psum(flat, axes)), strict=True):
                grads[i] = grad
        return tree.unflatten(grads), metrics

    def sample(self, params, num_bytes: int, temperature=0.7) -> bytes:
        """Text after PROMPT. Every device writes its own; this process's first is returned."""
        length = min(self.args.length, 64)
        moe = dataclasses.replace(self.moe, capacity_factor=2 * self.args.capacity_factor or None)
        graphdef = nnx.graphdef(nnx.eval_shape(lambda: self.make_model(moe)))
        window = np.full((self.mesh.size, length), ord("\n"), np.int32)
        window[:, -len(PROMPT) :] = list(PROMPT)

        def write(params, window):
            model = self.bind(params, graphdef)

            def write_byte(window, key):
                logits = model(window)[0][:, -1]
                byte = jax.random.categorical(key, logits / temperature).astype(jnp.int32)
                return jnp.concatenate([window[:, 1:], byte[:, None]], axis=1), byte

            keys = jax.random.split(jax.random.key(self.args.seed), num_bytes)
            return lax.scan(write_byte, window, keys)[1].T

        writer = jax.shard_map(write, mesh=self.mesh, in_specs=(self.specs, P(AXES)), out_specs=P(AXES))
        text = jax.jit(writer)(params, self.put(window))
        return PROMPT + bytes(np.asarray(text.addressable_shards[0].data)[0].astype(np.uint8))


def restore(args, trainer: Trainer):
    state = Checkpoints(args.out).restore(trainer)
    if state is None:
        raise SystemExit(f"--restore: no checkpoint under {args.out / 'checkpoint'}; train without it first")
    return state


def train(args, trainer: Trainer, state, corpus, is_first: bool):
    """Returns the new state and the losses; only the first process shows progress."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    first = int(state["step"])
    losses, dropped = [], []
    columns = (TextColumn("training"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[note]}"))
    with Progress(*columns, TimeRemainingColumn(), disable=not is_first) as progress:
        task = progress.add_task("", total=args.steps, completed=first, note="compiling")
        for step in range(first, args.steps):
            start = time.perf_counter()
            batch = trainer.put(_data.batch_at(corpus, step, args.batch, args.length, args.seed))
            state, metrics = trainer.step(state, batch)
            metrics = {name: float(value) for name, value in metrics.items()}
            seconds = time.perf_counter() - start
            losses.append(metrics["loss"])
            dropped.append(metrics["dropped"])
            progress.update(task, advance=1, note=f"loss {metrics['loss']:.3f}")
            if is_first and (step - first in (0, 1) or (step + 1) % max(1, args.steps // 10) == 0):
                progress.console.print(
                    f"step {step + 1:4d}  loss {metrics['loss']:.3f}  balance {metrics['balance']:.2f}  "
                    f"dropped {100 * np.mean(dropped[-50:]):.2f}%  {1e3 * seconds:.0f} ms"
                )
    return state, losses


def plot(path: pathlib.Path, first: int, losses, entropy: float):
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, axis = plt.subplots(figsize=(7, 4))
    axis.plot(range(first + 1, first + 1 + len(losses)), losses, label="training loss")
    axis.axhline(entropy, linestyle="--", color="gray", label="unigram entropy")
    axis.set(xlabel="step", ylabel="nats per byte", title="MoE language model on Python's standard library")
    axis.legend()
    figure.savefig(path, dpi=120, bbox_inches="tight")
    plt.close(figure)


def main(argv=None):
    args = parse_args(argv)
    joined = start_jax(args)
    mesh = make_mesh(args)
    is_first = jax.process_index() == 0
    say = print if is_first else lambda *_: None
    corpus = _data.load_corpus()
    entropy = _data.unigram_entropy(corpus)
    trainer = LocalTrainer(args, mesh)
    state = restore(args, trainer) if args.restore else trainer.init()
    first = int(state["step"])
    say(trainer.describe(state["params"]))
    say(f"{corpus.size:,} bytes of text, unigram entropy {entropy:.3f} nats per byte")

    state, losses = train(args, trainer, state, corpus, is_first)
    args.out.mkdir(parents=True, exist_ok=True)
    if losses:
        final = float(np.mean(losses[-20:]))
        say(
            f"final loss {final:.3f} nats per byte (mean of the last {len(losses[-20:])} steps), "
            f"unigram entropy {entropy:.3f}"
        )
        if is_first:
            plot(args.out / "loss.png", first, losses, entropy)
        if is_first and args.log_losses:
            args.log_losses.write_text(json.dumps({"first_step": first, "losses": losses, "entropy": entropy}))
        if not args.no_checkpoint:
            checkpoints = Checkpoints(args.out)
            checkpoints.save(state)
            checkpoints.close()
    else:
        say(f"nothing to train: the checkpoint is at step {first}, --steps is {args.steps}")
    if args.sample_bytes:
        text = trainer.sample(state["params"], args.sample_bytes)
        say("sample:\n" + text.decode("utf-8", errors="replace"))
    if joined:
        jax.distributed.shutdown()


if __name__ == "__main__":
    main()
