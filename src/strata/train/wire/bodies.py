"""JSON request bodies of the tinker protocol except samples: their fields, defaults, limits (metadata of 4 KiB) and
conversion to operations, and the parsing of `tinker://` paths.

Bodies are strict: a parameter of a newer client that this server would ignore must not pass for applied. Queries are
lenient. `sdk_model` is the model of the `tinker` SDK that a body reads: `sdk_fields` knows its defaults, and a contract
test compares the two.
"""

from __future__ import annotations

import datetime
import re
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Final, Literal, NamedTuple, get_args

import msgspec

from strata.base.errors import Code, StrataError
from strata.train.core import client_commands, model_options, ops
from strata.train.core.loss_graph import MAX_INPUTS, CustomLoss, LossGraph, LossInput, check_loss
from strata.train.core.ops import MAX_NAME
from strata.train.core.usage import HOUR_S
from strata.train.status import views
from strata.train.status.learning_curves import MAX_REPORTED
from strata.train.wire.sdk_fields import NO_MODEL

MAX_METADATA: Final = 4096
"""Bytes of the metadata of a session, as JSON: the server keeps it as long as the session's record."""
Name = Annotated[str, msgspec.Meta(min_length=1, max_length=MAX_NAME, pattern=r"\A[^\x00-\x1f\x7f]*\Z")]
Seq = Annotated[int, msgspec.Meta(ge=1, le=2**31 - 1)]
Int64 = Annotated[int, msgspec.Meta(ge=-(2**63), le=2**63 - 1)]
"""What msgpack, on the links and in the journal, can encode."""
Text = Annotated[str, msgspec.Meta(max_length=4096)]
Share = Annotated[float, msgspec.Meta(ge=0, lt=1)]
Amount = Annotated[float, msgspec.Meta(ge=0, le=1e30)]
Kind = ops.WeightsKind
KINDS: Final = get_args(ops.WeightsKind)

_LORA: Final = model_options.LoraConfig()
_ADAM: Final = model_options.AdamParams()
_MUON: Final = model_options.MuonParams(_ADAM.learning_rate)
_CHECKPOINT: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")


class LenientQuery(msgspec.Struct, frozen=True, kw_only=True):
    """Unknown parameters are ignored."""


class StrictBody(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Unknown fields are refused, unless they ask for nothing: see `sdk_fields`."""

    type: Text = ""


class ClientConfigBody(StrictBody, frozen=True, kw_only=True):
    sdk_model: ClassVar[str] = "ClientConfigRequest"
    sdk_version: Text = ""


class CreateSessionBody(StrictBody, frozen=True, kw_only=True):
    sdk_model: ClassVar[str] = "CreateSessionRequest"
    tags: Annotated[tuple[Text, ...], msgspec.Meta(max_length=100)] = ()
    user_metadata: dict[str, Any] | None = None
    sdk_version: Text = ""
    project_id: Text | None = None
    display_name: Text | None = None


class SessionBody(StrictBody, frozen=True, kw_only=True):
    sdk_model: ClassVar[str] = "SessionHeartbeatRequest"
    session_id: Name


class FinishReason(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    sdk_model: ClassVar[str] = NO_MODEL
    type: Text = "success"


class FinishSessionBody(StrictBody, frozen=True, kw_only=True):
    sdk_model: ClassVar[str] = NO_MODEL
    reason: FinishReason = FinishReason()
    detail: Text | None = None


class ModelBody(StrictBody, frozen=True, kw_only=True):
    sdk_model: ClassVar[str] = "GetInfoRequest"
    model_id: Name


class LoraConfigBody(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    sdk_model: ClassVar[str] = "LoraConfig"
    rank: Annotated[int, msgspec.Meta(ge=1, le=4096)]
    alpha: Annotated[float, msgspec.Meta(gt=0, le=1e6)] = _LORA.alpha
    seed: Int64 | None = None
    train_unembed: bool = _LORA.train_unembed
    train_mlp: bool = _LORA.train_mlp
    train_attn: bool = _LORA.train_attn

    def to_core(self) -> model_options.LoraConfig:
        return msgspec.convert(self, model_options.LoraConfig, from_attributes=True)


class OptimizerConfigBody(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    sdk_model: ClassVar[str] = "OptimizerConfigBase"
    type: Text = "adamw"
    version: int | None = None
    """The version of dimuon alone."""

    def to_core(self) -> model_options.OptimizerName:
        """INVALID for an optimizer that is not there."""
        match self.type:
            case "adamw" | "muon":
                if self.version is not None:
                    raise StrataError(Code.INVALID, f"optimizer_config.version: {self.type} has no versions")
                return self.type
            case _:
                why = ": its update rule is not published" if self.type == "dimuon" else ""
                raise StrataError(
                    Code.INVALID, f"optimizer_config.type: this server steps with adamw or muon, not {self.type!r}{why}"
                )


class CreateModelBody(StrictBody, frozen=True, kw_only=True):
    sdk_model: ClassVar[str] = "CreateModelRequest"
    session_id: Name
    model_seq_id: Annotated[int, msgspec.Meta(ge=0, le=2**31 - 1)]
    base_model: Name
    user_metadata: dict[str, Any] | None = None
    lora_config: LoraConfigBody | None = None
    optimizer_config: OptimizerConfigBody = OptimizerConfigBody()
    schedule: model_options.Schedule | None = None
    """A factor on every step's learning rate, for clients that do not compute their own."""

    def operation(self) -> ops.CreateModel:
        return ops.CreateModel(
            model_id=f"{self.session_id}:train:{self.model_seq_id}",
            base_model=self.base_model,
            lora=None if self.lora_config is None else self.lora_config.to_core(),
            schedule=self.schedule,
            user_metadata=metadata_as_text(self.user_metadata),
            optimizer=self.optimizer_config.to_core(),
        )


class AdamParamsBody(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    sdk_model: ClassVar[str] = "AdamParams"
    learning_rate: Amount = _ADAM.learning_rate
    beta1: Share = _ADAM.beta1
    beta2: Share = _ADAM.beta2
    eps: Amount = _ADAM.eps
    weight_decay: Amount = _ADAM.weight_decay
    grad_clip_norm: Amount = _ADAM.grad_clip_norm
    type: Literal["adamw"] = "adamw"

    def to_core(self) -> model_options.AdamParams:
        return msgspec.convert(self, model_options.AdamParams, from_attributes=True)


class MuonParamsBody(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    type: Literal["muon"]
    learning_rate: Amount
    momentum: Share = _MUON.momentum
    nesterov: bool = _MUON.nesterov
    weight_decay: Amount = _MUON.weight_decay
    ns_steps: Annotated[int, msgspec.Meta(ge=1, le=20)] = _MUON.ns_steps
    adjust_lr_fn: Literal["original", "match_rms_adamw"] = _MUON.adjust_lr_fn
    grad_clip_norm: Amount = _MUON.grad_clip_norm

    def to_core(self) -> model_options.MuonParams:
        return msgspec.convert(self, model_options.MuonParams, from_attributes=True)


class OptimStepBody(StrictBody, frozen=True, kw_only=True):
    sdk_model: ClassVar[str] = "OptimStepRequest"
    model_id: Name
    seq_id: Seq
    adam_params: AdamParamsBody = AdamParamsBody()
    optimizer_params: MuonParamsBody | None = None
    """Parameters of every optimizer but AdamW."""

    def operation(self) -> ops.OptimStep:
        if self.optimizer_params is not None:
            return ops.OptimStep(self.model_id, self.seq_id, None, self.optimizer_params.to_core())
        return ops.OptimStep(self.model_id, self.seq_id, self.adam_params.to_core())


class CreateCustomLossBody(StrictBody, frozen=True, kw_only=True):
    sdk_model: ClassVar[str] = "CreateCustomLossRequest"
    session_id: Name
    custom_loss_seq_id: Annotated[int, msgspec.Meta(ge=0, le=2**31 - 1)]
    name: Name
    inputs: Annotated[tuple[LossInput, ...], msgspec.Meta(max_length=MAX_INPUTS)]
    graph: LossGraph

    def command(self) -> client_commands.CreateCustomLoss:
        loss_id = f"{self.session_id}:loss:{self.custom_loss_seq_id}"
        loss = CustomLoss(self.name, self.inputs, self.graph)
        # The orchestrator checks it too, before it is journaled; a number of any size would not even get there.
        check_loss(loss)
        return client_commands.CreateCustomLoss(loss_id, loss)


class AbortGradientsBody(StrictBody, frozen=True, kw_only=True):
    model_id: Name
    seq_id: Seq

    def operation(self) -> ops.AbortGradients:
        return ops.AbortGradients(self.model_id, self.seq_id)


class SaveBody(StrictBody, frozen=True, kw_only=True):
    """What requests to save weights have in common."""

    model_id: Name
    seq_id: Seq
    path: Name | None = None
    """A name, not a path: where the files lie is the server's matter."""
    ttl_seconds: Annotated[float, msgspec.Meta(gt=0, le=3.2e8)] | None = None
    overwrite: bool = False
    user_metadata: dict[str, Any] | None = None

    def save(self, kind: ops.WeightsKind) -> ops.SaveWeights:
        return ops.SaveWeights(
            model_id=self.model_id,
            seq_id=self.seq_id,
            kind=kind,
            name=checkpoint_name(self.path if self.path is not None else f"step-{self.seq_id}"),
            overwrite=self.overwrite,
            ttl_s=self.ttl_seconds,
            user_metadata=metadata_as_text(self.user_metadata),
        )


class SaveWeightsBody(SaveBody, frozen=True, kw_only=True):
    sdk_model: ClassVar[str] = "SaveWeightsRequest"

    def operation(self) -> ops.SaveWeights:
        return self.save("weights")


class SaveWeightsExternalBody(StrictBody, frozen=True, kw_only=True):
    sdk_model: ClassVar[str] = "SaveWeightsExternalRequest"
    model_id: Name
    seq_id: Seq
    path: Name
    ttl_seconds: Annotated[float, msgspec.Meta(gt=0, le=3.2e8)] | None = None
    age_encryption_recipients: list[Text] | None = None

    def operation(self) -> ops.SaveWeights:
        if self.age_encryption_recipients:
            raise StrataError(Code.INVALID, "age_encryption_recipients: this server does not encrypt what it exports")
        name = checkpoint_name(self.path)
        return ops.SaveWeights(self.model_id, self.seq_id, "external_weights", name, ttl_s=self.ttl_seconds)


class LoadWeightsBody(StrictBody, frozen=True, kw_only=True):
    """Loads into a model, at a place of its order, or into a new model of a session, before everything else."""

    sdk_model: ClassVar[str] = "LoadWeightsRequest"
    path: Name
    model_id: Name | None = None
    seq_id: Seq | None = None
    session_id: Name | None = None
    model_seq_id: Annotated[int, msgspec.Meta(ge=0, le=2**31 - 1)] | None = None
    base_model: Name | None = None
    user_metadata: dict[str, Any] | None = None
    optimizer: bool = False
    optimizer_config: OptimizerConfigBody | None = None
    """The optimizer of a new model that does not continue with the state of the saved one."""

    @property
    def new_model_id(self) -> str | None:
        if self.session_id is None or self.model_seq_id is None:
            return None
        return f"{self.session_id}:train:{self.model_seq_id}"

    def operation(self) -> ops.LoadWeights:
        run_id, kind, name = tinker_path(self.path)
        new = self.new_model_id
        if new is not None and self.model_id is None and self.seq_id is None:
            return ops.LoadWeights(new, 0, run_id, kind, name, self.optimizer)
        if new is not None or self.model_id is None or self.seq_id is None:
            raise StrataError(
                Code.INVALID, "path: it is loaded either into model_id at seq_id, or into model_seq_id of session_id"
            )
        return ops.LoadWeights(self.model_id, self.seq_id, run_id, kind, name, self.optimizer)


class UnloadModelBody(StrictBody, frozen=True, kw_only=True):
    sdk_model: ClassVar[str] = "UnloadModelRequest"
    model_id: Name

    def operation(self) -> ops.UnloadModel:
        return ops.UnloadModel(self.model_id)


class TinkerPathBody(StrictBody, frozen=True, kw_only=True):
    sdk_model: ClassVar[str] = NO_MODEL
    tinker_path: Name


class CheckpointTtlBody(StrictBody, frozen=True, kw_only=True):
    ttl_seconds: Annotated[float, msgspec.Meta(gt=0, le=3.2e8)] | None
    """Seconds from now; null is for ever."""


class ArchiveTokenQuery(LenientQuery, frozen=True, kw_only=True):
    token: Annotated[str, msgspec.Meta(min_length=1, max_length=2048)]


class ImportQuery(LenientQuery, frozen=True, kw_only=True):
    name: Name
    ttl_seconds: Annotated[float, msgspec.Meta(gt=0, le=3.2e8)] | None = None


class CheckpointBody(StrictBody, frozen=True, kw_only=True):
    sdk_model: ClassVar[str] = NO_MODEL
    model_id: Name
    checkpoint_id: Name


class CopyWeightsBody(StrictBody, frozen=True, kw_only=True):
    sdk_model: ClassVar[str] = "CopyWeightsRequest"
    source_path: Name
    destination_project_id: Text | None = None
    session_id: Name | None = None
    model_seq_id: Int64 | None = None
    ttl_seconds: Annotated[float, msgspec.Meta(gt=0, le=3.2e8)] | None = None
    weights_access_token: Text | None = None

    def check_destination(self, own: str) -> None:
        """A copy goes into the one project of the caller."""
        if self.session_id is not None or self.model_seq_id is not None:
            raise StrataError(
                Code.INVALID, "session_id: this server copies weights into a project", hint=f"yours is {own!r}"
            )
        if self.destination_project_id != own:
            raise StrataError(
                Code.INVALID,
                f"destination_project_id: there is one project for each tenant, not {self.destination_project_id!r}",
                hint=f"yours is {own!r}",
            )


class ProjectBody(StrictBody, frozen=True, kw_only=True):
    project_id: Text


class UsageQuery(LenientQuery, frozen=True, kw_only=True):
    sdk_model: ClassVar[str] = "GetBillingUsageRequest"
    starting_on: datetime.datetime
    ending_before: datetime.datetime

    def window(self, now_s: float) -> tuple[float, float]:
        """Returns the window in seconds since 1970. INVALID if it is not whole hours of at most fourteen days that have
        begun."""
        for name in ("starting_on", "ending_before"):
            moment = getattr(self, name)
            if moment.tzinfo is None or moment.timestamp() % HOUR_S:
                raise StrataError(
                    Code.INVALID, f"{name}: needs a whole hour with a time zone, such as 2026-01-31T12:00:00Z"
                )
        from_s, until_s = self.starting_on.timestamp(), self.ending_before.timestamp()
        if from_s > now_s:
            raise StrataError(Code.INVALID, "starting_on: lies in the future")
        if not 0 < until_s - from_s <= 14 * 24 * HOUR_S:
            raise StrataError(Code.INVALID, "ending_before: lies at most 14 days after starting_on")
        return from_s, until_s


class StorageQuery(LenientQuery, frozen=True, kw_only=True):
    sdk_model: ClassVar[str] = "GetCurrentCheckpointStorageUsageRequest"
    project_id: Text | None = None


class SessionCursorBody(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    sdk_model: ClassVar[str] = "SessionSearchCursor"
    last_created_at: datetime.datetime
    last_session_id: Name


class SessionOwner(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    sdk_model: ClassVar[str] = "UserSearchOwner"
    type: Literal["own", "accessible", "user"] = "own"
    owner_urns: Annotated[tuple[Text, ...], msgspec.Meta(max_length=10)] = ()


class SessionStatusQuery(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    sdk_model: ClassVar[str] = "ClientFinishedSessionStatusQuery"
    type: Literal["active", "cancelled", "failed", "client_finished"]
    reasons: Annotated[tuple[Text, ...], msgspec.Meta(max_length=10)] | None = None


class SearchSessionsBody(StrictBody, frozen=True, kw_only=True):
    sdk_model: ClassVar[str] = "SessionSearchRequest"
    session_id: Name | None = None
    project_ids: Annotated[tuple[Text, ...], msgspec.Meta(max_length=100)] | None = None
    user_metadata: dict[str, str] = {}
    display_name: Text | None = None
    owner: SessionOwner = SessionOwner()
    statuses: Annotated[tuple[SessionStatusQuery, ...], msgspec.Meta(max_length=10)] | None = None
    limit: Annotated[int, msgspec.Meta(ge=1, le=200)] = 50
    cursor: SessionCursorBody | None = None

    def includes_owner(self, tenant: str) -> bool:
        return self.owner.type != "user" or tenant in self.owner.owner_urns

    def includes_project(self, project: str) -> bool:
        return self.project_ids is None or project in self.project_ids

    def matches(self, session: views.SessionView) -> bool:
        metadata = metadata_as_text(session.user_metadata)
        if any(metadata.get(name) != value for name, value in self.user_metadata.items()):
            return False
        status = session_status(session)
        if self.statuses is not None and not any(
            each.type == status.type and (each.reasons is None or status.reason in each.reasons)
            for each in self.statuses
        ):
            return False
        if self.session_id is None and self.display_name is None:
            return True
        words = (self.display_name or "").lower().split()
        named = bool(words) and all(word in metadata.get("display_name", "").lower() for word in words)
        return session.session_id == self.session_id or named


class SessionStatus(NamedTuple):
    type: Literal["active", "cancelled", "client_finished"]
    reason: str = ""
    """The reason as the client gave it."""
    detail: str | None = None


def session_status(session: views.SessionView) -> SessionStatus:
    """A session that the server ended for another reason than its client's is cancelled."""
    if session.finished is None:
        return SessionStatus("active")
    reason, _, detail = session.finished.partition(": ")
    if reason in ("success", "errored", "interrupted"):
        return SessionStatus("client_finished", reason, detail or None)
    return SessionStatus("cancelled", detail=session.finished)


class RetrieveFutureBody(StrictBody, frozen=True, kw_only=True):
    sdk_model: ClassVar[str] = "FutureRetrieveRequest"
    request_id: Name
    allow_metadata_only: bool = False
    """A permission that this server does not use: it sends results as a whole."""
    wait_s: Annotated[float, msgspec.Meta(ge=0, le=3600)] | None = None
    """Shorter than the server would wait."""


class FutureBody(StrictBody, frozen=True, kw_only=True):
    sdk_model: ClassVar[str] = NO_MODEL
    request_id: Name


class PageQuery(LenientQuery, frozen=True, kw_only=True):
    limit: Annotated[int, msgspec.Meta(ge=1, le=1000)] = 100
    offset: Annotated[int, msgspec.Meta(ge=0, le=2**53)] = 0


class ResultsQuery(LenientQuery, frozen=True, kw_only=True):
    after: Annotated[int, msgspec.Meta(ge=0, le=2**53)] = 0
    """The `seq_id` of the last point that is known."""
    limit: Annotated[int, msgspec.Meta(ge=1, le=1000)] = 200


class ActivityQuery(LenientQuery, frozen=True, kw_only=True):
    operations: Annotated[int, msgspec.Meta(ge=0, le=1000)] = 200


MetricName = Annotated[str, msgspec.Meta(pattern=r"\A[A-Za-z0-9][A-Za-z0-9_./-]{0,63}\Z")]


class ReportBody(StrictBody, frozen=True, kw_only=True):
    values: Annotated[dict[MetricName, float], msgspec.Meta(min_length=1, max_length=MAX_REPORTED)]
    seq_id: Annotated[int, msgspec.Meta(ge=0, le=2**62)] = 0
    """They belong to the first optimizer step from this operation of the model on; 0: to the next one."""


class ResolveBody(StrictBody, frozen=True, kw_only=True):
    action: Literal["accept", "roll_back"]
    """Accept the numbers of the replay, or load the last checkpoint from before it."""


class CurvesQuery(LenientQuery, frozen=True, kw_only=True):
    points: Annotated[int, msgspec.Meta(ge=1, le=1000)] = 500
    names: Annotated[str, msgspec.Meta(max_length=1000)] = ""
    """Names of metrics, with commas between; empty for all."""


class SessionQuery(LenientQuery, frozen=True, kw_only=True):
    session_id: Name | None = None


class ApiKeyBody(StrictBody, frozen=True, kw_only=True):
    name: Annotated[str, msgspec.Meta(min_length=1, max_length=128, pattern=r"\A[^\x00-\x1f\x7f]*\Z")]
    role: Literal["viewer", "researcher", "operator", "admin"]
    valid_s: Annotated[float, msgspec.Meta(gt=0, le=3650 * 86_400)] | None = None


def checkpoint_name(text: str) -> str:
    if not _CHECKPOINT.fullmatch(text):
        raise StrataError(
            Code.INVALID,
            f"path: {text[:80]!r} cannot be the name of a checkpoint",
            hint="up to 128 letters, digits, dots, dashes and underscores",
        )
    return text


def checkpoint_id(text: str) -> tuple[Kind, str]:
    """`weights/NAME`, `sampler_weights/NAME`, `external_weights/NAME`, or the bare name of the first kind."""
    kind, separator, name = text.rpartition("/")
    if not separator:
        return "weights", checkpoint_name(name)
    if kind in KINDS:
        return kind, checkpoint_name(name)  # type: ignore[return-value]
    raise StrataError(Code.NOT_FOUND, f"there is no checkpoint {text[:200]!r}")


def tinker_path(text: str) -> tuple[str, Kind, str]:
    """`tinker://RUN/weights/NAME`: which model, what kind of weights, their name.

    Whatever else is INVALID, also a kind there is not: only then an operation that names it still takes its number.
    """
    parts = text.removeprefix("tinker://").split("/")
    well_formed = len(parts) == 3 and parts[0] and parts[1] in KINDS
    if not text.startswith("tinker://") or not well_formed:
        raise StrataError(Code.INVALID, f"path: {text[:200]!r} is not of the form tinker://RUN/weights/NAME")
    kind, name = checkpoint_id(f"{parts[1]}/{parts[2]}")
    return parts[0], kind, name


def check_metadata(metadata: Mapping[str, Any], path: str = "user_metadata") -> Mapping[str, Any]:
    """The same metadata; INVALID if it is longer than the server keeps, or has an integer of more than 64 bits, which
    msgpack cannot encode."""
    pending: list[tuple[str, Any]] = [(path, metadata)]
    while pending:
        field, value = pending.pop()
        if isinstance(value, Mapping):
            pending += [(f"{field}.{name[:MAX_NAME]}", each) for name, each in value.items()]
        elif isinstance(value, list):
            pending += [(f"{field}[{index}]", each) for index, each in enumerate(value)]
        elif isinstance(value, int) and not -(2**63) <= value < 2**63:
            raise StrataError(Code.INVALID, f"{field}: the number has more than 64 bits", hint="send it as a text")
    size = len(msgspec.json.encode(metadata))
    if size > MAX_METADATA:
        raise StrataError(Code.INVALID, f"{path}: it has {size} bytes as JSON, at most {MAX_METADATA} are kept")
    return metadata


def metadata_as_text(metadata: Mapping[str, Any] | None) -> Mapping[str, str]:
    """The client's metadata as texts: other values are encoded as JSON."""
    return {
        name: value if isinstance(value, str) else msgspec.json.encode(value).decode()
        for name, value in (metadata or {}).items()
    }


class AddEndpointBody(StrictBody, frozen=True, kw_only=True):
    url: Text
    engine: Literal["vllm", "transformers"] = "vllm"
    name: Name | None = None
    """Host and port unless given."""

    def to_request(self) -> client_commands.AddEndpoint:
        location = self.url.partition("://")[2].rstrip("/")
        name = self.name if self.name is not None else "".join(each if each.isalnum() else "-" for each in location)
        return client_commands.AddEndpoint(name.strip("-")[:128] if self.name is None else name, self.url, self.engine)


class RemoveEndpointBody(StrictBody, frozen=True, kw_only=True):
    name: Name


class SyncWeightsBody(StrictBody, frozen=True, kw_only=True):
    model_id: Name
    seq_id: Seq
    name: Name | None = None
    """The name of the saved weights; after the sequence number unless given."""
    endpoints: Annotated[tuple[Name, ...], msgspec.Meta(max_length=64)] = ()
    """All of them unless given."""
    ttl_seconds: Annotated[float, msgspec.Meta(gt=0, le=3.2e8)] | None = None

    def operation(self) -> ops.SyncWeights:
        name = checkpoint_name(self.name) if self.name is not None else f"sync-{self.seq_id}"
        return ops.SyncWeights(self.model_id, self.seq_id, name, self.endpoints, self.ttl_seconds)
