"""Tables of what kernels noted about their phases: `Loopback.stamps()` of a build with -DJAX_EP_STAMPS=ON.

A stamp says what has just ended in a block: (phase, number, ns, clock), where `number` is that of the round, or the
KiB of a put; `ns` is a clock that all blocks share, in coarse steps, and `clock` counts the cycles of the block's own
SM. So times within a block are cycles, at the rate that both clocks show over all blocks together, and times between
blocks are ns.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

BEGIN = "begin"
BY_PUT = ("look with finds", "put done")  # as often as there was work, in a carrier


@dataclass(frozen=True)
class Block:
    """One block in one call: (phase, number, us since its begin), in the order of time; `begun` in us since the
    call's first block began."""

    rank: int
    is_carrier: bool
    dropped: int
    begun: float
    stamps: tuple[tuple[str, int, float], ...]


def blocks_of(ranks: Sequence) -> list[Block]:
    """Of one call: `Loopback.stamps()`."""
    taken = [(rank, block) for rank, blocks in enumerate(ranks) for block in blocks if block["stamps"]]
    spans = [(block["stamps"][0], block["stamps"][-1]) for _, block in taken]
    cycles = sum((last[3] - first[3]) % 2**32 for first, last in spans)  # only a clock's low word is noted
    ns = sum(last[2] - first[2] for first, last in spans)
    per_us = 1e3 * cycles / ns if ns else 1e3
    start = min((block["stamps"][0][2] for _, block in taken if not block["is_carrier"]), default=0)
    blocks = []
    for rank, block in taken:
        first = block["stamps"][0]
        since = [(phase, number, (clock - first[3]) % 2**32 / per_us) for phase, number, _, clock in block["stamps"]]
        since.sort(key=lambda stamp: stamp[2])  # warps of a carrier note side by side
        blocks.append(Block(rank, block["is_carrier"], block["dropped"], (first[2] - start) / 1e3, tuple(since)))
    return blocks


def _rounds(blocks: Sequence[Block]) -> list[str]:
    """Phases that a block passes in several rounds, in the order in which they first come."""
    seen: dict[str, int] = {}
    for block in blocks:
        numbers = defaultdict(set)
        for phase, number, _ in block.stamps:
            numbers[phase].add(number)
        for phase, several in numbers.items():
            seen[phase] = max(seen.get(phase, 0), len(several))
    return [phase for phase, several in seen.items() if several > 1]


def phase_lines(blocks: Sequence[Block]) -> Iterator[str]:
    """Per phase: how many stamps; least, median and most of the time since the block's begin; the median of rank 0
    alone, which in some routings is the only one with rows."""
    times: dict[str, list[tuple[int, float]]] = defaultdict(list)
    for block in blocks:
        for phase, _, us in block.stamps:
            times[phase].append((block.rank, us))
    for phase in (BEGIN, *_rounds(blocks)):
        times.pop(phase, None)
    yield f"    {'us since the begin':<20}{'stamps':>7}{'least':>9}{'median':>9}{'most':>9}{'rank 0':>9}"
    lines = []
    for phase, stamps in times.items():
        every, of_first = [us for _, us in stamps], [us for rank, us in stamps if rank == 0]
        median = statistics.median(every)
        text = f"    {phase:<20}{len(every):>7}{min(every):>9.1f}{median:>9.1f}{max(every):>9.1f}"
        lines.append((median, text + (f"{statistics.median(of_first):>9.1f}" if of_first else f"{'-':>9}")))
    for _, text in sorted(lines, key=lambda line: line[0]):
        yield text


def round_lines(blocks: Sequence[Block]) -> Iterator[str]:
    """Per phase of rounds: us since the block's stamp before, summed within a round, as a mean over the blocks that
    have the round; of each round, their mean, and what all rounds take together."""
    phases = _rounds(blocks)
    if not phases:
        return
    cells = defaultdict(list)  # (phase, round) -> us of each block
    for block in blocks:
        of_block: dict[tuple[str, int], float] = defaultdict(float)
        for (_, _, before), (phase, number, us) in pairwise(block.stamps):
            if phase in phases:
                of_block[phase, number] += us - before
        for key, us in of_block.items():
            cells[key].append(us)
    rounds = sorted({number for _, number in cells})
    yield f"    {'us of a round':<20}{'all':>9}{'mean':>9}" + "".join(f"{number:>7}" for number in rounds)
    for phase in phases:
        means = {number: statistics.fmean(cells[phase, number]) for number in rounds if (phase, number) in cells}
        each = "".join(f"{means[number]:>7.1f}" if number in means else f"{'-':>7}" for number in rounds)
        yield f"    {phase:<20}{sum(means.values()):>9.1f}{statistics.fmean(means.values()):>9.2f}{each}"


def carrier_lines(carriers: Sequence[Block]) -> Iterator[str]:
    """Per kind of a carrier's work: how often in a block, when first and last (us since the block's begin, medians),
    mean us between two; KiB of its puts."""
    yield f"    {'of a carrier block':<20}{'times':>7}{'first':>9}{'last':>9}{'between':>9}{'KiB':>9}"
    begun = statistics.median(block.begun for block in carriers)
    yield f"    {'begin, of the call':<27}{begun:>9.1f}"
    for phase in BY_PUT:
        found = [[(us, number) for name, number, us in block.stamps if name == phase] for block in carriers]
        found = [stamps for stamps in found if stamps]
        if not found:
            continue
        gaps = [(stamps[-1][0] - stamps[0][0]) / (len(stamps) - 1) for stamps in found if len(stamps) > 1]
        times = sum(map(len, found)) / len(carriers)
        first, last = (statistics.median(stamps[at][0] for stamps in found) for at in (0, -1))
        between = f"{statistics.fmean(gaps):>9.2f}" if gaps else f"{'-':>9}"
        kib = sum(number for stamps in found for _, number in stamps) / len(carriers)
        yield f"    {phase:<20}{times:>7.1f}{first:>9.1f}{last:>9.1f}{between}" + (f"{kib:>9.0f}" if kib else "")
    ends = [us for block in carriers for phase, _, us in block.stamps if phase == "end"]
    if ends:
        yield f"    {'end':<20}{len(ends) / len(carriers):>7.1f}{'':>9}{statistics.median(ends):>9.1f}"


def lines(op: str, calls: Sequence) -> Iterator[str]:
    """What is printed of an operation. `calls`: `Loopback.stamps()` after each of several calls."""
    taken = [blocks_of(ranks) for ranks in calls]
    blocks = [block for call in taken for block in call]
    of_call, carriers = ([block for block in blocks if block.is_carrier == kind] for kind in (False, True))
    if not of_call:
        yield f"  {op}: no block has noted anything"
        return
    spread = statistics.median(max(b.begun for b in call if not b.is_carrier) for call in taken if call)
    num_ranks = len({block.rank for block in of_call})
    each = len(of_call) / len(calls) / num_ranks
    yield (
        f"  {op}: {num_ranks} ranks with {each:.0f} blocks, {len(calls)} calls; "
        f"the last block begins {spread:.1f} us after the first"
    )
    yield from phase_lines(of_call)
    yield from round_lines(of_call)
    if carriers:
        yield from carrier_lines(carriers)
    dropped = sum(block.dropped for block in blocks)
    if dropped:
        yield f"    {dropped} stamps found no room: the last ones of a block are missing"
