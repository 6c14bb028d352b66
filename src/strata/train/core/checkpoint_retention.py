"""Checkpoints after their save: TTL, surplus ones that newer supersede, deletion, publication, import, which ones are
in use, and the check of their names.

Deletions are decided here, as facts. The files follow by garbage collection: whatever no fact and no replay refers to
is removed, so that a process may die at any moment between a fact and the last file.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Set
from typing import Final, assert_never

import msgspec

from strata.base.errors import Code, StrataError
from strata.train.core import ops, replay_stops
from strata.train.core.admission import admit_import
from strata.train.core.client_commands import (
    DeleteCheckpoint,
    Done,
    ImportCheckpoint,
    PublishCheckpoint,
    SetCheckpointTtl,
)
from strata.train.core.facts import (
    CheckpointDeleted,
    CheckpointImported,
    CheckpointPublished,
    CheckpointTtlSet,
    Dispatched,
)
from strata.train.core.inputs import Decision, DeleteExpiredCheckpoints
from strata.train.core.lineage import IMPORTED_FROM
from strata.train.core.lookup import find_checkpoint
from strata.train.core.sequence import SequenceWindow
from strata.train.core.snapshots import replay_starts
from strata.train.core.state import (
    INITIAL,
    CheckpointKey,
    CheckpointRead,
    ModelCheckpoint,
    ModelRecord,
    SamplerStatus,
    TrainState,
    WeightsLineage,
    folder_of,
    is_name,
    key_of,
)

EXPIRED: Final = "its time was over"
SUPERSEDED: Final = "newer ones took its place"


def apply(
    state: TrainState, fact: CheckpointDeleted | CheckpointTtlSet | CheckpointPublished | CheckpointImported
) -> None:
    match fact:
        case CheckpointDeleted():
            gone = state.checkpoints.pop((fact.run_id, fact.kind, fact.name))
            _drop_read(state, gone)
        case CheckpointTtlSet():
            key = (fact.run_id, fact.kind, fact.name)
            state.checkpoints[key] = msgspec.structs.replace(state.checkpoints[key], expires_at_s=fact.expires_at_s)
        case CheckpointPublished():
            key = (fact.run_id, fact.kind, fact.name)
            state.checkpoints[key] = msgspec.structs.replace(state.checkpoints[key], public=fact.public)
        case CheckpointImported():
            create, operation = fact.create, fact.operation
            # An imported run is never trained: it exists so that its checkpoint belongs to a run.
            run = ModelRecord(create.model_id, fact.tenant, "", create, fact.at_s, fact.at_s, line=SequenceWindow())
            run.unloading = run.unloaded = True
            state.models.setdefault(create.model_id, run)
            imported = ModelCheckpoint(operation, fact.path, lineage=WeightsLineage(IMPORTED_FROM))
            state.checkpoints[key_of(operation)] = completed(imported, fact.at_s)
        case _:
            assert_never(fact)


def completed(checkpoint: ModelCheckpoint, at_s: float) -> ModelCheckpoint:
    """The checkpoint as complete: its TTL counts from now."""
    ttl_s = checkpoint.operation.ttl_s
    expires_at_s = None if ttl_s is None else at_s + ttl_s
    return msgspec.structs.replace(checkpoint, saved_at_s=at_s, expires_at_s=expires_at_s)


def end_save(state: TrainState, operation: ops.SaveWeights, number: int, at_s: float | None) -> None:
    """The ranks saved it at `at_s`, in the dispatch with this number; None: they failed to.

    A later save under the same name may be in flight: its entry stays.
    """
    key, path = key_of(operation), folder_of(operation)
    saving = state.saving.get(key)
    if saving is not None and saving.path == path:
        del state.saving[key]
    if at_s is not None:
        saved = ModelCheckpoint(operation, path, number=number, lineage=state.models[operation.model_id].lineage)
        state.checkpoints[key] = completed(saved, at_s)


def record_read(state: TrainState, fact: Dispatched, read: ops.LoadWeights | ops.SavedWeights) -> None:
    key = (read.run_id, read.kind, read.name)
    checkpoint = state.saving.get(key) or state.checkpoints.get(key)
    if checkpoint is not None:
        state.checkpoint_reads[checkpoint.path] = CheckpointRead(checkpoint.number, fact.number)


def _drop_read(state: TrainState, gone: ModelCheckpoint) -> None:
    reading = state.checkpoint_reads.get(gone.path)
    if reading is not None and not any(
        _needed_for_replay(reading, replay_start) for replay_start in replay_starts(state)
    ):
        del state.checkpoint_reads[gone.path]


def _needed_for_replay(reading: CheckpointRead, replay_start: int) -> bool:
    """Says whether a replay from this dispatch reads the checkpoint without saving it first."""
    return reading.saved <= replay_start < reading.read


def retained_folders(state: TrainState) -> set[str]:
    """Folders of all checkpoints whose files must stay, wherever a replay may start."""
    found = {each.path for each in (*state.checkpoints.values(), *state.saving.values())}
    found |= _folders_in_flight(state)
    # A restarted endpoint gets these again, and reads the files.
    found |= state.pushes.keys() | state.published.keys()
    starts = replay_starts(state)
    return found | {
        path
        for path, reading in state.checkpoint_reads.items()
        if any(_needed_for_replay(reading, replay_start) for replay_start in starts)
    }


def expired(checkpoint: ModelCheckpoint, now_s: float) -> bool:
    return checkpoint.expires_at_s is not None and checkpoint.expires_at_s <= now_s


def delete_expired(state: TrainState, request: DeleteExpiredCheckpoints) -> Decision:
    """Delete all beyond their TTL, and those that are not among the newest of their run and kind."""
    in_flight = _folders_in_flight(state) | replay_stops.kept_folders(state)
    facts: dict[CheckpointKey, CheckpointDeleted] = {}
    for key, checkpoint in state.checkpoints.items():
        # Without its files a load in flight would fail, and succeed in a replay that saves the checkpoint again.
        if expired(checkpoint, request.at_s) and checkpoint.path not in in_flight and not _is_initial(checkpoint):
            facts[key] = _deleted(checkpoint, EXPIRED)
    if state.rules.keep_checkpoints is not None:
        in_use = in_flight | _folders_in_use(state)
        for checkpoint in _surplus(state, state.rules.keep_checkpoints, set(facts)):
            if checkpoint.path not in in_use:
                facts[key_of(checkpoint.operation)] = _deleted(checkpoint, SUPERSEDED)
    folders = tuple(state.checkpoints[key].path for key in facts)
    return Decision(Done(), tuple(facts.values()), deleted_folders=folders)


def _is_initial(checkpoint: ModelCheckpoint) -> bool:
    """Saved by the server before all training. A checkpoint that a client saved under that name is the client's."""
    return checkpoint.operation.name == INITIAL and checkpoint.operation.seq_id == 0


def _reject_initial(checkpoint: ModelCheckpoint) -> None:
    if _is_initial(checkpoint):
        raise StrataError(Code.PRECONDITION, f"checkpoint {INITIAL} is the model's beginning and stays")


def _surplus(state: TrainState, keep: int, leaving: Set[CheckpointKey]) -> Iterator[ModelCheckpoint]:
    groups: defaultdict[tuple[str, str], list[ModelCheckpoint]] = defaultdict(list)
    for key, checkpoint in state.checkpoints.items():
        if key not in leaving and not _is_initial(checkpoint):
            groups[key[:2]].append(checkpoint)
    for group in groups.values():
        newest_first = sorted(group, key=lambda each: (each.saved_at_s, each.number), reverse=True)
        yield from newest_first[keep:]


def _folders_in_flight(state: TrainState) -> set[str]:
    """Returns the folders of checkpoints that dispatches without results read or write."""
    return {each.path for each in state.dispatches.values() if each.path}


def _folders_in_use(state: TrainState) -> set[str]:
    """Returns the folders of checkpoints that endpoints have or get, and that samplers and waiting operations refer
    to."""
    referenced = {state.checkpoints[key].path for key in _referenced(state) if key in state.checkpoints}
    return referenced | state.pushes.keys() | state.published.keys()


def _referenced(state: TrainState) -> Iterator[CheckpointKey]:
    """Checkpoints that open samplers and waiting operations refer to."""
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


def _deleted(checkpoint: ModelCheckpoint, reason: str) -> CheckpointDeleted:
    operation = checkpoint.operation
    return CheckpointDeleted(operation.model_id, operation.kind, operation.name, reason)


def delete(state: TrainState, tenant: str, command: DeleteCheckpoint) -> Decision:
    checkpoint = find_checkpoint(state, tenant, command.run_id, command.kind, command.name)
    _reject_initial(checkpoint)
    if any(dispatch.path == checkpoint.path for dispatch in state.dispatches.values()):
        # Without its files a load in flight would fail, and succeed in a replay that saves the checkpoint again.
        raise StrataError(Code.UNAVAILABLE, "the checkpoint is being loaded", hint="delete it later")
    fact = CheckpointDeleted(command.run_id, command.kind, command.name)
    return Decision(Done(), (fact,), deleted_folders=(checkpoint.path,))


def set_ttl(state: TrainState, tenant: str, command: SetCheckpointTtl, at_s: float) -> Decision:
    """The TTL counts from now, not from when it was saved."""
    _reject_initial(find_checkpoint(state, tenant, command.run_id, command.kind, command.name))
    expires_at_s = None if command.ttl_s is None else at_s + command.ttl_s
    return Decision(Done(), (CheckpointTtlSet(command.run_id, command.kind, command.name, expires_at_s),))


def publish(state: TrainState, tenant: str, command: PublishCheckpoint) -> Decision:
    """Only its owner publishes a checkpoint. One that is saved again under its name is private again."""
    checkpoint = find_checkpoint(state, tenant, command.run_id, command.kind, command.name)
    if checkpoint.public == command.public:
        return Decision(Done())
    return Decision(Done(), (CheckpointPublished(command.run_id, command.kind, command.name, command.public),))


def import_checkpoint(state: TrainState, tenant: str, command: ImportCheckpoint, at_s: float) -> Decision:
    """Idempotent: the same again is the same checkpoint."""
    create, operation = command.create(), command.save()
    if not (is_name(create.model_id) and is_name(operation.name)):
        raise StrataError(Code.INVALID, f"{operation.name!r} cannot name a checkpoint: use letters, digits and . _ -")
    if operation.name == INITIAL:
        raise StrataError(Code.INVALID, f"the name {INITIAL} is taken by the first checkpoint of every model")
    run = state.models.get(create.model_id)
    if run is not None and run.tenant != tenant:
        raise StrataError(Code.CONFLICT, f"there is a run {create.model_id!r} already")
    if key_of(operation) in state.checkpoints:
        return Decision(Done())
    admit_import(state, tenant)
    return Decision(Done(), (CheckpointImported(tenant, create, operation, folder_of(operation), at_s),))
