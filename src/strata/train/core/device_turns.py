"""Decides whether ranks or the server's engines have the devices that they share: requests of a turn by work and time,
what may run in it, and when it passes. Both are never awake at once.

A turn passes in two facts. From `DeviceTurnRequested` on the side that has the devices begins nothing new. When what it
runs has ended it goes to sleep, and only its confirmation, under the number of that request, makes `DeviceTurnTaken`.
Nothing wakes the other side, and no process of it is started, before that fact is durable.
"""

from __future__ import annotations

from typing import Final, Literal

import msgspec

from strata.train.core import publishing, sampling_slices, snapshots
from strata.train.core.client_commands import Done
from strata.train.core.facts import DeviceTurnRequested, DeviceTurnTaken
from strata.train.core.inputs import Decision, RequestTurn, TakeTurn
from strata.train.core.state import DeviceSide, DeviceTurn, TrainState

IDLE_S: Final = 0.5
"""A side without work keeps the devices so long: a client that waits for each result leaves such gaps."""
OTHER: Final[dict[DeviceSide, DeviceSide]] = {"ranks": "engines", "engines": "ranks"}


def request_turn(state: TrainState, request: RequestTurn) -> Decision:
    """The other side gets the devices when this one is idle, or has had them long enough while the other waits."""
    turn = state.current_turn
    if turn is None or turn.leaving:
        return Decision(Done())
    other = OTHER[turn.side]
    if other not in request.starting and not _has_work(state, other, request.at_s):
        return Decision(Done())
    busy = turn.side in request.starting or _has_work(state, turn.side, request.at_s)
    reason: Literal["idle", "limit"]
    if not busy and request.at_s - max(turn.at_s, turn.busy_at_s) >= IDLE_S:
        reason = "idle"
    elif request.at_s - turn.at_s >= state.rules.device_turn_s:
        reason = "limit"
    else:
        return Decision(Done())
    return Decision(Done(), (DeviceTurnRequested(turn.number + 1, other, reason, request.at_s),))


def take_turn(state: TrainState, request: TakeTurn) -> Decision:
    """A confirmation of another request, or of ranks that were replaced, says nothing about today."""
    turn = state.current_turn
    if turn is None or not turn.leaving or request.number != turn.number or not may_sleep(state):
        return Decision(Done())
    if turn.side == "ranks" and request.group != state.group:
        return Decision(Done())
    return Decision(Done(), (DeviceTurnTaken(turn.number, OTHER[turn.side], request.group, request.at_s),))


def may_sleep(state: TrainState) -> bool:
    """Says whether the side that leaves runs nothing any more."""
    turn = state.current_turn
    if turn is None or not turn.leaving:
        return False
    if turn.side == "engines":
        return not _routed(state)
    return not state.dispatches and not _runs_samples(state)


def wants_last_slice(state: TrainState) -> bool:
    """Says whether ranks that leave still run samples: those end, and no others begin."""
    turn = state.current_turn
    leaves = turn is not None and turn.leaving and turn.side == "ranks"
    return leaves and _runs_samples(state) and state.running_slice is None


def reject_reason(state: TrainState, group: str) -> str | None:
    """Says why this group of ranks must not be used; None if it may. Ranks are awake when they start."""
    turn = state.current_turn
    if turn is None or turn.side == "ranks" or group == state.group:
        return None
    return "it started while engines had its devices"


def _has_work(state: TrainState, side: DeviceSide, at_s: float) -> bool:
    if side == "ranks":
        if len(state.scheduler) or state.dispatches or sampling_slices.wants_slice(state):
            return True
        return snapshots.due_reason(state, at_s) is not None
    engines = set(state.rules.engines)
    if _routed(state) or any(not engines.isdisjoint(each.endpoints) for each in state.pushes.values()):
        return True
    return any(
        not engines.isdisjoint(publishing.endpoints_for(state, future_id, sample) or ())
        for future_id, sample in state.waiting.items()
    )


def _routed(state: TrainState) -> bool:
    return any(endpoint in state.rules.engines for endpoint, _ in state.routed.values())


def _runs_samples(state: TrainState) -> bool:
    """Samples of ranks that a client put to sleep are paused, and go on when it wakes them."""
    return not state.asleep and bool(state.sampling or state.cancelled_samples)


# Facts


def apply(state: TrainState, fact: DeviceTurnRequested | DeviceTurnTaken) -> None:
    turn = state.device_turn or DeviceTurn()
    match fact:
        case DeviceTurnRequested():
            state.device_turn = msgspec.structs.replace(turn, number=fact.number, leaving=True)
        case DeviceTurnTaken():
            state.device_turn = DeviceTurn(fact.number, fact.side, at_s=fact.at_s)


def record_busy(state: TrainState, at_s: float) -> None:
    """An operation of the side that has the devices has ended, or a push has begun or ended."""
    turn = state.current_turn
    if turn is not None and at_s > turn.busy_at_s:
        state.device_turn = msgspec.structs.replace(turn, busy_at_s=at_s)
