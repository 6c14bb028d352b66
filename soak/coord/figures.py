"""Measured times as people read them: the middle, the worst of a hundred, the worst."""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil


def percentile(values: Sequence[float], share: float) -> float:
    """The smallest value that at least this share of all do not exceed."""
    ordered = sorted(values)
    return ordered[max(0, ceil(share * len(ordered)) - 1)]


def spread_s(values: Sequence[float]) -> str:
    """Seconds: `p50 / p99 / max` and how many there were."""
    if not values:
        return "none"
    middle, worst = percentile(values, 0.5), percentile(values, 0.99)
    return f"{middle:.2f} / {worst:.2f} / {max(values):.2f} s (n={len(values)})"
