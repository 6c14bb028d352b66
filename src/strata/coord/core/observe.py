"""Observations: the only writer of soft state, before a decision (a request arrived) and after it (its outcome).

`decide` reads what was observed and writes nothing, so it may be asked twice and answers the same.
"""

from __future__ import annotations

from typing import Final

from strata.coord.core import barriers, liveness, members, straggler_policy
from strata.coord.core.facts import (
    BarrierDecided,
    CheckpointReported,
    DatasetMode,
    Fact,
    GenerationFormed,
    JobDeleted,
    JobReset,
    Recovered,
    ShardsGranted,
    WorkerJoined,
    WorkerLost,
)
from strata.coord.core.inputs import (
    ArriveAtBarrier,
    Attached,
    CallClosed,
    CallOpened,
    Detached,
    Heartbeat,
    Input,
    NextShards,
    Outcome,
    Register,
    RegisterDataset,
    ReportCheckpoint,
    RequestRecovery,
    ShardAssignment,
    Tick,
)
from strata.coord.core.state import CoordState, SoftState, StepProgress

BLIND_S: Final = 2.0
"""A tick that comes later than this after the one before it means that this process did not run."""


FromMember = (
    NextShards
    | ArriveAtBarrier
    | Heartbeat
    | CallOpened
    | CallClosed
    | Attached
    | Detached
    | ReportCheckpoint
    | RequestRecovery
    | RegisterDataset
)
"""Requests of a worker that is a member already."""


def observe(state: CoordState, request: Input, now_s: float) -> None:
    """A request arrived: record what it says about its sender, whatever will be decided about it."""
    if isinstance(request, Tick):
        _observe_tick(state, now_s)
    elif isinstance(request, Register):
        _observe_registration(state, request, now_s)
    elif isinstance(request, FromMember):
        soft = state.writable_soft(request.caller.job) if request.caller.job in state.jobs else None
        if soft is not None and isinstance(request, CallClosed):
            # Also of an incarnation that is over: its count must not stay.
            liveness.call_closed(soft, request.caller)
        if soft is not None and liveness.is_current(state, request.caller):
            _observe_member(state, soft, request, now_s)


def _observe_member(state: CoordState, soft: SoftState, request: FromMember, now_s: float) -> None:
    worker_id = request.caller.worker_id
    match request:
        case CallOpened():
            liveness.call_opened(soft, request.caller)
        case Heartbeat():
            _record_heartbeat(soft, worker_id, request.progress, request.read_until, now_s)
        case Attached():
            liveness.touch_presence(soft, worker_id, now_s)
        case Detached():
            soft.disconnected_at_s.setdefault(worker_id, now_s)
        case ArriveAtBarrier():
            liveness.touch(soft, worker_id, now_s)
            barriers.record_arrival(state, soft, request, now_s)
        case _:
            liveness.touch(soft, worker_id, now_s)


def _observe_registration(state: CoordState, request: Register, now_s: float) -> None:
    job = state.jobs.get(request.job)
    member = job.members.get(request.worker.worker_id) if job else None
    if member is not None and member.worker.incarnation == request.worker.incarnation:
        liveness.touch_presence(state.writable_soft(request.job), request.worker.worker_id, now_s)


def observe_plain_heartbeat(  # noqa: PLR0913, PLR0917 - an object for each heartbeat would cost as much as the rest
    state: CoordState,
    job_id: str,
    worker_id: str,
    incarnation: str,
    progress: StepProgress | None,
    read_until: tuple[tuple[int, int], ...] | None,
    now_s: float,
) -> bool:
    """Record the heartbeat of a current member whose job has no open command; False, and nothing recorded: any other.

    Nearly every heartbeat is such a one. `decide` would find nothing to do, so the reply needs no decision.
    """
    job = state.jobs.get(job_id)
    member = job.members.get(worker_id) if job else None
    if job is None or member is None or job.commands or incarnation not in ("", member.worker.incarnation):
        return False
    _record_heartbeat(state.writable_soft(job_id), worker_id, progress, read_until, now_s)
    return True


def _record_heartbeat(
    soft: SoftState,
    worker_id: str,
    progress: StepProgress | None,
    read_until: tuple[tuple[int, int], ...] | None,
    now_s: float,
) -> None:
    if progress is not None:
        soft.stragglers.progress[worker_id] = (progress, now_s)
    if read_until is not None:
        soft.read_until[worker_id] = read_until
    liveness.touch_presence(soft, worker_id, now_s)


def _observe_tick(state: CoordState, now_s: float) -> None:
    blind_s = now_s - state.ticked_s if state.ticked_s is not None else 0.0
    state.ticked_s = now_s
    state.fleet = sum(len(job.members) for job in state.jobs.values())
    for job in state.jobs.values():
        soft = state.writable_soft(job.job)
        if blind_s > BLIND_S:
            liveness.extend_deadlines(soft, blind_s, now_s)
            straggler_policy.reset(soft)
        liveness.update_interval(state, job, soft, now_s)
        timeout_s = liveness.timeout_s(state, job, soft, now_s)
        liveness.grant_grace(job, soft, timeout_s, now_s)
        liveness.touch_open_calls(job, soft, now_s - timeout_s, now_s)
        straggler_policy.start_stop_timers(job, soft, now_s)
        expired = members.expired(job, soft, timeout_s, now_s)
        for worker_id in expired.keys() - job.members.keys():
            _forget(soft, worker_id)
        if job.settled and not expired.keys() & job.members.keys():
            straggler_policy.evaluate(job, soft, liveness.interval_s(state, job), now_s)
        else:
            soft.stragglers.incidents = ()


def observe_outcome(state: CoordState, request: Input, outcome: Outcome, now_s: float) -> None:
    """A request was decided: record what its facts, and a reply without data, mean for the soft state."""
    for fact in outcome.facts:
        _observe_fact(state, fact, now_s)
    if isinstance(request, NextShards) and request.count > 0 and isinstance(outcome.reply, ShardAssignment):
        dataset = state.jobs[request.caller.job].datasets[request.dataset_id].dataset
        if not outcome.reply.leases and dataset.mode is DatasetMode.LEASED:
            # A worker without data makes no steps, and that is not its fault.
            state.writable_soft(request.caller.job).stragglers.idle.add(request.caller.worker_id)


def _observe_fact(state: CoordState, fact: Fact, now_s: float) -> None:
    soft = state.writable_soft(fact.job)
    match fact:
        case ShardsGranted():
            state.leases_given += len(fact.grants)
            soft.stragglers.idle.discard(fact.worker_id)
        case WorkerJoined():
            liveness.touch_presence(soft, fact.worker.worker_id, now_s)
            _membership_changed(soft, now_s)
        case WorkerLost():
            _forget(soft, fact.worker_id)
            _membership_changed(soft, now_s)
        case GenerationFormed():
            soft.unsettled_s = None
        case BarrierDecided():
            soft.barriers.pop(fact.barrier_id, None)
        case CheckpointReported():
            missing = state.indexes_of(fact.job).missing_ranks.get((fact.generation, fact.checkpoint_id))
            if missing is not None:
                missing.pop(fact.part.rank, None)
        case Recovered():
            state.indexes_of(fact.job).pickers.clear()
            soft.read_until.clear()
        case JobReset() | JobDeleted():
            state.soft.pop(fact.job, None)
            state.indexes.pop(fact.job, None)
        case _:
            pass


def _forget(soft: SoftState, worker_id: str) -> None:
    liveness.forget(soft, worker_id)
    straggler_policy.forget(soft, worker_id)


def _membership_changed(soft: SoftState, now_s: float) -> None:
    soft.changed_s = now_s
    if soft.unsettled_s is None:
        soft.unsettled_s = now_s
