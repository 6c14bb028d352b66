"""Geometry of bars on a line: lanes over time, and parts of a whole (goodput)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from strata.web.render import duration

WIDTH: Final = 1000.0
"""The width of a line, in its own units."""


@dataclass(frozen=True)
class Bar:
    name: str
    """What it shows, for its colour."""
    x: float
    width: float
    words: str


def stack_bars(parts: Sequence[tuple[str, float, str]]) -> list[Bar]:
    """Parts side by side, each with its share of the line: their names, values and words."""
    total = sum(value for _, value, _ in parts)
    bars, x = [], 0.0
    for name, value, words in parts:
        width = value / total * WIDTH if total else 0.0
        if width:
            bars.append(Bar(name, x, width, words))
        x += width
    return bars


def goodput_bars(seconds: Iterable[tuple[str, float]]) -> list[Bar]:
    """Returns where the time went, as parts of one bar."""
    return stack_bars([(part, each_s, f"{part.replace('_', ' ')} {duration(each_s)}") for part, each_s in seconds])
