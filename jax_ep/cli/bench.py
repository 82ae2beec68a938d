"""`python -m jax_ep bench`: µs of dispatch and combine beside what XLA's collectives take for the same tokens.

    python -m jax_ep bench --ranks 8 --workload W1 --json w1.json --png w1.png
    python -m jax_ep bench --ranks 2 --implementation cuda --layout token --num-sms 4,8,12,16,24,32,48
    python -m jax_ep bench --ranks 1,2,4,8 --implementation cuda --layout token --png ranks.png
    python -m jax_ep bench --ranks 8 --implementation cuda --mode throughput,latency,auto --tokens 1,32,1024,8192
    python -m jax_ep bench --ranks 8 --implementation cuda --layout token --ranks-per-node 4,2      # simulated nodes
    python -m jax_ep bench --ranks 8 --workload W1 --layout token --first-call 5
    python -m jax_ep bench --ranks 2,4,8 --setup                    # what set-up takes, by phase
    python -m jax_ep bench --plot r2.json r8.json --png ranks.png
    python -m jax_ep bench --ranks 8 --workload W8        # a layer of jax_ep.nn, and where its time goes

`--ranks` starts that many local processes (with MPS when they share a GPU); without it the devices of this process are
the ranks. Every row is the time of the slowest rank. "limit" is what moving the same rows once would take at the copy
rate measured in the same run: across the link, or through the memory of the one GPU that all ranks share. Figures of
ranks on one GPU compare passes over its memory; they say nothing about links.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile

from jax_ep.cli import launch
from jax_ep.cli.benchlib import block_plan, plots, setup_time
from jax_ep.cli.benchlib.plan import Plan
from jax_ep.cli.benchlib.workloads import OPS, ROUTINGS, SENT, WORKLOADS, custom, with_tokens

# The opponent that needs processes of its own: with this flag XLA runs ragged_all_to_all as dense exchanges, the
# fastest way found for it (jax 0.11.2, H200).
DECOMPOSED = "ragged-decomposed"
DECOMPOSER_FLAG = "--xla_gpu_unsupported_enable_ragged_all_to_all_decomposer=true"
IMPLEMENTATIONS = ("cuda", "ragged", DECOMPOSED, "dense", "ring", "xla")
LAYOUTS = ("expert", "token", "batched")
MODES = ("throughput", "latency", "auto")
TRANSPORTS = ("auto", "nvshmem")


def _several(known):
    """Type for argparse: a comma-separated choice of `known`."""

    def parse(text: str) -> tuple[str, ...]:
        names = tuple(text.split(","))
        unknown = [n for n in names if n not in known]
        if unknown:
            raise argparse.ArgumentTypeError(f"{unknown[0]!r} is none of {', '.join(known)}")
        return names

    return parse


def _numbers(text: str) -> tuple[int, ...]:
    """Type for argparse: positive numbers, separated by commas."""
    numbers = tuple(int(n) if n.isdecimal() else 0 for n in text.split(","))
    if min(numbers) < 1:
        raise argparse.ArgumentTypeError(f"got {text!r}, expected positive numbers, separated by commas")
    return numbers


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m jax_ep bench", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    launch.add_arguments(parser, ranks_type=_numbers)
    what = parser.add_argument_group("what (several: separated by commas)")
    names = (*WORKLOADS, *block_plan.BLOCKS)
    what.add_argument("--workload", type=_several(names), default=("W1",), help=", ".join(names))
    what.add_argument("--implementation", type=_several(IMPLEMENTATIONS), default=(), help=", ".join(IMPLEMENTATIONS))
    what.add_argument("--layout", type=_several(LAYOUTS), default=(), help=", ".join(LAYOUTS))
    what.add_argument("--capacity", type=_several(("demand", "default")), default=("demand",), help="demand, default")
    what.add_argument(
        "--mode", type=_several(MODES), default=MODES[:1], help=f"{', '.join(MODES)}; default: {MODES[0]}"
    )
    what.add_argument("--op", type=_several(OPS[:3]), default=OPS[:3], help=", ".join(OPS[:3]))
    what.add_argument(
        "--num-sms", type=_numbers, default=(), help="SMs per rank; several: a sweep, with the default among them"
    )
    what.add_argument(
        "--ranks-per-node", type=_numbers, default=(), metavar="N", help="also over simulated nodes of N ranks each"
    )
    what.add_argument(
        "--transport", type=_several(TRANSPORTS), default=TRANSPORTS[:1], help=f"between nodes: {', '.join(TRANSPORTS)}"
    )
    what.add_argument("--split", action="store_true", help="also dispatch and combine as start and done")
    what.add_argument(
        "--command-buffers",
        action=argparse.BooleanOptionalAction,
        help="whether XLA may record the CUDA calls into CUDA graphs; default: where it may anywhere else, but not for "
        "--host and --first-call",
    )
    what.add_argument("--host", action="store_true", help="also the host's time for a call")
    what.add_argument(
        "--first-call",
        type=int,
        metavar="N",
        help="instead: first call over steady, in N fresh starts of --ranks processes, or of one with all devices",
    )
    what.add_argument(
        "--setup",
        type=int,
        nargs="?",
        const=3,
        metavar="N",
        help="instead: set-up by phase, median of N fresh starts (default: 3) for each number of --ranks",
    )
    what.add_argument("--plot", nargs="+", metavar="JSON", help="instead: draw --png from the files of earlier runs")
    changes = parser.add_argument_group("changes to the first workload, which is then called custom")
    changes.add_argument("--tokens", type=_numbers, default=(), help="per rank; several: a workload for each")
    changes.add_argument("--hidden", type=int)
    changes.add_argument("--ffn", type=int, help="inner size of an expert (W8)")
    changes.add_argument("--topk", type=int, dest="num_topk")
    changes.add_argument("--experts", type=int, dest="num_experts")
    changes.add_argument("--dtype", choices=("bfloat16", "float16", "float32"))
    changes.add_argument("--routing", choices=ROUTINGS)
    changes.add_argument("--sent", choices=SENT, help="rows, fp8 (quantised by dispatch) or a quantised pair")
    how = parser.add_argument_group("how")
    how.add_argument("--calls", type=int, help="calls chained in one program; default: 10")
    how.add_argument("--repeats", type=int, help="runs of that program, more where they are short; default: 15")
    how.add_argument("--quick", action="store_true", help="6 calls, 5 runs")
    how.add_argument("--json", metavar="PATH", help="write everything here")
    how.add_argument("--png", metavar="PATH", help="draw the table here (needs matplotlib)")
    return parser


def _plan(args: argparse.Namespace) -> Plan:
    """What the command line asks for, but for what depends on the number of ranks."""
    changes = {k: getattr(args, k) for k in ("hidden", "num_topk", "num_experts", "dtype", "routing", "sent")}
    first, *others = (WORKLOADS[name] for name in args.workload)
    if len(args.tokens) == 1:
        changes["num_tokens"] = args.tokens[0]
    firsts = [custom(first, **changes)]
    if len(args.tokens) > 1:
        firsts = [with_tokens(firsts[0], n) for n in args.tokens]
    return Plan(
        workloads=(*firsts, *others),
        implementations=args.implementation,
        layouts=args.layout or ("expert", "token"),
        capacities=args.capacity,
        modes=args.mode,
        num_sms=args.num_sms,
        ops=args.op,
        num_calls=args.calls or (6 if args.quick else 10),
        repeats=args.repeats or (5 if args.quick else 15),
        ranks_per_device=None,
        is_split=args.split,
        is_recorded=args.command_buffers,
        is_host_timed=args.host,
        is_first_call=args.first_call is not None,
        is_setup=args.setup is not None,
        ranks_per_node=args.ranks_per_node,
        transports=args.transport,
        suffix="",
        json_path=args.json,
        png_path=args.png,
    )


def main(argv: list[str]) -> int:
    """The command."""
    parser = _parser()
    args = parser.parse_args(argv)
    if args.plot:
        if not args.png:
            parser.error("--plot needs --png: where to draw")
        plots.draw([result for path in args.plot for result in _results(path)], args.png)
        return 0
    if any(name in block_plan.BLOCKS for name in args.workload):
        return _block(block_plan.plan(parser, args), args)
    if args.ffn:
        parser.error(f"--ffn goes with {', '.join(block_plan.BLOCKS)}")
    plan = _plan(args)
    if plan.num_calls < 2:
        parser.error("--calls must be at least 2: the time of a call is a difference between programs")
    if plan.transports != TRANSPORTS[:1] and not plan.ranks_per_node:
        parser.error("--transport is between nodes: give --ranks-per-node, too")
    for option, starts in (("--first-call", args.first_call), ("--setup", args.setup)):
        if starts is not None and starts < 1:
            parser.error(f"{option}: got {starts} starts, expected at least 1")
    if plan.is_setup:
        if args.ranks is None or plan.is_first_call or len(plan.modes) > 1:
            parser.error("--setup needs --ranks, and takes one --mode and no --first-call")
        return _setups(plan, args)
    if plan.is_first_call:
        if max(map(len, (args.ranks or (), plan.modes, plan.ranks_per_node, plan.transports))) > 1:
            parser.error("--first-call takes one number of --ranks, one --mode, one --ranks-per-node and --transport")
        how = launch.from_arguments(args)
        return _first_calls(*(_on(plan, args, args.ranks[0]) if args.ranks else (plan, how)), args.first_call)
    if args.ranks is None:
        if DECOMPOSED in plan.implementations:
            parser.error(f"{DECOMPOSED} needs --ranks: its flag concerns whole processes")
        from jax_ep.cli.benchlib import rank  # starts nothing before: it may be that only processes are launched

        return rank.run(plan)
    return _tables(plan, args)


def _block(plan: block_plan.BlockPlan, args: argparse.Namespace) -> int:
    if args.ranks is None:
        from jax_ep.cli.benchlib import block  # needs Flax, which the other workloads do not

        return block.run(plan)
    how = dataclasses.replace(launch.from_arguments(args), ranks=args.ranks[0])
    return launch.run(["-m", "jax_ep.cli.benchlib.block", plan.to_json()], how, _without_prefix)


def _results(path: str) -> list[dict]:
    """Results in a file of `--json`: one, or one per number of ranks."""
    content = json.loads(pathlib.Path(path).read_text())
    results = content.get("runs", [content])
    if not all("rows" in result for result in results):
        raise SystemExit(f"--plot: {path} has no table of times; expected what --json writes of one")
    return results


def _on(plan: Plan, args: argparse.Namespace, ranks: int) -> tuple[Plan, launch.Launch]:
    """The plan for `ranks` local processes, and how to launch them."""
    gpus = 0 if args.platform == "cpu" else launch.num_gpus()
    how = dataclasses.replace(launch.from_arguments(args), ranks=ranks)
    return dataclasses.replace(plan, ranks_per_device=-(-ranks // gpus) if gpus else ranks), how


def _tables(plan: Plan, args: argparse.Namespace) -> int:
    """A table per number of ranks; one file and one picture of them all, also when some of it fails."""
    runs: list[dict] = []
    status = 0
    for ranks in args.ranks:
        if len(args.ranks) > 1:
            print(f"{ranks} ranks", flush=True)
        here, how = _on(plan, args, ranks)
        for part, env in _parts(here):
            result, code = _measured(part, dataclasses.replace(how, env=how.env + env))
            status = status or code
            if not result:
                continue
            if runs and runs[-1]["num_ranks"] == result["num_ranks"]:
                runs[-1]["rows"] += result["rows"]
            else:
                runs.append(result)
    if not runs:
        return status
    if args.json:
        pathlib.Path(args.json).write_text(json.dumps(runs[0] if len(runs) == 1 else {"runs": runs}, indent=1))
    if args.png:
        plots.draw(runs, args.png)
    return status


def _parts(plan: Plan) -> list[tuple[Plan, tuple[tuple[str, str], ...]]]:
    """The plan cut by what XLA's flags must be in a process, with the environment of each part."""
    others = tuple(name for name in plan.implementations if name != DECOMPOSED)
    parts: list[tuple[Plan, tuple[tuple[str, str], ...]]] = []
    if others or not plan.implementations:
        parts.append((dataclasses.replace(plan, implementations=others), ()))
    if DECOMPOSED in plan.implementations:
        suffix = DECOMPOSED.removeprefix("ragged")
        decomposed = dataclasses.replace(plan, implementations=("ragged",), suffix=suffix, is_host_timed=False)
        flags = f"{os.environ.get('XLA_FLAGS', '')} {DECOMPOSER_FLAG}".strip()
        parts.append((decomposed, (("XLA_FLAGS", flags),)))
    return parts


def _on_ranks(plan: Plan, how: launch.Launch) -> int:
    command = ["-m", "jax_ep.cli.benchlib.rank", plan.to_json()]
    if how.ranks:
        return launch.run(command, how, _without_prefix)
    # One process with all devices. What it runs does not wait for other processes, so it needs no launcher.
    gpus = 0 if how.platform == "cpu" else launch.num_gpus()
    env = os.environ | launch.rank_env(dataclasses.replace(how, ranks=1), 0, gpus)
    try:
        return subprocess.run([sys.executable, *command], env=env, timeout=how.timeout_s, check=False).returncode
    except subprocess.TimeoutExpired:
        print(f"bench: not finished within {how.timeout_s:g} s")
        return launch.TIMED_OUT


def _measured(plan: Plan, how: launch.Launch) -> tuple[dict, int]:
    """What rank 0 wrote, {} if it did not come so far, and the ranks' status."""
    with tempfile.TemporaryDirectory() as folder:
        out = pathlib.Path(folder, "result.json")
        status = _on_ranks(dataclasses.replace(plan, json_path=str(out), png_path=None), how)
        return (json.loads(out.read_text()) if out.exists() else {}), status


def _without_prefix(line: str) -> None:
    """The table comes from rank 0 alone; the others only speak when something is wrong."""
    print(line.removeprefix("[0] "), flush=True)


def _first_calls(plan: Plan, how: launch.Launch, starts: int) -> int:
    """Median over fresh starts of first call / steady call, ours and the control's."""
    runs = []
    for start in range(starts):
        run, status = _measured(plan, how)
        if status:
            return status
        runs.append(run)
        setup = ", ".join(f"{phase} {ms:.0f}" for phase, ms in run["setup_ms"].items())
        parts = [_describe(run, key) for key in run["measured"]] + [f"set-up ms: {setup}"]
        print(f"start {start}: " + "; ".join(parts), flush=True)
    medians = {key: statistics.median(run[key]["ratio"] for run in runs) for key in runs[-1]["measured"]}
    print(f"median of {starts}: " + ", ".join(f"{key} {ratio:.2f}" for key, ratio in medians.items()))
    if plan.json_path:
        pathlib.Path(plan.json_path).write_text(json.dumps({"median_ratio": medians, "starts": runs}, indent=1))
    return 0


def _setups(plan: Plan, args: argparse.Namespace) -> int:
    """Set-up by phase of each number of ranks, on one node and on several; what fails leaves the others standing."""
    columns, everything, status = [], [], 0
    for ranks in args.ranks:
        here, how = _on(plan, args, ranks)
        for per_node, transport in plan.nodes(ranks):
            nodes = () if per_node is None else (per_node,)
            part = dataclasses.replace(here, ranks_per_node=nodes, transports=(transport,))
            runs = []
            for _ in range(args.setup):
                run, code = _measured(part, how)
                if code or not run:
                    status = status or code or 1
                    break  # the next start of the same would fail alike
                runs.append(run)
                print(setup_time.format_start(run), flush=True)
            if runs:
                columns.append(setup_time.median(runs))
                everything.append({"median": columns[-1], "starts": runs})
            if everything and args.json:  # a run that is cut short leaves what it has
                pathlib.Path(args.json).write_text(json.dumps({"setup": everything}, indent=1))
    if columns:
        print("\n".join([*setup_time.table(columns), *setup_time.growth(columns)]))
    return status


def _describe(run: dict, key: str) -> str:
    r = run[key]
    return (
        f"{key} {r['first_us']:.0f} us first / {r['steady_us']:.0f} us steady = {r['ratio']:.2f} "
        f"({r['paused_us']:.0f} us after a pause)"
    )
