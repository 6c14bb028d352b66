"""Which worker owns which bucket of a dataset: weighted rendezvous hashing with a capacity bound, sticky.

Ownership is affinity, not truth: a worker reads its own buckets first, and the lease ledger decides who read what.

**Shares.** A worker of weight w has a fair share of f = buckets * w / (sum of weights). Weights count in millionths, so
that the limits are exact integers: cap = ceil((1 + bound) * f), low = floor((1 - bound) * f). Nobody ever owns more
than its cap. From scratch everybody owns at least its low, and whoever joins or gains weight beside others who stay as
they are gets floor(f). Nothing moves for the sake of low alone, so that a loss moves what the lost worker had and
nothing else. A worker of weight 0 owns nothing.

**Preference.** A pair of bucket and worker has a cost, -ln(u) / w, where u in (0, 1) comes from a hash of both; the
cheaper the better. Without limits the cheapest worker of each bucket would be plain weighted rendezvous hashing. The
logarithm is made of additions, multiplications and divisions, which IEEE 754 rounds in one way only: `numpy.log` may
differ in the last bit from one processor to another, and then two coordinators would place differently.

**Change.** A bucket stays where it is unless (1) its worker is gone, (2) its worker owns more than its cap: the
costliest are shed, or (3) somebody joined or gained weight and has less than floor(f): it takes the buckets where it
beats the owner by most, and no owner gives below its low. Free buckets go to newcomers up to floor(f) first and then
to anybody up to its cap, in rounds: each asks for its cheapest worker with room, and a worker grants its cheapest
requests.

History matters, so an assignment cannot be computed again from the members: it is stored. `Assignment` is what a fact
or a snapshot carries, two bytes for each bucket and the names once: 8 KiB and the names for 4,096 buckets.

The plain consistent-hash ring has no bound and no memory; it is there for sites that want what they know.
No clock, no chance, no I/O; numpy, since a fresh placement looks at every pair.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Final, TypeAlias

import msgspec
import numpy as np
from numpy.typing import NDArray

from strata.base.digest import sha256_hex
from strata.base.errors import Code, StrataError
from strata.coord.core.facts import DEFAULT_BUCKETS
from strata.coord.core.permutation import mix_all

BUCKETS_PER_WORKER: Final = 8
DEFAULT_BOUND: Final = 0.05
RING_POINTS: Final = 150
"""Points on the ring for a weight of 1."""
MAX_WORKERS: Final = 2**16
"""Two bytes name a worker in an assignment."""
MAX_WEIGHT: Final = 1e6

_MILLION: Final = 1_000_000
_GOLDEN: Final = np.uint64(0x9E3779B97F4A7C15)
_PAIRS_AT_ONCE: Final = 1 << 23
"""Costs held at once, 64 MiB. A larger placement is cut into blocks, so this number is part of its result."""
_PAIRS_IN_CACHE: Final = 1 << 15
_LOG_2: Final = 0.6931471805599453
_LOG_TERMS: Final = (1 / 13, 1 / 11, 1 / 9, 1 / 7, 1 / 5, 1 / 3, 1.0)

_Floats: TypeAlias = NDArray[np.float64]
_Ints: TypeAlias = NDArray[np.int64]
_Words: TypeAlias = NDArray[np.uint64]


class Scheme(StrEnum):
    RENDEZVOUS = "rendezvous"
    RING = "ring"


class Assignment(msgspec.Struct, frozen=True):
    """The owner of every bucket. Equal assignments have equal bytes."""

    workers: tuple[str, ...]
    """Everybody with a weight, sorted."""
    weights: tuple[int, ...]
    """In millionths, in the order of `workers`."""
    owners: bytes
    """For each bucket the place of its owner in `workers`, as two bytes, low byte first."""

    def __post_init__(self) -> None:
        numbers = self.numbers() if len(self.owners) % 2 == 0 else np.empty(0, np.int64)
        if not len(numbers) or len(self.workers) != len(self.weights) or numbers.max() >= len(self.workers):
            raise StrataError(Code.CORRUPT, "the bytes of an assignment name owners that it does not list")

    @property
    def buckets(self) -> int:
        return len(self.owners) // 2

    def owner_of(self, bucket: int) -> str:
        if not 0 <= bucket < self.buckets:
            raise StrataError(Code.INVALID, f"bucket {bucket} is not among the {self.buckets} buckets")
        return self.workers[int.from_bytes(self.owners[2 * bucket : 2 * bucket + 2], "little")]

    def buckets_of(self, worker: str) -> list[int]:
        """The buckets of a worker, in order; none for one that has no weight or is no member."""
        if worker not in self.workers:
            return []
        owned: list[int] = np.flatnonzero(self.numbers() == self.workers.index(worker)).tolist()
        return owned

    def by_worker(self) -> dict[str, list[int]]:
        """The buckets of each worker, in one pass over all."""
        numbers = self.numbers()
        ends = np.cumsum(np.bincount(numbers, minlength=len(self.workers)))
        parts = np.split(np.argsort(numbers, kind="stable"), ends[:-1])
        return {worker: part.tolist() for worker, part in zip(self.workers, parts, strict=True)}

    def loads(self) -> dict[str, int]:
        counts: list[int] = np.bincount(self.numbers(), minlength=len(self.workers)).tolist()
        return dict(zip(self.workers, counts, strict=True))

    def numbers(self) -> _Ints:
        """For each bucket the place of its owner in `workers`."""
        return np.frombuffer(self.owners, "<u2").astype(np.int64)

    def encode(self) -> bytes:
        return msgspec.msgpack.encode(self)


def decode(data: bytes) -> Assignment:
    try:
        return msgspec.msgpack.decode(data, type=Assignment)
    except msgspec.MsgspecError as error:
        raise StrataError(Code.CORRUPT, f"these bytes are no assignment: {error}") from error


@dataclass(frozen=True, slots=True)
class Moves:
    """Why buckets changed their owner; each is counted once."""

    buckets: int
    orphaned: int
    """Their worker is gone, or they never had one."""
    shed: int
    """Their worker was over its cap."""
    taken: int
    """A worker that joined or gained weight took them. On a ring: any other move."""

    @property
    def moved(self) -> int:
        return self.orphaned + self.shed + self.taken

    @property
    def reason(self) -> str:
        return (
            f"{self.moved} of {self.buckets} buckets moved: {self.orphaned} had no worker, "
            f"{self.shed} were over the bound, {self.taken} went to workers that joined or gained weight"
        )


def buckets_for(expected_workers: int) -> int:
    """A power of two, at least 8 for each worker: with fewer, whole buckets are too coarse for a 5 % bound."""
    if expected_workers < 0:
        raise StrataError(Code.INVALID, f"{expected_workers} workers cannot be expected")
    return max(DEFAULT_BUCKETS, 1 << (BUCKETS_PER_WORKER * expected_workers - 1).bit_length())


def place(
    buckets: int,
    weights: Mapping[str, float],
    previous: Assignment | None = None,
    *,
    bound: float = DEFAULT_BOUND,
    scheme: Scheme = Scheme.RENDEZVOUS,
) -> tuple[Assignment, Moves]:
    """An owner for every bucket, and what moved. Refused if nobody can own them: then keep the previous assignment."""
    if buckets < 1 or buckets & (buckets - 1):
        raise StrataError(Code.INVALID, f"the number of buckets must be a power of two, not {buckets}")
    if previous is not None and previous.buckets != buckets:
        raise StrataError(Code.INVALID, f"{previous.buckets} buckets cannot become {buckets}: their number is fixed")
    if not 0 <= bound < 1:
        raise StrataError(Code.INVALID, f"the bound must be at least 0 and below 1, not {bound}")
    members = _members(weights)
    before = _carried(buckets, members, previous)
    if scheme is Scheme.RING:
        owners, shed = _ring_owners(buckets, members), 0
    else:
        owners, shed = _rendezvous_owners(members, before, _newcomers(members, previous), bound)
    orphaned = int(np.count_nonzero(before < 0))
    taken = int(np.count_nonzero(before != owners)) - orphaned - shed
    assignment = Assignment(tuple(members), tuple(members.values()), owners.astype("<u2").tobytes())
    return assignment, Moves(buckets, orphaned, shed, taken)


def _members(weights: Mapping[str, float]) -> dict[str, int]:
    """Everybody with a weight, sorted by name, with the weight in millionths."""
    for worker, weight in weights.items():
        if not 0 <= weight <= MAX_WEIGHT:
            raise StrataError(
                Code.INVALID, f"the weight of worker {worker!r} must be from 0 to {MAX_WEIGHT:g}: {weight}"
            )
    members = {worker: max(1, round(weights[worker] * _MILLION)) for worker in sorted(weights) if weights[worker] > 0}
    if not members:
        raise StrataError(Code.PRECONDITION, "no worker has a weight above 0, so nobody can own the buckets")
    if len(members) > MAX_WORKERS:
        raise StrataError(Code.INVALID, f"{len(members)} workers are more than the {MAX_WORKERS} of one assignment")
    return members


def _carried(buckets: int, members: Mapping[str, int], previous: Assignment | None) -> _Ints:
    """The present number of each bucket's previous owner, or -1."""
    if previous is None:
        return np.full(buckets, -1, np.int64)
    number_of = {worker: number for number, worker in enumerate(members)}
    return np.array([number_of.get(worker, -1) for worker in previous.workers], np.int64)[previous.numbers()]


def _newcomers(members: Mapping[str, int], previous: Assignment | None) -> _Ints:
    known = {} if previous is None else dict(zip(previous.workers, previous.weights, strict=True))
    return np.array(
        [n for n, (worker, weight) in enumerate(members.items()) if weight > known.get(worker, 0)], np.int64
    )


def _rendezvous_owners(members: Mapping[str, int], before: _Ints, newcomers: _Ints, bound: float) -> tuple[_Ints, int]:
    limits = _limits(len(before), list(members.values()), bound)
    draft = _Draft(before.copy(), members)
    shed = draft.shed(limits.cap)
    free = np.flatnonzero(draft.owners < 0)
    left = draft.grant(free, newcomers, limits.fair) if len(newcomers) < len(members) else free
    left = draft.grant(left, np.arange(len(members)), limits.cap)
    assert not len(left), "the caps add up to at least the number of buckets"
    for worker in np.flatnonzero(draft.loads < limits.low):
        draft.take(int(worker), int(limits.low[worker]), free, limits.low)
    settled = np.flatnonzero(~np.isin(draft.owners, newcomers))
    for worker in newcomers[draft.loads[newcomers] < limits.fair[newcomers]]:
        draft.take(int(worker), int(limits.fair[worker]), settled, limits.low)
    return draft.owners, shed


@dataclass(frozen=True, slots=True)
class _Limits:
    low: _Ints
    fair: _Ints
    cap: _Ints


def _limits(buckets: int, weights: Sequence[int], bound: float) -> _Limits:
    """In integers of any size: a share that is exactly 20 must have a cap of 21, whatever 1.05 is in binary."""
    bound_millionths, whole = round(bound * _MILLION), sum(weights) * _MILLION
    low = [buckets * weight * (_MILLION - bound_millionths) // whole for weight in weights]
    fair = [buckets * weight * _MILLION // whole for weight in weights]
    cap = [-(-buckets * weight * (_MILLION + bound_millionths) // whole) for weight in weights]
    return _Limits(np.array(low, np.int64), np.array(fair, np.int64), np.array(cap, np.int64))


class _Draft:
    """An assignment in the making: `loads` counts what `owners` says, `_held_at` is what a bucket costs its owner."""

    def __init__(self, owners: _Ints, members: Mapping[str, int]) -> None:
        self.owners = owners
        self.loads = np.bincount(owners[owners >= 0], minlength=len(members))
        self._bucket_keys = _bucket_keys(len(owners))
        self._worker_keys = np.array([_name_key(worker) for worker in members], np.uint64)
        self._weights = np.array(list(members.values()), np.float64)
        self._held_at = self._cost(np.arange(len(owners)), owners)

    def shed(self, cap: _Ints) -> int:
        """Frees the costliest buckets of everybody who is over its cap; how many."""
        over = np.append(self.loads > cap, False)
        buckets = np.flatnonzero(over[self.owners])
        owners = self.owners[buckets]
        excess = buckets[_rank_within(owners, self._held_at[buckets]) >= cap[owners]]
        self._give(excess, np.full(len(excess), -1, np.int64))
        return len(excess)

    def grant(self, buckets: _Ints, workers: _Ints, limit: _Ints) -> _Ints:
        """Gives free buckets to workers that have room below their limit; what is left when nobody has."""
        left = [buckets[:0]]
        rows = max(1, _PAIRS_AT_ONCE // max(1, len(workers)))
        for start in range(0, len(buckets), rows):
            workers = workers[self.loads[workers] < limit[workers]]
            asking = buckets[start : start + rows]
            costs = self._costs(asking, workers) if len(workers) else np.empty((len(asking), 0))
            among = workers
            while len(asking) and len(among):
                choice = costs.argmin(axis=1)
                chosen = among[choice]
                cost = costs[np.arange(len(asking)), choice]
                granted = _rank_within(chosen, cost) < (limit - self.loads)[chosen]
                self._give(asking[granted], chosen[granted])
                room = self.loads[among] < limit[among]
                asking, among, costs = asking[~granted], among[room], costs[~granted][:, room]
            left.append(asking)
        return np.concatenate(left)

    def take(self, worker: int, up_to: int, buckets: _Ints, low: _Ints) -> None:
        """Moves buckets of others to a worker, first where it beats the owner by most; nobody gives below its low."""
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

    def _give(self, buckets: _Ints, workers: _Ints) -> None:
        size = len(self.loads)
        before = self.owners[buckets]
        self.loads -= np.bincount(before[before >= 0], minlength=size)
        self.loads += np.bincount(workers[workers >= 0], minlength=size)
        self.owners[buckets] = workers
        self._held_at[buckets] = self._cost(buckets, workers)

    def _cost(self, buckets: _Ints, workers: _Ints) -> _Floats:
        """The cost of each bucket to the worker beside it; meaningless where that is nobody."""
        words = self._bucket_keys[buckets] ^ self._worker_keys[workers]
        return _minus_log(words) / self._weights[workers]

    def _costs(self, buckets: _Ints, workers: _Ints) -> _Floats:
        """A row for each bucket, a column for each worker."""
        keys, weights = self._worker_keys[workers], self._weights[workers]
        costs = np.empty((len(buckets), len(workers)))
        rows = max(1, _PAIRS_IN_CACHE // len(workers))
        for start in range(0, len(buckets), rows):
            words = self._bucket_keys[buckets[start : start + rows], None] ^ keys
            np.divide(_minus_log(words), weights, out=costs[start : start + rows])
        return costs


def _rank_within(groups: _Ints, costs: _Floats) -> _Ints:
    """For each entry, how many of its group are cheaper; of equal ones the earlier is."""
    order = np.lexsort((costs, groups))
    ordered = groups[order]
    ranks = np.empty(len(groups), np.int64)
    ranks[order] = np.arange(len(groups)) - np.searchsorted(ordered, ordered, side="left")
    return ranks


def _minus_log(words: _Words) -> _Floats:
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


def _bucket_keys(buckets: int) -> _Words:
    keys = np.arange(1, buckets + 1, dtype=np.uint64) * _GOLDEN
    mix_all(keys, np.empty_like(keys))
    return keys


def _name_key(worker: str) -> int:
    return int(sha256_hex(worker.encode())[:16], 16)


def _ring_owners(buckets: int, members: Mapping[str, int]) -> _Ints:
    """Each bucket goes to the owner of the next point on the ring; a weight of 1 has 150 points."""
    counts = [max(1, round(RING_POINTS * weight / _MILLION)) for weight in members.values()]
    owners = np.repeat(np.arange(len(members)), counts)
    points = np.concatenate([np.arange(1, count + 1, dtype=np.uint64) for count in counts])
    points *= _GOLDEN
    points += np.repeat(np.array([_name_key(worker) for worker in members], np.uint64), counts)
    mix_all(points, np.empty_like(points))
    order = np.argsort(points, kind="stable")
    following = np.searchsorted(points[order], _bucket_keys(buckets), side="left") % len(points)
    return owners[order][following]
