"""What the orchestrator knows: all of it built from facts, except what each tenant of the scheduler has saved up."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from enum import StrEnum
from typing import Any, Final, Literal

import msgspec

from strata.train.core import ops
from strata.train.core.commands import Row
from strata.train.core.future import Future, FutureStatus, FutureStore
from strata.train.core.sampling import QuantumPlan, Sample
from strata.train.core.schedule import Entry, Scheduler
from strata.train.core.sequence import Line

_NAME_CHARACTERS: Final = frozenset("ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789._-")
INITIAL: Final = "000000"
"""The name of every model's first checkpoint, from before anything was trained."""
IMPORTED: Final = "import-"
"""How the ids of runs begin that were made elsewhere."""
FIRST_LOAD: Final = "load"
"""The place of the weights that a model may begin with, before the operations that its client counts."""


class Rules(msgspec.Struct, frozen=True, kw_only=True):
    """The settings that decisions depend on."""

    max_running: int = 2
    max_pending: int = 100
    max_pending_per_tenant: int | None = None
    """None: half of all, so that no tenant alone can shut out the others."""
    base_models: Sequence[str]
    """What clients may call the model that is served; the first is its name."""
    max_tokens_per_row: int = 4096
    pack_tenants: bool = True
    slots: int | None = None
    """Models that one pass may be of; None is any number."""
    initial_checkpoint: bool = True
    result_ttl_s: float = 86_400.0
    max_kept_results: int = 200_000
    max_samplers: int = 64
    max_models_per_tenant: int | None = None
    max_pending_samples: int = 2048
    """Requests for samples that are accepted and not yet at the ranks."""
    max_running_samples: int = 256
    """Requests for samples at the ranks."""
    quantum_steps: int = 32
    push: bool = False
    """Tell the endpoints of all weights that are saved for sampling."""
    route: bool = False
    """Ask endpoints that have the weights for samples."""
    keep_versions: int = 2
    """Of each model on an endpoint."""
    snapshot_dispatches: int = 0
    """That change something, between two snapshots of the models; 0 is never for this reason."""
    snapshot_s: float = 0.0
    snapshot_payload_bytes: int = 0
    keep_checkpoints: int | None = None
    """Of each run and kind, the newest; None keeps all."""

    @property
    def tenant_quota(self) -> int:
        return self.max_pending_per_tenant or max(self.max_pending // 2, 1)

    @property
    def sample_quota(self) -> int:
        return max(self.max_pending_samples // 2, 1)

    @property
    def running_quota(self) -> int:
        return max(self.max_running_samples * 3 // 4, 1)


class Session(msgspec.Struct):
    session_id: str
    tenant: str
    opened_at_s: float
    tags: Sequence[str] = ()
    user_metadata: Mapping[str, Any] = {}
    sdk_version: str = ""
    finished: str | None = None
    models: list[str] = []


class Model(msgspec.Struct):
    model_id: str
    tenant: str
    session_id: str
    create: ops.CreateModel
    created_at_s: float
    last_request_at_s: float
    line: Line
    done: int = 0
    """The last operation, by number, of which the result is there."""
    refused: bool = False
    """The ranks never had it: what it was created with cannot be, or there was no place."""
    unloading: bool = False
    unloaded: bool = False


class SamplerStatus(StrEnum):
    COMING = "coming"
    """Accepted. Requests wait until the ranks are told of it; they do one thing after the other."""
    OPEN = "open"
    FAILED = "failed"


class Sampler(msgspec.Struct):
    """One that makes room for another is not here any more."""

    sampler_id: str
    tenant: str
    session_id: str
    base_model: str
    model_path: str | None
    status: SamplerStatus = SamplerStatus.COMING
    used: int = 0
    """When it was asked for samples last, in the order of turns."""
    folder: str = ""
    """Of the saved weights that it was opened from, and stays with if others get their name."""


class Endpoint(msgspec.Struct, frozen=True):
    """An inference engine that is told of new weights."""

    name: str
    url: str
    address: str
    """What its host was when it was added; no other is ever connected to."""
    engine: Literal["vllm", "transformers"]
    added_at_s: float


class Push(msgspec.Struct, frozen=True):
    """Weights on their way to endpoints. The same again is harmless: no other weights have that name."""

    path: str
    version: str
    model_id: str
    seq_id: int
    endpoints: Sequence[str]
    future_id: str


class Publication(msgspec.Struct, frozen=True):
    """Weights that endpoints have, unless they were restarted since."""

    path: str
    version: str
    model_id: str
    seq_id: int
    endpoints: Sequence[str]


class Checkpoint(msgspec.Struct, frozen=True):
    operation: ops.SaveWeights
    path: str
    saved_at_s: float = 0.0
    expires_at_s: float | None = None
    number: int = 0
    """Of the dispatch that saved it; 0 if it was made elsewhere, and no rank can save it again."""


class Reading(msgspec.Struct, frozen=True, array_like=True):
    """The dispatches that saved a checkpoint, 0 if it was made elsewhere, and that told the ranks last to read it."""

    saved: int
    read: int


class Dispatch(msgspec.Struct, frozen=True):
    number: int
    future_ids: Sequence[str]
    rows: Sequence[Sequence[Row]] = ()
    path: str = ""
    close: Sequence[str] = ()
    quantum: QuantumPlan | None = None
    snapshot: bool = False


class Since(msgspec.Struct, frozen=True):
    """What was dispatched since the last snapshot."""

    dispatches: int = 0
    """That changed something."""
    payload_bytes: int = 0
    first_at_s: float = 0.0
    """When the first of those was."""


class Snapshot(msgspec.Struct, frozen=True):
    """All models after the dispatch with this number."""

    number: int
    name: str
    digest: str = ""
    """Of its manifest; empty until all of it is on the disk."""
    pending: Mapping[str, ops.Operation] = {}
    """Accepted before it and not dispatched, by future: replaying what came after needs them."""
    since: Since = Since()
    """While it is being taken: what it covers that the one before did not."""


CheckpointKey = tuple[str, str, str]
"""Run, kind and name."""


class TrainState:
    def __init__(self, rules: Rules, saved: Saved | None = None) -> None:  # noqa: PLR0915 - all that is known
        saved = saved or Saved()
        self.rules = rules
        self.sessions = {each.session_id: each for each in saved.sessions}
        self.models = {each.model_id: each for each in saved.models}
        self.futures = FutureStore(saved.futures, saved.ended)
        self.checkpoints = {key_of(each.operation): each for each in saved.checkpoints}
        """Complete ones, the newest of each name."""
        self.saving = {key_of(each.operation): each for each in saved.saving}
        self.readings = dict(saved.readings)
        """By folder, of checkpoints that the ranks were told to read."""
        self.dispatches = {each.number: each for each in saved.dispatches}
        """Told to the ranks and not answered."""
        self.dispatched = saved.dispatched
        """The last number given out."""
        self.given_up = set(saved.given_up)
        self.spoiled = saved.spoiled
        """The group of ranks was told what was given up later, and may do it yet: nobody speaks to it again."""
        self.turns = saved.turns
        self.server_operations = saved.server_operations
        self.samplers = {each.sampler_id: each for each in saved.samplers}
        self.waiting: dict[str, Sample] = {}
        """Requests for samples that are not at the ranks, in their order."""
        self.sampling: dict[str, Sample] = {}
        """Those that are."""
        self.cancels = set(saved.cancels)
        """Ended here because their client gave them up; the ranks are told with the next quantum."""
        self.endpoints = {each.name: each for each in saved.endpoints}
        self.pushes = {each.path: each for each in saved.pushes}
        self.published = {each.path: each for each in saved.published}
        """The newest of each model, oldest first."""
        self.routed: dict[str, tuple[str, Sample]] = {}
        """Requests for samples that an endpoint is asked for: which, and what."""
        self.unroutable = set(saved.unroutable)
        """Requests that an endpoint did not answer."""
        self.group = saved.group
        """Of the ranks that have the requests."""
        self.asleep = saved.asleep
        self.sampled_last = saved.sampled_last
        """Whether the last dispatch was a quantum."""
        self.last_quantum = 0
        """The last one that this process saw answered: for telling deaths in a row from deaths over the years."""
        self.snapshots = list(saved.snapshots)
        """Committed ones, the newest last."""
        self.snapshotting = saved.snapshotting
        """The one that the ranks are told to take, until it is there or given up."""
        self.snapshot_failures = saved.snapshot_failures
        """In a row."""
        self.since = saved.since
        self.cut = saved.cut
        """Dispatches up to this number are let go: there is a snapshot of then or later. 0: everything is there."""
        self.scheduler = Scheduler(rules.max_tokens_per_row)
        for future in sorted(self.futures, key=lambda each: each.turn):
            if isinstance(future.operation, Sample) and future.future_id in saved.routed:
                self.routed[future.future_id] = saved.routed[future.future_id], future.operation
            elif isinstance(future.operation, Sample):
                queue = self.waiting if future.status is FutureStatus.PENDING else self.sampling
                queue[future.future_id] = future.operation
            elif future.status is FutureStatus.PENDING and future.turn:
                self.scheduler.add(entry_of(future))

    @property
    def settled(self) -> int:
        """Every dispatch up to this number has its results."""
        return min(self.dispatches, default=self.dispatched + 1) - 1

    @property
    def quantum(self) -> Dispatch | None:
        """The one that is at the ranks; there is never another beside it."""
        return next((each for each in self.dispatches.values() if each.quantum is not None), None)

    def samples_of(self, sampler_id: str) -> Iterator[str]:
        for queue in (self.waiting, self.sampling):
            yield from (future_id for future_id, sample in queue.items() if sample.sampler_id == sampler_id)
        yield from (future_id for future_id, (_, sample) in self.routed.items() if sample.sampler_id == sampler_id)

    def save(self) -> Saved:
        return Saved(
            sessions=list(self.sessions.values()),
            models=list(self.models.values()),
            futures=list(self.futures),
            ended=self.futures.ended,
            checkpoints=list(self.checkpoints.values()),
            saving=list(self.saving.values()),
            readings=self.readings,
            dispatches=list(self.dispatches.values()),
            dispatched=self.dispatched,
            given_up=sorted(self.given_up),
            spoiled=self.spoiled,
            turns=self.turns,
            server_operations=self.server_operations,
            samplers=list(self.samplers.values()),
            cancels=sorted(self.cancels),
            group=self.group,
            endpoints=list(self.endpoints.values()),
            pushes=list(self.pushes.values()),
            published=list(self.published.values()),
            routed={future_id: endpoint for future_id, (endpoint, _) in self.routed.items()},
            unroutable=sorted(self.unroutable),
            asleep=self.asleep,
            sampled_last=self.sampled_last,
            snapshots=self.snapshots,
            snapshotting=self.snapshotting,
            snapshot_failures=self.snapshot_failures,
            since=self.since,
            cut=self.cut,
        )


class Saved(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A snapshot. Operations that ended are not in it: the journal keeps them for ranks that start anew."""

    sessions: Sequence[Session] = ()
    models: Sequence[Model] = ()
    futures: Sequence[Future] = ()
    ended: Sequence[str] = ()
    checkpoints: Sequence[Checkpoint] = ()
    saving: Sequence[Checkpoint] = ()
    readings: Mapping[str, Reading] = {}
    dispatches: Sequence[Dispatch] = ()
    dispatched: int = 0
    given_up: Sequence[int] = ()
    turns: int = 0
    server_operations: int = 0
    samplers: Sequence[Sampler] = ()
    cancels: Sequence[str] = ()
    group: str = ""
    endpoints: Sequence[Endpoint] = ()
    pushes: Sequence[Push] = ()
    published: Sequence[Publication] = ()
    routed: Mapping[str, str] = {}
    unroutable: Sequence[str] = ()
    asleep: bool = False
    spoiled: bool = False
    sampled_last: bool = False
    snapshots: Sequence[Snapshot] = ()
    snapshotting: Snapshot | None = None
    snapshot_failures: int = 0
    since: Since = Since()
    cut: int = 0


def is_name(text: str) -> bool:
    """Whether it can be a part of an id and of a path."""
    return 1 <= len(text) <= 128 and text[0] not in ".-" and _NAME_CHARACTERS.issuperset(text)


def key_of(operation: ops.SaveWeights) -> CheckpointKey:
    return operation.model_id, operation.kind, operation.name


def run_folder(model_id: str) -> str:
    return model_id.replace(":", "-")


def folder_of(operation: ops.SaveWeights) -> str:
    """One for every save, so that it is never another one's; replaying the save finds its own again."""
    return f"{run_folder(operation.model_id)}/{operation.kind}/{operation.name}@{operation.seq_id}"


def entry_of(future: Future) -> Entry:
    operation = future.operation
    assert operation is not None, f"{future.future_id} has ended"
    tokens = sum(operation.lengths) if isinstance(operation, ops.ForwardBackward) else 0
    shares = future.kind if isinstance(operation, ops.ForwardBackward | ops.OptimStep) else ""
    return Entry(future.future_id, future.tenant, future.model_id, future.kind, tokens, future.turn, shares)


def future_id_of(operation: ops.Operation, server_operations: int) -> str:
    """Derived from what identifies the operation: an operation that is sent again finds the future it was given."""
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
        case Sample():
            return f"{operation.sampler_id}:{operation.seq_id}"
        case ops.LoadWeights() if operation.seq_id == 0:
            return f"{operation.model_id}:{FIRST_LOAD}"
        case _:
            return f"{operation.model_id}:{operation.seq_id}" if operation.seq_id else f"{operation.model_id}:{INITIAL}"
    return f"{operation.model_id}:{kind}"
