"""Messages about manifests, their plan as people see it, trainers and schedules."""

from __future__ import annotations

from typing import Any

from strata.fleet.artifacts.manifest import Word
from strata.fleet.core.jobspec import TrainerSpec
from strata.fleet.core.manifest import JobManifest
from strata.fleet.core.schedule import Overlap
from strata.fleet.wire.base import HubReply, Message


class ScheduleReply(HubReply, frozen=True, kw_only=True):
    project: str
    name: str
    owner: str
    cron: str
    timezone: str
    overlap: Overlap
    next_due_s: float
    paused: bool
    last_job: str
    """The id of the last run; empty before the first one."""
    note: str
    """Why the last run was not queued, or why the schedule is paused; empty otherwise."""


class SchedulesReply(HubReply, frozen=True, kw_only=True):
    schedules: tuple[ScheduleReply, ...]


class ManifestRequest(Message, frozen=True, kw_only=True):
    manifest: JobManifest
    schemas: dict[Word, Any] = {}
    """JSON Schema of the hyper-parameters, by trainer; those of trainers that are not named stay."""
    dry_run: bool = False
    accept: bool = False
    """Let results count that were made before a manifest had the job."""
    retrain: bool = False
    """Run completed jobs again whose result an earlier trainer made."""
    take_over: bool = False
    """Take the policies of these hosts from the project they belong to, and these sweeps from the file they belong to.
    """


class PlannedJob(HubReply, frozen=True, kw_only=True):
    id: str
    label: str


class PlannedChange(HubReply, frozen=True, kw_only=True):
    id: str
    label: str
    kinds: tuple[str, ...]
    deferred: bool
    """A host holds it: the change counts from the next attempt on."""


class ManifestReply(HubReply, frozen=True, kw_only=True):
    applied: bool
    summary: str
    new: tuple[PlannedJob, ...] = ()
    changed: tuple[PlannedChange, ...] = ()
    unchanged: int = 0
    orphaned: tuple[str, ...] = ()
    project: str = "default"
    trainers: tuple[str, ...] = ()
    takers: int = 0
    """How many unfinished jobs take another trainer."""
    requeued: tuple[PlannedJob, ...] = ()
    """Completed jobs that run again, because their result does not count."""
    outdated: tuple[str, ...] = ()
    """Completed jobs whose result an earlier trainer made; they stay completed."""
    hosts: tuple[str, ...] = ()
    schedules: dict[str, float] = {}
    """When each schedule of the manifest is due next."""
    stopped: tuple[str, ...] = ()
    """Sweeps of the manifest that were stopped: they make no trials until they are resumed."""


class Trainer(HubReply, frozen=True, kw_only=True):
    spec: TrainerSpec
    digest: str = ""
    params: Any = None
    """The JSON Schema of `hyper`; null where nobody gave one."""


class TrainersReply(HubReply, frozen=True, kw_only=True):
    trainers: dict[str, Trainer]
    """Trainers by name; those of other projects than the default one by `project/name`."""
