"""A job as operators see it: the core's state and the telemetry of this process, in one message."""

from __future__ import annotations

from typing import Final

import msgspec

from strata.base.errors import Code, StrataError
from strata.coord.core.barriers import missing_at
from strata.coord.core.facts import DatasetMode, GangStatus, JobConfig
from strata.coord.core.ledger import DatasetLedger, Quarantined
from strata.coord.core.state import CoordState, JobState, Member, PendingCheckpoint, SoftState
from strata.coord.pb import coordinator_pb2 as pb
from strata.coord.server.telemetry import LEFT, JobTelemetry
from strata.coord.server.wire import MAX_ARGUMENTS, address, command, manifest, open_epochs, part

HISTORY: Final = 20
STATUS_OF: Final = {
    GangStatus.CREATED: pb.JOB_STATUS_CREATED,
    GangStatus.RUNNING: pb.JOB_STATUS_RUNNING,
    GangStatus.STOPPED: pb.JOB_STATUS_STOPPED,
    GangStatus.FINISHED: pb.JOB_STATUS_FINISHED,
}
LATE_INTERVALS: Final = 1.5
"""Intervals of silence after which a heartbeat is late."""


def job_state(
    state: CoordState, job_id: str, telemetry: JobTelemetry, now_s: float, wall_s: float, limit: int
) -> pb.JobState:
    """`limit`: how many checkpoints and incidents; 0: as many as is useful."""
    job, soft = state.jobs[job_id], state.soft_of(job_id)
    limit = limit or HISTORY
    incidents = list(telemetry.incidents)[-limit:]
    return pb.JobState(
        job_id=job.job,
        generation=telemetry.generation,
        world_size=len(job.ranks),
        leader_epoch=state.leader_epoch,
        observed_at_unix_ms=_ms(wall_s),
        workers=_workers(job, soft, telemetry, now_s),
        datasets=[_dataset(each) for each in job.datasets.values()],
        barriers=_barriers(job, soft, telemetry, now_s),
        checkpoints=_checkpoints(job, telemetry)[:limit],
        incidents=[
            pb.Incident(
                kind=each.kind,
                at_unix_ms=_ms(each.at_s),
                generation=each.generation,
                worker_id=each.worker_id,
                message=each.message,
            )
            for each in reversed(incidents)
        ],
        commands=[
            pb.CommandState(
                command=command(each),
                waiting_for=each.waiting,
                issued_at_unix_ms=_ms(telemetry.issued_at_s.get(each.command_id, 0.0)),
            )
            for each in job.commands.values()
        ],
        training_parameters=job.config.parameters,
        status=STATUS_OF[job.status],
        run=job.run,
    )


def summary(job: JobState) -> pb.JobSummary:
    return pb.JobSummary(
        job_id=job.job,
        status=STATUS_OF[job.status],
        run=job.run,
        generation=job.generation,
        workers=len(job.members),
        min_workers=job.config.min_workers,
        max_workers=job.config.max_workers,
        checkpoint_step=job.checkpoints[-1].step if job.checkpoints else None,
    )


def job_config(request: pb.CreateJobRequest, default: JobConfig) -> JobConfig:
    parameters = {**default.parameters, **request.training_parameters}
    if sum(len(key) + len(value) for key, value in parameters.items()) > MAX_ARGUMENTS:
        raise StrataError(Code.INVALID, f"the parameters of a job have at most {MAX_ARGUMENTS:,} characters")
    return msgspec.structs.replace(
        default,
        min_workers=request.min_workers or default.min_workers,
        max_workers=request.max_workers or default.max_workers,
        parameters=parameters,
    )


def _ms(seconds: float) -> int:
    return round(seconds * 1000)


def _workers(job: JobState, soft: SoftState, telemetry: JobTelemetry, now_s: float) -> list[pb.WorkerState]:
    order = [*(worker for worker in job.ranks if worker in job.members), *job.members]
    found = [_worker(job, job.members[worker_id], soft, telemetry, now_s) for worker_id in dict.fromkeys(order)]
    for worker_id, incarnation in job.evicted.items():
        cause = telemetry.departed.get(worker_id, "was gone before this coordinator took over")
        liveness = pb.LIVENESS_LEFT if cause.startswith(LEFT) else pb.LIVENESS_LOST
        found.append(
            pb.WorkerState(worker_id=worker_id, incarnation=incarnation, liveness=liveness, liveness_reason=cause)
        )
    return found


def _worker(job: JobState, member: Member, soft: SoftState, telemetry: JobTelemetry, now_s: float) -> pb.WorkerState:
    worker_id = member.worker.worker_id
    seen_s = soft.seen_s.get(worker_id, now_s)
    liveness, reason = _liveness(job, soft, worker_id, now_s - seen_s)
    ip, port = address(member.worker)
    held = (ledger.held.get(worker_id, ()) for dataset in job.datasets.values() for ledger in dataset.epochs.values())
    state = pb.WorkerState(
        worker_id=worker_id,
        incarnation=member.worker.incarnation,
        liveness=liveness,
        liveness_reason=reason,
        ip=ip,
        port=port,
        hostname=member.worker.hostname,
        gpu_count=member.worker.gpus,
        weight=member.worker.weight * member.share,
        silent_ms=max(0, _ms(now_s - seen_s)),
        attached=worker_id in telemetry.streams,
        leased_shards=sum(map(len, held)),
        labels=member.worker.labels,
        sdk_version=telemetry.sdk_versions.get(worker_id, ""),
    )
    if worker_id in job.ranks:
        state.rank = job.ranks[worker_id]
    if worker_id in telemetry.steps:
        state.step = telemetry.steps[worker_id]
    heartbeat = telemetry.heartbeats.get(worker_id)
    if heartbeat is not None:
        state.status = heartbeat.status
        if heartbeat.HasField("step_time_ms"):
            state.step_time_ms = heartbeat.step_time_ms
        if heartbeat.HasField("resources"):
            state.resources.CopyFrom(heartbeat.resources)
    return state


def _liveness(job: JobState, soft: SoftState, worker_id: str, silent_s: float) -> tuple[pb.Liveness.ValueType, str]:
    if worker_id in soft.disconnected_at_s:
        return pb.LIVENESS_SUSPECT, "its stream broke"
    if silent_s < 0:
        return pb.LIVENESS_SUSPECT, "not heard from since this coordinator took over"
    if silent_s > LATE_INTERVALS * max(soft.interval_s, job.config.heartbeat_interval_s):
        return pb.LIVENESS_SUSPECT, f"silent for {silent_s:.1f} s"
    return pb.LIVENESS_ALIVE, "heard from in time"


def _dataset(found: DatasetLedger) -> pb.DatasetState:
    mode = pb.DATASET_MODE_DETERMINISTIC if found.dataset.mode is DatasetMode.DETERMINISTIC else pb.DATASET_MODE_LEASED
    return pb.DatasetState(
        dataset_id=found.dataset.dataset_id,
        mode=mode,
        num_samples=found.dataset.samples,
        num_shards=found.dataset.shards,
        open_epochs=open_epochs(found),
        finished_epochs=sorted(found.finished),
        quarantined=[
            pb.QuarantinedShard(
                shard_id=f"{found.dataset.dataset_id}/{number}/{each.shard_range.shard}",
                epoch=number,
                start_index=each.shard_range.start,
                end_index=each.shard_range.end,
                reason=each.reason,
            )
            for number, aside in sorted(_quarantined(found).items())
            for each in aside
        ],
    )


def _quarantined(found: DatasetLedger) -> dict[int, list[Quarantined]]:
    """By epoch, of finished and of open ones."""
    return found.quarantined | {number: ledger.quarantined for number, ledger in found.epochs.items()}


def _barriers(job: JobState, soft: SoftState, telemetry: JobTelemetry, now_s: float) -> list[pb.BarrierState]:
    return [
        pb.BarrierState(
            barrier_id=each.barrier_id,
            generation=job.generation,
            step=each.step,
            arrived=len(each.arrived),
            expected=each.expected or len(job.ranks),
            missing=missing_at(job, each),
            open_ms=_ms(now_s - telemetry.barrier_opened_s.get(each.barrier_id, now_s)),
        )
        for each in soft.barriers.values()
    ]


def _checkpoints(job: JobState, telemetry: JobTelemetry) -> list[pb.CheckpointState]:
    open_ones = [_collecting(job, each) for each in job.collecting.values()]
    committed = [
        pb.CheckpointState(
            manifest=manifest(each, telemetry.committed_at_s.get(each.checkpoint_id, 0.0)), committed=True
        )
        for each in job.checkpoints
    ]
    return [*reversed(open_ones), *reversed(committed)]


def _collecting(job: JobState, found: PendingCheckpoint) -> pb.CheckpointState:
    return pb.CheckpointState(
        manifest=pb.CheckpointManifest(
            checkpoint_id=found.checkpoint_id,
            step=found.step,
            parts=[part(each) for each in sorted(found.parts.values(), key=lambda each: each.rank)],
            generation=found.generation,
        ),
        missing_ranks=[rank for worker_id, rank in job.ranks.items() if worker_id not in found.parts],
    )
