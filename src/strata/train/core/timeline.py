"""When an operation was where, for those that ended last: in memory alone, and gone with the process.

Moments are seconds since 1970 by the orchestrator's clock. What happens on the ranks is told by them as spans, so that
their clocks need not agree with anybody's: an answer that took a second began a second before it was heard.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from typing import Final, Literal

from strata.train.core import ops
from strata.train.core.commands import Timing
from strata.train.core.facts import Accepted, Dispatched
from strata.train.core.future import Future, FutureStatus
from strata.train.core.inputs import Outcome
from strata.train.core.state import TrainState
from strata.train.core.status import Timeline
from strata.train.core.views import tokens_of

OUTCOMES: Final[Mapping[FutureStatus, Literal["finished", "failed", "cancelled"]]] = {
    FutureStatus.FINISHED: "finished",
    FutureStatus.FAILED: "failed",
    FutureStatus.CANCELLED: "cancelled",
}
MINUTE_S: Final = 60
_MOST_TOLD: Final = 64


class Timelines:
    """Those of the operations that came last, at most `keep`."""

    def __init__(self, keep: int) -> None:
        self._keep = keep
        self._lines: dict[str, Timeline] = {}
        self._told: dict[int, Sequence[str]] = {}
        """The operations of dispatches that are not answered."""

    def __iter__(self) -> Iterator[Timeline]:
        """Oldest first."""
        return iter(self._lines.values())

    def get(self, future_id: str) -> Timeline | None:
        return self._lines.get(future_id)

    def decided(self, outcome: Outcome, state: TrainState, now_s: float) -> list[Timeline]:
        """Note what became true. Returns those that have ended now."""
        for fact in outcome.facts:
            if isinstance(fact, Accepted):
                self._accepted(state, fact, now_s)
            elif isinstance(fact, Dispatched):
                for line in self._of(state, fact.future_ids):
                    line.number, line.dispatched_at_s = fact.number, fact.at_s or now_s
        ended = []
        for future_id in outcome.ended:
            future, over = state.futures.get(future_id), self._lines.get(future_id)
            if future is not None and over is not None:
                over.outcome, over.ended_at_s = OUTCOMES.get(future.status, ""), now_s
                ended.append(over)
        return ended

    def _accepted(self, state: TrainState, fact: Accepted, now_s: float) -> None:
        """Also those that were held for it are ready now."""
        for line in self._of(state, [fact.future_id]):
            line.accepted_at_s = fact.at_s
        operation = fact.operation
        if not isinstance(operation, ops.Sequenced) or operation.seq_id == 0:
            self._ready(state, fact.future_id, fact.at_s)
            return
        seq, at_s = operation.seq_id, fact.at_s
        while self._ready(state, f"{operation.model_id}:{seq}", at_s):
            seq, at_s = seq + 1, now_s

    def _ready(self, state: TrainState, future_id: str, now_s: float) -> bool:
        line, future = self._lines.get(future_id), state.futures.get(future_id)
        if line is None or future is None or not future.turn or line.ready_at_s is not None:
            return False
        line.ready_at_s = now_s
        return True

    def sent(self, state: TrainState, number: int, future_ids: Sequence[str], at_s: float) -> list[Timeline]:
        self._told[number] = future_ids
        while len(self._told) > _MOST_TOLD:
            del self._told[min(self._told)]
        lines = self._of(state, future_ids)
        for line in lines:
            line.number, line.sent_at_s = number, at_s
        return lines

    def answered(self, number: int, spent: Timing, at_s: float, ended: Sequence[str] | None) -> list[Timeline]:
        """The operations that were told with this dispatch. `ended` are those of a quantum, which may have come before;
        None if this was no quantum: then all of it has ended."""
        told = [line for each in self._told.pop(number, ()) if (line := self._lines.get(each)) is not None]
        for line in told:
            line.begun_at_s = at_s - spent.total_s
            if ended is None:
                line.answered_at_s, line.spent = at_s, spent
        for each in ended or ():
            line_ended = self._lines.get(each)
            if line_ended is not None:
                line_ended.answered_at_s = at_s
        return told

    def _of(self, state: TrainState, future_ids: Sequence[str]) -> list[Timeline]:
        found = []
        for future_id in future_ids:
            line, future = self._lines.get(future_id), state.futures.get(future_id)
            if line is None and future is not None and future.operation is not None:
                line = self._lines[future_id] = _begun(future, future.operation)
                if len(self._lines) > self._keep:
                    del self._lines[next(iter(self._lines))]
            if line is not None:
                found.append(line)
        return found


def _begun(future: Future, operation: ops.Operation) -> Timeline:
    return Timeline(
        future_id=future.future_id,
        tenant=future.tenant,
        model_id=future.model_id,
        kind=future.kind,
        tokens=tokens_of(operation),
        accepted_at_s=future.accepted_at_s,
    )


class Rate:
    """How much there was in the last minute, second by second."""

    def __init__(self) -> None:
        self._seconds: deque[tuple[int, int]] = deque()

    def note(self, amount: int, now_s: float) -> None:
        second = int(now_s)
        if self._seconds and self._seconds[-1][0] == second:
            amount += self._seconds.pop()[1]
        self._seconds.append((second, amount))
        self._forget(second)

    def per_s(self, now_s: float) -> float:
        self._forget(int(now_s))
        return sum(amount for _, amount in self._seconds) / MINUTE_S

    def _forget(self, second: int) -> None:
        while self._seconds and self._seconds[0][0] <= second - MINUTE_S:
            self._seconds.popleft()
