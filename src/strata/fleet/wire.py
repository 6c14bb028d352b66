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
from strata.fleet.core.attention import AttentionAction, AttentionKind
from strata.fleet.core.capability import Capability
from strata.fleet.core.goodput import GoodputPart, JobPhase
from strata.fleet.core.host_status import HostAction, HostStatus
from strata.fleet.core.job import Cause, JobStatus
from strata.fleet.core.jobspec import JobId, JobSpec, TrainerSpec
from strata.fleet.core.manifest import JobManifest
from strata.fleet.core.quota import OwnerUsage, Quota
from strata.fleet.core.requirement import Pool
from strata.fleet.core.samples import HostSample
from strata.fleet.core.schedule import Overlap
from strata.fleet.core.search import Direction
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
PartName = Annotated[str, msgspec.Meta(min_length=1, max_length=1024)]
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


class PartsRequest(Message, frozen=True, kw_only=True):
    """Which parts of a committed checkpoint a member of a gang needs, of all members."""

    epoch: Epoch
    parts: Annotated[Mapping[PartName, Prefix], msgspec.Meta(min_length=1, max_length=100_000)]
    """Paths of files in the checkpoint, and their digests (`sha256:…`); one that is empty, or of another kind, is that
    of no file."""


class PartsReply(HubReply, frozen=True, kw_only=True):
    artifacts: tuple[ArtifactId, ...]
    """They have all of these parts together; none if a part is missing."""


class HeartbeatsRequest(Message, frozen=True, kw_only=True):
    leases: Annotated[tuple[LeaseHeld, ...], msgspec.Meta(max_length=MAX_LEASES)] = ()
    sample: HostSample | None = None
    """What the host does; in every second heartbeat or so."""
    incarnation: Word = ""
    """Of the agent: it names its machine and process, and no other agent has the same."""


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


class JobProgress(HubReply, frozen=True, kw_only=True):
    fraction: float
    """From 0 to 1."""
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
    """Of a server: whether the hub forwards requests to it, or the next request wakes it."""
    progress: JobProgress | None = None
    """Of one that runs and reports it; in lists only with `progress`."""


class RanksFigures(HubReply, frozen=True, kw_only=True):
    state: str
    size: int = 0


class ServerFigures(HubReply, frozen=True, kw_only=True):
    """Of what a training server says of itself, the part for a list."""

    now_s: float
    ranks: RanksFigures
    models: int
    slots: int
    waiting: int
    samples_waiting: int
    samples_running: int
    trained_tokens_per_s: float
    sampled_tokens_per_s: float
    recoveries: int
    tenants: tuple[dict[str, Any], ...] = ()


class ServerEntry(HubReply, frozen=True, kw_only=True):
    """A job of the kind `server`."""

    job_id: str
    label: str
    project: str
    owner: str
    models: tuple[str, ...]
    """The names of its base model."""
    state: Literal["serving", "asleep", "starting", "ended"]
    reason: str
    host_id: str
    changed_at_s: float
    used_at_s: float | None
    """None if it has never served."""
    figures: ServerFigures | None
    """None if it does not serve, or did not reply in time."""


class ServersReply(HubReply, frozen=True, kw_only=True):
    servers: tuple[ServerEntry, ...]
    hosts: dict[str, str] = {}
    """The names of their hosts, by id."""


class ServerActivityQuery(Message, frozen=True, kw_only=True):
    operations: Annotated[int, msgspec.Meta(ge=0, le=1000)] = 200


class ServerCurvesQuery(Message, frozen=True, kw_only=True):
    points: Annotated[int, msgspec.Meta(ge=1, le=1000)] = 500
    names: Annotated[str, msgspec.Meta(max_length=1000)] = ""
    """Of metrics, with commas between; empty for all."""


class ServerRolloutsQuery(Message, frozen=True, kw_only=True):
    model: Annotated[str, msgspec.Meta(max_length=256)] = ""
    """The id of a model; empty: all models of the caller."""
    limit: Annotated[int, msgspec.Meta(ge=1, le=1000)] = 100


class ServerCompletion(Message, frozen=True, kw_only=True):
    """What the playground sends to the OpenAI-compatible endpoints of a training server; that server checks it."""

    model: Annotated[str, msgspec.Meta(max_length=1000)]
    temperature: float
    max_tokens: int
    logprobs: bool | int | None = None
    prompt: str | None = None
    messages: tuple[dict[str, str], ...] | None = None

    def encode(self) -> bytes:
        fields = msgspec.to_builtins(self)
        return msgspec.json.encode({name: value for name, value in fields.items() if value is not None})


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


class TimelineSegment(HubReply, frozen=True, kw_only=True):
    from_s: float
    to_s: float
    phase: JobPhase
    """What the job did: `silent` is a host that does not answer."""
    part: GoodputPart
    """What that time counts as."""
    attempt: int
    """Its number; 0: no host had the job."""


class TimelineMark(HubReply, frozen=True, kw_only=True):
    at_s: float
    kind: str
    """Of the event: `job.checkpointed`, `job.expired`, `job.preempted`, `job.revived`, `job.requeued` …"""
    attempt: int = 0


class Interruption(HubReply, frozen=True, kw_only=True):
    """An attempt that ended before the job did, and what that cost."""

    at_s: float
    """When the trainer ended, or its host was seen last."""
    attempt: int
    host_id: str
    host: str = ""
    """Its name."""
    cause: str
    resumed_at_s: float | None
    """When the job ran again; null: it does not yet, or never did."""
    detect_s: float
    restart_s: float
    rolled_back_s: float
    cost_s: float
    """The sum of the three."""
    job_id: str = ""
    """In the sum over many jobs."""


class JobTimelineReply(HubReply, frozen=True, kw_only=True):
    from_s: float
    to_s: float
    """The end of a job that has ended; now of another."""
    segments: tuple[TimelineSegment, ...]
    """In order; only between the end of a job and its requeue is a gap."""
    marks: tuple[TimelineMark, ...]
    attempts: tuple[JobAttempt, ...]
    hosts: dict[str, str]
    """The names of the hosts of these attempts, by id."""
    interruptions: tuple[Interruption, ...]


class GoodputQuery(Message, frozen=True, kw_only=True):
    project: Word = ""
    span_s: Annotated[float, msgspec.Meta(gt=0, le=7 * 86_400)] = 86_400.0
    """How far back."""


class GoodputReply(HubReply, frozen=True, kw_only=True):
    seconds: dict[GoodputPart, float]
    """`waiting`, `useful`, `checkpoint`, `detect`, `restart`, `rolled_back`: each moment belongs to one of them."""
    wall_s: float
    """Their sum: the time from queueing to the end, without that between an end and a requeue."""
    share: float | None
    """`useful` of all but `waiting`; null while there is nothing of these."""
    interruptions: tuple[Interruption, ...]
    """Of many jobs the most expensive ones."""
    jobs: int = 1
    whole: bool = True
    """False: there were more attempts than are added up at once; these are the last ones."""


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


# Overview


class AttentionItem(HubReply, frozen=True, kw_only=True):
    """Something that a person has to look at."""

    kind: AttentionKind
    what: str
    since_s: float
    why: str
    action: AttentionAction
    """One thing to do about it, with `subject`."""
    fix: str
    """The same in words."""
    subject: str = ""
    """The id of the job or host."""
    jobs: int = 1
    """How many it is about."""


class HistoryFigure(HubReply, frozen=True, kw_only=True):
    value: float | None
    """Now; null: nothing to tell it from."""
    at_s: tuple[float, ...]
    values: tuple[float, ...]
    """Over the last 24 hours: means of 15 minutes. Empty for one project."""


class OverviewQuery(Message, frozen=True, kw_only=True):
    project: Word = ""
    """Attention and counts of the jobs of this project alone; disk, hosts, cards and goodput are those of all."""


class OverviewReply(HubReply, frozen=True, kw_only=True):
    at_s: float
    """When this was computed, a few seconds ago at most."""
    attention: tuple[AttentionItem, ...]
    """What is worst first."""
    running: HistoryFigure
    waiting: HistoryFigure
    longest_wait_s: float
    """Of the jobs in the queue."""
    longest_waiting: str
    """The id of that job; empty: none waits."""
    busy_cards: HistoryFigure
    cards: int
    """Of hosts that take jobs."""
    goodput: HistoryFigure
    """The useful share of the last hour, 0 to 1."""
    hosts: dict[str, int]
    """How many are `online`, `suspect` or `offline`, without those that have left."""
    by_status: dict[str, int]


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
    """By name; those of other projects than the default one by `project/name`."""


# Sweeps


class MetricObjective(HubReply, frozen=True, kw_only=True):
    metric: str
    direction: Direction
    declared: bool = False
    """False: the hub has chosen it among the metrics that there are."""


class SweepsQuery(Message, frozen=True, kw_only=True):
    project: Word = ""
    search: Text = ""
    """In the name or the project; upper and lower case are the same."""
    offset: Offset = 0
    limit: Annotated[int, msgspec.Meta(ge=1, le=100)] = 50


class SweepTrial(HubReply, frozen=True, kw_only=True):
    job_id: str
    label: str
    status: JobStatus
    pruned: bool = False
    """It was ended early, because it fell behind."""
    parameters: dict[str, Any]
    """By name, with dots where one is inside a table."""
    metrics: dict[str, float]
    """Those of its result. Of a trial that has not completed: what it reported last."""
    reason: str = ""
    host_id: str = ""
    attempt: int = 0
    created_at_s: float
    changed_at_s: float


class SweepBest(HubReply, frozen=True, kw_only=True):
    job_id: str
    label: str
    value: float
    metrics: dict[str, float]
    parameters: dict[str, Any]
    """Those in which the trials of the sweep differ."""


class SweepSummary(HubReply, frozen=True, kw_only=True):
    project: str
    name: str
    owner: str = ""
    method: str = ""
    """How points are proposed; empty: they were all given in the manifest."""
    source: str = ""
    """The file of the manifest that it belongs to."""
    state: Literal["running", "waiting", "ended", "stopped"]
    objective: MetricObjective | None = None
    """None: no trial has reported a metric."""
    trials: int
    planned: int | None = None
    """Of a sweep that searches: how many trials it makes."""
    by_status: dict[str, int]
    pruned: int = 0
    skipped: int = 0
    """Trials that waited for a host when the sweep was stopped, and were cancelled therefore."""
    changed_at_s: float
    best: SweepBest | None = None


class SweepsReply(HubReply, frozen=True, kw_only=True):
    sweeps: tuple[SweepSummary, ...]
    """The one that changed last comes first."""
    total: int


class SweepQuery(Message, frozen=True, kw_only=True):
    metric: Word = ""
    """Compare by this one; empty: by the objective."""
    lowest: bool | None = None
    """Whether less of `metric` is better; null: by its name."""
    limit: Page = MAX_PAGE


class SweepReply(HubReply, frozen=True, kw_only=True):
    sweep: SweepSummary
    axes: tuple[str, ...]
    """The parameters in which the trials differ."""
    metrics: tuple[str, ...]
    """Those that trials have reported."""
    trials: tuple[SweepTrial, ...]
    """In the order in which they were queued. If there are more than `limit`: the best ones."""


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
    serving: bool = False
    """It is a training server, and serves."""


class HostRoom(HubReply, frozen=True, kw_only=True):
    capacity: HostAmounts
    """What the host has for jobs, by what its agent detects and by its policy."""
    free: HostAmounts
    jobs: tuple[HostJob, ...]


class HostsReply(HubReply, frozen=True, kw_only=True):
    hosts: tuple[Host, ...]


class HostsQuery(Message, frozen=True, kw_only=True):
    search: Text = ""
    """In the name, id, pool, labels or the names of cards; upper and lower case are the same."""
    status: HostStatus | None = None
    sort: Literal["name", "load", "seen"] = "name"
    """`load`: the busiest first. `seen`: the host whose last heartbeat is oldest first."""
    offset: Offset = 0
    limit: Page = 100


class HostCard(HubReply, frozen=True, kw_only=True):
    id: str
    name: str
    vram_gib: float
    taken: float
    """The share of it that jobs have, 0 to 1."""
    use: float | None = None
    """The share of the time in which it computed, 0 to 1; null: it is not known."""
    vram_used_gib: float | None = None


class HostSummary(HubReply, frozen=True, kw_only=True):
    id: str
    name: str
    status: HostStatus
    """State and presence in one word: the one that keeps it from jobs, if there is one."""
    status_reason: str = ""
    pool: str = ""
    seen_ago_s: float
    """By the hub's clock, at the time of the reply."""
    cores: int
    ram_gib: float
    cpu_use: float | None = None
    """Processes that run or wait for a core, for each core; null: it is not known."""
    ram_used_gib: float | None = None
    cards: tuple[HostCard, ...] = ()
    jobs: tuple[HostJob, ...] = ()


class HostPageReply(HubReply, frozen=True, kw_only=True):
    hosts: tuple[HostSummary, ...]
    total: int
    """How many match, on all pages."""
    by_status: dict[str, int]
    """Of all hosts that match `search`."""


class HostPolicyReply(HubReply, frozen=True, kw_only=True):
    project: str = ""
    """Whose manifest declares the policy; empty: none does."""
    rules: tuple[str, ...]
    """What the policy says, in words."""
    quiet_hours: tuple[str, ...] = ()
    """In the host's own time."""
    utc_offset_min: int = 0
    quiet_now: str = ""
    """The quiet hours it is in."""


class HostPlanQuery(Message, frozen=True, kw_only=True):
    action: HostAction


class HostPlanReply(HubReply, frozen=True, kw_only=True):
    """What an action would do now. Nothing is changed."""

    action: HostAction
    possible: bool
    effects: tuple[str, ...]
    """In words; if it is not possible, why."""
    ends: tuple[HostJob, ...] = ()
    """The jobs that would end here and run elsewhere or again."""
    stays: tuple[HostJob, ...] = ()
    """The jobs that would run to their end here."""
    stranded: int = 0
    """Jobs that wait, and for which no other host would be left."""


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
    tail: Offset = 0
    """Begin so many bytes before the end, instead of at `offset`."""
    limit: Annotated[int, msgspec.Meta(ge=1, le=4 * 1024 * 1024)] = 1024 * 1024
    wait_s: WaitS = 0.0
    """Wait so long for something behind `offset`, unless the attempt has ended."""


class MetricsQuery(StreamQuery, frozen=True, kw_only=True):
    points: Annotated[int, msgspec.Meta(ge=0, le=2000)] = 0
    """With it the reply is `MetricsReply`: series with so many points at most, of all attempts if `attempt` is 0.
    Without: the JSON lines themselves."""
    names: Annotated[tuple[Annotated[str, msgspec.Meta(max_length=1024)], ...], msgspec.Meta(max_length=8)] = ()
    """With `points`: of these metrics only; several also in one, with commas between."""


class MetricSeries(HubReply, frozen=True, kw_only=True):
    """The lowest and the highest value of each of equal groups, if there are more values than points."""

    name: str
    at_s: tuple[float, ...]
    """When each value was reported, by the clock of its host."""
    steps: tuple[int | None, ...]
    values: tuple[float, ...]
    last: float | None
    """Null: it was not a finite number."""
    count: int
    """How many finite values were reported."""
    not_finite: int
    """How many others: NaN or infinite."""


class MetricsReply(HubReply, frozen=True, kw_only=True):
    series: tuple[MetricSeries, ...]
    names: tuple[str, ...]
    """All that were reported."""
    attempts: tuple[int, ...]
    """Their numbers."""
    progress: JobProgress | None = None


class EventsQuery(Message, frozen=True, kw_only=True):
    after: Prefix = ""
    """The `cursor` of the last event that was seen; `newest` for what comes from now on."""
    before: Prefix = ""
    """Newest first: what was before the event with this `cursor`; `newest` for the first page."""
    subject: Prefix = ""
    kind: Annotated[tuple[Word, ...], msgspec.Meta(max_length=16)] = ()
    """Kinds of events, or globs of these as in `job.*`."""
    search: Text = ""
    """Without regard to case, in the kind, the subject, the actor and the details."""
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
    """Where to go on, also when there was nothing: as `after`, or as `before` when the newest come first. Empty: that
    was the first event of all."""
    more: bool = False
    """There may be more events that match: go on from `cursor`. A page looks at some thousand events at most."""
    hosts: dict[str, str] = {}
    """The names of the hosts that acted, by id; only where the newest come first."""
    keys: dict[str, str] = {}
    """Whose the keys are that acted, by their ids."""
    jobs: dict[str, str] = {}
    """The names of the jobs that the events are about, by id."""


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
    owner: str = ""
    """Of the name, where it is data; else of the job that made it, or of the bytes."""
    project: str = ""
    trainer_digest: str = ""
    """Of the attempt that made it."""


class MadeReply(HubReply, frozen=True, kw_only=True):
    artifacts: tuple[Made, ...]
    next: int | None = None
    """Give it as `before` for the next page; null at the end."""
    objective: MetricObjective | None = None
    """The metric that tells the better of these; null: they have none."""


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


class LineageQuery(Message, frozen=True, kw_only=True):
    descendants: bool = False
    """Also what was made from it, and from that."""
    limit: Page = MAX_PAGE
    """Of each direction."""


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
    pool: Pool = ""
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
    used_at_s: float | None = None
    """When a request last came with it; null: never."""


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


class LoginCodeReply(HubReply, frozen=True, kw_only=True):
    code: str
    """For `/login?code=`, once; told only here."""
    expires_in_s: float
    url: str = ""
    """Where browsers on the hub's machine reach it."""


class HubKeyReply(HubReply, frozen=True, kw_only=True):
    key: HubKey
    secret: str
    """The text of the key; told only here."""


class KeysReply(HubReply, frozen=True, kw_only=True):
    keys: tuple[HubKey, ...]


class GangRow(HubReply, frozen=True, kw_only=True):
    """A job of the coordinator."""

    id: str
    status: str
    """created, running, stopped or finished."""
    run: int
    generation: int
    workers: int
    min_workers: int
    max_workers: int
    """0: no limit."""
    checkpoint_step: int | None = None


class GangsReply(HubReply, frozen=True, kw_only=True):
    gangs: tuple[GangRow, ...]
    coordinator: str
    """Its address; empty: this hub has none."""


class GangQuery(Message, frozen=True, kw_only=True):
    search: Text = ""
    """Of the names and hosts of workers."""
    offset: Annotated[int, msgspec.Meta(ge=0, le=1_000_000)] = 0
    limit: Annotated[int, msgspec.Meta(ge=1, le=200)] = 50


class GangSpan(HubReply, frozen=True, kw_only=True):
    """What a worker did from a time to another."""

    status: str
    start_s: float
    end_s: float


class GangWorker(HubReply, frozen=True, kw_only=True):
    id: str
    status: str
    """As the worker reports it: initializing, idle, loading_data, training, checkpointing, recovering or error."""
    liveness: str
    """alive, suspect, lost or left."""
    reason: str
    """Why it is thought so."""
    rank: int | None
    hostname: str
    gpus: int
    silent_s: float
    step: int | None
    step_time_s: float | None
    slowdown: float | None
    """Its step time divided by the median of all, by computing times where they are known."""
    leased_shards: int
    compute_time_s: float | None = None
    """What it spent on a step itself, without waiting for others."""
    finding: str = ""
    """straggler or hang, as long as it counts as one."""
    finding_reason: str = ""
    lane: tuple[GangSpan, ...] = ()
    """Its last hour."""


class GangCount(HubReply, frozen=True, kw_only=True):
    status: str
    liveness: str
    count: int


class GangBarrier(HubReply, frozen=True, kw_only=True):
    id: str
    step: int
    arrived: int
    expected: int
    missing: tuple[str, ...]
    """Of many only the first ones."""
    open_s: float


class GangEpoch(HubReply, frozen=True, kw_only=True):
    """In shards."""

    epoch: int
    done: int
    leased: int
    waiting: int
    quarantined: int


class GangDataset(HubReply, frozen=True, kw_only=True):
    id: str
    mode: str
    samples: int
    shards: int
    epochs: tuple[GangEpoch, ...]
    """In progress."""
    finished: int
    """How many epochs."""


class GangCheckpoint(HubReply, frozen=True, kw_only=True):
    id: str
    step: int
    committed: bool
    parts: int
    missing: int
    size: int
    at_s: float | None


class GangGoodput(HubReply, frozen=True, kw_only=True):
    """How the time of the run was spent; the parts add up to the time since it began."""

    useful_s: float
    waiting_s: float
    checkpoint_s: float
    detect_s: float
    restart_s: float
    rolled_back_s: float
    phase: str
    share: float | None
    """Useful time of the time with workers."""


class GangEventRow(HubReply, frozen=True, kw_only=True):
    number: int
    kind: str
    at_s: float
    generation: int
    workers: tuple[str, ...]
    worker_count: int
    message: str
    detect_s: float
    restart_s: float
    rolled_back_s: float

    @property
    def cost_s(self) -> float:
        return self.detect_s + self.restart_s + self.rolled_back_s


class GangReply(HubReply, frozen=True, kw_only=True):
    gang: GangRow
    observed_at_s: float
    counts: tuple[GangCount, ...]
    workers: tuple[GangWorker, ...]
    """A page; those first that may need a person."""
    workers_total: int
    """That match the search."""
    lanes_start_s: float | None
    """Since when lanes are known."""
    barriers: tuple[GangBarrier, ...]
    datasets: tuple[GangDataset, ...]
    checkpoints: tuple[GangCheckpoint, ...]
    goodput: GangGoodput | None
    incidents: tuple[GangEventRow, ...]
    """The latest first."""


class GangEventsQuery(Message, frozen=True, kw_only=True):
    kind: tuple[Word, ...] = ()
    search: Text = ""
    before: Annotated[int, msgspec.Meta(ge=0)] = 0
    limit: Annotated[int, msgspec.Meta(ge=1, le=1000)] = 100


class GangEventsReply(HubReply, frozen=True, kw_only=True):
    events: tuple[GangEventRow, ...]
    next_before: int
    """0: there are no earlier ones."""
