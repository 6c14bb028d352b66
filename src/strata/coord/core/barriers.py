"""Barriers: arrivals are a set of identities, the end is a fact, and a repeated call gets the same answer."""

from __future__ import annotations

from itertools import islice
from typing import Final

from strata.base.errors import Code, StrataError
from strata.coord.core.facts import BarrierDecided, Fact, Verdict, parts_of
from strata.coord.core.inputs import Arrive, BarrierState
from strata.coord.core.members import job_of, member_of, settled_member
from strata.coord.core.state import CoordState, JobState, Live, OpenBarrier

MAX_OPEN: Final = 1_024
MISSING_NAMED: Final = 64
"""Names in the answer to one who arrives: all of them in each of ten thousand answers would be a hundred million."""


def arrive(state: CoordState, given: Arrive, now_s: float) -> tuple[list[Fact], BarrierState]:
    job = job_of(state, given.caller)
    member_of(job, given.caller)
    generation = given.caller.generation or job.generation
    decided = verdict_of(job, generation, given.barrier_id)
    # A newcomer belongs to the next generation: what this one decided is not for it.
    if decided is not None and (generation != job.generation or given.caller.worker_id in job.ranks):
        return [], decided
    if generation != job.generation:
        return [], BarrierState(Verdict.MEMBERSHIP_CHANGED, job.generation, 0, 0, ())
    settled_member(job, given.caller)
    live = state.live_of(job.job)
    barrier = _open(job, live, given, now_s)
    if given.expected != barrier.expected:
        raise StrataError(
            Code.INVALID,
            f"barrier {given.barrier_id!r} waits for {barrier.expected or 'all'} workers, not for"
            f" {given.expected or 'all'}",
        )
    barrier.arrived[given.caller.worker_id] = None
    barrier.missing.pop(given.caller.worker_id, None)
    expected = barrier.expected or len(job.ranks)
    if len(barrier.arrived) < expected:
        missing = tuple(islice(barrier.missing, MISSING_NAMED))
        return [], BarrierState(None, generation, len(barrier.arrived), expected, missing)
    del live.barriers[given.barrier_id]
    fact = BarrierDecided(job.job, generation, given.barrier_id, Verdict.RELEASED)
    return [fact], BarrierState(Verdict.RELEASED, generation, len(barrier.arrived), expected, ())


def verdict_of(job: JobState, generation: int, barrier_id: str) -> BarrierState | None:
    decided = job.verdicts.get((generation, barrier_id))
    return BarrierState(decided.verdict, generation, 0, 0, decided.missing) if decided else None


def missing_at(job: JobState, barrier: OpenBarrier) -> tuple[str, ...]:
    """All of them, in order of rank."""
    return tuple(worker for worker in job.ranks if worker not in barrier.arrived)


def time_out(job: JobState, live: Live, now_s: float) -> list[Fact]:
    facts: list[Fact] = []
    for barrier in [barrier for barrier in live.barriers.values() if now_s >= barrier.deadline_s]:
        del live.barriers[barrier.barrier_id]
        # A fact has room for some ten thousand names, and nobody reads more.
        missing = parts_of(missing_at(job, barrier))[0]
        facts.append(BarrierDecided(job.job, job.generation, barrier.barrier_id, Verdict.TIMED_OUT, missing))
    return facts


def end_all(job: JobState, live: Live) -> list[Fact]:
    """The generation is over: nobody waits for those who are gone."""
    facts: list[Fact] = [
        BarrierDecided(job.job, job.generation, barrier_id, Verdict.MEMBERSHIP_CHANGED) for barrier_id in live.barriers
    ]
    live.barriers.clear()
    return facts


def _open(job: JobState, live: Live, given: Arrive, now_s: float) -> OpenBarrier:
    found = live.barriers.get(given.barrier_id)
    if found is not None:
        return found
    if len(live.barriers) >= MAX_OPEN:
        raise StrataError(Code.EXHAUSTED, f"job {job.job!r} has {MAX_OPEN} open barriers", hint="reuse or finish some")
    if given.expected > len(job.ranks):
        raise StrataError(
            Code.INVALID, f"barrier {given.barrier_id!r} waits for {given.expected} workers of {len(job.ranks)}"
        )
    timeout_s = job.config.barrier_timeout_s if given.timeout_s is None else given.timeout_s
    barrier = OpenBarrier(given.barrier_id, given.expected, given.step, now_s + timeout_s)
    barrier.missing = dict.fromkeys(job.ranks)
    live.barriers[given.barrier_id] = barrier
    return barrier
