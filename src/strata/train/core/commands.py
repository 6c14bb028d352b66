"""The protocol between orchestrator and rank 0: types of dispatches, attach, restore, snapshots, health and replies,
and the codes of failures.

A session is a sequence of numbered dispatches under a generation, the leader epoch of the orchestrator. The
orchestrator opens it with `Attach`; rank 0 replies `AttachReply` with the last dispatch that it applied. A dispatch
that was applied is not run again: rank 0 keeps each reply until the orchestrator reports it durable (`durable` of a
later command). So either side may die at any moment, or send twice, and every dispatch is applied exactly once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

import msgspec

from strata.train.core import model_options, ops
from strata.train.core.replay_differences import RankNumerics
from strata.train.core.sampling import SampledPart, SamplingSlice, SliceResult


class Segment(msgspec.Struct, frozen=True, forbid_unknown_fields=True, array_like=True):
    """The position of a datum: `item` of the pass, `datum` of the item."""

    item: int
    datum: int


Row = Sequence[Segment]
"""Datums one after the other in one packed sequence; attention stays inside each."""


class PassItem(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One client's forward_backward inside a pass. `data` is an encoded `PassData`."""

    request_id: str
    model_id: str
    loss: model_options.LossName
    config: Mapping[str, float]
    data: bytes
    routing: bytes = b""
    """An encoded `PassRouting`; empty if nothing is replayed."""


class PassCommand(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True, tag="FORWARD_BACKWARD"):
    """Forward, and backward unless `forward_only`, over packed rows; `rows[rank]` are those of a rank, in order.

    Every rank has the same number of rows (an empty one if need be): a sharded model runs collectives in each.
    """

    forward_only: bool
    items: Sequence[PassItem]
    rows: Sequence[Sequence[Row]]
    replayed: bool = False
    """A replay: nothing of it is rejected for the memory that is free now."""


class StepsCommand(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="OPTIM_STEP"):
    """Optimizer steps of different models, one after the other. A failure of one does not affect the next."""

    operations: Sequence[ops.OptimStep]


class SaveState(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="SAVE_STATE"):
    operation: ops.SaveWeights
    path: str
    """Where the files go: a folder that does not exist yet."""


class LoadState(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="LOAD_STATE"):
    operation: ops.LoadWeights
    path: str


class ManageModel(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="MANAGE"):
    """Create and unload models, discard gradients, offload (sleep) and reload (wake)."""

    operation: ops.CreateModel | ops.UnloadModel | ops.AbortGradients | ops.Sleep | ops.Wake


class MakeSampler(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="MAKE_SAMPLER"):
    operation: ops.SaveSampler | ops.OpenSampler
    path: str
    """The path of the checkpoint to open, or where to save the weights of the sampler for engines; empty for
    neither."""
    close: Sequence[str] = ()
    """Samplers to evict first; one that does not exist is ignored."""


class TakeSnapshot(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="TAKE_SNAPSHOT"):
    """Copy everything that later work builds on, and reply; the copy is written in the background.

    The reply has no results, or one that failed. When all files of all ranks are durable, rank 0 sends
    `SnapshotWritten`.
    """

    path: str
    """A folder that appears when it is complete."""


class HealthCheck(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="HEALTH_CHECK"):
    """Check that all ranks are alive. Not a dispatch: it has no number and may come between any two."""


class YieldDevices(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="YIELD_DEVICES"):
    """Sleep, because engines get the devices. Not a dispatch: it changes no model, and no replay repeats it."""


class TakeDevices(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="TAKE_DEVICES"):
    """Wake: engines have left the devices. Ranks that are awake ignore it."""


class Shutdown(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="SHUTDOWN"):
    pass


Requested = HealthCheck | YieldDevices | TakeDevices | Shutdown
"""What may come between any two dispatches."""


Work = PassCommand | StepsCommand | SaveState | LoadState | ManageModel | MakeSampler | SamplingSlice | TakeSnapshot
Publishing = SaveState | MakeSampler
"""Work that publishes weights."""


class Attach(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="attach"):
    """An orchestrator opens a session. `generation` is its leader epoch: rank 0 fences off smaller ones."""

    generation: int
    run_id: str
    """The stream of the journal: ranks that applied dispatches of one run reject those of another."""


class AttachReply(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="attached"):
    generation: int
    group: str
    """A new id for every start of the ranks: a restarted group has applied nothing."""
    world_size: int
    applied: int
    model: ModelInfo
    written: SnapshotWritten | None = None
    """The last snapshot: an earlier orchestrator may not have received it."""
    exhausted: RowOutOfMemory | None = None
    """The row at which the group before this one ran out of memory, if it did."""
    data_ranks: int = 0
    """Ranks, or groups of ranks, that compute different rows of a pass; 0: each rank."""
    version: str = ""
    """The version of Strata. Orchestrator and ranks must have one."""
    numerics: RankNumerics = RankNumerics()


class RowOutOfMemory(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A row that did not fit into the memory of a rank."""

    rank: int
    model_id: str
    """The model with most tokens of the row."""
    tokens: int
    limit: int
    """The measured limit of tokens in a row; 0 if it was not measured."""
    sure: bool = False
    """The allocator reported it. Else the kernel has killed some process meanwhile, perhaps this rank."""


class SnapshotWritten(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="snapshot_written"):
    """All files of a snapshot are durable, or `trouble` says why they never will be. Sent without a request."""

    generation: int
    number: int
    digest: str
    """The digest of the manifest."""
    size: int
    held_s: float
    """How long the ranks did nothing but copy."""
    written_s: float
    trouble: str | None = None


class ModelInfo(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The base model, as the ranks loaded it."""

    name: str
    arch: str
    tokenizer_id: str
    vocab_size: int
    max_context: int
    full: bool
    """Full fine-tuning by one model, no LoRA adapters."""
    max_lora_rank: int
    slots: int
    parameters: int
    row_tokens: int = 0
    """Tokens of one row that fit into the memory of every rank: measured, or from the settings; 0 if unknown."""
    one_document_per_row: bool = False
    """Documents in one row would change each other, as the start-up check found or the family is known for."""


class DispatchCommand(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True, tag="command"):
    generation: int
    number: int
    work: Work
    durable: int
    """Rank 0 may drop its replies of dispatches up to this number."""
    traceparent: str = ""
    """The trace that this dispatch is part of; empty: none."""


class Restore(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="restore"):
    """Only for a group that has applied nothing: restore the snapshot of this dispatch."""

    generation: int
    number: int
    path: str
    digest: str
    """The digest of the manifest. Every file is verified before the first is loaded."""


class Restored(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="restored"):
    """The group has applied `number`; or, if it was `refused`, the group is unchanged and can restore another."""

    generation: int
    number: int
    refused: str | None = None
    damaged: bool = False
    """The files are not what was written; else a retry may succeed."""


class RankRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="ask"):
    generation: int
    ask_id: int
    work: Requested


class Timing(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Seconds inside the ranks, as measured by rank 0."""

    total_s: float
    forward_s: float = 0.0
    backward_s: float = 0.0
    tokens: int = 0
    optimizer_s: float = 0.0
    publish_s: float = 0.0
    """Copying weights to sample from, or saving them."""


class DispatchReply(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="reply"):
    """The results of a dispatch, one per item of a pass or step in order, else one. A result payload comes inline.

    A sampling slice has no results of its own but `sampled`, with the samples that ended in it.
    """

    generation: int
    number: int
    results: Sequence[ops.Result]
    timing: Timing
    sampled: SliceResult | None = None


class SampleProgress(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="sampled"):
    """Tokens of streamed samples, while their slice runs. Sent without a request; one that is lost is not repeated."""

    generation: int
    parts: Sequence[tuple[str, SampledPart]]
    """Parts by request."""


class HealthReply(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="healthy"):
    generation: int
    ask_id: int
    ranks: Sequence[int]
    failure: str = ""
    """Why they could not do what was requested."""


class Fenced(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="fenced"):
    """Sent to an orchestrator with a stale generation, or of another run."""

    generation: int
    reason: str


ToRank = Attach | Restore | DispatchCommand | RankRequest
FromRank = AttachReply | Restored | DispatchReply | SnapshotWritten | SampleProgress | HealthReply | Fenced

encode: Final = msgspec.msgpack.Encoder().encode
decode_to_rank: Final = msgspec.msgpack.Decoder(ToRank).decode
decode_from_rank: Final = msgspec.msgpack.Decoder(FromRank).decode
decode_work: Final = msgspec.msgpack.Decoder(Work | Restore | HealthCheck | Shutdown).decode
