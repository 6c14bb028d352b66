"""How fast the ranks are, from what they took so far, and where somebody who waits stands because of it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from strata.train.core.future import Future, FutureStatus
from strata.train.core.messages import QueueState, Waiting
from strata.train.core.sampling import Sample
from strata.train.core.schedule import Entry
from strata.train.core.state import TrainState
from strata.train.core.views import tokens_of

WEIGHT: Final = 0.2
"""Of the newest measurement in the average: the last handful counts."""


class Pace:
    """Seconds per token of passes, and per operation of what has no tokens, each by kind."""

    def __init__(self) -> None:
        self._seconds: dict[str, float] = {}
        self._order: Sequence[Entry] | None = None
        self._begins_s: list[float | None] = []
        """Of that order, kept until something is measured: many ask where they stand in the same."""

    def note(self, kind: str, amount: int, seconds: float) -> None:
        """`amount` is of tokens, or of operations if they have none."""
        if seconds <= 0:
            return
        measured = seconds / max(amount, 1)
        known = self._seconds.get(kind)
        self._seconds[kind] = measured if known is None else known + WEIGHT * (measured - known)
        self._order = None

    def expected_s(self, kind: str, tokens: int) -> float | None:
        """None before anything of the kind was measured."""
        known = self._seconds.get(kind)
        return None if known is None else known * max(tokens, 1)

    def begins_s(self, order: Sequence[Entry]) -> Sequence[float | None]:
        """Of each, how long those before it take; None if anything of them was never measured."""
        if self._order is not order:
            self._order, self._begins_s = order, []
            ahead_s: float | None = 0.0
            for entry in order:
                self._begins_s.append(ahead_s)
                took_s = self.expected_s(entry.kind, entry.tokens)
                ahead_s = None if ahead_s is None or took_s is None else ahead_s + took_s
        return self._begins_s


def describe(state: TrainState, future: Future, pace: Pace, *, attached: bool) -> Waiting:
    """For a future that has not ended: its place, when its turn will come, and what runs now."""
    if not attached:
        return Waiting(QueueState.PAUSED_CAPACITY, "the ranks are starting")
    if isinstance(future.operation, Sample):
        return _describe_sample(state, future)
    if any(push.future_id == future.future_id for push in state.pushes.values()):
        return Waiting(QueueState.ACTIVE, "the weights are saved, and the inference endpoints are being told")
    if future.status is FutureStatus.DISPATCHED:
        first = future.number == min(state.dispatches)
        return Waiting(QueueState.ACTIVE, "running" if first else f"next at the ranks, {_running(state)}")
    if not future.turn:
        wanted = state.models[future.model_id].line.wanted
        # Clients show the reason only of what is paused, and this one waits for something that may never come.
        return Waiting(QueueState.PAUSED_CAPACITY, f"held until operation {wanted} of this model comes")
    foreseen = state.scheduler.foreseen()
    place = foreseen.places[future.future_id]
    words = [f"{_ordinal(place + 1)} in queue"]
    wait_s, running_s = pace.begins_s(foreseen.order)[place], at_ranks_s(state, pace)
    # Zero if nothing is before it, or only a quantum, which takes nobody knows how long.
    if wait_s is not None and running_s is not None and wait_s + running_s > 0:
        words.append(f"~{wait_s + running_s:.0f} s")
    words.append(_running(state))
    others = foreseen.others_before(place, future.tenant) or _others_run(state, future.tenant)
    return Waiting(QueueState.PAUSED_CAPACITY if others else QueueState.ACTIVE, ", ".join(words))


def _describe_sample(state: TrainState, future: Future) -> Waiting:
    """Clients slow down for what is paused; a request that waits for a place among others is not."""
    if future.future_id in state.routed:
        return Waiting(QueueState.ACTIVE, f"being sampled by {state.routed[future.future_id][0]}")
    if state.asleep:
        return Waiting(QueueState.PAUSED_CAPACITY, "the server sleeps")
    if future.status is FutureStatus.DISPATCHED:
        return Waiting(QueueState.ACTIVE, f"being sampled with {len(state.sampling) - 1} others")
    place = next((place for place, each in enumerate(state.waiting) if each == future.future_id), 0)
    return Waiting(QueueState.ACTIVE, f"{_ordinal(place + 1)} to be sampled, {len(state.sampling)} are before it")


def _others_run(state: TrainState, tenant: str) -> bool:
    running = (state.futures.get(each) for dispatch in state.dispatches.values() for each in dispatch.future_ids)
    return any(future is not None and future.tenant != tenant for future in running)


def at_ranks_s(state: TrainState, pace: Pace) -> float | None:
    """What the ranks have before them already. Not their quanta: what a sample costs is not known before it ends."""
    waits = [
        pace.expected_s(future.kind, tokens_of(future.operation))
        for dispatch in state.dispatches.values()
        if dispatch.quantum is None
        for each in dispatch.future_ids
        if (future := state.futures.get(each)) is not None and future.operation is not None
    ]
    known = [wait_s for wait_s in waits if wait_s is not None]
    return sum(known) if len(known) == len(waits) else None


def _running(state: TrainState) -> str:
    for _, dispatch in sorted(state.dispatches.items()):
        if dispatch.quantum is not None:
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
