"""Futures: what was promised to a client for each operation, from its acceptance until its result is gone."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from enum import StrEnum
from typing import Final

import msgspec

from strata.base.errors import Code, StrataError
from strata.train.core import ops
from strata.train.core.sampling import Sample


class FutureStatus(StrEnum):
    PENDING = "pending"
    """Accepted, and not yet told to the ranks."""
    DISPATCHED = "dispatched"
    FINISHED = "finished"
    FAILED = "failed"
    CANCELLED = "cancelled"
    EXPIRED = "expired"
    """Its result was kept for as long as was promised. Nothing of it is left but that it was."""


class FutureEvent(StrEnum):
    DISPATCH = "dispatch"
    FINISH = "finish"
    FAIL = "fail"
    CANCEL = "cancel"
    RETURN = "return"
    """The ranks that had it are gone, and nothing of it was kept: samples only."""
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
"""What is absent is impossible: what ended never begins again. Only samples return, and are cancelled while they run:
they change nothing, so that their beginning again, or being forgotten, is nobody's loss."""
OF_SAMPLES: Final = frozenset(
    {(FutureStatus.DISPATCHED, FutureEvent.CANCEL), (FutureStatus.DISPATCHED, FutureEvent.RETURN)}
)
OPEN: Final = frozenset({FutureStatus.PENDING, FutureStatus.DISPATCHED})


class Future(msgspec.Struct):
    future_id: str
    tenant: str
    model_id: str
    """Empty for an operation of the whole server."""
    digest: str
    operation: ops.Operation | None
    """None once it ended: only its result is asked for then."""
    accepted_at_s: float
    status: FutureStatus = FutureStatus.PENDING
    turn: int = 0
    """When it was handed on to be scheduled, in order of that; 0 while a gap before it holds it."""
    number: int = 0
    """Of its dispatch."""
    result: ops.Result | None = None
    ended_at_s: float = 0.0

    @property
    def kind(self) -> str:
        return "" if self.operation is None else ops.kind_of(self.operation)


class FutureStore:
    """All futures that are not expired. Keeps the counts that admission needs and the order in which they ended."""

    def __init__(self, futures: Iterable[Future] = (), ended: Sequence[str] = ()) -> None:
        self._futures = {each.future_id: each for each in futures}
        self._ended = dict.fromkeys(ended)
        self._pending = Counter(each.tenant for each in self._futures.values() if _queued(each))
        self.result_bytes = sum(_inline_bytes(each) for each in self._futures.values())
        """What the kept results weigh in memory."""

    def __iter__(self) -> Iterator[Future]:
        return iter(self._futures.values())

    def __len__(self) -> int:
        return len(self._futures)

    @property
    def ended(self) -> Sequence[str]:
        """Oldest end first."""
        return list(self._ended)

    def get(self, future_id: str) -> Future | None:
        return self._futures.get(future_id)

    def tenant_of(self, future_id: str) -> str:
        return self._futures[future_id].tenant

    def pending(self, tenant: str | None = None) -> int:
        """Accepted and not dispatched, held or not; of one tenant or of all. Samples have a queue of their own."""
        return self._pending.total() if tenant is None else self._pending[tenant]

    @property
    def pending_by_tenant(self) -> Mapping[str, int]:
        return self._pending

    def add(self, future: Future) -> None:
        if future.future_id in self._futures:
            raise StrataError(Code.INTERNAL, f"{future.future_id} exists already")
        self._futures[future.future_id] = future
        if _queued(future):
            self._pending[future.tenant] += 1

    def dispatch(self, future_id: str, number: int) -> Future:
        future = self._move(future_id, FutureEvent.DISPATCH)
        future.number = number
        return future

    def give_back(self, future_id: str) -> Future:
        future = self._move(future_id, FutureEvent.RETURN)
        future.number = 0
        return future

    def end(self, future_id: str, result: ops.Result, at_s: float) -> Future:
        """With what came of it, whichever way."""
        if not isinstance(result, ops.Failed):
            event = FutureEvent.FINISH
        else:
            event = FutureEvent.CANCEL if result.category == "cancelled" else FutureEvent.FAIL
        future = self._move(future_id, event)
        future.operation, future.result, future.ended_at_s = None, result, at_s
        self._ended[future_id] = None
        self.result_bytes += _inline_bytes(future)
        return future

    def overdue(self, now_s: float, *, ttl_s: float, keep: int) -> float | None:
        """Results that ended at this moment or before may go: they had their time, or there are too many after them."""
        until_s: float | None = None
        surplus = len(self._ended) - keep
        for place, future_id in enumerate(self._ended):
            ended_at_s = self._futures[future_id].ended_at_s
            if place >= surplus and ended_at_s + ttl_s > now_s:
                break
            until_s = ended_at_s if until_s is None else max(until_s, ended_at_s)
        return until_s

    def expire(self, until_s: float) -> list[Future]:
        """Drop what ended at that moment or before, and everything that ended before the last of those."""
        last = None
        for place, future_id in enumerate(self._ended):
            if self._futures[future_id].ended_at_s <= until_s:
                last = place
            else:
                break
        gone = list(self._ended)[: 0 if last is None else last + 1]
        return [self._drop(future_id) for future_id in gone]

    def _drop(self, future_id: str) -> Future:
        future = self._move(future_id, FutureEvent.EXPIRE)
        self.result_bytes -= _inline_bytes(future)
        del self._ended[future_id], self._futures[future_id]
        return future

    def _move(self, future_id: str, event: FutureEvent) -> Future:
        future = self._futures[future_id]
        after = NEXT.get((future.status, event))
        if (future.status, event) in OF_SAMPLES and not isinstance(future.operation, Sample):
            after = None
        if after is None:
            raise StrataError(Code.INTERNAL, f"{future_id} is {future.status}: it cannot {event}")
        if _queued(future):
            self._pending[future.tenant] -= 1
            self._pending += Counter()
        future.status = after
        return future


def _queued(future: Future) -> bool:
    return future.status is FutureStatus.PENDING and not isinstance(future.operation, Sample)


def _inline_bytes(future: Future) -> int:
    payload = future.result.payload if isinstance(future.result, ops.PassDone | ops.SampleDone) else None
    return len(payload.data) if isinstance(payload, ops.Inline) else 0
