"""What follows from several rows of the table: skew, empty peers, the default number of SMs, "auto", nodes."""

from __future__ import annotations

from collections.abc import Iterator


def notes(rows: list[dict]) -> list[str]:
    """Sentences for the end of the table; adds "per_byte_of_uniform" and "empty_peer_us" to the rows that have them."""
    good = [row for row in rows if not row["error"]]
    return [*_default_sms(good), *_skew(good), *_empty_peers(good), *_auto(good), *_nodes(good)]


def nodes(row: dict) -> str:
    """Two nodes of four ranks are "2x4", one node is "", as are files from before there were any."""
    per_node = row.get("ranks_per_node")
    if per_node is None:
        return ""
    transport = "" if row["transport"] == "auto" else f" {row['transport']}"
    return f"{-(-row['num_ranks'] // per_node)}x{per_node}{transport}"


def _label(row: dict, mode: str | None = None) -> str:
    """`mode`: what to say instead of the row's."""
    mode = row["mode"] if mode is None else mode
    words = (row["workload"], nodes(row), row["implementation"], row["layout"], row["capacity"], mode, row["op"])
    return " ".join(filter(None, words))


def _default_sms(rows: list[dict]) -> Iterator[str]:
    """Time with the default number of SMs over the best time of a sweep."""
    sweeps: dict[tuple, list[dict]] = {}
    for row in rows:
        sweeps.setdefault((_label(row), row["num_ranks"]), []).append(row)
    for (label, _), sweep in sweeps.items():
        default = [row for row in sweep if row["is_default"]]
        if len(sweep) > 1 and default:
            best = min(sweep, key=lambda row: row["us"])
            yield (
                f"{label}: default {default[0]['num_sms']} SMs {default[0]['us']:.0f} us, best {best['num_sms']} SMs "
                f"{best['us']:.0f} us, ratio {default[0]['us'] / best['us']:.2f}"
            )


def _alike(row: dict) -> tuple:
    """What two rows must have in common to be compared over routings."""
    shape = {k: v for k, v in row["of"].items() if k not in ("name", "routing")}
    return (
        row["implementation"],
        row["layout"],
        row["capacity"],
        row["mode"],
        row["op"],
        row["num_sms"],
        nodes(row),
        *shape.items(),
    )


def _skew(rows: list[dict]) -> Iterator[str]:
    """Us per byte relative to the same shape with uniform routing in the same run; bytes as the limit counts them."""
    uniform = {_alike(row): row for row in rows if row["of"]["routing"] == "uniform"}
    for row in rows:
        base = uniform.get(_alike(row))
        if base is None or row is base or row["of"]["routing"] == "alone" or not (row["limit_us"] and base["limit_us"]):
            continue
        row["per_byte_of_uniform"] = row["us"] / row["limit_us"] / (base["us"] / base["limit_us"])
        yield f"{_label(row)}: {row['per_byte_of_uniform']:.2f} of uniform {base['workload']} per byte"


def _empty_peers(rows: list[dict]) -> Iterator[str]:
    """(one busy rank among R - 1 empty ones, less the same rank as a group of one) / (R - 1)."""
    alone = [row for row in rows if row["of"]["routing"] == "alone" and row["capacity"] == "demand"]
    ones = {(_label(row), row["num_sms"]): row for row in alone if row["num_ranks"] == 1}
    for row in alone:
        one = ones.get((_label(row), row["num_sms"]))
        if one is not None and row is not one:
            row["empty_peer_us"] = (row["us"] - one["us"]) / (row["num_ranks"] - 1)
            empty = f"{row['num_ranks'] - 1} empty ranks"
            yield (
                f"{_label(row)}: {row['us']:.1f} us, {one['us']:.1f} us without the {empty}; "
                f"an empty peer costs {row['empty_peer_us']:.2f} us"
            )


def _auto(rows: list[dict]) -> Iterator[str]:
    """Time of "auto" over that of the better mode; of several numbers of SMs the default counts, else the fastest."""
    of_mode: dict[tuple, dict[str, dict]] = {}
    for row in rows:
        modes = of_mode.setdefault((_label(row, ""), row["num_ranks"]), {})
        modes[row["mode"]] = min(modes.get(row["mode"], row), row, key=lambda r: (not r["is_default"], r["us"]))
    worst = 0.0
    for (label, _), modes in of_mode.items():
        if {"auto", "throughput", "latency"} <= set(modes):
            us = {mode: row["us"] for mode, row in modes.items()}
            ratio = us["auto"] / min(us["throughput"], us["latency"])
            worst = max(worst, ratio)
            modes["auto"]["auto_over_better"] = ratio
            yield (
                f"{label}: throughput {us['throughput']:.1f} us, latency {us['latency']:.1f} us, auto "
                f"({modes['auto']['chosen_mode']}) {us['auto']:.1f} us; auto ÷ better mode {ratio:.2f}"
            )
    if worst:
        yield f"auto ÷ better mode: at most {worst:.2f}"


def _nodes(rows: list[dict]) -> Iterator[str]:
    """Time over several nodes over that on one, with as many SMs (the carrier's come on top), or both by default.

    By default both take what the GPU has for a rank, so a call over nodes has its carrier's fewer to move rows with.
    """

    def key(row: dict) -> tuple:
        words = (row[k] for k in ("workload", "implementation", "layout", "capacity", "mode", "op", "num_ranks"))
        return (*words, "default" if row["is_default"] else row["num_sms"])

    one_node = {key(row): row for row in rows if not nodes(row)}
    worst = 0.0
    for row in rows:
        one = one_node.get(key(row))
        if nodes(row) and one is not None:
            row["over_one_node"] = row["us"] / one["us"]
            worst = max(worst, row["over_one_node"])
            yield (
                f"{_label(row)}: {row['us']:.0f} us over {nodes(row)}, {one['us']:.0f} us on one node, "
                f"ratio {row['over_one_node']:.2f}"
            )
    if worst:
        yield f"several nodes ÷ one: at most {worst:.2f}"
