"""Inputs into facts and answers. Changes nothing that is journaled; `SoftState` is all it touches."""

from __future__ import annotations

from typing import Final, assert_never

from strata.base.errors import Code, StrataError
from strata.coord.core import barriers, checkpoints, lifecycle, liveness, members, pace, shards
from strata.coord.core.facts import CommandIssued, Fact, parts_of
from strata.coord.core.inputs import (
    ArriveAtBarrier,
    Attached,
    CallClosed,
    CallOpened,
    CreateJob,
    DeleteJob,
    Detached,
    Done,
    Heartbeat,
    Input,
    IssueCommand,
    IssuedCommand,
    Leave,
    NextShards,
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

BLIND_S: Final = 2.0
"""A tick that comes later than this after the one before it means that this process was not looking."""


def decide(state: CoordState, request: Input, now_s: float) -> Outcome:
    facts, reply = _decide(state, request, now_s)
    return Outcome(reply, tuple(facts))


def _decide(state: CoordState, request: Input, now_s: float) -> tuple[list[Fact], Reply]:  # noqa: C901, PLR0911, PLR0912
    if isinstance(request, NextShards | ArriveAtBarrier | ReportCheckpoint | RequestRecovery | RegisterDataset):
        liveness.touch_caller(state, request.caller, now_s)
    match request:
        case CreateJob():
            return members.create(state, request), Done()
        case Register():
            return members.register(state, request, now_s), Done()
        case Leave():
            return members.leave(state, request, now_s), Done()
        case Heartbeat():
            return members.heartbeat(state, request, now_s)
        case Attached():
            members.attach(state, request, now_s)
            return [], Done()
        case Detached():
            members.detach(state, request, now_s)
            return [], Done()
        case CallOpened():
            liveness.call_opened(state, request)
            return [], Done()
        case CallClosed():
            liveness.call_closed(state, request, now_s)
            return [], Done()
        case RegisterDataset():
            return shards.register_dataset(state, request)
        case NextShards():
            return shards.next_shards(state, request)
        case ArriveAtBarrier():
            return barriers.arrive(state, request, now_s)
        case ReportCheckpoint():
            return checkpoints.report(state, request)
        case RequestRecovery():
            return checkpoints.recover(state, request)
        case IssueCommand():
            return _issue(state, request)
        case ResetJob():
            return lifecycle.reset(state, request), Done()
        case DeleteJob():
            return lifecycle.delete(state, request), Done()
        case Tick():
            return _tick(state, now_s), Done()
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
    blind_s = now_s - state.ticked_s if state.ticked_s is not None else 0.0
    state.ticked_s = now_s
    state.fleet = sum(len(job.members) for job in state.jobs.values())
    facts: list[Fact] = []
    for job in state.jobs.values():
        live = state.soft_of(job.job)
        if blind_s > BLIND_S:
            liveness.extend_deadlines(live, blind_s, now_s)
        lost = members.evict_expired(job, live, liveness.timeout_s(state, job, live, now_s), now_s)
        formed = members.form_if_settled(job, live, now_s) if not lost else []
        if lost or not job.settled:
            # Waiters hear at once that the generation is over, not only when the next one is there: it may take long.
            facts += barriers.end_all(job, live)
        else:
            facts += pace.judge(job, live, liveness.interval_s(state, job), now_s)
        facts += [*lost, *barriers.time_out(job, live, now_s), *formed]
    return facts
