"""Operations of clients and their results as types: datums, passes, steps, saves, loads, samplers; with the limits of
datums, inputs, names and groups, and from which size on a payload is a file (64 KiB).

Every message is frozen and rejects unknown fields, so that two versions that disagree fail at the boundary and not in a
gradient. Tensors travel as bytes with a type and a shape: nothing between the client and the ranks parses or unpickles
them. Tags and field names are stored in the journal and keep their spelling.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import StrEnum
from typing import Annotated, Final, Literal

import msgspec

from strata.train.core.loss_graph import CustomLoss
from strata.train.core.model_options import AdamParams, LoraConfig, LossName, MuonParams, OptimizerName, Schedule
from strata.train.core.sampling import SampleOperation

WeightsKind = Literal["weights", "sampler_weights", "external_weights"]
"""Weights and optimizer state to resume training from; weights to sample from; weights to export."""
INLINE_BYTES: Final = 64 << 10
"""A larger payload is stored in a file named by its digest; the journal and the links carry the digest."""


class DType(StrEnum):
    F32 = "f32"
    I64 = "i64"
    I32 = "i32"
    BF16 = "bf16"

    @property
    def itemsize(self) -> int:
        return {DType.F32: 4, DType.I64: 8, DType.I32: 4, DType.BF16: 2}[self]


MAX_DATUMS: Final = 1 << 16
MAX_INPUTS: Final = 64
MAX_DIMENSIONS: Final = 8
MAX_CONFIG: Final = 64
MAX_NAME: Final = 256
GROUP_SIZE: Final = "group_size"
"""A key in the config of a custom loss."""
MAX_GROUP: Final = 64


class Dense(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="dense"):
    """Numbers in row-major order, little-endian."""

    dtype: DType
    shape: Annotated[tuple[int, ...], msgspec.Meta(max_length=MAX_DIMENSIONS)]
    data: bytes


class Sparse(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="csr"):
    """A matrix of which only some places are not zero, by compressed rows; both index arrays are int64."""

    dtype: DType
    shape: tuple[int, int]
    data: bytes
    crow: bytes
    col: bytes


Tensor = Dense | Sparse


class Image(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """An image of a datum, decoded and resized to what the model takes: the same numbers in every replay."""

    start: int
    """The first of the tokens that stand for it."""
    height: int
    width: int
    pixels: bytes
    """Red, green and blue of each pixel, a byte each, row by row."""


class Datum(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """One sequence to train on: its tokens, and per token what the loss needs (targets, weights, advantages, …)."""

    tokens: bytes
    """int32, little-endian."""
    inputs: Annotated[Mapping[str, Tensor], msgspec.Meta(max_length=MAX_INPUTS)]
    images: Sequence[Image] = ()
    """Images, in the order of their tokens."""

    @property
    def length(self) -> int:
        return len(self.tokens) // 4


class PassData(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """What a payload holds: the data of one forward or forward-backward pass."""

    datums: Sequence[Datum]
    custom: CustomLoss | None = None
    """The definition of the loss `custom`: a replay needs nothing else than this payload."""


class InlinePayload(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="inline"):
    data: bytes


class StoredPayload(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="stored"):
    """A file named by the SHA-256 of its bytes, durable before its digest is handed out."""

    sha256: str
    size: int


Payload = InlinePayload | StoredPayload
"""An encoded `PassData`, `PassResult` or `SampleResult`."""


class CreateModel(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True, tag="create_model"):
    model_id: str
    base_model: str
    lora: LoraConfig | None
    """None is full fine-tuning: the model owns the base."""
    schedule: Schedule | None = None
    user_metadata: Mapping[str, str] = {}
    optimizer: OptimizerName = "adamw"
    """Fixed for the lifetime of the model."""


class ForwardBackward(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="forward_backward"):
    """A pass over a batch. Gradients are added to those the model has; `forward_only` leaves them untouched."""

    model_id: str
    seq_id: int
    loss: LossName
    config: Mapping[str, float]
    forward_only: bool
    lengths: Sequence[int]
    """Tokens of each datum, in order: all that the scheduler and packing need of the payload."""
    payload: Payload
    sampled_tokens: int = 0
    """The tokens that the client declared to be sampled."""

    @property
    def group_size(self) -> int:
        """So many datums, one after the other, have one loss."""
        return group_size_of(self.loss, self.config)


class RoutedForwardBackward(ForwardBackward, frozen=True, forbid_unknown_fields=True, tag="routed_forward_backward"):
    """A pass that replays the routing of samples. A kind of its own, so that the others are stored as ever."""

    routing: Payload = InlinePayload(b"")
    """An encoded `PassRouting`."""

    def as_sent(self) -> ForwardBackward:
        """Returns the pass as its client sent it, which sends it again without the routing."""
        fields = {name: getattr(self, name) for name in ForwardBackward.__struct_fields__}
        return ForwardBackward(**fields)


def group_size_of(loss: LossName, config: Mapping[str, float]) -> int:
    """Only a custom loss has groups. Bounded here too: one that does not divide a batch would stop all dispatches."""
    if loss is not LossName.CUSTOM:
        return 1
    return min(max(int(config.get(GROUP_SIZE, 1)), 1), MAX_GROUP)


class OptimStep(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True, tag="optim_step"):
    """A step with the parameters of one optimizer: that of the model."""

    model_id: str
    seq_id: int
    adam: AdamParams | None
    muon: MuonParams | None = None

    @property
    def params(self) -> AdamParams | MuonParams:
        params = self.muon or self.adam
        assert params is not None
        return params


class AbortGradients(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="abort_gradients"):
    """Discard what was accumulated since the last step."""

    model_id: str
    seq_id: int


class SaveWeights(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="save_weights"):
    """Saves weights of the kind "weights" with the state of the optimizer; of the others the weights alone."""

    model_id: str
    seq_id: int
    kind: WeightsKind
    name: str
    overwrite: bool = False
    ttl_s: float | None = None
    user_metadata: Mapping[str, str] = {}


class LoadWeights(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True, tag="load_weights"):
    model_id: str
    seq_id: int
    run_id: str
    kind: WeightsKind
    name: str
    optimizer: bool
    rollback: int = 0
    """Tells this load from others of its model if the owner rolls back after a replay that differed; clients send 0."""


class SaveSampler(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True, tag="save_sampler"):
    """A sampler of the model as it is at this sequence number. It lives in memory; engines of the server get files."""

    model_id: str
    seq_id: int
    sampler_id: str
    inflight: bool = False
    """It has the weights that all in-flight samplers of the model share: this save replaces them, and so does every
    later one. Engines get nothing."""


class SyncWeights(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="sync_weights"):
    """The weights at this sequence number: saved for sampling, then pushed to inference endpoints.

    The ranks save them like any other weights. The push does not hold up later operations.
    """

    model_id: str
    seq_id: int
    name: str
    endpoints: Sequence[str] = ()
    """Endpoints by name; empty: all that exist when the files are written."""
    ttl_s: float | None = None

    def save(self) -> SaveWeights:
        return SaveWeights(self.model_id, self.seq_id, "sampler_weights", self.name, ttl_s=self.ttl_s)


class SavedWeights(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    run_id: str
    kind: WeightsKind
    name: str

    @property
    def path(self) -> str:
        return f"tinker://{self.run_id}/{self.kind}/{self.name}"


class OpenSampler(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="open_sampler"):
    sampler_id: str
    base_model: str
    weights: SavedWeights | None = None
    """None is the base itself."""


class MalformedOperation(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="unreadable"):
    """An operation whose content is malformed. It takes its sequence number and fails as an error of the client.

    Clients of this protocol continue to count after a rejection: rejected at admission, its number would stay a gap
    for ever and hold up every later operation. It is never dispatched.
    """

    model_id: str
    seq_id: int
    message: str


class UnloadModel(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="unload_model"):
    model_id: str


class Sleep(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="sleep"):
    """Free what the models hold on the device; `Wake` brings it back."""


class Wake(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="wake"):
    pass


Sequenced = (
    ForwardBackward
    | RoutedForwardBackward
    | OptimStep
    | AbortGradients
    | SaveWeights
    | LoadWeights
    | SaveSampler
    | SyncWeights
    | MalformedOperation
)
"""Operations of one model, which run strictly in the order of their `seq_id`."""
Operation = Sequenced | CreateModel | UnloadModel | Sleep | Wake | OpenSampler | SampleOperation
WHILE_ASLEEP: Final = (Sleep, Wake, UnloadModel, AbortGradients)
"""Operations that wake the ranks or only release something: a model whose unload failed would keep its slot."""
ASLEEP: Final = "the server sleeps; wake it first"


def kind_of(operation: Operation) -> str:
    """The kind in status reports and throughput estimates: a pass without backward is a kind of its own."""
    if isinstance(operation, ForwardBackward):
        return "forward" if operation.forward_only else str(ForwardBackward.__struct_config__.tag)
    return str(operation.__struct_config__.tag)


class ModelCreated(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="create_model"):
    model_id: str


class LossCreated(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="create_custom_loss"):
    loss_id: str


class DatumOutput(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What the loss says of one datum, per field a float32 array; `logprobs` is always there."""

    fields: Mapping[str, Dense]


class PassResult(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a result payload holds: outputs in the order of the datums asked for, and metrics named `name:reduction`."""

    outputs: Sequence[DatumOutput]
    metrics: Mapping[str, float]


class PassMetrics(msgspec.Struct, frozen=True):
    """The metrics of an encoded `PassResult`, without its outputs."""

    metrics: Mapping[str, float]


class PassDone(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="forward_backward"):
    payload: Payload
    """An encoded `PassResult`."""


class StepDone(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="optim_step"):
    metrics: Mapping[str, float]


class GradientsAborted(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="abort_gradients"):
    pass


class WeightsSaved(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="save_weights"):
    path: str
    """`tinker://run/kind/name`."""


class WeightsLoaded(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="load_weights"):
    path: str


class EndpointOutcome(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The outcome of a push of weights to one inference endpoint."""

    endpoint: str
    ok: bool
    seconds: float
    message: str = ""
    """Why not, or what was noticed."""
    retired: Sequence[str] = ()
    """Older versions that were unloaded from it."""


class WeightsSynced(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="sync_weights"):
    path: str
    """`tinker://run/kind/name`."""
    version: str
    """The name of these weights at the endpoints; no other weights ever have it."""
    endpoints: Sequence[EndpointOutcome]


class SamplerOpened(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="open_sampler"):
    sampler_id: str


class SampleDone(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="sample"):
    payload: Payload
    """An encoded `SampleResult`."""
    tokens: int = 0
    """Sampled, in all sequences."""


class RoutedSampleDone(SampleDone, frozen=True, forbid_unknown_fields=True, tag="routed_sample"):
    """A sample whose routing is in its result, and may be replayed."""

    model_id: str = ""
    """The model that may replay it."""
    digests: Sequence[bytes] = ()
    """Digests of all tokens of each sequence, with those of the prompt."""


class ModelUnloaded(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="unload_model"):
    model_id: str


class Asleep(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="sleep"):
    freed_bytes: int


class Awake(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="wake"):
    pass


class Failed(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="failed"):
    """The operation failed; the next one of the model runs.

    `user`: the request itself is wrong, and would fail again. `server`: our fault; a retry may succeed.
    """

    category: Literal["user", "server", "cancelled"]
    message: str
    memory: bool = False
    """It did not fit into the memory of the ranks, and changed nothing. It is never replayed: with more memory it would
    succeed."""


Result = (
    ModelCreated
    | LossCreated
    | PassDone
    | StepDone
    | GradientsAborted
    | WeightsSaved
    | WeightsLoaded
    | WeightsSynced
    | SamplerOpened
    | SampleDone
    | RoutedSampleDone
    | ModelUnloaded
    | Asleep
    | Awake
    | Failed
)

# A repeated request must be the same bytes. The order of a protobuf map is another one in every process.
encode_pass_data: Final = msgspec.msgpack.Encoder(order="deterministic").encode
decode_pass_data: Final = msgspec.msgpack.Decoder(PassData).decode
decode_pass_result: Final = msgspec.msgpack.Decoder(PassResult).decode
decode_pass_metrics: Final = msgspec.msgpack.Decoder(PassMetrics).decode


def tokens_of(operation: Operation) -> int:
    return sum(operation.lengths) if isinstance(operation, ForwardBackward) else 0
