"""JSON replies of the training protocol as types: futures, capabilities, models, checkpoints, sessions, errors of
operations, and the flags of the client configuration.
"""

from __future__ import annotations

import datetime
from collections.abc import Mapping, Sequence
from typing import Literal, assert_never

import msgspec

from strata.train.core import model_options
from strata.train.core.state import TrainedCount, WeightsLineage
from strata.train.core.usage import UsageCount
from strata.train.status import views
from strata.train.wire.bodies import metadata_as_text, session_status

TYPE_OF = {"weights": "training", "sampler_weights": "sampler", "external_weights": "external"}


class FutureReply(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    request_id: str
    model_id: str = ""


class TryAgain(msgspec.Struct, frozen=True, kw_only=True):
    request_id: str
    queue_state: str
    queue_state_reason: str
    type: Literal["try_again"] = "try_again"


class ClientConfigReply(msgspec.Struct, frozen=True, kw_only=True):
    proto_compress_fwdbwd: bool
    """Compress batches on the way: saves the network time and costs the client's."""
    parallel_fwdbwd_chunks: bool = True
    use_pyqwest_transport: bool = True
    pjwt_auth_enabled: bool = False
    create_model_via_load_weights: bool = True
    """One request makes a model of saved weights, with the scale they were trained with."""
    sample_join_sampling_session: bool = True
    custom_loss_server_side: bool = True
    """Losses of `create_custom_loss` run on the ranks."""
    sample_use_retrieve_futures: bool = True
    """One poll for all samples of a sampler, and not one for each."""


class DynamicConfig(msgspec.Struct, frozen=True, kw_only=True):
    refresh_interval_sec: int = 300
    sample_cancel_enabled: bool = False


class SessionReply(msgspec.Struct, frozen=True, kw_only=True):
    session_id: str
    type: Literal["create_session"] = "create_session"


class SessionHeartbeatReply(msgspec.Struct, frozen=True, kw_only=True):
    type: Literal["session_heartbeat"] = "session_heartbeat"


class SupportedModel(msgspec.Struct, frozen=True, kw_only=True):
    model_name: str
    max_context_length: int
    trainable: bool
    sampleable: bool
    images: bool
    """Whether passes take images; the SDK does not read it."""


class Capabilities(msgspec.Struct, frozen=True, kw_only=True):
    supported_models: Sequence[SupportedModel]


class ModelData(msgspec.Struct, frozen=True, kw_only=True):
    arch: str
    model_name: str
    tokenizer_id: str


class ModelInfoReply(msgspec.Struct, frozen=True, kw_only=True):
    model_id: str
    model_data: ModelData
    is_lora: bool
    lora_rank: int | None
    model_name: str
    next_seq: int
    """The sequence number that the server expects next."""
    type: Literal["get_info"] = "get_info"


class OptimizerConfigReply(msgspec.Struct, frozen=True, kw_only=True):
    type: model_options.OptimizerName


class WeightsInfo(msgspec.Struct, frozen=True, kw_only=True):
    base_model: str
    is_lora: bool
    lora_rank: int | None
    lora_alpha: float | None
    train_unembed: bool | None
    train_mlp: bool | None
    train_attn: bool | None
    optimizer_config: OptimizerConfigReply


class TrainedReply(msgspec.Struct, frozen=True, kw_only=True):
    steps: int
    passes: int
    datums: int
    tokens: int
    sampled_tokens: int


class Provenance(msgspec.Struct, frozen=True, kw_only=True):
    """What a checkpoint was trained with; clients of the `tinker` SDK ignore it."""

    parent: str | None
    """The path of the checkpoint that training began with; `imported` if this server did not train it."""
    trained: TrainedReply
    """Counts since the parent."""
    total: TrainedReply
    """Counts with the parent and all before it, as far as this server trained them."""


class CheckpointReply(msgspec.Struct, frozen=True, kw_only=True):
    checkpoint_id: str
    checkpoint_type: str
    time: datetime.datetime
    tinker_path: str
    size_bytes: int
    public: bool
    user_metadata: Mapping[str, str]
    expires_at: datetime.datetime | None
    provenance: Provenance


class CopiedWeights(msgspec.Struct, frozen=True, kw_only=True):
    tinker_path: str


class TraceExport(msgspec.Struct, frozen=True, kw_only=True):
    url: str
    status: Literal["ready"] = "ready"


class KeyOrganization(msgspec.Struct, frozen=True, kw_only=True):
    name: str


class KeyUser(msgspec.Struct, frozen=True, kw_only=True):
    email: str
    """The name of the key: this server knows no addresses."""


class KeyDetails(msgspec.Struct, frozen=True, kw_only=True):
    org_details: KeyOrganization
    user_details: KeyUser


class OwnKeyReply(msgspec.Struct, frozen=True, kw_only=True):
    key_id: int
    name: str
    note: str
    details: KeyDetails


class TrainingUsage(msgspec.Struct, frozen=True, kw_only=True, tag="training"):
    token_count: int


class PrefillUsage(msgspec.Struct, frozen=True, kw_only=True, tag="sampling_prefill"):
    token_count: int
    cached: bool = False
    """Whether the prompt came from a cache."""


class SampleUsage(msgspec.Struct, frozen=True, kw_only=True, tag="sampling_sample"):
    token_count: int


class CheckpointUsage(msgspec.Struct, frozen=True, kw_only=True, tag="checkpoint"):
    count: int


UsageInfo = TrainingUsage | PrefillUsage | SampleUsage | CheckpointUsage


class UsageEvent(msgspec.Struct, frozen=True, kw_only=True):
    """What one session used in one hour. There are no prices here."""

    bucket_start: datetime.datetime
    bucket_end: datetime.datetime
    base_model: str
    user_id: str
    user_name: str
    session_id: str | None
    """None if only the tenant is still known."""
    project_id: str
    event_info: UsageInfo


class UsageSession(msgspec.Struct, frozen=True, kw_only=True):
    user_metadata: Mapping[str, str]


class UsageReply(msgspec.Struct, frozen=True, kw_only=True):
    data: Sequence[UsageEvent]
    sessions: Mapping[str, UsageSession]


class StorageItem(msgspec.Struct, frozen=True, kw_only=True):
    project_id: str
    org_user_urn: str
    user_name: str
    checkpoint_count: int
    size_bytes: int
    size_gigabytes: float


class StorageReply(msgspec.Struct, frozen=True, kw_only=True):
    data: Sequence[StorageItem]


class FinishedBy(msgspec.Struct, frozen=True, kw_only=True):
    type: str


class SessionStatusReply(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    type: Literal["active", "cancelled", "client_finished"]
    reason: FinishedBy | None = None
    detail: str | None = None


class SessionSummary(msgspec.Struct, frozen=True, kw_only=True):
    session_id: str
    created_at: datetime.datetime
    owner: str
    project_id: str
    status: SessionStatusReply
    checkpoints_count: int
    display_name: str | None
    user_metadata: Mapping[str, str]
    checkpoint_storage_bytes: int


class SessionCursor(msgspec.Struct, frozen=True, kw_only=True):
    last_created_at: datetime.datetime
    last_session_id: str


class SessionPage(msgspec.Struct, frozen=True, kw_only=True):
    sessions: Sequence[SessionSummary]
    next_cursor: SessionCursor | None = None


class Imported(msgspec.Struct, frozen=True, kw_only=True):
    path: str


class ExternalWeights(msgspec.Struct, frozen=True, kw_only=True):
    urls: Mapping[str, str]
    expires: datetime.datetime


class Cursor(msgspec.Struct, frozen=True, kw_only=True):
    offset: int
    limit: int
    total_count: int


class CheckpointsReply(msgspec.Struct, frozen=True, kw_only=True):
    checkpoints: Sequence[CheckpointReply]
    cursor: Cursor | None = None


class TrainingRun(msgspec.Struct, frozen=True, kw_only=True):
    training_run_id: str
    base_model: str
    model_owner: str
    is_lora: bool
    corrupted: bool
    lora_rank: int | None
    last_request_time: datetime.datetime
    last_checkpoint: CheckpointReply | None
    last_sampler_checkpoint: CheckpointReply | None
    user_metadata: Mapping[str, str]


class ModelPoint(msgspec.Struct, frozen=True, kw_only=True):
    """The metrics of one pass, or of one step of the optimizer."""

    seq_id: int
    kind: Literal["pass", "optim_step"]
    at_s: float
    values: Mapping[str, float]


class ModelMetrics(msgspec.Struct, frozen=True, kw_only=True):
    points: Sequence[ModelPoint]
    """Points in the order of `seq_id`; as long as the server keeps results."""
    unloaded: bool
    """The model is gone: nothing follows the last point."""


class TrainingRuns(msgspec.Struct, frozen=True, kw_only=True):
    training_runs: Sequence[TrainingRun]
    cursor: Cursor


class SessionsReply(msgspec.Struct, frozen=True, kw_only=True):
    sessions: Sequence[str]


class SessionInfo(msgspec.Struct, frozen=True, kw_only=True):
    training_run_ids: Sequence[str]
    sampler_ids: Sequence[str]
    user_metadata: Mapping[str, str]


class SessionState(msgspec.Struct, frozen=True, kw_only=True):
    session_id: str
    opened_at: datetime.datetime
    finished: str | None
    models: Sequence[str]


class ModelState(msgspec.Struct, frozen=True, kw_only=True):
    model_id: str
    session_id: str
    base_model: str
    next_seq_id: int
    """What the next operation has to be numbered."""
    taken_seq_ids: Sequence[int]
    """Numbers beyond that are used already."""
    done_seq_id: int
    """The last operation that has its result."""
    unloaded: bool


class SessionStates(msgspec.Struct, frozen=True, kw_only=True):
    sessions: Sequence[SessionState]


class ResolvedReply(msgspec.Struct, frozen=True, kw_only=True):
    request_id: str
    """The load of a roll back, whose result can be retrieved; empty if the numbers were accepted."""


class AcceptedReply(msgspec.Struct, frozen=True, kw_only=True):
    status: Literal["accepted"] = "accepted"


class Alive(msgspec.Struct, frozen=True, kw_only=True):
    status: Literal["ok"] = "ok"


class ServerHealthReply(msgspec.Struct, frozen=True, kw_only=True):
    status: str
    ranks: Sequence[int]
    reason: str
    pending: int
    running: int
    dispatched: int


class ApiKeyView(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    name: str
    role: str
    made_at_s: float
    expires_at_s: float | None
    revoked_at_s: float | None


class ApiKeyReply(msgspec.Struct, frozen=True, kw_only=True):
    key: ApiKeyView
    secret: str
    """The text of the key; only in this reply."""


class ApiKeysReply(msgspec.Struct, frozen=True, kw_only=True):
    keys: Sequence[ApiKeyView]


def to_datetime(at_s: float) -> datetime.datetime:
    return datetime.datetime.fromtimestamp(at_s, datetime.UTC)


def info(model: views.ModelView) -> ModelInfoReply:
    return ModelInfoReply(
        model_id=model.model_id,
        model_data=ModelData(arch=model.arch, model_name=model.base_model, tokenizer_id=model.tokenizer_id),
        is_lora=model.lora is not None,
        lora_rank=None if model.lora is None else model.lora.rank,
        model_name=model.base_model,
        next_seq=model.next_seq,
    )


def checkpoint(found: views.ModelCheckpointView) -> CheckpointReply:
    return CheckpointReply(
        checkpoint_id=f"{found.kind}/{found.name}",
        checkpoint_type=TYPE_OF[found.kind],
        time=to_datetime(found.saved_at_s),
        tinker_path=found.path,
        size_bytes=found.size,
        public=found.public,
        user_metadata=found.user_metadata,
        expires_at=None if found.expires_at_s is None else to_datetime(found.expires_at_s),
        provenance=_provenance(found.lineage),
    )


def _provenance(lineage: WeightsLineage) -> Provenance:
    total = lineage.before.plus(lineage.trained)
    return Provenance(parent=lineage.parent or None, trained=_trained(lineage.trained), total=_trained(total))


def _trained(count: TrainedCount) -> TrainedReply:
    return TrainedReply(**msgspec.structs.asdict(count))


def weights_info(found: views.ModelCheckpointView) -> WeightsInfo:
    lora = found.lora
    return WeightsInfo(
        base_model=found.base_model,
        is_lora=lora is not None,
        lora_rank=None if lora is None else lora.rank,
        lora_alpha=None if lora is None else lora.alpha,
        train_unembed=None if lora is None else lora.train_unembed,
        train_mlp=None if lora is None else lora.train_mlp,
        train_attn=None if lora is None else lora.train_attn,
        optimizer_config=OptimizerConfigReply(type=found.optimizer),
    )


def training_run(model: views.ModelView, saved: Sequence[views.ModelCheckpointView], owner: str) -> TrainingRun:
    newest: dict[str, views.ModelCheckpointView] = {}
    for each in sorted(saved, key=lambda found: found.saved_at_s):
        if each.run_id == model.model_id:
            newest[each.kind] = each
    return TrainingRun(
        training_run_id=model.model_id,
        base_model=model.base_model,
        model_owner=owner,
        is_lora=model.lora is not None,
        corrupted=False,
        lora_rank=None if model.lora is None else model.lora.rank,
        last_request_time=to_datetime(model.last_request_at_s),
        last_checkpoint=checkpoint(newest["weights"]) if "weights" in newest else None,
        last_sampler_checkpoint=checkpoint(newest["sampler_weights"]) if "sampler_weights" in newest else None,
        user_metadata=model.user_metadata,
    )


def usage_info(used: UsageCount) -> UsageInfo:
    match used.kind:
        case "training":
            return TrainingUsage(token_count=used.count)
        case "sampling_prefill":
            return PrefillUsage(token_count=used.count)
        case "sampling_sample":
            return SampleUsage(token_count=used.count)
        case "checkpoint":
            return CheckpointUsage(count=used.count)
        case _:
            assert_never(used.kind)


def session_summary(
    session: views.SessionView, checkpoints: Sequence[views.ModelCheckpointView], owner: str, project: str
) -> SessionSummary:
    own = [each for each in checkpoints if each.run_id.partition(":")[0] == session.session_id]
    metadata = metadata_as_text(session.user_metadata)
    status = session_status(session)
    return SessionSummary(
        session_id=session.session_id,
        created_at=to_datetime(session.opened_at_s),
        owner=owner,
        project_id=project,
        status=SessionStatusReply(
            type=status.type, reason=FinishedBy(type=status.reason) if status.reason else None, detail=status.detail
        ),
        checkpoints_count=len(own),
        display_name=metadata.get("display_name"),
        user_metadata=metadata,
        checkpoint_storage_bytes=sum(each.size for each in own),
    )


class EndpointsReply(msgspec.Struct, frozen=True, kw_only=True):
    endpoints: Sequence[views.EndpointView]


class EndpointAddedReply(msgspec.Struct, frozen=True, kw_only=True):
    name: str
