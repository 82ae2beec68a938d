"""The bench on one rank: `python -m jax_ep.cli.benchlib.rank PLAN_AS_JSON`, or `run(plan)` in this process."""

from __future__ import annotations

import dataclasses
import json
import pathlib
import sys

import jax

import jax_ep
from jax_ep.cli.benchlib import host, implementations, measure, plots, report, setup_time
from jax_ep.cli.benchlib.plan import Plan


def run(plan: Plan) -> int:
    """Measures on all devices of the program; process 0 prints, writes and draws."""
    platform = jax.default_backend()
    plan = dataclasses.replace(
        plan,
        implementations=plan.implementations or implementations.choices(platform),
        ranks_per_device=plan.ranks_per_device or (jax.device_count() if platform == "cpu" else 1),
    )
    is_first = jax.process_index() == 0

    def say(line: str) -> None:
        if is_first:
            print(line, flush=True)

    def save(measured: dict) -> dict:
        result = environment | measured
        if is_first and plan.json_path:
            pathlib.Path(plan.json_path).write_text(json.dumps(result, indent=1))
        return result

    def show(measured: dict) -> None:
        say(report.format_row(measured["rows"][-1]))
        save(measured)  # a run that is cut short leaves what it has

    environment = report.environment()
    if plan.is_setup:
        save(setup_time.run(plan))
    elif plan.is_first_call:
        result = save(measure.first_call(plan))
    else:
        say(report.HEADER)
        result = save(measure.steady(plan, show, say))
        stats = jax_ep.debug.stats()
        if plan.is_recorded or stats["recorded_calls"]:
            say(
                f"command buffers: {stats['recorded_calls']} calls were recorded; the host launched {stats['calls']}, "
                "first executions and programs too short to record among them; the rest was replayed"
            )
        if plan.is_host_timed:
            result = save(result | {"host": host.lines(plan, say)})
    if is_first and plan.png_path:
        plots.draw([result], plan.png_path)
    return 0


if __name__ == "__main__":
    sys.exit(run(Plan.from_json(sys.argv[1])))
