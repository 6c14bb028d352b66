"""Assigns buckets of a dataset to workers by weight: rendezvous hashing or a ring, a capacity bound of 5 %, and the
fewest moves when workers come and go.

Ownership is affinity, not truth: a worker reads its own buckets first, and the lease ledger decides who read what.

**Shares.** A worker of weight w has a fair share of f = buckets * w / (sum of weights). Weights count in millionths, so
that the limits are exact integers: cap = ceil((1 + bound) * f), low = floor((1 - bound) * f). Nobody ever owns more
than its cap. From scratch every worker owns at least its low, and one that joins or gains weight while the others stay
as they are gets floor(f). Nothing moves for the sake of low alone, so that a loss moves what the lost worker had and
nothing else. A worker of weight 0 owns nothing.

**Preference.** A pair of bucket and worker has a cost, -ln(u) / w, where u in (0, 1) comes from a hash of both; the
cheaper the better. Without limits the cheapest worker of each bucket would be plain weighted rendezvous hashing. The
logarithm is made of additions, multiplications and divisions, which IEEE 754 rounds in one way only: `numpy.log` may
differ in the last bit from one processor to another, and then two coordinators would place differently.

**Change.** A bucket stays where it is unless (1) its worker is gone, (2) its worker owns more than its cap: the
costliest are shed, or (3) a worker joined or gained weight and has less than floor(f): it takes the buckets where it
beats the owner by most, and no owner gives below its low. Free buckets go to newcomers up to floor(f) first and then
to any worker up to its cap, in rounds: each asks for its cheapest worker with room, and a worker grants its cheapest
requests. Where that would mean too many pairs, workers are put into groups by their names, and a bucket first chooses a
group by the weights in it and then a worker of that group, both in the same way.

The result depends on earlier assignments, so it cannot be computed again from the members: it is stored. A
`BucketAssignment` takes four bytes for each bucket and each name once: 16 KiB and the names for 4,096 buckets.

The plain consistent-hash ring has no bound and no memory; it is there for sites that want what they know.
No clock, no chance, no I/O; numpy, since a fresh placement looks at every pair.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

import msgspec
import numpy as np

from strata.base.errors import Code, StrataError
from strata.coord.core.permutation import mix_all
from strata.coord.core.rendezvous_hashing import GOLDEN, Draft, Ints, bucket_keys, name_key

DEFAULT_BOUND: Final = 0.05
RING_POINTS: Final = 150
"""Points on the ring for a weight of 1."""
MAX_WORKERS: Final = 2**18
"""What one job may have; a coordinator gets slow long before."""
MAX_WEIGHT: Final = 1e6

_MILLION: Final = 1_000_000


class Scheme(StrEnum):
    RENDEZVOUS = "rendezvous"
    RING = "ring"


class BucketAssignment(msgspec.Struct, frozen=True):
    """The owner of every bucket. Equal assignments have equal bytes."""

    workers: tuple[str, ...]
    """Everybody with a weight, sorted."""
    weights: tuple[int, ...]
    """The weights in millionths, in the order of `workers`."""
    owners: bytes
    """The place of each bucket's owner in `workers`, as four bytes, low byte first."""

    def __post_init__(self) -> None:
        numbers = self.numbers() if len(self.owners) % 4 == 0 else np.empty(0, np.int64)
        if not len(numbers) or len(self.workers) != len(self.weights) or numbers.max() >= len(self.workers):
            raise StrataError(Code.CORRUPT, "the bytes of an assignment name owners that it does not list")

    @property
    def buckets(self) -> int:
        return len(self.owners) // 4

    def by_worker(self) -> dict[str, list[int]]:
        """The buckets of each worker, in order, in one pass over all."""
        numbers = self.numbers()
        ends = np.cumsum(np.bincount(numbers, minlength=len(self.workers)))
        parts = np.split(np.argsort(numbers, kind="stable"), ends[:-1])
        return {worker: part.tolist() for worker, part in zip(self.workers, parts, strict=True)}

    def loads(self) -> dict[str, int]:
        counts: list[int] = np.bincount(self.numbers(), minlength=len(self.workers)).tolist()
        return dict(zip(self.workers, counts, strict=True))

    def numbers(self) -> Ints:
        """Returns the place of each bucket's owner in `workers`."""
        return np.frombuffer(self.owners, "<u4").astype(np.int64)

    def encode(self) -> bytes:
        return msgspec.msgpack.encode(self)


def decode(data: bytes) -> BucketAssignment:
    try:
        return msgspec.msgpack.decode(data, type=BucketAssignment)
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


def place(
    buckets: int,
    weights: Mapping[str, float],
    previous: BucketAssignment | None = None,
    *,
    bound: float = DEFAULT_BOUND,
    scheme: Scheme = Scheme.RENDEZVOUS,
) -> tuple[BucketAssignment, Moves]:
    """An owner for every bucket, and what moved. Raises if no worker can own them: keep the previous assignment."""
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
    assignment = BucketAssignment(tuple(members), tuple(members.values()), owners.astype("<u4").tobytes())
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
        raise StrataError(Code.PRECONDITION, "no worker has a weight above 0, so none can own the buckets")
    if len(members) > MAX_WORKERS:
        raise StrataError(Code.INVALID, f"{len(members)} workers are more than the {MAX_WORKERS} of one assignment")
    return members


def _carried(buckets: int, members: Mapping[str, int], previous: BucketAssignment | None) -> Ints:
    """The present number of each bucket's previous owner, or -1."""
    if previous is None:
        return np.full(buckets, -1, np.int64)
    number_of = {worker: number for number, worker in enumerate(members)}
    return np.array([number_of.get(worker, -1) for worker in previous.workers], np.int64)[previous.numbers()]


def _newcomers(members: Mapping[str, int], previous: BucketAssignment | None) -> Ints:
    known = {} if previous is None else dict(zip(previous.workers, previous.weights, strict=True))
    return np.array(
        [n for n, (worker, weight) in enumerate(members.items()) if weight > known.get(worker, 0)], np.int64
    )


def _rendezvous_owners(members: Mapping[str, int], before: Ints, newcomers: Ints, bound: float) -> tuple[Ints, int]:
    limits = _limits(len(before), list(members.values()), bound)
    draft = Draft(before.copy(), members)
    shed = draft.shed(limits.cap)
    all_members = np.arange(len(members))
    free = left = np.flatnonzero(draft.owners < 0)
    if len(newcomers) < len(members):
        left = draft.grant(left, newcomers, limits.fair)
    if draft.is_large(left, all_members):
        # First the low of every worker, so that few have to take it from others, one by one.
        left = draft.grant(left, all_members, limits.low)
    left = draft.grant(left, all_members, limits.cap)
    assert not len(left), "the caps add up to at least the number of buckets"
    for worker in np.flatnonzero(draft.loads < limits.low):
        draft.take(int(worker), int(limits.low[worker]), free, limits.low)
    settled = np.flatnonzero(~np.isin(draft.owners, newcomers))
    if len(settled):
        for worker in newcomers[draft.loads[newcomers] < limits.fair[newcomers]]:
            draft.take(int(worker), int(limits.fair[worker]), settled, limits.low)
    return draft.owners, shed


@dataclass(frozen=True, slots=True)
class _Limits:
    low: Ints
    fair: Ints
    cap: Ints


def _limits(buckets: int, weights: Sequence[int], bound: float) -> _Limits:
    """Computes caps in integers of any size: a share that is exactly 20 must have a cap of 21, whatever 1.05 is in
    binary."""
    bound_millionths, whole = round(bound * _MILLION), sum(weights) * _MILLION
    low = [buckets * weight * (_MILLION - bound_millionths) // whole for weight in weights]
    fair = [buckets * weight * _MILLION // whole for weight in weights]
    cap = [-(-buckets * weight * (_MILLION + bound_millionths) // whole) for weight in weights]
    return _Limits(np.array(low, np.int64), np.array(fair, np.int64), np.array(cap, np.int64))


def _ring_owners(buckets: int, members: Mapping[str, int]) -> Ints:
    """Each bucket goes to the owner of the next point on the ring; a weight of 1 has 150 points."""
    counts = [max(1, round(RING_POINTS * weight / _MILLION)) for weight in members.values()]
    owners = np.repeat(np.arange(len(members)), counts)
    points = np.concatenate([np.arange(1, count + 1, dtype=np.uint64) for count in counts])
    points *= GOLDEN
    points += np.repeat(np.array([name_key(worker) for worker in members], np.uint64), counts)
    mix_all(points, np.empty_like(points))
    order = np.argsort(points, kind="stable")
    following = np.searchsorted(points[order], bucket_keys(buckets), side="left") % len(points)
    return owners[order][following]
