"""What the examples share: options, processes, mesh, model and its placement, training state, checkpoints."""

import argparse
import dataclasses
import math
import os
import pathlib

import _data
import jax
import jax.numpy as jnp
import optax
from _model import LanguageModel, ModelConfig
from flax import nnx
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jax_ep
from jax_ep import nn
from jax_ep.nn import MoEConfig

AXES = ("data", "expert")
# What `jax.distributed.initialize()` reads, by launcher: with all of a line's names it needs no arguments.
LAUNCHERS = {
    "Open MPI": ("OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_LOCAL_RANK"),
    "Slurm": ("SLURM_NTASKS", "SLURM_PROCID", "SLURM_LOCALID", "SLURM_JOB_ID", "SLURM_STEP_NODELIST"),
    "Kubernetes": ("KUBERNETES_SERVICE_HOST", "JOB_COMPLETION_INDEX"),
}


def make_parser(doc: str) -> argparse.ArgumentParser:
    """The options of every example: those of processes and devices."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--implementation", choices=("auto", "cuda", "xla"), default="auto", help="of dispatch and combine")
    add("--dtype", choices=("bf16", "f32"), help="of the computation; default bf16 on GPU, else f32")
    add("--seed", type=int, default=0)
    add("--cpu-devices", type=int, default=8, help="virtual devices of a single process without a GPU")
    env = os.environ.get
    add("--coordinator", default=env("JAX_COORDINATOR_ADDRESS"), help="host:port; several processes")
    add("--num-processes", type=int, default=env("JAX_NUM_PROCESSES"))
    add("--process-id", type=int, default=env("JAX_PROCESS_ID"))
    return parser


def make_model_parser(doc: str) -> argparse.ArgumentParser:
    """Those, and the model's and the mesh's."""
    parser = make_parser(doc)
    add = parser.add_argument
    add("--hidden", type=int, default=128)
    add("--ffn", type=int, default=256, help="inner size of one expert")
    add("--layers", type=int, default=2)
    add("--heads", type=int, default=4)
    add("--experts", type=int, default=8)
    add("--topk", type=int, default=2)
    add(
        "--layout",
        choices=nn.LAYOUTS,
        help="how rows reach the experts; default: batched, or expert where no capacity is set",
    )
    add("--capacity-factor", type=float, default=2.0, help="rows kept over the mean; 0: worst case, no drops")
    add("--quantize", action="store_true", help="rows cross in FP8, both ways; the gradients' do not")
    add("--ep", type=int, help="size of the expert axis; default: the largest that fits")
    add("--ranks-per-node", type=int, metavar="N", help="combine per node of N ranks first; default: one node")
    return parser


def make_training_parser(doc: str, *, steps: int, out: str) -> argparse.ArgumentParser:
    """Those, and what a training run is."""
    parser = make_model_parser(doc)
    add = parser.add_argument
    add("--steps", type=int, default=steps, help="train up to this step")
    add("--batch", type=int, default=16, help="sequences per step over all devices")
    add("--length", type=int, default=128, help="bytes per sequence")
    add("--learning-rate", type=float, default=3e-3)
    add("--out", type=pathlib.Path, default=pathlib.Path(out), help="folder for what is written")
    add("--log-losses", type=pathlib.Path, metavar="FILE", help="write the loss of every step as JSON")
    return parser


def find_launcher() -> str | None:
    """The launcher that started this process as one of several, if JAX knows it."""
    for launcher, names in LAUNCHERS.items():
        # A lone process of Open MPI or Slurm needs nobody, and would be given one GPU only.
        if all(name in os.environ for name in names) and os.environ[names[0]] != "1":
            return launcher
    return None


def start_jax(args, *, detect: bool = False) -> bool:
    """Joins the other processes if there are any; must come before the first use of a device.

    `detect` also joins those of a launcher that JAX knows. Returns whether to call `jax.distributed.shutdown` at the
    end.
    """
    if jax.distributed.is_initialized():  # by `python -m jax_ep launch`
        return False
    if args.coordinator:
        # JAX itself reads JAX_LOCAL_DEVICE_IDS, needed when processes share a GPU.
        jax.distributed.initialize(args.coordinator, args.num_processes, args.process_id)
        return True
    launcher = find_launcher() if detect else None
    if launcher:
        try:
            jax.distributed.initialize()
        except ValueError as error:
            raise SystemExit(
                f"got variables of {launcher}, which this JAX cannot use ({error}); "
                "give --coordinator HOST:PORT, --num-processes and --process-id"
            ) from error
        return True
    if "xla_force_host_platform_device_count" not in os.environ.get("XLA_FLAGS", ""):
        jax.config.update("jax_num_cpu_devices", args.cpu_devices)
    return False


def make_mesh(args) -> Mesh:
    """Mesh data x expert over all devices, the experts of a group on one host where that can be. Collective."""
    num_devices = jax.device_count()
    dp, batch = getattr(args, "dp", None), getattr(args, "batch", None)
    ep = args.ep or (num_devices // dp if dp else math.gcd(num_devices, args.experts))
    if ep < 1 or ep * (dp or num_devices // ep) != num_devices or args.experts % ep or (batch or 0) % num_devices:
        sizes = (f"--dp {dp}, " if dp else "") + f"--ep {ep}, --experts {args.experts}"
        raise SystemExit(
            f"got {num_devices} devices, {sizes}{f', --batch {batch}' if batch else ''}; expected --ep to divide the "
            "devices and the experts"
            + (", and the devices to divide --batch" if batch else "")
            + (", and --dp times --ep to be the number of devices" if dp else "")
        )
    return jax_ep.make_mesh({"data": num_devices // ep, "expert": ep}, "expert")


class Model:
    """The language model over one mesh: what it is made of, and where its parameters are."""

    def __init__(self, args, mesh: Mesh, **moe):
        """Nothing is computed yet. `moe`: fields of `MoEConfig` that are not as `args` have them."""
        self.args, self.mesh = args, mesh
        is_gpu = mesh.devices.flat[0].platform == "gpu"
        self.dtype = {"bf16": jnp.bfloat16, "f32": jnp.float32}[args.dtype or ("bf16" if is_gpu else "f32")]
        as_asked = MoEConfig(
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
            config=jax_ep.Config(ranks_per_node=args.ranks_per_node),
        )
        self.moe = dataclasses.replace(as_asked, **moe)
        self.graphdef, abstract = nnx.split(nnx.eval_shape(lambda: self.make_model(self.moe)))
        self.abstract = abstract
        self.specs = nnx.to_pure_dict(nnx.get_partition_spec(abstract))
        self.shapes = nnx.to_pure_dict(abstract)
        place = lambda x, spec: NamedSharding(mesh, self.stored_spec(x.shape, spec))
        self.param_shardings = jax.tree.map(place, self.shapes, self.specs)

    def stored_spec(self, shape, spec: P) -> P:
        """Where a parameter is kept between steps: where the computation wants it."""
        del shape
        return spec

    def make_model(self, moe: MoEConfig) -> LanguageModel:
        """New parameters, the same for every mesh."""
        config = ModelConfig(_data.VOCABULARY, self.args.layers, self.args.heads, moe)
        return LanguageModel(config, mesh=self.mesh, dtype=self.dtype, rngs=nnx.Rngs(self.args.seed))

    def new_params(self):
        """Values of a new model, as a pure dict; under `jit` each array can be made where it belongs."""
        return nnx.to_pure_dict(nnx.state(self.make_model(self.moe)))

    def bind(self, params, graphdef=None) -> LanguageModel:
        """The model with these parameters, global or local ones."""
        state = jax.tree.map(lambda x: x, self.abstract)
        nnx.replace_by_pure_dict(state, params)
        return nnx.merge(graphdef or self.graphdef, state)

    def describe(self, params) -> str:
        """Devices, mesh and size of the model, for people."""
        shape = " x ".join(f"{name} {self.mesh.shape[name]}" for name in AXES)
        size = sum(x.size for x in jax.tree.leaves(params))
        kind = self.mesh.devices.flat[0].device_kind
        return f"{jax.device_count()} devices ({kind}), mesh {shape}, {size:,} parameters"


class Trainer(Model):
    """Model, optimiser and compiled functions over one mesh. State is a dict of params, opt_state and step.

    Moments are kept where their parameters are. A subclass gives `_step(state, batch) -> (state, metrics)`.
    """

    def __init__(self, args, mesh: Mesh, schedule: optax.Schedule):
        """Nothing is computed yet."""
        super().__init__(args, mesh)
        self.tx = optax.adamw(schedule, b2=0.98, weight_decay=0.01)
        replicated = NamedSharding(mesh, P())
        opt_state = optax.tree_utils.tree_map_params(
            self.tx,
            lambda _, sharding: sharding,
            jax.eval_shape(self.tx.init, self.shapes),
            self.param_shardings,
            transform_non_params=lambda _: replicated,
        )
        self.shardings = {"params": self.param_shardings, "opt_state": opt_state, "step": replicated}
        self.step = jax.jit(self._step, donate_argnums=0, out_shardings=(self.shardings, replicated))

    def init(self):
        """State at step 0, each array where it belongs."""

        def init():
            params = self.new_params()
            return {"params": params, "opt_state": self.tx.init(params), "step": jnp.zeros((), jnp.int32)}

        return jax.jit(init, out_shardings=self.shardings)()

    def update(self, state, grads):
        """State after one step of the optimiser."""
        updates, opt_state = self.tx.update(grads, state["opt_state"], state["params"])
        params = optax.apply_updates(state["params"], updates)
        return {"params": params, "opt_state": opt_state, "step": state["step"] + 1}


class Checkpoints:
    """Orbax checkpoints of the state under `out / "checkpoint"`, which all processes see."""

    def __init__(self, out: pathlib.Path, keep: int = 1):
        """Collective: every process opens, saves, restores and closes."""
        import orbax.checkpoint as ocp

        self.ocp, self.folder = ocp, (out / "checkpoint").absolute()
        self.manager = ocp.CheckpointManager(self.folder, options=ocp.CheckpointManagerOptions(max_to_keep=keep))

    def restore(self, trainer: Trainer):
        """State of the newest checkpoint, or None. Its mesh need not be the trainer's."""
        step = self.manager.latest_step()
        if step is None:
            return None
        shapes = jax.eval_shape(trainer.init)
        place = lambda x, sharding: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)
        target = jax.tree.map(place, shapes, trainer.shardings)
        return self.manager.restore(step, args=self.ocp.args.StandardRestore(target))

    def restore_params(self, model: Model):
        """Parameters of the newest checkpoint, without optimiser, or None."""
        step = self.manager.latest_step()
        if step is None:
            return None
        place = lambda x, sharding: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)
        target = {"params": jax.tree.map(place, model.shapes, model.param_shardings)}
        args = self.ocp.args.PyTreeRestore(
            item=target,
            restore_args=self.ocp.checkpoint_utils.construct_restore_args(target),
            partial_restore=True,
        )
        return self.manager.restore(step, args=args)["params"]

    def save(self, state):
        """Writes in the background, unless this step is there already; `close` waits for it."""
        step = int(state["step"])
        if step not in self.manager.all_steps():
            self.manager.save(step, args=self.ocp.args.StandardSave(state))

    def close(self):
        """Waits for what is being written."""
        self.manager.close()
