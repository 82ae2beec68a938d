"""`bench --setup`: the table and the growth that follow from fresh starts, and one run of the command."""

import json

import pytest
from test_bench import _jax_ep

from jax_ep.cli import bench
from jax_ep.cli.benchlib import setup_time


def _start(num_ranks, *peers_ms, per_node=None, init_ms=0.0):
    """A start whose ranks differ in the phase "peers"."""
    phases = [{"memory": 1.0, "peers": ms, "nvshmem_init": init_ms + i} for i, ms in enumerate(peers_ms)]
    start = {"num_ranks": num_ranks, "ranks_per_node": per_node, "transport": "auto" if per_node is None else "nvshmem"}
    start |= {"phases_ms": phases, "unavailable": "", "implementation": "cuda"}
    return start | {"compile_ms": 900.0, "compile_again_ms": 700.0}


def test_table_is_of_the_slowest_rank():
    columns = [_start(2, 30.0, 40.0), _start(8, *[90.0] * 7, 50.0, per_node=4, init_ms=600.0)]
    lines = setup_time.table(columns)
    cells = {line[:36].strip(): line[36:].split() for line in lines}
    assert cells["set-up, ms, of the slowest of ranks"] == ["2", "8"]
    assert cells["over nodes"] == ["2x4"] and cells["by transport"] == ["nvshmem"]
    assert (
        cells["memory"] == ["1.0", "1.0"] and cells["peers"] == ["40.0", "90.0"] and cells["total"] == ["41.0", "91.0"]
    )
    # Shown apart and in no total; of the rank where it took longest, which is another one.
    assert cells["NVSHMEM's own initialisation"] == ["1.0", "607.0"] and "nvshmem_init" not in cells
    assert cells["difference: set-up took no more"] == ["200.0", "200.0"]
    assert len({len(line) for line in lines}) == 1
    assert "over nodes" not in "".join(setup_time.table(columns[:1]))
    assert setup_time.format_start(columns[1]).startswith("8 ranks as 2x4 nvshmem: 91 ms, of these memory 1, peers 90")


def test_median_start_is_one_that_was():
    starts = [_start(2, ms) for ms in (70.0, 10.0, 20.0, 60.0)]
    assert setup_time.median(starts) is starts[2] and setup_time.median(starts[:3]) is starts[2]


def test_growth_is_told_for_each_kind_of_nodes():
    columns = [_start(8, 359.0), _start(2, 99.0), _start(4, 199.5)]
    columns += [_start(4, 100.0, per_node=2), _start(8, 110.0, per_node=2), _start(8, 9.0, per_node=4)]
    lines = setup_time.growth(columns)
    assert lines == [
        "growth: 4 ranks take 2.00 times as long as 2 ranks, 2.00 would be linear: ABOVE LINEAR",
        "growth: 8 ranks take 3.60 times as long as 2 ranks, 4.00 would be linear: not above linear",
        "growth: 8 ranks as 4x2 nvshmem take 1.10 times as long as 4 ranks as 2x2 nvshmem, 2.00 would be linear: "
        "not above linear",
    ]
    nothing = _start(2, 0.0) | {"phases_ms": [{"memory": 0.0}], "unavailable": "no CUDA device"}
    assert setup_time.growth([nothing, nothing | {"num_ranks": 4}]) == ["nothing was set up: no CUDA device"]


def test_every_number_of_ranks_and_nodes_starts_afresh(monkeypatch, tmp_path, capsys):
    """A failure ends the starts of its own column, and is the status."""
    started = []

    def measured(plan, how):
        per_node = plan.ranks_per_node[0] if plan.ranks_per_node else None
        started.append((how.ranks, per_node, plan.transports))
        if (how.ranks, per_node) == (4, None):
            return {}, 7
        return _start(how.ranks, 10.0 * how.ranks + len(started), per_node=per_node), 0

    monkeypatch.setattr(bench, "_measured", measured)
    words = "--ranks 2,4 --platform cpu --setup 2 --ranks-per-node 1,2 --transport nvshmem --json"
    assert bench.main([*words.split(), str(tmp_path / "s.json")]) == 7
    several = [(4, 1), (4, 1), (4, 2), (4, 2)]
    assert started == [
        *((2, None, ("auto",)) for _ in range(2)),
        *((2, 1, ("nvshmem",)) for _ in range(2)),
        (4, None, ("auto",)),
        *((*nodes, ("nvshmem",)) for nodes in several),
    ]
    content = json.loads((tmp_path / "s.json").read_text())["setup"]
    assert [len(column["starts"]) for column in content] == [2, 2, 2, 2]
    assert content[0]["median"] == content[0]["starts"][0]
    text = capsys.readouterr().out
    assert "4 ranks as 4x1 nvshmem take" in text and text.count("ranks as") == 6 + 2
    with pytest.raises(SystemExit, match="no table of times"):
        bench.main(["--plot", str(tmp_path / "s.json"), "--png", str(tmp_path / "s.png")])


@pytest.mark.parametrize("words", ["--setup", "--setup 0 --ranks 2", "--setup --ranks 2 --first-call 1"])
def test_what_does_not_go_with_it(words, capsys):
    with pytest.raises(SystemExit):
        bench.main(words.split())
    assert "--setup" in capsys.readouterr().err


@pytest.mark.multiprocess
def test_setup_command(tmp_path):
    done = _jax_ep(
        *("bench", "--ranks", "2", "--platform", "cpu", "--workload", "small", "--layout", "token", "--setup", "1"),
        *("--ranks-per-node", "1", "--json", str(tmp_path / "s.json")),
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    one, two = json.loads((tmp_path / "s.json").read_text())["setup"]
    for column, per_node in ((one, None), (two, 1)):
        (start,) = column["starts"]
        assert start["ranks_per_node"] == per_node and len(start["phases_ms"]) == 2
        assert {"memory", "kernels", "peers", "records", "nvshmem", "nvshmem_init"} <= set(start["phases_ms"][0])
        assert start["compile_ms"] > 0 and start["compile_again_ms"] > 0
    assert "nothing was set up" in done.stdout and "2x1" in done.stdout
