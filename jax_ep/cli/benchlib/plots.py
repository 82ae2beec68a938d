"""Pictures of results: bars of one table, or time against tokens or ranks from one or several."""

from __future__ import annotations

BLUE, RED = "#4477aa", "#cc3311"
COLOURS = (BLUE, "#ee6677", "#228833", "#ccbb44", "#66ccee", "#aa3377", "#777777")


def draw(results: list[dict], path: str) -> None:
    """Writes a PNG: curves where number of ranks or of tokens varies between rows, else bars."""
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
    over = _variable(results, rows)
    figure = _curves(plt, rows, over) if over else _bars(plt, rows)
    first = results[0]
    ranks = ", ".join(str(r) for r in dict.fromkeys(result["num_ranks"] for result in results))
    figure.suptitle(f"{first['device']}, {ranks} ranks, jax {first['jax']}", fontsize=10)
    figure.tight_layout()
    figure.savefig(path, dpi=150)
    plt.close(figure)


def _variable(results: list[dict], rows: list[dict]) -> str | None:
    """What a plot is drawn against: "ranks" where results differ in them, "tokens" where shapes differ in them."""
    if len({result["num_ranks"] for result in results}) > 1:
        return "ranks"
    uniform = [row["of"] for row in rows if row["of"]["routing"] == "uniform" and row["of"]["sent"] == "rows"]
    return "tokens" if len({of["num_tokens"] for of in uniform}) > 2 else None


def _bars(plt, rows: list[dict]):
    """Bars of us per implementation, one panel per workload and op, with the limit as a line."""
    from matplotlib.ticker import NullFormatter

    names = list(dict.fromkeys(row["workload"] for row in rows))
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
            axis.set_yticks(range(len(shown)), [_bar_label(row) for row in shown])
            axis.bar_label(bars, [f"{row['us']:.0f}" for row in shown], padding=3, fontsize=8)
            for y, row in enumerate(shown):
                axis.plot([row["limit_us"]] * 2, [y - 0.4, y + 0.4], color=RED, linewidth=2)
            axis.set_xscale("log")
            axis.xaxis.set_minor_formatter(NullFormatter())
            axis.margins(x=0.15)
            axis.invert_yaxis()
            axis.set_title(f"{name} {op}, µs (red: limit)", fontsize=9)
            axis.tick_params(labelsize=8)
    return figure


def _bar_label(row: dict) -> str:
    sms = f"{row['num_sms']} SMs" if row["num_sms"] else ""
    return " ".join(filter(None, (row["implementation"], row["layout"], row["capacity"], sms)))


def points(rows: list[dict], over: str) -> dict[tuple[str, str], dict[str, list[tuple]]]:
    """Curves of a plot: {(what is fixed, op): {label: [(ranks or tokens, us, limit_us), ...] in order}}.

    Of several numbers of SMs it takes the default one, else the fastest.
    """
    chosen: dict[tuple, dict] = {}
    for row in rows:
        of = row["of"]
        if row["num_ranks"] == 1 and of["routing"] == "alone":
            continue  # the group of one that empty peers are compared with
        x, fixed = (row["num_ranks"], of["num_tokens"]) if over == "ranks" else (of["num_tokens"], row["num_ranks"])
        fixed_label = f"{fixed} tokens" if over == "ranks" else f"{fixed} ranks"
        kind = [of["routing"]] if of["routing"] != "uniform" else []
        kind += [f"{of['sent']} (FP8)" if of["sent"] == "pair" else of["sent"]] if of["sent"] != "rows" else []
        label = " ".join(filter(None, (row["implementation"], row["layout"], row["capacity"], *kind)))
        key = (fixed_label, row["op"], label, x)
        rank = (not row["is_default"], row["us"])
        if key not in chosen or rank < (not chosen[key]["is_default"], chosen[key]["us"]):
            chosen[key] = row
    panels: dict[tuple[str, str], dict[str, list[tuple]]] = {}
    for (fixed_label, op, label, x), row in sorted(chosen.items(), key=lambda item: item[0][3]):
        panels.setdefault((fixed_label, op), {}).setdefault(label, []).append((x, row["us"], row["limit_us"]))
    return panels


def _curves(plt, rows: list[dict], over: str):
    """Time against `over`, one line of panels per value of the other, a panel per op; dashed: the limit."""
    from matplotlib.ticker import NullFormatter

    panels = points(rows, over)
    fixed = list(dict.fromkeys(f for f, _ in panels))
    ops = list(dict.fromkeys(row["op"] for row in rows))
    figure, axes = plt.subplots(len(fixed), len(ops), figsize=(5.5 * len(ops), 1 + 4 * len(fixed)), squeeze=False)
    for line, name in zip(axes, fixed, strict=True):
        for axis, op in zip(line, ops, strict=True):
            ticks = set()
            for colour, (label, curve) in enumerate(panels.get((name, op), {}).items()):
                xs, us, limits = zip(*curve, strict=True)
                ticks |= set(xs)
                style = {"color": COLOURS[colour % len(COLOURS)]}
                axis.plot(xs, us, marker="o", markersize=4, label=label, **style)
                if any(limits):
                    axis.plot(xs, limits, linestyle="--", linewidth=1, **style)
            axis.set_xscale("log", base=2)
            axis.set_yscale("log")
            axis.set_xticks(sorted(ticks), [str(x) for x in sorted(ticks)])
            axis.xaxis.set_minor_formatter(NullFormatter())
            axis.set_xlabel("tokens per rank" if over == "tokens" else "ranks")
            axis.set_title(f"{op}, {name}, µs (dashed: limit)", fontsize=9)
            axis.grid(alpha=0.3)
            axis.tick_params(labelsize=8)
            if ticks:
                axis.legend(fontsize=7)
    return figure
