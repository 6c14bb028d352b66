"""The state of a training server as types (sessions, models, samplers, checkpoints, dispatches), and `Rules`: every
limit and lifetime that the core decides by, with defaults; also the pattern of names.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from enum import StrEnum
from typing import Any, Final, Literal

import msgspec

from strata.train.core import ops
from strata.train.core.commands import Row
from strata.train.core.future import FutureStatus, FutureStore, OperationFuture
from strata.train.core.loss_graph import CustomLoss
from strata.train.core.replay_differences import RankNumerics, ReplayDifferences
from strata.train.core.sampling import DrawnSequence, SampleOperation, SlicePlan
from strata.train.core.scheduler import QueuedOperation, Scheduler
from strata.train.core.sequence import SequenceWindow
from strata.train.core.usage import HourlyUsage, UsageCount

_NAME_CHARACTERS: Final = frozenset("ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789._-")
INITIAL: Final = "000000"
"""The name of every model's first checkpoint, from before anything was trained."""
_DEVICES: Final = frozenset(
    {"con", "prn", "aux", "nul", *(f"{port}{digit}" for port in ("com", "lpt") for digit in range(10))}
)
"""Names that Windows reserves, whatever follows their first dot."""
IMPORTED: Final = "import-"
"""Prefix of the ids of imported runs."""
INITIAL_LOAD: Final = "load"
"""The id of the load that a model may begin with, before the operations that its client counts."""
ROLLBACK: Final = "rollback-"
"""Prefix of the ids of loads that an owner asked for after a replay that differed."""


class Rules(msgspec.Struct, frozen=True, kw_only=True):
    """The settings that decisions depend on."""

    max_running: int = 2
    max_pending: int = 100
    max_pending_per_tenant: int | None = None
    """None: half of all, so that one tenant cannot shut out the others."""
    base_models: Sequence[str]
    """What clients may call the model that is served; the first is its name."""
    max_tokens_per_row: int = 4096
    fairness_quantum_tokens: int = 4096
    """What a tenant's turn adds to its deficit."""
    pack_tenants: bool = True
    slots: int | None = None
    """Models that one pass may be of; None is any number."""
    initial_checkpoint: bool = True
    result_ttl_s: float = 86_400.0
    max_kept_results: int = 200_000
    max_samplers: int = 64
    max_models_per_tenant: int | None = None
    max_sessions_per_tenant: int = 1000
    """The most sessions that have not ended."""
    ended_session_ttl_s: float = 30 * 86_400.0
    max_ended_sessions: int = 1000
    """The most ended sessions of one tenant, without models."""
    max_imports_per_tenant: int = 1000
    """Checkpoints that were imported or copied."""
    max_loss_bytes: int = 1 << 20
    """Bytes of all custom losses of one tenant, encoded."""
    max_pending_samples: int = 2048
    """Sample requests that are accepted and not yet dispatched."""
    max_running_samples: int = 256
    """Sample requests at the ranks."""
    slice_steps: int = 32
    push: bool = False
    """Push all weights that are saved for sampling to the endpoints."""
    route: bool = False
    """Route samples to endpoints that have the weights."""
    engines: Sequence[str] = ()
    """Endpoints that the server itself starts, and restarts when they die: samples wait for them."""
    device_turn_s: float = 0.0
    """How long ranks or engines may keep the devices that they share while the other side waits; 0: they take no
    turns."""
    fallback: bool = False
    """Let the ranks sample what those fail to deliver."""
    refuse_unroutable: bool = False
    """Fail the samples that no engine can draw, instead of leaving them to the ranks."""
    keep_versions: int = 2
    """Versions of each model on an endpoint."""
    snapshot_dispatches: int = 0
    """Dispatches that modify a model, between two snapshots of the models; 0 is never for this reason."""
    snapshot_s: float = 0.0
    snapshot_payload_bytes: int = 0
    snapshot_replay_s: float = 0.0
    """A snapshot is due when a replay would take so long, or as long as `snapshots.COST_SHARE` demands."""
    keep_checkpoints: int | None = None
    """Checkpoints of each run and kind, the newest; None keeps all."""

    @property
    def tenant_quota(self) -> int:
        return self.max_pending_per_tenant or max(self.max_pending // 2, 1)

    @property
    def sample_quota(self) -> int:
        return max(self.max_pending_samples // 2, 1)

    @property
    def running_quota(self) -> int:
        return max(self.max_running_samples * 3 // 4, 1)


class ClientSession(msgspec.Struct):
    session_id: str
    tenant: str
    opened_at_s: float
    tags: Sequence[str] = ()
    user_metadata: Mapping[str, Any] = {}
    sdk_version: str = ""
    finished: str | None = None
    models: list[str] = []
    finished_at_s: float = 0.0
    """0 for one that has not ended."""


class CustomLossRecord(msgspec.Struct, frozen=True):
    loss_id: str
    tenant: str
    loss: CustomLoss


class TrainedCount(msgspec.Struct, frozen=True, array_like=True):
    steps: int = 0
    passes: int = 0
    """Backward passes, of which a client may send several for one step."""
    datums: int = 0
    tokens: int = 0
    sampled_tokens: int = 0
    """Those of these that the client declared to be sampled (`Datum.with_provenance`)."""

    def plus(self, other: TrainedCount) -> TrainedCount:
        return TrainedCount(
            self.steps + other.steps,
            self.passes + other.passes,
            self.datums + other.datums,
            self.tokens + other.tokens,
            self.sampled_tokens + other.sampled_tokens,
        )


class WeightsLineage(msgspec.Struct, frozen=True, array_like=True):
    parent: str = ""
    """The path of the checkpoint that was loaded; empty if training began with the base model."""
    trained: TrainedCount = TrainedCount()
    """Counts since the parent."""
    before: TrainedCount = TrainedCount()
    """Counts of the parent with all before it, as far as this server trained them."""
    pending: TrainedCount = TrainedCount()
    """Passes whose gradients no step has used yet."""


class ReplayStop(msgspec.Struct, frozen=True):
    """A replay gave a model other numbers than its client has."""

    number: int
    """The first dispatch that differs."""
    through: int
    """The last dispatch of the replay."""
    snapshot: int
    """The dispatch of the last snapshot from before the difference; 0 if there is none."""
    at_s: float
    differences: ReplayDifferences


class ModelRecord(msgspec.Struct):
    model_id: str
    tenant: str
    session_id: str
    create: ops.CreateModel
    created_at_s: float
    last_request_at_s: float
    line: SequenceWindow
    done: int = 0
    """The sequence number of the last operation that has a result."""
    refused: bool = False
    """The ranks rejected its creation: its configuration is invalid, or there was no slot."""
    unloading: bool = False
    unloaded: bool = False
    lineage: WeightsLineage = WeightsLineage()
    stopped: ReplayStop | None = None
    """Why its operations are refused."""
    accepted_through: int = 0
    """Differences in replays of dispatches up to this one were accepted, or rolled back."""


class SamplerStatus(StrEnum):
    COMING = "coming"
    """Accepted. Samples wait until its operation is dispatched; the ranks run one dispatch after the other."""
    OPEN = "open"
    FAILED = "failed"


class SamplerState(msgspec.Struct, omit_defaults=True):
    """An open sampler. An evicted one is not in the state any more."""

    sampler_id: str
    tenant: str
    session_id: str
    base_model: str
    model_path: str | None
    status: SamplerStatus = SamplerStatus.COMING
    used: int = 0
    """The turn of its last sample: for least-recently-used eviction."""
    folder: str = msgspec.field(default_factory=str)
    """The folder of the checkpoint that it was opened from. It keeps it even if another one gets the same name."""
    model_id: str = ""
    """The model whose weights it has, if they are in flight or its routing is replayed."""
    inflight: bool = False
    """Whether it has those that the in-flight samplers of that model share."""

    @property
    def inflight_model(self) -> str:
        return self.model_id if self.inflight else ""


class DrawnSample(msgspec.Struct, frozen=True, array_like=True):
    sequences: Mapping[int, DrawnSequence] = {}
    """Those that have begun, by their place."""
    saves: int = 0
    """In-flight saves of its model that ended since its first token became durable."""


class InferenceEndpoint(msgspec.Struct, frozen=True):
    """An inference engine that new weights are pushed to."""

    name: str
    url: str
    address: str
    """What its host resolved to when it was added; no other address is ever connected to."""
    engine: Literal["vllm", "transformers"]
    added_at_s: float


class Publication(msgspec.Struct, frozen=True):
    """Weights that endpoints have, unless they were restarted since."""

    path: str
    version: str
    model_id: str
    seq_id: int
    endpoints: Sequence[str]


class Push(Publication, frozen=True):
    """A push of weights to endpoints in progress. Idempotent: no other weights have that version."""

    future_id: str


class ModelCheckpoint(msgspec.Struct, frozen=True):
    operation: ops.SaveWeights
    path: str
    saved_at_s: float = 0.0
    expires_at_s: float | None = None
    number: int = 0
    """The number of the dispatch that saved it; 0 if it was imported, and no replay can save it again."""
    public: bool = False
    """Its owner lets all tenants of this server read it."""
    lineage: WeightsLineage = WeightsLineage()


class CheckpointRead(msgspec.Struct, frozen=True, array_like=True):
    """The dispatch that saved a checkpoint, 0 if it was imported, and the last one that reads it."""

    saved: int
    read: int


DeviceSide = Literal["ranks", "engines"]


class DeviceTurn(msgspec.Struct, frozen=True, omit_defaults=True):
    """Who has the devices that ranks and engines share in turns."""

    number: int = 0
    """The number of the last request of a turn."""
    side: DeviceSide = "ranks"
    leaving: bool = False
    """The other side was promised the devices, and gets them when this one sleeps."""
    at_s: float = 0.0
    """When the turn began."""
    busy_at_s: float = 0.0
    """When an operation or a push last ended."""


class Dispatch(msgspec.Struct, frozen=True):
    number: int
    future_ids: Sequence[str]
    rows: Sequence[Sequence[Row]] = ()
    path: str = ""
    close: Sequence[str] = ()
    slice: SlicePlan | None = None
    snapshot: bool = False


class SnapshotBacklog(msgspec.Struct, frozen=True):
    """Work since the last snapshot: what a replay costs today."""

    dispatches: int = 0
    """Those that modified a model."""
    payload_bytes: int = 0
    first_at_s: float = 0.0
    """When the first of those was dispatched."""
    replay_s: float = 0.0
    """How long the ranks took for what a replay would repeat."""


class ModelSnapshot(msgspec.Struct, frozen=True):
    """A snapshot of all models after the dispatch with this number."""

    number: int
    name: str
    digest: str = ""
    """The digest of its manifest; empty until all of it is on the disk."""
    pending: Mapping[str, ops.Operation] = {}
    """Operations that were accepted before it and not dispatched, by future: a replay from here needs them."""
    since: SnapshotBacklog = SnapshotBacklog()
    """While it is in progress: what it covers that the one before did not."""
    cost_s: float = 0.0
    """How long it took to copy and to write."""
    numerics: RankNumerics | None = None
    """Those of the ranks that copied it: the journal before it may be truncated."""


CheckpointKey = tuple[str, str, str]
"""Run, kind and name."""


class TrainState:
    def __init__(self, rules: Rules, saved: SavedState | None = None) -> None:  # noqa: PLR0915 - all that is known
        saved = saved or SavedState()
        self.rules = rules
        self.sessions = {each.session_id: each for each in saved.sessions}
        self.models = {each.model_id: each for each in saved.models}
        self.futures = FutureStore(saved.futures, saved.ended)
        self.checkpoints = _by_key(saved.checkpoints)
        """Complete ones, the newest of each name."""
        self.saving = _by_key(saved.saving)
        self.checkpoint_reads = dict(saved.checkpoint_reads)
        """Reads by folder, of checkpoints that a dispatch reads."""
        self.dispatches = {each.number: each for each in saved.dispatches}
        """Dispatches in flight: without results."""
        self.dispatched = saved.dispatched
        """The number of the last dispatch."""
        self.failed_dispatches = set(saved.failed_dispatches)
        self.tainted = saved.tainted
        """The attached group was sent a dispatch that was failed later, and may still run it: it is not used again."""
        self.turns = saved.turns
        self.server_operations = saved.server_operations
        self.samplers = {each.sampler_id: each for each in saved.samplers}
        self.waiting: dict[str, SampleOperation] = {}
        """Samples that are not dispatched, in the order of acceptance."""
        self.sampling: dict[str, SampleOperation] = {}
        """Samples at the ranks."""
        self.drawn = dict(saved.drawn)
        """What is durable of in-flight samples that run, or ran on ranks that were lost."""
        self.cancelled_samples = set(saved.cancelled_samples)
        """Samples that a client cancelled while they ran; the next slice cancels them at the ranks."""
        self.endpoints = {each.name: each for each in saved.endpoints}
        self.pushes = {each.path: each for each in saved.pushes}
        self.published = {each.path: each for each in saved.published}
        """The newest of each model, oldest first."""
        self.routed: dict[str, tuple[str, SampleOperation]] = {}
        """Samples that were routed to an endpoint: its name, and the sample."""
        self.unroutable = set(saved.unroutable)
        """Samples that an endpoint failed to answer: the ranks sample them."""
        self.group = saved.group
        """The attached group of ranks."""
        self.numerics = saved.numerics
        """What the numbers of that group depend on."""
        self.asleep = saved.asleep
        self.device_turn = saved.device_turn
        """None unless a turn on shared devices was ever requested."""
        self.last_was_slice = saved.last_was_slice
        """Whether the last dispatch was a sampling slice."""
        self.last_slice = 0
        """The last slice that completed in this process: tells group deaths in a row from unrelated ones."""
        self.snapshots = list(saved.snapshots)
        """Committed ones, the newest last."""
        self.snapshotting = saved.snapshotting
        """The snapshot in progress, until it is committed or abandoned."""
        self.snapshot_failures = saved.snapshot_failures
        """Failures in a row."""
        self.snapshot_backlog = saved.snapshot_backlog
        self.truncated_through = saved.truncated_through
        """The journal is truncated up to this dispatch: there is a snapshot of it or a later one. 0: it is complete."""
        self.usage = HourlyUsage(saved.usage)
        self.custom_losses = {each.loss_id: each for each in saved.custom_losses}
        self.scheduler = Scheduler(rules.fairness_quantum_tokens)
        self._requeue(saved.routed)

    def _requeue(self, routed: Mapping[str, str]) -> None:
        """Put every open future back into its queue. `routed` are samples with the endpoint that samples them."""
        for future in sorted(self.futures, key=lambda each: each.turn):
            if isinstance(future.operation, SampleOperation) and future.future_id in routed:
                self.routed[future.future_id] = routed[future.future_id], future.operation
            elif isinstance(future.operation, SampleOperation):
                queue = self.waiting if future.status is FutureStatus.PENDING else self.sampling
                queue[future.future_id] = future.operation
            elif future.status is FutureStatus.PENDING and future.turn:
                self.scheduler.add(queued_operation(future))

    @property
    def settled_through(self) -> int:
        """Every dispatch up to this number has results."""
        return min(self.dispatches, default=self.dispatched + 1) - 1

    @property
    def running_slice(self) -> Dispatch | None:
        """The sampling slice in flight; there is never a second one."""
        return next((each for each in self.dispatches.values() if each.slice is not None), None)

    @property
    def current_turn(self) -> DeviceTurn | None:
        """The turn on the shared devices; None if the settings have none. Ranks have the first."""
        return (self.device_turn or DeviceTurn()) if self.rules.device_turn_s else None

    def may_begin(self, side: DeviceSide) -> bool:
        """Says whether ranks, or the engines of the server, may begin something."""
        turn = self.current_turn
        return turn is None or (turn.side == side and not turn.leaving)

    def samples_of(self, sampler_id: str) -> Iterator[str]:
        for queue in (self.waiting, self.sampling):
            yield from (future_id for future_id, sample in queue.items() if sample.sampler_id == sampler_id)
        yield from (future_id for future_id, (_, sample) in self.routed.items() if sample.sampler_id == sampler_id)

    def save(self) -> SavedState:
        return SavedState(
            sessions=list(self.sessions.values()),
            models=list(self.models.values()),
            futures=list(self.futures),
            ended=self.futures.ended,
            checkpoints=list(self.checkpoints.values()),
            saving=list(self.saving.values()),
            checkpoint_reads=self.checkpoint_reads,
            dispatches=list(self.dispatches.values()),
            dispatched=self.dispatched,
            failed_dispatches=sorted(self.failed_dispatches),
            tainted=self.tainted,
            turns=self.turns,
            server_operations=self.server_operations,
            samplers=list(self.samplers.values()),
            drawn=self.drawn,
            cancelled_samples=sorted(self.cancelled_samples),
            group=self.group,
            numerics=self.numerics,
            endpoints=list(self.endpoints.values()),
            pushes=list(self.pushes.values()),
            published=list(self.published.values()),
            routed={future_id: endpoint for future_id, (endpoint, _) in self.routed.items()},
            unroutable=sorted(self.unroutable),
            asleep=self.asleep,
            device_turn=self.device_turn,
            last_was_slice=self.last_was_slice,
            snapshots=self.snapshots,
            snapshotting=self.snapshotting,
            snapshot_failures=self.snapshot_failures,
            snapshot_backlog=self.snapshot_backlog,
            truncated_through=self.truncated_through,
            usage=list(self.usage),
            custom_losses=list(self.custom_losses.values()),
        )


class SavedState(
    msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True, tag_field="format", tag=2
):
    """A snapshot of this state. Ended operations are only in the journal.

    `format` counts up when the name or the meaning of a stored field changes; new ones have defaults.
    """

    sessions: Sequence[ClientSession] = ()
    models: Sequence[ModelRecord] = ()
    futures: Sequence[OperationFuture] = ()
    ended: Sequence[str] = ()
    checkpoints: Sequence[ModelCheckpoint] = ()
    saving: Sequence[ModelCheckpoint] = ()
    checkpoint_reads: Mapping[str, CheckpointRead] = {}
    dispatches: Sequence[Dispatch] = ()
    dispatched: int = 0
    failed_dispatches: Sequence[int] = ()
    turns: int = 0
    server_operations: int = 0
    samplers: Sequence[SamplerState] = ()
    drawn: Mapping[str, DrawnSample] = {}
    cancelled_samples: Sequence[str] = ()
    group: str = ""
    numerics: RankNumerics | None = None
    endpoints: Sequence[InferenceEndpoint] = ()
    pushes: Sequence[Push] = ()
    published: Sequence[Publication] = ()
    routed: Mapping[str, str] = {}
    unroutable: Sequence[str] = ()
    asleep: bool = False
    device_turn: DeviceTurn | None = None
    tainted: bool = False
    last_was_slice: bool = False
    snapshots: Sequence[ModelSnapshot] = ()
    snapshotting: ModelSnapshot | None = None
    snapshot_failures: int = 0
    snapshot_backlog: SnapshotBacklog = SnapshotBacklog()
    truncated_through: int = 0
    usage: Sequence[UsageCount] = ()
    custom_losses: Sequence[CustomLossRecord] = ()


def is_name(text: str) -> bool:
    """Says whether it is valid as part of an id and of a path."""
    return 1 <= len(text) <= 128 and text[0] not in ".-" and _NAME_CHARACTERS.issuperset(text)


def key_of(operation: ops.SaveWeights) -> CheckpointKey:
    return operation.model_id, operation.kind, operation.name


def _by_key(checkpoints: Sequence[ModelCheckpoint]) -> dict[CheckpointKey, ModelCheckpoint]:
    return {key_of(each.operation): each for each in checkpoints}


def run_folder(model_id: str) -> str:
    return model_id.replace(":", "-")


def folder_of(operation: ops.SaveWeights) -> str:
    """One folder per save, so that no two saves share one; the replay of a save finds its own again.

    A folder that Windows would take for a device gets another name: an artifact cannot have it, and so the copies of a
    server would end with a checkpoint of one tenant.
    """
    stem, dot, _ = operation.name.lower().partition(".")
    mark = "_" if dot and stem in _DEVICES else ""
    return f"{run_folder(operation.model_id)}/{operation.kind}/{mark}{operation.name}@{operation.seq_id}"


def queued_operation(future: OperationFuture) -> QueuedOperation:
    operation = future.operation
    assert operation is not None, f"{future.future_id} has ended"
    tokens = sum(operation.lengths) if isinstance(operation, ops.ForwardBackward) else 0
    batch_key = future.kind if isinstance(operation, ops.ForwardBackward | ops.OptimStep) else ""
    return QueuedOperation(
        future.future_id, future.tenant, future.model_id, future.kind, tokens, future.turn, batch_key
    )


def future_id_of(operation: ops.Operation, server_operations: int) -> str:
    """Derived from what identifies the operation, so that submitting it again is idempotent."""
    kind: Literal["create", "unload"]
    match operation:
        case ops.CreateModel():
            kind = "create"
        case ops.UnloadModel():
            kind = "unload"
        case ops.Sleep() | ops.Wake():
            return f"op:{server_operations + 1}"
        case ops.OpenSampler():
            return f"{operation.sampler_id}:open"
        case SampleOperation():
            return f"{operation.sampler_id}:{operation.seq_id}"
        case ops.LoadWeights() if operation.seq_id == 0:
            rollback = operation.rollback
            return f"{operation.model_id}:{f'{ROLLBACK}{rollback}' if rollback else INITIAL_LOAD}"
        case _:
            return f"{operation.model_id}:{operation.seq_id}" if operation.seq_id else f"{operation.model_id}:{INITIAL}"
    return f"{operation.model_id}:{kind}"


def resident_models(state: TrainState) -> Iterator[ModelRecord]:
    """Models that occupy a slot of the ranks, or will."""
    for model in state.models.values():
        if not model.unloaded and not model.refused:
            yield model
