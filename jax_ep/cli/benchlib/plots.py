"""Pictures of results: bars of one table, or time against tokens or ranks from one or several."""

from __future__ import annotations

from jax_ep.cli.benchlib.findings import nodes

BLUE, RED = "#4477aa", "#cc3311"
LEAST_POINTS = {"tokens": 3, "ranks": 2}  # of a curve against these; with fewer, bars say more
LOG_FROM = 30  # largest time over smallest
COLOURS = (BLUE, "#ee6677", "#228833", "#ccbb44", "#66ccee", "#aa3377", "#777777")


def draw(results: list[dict], path: str) -> None:
    """Writes a PNG: curves where numbers of tokens or of ranks vary between rows, else bars."""
    try:
        import matplotlib
    except ImportError:
        print(f"{path} not drawn: matplotlib is not installed (pip install 'jax_ep[bench]')")
        return
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    rows = [row for result in results for row in result["rows"] if not row["error"]]
    if not rows:
        print(f"{path} not drawn: nothing was measured")
        return
    panels = [
        (over, fixed, curves) for over, least in LEAST_POINTS.items() for fixed, curves in points(rows, over, least)
    ]
    figure = _curves(plt, rows, panels) if panels else _bars(plt, rows)
    ranks = ", ".join(str(r) for r in sorted({result["num_ranks"] for result in results}))
    devices, versions = (" and ".join(dict.fromkeys(result[key] for result in results)) for key in ("device", "jax"))
    figure.suptitle(f"{devices}, R = {ranks}, jax {versions}", fontsize=10)
    figure.tight_layout()
    figure.savefig(path, dpi=150)
    plt.close(figure)


def _bars(plt, rows: list[dict]):
    """Bars of us per implementation, one panel per workload and op, with the limit as a line."""
    names = list(dict.fromkeys(row["workload"] for row in rows))
    has_modes = len(_modes(rows)) > 1
    ops = list(dict.fromkeys(row["op"] for row in rows))
    tallest = max(sum(row["workload"] == name and row["op"] == ops[0] for row in rows) for name in names)
    size = (5.5 * len(ops), 1 + len(names) * (1.4 + 0.3 * tallest))
    figure, axes = plt.subplots(len(names), len(ops), figsize=size, squeeze=False)
    for line, name in zip(axes, names, strict=True):
        for axis, op in zip(line, ops, strict=True):
            shown = [row for row in rows if row["workload"] == name and row["op"] == op]
            if not shown:
                axis.set_axis_off()
                continue
            bars = axis.barh(range(len(shown)), [row["us"] for row in shown], color=BLUE)
            axis.set_yticks(range(len(shown)), [_bar_label(row, has_modes) for row in shown])
            axis.bar_label(bars, [f"{row['us']:.0f}" for row in shown], padding=3, fontsize=8)
            for y, row in enumerate(shown):
                if row["limit_us"]:  # 0: nothing crosses
                    axis.plot([row["limit_us"]] * 2, [y - 0.4, y + 0.4], color=RED, linewidth=2)
            times = [us for row in shown for us in (row["us"], row["limit_us"]) if us]
            if max(times) > LOG_FROM * min(times):  # else from 0, where the length of a bar is the time
                axis.set_xscale("log")
                _number(axis.xaxis)
            axis.margins(x=0.15)
            axis.invert_yaxis()
            axis.set_title(f"{name} {op}, µs (red: limit)", fontsize=9)
            axis.tick_params(labelsize=8)
    return figure


def _number(axis) -> None:
    """Labels a logarithmic axis with 1, 2 and 5 of each power of ten, also where it spans less than one."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    axis.set_major_locator(LogLocator(10, subs=(1, 2, 5)))
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axis.set_minor_formatter(NullFormatter())


def _modes(rows: list[dict]) -> set[str]:
    """Those that a picture must tell apart: of calls as a whole, and of files from before there were any."""
    return {row.get("mode", "throughput") for row in rows if not row["op"].endswith(" split")} - {""}


def _mode(row: dict, has_modes: bool) -> str:
    return row.get("mode", "throughput") if has_modes and not row["op"].endswith(" split") else ""


def _nodes_of(row: dict) -> str:
    """By the ranks of a node, which a curve against ranks keeps; "" on one."""
    _, _, transport = nodes(row).partition(" ")
    return " ".join(filter(None, (f"nodes of {row['ranks_per_node']}", transport))) if nodes(row) else ""


def _bar_label(row: dict, has_modes: bool) -> str:
    carriers = f" + {row['node_sms']}" if row.get("node_sms") else ""
    sms = f"{row['num_sms']}{carriers} SMs" if row["num_sms"] else ""
    words = (row["implementation"], row["layout"], row["capacity"], nodes(row), _mode(row, has_modes), sms)
    return " ".join(filter(None, words))


def points(rows: list[dict], over: str, least: int) -> list[tuple[str, dict]]:
    """Curves against "tokens" or "ranks": [(what is fixed, {(op, label): [(x, us, limit_us), ...] by x}), ...].

    Where no curve has `least` points there is no entry. Of several numbers of SMs the default counts, else the fastest.
    """
    chosen: dict[tuple, dict] = {}
    has_modes = len(_modes(rows)) > 1
    for row in rows:
        of = row["of"]
        if of["routing"] == "alone":
            continue  # bytes do not grow with its ranks
        x, fixed = of["num_tokens"], f"R = {row['num_ranks']}"
        if over == "ranks":
            x, fixed = row["num_ranks"], f"{of['num_tokens']} tokens"
        kind = [
            _nodes_of(row),
            _mode(row, has_modes),
            "" if of["routing"] == "uniform" else of["routing"],
            "" if of["sent"] == "rows" else f"FP8 {of['sent']}",
        ]
        label = " ".join(filter(None, (row["implementation"], row["layout"], row["capacity"], *kind)))
        key = (x, fixed, row["op"], label)
        if key not in chosen or _preference(row) < _preference(chosen[key]):
            chosen[key] = row
    groups: dict[str, dict] = {}
    for (x, fixed, op, label), row in sorted(chosen.items(), key=lambda item: item[0][0]):
        groups.setdefault(fixed, {}).setdefault((op, label), []).append((x, row["us"], row["limit_us"]))
    return [(fixed, curves) for fixed, curves in groups.items() if max(map(len, curves.values())) >= least]


def _preference(row: dict) -> tuple:
    return not row["is_default"], row["us"]


def _curves(plt, rows: list[dict], panels: list[tuple[str, str, dict]]):
    """A line of panels per group of `points`, a panel per op; dashed: the limit."""
    from matplotlib.ticker import NullFormatter

    ops = list(dict.fromkeys(row["op"] for row in rows))
    figure, axes = plt.subplots(len(panels), len(ops), figsize=(5.5 * len(ops), 1 + 4 * len(panels)), squeeze=False)
    for line, (over, fixed, curves) in zip(axes, panels, strict=True):
        for axis, op in zip(line, ops, strict=True):
            here = {label: curve for (of, label), curve in curves.items() if of == op}
            for colour, (label, curve) in enumerate(here.items()):
                xs, us, limits = zip(*curve, strict=True)
                style = {"color": COLOURS[colour % len(COLOURS)], "markersize": 4}
                if "auto" in label.split():  # lies on one of the other modes: rings, under which that can be seen
                    rings = style | {"markersize": 9, "markerfacecolor": "none"}
                    axis.plot(xs, us, marker="o", linestyle="", label=label, **rings)
                    continue
                axis.plot(xs, us, marker="o", label=label, **style)
                if all(limits):
                    axis.plot(xs, limits, linestyle="--", linewidth=1, **style)
            axis.set_xscale("log", base=2)
            axis.set_yscale("log")
            _number(axis.yaxis)
            ticks = sorted({x for curve in here.values() for x, *_ in curve})
            axis.set_xticks(ticks, [str(x) for x in ticks])
            axis.xaxis.set_minor_formatter(NullFormatter())
            axis.set_xlabel("tokens per rank" if over == "tokens" else "ranks")
            axis.set_title(f"{op}, {fixed}, µs (dashed: limit)", fontsize=9)
            axis.grid(which="both", alpha=0.3)
            axis.tick_params(which="both", labelsize=8)
            if here:
                axis.legend(fontsize=7)
    return figure
