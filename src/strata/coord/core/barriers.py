"""Barriers: arrivals are a set of identities, the end is a fact, and a repeated call gets the same answer."""

from __future__ import annotations

from itertools import islice
from typing import Final

from strata.base.errors import Code, StrataError
from strata.coord.core.facts import BarrierDecided, BarrierVerdict, Fact, parts_of
from strata.coord.core.inputs import ArriveAtBarrier, BarrierState
from strata.coord.core.members import job_of, member_of, settled_member
from strata.coord.core.state import CoordState, JobState, OpenBarrier, SoftState

MAX_OPEN: Final = 1_024
MISSING_NAMED: Final = 64
"""Names in the answer to one who arrives: all of them in each of ten thousand answers would be a hundred million."""


def arrive(state: CoordState, request: ArriveAtBarrier, now_s: float) -> tuple[list[Fact], BarrierState]:
    job = job_of(state, request.caller)
    member_of(job, request.caller)
    generation = request.caller.generation or job.generation
    decided = verdict_of(job, generation, request.barrier_id)
    # A newcomer belongs to the next generation: what this one decided is not for it.
    if decided is not None and (generation != job.generation or request.caller.worker_id in job.ranks):
        return [], decided
    if generation != job.generation:
        return [], BarrierState(BarrierVerdict.MEMBERSHIP_CHANGED, job.generation, 0, 0, ())
    settled_member(job, request.caller)
    live = state.soft_of(job.job)
    barrier = _open(job, live, request, now_s)
    if request.expected != barrier.expected:
        raise StrataError(
            Code.INVALID,
            f"barrier {request.barrier_id!r} waits for {barrier.expected or 'all'} workers, not for"
            f" {request.expected or 'all'}",
        )
    barrier.arrived[request.caller.worker_id] = None
    barrier.missing.pop(request.caller.worker_id, None)
    expected = barrier.expected or len(job.ranks)
    if len(barrier.arrived) < expected:
        missing = tuple(islice(barrier.missing, MISSING_NAMED))
        return [], BarrierState(None, generation, len(barrier.arrived), expected, missing)
    del live.barriers[request.barrier_id]
    fact = BarrierDecided(job.job, generation, request.barrier_id, BarrierVerdict.RELEASED)
    return [fact], BarrierState(BarrierVerdict.RELEASED, generation, len(barrier.arrived), expected, ())


def verdict_of(job: JobState, generation: int, barrier_id: str) -> BarrierState | None:
    decided = job.verdicts.get((generation, barrier_id))
    return BarrierState(decided.verdict, generation, 0, 0, decided.missing) if decided else None


def missing_at(job: JobState, barrier: OpenBarrier) -> tuple[str, ...]:
    """All of them, in order of rank."""
    return tuple(worker for worker in job.ranks if worker not in barrier.arrived)


def time_out(job: JobState, live: SoftState, now_s: float) -> list[Fact]:
    facts: list[Fact] = []
    for barrier in [barrier for barrier in live.barriers.values() if now_s >= barrier.deadline_s]:
        del live.barriers[barrier.barrier_id]
        # A fact has room for some ten thousand names, and nobody reads more.
        missing = parts_of(missing_at(job, barrier))[0]
        facts.append(BarrierDecided(job.job, job.generation, barrier.barrier_id, BarrierVerdict.TIMED_OUT, missing))
    return facts


def end_all(job: JobState, live: SoftState) -> list[Fact]:
    """The generation is over: nobody waits for those who are gone."""
    facts: list[Fact] = [
        BarrierDecided(job.job, job.generation, barrier_id, BarrierVerdict.MEMBERSHIP_CHANGED)
        for barrier_id in live.barriers
    ]
    live.barriers.clear()
    return facts


def _open(job: JobState, live: SoftState, request: ArriveAtBarrier, now_s: float) -> OpenBarrier:
    found = live.barriers.get(request.barrier_id)
    if found is not None:
        return found
    if len(live.barriers) >= MAX_OPEN:
        raise StrataError(Code.EXHAUSTED, f"job {job.job!r} has {MAX_OPEN} open barriers", hint="reuse or finish some")
    if request.expected > len(job.ranks):
        raise StrataError(
            Code.INVALID, f"barrier {request.barrier_id!r} waits for {request.expected} workers of {len(job.ranks)}"
        )
    timeout_s = job.config.barrier_timeout_s if request.timeout_s is None else request.timeout_s
    barrier = OpenBarrier(request.barrier_id, request.expected, request.step, now_s + timeout_s)
    barrier.missing = dict.fromkeys(job.ranks)
    live.barriers[request.barrier_id] = barrier
    return barrier
