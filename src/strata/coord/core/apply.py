"""Facts into state: the only place where what is journaled changes anything. A fact that was once written applies."""

from __future__ import annotations

from typing import Any, TypeVar, assert_never

from strata.coord.core import ledger as ledgers
from strata.coord.core.facts import (
    BarrierDecided,
    CheckpointCommitted,
    CheckpointReported,
    CommandAcked,
    CommandIssued,
    DatasetRegistered,
    Fact,
    GenerationFormed,
    JobCreated,
    Recovered,
    ShardAcked,
    ShardReturned,
    ShardsGranted,
    WorkerJoined,
    WorkerLost,
)
from strata.coord.core.ledger import DatasetLedger, EpochLedger
from strata.coord.core.state import (
    ACKS_KEPT,
    EVICTED_KEPT,
    TOMBSTONES_KEPT,
    VERDICTS_KEPT,
    Checkpoint,
    Collecting,
    Command,
    CoordState,
    Decided,
    JobState,
    Member,
)

Key = TypeVar("Key")


def apply(state: CoordState, fact: Fact) -> None:
    if isinstance(fact, JobCreated):
        state.jobs[fact.job] = JobState(fact.job, fact.config)
        return
    _apply_to_job(state.jobs[fact.job], fact)


def _apply_to_job(job: JobState, fact: Fact) -> None:  # noqa: C901, PLR0912 - one arm per fact
    match fact:
        case JobCreated():
            raise AssertionError("a job is created outside of itself")
        case WorkerJoined():
            job.evicted.pop(fact.worker.worker_id, None)
            job.members[fact.worker.worker_id] = Member(fact.worker)
            job.settled = False
        case WorkerLost():
            _lose(job, fact.worker_id, fact.incarnation)
        case GenerationFormed():
            job.generation, job.settled = fact.generation, True
            job.ranks = {worker: rank for rank, worker in enumerate(fact.members)}
            # A checkpoint of a generation that is over can never be complete.
            job.collecting = {}
        case DatasetRegistered():
            job.datasets[fact.dataset.dataset_id] = DatasetLedger(fact.dataset)
        case ShardsGranted():
            dataset = job.datasets[fact.dataset_id]
            ledger = dataset.epochs.setdefault(fact.epoch, dataset.epoch(fact.epoch))
            ledgers.grant(ledger, dataset.dataset, fact.worker_id, fact.grants)
        case ShardAcked():
            _ack(job, fact)
        case ShardReturned():
            _return(job, fact)
        case BarrierDecided():
            job.verdicts[fact.generation, fact.barrier_id] = Decided(
                fact.generation, fact.barrier_id, fact.verdict, fact.missing
            )
            _forget(job.verdicts, VERDICTS_KEPT)
        case CheckpointReported():
            _report(job, fact)
        case CheckpointCommitted():
            _commit(job, fact)
        case Recovered():
            _recover(job, fact)
        case CommandIssued():
            job.last_command = max(job.last_command, fact.command_id)
            job.commands[fact.command_id] = Command(
                fact.command_id, fact.kind, dict.fromkeys(fact.workers), fact.reason
            )
        case CommandAcked():
            _take_off(job, fact.worker_id, fact.command_id)
        case _:
            assert_never(fact)


def _lose(job: JobState, worker_id: str, incarnation: str) -> None:
    del job.members[worker_id]
    job.settled = False
    job.evicted.pop(worker_id, None)
    job.evicted[worker_id] = incarnation
    _forget(job.evicted, EVICTED_KEPT)
    for ledger in _open_ledgers(job):
        ledgers.give_back_all(ledger, worker_id)
    for command_id in list(job.commands):
        _take_off(job, worker_id, command_id)


def _ack(job: JobState, fact: ShardAcked) -> None:
    dataset = job.datasets[fact.dataset_id]
    ledger = dataset.epochs[fact.epoch]
    before = ledgers.ack(ledger, fact.lease_id, fact.until)
    if fact.lease_id not in ledger.leases:
        _remember_ack(job, before.worker_id, fact.lease_id)
    for collecting in job.collecting.values():
        if before.worker_id in collecting.parts:
            late = ledgers.late_part(before, fact.until, collecting.read_until)
            if late is not None:
                collecting.late.setdefault(fact.dataset_id, {}).setdefault(fact.epoch, []).append(late)
    ledgers.close_finished(dataset, fact.epoch)


def _return(job: JobState, fact: ShardReturned) -> None:
    dataset = job.datasets[fact.dataset_id]
    ledger = dataset.epochs[fact.epoch]
    _remember_ack(job, ledger.leases[fact.lease_id].worker_id, fact.lease_id)
    if fact.quarantined:
        ledgers.quarantine(ledger, fact.lease_id, fact.reason)
    else:
        ledgers.give_back(ledger, fact.lease_id, failed=True)
    ledgers.close_finished(dataset, fact.epoch)


def _remember_ack(job: JobState, worker_id: str, lease_id: int) -> None:
    member = job.members.get(worker_id)
    if member is not None:
        member.acked.append(lease_id)
        del member.acked[:-ACKS_KEPT]


def _report(job: JobState, fact: CheckpointReported) -> None:
    collecting = job.collecting.setdefault(
        fact.checkpoint_id, Collecting(fact.checkpoint_id, fact.generation, fact.step)
    )
    collecting.parts[fact.worker_id] = fact.part
    # After a recovery the same step comes again, perhaps under the same name: what is written now is not to be deleted.
    job.tombstones.pop(fact.part.uri, None)
    collecting.read_until.update({each.lease_id: each.until for each in fact.consumed})


def _commit(job: JobState, fact: CheckpointCommitted) -> None:
    collecting = job.collecting.pop(fact.checkpoint_id)
    job.checkpoints.append(
        Checkpoint(
            checkpoint_id=fact.checkpoint_id,
            generation=fact.generation,
            step=fact.step,
            parts=tuple(sorted(collecting.parts.values(), key=lambda part: part.rank)),
            positions={
                name: ledgers.position(dataset, collecting.read_until, collecting.late.get(name, {}))
                for name, dataset in job.datasets.items()
            },
        )
    )
    # An unfinished one of an earlier step has been overtaken.
    job.collecting = {name: each for name, each in job.collecting.items() if each.step > fact.step}
    while len(job.checkpoints) > job.config.keep_checkpoints:
        _bury(job, job.checkpoints.pop(0))


def _recover(job: JobState, fact: Recovered) -> None:
    if fact.bad_checkpoint_id is not None:
        job.checkpoints = [each for each in job.checkpoints if each.checkpoint_id != fact.bad_checkpoint_id]
    checkpoint = job.checkpoint(fact.checkpoint_id)
    if checkpoint is not None:
        # What was committed after it belongs to a lineage that is given up.
        at = job.checkpoints.index(checkpoint)
        gone = job.checkpoints[at + 1 :]
        del job.checkpoints[at + 1 :]
        for each in gone:
            _bury(job, each)
    else:
        job.checkpoints = []
    for name, dataset in job.datasets.items():
        known = checkpoint.positions.get(name) if checkpoint else None
        ledgers.rewind(dataset, known or ledgers.DatasetPosition((), ()))
    for member in job.members.values():
        member.acked = []
    job.collecting = {}
    job.recovered_generation = job.generation + 1
    job.recovered_to = fact.checkpoint_id


def _bury(job: JobState, checkpoint: Checkpoint) -> None:
    """Its parts may be deleted, but for paths that a checkpoint that is kept was written to as well."""
    kept = {part.uri for each in job.checkpoints for part in each.parts}
    kept |= {part.uri for each in job.collecting.values() for part in each.parts.values()}
    job.tombstones |= {part.uri: part.rank for part in checkpoint.parts if part.uri not in kept}
    _forget(job.tombstones, TOMBSTONES_KEPT)


def _forget(kept: dict[Key, Any], limit: int) -> None:
    """The oldest ones, beyond a limit."""
    while len(kept) > limit:
        del kept[next(iter(kept))]


def _take_off(job: JobState, worker_id: str, command_id: int) -> None:
    command = job.commands.get(command_id)
    if command is not None and worker_id in command.waiting:
        del command.waiting[worker_id]
        if not command.waiting:
            del job.commands[command_id]


def _open_ledgers(job: JobState) -> list[EpochLedger]:
    return [ledger for dataset in job.datasets.values() for ledger in dataset.epochs.values()]
