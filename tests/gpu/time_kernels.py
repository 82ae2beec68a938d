"""Times the kernels alone: R ranks on R streams of one process and one GPU, CUDA events, without XLA.

    python tests/gpu/time_kernels.py --ranks 2,8 --sms 16 --layout token,expert
    python tests/gpu/time_kernels.py --ranks 8 --sms 8,12,16 --tokens 128,4096 --bulk both --quantize fp8

A line per combination of the options that are lists; us of the slowest rank over back-to-back calls, median of
`--repeats` such runs. W1's shape unless said otherwise, capacity = demand rounded up to 128. "again" is a dispatch
along the handle. A pair quantised before dispatch is `--hidden 3584 --side 224`: rows of 7168 bytes with their scales
(its combine has no counterpart). Needs jax_ep with its CUDA extension, or the checkout on PYTHONPATH after a developer
build.
"""

from __future__ import annotations

import argparse
import itertools
import statistics

from jax_ep.cli.benchlib import workloads
from jax_ep.cli.benchlib.workloads import ROUTINGS, WORKLOADS, Traffic

LAYOUTS = ("expert", "token", "batched")  # in the order of the kernels' codes
QUANTIZE = ("none", "fp8", "fp8_ue8m0", "fp8_wire")
DTYPES = {"bfloat16": (0, 2), "float16": (1, 2), "float32": (2, 4)}  # code, bytes
OPS = {"dispatch": "dispatch", "again": "redispatch", "combine": "combine"}
HEADER = f"{'R':>3}{'SMs':>5}{'tokens':>8} {'layout':<9}{'copies':<8}{'capacity':>9}" + "".join(
    f"{op:>10}" for op in OPS
)


def _list(of):
    return lambda text: tuple(of(word) for word in text.split(","))


def _arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    lists = parser.add_argument_group("lists, separated by commas")
    lists.add_argument("--ranks", type=_list(int), default=(8,))
    lists.add_argument("--sms", type=_list(int), default=(16,), help="blocks of a rank; all ranks' must fit on the GPU")
    lists.add_argument("--tokens", type=_list(int), default=(4096,), help="per rank")
    lists.add_argument("--layout", type=_list(str), default=("token", "expert"), help=", ".join(LAYOUTS))
    parser.add_argument("--slots", type=int, default=0, help="latency mode, with so many slots; 0: throughput mode")
    parser.add_argument("--bulk", choices=("yes", "no", "both"), default="yes", help="copies by the copy engine")
    parser.add_argument("--quantize", choices=QUANTIZE[:3], default="none", help="in dispatch")
    parser.add_argument("--wire", choices=(QUANTIZE[0], QUANTIZE[3]), default="none", help="in combine")
    parser.add_argument(
        "--side", type=int, default=0, metavar="BYTES", help="that travel beside a row (scales of a pair)"
    )
    parser.add_argument("--hidden", type=int, default=7168)
    parser.add_argument("--topk", type=int, default=8)
    parser.add_argument("--experts", type=int, default=256)
    parser.add_argument("--dtype", choices=tuple(DTYPES), default="bfloat16")
    parser.add_argument("--routing", choices=ROUTINGS, default="uniform")
    parser.add_argument("--weights", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--zero-tail", action="store_true")
    parser.add_argument("--calls", type=int, default=30)
    parser.add_argument("--repeats", type=int, default=3)
    args = parser.parse_args(argv)
    unknown = [layout for layout in args.layout if layout not in LAYOUTS]
    if unknown:
        parser.error(f"layout {unknown[0]!r} is none of {', '.join(LAYOUTS)}")
    return args


def measure(loopback, args, num_ranks: int, num_sms: int, num_tokens: int, layout: str, use_bulk: bool) -> dict:
    """us of each op and the capacity of one combination. `loopback`: `jax_ep._cuda.Loopback`."""
    workload = workloads.custom(
        WORKLOADS["W1"], num_tokens=num_tokens, num_topk=args.topk, num_experts=args.experts, routing=args.routing
    )
    idx = workloads.topk_idx(workload, num_ranks)
    capacity = workloads.capacity(workload, Traffic.of(idx, args.experts), layout, "demand")
    code, item = DTYPES[args.dtype]
    ranks = loopback(
        num_ranks=num_ranks, num_tokens=num_tokens, num_topk=args.topk, num_experts=args.experts,
        row_bytes=args.hidden * item, capacity=capacity, layout=LAYOUTS.index(layout), dtype=code,
        zero_tail=args.zero_tail, has_weights=args.weights, use_bulk=use_bulk, num_sms=num_sms, side_bytes=args.side,
        quantize=QUANTIZE.index(args.quantize), wire=QUANTIZE.index(args.wire), num_slots=args.slots,
    )  # fmt: skip
    for rank in range(num_ranks):
        ranks.write("topk_idx", rank, idx[rank].tobytes())
    for name in ("x", "y", "weights", "y_weights", "side"):
        if ranks.bytes(name):
            ranks.fill(name, 0x3C)  # as payload or float32 a small positive number
    ranks.launch("dispatch")  # the handle of the others
    ranks.synchronize()
    result = {"capacity": capacity}
    for op, name in OPS.items():
        ranks.time(name, 3)
        result[op] = statistics.median(ranks.time(name, args.calls) for _ in range(args.repeats))
    failures = [ranks.failure(rank) for rank in range(num_ranks)]
    if any(failure["code"] for failure in failures):
        raise RuntimeError(f"a rank failed: {failures}")
    return result


def main(argv: list[str] | None = None, loopback=None) -> None:
    """Prints the table. `loopback`: stands in for the extension's."""
    args = _arguments(argv)
    if loopback is None:
        from jax_ep._cuda import Loopback as loopback
    copies = {"yes": (True,), "no": (False,), "both": (True, False)}[args.bulk]
    print(HEADER)
    for choice in itertools.product(args.ranks, args.sms, args.tokens, args.layout, copies):
        got = measure(loopback, args, *choice)
        num_ranks, num_sms, num_tokens, layout, use_bulk = choice
        start = f"{num_ranks:>3}{num_sms:>5}{num_tokens:>8} {layout:<9}{'bulk' if use_bulk else 'vector':<8}"
        print(start + f"{got['capacity']:>9}" + "".join(f"{got[op]:>10.1f}" for op in OPS), flush=True)


if __name__ == "__main__":
    main()
