"""The inputs of the state machine that do not come from clients (results of the ranks, endpoints, passing of time), and
the decision that it returns.

Commands of clients are declared in `client_commands`, as the link carries them. The other inputs come from the
orchestrator itself: results of the ranks, the endpoints' outcomes, and the passing of time.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from strata.train.core import ops
from strata.train.core.client_commands import Accepted, Command, Done
from strata.train.core.commands import RowOutOfMemory, SnapshotWritten
from strata.train.core.facts import Fact
from strata.train.core.replay_differences import RankNumerics, ReplayDifferences
from strata.train.core.sampling import DrawnPart
from strata.train.core.scheduler import Charges
from strata.train.core.state import DeviceSide, Dispatch


@dataclass(frozen=True)
class ClientCommand:
    """A command of a client, with what the server itself vouches for: the tenant, and when it came."""

    tenant: str
    command: Command
    at_s: float


@dataclass(frozen=True)
class DispatchNext:
    """The ranks may have capacity. Decides one thing at a time: repeat until there is no fact."""

    ranks: int
    max_context: int
    at_s: float
    row_tokens: int = 0
    """Tokens of a row that fit into the memory of a rank; 0 is any number."""
    one_document_per_row: bool = False
    """The layers of the model carry state from a document into the next: nothing is packed."""


@dataclass(frozen=True)
class CompleteDispatch:
    """The ranks sent the results of a dispatch. A dispatch that is not in flight any more is ignored."""

    number: int
    results: Sequence[ops.Result]
    at_s: float
    took_s: float = 0.0
    """How long the ranks took."""


@dataclass(frozen=True)
class CompleteSlice:
    """The samples that ended in a sampling slice; `left` is how many samples the ranks still run."""

    number: int
    ended: Sequence[tuple[str, ops.Result]]
    left: int
    at_s: float
    drawn: Mapping[str, Sequence[DrawnPart]] = field(default_factory=dict)
    """What the slice added to in-flight samples that run on."""


@dataclass(frozen=True)
class CompleteSnapshotCopy:
    """The ranks have copied all models, or `trouble` says why not; the copy is not on the disk yet."""

    number: int
    trouble: str | None


@dataclass(frozen=True)
class CommitSnapshot:
    """All files of a snapshot are durable, or its `trouble` says why not."""

    written: SnapshotWritten
    at_s: float


@dataclass(frozen=True)
class RejectSnapshot:
    """A group of ranks found that the snapshot is not what was written."""

    number: int
    reason: str


@dataclass(frozen=True)
class RanksAttached:
    """A group of ranks has finished its replay and is used from now on."""

    group: str
    numerics: RankNumerics | None = None


@dataclass(frozen=True)
class CompareReplay:
    """A group of ranks has replayed the dispatches up to `through`: what differs, by model."""

    group: str
    through: int
    models: Mapping[str, ReplayDifferences]
    at_s: float


@dataclass(frozen=True)
class FailDispatch:
    """The orchestrator fails a dispatch that ranks died of, hung in, or cannot be sent."""

    number: int
    reason: str
    at_s: float


@dataclass(frozen=True)
class RanksOutOfMemory:
    """A group of ranks ran out of memory in a row, perhaps of this dispatch."""

    number: int
    exhausted: RowOutOfMemory
    at_s: float


@dataclass(frozen=True)
class DeleteExpiredCheckpoints:
    """Checkpoints may be beyond their TTL, or too many."""

    at_s: float


@dataclass(frozen=True)
class CompletePush:
    """The outcome of a push of weights at every endpoint."""

    path: str
    outcomes: Sequence[ops.EndpointOutcome]
    at_s: float


@dataclass(frozen=True)
class RouteSamples:
    """Route samples to endpoints that have the weights, at most `limit` at a time."""

    limit: int
    down: frozenset[str] = frozenset()
    """Endpoints that do not reply at present: samples wait for them."""


@dataclass(frozen=True)
class CompleteRouted:
    """An endpoint returned a routed sample, or failed so often that it has failed for good."""

    future_id: str
    result: ops.SampleDone | ops.Failed
    at_s: float


@dataclass(frozen=True)
class RequeueRouted:
    """An endpoint failed to return a routed sample: the ranks sample it, or with `again` an endpoint."""

    future_id: str
    again: bool = False


@dataclass(frozen=True)
class RequestTurn:
    """Time has passed, or work has come: ranks or engines may be due to have the devices that they share."""

    at_s: float
    starting: frozenset[DeviceSide] = frozenset()
    """The sides of which a process waits for the devices to start, or is starting."""


@dataclass(frozen=True)
class TakeTurn:
    """The side that leaves the devices has confirmed that it sleeps, for the request with this number."""

    number: int
    at_s: float
    group: str = ""
    """The group of ranks that confirmed it; empty if engines did."""


@dataclass(frozen=True)
class ExpireResults:
    """Results may be beyond their TTL, or too many."""

    at_s: float


Input = (
    ClientCommand
    | DispatchNext
    | CompleteDispatch
    | CompleteSlice
    | CompleteSnapshotCopy
    | CommitSnapshot
    | RejectSnapshot
    | RanksAttached
    | CompareReplay
    | FailDispatch
    | RanksOutOfMemory
    | DeleteExpiredCheckpoints
    | ExpireResults
    | CompletePush
    | RouteSamples
    | CompleteRouted
    | RequeueRouted
    | RequestTurn
    | TakeTurn
)


@dataclass(frozen=True)
class Dispatching:
    """A dispatch to send to the ranks once it is durable."""

    dispatch: Dispatch
    efficiency: float


@dataclass(frozen=True)
class Decision:
    reply: Done | Accepted | Dispatching
    """The response to a command of a client."""
    facts: tuple[Fact, ...] = ()
    ended: tuple[str, ...] = ()
    """Futures that have their result now."""
    deleted_folders: tuple[str, ...] = ()
    """Folders of checkpoints that were deleted: their files may be removed."""
    charges: Charges | None = None
    """An effect on the soft state: what the selected operations cost their tenants."""
