"""Percentiles by nearest rank: always a value that was measured, also of few values and in the tail."""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil


def percentile(values: Sequence[float], percent: float) -> float:
    """The smallest value that at least so many percent of all do not exceed."""
    if not values:
        raise ValueError("there is no percentile of nothing")
    return sorted(values)[max(0, ceil(len(values) * percent / 100) - 1)]
