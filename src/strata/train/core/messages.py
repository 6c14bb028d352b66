"""What an API server and the orchestrator say to each other.

An API server holds nothing: it asks, and every answer carries the id of the question. `request_id` of a question is
the asker's and lives as long as the question; `future_id` is the orchestrator's and lives as long as the future.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import StrEnum
from typing import Any, Final, Literal

import msgspec

from strata.base.errors import Code
from strata.train.core import ops, status


class RequestType(StrEnum):
    ADD = "add"
    """Accept an operation; answered when it is durable."""
    ABORT = "abort"
    """Give up an operation that has not been dispatched."""
    UTILITY = "utility"
    """Anything that is no operation: sessions, looking up, health."""


class OpenSession(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="open_session"):
    session_id: str
    tags: Sequence[str] = ()
    user_metadata: Mapping[str, Any] = {}
    sdk_version: str = ""


class SessionHeartbeat(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="beat_session"):
    session_id: str


class FinishSession(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="finish_session"):
    session_id: str
    reason: str


class WatchFuture(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="watch_future"):
    """Answered with the result when it is there, or with the place in the queue when `wait_s` are over."""

    future_id: str
    wait_s: float


class WatchSamples(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="watch_samples"):
    """Answered as soon as a sample of this sampler has ended that the asker does not know of, or after `wait_s`."""

    sampler_id: str
    copy: int
    """Of the client: each counts its requests in a block of its own."""
    cursor: int
    """From the answer before; 0 is the beginning."""
    wait_s: float
    linger: bool = True
    """Wait also if there is nothing that could end."""


class DescribeModel(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="describe_model"):
    model_id: str


class DescribeSampler(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="describe_sampler"):
    sampler_id: str


class JoinSampler(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="join_sampler"):
    """Another copy of a client wants a number of its own."""

    sampler_id: str


class ListModels(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="list_models"):
    """Of this tenant."""


class ListSessions(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="list_sessions"):
    """Of this tenant, all or the one that is named."""

    session_id: str | None = None


class ListCheckpoints(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="list_checkpoints"):
    """Of one model, or of all models of this tenant."""

    model_id: str | None = None


class DescribeCheckpoint(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="describe_checkpoint"):
    run_id: str
    kind: ops.WeightsKind
    name: str


class DeleteCheckpoint(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="delete_checkpoint"):
    run_id: str
    kind: ops.WeightsKind
    name: str


class SetCheckpointTtl(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="time_checkpoint"):
    """Seconds from now until the checkpoint goes; None is never."""

    run_id: str
    kind: ops.WeightsKind
    name: str
    ttl_s: float | None


class ImportCheckpoint(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="import_checkpoint"):
    """Take in what lies whole in this folder of the imports; answered when it is a checkpoint."""

    import_id: str
    name: str
    run_id: str
    base_model: str
    lora: ops.LoraConfig
    ttl_s: float | None = None
    user_metadata: Mapping[str, str] = {}


class DescribeServer(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="describe_server"):
    pass


class AddEndpoint(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="add_endpoint"):
    """An inference engine at a URL that the settings allow."""

    name: str
    url: str
    engine: Literal["vllm", "transformers"]


class RemoveEndpoint(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="remove_endpoint"):
    name: str


class ListEndpoints(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="list_endpoints"):
    """Every one is asked what it has."""


class CheckHealth(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="check_health"):
    """Through the orchestrator to every rank and back."""


Utility = (
    OpenSession
    | SessionHeartbeat
    | FinishSession
    | WatchFuture
    | WatchSamples
    | DescribeModel
    | DescribeSampler
    | JoinSampler
    | ListModels
    | ListSessions
    | ListCheckpoints
    | DescribeCheckpoint
    | DeleteCheckpoint
    | SetCheckpointTtl
    | ImportCheckpoint
    | DescribeServer
    | CheckHealth
    | AddEndpoint
    | RemoveEndpoint
    | ListEndpoints
    | status.Questions
)


class Abort(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="abort"):
    future_id: str


class OrchestratorRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    request_id: str
    request_type: RequestType
    tenant: str
    """Who asks: what belongs to another tenant does not exist for it."""
    operation: ops.Operation | None = None
    payload: Abort | Utility | None = None
    session_id: str = ""
    """Of an operation that creates a model or opens a sampler: the session it belongs to."""


class Accepted(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="accepted"):
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
    """Bytes of what was sampled; None if nothing was, or if it is gone."""


class SamplesEnded(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="samples_ended"):
    ended: Sequence[SampleEnded]
    cursor: int


class Done(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="done"):
    """A question that needs no more than a yes."""


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
    """The first sequence number that has not come."""
    held: Sequence[int] = ()
    """Those beyond it that have."""


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

    @property
    def path(self) -> str:
        return f"tinker://{self.run_id}/{self.kind}/{self.name}"


class CheckpointList(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="checkpoints"):
    checkpoints: Sequence[ModelCheckpointView]


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
    """The newest dispatch of which there is a snapshot; ranks that start anew begin after it."""


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
    """Of weights, that it says it has."""
    published: Sequence[str]
    """Of weights, that it was told of last."""


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
    | SamplesEnded
    | Done
    | ModelView
    | SamplerView
    | SamplerJoined
    | ModelList
    | SessionList
    | ModelCheckpointView
    | CheckpointList
    | ServerView
    | HealthReport
    | EndpointList
    | status.Views
)


class OrchestratorOutputs(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    request_id: str
    output: Output


encode: Final = msgspec.msgpack.Encoder().encode
decode_request: Final = msgspec.msgpack.Decoder(OrchestratorRequest).decode
decode_outputs: Final = msgspec.msgpack.Decoder(OrchestratorOutputs).decode
