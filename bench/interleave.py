"""Two sides measured turn by turn, so that what disturbs the machine meanwhile disturbs both.

The order is A B B A: a drift over time (a cache that warms up, a table that grows) favours neither side. What counts is
the median of the ratios of neighbours, not the ratio of two averages taken at different times.
"""

from __future__ import annotations

import gc
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass
from statistics import median, quantiles
from typing import Literal

Side = Literal["ours", "bare"]
Better = Literal["higher", "lower"]
Measure = Callable[[], Awaitable[float]]
"""Runs one side once and returns its figure, a rate or a duration: it knows what of the time counts."""


@dataclass(frozen=True)
class Comparison:
    """The figures of both sides, pair by pair."""

    ours: Sequence[float]
    bare: Sequence[float]
    better: Better = "higher"
    """Whether a higher figure is the better one, as of a rate, or a lower one, as of a latency."""

    @property
    def ratios(self) -> list[float]:
        """Of each pair, how good we are against the bare engine: above 1 is better, whatever the unit."""
        pairs = zip(self.ours, self.bare, strict=True)
        return [ours / bare if self.better == "higher" else bare / ours for ours, bare in pairs]

    @property
    def ratio(self) -> float:
        return median(self.ratios)

    @property
    def ours_more(self) -> float:
        """By how much our figure is above the bare one, in their unit."""
        return median(ours - bare for ours, bare in zip(self.ours, self.bare, strict=True))

    @property
    def spread(self) -> tuple[float, float]:
        """Between which ratios the middle half of the pairs lies."""
        ratios = self.ratios
        if len(ratios) == 1:
            return ratios[0], ratios[0]
        low, _, high = quantiles(ratios, n=4, method="inclusive")
        return low, high


def turns(rounds: int) -> Iterator[Side]:
    """A B, B A, A B, …: each round has both sides, and each goes first as often as the other."""
    for number in range(rounds):
        yield from ("ours", "bare") if number % 2 == 0 else ("bare", "ours")


async def interleave(
    ours: Measure, bare: Measure, rounds: int, *, better: Better = "higher", warm_up: bool = True
) -> Comparison:
    sides: dict[Side, Measure] = {"ours": ours, "bare": bare}
    figures: dict[Side, list[float]] = {"ours": [], "bare": []}
    if warm_up:
        for side in turns(1):
            await sides[side]()
    for side in turns(rounds):
        # What one side left behind is not collected in the other's time.
        gc.collect()
        figures[side].append(await sides[side]())
    return Comparison(figures["ours"], figures["bare"], better)
