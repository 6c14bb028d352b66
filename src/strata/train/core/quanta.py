"""Sampling between training: which requests the ranks get next, and which samplers make room for new ones.

There is one quantum at the ranks at a time, and between two of them whatever training waits: a dispatch of each in
turn. A quantum changes nothing that is trained, so ranks that start anew are never told one again. What they had is
given to them as new.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from strata.base.errors import Code, StrataError
from strata.train.core import ops, publishing
from strata.train.core.admission import admit, admit_sample
from strata.train.core.facts import Accepted, Dispatched, Fact, Finished, QuantumEnded, RanksRenewed
from strata.train.core.inputs import Accept, AnswerQuantum, Dispatching, Done, Greet, Outcome, Taken
from strata.train.core.sampling import QuantumPlan, Sample
from strata.train.core.state import Dispatch, SamplerStatus, TrainState, future_id_of
from strata.train.core.views import find_sampler, find_session


def accept_sampler(state: TrainState, given: Accept, operation: ops.OpenSampler, digest: str) -> Outcome:
    """The same again is the same sampler, also if it has long made room for others."""
    future_id = future_id_of(operation, 0)
    known = state.futures.get(future_id)
    session = find_session(state, given.tenant, given.session_id)
    if known is not None and operation.sampler_id in state.samplers:
        return _known(known.digest, digest, Taken(future_id, ""), f"sampler {operation.sampler_id!r}")
    if known is not None or operation.sampler_id in state.samplers:
        raise StrataError(Code.CONFLICT, f"there was a sampler {operation.sampler_id!r} already")
    if session.finished is not None:
        raise StrataError(Code.PRECONDITION, f"session {session.session_id!r} is finished")
    obstacle = unopenable(state, operation, given.tenant)
    if obstacle is not None:
        raise StrataError(Code.NOT_FOUND, obstacle)
    admit(state, given.tenant)
    return Outcome(Taken(future_id, ""), (Accepted(future_id, given.tenant, operation, digest, given.at_s),))


def accept_sample(state: TrainState, given: Accept, sample: Sample, digest: str) -> Outcome:
    future_id = future_id_of(sample, 0)
    known = state.futures.get(future_id)
    if known is not None and known.tenant == given.tenant:
        return _known(known.digest, digest, Taken(future_id, ""), f"sample {sample.seq_id} of {sample.sampler_id!r}")
    sampler = find_sampler(state, given.tenant, sample.sampler_id)
    if state.sessions[sampler.session_id].finished is not None:
        raise StrataError(Code.PRECONDITION, f"session {sampler.session_id!r} is finished")
    admit_sample(state, given.tenant)
    return Outcome(Taken(future_id, ""), (Accepted(future_id, given.tenant, sample, digest, given.at_s),))


def _known(before: str, now: str, taken: Taken, what: str) -> Outcome:
    if before != now:
        raise StrataError(Code.CONFLICT, f"{what} was asked for before, in another way")
    return Outcome(taken)


def wants_quantum(state: TrainState) -> bool:
    if state.asleep or state.quantum is not None:
        return False
    return bool(state.sampling or state.cancels) or any(
        _ready(state, future_id, sample) for future_id, sample in state.waiting.items()
    )


def _ready(state: TrainState, future_id: str, sample: Sample) -> bool:
    sampler = state.samplers.get(sample.sampler_id)
    if sampler is not None and sampler.status is SamplerStatus.COMING:
        return False
    return publishing.routable(state, future_id, sample) is None


def next_quantum(state: TrainState, at_s: float) -> Outcome:
    """A quantum, or the failure of the requests whose sampler does not exist."""
    ready = {future_id: sample for future_id, sample in state.waiting.items() if _ready(state, future_id, sample)}
    failed = [future_id for future_id, sample in ready.items() if not _is_open(state, sample)]
    if failed:
        result = ops.Failed("user", "its sampler could not be made, or has made room for others")
        return Outcome(Done(), tuple(Finished(each, result, at_s) for each in failed), tuple(failed))
    added = _fairly(state, ready)
    # Not for one that its quota holds back: a sample that ends need not be one of its tenant.
    full = len(state.sampling) + len(added) >= state.rules.max_running_samples
    plan = QuantumPlan(state.rules.quantum_steps, tuple(sorted(state.cancels)), eager=full and len(ready) > len(added))
    number = state.dispatched + 1
    dispatch = Dispatch(number, tuple(added), quantum=plan)
    return Outcome(Dispatching(dispatch, 1.0), (Dispatched(number, tuple(added), quantum=plan),))


def _is_open(state: TrainState, sample: Sample) -> bool:
    sampler = state.samplers.get(sample.sampler_id)
    return sampler is not None and sampler.status is SamplerStatus.OPEN


def _fairly(state: TrainState, future_ids: Iterable[str]) -> list[str]:
    """As many as there is room for at the ranks, of those first who have the fewest there.

    Some room is left by whoever is alone: for who comes next, and would have to wait until something ends.
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


def answer_quantum(state: TrainState, given: AnswerQuantum) -> Outcome:
    if given.number not in state.dispatches:
        return Outcome(Done())
    # One that was given up meanwhile has its result already.
    ended = {future_id: result for future_id, result in given.ended if future_id in state.sampling}
    if not given.left:
        lost = ops.Failed("server", "the ranks do not know of this request any more")
        ended |= {future_id: lost for future_id in state.sampling if future_id not in ended}
    facts: list[Fact] = [Finished(future_id, result, given.at_s) for future_id, result in ended.items()]
    return Outcome(Done(), (*facts, QuantumEnded(given.number)), tuple(ended))


def greet(state: TrainState, given: Greet) -> Outcome:
    return Outcome(Done(), () if given.group == state.group else (RanksRenewed(given.group),))


def unopenable(state: TrainState, operation: ops.OpenSampler, tenant: str) -> str | None:
    weights = operation.weights
    if weights is None:
        return None
    key = (weights.run_id, weights.kind, weights.name)
    run = state.models.get(weights.run_id)
    if (key not in state.saving and key not in state.checkpoints) or run is None or run.tenant != tenant:
        return f"there is no checkpoint {weights.path}"
    return None


def room_for_sampler(state: TrainState) -> tuple[str, ...] | None:
    """The samplers that go before a new one comes: those of sessions that are over, and if need be the longest unused.

    Of the tenant that has the most, and never one that somebody waits for; None if there is no such.
    """
    opened = [each for each in state.samplers.values() if each.status is SamplerStatus.OPEN]
    failed = [each.sampler_id for each in state.samplers.values() if each.status is SamplerStatus.FAILED]
    over = [each.sampler_id for each in opened if state.sessions[each.session_id].finished is not None]
    if len(opened) - len(over) < state.rules.max_samplers:
        return (*failed, *over)
    busy = {sample.sampler_id for queue in (state.waiting, state.sampling) for sample in queue.values()}
    busy |= {sample.sampler_id for _, sample in state.routed.values()}
    idle = [each for each in opened if each.sampler_id not in busy and each.sampler_id not in over]
    if not idle:
        return None
    share = Counter(each.tenant for each in opened)
    unused = min(idle, key=lambda each: (-share[each.tenant], each.used))
    return (*failed, *over, unused.sampler_id)
