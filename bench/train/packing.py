"""Packing efficiency: the share of the tokens that the ranks compute which belong to a request.

Lengths are drawn, with a fixed seed, from the histogram of Wikipedia as BERT was pretrained on it, published with
"Efficient Sequence Packing without Cross-contamination" (Krell et al., arXiv:2107.02027): 16.3 million sequences of 5
to 512 tokens, 256 on average, almost a quarter of them cut off at 512. Here it is in steps of 32 tokens.

`packing` has rows of 512 tokens as in that publication, so that many datums fill a row alone and few fit next to them;
`packing.batch` has the default rows of a server, and a batch that is small for so many ranks. What is counted is the
time of the ranks: they synchronise in every row, so each waits for the longest row of all ranks.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from itertools import chain
from time import perf_counter
from typing import Final

from bench.interleave import Comparison
from bench.percentiles import percentile
from bench.report import Report
from strata.train.core.commands import Row
from strata.train.core.pack import pack
from strata.train.plan.device_values import DeviceValues

SEED: Final = 0
STEP: Final = 32
LONGEST: Final = 512
THOUSANDS: Final = (585, 2278, 1853, 1297, 1014, 841, 720, 629, 554, 496, 450, 410, 375, 347, 321, 292)
"""Sequences of 1 … 32 tokens, of 33 … 64, and so on; those of 512 apart."""
THOUSANDS_LONGEST: Final = 3815
RANKS: Final = 8
GOAL: Final = 0.97
CASES: Final = (("packing", LONGEST, 1024), ("packing.batch", DeviceValues().max_tokens_per_row, 64))
"""Name, tokens of a row, datums of a batch. 1024 is the largest batch that the `tinker` SDK sends in one piece."""


def lengths(chance: random.Random, count: int) -> list[int]:
    steps = chance.choices(range(len(THOUSANDS) + 1), (*THOUSANDS, THOUSANDS_LONGEST), k=count)
    return [
        LONGEST if step == len(THOUSANDS) else min(STEP * step + chance.randint(1, STEP), LONGEST - 1) for step in steps
    ]


def spent(rows: Sequence[Sequence[Row]], batch: Sequence[int]) -> int:
    """Tokens that the ranks could have computed in the time of these rows. Every datum must be in one of them."""
    places = [(segment.item, segment.datum) for row in chain.from_iterable(rows) for segment in row]
    assert sorted(places) == [(0, datum) for datum in range(len(batch))]
    together = zip(*rows, strict=True)
    return sum(len(rows) * max(sum(batch[segment.datum] for segment in row) for row in beside) for beside in together)


def run(report: Report, *, batches: int) -> None:
    for case, row_tokens, datums in CASES:
        chance = random.Random(SEED)
        ours, bound, seconds = [], [], 0.0
        for _ in range(batches):
            batch = lengths(chance, datums)
            started = perf_counter()
            packed = pack([batch], ranks=RANKS, max_tokens_per_row=row_tokens, max_context=row_tokens)
            seconds += perf_counter() - started
            ours.append(float(spent(packed.rows, batch)))
            bound.append(float(sum(batch)))
        found = Comparison(ours, bound, "lower")
        worst = percentile(found.ratios, 1)
        note = f"{datums} datums, rows of {row_tokens}, {RANKS} ranks; p1 {worst:.3f}; {seconds / batches * 1e3:.1f} ms"
        report.add(case, "token slots", found, goal=GOAL, note=note)
