"""Barriers decide who waits, when all have arrived, when one times out, and how many may be open (1,024); a repeated
call gets the stored verdict.
"""

from __future__ import annotations

from itertools import islice
from typing import Final

from strata.base.errors import Code, StrataError
from strata.coord.core.facts import BarrierDecided, BarrierVerdict, Fact, parts_of
from strata.coord.core.inputs import MISSING_NAMED, ArriveAtBarrier, BarrierState
from strata.coord.core.members import job_of, member_of, settled_member
from strata.coord.core.state import CoordState, JobState, OpenBarrier, SoftState

MAX_OPEN: Final = 1_024


def arrive(state: CoordState, request: ArriveAtBarrier) -> tuple[list[Fact], BarrierState]:
    """The state of the barrier after the arrival, which `record_arrival` has recorded before."""
    job = job_of(state, request.caller)
    soft = state.soft_of(job.job)
    result = _check_arrival(job, soft, request)
    if result is not None:
        return [], result
    barrier = soft.barriers[request.barrier_id]
    expected = barrier.expected or len(job.ranks)
    if len(barrier.arrived) < expected:
        missing = tuple(islice(barrier.missing, MISSING_NAMED))
        return [], BarrierState(None, job.generation, len(barrier.arrived), expected, missing)
    fact = BarrierDecided(job.job, job.generation, request.barrier_id, BarrierVerdict.RELEASED)
    return [fact], BarrierState(BarrierVerdict.RELEASED, job.generation, len(barrier.arrived), expected, ())


def record_arrival(state: CoordState, soft: SoftState, request: ArriveAtBarrier, now_s: float) -> None:
    """Add a worker to the barrier that it may arrive at, opening it for the first one; called by `observe`."""
    job = state.jobs[request.caller.job]
    try:
        if _check_arrival(job, soft, request) is not None:
            return
    except StrataError:
        return
    barrier = soft.barriers.get(request.barrier_id)
    if barrier is None:
        timeout_s = job.config.barrier_timeout_s if request.timeout_s is None else request.timeout_s
        barrier = OpenBarrier(request.barrier_id, request.expected, request.step, now_s + timeout_s, now_s)
        barrier.missing = dict.fromkeys(job.ranks)
        soft.barriers[request.barrier_id] = barrier
    barrier.arrived[request.caller.worker_id] = None
    barrier.missing.pop(request.caller.worker_id, None)


def _check_arrival(job: JobState, soft: SoftState, request: ArriveAtBarrier) -> BarrierState | None:
    """Returns how the barrier ended, if it has; else raises unless the caller may arrive."""
    member_of(job, request.caller)
    generation = request.caller.generation or job.generation
    result = verdict_of(job, generation, request.barrier_id)
    # A worker that just joined belongs to the next generation: the result of this one is not for it.
    if result is not None and (generation != job.generation or request.caller.worker_id in job.ranks):
        return result
    if generation != job.generation:
        return BarrierState(BarrierVerdict.MEMBERSHIP_CHANGED, job.generation, 0, 0, ())
    settled_member(job, request.caller)
    barrier = soft.barriers.get(request.barrier_id)
    if barrier is None:
        _check_new(job, soft, request)
    elif request.expected != barrier.expected:
        raise StrataError(
            Code.INVALID,
            f"barrier {request.barrier_id!r} waits for {barrier.expected or 'all'} workers, not for"
            f" {request.expected or 'all'}",
        )
    return None


def _check_new(job: JobState, soft: SoftState, request: ArriveAtBarrier) -> None:
    if len(soft.barriers) >= MAX_OPEN:
        raise StrataError(Code.EXHAUSTED, f"job {job.job!r} has {MAX_OPEN} open barriers", hint="reuse or finish some")
    if request.expected > len(job.ranks):
        raise StrataError(
            Code.INVALID, f"barrier {request.barrier_id!r} waits for {request.expected} workers of {len(job.ranks)}"
        )


def verdict_of(job: JobState, generation: int, barrier_id: str) -> BarrierState | None:
    decided = job.verdicts.get((generation, barrier_id))
    return BarrierState(decided.verdict, generation, 0, 0, decided.missing) if decided else None


def missing_at(job: JobState, barrier: OpenBarrier) -> tuple[str, ...]:
    """All of them, in order of rank."""
    return tuple(worker for worker in job.ranks if worker not in barrier.arrived)


def time_out(job: JobState, soft: SoftState, now_s: float) -> list[Fact]:
    facts: list[Fact] = []
    for barrier in soft.barriers.values():
        if now_s >= barrier.deadline_s:
            # A fact has room for some ten thousand names, and no reader needs more.
            missing = parts_of(missing_at(job, barrier))[0]
            facts.append(BarrierDecided(job.job, job.generation, barrier.barrier_id, BarrierVerdict.TIMED_OUT, missing))
    return facts


def end_all(job: JobState, soft: SoftState) -> list[Fact]:
    """The generation is over: no barrier waits for a member that left."""
    return [
        BarrierDecided(job.job, job.generation, barrier_id, BarrierVerdict.MEMBERSHIP_CHANGED)
        for barrier_id in soft.barriers
    ]
