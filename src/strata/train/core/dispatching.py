"""Makes the next dispatch from what the scheduler chose, or fails an operation whose model, checkpoint or sampler has
changed since its acceptance.
"""

from __future__ import annotations

from typing import Final, NamedTuple

from strata.base.errors import StrataError
from strata.train.core import (
    checkpoint_retention,
    device_turns,
    inflight,
    ops,
    publishing,
    replay_stops,
    sampling_slices,
    snapshots,
)
from strata.train.core.client_commands import Done
from strata.train.core.facts import Dispatched, OperationFinished
from strata.train.core.inputs import Decision, Dispatching, DispatchNext
from strata.train.core.lookup import may_read
from strata.train.core.pack import Packed, check_lengths, pack
from strata.train.core.scheduler import Charges
from strata.train.core.state import (
    Dispatch,
    ModelCheckpoint,
    SamplerStatus,
    TrainState,
    folder_of,
    is_name,
    key_of,
)

UNNAMED: Final = "unnamed"
"""The files of a sampler that was saved without a name. They stay as long as engines have its weights."""
_SAMPLER_OPERATIONS: Final = (ops.SaveSampler, ops.OpenSampler)


class _Chosen(NamedTuple):
    future_id: str
    operation: ops.Operation
    tenant: str


def dispatch_next(state: TrainState, request: DispatchNext) -> Decision:
    """One dispatch, or the failure of one operation that cannot be dispatched, or nothing."""
    may_begin = state.may_begin("ranks")
    if len(state.dispatches) >= state.rules.max_running or not (may_begin or device_turns.wants_last_slice(state)):
        return Decision(Done())
    if may_begin and snapshots.due_reason(state, request.at_s) is not None:
        return snapshots.begin_snapshot(state, request.at_s)
    if not may_begin or (sampling_slices.wants_slice(state) and not (state.last_was_slice and len(state.scheduler))):
        return sampling_slices.next_slice(state, request.at_s, add=may_begin)
    budget = request.ranks * state.rules.max_tokens_per_row
    rules = state.rules
    selection = state.scheduler.select(budget_tokens=budget, coalesce=rules.pack_tenants, most=rules.slots)
    chosen = [_chosen(state, entry.future_id) for entry in selection.operations]
    if not chosen:
        return Decision(Done())
    for each in chosen:
        stopped = replay_stops.refusal(state, each.operation)
        obstacle = stopped or _obstacle(state, each, request)
        if obstacle is not None:
            # Only its own tenant is charged: else a tenant whose operations cannot run would have others charged.
            charges = selection.charges(only={each.future_id})
            failed = OperationFinished(
                each.future_id, ops.Failed("server" if stopped else "user", obstacle), request.at_s
            )
            return Decision(Done(), (failed,), (each.future_id,), charges=charges)
    return _dispatch(state, chosen, request, selection.charges())


def _chosen(state: TrainState, future_id: str) -> _Chosen:
    future = state.futures.get(future_id)
    assert future is not None, "the scheduler has an operation that does not exist"
    assert future.operation is not None, "the scheduler has an operation that has ended"
    return _Chosen(future.future_id, future.operation, future.tenant)


def _dispatch(state: TrainState, chosen: list[_Chosen], request: DispatchNext, charges: Charges) -> Decision:
    packed = _packed(state, chosen, request)
    number = state.dispatched + 1
    ids = tuple(each.future_id for each in chosen)
    path = _path(state, chosen[0].operation)
    close: tuple[str, ...] = ()
    if isinstance(chosen[0].operation, _SAMPLER_OPERATIONS):
        evicted = sampling_slices.samplers_to_evict(state) or ()
        close = (*evicted, *inflight.unused_weights(state, evicted))
    dispatch = Dispatch(number, ids, packed.rows, path, close)
    fact = Dispatched(number, ids, packed.rows, path, close, at_s=request.at_s)
    return Decision(Dispatching(dispatch, packed.efficiency), (fact,), charges=charges)


def _packed(state: TrainState, chosen: list[_Chosen], request: DispatchNext) -> Packed:
    passes = [each.operation for each in chosen if isinstance(each.operation, ops.ForwardBackward)]
    if not passes:
        return Packed((), 1.0)
    capacity = min(state.rules.max_tokens_per_row, request.row_tokens or state.rules.max_tokens_per_row)
    return pack(
        [operation.lengths for operation in passes],
        ranks=request.ranks,
        max_tokens_per_row=capacity,
        max_context=request.max_context,
        group_sizes=[operation.group_size for operation in passes],
        one_document_per_row=request.one_document_per_row,
    )


def _obstacle(state: TrainState, chosen: _Chosen, request: DispatchNext) -> str | None:  # noqa: PLR0911 - one arm per kind
    """Says why this operation cannot be dispatched."""
    operation = chosen.operation
    if state.asleep and not isinstance(operation, ops.WHILE_ASLEEP):
        # Decided here, not by the ranks: in a replay others might be awake where these were asleep.
        return ops.ASLEEP
    match operation:
        case ops.MalformedOperation():
            return operation.message
        case ops.ForwardBackward():
            return _pack_obstacle(operation, request)
        case ops.SaveWeights() | ops.SyncWeights():
            return publishing.unknown_endpoint(state, operation) or _save_obstacle(state, publishing.as_save(operation))
        case ops.LoadWeights():
            return _load_obstacle(state, operation, chosen.tenant, request.at_s)
        case ops.SaveSampler() | ops.OpenSampler():
            return _sampler_obstacle(state, operation, chosen.tenant)
        case _:
            return None


def _pack_obstacle(operation: ops.ForwardBackward, request: DispatchNext) -> str | None:
    try:
        check_lengths([operation.lengths], request.max_context, request.row_tokens)
    except StrataError as error:
        return error.message
    return None


def _save_obstacle(state: TrainState, operation: ops.SaveWeights) -> str | None:
    if not is_name(operation.name):
        return f"{operation.name!r} cannot name a checkpoint: use letters, digits and . _ -"
    there = state.saving.get(key_of(operation)) or state.checkpoints.get(key_of(operation))
    # The initial checkpoint of the server may be replaced: clients that count from zero save under that name too.
    if there is not None and there.operation.seq_id and not operation.overwrite:
        return f"there is a checkpoint {operation.kind}/{operation.name} already"
    return None


def _load_obstacle(state: TrainState, operation: ops.LoadWeights, tenant: str, now_s: float) -> str | None:
    checkpoint = _checkpoint(state, operation)
    if checkpoint is None or not may_read(state, tenant, checkpoint) or checkpoint_retention.expired(checkpoint, now_s):
        return f"there is no checkpoint tinker://{operation.run_id}/{operation.kind}/{operation.name}"
    if operation.optimizer and operation.kind != "weights":
        return "a checkpoint for sampling does not hold the state of the optimizer"
    return None


def _sampler_obstacle(state: TrainState, operation: ops.SaveSampler | ops.OpenSampler, tenant: str) -> str | None:
    sampler = state.samplers.get(operation.sampler_id)
    if sampler is None or sampler.tenant != tenant or sampler.status is not SamplerStatus.COMING:
        return f"there is a sampler {operation.sampler_id!r} already"
    session = state.sessions.get(sampler.session_id)
    if session is None or session.tenant != tenant:
        return f"there is no session {sampler.session_id!r}"
    if session.finished is not None:
        return f"session {session.session_id!r} is finished"
    if (
        isinstance(operation, ops.SaveSampler)
        and operation.inflight
        and state.models[operation.model_id].create.lora is None
    ):
        return inflight.ONLY_ADAPTERS
    if sampling_slices.samplers_to_evict(state) is None:
        return f"all {state.rules.max_samplers} samplers are being asked for samples; none can make room"
    return sampling_slices.open_obstacle(state, operation, tenant) if isinstance(operation, ops.OpenSampler) else None


def _checkpoint(state: TrainState, operation: ops.LoadWeights | ops.SavedWeights) -> ModelCheckpoint | None:
    """A checkpoint that is still being saved counts: the ranks run one dispatch after the other."""
    key = (operation.run_id, operation.kind, operation.name)
    return state.saving.get(key) or state.checkpoints.get(key)


def _path(state: TrainState, operation: ops.Operation) -> str:
    match operation:
        case ops.SaveWeights() | ops.SyncWeights():
            return folder_of(publishing.as_save(operation))
        case ops.LoadWeights():
            checkpoint = _checkpoint(state, operation)
            assert checkpoint is not None, "checked before"
            return checkpoint.path
        case ops.OpenSampler() if operation.weights is not None:
            checkpoint = _checkpoint(state, operation.weights)
            assert checkpoint is not None, "checked before"
            return checkpoint.path
        case ops.SaveSampler() if state.rules.engines and not operation.inflight:
            # Engines read files. No other operation of this model has this sequence number, and so this folder.
            unnamed = ops.SaveWeights(operation.model_id, operation.seq_id, "sampler_weights", UNNAMED)
            return folder_of(unnamed)
        case _:
            return ""
