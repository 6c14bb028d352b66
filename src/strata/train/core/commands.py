"""What the orchestrator and rank 0 say to each other over their PAIR link, and rank 0 to the other ranks.

The link is a conversation in numbered dispatches under a generation. The orchestrator begins with `Attach`; rank 0
answers `Attached` with the last dispatch that was applied. A dispatch with a number that was applied is not done again:
rank 0 keeps each reply until the orchestrator says that it is durable (`durable` of a later command). So either side
may die at any moment, or send twice, and every dispatch is done once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

import msgspec

from strata.train.core import ops
from strata.train.core.sampling import Quantum, QuantumDone


class Segment(msgspec.Struct, frozen=True, forbid_unknown_fields=True, array_like=True):
    """A datum in its place: `item` of the pass, `datum` of the item."""

    item: int
    datum: int


Row = Sequence[Segment]
"""Datums one after the other in one packed sequence; attention stays inside each."""


class PassItem(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One client's forward_backward inside a pass. `data` is an encoded `PassData`."""

    request_id: str
    model_id: str
    loss: ops.LossName
    config: Mapping[str, float]
    data: bytes


class Pass(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True, tag="FORWARD_BACKWARD"):
    """Forward, and backward unless `forward_only`, over packed rows; `rows[rank]` are those of a rank, in turn.

    Every rank has the same number of rows (an empty one if need be): the layers of a sharded model meet in each.
    """

    forward_only: bool
    items: Sequence[PassItem]
    rows: Sequence[Sequence[Row]]
    replayed: bool = False
    """Ranks before these have done it: nothing of it is rejected for the memory that is free now."""


class Steps(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="OPTIM_STEP"):
    """Of different models, one after the other. What one of them fails for is no matter to the next."""

    operations: Sequence[ops.OptimStep]


class SaveState(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="SAVE_STATE"):
    operation: ops.SaveWeights
    path: str
    """Where the files go: a folder that exists for nobody else yet."""


class LoadState(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="LOAD_STATE"):
    operation: ops.LoadWeights
    path: str


class Manage(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="MANAGE"):
    """Models that come, go, forget their gradients, sleep and wake."""

    operation: ops.CreateModel | ops.UnloadModel | ops.AbortGradients | ops.Sleep | ops.Wake


class MakeSampler(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="MAKE_SAMPLER"):
    operation: ops.SaveSampler | ops.OpenSampler
    path: str
    """Of the checkpoint to open, if it is one."""
    close: Sequence[str] = ()
    """Samplers that go first; one that is not there is no matter."""


class TakeSnapshot(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="TAKE_SNAPSHOT"):
    """Copy everything that later work builds on, and answer; the copy is written meanwhile.

    The reply has no results, or one that failed. When all files of all ranks are on the disk, rank 0 says so by itself.
    """

    path: str
    """A folder that appears when it is whole."""


class HealthCheck(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="HEALTH_CHECK"):
    """Verify that all ranks are alive. Not a dispatch: it has no number and may come between any two."""


class Shutdown(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="SHUTDOWN"):
    pass


Work = Pass | Steps | SaveState | LoadState | Manage | MakeSampler | Quantum | TakeSnapshot
Publishing = SaveState | MakeSampler
"""Work that makes weights for others."""


class Attach(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="attach"):
    """An orchestrator begins to speak. `generation` is its leader epoch: rank 0 hears nobody with a smaller one."""

    generation: int
    run_id: str
    """The journal's stream: ranks that applied dispatches of one run take none of another."""


class Attached(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="attached"):
    generation: int
    group: str
    """A new one for every start of the ranks: a group that starts anew has applied nothing."""
    world_size: int
    applied: int
    model: ModelInfo
    written: SnapshotWritten | None = None
    """The last one, of which whoever spoke before may not have heard."""
    exhausted: Exhausted | None = None
    """What the group before this one ran out of memory at, if it did."""


class Exhausted(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A row for which the memory of a rank did not do."""

    rank: int
    model_id: str
    """Whose tokens are most of the row."""
    tokens: int
    limit: int
    """Tokens that a row may have by what was measured; 0 if nothing was."""
    sure: bool = False
    """The allocator said so. Else the kernel has killed some process meanwhile, perhaps this rank."""


class SnapshotWritten(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="snapshot_written"):
    """All files of a snapshot are on the disk, or `trouble` says why they never will be. Said without being asked."""

    generation: int
    number: int
    digest: str
    """Of the manifest."""
    size: int
    held_s: float
    """How long the ranks did nothing but copy."""
    written_s: float
    trouble: str | None = None


class ModelInfo(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Of the base model, as the ranks loaded it."""

    name: str
    arch: str
    tokenizer_id: str
    vocab_size: int
    max_context: int
    full: bool
    """Trained whole by one model, not through adapters."""
    max_lora_rank: int
    slots: int
    parameters: int
    row_tokens: int = 0
    """Tokens of one row that fit into the memory of every rank: measured, or told by the settings; 0 if unknown."""


class Command(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="command"):
    generation: int
    number: int
    work: Work
    durable: int
    """Replies of dispatches up to this number need not be kept any longer."""


class Restore(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="restore"):
    """Only for a group that has applied nothing: begin where the snapshot of this dispatch was taken."""

    generation: int
    number: int
    path: str
    digest: str
    """Of the manifest. Every file is checked before the first is read."""


class Restored(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="restored"):
    """The group has applied `number`; or, if it was `refused`, it is as it was, and can be told something else."""

    generation: int
    number: int
    refused: str | None = None
    damaged: bool = False
    """What is there is not what was written; else another try may succeed."""


class Ask(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="ask"):
    generation: int
    ask_id: int
    work: HealthCheck | Shutdown


class Timing(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Seconds inside the ranks, as rank 0 saw them."""

    total_s: float
    forward_s: float = 0.0
    backward_s: float = 0.0
    tokens: int = 0
    optimizer_s: float = 0.0
    publish_s: float = 0.0
    """Copying weights to sample from, or saving them."""


class Reply(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="reply"):
    """The results of a dispatch, one per item of a pass or step in order, else one. A result payload comes inline.

    A quantum has no results of its own but `sampled`, which says of whatever ended in it.
    """

    generation: int
    number: int
    results: Sequence[ops.Result]
    timing: Timing
    sampled: QuantumDone | None = None


class Healthy(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="healthy"):
    generation: int
    ask_id: int
    ranks: Sequence[int]


class Fenced(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="fenced"):
    """Said to a speaker whose generation is over, or that belongs to another run."""

    generation: int
    reason: str


ToRank = Attach | Restore | Command | Ask
FromRank = Attached | Restored | Reply | SnapshotWritten | Healthy | Fenced

encode: Final = msgspec.msgpack.Encoder().encode
decode_to_rank: Final = msgspec.msgpack.Decoder(ToRank).decode
decode_from_rank: Final = msgspec.msgpack.Decoder(FromRank).decode
decode_work: Final = msgspec.msgpack.Decoder(Work | Restore | HealthCheck | Shutdown).decode
