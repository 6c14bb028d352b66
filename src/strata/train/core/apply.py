"""Applies a fact to the state of the training server: the only writer of what facts build, for every kind of fact."""

from __future__ import annotations

from typing import assert_never

from strata.train.core import (
    checkpoint_retention,
    device_turns,
    inflight,
    lineage,
    ops,
    out_of_memory,
    publishing,
    replay_stops,
    snapshots,
)
from strata.train.core.facts import (
    CheckpointDeleted,
    CheckpointImported,
    CheckpointPublished,
    CheckpointTtlSet,
    CustomLossCreated,
    DeviceTurnRequested,
    DeviceTurnTaken,
    Dispatched,
    DispatchFailed,
    EndpointAdded,
    EndpointRemoved,
    Fact,
    OperationAccepted,
    OperationFinished,
    PushBegun,
    PushEnded,
    RanksRenewed,
    ReplayAccepted,
    ReplayCompared,
    ResultsExpired,
    SampleReturned,
    SampleRouted,
    SessionFinished,
    SessionOpened,
    SessionsForgotten,
    SliceEnded,
    SnapshotAbandoned,
    SnapshotCommitted,
    SnapshotCopied,
    SnapshotRejected,
)
from strata.train.core.future import OPEN, OperationFuture
from strata.train.core.router_replay import wants_router_replay
from strata.train.core.sampling import SampleOperation
from strata.train.core.sequence import SequenceWindow
from strata.train.core.state import (
    ClientSession,
    CustomLossRecord,
    Dispatch,
    ModelCheckpoint,
    ModelRecord,
    SamplerState,
    SamplerStatus,
    TrainState,
    key_of,
    queued_operation,
)


def apply(state: TrainState, fact: Fact) -> None:  # noqa: C901, PLR0912 - one arm per fact
    match fact:
        case SessionOpened():
            state.sessions[fact.session_id] = ClientSession(
                fact.session_id, fact.tenant, fact.at_s, fact.tags, fact.user_metadata, fact.sdk_version
            )
        case SessionFinished():
            state.sessions[fact.session_id].finished = fact.reason
            state.sessions[fact.session_id].finished_at_s = fact.at_s
            for loss_id in [each for each in state.custom_losses if each.startswith(f"{fact.session_id}:")]:
                del state.custom_losses[loss_id]
        case SessionsForgotten():
            for session_id in fact.session_ids:
                del state.sessions[session_id]
        case CustomLossCreated():
            state.custom_losses[fact.loss_id] = CustomLossRecord(fact.loss_id, fact.tenant, fact.loss)
        case OperationAccepted():
            _accept(state, fact)
        case Dispatched():
            _dispatch(state, fact)
        case OperationFinished():
            _finish(state, fact.future_id, fact.result, fact.at_s, fact.took_s)
        case SliceEnded():
            state.dispatches.pop(fact.number, None)
            state.last_slice = fact.number
            inflight.record_parts(state, fact.drawn)
        case SnapshotCopied() | SnapshotAbandoned() | SnapshotCommitted() | SnapshotRejected():
            snapshots.apply(state, fact)
        case RanksRenewed():
            _attach_ranks(state, fact)
        case ReplayCompared() | ReplayAccepted():
            replay_stops.apply(state, fact)
        case DispatchFailed():
            _fail_dispatch(state, fact)
        case CheckpointDeleted() | CheckpointTtlSet() | CheckpointImported() | CheckpointPublished():
            checkpoint_retention.apply(state, fact)
        case ResultsExpired():
            state.futures.expire(fact.until_s)
        case EndpointAdded() | EndpointRemoved() | PushBegun() | PushEnded() | SampleRouted() | SampleReturned():
            publishing.apply(state, fact)
            if isinstance(fact, PushBegun | PushEnded):
                device_turns.record_busy(state, fact.at_s)
        case DeviceTurnRequested() | DeviceTurnTaken():
            device_turns.apply(state, fact)
        case _:
            assert_never(fact)


def _accept(state: TrainState, fact: OperationAccepted) -> None:
    operation = fact.operation
    of_server = ops.Sleep | ops.Wake | ops.OpenSampler | SampleOperation
    model_id = "" if isinstance(operation, of_server) else operation.model_id
    state.futures.add(OperationFuture(fact.future_id, fact.tenant, model_id, fact.digest, operation, fact.at_s))
    match operation:
        case ops.Sleep() | ops.Wake():
            state.server_operations += 1
            _enqueue(state, fact.future_id)
        case ops.OpenSampler():
            run_id = operation.weights.run_id if operation.weights is not None else ""
            _add_sampler(state, fact, operation, operation.base_model, run_id)
            _enqueue(state, fact.future_id)
        case SampleOperation():
            state.turns += 1
            state.waiting[fact.future_id] = operation
            future = state.futures.get(fact.future_id)
            assert future is not None
            future.turn = state.samplers[operation.sampler_id].used = state.turns
        case ops.CreateModel():
            state.models[model_id] = ModelRecord(
                model_id,
                fact.tenant,
                fact.session_id,
                operation,
                fact.at_s,
                fact.at_s,
                line=SequenceWindow(),
            )
            state.sessions[fact.session_id].models.append(model_id)
            _enqueue(state, fact.future_id)
        case ops.UnloadModel():
            state.models[model_id].unloading = True
            _enqueue(state, fact.future_id)
        case _:
            _accept_sequenced(state, fact, operation)


def _accept_sequenced(state: TrainState, fact: OperationAccepted, operation: ops.Sequenced) -> None:
    model = state.models[operation.model_id]
    model.last_request_at_s = fact.at_s
    if isinstance(operation, ops.SaveSampler):
        _add_sampler(state, fact, operation, model.create.base_model, model.model_id)
    if operation.seq_id == 0:
        _enqueue(state, fact.future_id)
        return
    for seq in model.line.release(operation.seq_id):
        _enqueue(state, f"{model.model_id}:{seq}")


def _add_sampler(
    state: TrainState, fact: OperationAccepted, operation: ops.OpenSampler | ops.SaveSampler, base: str, model_id: str
) -> None:
    """Adds nothing if there is one of this name: the operation is refused when it is dispatched."""
    opened = operation.weights if isinstance(operation, ops.OpenSampler) else None
    is_inflight = isinstance(operation, ops.SaveSampler) and operation.inflight
    model = state.models.get(model_id)
    replays = model is not None and wants_router_replay(model.create.user_metadata)
    sampler = SamplerState(
        operation.sampler_id,
        fact.tenant,
        operation.sampler_id.partition(":sample:")[0],
        base,
        opened.path if opened is not None else None,
        used=state.turns,
        model_id=model_id if is_inflight or replays else "",
        inflight=is_inflight,
    )
    state.samplers.setdefault(sampler.sampler_id, sampler)


def _enqueue(state: TrainState, future_id: str) -> None:
    """No operation of its model is missing before it: it may be scheduled. One that was cancelled while held is not."""
    future = state.futures.get(future_id)
    if future is not None and future.operation is not None:
        state.turns += 1
        future.turn = state.turns
        state.scheduler.add(queued_operation(future))


def _dispatch(state: TrainState, fact: Dispatched) -> None:
    state.dispatched = fact.number
    state.dispatches[fact.number] = Dispatch(
        fact.number, fact.future_ids, fact.rows, fact.path, fact.close, fact.slice, fact.snapshot
    )
    if fact.slice is None:
        known = [state.futures.get(future_id) for future_id in fact.future_ids]
        snapshots.record_dispatch(state, fact, [each.operation for each in known if each and each.operation])
    if not fact.snapshot:
        state.last_was_slice = fact.slice is not None
    if fact.slice is not None:
        state.cancelled_samples.difference_update(fact.slice.cancel)
    for sampler_id in fact.close:
        state.samplers.pop(sampler_id, None)
    for future_id in fact.future_ids:
        _dispatch_operation(state, fact, future_id)


def _dispatch_operation(state: TrainState, fact: Dispatched, future_id: str) -> None:
    state.scheduler.remove(future_id)
    operation = state.futures.dispatch(future_id, fact.number).operation
    match operation:
        case ops.SaveWeights() | ops.SyncWeights():
            saving = publishing.as_save(operation)
            state.saving[key_of(saving)] = ModelCheckpoint(saving, fact.path, number=fact.number)
        case ops.LoadWeights():
            checkpoint_retention.record_read(state, fact, operation)
        case ops.OpenSampler() if operation.weights is not None:
            checkpoint_retention.record_read(state, fact, operation.weights)
            state.samplers[operation.sampler_id].status = SamplerStatus.OPEN
            state.samplers[operation.sampler_id].folder = fact.path
        case ops.SaveSampler() | ops.OpenSampler():
            state.samplers[operation.sampler_id].status = SamplerStatus.OPEN
            state.samplers[operation.sampler_id].folder = fact.path
        case SampleOperation():
            state.sampling[future_id] = state.waiting.pop(future_id)
        case ops.Sleep() | ops.Wake():
            state.asleep = isinstance(operation, ops.Sleep)
        case _:
            pass


def _attach_ranks(state: TrainState, fact: RanksRenewed) -> None:
    state.group, state.numerics, state.tainted = fact.group, fact.numerics, False
    snapshots.abandon_unfinished(state)
    state.cancelled_samples.clear()
    for number in [each.number for each in state.dispatches.values() if each.slice is not None]:
        del state.dispatches[number]
    returned = dict(state.sampling)
    for future_id in returned:
        state.futures.give_back(future_id)
    state.sampling.clear()
    # They were accepted before those that wait.
    state.waiting = returned | state.waiting


def _finish(state: TrainState, future_id: str, result: ops.Result, at_s: float, took_s: float = 0.0) -> None:
    state.scheduler.remove(future_id)
    before = state.futures.get(future_id)
    operation = before.operation if before else None
    future = state.futures.end(future_id, result, at_s)
    state.usage.record(future.tenant, operation, result, at_s)
    device_turns.record_busy(state, at_s)
    snapshots.record_finished(state, future.number, operation, took_s)
    dispatch = state.dispatches.get(future.number)
    lineage.record(state, operation, result, dispatch.path if dispatch is not None else "")
    if dispatch is not None and dispatch.slice is None:
        _end_in_dispatch(state, dispatch, future_id, result)
    match operation:
        case ops.SaveWeights() if future.number:
            saved_at_s = None if isinstance(result, ops.Failed) else at_s
            checkpoint_retention.end_save(state, operation, future.number, saved_at_s)
        case ops.LoadWeights() if operation.rollback and not isinstance(result, ops.Failed):
            replay_stops.end_rollback(state, operation, future.number)
        case ops.UnloadModel():
            state.models[operation.model_id].unloaded = True
            publishing.retract_published(state, operation.model_id)
        case SampleOperation():
            _finish_sample(state, future_id, result)
        case ops.SaveSampler() if operation.inflight and not isinstance(result, ops.Failed):
            inflight.count_save(state, operation)
        case _ if isinstance(result, ops.Failed):
            _undo_failed(state, operation, future.number)
        case _:
            pass
    if isinstance(operation, ops.Sequenced):
        _advance_done(state, state.models[operation.model_id])


def _undo_failed(state: TrainState, operation: ops.Operation | None, number: int) -> None:
    """Undo what was assumed when the operation was accepted or dispatched."""
    match operation:
        case ops.SyncWeights():
            checkpoint_retention.end_save(state, operation.save(), number, None)
        case ops.CreateModel():
            state.models[operation.model_id].refused = True
        case ops.SaveSampler() | ops.OpenSampler():
            _fail_sampler(state, operation.sampler_id, dispatched=number > 0)
        case ops.Sleep() | ops.Wake():
            state.asleep = isinstance(operation, ops.Wake)
        case _:
            pass


def _end_in_dispatch(state: TrainState, dispatch: Dispatch, future_id: str, result: ops.Result) -> None:
    """A dispatch ends with its last operation. An operation that did not fit into memory leaves the dispatch."""
    if isinstance(result, ops.Failed) and result.memory:
        dispatch = state.dispatches[dispatch.number] = out_of_memory.without_operations(dispatch, {future_id})
    known = [state.futures.get(each) for each in dispatch.future_ids]
    if not any(future is not None and future.status in OPEN for future in known):
        del state.dispatches[dispatch.number]


def _fail_sampler(state: TrainState, sampler_id: str, *, dispatched: bool) -> None:
    sampler = state.samplers.get(sampler_id)
    # An operation that failed because the name was taken does not concern the sampler that has the name.
    if sampler is not None and (dispatched or sampler.status is SamplerStatus.COMING):
        sampler.status = SamplerStatus.FAILED


def _finish_sample(state: TrainState, future_id: str, result: ops.Result) -> None:
    state.waiting.pop(future_id, None)
    state.routed.pop(future_id, None)
    state.unroutable.discard(future_id)
    state.drawn.pop(future_id, None)
    running = state.sampling.pop(future_id, None)
    if running is not None and isinstance(result, ops.Failed) and result.category == "cancelled":
        state.cancelled_samples.add(future_id)


def _advance_done(state: TrainState, model: ModelRecord) -> None:
    """An operation that was cancelled early counts when those before it have ended."""
    while model.done < model.line.released:
        future = state.futures.get(f"{model.model_id}:{model.done + 1}")
        if future is not None and future.status in OPEN:
            return
        model.done += 1


def _fail_dispatch(state: TrainState, fact: DispatchFailed) -> None:
    state.failed_dispatches.add(fact.number)
    state.tainted = True
    if state.dispatches[fact.number].slice is not None:
        for future_id in list(state.sampling):
            _finish(state, future_id, ops.Failed("server", fact.reason), fact.at_s)
        del state.dispatches[fact.number]
        return
    if state.dispatches[fact.number].snapshot:
        del state.dispatches[fact.number]
        snapshots.abandon_snapshot(state)
        return
    for future_id in state.dispatches[fact.number].future_ids:
        _finish(state, future_id, ops.Failed("server", fact.reason), fact.at_s)
