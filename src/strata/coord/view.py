"""A job as `strata gang -o json` prints it: plain frozen values of workers, datasets, barriers, checkpoints and
incidents, with the contract's field names.

The names are kept: scripts read them. New fields may be added; a test holds the schema.
"""

from __future__ import annotations

from typing import Final

import msgspec

GONE: Final = frozenset({"LOST", "LEFT"})
"""Values of `WorkerView.liveness` of workers that are no members any more."""


class GpuView(msgspec.Struct, frozen=True, kw_only=True):
    index: int
    name: str
    utilization_percent: float
    memory_used_bytes: int
    memory_total_bytes: int
    temperature_celsius: float | None = None
    power_watts: float | None = None
    error: str = ""
    """Why the device could not be read."""


class ResourcesView(msgspec.Struct, frozen=True, kw_only=True):
    cpu_percent: float
    memory_used_bytes: int
    disk_read_bytes: int
    disk_write_bytes: int
    network_rx_bytes: int
    network_tx_bytes: int
    gpu_metrics: tuple[GpuView, ...] = ()


class WorkerView(msgspec.Struct, frozen=True, kw_only=True):
    worker_id: str
    incarnation: str
    rank: int | None
    """None: no member of the generation."""
    status: str | None
    """What the worker reports, such as TRAINING; None: it has not."""
    liveness: str | None
    """ALIVE, SUSPECT, LOST or LEFT."""
    liveness_reason: str
    ip: str
    port: int
    hostname: str
    gpu_count: int
    weight: float
    silent_ms: int
    """Time since its last message."""
    attached: bool
    step: int | None
    step_time_ms: float | None
    leased_shards: int
    resources: ResourcesView | None
    labels: dict[str, str]
    sdk_version: str
    slowdown: float | None = None
    """Its step time divided by the median of the members, by computing times where they are known."""
    compute_time_ms: float | None = None
    """What it spent on a step itself, without waiting for others."""
    finding: str | None = None
    """STRAGGLER or HANG, as long as it counts as one."""
    finding_reason: str = ""

    @property
    def is_gone(self) -> bool:
        return self.liveness in GONE


class EpochView(msgspec.Struct, frozen=True, kw_only=True):
    """Progress of an epoch in shards; the four add up to all."""

    epoch: int
    done_shards: int
    leased_shards: int
    waiting_shards: int
    quarantined_shards: int


class QuarantinedView(msgspec.Struct, frozen=True, kw_only=True):
    shard_id: str
    epoch: int
    start_index: int
    end_index: int
    reason: str


class DatasetView(msgspec.Struct, frozen=True, kw_only=True):
    dataset_id: str
    mode: str | None
    num_samples: int
    num_shards: int
    open_epochs: tuple[EpochView, ...]
    finished_epochs: tuple[int, ...]
    quarantined: tuple[QuarantinedView, ...]


class BarrierView(msgspec.Struct, frozen=True, kw_only=True):
    barrier_id: str
    generation: int
    step: int
    arrived: int
    expected: int
    missing: tuple[str, ...]
    """Members that have not arrived, in order of rank."""
    open_ms: int


class PartView(msgspec.Struct, frozen=True, kw_only=True):
    rank: int
    uri: str
    size_bytes: int
    digest: str


class ManifestView(msgspec.Struct, frozen=True, kw_only=True):
    checkpoint_id: str
    step: int
    parts: tuple[PartView, ...]
    generation: int
    committed_at_unix_ms: int
    """0: not committed, or committed before this coordinator took over."""


class CheckpointView(msgspec.Struct, frozen=True, kw_only=True):
    manifest: ManifestView
    committed: bool
    missing_ranks: tuple[int, ...]
    command_id: int = 0
    """The command that it answers; 0: none."""


class IncidentView(msgspec.Struct, frozen=True, kw_only=True):
    kind: str | None
    at_unix_ms: int
    generation: int
    worker_id: str
    message: str


class CommandView(msgspec.Struct, frozen=True, kw_only=True):
    command_id: int
    kind: str | None
    arguments: dict[str, str]
    reason: str


class CommandStateView(msgspec.Struct, frozen=True, kw_only=True):
    command: CommandView
    waiting_for: tuple[str, ...]
    issued_at_unix_ms: int
    """0: before this coordinator took over."""


class RefusedCommandView(msgspec.Struct, frozen=True, kw_only=True):
    command_id: int
    reason: str


class JobView(msgspec.Struct, frozen=True, kw_only=True):
    job_id: str
    generation: int
    """0: not enough workers yet."""
    world_size: int
    leader_epoch: int
    observed_at_unix_ms: int
    workers: tuple[WorkerView, ...]
    datasets: tuple[DatasetView, ...]
    barriers: tuple[BarrierView, ...]
    checkpoints: tuple[CheckpointView, ...]
    incidents: tuple[IncidentView, ...]
    commands: tuple[CommandStateView, ...]
    training_parameters: dict[str, str]
    status: str | None
    """CREATED, RUNNING, STOPPED or FINISHED."""
    run: int
    refused_commands: tuple[RefusedCommandView, ...] = ()

    def refusal(self, command_id: int) -> str | None:
        """Says why nothing comes of a command; None: something may."""
        return next((each.reason for each in self.refused_commands if each.command_id == command_id), None)

    @property
    def members(self) -> tuple[WorkerView, ...]:
        """Members, in the generation or waiting for the next."""
        return tuple(each for each in self.workers if not each.is_gone)

    def worker(self, worker_id: str) -> WorkerView | None:
        return next((each for each in self.workers if each.worker_id == worker_id), None)

    def at_rank(self, rank: int) -> str:
        """The name of the worker with a rank; the rank itself if there is none."""
        return next((each.worker_id for each in self.workers if each.rank == rank), f"rank {rank}")


class JobSummaryView(msgspec.Struct, frozen=True, kw_only=True):
    """A job in a line, as `strata gang list` prints it."""

    job_id: str
    status: str | None
    run: int
    generation: int
    workers: int
    min_workers: int
    max_workers: int
    checkpoint_step: int | None = None
    partition: int | None = None
    leader: str = ""


class WorkerCountView(msgspec.Struct, frozen=True, kw_only=True):
    status: str | None
    liveness: str | None
    count: int


class LaneSpanView(msgspec.Struct, frozen=True, kw_only=True):
    """What a worker did from one time to another."""

    status: str
    start_unix_ms: int
    end_unix_ms: int


class WorkerLaneView(msgspec.Struct, frozen=True, kw_only=True):
    """What a worker did over the last hour."""

    worker_id: str
    spans: tuple[LaneSpanView, ...]


class GoodputView(msgspec.Struct, frozen=True, kw_only=True):
    """How the time of a run was spent, in milliseconds; the parts add up to the time since it began."""

    useful_ms: int
    waiting_ms: int
    checkpoint_ms: int
    detect_ms: int
    restart_ms: int
    rolled_back_ms: int
    phase: str
    """The part that grows now."""
    phase_since_unix_ms: int

    @property
    def share(self) -> float | None:
        """Useful time of the time with workers; None: there was none."""
        busy_ms = self.useful_ms + self.checkpoint_ms + self.detect_ms + self.restart_ms + self.rolled_back_ms
        return self.useful_ms / busy_ms if busy_ms else None


class GangEventView(msgspec.Struct, frozen=True, kw_only=True):
    """Something that happened to a job."""

    number: int
    kind: str | None
    at_unix_ms: int
    run: int
    generation: int
    workers: tuple[str, ...]
    """The workers of the event; of many only the first ones."""
    worker_count: int
    message: str
    detect_ms: int
    restart_ms: int
    rolled_back_ms: int

    @property
    def cost_ms(self) -> int:
        return self.detect_ms + self.restart_ms + self.rolled_back_ms


class GangEventsView(msgspec.Struct, frozen=True, kw_only=True):
    """A page, the latest first."""

    events: tuple[GangEventView, ...]
    next_before: int
    """Where the next page begins; 0: there is none."""


class JobPageView(msgspec.Struct, frozen=True, kw_only=True):
    """A job with some of its workers, and what is known of all of them."""

    job: JobView
    workers_total: int
    """The number of workers that match, on all pages."""
    worker_counts: tuple[WorkerCountView, ...]
    goodput: GoodputView | None
    """None from a coordinator that does not count it."""
    lanes_start_unix_ms: int | None
    """The time since which lanes are known."""
    lanes: tuple[WorkerLaneView, ...]


class GangView(JobPageView, frozen=True, kw_only=True):
    """A page of a job as a hub shows it."""

    incidents: tuple[GangEventView, ...]
    """The latest events that cost the gang time, the latest first."""


class GangsView(msgspec.Struct, frozen=True, kw_only=True):
    """The jobs of the coordinator of a hub."""

    gangs: tuple[JobSummaryView, ...]
    coordinator: str
    """Its address; empty: this hub has none."""
