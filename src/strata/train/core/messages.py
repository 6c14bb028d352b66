"""The messages between an API server and the orchestrator, each declared once.

A request is a command or a query. The link carries commands as the core decides them (`inputs.ClientCommand` adds
whose they are and when they came); queries only read. An API server keeps no state: every response carries the id of
its request. `request_id` is the API server's and lives as long as the request; `future_id` is the orchestrator's and
lives as long as the future.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import StrEnum
from typing import Any, Final, Literal

import msgspec

from strata.base.errors import Code
from strata.train.core import ops, status
from strata.train.core.lineage import WeightsLineage
from strata.train.core.loss_graph import CustomLoss
from strata.train.core.rollouts import RolloutsView, RolloutView
from strata.train.core.sampling import SampledPart
from strata.train.core.usage import UsageCount


class _Request(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    @property
    def subject(self) -> str | None:
        """The name that the request is about, which begins with the id of its session; None if it names none."""
        return None


class _SessionRequest(_Request, frozen=True):
    session_id: str

    @property
    def subject(self) -> str | None:
        return self.session_id


class _FutureRequest(_Request, frozen=True):
    future_id: str

    @property
    def subject(self) -> str | None:
        return self.future_id


class _SamplerRequest(_Request, frozen=True):
    sampler_id: str

    @property
    def subject(self) -> str | None:
        return self.sampler_id


class _CheckpointRequest(_Request, frozen=True):
    run_id: str
    """The id of the model that was saved."""
    kind: ops.WeightsKind
    name: str

    @property
    def subject(self) -> str | None:
        return self.run_id


# Commands


class SubmitOperation(_Request, frozen=True, tag="submit_operation"):
    """Accept an operation. Idempotent: its response, when it is durable, has the same future every time."""

    operation: ops.Operation
    session_id: str = ""
    """Of an operation that creates a model or opens a sampler: the session it belongs to."""


class AbortOperation(_FutureRequest, frozen=True, tag="abort"):
    """Cancel an operation that has not been dispatched, or a sample."""

    reason: str = "cancelled by the client"


class OpenSession(_SessionRequest, frozen=True, tag="open_session"):
    tags: Sequence[str] = ()
    user_metadata: Mapping[str, Any] = {}
    sdk_version: str = ""


class FinishSession(_SessionRequest, frozen=True, tag="finish_session"):
    """Its models are unloaded when they have run what was accepted for them."""

    reason: str


class CreateCustomLoss(_Request, frozen=True, tag="create_custom_loss"):
    """Idempotent: the same number with the same content is the same loss."""

    loss_id: str
    loss: CustomLoss

    @property
    def subject(self) -> str | None:
        return self.loss_id


class DeleteCheckpoint(_CheckpointRequest, frozen=True, tag="delete_checkpoint"):
    pass


class SetCheckpointTtl(_CheckpointRequest, frozen=True, tag="time_checkpoint"):
    ttl_s: float | None
    """Seconds from now until the checkpoint expires; None is never."""


class PublishCheckpoint(_CheckpointRequest, frozen=True, tag="publish_checkpoint"):
    """Let all tenants of this server read a checkpoint, or no longer. Idempotent."""

    public: bool


class ImportCheckpoint(_Request, frozen=True, tag="import_checkpoint"):
    """Make a checkpoint of complete files in this folder of the imports: weights from elsewhere, as a run of their own.

    The files are in place before it is decided.
    """

    import_id: str
    name: str
    run_id: str
    base_model: str
    lora: ops.LoraConfig | None
    ttl_s: float | None = None
    user_metadata: Mapping[str, str] = {}
    kind: ops.WeightsKind = "weights"
    optimizer: ops.OptimizerName = "adamw"

    def create(self) -> ops.CreateModel:
        """A model that can load the weights."""
        return ops.CreateModel(self.run_id, self.base_model, self.lora, optimizer=self.optimizer)

    def save(self) -> ops.SaveWeights:
        """The save that would have made the checkpoint."""
        return ops.SaveWeights(self.run_id, 0, self.kind, self.name, ttl_s=self.ttl_s, user_metadata=self.user_metadata)


class AddEndpoint(_Request, frozen=True, tag="add_endpoint"):
    """An inference engine at a URL that the settings allow. Idempotent, and resolves its address again."""

    name: str
    url: str
    engine: Literal["vllm", "transformers"]
    address: str = ""
    """What its host resolves to: filled in by the orchestrator before it is decided."""


class RemoveEndpoint(_Request, frozen=True, tag="remove_endpoint"):
    name: str


Command = (
    SubmitOperation
    | AbortOperation
    | OpenSession
    | FinishSession
    | CreateCustomLoss
    | DeleteCheckpoint
    | SetCheckpointTtl
    | PublishCheckpoint
    | ImportCheckpoint
    | AddEndpoint
    | RemoveEndpoint
)


# Queries


class SessionHeartbeat(_SessionRequest, frozen=True, tag="beat_session"):
    """The client is alive. Every request that names a session says so; this one says nothing else."""


class WatchFuture(_FutureRequest, frozen=True, tag="watch_future"):
    """The result when it is there, or the queue position when `wait_s` are over."""

    wait_s: float


class WatchTokens(_FutureRequest, frozen=True, tag="watch_tokens"):
    """As `WatchFuture`, or before that the tokens of a streamed sample beyond those that the client has."""

    counts: Sequence[int]
    """How many tokens the client has of each sample of the request."""
    wait_s: float


class WatchSamples(_SamplerRequest, frozen=True, tag="watch_samples"):
    """The samples of this sampler that ended after the cursor, as soon as there is one, or after `wait_s`."""

    copy: int
    """The id of the client: each numbers its requests in a block of its own."""
    cursor: int
    """From the last response; 0 is the beginning."""
    wait_s: float
    linger: bool = True
    """Wait even if nothing is open that could end."""


class DescribeModel(_Request, frozen=True, tag="describe_model"):
    model_id: str

    @property
    def subject(self) -> str | None:
        return self.model_id


class DescribeCustomLoss(_Request, frozen=True, tag="describe_custom_loss"):
    loss_id: str

    @property
    def subject(self) -> str | None:
        return self.loss_id


class DescribeSampler(_SamplerRequest, frozen=True, tag="describe_sampler"):
    pass


class JoinSampler(_SamplerRequest, frozen=True, tag="join_sampler"):
    """Issue an id to another client of this sampler."""


class ListModels(_Request, frozen=True, tag="list_models"):
    """Of this tenant."""


class ListSessions(_Request, frozen=True, tag="list_sessions"):
    """Of this tenant, all or the one that is named."""

    session_id: str | None = None

    @property
    def subject(self) -> str | None:
        return self.session_id


class ListCheckpoints(_Request, frozen=True, tag="list_checkpoints"):
    """Of one model, or of all models of this tenant."""

    model_id: str | None = None

    @property
    def subject(self) -> str | None:
        return self.model_id


class DescribeCheckpoint(_CheckpointRequest, frozen=True, tag="describe_checkpoint"):
    """Of this tenant, or a public one."""


class ListResults(_Request, frozen=True, tag="list_results"):
    """Of the passes and steps of one model that ended and whose results are kept, in their order."""

    model_id: str
    after: int
    """The sequence number of the last one that is known."""
    limit: int

    @property
    def subject(self) -> str | None:
        return self.model_id


class DescribeServer(_Request, frozen=True, tag="describe_server"):
    pass


class CheckHealth(_Request, frozen=True, tag="check_health"):
    """Through the orchestrator to every rank and back."""


class ListEndpoints(_Request, frozen=True, tag="list_endpoints"):
    """Every endpoint is asked which versions it has."""


class DescribeStatus(_Request, frozen=True, tag="describe_status"):
    everything: bool
    """All tenants by name."""


class DescribeTimeline(_FutureRequest, frozen=True, tag="describe_timeline"):
    pass


class ListTimelines(_Request, frozen=True, tag="list_timelines"):
    """Of all tenants; or of one session of this tenant."""

    session_id: str = ""
    """Empty: of all tenants."""


class ReadMetrics(_Request, frozen=True, tag="read_metrics"):
    everything: bool


class DescribeActivity(_Request, frozen=True, tag="describe_activity"):
    everything: bool
    operations: int


class ReportMetrics(_Request, frozen=True, tag="report_metrics"):
    """What the client of a model measured, for the curves of the next step. In memory only, and so no command."""

    model_id: str
    seq_id: int
    """They belong to the first optimizer step from this number on."""
    values: Mapping[str, float]

    @property
    def subject(self) -> str | None:
        return self.model_id


class ReadThroughput(_Request, frozen=True, tag="read_throughput"):
    """Of the last hour."""


class ReadUsage(_Request, frozen=True, tag="read_usage"):
    """Of this tenant, in the hours that begin in this window."""

    from_s: float
    until_s: float


class ReadCurves(_Request, frozen=True, tag="read_curves"):
    """The metrics of a model over its steps."""

    model_id: str
    everything: bool
    """Also of another tenant."""
    points: int
    names: Sequence[str] = ()
    """Of the metrics; empty for all."""


class ListRollouts(_Request, frozen=True, tag="list_rollouts"):
    """The kept rollouts of the caller."""

    model_id: str
    """Of one model; empty: of all."""
    limit: int


class ReadRollout(_Request, frozen=True, tag="read_rollout"):
    rollout_id: str


Query = (
    SessionHeartbeat
    | WatchFuture
    | WatchTokens
    | WatchSamples
    | DescribeModel
    | DescribeCustomLoss
    | DescribeSampler
    | JoinSampler
    | ListModels
    | ListSessions
    | ListCheckpoints
    | DescribeCheckpoint
    | ListResults
    | DescribeServer
    | CheckHealth
    | ListEndpoints
    | DescribeStatus
    | DescribeTimeline
    | ListTimelines
    | ReadMetrics
    | DescribeActivity
    | ReportMetrics
    | ReadThroughput
    | ReadUsage
    | ReadCurves
    | ListRollouts
    | ReadRollout
)


class OrchestratorRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    request_id: str
    tenant: str
    """Of the caller, as the API server has authenticated it: what belongs to another tenant does not exist for it."""
    body: Command | Query
    traceparent: str = ""
    """The trace that this request is part of; empty: none."""


# Responses


class Accepted(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="accepted"):
    """The future of an operation, new or submitted before."""

    future_id: str
    model_id: str


class ErrorResponse(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="refused"):
    code: Code
    message: str
    hint: str | None = None


class FutureResult(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="finished"):
    result: ops.Result


class QueueState(StrEnum):
    ACTIVE = "active"
    PAUSED_CAPACITY = "paused_capacity"
    PAUSED_RATE_LIMIT = "paused_rate_limit"


class QueuePosition(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="waiting"):
    queue_state: QueueState
    reason: str


class SampleEnded(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    future_id: str
    size: int | None
    """Bytes of the result; None if it failed or expired."""


class TokensSampled(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="tokens_sampled"):
    parts: Sequence[SampledPart]


class SamplesEnded(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="samples_ended"):
    ended: Sequence[SampleEnded]
    cursor: int


class Done(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="done"):
    """The request was carried out; there is nothing else to report."""


class ModelView(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="model"):
    model_id: str
    session_id: str
    base_model: str
    arch: str
    tokenizer_id: str
    lora: ops.LoraConfig | None
    created_at_s: float
    last_request_at_s: float
    next_seq: int
    """The sequence number that runs next."""
    unloaded: bool
    user_metadata: Mapping[str, str] = {}
    wanted: int = 1
    """The first sequence number that is missing."""
    held: Sequence[int] = ()
    """Later ones that arrived."""


class CustomLossView(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="custom_loss"):
    loss: CustomLoss


class SamplerView(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="sampler"):
    sampler_id: str
    base_model: str
    model_path: str | None


class SamplerJoined(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="sampler_joined"):
    copy: int


class ModelList(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="models"):
    models: Sequence[ModelView]


class SessionView(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    session_id: str
    opened_at_s: float
    finished: str | None
    models: Sequence[str]
    user_metadata: Mapping[str, Any]
    samplers: Sequence[str] = ()


class SessionList(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="sessions"):
    sessions: Sequence[SessionView]


class ModelCheckpointView(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="checkpoint"):
    run_id: str
    """The id of the model that was saved."""
    kind: ops.WeightsKind
    name: str
    base_model: str
    lora: ops.LoraConfig | None
    saved_at_s: float
    size: int
    """Bytes of its files."""
    expires_at_s: float | None = None
    user_metadata: Mapping[str, str] = {}
    folder: str = ""
    """Of its files, under that of all checkpoints."""
    public: bool = False
    optimizer: ops.OptimizerName = "adamw"
    lineage: WeightsLineage | None = None

    @property
    def path(self) -> str:
        return f"tinker://{self.run_id}/{self.kind}/{self.name}"


class CheckpointList(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="checkpoints"):
    checkpoints: Sequence[ModelCheckpointView]


class UsageView(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="usage"):
    counts: Sequence[UsageCount]


class EndedResult(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    seq_id: int
    ended_at_s: float
    result: ops.PassDone | ops.StepDone


class ResultList(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="results"):
    results: Sequence[EndedResult]
    unloaded: bool
    """The model is gone: nothing follows."""


class ServerView(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="server"):
    base_model: str
    max_context: int
    full: bool
    world_size: int
    ready: bool
    pending: int
    running: int
    dispatched: int
    arch: str = ""
    snapshot: int = 0
    """The dispatch of the newest snapshot; a replay starts after it."""


class EndpointView(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    name: str
    url: str
    address: str
    engine: str
    added_at_s: float
    reachable: bool
    message: str
    """Why it is not."""
    versions: Sequence[str]
    """Of weights, that it reports."""
    published: Sequence[str]
    """Of weights, that were pushed to it last."""


class EndpointList(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="endpoints"):
    endpoints: Sequence[EndpointView]


class HealthReport(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="health"):
    status: Literal["healthy", "starting", "unhealthy"]
    ranks: Sequence[int]
    reason: str


Output = (
    Accepted
    | ErrorResponse
    | FutureResult
    | QueuePosition
    | TokensSampled
    | SamplesEnded
    | Done
    | ModelView
    | CustomLossView
    | SamplerView
    | SamplerJoined
    | ModelList
    | SessionList
    | ModelCheckpointView
    | CheckpointList
    | UsageView
    | ResultList
    | ServerView
    | HealthReport
    | EndpointList
    | status.Views
    | RolloutView
    | RolloutsView
)


class OrchestratorOutputs(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    request_id: str
    output: Output


encode: Final = msgspec.msgpack.Encoder().encode
decode_request: Final = msgspec.msgpack.Decoder(OrchestratorRequest).decode
decode_outputs: Final = msgspec.msgpack.Decoder(OrchestratorOutputs).decode
