"""examples/decode.py and overlap.py in short form, on CUDA devices; one process per rank.

What they check themselves ends them with an error: a compilation after the warm-up, a schedule that XLA did not keep,
results of overlapped layers that are not those of the others.
"""

import pathlib
import re
import sys

import jax
import pytest
import ranks

import jax_ep

sys.path.insert(0, str(pathlib.Path(__file__).parents[2] / "examples"))

DECODE = "--layers 1 --requests 8 --new-tokens 12 --prompt 8 --batches 1,4"
OVERLAP = "--tokens 512 --layers 2 --repeats 10"


@pytest.fixture
def run(request, capsys):
    """`run(module, options)`: its `main`, what that returned, what it printed, and how many of our calls it made."""
    implementation = request.config.getoption("--implementation")

    def start(module, options):
        before = jax_ep.debug.stats()["calls"]
        result = module.main([*options.split(), "--implementation", implementation])
        jax_ep.check()
        calls = jax_ep.debug.stats()["calls"] - before
        assert (calls > 0) == (implementation == "cuda")
        ranks.barrier()
        text = capsys.readouterr().out
        with capsys.disabled():
            print(text)
        return result, text, calls

    return start


def test_decode_in_both_modes(run):
    """The same text: both modes give the same bits, though XLA might round what is around them another way."""
    import decode

    drawn = {}
    for mode in ("latency", "throughput"):
        reports, text, _ = run(decode, f"{DECODE} --mode {mode}")
        (report,) = reports.values()
        assert len(report.sizes) == 2 and sum(report.sizes.values()) == len(report.step_ms)
        drawn[mode] = {r.number: r.drawn for r in report.requests if r.drawn}
        assert sum(ranks.exchange(len(drawn[mode]))) == 8
        assert all(6 <= len(tokens) <= 12 for tokens in drawn[mode].values())
        assert jax.process_index() > 0 or ("0 compiled after that" in text and "request 0:" in text)
    same = [drawn["latency"][number] == tokens for number, tokens in drawn["throughput"].items()]
    assert 2 * sum(same) >= len(same), drawn


def test_overlap(run, request):
    import overlap

    _, text, _ = run(overlap, OVERLAP)
    if jax.process_index() == 0:
        assert float(re.search(r"results differ by (\S+) at most", text)[1]) < 0.1
        is_cuda = request.config.getoption("--implementation") == "cuda"
        assert ("dispatch_start gemm gemm dispatch_done" in text) == is_cuda
        assert bool(re.search(r"overlapped: \S+ times as fast", text)) == is_cuda
