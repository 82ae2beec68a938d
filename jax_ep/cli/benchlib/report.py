"""How results are shown: lines of a table, a picture, and the facts that a figure needs beside it."""

from __future__ import annotations

import sys
import time

import jax
import jaxlib

import jax_ep

HEADER = (
    f"{'workload':<10}{'implementation':<16}{'layout':<8}{'capacity':<10}{'op':<10}"
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
    """One line of the table."""
    start = f"{row['workload']:<10}{row['implementation']:<16}{row['layout']:<8}{row['capacity']:<10}{row['op']:<10}"
    if row["error"]:
        return f"{start}  {row['error']}"
    return f"{start}{row['us']:>10.1f}{row['wire_gb_s']:>11.1f}{row['limit_us']:>10.1f}{row['percent_of_limit']:>9.1f}"


def draw(result: dict, path: str) -> None:
    """Bars of µs per implementation, one panel per workload and op, with the limit as a line."""
    try:
        import matplotlib
    except ImportError:
        print(f"{path} not drawn: matplotlib is not installed (pip install 'jax_ep[bench]')")
        return
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    from matplotlib.ticker import NullFormatter

    rows = [r for r in result["rows"] if not r["error"]]
    names = list(dict.fromkeys(r["workload"] for r in rows))
    figure, axes = plt.subplots(len(names), 2, figsize=(11, 1 + 2.6 * len(names)), squeeze=False)
    for line, name in zip(axes, names, strict=True):
        for axis, op in zip(line, ("dispatch", "combine"), strict=True):
            shown = [r for r in rows if r["workload"] == name and r["op"] == op]
            labels = [" ".join(filter(None, (r["implementation"], r["layout"], r["capacity"]))) for r in shown]
            bars = axis.barh(labels, [r["us"] for r in shown], color="#4477aa")
            axis.bar_label(bars, [f"{r['us']:.0f}" for r in shown], padding=3, fontsize=8)
            for y, row in enumerate(shown):
                axis.plot([row["limit_us"]] * 2, [y - 0.4, y + 0.4], color="#cc3311", linewidth=2)
            axis.set_xscale("log")
            axis.xaxis.set_minor_formatter(NullFormatter())
            axis.margins(x=0.15)
            axis.invert_yaxis()
            axis.set_title(f"{name} {op}, µs (red: limit)", fontsize=9)
            axis.tick_params(labelsize=8)
    figure.suptitle(f"{result['device']}, {result['num_ranks']} ranks, jax {result['jax']}", fontsize=10)
    figure.tight_layout()
    figure.savefig(path, dpi=150)
    plt.close(figure)
