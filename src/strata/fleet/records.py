"""The rows of the fleet's database as values (jobs, attempts, leases, hosts, sweeps, schedules), and what its ports
take and return.

A value that people get as it is has one shape: the messages of `wire` contain it, or begin with its fields.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import msgspec

from strata.fleet.core.amounts import UNKNOWN, Amounts, Capacity, MoreMemory, Taken
from strata.fleet.core.capability import Capability
from strata.fleet.core.goodput import AttemptTimes, LedgerEvent
from strata.fleet.core.host_status import StoredState
from strata.fleet.core.job import HELD, Cause, JobStatus
from strata.fleet.core.jobspec import JobSpec, TrainerSpec
from strata.fleet.core.lease import ASLEEP
from strata.fleet.core.ownership import Submitter
from strata.fleet.core.quota import OwnerUsage
from strata.fleet.core.requirement import RequirementClass
from strata.fleet.core.schedule import JobSchedule
from strata.fleet.core.search import SearchSweep
from strata.fleet.core.subscription import Subscription


@dataclass(frozen=True, slots=True, kw_only=True)
class ClassRow:
    id: int
    requirement: RequirementClass


class JobRecord(msgspec.Struct, frozen=True, kw_only=True):
    """What the rows of a job and the messages about it have in common."""

    id: str
    status: JobStatus
    spec: JobSpec
    epoch: int
    """The fence of what hosts write: grows with every claim, and by a leap when the database is restored. Not the
    number of an attempt."""
    attempt: int = 0
    """The number of the last attempt, from 1; 0 when no host has claimed it yet."""
    created_at_s: float
    changed_at_s: float
    not_before_s: float = 0.0
    host_id: str = ""
    """The host that holds it, or held it last."""
    reason: str = ""
    """The last decision in words: why it failed, why it is retried."""
    artifact: str = ""
    declared: bool = True
    """A manifest has it, or had it; others were submitted one by one."""
    orphaned: bool = False
    """The last manifest did not have it any more; it stays until it is cancelled."""
    waits_for: int = 0
    """How many of `spec.after` are not completed yet."""
    trainer_digest: str = ""
    """The trainer of its next attempt; of a completed job, the one that made its result. Empty: it is not known."""
    submitted_by: str = ""
    """Who queued it, as events name the caller: the key that submitted it, or that applied its manifest."""
    owner: str = ""
    """The name of the key that owns the job, so that a renewed key keeps its jobs."""
    archived: bool = False
    superseded: bool = False
    """A later job has its name, and no manifest has it any more."""
    newer: int = 0
    """How many later jobs of its project have its name: `name@2` has one. Counted in lists only."""


class JobRow(JobRecord, frozen=True, kw_only=True):
    class_id: int
    seq: int = 0
    """Grows with every job that is queued for the first time."""


class JobAttempt(msgspec.Struct, frozen=True, kw_only=True):
    attempt: int = 0
    """Its number: 1, 2, 3 … of its job."""
    epoch: int
    """The fence of what its host writes."""
    host_id: str
    claimed_at_s: float
    started_at_s: float | None = None
    ended_at_s: float | None = None
    outcome: Literal["", "completed", "failed", "retried", "lost", "cancelled", "orphan"] = ""
    cause: Cause | None = None
    error: str = ""
    artifact: str = ""
    checkpoint: str = ""
    """The artifact a later attempt may resume from."""
    facts: Mapping[str, Any] = {}
    """Recorded by the agent for the lineage: code commit, lock hash, data digest, versions."""
    trainer_digest: str = ""
    """The trainer that the host was given for this attempt."""


class AttemptRow(JobAttempt, frozen=True, kw_only=True):
    job_id: str
    taken: Taken = UNKNOWN
    """What it has of its host, or had."""


@dataclass(frozen=True, slots=True)
class JobLease:
    job_id: str
    epoch: int
    host_id: str
    expires_at_s: float
    spec: JobSpec
    trainer: TrainerSpec | None
    """The one with the digest that the job carries; None where it is not known, and the agent refuses the job."""
    checkpoint: str = ""
    """The newest checkpoint of any earlier attempt."""
    trainer_digest: str = ""
    taken: Taken = UNKNOWN
    """What the attempt has of its host: the cards it may use, and how much of the rest."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """A host requests jobs. `classes` maps the ids of the classes it may take to what a job of it takes of the host."""

    host_id: str
    claim_id: str
    classes: Mapping[int, Amounts]
    capacity: Capacity
    count: int = 1
    held_back: Mapping[int, float] = field(default_factory=dict)
    """Classes that would rather run elsewhere: of these only jobs that have waited since this time, or longer."""
    refusing: bool = False
    """The host is excluded for some jobs, so it shares no statement with other hosts."""
    idle: bool = True
    """A guess that the host holds nothing, which makes the claim cheaper if it is right."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Renewal:
    job_id: str
    epoch: int
    running: bool = False
    """The child runs: CLAIMED becomes RUNNING."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RenewalResult:
    job_id: str
    epoch: int
    verdict: Literal["held", "stale", "ended", "unknown"]
    """`stale`: another attempt has begun. `ended`: the job is terminal, by cancel or otherwise: stop the child."""
    status: JobStatus | None = None
    expires_at_s: float = 0.0
    preempt: str = ""
    """Why the attempt has to stop with a checkpoint, if it has."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RefusedJob:
    """A pending job, and the hosts that are excluded for it."""

    job_id: str
    class_id: int
    hosts: frozenset[str]

    def is_unservable(self, eligible: Collection[str]) -> bool:
        return self.hosts.issuperset(eligible)


@dataclass(frozen=True, slots=True)
class AttemptKey:
    """Identifies one attempt and its host; `epoch` is the fencing token of every write of that host."""

    host_id: str
    job_id: str
    epoch: int


@dataclass(frozen=True, slots=True, kw_only=True)
class JobFailure:
    cause: Cause
    error: str = ""
    facts: Mapping[str, Any] = field(default_factory=dict)
    memory: MoreMemory | None = None
    """What the next attempt needs; set by the hub for one that ran out of memory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JobCompletion:
    artifact: str = ""
    metrics: Mapping[str, float] = field(default_factory=dict)
    facts: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class YieldRequest:
    """The hub wants an attempt to end in order: its host saves its state and reports it with this cause."""

    cause: Literal["cancelled", "preempted"]
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerRow:
    """A job of the kind `server` that has served, and where its last attempt did so."""

    job: JobRow
    epoch: int
    """The epoch of the attempt that published the address."""
    address: str
    models: tuple[str, ...]
    """The names of its base model."""
    used_at_s: float
    """When it was published, or the last request after that."""

    @property
    def serving(self) -> bool:
        """Says whether the attempt that published the address holds the lease."""
        return self.job.status in HELD and self.job.epoch == self.epoch

    @property
    def asleep(self) -> bool:
        return self.job.status is JobStatus.CANCELLED and self.job.reason.startswith(ASLEEP)

    @property
    def state(self) -> Literal["", "serving", "asleep"]:
        """The state for people."""
        return "serving" if self.serving else "asleep" if self.asleep else ""


class HostRow(msgspec.Struct, frozen=True):
    id: str
    name: str
    capability: Capability
    registered_at_s: float
    state: StoredState = "active"
    state_reason: str = ""
    seen_at_s: float = 0.0
    """The time of `host_beat`; heartbeats touch nothing else."""
    agent_version: str = ""
    pool: str = ""
    labels: dict[str, str] = {}
    """Labels of its invitation; those of its agent's settings are in `capability`, and count for wishes only."""
    ephemeral: bool = False
    """It exists for a time only."""


class HostJob(msgspec.Struct, frozen=True):
    """A job that a host has, and the attempt there."""

    job_id: str
    label: str
    owner: str
    status: JobStatus
    epoch: int
    claimed_at_s: float
    taken: Taken
    """What it has of the host."""
    serving: bool = False
    """It is a training server, and this attempt serves."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepRow:
    """A sweep as its jobs show it."""

    project: str
    name: str
    by_status: Mapping[str, int]
    changed_at_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialRow:
    """What decides which job of a sweep is the best, without its spec: a sweep may have very many."""

    job_id: str
    status: JobStatus
    reason: str
    owner: str
    changed_at_s: float
    metrics: Mapping[str, float] = field(default_factory=dict)
    """Metrics of its completed attempt."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Counts:
    """Counts without the jobs that lists hide."""

    by_status: Mapping[str, int]
    ready: int
    hosts: int


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetCounts:
    """What the metrics show of the fleet."""

    jobs: Mapping[str, int] = field(default_factory=dict)
    ready: int = 0
    hosts: Mapping[str, int] = field(default_factory=dict)
    reservations: int = 0
    gpus: int = 0
    gpu_use: float = 0.0
    """The mean of all cards of hosts that are online, 0 to 1."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JobFilter:
    status: Sequence[JobStatus] = ()
    model: str = ""
    host_id: str = ""
    sweep: str = ""
    project: str = ""
    owner: str = ""
    label: str = ""
    """The name of the job, as people call it."""
    search: str = ""
    """A text to find in the name, owner, project, model, sweep or name of the last host, or the beginning of the id."""
    hidden: bool = True
    """Also jobs that are archived, or ended and superseded."""
    ids: Sequence[str] = ()
    """Only these; empty: all."""
    servers: bool = False
    """Only what may be a server: those whose spec has the text of that kind in it."""
    order: Literal["id", "newest", "ended"] = "id"
    """`ended`: those alone that have ended, the last one first."""
    after: str = ""
    """Paging: `cursor_of` the last row of the page before."""
    limit: int = 100

    def cursor_of(self, row: JobRow) -> str:
        """Returns where the page after this row begins."""
        if self.order == "id":
            return row.id
        return str(row.seq) if self.order == "newest" else f"{row.changed_at_s!r}:{row.seq}"


class OwnerUsages(NamedTuple):
    by_owner: Mapping[str, OwnerUsage]
    attempts: int
    """The number of attempts that were added up."""


class WaitingClass(NamedTuple):
    """The jobs of one requirement class that wait in the queue."""

    class_id: int
    jobs: int
    since_s: float
    """The time since which the first of them waits."""
    first_job: str
    """The one that was queued first."""


class LedgerJob(NamedTuple):
    created_at_s: float
    changed_at_s: float
    ended: bool
    server: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class JobLedger:
    """What the goodput of many jobs is computed from."""

    jobs: Mapping[str, LedgerJob]
    attempts: Sequence[tuple[str, AttemptTimes]]
    """Attempts with their jobs, by job and epoch."""
    events: Sequence[tuple[str, LedgerEvent]]
    whole: bool
    """There were no more attempts than `limit`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredSecret:
    """A secret without its value."""

    scope: str
    name: str
    changed_at_s: float
    changed_by: str


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredSubscription:
    owner: str
    """The owner as events name the caller."""
    name: str
    subscription: Subscription


class StoredSweep(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A sweep, the manifest that it belongs to, and for whom its jobs are queued."""

    project: str = ""
    name: str = ""
    source: str = ""
    """The file of the manifest. Empty: of no file so far."""
    sweep: SearchSweep | None
    """None: all its points are jobs of the manifest."""
    trainer: str = ""
    """The digest of the trainer that new trials get; empty: the one that its name stands for."""
    actor: str
    submitter: Submitter
    stopped: bool = False
    """It makes no more trials until it is resumed."""


class StoredSchedule(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A schedule, and for whom its runs are queued."""

    schedule: JobSchedule
    trainer: str = ""
    """The digest of the trainer that its runs get; empty: the one that its name stands for."""
    actor: str
    submitter: Submitter


@dataclass(frozen=True, slots=True)
class ScheduleRow:
    project: str
    name: str
    stored: StoredSchedule
    next_due_s: float
    paused: bool = False
    last_job: str = ""
    """The id of the last run."""
    note: str = ""
    """Why the last run was not queued, or why it is paused; empty otherwise."""


def fields_of(record: type[msgspec.Struct], row: msgspec.Struct) -> dict[str, Any]:
    """Returns the fields of `record` as a row that extends it has them, for a message that extends it too."""
    return {name: getattr(row, name) for name in record.__struct_fields__}
