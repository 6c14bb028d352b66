"""The requests that the core decides about and its replies, as types, and how many missing workers a reply names. They
are not journaled.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

from strata.coord.core.facts import (
    BarrierVerdict,
    CheckpointPart,
    CommandKind,
    Consumed,
    Dataset,
    Fact,
    RegisteredWorker,
)
from strata.coord.core.hang_diagnosis import HangReport
from strata.coord.core.job_config import JobConfig
from strata.coord.core.ledger import ShardRange
from strata.coord.core.state import CommittedCheckpoint, PendingCommand, StepProgress

MISSING_NAMED: Final = 64
"""Workers or ranks that a reply names: ten thousand replies with all the others would hold a hundred million names."""


@dataclass(frozen=True)
class Caller:
    """The calling worker. An empty incarnation (the minimal worker) and generation 0 mean the current ones."""

    job: str
    worker_id: str
    incarnation: str = ""
    generation: int = 0


@dataclass(frozen=True)
class CreateJob:
    """Creates a job before any worker joins. Idempotent: the same configuration twice is no change."""

    job: str
    config: JobConfig


@dataclass(frozen=True)
class UpdateJob:
    """An operator changes settings of a job, also while it runs. The same configuration twice is no change."""

    job: str
    config: JobConfig


@dataclass(frozen=True)
class Register:
    job: str
    worker: RegisteredWorker


@dataclass(frozen=True)
class Leave:
    caller: Caller
    cause: str = "left"
    finished: bool = False
    """The worker's program reports that it is done."""


@dataclass(frozen=True)
class Heartbeat:
    """A worker reports that it is alive. `failed`: it is in ERROR, is evicted and gets a STOP command."""

    caller: Caller
    failed: bool = False
    acked_commands: tuple[int, ...] = ()
    progress: StepProgress | None = None
    """None from a worker that does not count its steps."""
    read_until: tuple[tuple[int, int], ...] | None = None
    """How far the worker has read in each lease; None if it does not report that. None if it does not report that."""
    hang_report: tuple[int, HangReport] | None = None
    """The number of a probe and the report."""


@dataclass(frozen=True)
class Attached:
    caller: Caller


@dataclass(frozen=True)
class Detached:
    """The presence stream broke: the worker is suspect and has a moment to reconnect."""

    caller: Caller
    suspect: bool = True
    """False: the process that forwarded the stream may have broken it; heartbeats tell whether the worker lives."""


@dataclass(frozen=True)
class CallOpened:
    """A call of a worker waits here: as long as it does, the worker is alive."""

    caller: Caller


@dataclass(frozen=True)
class CallClosed:
    """An open call has ended, for whatever reason."""

    caller: Caller


@dataclass(frozen=True)
class RegisterDataset:
    caller: Caller
    dataset: Dataset


@dataclass(frozen=True)
class Ack:
    """Samples of a lease before `until` are consumed; None means all. A failed lease is returned from there on.

    One that is `returned` without a failure was not begun from there on: another worker may be faster.
    """

    lease_id: int
    until: int | None = None
    failed: bool = False
    reason: str = ""
    returned: bool = False


@dataclass(frozen=True)
class NextShards:
    """Ack what is read and lease more.

    `held` are the leases that the worker knows of: one that was granted and is not among them is granted again, because
    the reply was lost. None is the minimal worker, which does not report them: its request acks all that it holds.
    """

    caller: Caller
    dataset_id: str
    data_epoch: int
    count: int = 1
    acks: tuple[Ack, ...] = ()
    held: tuple[int, ...] | None = ()
    step: int = 0
    leaving: bool = False
    """The last acks of a worker count also while members join or leave: its leases are its own until it has left."""


@dataclass(frozen=True)
class ArriveAtBarrier:
    caller: Caller
    barrier_id: str
    step: int = 0
    expected: int = 0
    timeout_s: float | None = None


@dataclass(frozen=True)
class ReportCheckpoint:
    caller: Caller
    checkpoint_id: str
    step: int
    part: CheckpointPart
    consumed: tuple[Consumed, ...] = ()


@dataclass(frozen=True)
class RequestRecovery:
    """Go back to the last checkpoint, once for all workers that observed this generation."""

    caller: Caller
    observed_generation: int
    bad_checkpoint_id: str | None = None


@dataclass(frozen=True)
class IssueCommand:
    """An operator's command, to some workers or (none named) to all. The same request id twice is one command."""

    job: str
    kind: CommandKind
    workers: tuple[str, ...] = ()
    reason: str = ""
    arguments: dict[str, str] = field(default_factory=dict)
    request_id: str = ""


@dataclass(frozen=True)
class ResetJob:
    """An operator wants another run, from the beginning. `run` is the one that ends; 0: the current one."""

    job: str
    run: int = 0


@dataclass(frozen=True)
class DeleteJob:
    job: str


@dataclass(frozen=True)
class Tick:
    """Time passes: silent members are evicted, generations form, barriers time out, stragglers are found."""

    wall_s: float | None = None
    """The time of day, for the history; None: unknown."""


Input = (
    CreateJob
    | UpdateJob
    | Register
    | Leave
    | Heartbeat
    | Attached
    | Detached
    | CallOpened
    | CallClosed
    | RegisterDataset
    | NextShards
    | ArriveAtBarrier
    | ReportCheckpoint
    | RequestRecovery
    | IssueCommand
    | ResetJob
    | DeleteJob
    | Tick
)


@dataclass(frozen=True)
class RankAssignment:
    """A worker's rank in a generation. Generation 0: it has no rank yet."""

    generation: int
    rank: int
    world_size: int
    incarnation: str
    recover_first: bool = False


@dataclass(frozen=True)
class HeartbeatReply:
    """The reply to a heartbeat."""

    generation: int
    commands: tuple[PendingCommand, ...]


@dataclass(frozen=True)
class LeasedShard:
    lease_id: int
    shard_range: ShardRange
    files: tuple[str, ...]


@dataclass(frozen=True)
class ShardAssignment:
    """Leased shards, or why there are none: the epoch is over, or other workers still read and may return some."""

    leases: tuple[LeasedShard, ...]
    end_of_epoch: bool
    stale: tuple[int, ...]
    """Acked leases that were not this worker's any more: their samples are not counted."""


@dataclass(frozen=True)
class BarrierState:
    """No verdict: wait for the missing workers."""

    verdict: BarrierVerdict | None
    generation: int
    arrived: int
    expected: int
    missing: tuple[str, ...]
    """While the barrier is open, the first of them only."""


@dataclass(frozen=True)
class DatasetRegistration:
    created: bool
    shards: int


@dataclass(frozen=True)
class CheckpointState:
    committed: bool
    missing_ranks: tuple[int, ...]
    tombstones: tuple[str, ...]
    """Old parts that the caller may delete: those of its rank, and its share of those of ranks that are no more."""
    generation_ends: bool = False
    """The checkpoint is committed, and the generation goes no further than that."""
    drain: bool = False
    """The caller leaves now."""


@dataclass(frozen=True)
class Recovery:
    """Where to resume. `checkpoint` None: from the start."""

    place: RankAssignment
    checkpoint: CommittedCheckpoint | None
    rewound: bool


@dataclass(frozen=True)
class IssuedCommand:
    """The command and its workers; id 0: the job has no worker."""

    command_id: int
    workers: tuple[str, ...]


@dataclass(frozen=True)
class NoContent:
    """The reply has no content."""


Reply = (
    RankAssignment
    | HeartbeatReply
    | ShardAssignment
    | BarrierState
    | DatasetRegistration
    | CheckpointState
    | Recovery
    | IssuedCommand
    | NoContent
)


@dataclass(frozen=True)
class Outcome:
    """The reply to the caller, and the facts: the server notifies the calls that wait for them."""

    reply: Reply
    facts: tuple[Fact, ...] = ()
