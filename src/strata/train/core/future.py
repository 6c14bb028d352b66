"""Futures: the table of statuses of an operation, the store of all with its index by tenant, and when results expire
(time and number). Errors about unknown futures are in `lookup`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from enum import StrEnum
from typing import Final

import msgspec

from strata.base.errors import Code, StrataError
from strata.train.core import ops
from strata.train.core.sampling import SampleOperation


class FutureStatus(StrEnum):
    PENDING = "pending"
    """Accepted, and not yet dispatched."""
    DISPATCHED = "dispatched"
    FINISHED = "finished"
    FAILED = "failed"
    CANCELLED = "cancelled"
    EXPIRED = "expired"
    """The TTL of its result is over. Its id still tells that it existed."""


class FutureEvent(StrEnum):
    DISPATCH = "dispatch"
    FINISH = "finish"
    FAIL = "fail"
    CANCEL = "cancel"
    RETURN = "return"
    """The ranks that ran it are lost, and it runs again: samples only."""
    EXPIRE = "expire"


NEXT: Final[Mapping[tuple[FutureStatus, FutureEvent], FutureStatus]] = {
    (FutureStatus.PENDING, FutureEvent.DISPATCH): FutureStatus.DISPATCHED,
    (FutureStatus.PENDING, FutureEvent.FAIL): FutureStatus.FAILED,
    (FutureStatus.PENDING, FutureEvent.CANCEL): FutureStatus.CANCELLED,
    (FutureStatus.DISPATCHED, FutureEvent.FINISH): FutureStatus.FINISHED,
    (FutureStatus.DISPATCHED, FutureEvent.FAIL): FutureStatus.FAILED,
    (FutureStatus.DISPATCHED, FutureEvent.CANCEL): FutureStatus.CANCELLED,
    (FutureStatus.DISPATCHED, FutureEvent.RETURN): FutureStatus.PENDING,
    (FutureStatus.FINISHED, FutureEvent.EXPIRE): FutureStatus.EXPIRED,
    (FutureStatus.FAILED, FutureEvent.EXPIRE): FutureStatus.EXPIRED,
    (FutureStatus.CANCELLED, FutureEvent.EXPIRE): FutureStatus.EXPIRED,
}
"""Transitions that are absent are illegal: an ended operation never starts again. Only samples return to the queue or
are cancelled while they run: they change no model."""
SAMPLES_ONLY: Final = frozenset(
    {(FutureStatus.DISPATCHED, FutureEvent.CANCEL), (FutureStatus.DISPATCHED, FutureEvent.RETURN)}
)
OPEN: Final = frozenset({FutureStatus.PENDING, FutureStatus.DISPATCHED})


class OperationFuture(msgspec.Struct):
    future_id: str
    tenant: str
    model_id: str
    """Empty for an operation of the whole server."""
    digest: str
    operation: ops.Operation | None
    """None once it ended: only its result is needed then."""
    accepted_at_s: float
    status: FutureStatus = FutureStatus.PENDING
    turn: int = 0
    """Its position in the order of enqueueing; 0 while it is held behind a gap."""
    number: int = 0
    """The number of its dispatch."""
    result: ops.Result | None = None
    ended_at_s: float = 0.0

    @property
    def kind(self) -> str:
        return "" if self.operation is None else ops.kind_of(self.operation)


class FutureStore:
    """All futures that are not expired, with the counts for admission and the order in which they ended."""

    def __init__(self, futures: Iterable[OperationFuture] = (), ended: Sequence[str] = ()) -> None:
        self._futures = {each.future_id: each for each in futures}
        self._ended = dict.fromkeys(ended)
        kept = (self._futures[each] for each in self._ended if each in self._futures)
        self._recorded = dict.fromkeys(each.future_id for each in kept if isinstance(each.result, ops.RoutedSampleDone))
        self._pending = Counter(each.tenant for each in self._futures.values() if _queued(each))
        self.result_bytes = sum(_inline_bytes(each) for each in self._futures.values())
        """Bytes of the inline results in memory."""

    def __iter__(self) -> Iterator[OperationFuture]:
        return iter(self._futures.values())

    def __len__(self) -> int:
        return len(self._futures)

    @property
    def ended(self) -> Sequence[str]:
        """Oldest end first."""
        return list(self._ended)

    @property
    def recorded(self) -> Iterator[OperationFuture]:
        """Samples whose routing was recorded; the oldest end first."""
        return (self._futures[each] for each in self._recorded)

    def get(self, future_id: str) -> OperationFuture | None:
        return self._futures.get(future_id)

    def tenant_of(self, future_id: str) -> str:
        return self._futures[future_id].tenant

    def pending(self, tenant: str | None = None) -> int:
        """Accepted and not dispatched, held or not; of one tenant or of all. Samples have a queue of their own."""
        return self._pending.total() if tenant is None else self._pending[tenant]

    @property
    def pending_by_tenant(self) -> Mapping[str, int]:
        return self._pending

    def add(self, future: OperationFuture) -> None:
        if future.future_id in self._futures:
            raise StrataError(Code.INTERNAL, f"{future.future_id} exists already")
        self._futures[future.future_id] = future
        if _queued(future):
            self._pending[future.tenant] += 1

    def dispatch(self, future_id: str, number: int) -> OperationFuture:
        future = self._move(future_id, FutureEvent.DISPATCH)
        future.number = number
        return future

    def give_back(self, future_id: str) -> OperationFuture:
        future = self._move(future_id, FutureEvent.RETURN)
        future.number = 0
        return future

    def end(self, future_id: str, result: ops.Result, at_s: float) -> OperationFuture:
        """End it with its result or failure."""
        if not isinstance(result, ops.Failed):
            event = FutureEvent.FINISH
        else:
            event = FutureEvent.CANCEL if result.category == "cancelled" else FutureEvent.FAIL
        future = self._move(future_id, event)
        future.operation, future.result, future.ended_at_s = None, result, at_s
        self._ended[future_id] = None
        if isinstance(result, ops.RoutedSampleDone):
            self._recorded[future_id] = None
        self.result_bytes += _inline_bytes(future)
        return future

    def overdue(self, now_s: float, *, ttl_s: float, keep: int) -> float | None:
        """Results that ended at this time or before may be dropped: their TTL is over, or too many are newer."""
        until_s: float | None = None
        surplus = len(self._ended) - keep
        for place, future_id in enumerate(self._ended):
            ended_at_s = self._futures[future_id].ended_at_s
            if place >= surplus and ended_at_s + ttl_s > now_s:
                break
            until_s = ended_at_s if until_s is None else max(until_s, ended_at_s)
        return until_s

    def expire(self, until_s: float) -> list[OperationFuture]:
        """Drop what ended at that time or before, and everything that ended before the last of those."""
        last = None
        for place, future_id in enumerate(self._ended):
            if self._futures[future_id].ended_at_s <= until_s:
                last = place
            else:
                break
        gone = list(self._ended)[: 0 if last is None else last + 1]
        return [self._drop(future_id) for future_id in gone]

    def _drop(self, future_id: str) -> OperationFuture:
        future = self._move(future_id, FutureEvent.EXPIRE)
        self.result_bytes -= _inline_bytes(future)
        del self._ended[future_id], self._futures[future_id]
        self._recorded.pop(future_id, None)
        return future

    def _move(self, future_id: str, event: FutureEvent) -> OperationFuture:
        future = self._futures[future_id]
        after = NEXT.get((future.status, event))
        if (future.status, event) in SAMPLES_ONLY and not isinstance(future.operation, SampleOperation):
            after = None
        if after is None:
            raise StrataError(Code.INTERNAL, f"{future_id} is {future.status}: it cannot {event}")
        if _queued(future):
            self._pending[future.tenant] -= 1
            self._pending += Counter()
        future.status = after
        return future


def _queued(future: OperationFuture) -> bool:
    return future.status is FutureStatus.PENDING and not isinstance(future.operation, SampleOperation)


def _inline_bytes(future: OperationFuture) -> int:
    payload = future.result.payload if isinstance(future.result, ops.PassDone | ops.SampleDone) else None
    return len(payload.data) if isinstance(payload, ops.InlinePayload) else 0
