"""Applies a fact to the state of a job, and is the only writer of journaled state: what each fact changes, which old
entries it drops, and when a pending checkpoint is abandoned. A fact that was once written always applies.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, TypeVar, assert_never

from strata.coord.core import history, lifecycle
from strata.coord.core import ledger as ledgers
from strata.coord.core.facts import (
    BarrierDecided,
    CheckpointAgreed,
    CheckpointCommitted,
    CheckpointPart,
    CheckpointRefused,
    CheckpointReported,
    CheckpointRequested,
    CheckpointStepNamed,
    CommandAcked,
    CommandIssued,
    DatasetRegistered,
    DrainBegun,
    Fact,
    GangStatus,
    GenerationFormed,
    JobConfigured,
    JobCreated,
    JobDeleted,
    JobFinished,
    JobReset,
    LeaderChanged,
    RanksListed,
    Recovered,
    ShardAcked,
    ShardReturned,
    ShardsGranted,
    WorkerJoined,
    WorkerJudged,
    WorkerLost,
    WorkerRecovered,
    is_timed,
)
from strata.coord.core.job_config import EscalationLevel
from strata.coord.core.ledger import DatasetLedger, EpochLedger
from strata.coord.core.state import (
    ACKS_KEPT,
    EVICTED_KEPT,
    FENCED_KEPT,
    PARTED_KEPT,
    REFUSED_KEPT,
    REQUESTED_KEPT,
    REQUESTS_KEPT,
    TOMBSTONES_KEPT,
    VERDICTS_KEPT,
    BarrierResult,
    CheckpointRequest,
    CommittedCheckpoint,
    CoordState,
    GangEvent,
    IssuedRequest,
    JobState,
    Member,
    PendingCheckpoint,
    PendingCommand,
)

Key = TypeVar("Key")


def apply(state: CoordState, fact: Fact) -> None:
    if isinstance(fact, JobCreated):
        state.jobs[fact.job] = JobState(fact.job, fact.config, GangStatus.CREATED, leader_epoch=fact.leader_epoch)
    elif isinstance(fact, JobReset | JobDeleted):
        _end_run(state, fact)
    else:
        _apply_to_job(state.jobs[fact.job], fact)
    if is_timed(fact):
        history.record(state.jobs[fact.job], fact, history.events_kept(len(state.jobs)))


def _apply_to_job(job: JobState, fact: Fact) -> None:  # noqa: C901, PLR0912, PLR0915 - one arm per fact
    match fact:
        case JobCreated() | JobReset() | JobDeleted():
            raise AssertionError("a job begins and ends outside of itself")
        case JobFinished():
            lifecycle.move(job, GangEvent.FINISH)
        case JobConfigured():
            job.config = fact.config
        case LeaderChanged():
            job.leader_epoch = fact.leader_epoch
        case WorkerJoined():
            _join(job, fact)
        case WorkerLost():
            _lose(job, fact.worker_id, fact.incarnation)
        case WorkerJudged():
            _judge(job, fact)
        case RanksListed():
            job.listed.extend(fact.members)
        case GenerationFormed():
            job.generation, job.settled = fact.generation, True
            job.ranks = {worker: rank for rank, worker in enumerate([*job.listed, *fact.members])}
            job.listed = []
            # A checkpoint of a generation that is over can never be complete.
            _discard_pending(job, list(job.collecting))
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
            job.verdicts[fact.generation, fact.barrier_id] = BarrierResult(
                fact.generation, fact.barrier_id, fact.verdict, fact.missing
            )
            _drop_oldest(job.verdicts, VERDICTS_KEPT)
        case CheckpointReported():
            _report(job, fact)
        case CheckpointCommitted():
            _commit(job, fact)
        case CheckpointRequested() | CheckpointStepNamed() | CheckpointAgreed() | CheckpointRefused() | DrainBegun():
            _follow_request(job, fact)
        case Recovered():
            _recover(job, fact)
        case WorkerRecovered():
            job.members[fact.worker_id].recover_first = False
        case CommandIssued():
            _issue_command(job, fact)
        case CommandAcked():
            _clear_command(job, fact.worker_id, fact.command_id)
        case _:
            assert_never(fact)


def _end_run(state: CoordState, fact: JobReset | JobDeleted) -> None:
    old = state.jobs[fact.job]
    lifecycle.move(old, GangEvent.RESET if isinstance(fact, JobReset) else GangEvent.DELETE)
    if isinstance(fact, JobDeleted):
        del state.jobs[fact.job]
        return
    # A process of the old run has the old run's state: its incarnation may not come back in the new one.
    fenced = dict(old.fenced)
    for worker_id, incarnation in old.evicted.items():
        fenced[worker_id] = [*fenced.pop(worker_id, []), incarnation][-FENCED_KEPT:]
    _drop_oldest(fenced, EVICTED_KEPT)
    state.jobs[fact.job] = JobState(
        fact.job,
        old.config,
        old.status,
        fact.run,
        fenced=fenced,
        generation=old.generation,
        last_command=old.last_command,
        history=history.next_run(old.history),
        leader_epoch=old.leader_epoch,
    )


def _join(job: JobState, fact: WorkerJoined) -> None:
    worker_id, incarnation = fact.worker.worker_id, fact.worker.incarnation
    before = job.evicted.pop(worker_id, None)
    acked = job.parted.pop(worker_id, [])
    acked = acked if before == incarnation else []
    job.members[worker_id] = Member(fact.worker, acked=acked, recover_first=fact.recover_first)
    lifecycle.move(job, GangEvent.JOIN)
    if before not in (None, incarnation):
        fenced = job.fenced.pop(worker_id, [])
        job.fenced[worker_id] = [*fenced, before][-FENCED_KEPT:]
        _drop_oldest(job.fenced, EVICTED_KEPT)
    job.settled = False


def _lose(job: JobState, worker_id: str, incarnation: str) -> None:
    member = job.members.pop(worker_id)
    if not job.members:
        lifecycle.move(job, GangEvent.EMPTY)
        job.checkpoint_request = None
    job.settled = False
    job.stopping.pop(worker_id, None)
    job.draining.pop(worker_id, None)
    if job.checkpoint_request is not None:
        job.checkpoint_request.drain.pop(worker_id, None)
    job.evicted.pop(worker_id, None)
    job.evicted[worker_id] = incarnation
    _drop_oldest(job.evicted, EVICTED_KEPT)
    if member.acked:
        job.parted[worker_id] = member.acked
        _drop_oldest(job.parted, PARTED_KEPT)
    for ledger in _open_ledgers(job):
        ledgers.give_back_all(ledger, worker_id)
    for command_id in list(job.commands):
        _clear_command(job, worker_id, command_id)


def _judge(job: JobState, fact: WorkerJudged) -> None:
    member = job.members[fact.worker_id]
    if member.share != fact.weight:
        member.share = fact.weight
        job.reweighted += 1
    member.level = fact.level
    is_found = fact.level is not EscalationLevel.NONE
    member.finding, member.finding_reason = (fact.finding, fact.reason) if is_found else (None, "")
    if fact.level is EscalationLevel.STOP and not fact.ends_itself:
        job.stopping[fact.worker_id] = fact.reason


def _issue_command(job: JobState, fact: CommandIssued) -> None:
    job.last_command = max(job.last_command, fact.command_id)
    known = job.commands.get(fact.command_id)
    if known is None and fact.workers:
        job.commands[fact.command_id] = PendingCommand(
            fact.command_id, fact.kind, dict.fromkeys(fact.workers), fact.reason, fact.arguments, fact.at_ms
        )
    elif known is not None:
        known.waiting.update(dict.fromkeys(fact.workers))
    if fact.request_id:
        before = job.requests.get(fact.request_id)
        workers = (*before.workers, *fact.workers) if before else fact.workers
        job.requests[fact.request_id] = IssuedRequest(fact.command_id, workers)
        _drop_oldest(job.requests, REQUESTS_KEPT)
        while len(job.requests) > 1 and sum(len(each.workers) for each in job.requests.values()) > REQUESTED_KEPT:
            _drop_oldest(job.requests, len(job.requests) - 1)


def _follow_request(
    job: JobState, fact: CheckpointRequested | CheckpointStepNamed | CheckpointAgreed | CheckpointRefused | DrainBegun
) -> None:
    """Notes what becomes of a checkpoint that an operator requested."""
    match fact:
        case CheckpointRequested():
            request = job.checkpoint_request
            if request is None or request.command_id != fact.command_id:
                request = CheckpointRequest(fact.command_id, fact.reason, proposal=fact.command_id)
            request.drain |= dict.fromkeys(fact.drain)
            if fact.drain_command and fact.drain_command not in request.drain_commands:
                request.drain_commands.append(fact.drain_command)
            job.checkpoint_request = request
        case CheckpointStepNamed():
            assert job.checkpoint_request is not None
            _name_step(job, job.checkpoint_request, fact)
        case CheckpointAgreed():
            assert job.checkpoint_request is not None
            job.checkpoint_request.agreed = True
        case CheckpointRefused():
            assert job.checkpoint_request is not None
            for command_id in (job.checkpoint_request.proposal, *fact.command_ids):
                job.commands.pop(command_id, None)
            job.checkpoint_request = None
            job.refused |= dict.fromkeys(fact.command_ids, fact.reason)
            _drop_oldest(job.refused, REFUSED_KEPT)
        case DrainBegun():
            job.settled = False
            job.draining |= dict.fromkeys(fact.workers)
            # A worker that does not leave is evicted like one that ignores a stop command.
            job.stopping |= dict.fromkeys(fact.workers, "it was drained")


def _name_step(job: JobState, request: CheckpointRequest, fact: CheckpointStepNamed) -> None:
    if request.proposal != fact.command_id:
        # The step that it named is of no interest any more.
        job.commands.pop(request.proposal, None)
    is_same = request.generation == fact.generation
    request.attempts = request.attempts + 1 if is_same else 1
    request.missed = request.missed + request.agreed if is_same else 0
    request.proposal, request.generation, request.step = fact.command_id, fact.generation, fact.step
    request.agreed = False


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
        ledgers.give_back(ledger, fact.lease_id, failed=fact.failed)
    ledgers.close_finished(dataset, fact.epoch)


def _remember_ack(job: JobState, worker_id: str, lease_id: int) -> None:
    member = job.members.get(worker_id)
    if member is not None:
        member.acked.append(lease_id)
        del member.acked[:-ACKS_KEPT]


def _report(job: JobState, fact: CheckpointReported) -> None:
    collecting = job.collecting.setdefault(
        fact.checkpoint_id, PendingCheckpoint(fact.checkpoint_id, fact.generation, fact.step)
    )
    collecting.parts[fact.worker_id] = fact.part
    # After a recovery the same step comes again, perhaps under the same name: what is written now is not to be deleted.
    job.tombstones.pop(fact.part.uri, None)
    job.tombstone_steps.pop(fact.part.uri, None)
    collecting.read_until.update({each.lease_id: each.until for each in fact.consumed})


def _commit(job: JobState, fact: CheckpointCommitted) -> None:
    collecting = job.collecting.pop(fact.checkpoint_id)
    job.checkpoints.append(
        CommittedCheckpoint(
            checkpoint_id=fact.checkpoint_id,
            generation=fact.generation,
            step=fact.step,
            parts=tuple(sorted(collecting.parts.values(), key=lambda part: part.rank)),
            positions={
                name: ledgers.position(dataset, collecting.read_until, collecting.late.get(name, {}))
                for name, dataset in job.datasets.items()
            },
            committed_at_ms=fact.at_ms,
            command_id=fact.command_id,
        )
    )
    if fact.command_id:
        job.checkpoint_request = None
    # An unfinished one of an earlier step has been overtaken.
    _discard_pending(job, [name for name, each in job.collecting.items() if each.step <= fact.step])
    while len(job.checkpoints) > job.config.keep_checkpoints:
        old = job.checkpoints.pop(0)
        _mark_garbage(job, old.parts, old.step)


def _recover(job: JobState, fact: Recovered) -> None:
    _discard_pending(job, list(job.collecting))
    if fact.bad_checkpoint_id is not None:
        job.checkpoints = [each for each in job.checkpoints if each.checkpoint_id != fact.bad_checkpoint_id]
    checkpoint = job.checkpoint(fact.checkpoint_id)
    if checkpoint is not None:
        _abandon_after(job, checkpoint)
    else:
        job.checkpoints = []
    for name, dataset in job.datasets.items():
        known = checkpoint.positions.get(name) if checkpoint else None
        ledgers.rewind(dataset, known or ledgers.DatasetPosition((), ()))
    for member in job.members.values():
        member.acked = []
        member.recover_first = not member.worker.elastic
    job.parted = {}
    job.recovered_generation = job.generation + 1
    job.recovered_to = fact.checkpoint_id


def _abandon_after(job: JobState, checkpoint: CommittedCheckpoint) -> None:
    """The checkpoints that were committed after this one belong to an abandoned lineage."""
    at = job.checkpoints.index(checkpoint)
    gone = job.checkpoints[at + 1 :]
    del job.checkpoints[at + 1 :]
    for each in gone:
        _mark_garbage(job, each.parts, each.step)


def _discard_pending(job: JobState, checkpoint_ids: Iterable[str]) -> None:
    """These checkpoints will never be complete: their parts become garbage."""
    gone = frozenset(checkpoint_ids)
    given_up = [each for name, each in job.collecting.items() if name in gone]
    job.collecting = {name: each for name, each in job.collecting.items() if name not in gone}
    for each in given_up:
        _mark_garbage(job, each.parts.values(), each.step)


def _mark_garbage(job: JobState, parts: Iterable[CheckpointPart], step: int) -> None:
    """These parts may be deleted, except for paths that a kept checkpoint was written to as well."""
    kept = {part.uri for each in job.checkpoints for part in each.parts}
    kept |= {part.uri for each in job.collecting.values() for part in each.parts.values()}
    buried = {part.uri: part.rank for part in parts if part.uri not in kept}
    job.tombstones |= buried
    job.tombstone_steps |= dict.fromkeys(buried, step)
    job.gc_version += 1
    _drop_oldest(job.tombstones, TOMBSTONES_KEPT)
    _drop_oldest(job.tombstone_steps, TOMBSTONES_KEPT)


def _drop_oldest(kept: dict[Key, Any], limit: int) -> None:
    """The oldest ones, beyond a limit."""
    while len(kept) > limit:
        del kept[next(iter(kept))]


def _clear_command(job: JobState, worker_id: str, command_id: int) -> None:
    command = job.commands.get(command_id)
    if command is not None and worker_id in command.waiting:
        del command.waiting[worker_id]
        if not command.waiting:
            del job.commands[command_id]


def _open_ledgers(job: JobState) -> list[EpochLedger]:
    return [ledger for dataset in job.datasets.values() for ledger in dataset.epochs.values()]
