"""The decision: from the state and a request to facts and a reply. It writes nothing; `observe` and `apply` do.

The indexes of a job are caches that it may fill.
"""

from __future__ import annotations

from typing import assert_never

from strata.base.errors import Code, StrataError
from strata.coord.core import barriers, checkpoints, lifecycle, liveness, members, shards, straggler_policy
from strata.coord.core.facts import CommandIssued, Fact, parts_of
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
    Tick,
)
from strata.coord.core.state import CoordState


def decide(state: CoordState, request: Input, now_s: float) -> Outcome:
    facts, reply = _decide(state, request, now_s)
    return Outcome(reply, tuple(facts))


def _decide(state: CoordState, request: Input, now_s: float) -> tuple[list[Fact], Reply]:  # noqa: C901, PLR0911, PLR0912
    match request:
        case CreateJob():
            return members.create(state, request), NoContent()
        case Register():
            return members.register(state, request), NoContent()
        case Leave():
            return members.leave(state, request), NoContent()
        case Heartbeat():
            return members.heartbeat(state, request)
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
        return [], IssuedCommand(known.command_id, known.workers)
    unknown = [worker for worker in request.workers if worker not in job.members]
    if unknown:
        raise StrataError(Code.NOT_FOUND, f"job {request.job!r} has no worker {unknown[0]!r}", reason="unknown-worker")
    workers = tuple(dict.fromkeys(request.workers or job.members))
    if not workers:
        return [], IssuedCommand(0, ())
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
        evicted = members.evict_expired(job, soft, liveness.timeout_s(state, job, soft, now_s), now_s)
        if evicted or not job.settled:
            # The barriers end at once, not only when the next generation forms: that may take long.
            facts += [*barriers.end_all(job, soft), *evicted]
        else:
            facts += straggler_policy.escalate(job, soft.stragglers.incidents)
            facts += barriers.time_out(job, soft, now_s)
        if not evicted:
            facts += members.form_if_settled(job, soft, now_s)
    return facts
