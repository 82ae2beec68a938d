"""What kernels note about their phases, as tests/gpu/time_kernels.py --stamps prints it: tables of made-up stamps, and
the header that names the phases. Nothing is run on a GPU here."""

import pathlib
import re

import pytest

ROOT = pathlib.Path(__file__).parent.parent
GPU = ROOT / "tests" / "gpu"
CYCLES = 2000  # of a us, in what is made up here


@pytest.fixture
def scripts(gpu_scripts):
    return gpu_scripts("stamps", "time_kernels")


def noted(begin_us, *stamps, first_clock=0, is_carrier=False, dropped=0, block=0):
    """As Loopback.stamps() has a block: (phase, number, us since its begin), the shared clock in steps of a us."""
    all_stamps = [
        (phase, number, (begin_us + int(us)) * 1000, (first_clock + round(us * CYCLES)) % 2**32)
        for phase, number, us in [("begin", 0, 0), *stamps]
    ]
    return {"block": block, "is_carrier": is_carrier, "dropped": dropped, "stamps": all_stamps}


def table(lines):
    """Words of each line behind its first 24 columns, by what stands in those."""
    return {line[:24].strip(): line[24:].split() for line in lines}


def test_phases_are_medians_over_blocks_and_ranks(scripts):
    """Of all ranks and blocks together; a clock whose low word wraps; the leader's phases have fewer stamps."""
    stamps, _ = scripts
    ends = ("announced", 0, 4.0), ("end", 0, 10.0)
    ranks = [
        [noted(100, ("rows", 0, 2.0), *ends), noted(101, ("rows", 0, 3.0), ("end", 0, 10.0), first_clock=2**32 - 5000)],
        [noted(103, ("rows", 0, 2.5), *ends), noted(107, ("rows", 0, 8.25), ("end", 0, 12.0), first_clock=777)],
    ]
    first, *lines = stamps.lines("dispatch", [ranks])
    assert "2 ranks with 2 blocks, 1 calls" in first and "begins 7.0 us after the first" in first
    assert table(lines) == {
        "us since the begin": ["stamps", "least", "median", "most", "rank", "0"],
        "announced": ["2", "4.0", "4.0", "4.0", "4.0"],
        "rows": ["4", "2.0", "2.8", "8.2", "2.5"],
        "end": ["4", "10.0", "10.0", "12.0", "10.0"],
    }
    assert [line.split()[0] for line in lines[1:]] == ["rows", "announced", "end"]  # by their medians
    assert table(stamps.lines("dispatch", [[[], ranks[1]]]))["rows"][-1] == "-"  # nothing of rank 0
    # A rank that notes nothing (past the 16th) is left out; so is a build's call of which nothing is known.
    assert "2 ranks with 2 blocks" in next(iter(stamps.lines("dispatch", [[*ranks, []]])))
    assert list(stamps.lines("again", [[[], []]])) == ["  again: no block has noted anything"]


def test_the_rate_of_the_clock_is_that_of_all_blocks(scripts):
    """The shared clock moves in steps as long as a phase: one block alone would say anything."""
    stamps, _ = scripts
    ranks = [[noted(10 * i, ("end", 0, 4.5 + (i % 2) * 1e-9)) for i in range(8)]]
    for i, block in enumerate(ranks[0]):  # half of the blocks see one step more
        phase, number, ns, clock = block["stamps"][1]
        block["stamps"][1] = (phase, number, ns + 1000 * (i % 2), clock)
    assert {block.stamps[-1] for block in stamps.blocks_of(ranks)} == {("end", 0, 4.5)}


def test_rounds_are_means_since_the_stamp_before(scripts):
    """Per round and phase; what comes twice in a round counts together; a phase of one round is like any other."""
    stamps, _ = scripts
    blocks = [
        noted(0, ("asked", 0, 1.0), ("answered", 0, 3.0), ("answered", 0, 4.0), ("asked", 1, 5.0), ("answered", 1, 9.0),
              ("end", 0, 10.0)),
        noted(0, ("asked", 0, 2.0), ("answered", 0, 3.0), ("answered", 0, 7.0), ("asked", 1, 8.0), ("end", 0, 10.0)),
    ]  # fmt: skip
    got = table(stamps.lines("combine", [[blocks]]))
    assert got["us of a round"] == ["all", "mean", "0", "1"]
    assert got["asked"] == ["2.5", "1.25", "1.5", "1.0"]
    assert got["answered"] == ["8.0", "4.00", "4.0", "4.0"]  # 3 and 5, then 4 of the only block that had it
    assert got["end"] == ["2", "10.0", "10.0", "10.0", "10.0"]
    one_round = table(stamps.lines("combine", [[[noted(0, ("asked", 0, 1.0), ("end", 0, 2.0))]]]))
    assert "us of a round" not in one_round and one_round["asked"] == ["1", "1.0", "1.0", "1.0", "1.0"]


def test_a_carrier_has_a_table_of_its_own(scripts):
    stamps, _ = scripts
    puts = [("look with finds", 0, 1.0), ("put done", 64, 3.0), ("put done", 32, 9.0), ("put done", 1, 4.0)]
    ranks = [[noted(0, ("end", 0, 20.0)), noted(5, *puts, ("end", 0, 21.0), is_carrier=True, dropped=3)]]
    lines = list(stamps.lines("combine", [ranks]))
    assert "1 ranks with 1 blocks" in lines[0]
    got = table(lines)
    assert got["begin, of the call"] == ["5.0"]
    assert got["look with finds"] == ["1.0", "1.0", "1.0", "-"]
    assert got["put done"] == ["3.0", "3.0", "9.0", "3.00", "97"]  # in the order of time, whoever noted first
    assert lines[-1].split()[:5] == ["3", "stamps", "found", "no", "room:"]


def test_time_kernels_prints_them(scripts, capsys):
    """Of the last call of each run of each operation; without a build that has them it says how to get one."""
    _, time_kernels = scripts
    done = []

    class Kernels:
        has_stamps = True

        def __init__(self, **shape):
            self.is_running = False

        def bytes(self, name):
            return 0

        def write(self, name, rank, data):
            pass

        def launch(self, op):
            self.op = op

        def time(self, op, calls):
            self.op, self.is_running = op, True
            return 8.0

        def synchronize(self):
            self.is_running = False

        def stamps(self):
            assert not self.is_running
            done.append(self.op)
            return [[noted(0, (self.op, 0, 4.0))]]

        def failure(self, rank):
            return {"code": 0}

    words = "--on 1x4 --tokens 64 --layout token --repeats 2 --ops dispatch,combine".split()
    time_kernels.main(words, Kernels)
    assert done == [] and "stamps" not in capsys.readouterr().out
    time_kernels.main([*words, "--stamps"], Kernels)
    out = capsys.readouterr().out.splitlines()
    assert done == ["dispatch"] * 2 + ["combine"] * 2
    assert [line.split()[0] for line in out[2:]] == ["dispatch:", "us", "dispatch", "combine:", "us", "combine"]
    assert out[4].split()[1:] == ["2", "4.0", "4.0", "4.0", "4.0"]
    Kernels.has_stamps = False
    with pytest.raises(SystemExit, match="cmake -DJAX_EP_CUDA=on -DJAX_EP_STAMPS=ON"):
        time_kernels.main([*words, "--stamps"], Kernels)


def test_every_phase_is_named_and_stamped(scripts):
    """The header has all names; a phase that no kernel stamps, or one without a name, would be a mistake."""
    stamps, _ = scripts
    header = (ROOT / "cuda" / "device" / "stamps.cuh").read_text()
    names = dict(re.findall(r'case Stamp::(k\w+): return "(.*)";', header))
    listed = re.sub(r"//.*", "", re.search(r"enum class Stamp[^{]*{(.*?)};", header, re.DOTALL).group(1))
    assert sorted(names) == sorted(re.findall(r"k\w+", listed)) and len(set(names.values())) == len(names)
    sources = [path for path in sorted((ROOT / "cuda").rglob("*.cu*")) if path.name != "stamps.cuh"]
    used = {name for path in sources for name in re.findall(r"JAX_EP_STAMP(?:_ROUND|_LANE)?\((k\w+)", path.read_text())}
    assert used | {"kBegin"} == set(names)
    assert {stamps.BEGIN, *stamps.BY_PUT} <= set(names.values())
    for path in sources:  # which begin where they are launched
        kernels = len(
            re.findall(r"^\s*(?:template.*\n)?__global__ void __launch_bounds__", path.read_text(), re.MULTILINE)
        )
        begun = path.read_text().count("JAX_EP_STAMP_BEGIN(")
        assert begun == kernels or path.name in ("test_carrier.cu", "carrier.cu"), path  # carrier.cuh begins theirs
