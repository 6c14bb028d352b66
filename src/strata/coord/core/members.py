"""Membership: creating and updating a job, checks of its settings and of workers that register (name, weight, rank,
number), leaving, and when a new generation forms (settled, or at the latest after 25 times `settle_s`). Eviction is in
`liveness`.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import inf
from typing import Final

from strata.base.errors import Code, StrataError
from strata.coord.core import lifecycle, liveness
from strata.coord.core.facts import (
    Fact,
    GenerationFormed,
    JobConfigured,
    JobCreated,
    RanksListed,
    WorkerJoined,
    parts_of,
)
from strata.coord.core.inputs import (
    Caller,
    CreateJob,
    Leave,
    RankAssignment,
    Register,
    UpdateJob,
)
from strata.coord.core.job_config import JobConfig
from strata.coord.core.placement import MAX_WEIGHT, MAX_WORKERS, Scheme
from strata.coord.core.state import CoordState, JobState, Member, SoftState

MAX_SETTLE_PERIODS: Final = 25
"""A generation is formed after so many times `settle_s` even if members still come and go."""


def job_of(state: CoordState, caller: Caller) -> JobState:
    job = state.jobs.get(caller.job)
    if job is None:
        raise _unregistered(caller)
    return job


def member_of(job: JobState, caller: Caller) -> Member:
    """The calling member; raises for unknown workers, evicted ones, and incarnations that are over."""
    member = job.members.get(caller.worker_id)
    if member is None:
        if caller.worker_id in job.evicted:
            raise liveness.evicted(job, caller.worker_id)
        raise _unregistered(caller)
    if caller.incarnation not in ("", member.worker.incarnation):
        # Not NOT_FOUND: this incarnation would register again, and the two would replace each other for ever.
        raise liveness.replaced(caller.worker_id)
    return member


def _unregistered(caller: Caller) -> StrataError:
    return StrataError(Code.PRECONDITION, f"worker {caller.worker_id!r} has to register first", reason="not-registered")


def settled_member(job: JobState, caller: Caller) -> Member:
    """The calling member of the current generation; raises while members join or leave."""
    member = member_of(job, caller)
    if caller.generation not in (0, job.generation):
        raise stale_generation(job, caller.generation)
    if not job.settled:
        raise StrataError(
            Code.UNAVAILABLE,
            f"job {job.job!r} is forming a new generation",
            retry_after_s=max(job.config.settle_s, 0.05),
        )
    return member


def check_recovered(job: JobState, member: Member) -> None:
    """A start is a recovery: a worker that does not know the job's checkpoint would train the rest on empty state."""
    if member.recover_first:
        raise StrataError(
            Code.PRECONDITION,
            f"the data of job {job.job!r} has moved, and worker {member.worker.worker_id!r} has not recovered",
            hint="call RequestRecovery and load the checkpoint that it names, then ask for shards",
            reason="recover-first",
        )


def stale_generation(job: JobState, generation: int) -> StrataError:
    return StrataError(
        Code.PRECONDITION,
        f"generation {generation} of job {job.job!r} is over: it is {job.generation} now",
        reason="stale-generation",
        generation=job.generation,
    )


def rank_of(job: JobState, worker_id: str) -> RankAssignment:
    member = job.members[worker_id]
    incarnation = member.worker.incarnation
    if worker_id not in job.ranks or not job.settled:
        return RankAssignment(0, -1, 0, incarnation, member.recover_first)
    return RankAssignment(job.generation, job.ranks[worker_id], len(job.ranks), incarnation, member.recover_first)


def create(state: CoordState, request: CreateJob) -> list[Fact]:
    job = state.jobs.get(request.job)
    if job is None:
        _check(request)
        return [JobCreated(request.job, request.config)]
    if job.config != request.config:
        raise StrataError(Code.CONFLICT, f"job {request.job!r} exists with another configuration")
    return []


def update(state: CoordState, request: UpdateJob) -> list[Fact]:
    """Changes the settings from the next decision on. Members that are there stay, also above a smaller maximum."""
    job = lifecycle.job_named(state, request.job)
    _check(request)
    return [JobConfigured(job.job, request.config)] if job.config != request.config else []


def _check(request: CreateJob | UpdateJob) -> None:
    config = request.config
    problems = {
        "heartbeat_interval_s must be above 0": not 0 < config.heartbeat_interval_s < inf,
        "missed_beats must be at least 1": config.missed_beats < 1,
        "reconnect_grace_s must not be below 0": not 0 <= config.reconnect_grace_s < inf,
        "settle_s must not be below 0": not 0 <= config.settle_s < inf,
        "min_workers must be at least 1": config.min_workers < 1,
        "max_workers must be 0 (no limit) or at least min_workers": not (
            config.max_workers == 0 or config.max_workers >= config.min_workers
        ),
        "barrier_timeout_s must be above 0": not config.barrier_timeout_s > 0,
        "keep_checkpoints must be at least 1": config.keep_checkpoints < 1,
        "max_shard_failures must be at least 1": config.max_shard_failures < 1,
        f"placement must be one of {', '.join(Scheme)}": config.placement not in list(Scheme),
        "hang_floor_s must be above 0": not config.hang_floor_s > 0,
    }
    for problem, found in problems.items():
        if found:
            raise StrataError(Code.INVALID, f"job {request.job!r}: {problem}")


def _check_worker(request: Register, job: JobState | None) -> None:
    """Checks at registration what would fail later for all workers: with a wrong weight no bucket could be placed."""
    worker = request.worker
    if not worker.worker_id:
        raise StrataError(Code.INVALID, "a worker needs a worker_id")
    if not 0 <= worker.weight <= MAX_WEIGHT:
        raise StrataError(
            Code.INVALID,
            f"the weight of worker {worker.worker_id!r} must be from 0 to {MAX_WEIGHT:g}, not {worker.weight}",
        )
    if job is None:
        return
    lifecycle.check_open(job)
    most = min(job.config.max_workers or MAX_WORKERS, MAX_WORKERS)
    if worker.worker_id not in job.members and len(job.members) >= most:
        raise StrataError(Code.EXHAUSTED, f"job {request.job!r} has {most} workers and takes no more")


def register(state: CoordState, request: Register) -> list[Fact]:
    """A second incarnation of the same worker ends the first. Of the same one it is only a heartbeat.

    An evicted incarnation may come back as long as no other one has followed it: that is how a worker that was cut off
    for a while rejoins, and it holds nothing then.
    """
    facts: list[Fact] = []
    job = state.jobs.get(request.job)
    _check_worker(request, job)
    if job is None:
        facts.append(JobCreated(request.job, JobConfig()))
    member = job.members.get(request.worker.worker_id) if job else None
    if job is not None and request.worker.incarnation in job.fenced.get(request.worker.worker_id, ()):
        raise liveness.replaced(request.worker.worker_id)
    if member is not None:
        if member.worker.incarnation == request.worker.incarnation:
            return facts
        assert job is not None
        facts += liveness.evict(job, state.soft_of(request.job), request.worker.worker_id, "replaced")
    recover_first = job is not None and job.has_progress and not request.worker.elastic
    return [*facts, WorkerJoined(request.job, request.worker, recover_first)]


def leave(state: CoordState, request: Leave) -> list[Fact]:
    job = job_of(state, request.caller)
    if request.caller.worker_id in job.evicted:
        return []
    member_of(job, request.caller)
    # A worker that leaves has acked what should count: its last progress report counts no more.
    facts: list[Fact] = [liveness.lost(job, request.caller.worker_id, request.cause)]
    is_last = request.finished and len(job.members) == 1
    return [*facts, *lifecycle.finish(job)] if is_last else facts


def form_if_settled(job: JobState, soft: SoftState, now_s: float) -> list[Fact]:
    """A new generation, once no member joins or leaves any more. Members that stay keep their order of ranks."""
    if job.settled or len(job.members) < job.config.min_workers or _is_unsettled(job, soft, now_s):
        return []
    if job.draining:
        # A generation with them would end at once.
        return []
    stay = [worker for worker in job.ranks if worker in job.members]
    come = [worker for worker in job.members if worker not in job.ranks]
    return form_generation(job, sorted(stay + come, key=lambda worker: _expected_rank(job, worker)))


def _expected_rank(job: JobState, worker_id: str) -> float:
    """Members whose launcher has ranked them come first and in that order, whoever of them joined first."""
    expected = job.members[worker_id].worker.expected_rank
    return inf if expected is None else expected


def _is_unsettled(job: JobState, soft: SoftState, now_s: float) -> bool:
    """Says whether more members may come or go soon. Workers that keep joining must not keep the others from
    starting."""
    settle_s = job.config.settle_s
    quiet_s = now_s - (soft.changed_s if soft.changed_s is not None else -settle_s)
    waited_s = now_s - (soft.unsettled_s if soft.unsettled_s is not None else now_s)
    return quiet_s < settle_s and waited_s < MAX_SETTLE_PERIODS * settle_s


def form_generation(job: JobState, members: Sequence[str]) -> list[Fact]:
    """The next generation, in as many facts as its names need."""
    *first, last = parts_of(members)
    return [
        *(RanksListed(job.job, names) for names in first),
        GenerationFormed(job.job, job.generation + 1, last),
    ]
