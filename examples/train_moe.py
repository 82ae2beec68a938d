"""Trains a small Mixture-of-Experts language model on the sources of Python's standard library.

    python examples/train_moe.py                                   # all GPUs, or 8 virtual CPU devices: < 6 minutes
    python examples/train_moe.py --steps 20                        # a short look
    python -m jax_ep launch --ranks 4 examples/train_moe.py        # four processes of this machine

The mesh is data x expert over all devices. Tokens are split over both axes, experts over the second. The global batch
does not depend on the number of devices, so losses are comparable.
"""

import argparse
import dataclasses
import functools
import json
import math
import os
import pathlib
import time

import _data
import jax
import jax.numpy as jnp
import numpy as np
import optax
from _model import LanguageModel, ModelConfig
from flax import nnx
from jax import lax
from jax.flatten_util import ravel_pytree
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jax_ep import nn
from jax_ep.nn import MoEConfig

AXES = ("data", "expert")
PROMPT = b"def "


def parse_args(argv=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--steps", type=int, default=300, help="train up to this step")
    add("--batch", type=int, default=16, help="sequences per step over all devices")
    add("--length", type=int, default=128, help="bytes per sequence")
    add("--hidden", type=int, default=128)
    add("--ffn", type=int, default=256, help="inner size of one expert")
    add("--layers", type=int, default=2)
    add("--heads", type=int, default=4)
    add("--experts", type=int, default=8)
    add("--topk", type=int, default=2)
    add(
        "--layout",
        choices=nn.LAYOUTS,
        default=nn.DEFAULT_LAYOUT,
        help="how rows reach the experts; default %(default)s",
    )
    add("--capacity-factor", type=float, default=2.0, help="rows kept over the mean; 0: worst case, no drops")
    add("--quantize", action="store_true", help="rows cross in FP8, both ways; the gradients' do not")
    add("--learning-rate", type=float, default=3e-3)
    add("--implementation", choices=("auto", "cuda", "xla"), default="auto", help="of dispatch and combine")
    add("--dtype", choices=("bf16", "f32"), help="of the computation; default bf16 on GPU, else f32")
    add("--ep", type=int, help="size of the expert axis; default: the largest that fits")
    add("--seed", type=int, default=0)
    add("--out", type=pathlib.Path, default=pathlib.Path("runs/train_moe"), help="folder for plot and checkpoint")
    add("--restore", action="store_true", help="go on from the checkpoint in --out")
    add("--no-checkpoint", action="store_true")
    add("--log-losses", type=pathlib.Path, metavar="FILE", help="write the loss of every step as JSON")
    add("--sample-bytes", type=int, default=120, help="length of the text written at the end; 0: none")
    add("--cpu-devices", type=int, default=8, help="virtual devices of a single process without a GPU")
    env = os.environ.get
    add("--coordinator", default=env("JAX_COORDINATOR_ADDRESS"), help="host:port; several processes")
    add("--num-processes", type=int, default=env("JAX_NUM_PROCESSES"))
    add("--process-id", type=int, default=env("JAX_PROCESS_ID"))
    return parser.parse_args(argv)


def start_jax(args):
    """Joins the other processes if there are any; must come before the first use of a device."""
    if jax.distributed.is_initialized():  # by `python -m jax_ep launch`
        return
    if args.coordinator:
        # JAX itself reads JAX_LOCAL_DEVICE_IDS, needed when processes share a GPU.
        jax.distributed.initialize(args.coordinator, args.num_processes, args.process_id)
    elif "xla_force_host_platform_device_count" not in os.environ.get("XLA_FLAGS", ""):
        jax.config.update("jax_num_cpu_devices", args.cpu_devices)


def make_mesh(args) -> Mesh:
    num_devices = jax.device_count()
    ep = args.ep or math.gcd(num_devices, args.experts)
    if num_devices % ep or args.experts % ep or args.batch % num_devices:
        raise SystemExit(
            f"got {num_devices} devices, --ep {ep}, --experts {args.experts}, --batch {args.batch}; expected --ep to "
            "divide the devices and the experts, and the devices to divide --batch"
        )
    return Mesh(np.array(jax.devices()).reshape(-1, ep), AXES)


class Trainer:
    """Model, optimiser and compiled functions over one mesh. State is a dict of params, opt_state and step."""

    def __init__(self, args, mesh: Mesh):
        """Nothing is computed yet."""
        self.args, self.mesh = args, mesh
        is_gpu = mesh.devices.flat[0].platform == "gpu"
        self.dtype = {"bf16": jnp.bfloat16, "f32": jnp.float32}[args.dtype or ("bf16" if is_gpu else "f32")]
        self.moe = MoEConfig(
            hidden=args.hidden,
            ffn=args.ffn,
            num_experts=args.experts,
            num_topk=args.topk,
            axis_name="expert",
            data_axes=("data",),
            layout=args.layout,
            capacity_factor=args.capacity_factor or None,
            quantize="fp8" if args.quantize else None,
            quantize_combine="fp8_wire" if args.quantize else None,
            implementation=None if args.implementation == "auto" else args.implementation,
        )
        schedule = optax.warmup_cosine_decay_schedule(0, args.learning_rate, min(50, args.steps // 4), args.steps)
        self.tx = optax.adamw(schedule, b2=0.98, weight_decay=0.01)

        self.graphdef, abstract = nnx.split(nnx.eval_shape(lambda: self.make_model(self.moe)))
        self.specs = nnx.to_pure_dict(nnx.get_partition_spec(abstract))
        shard = functools.partial(NamedSharding, mesh)
        params = jax.tree.map(shard, self.specs)
        opt_state = optax.tree_utils.tree_map_params(
            self.tx,
            lambda _, sharding: sharding,
            jax.eval_shape(self.tx.init, nnx.to_pure_dict(abstract)),
            params,
            transform_non_params=lambda _: shard(P()),
        )
        self.shardings = {"params": params, "opt_state": opt_state, "step": shard(P())}
        self.abstract = abstract
        self.step = jax.jit(self._step, donate_argnums=0, out_shardings=(self.shardings, shard(P())))

    def make_model(self, moe: MoEConfig) -> LanguageModel:
        """New parameters, the same for every mesh."""
        config = ModelConfig(_data.VOCABULARY, self.args.layers, self.args.heads, moe)
        return LanguageModel(config, mesh=self.mesh, dtype=self.dtype, rngs=nnx.Rngs(self.args.seed))

    def init(self):
        """State at step 0, each array where it belongs."""

        def init():
            params = nnx.to_pure_dict(nnx.state(self.make_model(self.moe)))
            return {"params": params, "opt_state": self.tx.init(params), "step": jnp.zeros((), jnp.int32)}

        return jax.jit(init, out_shardings=self.shardings)()

    def put(self, batch: np.ndarray) -> jax.Array:
        """Global array of a batch that every process has whole."""
        return jax.make_array_from_callback(batch.shape, NamedSharding(self.mesh, P(AXES)), lambda i: batch[i])

    def bind(self, params, graphdef=None) -> LanguageModel:
        """The model with these parameters, global or local ones."""
        state = jax.tree.map(lambda x: x, self.abstract)
        nnx.replace_by_pure_dict(state, params)
        return nnx.merge(graphdef or self.graphdef, state)

    def _step(self, state, batch):
        gradients = jax.shard_map(
            self._gradients, mesh=self.mesh, in_specs=(self.specs, P(AXES)), out_specs=(self.specs, P())
        )
        grads, metrics = gradients(state["params"], batch)
        updates, opt_state = self.tx.update(grads, state["opt_state"], state["params"])
        params = optax.apply_updates(state["params"], updates)
        return {"params": params, "opt_state": opt_state, "step": state["step"] + 1}, metrics

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


def open_checkpoints(args):
    import orbax.checkpoint as ocp

    options = ocp.CheckpointManagerOptions(max_to_keep=1)
    return ocp, ocp.CheckpointManager((args.out / "checkpoint").absolute(), options=options)


def restore(args, trainer: Trainer):
    ocp, manager = open_checkpoints(args)
    if manager.latest_step() is None:
        raise SystemExit(f"--restore: no checkpoint under {args.out / 'checkpoint'}; train without it first")
    shapes = jax.eval_shape(trainer.init)
    target = jax.tree.map(lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), shapes, trainer.shardings)
    return manager.restore(manager.latest_step(), args=ocp.args.StandardRestore(target))


def save(args, state):
    ocp, manager = open_checkpoints(args)
    step = int(state["step"])
    if step not in manager.all_steps():
        manager.save(step, args=ocp.args.StandardSave(state))
    manager.close()


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
    start_jax(args)
    mesh = make_mesh(args)
    is_first = jax.process_index() == 0
    say = print if is_first else lambda *_: None
    corpus = _data.load_corpus()
    entropy = _data.unigram_entropy(corpus)
    trainer = Trainer(args, mesh)
    state = restore(args, trainer) if args.restore else trainer.init()
    first = int(state["step"])
    shape = " x ".join(f"{name} {mesh.shape[name]}" for name in AXES)
    size = sum(x.size for x in jax.tree.leaves(state["params"]))
    say(f"{jax.device_count()} devices ({mesh.devices.flat[0].device_kind}), mesh {shape}, {size:,} parameters")
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
            save(args, state)
    else:
        say(f"nothing to train: the checkpoint is at step {first}, --steps is {args.steps}")
    if args.sample_bytes:
        text = trainer.sample(state["params"], args.sample_bytes)
        say("sample:\n" + text.decode("utf-8", errors="replace"))
    if args.coordinator:
        jax.distributed.shutdown()


if __name__ == "__main__":
    main()
