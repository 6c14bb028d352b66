"""Facts into state: the only place where what is journaled changes anything. A fact that was once written applies."""

from __future__ import annotations

from typing import assert_never

from strata.train.core import memory, ops, publishing, retention, snapshots
from strata.train.core.facts import (
    Accepted,
    CheckpointDeleted,
    CheckpointImported,
    CheckpointTimed,
    Dispatched,
    EndpointAdded,
    EndpointRemoved,
    Expired,
    Fact,
    Finished,
    GivenUp,
    PushBegun,
    PushEnded,
    QuantumEnded,
    RanksRenewed,
    SampleReturned,
    SampleRouted,
    SessionFinished,
    SessionOpened,
    SnapshotAbandoned,
    SnapshotCommitted,
    SnapshotRefused,
    SnapshotTaken,
)
from strata.train.core.future import OPEN, Future
from strata.train.core.sampling import Sample
from strata.train.core.sequence import Line
from strata.train.core.state import (
    Checkpoint,
    Dispatch,
    Model,
    Sampler,
    SamplerStatus,
    Session,
    TrainState,
    entry_of,
    key_of,
)


def apply(state: TrainState, fact: Fact) -> None:  # noqa: C901, PLR0912 - one arm per fact
    match fact:
        case SessionOpened():
            state.sessions[fact.session_id] = Session(
                fact.session_id, fact.tenant, fact.at_s, fact.tags, fact.user_metadata, fact.sdk_version
            )
        case SessionFinished():
            state.sessions[fact.session_id].finished = fact.reason
        case Accepted():
            _accept(state, fact)
        case Dispatched():
            _dispatch(state, fact)
        case Finished():
            _finish(state, fact.future_id, fact.result, fact.at_s)
        case QuantumEnded():
            state.dispatches.pop(fact.number, None)
            state.last_quantum = fact.number
        case SnapshotTaken() | SnapshotAbandoned() | SnapshotCommitted() | SnapshotRefused():
            snapshots.apply(state, fact)
        case RanksRenewed():
            _renew(state, fact.group)
        case GivenUp():
            _give_up(state, fact)
        case CheckpointDeleted() | CheckpointTimed() | CheckpointImported():
            retention.apply(state, fact)
        case Expired():
            state.futures.expire(fact.until_s)
        case EndpointAdded() | EndpointRemoved() | PushBegun() | PushEnded() | SampleRouted() | SampleReturned():
            publishing.apply(state, fact)
        case _:
            assert_never(fact)


def _accept(state: TrainState, fact: Accepted) -> None:
    operation = fact.operation
    of_server = ops.Sleep | ops.Wake | ops.OpenSampler | Sample
    model_id = "" if isinstance(operation, of_server) else operation.model_id
    state.futures.add(Future(fact.future_id, fact.tenant, model_id, fact.digest, operation, fact.at_s))
    match operation:
        case ops.Sleep() | ops.Wake():
            state.server_operations += 1
            _hand_on(state, fact.future_id)
        case ops.OpenSampler():
            path = operation.weights.path if operation.weights else None
            _add_sampler(state, fact, operation.sampler_id, operation.base_model, path)
            _hand_on(state, fact.future_id)
        case Sample():
            state.turns += 1
            state.waiting[fact.future_id] = operation
            future = state.futures.get(fact.future_id)
            assert future is not None
            future.turn = state.samplers[operation.sampler_id].used = state.turns
        case ops.CreateModel():
            state.models[model_id] = Model(
                model_id, fact.tenant, fact.session_id, operation, fact.at_s, fact.at_s, line=Line()
            )
            state.sessions[fact.session_id].models.append(model_id)
            _hand_on(state, fact.future_id)
        case ops.UnloadModel():
            state.models[model_id].unloading = True
            _hand_on(state, fact.future_id)
        case _:
            model = state.models[model_id]
            model.last_request_at_s = fact.at_s
            if isinstance(operation, ops.SaveSampler):
                _add_sampler(state, fact, operation.sampler_id, model.create.base_model, None)
            if operation.seq_id == 0:
                _hand_on(state, fact.future_id)
                return
            for seq in model.line.take(operation.seq_id):
                _hand_on(state, f"{model_id}:{seq}")


def _add_sampler(state: TrainState, fact: Accepted, sampler_id: str, base_model: str, path: str | None) -> None:
    session_id = sampler_id.partition(":sample:")[0]
    sampler = Sampler(sampler_id, fact.tenant, session_id, base_model, path, used=state.turns)
    state.samplers.setdefault(sampler_id, sampler)


def _hand_on(state: TrainState, future_id: str) -> None:
    """Nothing of its model is missing before it: it may be scheduled. One that was given up while held is skipped."""
    future = state.futures.get(future_id)
    if future is not None and future.operation is not None:
        state.turns += 1
        future.turn = state.turns
        state.scheduler.add(entry_of(future))


def _dispatch(state: TrainState, fact: Dispatched) -> None:  # noqa: C901 - one arm per kind
    state.dispatched = fact.number
    state.dispatches[fact.number] = Dispatch(
        fact.number, fact.future_ids, fact.rows, fact.path, fact.close, fact.quantum, fact.snapshot
    )
    if fact.quantum is None:
        known = [state.futures.get(future_id) for future_id in fact.future_ids]
        snapshots.note_dispatch(state, fact, [each.operation for each in known if each and each.operation])
    if not fact.snapshot:
        state.sampled_last = fact.quantum is not None
    if fact.quantum is not None:
        state.cancels.difference_update(fact.quantum.cancel)
    for sampler_id in fact.close:
        state.samplers.pop(sampler_id, None)
    for future_id in fact.future_ids:
        state.scheduler.remove(future_id)
        operation = state.futures.dispatch(future_id, fact.number).operation
        match operation:
            case ops.SaveWeights() | ops.SyncWeights():
                saving = publishing.as_save(operation)
                state.saving[key_of(saving)] = Checkpoint(saving, fact.path, number=fact.number)
            case ops.LoadWeights():
                retention.note_reading(state, fact, operation)
            case ops.OpenSampler() if operation.weights is not None:
                retention.note_reading(state, fact, operation.weights)
                state.samplers[operation.sampler_id].status = SamplerStatus.OPEN
                state.samplers[operation.sampler_id].folder = fact.path
            case ops.SaveSampler() | ops.OpenSampler():
                state.samplers[operation.sampler_id].status = SamplerStatus.OPEN
            case Sample():
                state.sampling[future_id] = state.waiting.pop(future_id)
            case ops.Sleep() | ops.Wake():
                state.asleep = isinstance(operation, ops.Sleep)
            case _:
                pass


def _renew(state: TrainState, group: str) -> None:
    state.group, state.spoiled = group, False
    snapshots.forget_unanswered(state)
    state.cancels.clear()
    for number in [each.number for each in state.dispatches.values() if each.quantum is not None]:
        del state.dispatches[number]
    returned = dict(state.sampling)
    for future_id in returned:
        state.futures.give_back(future_id)
    state.sampling.clear()
    # They came before those that wait.
    state.waiting = returned | state.waiting


def _finish(state: TrainState, future_id: str, result: ops.Result, at_s: float) -> None:
    state.scheduler.remove(future_id)
    before = state.futures.get(future_id)
    operation = before.operation if before else None
    future = state.futures.end(future_id, result, at_s)
    dispatch = state.dispatches.get(future.number)
    if dispatch is not None and dispatch.quantum is None:
        _end_in(state, dispatch, future_id, result)
    match operation:
        case ops.SaveWeights() if future.number:
            retention.end_save(state, operation, future.number, None if isinstance(result, ops.Failed) else at_s)
        case ops.SyncWeights() if isinstance(result, ops.Failed):
            retention.end_save(state, operation.save(), future.number, None)
        case ops.CreateModel() if isinstance(result, ops.Failed):
            state.models[operation.model_id].refused = True
        case ops.UnloadModel():
            state.models[operation.model_id].unloaded = True
            publishing.forget(state, operation.model_id)
        case ops.SaveSampler() | ops.OpenSampler() if isinstance(result, ops.Failed):
            _fail_sampler(state, operation.sampler_id, dispatched=future.number > 0)
        case ops.Sleep() | ops.Wake() if isinstance(result, ops.Failed):
            state.asleep = isinstance(operation, ops.Wake)
        case Sample():
            _finish_sample(state, future_id, result)
        case _:
            pass
    if isinstance(operation, ops.Sequenced):
        _count_on(state, state.models[operation.model_id])


def _end_in(state: TrainState, dispatch: Dispatch, future_id: str, result: ops.Result) -> None:
    """A dispatch is over with its last operation. One that did not fit into the memory is no part of it any longer."""
    if isinstance(result, ops.Failed) and result.memory:
        dispatch = state.dispatches[dispatch.number] = memory.without(dispatch, {future_id})
    known = [state.futures.get(each) for each in dispatch.future_ids]
    if not any(future is not None and future.status in OPEN for future in known):
        del state.dispatches[dispatch.number]


def _fail_sampler(state: TrainState, sampler_id: str, *, dispatched: bool) -> None:
    sampler = state.samplers.get(sampler_id)
    # An operation that failed because the name was taken says nothing of the one that has the name.
    if sampler is not None and (dispatched or sampler.status is SamplerStatus.COMING):
        sampler.status = SamplerStatus.FAILED


def _finish_sample(state: TrainState, future_id: str, result: ops.Result) -> None:
    state.waiting.pop(future_id, None)
    state.routed.pop(future_id, None)
    state.unroutable.discard(future_id)
    running = state.sampling.pop(future_id, None)
    if running is not None and isinstance(result, ops.Failed) and result.category == "cancelled":
        state.cancels.add(future_id)


def _count_on(state: TrainState, model: Model) -> None:
    """One that was given up before its turn counts when those before it have ended."""
    while model.done < model.line.released:
        future = state.futures.get(f"{model.model_id}:{model.done + 1}")
        if future is not None and future.status in OPEN:
            return
        model.done += 1


def _give_up(state: TrainState, fact: GivenUp) -> None:
    state.given_up.add(fact.number)
    state.spoiled = True
    if state.dispatches[fact.number].quantum is not None:
        for future_id in list(state.sampling):
            _finish(state, future_id, ops.Failed("server", fact.reason), fact.at_s)
        del state.dispatches[fact.number]
        return
    if state.dispatches[fact.number].snapshot:
        del state.dispatches[fact.number]
        snapshots.abandon(state)
        return
    for future_id in state.dispatches[fact.number].future_ids:
        _finish(state, future_id, ops.Failed("server", fact.reason), fact.at_s)
