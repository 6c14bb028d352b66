"""Messages about jobs: what they are, their attempts, lists, submission, cancellation."""

from __future__ import annotations

from typing import Any, Literal

from strata.fleet.artifacts.manifest import Word
from strata.fleet.core.job import Cause, JobStatus
from strata.fleet.core.jobspec import JobSpec, TrainerSpec
from strata.fleet.wire.base import HubReply, Message, Page, Prefix, Reason, Text


class JobProgress(HubReply, frozen=True, kw_only=True):
    fraction: float
    """The fraction, from 0 to 1."""
    note: str = ""
    at_s: float
    """When it was reported, by the clock of its host."""
    eta_s: float | None = None
    """How long it takes from then on at the pace of this attempt; null: nothing to tell it from."""


class Job(HubReply, frozen=True, kw_only=True):
    id: str
    status: JobStatus
    spec: JobSpec
    epoch: int
    """The fence of what hosts write; not the number of an attempt."""
    attempt: int = 0
    """The number of the last attempt, from 1; 0 when no host has claimed it yet."""
    created_at_s: float
    changed_at_s: float
    not_before_s: float = 0.0
    host_id: str = ""
    reason: str = ""
    artifact: str = ""
    declared: bool = True
    orphaned: bool = False
    waits_for: int = 0
    trainer_digest: str = ""
    """The trainer of its next attempt; of a completed job, the one that made its result."""
    submitted_by: str = ""
    owner: str = ""
    archived: bool = False
    superseded: bool = False
    """A later job has its name, and no manifest has it any more."""
    newer: int = 0
    """How many later jobs of its project have its name: `name@2` has one. Counted in lists only."""
    serving: Literal["", "serving", "asleep"] = ""
    """Whether the hub forwards requests to a server, or the next request wakes it."""
    progress: JobProgress | None = None
    """Progress of a job that runs and reports it; in lists only with `progress`."""


class JobAttempt(HubReply, frozen=True, kw_only=True):
    attempt: int = 0
    """Its number: 1, 2, 3 … of its job."""
    epoch: int
    host_id: str
    claimed_at_s: float
    started_at_s: float | None = None
    ended_at_s: float | None = None
    outcome: str = ""
    cause: Cause | None = None
    error: str = ""
    artifact: str = ""
    checkpoint: str = ""
    facts: dict[str, Any] = {}
    trainer_digest: str = ""
    """The trainer that its host was given."""


class JobReply(HubReply, frozen=True, kw_only=True):
    job: Job
    attempts: tuple[JobAttempt, ...]


class JobsQuery(Message, frozen=True, kw_only=True):
    status: tuple[JobStatus, ...] = ()
    model: Word = ""
    host: Prefix = ""
    sweep: Text = ""
    project: Word = ""
    owner: Word = ""
    name: Text = ""
    """What people call the job."""
    search: Text = ""
    """Jobs whose name, owner, project, model or sweep contains it, whose id begins with it, or whose last host has it
    in its name; without regard to case."""
    hidden: bool = True
    """Also jobs that are archived, or ended and superseded."""
    order: Literal["id", "newest", "ended"] = "id"
    """`newest`: those first that were queued last. `ended`: only jobs that have ended, those first that ended last."""
    progress: bool = False
    """Tell the progress of those that run."""
    after: Prefix = ""
    limit: Page = 100


class JobsReply(HubReply, frozen=True, kw_only=True):
    jobs: tuple[Job, ...]
    next: str = ""
    """Give it as `after` for the next page; empty at the end."""
    by_status: dict[str, int] = {}
    """How many jobs of the project, or of all projects, are in each status, without hidden ones: whatever else the
    query says. They are kept, so this costs nothing. Not for hosts."""
    hosts: dict[str, str] = {}
    """The names of the hosts of these jobs, by id. Not for hosts."""


class SubmitRequest(Message, frozen=True, kw_only=True):
    spec: JobSpec
    trainer: TrainerSpec | None = None
    """If no manifest has declared it. A trainer that is there under this name has to be the same."""


class SubmitReply(HubReply, frozen=True, kw_only=True):
    job: Job
    new: bool


class CancelRequest(Message, frozen=True, kw_only=True):
    reason: Reason = ""
