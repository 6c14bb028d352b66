"""The coordinator as a machine on a journal: which function observes and decides each kind of request, what a tick
does, after which pause (2 s) the process counts as not having run, and how snapshots are encoded.

`observe` and `observe_outcome` are the only writers of soft state. `decide` writes nothing, so it may be asked twice
and answers the same; the indexes of a job are caches that it may fill. `apply` alone writes what facts build.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final, assert_never, get_args

import msgspec

from strata.base.errors import Code, StrataError
from strata.base.stored import stored_decoder
from strata.coord.core import (
    barriers,
    checkpoint_requests,
    checkpoints,
    history,
    lifecycle,
    liveness,
    members,
    shards,
    straggler_reaction,
)
from strata.coord.core.apply import apply
from strata.coord.core.facts import (
    BarrierDecided,
    CheckpointReported,
    CommandIssued,
    CommandKind,
    DatasetMode,
    DrainBegun,
    Fact,
    GenerationFormed,
    JobDeleted,
    JobReset,
    Recovered,
    ShardsGranted,
    WorkerJoined,
    WorkerLost,
    parts_of,
)
from strata.coord.core.inputs import (
    ArriveAtBarrier,
    Attached,
    CallClosed,
    CallOpened,
    CreateJob,
    DeleteJob,
    Detached,
    Heartbeat,
    Input,
    IssueCommand,
    IssuedCommand,
    Leave,
    NextShards,
    NoContent,
    Outcome,
    Register,
    RegisterDataset,
    Reply,
    ReportCheckpoint,
    RequestRecovery,
    ResetJob,
    ShardAssignment,
    Tick,
    UpdateJob,
)
from strata.coord.core.state import CoordState, JobState, SoftState

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
_FROM_MEMBER: Final = get_args(FromMember)
"""A tuple is compared faster than a union."""

_encode = msgspec.msgpack.Encoder().encode


class SavedJobs(msgspec.Struct, frozen=True, tag_field="format", tag=2):
    """A snapshot. `format` counts up when the name or the meaning of a stored field changes; new ones have defaults."""

    jobs: list[JobState]


decode_fact: Final[Callable[[bytes], Fact]] = stored_decoder(Fact, "a fact")
_decode_saved: Final[Callable[[bytes], SavedJobs]] = stored_decoder(SavedJobs, "a snapshot")


class CoordMachine:
    """Implements `strata.journal.replica.Machine`."""

    def initial(self) -> CoordState:
        return CoordState()

    def observe(self, state: CoordState, request: Input, now_s: float) -> None:
        observe(state, request, now_s)

    def observe_outcome(self, state: CoordState, request: Input, outcome: Outcome, now_s: float) -> None:
        observe_outcome(state, request, outcome, now_s)

    def decide(self, state: CoordState, request: Input, now_s: float) -> tuple[Sequence[bytes], Outcome]:
        outcome = decide(state, request, now_s)
        return [_encode(fact) for fact in outcome.facts], outcome

    def apply(self, state: CoordState, fact: bytes) -> CoordState:
        apply(state, decode_fact(fact))
        return state

    def save(self, state: CoordState) -> bytes:
        return _encode(SavedJobs(list(state.jobs.values())))

    def load(self, saved: bytes) -> CoordState:
        return CoordState(jobs={job.job: job for job in _decode_saved(saved).jobs})


# Observe


def observe(state: CoordState, request: Input, now_s: float) -> None:
    """A request arrived: record what it says about its sender, whatever will be decided about it."""
    if isinstance(request, Tick):
        _observe_tick(state, request, now_s)
    elif isinstance(request, Register):
        _observe_registration(state, request, now_s)
    elif isinstance(request, _FROM_MEMBER):
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
            liveness.observe_heartbeat(soft, worker_id, request.progress, request.read_until, now_s)
            if request.hang_report is not None:
                straggler_reaction.record_report(soft, worker_id, *request.hang_report)
        case Attached():
            soft.attached.add(worker_id)
            liveness.touch_presence(soft, worker_id, now_s)
        case Detached():
            soft.attached.discard(worker_id)
            if request.suspect:
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


def _observe_tick(state: CoordState, tick: Tick, now_s: float) -> None:
    if tick.wall_s is not None:
        state.wall_offset_s = tick.wall_s - now_s
    blind_s = now_s - state.ticked_s if state.ticked_s is not None else 0.0
    state.ticked_s = now_s
    state.fleet = sum(len(job.members) for job in state.jobs.values())
    for job in state.jobs.values():
        soft = state.writable_soft(job.job)
        if blind_s > BLIND_S:
            liveness.extend_deadlines(soft, blind_s, now_s)
            straggler_reaction.reset(soft)
        liveness.update_interval(state, job, soft, now_s)
        timeout_s = liveness.timeout_s(state, job, soft, now_s)
        liveness.grant_grace(job, soft, timeout_s, now_s)
        liveness.touch_open_calls(job, soft, now_s - timeout_s, now_s)
        straggler_reaction.start_stop_timers(job, soft, now_s)
        checkpoint_requests.observe_grids(job, soft, now_s)
        expired = liveness.expired(job, soft, timeout_s, now_s)
        for worker_id in expired.keys() - job.members.keys():
            _forget(soft, worker_id)
        if job.settled and not expired.keys() & job.members.keys():
            interval_s = liveness.interval_s(state, job)
            straggler_reaction.evaluate(job, soft, interval_s, now_s, silent=liveness.silent_but_attached)
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


def _observe_fact(state: CoordState, fact: Fact, now_s: float) -> None:  # noqa: C901 - one arm per fact
    soft = state.writable_soft(fact.job)
    match fact:
        case ShardsGranted():
            state.leases_given += len(fact.grants)
            soft.stragglers.idle.discard(fact.worker_id)
        case WorkerJoined():
            liveness.touch_presence(soft, fact.worker.worker_id, now_s)
            _membership_changed(soft, now_s)
        case WorkerLost() | DrainBegun():
            if isinstance(fact, WorkerLost):
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
    straggler_reaction.forget(soft, worker_id)


def _membership_changed(soft: SoftState, now_s: float) -> None:
    soft.changed_s = now_s
    if soft.unsettled_s is None:
        soft.unsettled_s = now_s


# Decide


def decide(state: CoordState, request: Input, now_s: float) -> Outcome:
    facts, reply = _decide(state, request, now_s)
    return Outcome(reply, tuple(history.annotate(state, fact, now_s) for fact in facts))


def _decide(state: CoordState, request: Input, now_s: float) -> tuple[list[Fact], Reply]:  # noqa: C901, PLR0911, PLR0912
    match request:
        case CreateJob():
            return members.create(state, request), NoContent()
        case UpdateJob():
            return members.update(state, request), NoContent()
        case Register():
            return members.register(state, request), NoContent()
        case Leave():
            return members.leave(state, request), NoContent()
        case Heartbeat():
            return liveness.heartbeat(state, request)
        case Attached():
            members.member_of(members.job_of(state, request.caller), request.caller)
            return [], NoContent()
        case Detached() | CallOpened() | CallClosed():
            return [], NoContent()
        case RegisterDataset():
            return shards.register_dataset(state, request)
        case NextShards():
            return shards.next_shards(state, request)
        case ArriveAtBarrier():
            return barriers.arrive(state, request)
        case ReportCheckpoint():
            return checkpoints.report(state, request)
        case RequestRecovery():
            return checkpoints.recover(state, request)
        case IssueCommand():
            return _issue(state, request)
        case ResetJob():
            return lifecycle.reset(state, request), NoContent()
        case DeleteJob():
            return lifecycle.delete(state, request), NoContent()
        case Tick():
            return _tick(state, now_s), NoContent()
        case _:
            assert_never(request)


def _issue(state: CoordState, request: IssueCommand) -> tuple[list[Fact], IssuedCommand]:
    job = state.jobs.get(request.job)
    if job is None:
        raise StrataError(Code.NOT_FOUND, f"there is no job {request.job!r}", reason="unknown-job")
    known = job.requests.get(request.request_id) if request.request_id else None
    if known is not None:
        # A request that shares the checkpoint of another one is known without workers.
        return [], IssuedCommand(known.command_id, known.workers or tuple(job.members))
    unknown = [worker for worker in request.workers if worker not in job.members]
    if unknown:
        raise StrataError(Code.NOT_FOUND, f"job {request.job!r} has no worker {unknown[0]!r}", reason="unknown-worker")
    workers = tuple(dict.fromkeys(request.workers or job.members))
    if not workers:
        return [], IssuedCommand(0, ())
    soft = state.soft_of(request.job)
    if request.kind is CommandKind.CHECKPOINT_NOW:
        return checkpoint_requests.issue_checkpoint(job, soft, request)
    drain = checkpoint_requests.issue_drain(job, soft, request, workers) if request.kind is CommandKind.DRAIN else None
    if drain is not None:
        return drain
    command_id = job.last_command + 1
    facts: list[Fact] = [
        CommandIssued(job.job, command_id, request.kind, names, request.reason, request.arguments, request.request_id)
        for names in parts_of(workers)
    ]
    return facts, IssuedCommand(command_id, workers)


def _tick(state: CoordState, now_s: float) -> list[Fact]:
    facts: list[Fact] = []
    for job in state.jobs.values():
        soft = state.soft_of(job.job)
        facts += history.leader_changes(state, job)
        evicted = liveness.evict_expired(job, soft, liveness.timeout_s(state, job, soft, now_s), now_s)
        if evicted or not job.settled:
            # The barriers end at once, not only when the next generation forms: that may take long.
            facts += [*barriers.end_all(job, soft), *evicted]
        else:
            escalated = straggler_reaction.escalate(job, soft.stragglers.incidents)
            # Both number their commands from the last one of the state.
            facts += escalated or checkpoint_requests.advance(job, soft, now_s)
            facts += barriers.time_out(job, soft, now_s)
        if not evicted:
            facts += members.form_if_settled(job, soft, now_s)
    return facts
