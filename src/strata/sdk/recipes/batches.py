"""Chooses the examples of each step and the held-out ones by seed, and computes total steps, the interval of saves (10
in a run) and the learning rate.
"""

from __future__ import annotations

import hashlib
import math
from functools import lru_cache
from typing import Final

from strata.base.errors import Code, StrataError
from strata.sdk.recipes.recipe import RecipeTraining
from strata.train.core.model_options import Schedule

SEEDS: Final = 2**31
SAVES: Final = 10
"""States that a run saves unless the recipe says how often."""


def derive_seed(*parts: int | str) -> int:
    """A seed that follows from these values, the same on every machine."""
    return int.from_bytes(_digest(*parts)[:8], "big") % SEEDS


def batch_at(step: int, count: int, train: RecipeTraining) -> list[int]:
    """The examples of a step: one shuffled pass over all of them after the other."""
    first = step * train.batch_size
    return [_shuffled(train.seed, at // count, count)[at % count] for at in range(first, first + train.batch_size)]


def held_out(count: int, share: float, seed: int) -> tuple[list[int], list[int]]:
    """The examples to train on, and those to evaluate with, in the order of the data."""
    number = max(1, round(count * share))
    if number >= count:
        raise StrataError(Code.INVALID, f"{count} rows are too few to hold out a share of {share:g}")
    chosen = set(_shuffled(seed, -1, count)[:number])
    return [each for each in range(count) if each not in chosen], sorted(chosen)


def total_steps(count: int, train: RecipeTraining) -> int:
    if train.steps is not None:
        return train.steps
    return max(1, math.ceil((train.epochs or 1.0) * count / train.batch_size))


def save_interval(steps: int, train: RecipeTraining) -> int:
    return train.save_every or max(1, steps // SAVES)


def learning_rate(step: int, steps: int, train: RecipeTraining) -> float:
    """Returns that of the step after `step` others. The first one after the warm-up has the full rate, and the last one
    trains too."""
    at = step + 1 if step < train.warmup_steps else step
    return train.learning_rate * Schedule(train.schedule, train.warmup_steps, steps).factor(at)


@lru_cache(maxsize=4)
def _shuffled(seed: int, data_epoch: int, count: int) -> tuple[int, ...]:
    return tuple(sorted(range(count), key=lambda each: _digest("order", seed, data_epoch, each)))


def _digest(*parts: int | str) -> bytes:
    return hashlib.sha256("/".join(map(str, parts)).encode()).digest()
