"""Times the kernels alone: R ranks on R streams of one process and one GPU, CUDA events, without XLA.

    python tests/gpu/time_kernels.py --ranks 2,8 --sms 16 --layout token,expert
    python tests/gpu/time_kernels.py --ranks 8 --sms 8,12,16 --tokens 128,4096 --bulk both
    python tests/gpu/time_kernels.py --on 8x16,2x24 --workload W1,W1f,W1q --layout token --wire none,fp8_wire
    python tests/gpu/time_kernels.py --on 8x12,4x28 --nodes 1,2,4 --carriers 4,8 --chunk 0,8,16 --layout token
    python tests/gpu/time_kernels.py --on 2x32 --workload W2 --slots 2 --layout token --stamps

A line per combination of the options that are lists; over nodes it names them, the carrier's SMs and the tokens of a
chunk, and leaves out what would not fit on the GPU together. Of each operation: us of the slowest rank over
back-to-back calls, median of `--repeats` such runs, and GB/s, read plus write, of all ranks together: the bytes that
the limit of docs/performance.md counts, over this time. "again" is a dispatch along the handle. Workloads are the
bench's: W1f sends pairs that were quantised before (its combine would be W1's and is left out), W1q quantises in
dispatch. Capacity is the demand rounded up to 128. Needs jax_ep with its CUDA extension, or the checkout on PYTHONPATH
after a developer build. `--stamps` adds where the time goes in the kernels, from the last call of each run: by phase,
the median over blocks and ranks of the time since the block's begin, and of rounds over nodes the time that each phase
takes. It needs a build for this alone (cmake -DJAX_EP_STAMPS=ON), in which calls take longer.
"""

from __future__ import annotations

import argparse
import itertools
import statistics

import stamps

from jax_ep.cli.benchlib import workloads
from jax_ep.cli.benchlib.workloads import ROUTINGS, WORKLOADS, Traffic, Workload

LAYOUTS = ("expert", "token", "batched")  # in the order of the kernels' codes
QUANTIZE = ("none", "fp8", "fp8_ue8m0", "fp8_wire")
DTYPES = {"bfloat16": 0, "float16": 1, "float32": 2}  # code
OPS = {"dispatch": "dispatch", "again": "redispatch", "combine": "combine"}
COLUMNS = f"{'work':<8}{'R':>3}{'SMs':>5}{'tokens':>8} {'layout':<9}{'copies':<8}{'wire':<10}{'capacity':>9}"


def _list(of):
    return lambda text: tuple(of(word) for word in text.split(","))


def _pair(text: str) -> tuple[int, int]:
    ranks, sms = text.split("x")
    return int(ranks), int(sms)


def _arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    lists = parser.add_argument_group("lists, separated by commas")
    lists.add_argument("--workload", type=_list(str), default=("W1",), help=", ".join(WORKLOADS))
    lists.add_argument("--ranks", type=_list(int), default=(8,))
    lists.add_argument("--sms", type=_list(int), default=(16,), help="blocks of a rank; all ranks' must fit on the GPU")
    lists.add_argument("--on", type=_list(_pair), metavar="RxSMS", help="instead of both: ranks with their SMs, 8x16")
    lists.add_argument("--tokens", type=_list(int), default=(None,), help="per rank")
    lists.add_argument("--layout", type=_list(str), default=("token", "expert"), help=", ".join(LAYOUTS))
    lists.add_argument("--wire", type=_list(str), default=("none",), help="of combine: none, fp8_wire")
    lists.add_argument("--ops", type=_list(str), default=tuple(OPS), help=", ".join(OPS))
    parser.add_argument("--slots", type=int, default=0, help="latency mode, with so many slots; 0: throughput mode")
    lists.add_argument("--nodes", type=_list(int), default=(1,), help="over the test transport, nothing delayed")
    lists.add_argument("--carriers", type=_list(int), default=(4,), help="of several nodes: SMs of a rank beside --sms")
    lists.add_argument(
        "--chunk", type=_list(int), default=(0,), help="of several nodes: tokens; 0: what --node-mib holds"
    )
    parser.add_argument("--gpu-sms", type=int, default=132, help="blocks that may be resident, all ranks' together")
    parser.add_argument("--node-mib", type=int, default=64, help="of several nodes: own memory of a rank for chunks")
    parser.add_argument("--bulk", choices=("yes", "no", "both"), default="yes", help="copies by the copy engine")
    own = parser.add_argument_group("instead of the workload's own")
    own.add_argument("--quantize", choices=QUANTIZE[:3], help="in dispatch")
    own.add_argument("--side", type=int, metavar="BYTES", help="that travel beside a row (scales of a pair)")
    own.add_argument("--hidden", type=int)
    own.add_argument("--topk", type=int)
    own.add_argument("--experts", type=int)
    own.add_argument("--dtype", choices=tuple(DTYPES))
    own.add_argument("--routing", choices=ROUTINGS)
    parser.add_argument("--weights", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--zero-tail", action="store_true")
    parser.add_argument("--calls", type=int, default=30)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--stamps", action="store_true", help="print when the kernels' phases end; a build of its own")
    args = parser.parse_args(argv)
    known = {"workload": WORKLOADS, "layout": LAYOUTS, "wire": ("none", "fp8_wire"), "ops": OPS}
    for name, words in known.items():
        unknown = [word for word in getattr(args, name) if word not in words]
        if unknown:
            parser.error(f"--{name} {unknown[0]!r} is none of {', '.join(words)}")
    return args


def measure(loopback, args, workload: Workload, on: tuple[int, int], layout: str, wire: str, use_bulk: bool,
            nodes: int = 1, carriers: int = 1, chunk: int = 0) -> dict:  # fmt: skip
    """Capacity of one combination, and (us, GB/s) of each operation; with --stamps also "stamps", of each operation the
    last calls'. `loopback`: `jax_ep._cuda.Loopback`."""
    num_ranks, num_sms = on
    idx = workloads.topk_idx(workload, num_ranks)
    traffic = Traffic.of(idx, workload.num_experts)
    capacity = workloads.capacity(workload, traffic, layout, "demand")
    is_pair = workload.sent == "pair"  # rows of one byte a channel: any type of them will do, as nothing is computed
    side = args.side if args.side is not None else workload.fp8_bytes - workload.hidden if is_pair else 0
    quantize = args.quantize or ("fp8" if workload.sent == "fp8" else "none")
    ranks = loopback(
        num_ranks=num_ranks, num_tokens=workload.num_tokens, num_topk=workload.num_topk,
        num_experts=workload.num_experts, row_bytes=workload.hidden if is_pair else workload.row_bytes,
        capacity=capacity, layout=LAYOUTS.index(layout), dtype=DTYPES[workload.dtype], zero_tail=args.zero_tail,
        has_weights=args.weights, use_bulk=use_bulk, num_sms=num_sms, side_bytes=side,
        quantize=QUANTIZE.index(quantize), wire=QUANTIZE.index(wire), num_slots=args.slots,
        num_nodes=nodes, num_carriers=carriers, chunk_tokens=chunk,
        **(dict(staging_bytes=args.node_mib << 20) if nodes > 1 else {}),
    )  # fmt: skip
    for rank in range(num_ranks):
        ranks.write("topk_idx", rank, idx[rank].tobytes())
    for name in ("x", "y", "weights", "y_weights", "side"):
        if ranks.bytes(name):
            ranks.fill(name, 0x3C)  # as payload or float32 a small positive number
    ranks.launch("dispatch")  # the handle of the others
    ranks.synchronize()
    result = {"capacity": capacity, "stamps": {}}
    for op in args.ops:
        if op == "combine" and is_pair:
            continue
        ranks.time(OPS[op], 3)
        runs, noted = [], []
        for _ in range(args.repeats):
            runs.append(ranks.time(OPS[op], args.calls))
            if args.stamps:
                ranks.synchronize()  # carriers, which end after their calls
                noted.append(ranks.stamps())
        us = statistics.median(runs)
        result["stamps"][op] = noted
        counted = "combine fp8" if op == "combine" and wire != "none" else op
        result[op] = us, traffic.memory_bytes(counted, layout, workload) / us / 1e3
    failures = [ranks.failure(rank) for rank in range(num_ranks)]
    if any(failure["code"] for failure in failures):
        raise RuntimeError(f"a rank failed: {failures}")
    return result


def main(argv: list[str] | None = None, loopback=None) -> None:
    """Prints the table. `loopback`: stands in for the extension's."""
    args = _arguments(argv)
    if loopback is None:
        from jax_ep._cuda import Loopback as loopback
    if args.stamps and not getattr(loopback, "has_stamps", False):
        raise SystemExit(
            "--stamps: the kernels of this build note nothing; build the checkout with cmake -DJAX_EP_CUDA=on "
            "-DJAX_EP_STAMPS=ON (docs/performance.md, How figures are taken) and put it on PYTHONPATH"
        )
    copies = {"yes": (True,), "no": (False,), "both": (True, False)}[args.bulk]
    on = args.on or tuple(itertools.product(args.ranks, args.sms))
    print(COLUMNS + "".join(f"{op:>10}{'GB/s':>7}" for op in args.ops))
    over = [
        (nodes, carriers, chunk)
        for nodes in args.nodes
        for carriers, chunk in (itertools.product(args.carriers, args.chunk) if nodes > 1 else [(1, 0)])
    ]
    for name, tokens, where, layout, wire, use_bulk, (nodes, carriers, chunk) in itertools.product(
        args.workload, args.tokens, on, args.layout, args.wire, copies, over
    ):
        if nodes > 1 and where[0] * (where[1] + carriers) > args.gpu_sms:
            continue  # they wait for each other
        workload = workloads.custom(
            WORKLOADS[name], num_tokens=tokens, hidden=args.hidden, num_topk=args.topk, num_experts=args.experts,
            dtype=args.dtype, routing=args.routing,
        )  # fmt: skip
        got = measure(loopback, args, workload, where, layout, wire, use_bulk, nodes, carriers, chunk)
        start = f"{name:<8}{where[0]:>3}{where[1]:>5}{workload.num_tokens:>8} {layout:<9}"
        start += f"{'bulk' if use_bulk else 'vector':<8}{wire:<10}{got['capacity']:>9}"
        start += f" {nodes} nodes +{carriers} {chunk or '-'}" if nodes > 1 else ""
        times = (f"{got[op][0]:>10.1f}{got[op][1]:>7.0f}" if op in got else f"{'-':>10}{'-':>7}" for op in args.ops)
        print(start + "".join(times), flush=True)
        if args.stamps:
            for op in (op for op in args.ops if op in got):
                print("\n".join(stamps.lines(op, got["stamps"][op])), flush=True)


if __name__ == "__main__":
    main()
