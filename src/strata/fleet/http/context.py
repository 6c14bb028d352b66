"""What the handlers of the hub's routes share: `HubContext` with all services, checks of ids and names in a path, and
who the calling host or submitter is.
"""

from __future__ import annotations

import asyncio
import hmac
import re
import secrets
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Protocol, TypeAlias

import msgspec

from strata.base.clock import Clock
from strata.base.errors import Code, StrataError
from strata.base.ids import resolve_prefix
from strata.base.notify import KeyedNotifier
from strata.fleet.artifacts.service import Artifacts
from strata.fleet.core.attention import HubBackups
from strata.fleet.core.jobspec import JobSpec, coordinator_job
from strata.fleet.core.lease_status import unknown_job
from strata.fleet.core.ownership import Submitter
from strata.fleet.core.plan import ApplyPlan
from strata.fleet.core.requirement import SandboxLevel
from strata.fleet.core.schedule import JobSchedule
from strata.fleet.core.subscription import SubscribedEvent
from strata.fleet.execs import ExecBoard
from strata.fleet.http.feed import Feed
from strata.fleet.http.leased_reads import LeasedReads
from strata.fleet.http.long_poll import AttemptHosts
from strata.fleet.http.validation import ValidationPool
from strata.fleet.hub_metrics import HubMetrics
from strata.fleet.metric_history import MetricHistory
from strata.fleet.overview import FleetHistory
from strata.fleet.records import (
    AttemptKey,
    HostRow,
    ScheduleRow,
    StoredSchedule,
    StoredSecret,
    StoredSubscription,
    StoredSweep,
)
from strata.fleet.service.fleet import Fleet
from strata.fleet.streams import AttemptStreams
from strata.http.body import BodyPace
from strata.http.root import RootLimits
from strata.http.route import HttpCall
from strata.identity.authenticate import Authenticator
from strata.identity.ca import Authority
from strata.identity.enroll import Enrollment
from strata.identity.roles import CallerKind, Principal, Role
from strata.identity.store import IdentityStore

_JOB: Final = re.compile(r"job1_[0-9a-f]{64}")
_ARTIFACT: Final = re.compile(r"artifact1_[0-9a-f]{64}")
_PREFIX: Final = re.compile(r"[0-9a-z_]{1,80}")


class TrainerSchemas(Protocol):
    """The JSON Schemas of trainers, as the last manifest gave them."""

    async def schemas(self, trainers: Collection[str] | None = None) -> Mapping[str, bytes]:
        """Those of these trainers that have one, as JSON; of all without an argument. Reading them is not for the event
        loop."""

    async def put_schemas(self, schemas: Mapping[str, Any]) -> None: ...


class Secrets(Protocol):
    """The secrets of jobs, by scope (`owner:NAME` or `project:NAME`) and name."""

    async def put(self, scope: str, name: str, value: str, *, actor: str, now_s: float) -> None: ...

    async def names(self, scopes: Sequence[str]) -> Sequence[StoredSecret]: ...

    async def remove(self, scope: str, name: str) -> bool: ...

    async def reveal(self, scopes: Sequence[str], names: Sequence[str]) -> Mapping[str, str]: ...


class Sweeps(Protocol):
    """The sweeps of manifests, by project and name."""

    async def check(
        self, sweeps: Sequence[StoredSweep], plan: ApplyPlan, source: str, *, take_over: bool
    ) -> Sequence[str]:
        """The names of those that are stopped. CONFLICT for a sweep of another file than `source`, or a trial of one
        that the plan takes away from it, without `take_over`; UNSUPPORTED if the hub lacks what proposes points."""

    async def declare(self, sweeps: Sequence[StoredSweep], *, take_over: bool) -> None:
        """Add these, or change those of the same names; others stay. CONFLICT as in `check`."""

    async def listed(self) -> Sequence[StoredSweep]: ...

    async def stop(self, project: str, name: str, actor: str, submitter: Submitter) -> None:
        """Make no more trials, and cancel those that wait for a host."""

    async def resume(self, project: str, name: str, actor: str, submitter: Submitter) -> None:
        """Make trials again, and requeue those that `stop` cancelled."""


class Schedules(Protocol):
    """Jobs that are queued again and again, by project and name."""

    async def check(
        self, project: str, schedules: Mapping[str, JobSchedule], submitter: Submitter
    ) -> Mapping[str, float]:
        """Returns when each is due next; INVALID for an unknown time zone, FORBIDDEN for a schedule of another owner,
        EXHAUSTED for too many of one owner."""

    async def declare(self, project: str, schedules: Mapping[str, StoredSchedule]) -> None:
        """Add these, or change those of the same names; others stay."""

    async def listed(self) -> Sequence[ScheduleRow]: ...

    async def pause(self, project: str, name: str, actor: str, submitter: Submitter) -> ScheduleRow: ...

    async def resume(self, project: str, name: str, actor: str, submitter: Submitter) -> ScheduleRow:
        """Its next run is the next one that is due from now on."""

    async def remove(self, project: str, name: str, actor: str, submitter: Submitter) -> None: ...


class Subscriptions(Protocol):
    """The subscriptions of people to events of jobs."""

    async def add(
        self, caller: Principal, name: str, url: str, events: Sequence[SubscribedEvent], *, project: str, all_jobs: bool
    ) -> StoredSubscription: ...

    async def listed(self, owner: str = "") -> Sequence[StoredSubscription]: ...

    async def remove(self, owner: str, name: str) -> None: ...

    async def send_test(self, owner: str, name: str) -> str: ...


@dataclass
class WriteProbe:
    """Whether the last probe write to the database failed."""

    fails: bool = False


@dataclass
class ServedAt:
    """Where the hub listens, once it does."""

    url: str = ""


@dataclass(frozen=True, kw_only=True)
class GangCoordinator:
    """The coordinator of the gangs of this hub, and the tokens that let their workers in."""

    address: str
    ca_pem: str = ""
    checkpoint_root: str = ""
    token_s: float = 0.0
    sign: Callable[[str, str], str] | None = None
    """A token for the workers of a job of the coordinator, with an id to revoke it by. None: it needs no tokens."""
    needed: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when a host has got a member of a gang: `strata up` starts its coordinator then."""

    def issue(self, spec: JobSpec, held: AttemptKey) -> str:
        """Issues a token for the workers of one attempt on one host; empty where none is needed."""
        self.needed.set()
        if self.sign is None:
            return ""
        return self.sign(coordinator_job(spec), f"{held.job_id}:{held.epoch}@{held.host_id}")


@dataclass(frozen=True, kw_only=True)
class HubContext:
    fleet: Fleet
    artifacts: Artifacts
    leased: LeasedReads
    """What hosts may read."""
    streams: AttemptStreams
    metrics: MetricHistory
    history: FleetHistory
    identity: IdentityStore
    enrollment: Enrollment
    authenticator: Authenticator
    authority: Authority
    schemas: TrainerSchemas
    secrets: Secrets
    subscriptions: Subscriptions
    sweeps: Sweeps
    schedules: Schedules
    execs: ExecBoard
    feed: Feed
    clock: Clock
    tls: bool = False
    address: str = "the hub's Unix socket"
    """Where the hub's own user reaches it, for hints."""
    public_read: bool = False
    require_sandbox: Mapping[str, SandboxLevel] = field(default_factory=dict)
    """The sandbox that the jobs of each project get at least."""
    owner_only: bool = False
    """Jobs run as the hub's own user and can read its operator token, so only the hub's owner may submit one."""
    manifest: Path | None = None
    """The file that `reload` applies."""
    pace: BodyPace = field(default_factory=BodyPace)
    writing: WriteProbe = field(default_factory=WriteProbe)
    served: ServedAt = field(default_factory=ServedAt)
    limits: RootLimits = field(default_factory=RootLimits)
    stopping: asyncio.Event = field(default_factory=asyncio.Event)
    appends: KeyedNotifier[None] = field(default_factory=KeyedNotifier)
    """Notifies of pieces of logs and metrics, by job, epoch and name of the stream."""
    attempts: AttemptHosts = field(default_factory=AttemptHosts)
    validation: ValidationPool = field(default_factory=ValidationPool)
    coordinator: GangCoordinator | None = None
    """None: this hub starts no gangs."""
    front_secret: bytes = field(default_factory=lambda: secrets.token_bytes(32))
    """The keys of the servers follow from it, so that no database has them."""
    bundle_digests: dict[str, str] = field(default_factory=dict)
    """Digests of the bundles of the export, by artifact: each is read once to compute its digest."""
    hub_metrics: HubMetrics = field(default_factory=HubMetrics)
    """The metrics for Prometheus."""
    data: Path | None = None
    """The folder whose disk the metrics show."""
    backups: Callable[[], HubBackups | None] = lambda: None
    """Surveys the scheduled backups; None: there are none."""

    def front_key(self, job_id: str, epoch: int) -> str:
        """The secret that the server of this attempt takes the hub's word for its callers with."""
        return hmac.digest(self.front_secret, f"{job_id}:{epoch}".encode(), "sha256").hex()


HubCall: TypeAlias = HttpCall[HubContext]


async def resolve_job_id(call: HubCall) -> str:
    """The id of the job that the path names in full or by a prefix. With a full id the job may not exist."""
    text = call.path["id"]
    if _JOB.fullmatch(text):
        return text
    if not _PREFIX.fullmatch(text):
        raise unknown_job(text[:100])
    return resolve_prefix(text, await call.context.fleet.store.jobs.find(text))


def submitter_of(call: HubCall) -> Submitter:
    """Returns the owner of the jobs that the caller queues."""
    role = call.caller.role
    return Submitter(owner=call.caller.owner, operator=role is not None and role >= Role.OPERATOR)


async def resolve_artifact_id(call: HubCall) -> str:
    text = call.path["id"]
    if _ARTIFACT.fullmatch(text):
        return text
    if not _PREFIX.fullmatch(text):
        raise StrataError(Code.NOT_FOUND, f"there is no artifact {text[:100]!r}")
    return resolve_prefix(text, await call.context.artifacts.index.find(text))


async def resolve_host(call: HubCall) -> HostRow:
    """The host that the path names by its id or its name."""
    text = call.path["id"]
    matches: Sequence[HostRow] = await call.context.fleet.hosts.find(text)
    # A name may have been used by a host that was revoked since: a host that has not left comes first.
    matches = [host for host in matches if host.id == text or host.state != "left"] or matches[-1:]
    if not matches:
        raise StrataError(Code.NOT_FOUND, f"there is no host {text[:100]!r}")
    return matches[0]


def named_in_path(call: HubCall, kind: Any, rule: str) -> str:
    """The name in the path; INVALID with the rule that it breaks."""
    try:
        name: str = msgspec.convert(call.path["name"], kind)
    except msgspec.ValidationError:
        raise StrataError(Code.INVALID, rule) from None
    return name


def calling_host(call: HubCall) -> str:
    """The id of the host that calls; empty if a person does."""
    return call.caller.require_host() if call.caller.kind is CallerKind.HOST else ""


def own_hold(call: HubCall, job_id: str, epoch: int) -> AttemptKey:
    """The hold of the calling host on an attempt. The host comes from the credentials, never from a message."""
    return AttemptKey(call.caller.require_host(), job_id, epoch)
