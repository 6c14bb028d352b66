"""What the orchestrator's core is asked to decide, and what it answers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from strata.train.core import ops
from strata.train.core.commands import RowOutOfMemory
from strata.train.core.facts import Fact
from strata.train.core.state import Dispatch


@dataclass(frozen=True)
class OpenSession:
    tenant: str
    session_id: str
    at_s: float
    tags: Sequence[str] = ()
    user_metadata: Mapping[str, Any] | None = None
    sdk_version: str = ""


@dataclass(frozen=True)
class FinishSession:
    """Its models are unloaded when they have done what was accepted for them."""

    tenant: str
    session_id: str
    reason: str
    at_s: float


@dataclass(frozen=True)
class Accept:
    tenant: str
    operation: ops.Operation
    at_s: float
    session_id: str = ""


@dataclass(frozen=True)
class DispatchNext:
    """There may be room at the ranks. Decides one thing at a time: ask until nothing comes of it."""

    ranks: int
    max_context: int
    at_s: float
    row_tokens: int = 0
    """That fit into the memory of a rank; 0 is any number."""


@dataclass(frozen=True)
class CompleteDispatch:
    """The ranks' results of a dispatch. One that is not awaited any longer changes nothing."""

    number: int
    results: Sequence[ops.Result]
    at_s: float


@dataclass(frozen=True)
class CompleteSlice:
    """What ended in a quantum; `left` is how many requests the ranks still have."""

    number: int
    ended: Sequence[tuple[str, ops.Result]]
    left: int
    at_s: float


@dataclass(frozen=True)
class CompleteSnapshotCopy:
    """The ranks have copied all models, unless there was trouble; what they copied is not on the disk yet."""

    number: int
    trouble: str | None


@dataclass(frozen=True)
class CommitSnapshot:
    """All files of a snapshot are on the disk, unless there was trouble."""

    number: int
    digest: str
    size: int
    held_s: float
    written_s: float
    at_s: float
    trouble: str | None = None


@dataclass(frozen=True)
class RejectSnapshot:
    """A group of ranks found that it is not what was written."""

    number: int
    reason: str


@dataclass(frozen=True)
class RanksAttached:
    """A group of ranks is spoken to from now on."""

    group: str


@dataclass(frozen=True)
class FailDispatch:
    number: int
    reason: str
    at_s: float


@dataclass(frozen=True)
class RanksOutOfMemory:
    """A group of ranks died of a row of this dispatch, for want of memory."""

    number: int
    exhausted: RowOutOfMemory
    at_s: float


@dataclass(frozen=True)
class Abort:
    tenant: str
    future_id: str
    at_s: float
    reason: str = "given up by the client"


@dataclass(frozen=True)
class DeleteCheckpoint:
    tenant: str
    run_id: str
    kind: ops.WeightsKind
    name: str


@dataclass(frozen=True)
class SetCheckpointTtl:
    """Seconds from now until the checkpoint goes; None is never."""

    tenant: str
    run_id: str
    kind: ops.WeightsKind
    name: str
    ttl_s: float | None
    at_s: float


@dataclass(frozen=True)
class ImportCheckpoint:
    """Weights that were made elsewhere and whose files are in place."""

    tenant: str
    create: ops.CreateModel
    """What a model must be like to load them."""
    operation: ops.SaveWeights
    at_s: float


@dataclass(frozen=True)
class DeleteExpiredCheckpoints:
    """There may be checkpoints whose time is over, or too many."""

    at_s: float


@dataclass(frozen=True)
class AddEndpoint:
    """The same again is the same endpoint, and looks up its address anew."""

    name: str
    url: str
    address: str
    engine: Literal["vllm", "transformers"]
    at_s: float


@dataclass(frozen=True)
class RemoveEndpoint:
    name: str


@dataclass(frozen=True)
class CompletePush:
    path: str
    outcomes: Sequence[ops.EndpointOutcome]
    at_s: float


@dataclass(frozen=True)
class RouteSamples:
    """Requests that an endpoint could answer may go there, so many at a time."""

    limit: int


@dataclass(frozen=True)
class CompleteRouted:
    future_id: str
    result: ops.SampleDone
    at_s: float


@dataclass(frozen=True)
class RequeueRouted:
    future_id: str


@dataclass(frozen=True)
class ExpireResults:
    at_s: float


Input = (
    OpenSession
    | FinishSession
    | Accept
    | DispatchNext
    | CompleteDispatch
    | CompleteSlice
    | CompleteSnapshotCopy
    | CommitSnapshot
    | RejectSnapshot
    | RanksAttached
    | FailDispatch
    | RanksOutOfMemory
    | Abort
    | DeleteCheckpoint
    | SetCheckpointTtl
    | ImportCheckpoint
    | DeleteExpiredCheckpoints
    | ExpireResults
    | AddEndpoint
    | RemoveEndpoint
    | CompletePush
    | RouteSamples
    | CompleteRouted
    | RequeueRouted
)


@dataclass(frozen=True)
class Done:
    pass


@dataclass(frozen=True)
class Taken:
    """The future of an operation, new or known."""

    future_id: str
    model_id: str


@dataclass(frozen=True)
class Dispatching:
    """To be told to the ranks once it is durable."""

    dispatch: Dispatch
    efficiency: float


@dataclass(frozen=True)
class Removed:
    """A checkpoint whose folder may go."""

    path: str


@dataclass(frozen=True)
class Retained:
    """The folders of checkpoints that were let go."""

    gone: Sequence[str]


Reply = Done | Taken | Dispatching | Removed | Retained


@dataclass(frozen=True)
class Decision:
    reply: Reply
    facts: tuple[Fact, ...] = ()
    ended: tuple[str, ...] = ()
    """Futures that have their result now."""
