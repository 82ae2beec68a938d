"""How results are shown: lines of a table, and the facts that a figure needs beside it."""

from __future__ import annotations

import sys
import time

import jax
import jaxlib

import jax_ep
from jax_ep.cli.benchlib import findings

HEADER = (
    f"{'workload':<14}{'nodes':<13}{'implementation':<18}{'layout':<9}{'capacity':<10}{'mode':<17}{'op':<15}{'SMs':>5}"
    f"{'us':>10}{'wire GB/s':>11}{'limit us':>10}{'% limit':>9}"
)


def environment() -> dict:
    """Versions and devices."""
    return {
        "when": time.strftime("%Y-%m-%d %H:%M:%S"),
        "jax_ep": jax_ep.__version__,
        "jax": jax.__version__,
        "jaxlib": jaxlib.__version__,
        "python": sys.version.split()[0],
        "device": jax.devices()[0].device_kind,
        "num_devices": jax.device_count(),
        "num_processes": jax.process_count(),
    }


def format_row(row: dict) -> str:
    """One line of the table. "12*" SMs: what the call takes by default; "12+4": and four for the carrier.

    "auto=latency": what "auto" became. A group of one among several: "name/1".
    """
    name = row["workload"] + ("/1" if row["num_ranks"] < jax.device_count() else "")
    carriers = f"+{row['node_sms']}" if row.get("node_sms") else ""
    sms = "" if row["num_sms"] is None else f"{row['num_sms']}{carriers}{'*' if row['is_default'] else ''}"
    mode = row["mode"] + (f"={row['chosen_mode']}" if row["mode"] == "auto" != row["chosen_mode"] else "")
    start = (
        f"{name:<14}{findings.nodes(row):<13}{row['implementation']:<18}{row['layout']:<9}{row['capacity']:<10}"
        f"{mode:<17}{row['op']:<15}{sms:>5}"
    )
    if row["error"]:
        return f"{start}  {row['error']}"
    return f"{start}{row['us']:>10.1f}{row['wire_gb_s']:>11.1f}{row['limit_us']:>10.1f}{row['percent_of_limit']:>9.1f}"
