"""Inputs into facts and answers. Changes nothing that is journaled; `Live` is all it touches."""

from __future__ import annotations

from typing import Final, assert_never

from strata.base.errors import Code, StrataError
from strata.coord.core import barriers, checkpoints, lifecycle, liveness, members, pace, shards
from strata.coord.core.facts import CommandIssued, Fact, parts_of
from strata.coord.core.inputs import (
    Arrive,
    Attached,
    Beat,
    CreateJob,
    DeleteJob,
    Detached,
    Done,
    Input,
    Issue,
    Issued,
    Leave,
    NextShards,
    Outcome,
    Recover,
    Register,
    RegisterDataset,
    Reply,
    Report,
    ResetJob,
    Tick,
    Waits,
    WaitsNoLonger,
)
from strata.coord.core.state import CoordState

BLIND_S: Final = 2.0
"""A tick that comes later than this after the one before it means that this process was not looking."""


def decide(state: CoordState, given: Input, now_s: float) -> Outcome:
    facts, reply = _decide(state, given, now_s)
    return Outcome(reply, tuple(facts))


def _decide(state: CoordState, given: Input, now_s: float) -> tuple[list[Fact], Reply]:  # noqa: C901, PLR0911, PLR0912
    if isinstance(given, NextShards | Arrive | Report | Recover | RegisterDataset):
        liveness.notice(state, given.caller, now_s)
    match given:
        case CreateJob():
            return members.create(state, given), Done()
        case Register():
            return members.register(state, given, now_s), Done()
        case Leave():
            return members.leave(state, given, now_s), Done()
        case Beat():
            return members.beat(state, given, now_s)
        case Attached():
            members.attach(state, given, now_s)
            return [], Done()
        case Detached():
            members.detach(state, given, now_s)
            return [], Done()
        case Waits():
            liveness.wait(state, given)
            return [], Done()
        case WaitsNoLonger():
            liveness.wait_no_longer(state, given, now_s)
            return [], Done()
        case RegisterDataset():
            return shards.register_dataset(state, given)
        case NextShards():
            return shards.next_shards(state, given)
        case Arrive():
            return barriers.arrive(state, given, now_s)
        case Report():
            return checkpoints.report(state, given)
        case Recover():
            return checkpoints.recover(state, given)
        case Issue():
            return _issue(state, given)
        case ResetJob():
            return lifecycle.reset(state, given), Done()
        case DeleteJob():
            return lifecycle.delete(state, given), Done()
        case Tick():
            return _tick(state, now_s), Done()
        case _:
            assert_never(given)


def _issue(state: CoordState, given: Issue) -> tuple[list[Fact], Issued]:
    job = state.jobs.get(given.job)
    if job is None:
        raise StrataError(Code.NOT_FOUND, f"there is no job {given.job!r}", reason="unknown-job")
    known = job.requests.get(given.request_id) if given.request_id else None
    if known is not None:
        return [], Issued(known.command_id, known.workers)
    unknown = [worker for worker in given.workers if worker not in job.members]
    if unknown:
        raise StrataError(Code.NOT_FOUND, f"job {given.job!r} has no worker {unknown[0]!r}", reason="unknown-worker")
    workers = tuple(dict.fromkeys(given.workers or job.members))
    if not workers:
        return [], Issued(0, ())
    command_id = job.last_command + 1
    facts: list[Fact] = [
        CommandIssued(job.job, command_id, given.kind, names, given.reason, given.arguments, given.request_id)
        for names in parts_of(workers)
    ]
    return facts, Issued(command_id, workers)


def _tick(state: CoordState, now_s: float) -> list[Fact]:
    blind_s = now_s - state.ticked_s if state.ticked_s is not None else 0.0
    state.ticked_s = now_s
    state.fleet = sum(len(job.members) for job in state.jobs.values())
    facts: list[Fact] = []
    for job in state.jobs.values():
        live = state.live_of(job.job)
        if blind_s > BLIND_S:
            liveness.forgive(live, blind_s, now_s)
        lost = members.lose_the_silent(job, live, liveness.patience_s(state, job, live, now_s), now_s)
        formed = members.form(job, live, now_s) if not lost else []
        if lost or not job.settled:
            # Waiters hear at once that the generation is over, not only when the next one is there: it may take long.
            facts += barriers.end_all(job, live)
        else:
            facts += pace.judge(job, live, liveness.interval_s(state, job), now_s)
        facts += [*lost, *barriers.time_out(job, live, now_s), *formed]
    return facts
