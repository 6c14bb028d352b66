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
    initial_checkpoint: bool = True
    result_ttl_s: float = 86_400.0
    max_kept_results: int = 200_000
    max_samplers: int = 64
    max_pending_samples: int = 1024
    """Requests for samples that are accepted and not yet at the ranks."""
    max_running_samples: int = 256
    """Requests for samples at the ranks."""
    quantum_steps: int = 32

    @property
    def tenant_quota(self) -> int:
        return self.max_pending_per_tenant or max(self.max_pending // 2, 1)


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


class Checkpoint(msgspec.Struct, frozen=True):
    operation: ops.SaveWeights
    path: str
    saved_at_s: float = 0.0


class Dispatch(msgspec.Struct, frozen=True):
    number: int
    future_ids: Sequence[str]
    rows: Sequence[Sequence[Row]] = ()
    path: str = ""
    close: Sequence[str] = ()
    quantum: QuantumPlan | None = None


CheckpointKey = tuple[str, str, str]
"""Run, kind and name."""


class TrainState:
    def __init__(self, rules: Rules, saved: Saved | None = None) -> None:
        saved = saved or Saved()
        self.rules = rules
        self.sessions = {each.session_id: each for each in saved.sessions}
        self.models = {each.model_id: each for each in saved.models}
        self.futures = FutureStore(saved.futures, saved.ended)
        self.checkpoints = {key_of(each.operation): each for each in saved.checkpoints}
        """Complete ones, the newest of each name."""
        self.saving = {key_of(each.operation): each for each in saved.saving}
        self.dispatches = {each.number: each for each in saved.dispatches}
        """Told to the ranks and not answered."""
        self.dispatched = saved.dispatched
        """The last number given out."""
        self.given_up = set(saved.given_up)
        self.turns = saved.turns
        self.server_operations = saved.server_operations
        self.samplers = {each.sampler_id: each for each in saved.samplers}
        self.waiting: dict[str, Sample] = {}
        """Requests for samples that are not at the ranks, in their order."""
        self.sampling: dict[str, Sample] = {}
        """Those that are."""
        self.cancels = set(saved.cancels)
        """Ended here because their client gave them up; the ranks are told with the next quantum."""
        self.group = saved.group
        """Of the ranks that have the requests."""
        self.asleep = saved.asleep
        self.sampled_last = saved.sampled_last
        """Whether the last dispatch was a quantum."""
        self.last_quantum = 0
        """The last one that this process saw answered: for telling deaths in a row from deaths over the years."""
        self.scheduler = Scheduler(rules.max_tokens_per_row)
        for future in sorted(self.futures, key=lambda each: each.turn):
            if isinstance(future.operation, Sample):
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

    def save(self) -> Saved:
        return Saved(
            sessions=list(self.sessions.values()),
            models=list(self.models.values()),
            futures=list(self.futures),
            ended=self.futures.ended,
            checkpoints=list(self.checkpoints.values()),
            saving=list(self.saving.values()),
            dispatches=list(self.dispatches.values()),
            dispatched=self.dispatched,
            given_up=sorted(self.given_up),
            turns=self.turns,
            server_operations=self.server_operations,
            samplers=list(self.samplers.values()),
            cancels=sorted(self.cancels),
            group=self.group,
            asleep=self.asleep,
            sampled_last=self.sampled_last,
        )


class Saved(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A snapshot. Operations that ended are not in it: the journal keeps them for ranks that start anew."""

    sessions: Sequence[Session] = ()
    models: Sequence[Model] = ()
    futures: Sequence[Future] = ()
    ended: Sequence[str] = ()
    checkpoints: Sequence[Checkpoint] = ()
    saving: Sequence[Checkpoint] = ()
    dispatches: Sequence[Dispatch] = ()
    dispatched: int = 0
    given_up: Sequence[int] = ()
    turns: int = 0
    server_operations: int = 0
    samplers: Sequence[Sampler] = ()
    cancels: Sequence[str] = ()
    group: str = ""
    asleep: bool = False
    sampled_last: bool = False


def is_name(text: str) -> bool:
    """Whether it can be a part of an id and of a path."""
    return 1 <= len(text) <= 128 and text[0] not in ".-" and _NAME_CHARACTERS.issuperset(text)


def key_of(operation: ops.SaveWeights) -> CheckpointKey:
    return operation.model_id, operation.kind, operation.name


def folder_of(operation: ops.SaveWeights) -> str:
    """One for every save, so that it is never another one's; replaying the save finds its own again."""
    run = operation.model_id.replace(":", "-")
    return f"{run}/{operation.kind}/{operation.name}@{operation.seq_id}"


def entry_of(future: Future) -> Entry:
    operation = future.operation
    assert operation is not None, f"{future.future_id} has ended"
    tokens, shares = 0, ""
    if isinstance(operation, ops.ForwardBackward):
        tokens = sum(operation.lengths)
        shares = "forward" if operation.forward_only else "forward_backward"
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
        case _:
            return f"{operation.model_id}:{operation.seq_id}" if operation.seq_id else f"{operation.model_id}:{INITIAL}"
    return f"{operation.model_id}:{kind}"
