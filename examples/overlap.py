"""A Mixture-of-Experts layer whose exchanges run beside its matrix products, and what that saves.

    python examples/overlap.py                                   # all GPUs, or 4 virtual CPU devices
    python -m jax_ep launch --ranks 2 examples/overlap.py        # two processes of this machine

Each rank's tokens are two micro-batches, and beside the routed experts there is a shared one. Rows of one micro-batch
travel while the other is computed:

    dispatch a | shared expert on a | dispatch b | experts on a | combine a | experts on b | combine b | shared on b
      start .......................... done/start .............. done/start ............... done/start ......... done

Between `start` and `done` stand products that need nothing of that exchange, held there by two barriers, without which
XLA may move them (docs/concepts.md). The program says whether it kept them, from the text that XLA compiled, and takes
the time of the same layers with whole exchanges. Without CUDA devices there is nothing to overlap,
and it only compares the results.
"""

import re
import statistics
import time

import jax
import jax.numpy as jnp
import numpy as np
from _training import make_parser, start_jax
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jax_ep

PARTS = ("dispatch a", "dispatch b", "combine a", "combine b")
NUM_PRODUCTS = 2  # of each expert, and so between start and done


def parse_args(argv=None):
    parser = make_parser(__doc__)
    parser.set_defaults(cpu_devices=4)
    add = parser.add_argument
    add("--tokens", type=int, help="per device and micro-batch; default 1024, without GPUs 64")
    add("--hidden", type=int, help="default 2048, without GPUs 128")
    add("--ffn", type=int, help="inner size of an expert, and of the shared one; default 1024, without GPUs 64")
    add("--experts", type=int, default=8, help="per device")
    add("--topk", type=int, default=4)
    add("--layers", type=int, default=4)
    add("--repeats", type=int, default=20, help="timed runs of each program")
    return parser.parse_args(argv)


def between(pending, operand, fn):
    """`fn(operand)` after the start that made `pending` and before its done; both again."""
    pending, operand = lax.optimization_barrier((pending, operand))
    return lax.optimization_barrier((pending, fn(operand)))


class Layer:
    """One layer inside `shard_map`, on micro-batches a and b, each [num_tokens, hidden]."""

    def __init__(self, args, num_ranks: int):
        """Room for twice the mean of an expert's rows."""
        self.num_topk = args.topk
        num_experts = args.experts * num_ranks
        capacity = min(2 * -(-args.tokens * args.topk // args.experts), args.tokens * num_ranks)
        self.settings = dict(num_experts=num_experts, axis_name="ep", layout="batched", capacity=capacity)
        self.settings["implementation"] = None if args.implementation == "auto" else args.implementation

    def route(self, x, params):
        """Arguments of dispatch."""
        probs = jax.nn.softmax(x.astype(jnp.float32) @ params["router"])
        weights, idx = lax.top_k(probs, self.num_topk)
        return x, idx.astype(jnp.int32), weights

    @staticmethod
    def experts(rows, params):
        """Routed experts, on [num_local_experts, capacity, hidden]."""
        inner = jax.nn.gelu(jnp.einsum("ech,ehf->ecf", rows, params["up"]))
        return jnp.einsum("ecf,efh->ech", inner, params["down"])

    @staticmethod
    def shared(x, params):
        """The expert of all tokens."""
        return jax.nn.gelu(x @ params["shared_up"]) @ params["shared_down"]

    def whole(self, a, b, params):
        """With whole exchanges. XLA may then compute both micro-batches in one product."""

        def micro_batch(x):
            recv = jax_ep.dispatch(*self.route(x, params), **self.settings)
            y = self.experts(recv.x, params)
            return x + jax_ep.combine(y, recv.handle, weights=recv.weights) + self.shared(x, params)

        return micro_batch(a), micro_batch(b)

    def overlapped(self, a, b, params):
        """The same sums; products stand between start and done of an exchange that they do not need."""
        # Layer by layer: without this barrier the first start would already run beside the last exchange of the layer
        # before. That is no mistake, as two may be pending (`Config.max_pending`), but harder to read in the schedule.
        a, b = lax.optimization_barrier((a, b))
        pending = jax_ep.dispatch_start(*self.route(a, params), **self.settings)
        pending, shared_a = between(pending, a, lambda a: self.shared(a, params))
        recv_a = jax_ep.dispatch_done(pending)

        # Nothing else ties b to a; the barrier keeps the second start behind the first done.
        rows_a, b = lax.optimization_barrier((recv_a.x, b))
        pending = jax_ep.dispatch_start(*self.route(b, params), **self.settings)
        pending, y_a = between(pending, rows_a, lambda rows: self.experts(rows, params))
        recv_b = jax_ep.dispatch_done(pending)

        rows_b, y_a = lax.optimization_barrier((recv_b.x, y_a))
        pending = jax_ep.combine_start(y_a, recv_a.handle, weights=recv_a.weights)
        pending, y_b = between(pending, rows_b, lambda rows: self.experts(rows, params))
        out_a = jax_ep.combine_done(pending)

        out_a, y_b = lax.optimization_barrier((out_a, y_b))
        pending = jax_ep.combine_start(y_b, recv_b.handle, weights=recv_b.weights)
        pending, shared_b = between(pending, b, lambda b: self.shared(b, params))
        out_b = jax_ep.combine_done(pending)
        return a + out_a + shared_a, b + out_b + shared_b


SPECS = (P("ep"), P("ep"), {"up": P("ep"), "down": P("ep"), "shared_up": P(), "shared_down": P(), "router": P()})


def make_operands(args, num_ranks: int, dtype):
    """Tokens of a and b, [num_ranks * num_tokens, hidden], and parameters; over the mesh as SPECS has them."""
    hidden, ffn, experts = args.hidden, args.ffn, args.experts * num_ranks
    shapes = {
        "up": (experts, hidden, ffn),
        "down": (experts, ffn, hidden),
        "shared_up": (hidden, ffn),
        "shared_down": (ffn, hidden),
        "router": (hidden, experts),
    }
    keys = iter(jax.random.split(jax.random.key(args.seed), len(shapes) + 2))
    a, b = (jax.random.normal(next(keys), (num_ranks * args.tokens, hidden), dtype) for _ in range(2))
    params = {name: jax.random.normal(next(keys), s, dtype) / s[-2] ** 0.5 for name, s in shapes.items()}
    return a, b, params | {"router": params["router"].astype(jnp.float32)}


def schedule(hlo: str) -> list[str]:
    """Our calls and the matrix products of a compiled program, in the order in which XLA runs them."""
    entry = hlo[hlo.index("\nENTRY ") :]
    # Products are calls of cuBLAS or fusions of their own, as XLA likes; "_graph" ends the name of a call that it may
    # record into a command buffer.
    calls = re.findall(
        r'^  (?:ROOT )?%.*(?:custom_call_target="(?:jax_ep_|__)(\w+?)(?:_graph)?["$]|kind=kCustom, calls=%\S*?(gemm))',
        entry,
        re.M,
    )
    return [re.sub("cublas.*", "gemm", name or product) for name, product in calls]


def show_schedule(order: list[str], num_layers: int, say):
    """Says what stands between which halves in the first layer; an error where it is not what was written."""
    halves = [i for i, name in enumerate(order) if name.endswith(("_start", "_done"))]
    if len(halves) != 8 * num_layers:
        raise SystemExit(f"found {len(halves)} halves, expected {8 * num_layers}: {' '.join(order)}")
    for layer in range(num_layers):
        mine = halves[8 * layer : 8 * layer + 8]
        for part, start, done in zip(PARTS, mine[::2], mine[1::2], strict=True):
            words = order[start : done + 1]
            if layer == 0:
                say(f"  {part}: {' '.join(words)}")
            op = part.split()[0]
            if words != [f"{op}_start", *["gemm"] * NUM_PRODUCTS, f"{op}_done"]:
                raise SystemExit(f"XLA did not keep the schedule in layer {layer}: {part} is {' '.join(words)}")
    if num_layers > 1:
        say(f"and so in all {num_layers} layers")


def seconds_of(programs, operands, repeats: int) -> list[float]:
    """Median time of each; they take turns, so that what the machine does besides hits all alike."""
    times = [[] for _ in programs]
    for _ in range(repeats + 2):
        for program, of in zip(programs, times, strict=True):
            start = time.perf_counter()
            jax.block_until_ready(program(*operands))
            of.append(time.perf_counter() - start)
    return [statistics.median(of[2:]) for of in times]


def normalize(x):
    """Rows to a root mean square of 1, so that layers can follow each other."""
    mean = jnp.mean(jnp.square(x.astype(jnp.float32)), axis=-1, keepdims=True)
    return (x * lax.rsqrt(mean + 1e-6)).astype(x.dtype)


def stack(one_layer, num_layers: int, mesh: Mesh):
    """A program of equal layers."""

    def layers(a, b, params):
        for _ in range(num_layers):
            a, b = map(normalize, one_layer(a, b, params))
        return a, b

    return jax.jit(jax.shard_map(layers, mesh=mesh, in_specs=SPECS, out_specs=SPECS[:2]))


def differences(want, got) -> np.ndarray:
    """The largest one of each token, over this process's shards of all arrays."""
    pairs = [
        (np.asarray(a.data, np.float32), np.asarray(b.data, np.float32))
        for x, y in zip(want, got, strict=True)
        for a, b in zip(x.addressable_shards, y.addressable_shards, strict=True)
    ]
    return np.concatenate([np.abs(a - b).max(axis=-1).ravel() for a, b in pairs])


def main(argv=None):
    args = parse_args(argv)
    joined = start_jax(args)
    mesh = Mesh(np.array(jax.devices()), ("ep",))
    is_gpu, is_first = jax.devices()[0].platform == "gpu", jax.process_index() == 0
    say = (lambda text: print(text, flush=True)) if is_first else lambda _: None
    dtype = {"bf16": jnp.bfloat16, "f32": jnp.float32}[args.dtype or ("bf16" if is_gpu else "f32")]
    for name, sizes in {"tokens": (64, 1024), "hidden": (128, 2048), "ffn": (64, 1024)}.items():
        setattr(args, name, getattr(args, name) or sizes[is_gpu])
    layer = Layer(args, mesh.size)
    shardings = jax.tree.map(lambda spec: NamedSharding(mesh, spec), SPECS)
    operands = jax.jit(lambda: make_operands(args, mesh.size, dtype), out_shardings=shardings)()
    say(
        f"{mesh.size} devices ({jax.devices()[0].device_kind}), {args.layers} layers, each with two micro-batches of "
        f"{args.tokens} tokens of {args.hidden} {jnp.dtype(dtype)} a device"
    )

    programs = (stack(one, args.layers, mesh) for one in (layer.whole, layer.overlapped))
    whole, overlapped = (program.lower(*operands).compile() for program in programs)
    of_tokens = differences(whole(*operands), overlapped(*operands))
    # Exchanges are equal bit by bit; what XLA fuses around them is not the same in both programs. Where that changes a
    # last bit, the router may choose another expert in the next layer, for a token in some hundreds.
    is_equal = of_tokens <= (0.1 if dtype == jnp.bfloat16 else 1e-4)
    if not np.mean(is_equal) >= 0.99:
        raise SystemExit(
            f"results of {np.sum(~is_equal)} tokens of {is_equal.size} differ, by {of_tokens.max():.3g} at most"
        )
    worst = of_tokens[is_equal].max()
    say(
        f"results differ by {worst:.2g} at most, but for {np.sum(~is_equal)} of {is_equal.size} tokens, which got "
        "other experts; the rows have a root mean square of 1"
    )

    order = schedule(overlapped.as_text())
    if "dispatch_start" in order:
        say("compiled, per exchange of the first layer:")
        show_schedule(order, args.layers, say)
        before, after = (1e6 * s / args.layers for s in seconds_of((whole, overlapped), operands, args.repeats))
        say(
            f"a layer takes {before:.0f} us with whole exchanges, {after:.0f} us overlapped: "
            f"{before / after:.2f} times as fast"
        )
    else:
        say("no CUDA calls in the program: the pure-JAX implementation exchanges everything in done, nothing overlaps")
    if joined:
        jax.distributed.shutdown()


if __name__ == "__main__":
    main()
