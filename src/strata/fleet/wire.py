"""Every message of the hub's HTTP interface, declared once: for the hub, the agent, the command line and the SDK.

Times between machines are spans (`expires_in_s`), because their clocks differ; `…_at_s` is the hub's wall clock and is
for showing only. Who calls is never in a message: it follows from the credentials.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Final, Literal

import msgspec

from strata.fleet.artifacts.manifest import ArtifactId, ArtifactKind, ArtifactManifest, Lineage, Sha256, Size, Word
from strata.fleet.core.amounts import UNKNOWN, Taken
from strata.fleet.core.capability import Capability
from strata.fleet.core.job import Cause, JobStatus
from strata.fleet.core.jobspec import JobId, JobSpec, TrainerSpec
from strata.fleet.core.manifest import JobManifest
from strata.fleet.core.quota import OwnerUsage, Quota
from strata.fleet.core.samples import HostSample
from strata.fleet.core.schedule import Overlap
from strata.fleet.core.subscription import DEFAULT_EVENTS, SubscribedEvent

MAX_WAIT_S: Final = 60.0
MAX_CLAIM: Final = 256
MAX_LEASES: Final = 1024
MAX_PAGE: Final = 1000

Epoch = Annotated[int, msgspec.Meta(ge=1, le=2**53 - 1)]
Offset = Annotated[int, msgspec.Meta(ge=0, le=2**53 - 1)]
WaitS = Annotated[float, msgspec.Meta(ge=0, le=MAX_WAIT_S)]
Page = Annotated[int, msgspec.Meta(ge=1, le=MAX_PAGE)]
ClaimId = Annotated[str, msgspec.Meta(pattern=r"\A[A-Za-z0-9._:-]{1,128}\Z")]
Reason = Annotated[str, msgspec.Meta(max_length=1000)]
ErrorText = Annotated[str, msgspec.Meta(max_length=65_536)]
Pem = Annotated[str, msgspec.Meta(max_length=16_384)]
Prefix = Annotated[str, msgspec.Meta(max_length=128)]
RoleName = Literal["viewer", "researcher", "operator", "admin"]
BaseModel = Annotated[str, msgspec.Meta(min_length=1, max_length=1024)]
HostState = Literal["active", "draining", "paused", "quarantined", "left"]
Text = Annotated[str, msgspec.Meta(max_length=4096)]


class Message(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What all have in common."""


class HubReply(msgspec.Struct, frozen=True, kw_only=True):
    """What the hub says. A newer hub may say more: hosts are not all updated in one moment."""


class HubHealth(HubReply, frozen=True, kw_only=True):
    status: Literal["ok", "stopping"]
    version: str


# Hosts and their leases


class RegisterRequest(Message, frozen=True, kw_only=True):
    capability: Capability
    agent_version: Word = ""


class RegisterReply(HubReply, frozen=True, kw_only=True):
    host_id: str
    name: str
    state: HostState
    state_reason: str = ""
    lease_s: float
    """A lease that is not renewed for so long may go to somebody else."""
    renew_every_s: float


class ClaimRequest(Message, frozen=True, kw_only=True):
    claim_id: ClaimId
    """Of the sender's choice. Sent again after a lost reply, it gets the same leases and no others."""
    count: Annotated[int, msgspec.Meta(ge=1, le=MAX_CLAIM)] = 1
    slots: Annotated[int, msgspec.Meta(ge=1, le=65_536)] | None = None
    """Of agents that count their own slots: no more jobs than these. The hub counts what fits on the host."""
    wait_s: WaitS = 0.0


class GangLease(HubReply, frozen=True, kw_only=True):
    """What a member of a gang needs of the coordinator."""

    coordinator: str
    """Its address; of several, with commas between, one leads."""
    job: str
    """What the coordinator calls this run of the gang."""
    ca_pem: str = ""
    """The authority of its certificate; empty for one on this machine."""
    token: str = ""
    """For the workers of this member, until `token_s` have passed; empty where none is needed."""
    token_s: float = 0.0
    checkpoint_root: str = ""
    """Below which the gang keeps its checkpoints; empty: where the program says."""


class LeaseGiven(HubReply, frozen=True, kw_only=True):
    job_id: JobId
    epoch: Epoch
    """Goes with everything the host says about this attempt."""
    expires_in_s: float
    spec: JobSpec
    trainer: TrainerSpec | None = None
    """The one with the digest that the job carries. None where it is not known: fail the attempt as `setup_error`."""
    checkpoint: Annotated[str, msgspec.Meta(pattern=r"\A(artifact1_[0-9a-f]{64})?\Z")] = ""
    """The artifact to resume from, if there is one."""
    trainer_digest: str = ""
    secrets: dict[str, str] = {}
    """The values of the secrets that the trainer names and the hub has for this job."""
    taken: Taken = UNKNOWN
    """What the attempt has of the host: the cards it may use, and how much of the rest."""
    front_key: str = ""
    """Of a server: the secret with which the hub forwards the requests of its callers."""
    served_epoch: int = 0
    """Of a server: the last attempt that has served. State that does not have its work is behind what clients saw."""
    gang: GangLease | None = None
    """Of a member of a gang."""
    due: str = ""
    """Of a run of a schedule: when it was due. Not in `spec`, of which an older agent knows every field or none."""

    @property
    def resumed(self) -> str:
        """The checkpoint that the job itself reads. That of a server is the state in its data folder."""
        return "" if self.spec.kind == "server" else self.checkpoint


class ClaimReply(HubReply, frozen=True, kw_only=True):
    leases: tuple[LeaseGiven, ...]


class LeaseHeld(Message, frozen=True, kw_only=True, omit_defaults=True):
    job_id: JobId
    epoch: Epoch
    running: bool = False
    """The child runs, not only prepares."""
    renew_token: bool = False
    """The workers of this member of a gang need another token soon. Hubs that know no gangs never see it."""


class PublishRequest(Message, frozen=True, kw_only=True):
    """Where the server of an attempt serves."""

    epoch: Epoch
    address: Annotated[
        str, msgspec.Meta(max_length=1024, pattern=r"\A(unix:/[!-~]+|tls://[0-9A-Za-z.:\[\]-]+:[0-9]{1,5})\Z")
    ]
    """A Unix socket on the hub's machine, or host and port of the relay of an agent on another one."""
    models: Annotated[tuple[BaseModel, ...], msgspec.Meta(max_length=16)]
    """The names of its base model."""


class HeartbeatsRequest(Message, frozen=True, kw_only=True):
    leases: Annotated[tuple[LeaseHeld, ...], msgspec.Meta(max_length=MAX_LEASES)] = ()
    sample: HostSample | None = None
    """What the host does; in every second heartbeat or so."""


class HeartbeatRequest(Message, frozen=True, kw_only=True):
    epoch: Epoch
    running: bool = False


class LeaseVerdict(HubReply, frozen=True, kw_only=True):
    job_id: str
    epoch: int
    verdict: Literal["continue", "stop"]
    reason: str = ""
    """Why to stop, in words."""
    cause: Literal["", "stale", "ended", "unknown"] = ""
    """`stale`: another attempt has begun. `ended`: the job is terminal, cancelled perhaps. `unknown`: no such job."""
    expires_in_s: float = 0.0
    yield_as: Literal["", "cancelled", "preempted"] = ""
    """With `continue`: end the attempt for `reason` all the same, save its state, and report it with this cause. The
    lease is held until then, so that no other host starts the job from older state."""
    token: str = ""
    """For the workers of a member of a gang, in the place of the one they have."""


class ExecPending(HubReply, frozen=True, kw_only=True):
    """A command that a person wants to run in an attempt of this host."""

    id: str
    job_id: JobId
    epoch: Epoch


class HeartbeatsReply(HubReply, frozen=True, kw_only=True):
    verdicts: tuple[LeaseVerdict, ...]
    execs: tuple[ExecPending, ...] = ()
    """Those that have not ended, also when this host runs them already."""


class CompleteRequest(Message, frozen=True, kw_only=True):
    epoch: Epoch
    artifact: Annotated[str, msgspec.Meta(pattern=r"\A((artifact1_)?[0-9a-f]{64})?\Z")] = ""
    """An artifact, or the SHA-256 under which it was uploaded as a blob; it has to be there."""
    metrics: Annotated[dict[Word, float], msgspec.Meta(max_length=1000)] = {}
    facts: dict[Word, Any] = {}


class FailRequest(Message, frozen=True, kw_only=True):
    epoch: Epoch
    cause: Cause
    error: ErrorText = ""
    facts: dict[Word, Any] = {}


# Commands in running jobs

MAX_EXEC_S: Final = 3600.0
Argument = Annotated[str, msgspec.Meta(max_length=65_536, pattern=r"\A[^\0]*\Z")]


class ExecRequest(Message, frozen=True, kw_only=True):
    command: Annotated[tuple[Argument, ...], msgspec.Meta(min_length=1, max_length=1024)]
    """The program and its arguments; it is found in the PATH of the job."""
    timeout_s: Annotated[float, msgspec.Meta(gt=0, le=MAX_EXEC_S)] = 60.0
    """It is stopped after so long."""


class ExecReply(HubReply, frozen=True, kw_only=True):
    id: str
    job_id: str
    epoch: int
    host_id: str


class ExecQuery(Message, frozen=True, kw_only=True):
    offset: Offset = 0
    limit: Annotated[int, msgspec.Meta(ge=1, le=4 * 1024 * 1024)] = 1024 * 1024
    wait_s: WaitS = 0.0
    """Wait so long for something behind `offset`, unless the command has ended."""


class ExecStartRequest(Message, frozen=True, kw_only=True):
    run: ClaimId
    """Of the agent's choice. Sent again after a lost reply, it gets the same reply; another one does not."""


class ExecGiven(HubReply, frozen=True, kw_only=True):
    id: str
    command: tuple[str, ...]
    timeout_s: float


class ExecEndRequest(Message, frozen=True, kw_only=True):
    run: ClaimId
    status: Annotated[int, msgspec.Meta(ge=0, le=255)] | None = None
    """As a shell has it: 128 and the number of the signal that killed it. None: it did not run to its end."""
    error: Reason = ""


# Jobs


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
    """Of a server: whether the hub forwards requests to it, or the next request wakes it."""


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
    hidden: bool = True
    """Also jobs that are archived, or ended and superseded."""
    after: Prefix = ""
    limit: Page = 100


class JobsReply(HubReply, frozen=True, kw_only=True):
    jobs: tuple[Job, ...]
    next: str = ""
    """Give it as `after` for the next page; empty at the end."""


class SubmitRequest(Message, frozen=True, kw_only=True):
    spec: JobSpec
    trainer: TrainerSpec | None = None
    """If no manifest has declared it. A trainer that is there under this name has to be the same."""


class SubmitReply(HubReply, frozen=True, kw_only=True):
    job: Job
    new: bool


class CancelRequest(Message, frozen=True, kw_only=True):
    reason: Reason = ""


class StatusReply(HubReply, frozen=True, kw_only=True):
    by_status: dict[str, int]
    ready: int
    hosts: int
    version: str
    now_s: float


# Quotas


class OwnerQuota(HubReply, frozen=True, kw_only=True):
    owner: str
    own: bool
    """False: it is the quota of everybody who has none."""
    quota: Quota
    usage: OwnerUsage


class QuotasReply(HubReply, frozen=True, kw_only=True):
    quotas: tuple[OwnerQuota, ...]


class QuotaRequest(Message, frozen=True, kw_only=True):
    owner: Annotated[Word, msgspec.Meta(min_length=1)]
    """`*`: everybody who has none."""
    quota: Quota | None
    """Null: the quota of everybody again."""


# Schedules


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


# Manifest


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
    """Take the policies of these hosts from the project they belong to."""


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


class Trainer(HubReply, frozen=True, kw_only=True):
    spec: TrainerSpec
    digest: str = ""
    params: Any = None
    """The JSON Schema of `hyper`; null where nobody gave one."""


class TrainersReply(HubReply, frozen=True, kw_only=True):
    trainers: dict[str, Trainer]
    """By name; those of other projects than the default one by `project/name`."""


# Secrets

SecretName = Annotated[str, msgspec.Meta(max_length=256, pattern=r"\A(?!STRATA_)[A-Za-z_][A-Za-z0-9_]*\Z")]


class SecretQuery(Message, frozen=True, kw_only=True):
    project: Annotated[str, msgspec.Meta(pattern=r"\A([A-Za-z0-9][A-Za-z0-9._-]{0,63})?\Z")] = ""
    """For all jobs of this project. Empty: for the jobs of the caller."""


class SecretRequest(Message, frozen=True, kw_only=True):
    value: Annotated[str, msgspec.Meta(min_length=8, max_length=65_536, pattern=r"\A[^\0]*\Z")]
    """Shorter values could not be removed from logs without damage."""


class StoredSecretReply(HubReply, frozen=True, kw_only=True):
    name: str
    project: str = ""
    """Empty: of the caller."""
    changed_at_s: float
    changed_by: str


class SecretsReply(HubReply, frozen=True, kw_only=True):
    """Names only: no request reads a value."""

    secrets: tuple[StoredSecretReply, ...]


# Subscriptions

SubscriptionName = Annotated[str, msgspec.Meta(pattern=r"\A[A-Za-z0-9][A-Za-z0-9._-]{0,63}\Z")]


class SubscriptionRequest(Message, frozen=True, kw_only=True):
    url: Annotated[str, msgspec.Meta(min_length=4, max_length=2048, pattern=r"\A[!-~]+\Z")]
    """Of Apprise, as in `ntfy://TOPIC`. No reply has it."""
    events: Annotated[tuple[SubscribedEvent, ...], msgspec.Meta(min_length=1, max_length=16)] = DEFAULT_EVENTS
    project: Annotated[str, msgspec.Meta(pattern=r"\A([A-Za-z0-9][A-Za-z0-9._-]{0,63})?\Z")] = ""
    """The jobs of this project; empty: the caller's own."""
    all_jobs: bool = False


class SubscriptionReply(HubReply, frozen=True, kw_only=True):
    name: str
    service: str
    events: tuple[str, ...]
    project: str = ""
    all_jobs: bool = False


class SubscriptionsReply(HubReply, frozen=True, kw_only=True):
    subscriptions: tuple[SubscriptionReply, ...]


class SubscriptionTestReply(HubReply, frozen=True, kw_only=True):
    service: str
    """It accepted a message."""


# Hosts, for people


class Host(HubReply, frozen=True, kw_only=True):
    id: str
    name: str
    state: HostState
    state_reason: str = ""
    capability: Capability
    labels: dict[str, str] = {}
    """Of its invitation; those of its agent's settings are in `capability`, and count for wishes only."""
    pool: str = ""
    agent_version: str = ""
    registered_at_s: float
    seen_at_s: float
    seen_ago_s: float
    """By the hub's clock, at the time of the reply."""
    presence: Literal["online", "suspect", "offline"]
    sample: dict[str, float] = {}
    """What it did when its agent told this hub last; by name as in `/v1/host/{id}/samples`."""


class HostAmounts(HubReply, frozen=True, kw_only=True):
    cores: int
    ram_gib: float
    slots: int | None = None
    """None: as many jobs as fit by their amounts."""
    cards: dict[str, float] = {}
    """The VRAM of each in GiB, by its UUID or its number."""


class HostJob(HubReply, frozen=True, kw_only=True):
    job_id: str
    label: str
    owner: str
    status: JobStatus
    epoch: int
    claimed_at_s: float
    taken: Taken
    """What it has of the host."""


class HostRoom(HubReply, frozen=True, kw_only=True):
    capacity: HostAmounts
    """What the host has for jobs, by what its agent detects and by its policy."""
    free: HostAmounts
    jobs: tuple[HostJob, ...]


class HostsReply(HubReply, frozen=True, kw_only=True):
    hosts: tuple[Host, ...]


class SamplesQuery(Message, frozen=True, kw_only=True):
    span_s: Annotated[float, msgspec.Meta(gt=0, le=90 * 86_400)] = 3600.0
    """How far back."""
    points: Annotated[int, msgspec.Meta(ge=1, le=5000)] = 300
    """How many at most: the finest resolution with so few is chosen."""


class SampledPoint(HubReply, frozen=True, kw_only=True):
    at_s: float
    values: dict[str, float]


class SamplesReply(HubReply, frozen=True, kw_only=True):
    step_s: int
    """Of which the values are means; 0: as they were sampled."""
    points: tuple[SampledPoint, ...]


class HostStateRequest(Message, frozen=True, kw_only=True):
    reason: Reason = ""


# Logs, metrics, events


class PieceQuery(Message, frozen=True, kw_only=True):
    epoch: Epoch
    offset: Offset
    last: bool = False
    """Nothing follows: the reply says that all of it is on the disk."""


class PieceReply(HubReply, frozen=True, kw_only=True):
    size: int
    """How many bytes of the stream are stored: go on from there."""


class StreamQuery(Message, frozen=True, kw_only=True):
    attempt: Annotated[int, msgspec.Meta(ge=0, le=2**31 - 1)] = 0
    """The number of an attempt; 0: the last one."""
    offset: Offset = 0
    limit: Annotated[int, msgspec.Meta(ge=1, le=4 * 1024 * 1024)] = 1024 * 1024
    wait_s: WaitS = 0.0
    """Wait so long for something behind `offset`, unless the attempt has ended."""


class EventsQuery(Message, frozen=True, kw_only=True):
    after: Prefix = ""
    """The `cursor` of the last event that was seen; `newest` for what comes from now on."""
    subject: Prefix = ""
    limit: Page = 100
    wait_s: WaitS = 0.0


class FeedEvent(HubReply, frozen=True, kw_only=True):
    cursor: str
    at_s: float
    actor: str
    kind: str
    subject: str
    body: dict[str, Any]
    address: str = ""
    """Where the request came from; empty for what the hub did itself, for the reports of hosts, and to callers who are
    neither the actor nor an operator."""


class EventsReply(HubReply, frozen=True, kw_only=True):
    events: tuple[FeedEvent, ...]
    cursor: str
    """Where to go on, also when there was nothing."""


# Artifacts


class MissingRequest(Message, frozen=True, kw_only=True):
    chunks: dict[Sha256, Size]
    """Digest to size."""


class MissingChunk(HubReply, frozen=True, kw_only=True):
    digest: str
    size: int
    received: int = 0
    url: str = ""
    """Where to PUT it; empty: to the hub."""


class MissingReply(HubReply, frozen=True, kw_only=True):
    missing: tuple[MissingChunk, ...]
    stored: int


class ChunkQuery(Message, frozen=True, kw_only=True):
    size: Annotated[int, msgspec.Meta(ge=1, le=8 * 1024 * 1024)]
    """Of the whole chunk."""
    offset: Offset = 0


class CommitRequest(Message, frozen=True, kw_only=True):
    manifest: ArtifactManifest
    lineage: Lineage
    job_id: JobId | None = None
    """A host commits for an attempt that it holds; a person for none."""
    epoch: Epoch | None = None


class CommitReply(HubReply, frozen=True, kw_only=True):
    artifact_id: str
    lineage_id: str
    new: bool


class BlobQuery(Message, frozen=True, kw_only=True):
    """For which attempt: the model and the mode are those of its job."""

    job_id: JobId
    epoch: Epoch


class Made(HubReply, frozen=True, kw_only=True):
    """An artifact and where it came from."""

    artifact_id: str
    lineage_id: str
    seq: int
    size: int
    committed_at_s: float
    lineage: Lineage
    pinned: str = ""
    removed_at_s: float | None = None
    by: str = ""
    """Who committed it: `host:…` for an attempt, `key:…` for a person."""
    project: str = ""
    trainer_digest: str = ""
    """Of the attempt that made it."""


class MadeReply(HubReply, frozen=True, kw_only=True):
    artifacts: tuple[Made, ...]
    next: int | None = None
    """Give it as `before` for the next page; null at the end."""


class ArtifactsQuery(Message, frozen=True, kw_only=True):
    model: Word = ""
    mode: Word = ""
    kind: ArtifactKind | None = None
    job_id: Prefix = ""
    parent: ArtifactId | None = None
    metric: Word = ""
    """Order by it, the highest first; one page only."""
    lowest: bool = False
    removed: bool = False
    before: Annotated[int, msgspec.Meta(ge=0, le=2**53 - 1)] | None = None
    limit: Page = 100


class LatestQuery(Message, frozen=True, kw_only=True):
    model: Word
    mode: Word = ""
    kind: ArtifactKind = ArtifactKind.RESULT


class BestQuery(Message, frozen=True, kw_only=True):
    model: Word
    metric: Word
    mode: Word = ""
    lowest: bool = False


class ArtifactReply(HubReply, frozen=True, kw_only=True):
    id: str
    size: int
    committed_at_s: float
    pinned: str = ""
    manifest: ArtifactManifest
    urls: Mapping[str, str] = {}
    """Where to GET each chunk; empty: from the hub."""


class FileQuery(Message, frozen=True, kw_only=True):
    path: Text


class PinRequest(Message, frozen=True, kw_only=True):
    reason: Annotated[str, msgspec.Meta(max_length=256)] = ""
    """Empty: let it go."""


# Identity


class InviteRequest(Message, frozen=True, kw_only=True):
    name: Annotated[str, msgspec.Meta(max_length=64)] = ""
    """The only name it may be used for; empty: the host chooses one that is free."""
    pool: Word = ""
    labels: Annotated[tuple[Word, ...], msgspec.Meta(max_length=64)] = ()
    valid_s: Annotated[float, msgspec.Meta(gt=0, le=30 * 86_400)] = 1800.0


class InviteReply(HubReply, frozen=True, kw_only=True):
    token: str
    """Told only here."""
    id: str
    expires_in_s: float
    tls: bool = False
    """Whether other machines can reach this hub."""


class Invited(HubReply, frozen=True, kw_only=True):
    id: str
    made_at_s: float
    expires_at_s: float
    name: str = ""
    pool: str = ""
    labels: tuple[str, ...] = ()
    used: bool = False
    revoked_at_s: float | None = None


class InvitesReply(HubReply, frozen=True, kw_only=True):
    invites: tuple[Invited, ...]


class JoinRequest(Message, frozen=True, kw_only=True):
    invite_id: Annotated[str, msgspec.Meta(pattern=r"\A[0-9a-f]{12}\Z")]
    secret: Annotated[str, msgspec.Meta(pattern=r"\A[0-9a-f]{40}\Z")]
    name: Annotated[str, msgspec.Meta(min_length=1, max_length=64)]
    request_pem: Pem
    """A signing request for the key that was made on the host."""


class CertificateReply(HubReply, frozen=True, kw_only=True):
    host_id: str
    name: str
    certificate_pem: str
    serving_pem: str = ""
    """For the same key: what the host shows its hub when the hub connects to a server there."""
    ca_pem: str
    valid_for_s: float


class RenewRequest(Message, frozen=True, kw_only=True):
    request_pem: Pem


class LocalHostRequest(Message, frozen=True, kw_only=True):
    name: Annotated[str, msgspec.Meta(min_length=1, max_length=64)]


class LocalHostReply(HubReply, frozen=True, kw_only=True):
    host_id: str
    secret: str
    """Told only here; good on a hub that listens on loopback without TLS."""


class HubKeyRequest(Message, frozen=True, kw_only=True, omit_defaults=True):
    name: Annotated[str, msgspec.Meta(min_length=1, max_length=128, pattern=r"\A[^\x00-\x1f\x7f]*\Z")]
    role: RoleName
    valid_s: Annotated[float, msgspec.Meta(gt=0, le=3650 * 86_400)] | None = None
    owner: bool = False
    """For the owner of a hub whose jobs run as its own user, where a lesser role would be no less."""


class HubKey(HubReply, frozen=True, kw_only=True):
    id: str
    name: str
    role: RoleName
    made_at_s: float
    expires_at_s: float | None = None
    revoked_at_s: float | None = None


class CallerReply(HubReply, frozen=True, kw_only=True):
    """Who the hub takes the caller for."""

    kind: Literal["key", "host", "operator"]
    id: str = ""
    name: str = ""
    role: RoleName | None = None
    """None: a host."""
    owner: str = ""
    """The owner of the jobs that the caller queues."""
    expires_at_s: float | None = None
    """Of the key, or of the host's certificate; None: it does not."""


class HubKeyReply(HubReply, frozen=True, kw_only=True):
    key: HubKey
    secret: str
    """The text of the key; told only here."""


class KeysReply(HubReply, frozen=True, kw_only=True):
    keys: tuple[HubKey, ...]
