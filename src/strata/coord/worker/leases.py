"""What a worker holds: its leases, how far it has consumed them, and how much of that the coordinator knows.

No I/O. `at` may be moved by the thread that trains while the event loop reads it; leases come and go in the loop only.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from strata.base.errors import Code, StrataError
from strata.coord.pb import coordinator_pb2 as pb


@dataclass(eq=False)
class Held:
    """One lease. Samples before `at` are consumed; the coordinator knows of those before `acked`."""

    dataset_id: str
    epoch: int
    shard: pb.Shard
    at: int
    acked: int
    begun: bool = False
    """Handed to the loop that trains."""
    failure: str | None = None
    lost: bool = False

    @property
    def lease_id(self) -> int:
        return self.shard.lease_id

    @property
    def is_over(self) -> bool:
        return self.at == self.shard.end_index or self.failure is not None

    def consume(self, until: int) -> None:
        if not self.at <= until <= self.shard.end_index:
            raise StrataError(
                Code.INVALID,
                f"{until} is not a place in the rest of shard {self.shard.shard_id}: {self.at} to"
                f" {self.shard.end_index}",
            )
        if self.failure is None:
            self.at = until


@dataclass(frozen=True)
class Sent:
    """An ack on its way, as it was when it was sent."""

    held: Held
    at: int
    over: bool
    message: pb.ShardAck


@dataclass(frozen=True)
class Capture:
    """What had been consumed when a worker took its part of a checkpoint."""

    checkpoint_id: str
    step: int
    consumed: tuple[pb.ConsumedLease, ...]


@dataclass
class Ledger:
    """All leases of a worker. While `capture` is set nothing is acked: the checkpoint's position must not move."""

    capture: Capture | None = None
    era: int = 0
    """Grows when everything is lost at once: an answer to a question from before that brings nothing."""
    _held: dict[int, Held] = field(default_factory=dict)
    _lost: list[int] = field(default_factory=list)

    def take(self, dataset_id: str, epoch: int, shards: Iterable[pb.Shard]) -> None:
        """New leases; one that is known already was handed out again and stays as it is."""
        for shard in shards:
            if shard.lease_id not in self._held:
                at = shard.start_index
                self._held[shard.lease_id] = Held(dataset_id, epoch, shard, at, at)

    def restart(self, dataset_id: str, epoch: int) -> None:
        """A new loop begins: what an earlier one left unfinished is read on."""
        for held in self._of(dataset_id, epoch):
            held.begun = False

    def next_unread(self, dataset_id: str, epoch: int) -> Held | None:
        return next(iter(self.unread(dataset_id, epoch)), None)

    def unread(self, dataset_id: str, epoch: int) -> list[Held]:
        """What the loop that trains has not got yet."""
        return [held for held in self._of(dataset_id, epoch) if not held.begun and not held.is_over]

    def ids(self, dataset_id: str | None = None) -> list[int]:
        return [held.lease_id for held in self._held.values() if dataset_id in (None, held.dataset_id)]

    def unacked(self) -> list[tuple[str, int]]:
        """Datasets and epochs that have something to ack."""
        if self.capture is not None:
            return []
        return sorted({(held.dataset_id, held.epoch) for held in self._held.values() if _is_news(held)})

    def acks(self, dataset_id: str | None = None) -> list[Sent]:
        """What to ack now, in the order in which the leases came."""
        if self.capture is not None:
            return []
        return [_sent(held) for held in self._held.values() if dataset_id in (None, held.dataset_id) and _is_news(held)]

    def confirm(self, sent: Sequence[Sent], rejected: Iterable[int]) -> None:
        """The coordinator has answered: these acks count, except the rejected ones."""
        refused = set(rejected)
        for each in sent:
            each.held.acked = max(each.held.acked, each.at)
            if each.over and self._held.get(each.held.lease_id) is each.held and each.held.lease_id not in refused:
                del self._held[each.held.lease_id]
        self.lose(refused)

    def progress(self) -> list[pb.LeaseProgress]:
        if self.capture is not None:
            return []
        return [
            pb.LeaseProgress(lease_id=held.lease_id, consumed_until=held.at)
            for held in list(self._held.values())
            if held.at > held.shard.start_index
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
                dataset_id=held.dataset_id, epoch=held.epoch, lease_id=held.lease_id, consumed_until=held.at
            )
            for held in self._held.values()
        )
        self.capture = Capture(checkpoint_id, step, consumed)
        return self.capture

    def end(self, capture: Capture) -> None:
        if self.capture is capture:
            self.capture = None

    def lose(self, leases: Iterable[int]) -> None:
        """These are somebody else's now; `take_lost` tells the loop that trains."""
        for lease_id in leases:
            held = self._held.pop(lease_id, None)
            if held is not None:
                held.lost = True
                if held.begun:
                    self._lost.append(lease_id)

    def forfeit(self, leases: Iterable[int]) -> None:
        """Not known as ours any more. One that is over may just have been acked: the answer to its ack will tell."""
        self.lose([each for each in leases if each in self._held and not self._held[each].is_over])

    def lose_all(self) -> None:
        self.era += 1
        self.lose(list(self._held))
        self.capture = None

    def take_lost(self) -> list[int]:
        lost, self._lost = self._lost, []
        return lost

    def clear(self) -> None:
        """Everybody goes back: what is held is void, and that is no surprise to anybody."""
        self.lose_all()
        self.take_lost()

    def _of(self, dataset_id: str, epoch: int) -> list[Held]:
        return [held for held in self._held.values() if (held.dataset_id, held.epoch) == (dataset_id, epoch)]


def _is_news(held: Held) -> bool:
    return held.is_over or held.at > held.acked


def _sent(held: Held) -> Sent:
    at, failure = held.at, held.failure
    message = pb.ShardAck(lease_id=held.lease_id)
    if failure is not None:
        message.failed, message.reason, message.consumed_until = True, failure, at
    elif at < held.shard.end_index:
        message.consumed_until = at
    return Sent(held, at, failure is not None or at == held.shard.end_index, message)
