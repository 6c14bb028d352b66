"""What is journaled: everything that the orchestrator has to know again after a restart, and nothing else."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final, Literal

import msgspec

from strata.train.core import ops
from strata.train.core.commands import Row
from strata.train.core.sampling import QuantumPlan


class _Fact(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    pass


class SessionOpened(_Fact, frozen=True, tag="session_opened"):
    session_id: str
    tenant: str
    at_s: float
    tags: Sequence[str] = ()
    user_metadata: Mapping[str, Any] = {}
    sdk_version: str = ""


class SessionFinished(_Fact, frozen=True, tag="session_finished"):
    session_id: str
    reason: str
    at_s: float


class Accepted(_Fact, frozen=True, tag="accepted"):
    """Durable before the client hears of it: from here on the operation is done once, whatever dies."""

    future_id: str
    tenant: str
    operation: ops.Operation
    digest: str
    at_s: float
    session_id: str = ""


class Dispatched(_Fact, frozen=True, tag="dispatched"):
    """Durable before the ranks hear of it: the exact composition, so that it can be told again in the same words."""

    number: int
    future_ids: Sequence[str]
    rows: Sequence[Sequence[Row]] = ()
    path: str = ""
    """The folder of a checkpoint, under that of all checkpoints."""
    close: Sequence[str] = ()
    """Samplers that make room for a new one."""
    quantum: QuantumPlan | None = None
    """The futures are then the requests that the quantum adds; none of them ends with this dispatch as such."""
    snapshot: bool = False
    """All models are to be written as they are at this place; `path` is the folder, under that of all snapshots."""
    at_s: float = 0.0


class SnapshotTaken(_Fact, frozen=True, tag="snapshot_taken"):
    """The ranks have copied everything, and write it while they go on."""

    number: int


class SnapshotAbandoned(_Fact, frozen=True, tag="snapshot_abandoned"):
    number: int
    reason: str


class SnapshotCommitted(_Fact, frozen=True, tag="snapshot_committed"):
    """Its files are on the disk, and all dispatches up to it have their results: ranks may begin from it."""

    number: int
    name: str
    digest: str
    """Of its manifest, which has those of its files."""
    at_s: float
    size: int = 0
    held_s: float = 0.0
    """How long the ranks did nothing else."""
    written_s: float = 0.0


class SnapshotRefused(_Fact, frozen=True, tag="snapshot_refused"):
    """It is not what was written. No group of ranks is told to restore it again."""

    number: int
    reason: str


class QuantumEnded(_Fact, frozen=True, tag="quantum_ended"):
    """The ranks answered a quantum. What ended in it has facts of its own."""

    number: int


class RanksRenewed(_Fact, frozen=True, tag="ranks_renewed"):
    """Another group of ranks is spoken to: what the one before remembered of sequences is lost, and begins again."""

    group: str


class Finished(_Fact, frozen=True, tag="finished"):
    future_id: str
    result: ops.Result
    at_s: float


class GivenUp(_Fact, frozen=True, tag="given_up"):
    """A dispatch that ranks died of, or never came back from. No group of ranks is ever told it again."""

    number: int
    reason: str
    at_s: float


class CheckpointDeleted(_Fact, frozen=True, tag="checkpoint_deleted"):
    run_id: str
    kind: ops.WeightsKind
    name: str
    reason: str = ""
    """Empty if its owner deleted it."""


class CheckpointTimed(_Fact, frozen=True, tag="checkpoint_timed"):
    """When a checkpoint goes was set anew; None is never."""

    run_id: str
    kind: ops.WeightsKind
    name: str
    expires_at_s: float | None


class CheckpointImported(_Fact, frozen=True, tag="checkpoint_imported"):
    """Weights that were made elsewhere: a run that was never trained here, and its one checkpoint.

    Its files are in place before this is durable. No rank can save them again.
    """

    tenant: str
    create: ops.CreateModel
    operation: ops.SaveWeights
    path: str
    at_s: float


class EndpointAdded(_Fact, frozen=True, tag="endpoint_added"):
    """An inference engine that weights may be told to. Its address was looked up once, and stays."""

    name: str
    url: str
    address: str
    engine: Literal["vllm", "transformers"]
    at_s: float


class EndpointRemoved(_Fact, frozen=True, tag="endpoint_removed"):
    name: str


class PushBegun(_Fact, frozen=True, tag="push_begun"):
    """Saved weights are to be told to endpoints. `future_id` waits for that; empty if nobody does."""

    path: str
    """The folder of the checkpoint, under that of all checkpoints."""
    version: str
    model_id: str
    seq_id: int
    endpoints: Sequence[str]
    future_id: str
    number: int
    """Of the dispatch that saved the weights."""
    at_s: float


class PushEnded(_Fact, frozen=True, tag="push_ended"):
    path: str
    outcomes: Sequence[ops.EndpointOutcome]
    at_s: float


class SampleRouted(_Fact, frozen=True, tag="sample_routed"):
    """An inference endpoint is asked for this sample, and not the ranks."""

    future_id: str
    endpoint: str


class SampleReturned(_Fact, frozen=True, tag="sample_returned"):
    """The endpoint did not give it. The ranks do."""

    future_id: str


class Expired(_Fact, frozen=True, tag="expired"):
    """Results that ended at this moment or before are gone."""

    until_s: float


Fact = (
    SessionOpened
    | SessionFinished
    | Accepted
    | Dispatched
    | QuantumEnded
    | SnapshotTaken
    | SnapshotAbandoned
    | SnapshotCommitted
    | SnapshotRefused
    | RanksRenewed
    | Finished
    | GivenUp
    | CheckpointDeleted
    | CheckpointTimed
    | CheckpointImported
    | Expired
    | EndpointAdded
    | EndpointRemoved
    | PushBegun
    | PushEnded
    | SampleRouted
    | SampleReturned
)

encode: Final = msgspec.msgpack.Encoder().encode
decode: Final = msgspec.msgpack.Decoder(Fact).decode
