"""Decodes a stream of requests with the model of train_moe.py, in batches whose size changes.

    python examples/decode.py --checkpoint runs/train_moe            # all GPUs, or 4 virtual CPU devices
    python examples/decode.py --requests 8 --new-tokens 8            # a short look, with weights that nobody trained
    python -m jax_ep launch --ranks 4 examples/decode.py --compare   # latency mode, throughput mode, XLA's collectives

Requests come in waves and take the lowest free slots. A step takes one token of each: of its prompt as long as that
lasts, then the one that the step before has drawn. Experts are spread over all devices, slots and their keys and values
too. A batch has one of a few sizes, the smallest that holds all slots in use: one program for each is compiled before
the first request, and none after it, which is checked. The host does not wait for a step before it starts the next.
"""

import collections
import dataclasses
import functools
import pathlib
import time

import _data
import jax
import jax.numpy as jnp
import numpy as np
from _training import AXES, Checkpoints, Model, make_mesh, make_model_parser, start_jax
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

# What --compare compares: fields of MoEConfig.
VARIANTS = {
    "latency mode": {"mode": "latency"},
    "throughput mode": {"mode": "throughput"},
    "XLA collectives": {"implementation": "xla"},
}
TOKEN, POSITION, REQUEST = range(3)  # what a step is told about a slot
LAST_DRAWN = -1  # as TOKEN


def parse_args(argv=None):
    parser = make_model_parser(__doc__)
    parser.set_defaults(cpu_devices=4)
    add = parser.add_argument
    add("--checkpoint", type=pathlib.Path, metavar="DIR", help="--out of a training run with the same model options")
    add("--requests", type=int, default=64)
    add("--new-tokens", type=int, default=64, help="most that a request asks for; at least half of it")
    add("--prompt", type=int, default=16, help="longest prompt in bytes; at least half of it")
    add("--batches", default="1,4,16", metavar="N,...", help="sizes of a batch, in sequences per device")
    add("--temperature", type=float, default=0.7, help="0: the likeliest token")
    add("--mode", choices=("auto", "latency", "throughput"), default="auto", help="of dispatch and combine")
    add("--compare", action="store_true", help=f"the same stream with each of: {', '.join(VARIANTS)}")
    args = parser.parse_args(argv)
    args.batches = sorted({int(n) for n in args.batches.split(",")})
    if min(args.batches[0], args.requests, args.new_tokens, args.prompt) < 1:
        parser.error("--batches, --requests, --new-tokens and --prompt start at 1")
    return args


@dataclasses.dataclass
class Request:
    """What somebody wants decoded, and how far that is."""

    number: int
    prompt: np.ndarray  # i32
    new_tokens: int
    arrival: int  # step before which it comes
    position: int = 0  # of the token that goes next
    drawn: list[int] = dataclasses.field(default_factory=list)  # where one of this process's devices has it
    arrived_s: float = 0.0
    done_s: float = 0.0

    @property
    def is_drawing(self) -> bool:
        """Whether the next step draws a token for it; before, it takes in the prompt."""
        return self.position >= len(self.prompt) - 1

    @property
    def is_done(self) -> bool:
        """Whether its last token has been drawn, or is being drawn."""
        return self.position == len(self.prompt) + self.new_tokens - 1


def make_requests(args, corpus: np.ndarray, num_slots: int) -> list[Request]:
    """Four waves or more, some steps apart; prompts from the corpus. Equal in all processes."""
    rng = np.random.default_rng(args.seed)
    half_to = lambda most: int(rng.integers(-(-most // 2), most + 1))
    most = min(num_slots, -(-args.requests // 4))
    requests, arrival = [], 0
    while len(requests) < args.requests:
        for _ in range(min(int(rng.integers(1, most + 1)), args.requests - len(requests))):
            start, length = int(rng.integers(corpus.size - args.prompt)), half_to(args.prompt)
            prompt = corpus[start : start + length].astype(np.int32)
            requests.append(Request(len(requests), prompt, half_to(args.new_tokens), arrival))
        arrival += half_to(args.new_tokens)
    return requests


class Slots:
    """Which request is in which slot of which device."""

    def __init__(self, num_devices: int, batches: list[int]):
        """All are free. `batches`: sizes per device, ascending."""
        self.batches = batches
        self.held: list[list[Request | None]] = [[None] * num_devices for _ in range(batches[-1])]  # [slot][device]

    def admit(self, request: Request) -> bool:
        """Takes the lowest free slot, so that batches stay small; False if there is none."""
        for line in self.held:
            if None in line:
                line[line.index(None)] = request
                return True
        return False

    @property
    def num_lines(self) -> int:
        """Slots per device that a batch must have."""
        return max((i + 1 for i, line in enumerate(self.held) if any(line)), default=0)

    def advance(self):
        """The next batch, [device, slot, (token, position, request)], and its requests with slot and device.

        Requests are then one token further; those that are done with it have left.
        """
        size = next(n for n in self.batches if n >= self.num_lines)
        batch = np.full((len(self.held[0]), size, 3), -1, np.int32)  # position -1: nobody
        taken = []
        for slot, line in enumerate(self.held[:size]):
            for device, request in enumerate(line):
                if request is None:
                    continue
                at, prompt = request.position, request.prompt
                batch[device, slot] = prompt[at] if at < len(prompt) else LAST_DRAWN, at, request.number
                is_drawing = request.is_drawing
                request.position += 1
                taken.append((request, slot, device, is_drawing, request.is_done))
                if request.is_done:
                    line[device] = None
        return batch, taken


class Decoder(Model):
    """The compiled step. Its state, split over the devices by slot: last token drawn, and keys and values per layer."""

    def __init__(self, args, mesh: Mesh, **moe):
        """Nothing is computed yet."""
        super().__init__(args, mesh, capacity_factor=None, **moe)  # nothing is dropped: no request feels another
        self.length = args.prompt + args.new_tokens
        self.placed = NamedSharding(mesh, P(AXES))
        self.step = jax.jit(self._step, donate_argnums=1)

    def init(self):
        """State without any request."""
        args, num_slots = self.args, self.mesh.size * self.args.batches[-1]

        def init():
            cache = jnp.zeros((num_slots, self.length, args.heads, args.hidden // args.heads), self.dtype)
            return {"last": jnp.zeros(num_slots, jnp.int32), "caches": [(cache, cache)] * args.layers}

        return jax.jit(init, out_shardings=self.placed)()

    def _step(self, params, state, batch):
        """`batch` as `Slots.advance` makes it, the same on all devices; the new state and what was drawn."""
        step = jax.shard_map(
            self._local_step,
            mesh=self.mesh,
            in_specs=(self.specs, P(AXES), P()),
            out_specs=P(AXES),
        )
        return step(params, state, batch)

    def _local_step(self, params, state, batch):
        batch = batch[lax.axis_index(AXES)]
        token, position = batch[:, TOKEN], batch[:, POSITION]
        last = state["last"][: len(batch)]
        token = jnp.where(token == LAST_DRAWN, last, token)
        logits, caches = self.bind(params).decode(token, position, state["caches"])
        drawn = jnp.where(position >= 0, self._draw(logits, batch), last)
        return {"last": lax.dynamic_update_slice(state["last"], drawn, (0,)), "caches": caches}, drawn

    def _draw(self, logits, batch):
        """Next tokens. Keys are of request and position, so neither slot nor neighbours matter."""
        if not self.args.temperature:
            return jnp.argmax(logits, axis=-1).astype(jnp.int32)
        key = jax.random.key(self.args.seed)
        key_of = lambda row: jax.random.fold_in(jax.random.fold_in(key, row[REQUEST]), row[POSITION])
        draw = lambda row, logits: jax.random.categorical(key_of(row), logits / self.args.temperature)
        return jax.vmap(draw)(batch, logits).astype(jnp.int32)

    def warm_up(self, params, state):
        """Compiles and runs the program of each size, without requests."""
        for size in self.args.batches * 2:
            state, drawn = self.step(params, state, np.full((self.mesh.size, size, 3), -1, np.int32))
            jax.block_until_ready(drawn)
        return state


@functools.cache
def compilations() -> collections.Counter:
    """Counts the programs that XLA compiles in this process, from the first call on."""
    counter: collections.Counter = collections.Counter()

    def on_event(name: str, seconds: float, **_):
        if name == "/jax/core/compile/backend_compile_duration":
            counter["programs"] += 1

    jax.monitoring.register_event_duration_secs_listener(on_event)
    return counter


@dataclasses.dataclass
class Report:
    """What a stream took, in this process."""

    requests: list[Request]
    seconds: float
    step_ms: list[float]
    sizes: collections.Counter  # steps by sequences in the batch, of all devices

    def lines(self) -> list[str]:
        """For people."""
        tokens = sum(r.new_tokens for r in self.requests)
        prompts = sum(len(r.prompt) for r in self.requests)
        sizes = ", ".join(f"{size}: {steps}" for size, steps in sorted(self.sizes.items()))
        return [
            f"{len(self.requests)} requests, {tokens} tokens drawn after {prompts} of prompts in {self.seconds:.2f} s: "
            f"{self.tokens_per_s:.0f} tokens/s",
            f"steps by size of their batch: {sizes}",
            f"ms per step: p50 {self.p(50):.2f}, p99 {self.p(99):.2f}; "
            f"per request: p50 {self.request_p(50):.0f}, p99 {self.request_p(99):.0f}",
        ]

    @property
    def tokens_per_s(self) -> float:
        """Drawn ones."""
        return sum(r.new_tokens for r in self.requests) / self.seconds

    def p(self, percent: float) -> float:
        """Percentile of the steps' ms."""
        return float(np.percentile(self.step_ms, percent))

    def request_p(self, percent: float) -> float:
        """Percentile of the requests' ms from arrival to last token."""
        return float(np.percentile([1e3 * (r.done_s - r.arrived_s) for r in self.requests], percent))


def serve(decoder: Decoder, params, state, requests: list[Request], on_done) -> Report:
    """Decodes all requests; `on_done` is called with each."""
    slots = Slots(decoder.mesh.size, decoder.args.batches)
    coming, waiting = collections.deque(requests), collections.deque()
    step_ms, sizes, step, under_way = [], collections.Counter(), 0, None
    start = last = time.perf_counter()

    def finish(drawn, taken):
        """Waits for a step, and gives its tokens to those requests that this process's devices hold."""
        nonlocal last
        size = drawn.shape[0] // decoder.mesh.size
        local = {(shard.index[0].start or 0) // size: np.asarray(shard.data) for shard in drawn.addressable_shards}
        now = time.perf_counter()
        step_ms.append(1e3 * (now - last))
        last = now
        for request, slot, device, is_drawing, is_last in taken:
            if is_drawing and device in local:
                request.drawn.append(int(local[device][slot]))
            if is_last:
                request.done_s = now
                on_done(request)

    while coming or waiting or slots.num_lines or under_way:
        if not (waiting or slots.num_lines or under_way):  # nobody is there: on to the next wave
            step, last = max(step, coming[0].arrival), time.perf_counter()
        while coming and coming[0].arrival <= step:
            coming[0].arrived_s = time.perf_counter()
            waiting.append(coming.popleft())
        while waiting and slots.admit(waiting[0]):
            waiting.popleft()
        started = None
        if slots.num_lines:
            batch, taken = slots.advance()
            state, drawn = decoder.step(params, state, batch)
            sizes[drawn.shape[0]] += 1
            started = drawn, taken
        if under_way:
            finish(*under_way)
        under_way, step = started, step + 1
    return Report(requests, time.perf_counter() - start, step_ms, sizes)


def load_params(args, model: Model, say):
    """Those of the checkpoint, or new ones."""
    if not args.checkpoint:
        say("weights are new, so the text means nothing; --checkpoint DIR takes those in the --out of train_moe.py")
        return jax.jit(model.new_params, out_shardings=model.param_shardings)()
    params = Checkpoints(args.checkpoint).restore_params(model) if args.checkpoint.exists() else None
    if params is None:
        raise SystemExit(f"--checkpoint: nothing under {args.checkpoint / 'checkpoint'}; train with train_moe.py first")
    return params


def run(args, mesh, params, name: str, moe: dict, corpus, is_first: bool) -> Report:
    """One stream from warm-up to the last token; only the first process shows progress."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

    decoder, counter = Decoder(args, mesh, **moe), compilations()
    before, start = counter["programs"], time.perf_counter()
    state = decoder.warm_up(params, decoder.init())
    compiled, warm_up_s = counter["programs"] - before, time.perf_counter() - start
    if compiled < len(args.batches):
        raise SystemExit(
            f"counted {compiled} compilations in a warm-up of {len(args.batches)} programs: JAX's event has changed"
        )
    requests = make_requests(args, corpus, mesh.size * args.batches[-1])
    with Progress(TextColumn(name), BarColumn(), MofNCompleteColumn(), disable=not is_first) as progress:
        task = progress.add_task("", total=len(requests))
        report = serve(decoder, params, state, requests, lambda _: progress.advance(task))
    after = counter["programs"] - before - compiled
    if after:
        raise SystemExit(f"{after} programs were compiled after the warm-up of {len(args.batches)}")
    if is_first:
        sizes = ", ".join(str(mesh.size * n) for n in args.batches)
        print(f"{name}: programs for batches of {sizes}, {warm_up_s:.1f} s; 0 compiled after that")
        print("\n".join(f"  {line}" for line in report.lines()), flush=True)
    return report


def show_comparison(reports: dict[str, Report]):
    from rich.console import Console
    from rich.table import Table

    table = Table(title="The same stream of requests", title_justify="left")
    columns = ("", "tokens/s", "ms per step: p50", "p99", "per request: p50", "p99", "same text as the first")
    for i, column in enumerate(columns):
        table.add_column(column, justify="right" if i else "left")
    first = next(iter(reports.values()))
    for name, r in reports.items():
        own = [(a, b) for a, b in zip(first.requests, r.requests, strict=True) if a.drawn]
        figures = (f"{r.tokens_per_s:.0f}", f"{r.p(50):.2f}", f"{r.p(99):.2f}")
        figures += (f"{r.request_p(50):.0f}", f"{r.request_p(99):.0f}")
        table.add_row(name, *figures, f"{sum(a.drawn == b.drawn for a, b in own)} of {len(own)}")
    Console(width=110).print(table)


def main(argv=None):
    args = parse_args(argv)
    joined = start_jax(args)
    mesh = make_mesh(args)
    is_first = jax.process_index() == 0
    say = (lambda text: print(text, flush=True)) if is_first else lambda _: None
    model = Model(args, mesh)
    params = load_params(args, model, say)
    say(model.describe(params))
    name = "XLA collectives" if args.implementation == "xla" else f"mode {args.mode}"
    variants = VARIANTS if args.compare else {name: {"mode": args.mode}}
    if args.compare and mesh.devices.flat[0].platform == "gpu":  # what fell back would be compared with itself
        variants = {name: {"implementation": "cuda"} | moe for name, moe in variants.items()}
    elif args.compare:
        say("without CUDA devices all of these are the pure-JAX implementation, and differ by noise")
    corpus = _data.load_corpus()
    reports = {name: run(args, mesh, params, name, moe, corpus, is_first) for name, moe in variants.items()}
    if args.compare and is_first:
        show_comparison(reports)
    shown = next((r for r in next(iter(reports.values())).requests if r.drawn), None)
    if shown:
        text = bytes([*shown.prompt, *shown.drawn]).decode("utf-8", errors="replace")
        say(f"request {shown.number}:\n{text}")
    if joined:
        jax.distributed.shutdown()
    return reports


if __name__ == "__main__":
    main()
