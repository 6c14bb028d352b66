"""Records when each of the last operations passed each stage, rates over the last minute, and the history of throughput
(360 points of 10 s).

Times are seconds since 1970 by the orchestrator's clock. The ranks report durations, so that their clocks need not
agree with any other: a reply that took a second began a second before it was received.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from typing import Final, Literal

from strata.train.core import ops
from strata.train.core.commands import Timing
from strata.train.core.facts import Dispatched, OperationAccepted
from strata.train.core.future import FutureStatus, OperationFuture
from strata.train.core.inputs import Decision
from strata.train.core.ops import tokens_of
from strata.train.core.state import TrainState
from strata.train.status.reports import ThroughputPoint, Timeline

OUTCOMES: Final[Mapping[FutureStatus, Literal["finished", "failed", "cancelled"]]] = {
    FutureStatus.FINISHED: "finished",
    FutureStatus.FAILED: "failed",
    FutureStatus.CANCELLED: "cancelled",
}
MINUTE_S: Final = 60
HISTORY_STEP_S: Final = 10
HISTORY_POINTS: Final = 360
_MAX_IN_FLIGHT: Final = 64


class Timelines:
    """Timelines of the newest operations, at most `keep`."""

    def __init__(self, keep: int) -> None:
        self._keep = keep
        self._lines: dict[str, Timeline] = {}
        self._in_flight: dict[int, Sequence[str]] = {}
        """The operations of dispatches in flight."""

    def __iter__(self) -> Iterator[Timeline]:
        """Oldest first."""
        return iter(self._lines.values())

    def get(self, future_id: str) -> Timeline | None:
        return self._lines.get(future_id)

    def in_flight(self, number: int) -> Sequence[str]:
        """The operations of this dispatch, which has no reply yet."""
        return self._in_flight.get(number, ())

    def record_decision(self, decision: Decision, state: TrainState, now_s: float) -> list[Timeline]:
        """Record the facts of a decision. Returns the timelines that ended with it."""
        for fact in decision.facts:
            if isinstance(fact, OperationAccepted):
                self._accepted(state, fact, now_s)
            elif isinstance(fact, Dispatched):
                for line in self._of(state, fact.future_ids):
                    line.number, line.dispatched_at_s = fact.number, fact.at_s or now_s
        ended = []
        for future_id in decision.ended:
            future, over = state.futures.get(future_id), self._lines.get(future_id)
            if future is not None and over is not None:
                over.outcome, over.ended_at_s = OUTCOMES.get(future.status, ""), now_s
                ended.append(over)
        return ended

    def _accepted(self, state: TrainState, fact: OperationAccepted, now_s: float) -> None:
        """Operations that were held behind this one become ready with it."""
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

    def record_sent(self, state: TrainState, number: int, future_ids: Sequence[str], at_s: float) -> list[Timeline]:
        self._in_flight[number] = future_ids
        while len(self._in_flight) > _MAX_IN_FLIGHT:
            del self._in_flight[min(self._in_flight)]
        lines = self._of(state, future_ids)
        for line in lines:
            line.number, line.sent_at_s = number, at_s
        return lines

    def record_reply(self, number: int, spent: Timing, at_s: float, ended: Sequence[str] | None) -> list[Timeline]:
        """Timelines of this dispatch. `ended` are the samples that ended in a slice, which an earlier slice may have
        begun; None if this was no slice: then all of its operations have ended."""
        sent = [line for each in self._in_flight.pop(number, ()) if (line := self._lines.get(each)) is not None]
        for line in sent:
            line.begun_at_s = at_s - spent.total_s
            if ended is None:
                line.answered_at_s, line.spent = at_s, spent
        for each in ended or ():
            line_ended = self._lines.get(each)
            if line_ended is not None:
                line_ended.answered_at_s = at_s
        return sent

    def _of(self, state: TrainState, future_ids: Sequence[str]) -> list[Timeline]:
        lines = []
        for future_id in future_ids:
            line, future = self._lines.get(future_id), state.futures.get(future_id)
            if line is None and future is not None and future.operation is not None:
                line = self._lines[future_id] = _new_timeline(future, future.operation)
                if len(self._lines) > self._keep:
                    del self._lines[next(iter(self._lines))]
            if line is not None:
                lines.append(line)
        return lines


def _new_timeline(future: OperationFuture, operation: ops.Operation) -> Timeline:
    return Timeline(
        future_id=future.future_id,
        tenant=future.tenant,
        model_id=future.model_id,
        kind=future.kind,
        tokens=tokens_of(operation),
        accepted_at_s=future.accepted_at_s,
    )


class Rate:
    """A rate over the last minute, counted second by second."""

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


class ThroughputHistory:
    """How many tokens were trained and sampled, in steps of ten seconds over the last hour."""

    def __init__(self) -> None:
        self._steps: deque[list[int]] = deque(maxlen=HISTORY_POINTS)

    def note(self, now_s: float, *, trained: int = 0, sampled: int = 0) -> None:
        step = int(now_s) // HISTORY_STEP_S
        if not self._steps or self._steps[-1][0] != step:
            self._steps.append([step, 0, 0])
        self._steps[-1][1] += trained
        self._steps[-1][2] += sampled

    def points(self, now_s: float) -> list[ThroughputPoint]:
        """Returns points of every step from the first that is kept to the last that is over; zero where nothing
        happened."""
        last = int(now_s) // HISTORY_STEP_S - 1
        noted = {step: (trained, sampled) for step, trained, sampled in self._steps if step > last - HISTORY_POINTS}
        return [
            ThroughputPoint(
                at_s=float(step * HISTORY_STEP_S),
                values={
                    name: count / HISTORY_STEP_S
                    for name, count in zip(("trained", "sampled"), noted.get(step, (0, 0)), strict=True)
                },
            )
            for step in range(min(noted, default=last + 1), last + 1)
        ]
