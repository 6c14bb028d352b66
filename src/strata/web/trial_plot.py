"""Geometry of the plot of trials in a sweep: sizes, axis ticks, best line."""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil, floor, log10
from typing import Final, NamedTuple

from strata.fleet.core.search import Direction
from strata.fleet.wire.sweeps import SweepTrial

WIDTH: Final = 1120
HEIGHT: Final = 260
LEFT: Final = 64
RIGHT: Final = 12
TOP: Final = 12
BOTTOM: Final = 28
SMALLEST_STEP: Final = 1e-12
"""Ticks are rounded to as many digits."""


class TrialMark(NamedTuple):
    x: float
    y: float
    trial: SweepTrial
    value: float
    kind: str
    """`completed`, `pruned`, `running` or `failed`."""


class AxisTick(NamedTuple):
    at: float
    text: str


class TrialPlot(NamedTuple):
    marks: Sequence[TrialMark]
    best: str
    """The points of the line of the best so far."""
    x_ticks: Sequence[AxisTick]
    y_ticks: Sequence[AxisTick]
    width: int = WIDTH
    height: int = HEIGHT
    left: int = LEFT
    right: int = WIDTH - RIGHT
    top: int = TOP
    bottom: int = HEIGHT - BOTTOM


def plot_trials(trials: Sequence[SweepTrial], metric: str, direction: Direction) -> TrialPlot | None:
    """None if no trial has the metric."""
    values = [(number, trial, trial.metrics[metric]) for number, trial in enumerate(trials) if metric in trial.metrics]
    if not values:
        return None
    low, high = min(value for *_, value in values), max(value for *_, value in values)
    ticks = nice_ticks(low, high)
    low, high = min(low, ticks[0]), max(high, ticks[-1])
    last = max(1, len(trials) - 1)

    def place_x(number: float) -> float:
        return round(LEFT + 8 + (WIDTH - LEFT - RIGHT - 16) * number / last, 1)

    def place_y(value: float) -> float:
        share = (value - low) / (high - low) if high > low else 0.5
        return round(HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * share, 1)

    marks = [
        TrialMark(place_x(number), place_y(value), trial, value, mark_kind(trial)) for number, trial, value in values
    ]
    return TrialPlot(
        marks=marks,
        best=_best_line(marks, direction, place_x(last)),
        x_ticks=[AxisTick(place_x(number), str(number + 1)) for number in _numbers(len(trials))],
        y_ticks=[AxisTick(place_y(value), f"{value:.6g}") for value in ticks],
    )


def mark_kind(trial: SweepTrial) -> str:
    if trial.pruned:
        return "pruned"
    if trial.status in ("claimed", "running", "pending"):
        return "running"
    return "completed" if trial.status == "completed" else "failed"


def _best_line(marks: Sequence[TrialMark], direction: Direction, until: float) -> str:
    """Only completed trials count, as they do for the best of the sweep."""
    best: TrialMark | None = None
    points: list[str] = []
    for mark in marks:
        if mark.kind != "completed":
            continue
        if best is None or (mark.value < best.value if direction == "minimize" else mark.value > best.value):
            if best is not None:
                points.append(f"{mark.x:g},{best.y:g}")
            points.append(f"{mark.x:g},{mark.y:g}")
            best = mark
    if best is None:
        return ""
    return " ".join([*points, f"{until:g},{best.y:g}"])


def _numbers(count: int) -> list[int]:
    """Returns about six positions of the queue, from the first to the last."""
    step = max(1, ceil(count / 6))
    return list(range(0, count, step))


def nice_ticks(low: float, high: float, count: int = 4) -> list[float]:
    """Round numbers from `low` or below to `high` or above."""
    raw = (high - low) / count
    if not raw > SMALLEST_STEP:
        return [low]
    power = 10.0 ** floor(log10(raw))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= raw)
    first, last = floor(low / step), ceil(high / step)
    return [round(number * step, 12) for number in range(first, last + 1)]
