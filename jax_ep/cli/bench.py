"""`python -m jax_ep bench`: µs of dispatch and combine beside what XLA's collectives take for the same tokens.

    python -m jax_ep bench --ranks 8 --workload W1 --json w1.json --png w1.png
    python -m jax_ep bench --ranks 8 --workload W1 --layout token --first-call 5

`--ranks` starts that many local processes (with MPS when they share a GPU); without it the devices of this process are
the ranks. Every row is the time of the slowest rank. "limit" is what moving the same rows once would take at the copy
rate measured in the same run: across the link, or through the memory of the one GPU that all ranks share. Figures of
ranks on one GPU compare passes over its memory; they say nothing about links.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import pathlib
import statistics
import tempfile

from jax_ep import testing
from jax_ep.cli import launch
from jax_ep.cli.benchlib.plan import Plan
from jax_ep.cli.benchlib.workloads import WORKLOADS, custom

IMPLEMENTATIONS = ("cuda", "ragged", "dense", "ring", "xla")


def _several(known):
    """Type for argparse: a comma-separated choice of `known`."""

    def parse(text: str) -> tuple[str, ...]:
        names = tuple(text.split(","))
        unknown = [n for n in names if n not in known]
        if unknown:
            raise argparse.ArgumentTypeError(f"{unknown[0]!r} is none of {', '.join(known)}")
        return names

    return parse


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m jax_ep bench", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    launch.add_arguments(parser)
    what = parser.add_argument_group("what (several: separated by commas)")
    what.add_argument("--workload", type=_several(WORKLOADS), default=("W1",), help=", ".join(WORKLOADS))
    what.add_argument("--implementation", type=_several(IMPLEMENTATIONS), default=(), help=", ".join(IMPLEMENTATIONS))
    what.add_argument("--layout", type=_several(("expert", "token")), default=("expert", "token"))
    what.add_argument("--capacity", type=_several(("demand", "default")), default=("demand",))
    what.add_argument("--num-sms", type=int, help="SMs per rank; default: that of jax_ep.Config")
    what.add_argument("--first-call", type=int, metavar="N", help="instead: first call over steady, in N fresh starts")
    changes = parser.add_argument_group("changes to the first workload, which is then called custom")
    changes.add_argument("--tokens", type=int, dest="num_tokens", help="per rank")
    changes.add_argument("--hidden", type=int)
    changes.add_argument("--topk", type=int, dest="num_topk")
    changes.add_argument("--experts", type=int, dest="num_experts")
    changes.add_argument("--dtype", choices=("bfloat16", "float16", "float32"))
    changes.add_argument("--routing", choices=testing.ROUTINGS)
    how = parser.add_argument_group("how")
    how.add_argument("--calls", type=int, default=10, help="calls chained in one program; default: %(default)s")
    how.add_argument("--repeats", type=int, default=15, help="runs of that program; default: %(default)s")
    how.add_argument("--json", metavar="PATH", help="write everything here")
    how.add_argument("--png", metavar="PATH", help="draw the table here (needs matplotlib)")
    return parser


def main(argv: list[str]) -> int:
    """The command."""
    parser = _parser()
    args = parser.parse_args(argv)
    if args.calls < 2:
        parser.error("--calls must be at least 2: the time of a call is a difference between programs")
    changes = {k: getattr(args, k) for k in ("num_tokens", "hidden", "num_topk", "num_experts", "dtype", "routing")}
    first, *others = (WORKLOADS[name] for name in args.workload)
    plan = Plan(
        workloads=(custom(first, **changes), *others),
        implementations=args.implementation,
        layouts=args.layout,
        capacities=args.capacity,
        num_sms=args.num_sms,
        num_calls=args.calls,
        repeats=args.repeats,
        ranks_per_device=None,
        is_first_call=args.first_call is not None,
        json_path=args.json,
        png_path=args.png,
    )
    if args.ranks is None:
        if plan.is_first_call:
            parser.error("--first-call needs --ranks: every start is a fresh set of processes")
        from jax_ep.cli.benchlib import rank  # starts nothing before: it may be that only processes are launched

        return rank.run(plan)
    gpus = 0 if args.platform == "cpu" else launch.num_gpus()
    plan = dataclasses.replace(plan, ranks_per_device=-(-args.ranks // gpus) if gpus else args.ranks)
    how = launch.from_arguments(args)
    return _first_calls(plan, how, args.first_call) if plan.is_first_call else _on_ranks(plan, how)


def _on_ranks(plan: Plan, how: launch.Launch) -> int:
    return launch.run(["-m", "jax_ep.cli.benchlib.rank", plan.to_json()], how, _without_prefix)


def _without_prefix(line: str) -> None:
    """The table comes from rank 0 alone; the others only speak when something is wrong."""
    print(line.removeprefix("[0] "), flush=True)


def _first_calls(plan: Plan, how: launch.Launch, starts: int) -> int:
    """Median over fresh starts of first call / steady call, ours and the control's."""
    runs = []
    with tempfile.TemporaryDirectory() as folder:
        out = pathlib.Path(folder, "first.json")
        for start in range(starts):
            status = _on_ranks(dataclasses.replace(plan, json_path=str(out), png_path=None), how)
            if status:
                return status
            runs.append(json.loads(out.read_text()))
            setup = ", ".join(f"{phase} {ms:.0f}" for phase, ms in runs[-1]["setup_ms"].items())
            parts = [_describe(runs[-1], key) for key in runs[-1]["measured"]] + [f"set-up ms: {setup}"]
            print(f"start {start}: " + "; ".join(parts), flush=True)
    medians = {key: statistics.median(run[key]["ratio"] for run in runs) for key in runs[-1]["measured"]}
    print(f"median of {starts}: " + ", ".join(f"{key} {ratio:.2f}" for key, ratio in medians.items()))
    if plan.json_path:
        pathlib.Path(plan.json_path).write_text(json.dumps({"median_ratio": medians, "starts": runs}, indent=1))
    return 0


def _describe(run: dict, key: str) -> str:
    r = run[key]
    return f"{key} {r['first_us']:.0f} us first / {r['steady_us']:.0f} us steady = {r['ratio']:.2f}"
