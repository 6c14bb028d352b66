"""The leases that a worker holds: how far it has consumed each, which acks are due, what the coordinator has confirmed,
and which leases are lost.

No I/O. The training thread may move `position` while the event loop reads it; only the loop adds and removes leases.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from strata.base.errors import Code, StrataError
from strata.coord.pb import coordinator_pb2 as pb
from strata.coord.worker.reasons import lease_lost


@dataclass(eq=False)
class HeldLease:
    """One lease. Samples before `position` are consumed; the coordinator knows of those before `acked`."""

    dataset_id: str
    epoch: int
    shard: pb.Shard
    position: int
    acked: int
    delivered: bool = False
    """Handed to the training loop."""
    failure: str | None = None
    returned: bool = False
    """Not begun, and given to others."""
    lost: bool = False

    @property
    def lease_id(self) -> int:
        return self.shard.lease_id

    @property
    def is_finished(self) -> bool:
        return self.position == self.shard.end_index or self.failure is not None or self.returned

    def consume(self, until: int) -> None:
        if not self.position <= until <= self.shard.end_index:
            raise StrataError(
                Code.INVALID,
                f"{until} is not a place in the rest of shard {self.shard.shard_id}: {self.position} to"
                f" {self.shard.end_index}",
            )
        if self.failure is None:
            self.position = until


@dataclass(frozen=True)
class SentAck:
    """An ack on its way, as it was when it was sent."""

    held: HeldLease
    position: int
    finished: bool
    message: pb.ShardAck


@dataclass(frozen=True)
class Capture:
    """What had been consumed when a worker took its part of a checkpoint."""

    checkpoint_id: str
    step: int
    consumed: tuple[pb.ConsumedLease, ...]


@dataclass
class LeaseTracker:
    """All leases of a worker. While `capture` is set nothing is acked: the checkpoint's position must not move."""

    capture: Capture | None = None
    resets: int = 0
    """Grows when all leases are lost at once: the reply to an earlier request brings no leases then."""
    _held: dict[int, HeldLease] = field(default_factory=dict)
    _lost: list[int] = field(default_factory=list)

    def take(self, dataset_id: str, epoch: int, shards: Iterable[pb.Shard]) -> None:
        """New leases; one that is known already was handed out again and stays as it is."""
        for shard in shards:
            if shard.lease_id not in self._held:
                position = shard.start_index
                self._held[shard.lease_id] = HeldLease(dataset_id, epoch, shard, position, position)

    def restart(self, dataset_id: str, epoch: int) -> None:
        """A new loop begins: what an earlier one left unfinished is read on."""
        for held in self._of(dataset_id, epoch):
            held.delivered = False

    def next_unread(self, dataset_id: str, epoch: int) -> HeldLease | None:
        return next(iter(self.unread(dataset_id, epoch)), None)

    def unread(self, dataset_id: str, epoch: int) -> list[HeldLease]:
        """Returns what the training loop has not got yet."""
        return [held for held in self._of(dataset_id, epoch) if not held.delivered and not held.is_finished]

    def return_unread(self) -> None:
        """Give to others what the training loop has not got yet; the next ack says so."""
        for held in self._held.values():
            held.returned |= not (held.delivered or held.is_finished)

    def ids(self, dataset_id: str | None = None) -> list[int]:
        return [held.lease_id for held in self._held.values() if dataset_id in (None, held.dataset_id)]

    def unacked_epochs(self) -> list[tuple[str, int]]:
        """Datasets and epochs that have something to ack."""
        if self.capture is not None:
            return []
        return sorted({(held.dataset_id, held.epoch) for held in self._held.values() if _has_unacked(held)})

    def pending_acks(self, dataset_id: str | None = None) -> list[SentAck]:
        """Returns what to ack now, in the order in which the leases came."""
        if self.capture is not None:
            return []
        return [
            _ack_of(held)
            for held in self._held.values()
            if dataset_id in (None, held.dataset_id) and _has_unacked(held)
        ]

    def confirm(self, sent: Sequence[SentAck], rejected: Iterable[int]) -> None:
        """The coordinator has replied: these acks count, except the rejected ones."""
        refused = set(rejected)
        for each in sent:
            each.held.acked = max(each.held.acked, each.position)
            if each.finished and self._held.get(each.held.lease_id) is each.held and each.held.lease_id not in refused:
                del self._held[each.held.lease_id]
        self.mark_lost(refused)

    def progress(self) -> list[pb.LeaseProgress]:
        if self.capture is not None:
            return []
        return [
            pb.LeaseProgress(lease_id=held.lease_id, consumed_until=held.position)
            for held in list(self._held.values())
            if held.position > held.shard.start_index
        ]

    def begin(self, checkpoint_id: str, step: int) -> Capture:
        if self.capture is not None:
            raise StrataError(
                Code.PRECONDITION,
                f"the checkpoint of step {self.capture.step} is begun and not reported",
                hint="report it, or give it up",
            )
        consumed = tuple(
            pb.ConsumedLease(
                dataset_id=held.dataset_id, epoch=held.epoch, lease_id=held.lease_id, consumed_until=held.position
            )
            for held in self._held.values()
        )
        self.capture = Capture(checkpoint_id, step, consumed)
        return self.capture

    def end(self, capture: Capture) -> None:
        if self.capture is capture:
            self.capture = None

    def mark_lost(self, leases: Iterable[int]) -> None:
        """These leases belong to other workers now; `pop_lost` reports them to the training loop."""
        for lease_id in leases:
            held = self._held.pop(lease_id, None)
            if held is not None:
                held.lost = True
                if held.delivered:
                    self._lost.append(lease_id)

    def mark_unless_finished(self, leases: Iterable[int]) -> None:
        """The coordinator reports these as lost. A finished one may just have been acked: the reply to that decides."""
        self.mark_lost([each for each in leases if each in self._held and not self._held[each].is_finished])

    def mark_all_lost(self) -> None:
        self.resets += 1
        self.mark_lost(list(self._held))
        self.capture = None

    def pop_lost(self) -> list[int]:
        lost, self._lost = self._lost, []
        return lost

    def check(self) -> None:
        if lost := self.pop_lost():
            raise lease_lost(lost)

    def clear(self) -> None:
        """All workers rewind: the leases are void, and the training loop knows it."""
        self.mark_all_lost()
        self.pop_lost()

    def _of(self, dataset_id: str, epoch: int) -> list[HeldLease]:
        return [held for held in self._held.values() if (held.dataset_id, held.epoch) == (dataset_id, epoch)]


def _has_unacked(held: HeldLease) -> bool:
    return held.is_finished or held.position > held.acked


def _ack_of(held: HeldLease) -> SentAck:
    position, failure = held.position, held.failure
    message = pb.ShardAck(lease_id=held.lease_id)
    if failure is not None:
        message.failed, message.reason, message.consumed_until = True, failure, position
    elif position < held.shard.end_index:
        message.consumed_until, message.returned = position, held.returned
    return SentAck(held, position, held.is_finished, message)
