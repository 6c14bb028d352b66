"""Messages about jobs: a job, its attempts, the filters of lists, submission, cancellation."""

from __future__ import annotations

from typing import Literal

from strata.fleet.artifacts.manifest import Word
from strata.fleet.core.job import JobStatus
from strata.fleet.core.jobspec import JobSpec, TrainerSpec
from strata.fleet.core.series import JobProgress
from strata.fleet.records import JobAttempt, JobRecord
from strata.fleet.wire.base import HubReply, Message, Page, Prefix, Reason, Text


class Job(JobRecord, HubReply, frozen=True, kw_only=True):
    serving: Literal["", "serving", "asleep"] = ""
    """Whether the hub forwards requests to a server, or the next request wakes it."""
    progress: JobProgress | None = None
    """Progress of a job that runs and reports it; in lists only with `progress`."""


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
