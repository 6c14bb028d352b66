"""The coordinator's safeguards, each taken out in turn. The lineage simulation must notice every one of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from strata.coord.core import apply as applying
from strata.coord.core import checkpoints, ledger, members, shards
from strata.coord.core.facts import ShardAcked
from strata.coord.core.inputs import Ack, Caller, NextShards, RequestRecovery
from strata.coord.core.ledger import DatasetLedger, DatasetPosition, EpochLedger, Lease, ShardRange
from strata.coord.core.state import CoordState, JobState, Member

Ablation = tuple[Any, str, Callable[..., Any]]


def _any_generation(job: JobState, caller: Caller) -> Member:
    return _settled_member(job, Caller(caller.job, caller.worker_id, caller.incarnation))


def _any_incarnation(job: JobState, caller: Caller) -> Member:
    return _member_of(job, Caller(caller.job, caller.worker_id, "", caller.generation))


def _anybodys_lease(job: JobState, given: NextShards, member: Member, mine: dict[int, Lease]) -> Any:
    everybodys = job.datasets[given.dataset_id].epoch(given.data_epoch).leases
    if given.held is None:
        given = _replaced(given, held=(), acks=tuple(map(Ack, mine)))
    return _decide_acks(job, given, member, {**everybodys, **mine})


def _rest_from_the_start(state: EpochLedger, lease_id: int, *, failed: bool = False) -> None:
    lease = ledger._end(state, lease_id)
    state.returned.insert(0, ShardRange(lease.shard, lease.start, lease.end))


def _nothing_late(before: Lease, until: int, read_until: dict[int, int]) -> None:
    return None


def _position_at_commit(datasets: DatasetLedger, read_until: dict[int, int], late: Any) -> DatasetPosition:
    return _position(datasets, {}, late)


def _anybody_starts(job: JobState, member: Member) -> None:
    return


def _everybody_shares(job: JobState, member: Member, given: RequestRecovery) -> bool:
    return member.recover_first or given.observed_generation < job.recovered_generation


def _nobody_missing(job: JobState, *rest: Any) -> tuple[int, ...]:
    return ()


def _keep_leases(datasets: DatasetLedger, to: DatasetPosition) -> None:
    kept = {number: each.leases for number, each in datasets.epochs.items()}
    held = {number: each.held for number, each in datasets.epochs.items()}
    _rewind(datasets, to)
    for number, each in datasets.epochs.items():
        each.leases, each.held = kept.get(number, {}), held.get(number, {})


def _ledger_not_rewound(datasets: DatasetLedger, to: DatasetPosition) -> None:
    for number, each in datasets.epochs.items():
        each.leases, each.held = {}, {}
        del number


def _nobody_shares(job: JobState, member: Member, given: RequestRecovery) -> bool:
    return False


def _leases_stay(state: EpochLedger, worker_id: str) -> None:
    return


def _collecting_survives(job: JobState, fact: Any) -> None:
    kept = job.collecting
    _apply_to_job(job, fact)
    if not job.collecting:
        job.collecting = kept


def _finished_forgotten(datasets: DatasetLedger, epoch: int) -> None:
    _close_finished(datasets, epoch)
    if epoch in datasets.finished:
        datasets.finished.remove(epoch)


def _acked_leases_forgotten(job: JobState, fact: ShardAcked) -> None:
    _ack(job, fact)
    for member in job.members.values():
        member.acked = []


def _lost_answers_stay_lost(state: CoordState, given: NextShards) -> Any:
    mine = (
        state.jobs[given.caller.job]
        .datasets[given.dataset_id]
        .epoch(given.data_epoch)
        .held.get(given.caller.worker_id, ())
    )
    return _next_shards(state, _replaced(given, held=tuple(mine)))


def _replaced(given: NextShards, **changes: Any) -> NextShards:
    return NextShards(**{**given.__dict__, **changes})


_settled_member = members.settled_member
_member_of = members.member_of
_decide_acks = shards._decide_acks
_position = ledger.position
_rewind = ledger.rewind
_apply_to_job = applying._apply_to_job
_close_finished = ledger.close_finished
_ack = applying._ack
_next_shards = shards.next_shards

EVERY: dict[str, list[Ablation]] = {
    # Either of the two is enough after a recovery; without both, a worker goes on in a lineage that was given up.
    "a stale generation may take shards, recovered or not": [
        (shards, "settled_member", _any_generation),
        (shards, "check_recovered", _anybody_starts),
    ],
    "an incarnation that is over may speak": [(members, "member_of", _any_incarnation)],
    "anybody may ack any lease": [(shards, "_decide_acks", _anybodys_lease)],
    "a lost worker's shard is read again from its start": [(ledger, "give_back", _rest_from_the_start)],
    "a lost worker keeps its leases": [(ledger, "give_back_all", _leases_stay)],
    "later acks leak into a checkpoint": [(ledger, "late_part", _nothing_late)],
    "what was read but not acked is not in the checkpoint": [(ledger, "position", _position_at_commit)],
    "a checkpoint is committed without all ranks": [(checkpoints, "_missing", _nobody_missing)],
    "recovery leaves old leases valid": [(ledger, "rewind", _keep_leases)],
    "recovery does not rewind the ledger": [(ledger, "rewind", _ledger_not_rewound)],
    "every caller rewinds": [(checkpoints, "_shares", _nobody_shares)],
    "a process that starts gets shards before it has recovered": [
        (shards, "check_recovered", _anybody_starts),
        (checkpoints, "check_recovered", _anybody_starts),
    ],
    "a recovery is shared after its workers are lost": [(checkpoints, "_shares", _everybody_shares)],
    "a finished epoch is forgotten": [(ledger, "close_finished", _finished_forgotten)],
    "a repeated ack is not recognised": [(applying, "_ack", _acked_leases_forgotten)],
    "a lost answer is not repeated": [(shards, "next_shards", _lost_answers_stay_lost)],
    "a checkpoint outlives its generation": [(applying, "_apply_to_job", _collecting_survives)],
}


@contextmanager
def without(safeguard: str) -> Iterator[None]:
    before = [(module, name, getattr(module, name)) for module, name, _ in EVERY[safeguard]]
    for module, name, replacement in EVERY[safeguard]:
        setattr(module, name, replacement)
    try:
        yield
    finally:
        for module, name, original in before:
            setattr(module, name, original)
