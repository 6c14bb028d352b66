"""Decides on samplers and sampling: acceptance of samplers and samples, which samples the next time slice takes (fair
by tenant), what its end does, and which sampler is evicted. Types are in `sampling`, numbers in `state.Rules`.

One sampling slice is in flight at a time, and slices alternate with training dispatches. A slice changes no model, so
it is never replayed: the running samples of a lost group start again on the next one, and those of in-flight samplers
go on there from what is durable of them (`inflight`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence, Set
from typing import Final

import msgspec

from strata.base.errors import Code, StrataError
from strata.train.core import inflight, ops, publishing
from strata.train.core.admission import admit, admit_sample
from strata.train.core.client_commands import Accepted, Done
from strata.train.core.facts import Dispatched, Fact, OperationAccepted, OperationFinished, RanksRenewed, SliceEnded
from strata.train.core.future import OperationFuture
from strata.train.core.inputs import CompleteSlice, Decision, Dispatching, RanksAttached
from strata.train.core.lookup import find_sampler, find_session, may_read
from strata.train.core.sampling import SampleOperation, SlicePlan
from strata.train.core.state import Dispatch, SamplerState, SamplerStatus, TrainState

_NO_SAMPLER: Final = ops.Failed("server", "its sampler could not be opened, or was evicted")
"""No error of the sample: the same one may succeed with another sampler."""


def accept_sampler(state: TrainState, fact: OperationAccepted, operation: ops.OpenSampler, session_id: str) -> Decision:
    """Idempotent: the same request gives the same sampler, even one that was evicted long ago."""
    existing = state.futures.get(fact.future_id)
    session = find_session(state, fact.tenant, session_id)
    if existing is not None and operation.sampler_id in state.samplers:
        return _same_or_conflict(existing, fact, f"sampler {operation.sampler_id!r}")
    if existing is not None or operation.sampler_id in state.samplers:
        raise StrataError(Code.CONFLICT, f"there was a sampler {operation.sampler_id!r} already")
    if session.finished is not None:
        raise StrataError(Code.PRECONDITION, f"session {session.session_id!r} is finished")
    obstacle = open_obstacle(state, operation, fact.tenant)
    if obstacle is not None:
        raise StrataError(Code.NOT_FOUND, obstacle)
    admit(state, fact.tenant)
    return Decision(Accepted(fact.future_id, ""), (fact,))


def accept_sample(state: TrainState, fact: OperationAccepted, sample: SampleOperation) -> Decision:
    existing = state.futures.get(fact.future_id)
    if existing is not None and existing.tenant == fact.tenant:
        return _same_or_conflict(existing, fact, f"sample {sample.seq_id} of {sample.sampler_id!r}")
    sampler = find_sampler(state, fact.tenant, sample.sampler_id)
    if state.sessions[sampler.session_id].finished is not None:
        raise StrataError(Code.PRECONDITION, f"session {sampler.session_id!r} is finished")
    if sampler.status is SamplerStatus.FAILED:
        # As if it were evicted already, which the next sampler that opens does: its client opens another one.
        raise StrataError(Code.NOT_FOUND, f"sampler {sampler.sampler_id!r} could not be opened", hint="create it again")
    if sample.max_staleness is not msgspec.UNSET and not sampler.inflight:
        raise StrataError(Code.INVALID, "max_staleness: the weights of this sampler never change; make one in flight")
    admit_sample(state, fact.tenant)
    return Decision(Accepted(fact.future_id, ""), (fact,))


def _same_or_conflict(existing: OperationFuture, fact: OperationAccepted, what: str) -> Decision:
    if existing.digest != fact.digest:
        raise StrataError(Code.CONFLICT, f"{what} was asked for before, in another way")
    return Decision(Accepted(fact.future_id, ""))


def wants_slice(state: TrainState) -> bool:
    if state.asleep or state.running_slice is not None:
        return False
    return bool(state.sampling or state.cancelled_samples) or any(
        _ready(state, future_id, sample) for future_id, sample in state.waiting.items()
    )


def _ready(state: TrainState, future_id: str, sample: SampleOperation) -> bool:
    sampler = state.samplers.get(sample.sampler_id)
    if sampler is not None and sampler.status is SamplerStatus.COMING:
        return False
    return publishing.endpoints_for(state, future_id, sample) is None


def next_slice(state: TrainState, at_s: float, *, add: bool = True) -> Decision:
    """The next slice, or the failure of the samples whose sampler does not exist. Without `add` no sample begins."""
    waiting = state.waiting.items() if add else ()
    ready = {future_id: sample for future_id, sample in waiting if _ready(state, future_id, sample)}
    failed = [future_id for future_id, sample in ready.items() if not _is_open(state, sample)]
    if failed:
        return Decision(Done(), tuple(OperationFinished(each, _NO_SAMPLER, at_s) for each in failed), tuple(failed))
    added = _select_fairly(state, ready)
    # Not for a sample that its quota holds back: a sample that ends need not be of the same tenant.
    full = len(state.sampling) + len(added) >= state.rules.max_running_samples
    plan = SlicePlan(
        state.rules.slice_steps, tuple(sorted(state.cancelled_samples)), eager=full and len(ready) > len(added)
    )
    number = state.dispatched + 1
    dispatch = Dispatch(number, tuple(added), slice=plan)
    return Decision(Dispatching(dispatch, 1.0), (Dispatched(number, tuple(added), slice=plan),))


def _is_open(state: TrainState, sample: SampleOperation) -> bool:
    sampler = state.samplers.get(sample.sampler_id)
    return sampler is not None and sampler.status is SamplerStatus.OPEN


def _select_fairly(state: TrainState, future_ids: Iterable[str]) -> list[str]:
    """Selects as many samples as the ranks have room for, tenants with the fewest running samples first.

    A tenant alone leaves some room, so that the next tenant does not have to wait until a sample ends.
    """
    rules = state.rules
    running = Counter(map(state.futures.tenant_of, state.sampling))
    places = []
    for future_id in future_ids:
        tenant = state.futures.tenant_of(future_id)
        if running[tenant] < rules.running_quota:
            places.append((running[tenant], future_id))
            running[tenant] += 1
    places.sort(key=lambda each: each[0])
    room = max(rules.max_running_samples - len(state.sampling), 0)
    return [future_id for _, future_id in places[:room]]


def complete_slice(state: TrainState, request: CompleteSlice) -> Decision:
    if request.number not in state.dispatches:
        return Decision(Done())
    # A sample that was cancelled meanwhile has its result already.
    ended = {
        future_id: _blame_sampler(state, future_id, result)
        for future_id, result in request.ended
        if future_id in state.sampling
    }
    if not request.left:
        lost = ops.Failed("server", "the ranks do not know of this request any more")
        ended |= {future_id: lost for future_id in state.sampling if future_id not in ended}
    facts: list[Fact] = [OperationFinished(future_id, result, request.at_s) for future_id, result in ended.items()]
    drawn = inflight.durable_parts(state, request.drawn, ended)
    return Decision(Done(), (*facts, SliceEnded(request.number, drawn)), tuple(ended))


def _blame_sampler(state: TrainState, future_id: str, result: ops.Result) -> ops.Result:
    """The result of a sample. One that the ranks got before they failed to open its sampler is no error of its own."""
    rejected = isinstance(result, ops.Failed) and result.category == "user"
    return _NO_SAMPLER if rejected and not _is_open(state, state.sampling[future_id]) else result


def attach_ranks(state: TrainState, request: RanksAttached) -> Decision:
    promised = request.numerics is not None and request.numerics.deterministic
    renewed = RanksRenewed(request.group, request.numerics if promised else None)
    return Decision(Done(), () if request.group == state.group else (renewed,))


def open_obstacle(state: TrainState, operation: ops.OpenSampler, tenant: str) -> str | None:
    weights = operation.weights
    if weights is None:
        return None
    key = (weights.run_id, weights.kind, weights.name)
    checkpoint = state.saving.get(key) or state.checkpoints.get(key)
    if checkpoint is None or not may_read(state, tenant, checkpoint):
        return f"there is no checkpoint {weights.path}"
    return None


def samplers_to_evict(state: TrainState) -> tuple[str, ...] | None:
    """The samplers to evict before a new one is opened: failed ones, those of finished sessions, and at the limit the
    least recently used one of the tenant that has the most. Never one with open samples; None if every one has some.
    """
    opened = [each for each in state.samplers.values() if each.status is SamplerStatus.OPEN]
    failed = [each.sampler_id for each in state.samplers.values() if each.status is SamplerStatus.FAILED]
    finished = [each.sampler_id for each in opened if state.sessions[each.session_id].finished is not None]
    if len(opened) - len(finished) < state.rules.max_samplers:
        return (*failed, *finished)
    least_recent = _least_recently_used(state, opened, set(finished))
    return None if least_recent is None else (*failed, *finished, least_recent)


def _least_recently_used(state: TrainState, opened: Sequence[SamplerState], finished: Set[str]) -> str | None:
    """Returns a sampler of the tenant that has the most; None if all of them have open samples, or are of finished
    sessions."""
    in_use = {sample.sampler_id for queue in (state.waiting, state.sampling) for sample in queue.values()}
    in_use |= {sample.sampler_id for _, sample in state.routed.values()}
    idle = [each for each in opened if each.sampler_id not in in_use and each.sampler_id not in finished]
    share = Counter(each.tenant for each in opened)
    chosen = min(idle, key=lambda each: (-share[each.tenant], each.used), default=None)
    return None if chosen is None else chosen.sampler_id
