"""The facts that the coordinator journals, and the types in them: datasets (default number of buckets), barrier
verdicts and the time-out message, kinds of commands, statuses of a job, how many workers a message names
(`WORKERS_NAMED`).

A fact holds what was decided, not why: to replay it needs no clock and no rule of the version that decided.
New kinds and new fields with defaults may be added; a field never changes its meaning. `at_ms` is the leader's time of
day in milliseconds since 1970, for the history of the job alone; 0: the fact is no part of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum, StrEnum
from typing import Final, TypeGuard, get_args

import msgspec

from strata.coord.core.job_config import EscalationLevel, JobConfig

DEFAULT_BUCKETS: Final = 4096
WORKERS_NAMED: Final = 32
"""Workers that an event or a message names; of more it has the number."""


class DatasetMode(IntEnum):
    """How a dataset is handed out."""

    LEASED = 1
    """Shards are leased to the workers that request them: elastic, and no straggler delays the others."""
    DETERMINISTIC = 2
    """A pure function of seed, step, rank and world size: the same global batches for any world size."""


class BarrierVerdict(IntEnum):
    """How a barrier ended."""

    RELEASED = 1
    MEMBERSHIP_CHANGED = 2
    TIMED_OUT = 3


def barrier_timeout_message(barrier_id: str, missing: Sequence[str]) -> str:
    """The same words for the callers that waited and for the history of the job."""
    names = ", ".join((*missing[:WORKERS_NAMED], *(["…"] if len(missing) > WORKERS_NAMED else []))) or "none"
    return f"barrier {barrier_id!r} timed out; missing: {names}"


class CommandKind(IntEnum):
    """A command to a worker."""

    STOP = 1
    REBALANCE = 2
    CHECKPOINT_NOW = 3
    RELOAD = 4
    DRAIN = 5


IF_HUNG: Final = "if_hung"
"""An argument of STOP: what a worker does whose training thread does not move."""
KILL: Final = "kill"
"""It ends its process: only then the ranks that wait for it in a collective go on."""


class GangStatus(StrEnum):
    """Where a job is in its life cycle."""

    CREATED = "created"
    """No worker of this run has joined."""
    RUNNING = "running"
    STOPPED = "stopped"
    """All workers have left, and the run is not finished: workers that join next recover first."""
    FINISHED = "finished"
    """All data is consumed and the last worker has left: no worker joins before a reset."""
    DELETED = "deleted"


class StragglerFinding(StrEnum):
    """How a worker's steps compare with those of its job."""

    FINE = "fine"
    SLOW = "slow"
    HUNG = "hung"


def nodes_job(job: str) -> str:
    """The job whose members are the launchers of a job's workers, one on each host. A token of `job` is for both."""
    return f"{job}/nodes"


class DataFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    path: str
    samples: int


class Dataset(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A definition; two equal ones are the same dataset."""

    dataset_id: str
    samples: int
    shard_size: int
    files: tuple[DataFile, ...] = ()
    mode: DatasetMode = DatasetMode.LEASED
    seed: int = 0
    shuffle: bool = True
    buckets: int = DEFAULT_BUCKETS
    global_batch: int = 1
    """Shards that all workers together take in one step of a deterministic dataset."""

    @property
    def shards(self) -> int:
        return -(-self.samples // self.shard_size)

    def bounds(self, shard: int) -> tuple[int, int]:
        """First sample of a shard, and the one after its last."""
        start = shard * self.shard_size
        return start, min(start + self.shard_size, self.samples)


class RegisteredWorker(msgspec.Struct, frozen=True, kw_only=True):
    """One incarnation of a worker, as it registered."""

    worker_id: str
    incarnation: str
    address: str = ""
    hostname: str = ""
    gpus: int = 0
    weight: float = 1.0
    labels: dict[str, str] = {}
    elastic: bool = False
    """Its results survive it: it needs no checkpoint to continue at the ledger's position."""
    expected_rank: int | None = None
    """The rank that its launcher gave it; None: any."""


class Grant(msgspec.Struct, frozen=True, array_like=True):
    """One leased range of samples. `fresh` ones come from their bucket, others were returned before."""

    lease_id: int
    shard: int
    start: int
    end: int
    fresh: bool


class Consumed(msgspec.Struct, frozen=True, array_like=True):
    """How far a worker had read in a lease when it took its part of a checkpoint."""

    dataset_id: str
    epoch: int
    lease_id: int
    until: int


class CheckpointPart(msgspec.Struct, frozen=True):
    """What one rank wrote."""

    rank: int
    uri: str
    size: int
    digest: str


# A fact names its job first.


class JobCreated(msgspec.Struct, frozen=True, tag=True):
    job: str
    config: JobConfig
    at_ms: int = 0
    leader_epoch: int = 0
    """The epoch of the leader that created it; 0: not recorded. 0: not recorded."""


class JobConfigured(msgspec.Struct, frozen=True, tag=True):
    """An operator changed the settings of the job."""

    job: str
    config: JobConfig


class JobFinished(msgspec.Struct, frozen=True, tag=True):
    """All data of the run is consumed, and its last worker has left."""

    job: str
    at_ms: int = 0


class JobReset(msgspec.Struct, frozen=True, tag=True):
    """The next run begins with no data consumed and no checkpoint. The generation goes on: fencing outlives runs."""

    job: str
    run: int
    at_ms: int = 0


class LeaderChanged(msgspec.Struct, frozen=True, tag=True):
    """A coordinator took over a job that has members."""

    job: str
    leader_epoch: int
    at_ms: int = 0


class JobDeleted(msgspec.Struct, frozen=True, tag=True):
    job: str


class WorkerJoined(msgspec.Struct, frozen=True, tag=True):
    job: str
    worker: RegisteredWorker
    recover_first: bool = False
    """The job has progress: the worker gets no shard before it knows which checkpoint to start from."""
    at_ms: int = 0


class WorkerLost(msgspec.Struct, frozen=True, tag=True):
    job: str
    worker_id: str
    incarnation: str
    cause: str
    at_ms: int = 0
    silent_ms: int = 0
    """How long nothing had been heard from it."""


class WorkerJudged(msgspec.Struct, frozen=True, tag=True):
    """A straggler moved to another level of escalation; its share of the data follows."""

    job: str
    worker_id: str
    finding: StragglerFinding
    level: EscalationLevel
    weight: float
    """What its registered weight is multiplied with from now on."""
    reason: str
    at_ms: int = 0
    ends_itself: bool = False
    """Set at STOP: the worker ends its own process if it still hangs then; it is not evicted as one that does not
    stop."""


class RanksListed(msgspec.Struct, frozen=True, tag=True):
    """Members of the generation that the next facts form, in order of rank: too many for one fact."""

    job: str
    members: tuple[str, ...]


class GenerationFormed(msgspec.Struct, frozen=True, tag=True):
    """The members in order of rank, or the last of them after `RanksListed`."""

    job: str
    generation: int
    members: tuple[str, ...]
    at_ms: int = 0


class DatasetRegistered(msgspec.Struct, frozen=True, tag=True):
    job: str
    dataset: Dataset


class ShardsGranted(msgspec.Struct, frozen=True, tag=True):
    job: str
    dataset_id: str
    epoch: int
    worker_id: str
    grants: tuple[Grant, ...]


class ShardAcked(msgspec.Struct, frozen=True, tag=True):
    """Samples before `until` are consumed; at the end of the lease it is over."""

    job: str
    dataset_id: str
    epoch: int
    lease_id: int
    until: int


class ShardReturned(msgspec.Struct, frozen=True, tag=True):
    """A worker returned a lease: its unread rest is leased next, or quarantined if it has failed too often."""

    job: str
    dataset_id: str
    epoch: int
    lease_id: int
    reason: str
    quarantined: bool
    at_ms: int = 0
    failed: bool = True
    """It could not be read. False: the worker has not begun it."""


class BarrierDecided(msgspec.Struct, frozen=True, tag=True, omit_defaults=True):
    """Only one that was open for long, or timed out, has its time and is part of the history."""

    job: str
    generation: int
    barrier_id: str
    verdict: BarrierVerdict
    missing: tuple[str, ...] = ()
    at_ms: int = 0
    open_ms: int = 0
    last_arrival: str = ""
    """The worker that the others waited for."""


class CheckpointReported(msgspec.Struct, frozen=True, tag=True):
    job: str
    generation: int
    step: int
    checkpoint_id: str
    worker_id: str
    part: CheckpointPart
    consumed: tuple[Consumed, ...] = ()
    at_ms: int = 0


class CheckpointCommitted(msgspec.Struct, frozen=True, tag=True):
    """Every rank of the generation reported this step. The ledgers' position at that step follows from the reports."""

    job: str
    generation: int
    step: int
    checkpoint_id: str
    at_ms: int = 0
    command_id: int = 0
    """The operator's command that it answers; 0: none."""


class CheckpointRequested(msgspec.Struct, frozen=True, tag=True):
    """An operator wants a checkpoint. The same id again: more workers leave the job after it."""

    job: str
    command_id: int
    reason: str = ""
    drain: tuple[str, ...] = ()
    """Workers that leave as soon as it is committed."""
    drain_command: int = 0
    """The command that drains them; 0: none."""


class CheckpointStepNamed(msgspec.Struct, frozen=True, tag=True):
    """The requested checkpoint shall be of this step, if all ranks agree; the command that carries it to them.

    Step 0: of none yet, so that no rank waits for the others at the one that was named before.
    """

    job: str
    command_id: int
    generation: int
    step: int


class CheckpointAgreed(msgspec.Struct, frozen=True, tag=True):
    """Every rank holds at this step or has not reached it: all of them write the checkpoint of it."""

    job: str
    generation: int
    step: int


class CheckpointRefused(msgspec.Struct, frozen=True, tag=True):
    """The ranks share no step, or go past those that they agree on: nothing comes of the request and of its drains."""

    job: str
    command_ids: tuple[int, ...]
    reason: str
    at_ms: int = 0


class DrainBegun(msgspec.Struct, frozen=True, tag=True):
    """The checkpoint before the drain is committed: these workers leave, and the next generation waits for that."""

    job: str
    workers: tuple[str, ...]


class Recovered(msgspec.Struct, frozen=True, tag=True):
    """The job goes back to a checkpoint, or to the start; all leases are void. A new generation follows at once.

    Members get no shard before their own `WorkerRecovered`.
    """

    job: str
    checkpoint_id: str | None
    bad_checkpoint_id: str | None = None
    at_ms: int = 0


class WorkerRecovered(msgspec.Struct, frozen=True, tag=True):
    """It knows where the job went back to, and may have shards again."""

    job: str
    worker_id: str
    at_ms: int = 0


class CommandIssued(msgspec.Struct, frozen=True, tag=True):
    """A command was issued to these workers. The same id again is the same command, to more of them than one fact could
    name."""

    job: str
    command_id: int
    kind: CommandKind
    workers: tuple[str, ...]
    reason: str = ""
    arguments: dict[str, str] = {}
    request_id: str = ""
    """The operator's id of the request, which makes it idempotent."""
    at_ms: int = 0


class CommandAcked(msgspec.Struct, frozen=True, tag=True):
    job: str
    command_id: int
    worker_id: str


Fact = (
    JobCreated
    | JobConfigured
    | JobFinished
    | JobReset
    | JobDeleted
    | LeaderChanged
    | WorkerJoined
    | WorkerLost
    | WorkerJudged
    | RanksListed
    | GenerationFormed
    | DatasetRegistered
    | ShardsGranted
    | ShardAcked
    | ShardReturned
    | BarrierDecided
    | CheckpointReported
    | CheckpointCommitted
    | CheckpointRequested
    | CheckpointStepNamed
    | CheckpointAgreed
    | CheckpointRefused
    | DrainBegun
    | Recovered
    | WorkerRecovered
    | CommandIssued
    | CommandAcked
)

TimedFact = (
    JobCreated
    | JobFinished
    | JobReset
    | LeaderChanged
    | WorkerJoined
    | WorkerLost
    | WorkerJudged
    | GenerationFormed
    | ShardReturned
    | BarrierDecided
    | CheckpointReported
    | CheckpointCommitted
    | CheckpointRefused
    | Recovered
    | WorkerRecovered
    | CommandIssued
)
"""Facts that the history and the goodput of a job are made of."""
_TIMED: Final = frozenset(get_args(TimedFact))


def is_timed(fact: Fact) -> TypeGuard[TimedFact]:
    """Cheaper than `isinstance` with so many kinds: every fact is asked."""
    return type(fact) in _TIMED


NAMES_BYTES: Final = 512 << 10
"""How much of a fact names may take: half of what a journal takes as one fact."""


def parts_of(names: Sequence[str], limit: int = NAMES_BYTES) -> list[tuple[str, ...]]:
    """Names in order, cut so that each part fits into a fact; at least one part."""
    parts: list[tuple[str, ...]] = []
    start = size = 0
    for at, name in enumerate(names):
        # Five bytes are the longest head of a string.
        size += len(name.encode()) + 5
        if size > limit and at > start:
            parts.append(tuple(names[start:at]))
            start, size = at, len(name.encode()) + 5
    parts.append(tuple(names[start:]))
    return parts
