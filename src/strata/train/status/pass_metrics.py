"""Combines metrics of datums and passes by the suffix of their name (`:sum`, `:mean`, `:max` …), and names the counted
ones.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

TOKENS: Final = "tokens:sum"
"""The tokens with a weight: a mean is over them, unless `COUNTED` says otherwise."""
SAMPLED: Final = "sampled_tokens:sum"
"""The tokens with a weight and an advantage. Others, as those of a prompt, have no log probability of a sampler."""
COUNTED: Final = {
    "ratio:mean": SAMPLED,
    "sampler_gap:sum": SAMPLED,
    "sampler_kl:sum": SAMPLED,
    "same_weights_gap:sum": "same_weights_tokens:sum",
}
"""The metrics that are means of, or sums over, other tokens than those with a weight."""

CUSTOM: Final = "custom/"
"""Metrics of a client's own loss: a mean is over its groups."""


def combine_metrics(parts: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Combines in the order of the parts, so that rows and ranks make no difference."""
    names = dict.fromkeys(name for each in parts for name in each)
    return {name: _reduce(name, [each for each in parts if name in each]) for name in names}


def _reduce(name: str, parts: Sequence[Mapping[str, float]]) -> float:
    values = [each[name] for each in parts]
    match name.rpartition(":")[2]:
        case "sum":
            return sum(values)
        case "min":
            return min(values)
        case "max":
            return max(values)
        case _ if name.startswith(CUSTOM):
            return sum(values) / len(values)
        case _:
            return _weighted_mean(values, [each.get(COUNTED.get(name, TOKENS), 0.0) for each in parts])


def _weighted_mean(values: Sequence[float], weights: Sequence[float]) -> float:
    total = sum(weights)
    if not total:
        return sum(values) / len(values)
    return sum(value * weight for value, weight in zip(values, weights, strict=True)) / total
