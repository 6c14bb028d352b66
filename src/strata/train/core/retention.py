"""How long checkpoints are kept: until their time is over, their owner deletes them, or newer ones take their place.

What goes is decided here, as facts. Files follow: whatever no fact and no replay can ask for is swept away, as often
as it takes, so that a process may die at any moment between a fact and the last file.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Set
from typing import Final, assert_never

import msgspec

from strata.base.errors import Code, StrataError
from strata.train.core import ops
from strata.train.core.facts import CheckpointDeleted, CheckpointImported, CheckpointTimed, Dispatched
from strata.train.core.inputs import (
    DeleteCheckpoint,
    Done,
    ImportCheckpoint,
    Outcome,
    Removed,
    Retain,
    Retained,
    TimeCheckpoint,
)
from strata.train.core.sequence import Line
from strata.train.core.snapshots import beginnings
from strata.train.core.state import (
    INITIAL,
    Checkpoint,
    CheckpointKey,
    Model,
    Reading,
    SamplerStatus,
    TrainState,
    folder_of,
    is_name,
    key_of,
)
from strata.train.core.views import find_checkpoint

EXPIRED: Final = "its time was over"
SUPERSEDED: Final = "newer ones took its place"


def apply(state: TrainState, fact: CheckpointDeleted | CheckpointTimed | CheckpointImported) -> None:
    match fact:
        case CheckpointDeleted():
            gone = state.checkpoints.pop((fact.run_id, fact.kind, fact.name))
            _forget_reading(state, gone)
        case CheckpointTimed():
            key = (fact.run_id, fact.kind, fact.name)
            state.checkpoints[key] = msgspec.structs.replace(state.checkpoints[key], expires_at_s=fact.expires_at_s)
        case CheckpointImported():
            create, operation = fact.create, fact.operation
            # There is nothing to train: it is a run only so that its checkpoint belongs to one.
            run = Model(create.model_id, fact.tenant, "", create, fact.at_s, fact.at_s, line=Line())
            run.unloading = run.unloaded = True
            state.models.setdefault(create.model_id, run)
            imported = Checkpoint(operation, fact.path)
            state.checkpoints[key_of(operation)] = saved(imported, fact.at_s)
        case _:
            assert_never(fact)


def saved(checkpoint: Checkpoint, at_s: float) -> Checkpoint:
    """Complete, and from now on counted."""
    ttl_s = checkpoint.operation.ttl_s
    expires_at_s = None if ttl_s is None else at_s + ttl_s
    return msgspec.structs.replace(checkpoint, saved_at_s=at_s, expires_at_s=expires_at_s)


def end_save(state: TrainState, operation: ops.SaveWeights, number: int, at_s: float | None) -> None:
    """The ranks saved it then, in the dispatch with this number; None: they did not.

    There may be another save under the same name behind it, and what is known of that one stays.
    """
    key, path = key_of(operation), folder_of(operation)
    saving = state.saving.get(key)
    if saving is not None and saving.path == path:
        del state.saving[key]
    if at_s is not None:
        state.checkpoints[key] = saved(Checkpoint(operation, path, number=number), at_s)


def note_reading(state: TrainState, fact: Dispatched, read: ops.LoadWeights | ops.SavedWeights) -> None:
    key = (read.run_id, read.kind, read.name)
    checkpoint = state.saving.get(key) or state.checkpoints.get(key)
    if checkpoint is not None:
        state.readings[checkpoint.path] = Reading(checkpoint.number, fact.number)


def _forget_reading(state: TrainState, gone: Checkpoint) -> None:
    reading = state.readings.get(gone.path)
    if reading is not None and not any(_needed(reading, told_from) for told_from in beginnings(state)):
        del state.readings[gone.path]


def _needed(reading: Reading, told_from: int) -> bool:
    """Whether ranks that start anew are told to read it and are not told to save it before that."""
    return reading.saved <= told_from < reading.read


def kept_folders(state: TrainState) -> set[str]:
    """Of all checkpoints whose files must stay, wherever ranks that start anew may begin."""
    found = {each.path for each in (*state.checkpoints.values(), *state.saving.values())}
    found |= {each.path for each in state.dispatches.values() if each.path}
    # An endpoint that starts anew is told of these again, and reads the files.
    found |= state.pushes.keys() | state.published.keys()
    starts = beginnings(state)
    return found | {
        path for path, reading in state.readings.items() if any(_needed(reading, told_from) for told_from in starts)
    }


def expired(checkpoint: Checkpoint, now_s: float) -> bool:
    return checkpoint.expires_at_s is not None and checkpoint.expires_at_s <= now_s


def retain(state: TrainState, given: Retain) -> Outcome:
    """Let go of all whose time is over, and of those that are not among the newest of their run and kind."""
    at_work = {each.path for each in state.dispatches.values() if each.path}
    facts: dict[CheckpointKey, CheckpointDeleted] = {}
    for key, checkpoint in state.checkpoints.items():
        # Without it a load would fail, and succeed when ranks that start anew have saved the checkpoint once more.
        if expired(checkpoint, given.at_s) and checkpoint.path not in at_work and not _is_beginning(checkpoint):
            facts[key] = _deleted(checkpoint, EXPIRED)
    if state.rules.keep_checkpoints is not None:
        in_use = at_work | state.pushes.keys() | state.published.keys()
        in_use |= {state.checkpoints[key].path for key in _asked_for(state) if key in state.checkpoints}
        for checkpoint in _surplus(state, state.rules.keep_checkpoints, set(facts)):
            if checkpoint.path not in in_use:
                facts[key_of(checkpoint.operation)] = _deleted(checkpoint, SUPERSEDED)
    return Outcome(Retained([state.checkpoints[key].path for key in facts]), tuple(facts.values()))


def _is_beginning(checkpoint: Checkpoint) -> bool:
    """Saved by the server before all training. One of that name that a client saved in its place is the client's."""
    return checkpoint.operation.name == INITIAL and checkpoint.operation.seq_id == 0


def _refuse_beginning(checkpoint: Checkpoint) -> None:
    if _is_beginning(checkpoint):
        raise StrataError(Code.PRECONDITION, f"checkpoint {INITIAL} is the model's beginning and stays")


def _surplus(state: TrainState, keep: int, leaving: Set[CheckpointKey]) -> Iterator[Checkpoint]:
    groups: defaultdict[tuple[str, str], list[Checkpoint]] = defaultdict(list)
    for key, checkpoint in state.checkpoints.items():
        if key not in leaving and not _is_beginning(checkpoint):
            groups[key[:2]].append(checkpoint)
    for group in groups.values():
        newest_first = sorted(group, key=lambda each: (each.saved_at_s, each.number), reverse=True)
        yield from newest_first[keep:]


def _asked_for(state: TrainState) -> Iterator[CheckpointKey]:
    """By samplers that live, and by operations that wait."""
    paths = {each.model_path for each in state.samplers.values() if each.status is not SamplerStatus.FAILED}
    for key in state.checkpoints:
        if "tinker://{}/{}/{}".format(*key) in paths:
            yield key
    for future in state.futures:
        operation = future.operation
        if isinstance(operation, ops.LoadWeights):
            yield operation.run_id, operation.kind, operation.name
        elif isinstance(operation, ops.OpenSampler) and operation.weights is not None:
            yield operation.weights.run_id, operation.weights.kind, operation.weights.name


def _deleted(checkpoint: Checkpoint, reason: str) -> CheckpointDeleted:
    operation = checkpoint.operation
    return CheckpointDeleted(operation.model_id, operation.kind, operation.name, reason)


def delete(state: TrainState, given: DeleteCheckpoint) -> Outcome:
    checkpoint = find_checkpoint(state, given.tenant, given.run_id, given.kind, given.name)
    _refuse_beginning(checkpoint)
    if any(dispatch.path == checkpoint.path for dispatch in state.dispatches.values()):
        # Without it a load would fail, and succeed when ranks that start anew have saved the checkpoint once more.
        raise StrataError(Code.UNAVAILABLE, "the checkpoint is being loaded", hint="delete it later")
    return Outcome(Removed(checkpoint.path), (CheckpointDeleted(given.run_id, given.kind, given.name),))


def set_time(state: TrainState, given: TimeCheckpoint) -> Outcome:
    """Counted from now, not from when it was saved."""
    _refuse_beginning(find_checkpoint(state, given.tenant, given.run_id, given.kind, given.name))
    expires_at_s = None if given.ttl_s is None else given.at_s + given.ttl_s
    return Outcome(Done(), (CheckpointTimed(given.run_id, given.kind, given.name, expires_at_s),))


def take_import(state: TrainState, given: ImportCheckpoint) -> Outcome:
    """The same again is the same checkpoint."""
    create, operation = given.create, given.operation
    if create.model_id != operation.model_id or not (is_name(create.model_id) and is_name(operation.name)):
        raise StrataError(Code.INVALID, f"{operation.name!r} cannot name a checkpoint: use letters, digits and . _ -")
    if operation.name == INITIAL:
        raise StrataError(Code.INVALID, f"the name {INITIAL} is taken by the first checkpoint of every model")
    run = state.models.get(create.model_id)
    if run is not None and run.tenant != given.tenant:
        raise StrataError(Code.CONFLICT, f"there is a run {create.model_id!r} already")
    if key_of(operation) in state.checkpoints:
        return Outcome(Done())
    fact = CheckpointImported(given.tenant, create, operation, folder_of(operation), given.at_s)
    return Outcome(Done(), (fact,))
