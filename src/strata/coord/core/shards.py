"""Requests for data: registering a dataset (checks of its sizes, files and buckets), granting leases on shards, acks,
returns and the quarantine of failing shards, slices of deterministic datasets; at most 256 shards or acks in a call.
"""

from __future__ import annotations

from bisect import bisect_right
from itertools import accumulate
from typing import Final

from strata.base.errors import Code, StrataError
from strata.coord.core import ledger as ledgers
from strata.coord.core.facts import (
    Dataset,
    DatasetMode,
    DatasetRegistered,
    Fact,
    Grant,
    ShardAcked,
    ShardReturned,
    ShardsGranted,
)
from strata.coord.core.inputs import Ack, DatasetRegistration, LeasedShard, NextShards, RegisterDataset, ShardAssignment
from strata.coord.core.ledger import DatasetLedger, EpochLedger, Lease, ShardRange
from strata.coord.core.members import check_recovered, job_of, member_of, settled_member
from strata.coord.core.permutation import order_of, slice_of
from strata.coord.core.picker import Picker
from strata.coord.core.placement import Scheme, place
from strata.coord.core.state import ACKS_KEPT, BucketPlacement, CoordState, JobIndexes, JobState, Member

MAX_BUCKETS: Final = 1 << 16
MAX_COUNT: Final = ACKS_KEPT
"""Shards in one reply, and acks in one call: a repeated one is recognised as a whole."""


def register_dataset(state: CoordState, request: RegisterDataset) -> tuple[list[Fact], DatasetRegistration]:
    """Register a dataset. Idempotent: the same definition is no change; another one of the same name is rejected."""
    job = job_of(state, request.caller)
    member_of(job, request.caller)
    dataset = request.dataset
    known = job.datasets.get(dataset.dataset_id)
    if known is not None:
        if known.dataset != dataset:
            raise StrataError(Code.CONFLICT, f"dataset {dataset.dataset_id!r} is registered with another definition")
        return [], DatasetRegistration(created=False, shards=dataset.shards)
    _check(dataset, job.config.max_shards)
    return [DatasetRegistered(job.job, dataset)], DatasetRegistration(created=True, shards=dataset.shards)


def _check(dataset: Dataset, max_shards: int) -> None:
    problems = {
        "a dataset needs a name": not dataset.dataset_id,
        "a dataset needs at least one sample": dataset.samples < 1,
        "a shard needs at least one sample": dataset.shard_size < 1,
        f"more than {max_shards:,} shards; choose a larger shard_size, or raise max_shards of the job": (
            dataset.shard_size > 0 and dataset.shards > max_shards
        ),
        f"buckets must be a power of two up to {MAX_BUCKETS}": not 1 <= dataset.buckets <= MAX_BUCKETS
        or dataset.buckets & (dataset.buckets - 1) != 0,
        "a file cannot have fewer samples than none": any(file.samples < 0 for file in dataset.files),
        "the files do not have as many samples as the dataset": bool(dataset.files)
        and sum(file.samples for file in dataset.files) != dataset.samples,
        "a global batch needs at least one shard": dataset.global_batch < 1,
        "a seed is a whole number below 2**64": not 0 <= dataset.seed < 1 << 64,
    }
    for problem, found in problems.items():
        if found:
            raise StrataError(Code.INVALID, f"dataset {dataset.dataset_id!r}: {problem}")


def next_shards(state: CoordState, request: NextShards) -> tuple[list[Fact], ShardAssignment]:
    job = job_of(state, request.caller)
    # The next generation waits until a drained worker has left, and that brings its last acks.
    is_leaving = request.leaving or request.caller.worker_id in job.draining
    member = (member_of if is_leaving and request.count == 0 else settled_member)(job, request.caller)
    check_recovered(job, member)
    dataset = _dataset_of(job, request.dataset_id)
    if dataset.dataset.mode is DatasetMode.DETERMINISTIC:
        return [], _slice(dataset.dataset, job, state.indexes_of(job.job), request)
    if len(request.acks) > MAX_COUNT:
        raise StrataError(Code.INVALID, f"{len(request.acks)} acks in one call: {MAX_COUNT} at most")
    ledgers.check_epoch(dataset, request.data_epoch)
    ledger = dataset.epoch(request.data_epoch)
    indexes = state.indexes_of(job.job)
    mine = ledgers.leases_of(ledger, request.caller.worker_id)
    facts, over, stale = _decide_acks(job, request, member, mine)
    again = mine.keys() - over - set(request.held or ())
    if again:
        # Granted before, and the answer was lost: the same leases once more, not others.
        leases = tuple(_leased(indexes, dataset.dataset, mine[lease_id]) for lease_id in mine if lease_id in again)
        return facts, ShardAssignment(leases, end_of_epoch=False, stale=stale)
    if request.data_epoch in dataset.finished:
        return facts, ShardAssignment((), end_of_epoch=True, stale=stale)
    grants = _grants(state, job, dataset, ledger, request)
    if not grants:
        return facts, ShardAssignment((), _ends_with(dataset.dataset, ledger, facts, over), stale)
    facts.append(
        ShardsGranted(job.job, request.dataset_id, request.data_epoch, request.caller.worker_id, tuple(grants))
    )
    leases = tuple(_granted(indexes, dataset.dataset, each) for each in grants)
    return facts, ShardAssignment(leases, end_of_epoch=False, stale=stale)


def _dataset_of(job: JobState, dataset_id: str) -> DatasetLedger:
    dataset = job.datasets.get(dataset_id)
    if dataset is None:
        raise StrataError(
            Code.NOT_FOUND,
            f"dataset {dataset_id!r} is not registered",
            hint="call AckDataset first",
            reason="unknown-dataset",
        )
    return dataset


def _ends_with(dataset: Dataset, ledger: EpochLedger, facts: list[Fact], over: set[int]) -> bool:
    """Says whether an epoch that has nothing to grant is consumed once these leases are over and these facts apply."""
    if not ledgers.is_exhausted(dataset, ledger) or ledger.leases.keys() - over:
        return False
    return all(not isinstance(fact, ShardReturned) or fact.quarantined for fact in facts)


def _decide_acks(
    job: JobState, request: NextShards, member: Member, mine: dict[int, Lease]
) -> tuple[list[Fact], set[int], tuple[int, ...]]:
    """Facts of the acks, the leases that end with them, and the acked leases that were not the caller's any more.

    A caller that does not list the leases it holds acks all of them by its next request.
    """
    acks = request.acks if request.held is not None else map(Ack, mine)
    facts: list[Fact] = []
    over: set[int] = set()
    stale: list[int] = []
    for ack in acks:
        if ack.lease_id in over:
            continue
        lease = mine.get(ack.lease_id)
        if lease is None:
            if ack.lease_id not in member.acked:
                stale.append(ack.lease_id)
            continue
        until = _acked_until(ack, lease)
        if until > lease.until:
            facts.append(ShardAcked(job.job, request.dataset_id, request.data_epoch, ack.lease_id, until))
        if until == lease.end:
            over.add(ack.lease_id)
        elif ack.failed or ack.returned:
            over.add(ack.lease_id)
            facts.append(_returned(job, request, lease, ack))
    return facts, over, tuple(stale)


def _acked_until(ack: Ack, lease: Lease) -> int:
    """Returns how far an ack reaches: without a place it means the whole lease, and a failure or a return nothing of
    it."""
    until = ack.until
    if until is None:
        return lease.until if ack.failed or ack.returned else lease.end
    if not lease.until <= until <= lease.end:
        raise StrataError(
            Code.INVALID,
            f"lease {ack.lease_id} covers samples {lease.start} to {lease.end - 1}, read up to {lease.until}:"
            f" {until} is not a place in it",
        )
    return until


def _returned(job: JobState, request: NextShards, lease: Lease, ack: Ack) -> ShardReturned:
    failed_before = job.datasets[request.dataset_id].epoch(request.data_epoch).failures.get(lease.shard, 0)
    return ShardReturned(
        job=job.job,
        dataset_id=request.dataset_id,
        epoch=request.data_epoch,
        lease_id=lease.lease_id,
        reason=ack.reason or "the worker gave it back",
        quarantined=ack.failed and failed_before + 1 >= job.config.max_shard_failures,
        failed=ack.failed,
    )


def _grants(
    state: CoordState, job: JobState, dataset: DatasetLedger, ledger: EpochLedger, request: NextShards
) -> list[Grant]:
    """Lease ids go on from those that `observe` has counted: a repeated decision gives out the same ones."""
    indexes = state.indexes_of(job.job)
    key = (request.dataset_id, request.data_epoch)
    picker = indexes.pickers.get(key)
    if picker is None:
        for epoch in dataset.finished:
            indexes.pickers.pop((request.dataset_id, epoch), None)
        picker = indexes.pickers[key] = Picker(dataset.dataset, request.data_epoch)
    worker_id = request.caller.worker_id
    count = max(0, min(request.count, MAX_COUNT))
    picked = picker.pick(
        ledger, worker_id, _version(job), count, lambda: _buckets_of(job, indexes, dataset.dataset.buckets, worker_id)
    )
    first_id = (state.leader_epoch << 32 | state.leases_given) + 1
    return [
        Grant(lease_id, shard_range.shard, shard_range.start, shard_range.end, fresh)
        for lease_id, (shard_range, fresh) in enumerate(picked, start=first_id)
    ]


def _version(job: JobState) -> tuple[int, int]:
    """The version of the members and shares that the placement follows from."""
    return job.generation, job.reweighted


def _buckets_of(job: JobState, indexes: JobIndexes, buckets: int, worker_id: str) -> list[int]:
    """The caller's buckets in this generation; members keep theirs over generations as far as balance allows."""
    placed = indexes.placements.get(buckets)
    if placed is None or placed.version != _version(job):
        weights = {worker: job.members[worker].worker.weight * job.members[worker].share for worker in job.ranks}
        if not any(weights.values()):
            return []
        before = placed.assignment if placed else None
        assignment, _ = place(buckets, weights, before, scheme=Scheme(job.config.placement))
        placed = indexes.placements[buckets] = BucketPlacement(_version(job), assignment, assignment.by_worker())
    return placed.by_worker.get(worker_id, [])


def _slice(dataset: Dataset, job: JobState, indexes: JobIndexes, request: NextShards) -> ShardAssignment:
    """This rank's part of a step; a pure function, so it needs no ledger. Steps count through all epochs."""
    rank = job.ranks[request.caller.worker_id]
    part = slice_of(request.step, rank, len(job.ranks), global_batch=dataset.global_batch, n=dataset.shards)
    if part.epoch < request.data_epoch:
        raise StrataError(
            Code.INVALID,
            f"step {request.step} of {dataset.dataset_id!r} is in epoch {part.epoch}, before epoch"
            f" {request.data_epoch}: steps count through all epochs",
        )
    if part.epoch > request.data_epoch:
        return ShardAssignment((), end_of_epoch=True, stale=())
    order = order_of(dataset.dataset_id, dataset.seed, part.epoch, dataset.shards, shuffle=dataset.shuffle)
    leases: list[LeasedShard] = []
    for position in range(part.start, part.stop):
        shard = order.at(position)
        start, end = dataset.bounds(shard)
        leases.append(LeasedShard(0, ShardRange(shard, start, end), files_of(indexes, dataset, start, end)))
    return ShardAssignment(tuple(leases), end_of_epoch=False, stale=())


def _granted(indexes: JobIndexes, dataset: Dataset, grant: Grant) -> LeasedShard:
    shard_range = ShardRange(grant.shard, grant.start, grant.end)
    return LeasedShard(grant.lease_id, shard_range, files_of(indexes, dataset, grant.start, grant.end))


def _leased(indexes: JobIndexes, dataset: Dataset, lease: Lease) -> LeasedShard:
    shard_range = ShardRange(lease.shard, lease.until, lease.end)
    return LeasedShard(lease.lease_id, shard_range, files_of(indexes, dataset, shard_range.start, shard_range.end))


def files_of(indexes: JobIndexes, dataset: Dataset, start: int, end: int) -> tuple[str, ...]:
    """The files that hold these samples, in order."""
    ends = file_ends(indexes, dataset)
    first, last = bisect_right(ends, start), bisect_right(ends, end - 1)
    return tuple(file.path for file in dataset.files[first : last + 1])


def file_ends(indexes: JobIndexes, dataset: Dataset) -> list[int]:
    """Returns for each file the sample after its last one."""
    ends = indexes.file_ends.get(dataset.dataset_id)
    if ends is None:
        ends = indexes.file_ends[dataset.dataset_id] = list(accumulate(file.samples for file in dataset.files))
    return ends
