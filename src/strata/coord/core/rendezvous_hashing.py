"""The arithmetic of weighted rendezvous hashing in bulk: the cost of a bucket for a worker, and how free or surplus
buckets change hands by it. It has nothing of torchrun's rendezvous.

The rules of who may own how much are in `placement`; here is how free buckets find a worker with room, how a worker
sheds what is too much, and how it takes what it lacks.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, TypeAlias

import numpy as np
from numpy.typing import NDArray

from strata.base.digest import sha256_hex
from strata.coord.core.permutation import mix_all

GOLDEN: Final = np.uint64(0x9E3779B97F4A7C15)

_PAIRS_AT_ONCE: Final = 1 << 23
"""Costs held at once, 64 MiB. A larger placement goes by groups, so this number is part of its result."""
_PAIRS_IN_CACHE: Final = 1 << 15
_GROUP: Final = np.uint64(0xD1B54A32D192ED03)
"""Sets the keys of groups apart from those of workers and buckets."""
_LOG_2: Final = 0.6931471805599453
_LOG_TERMS: Final = (1 / 13, 1 / 11, 1 / 9, 1 / 7, 1 / 5, 1 / 3, 1.0)

Floats: TypeAlias = NDArray[np.float64]
Ints: TypeAlias = NDArray[np.int64]
Words: TypeAlias = NDArray[np.uint64]


class Draft:
    """An assignment in the making: `loads` counts what `owners` says, `_held_at` is what a bucket costs its owner."""

    def __init__(self, owners: Ints, members: Mapping[str, int]) -> None:
        self.owners = owners
        self.loads = np.bincount(owners[owners >= 0], minlength=len(members))
        self._bucket_keys = bucket_keys(len(owners))
        self._worker_keys = np.array([name_key(worker) for worker in members], np.uint64)
        self._weights = np.array(list(members.values()), np.float64)
        self._held_at = self._cost(np.arange(len(owners)), owners)

    def shed(self, cap: Ints) -> int:
        """Frees the costliest buckets of every worker that is over its cap; how many."""
        over = np.append(self.loads > cap, False)
        buckets = np.flatnonzero(over[self.owners])
        owners = self.owners[buckets]
        excess = buckets[_rank_within(owners, self._held_at[buckets]) >= cap[owners]]
        self._give(excess, np.full(len(excess), -1, np.int64))
        return len(excess)

    @staticmethod
    def is_large(buckets: Ints, workers: Ints) -> bool:
        """Says whether to look at every pair would take too long."""
        return len(buckets) * len(workers) > _PAIRS_AT_ONCE

    def grant(self, buckets: Ints, workers: Ints, limit: Ints) -> Ints:
        """Gives free buckets to workers that have room below their limit; what is left when none has."""
        workers = workers[self.loads[workers] < limit[workers]]
        if self.is_large(buckets, workers):
            return self._grant_by_groups(buckets, workers, limit)
        return self._grant_directly(buckets, workers, limit)

    def _grant_directly(self, buckets: Ints, workers: Ints, limit: Ints) -> Ints:
        if not len(workers):
            return buckets
        costs = self._costs(buckets, self._worker_keys[workers], self._weights[workers])
        chosen = _choose(costs, (limit - self.loads)[workers])
        granted = chosen >= 0
        self._give(buckets[granted], workers[chosen[granted]])
        return buckets[~granted]

    def _grant_by_groups(self, buckets: Ints, workers: Ints, limit: Ints) -> Ints:
        """First each bucket chooses a group, by the room and the weights in it, then a worker of that group."""
        count = 1 << (int(np.sqrt(len(workers))) - 1).bit_length()
        # By name: whichever others join or leave, a worker is in the same group as long as there are as many groups.
        group_of = (self._worker_keys[workers] % np.uint64(count)).astype(np.int64)
        room = np.bincount(group_of, (limit - self.loads)[workers], count).astype(np.int64)
        weights = np.bincount(group_of, self._weights[workers], count).astype(np.float64)
        groups = np.flatnonzero(room)
        chosen = _choose(self._costs(buckets, bucket_keys(count)[groups] ^ _GROUP, weights[groups]), room[groups])
        left = [buckets[chosen < 0]]
        for number, group in enumerate(groups):
            left.append(self._grant_directly(buckets[chosen == number], workers[group_of == group], limit))
        return np.concatenate(left)

    def take(self, worker: int, up_to: int, buckets: Ints, low: Ints) -> None:
        """Moves buckets of others to a worker, first where it beats the owner by most; no owner gives below its low."""
        spare = np.maximum(self.loads - low, 0)
        spare[worker] = 0
        buckets = buckets[spare[self.owners[buckets]] > 0]
        owners = self.owners[buckets]
        ratios = self._cost(buckets, np.full(len(buckets), worker)) / self._held_at[buckets]
        wanted = up_to - self.loads[worker]
        chosen: list[np.intp] = []
        for at in np.argsort(ratios, kind="stable"):
            if len(chosen) >= wanted:
                break
            if spare[owners[at]]:
                spare[owners[at]] -= 1
                chosen.append(at)
        best = buckets[chosen]
        self._give(best, np.full(len(best), worker))

    def _give(self, buckets: Ints, workers: Ints) -> None:
        size = len(self.loads)
        before = self.owners[buckets]
        self.loads -= np.bincount(before[before >= 0], minlength=size)
        self.loads += np.bincount(workers[workers >= 0], minlength=size)
        self.owners[buckets] = workers
        self._held_at[buckets] = self._cost(buckets, workers)

    def _cost(self, buckets: Ints, workers: Ints) -> Floats:
        """The cost of each bucket to the worker beside it; meaningless where there is none."""
        words = self._bucket_keys[buckets] ^ self._worker_keys[workers]
        return _minus_log(words) / self._weights[workers]

    def _costs(self, buckets: Ints, keys: Words, weights: Floats) -> Floats:
        """A row for each bucket, a column for each key."""
        costs = np.empty((len(buckets), len(keys)))
        rows = max(1, _PAIRS_IN_CACHE // len(keys))
        for start in range(0, len(buckets), rows):
            words = self._bucket_keys[buckets[start : start + rows], None] ^ keys
            np.divide(_minus_log(words), weights, out=costs[start : start + rows])
        return costs


def _choose(costs: Floats, room: Ints) -> Ints:
    """Chooses the column that each row gets, or -1.

    In rounds: a row asks for its cheapest column with room, and a column grants its cheapest requests.
    """
    chosen = np.full(len(costs), -1, np.int64)
    room, rows, columns = room.copy(), np.arange(len(costs)), np.arange(costs.shape[1])
    while len(rows) and len(columns):
        choice = costs.argmin(axis=1)
        cost = costs[np.arange(len(rows)), choice]
        asked = columns[choice]
        granted = _rank_within(asked, cost) < room[asked]
        chosen[rows[granted]] = asked[granted]
        room -= np.bincount(asked[granted], minlength=len(room))
        open_ = room[columns] > 0
        rows, columns, costs = rows[~granted], columns[open_], costs[~granted][:, open_]
    return chosen


def _rank_within(groups: Ints, costs: Floats) -> Ints:
    """Counts for each entry how many of its group are cheaper; of equal ones the earlier is."""
    order = np.lexsort((costs, groups))
    ordered = groups[order]
    ranks = np.empty(len(groups), np.int64)
    ranks[order] = np.arange(len(groups)) - np.searchsorted(ordered, ordered, side="left")
    return ranks


def _minus_log(words: Words) -> Floats:
    """-ln(u) for a u in (0, 1) made of each hash; overwrites `words`. Good to 1e-7, the same on every processor."""
    mix_all(words, np.empty_like(words))
    np.right_shift(words, np.uint64(12), out=words)
    u = words.astype(np.float64)
    u += 0.5
    mantissa, exponent = np.frexp(u)
    # ln(m) = -2 artanh(s) with s = (1 - m) / (1 + m), which is at most 1/3; the series converges fast and keeps its
    # relative precision near u = 1, where the winners are.
    s = (1.0 - mantissa) / (1.0 + mantissa)
    square = s * s
    series = np.full_like(s, _LOG_TERMS[0])
    for term in _LOG_TERMS[1:]:
        series *= square
        series += term
    series *= s
    series *= 2.0
    series += (52 - exponent) * _LOG_2
    return series


def bucket_keys(buckets: int) -> Words:
    keys = np.arange(1, buckets + 1, dtype=np.uint64) * GOLDEN
    mix_all(keys, np.empty_like(keys))
    return keys


def name_key(worker: str) -> int:
    return int(sha256_hex(worker.encode())[:16], 16)
