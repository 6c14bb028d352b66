"""Checkpoints that count only when all ranks have written their part, and recovery that rewinds once."""

from __future__ import annotations

from strata.base.errors import Code, StrataError
from strata.coord.core.barriers import end_all
from strata.coord.core.facts import CheckpointCommitted, CheckpointReported, Fact, GenerationFormed, Recovered
from strata.coord.core.inputs import Caller, CheckpointState, Place, Recover, Recovery, Report
from strata.coord.core.members import job_of, member_of, settled_member
from strata.coord.core.state import Collecting, CoordState, JobState


def report(state: CoordState, given: Report) -> tuple[list[Fact], CheckpointState]:
    job = job_of(state, given.caller)
    settled_member(job, given.caller)
    worker_id = given.caller.worker_id
    committed = job.checkpoint(given.checkpoint_id)
    if committed is not None:
        return [], CheckpointState(committed=True, missing_ranks=(), tombstones=tuple(job.tombstones))
    collecting = job.collecting.get(given.checkpoint_id)
    _check(job, given, collecting)
    if collecting is not None and worker_id in collecting.parts:
        if collecting.parts[worker_id] != given.part:
            raise StrataError(Code.CONFLICT, f"worker {worker_id!r} reported another part of {given.checkpoint_id!r}")
        return [], CheckpointState(
            committed=False, missing_ranks=_missing(job, collecting, None), tombstones=tuple(job.tombstones)
        )
    reported = CheckpointReported(
        job.job, job.generation, given.step, given.checkpoint_id, worker_id, given.part, given.consumed
    )
    missing = _missing(job, collecting, worker_id)
    if missing:
        return [reported], CheckpointState(committed=False, missing_ranks=missing, tombstones=tuple(job.tombstones))
    done = CheckpointCommitted(job.job, job.generation, given.step, given.checkpoint_id)
    return [reported, done], CheckpointState(committed=True, missing_ranks=(), tombstones=tuple(job.tombstones))


def _check(job: JobState, given: Report, collecting: Collecting | None) -> None:
    rank = job.ranks[given.caller.worker_id]
    if given.part.rank != rank:
        raise StrataError(Code.INVALID, f"worker {given.caller.worker_id!r} has rank {rank}, not {given.part.rank}")
    if collecting is not None and collecting.step != given.step:
        raise StrataError(
            Code.CONFLICT,
            f"checkpoint {given.checkpoint_id!r} is of step {collecting.step}, not of {given.step}",
        )
    if job.checkpoints and given.step < job.checkpoints[-1].step:
        raise StrataError(
            Code.PRECONDITION, f"a checkpoint of step {job.checkpoints[-1].step} is committed; {given.step} is older"
        )


def _missing(job: JobState, collecting: Collecting | None, just_now: str | None) -> tuple[int, ...]:
    there = collecting.parts if collecting else {}
    return tuple(rank for worker, rank in job.ranks.items() if worker not in there and worker != just_now)


def recover(state: CoordState, given: Recover) -> tuple[list[Fact], Recovery]:
    """Who observed a generation from before the last recovery is told of that one; the first after it rewinds."""
    job = job_of(state, given.caller)
    member_of(job, given.caller)
    settled_member(job, _at_any_generation(given))
    worker_id = given.caller.worker_id
    spoilt = given.bad_checkpoint_id is not None and given.bad_checkpoint_id == job.recovered_to
    if given.observed_generation < job.recovered_generation and not spoilt:
        checkpoint = job.checkpoint(job.recovered_to)
        return [], Recovery(_place(job, worker_id, job.generation), checkpoint, rewound=False)
    usable = [each for each in job.checkpoints if each.checkpoint_id != given.bad_checkpoint_id]
    checkpoint = usable[-1] if usable else None
    to = checkpoint.checkpoint_id if checkpoint else None
    generation = job.generation + 1
    facts: list[Fact] = [
        *end_all(job, state.live_of(job.job)),
        Recovered(job.job, to, given.bad_checkpoint_id),
        GenerationFormed(job.job, generation, tuple(job.ranks)),
    ]
    state.live_of(job.job).pickers.clear()
    return facts, Recovery(_place(job, worker_id, generation), checkpoint, rewound=True)


def _at_any_generation(given: Recover) -> Caller:
    return Caller(given.caller.job, given.caller.worker_id, given.caller.incarnation)


def _place(job: JobState, worker_id: str, generation: int) -> Place:
    return Place(generation, job.ranks[worker_id], len(job.ranks), job.members[worker_id].worker.incarnation)
