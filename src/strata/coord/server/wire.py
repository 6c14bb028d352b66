"""Converts protobuf messages of workers to the core's types and back, with the defaults (shard size, job name), limits
of names and arguments, and when a worker without shards asks again (200 ms). `wire_job` converts a job for operators.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Protocol

from strata.base.errors import Code, StrataError
from strata.coord.core import inputs
from strata.coord.core.checkpoint_requests import AFTER, STEP
from strata.coord.core.facts import (
    DEFAULT_BUCKETS,
    IF_HUNG,
    BarrierVerdict,
    CheckpointPart,
    CommandKind,
    Consumed,
    DataFile,
    Dataset,
    DatasetMode,
    RegisteredWorker,
    nodes_job,
)
from strata.coord.core.inputs import Ack, Caller
from strata.coord.core.ledger import DatasetLedger, progress
from strata.coord.core.liveness import interval_s
from strata.coord.core.state import CommittedCheckpoint, CoordState, JobState, PendingCommand
from strata.coord.pb import coordinator_pb2 as pb

DEFAULT_JOB: Final = "default"
DEFAULT_SHARD_SIZE: Final = 1024
MAX_NAME: Final = 256
"""Characters in the id of a job, worker, incarnation, dataset, barrier or checkpoint."""
MAX_ARGUMENTS: Final = 16_384
"""Characters in all arguments of a command: they are repeated to every worker until it has acknowledged."""
EMPTY_RETRY_MS: Final = 200
"""When to retry for shards that other workers may return."""

VERDICT_OF: Final = {
    BarrierVerdict.RELEASED: pb.BARRIER_VERDICT_RELEASED,
    BarrierVerdict.MEMBERSHIP_CHANGED: pb.BARRIER_VERDICT_MEMBERSHIP_CHANGED,
    BarrierVerdict.TIMED_OUT: pb.BARRIER_VERDICT_TIMED_OUT,
}
KIND_OF: Final = {
    CommandKind.STOP: pb.COMMAND_KIND_STOP,
    CommandKind.REBALANCE: pb.COMMAND_KIND_REBALANCE,
    CommandKind.CHECKPOINT_NOW: pb.COMMAND_KIND_CHECKPOINT_NOW,
    CommandKind.RELOAD: pb.COMMAND_KIND_RELOAD,
    CommandKind.DRAIN: pb.COMMAND_KIND_DRAIN,
}
MODE_OF: Final = {pb.DATASET_MODE_DETERMINISTIC: DatasetMode.DETERMINISTIC, pb.DATASET_MODE_LEASED: DatasetMode.LEASED}


@dataclass(frozen=True)
class Identity:
    """The caller as the metadata and the token name it; empty where they name nothing."""

    job: str = ""
    worker_id: str = ""
    token_job: str = ""
    token_worker_id: str = ""

    def job_of(self, field: str) -> str:
        if self.token_job and field not in ("", self.token_job, nodes_job(self.token_job)):
            raise StrataError(Code.FORBIDDEN, f"the token is not for job {field!r}")
        if 0 < len(field) <= MAX_NAME:
            return field
        return _name(field or self.job or self.token_job or DEFAULT_JOB, "job_id")

    def worker_of(self, field: str) -> str:
        if self.token_worker_id and field not in ("", self.token_worker_id):
            raise StrataError(Code.FORBIDDEN, f"the token is not for worker {field!r}")
        if 0 < len(field) <= MAX_NAME:
            return field
        worker_id = field or self.worker_id or self.token_worker_id
        if not worker_id:
            raise StrataError(
                Code.INVALID, "the call says nowhere which worker it is from", hint="set worker_id or strata-worker"
            )
        return _name(worker_id, "worker_id")


def _name(text: str, field: str) -> str:
    if not text or len(text) > MAX_NAME:
        raise StrataError(Code.INVALID, f"{field} needs 1 to {MAX_NAME} characters, not {len(text)}")
    return text


class _Named(Protocol):
    @property
    def job_id(self) -> str: ...

    @property
    def worker_id(self) -> str: ...

    @property
    def incarnation(self) -> str: ...


def caller(message: _Named, identity: Identity, generation: int = 0) -> Caller:
    return Caller(
        identity.job_of(message.job_id), identity.worker_of(message.worker_id), message.incarnation, generation
    )


def worker(message: pb.WorkerInfo, identity: Identity, incarnation: str) -> inputs.Register:
    """`incarnation` is the one to assign to a worker that has none."""
    weight = message.weight if message.HasField("weight") else float(max(1, message.gpu_count))
    return inputs.Register(
        identity.job_of(message.job_id),
        RegisteredWorker(
            worker_id=identity.worker_of(message.worker_id),
            incarnation=_name(message.incarnation or incarnation, "incarnation"),
            address=f"{message.ip}:{message.port}" if message.ip else "",
            hostname=message.hostname,
            gpus=message.gpu_count,
            weight=weight,
            labels=dict(message.labels),
            elastic=message.elastic,
            expected_rank=message.expected_rank if message.HasField("expected_rank") else None,
        ),
    )


def interval_ms(state: CoordState, job: JobState) -> int:
    return round(interval_s(state, job) * 1000)


def config(state: CoordState, job: JobState, place: inputs.RankAssignment) -> pb.WorkerConfig:
    return pb.WorkerConfig(
        heartbeat_interval_ms=interval_ms(state, job),
        training_parameters=job.config.parameters,
        rank=max(0, place.rank),
        world_size=place.world_size,
        generation=place.generation,
        incarnation=place.incarnation,
        job_id=job.job,
        leader_epoch=state.leader_epoch,
        recover_first=place.recover_first,
        run=job.run,
    )


def address(found: RegisteredWorker) -> tuple[str, int]:
    ip, _, port = found.address.rpartition(":")
    return ip, int(port or 0)


def members(job: JobState) -> list[pb.Member]:
    found: list[pb.Member] = []
    for worker_id, rank in job.ranks.items():
        member = job.members.get(worker_id)
        if member is not None:
            ip, port = address(member.worker)
            found.append(
                pb.Member(
                    worker_id=worker_id,
                    rank=rank,
                    ip=ip,
                    port=port,
                    gpu_count=member.worker.gpus,
                    hostname=member.worker.hostname,
                )
            )
    return found


def command(found: PendingCommand) -> pb.Command:
    return pb.Command(
        command_id=found.command_id, kind=KIND_OF[found.kind], reason=found.reason, arguments=found.arguments
    )


def dataset(message: pb.DatasetInfo, known: Dataset | None) -> Dataset | None:
    """None if the message names a dataset without defining it. What it leaves to us is as registered, if it is."""
    _name(message.dataset_id, "dataset_id")
    files = _data_files(message)
    samples = message.num_samples or sum(file.samples for file in files)
    if message.file_samples and not message.file_paths:
        samples = message.file_samples[0]
    if samples == 0:
        return None
    shard_size, buckets = (known.shard_size, known.buckets) if known else (DEFAULT_SHARD_SIZE, DEFAULT_BUCKETS)
    return Dataset(
        dataset_id=message.dataset_id,
        samples=samples,
        shard_size=message.shard_size or shard_size,
        files=files,
        mode=MODE_OF.get(message.mode, DatasetMode.LEASED),
        seed=message.seed,
        shuffle=message.shuffle if message.HasField("shuffle") else True,
        buckets=message.buckets or buckets,
        global_batch=message.global_batch_shards or 1,
    )


def _data_files(message: pb.DatasetInfo) -> tuple[DataFile, ...]:
    """Decodes the files of a dataset: as a minimal worker names them, or in full."""
    paths, samples = message.file_paths, message.file_samples
    if not (paths or samples):
        return tuple(DataFile(file.path, file.num_samples) for file in message.files)
    problem = ""
    if message.files or message.num_samples:
        problem = "file_paths and file_samples stand in place of files and num_samples: send one of the two"
    elif len(samples) != max(1, len(paths)):
        problem = f"{len(paths)} file_paths need as many file_samples, not {len(samples)}"
    if problem:
        raise StrataError(Code.INVALID, f"dataset {message.dataset_id!r}: {problem}")
    return tuple(DataFile(path, count) for path, count in zip(paths, samples, strict=bool(paths)))


def dataset_ack(found: inputs.DatasetRegistration, ledger: DatasetLedger) -> pb.DatasetAck:
    return pb.DatasetAck(
        accepted=True,
        created=found.created,
        num_shards=found.shards,
        open_epochs=open_epochs(ledger),
        finished_epochs=sorted(ledger.finished),
    )


def open_epochs(found: DatasetLedger) -> list[pb.EpochProgress]:
    epochs: list[pb.EpochProgress] = []
    for number in sorted(found.epochs):
        counted = progress(found.dataset, found.epochs[number])
        epochs.append(
            pb.EpochProgress(
                epoch=number,
                done_shards=counted.done,
                leased_shards=counted.leased,
                waiting_shards=counted.waiting,
                quarantined_shards=counted.quarantined,
            )
        )
    return epochs


def acks(found: Sequence[pb.ShardAck]) -> tuple[Ack, ...]:
    return tuple(
        Ack(
            ack.lease_id,
            ack.consumed_until if ack.HasField("consumed_until") else None,
            failed=ack.failed,
            reason=ack.reason,
            returned=ack.returned,
        )
        for ack in found
    )


def next_shards(message: pb.ShardRequest, identity: Identity) -> inputs.NextShards:
    return inputs.NextShards(
        caller(message, identity, message.generation),
        message.dataset_id,
        message.epoch,
        count=0 if message.acks_only else message.max_shards or 1,
        acks=acks(message.acks),
        held=tuple(message.held_leases) if message.explicit_acks else None,
        step=message.step,
    )


def assignment(
    found: inputs.ShardAssignment, generation: int, epoch: int, defined: Dataset, ends: Sequence[int]
) -> pb.ShardAssignment:
    """The first shard also stands at the top, where the minimal worker looks. `ends`: as of `slices`."""
    if not found.leases:
        return pb.ShardAssignment(
            end_of_epoch=found.end_of_epoch,
            generation=generation,
            epoch=epoch,
            rejected_leases=found.stale,
            retry_after_ms=0 if found.end_of_epoch else EMPTY_RETRY_MS,
        )
    prefix = f"{defined.dataset_id}/{epoch}/"
    first = found.leases[0]
    reply = pb.ShardAssignment(
        shard_id=f"{prefix}{first.shard_range.shard}",
        file_paths=first.files,
        start_index=first.shard_range.start,
        end_index=first.shard_range.end,
        lease_id=first.lease_id,
        generation=generation,
        epoch=epoch,
        rejected_leases=found.stale,
    )
    for lease in found.leases:
        reply.shards.add(
            shard_id=f"{prefix}{lease.shard_range.shard}",
            file_paths=lease.files,
            start_index=lease.shard_range.start,
            end_index=lease.shard_range.end,
            lease_id=lease.lease_id,
            shard_index=lease.shard_range.shard,
            slices=slices(defined, ends, lease.shard_range.start, lease.shard_range.end),
        )
    return reply


def slices(defined: Dataset, ends: Sequence[int], start: int, end: int) -> list[pb.FileSlice]:
    """Samples counted within each file. `ends` has the sample after the last of each file."""
    found: list[pb.FileSlice] = []
    index = bisect_right(ends, start)
    while index < len(ends) and start < end:
        until = min(end, ends[index])
        base = ends[index] - defined.files[index].samples
        if start < until:
            found.append(pb.FileSlice(path=defined.files[index].path, start_index=start - base, end_index=until - base))
        start, index = until, index + 1
    return found


def arrive(message: pb.BarrierRequest, identity: Identity) -> inputs.ArriveAtBarrier:
    return inputs.ArriveAtBarrier(
        caller(message, identity, message.generation),
        _name(message.barrier_id, "barrier_id"),
        step=message.step,
        expected=message.expected_participants,
        timeout_s=message.timeout_ms / 1000 if message.timeout_ms else None,
    )


def barrier(found: inputs.BarrierState) -> pb.BarrierResponse:
    verdict = pb.BARRIER_VERDICT_PENDING if found.verdict is None else VERDICT_OF[found.verdict]
    return pb.BarrierResponse(
        released=found.verdict is BarrierVerdict.RELEASED,
        verdict=verdict,
        generation=found.generation,
        arrived=found.arrived,
        expected=found.expected,
        missing=found.missing,
    )


def report(message: pb.CheckpointInfo, who: Caller, job: JobState, step: int) -> inputs.ReportCheckpoint:
    """`step` is the highest that the worker has named, for one that does not say which step it saved."""
    rank = message.rank if message.HasField("rank") else job.ranks.get(who.worker_id, 0)
    return inputs.ReportCheckpoint(
        who,
        _name(message.checkpoint_id, "checkpoint_id"),
        message.step if message.HasField("step") else step,
        CheckpointPart(rank, message.path, message.size_bytes, message.digest),
        tuple(each for found in message.consumed if (each := _consumed(found, job)) is not None),
    )


def _consumed(found: pb.ConsumedLease, job: JobState) -> Consumed | None:
    """None if all of a lease is meant that is over: it is acked, so it counts as consumed anyway."""
    if found.HasField("consumed_until"):
        return Consumed(found.dataset_id, found.epoch, found.lease_id, found.consumed_until)
    known = job.datasets.get(found.dataset_id)
    ledger = known.epochs.get(found.epoch) if known else None
    lease = ledger.leases.get(found.lease_id) if ledger else None
    return Consumed(found.dataset_id, found.epoch, found.lease_id, lease.end) if lease else None


def checkpoint_ack(found: inputs.CheckpointState, step: int) -> pb.CheckpointAck:
    return pb.CheckpointAck(
        accepted=True,
        committed=found.committed,
        step=step,
        missing_ranks=found.missing_ranks,
        tombstones=found.tombstones,
        generation_ends=found.generation_ends,
        drain=found.drain,
    )


def manifest(found: CommittedCheckpoint) -> pb.CheckpointManifest:
    return pb.CheckpointManifest(
        checkpoint_id=found.checkpoint_id,
        step=found.step,
        parts=map(part, found.parts),
        generation=found.generation,
        committed_at_unix_ms=found.committed_at_ms,
    )


def part(found: CheckpointPart) -> pb.CheckpointPart:
    return pb.CheckpointPart(rank=found.rank, uri=found.uri, size_bytes=found.size, digest=found.digest)


def recovery(found: inputs.Recovery, leader_epoch: int) -> pb.RecoveryResponse:
    """The data position went back in any case: by this call, or by the one whose rewind it shares."""
    return pb.RecoveryResponse(
        generation=found.place.generation,
        rank=found.place.rank,
        world_size=found.place.world_size,
        ledger_rewound=True,
        leader_epoch=leader_epoch,
        checkpoint=manifest(found.checkpoint) if found.checkpoint else None,
    )


def issue(message: pb.IssueCommandRequest, identity: Identity) -> inputs.IssueCommand:
    kind = next((ours for ours, theirs in KIND_OF.items() if theirs == message.kind), None)
    if kind is None:
        raise StrataError(Code.INVALID, "a command needs a kind")
    arguments = dict(message.arguments)
    if sum(len(key) + len(value) for key, value in arguments.items()) > MAX_ARGUMENTS:
        raise StrataError(Code.INVALID, f"the arguments of a command have at most {MAX_ARGUMENTS:,} characters")
    if kind is not CommandKind.RELOAD and (reserved := arguments.keys() & {STEP, AFTER, IF_HUNG}):
        raise StrataError(Code.INVALID, f"the coordinator alone gives a command the argument {min(reserved)!r}")
    if len(message.request_id) > MAX_NAME:
        raise StrataError(Code.INVALID, f"request_id has at most {MAX_NAME} characters")
    return inputs.IssueCommand(
        identity.job_of(message.job_id),
        kind,
        tuple(message.worker_ids),
        message.reason,
        arguments,
        message.request_id,
    )
