"""A checkpoint commits when all ranks have reported their part (this module checks step, rank and leases of each), and
a recovery rewinds the data once to a committed one.
"""

from __future__ import annotations

from itertools import islice

from strata.base.errors import Code, StrataError
from strata.coord.core import checkpoint_requests
from strata.coord.core.barriers import end_all
from strata.coord.core.facts import (
    CheckpointCommitted,
    CheckpointReported,
    DatasetMode,
    Fact,
    Recovered,
    WorkerRecovered,
)
from strata.coord.core.inputs import (
    MISSING_NAMED,
    Caller,
    CheckpointState,
    RankAssignment,
    Recovery,
    ReportCheckpoint,
    RequestRecovery,
)
from strata.coord.core.members import (
    check_recovered,
    form_generation,
    job_of,
    member_of,
    settled_member,
    stale_generation,
)
from strata.coord.core.state import (
    CommittedCheckpoint,
    CoordState,
    GarbageParts,
    JobIndexes,
    JobState,
    Member,
    PendingCheckpoint,
)


def report(state: CoordState, request: ReportCheckpoint) -> tuple[list[Fact], CheckpointState]:
    job = job_of(state, request.caller)
    committed = job.checkpoint(request.checkpoint_id)
    check_recovered(job, reporting_member(job, request, committed))
    worker_id, indexes = request.caller.worker_id, state.indexes_of(job.job)
    collecting = job.collecting.get(request.checkpoint_id)
    _check_step(request, committed or collecting)
    if committed is not None and request.caller.generation not in (0, job.generation):
        # Its rank is another one now, so nothing of it is garbage.
        return [], CheckpointState(committed=True, missing_ranks=(), tombstones=(), generation_ends=True)
    tombstones = _garbage_of_rank(job, indexes, job.ranks[worker_id], request.part.uri)
    if committed is not None:
        return [], CheckpointState(
            committed=True,
            missing_ranks=(),
            tombstones=tombstones,
            generation_ends=not job.settled,
            drain=worker_id in job.draining,
        )
    _check(job, request)
    if collecting is not None and worker_id in collecting.parts:
        if collecting.parts[worker_id] != request.part:
            raise StrataError(Code.CONFLICT, f"worker {worker_id!r} reported another part of {request.checkpoint_id!r}")
        missing = _missing(job, indexes, request.checkpoint_id, collecting, None)
        return [], CheckpointState(committed=False, missing_ranks=missing, tombstones=tombstones)
    _check_consumed(job, request)
    reported = CheckpointReported(
        job.job, job.generation, request.step, request.checkpoint_id, worker_id, request.part, request.consumed
    )
    missing = _missing(job, indexes, request.checkpoint_id, collecting, job.ranks[worker_id])
    if missing:
        return [reported], CheckpointState(committed=False, missing_ranks=missing, tombstones=tombstones)
    answered = checkpoint_requests.answered_by(job, request.step)
    command_id = answered.command_id if answered else 0
    done = CheckpointCommitted(job.job, job.generation, request.step, request.checkpoint_id, command_id=command_id)
    drains = checkpoint_requests.begin_drain(job, answered)
    return [reported, done, *drains], CheckpointState(
        committed=True,
        missing_ranks=(),
        tombstones=tombstones,
        generation_ends=bool(drains),
        drain=answered is not None and worker_id in answered.drain,
    )


def reporting_member(job: JobState, request: ReportCheckpoint, committed: CommittedCheckpoint | None) -> Member:
    """The caller; it may repeat the report of a committed checkpoint also while members join or leave, and after that.

    The worker that reported last may leave at once. Then the others' generation is over, and below `min_workers` no
    other one forms: without this they would never learn of the commit.
    """
    caller = request.caller
    member = member_of(job, caller)
    if committed is not None:
        if caller.worker_id in job.ranks and caller.generation in (0, job.generation):
            return member
        if caller.generation == committed.generation and request.part in committed.parts:
            return member
    return settled_member(job, caller)


def _check_step(request: ReportCheckpoint, known: CommittedCheckpoint | PendingCheckpoint | None) -> None:
    if known is not None and known.step != request.step:
        raise StrataError(
            Code.CONFLICT, f"checkpoint {request.checkpoint_id!r} is of step {known.step}, not of {request.step}"
        )


def _check(job: JobState, request: ReportCheckpoint) -> None:
    rank = job.ranks[request.caller.worker_id]
    if request.part.rank != rank:
        raise StrataError(Code.INVALID, f"worker {request.caller.worker_id!r} has rank {rank}, not {request.part.rank}")
    if job.checkpoints and request.step < job.checkpoints[-1].step:
        raise StrataError(
            Code.PRECONDITION, f"a checkpoint of step {job.checkpoints[-1].step} is committed; {request.step} is older"
        )


def _check_consumed(job: JobState, request: ReportCheckpoint) -> None:
    """Refuses what would be missing or doubled after a recovery: also a lease that is gone and that the caller has not
    acked, as the others rewound, or evicted it, between its part and this report."""
    acked = job.members[request.caller.worker_id].acked
    for each in request.consumed:
        dataset = job.datasets.get(each.dataset_id)
        if dataset is None or dataset.dataset.mode is DatasetMode.DETERMINISTIC:
            continue
        ledger = dataset.epochs.get(each.epoch)
        lease = ledger.leases.get(each.lease_id) if ledger else None
        if lease is None:
            if each.lease_id not in acked:
                raise StrataError(
                    Code.PRECONDITION,
                    f"lease {each.lease_id} is not {request.caller.worker_id!r}'s any more",
                    hint="discard the results of it",
                    reason="lease-lost",
                )
            continue
        if lease.worker_id != request.caller.worker_id:
            raise StrataError(Code.INVALID, f"lease {each.lease_id} is not {request.caller.worker_id!r}'s")
        if not lease.until <= each.until <= lease.end:
            raise StrataError(
                Code.INVALID,
                f"lease {each.lease_id} covers samples {lease.start} to {lease.end - 1}, acked up to {lease.until}:"
                f" the state of step {request.step} cannot have those before {each.until}",
                hint="ack nothing between taking a part of a checkpoint and reporting it",
            )


def _garbage_of_rank(job: JobState, indexes: JobIndexes, rank: int, written_now: str) -> tuple[str, ...]:
    """The tombstones of this rank, and its share of those whose rank exists no more.

    Only of steps behind a committed checkpoint: a later step may be repeated, and a worker may be writing to the same
    path at this moment.
    """
    behind = job.checkpoints[-1].step if job.checkpoints else -1
    version = (job.generation, job.gc_version, behind)
    garbage = indexes.garbage
    if garbage is None or garbage.version != version:
        garbage = indexes.garbage = GarbageParts(version, {})
        for uri, written_by in job.tombstones.items():
            if job.tombstone_steps.get(uri, 0) <= behind:
                garbage.by_rank.setdefault(written_by % len(job.ranks), []).append(uri)
    return tuple(uri for uri in garbage.by_rank.get(rank, ()) if uri in job.tombstones and uri != written_now)


def _missing(
    job: JobState, indexes: JobIndexes, checkpoint_id: str, collecting: PendingCheckpoint | None, just_now: int | None
) -> tuple[int, ...]:
    """The first ranks that have not reported, in order; none if all have. `just_now` is the one that reports."""
    there = collecting.parts if collecting else {}
    if len(there) + (just_now is not None) == len(job.ranks):
        return ()
    key = (job.generation, checkpoint_id)
    missing_ranks = indexes.missing_ranks.get(key)
    if missing_ranks is None:
        _drop_decided(job, indexes)
        missing_ranks = {rank: None for worker, rank in job.ranks.items() if worker not in there}
        indexes.missing_ranks[key] = missing_ranks
    return tuple(islice((rank for rank in missing_ranks if rank != just_now), MISSING_NAMED))


def _drop_decided(job: JobState, indexes: JobIndexes) -> None:
    """Forget the missing ranks of checkpoints that are not pending any more."""
    indexes.missing_ranks = {
        (generation, name): ranks
        for (generation, name), ranks in indexes.missing_ranks.items()
        if generation == job.generation and name in job.collecting
    }


def recover(state: CoordState, request: RequestRecovery) -> tuple[list[Fact], Recovery]:
    """One rewind for all members of a generation: the first caller rewinds, the others get the same checkpoint."""
    job = job_of(state, request.caller)
    member = settled_member(job, _at_any_generation(request))
    worker_id = request.caller.worker_id
    if _shares(job, member, request):
        checkpoint = job.checkpoint(job.recovered_to)
        if checkpoint is None and job.recovered_to is not None:
            # The others have moved on, and it is kept no longer. No checkpoint would mean the start.
            raise stale_generation(job, request.observed_generation)
        started: list[Fact] = [WorkerRecovered(job.job, worker_id)] if member.recover_first else []
        return started, Recovery(_rank_assignment(job, worker_id, job.generation), checkpoint, rewound=False)
    usable = [each for each in job.checkpoints if each.checkpoint_id != request.bad_checkpoint_id]
    checkpoint = usable[-1] if usable else None
    to = checkpoint.checkpoint_id if checkpoint else None
    facts: list[Fact] = [
        *end_all(job, state.soft_of(job.job)),
        Recovered(job.job, to, request.bad_checkpoint_id),
        WorkerRecovered(job.job, worker_id),
        *form_generation(job, list(job.ranks)),
    ]
    return facts, Recovery(_rank_assignment(job, worker_id, job.generation + 1), checkpoint, rewound=True)


def _shares(job: JobState, member: Member, request: RequestRecovery) -> bool:
    """Says whether the last recovery is the one that this caller needs.

    Not after members joined or left since: a lost worker took samples of that lineage with it.
    """
    if job.generation != job.recovered_generation:
        return False
    if request.bad_checkpoint_id is not None and request.bad_checkpoint_id == job.recovered_to:
        return False
    return member.recover_first or request.observed_generation < job.recovered_generation


def _at_any_generation(request: RequestRecovery) -> Caller:
    return Caller(request.caller.job, request.caller.worker_id, request.caller.incarnation)


def _rank_assignment(job: JobState, worker_id: str, generation: int) -> RankAssignment:
    return RankAssignment(generation, job.ranks[worker_id], len(job.ranks), job.members[worker_id].worker.incarnation)
