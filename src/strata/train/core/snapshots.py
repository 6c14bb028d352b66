"""Snapshots of all models: when one is due, its share of the time (5 %), how many are retained (2), backoff after a
failed one, and the recovery point with what is replayed after it.

A snapshot is a dispatch of its own, so its position among the others is exact. It is committed once its files are
durable and every dispatch before it has results (`SnapshotCommitted`). New ranks restore the newest snapshot and replay
every dispatch after it. The last `KEEP` are retained; the journal before the oldest of them is truncated. While a model
is stopped for a replay that differed, the one from before the difference is retained too.
"""

from __future__ import annotations

from collections.abc import Mapping, Set
from typing import Final

import msgspec

from strata.base.errors import Code, StrataError
from strata.train.core import ops
from strata.train.core.client_commands import Done
from strata.train.core.facts import (
    Dispatched,
    SnapshotAbandoned,
    SnapshotCommitted,
    SnapshotCopied,
    SnapshotRejected,
)
from strata.train.core.future import FutureStatus
from strata.train.core.inputs import CommitSnapshot, CompleteSnapshotCopy, Decision, Dispatching, RejectSnapshot
from strata.train.core.replay_differences import RankNumerics
from strata.train.core.replay_stops import pinned_snapshot
from strata.train.core.sampling import SampleOperation
from strata.train.core.state import Dispatch, ModelSnapshot, SnapshotBacklog, TrainState

KEEP: Final = 2
MAX_BACKOFF_DOUBLINGS: Final = 6
"""Exponential backoff stops to double after so many failures in a row."""
COST_SHARE: Final = 0.05
"""The share of the time that may go into snapshots that are due for their replay: those of large models take
minutes."""
_READ_ONLY: Final = (ops.SaveWeights, ops.SyncWeights, ops.Sleep, ops.Wake, ops.MalformedOperation, SampleOperation)


def due_reason(state: TrainState, at_s: float) -> str | None:
    """Says why a snapshot is due; None if it is not. A failure doubles the interval until the next attempt."""
    rules, since = state.rules, state.snapshot_backlog
    if state.snapshotting is not None or state.asleep:
        return None
    slower = 1 << min(state.snapshot_failures, MAX_BACKOFF_DOUBLINGS)
    if rules.snapshot_dispatches and since.dispatches >= rules.snapshot_dispatches * slower:
        return f"{since.dispatches} dispatches"
    if rules.snapshot_payload_bytes and since.payload_bytes >= rules.snapshot_payload_bytes * slower:
        return f"{since.payload_bytes} bytes of payloads"
    if rules.snapshot_replay_s and since.dispatches and since.replay_s >= replay_limit_s(state) * slower:
        return f"a replay of {since.replay_s:.0f} seconds"
    if rules.snapshot_s and since.dispatches and at_s - since.first_at_s >= rules.snapshot_s * slower:
        return f"{at_s - since.first_at_s:.0f} seconds"
    return None


def replay_limit_s(state: TrainState) -> float:
    """Returns how long a replay may take before a snapshot is due for that reason."""
    cost_s = state.snapshots[-1].cost_s if state.snapshots else 0.0
    return max(state.rules.snapshot_replay_s, cost_s / COST_SHARE)


def begin_snapshot(state: TrainState, at_s: float) -> Decision:
    number = state.dispatched + 1
    # The group is part of the name: a quarantined group may still be writing.
    name = f"{number:012d}-{state.group}"
    dispatch = Dispatch(number, (), path=name, snapshot=True)
    return Decision(Dispatching(dispatch, 1.0), (Dispatched(number, (), path=name, snapshot=True, at_s=at_s),))


def snapshot_copied(state: TrainState, request: CompleteSnapshotCopy) -> Decision:
    """The ranks have copied all models and write the copy, or could not."""
    if request.number not in state.dispatches:
        return Decision(Done())
    if request.trouble is not None:
        return Decision(Done(), (SnapshotAbandoned(request.number, request.trouble),))
    return Decision(Done(), (SnapshotCopied(request.number),))


def commit_snapshot(state: TrainState, request: CommitSnapshot) -> Decision:
    """Not before every dispatch up to it has results: no replay from the snapshot would produce them."""
    taking, done = state.snapshotting, request.written
    if taking is None or taking.number != done.number or state.settled_through < done.number:
        return Decision(Done())
    if done.trouble is not None:
        return Decision(Done(), (SnapshotAbandoned(done.number, done.trouble),))
    fact = SnapshotCommitted(
        done.number, taking.name, done.digest, request.at_s, done.size, done.held_s, done.written_s
    )
    return Decision(Done(), (fact,))


def reject_snapshot(state: TrainState, request: RejectSnapshot) -> Decision:
    """The last recovery point is never dropped, damaged or not: an operator may be able to repair it."""
    known = [each.number for each in state.snapshots]
    if request.number not in known or (len(known) == 1 and state.truncated_through):
        return Decision(Done())
    return Decision(Done(), (SnapshotRejected(request.number, request.reason),))


def recovery_point(state: TrainState, refused: Set[int]) -> ModelSnapshot | None:
    """The snapshot that new ranks restore; None: they replay the whole journal."""
    left = [each for each in state.snapshots if each.number not in refused]
    if left:
        return left[-1]
    if state.truncated_through:
        raise StrataError(
            Code.CORRUPT,
            "no snapshot of the models can be restored, and the journal before them was truncated",
            hint="bring back the snapshot folders from a backup, or start over with an empty data folder",
        )
    return None


def pending_operations(state: TrainState, after: int) -> Mapping[str, ops.Operation]:
    """Operations that were accepted before a dispatch and dispatched after it: the journal may not have them any more.

    From the newest snapshot up to `after`; GONE if the journal after that dispatch was truncated.
    """
    reached = [each for each in state.snapshots if each.number <= after]
    if reached:
        return reached[-1].pending
    if state.truncated_through:
        raise StrataError(Code.GONE, f"dispatches after {after} were truncated up to {state.truncated_through}")
    return {}


def retained_numerics(state: TrainState) -> RankNumerics | None:
    """Those of the ranks where the retained journal begins; the facts after that tell of others."""
    return state.snapshots[0].numerics if state.truncated_through and state.snapshots else None


def replay_starts(state: TrainState) -> set[int]:
    """Returns the dispatches after which a replay may start, now or when the snapshot in progress is committed."""
    found = {each.number for each in state.snapshots}
    if state.snapshotting is not None:
        found.add(state.snapshotting.number)
    return found if state.truncated_through else found | {0}


# Facts


def record_dispatch(state: TrainState, fact: Dispatched, operations: list[ops.Operation]) -> None:
    """Count what the next snapshot would cover; a snapshot itself resets the count."""
    if fact.snapshot:
        pending = {
            each.future_id: each.operation
            for each in state.futures
            if each.status is FutureStatus.PENDING
            and each.operation is not None
            and not isinstance(each.operation, SampleOperation)
        }
        state.snapshotting = ModelSnapshot(
            fact.number, fact.path, pending=pending, since=state.snapshot_backlog, numerics=state.numerics
        )
        state.snapshot_backlog = SnapshotBacklog()
        return
    size = sum(map(_payload_bytes, operations))
    changes = any(_modifies_models(operation) for operation in operations)
    state.snapshot_backlog = _merge(
        state.snapshot_backlog, SnapshotBacklog(int(changes), size, fact.at_s if changes else 0.0)
    )


def record_finished(state: TrainState, number: int, operation: ops.Operation | None, took_s: float) -> None:
    """Count how long a replay of this operation would take: for the snapshot in progress if that covers it."""
    if not took_s or (operation is not None and not _modifies_models(operation)):
        return
    taking, more = state.snapshotting, SnapshotBacklog(replay_s=took_s)
    if taking is not None and number < taking.number:
        state.snapshotting = msgspec.structs.replace(taking, since=_merge(taking.since, more))
    else:
        state.snapshot_backlog = _merge(state.snapshot_backlog, more)


def _merge(one: SnapshotBacklog, other: SnapshotBacklog) -> SnapshotBacklog:
    times = [each.first_at_s for each in (one, other) if each.dispatches]
    return SnapshotBacklog(
        one.dispatches + other.dispatches,
        one.payload_bytes + other.payload_bytes,
        min(times, default=0.0),
        one.replay_s + other.replay_s,
    )


def _modifies_models(operation: ops.Operation) -> bool:
    if isinstance(operation, ops.ForwardBackward):
        return not operation.forward_only
    return not isinstance(operation, _READ_ONLY)


def _payload_bytes(operation: ops.Operation) -> int:
    if not isinstance(operation, ops.ForwardBackward):
        return 0
    routing = [operation.routing] if isinstance(operation, ops.RoutedForwardBackward) else []
    return sum(
        payload.size if isinstance(payload, ops.StoredPayload) else len(payload.data)
        for payload in (operation.payload, *routing)
    )


def apply(state: TrainState, fact: SnapshotCopied | SnapshotAbandoned | SnapshotCommitted | SnapshotRejected) -> None:
    match fact:
        case SnapshotCopied():
            state.dispatches.pop(fact.number, None)
        case SnapshotAbandoned():
            state.dispatches.pop(fact.number, None)
            abandon_snapshot(state)
        case SnapshotCommitted():
            _commit(state, fact)
        case SnapshotRejected():
            state.snapshots = [each for each in state.snapshots if each.number != fact.number]


def abandon_snapshot(state: TrainState) -> None:
    """The snapshot in progress will never be complete: what it would have covered counts for the next one."""
    taking, state.snapshotting = state.snapshotting, None
    if taking is not None:
        state.snapshot_backlog = _merge(taking.since, state.snapshot_backlog)
        state.snapshot_failures += 1


def abandon_unfinished(state: TrainState) -> None:
    """Another group of ranks attached: the one before did not finish its snapshot."""
    for number in [each.number for each in state.dispatches.values() if each.snapshot]:
        del state.dispatches[number]
    abandon_snapshot(state)


def _commit(state: TrainState, fact: SnapshotCommitted) -> None:
    taking, state.snapshotting = state.snapshotting, None
    assert taking is not None, "checked before"
    cost_s = fact.held_s + fact.written_s
    made = msgspec.structs.replace(taking, digest=fact.digest, since=SnapshotBacklog(), cost_s=cost_s)
    pinned = pinned_snapshot(state)
    older = [each for each in state.snapshots[: 1 - KEEP] if each.number == pinned]
    state.snapshots = [*older, *[*state.snapshots, made][-KEEP:]]
    state.snapshot_failures = 0
    first = state.snapshots[0].number
    if len(state.snapshots) >= KEEP and (pinned is None or first <= pinned):
        state.truncated_through = first
    state.failed_dispatches = {number for number in state.failed_dispatches if number > state.truncated_through}
    if state.truncated_through:
        state.checkpoint_reads = {
            path: each for path, each in state.checkpoint_reads.items() if each.read > state.truncated_through
        }
