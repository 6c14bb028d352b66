"""Measures the ranks' throughput by kind of work, and words the queue position and ETA that a client polls."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from strata.train.core.future import FutureStatus, OperationFuture
from strata.train.core.ops import tokens_of
from strata.train.core.publishing import endpoints_for
from strata.train.core.sampling import SampleOperation
from strata.train.core.scheduler import QueuedOperation
from strata.train.core.state import TrainState
from strata.train.status.views import QueuePosition, QueueState

WEIGHT: Final = 0.2
"""Weight of the newest measurement in the moving average."""


class ThroughputEstimate:
    """Moving averages by kind: seconds per token of passes, seconds per operation of everything else."""

    def __init__(self) -> None:
        self._seconds: dict[str, float] = {}
        self._order: Sequence[QueuedOperation] | None = None
        self._start_times_s: list[float | None] = []
        """The times of that order, cached until the next measurement: many clients poll in between."""

    def record(self, kind: str, amount: int, seconds: float) -> None:
        """`amount` counts tokens, or operations if they have none."""
        if seconds <= 0:
            return
        measured = seconds / max(amount, 1)
        average = self._seconds.get(kind)
        self._seconds[kind] = measured if average is None else average + WEIGHT * (measured - average)
        self._order = None

    def expected_s(self, kind: str, tokens: int) -> float | None:
        """None before anything of this kind was measured."""
        average = self._seconds.get(kind)
        return None if average is None else average * max(tokens, 1)

    def start_times_s(self, order: Sequence[QueuedOperation]) -> Sequence[float | None]:
        """Returns for each operation how long those before it take; None if the kind of one was never measured."""
        if self._order is not order:
            self._order, self._start_times_s = order, []
            ahead_s: float | None = 0.0
            for entry in order:
                self._start_times_s.append(ahead_s)
                took_s = self.expected_s(entry.kind, entry.tokens)
                ahead_s = None if ahead_s is None or took_s is None else ahead_s + took_s
        return self._start_times_s


def describe_wait(
    state: TrainState, future: OperationFuture, throughput: ThroughputEstimate, *, attached: bool
) -> QueuePosition:
    """The queue position of a future that has not ended, its ETA, and what runs now."""
    if not attached:
        return QueuePosition(QueueState.PAUSED_CAPACITY, "the ranks are starting")
    if isinstance(future.operation, SampleOperation):
        return _describe_sample(state, future)
    if any(push.future_id == future.future_id for push in state.pushes.values()):
        return QueuePosition(
            QueueState.ACTIVE, "the weights are saved, and are being pushed to the inference endpoints"
        )
    if future.status is FutureStatus.DISPATCHED:
        first = future.number == min(state.dispatches)
        return QueuePosition(QueueState.ACTIVE, "running" if first else f"next at the ranks, {_running(state)}")
    if not future.turn:
        wanted = state.models[future.model_id].line.wanted
        # Clients show the reason only of what is paused, and this one waits for something that may never come.
        return QueuePosition(QueueState.PAUSED_CAPACITY, f"held until operation {wanted} of this model comes")
    return _describe_queued(state, future, throughput)


def _describe_queued(state: TrainState, future: OperationFuture, throughput: ThroughputEstimate) -> QueuePosition:
    forecast = state.scheduler.forecast()
    position = forecast.positions[future.future_id]
    phrases = [f"{_ordinal(position + 1)} in queue"]
    wait_s, running_s = throughput.start_times_s(forecast.order)[position], in_flight_s(state, throughput)
    # Zero if nothing is before it, or only a sampling slice, whose duration cannot be predicted.
    if wait_s is not None and running_s is not None and wait_s + running_s > 0:
        phrases.append(f"~{wait_s + running_s:.0f} s")
    phrases.append(_running(state))
    others = forecast.others_before(position, future.tenant) or _others_run(state, future.tenant)
    return QueuePosition(QueueState.PAUSED_CAPACITY if others else QueueState.ACTIVE, ", ".join(phrases))


def _describe_sample(state: TrainState, future: OperationFuture) -> QueuePosition:
    """Clients slow down for what is paused; a sample that waits for a slot is not paused."""
    if future.future_id in state.routed:
        return QueuePosition(QueueState.ACTIVE, f"being sampled by {state.routed[future.future_id][0]}")
    if state.asleep:
        return QueuePosition(QueueState.PAUSED_CAPACITY, "the server sleeps")
    if future.status is FutureStatus.DISPATCHED:
        return QueuePosition(QueueState.ACTIVE, f"being sampled with {len(state.sampling) - 1} others")
    sample = state.waiting.get(future.future_id)
    if sample is not None and endpoints_for(state, future.future_id, sample) is not None:
        return QueuePosition(QueueState.ACTIVE, "waits for an inference engine")
    position = next((at for at, future_id in enumerate(state.waiting) if future_id == future.future_id), 0)
    return QueuePosition(
        QueueState.ACTIVE, f"{_ordinal(position + 1)} to be sampled, {len(state.sampling)} are before it"
    )


def _others_run(state: TrainState, tenant: str) -> bool:
    running = (state.futures.get(each) for dispatch in state.dispatches.values() for each in dispatch.future_ids)
    return any(future is not None and future.tenant != tenant for future in running)


def in_flight_s(state: TrainState, throughput: ThroughputEstimate) -> float | None:
    """Time that the dispatches in flight take. Without sampling slices, whose cost is not known in advance."""
    waits = [
        throughput.expected_s(future.kind, tokens_of(future.operation))
        for dispatch in state.dispatches.values()
        if dispatch.slice is None
        for each in dispatch.future_ids
        if (future := state.futures.get(each)) is not None and future.operation is not None
    ]
    known = [wait_s for wait_s in waits if wait_s is not None]
    return sum(known) if len(known) == len(waits) else None


def _running(state: TrainState) -> str:
    for _, dispatch in sorted(state.dispatches.items()):
        if dispatch.slice is not None:
            return f"sampling for {len(state.sampling)} requests"
        if dispatch.snapshot:
            return "copying the models for a snapshot"
        future = state.futures.get(dispatch.future_ids[0])
        if future is not None:
            return f"running {future.tenant.removeprefix('key:')}/{future.kind}"
    return "nothing is running"


def _ordinal(number: int) -> str:
    if number % 100 in (11, 12, 13):
        return f"{number}th"
    return f"{number}{ {1: 'st', 2: 'nd', 3: 'rd'}.get(number % 10, 'th') }"
