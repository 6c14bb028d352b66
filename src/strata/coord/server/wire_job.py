"""Converts a job to the messages that operators see: counts and order of workers, how late a heartbeat makes a worker
`LATE`, slowdown, incidents, datasets, barriers, checkpoints and goodput.

A large job has too many workers to describe them in one turn of the loop: callers describe them in slices.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median
from typing import Final

import msgspec

from strata.base.errors import Code, StrataError
from strata.coord.core import goodput
from strata.coord.core.barriers import missing_at
from strata.coord.core.facts import DatasetMode, GangStatus, StragglerFinding
from strata.coord.core.goodput import GoodputPhase
from strata.coord.core.history import INCIDENTS, LEFT, HistoryEvent, HistoryKind
from strata.coord.core.job_config import JobConfig
from strata.coord.core.ledger import DatasetLedger, Quarantined
from strata.coord.core.state import CoordState, JobState, Member, PendingCheckpoint, SoftState
from strata.coord.pb import coordinator_pb2 as pb
from strata.coord.server.telemetry import JobTelemetry
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


EVENT_KIND_OF: Final[Mapping[HistoryKind, pb.EventKind.ValueType]] = {
    kind: pb.EventKind.Value(f"EVENT_KIND_{kind.name}") for kind in HistoryKind
}
FINDING_KIND_OF: Final[Mapping[StragglerFinding, pb.IncidentKind.ValueType]] = {
    StragglerFinding.SLOW: pb.INCIDENT_KIND_STRAGGLER,
    StragglerFinding.HUNG: pb.INCIDENT_KIND_HANG,
}
_INCIDENT_KIND_OF: Final[Mapping[HistoryKind, pb.IncidentKind.ValueType]] = {
    kind: pb.IncidentKind.Value(f"INCIDENT_KIND_{kind.name}") for kind in INCIDENTS
}


def job_header(
    state: CoordState, job_id: str, telemetry: JobTelemetry, now_s: float, wall_s: float, limit: int
) -> pb.JobState:
    """Everything but workers and checkpoints. `limit`: how many incidents; 0: as many as is useful."""
    job, soft = state.jobs[job_id], state.soft_of(job_id)
    limit = limit or HISTORY
    return pb.JobState(
        job_id=job.job,
        generation=telemetry.generation,
        world_size=len(job.ranks),
        leader_epoch=state.leader_epoch,
        observed_at_unix_ms=_ms(wall_s),
        datasets=[_dataset(each) for each in job.datasets.values()],
        barriers=_barriers(job, soft, now_s),
        incidents=_incidents(job, limit),
        commands=[
            pb.CommandState(
                command=command(each),
                waiting_for=each.waiting,
                issued_at_unix_ms=each.issued_at_ms,
            )
            for each in job.commands.values()
        ],
        training_parameters=job.config.parameters,
        status=STATUS_OF[job.status],
        run=job.run,
        refused_commands=[
            pb.RefusedCommand(command_id=command_id, reason=reason)
            for command_id, reason in reversed(job.refused.items())
        ],
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


def created_config(request: pb.CreateJobRequest, default: JobConfig) -> JobConfig:
    """0 is the default, except for the grace period, which may be 0."""
    found = _with_settings(request, default, ("reconnect_grace_ms",))
    return msgspec.structs.replace(
        found,
        min_workers=request.min_workers or default.min_workers,
        max_workers=request.max_workers or default.max_workers,
        heartbeat_interval_s=request.heartbeat_interval_ms / 1000 or default.heartbeat_interval_s,
        missed_beats=request.missed_heartbeats or default.missed_beats,
    )


def updated_config(request: pb.UpdateJobRequest, current: JobConfig) -> JobConfig:
    return _with_settings(request, current, tuple(_SETTINGS))


_SETTINGS: Final[Mapping[str, tuple[str, int]]] = {
    "min_workers": ("min_workers", 1),
    "max_workers": ("max_workers", 1),
    "heartbeat_interval_ms": ("heartbeat_interval_s", 1000),
    "missed_heartbeats": ("missed_beats", 1),
    "reconnect_grace_ms": ("reconnect_grace_s", 1000),
}
"""The setting of each field of the contract, and how many of the field's units are one of the setting's."""


def _with_settings(
    request: pb.CreateJobRequest | pb.UpdateJobRequest, config: JobConfig, fields: Sequence[str]
) -> JobConfig:
    """The configuration with the parameters of the request, and with those of the fields that it sets."""
    parameters = {**config.parameters, **request.training_parameters}
    if sum(len(key) + len(value) for key, value in parameters.items()) > MAX_ARGUMENTS:
        raise StrataError(Code.INVALID, f"the parameters of a job have at most {MAX_ARGUMENTS:,} characters")
    changed = {}
    named = {descriptor.name for descriptor, _ in request.ListFields()}
    for field in fields:
        setting, units = _SETTINGS[field]
        if field in named:
            value = getattr(request, field)
            changed[setting] = value / units if units > 1 else value
    return msgspec.structs.replace(config, parameters=parameters, **changed)


def _ms(seconds: float) -> int:
    return round(seconds * 1000)


def _incidents(job: JobState, limit: int) -> list[pb.Incident]:
    """Returns the incidents of this run, the latest first; one for each worker that an event names."""
    found: list[pb.Incident] = []
    for event in reversed(job.history.events):
        if len(found) >= limit or event.run != job.run:
            break
        if event.kind in INCIDENTS:
            # A barrier names its missing workers in its message.
            names = event.workers if event.kind is not HistoryKind.BARRIER_TIMED_OUT else ()
            found += [
                pb.Incident(
                    kind=_INCIDENT_KIND_OF[event.kind],
                    at_unix_ms=event.at_ms,
                    generation=event.generation,
                    worker_id=worker_id,
                    message=event.message,
                )
                for worker_id in reversed(names or ("",))
            ]
    return found[:limit]


def job_event(event: HistoryEvent) -> pb.JobEvent:
    return pb.JobEvent(
        number=event.number,
        kind=EVENT_KIND_OF[event.kind],
        at_unix_ms=event.at_ms,
        run=event.run,
        generation=event.generation,
        workers=event.workers,
        worker_count=event.worker_count,
        message=event.message,
        detect_ms=event.cost.detect_ms,
        restart_ms=event.cost.restart_ms,
        rolled_back_ms=event.cost.rolled_back_ms,
    )


def job_goodput(job: JobState, wall_s: float) -> pb.Goodput:
    ledger = job.history.ledger
    parts = goodput.parts_at(ledger, _ms(wall_s))
    return pb.Goodput(
        useful_ms=parts[GoodputPhase.USEFUL],
        waiting_ms=parts[GoodputPhase.WAITING],
        checkpoint_ms=parts[GoodputPhase.CHECKPOINT],
        detect_ms=parts[GoodputPhase.DETECT],
        restart_ms=parts[GoodputPhase.RESTART],
        rolled_back_ms=parts[GoodputPhase.ROLLED_BACK],
        phase=ledger.phase.name,
        phase_since_unix_ms=ledger.entered_ms,
    )


def worker_order(job: JobState) -> list[str]:
    """Members in order of rank, then those that wait, then those that are gone."""
    ranked = (worker for worker in job.ranks if worker in job.members)
    return list(dict.fromkeys((*ranked, *job.members, *job.evicted)))


def worker_counts(counts: Mapping[tuple[int, int], int]) -> list[pb.WorkerCount]:
    """Members by status and liveness."""
    return [
        pb.WorkerCount(status=pb.WorkerStatus.ValueType(status), liveness=pb.Liveness.ValueType(liveness), count=count)
        for (status, liveness), count in sorted(counts.items())
    ]


def median_step_ms(job: JobState, telemetry: JobTelemetry) -> float | None:
    times = [
        own_ms
        for worker_id in job.members
        if (heartbeat := telemetry.heartbeats.get(worker_id)) is not None
        and (own_ms := own_step_ms(heartbeat)) is not None
    ]
    return median(times) if times else None


def own_step_ms(heartbeat: pb.HeartbeatRequest) -> float | None:
    """Returns what the worker itself takes for a step; ranks that wait for each other have equal step times."""
    if heartbeat.compute_times_ms:
        return median(heartbeat.compute_times_ms)
    return heartbeat.step_time_ms if heartbeat.HasField("step_time_ms") else None


def slowdown(telemetry: JobTelemetry, worker_id: str, typical_ms: float | None) -> float | None:
    heartbeat = telemetry.heartbeats.get(worker_id)
    own_ms = own_step_ms(heartbeat) if heartbeat is not None else None
    return own_ms / typical_ms if own_ms is not None and typical_ms else None


def worker_state(
    job: JobState,
    soft: SoftState,
    telemetry: JobTelemetry,
    worker_id: str,
    now_s: float,
    typical_ms: float | None = None,
) -> pb.WorkerState:
    """A member, or one that is gone."""
    member = job.members.get(worker_id)
    if member is not None:
        return _member(job, member, soft, telemetry, now_s, typical_ms)
    cause = telemetry.departed.get(worker_id, "was gone before this coordinator took over")
    liveness = pb.LIVENESS_LEFT if cause.startswith(LEFT) else pb.LIVENESS_LOST
    incarnation = job.evicted.get(worker_id, "")
    return pb.WorkerState(worker_id=worker_id, incarnation=incarnation, liveness=liveness, liveness_reason=cause)


def _member(
    job: JobState, member: Member, soft: SoftState, telemetry: JobTelemetry, now_s: float, typical_ms: float | None
) -> pb.WorkerState:
    worker_id = member.worker.worker_id
    seen_s = soft.seen_s.get(worker_id, now_s)
    liveness, reason = worker_liveness(job, soft, worker_id, now_s)
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
    finding = current_finding(member, soft)
    if finding is not None:
        state.finding, state.finding_reason = FINDING_KIND_OF[finding], member.finding_reason
    if worker_id in job.ranks:
        state.rank = job.ranks[worker_id]
    if worker_id in telemetry.steps:
        state.step = telemetry.steps[worker_id]
    heartbeat = telemetry.heartbeats.get(worker_id)
    if heartbeat is not None:
        state.status = heartbeat.status
        if heartbeat.HasField("step_time_ms"):
            state.step_time_ms = heartbeat.step_time_ms
        if heartbeat.compute_times_ms:
            state.compute_time_ms = median(heartbeat.compute_times_ms)
        if heartbeat.HasField("resources"):
            state.resources.CopyFrom(heartbeat.resources)
        slow = slowdown(telemetry, worker_id, typical_ms)
        if slow is not None:
            state.slowdown = slow
    return state


def current_finding(member: Member, soft: SoftState) -> StragglerFinding | None:
    """Returns what the worker counts as. One that hung and makes steps again hangs no more, whatever its level still
    is."""
    standing = soft.stragglers.standings.get(member.worker.worker_id)
    moves_again = standing is not None and standing.finding is not StragglerFinding.HUNG
    return None if member.finding is StragglerFinding.HUNG and moves_again else member.finding


def worker_liveness(job: JobState, soft: SoftState, worker_id: str, now_s: float) -> tuple[pb.Liveness.ValueType, str]:
    silent_s = now_s - soft.seen_s.get(worker_id, now_s)
    if worker_id in soft.disconnected_at_s:
        return pb.LIVENESS_SUSPECT, "its stream broke"
    if silent_s < 0:
        return pb.LIVENESS_SUSPECT, "not heard from since this coordinator took over"
    if silent_s > LATE_INTERVALS * max(soft.interval_s, job.config.heartbeat_interval_s):
        alive = ", but its process answers pings" if worker_id in soft.attached else ""
        return pb.LIVENESS_SUSPECT, f"silent for {silent_s:.1f} s{alive}"
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
    """Returns the quarantined ranges of each epoch, of finished and of open ones."""
    return found.quarantined | {number: ledger.quarantined for number, ledger in found.epochs.items()}


def _barriers(job: JobState, soft: SoftState, now_s: float) -> list[pb.BarrierState]:
    return [
        pb.BarrierState(
            barrier_id=each.barrier_id,
            generation=job.generation,
            step=each.step,
            arrived=len(each.arrived),
            expected=each.expected or len(job.ranks),
            missing=missing_at(job, each),
            open_ms=_ms(now_s - each.opened_s),
        )
        for each in soft.barriers.values()
    ]


def checkpoint_states(job: JobState, limit: int) -> list[pb.CheckpointState]:
    """The latest first. Each has a part for every rank, so a large job makes it only when one changed."""
    open_ones = [_collecting(job, each) for each in job.collecting.values()]
    committed = [
        pb.CheckpointState(manifest=manifest(each), committed=True, command_id=each.command_id)
        for each in job.checkpoints
    ]
    return [*reversed(open_ones), *reversed(committed)][: limit or HISTORY]


def checkpoint_key(job: JobState) -> object:
    """Changes with `checkpoint_states`."""
    collecting = tuple((name, len(each.parts)) for name, each in job.collecting.items())
    return job.generation, tuple(each.checkpoint_id for each in job.checkpoints), collecting


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
