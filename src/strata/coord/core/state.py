"""The coordinator's state: of each job what the facts built (`JobState`) and what this process observed (`SoftState`);
how many evicted workers, verdicts, acks, tombstones and requests it keeps; and how many heartbeats it accepts (1,000 a
second).

A snapshot holds the first and never the second: after a restart, heartbeats and calls of the workers rebuild it.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final

import msgspec

from strata.coord.core.facts import (
    BarrierVerdict,
    CheckpointPart,
    CommandKind,
    GangStatus,
    RegisteredWorker,
    StragglerFinding,
)
from strata.coord.core.hang_diagnosis import HangProbe
from strata.coord.core.history import JobHistory
from strata.coord.core.job_config import EscalationLevel, JobConfig
from strata.coord.core.ledger import DatasetLedger, DatasetPosition, Late
from strata.coord.core.picker import Picker
from strata.coord.core.placement import BucketAssignment
from strata.coord.core.step_samples import StepSample
from strata.coord.core.straggler_detection import StragglerIncident, StragglerStanding

EVICTED_KEPT: Final = 10_000
VERDICTS_KEPT: Final = 4_096
ACKS_KEPT: Final = 256
TOMBSTONES_KEPT: Final = 16_384
FENCED_KEPT: Final = 8
"""Incarnations of one worker that are over and may not come back."""
PARTED_KEPT: Final = 256
"""Workers that left and whose acks are kept, in case the same incarnation comes back."""
REQUESTS_KEPT: Final = 1_024
REFUSED_KEPT: Final = 16
REQUESTED_KEPT: Final = 100_000
"""Names of workers in all requests that are kept."""
HEARTBEATS_PER_S: Final = 1_000.0
"""Heartbeats that one coordinator accepts at most: a unary call costs it a quarter to half a millisecond."""


class GangEvent(StrEnum):
    """What changes the status of a job; `lifecycle.NEXT` says how."""

    JOIN = "a worker joins"
    EMPTY = "the last worker is gone"
    FINISH = "all data is consumed"
    RESET = "an operator resets it"
    DELETE = "an operator deletes it"


class Member(msgspec.Struct):
    worker: RegisteredWorker
    acked: list[int] = []
    """The last leases it acked, so that acks are idempotent."""
    share: float = 1.0
    """The factor of its registered weight; below 1 for a straggler."""
    level: EscalationLevel = EscalationLevel.NONE
    finding: StragglerFinding | None = None
    """Why its level is above NONE."""
    finding_reason: str = ""
    recover_first: bool = False
    """It has not requested the checkpoint to start from, and the job has progress."""


class BarrierResult(msgspec.Struct, frozen=True):
    """The result of a barrier, kept so that a repeated call gets the same reply."""

    generation: int
    barrier_id: str
    verdict: BarrierVerdict
    missing: tuple[str, ...]


class PendingCheckpoint(msgspec.Struct):
    """A checkpoint that some ranks have reported."""

    checkpoint_id: str
    generation: int
    step: int
    parts: dict[str, CheckpointPart] = {}
    read_until: dict[int, int] = {}
    late: dict[str, Late] = {}
    """What a worker consumed of each dataset after it took its part: it is not in the checkpoint."""


class CommittedCheckpoint(msgspec.Struct, frozen=True):
    """The parts of all ranks, and the position of every dataset at that step."""

    checkpoint_id: str
    generation: int
    step: int
    parts: tuple[CheckpointPart, ...]
    positions: dict[str, DatasetPosition]
    committed_at_ms: int = 0
    """0: before facts carried their time."""
    command_id: int = 0
    """The operator's command that it answers; 0: none."""


class CheckpointRequest(msgspec.Struct):
    """A checkpoint that an operator wants, and the step that the ranks are to share."""

    command_id: int
    reason: str = ""
    drain: dict[str, None] = {}
    """Workers that leave as soon as it is committed."""
    proposal: int = 0
    """The command that carries the step to the ranks."""
    generation: int = 0
    """The generation that the step was named in; 0: none was named, and any checkpoint answers the request."""
    step: int = 0
    attempts: int = 0
    agreed: bool = False
    """Every rank writes the checkpoint of this step."""
    missed: int = 0
    """How many agreed steps of this generation some rank went past."""
    drain_commands: list[int] = []


class PendingCommand(msgspec.Struct):
    command_id: int
    kind: CommandKind
    waiting: dict[str, None]
    """Workers that have not acknowledged it."""
    reason: str
    arguments: dict[str, str] = {}
    issued_at_ms: int = 0


class IssuedRequest(msgspec.Struct, frozen=True):
    """The reply to an operator's request, for when it is repeated."""

    command_id: int
    workers: tuple[str, ...]


class JobState(msgspec.Struct):
    job: str
    config: JobConfig
    status: GangStatus = GangStatus.RUNNING
    run: int = 1
    """The number of this run of the job; an operator's reset begins the next."""
    members: dict[str, Member] = {}
    evicted: dict[str, str] = {}
    """The last incarnation of workers that are no members any more, oldest first."""
    parted: dict[str, list[int]] = {}
    """The last leases that the latest of them acked."""
    fenced: dict[str, list[str]] = {}
    """The incarnations of each worker that another one has followed: they may not come back and replace it."""
    stopping: dict[str, str] = {}
    """Members that got a STOP command as stragglers, and why."""
    reweighted: int = 0
    """How often a member's share changed."""
    generation: int = 0
    ranks: dict[str, int] = {}
    """The members of the generation and their ranks, in order of rank."""
    listed: list[str] = []
    """Members of the next generation, while the facts that form it are being read."""
    settled: bool = True
    """Whether no member has joined or left since the generation was formed."""
    recovered_generation: int = 0
    """The generation that began with the last recovery; workers that observed an older one share its rewind."""
    recovered_to: str | None = None
    datasets: dict[str, DatasetLedger] = {}
    verdicts: dict[tuple[int, str], BarrierResult] = {}
    """The verdicts by generation and id; oldest first."""
    collecting: dict[str, PendingCheckpoint] = {}
    checkpoints: list[CommittedCheckpoint] = []
    checkpoint_request: CheckpointRequest | None = None
    draining: dict[str, None] = {}
    """Members that leave before the next generation forms."""
    tombstones: dict[str, int] = {}
    """Parts of checkpoints that are kept no longer, and the ranks that wrote them; oldest first."""
    tombstone_steps: dict[str, int] = {}
    """The step of each tombstone. Until a checkpoint of it or a later one is committed, it may be written again."""
    gc_version: int = 0
    """How often tombstones were added."""
    commands: dict[int, PendingCommand] = {}
    last_command: int = 0
    requests: dict[str, IssuedRequest] = {}
    """The requests by the operators' own ids; oldest first."""
    refused: dict[int, str] = {}
    """Why nothing came of a command, by command; oldest first."""
    history: JobHistory = msgspec.field(default_factory=JobHistory)
    leader_epoch: int = 0
    """The last leader that the history has."""

    @property
    def has_progress(self) -> bool:
        """Says whether a process that starts with empty state would miss something."""
        begun = any(dataset.finished or dataset.epochs for dataset in self.datasets.values())
        return begun or bool(self.checkpoints)

    def checkpoint(self, checkpoint_id: str | None) -> CommittedCheckpoint | None:
        return next((each for each in self.checkpoints if each.checkpoint_id == checkpoint_id), None)


@dataclass
class OpenBarrier:
    barrier_id: str
    expected: int
    """How many workers have to arrive; 0 means all of the generation."""
    step: int
    deadline_s: float
    opened_s: float = 0.0
    arrived: dict[str, None] = field(default_factory=dict)
    missing: dict[str, None] = field(default_factory=dict)
    """Members of the generation that have not arrived, in order of rank."""


class StepProgress(msgspec.Struct, frozen=True, gc=False):
    """A worker's progress as its heartbeat reports it."""

    step: int
    step_time_s: float | None = None
    busy: bool = False
    """The worker does something else than training."""
    generation: int = 0
    """The generation it works in; 0: the current one."""
    compute_s: tuple[float, ...] = ()
    """What it spent on each of its last steps itself, newest last; empty: it does not report that."""
    checkpoint_step: int | None = None
    """The step that it goes past only when all ranks have agreed on it; 0: none. None: its program does not agree."""
    asked_step: int = 0
    """The last step after which its program asked whether a checkpoint is due."""
    asked_stride: int = 1
    """The distance of that step from the one before."""


@dataclass
class StragglerState:
    """The step times of one generation's workers, as far as their heartbeats report them."""

    generation: int = 0
    progress: dict[str, tuple[StepProgress, float]] = field(default_factory=dict)
    """Reports since the last evaluation, and when they arrived."""
    samples: dict[str, StepSample] = field(default_factory=dict)
    standings: dict[str, StragglerStanding] = field(default_factory=dict)
    incidents: tuple[StragglerIncident, ...] = ()
    """What the evaluation at the last tick found; the decision about that tick makes facts of it."""
    judged_s: float | None = None
    idle: set[str] = field(default_factory=set)
    """Workers that requested data and got none: without data they make no steps."""
    stopping_s: dict[str, float] = field(default_factory=dict)
    """The time since which this process waits for a worker to stop."""
    stopped_at: dict[str, int] = field(default_factory=dict)
    """The step at which a worker that is to stop was found to hang."""
    probe: HangProbe | None = None
    """Put to all members while none of them makes a step."""
    probes: int = 0
    """How many this process has put."""


@dataclass
class SoftState:
    """What this process observed of a job. `observe` alone writes it. Times are this process's monotonic seconds."""

    seen_s: OrderedDict[str, float] = field(default_factory=OrderedDict)
    """When each member was last heard from; longest silent first."""
    disconnected_at_s: dict[str, float] = field(default_factory=dict)
    """The time since which a member's presence stream is broken."""
    attached: set[str] = field(default_factory=set)
    """Members whose presence stream is open: their processes answer the pings of its connection."""
    grace_granted: bool = False
    """Whether the members known from the journal were given time to send their first heartbeat to this process."""
    not_yet_seen: dict[str, None] = field(default_factory=dict)
    """Those of them that have sent none. Their `seen_s` lies in the future, out of order: they are checked apart."""
    unsettled_s: float | None = None
    """The time since which members have been joining and leaving without a generation being formed."""
    changed_s: float | None = None
    """When the members last changed since the generation was formed."""
    barriers: dict[str, OpenBarrier] = field(default_factory=dict)
    open_calls: dict[tuple[str, str], int] = field(default_factory=dict)
    """The calls of each worker and incarnation that wait here: as long as one does, the worker is alive."""
    interval_s: float = 0.0
    """The heartbeat interval that replies name."""
    old_interval: tuple[float, float] = (0.0, 0.0)
    """A longer interval that earlier replies named, and until when workers may still use it."""
    progress: dict[str, StepProgress] = field(default_factory=dict)
    """The last report of steps of each worker."""
    read_until: dict[str, tuple[tuple[int, int], ...]] = field(default_factory=dict)
    """How far each worker last reported to have read in its leases."""
    stragglers: StragglerState = field(default_factory=StragglerState)
    unmatched_s: float | None = None
    """The time since which the ranks share no step that a requested checkpoint could be of."""


@dataclass(frozen=True)
class BucketPlacement:
    version: tuple[int, int]
    """The generation, and how often shares had changed."""
    assignment: BucketAssignment
    by_worker: dict[str, list[int]]


@dataclass(frozen=True)
class GarbageParts:
    """Tombstones by the rank that may delete them."""

    version: tuple[int, int, int]
    """The generation, `JobState.gc_version`, and the last committed step."""
    by_rank: dict[int, list[str]]


@dataclass
class JobIndexes:
    """Lookups computed from `JobState` and cached: to fill one, or to drop it, changes no decision."""

    pickers: dict[tuple[str, int], Picker] = field(default_factory=dict)
    file_ends: dict[str, list[int]] = field(default_factory=dict)
    """The sample after the last one of each file, by dataset."""
    placements: dict[int, BucketPlacement] = field(default_factory=dict)
    """The owner of each bucket, by number of buckets. Affinity only: the ledger decides who reads what."""
    missing_ranks: dict[tuple[int, str], dict[int, None]] = field(default_factory=dict)
    """The ranks that have not reported a pending checkpoint, by generation and checkpoint; only to name them."""
    garbage: GarbageParts | None = None


@dataclass
class CoordState:
    """One partition: its jobs, what this process observed of them, and the counter of its lease ids."""

    jobs: dict[str, JobState] = field(default_factory=dict)
    soft: dict[str, SoftState] = field(default_factory=dict)
    indexes: dict[str, JobIndexes] = field(default_factory=dict)
    leader_epoch: int = 0
    leases_given: int = 0
    """Lease ids that this process has used; `observe` counts them."""
    ticked_s: float | None = None
    wall_offset_s: float | None = None
    """What to add to this process's monotonic seconds for the time of day; None: facts get no time."""
    heartbeats_per_s: float = HEARTBEATS_PER_S
    fleet: int = 0
    """Members of all jobs, as counted at the last tick."""

    def soft_of(self, job: str) -> SoftState:
        """Returns the soft state for reading: a job that nothing was observed of has an empty one."""
        return self.soft.get(job) or SoftState()

    def writable_soft(self, job: str) -> SoftState:
        """Returns the soft state that `observe` alone may change."""
        soft = self.soft.get(job)
        if soft is None:
            soft = self.soft[job] = SoftState()
        return soft

    def indexes_of(self, job: str) -> JobIndexes:
        indexes = self.indexes.get(job)
        if indexes is None:
            indexes = self.indexes[job] = JobIndexes()
        return indexes
