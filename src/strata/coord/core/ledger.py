"""The lease ledger of an epoch: which samples are consumed, leased, returned or quarantined, and to which position a
checkpoint rewinds it. Requests that change it are decided in `shards`.

The state is small because most of it follows from little: shards lie in fixed buckets, each with a fixed order, so a
cursor for each bucket says what was ever handed out. Of that, everything is consumed but what is leased, returned or
quarantined. A lease is read from front to back, so its unread rest is a single range.
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from strata.base.errors import Code, StrataError
from strata.coord.core.facts import Dataset, Grant


class Lease(msgspec.Struct):
    lease_id: int
    worker_id: str
    shard: int
    start: int
    end: int
    until: int
    """Samples before this one are consumed and will not be handed out again in this lineage."""


class ShardRange(msgspec.Struct, frozen=True):
    """Samples that were handed out and not consumed."""

    shard: int
    start: int
    end: int


class Quarantined(msgspec.Struct, frozen=True):
    shard_range: ShardRange
    reason: str


class EpochLedger(msgspec.Struct):
    epoch: int
    cursors: list[int]
    """The number of shards of each bucket that were handed out."""
    leases: dict[int, Lease] = {}
    returned: list[ShardRange] = []
    """Returned ranges; they are leased again before any fresh shard, in this order."""
    quarantined: list[Quarantined] = []
    """Shards that failed too often: shown, never dropped silently."""
    failures: dict[int, int] = {}
    issued: int = 0
    """The sum of the cursors."""
    held: dict[str, list[int]] = {}
    """The leases of each worker."""


class DatasetLedger(msgspec.Struct):
    """All of one dataset: finished epochs, and the ledgers of open ones."""

    dataset: Dataset
    finished: list[int] = []
    epochs: dict[int, EpochLedger] = {}
    quarantined: dict[int, list[Quarantined]] = {}
    """The quarantined ranges of each finished epoch. Those of an open epoch are in its ledger."""

    def epoch(self, number: int) -> EpochLedger:
        """The ledger of an epoch; a new one if no worker has read from it before."""
        return self.epochs.get(number) or EpochLedger(number, [0] * self.dataset.buckets)


class EpochProgress(msgspec.Struct, frozen=True):
    """The progress of an epoch for an operator, in shards."""

    total: int
    done: int
    leased: int
    waiting: int
    quarantined: int


def progress(dataset: Dataset, ledger: EpochLedger) -> EpochProgress:
    # A shard may be in two of them: after a rewind its rests can be apart.
    quarantined = {each.shard_range.shard for each in ledger.quarantined}
    leased = {lease.shard for lease in ledger.leases.values()} - quarantined
    unread = {rest.shard for rest in ledger.returned} | leased | quarantined
    done = ledger.issued - len(unread)
    waiting = dataset.shards - done - len(leased) - len(quarantined)
    return EpochProgress(dataset.shards, done, len(leased), waiting, len(quarantined))


def bucket_of(dataset: Dataset, shard: int) -> int:
    """Returns the bucket of a shard: it is the same in every epoch, so what a worker has cached stays useful."""
    return shard % dataset.buckets


def leases_of(ledger: EpochLedger, worker_id: str) -> dict[int, Lease]:
    return {lease_id: ledger.leases[lease_id] for lease_id in ledger.held.get(worker_id, ())}


def is_exhausted(dataset: Dataset, ledger: EpochLedger) -> bool:
    """Nothing can be handed out now; leases may still come back."""
    return not ledger.returned and ledger.issued == dataset.shards


def is_finished(dataset: Dataset, ledger: EpochLedger) -> bool:
    return is_exhausted(dataset, ledger) and not ledger.leases


def grant(ledger: EpochLedger, dataset: Dataset, worker_id: str, grants: Iterable[Grant]) -> None:
    for each in grants:
        if each.fresh:
            ledger.cursors[bucket_of(dataset, each.shard)] += 1
            ledger.issued += 1
        else:
            ledger.returned.remove(ShardRange(each.shard, each.start, each.end))
        ledger.leases[each.lease_id] = Lease(
            each.lease_id, worker_id, each.shard, each.start, each.end, until=each.start
        )
        ledger.held.setdefault(worker_id, []).append(each.lease_id)


def ack(ledger: EpochLedger, lease_id: int, until: int) -> Lease:
    """Count samples as consumed; the lease ends with its last one. Returns the lease as it was before."""
    lease = ledger.leases[lease_id]
    before = msgspec.structs.replace(lease)
    lease.until = max(lease.until, until)
    if lease.until >= lease.end:
        _end(ledger, lease_id)
    return before


def _end(ledger: EpochLedger, lease_id: int) -> Lease:
    lease = ledger.leases.pop(lease_id)
    mine = ledger.held[lease.worker_id]
    mine.remove(lease_id)
    if not mine:
        del ledger.held[lease.worker_id]
    return lease


def give_back(ledger: EpochLedger, lease_id: int, *, failed: bool = False) -> None:
    """The unread rest goes to the front."""
    lease = _end(ledger, lease_id)
    if failed:
        ledger.failures[lease.shard] = ledger.failures.get(lease.shard, 0) + 1
    ledger.returned.insert(0, ShardRange(lease.shard, lease.until, lease.end))


def quarantine(ledger: EpochLedger, lease_id: int, reason: str) -> None:
    lease = _end(ledger, lease_id)
    ledger.failures[lease.shard] = ledger.failures.get(lease.shard, 0) + 1
    ledger.quarantined.append(Quarantined(ShardRange(lease.shard, lease.until, lease.end), reason))


def give_back_all(ledger: EpochLedger, worker_id: str) -> None:
    """All leases of a worker; the oldest comes to the front."""
    for lease_id in reversed(ledger.held.get(worker_id, [])[:]):
        give_back(ledger, lease_id)


def close_finished(datasets: DatasetLedger, epoch: int) -> None:
    """Drop the ledger of a finished epoch: its number and its quarantined ranges are enough."""
    ledger = datasets.epochs.get(epoch)
    if ledger is not None and is_finished(datasets.dataset, ledger):
        del datasets.epochs[epoch]
        datasets.finished.append(epoch)
        if ledger.quarantined:
            datasets.quarantined[epoch] = ledger.quarantined


def check_epoch(datasets: DatasetLedger, epoch: int) -> None:
    """An epoch may begin when the one before it was begun, so that a wrong number does not open a ledger."""
    known = [*datasets.finished, *datasets.epochs]
    if epoch < 0 or (known and epoch not in known and epoch > max(known) + 1):
        raise StrataError(
            Code.INVALID,
            f"epoch {epoch} of {datasets.dataset.dataset_id!r} cannot begin: the last begun is {max(known, default=0)}",
        )


class EpochPosition(msgspec.Struct, frozen=True):
    """An epoch at a step: what was handed out, and of that what was not consumed."""

    epoch: int
    cursors: tuple[int, ...]
    unread: tuple[ShardRange, ...]
    quarantined: tuple[Quarantined, ...]
    failures: dict[int, int]


class DatasetPosition(msgspec.Struct, frozen=True):
    finished: tuple[int, ...]
    epochs: tuple[EpochPosition, ...]
    quarantined: dict[int, tuple[Quarantined, ...]] = {}
    """The quarantined ranges of each finished epoch."""


Late = dict[int, list[ShardRange]]
"""The ranges of each data epoch that were consumed after their worker had taken its part of a checkpoint."""


def position(datasets: DatasetLedger, read_until: dict[int, int], late: Late) -> DatasetPosition:
    """The position of the dataset when each worker took its part of a checkpoint: later acks must not leak in.

    `read_until` says by lease how far its worker had read then, which may be further than it had acked.
    """
    epochs: list[EpochPosition] = []
    for number in sorted({*datasets.epochs, *late}):
        ledger = datasets.epochs.get(number) or _finished_ledger(datasets, number)
        rests = list(late.get(number, ()))
        for lease in ledger.leases.values():
            read = max(lease.until, read_until.get(lease.lease_id, lease.start))
            if read < lease.end:
                rests.append(ShardRange(lease.shard, read, lease.end))
        rests += ledger.returned
        epochs.append(
            EpochPosition(
                number, tuple(ledger.cursors), _joined(rests), tuple(ledger.quarantined), dict(ledger.failures)
            )
        )
    finished = tuple(epoch for epoch in datasets.finished if epoch not in late)
    aside = {epoch: tuple(some) for epoch, some in datasets.quarantined.items() if epoch not in late}
    return DatasetPosition(finished, tuple(epochs), aside)


def late_part(before: Lease, until: int, read_until: dict[int, int]) -> ShardRange | None:
    """The range that an ack consumes beyond the position its worker had reported; None if there is none."""
    start = max(before.until, read_until.get(before.lease_id, before.until))
    return ShardRange(before.shard, start, until) if start < until else None


def _joined(rests: list[ShardRange]) -> tuple[ShardRange, ...]:
    """Sorts ranges and joins neighbours."""
    joined: list[ShardRange] = []
    for rest in sorted(rests, key=lambda each: each.start):
        if joined and (joined[-1].shard, joined[-1].end) == (rest.shard, rest.start):
            joined[-1] = ShardRange(rest.shard, joined[-1].start, rest.end)
        else:
            joined.append(rest)
    return tuple(joined)


def rewind(datasets: DatasetLedger, to: DatasetPosition) -> None:
    """Restore the position of a checkpoint. Every lease is void: what its holder still reads does not count."""
    datasets.finished = list(to.finished)
    datasets.quarantined = {epoch: list(some) for epoch, some in to.quarantined.items()}
    datasets.epochs = {
        each.epoch: EpochLedger(
            epoch=each.epoch,
            cursors=list(each.cursors),
            issued=sum(each.cursors),
            returned=list(each.unread),
            quarantined=list(each.quarantined),
            failures=dict(each.failures),
        )
        for each in to.epochs
    }
    # All of an epoch may be in the checkpoint though its last acks came later: no ack will come that closes it.
    for epoch in list(datasets.epochs):
        close_finished(datasets, epoch)


def _finished_ledger(datasets: DatasetLedger, epoch: int) -> EpochLedger:
    dataset = datasets.dataset
    full, extra = divmod(dataset.shards, dataset.buckets)
    cursors = [full + (bucket < extra) for bucket in range(dataset.buckets)]
    return EpochLedger(epoch, cursors, issued=dataset.shards, quarantined=list(datasets.quarantined.get(epoch, ())))
