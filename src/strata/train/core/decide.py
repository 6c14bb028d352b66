"""`decide`: every decision of the orchestrator, from the state and an input alone; sessions, acceptance of models and
operations, completed and failed dispatches, expiry, abort, and their rejections.

A rejection is an error and leaves nothing behind. Only requests without a sequence number are rejected: an operation
that has one is accepted even if it cannot work, and fails in its turn, because its client continues to count.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, assert_never

import msgspec

from strata.base.digest import sha256_hex
from strata.base.errors import Code, StrataError
from strata.train.core import (
    checkpoint_retention,
    custom_losses,
    device_turns,
    dispatching,
    inflight,
    ops,
    out_of_memory,
    publishing,
    replay_stops,
    sampling_slices,
    snapshots,
)
from strata.train.core.admission import admit, admit_model, admit_session, forgettable_sessions
from strata.train.core.client_commands import (
    AbortOperation,
    Accepted,
    AddEndpoint,
    CreateCustomLoss,
    DeleteCheckpoint,
    Done,
    FinishSession,
    ImportCheckpoint,
    OpenSession,
    PublishCheckpoint,
    RemoveEndpoint,
    ResolveReplay,
    SetCheckpointTtl,
    SubmitOperation,
)
from strata.train.core.facts import (
    DispatchFailed,
    Fact,
    OperationAccepted,
    OperationFinished,
    ResultsExpired,
    SessionFinished,
    SessionOpened,
    SessionsForgotten,
)
from strata.train.core.future import OPEN, FutureStatus
from strata.train.core.inputs import (
    ClientCommand,
    CommitSnapshot,
    CompareReplay,
    CompleteDispatch,
    CompletePush,
    CompleteRouted,
    CompleteSlice,
    CompleteSnapshotCopy,
    Decision,
    DeleteExpiredCheckpoints,
    DispatchNext,
    ExpireResults,
    FailDispatch,
    Input,
    RanksAttached,
    RanksOutOfMemory,
    RejectSnapshot,
    RequestTurn,
    RequeueRouted,
    RouteSamples,
    TakeTurn,
)
from strata.train.core.lookup import find_future, find_model, find_session
from strata.train.core.router_replay import ROUTER_REPLAY, wants_router_replay
from strata.train.core.sampling import SampleOperation
from strata.train.core.sequence import SequenceCheck
from strata.train.core.state import INITIAL, ClientSession, ModelRecord, TrainState, future_id_of, is_name

# Digests ignore the order in which a client wrote the keys of a mapping.
_canonical: Final = msgspec.msgpack.Encoder(order="deterministic").encode


def decide(state: TrainState, request: Input) -> Decision:  # noqa: C901, PLR0911, PLR0912 - one arm per input
    match request:
        case ClientCommand():
            return _decide_command(state, request)
        case DispatchNext():
            return dispatching.dispatch_next(state, request)
        case CompleteDispatch():
            return _complete_dispatch(state, request)
        case CompleteSlice():
            return sampling_slices.complete_slice(state, request)
        case CompleteSnapshotCopy():
            return snapshots.snapshot_copied(state, request)
        case CommitSnapshot():
            return snapshots.commit_snapshot(state, request)
        case RejectSnapshot():
            return snapshots.reject_snapshot(state, request)
        case RanksAttached():
            return sampling_slices.attach_ranks(state, request)
        case CompareReplay():
            return replay_stops.compare_replay(state, request)
        case RanksOutOfMemory():
            return out_of_memory.fail_oversized(state, request)
        case FailDispatch():
            return _fail_dispatch(state, request)
        case DeleteExpiredCheckpoints():
            return checkpoint_retention.delete_expired(state, request)
        case ExpireResults():
            return _expire(state, request.at_s)
        case CompletePush() | RouteSamples() | CompleteRouted() | RequeueRouted():
            return publishing.decide(state, request)
        case RequestTurn():
            return device_turns.request_turn(state, request)
        case TakeTurn():
            return device_turns.take_turn(state, request)
        case _:
            assert_never(request)


def _decide_command(  # noqa: C901, PLR0911, PLR0912 - one arm per command
    state: TrainState, request: ClientCommand
) -> Decision:
    tenant, command, at_s = request.tenant, request.command, request.at_s
    match command:
        case SubmitOperation():
            return _submit(state, tenant, command, at_s)
        case AbortOperation():
            return _abort(state, tenant, command, at_s)
        case OpenSession():
            return _open_session(state, tenant, command, at_s)
        case FinishSession():
            return _finish_session(state, tenant, command, at_s)
        case CreateCustomLoss():
            return custom_losses.create(state, tenant, command, at_s)
        case DeleteCheckpoint():
            return checkpoint_retention.delete(state, tenant, command)
        case SetCheckpointTtl():
            return checkpoint_retention.set_ttl(state, tenant, command, at_s)
        case PublishCheckpoint():
            return checkpoint_retention.publish(state, tenant, command)
        case ImportCheckpoint():
            return checkpoint_retention.import_checkpoint(state, tenant, command, at_s)
        case ResolveReplay():
            return replay_stops.resolve(state, tenant, command, at_s)
        case AddEndpoint():
            return publishing.add_endpoint(state, command, at_s)
        case RemoveEndpoint():
            return publishing.remove_endpoint(state, command)
        case _:
            assert_never(command)


def digest_of(operation: ops.Operation) -> str:
    if isinstance(operation, ops.RoutedForwardBackward):
        operation = operation.as_sent()
    return sha256_hex(_canonical(operation))


def _expire(state: TrainState, now_s: float) -> Decision:
    rules, facts = state.rules, list[Fact]()
    until_s = state.futures.overdue(now_s, ttl_s=rules.result_ttl_s, keep=rules.max_kept_results)
    if until_s is not None:
        facts.append(ResultsExpired(until_s))
    forgotten = forgettable_sessions(state, now_s)
    if forgotten:
        facts.append(SessionsForgotten(forgotten))
    return Decision(Done(), tuple(facts))


def _open_session(state: TrainState, tenant: str, command: OpenSession, at_s: float) -> Decision:
    existing = state.sessions.get(command.session_id)
    if existing is not None and existing.tenant == tenant:
        return Decision(Done())
    if existing is not None or not is_name(command.session_id):
        raise StrataError(Code.INVALID, f"{command.session_id!r} cannot name a session")
    admit_session(state, tenant)
    fact = SessionOpened(
        command.session_id, tenant, at_s, tuple(command.tags), dict(command.user_metadata), command.sdk_version
    )
    return Decision(Done(), (fact,))


def _finish_session(state: TrainState, tenant: str, command: FinishSession, at_s: float) -> Decision:
    session = find_session(state, tenant, command.session_id)
    if session.finished is not None:
        return Decision(Done())
    facts: list[Fact] = [SessionFinished(command.session_id, command.reason, at_s)]
    ended: list[str] = []
    for model_id in session.models:
        if not state.models[model_id].unloading:
            unloading, cancelled = _unload(state, state.models[model_id], at_s)
            facts += unloading
            ended += cancelled
    cancelled_result = ops.Failed("cancelled", "the session was finished before it was sampled")
    for sampler in state.samplers.values():
        if sampler.session_id == command.session_id:
            samples = list(state.samples_of(sampler.sampler_id))
            facts += [OperationFinished(future_id, cancelled_result, at_s) for future_id in samples]
            ended += samples
    return Decision(Done(), tuple(facts), tuple(ended))


def _submit(state: TrainState, tenant: str, command: SubmitOperation, at_s: float) -> Decision:  # noqa: PLR0911 - one arm per kind
    operation = command.operation
    match operation:
        case ops.CreateModel():
            return _accept_model(state, tenant, operation, command.session_id, at_s)
        case ops.UnloadModel():
            model = find_model(state, tenant, operation.model_id)
            accepted = Accepted(future_id_of(operation, 0), model.model_id)
            if model.unloading:
                return Decision(accepted)
            facts, ended = _unload(state, model, at_s)
            return Decision(accepted, tuple(facts), tuple(ended))
        case ops.Sleep() | ops.Wake():
            admit(state, tenant)
            fact = _accepted(state, tenant, operation, at_s)
            return Decision(Accepted(fact.future_id, ""), (fact,))
        case ops.OpenSampler():
            fact = _accepted(state, tenant, operation, at_s)
            return sampling_slices.accept_sampler(state, fact, operation, command.session_id)
        case SampleOperation():
            return sampling_slices.accept_sample(state, _accepted(state, tenant, operation, at_s), operation)
        case ops.LoadWeights() if operation.rollback:
            raise StrataError(Code.INVALID, "rollback: only the server itself loads for a roll back")
        case ops.LoadWeights() if operation.seq_id == 0:
            return _accept_initial_load(state, tenant, operation, at_s)
        case _:
            return _accept_sequenced(state, tenant, operation, at_s)


def _accept_model(state: TrainState, tenant: str, operation: ops.CreateModel, session_id: str, at_s: float) -> Decision:
    fact = _accepted(state, tenant, operation, at_s, session_id)
    accepted = Accepted(fact.future_id, operation.model_id)
    existing = state.models.get(operation.model_id)
    if existing is not None:
        find_model(state, tenant, operation.model_id)
        if digest_of(existing.create) != fact.digest:
            raise StrataError(Code.CONFLICT, f"model {operation.model_id!r} was created before, in another way")
        return Decision(accepted)
    session = find_session(state, tenant, session_id)
    if session.finished is not None:
        raise StrataError(Code.PRECONDITION, f"session {session.session_id!r} is finished")
    _check_model_id(session, operation.model_id)
    _check_base(state, operation.base_model)
    if state.rules.route and wants_router_replay(operation.user_metadata):
        raise StrataError(Code.INVALID, f"{ROUTER_REPLAY}: engines sample for this server, and they return no routing")
    admit(state, tenant)
    admit_model(state, tenant)
    facts: list[Fact] = [fact]
    if state.rules.initial_checkpoint:
        first = ops.SaveWeights(model_id=operation.model_id, seq_id=0, kind="weights", name=INITIAL)
        facts.append(_accepted(state, tenant, first, at_s))
    return Decision(accepted, tuple(facts))


def _check_model_id(session: ClientSession, model_id: str) -> None:
    head, _, number = model_id.rpartition(":")
    if head != f"{session.session_id}:train" or not (number.isascii() and number.isdecimal()):
        raise StrataError(Code.INVALID, f"{model_id!r} is not of the form '{session.session_id}:train:NUMBER'")


def _check_base(state: TrainState, base_model: str) -> None:
    """There is one base model: a client that requested another would train the wrong one unnoticed."""
    served = state.rules.base_models
    if base_model not in served:
        raise StrataError(
            Code.INVALID, f"base_model: {base_model!r} is not served here", hint=f"this server has {served[0]!r}"
        )


def _accept_sequenced(state: TrainState, tenant: str, operation: ops.Sequenced, at_s: float) -> Decision:
    model = find_model(state, tenant, operation.model_id)
    fact = _accepted(state, tenant, operation, at_s)
    accepted = Accepted(fact.future_id, model.model_id)
    existing = state.futures.get(fact.future_id)
    check = model.line.check(operation.seq_id, fact.digest, existing.digest if existing else None)
    if check is SequenceCheck.DUPLICATE:
        return Decision(accepted)
    if model.unloading:
        raise StrataError(Code.GONE, f"model {model.model_id!r} was unloaded")
    if not _unblocks_held(state, model, operation.seq_id):
        admit(state, tenant)
    return Decision(accepted, (fact,))


def _accept_initial_load(state: TrainState, tenant: str, operation: ops.LoadWeights, at_s: float) -> Decision:
    """A model that begins with saved weights: they are loaded before its operations, which its client counts from 1."""
    model = find_model(state, tenant, operation.model_id)
    fact = _accepted(state, tenant, operation, at_s)
    accepted = Accepted(fact.future_id, model.model_id)
    existing = state.futures.get(fact.future_id)
    if existing is not None and existing.digest == fact.digest:
        return Decision(accepted)
    if existing is not None or model.line.released or model.line.held:
        raise StrataError(Code.CONFLICT, f"model {model.model_id!r} began in another way")
    if model.unloading:
        raise StrataError(Code.GONE, f"model {model.model_id!r} was unloaded")
    admit(state, tenant)
    return Decision(accepted, (fact,))


def _unblocks_held(state: TrainState, model: ModelRecord, seq: int) -> bool:
    """Says whether held operations wait for this one: a queue full of held operations would never drain without it.

    One at a time. While the last released one waits the queue does drain, and a client that sent a high number first
    gets no more room for the numbers below it than others have.
    """
    last = state.futures.get(f"{model.model_id}:{model.line.released}")
    runs_out = last is None or last.status is not FutureStatus.PENDING
    return seq == model.line.wanted and bool(model.line.held) and runs_out


def _accepted(
    state: TrainState, tenant: str, operation: ops.Operation, at_s: float, session_id: str = ""
) -> OperationAccepted:
    future_id = future_id_of(operation, state.server_operations)
    return OperationAccepted(future_id, tenant, operation, digest_of(operation), at_s, session_id)


def _unload(state: TrainState, model: ModelRecord, at_s: float) -> tuple[list[Fact], list[str]]:
    """Unload after everything that may still run. Operations behind a gap can never run now, and are cancelled."""
    held = [f"{model.model_id}:{seq}" for seq in sorted(model.line.held)]
    result = ops.Failed("cancelled", "the model was unloaded before the operations before this one came")
    cancelled = [
        future_id
        for future_id in held
        if (future := state.futures.get(future_id)) is not None and future.status in OPEN
    ]
    facts: list[Fact] = [OperationFinished(future_id, result, at_s) for future_id in cancelled]
    facts.append(_accepted(state, model.tenant, ops.UnloadModel(model.model_id), at_s))
    return facts, cancelled


def _complete_dispatch(state: TrainState, request: CompleteDispatch) -> Decision:
    dispatch = state.dispatches.get(request.number)
    if dispatch is None:
        return Decision(Done())
    results: Sequence[ops.Result] = request.results
    if len(results) != len(dispatch.future_ids):
        wrong = f"the ranks gave {len(results)} results for {len(dispatch.future_ids)} operations"
        results = [ops.Failed("server", wrong)] * len(dispatch.future_ids)
    push = publishing.push_after_save(state, dispatch, results, request.at_s)
    if push is not None and push.future_id:
        # The future ends when the push to the endpoints is complete.
        return Decision(Done(), (push,))
    took_s = request.took_s / max(len(dispatch.future_ids), 1)
    facts: list[Fact] = [
        OperationFinished(future_id, result, request.at_s, took_s)
        for future_id, result in zip(dispatch.future_ids, results, strict=True)
    ]
    if push is not None:
        facts.append(push)
    stale = inflight.cancel_stale(state, dispatch, results, request.at_s)
    return Decision(Done(), (*facts, *stale), (*dispatch.future_ids, *(each.future_id for each in stale)))


def _fail_dispatch(state: TrainState, request: FailDispatch) -> Decision:
    dispatch = state.dispatches.get(request.number)
    if dispatch is None:
        return Decision(Done())
    ended = dispatch.future_ids if dispatch.slice is None else state.sampling
    return Decision(Done(), (DispatchFailed(request.number, request.reason, request.at_s),), tuple(ended))


def _abort(state: TrainState, tenant: str, command: AbortOperation, at_s: float) -> Decision:
    future = find_future(state, tenant, command.future_id)
    is_sample = isinstance(future.operation, SampleOperation)
    if future.status is FutureStatus.DISPATCHED and not is_sample:
        raise StrataError(Code.PRECONDITION, "it is running already and cannot be cancelled any more")
    if future.status not in OPEN:
        return Decision(Done())
    if not is_sample and not isinstance(future.operation, ops.Sequenced):
        raise StrataError(Code.PRECONDITION, f"{future.kind} cannot be cancelled: others rely on it")
    result = ops.Failed("cancelled", command.reason)
    return Decision(Done(), (OperationFinished(command.future_id, result, at_s),), (command.future_id,))
