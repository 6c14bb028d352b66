"""What the coordinator is told, and what it answers. Inputs are not journaled: a restart does not depend on them."""

from __future__ import annotations

from dataclasses import dataclass, field

from strata.coord.core.facts import (
    BarrierVerdict,
    CheckpointPart,
    CommandKind,
    Consumed,
    Dataset,
    Fact,
    JobConfig,
    RegisteredWorker,
)
from strata.coord.core.ledger import ShardRange
from strata.coord.core.state import CommittedCheckpoint, PendingCommand, StepProgress


@dataclass(frozen=True)
class Caller:
    """Who asks. An empty incarnation (the minimal worker) means the current one; generation 0 means the current one."""

    job: str
    worker_id: str
    incarnation: str = ""
    generation: int = 0


@dataclass(frozen=True)
class CreateJob:
    """Before any worker comes, by whoever sets the parameters. The same configuration twice is no change."""

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
    """Its program is done, as far as it knows."""


@dataclass(frozen=True)
class Heartbeat:
    """A sign of life. `failed` is a worker in ERROR: it is lost, and told to stop."""

    caller: Caller
    failed: bool = False
    acked_commands: tuple[int, ...] = ()
    progress: StepProgress | None = None
    """How far it is; None from a worker that does not count its steps."""
    read_until: tuple[tuple[int, int], ...] | None = None
    """How far it has read in its leases; None if it says nothing about that."""


@dataclass(frozen=True)
class Attached:
    caller: Caller


@dataclass(frozen=True)
class Detached:
    """The presence stream broke: suspicion, with a moment to come back."""

    caller: Caller


@dataclass(frozen=True)
class CallOpened:
    """A call of a worker is open and waits: as long as it does, the worker is there."""

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
    """Samples of a lease before `until` are consumed; None means all. A failed one is given back from there."""

    lease_id: int
    until: int | None = None
    failed: bool = False
    reason: str = ""


@dataclass(frozen=True)
class NextShards:
    """Ack what is read, ask for more.

    `held` are the leases the worker knows of: one that was granted and is not among them is granted again, because the
    answer was lost. None is the minimal worker, which does not say: asking for the next acks all it holds.
    """

    caller: Caller
    dataset_id: str
    epoch: int
    count: int = 1
    acks: tuple[Ack, ...] = ()
    held: tuple[int, ...] | None = ()
    step: int = 0


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
    """Go back to the last checkpoint, once for all who observed this generation."""

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
    """Time goes on: the silent are lost, generations form, barriers time out, the slow are noticed."""


Input = (
    CreateJob
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
    """A worker's place in its job. Generation 0: not placed yet."""

    generation: int
    rank: int
    world_size: int
    incarnation: str
    recover_first: bool = False


@dataclass(frozen=True)
class HeartbeatReply:
    """The answer to a beat."""

    generation: int
    commands: tuple[PendingCommand, ...]


@dataclass(frozen=True)
class LeasedShard:
    lease_id: int
    rest: ShardRange
    files: tuple[str, ...]


@dataclass(frozen=True)
class ShardAssignment:
    """Shards to read, or why there are none: the epoch is over, or others still read and may give something back."""

    leases: tuple[LeasedShard, ...]
    end_of_epoch: bool
    stale: tuple[int, ...]
    """Acked leases that were not this worker's any more: their samples are not counted."""


@dataclass(frozen=True)
class BarrierState:
    """No verdict: wait for the missing."""

    verdict: BarrierVerdict | None
    generation: int
    arrived: int
    expected: int
    missing: tuple[str, ...]
    """While it is open the first of them only."""


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


@dataclass(frozen=True)
class Recovery:
    """Where to go on. `checkpoint` None: from the start."""

    place: RankAssignment
    checkpoint: CommittedCheckpoint | None
    rewound: bool


@dataclass(frozen=True)
class IssuedCommand:
    """The command and who gets it; id 0: there is nobody to get it."""

    command_id: int
    workers: tuple[str, ...]


@dataclass(frozen=True)
class Done:
    """There is nothing to tell."""


Reply = (
    RankAssignment
    | HeartbeatReply
    | ShardAssignment
    | BarrierState
    | DatasetRegistration
    | CheckpointState
    | Recovery
    | IssuedCommand
    | Done
)


@dataclass(frozen=True)
class Outcome:
    """The answer to the caller, and what became true: the shell wakes those who waited for it."""

    reply: Reply
    facts: tuple[Fact, ...] = ()
