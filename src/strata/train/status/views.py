"""Views of the state as types: what each query of a client is responded with, and the texts of queue states."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import StrEnum
from typing import Any, Literal

import msgspec

from strata.base.errors import Code
from strata.train.core import model_options, ops
from strata.train.core.commands import ModelInfo
from strata.train.core.loss_graph import CustomLoss
from strata.train.core.sampling import SampledPart
from strata.train.core.state import (
    ClientSession,
    ModelCheckpoint,
    ModelRecord,
    SamplerState,
    TrainState,
    WeightsLineage,
)
from strata.train.core.usage import UsageCount


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


class ModelView(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="model"):
    model_id: str
    session_id: str
    base_model: str
    arch: str
    tokenizer_id: str
    lora: model_options.LoraConfig | None
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
    inflight: bool = False


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
    lora: model_options.LoraConfig | None
    saved_at_s: float
    size: int
    """Bytes of its files."""
    expires_at_s: float | None = None
    user_metadata: Mapping[str, str] = {}
    folder: str = ""
    """The folder of its files, under that of all checkpoints."""
    public: bool = False
    optimizer: model_options.OptimizerName = "adamw"
    lineage: WeightsLineage = WeightsLineage()

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
    """Versions of weights that it reports."""
    published: Sequence[str]
    """Versions of weights that were pushed to it last."""


class EndpointList(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="endpoints"):
    endpoints: Sequence[EndpointView]


class HealthReport(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="health"):
    status: Literal["healthy", "starting", "unhealthy"]
    ranks: Sequence[int]
    reason: str


def ended_results(state: TrainState, model_id: str, after: int, limit: int) -> list[EndedResult]:
    """Operations of a model end in the order of their numbers, so what is missing before the first has expired."""
    prefix = f"{model_id}:"
    ended = [
        EndedResult(int(future.future_id.removeprefix(prefix)), future.ended_at_s, future.result)
        for future in state.futures
        if future.model_id == model_id and isinstance(future.result, ops.PassDone | ops.StepDone)
    ]
    return sorted((each for each in ended if each.seq_id > after), key=lambda each: each.seq_id)[:limit]


def view_ended_sample(state: TrainState, future_id: str) -> SampleEnded:
    future = state.futures.get(future_id)
    done = future.result if future is not None else None
    if not isinstance(done, ops.SampleDone):
        return SampleEnded(future_id, None)
    payload = done.payload
    return SampleEnded(future_id, len(payload.data) if isinstance(payload, ops.InlinePayload) else payload.size)


def view_sampler(sampler: SamplerState) -> SamplerView:
    return SamplerView(sampler.sampler_id, sampler.base_model, sampler.model_path, sampler.inflight)


def view_checkpoint(state: TrainState, checkpoint: ModelCheckpoint, size: int) -> ModelCheckpointView:
    operation = checkpoint.operation
    created = state.models[operation.model_id].create
    return ModelCheckpointView(
        run_id=operation.model_id,
        kind=operation.kind,
        name=operation.name,
        base_model=created.base_model,
        lora=created.lora,
        saved_at_s=checkpoint.saved_at_s,
        size=size,
        expires_at_s=checkpoint.expires_at_s,
        folder=checkpoint.path,
        user_metadata=operation.user_metadata,
        public=checkpoint.public,
        optimizer=created.optimizer,
        lineage=checkpoint.lineage,
    )


def view_model(model: ModelRecord, base: ModelInfo | None) -> ModelView:
    return ModelView(
        model_id=model.model_id,
        session_id=model.session_id,
        base_model=model.create.base_model,
        arch=base.arch if base else "",
        tokenizer_id=base.tokenizer_id if base else "",
        lora=model.create.lora,
        created_at_s=model.created_at_s,
        last_request_at_s=model.last_request_at_s,
        next_seq=model.done + 1,
        unloaded=model.unloaded,
        user_metadata=model.create.user_metadata,
        wanted=model.line.wanted,
        held=sorted(model.line.held),
    )


def view_session(state: TrainState, session: ClientSession) -> SessionView:
    return SessionView(
        session_id=session.session_id,
        opened_at_s=session.opened_at_s,
        finished=session.finished,
        models=session.models,
        samplers=[each.sampler_id for each in state.samplers.values() if each.session_id == session.session_id],
        user_metadata=session.user_metadata,
    )
