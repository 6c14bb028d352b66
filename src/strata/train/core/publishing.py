"""Publishing weights to inference endpoints and routing samples to them: names of versions, at most 64 endpoints, and
the choice of an engine by shared prefix and load.

A version is named after its model and the sequence number at which it was saved. So a name never means two versions, a
push is idempotent, and a sample that names its version never runs on older weights.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from enum import StrEnum
from typing import Final, assert_never

from strata.base.digest import sha256_hex
from strata.base.errors import Code, StrataError
from strata.train.core import checkpoint_retention, ops
from strata.train.core.client_commands import AddEndpoint, Done, RemoveEndpoint
from strata.train.core.facts import (
    EndpointAdded,
    EndpointRemoved,
    Fact,
    OperationFinished,
    PushBegun,
    PushEnded,
    SampleReturned,
    SampleRouted,
)
from strata.train.core.future import OPEN
from strata.train.core.inputs import CompletePush, CompleteRouted, Decision, RequeueRouted, RouteSamples
from strata.train.core.sampling import SampleOperation, SampleParams
from strata.train.core.state import Dispatch, InferenceEndpoint, Publication, Push, TrainState, is_name

MAX_ENDPOINTS: Final = 64
PREFIX_TOKENS: Final = 16
"""Tokens of a prompt that choose its endpoint: a block of vLLM's prefix cache."""
TOKEN_BYTES: Final = 4
LOAD_BOUND: Final = 1.25
SAMPLING_ENGINES: Final = frozenset({"vllm"})
"""Engines that accept tokens and return their log probabilities."""
LOWEST_TEMPERATURE: Final = 0.01
"""vLLM raises a lower temperature to this one, unless it is 0."""

PublishingInput = CompletePush | RouteSamples | CompleteRouted | RequeueRouted
EndpointFact = EndpointAdded | EndpointRemoved | PushBegun | PushEnded | SampleRouted | SampleReturned


def version_of(model_id: str, seq_id: int) -> str:
    return f"{model_id.replace(':', '-')}-v{seq_id}"


def decide(state: TrainState, request: PublishingInput) -> Decision:
    match request:
        case CompletePush():
            return _complete_push(state, request)
        case RouteSamples():
            return _route(state, request)
        case CompleteRouted():
            # A sample that was cancelled meanwhile has its result already.
            if request.future_id not in state.routed:
                return Decision(Done())
            return Decision(
                Done(), (OperationFinished(request.future_id, request.result, request.at_s),), (request.future_id,)
            )
        case RequeueRouted():
            returned = SampleReturned(request.future_id, request.again)
            return Decision(Done(), (returned,) if request.future_id in state.routed else ())
        case _:
            assert_never(request)


def add_endpoint(state: TrainState, command: AddEndpoint, at_s: float) -> Decision:
    """Idempotent. A changed address replaces the old one."""
    if not is_name(command.name):
        raise StrataError(Code.INVALID, f"{command.name!r} cannot name an endpoint: use letters, digits and . _ -")
    existing = state.endpoints.get(command.name)
    if existing is not None and (existing.url, existing.engine) != (command.url, command.engine):
        raise StrataError(Code.CONFLICT, f"there is an inference endpoint {command.name!r} already, another one")
    if existing is not None and existing.address == command.address:
        return Decision(Done())
    own = command.name in state.rules.engines
    if existing is None and not own and len(state.endpoints) >= MAX_ENDPOINTS:
        raise StrataError(Code.EXHAUSTED, f"there are {MAX_ENDPOINTS} inference endpoints, which is the limit")
    return Decision(Done(), (EndpointAdded(command.name, command.url, command.address, command.engine, at_s),))


def remove_endpoint(state: TrainState, command: RemoveEndpoint) -> Decision:
    if command.name not in state.endpoints:
        raise StrataError(Code.NOT_FOUND, f"there is no inference endpoint {command.name!r}")
    return Decision(Done(), (EndpointRemoved(command.name),))


def push_after_save(
    state: TrainState, dispatch: Dispatch, results: Sequence[ops.Result], at_s: float
) -> PushBegun | None:
    """The push that follows when the ranks have saved the weights of this dispatch; None if there is none."""
    if len(results) != 1 or not isinstance(results[0], ops.WeightsSaved | ops.SamplerOpened):
        return None
    future = state.futures.get(dispatch.future_ids[0])
    operation = future.operation if future else None
    if isinstance(operation, ops.SyncWeights):
        endpoints, future_id = operation.endpoints or state.endpoints, dispatch.future_ids[0]
    elif isinstance(operation, ops.SaveWeights) and _is_pushed(state, operation):
        endpoints, future_id = state.endpoints, ""
    elif isinstance(operation, ops.SaveSampler) and dispatch.path:
        endpoints, future_id = state.rules.engines, ""
    else:
        return None
    return PushBegun(
        path=dispatch.path,
        version=version_of(operation.model_id, operation.seq_id),
        model_id=operation.model_id,
        seq_id=operation.seq_id,
        endpoints=tuple(endpoints),
        future_id=future_id,
        number=dispatch.number,
        at_s=at_s,
    )


def _is_pushed(state: TrainState, operation: ops.SaveWeights) -> bool:
    """Says whether the settings push what this operation saves, without a request of the client."""
    return state.rules.push and operation.kind == "sampler_weights" and bool(state.endpoints)


def _complete_push(state: TrainState, request: CompletePush) -> Decision:
    push = state.pushes.get(request.path)
    if push is None:
        return Decision(Done())
    ended: list[Fact] = [PushEnded(request.path, request.outcomes, request.at_s)]
    future = state.futures.get(push.future_id)
    if future is None or future.status not in OPEN or not isinstance(future.operation, ops.SyncWeights):
        return Decision(Done(), tuple(ended))
    weights = future.operation.save()
    path = ops.SavedWeights(weights.model_id, weights.kind, weights.name).path
    result = ops.WeightsSynced(path, push.version, request.outcomes)
    ended.append(OperationFinished(push.future_id, result, request.at_s))
    return Decision(Done(), tuple(ended), (push.future_id,))


class RanksReason(StrEnum):
    """Why the ranks draw a sample although samples are routed to engines."""

    NO_FILES = "no_files"
    NOT_PUSHED = "not_pushed"
    PROMPT = "prompt"
    PARAMETERS = "parameters"
    ENGINE_FAILED = "engine_failed"


_REASONS: Final = {
    RanksReason.NO_FILES: "its sampler is of the base model, or of weights that are in no file",
    RanksReason.NOT_PUSHED: "no engine has its weights: they were not pushed, or newer ones replaced them",
    RanksReason.PROMPT: "no engine scores tokens that a request names, or draws others, at the places of a prompt",
    RanksReason.PARAMETERS: f"engines draw at temperature 0 or from {LOWEST_TEMPERATURE} on, with top_p in (0, 1], "
    "and without min_p, penalties, biases and grammars",
    RanksReason.ENGINE_FAILED: "an engine failed to draw it",
}


def ranks_reason(state: TrainState, future_id: str, sample: SampleOperation) -> RanksReason | None:
    """Returns why the ranks draw a sample where samples are routed to engines; None if an engine does."""
    sampler = state.samplers.get(sample.sampler_id)
    if future_id in state.unroutable:
        return RanksReason.ENGINE_FAILED
    if sample.prompt_draws or sample.targets is not None:
        return RanksReason.PROMPT
    if not _engines_draw_at(sample.params):
        return RanksReason.PARAMETERS
    if sampler is None or not sampler.folder:
        return RanksReason.NO_FILES
    if _able_endpoints(state, sampler.folder) or _reaches_engines(state, sampler.folder):
        return None
    return RanksReason.NOT_PUSHED


def endpoints_for(state: TrainState, future_id: str, sample: SampleOperation) -> Sequence[str] | None:
    """The endpoints that may draw this sample; none of them: it waits for one. None: the ranks draw it."""
    if not state.rules.route or ranks_reason(state, future_id, sample) is not None:
        return None
    return _able_endpoints(state, state.samplers[sample.sampler_id].folder)


def refusal(state: TrainState, future_id: str, sample: SampleOperation) -> ops.Failed | None:
    """The failure of a sample that no engine can draw, if the ranks are to draw none of those."""
    if not (state.rules.route and state.rules.refuse_unroutable):
        return None
    reason = ranks_reason(state, future_id, sample)
    # Of what engines failed to draw, the publisher decided which the ranks are to draw.
    if reason is None or reason is RanksReason.ENGINE_FAILED:
        return None
    return ops.Failed("user", f"the settings leave it to inference engines, and {_REASONS[reason]}")


def _able_endpoints(state: TrainState, path: str) -> Sequence[str]:
    publication = state.published.get(path)
    return [
        name
        for name in (publication.endpoints if publication else ())
        if name in state.endpoints and state.endpoints[name].engine in SAMPLING_ENGINES
    ]


def _reaches_engines(state: TrainState, path: str) -> bool:
    """Says whether samples wait for these weights, which are being saved, or are on their way to engines."""
    rules = state.rules
    waits = (rules.engines and not rules.fallback) or rules.refuse_unroutable
    if not waits or path in state.published:
        return False
    push = state.pushes.get(path)
    return push is not None or any(dispatch.path == path for dispatch in state.dispatches.values())


def _engines_draw_at(params: SampleParams) -> bool:
    """Says whether engines draw with these numbers. What is no temperature or no share, the ranks reject."""
    if params.shapes_logits or params.min_p:
        return False
    is_drawn = params.is_greedy or params.temperature >= LOWEST_TEMPERATURE
    return is_drawn and 0 <= params.temperature < math.inf and 0 < params.top_p <= 1


def _route(state: TrainState, request: RouteSamples) -> Decision:
    """One at a time, so that each choice sees the load of those before it."""
    if len(state.routed) >= request.limit:
        return Decision(Done())
    load = Counter(endpoint for endpoint, _ in state.routed.values())
    closed = request.down if state.may_begin("engines") else request.down.union(state.rules.engines)
    for future_id, sample in state.waiting.items():
        able = [name for name in endpoints_for(state, future_id, sample) or () if name not in closed]
        if able:
            return Decision(Done(), (SampleRouted(future_id, choose_endpoint(able, sample, load)),))
    return Decision(Done())


def choose_endpoint(able: Sequence[str], sample: SampleOperation, load: Mapping[str, int]) -> str:
    """Chooses by rendezvous hashing of the first block of the prompt: samples that share it find its KV cache in one
    endpoint, and an endpoint that comes or goes moves none but its own. An endpoint takes no more than its share of the
    load and a quarter; beyond that the next in the order of the hash does."""
    block = sample.prompt[: PREFIX_TOKENS * TOKEN_BYTES]
    bound = math.ceil(LOAD_BOUND * (sum(load.get(name, 0) for name in able) + 1) / len(able))
    ranked = sorted(able, key=lambda name: sha256_hex(name.encode() + b"\0" + block))
    return next(name for name in ranked if load.get(name, 0) < bound)


def apply(state: TrainState, fact: EndpointFact) -> None:
    match fact:
        case EndpointAdded():
            state.endpoints[fact.name] = InferenceEndpoint(fact.name, fact.url, fact.address, fact.engine, fact.at_s)
        case EndpointRemoved():
            state.endpoints.pop(fact.name, None)
        case PushBegun():
            _begin_push(state, fact)
        case PushEnded():
            _end_push(state, fact)
        case SampleRouted():
            sample = state.waiting.pop(fact.future_id)
            state.futures.dispatch(fact.future_id, 0)
            state.routed[fact.future_id] = fact.endpoint, sample
        case SampleReturned():
            _, sample = state.routed.pop(fact.future_id)
            state.futures.give_back(fact.future_id)
            if not fact.again:
                state.unroutable.add(fact.future_id)
            # It was accepted before those that wait.
            state.waiting = {fact.future_id: sample} | state.waiting
        case _:
            assert_never(fact)


def _begin_push(state: TrainState, fact: PushBegun) -> None:
    state.pushes[fact.path] = Push(fact.path, fact.version, fact.model_id, fact.seq_id, fact.endpoints, fact.future_id)
    # The ranks are done with this dispatch; only the endpoints are not.
    state.dispatches.pop(fact.number, None)
    future = state.futures.get(fact.future_id)
    if future is not None and isinstance(future.operation, ops.SyncWeights):
        checkpoint_retention.end_save(state, future.operation.save(), fact.number, fact.at_s)


def _end_push(state: TrainState, fact: PushEnded) -> None:
    push = state.pushes.pop(fact.path)
    # An engine of the server that is down gets the weights with the first sample after its restart.
    engines = state.rules.engines
    endpoints = tuple(each.endpoint for each in fact.outcomes if each.ok or each.endpoint in engines)
    if endpoints and not state.models[push.model_id].unloaded:
        _publish(state, push, endpoints)


def _publish(state: TrainState, push: Push, endpoints: tuple[str, ...]) -> None:
    before = state.published.pop(push.path, None)
    names = tuple(dict.fromkeys((*(before.endpoints if before else ()), *endpoints)))
    state.published[push.path] = Publication(push.path, push.version, push.model_id, push.seq_id, names)
    same = sorted(each.seq_id for each in state.published.values() if each.model_id == push.model_id)
    kept = set(same[-state.rules.keep_versions :])
    for each in [one for one in state.published.values() if one.model_id == push.model_id and one.seq_id not in kept]:
        del state.published[each.path]


def unknown_endpoint(state: TrainState, operation: ops.SaveWeights | ops.SyncWeights) -> str | None:
    """The error for an endpoint that does not exist; None if all do."""
    named = operation.endpoints if isinstance(operation, ops.SyncWeights) else ()
    strange = [each for each in named if each not in state.endpoints]
    return f"there is no inference endpoint {strange[0]!r}" if strange else None


def retract_published(state: TrainState, model_id: str) -> None:
    """The model was unloaded: its weights are not pushed to restarted engines any more, and the ranks sample them."""
    for each in [one for one in state.published.values() if one.model_id == model_id]:
        del state.published[each.path]


def as_save(operation: ops.SaveWeights | ops.SyncWeights) -> ops.SaveWeights:
    """The save that the ranks run for it."""
    return operation if isinstance(operation, ops.SaveWeights) else operation.save()
