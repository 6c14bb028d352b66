"""Stops a model whose replay differs though its ranks promise the same bits: when, what is refused and kept meanwhile,
and how its owner accepts the new numbers or rolls back to the last checkpoint.
"""

from __future__ import annotations

from collections.abc import Iterator

from strata.base.errors import Code, StrataError
from strata.train.core import ops
from strata.train.core.client_commands import Accepted, Done, ResolveReplay
from strata.train.core.facts import OperationAccepted, ReplayAccepted, ReplayCompared
from strata.train.core.inputs import CompareReplay, Decision
from strata.train.core.state import ModelCheckpoint, ModelRecord, ReplayStop, TrainState, future_id_of


def compare_replay(state: TrainState, request: CompareReplay) -> Decision:
    """Journal what a replay found above the tolerance, and stop the models whose numbers should have been the same.

    Smaller differences are for metrics and log alone: a journal without this fact can be read by version 0.2.0."""
    above = {model_id: found for model_id, found in request.models.items() if found.above}
    if not above:
        return Decision(Done())
    stopped = [
        model_id
        for model_id, found in above.items()
        if (model := state.models.get(model_id)) is not None
        and found.stops_at > model.accepted_through
        and model.stopped is None
        and not model.unloaded
    ]
    fact = ReplayCompared(request.group, request.through, above, tuple(stopped), request.at_s)
    return Decision(Done(), (fact,))


def stopped_models(state: TrainState) -> Iterator[tuple[ModelRecord, ReplayStop]]:
    for model in state.models.values():
        if model.stopped is not None and not model.unloaded:
            yield model, model.stopped


def describe_stop(model: ModelRecord, stop: ReplayStop) -> str:
    """The reason, for the client and the operator."""
    return (
        f"model {model.model_id} is stopped: the replay of dispatch {stop.number} differs from its first run "
        f"({stop.differences.describe()}), and what follows would build on other numbers than its client has. "
        f"Decide with: strata serve resolve {model.model_id} --accept, or --roll-back"
    )


def refusal(state: TrainState, operation: ops.Operation) -> str | None:
    """Says why an operation of a stopped model is refused. Only a roll back runs, and an unload."""
    if not isinstance(operation, ops.Sequenced):
        return None
    model = state.models[operation.model_id]
    if model.stopped is None or (isinstance(operation, ops.LoadWeights) and operation.rollback):
        return None
    return describe_stop(model, model.stopped)


def pinned_snapshot(state: TrainState) -> int | None:
    """The number of the oldest snapshot that is from before a difference of a stopped model: it is kept, with the
    journal after it. 0 is the beginning of the journal; None: no model is stopped."""
    return min((stop.snapshot for _, stop in stopped_models(state)), default=None)


def kept_folders(state: TrainState) -> set[str]:
    """The folders of the checkpoints of stopped models: none expires."""
    stopped = {model.model_id for model, _ in stopped_models(state)}
    return {each.path for (run_id, _, _), each in state.checkpoints.items() if run_id in stopped} if stopped else set()


def resolve(state: TrainState, tenant: str, command: ResolveReplay, at_s: float) -> Decision:
    """Accept the numbers of the replay, or load the last checkpoint that the first run saved."""
    model = state.models.get(command.model_id)
    if model is None or (model.tenant != tenant and not command.everything):
        raise StrataError(Code.NOT_FOUND, f"there is no model {command.model_id!r}")
    if model.stopped is None or model.unloading:
        raise StrataError(Code.PRECONDITION, f"model {model.model_id!r} is not stopped")
    rollback = _open_rollback(state, model)
    if command.action == "accept":
        if rollback is not None:
            raise StrataError(Code.CONFLICT, f"model {model.model_id!r} is being rolled back")
        return Decision(Done(), (ReplayAccepted(model.model_id, at_s),))
    if rollback is not None:
        return Decision(Accepted(rollback, model.model_id))
    checkpoint = _last_checkpoint(state, model, model.stopped)
    saved = checkpoint.operation
    operation = ops.LoadWeights(
        model.model_id, 0, saved.model_id, saved.kind, saved.name, optimizer=True, rollback=state.turns + 1
    )
    fact = OperationAccepted(future_id_of(operation, 0), model.tenant, operation, "", at_s)
    return Decision(Accepted(fact.future_id, model.model_id), (fact,))


def _open_rollback(state: TrainState, model: ModelRecord) -> str | None:
    """The future of a roll back that has not ended."""
    for future in state.futures:
        operation = future.operation
        if isinstance(operation, ops.LoadWeights) and operation.rollback and operation.model_id == model.model_id:
            return future.future_id
    return None


def _last_checkpoint(state: TrainState, model: ModelRecord, stop: ReplayStop) -> ModelCheckpoint:
    """The newest whose save had its result before the replay: a replay keeps the files of the first run."""
    found = [
        each
        for (run_id, kind, _), each in state.checkpoints.items()
        if run_id == model.model_id and kind == "weights" and 0 < each.number <= stop.through
    ]
    if not found:
        raise StrataError(
            Code.PRECONDITION,
            f"model {model.model_id!r} has no checkpoint from before the replay",
            hint="accept the new numbers, or unload the model",
        )
    return max(found, key=lambda each: each.number)


# Facts


def apply(state: TrainState, fact: ReplayCompared | ReplayAccepted) -> None:
    match fact:
        case ReplayCompared():
            for model_id in fact.stopped:
                found = fact.models[model_id]
                before = [each.number for each in state.snapshots if each.number < found.stops_at]
                state.models[model_id].stopped = ReplayStop(
                    found.stops_at, fact.through, max(before, default=0), fact.at_s, found
                )
        case ReplayAccepted():
            _resume(state, fact.model_id, state.dispatched)


def end_rollback(state: TrainState, operation: ops.LoadWeights, number: int) -> None:
    """The ranks have loaded the checkpoint. What differed before it is gone."""
    _resume(state, operation.model_id, number)


def _resume(state: TrainState, model_id: str, accepted_through: int) -> None:
    model = state.models[model_id]
    model.stopped, model.accepted_through = None, accepted_through
