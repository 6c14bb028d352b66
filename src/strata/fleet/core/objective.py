"""Chooses the metric that tells the better run, and whether lower or higher is better, by the words of its name, for
sweeps and artifacts that declare none.

A sweep that searches declares its objective. For all others the metric is chosen among those that most runs report, by
the words of its name: a validation figure before a training figure, a known figure before an unknown one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

import msgspec

from strata.fleet.core.search import Direction

_HELD_OUT: Final = frozenset({"val", "valid", "validation", "eval", "evaluation", "test", "dev", "heldout"})
_LOWER: Final = frozenset(
    {"loss", "error", "err", "perplexity", "ppl", "mae", "mse", "rmse", "mape", "nll", "bpb", "wer", "cer", "kl"}
    | {"regret", "cost", "latency", "crossentropy", "entropy", "brier", "fid"}
)
_HIGHER: Final = frozenset(
    {"accuracy", "acc", "reward", "score", "f1", "auc", "auroc", "bleu", "rouge", "r2", "map", "precision", "recall"}
    | {"return", "win", "pass", "iou", "dice", "ndcg", "mrr"}
)


class MetricObjective(msgspec.Struct, frozen=True):
    metric: str
    direction: Direction
    declared: bool = False
    """False: the hub has chosen it among the metrics that there are."""

    def better(self, one: float, other: float) -> bool:
        return one < other if self.direction == "minimize" else one > other


def direction_of(metric: str) -> Direction:
    """Chooses the better direction by the words of the name; more is better where they do not tell."""
    return "minimize" if _words(metric) & _LOWER else "maximize"


def choose_objective(reported: Iterable[Mapping[str, float]]) -> MetricObjective | None:
    """The metric that matters among those that at least half as many runs report as report the most frequent one."""
    counts = Counter(name for values in reported for name in values)
    if not counts:
        return None
    most = max(counts.values())
    candidates = [name for name, count in counts.items() if 2 * count >= most]
    chosen = min(candidates, key=_rank)
    return MetricObjective(chosen, direction_of(chosen))


def best_index(objective: MetricObjective, reported: Sequence[Mapping[str, float]]) -> int | None:
    """The position of the best run; the first of equal ones. None if no run has the metric."""
    best: int | None = None
    for index, values in enumerate(reported):
        value = values.get(objective.metric)
        if value is not None and (best is None or objective.better(value, reported[best][objective.metric])):
            best = index
    return best


def flatten(hyper: Mapping[str, Any]) -> dict[str, Any]:
    """Parameters by name, with dots where one is inside a table: as the axes of a sweep are written."""
    flat: dict[str, Any] = {}
    for name, value in hyper.items():
        if isinstance(value, dict):
            flat |= {f"{name}.{inner}": each for inner, each in flatten(value).items()}
        else:
            flat[name] = value
    return flat


def varied_names(points: Sequence[Mapping[str, Any]]) -> tuple[str, ...]:
    """The parameters in which the points differ, in the order in which they are first seen."""
    names = dict.fromkeys(name for point in points for name in point)
    first = points[0] if points else {}
    return tuple(name for name in names if any(_differs(point, first, name) for point in points))


def _differs(one: Mapping[str, Any], other: Mapping[str, Any], name: str) -> bool:
    # By type as well: in Python 1, 1.0 and True are equal.
    here, there = one.get(name), other.get(name)
    return name not in one or name not in other or type(here) is not type(there) or here != there


def _rank(metric: str) -> tuple[bool, bool, str]:
    words = _words(metric)
    return not words & (_LOWER | _HIGHER), not words & _HELD_OUT, metric


def _words(metric: str) -> frozenset[str]:
    return frozenset("".join(each if each.isalnum() else " " for each in metric.lower()).split())
