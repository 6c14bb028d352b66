"""The facts of the training server's journal as types, with their stored tags and fields, and the tags that are no
longer used.

The name of a class is its tag; tags and field names are stored.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, Literal

import msgspec

from strata.base.stored import stored_decoder
from strata.train.core import ops
from strata.train.core.commands import Row
from strata.train.core.loss_graph import CustomLoss
from strata.train.core.replay_differences import RankNumerics, ReplayDifferences
from strata.train.core.sampling import DrawnPart, SlicePlan

REMOVED_TAGS: Final = frozenset(
    {
        "accepted",
        "checkpoint_timed",
        "expired",
        "finished",
        "given_up",
        "quantum_ended",
        "snapshot_refused",
        "snapshot_taken",
    }
)
"""Tags that earlier versions wrote. No fact has one of them again."""


def _tag_of(name: str) -> str:
    """`OperationFinished` is stored as `operation_finished`."""
    return re.sub(r"(?<!^)(?=[A-Z])", "_", name).lower()


class _Fact(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag=_tag_of):
    pass


class SessionOpened(_Fact, frozen=True):
    session_id: str
    tenant: str
    at_s: float
    tags: Sequence[str] = ()
    user_metadata: Mapping[str, Any] = {}
    sdk_version: str = ""


class SessionFinished(_Fact, frozen=True):
    session_id: str
    reason: str
    at_s: float


class SessionsForgotten(_Fact, frozen=True):
    """Ended sessions of which nothing is left but their names are dropped."""

    session_ids: Sequence[str]


class CustomLossCreated(_Fact, frozen=True):
    """A loss that passes of its session may name until the session ends; a payload that used it has a copy."""

    loss_id: str
    tenant: str
    loss: CustomLoss
    at_s: float


class OperationAccepted(_Fact, frozen=True):
    """Durable before the client gets its future: from here on the operation runs exactly once, whatever dies."""

    future_id: str
    tenant: str
    operation: ops.Operation
    digest: str
    at_s: float
    session_id: str = ""


class Dispatched(_Fact, frozen=True):
    """Durable before it is sent to the ranks: the exact composition, so that a replay sends the same."""

    number: int
    future_ids: Sequence[str]
    rows: Sequence[Sequence[Row]] = ()
    path: str = ""
    """The folder of a checkpoint, under that of all checkpoints."""
    close: Sequence[str] = ()
    """Samplers that are evicted for a new one."""
    slice: SlicePlan | None = None
    """The plan of a sampling slice: the futures are the samples that it adds; they do not end with this dispatch as
    such."""
    snapshot: bool = False
    """A snapshot of all models at this position; `path` is its folder, under that of all snapshots."""
    at_s: float = 0.0


class SnapshotCopied(_Fact, frozen=True):
    """The ranks have copied all models, and write the copy while they train on."""

    number: int


class SnapshotAbandoned(_Fact, frozen=True):
    number: int
    reason: str


class SnapshotCommitted(_Fact, frozen=True):
    """Its files are durable, and all dispatches up to it have results: it is a recovery point."""

    number: int
    name: str
    digest: str
    """The digest of its manifest, which has those of its files."""
    at_s: float
    size: int = 0
    held_s: float = 0.0
    """How long the ranks did nothing but copy."""
    written_s: float = 0.0


class SnapshotRejected(_Fact, frozen=True):
    """Its files are not what was written. No group of ranks restores it again."""

    number: int
    reason: str


class SliceEnded(_Fact, frozen=True, omit_defaults=True):
    """The ranks replied to a sampling slice. The samples that ended in it have facts of their own."""

    number: int
    drawn: Mapping[str, Sequence[DrawnPart]] = {}
    """What it added to in-flight samples that run on: new ranks go on from there."""


class RanksRenewed(_Fact, frozen=True, omit_defaults=True):
    """Another group of ranks attached: the KV cache of the one before is lost, and its samples start again, or go on
    from what is durable of them."""

    group: str
    numerics: RankNumerics | None = None
    """None: ranks that promise no equal bits. Version 0.2.0 reads the fact then, and may take over."""


class ReplayCompared(_Fact, frozen=True):
    """New ranks have replayed the dispatches up to `through`, and numbers of these models differ from the first ones by
    more than the tolerance."""

    group: str
    through: int
    models: Mapping[str, ReplayDifferences]
    stopped: Sequence[str]
    """Models that are stopped for it."""
    at_s: float


class ReplayAccepted(_Fact, frozen=True):
    """The owner of a stopped model goes on with the numbers of the replay."""

    model_id: str
    at_s: float


class OperationFinished(_Fact, frozen=True):
    future_id: str
    result: ops.Result
    at_s: float
    took_s: float = 0.0
    """Its share of the time that the ranks took for its dispatch: a replay would take as long."""


class DispatchFailed(_Fact, frozen=True):
    """The orchestrator failed a dispatch that ranks died of or hung in. It is never replayed."""

    number: int
    reason: str
    at_s: float


class CheckpointDeleted(_Fact, frozen=True):
    run_id: str
    kind: ops.WeightsKind
    name: str
    reason: str = ""
    """Empty if its owner deleted it."""


class CheckpointTtlSet(_Fact, frozen=True):
    """The expiry of a checkpoint was set; None is never."""

    run_id: str
    kind: ops.WeightsKind
    name: str
    expires_at_s: float | None


class CheckpointPublished(_Fact, frozen=True):
    """The owner lets all tenants of this server read a checkpoint, or does so no longer."""

    run_id: str
    kind: ops.WeightsKind
    name: str
    public: bool


class CheckpointImported(_Fact, frozen=True):
    """Weights from elsewhere: a run that was never trained here, and its one checkpoint.

    Its files are in place before this fact is durable. No replay can save them again.
    """

    tenant: str
    create: ops.CreateModel
    operation: ops.SaveWeights
    path: str
    at_s: float


class EndpointAdded(_Fact, frozen=True):
    """An inference engine that weights may be pushed to. Its address was resolved once, and stays."""

    name: str
    url: str
    address: str
    engine: Literal["vllm", "transformers"]
    at_s: float


class EndpointRemoved(_Fact, frozen=True):
    name: str


class PushBegun(_Fact, frozen=True):
    """Saved weights are pushed to endpoints. `future_id` ends with the push; empty if no future waits for it."""

    path: str
    """The folder of the checkpoint, under that of all checkpoints."""
    version: str
    model_id: str
    seq_id: int
    endpoints: Sequence[str]
    future_id: str
    number: int
    """The number of the dispatch that saved the weights."""
    at_s: float


class PushEnded(_Fact, frozen=True):
    path: str
    outcomes: Sequence[ops.EndpointOutcome]
    at_s: float


class SampleRouted(_Fact, frozen=True):
    """This sample was routed to an inference endpoint instead of the ranks."""

    future_id: str
    endpoint: str


class SampleReturned(_Fact, frozen=True):
    """The endpoint failed to sample it. The ranks do it, or with `again` an endpoint."""

    future_id: str
    again: bool = False


class DeviceTurnRequested(_Fact, frozen=True):
    """Ranks or engines are to have the devices that they share. The other side begins nothing new."""

    number: int
    """Counts the requests: a confirmation names the one that it is for."""
    side: Literal["ranks", "engines"]
    reason: Literal["idle", "limit"]
    """The other side had nothing to do, or has had the devices for its time."""
    at_s: float


class DeviceTurnTaken(_Fact, frozen=True):
    """The other side has confirmed that it sleeps. Durable before anything of this side is woken or started."""

    number: int
    side: Literal["ranks", "engines"]
    group: str
    """The group of ranks that sleeps; empty if engines do."""
    at_s: float


class ResultsExpired(_Fact, frozen=True):
    """Results that ended at this time or before are dropped."""

    until_s: float


Fact = (
    SessionOpened
    | SessionFinished
    | SessionsForgotten
    | CustomLossCreated
    | OperationAccepted
    | Dispatched
    | SliceEnded
    | SnapshotCopied
    | SnapshotAbandoned
    | SnapshotCommitted
    | SnapshotRejected
    | RanksRenewed
    | ReplayCompared
    | ReplayAccepted
    | OperationFinished
    | DispatchFailed
    | CheckpointDeleted
    | CheckpointTtlSet
    | CheckpointPublished
    | CheckpointImported
    | ResultsExpired
    | EndpointAdded
    | EndpointRemoved
    | PushBegun
    | PushEnded
    | SampleRouted
    | SampleReturned
    | DeviceTurnRequested
    | DeviceTurnTaken
)

encode: Final = msgspec.msgpack.Encoder().encode
decode: Final[Callable[[bytes], Fact]] = stored_decoder(Fact, "a fact", REMOVED_TAGS)
