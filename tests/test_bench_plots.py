"""Pictures of the bench: which curves and bars they have, what their axes say, and one run of `--plot`."""

import json

from test_bench import _row

from jax_ep.cli import bench
from jax_ep.cli.benchlib import plots
from jax_ep.cli.benchlib.workloads import WORKLOADS


def test_curves_and_bars_name_modes_where_there_are_several():
    rows = [_row(4.0, num_ranks=n, mode=mode) for n in (2, 8) for mode in ("throughput", "latency")]
    ((_, curves),) = plots.points(rows, "ranks", 2)
    assert list(curves) == [("dispatch", f"cuda token demand {mode}") for mode in ("throughput", "latency")]
    ((_, curves),) = plots.points([*rows[::2], _row(4.0, "combine split", "latency")], "ranks", 2)
    assert list(curves) == [("dispatch", "cuda token demand"), ("combine split", "cuda token demand")]
    old = [{k: v for k, v in row.items() if "mode" not in k} for row in rows[::2]]  # of a file that knows no modes
    assert plots.points(old, "ranks", 2) == plots.points(rows[::2], "ranks", 2)
    assert plots._bar_label(rows[1], True) == "cuda token demand latency 16 SMs"


def test_axes_have_numbers():
    """Bars begin at 0 unless times are far apart; a logarithmic axis is labelled also within one power of ten."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    near = [_row(us, num_sms=n, limit_us=190.0) for n, us in ((8, 700.0), (16, 230.0))]
    far = [*near, _row(91000.0, limit_us=190.0) | {"implementation": "ragged", "num_sms": None}]
    for rows, scale in ((near, "linear"), (far, "log")):
        (axis,) = plots._bars(plt, rows).axes
        assert axis.get_xscale() == scale
    points = [(2, 230.0, 210.0), (4, 700.0, 600.0)]
    (axis,) = plots._curves(plt, near, [("ranks", "4096 tokens", {("dispatch", "cuda"): points})]).axes
    axis.figure.canvas.draw()
    low, high = axis.get_ylim()
    labels = [label.get_text() for label in axis.get_yticklabels() if low <= label.get_position()[1] <= high]
    assert "500" in labels and set(labels) <= {"200", "500"}
    plt.close("all")


def test_curves_take_the_default_number_of_sms():
    w3, alone = WORKLOADS["W3"], WORKLOADS["W6-alone"]
    rows = [_row(9.0, workload=w3), _row(4.0), _row(5.0, num_sms=12, is_default=True), _row(6.0, num_ranks=2)]
    rows.append(_row(1.0, workload=alone))
    of_dispatch = ("dispatch", "cuda token demand")
    assert plots.points(rows, "tokens", 2) == [("R = 8", {of_dispatch: [(4096, 5.0, 100.0), (8192, 9.0, 100.0)]})]
    assert plots.points(rows, "ranks", 2) == [("4096 tokens", {of_dispatch: [(2, 6.0, 100.0), (8, 5.0, 100.0)]})]
    assert plots.points(rows, "tokens", 3) == []


def test_plot_command_draws_several_files(tmp_path):
    files = []
    for num_ranks in (1, 2, 8):
        rows = [_row(50.0 * num_ranks, op, num_ranks=num_ranks) for op in ("dispatch", "combine")]
        files.append(str(tmp_path / f"{num_ranks}.json"))
        result = {"device": "a", "jax": "1", "num_ranks": num_ranks, "rows": rows}
        (tmp_path / f"{num_ranks}.json").write_text(json.dumps({"runs": [result]} if num_ranks == 8 else result))
    assert bench.main(["--plot", *files, "--png", str(tmp_path / "r.png")]) == 0
    assert (tmp_path / "r.png").read_bytes().startswith(b"\x89PNG")
