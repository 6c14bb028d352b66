"""Snapshots of all models at a boundary between two dispatches: when one is taken, which are kept, and the way back.

A snapshot is a dispatch of its own, so that it is clear what is in it. It counts once its files are on the disk and
everything before it has its results (`SnapshotCommitted`). Ranks that start anew are told to restore the newest one and
then every dispatch after it. The last `KEEP` are kept; what happened before the oldest of them is let go.
"""

from __future__ import annotations

from collections.abc import Mapping, Set
from typing import Final

import msgspec

from strata.base.errors import Code, StrataError
from strata.train.core import ops
from strata.train.core.facts import (
    Dispatched,
    SnapshotAbandoned,
    SnapshotCommitted,
    SnapshotRefused,
    SnapshotTaken,
)
from strata.train.core.future import FutureStatus
from strata.train.core.inputs import AnswerSnapshot, CommitSnapshot, Dispatching, Done, Outcome, RefuseSnapshot
from strata.train.core.sampling import Sample
from strata.train.core.state import Dispatch, Since, Snapshot, TrainState

KEEP: Final = 2
SLOWEST: Final = 6
"""After so many failures in a row the time between two tries is not doubled any more."""
_CHANGES_NOTHING: Final = (ops.SaveWeights, ops.SyncWeights, ops.Sleep, ops.Wake, ops.Unreadable, Sample)


def due(state: TrainState, at_s: float) -> str | None:
    """Why it is time for a snapshot. After one that failed it takes twice as long until the next."""
    rules, since = state.rules, state.since
    if state.snapshotting is not None or state.asleep:
        return None
    slower = 1 << min(state.snapshot_failures, SLOWEST)
    if rules.snapshot_dispatches and since.dispatches >= rules.snapshot_dispatches * slower:
        return f"{since.dispatches} dispatches"
    if rules.snapshot_payload_bytes and since.payload_bytes >= rules.snapshot_payload_bytes * slower:
        return f"{since.payload_bytes} bytes of payloads"
    if rules.snapshot_s and since.dispatches and at_s - since.first_at_s >= rules.snapshot_s * slower:
        return f"{at_s - since.first_at_s:.0f} seconds"
    return None


def take(state: TrainState, at_s: float) -> Outcome:
    number = state.dispatched + 1
    # Of no other group: one that was given up may still be writing.
    name = f"{number:012d}-{state.group}"
    dispatch = Dispatch(number, (), path=name, snapshot=True)
    return Outcome(Dispatching(dispatch, 1.0), (Dispatched(number, (), path=name, snapshot=True, at_s=at_s),))


def answer(state: TrainState, given: AnswerSnapshot) -> Outcome:
    """The ranks have copied everything and write it, or could not."""
    if given.number not in state.dispatches:
        return Outcome(Done())
    if given.trouble is not None:
        return Outcome(Done(), (SnapshotAbandoned(given.number, given.trouble),))
    return Outcome(Done(), (SnapshotTaken(given.number),))


def commit(state: TrainState, given: CommitSnapshot) -> Outcome:
    """Not before all results up to it are there: nobody could make them again from what comes after."""
    taking = state.snapshotting
    if taking is None or taking.number != given.number or state.settled < given.number:
        return Outcome(Done())
    if given.trouble is not None:
        return Outcome(Done(), (SnapshotAbandoned(given.number, given.trouble),))
    fact = SnapshotCommitted(
        given.number, taking.name, given.digest, given.at_s, given.size, given.held_s, given.written_s
    )
    return Outcome(Done(), (fact,))


def refuse(state: TrainState, given: RefuseSnapshot) -> Outcome:
    """The last way back is not forgotten, damaged or not: somebody may be able to repair it."""
    known = [each.number for each in state.snapshots]
    if given.number not in known or (len(known) == 1 and state.cut):
        return Outcome(Done())
    return Outcome(Done(), (SnapshotRefused(given.number, given.reason),))


def way_back(state: TrainState, refused: Set[int]) -> Snapshot | None:
    """The snapshot that ranks which start anew begin from; None is the beginning of everything."""
    left = [each for each in state.snapshots if each.number not in refused]
    if left:
        return left[-1]
    if state.cut:
        raise StrataError(
            Code.CORRUPT,
            "no snapshot of the models can be restored, and what led to them was let go",
            hint="bring back the snapshot folders from a backup, or begin anew with an empty data folder",
        )
    return None


def pending_at(state: TrainState, after: int) -> Mapping[str, ops.Operation]:
    """Operations that were accepted before a boundary and dispatched after it: the journal may not have them any more.

    Of the newest snapshot up to `after`; GONE if what came after that number was let go.
    """
    reached = [each for each in state.snapshots if each.number <= after]
    if reached:
        return reached[-1].pending
    if state.cut:
        raise StrataError(Code.GONE, f"dispatches after {after} were let go up to {state.cut}")
    return {}


def beginnings(state: TrainState) -> set[int]:
    """After which dispatches ranks that start anew may begin, now or when the snapshot being taken is there."""
    found = {each.number for each in state.snapshots}
    if state.snapshotting is not None:
        found.add(state.snapshotting.number)
    return found if state.cut else found | {0}


# Facts


def note_dispatch(state: TrainState, fact: Dispatched, operations: list[ops.Operation]) -> None:
    """Count what a snapshot would cover; a snapshot itself begins the count anew."""
    if fact.snapshot:
        pending = {
            each.future_id: each.operation
            for each in state.futures
            if each.status is FutureStatus.PENDING
            and each.operation is not None
            and not isinstance(each.operation, Sample)
        }
        state.snapshotting = Snapshot(fact.number, fact.path, pending=pending, since=state.since)
        state.since = Since()
        return
    size = sum(map(_payload_bytes, operations))
    changes = any(_changes(operation) for operation in operations)
    state.since = _later(state.since, Since(int(changes), size, fact.at_s if changes else 0.0))


def _later(one: Since, other: Since) -> Since:
    times = [each.first_at_s for each in (one, other) if each.dispatches]
    return Since(one.dispatches + other.dispatches, one.payload_bytes + other.payload_bytes, min(times, default=0.0))


def _changes(operation: ops.Operation) -> bool:
    if isinstance(operation, ops.ForwardBackward):
        return not operation.forward_only
    return not isinstance(operation, _CHANGES_NOTHING)


def _payload_bytes(operation: ops.Operation) -> int:
    if not isinstance(operation, ops.ForwardBackward):
        return 0
    payload = operation.payload
    return payload.size if isinstance(payload, ops.Stored) else len(payload.data)


def apply(state: TrainState, fact: SnapshotTaken | SnapshotAbandoned | SnapshotCommitted | SnapshotRefused) -> None:
    match fact:
        case SnapshotTaken():
            state.dispatches.pop(fact.number, None)
        case SnapshotAbandoned():
            state.dispatches.pop(fact.number, None)
            abandon(state)
        case SnapshotCommitted():
            _commit(state, fact)
        case SnapshotRefused():
            state.snapshots = [each for each in state.snapshots if each.number != fact.number]


def abandon(state: TrainState) -> None:
    """The one that is being taken will never be there: what it would have covered is still uncovered."""
    taking, state.snapshotting = state.snapshotting, None
    if taking is not None:
        state.since = _later(taking.since, state.since)
        state.snapshot_failures += 1


def forget_unanswered(state: TrainState) -> None:
    """Other ranks: whatever the ones before were about to write, they have not finished it."""
    for number in [each.number for each in state.dispatches.values() if each.snapshot]:
        del state.dispatches[number]
    abandon(state)


def _commit(state: TrainState, fact: SnapshotCommitted) -> None:
    taking, state.snapshotting = state.snapshotting, None
    assert taking is not None, "checked before"
    made = msgspec.structs.replace(taking, digest=fact.digest, since=Since())
    state.snapshots = [*state.snapshots, made][-KEEP:]
    state.snapshot_failures = 0
    if len(state.snapshots) == KEEP:
        state.cut = state.snapshots[0].number
    state.given_up = {number for number in state.given_up if number > state.cut}
    if state.cut:
        state.readings = {path: each for path, each in state.readings.items() if each.read > state.cut}
