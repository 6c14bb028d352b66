"""Facts into state: the only place where what is journaled changes anything. A fact that was once written applies."""

from __future__ import annotations

from typing import assert_never

import msgspec

from strata.train.core import ops
from strata.train.core.facts import (
    Accepted,
    CheckpointDeleted,
    Dispatched,
    Expired,
    Fact,
    Finished,
    GivenUp,
    SessionFinished,
    SessionOpened,
)
from strata.train.core.future import OPEN, Future
from strata.train.core.sequence import Line
from strata.train.core.state import Checkpoint, Dispatch, Model, Session, TrainState, entry_of, key_of


def apply(state: TrainState, fact: Fact) -> None:
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
        case GivenUp():
            _give_up(state, fact)
        case CheckpointDeleted():
            del state.checkpoints[fact.run_id, fact.kind, fact.name]
        case Expired():
            state.futures.expire(fact.until_s)
        case _:
            assert_never(fact)


def _accept(state: TrainState, fact: Accepted) -> None:
    operation = fact.operation
    model_id = "" if isinstance(operation, ops.Sleep | ops.Wake) else operation.model_id
    state.futures.add(Future(fact.future_id, fact.tenant, model_id, fact.digest, operation, fact.at_s))
    match operation:
        case ops.Sleep() | ops.Wake():
            state.server_operations += 1
            _hand_on(state, fact.future_id)
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
            if operation.seq_id == 0:
                _hand_on(state, fact.future_id)
                return
            for seq in model.line.take(operation.seq_id):
                _hand_on(state, f"{model_id}:{seq}")


def _hand_on(state: TrainState, future_id: str) -> None:
    """Nothing of its model is missing before it: it may be scheduled. One that was given up while held is skipped."""
    future = state.futures.get(future_id)
    if future is not None and future.operation is not None:
        state.turns += 1
        future.turn = state.turns
        state.scheduler.add(entry_of(future))


def _dispatch(state: TrainState, fact: Dispatched) -> None:
    state.dispatched = fact.number
    state.dispatches[fact.number] = Dispatch(fact.number, fact.future_ids, fact.rows, fact.path)
    for future_id in fact.future_ids:
        state.scheduler.remove(future_id)
        operation = state.futures.dispatch(future_id, fact.number).operation
        if isinstance(operation, ops.SaveWeights):
            state.saving[key_of(operation)] = Checkpoint(operation, fact.path)


def _finish(state: TrainState, future_id: str, result: ops.Result, at_s: float) -> None:
    state.scheduler.remove(future_id)
    before = state.futures.get(future_id)
    operation = before.operation if before else None
    future = state.futures.end(future_id, result, at_s)
    dispatch = state.dispatches.get(future.number)
    if dispatch is not None and future_id == dispatch.future_ids[-1]:
        del state.dispatches[future.number]
    match operation:
        case ops.SaveWeights() if future.number:
            saving = state.saving.pop(key_of(operation))
            if not isinstance(result, ops.Failed):
                state.checkpoints[key_of(operation)] = msgspec.structs.replace(saving, saved_at_s=at_s)
        case ops.UnloadModel():
            state.models[operation.model_id].unloaded = True
        case _:
            pass
    if isinstance(operation, ops.Sequenced):
        _count_on(state, state.models[operation.model_id])


def _count_on(state: TrainState, model: Model) -> None:
    """One that was given up before its turn counts when those before it have ended."""
    while model.done < model.line.released:
        future = state.futures.get(f"{model.model_id}:{model.done + 1}")
        if future is not None and future.status in OPEN:
            return
        model.done += 1


def _give_up(state: TrainState, fact: GivenUp) -> None:
    state.given_up.add(fact.number)
    for future_id in state.dispatches[fact.number].future_ids:
        _finish(state, future_id, ops.Failed("server", fact.reason), fact.at_s)
