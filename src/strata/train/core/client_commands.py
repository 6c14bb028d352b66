"""The commands of clients as types (submit, abort, open and finish a session, checkpoints, endpoints), with their
defaults, and what each is responded with.

`inputs.ClientCommand` adds whose they are and when they came. Queries, which only read, are in `status`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import msgspec

from strata.train.core import model_options, ops
from strata.train.core.loss_graph import CustomLoss


class Request(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    @property
    def subject(self) -> str | None:
        """The name that the request is about, which begins with the id of its session; None if it names none."""
        return None


class SessionRequest(Request, frozen=True):
    session_id: str

    @property
    def subject(self) -> str | None:
        return self.session_id


class FutureRequest(Request, frozen=True):
    future_id: str

    @property
    def subject(self) -> str | None:
        return self.future_id


class SavedCheckpointRequest(Request, frozen=True):
    run_id: str
    """The id of the model that was saved."""
    kind: ops.WeightsKind
    name: str

    @property
    def subject(self) -> str | None:
        return self.run_id


class SubmitOperation(Request, frozen=True, tag="submit_operation"):
    """Accept an operation. Idempotent: its response, when it is durable, has the same future every time."""

    operation: ops.Operation
    session_id: str = ""
    """The session of an operation that creates a model or opens a sampler."""


class AbortOperation(FutureRequest, frozen=True, tag="abort"):
    """Cancel an operation that has not been dispatched, or a sample."""

    reason: str = "cancelled by the client"


class OpenSession(SessionRequest, frozen=True, tag="open_session"):
    tags: Sequence[str] = ()
    user_metadata: Mapping[str, Any] = {}
    sdk_version: str = ""


class FinishSession(SessionRequest, frozen=True, tag="finish_session"):
    """Its models are unloaded when they have run what was accepted for them."""

    reason: str


class CreateCustomLoss(Request, frozen=True, tag="create_custom_loss"):
    """Idempotent: the same number with the same content is the same loss."""

    loss_id: str
    loss: CustomLoss

    @property
    def subject(self) -> str | None:
        return self.loss_id


class DeleteCheckpoint(SavedCheckpointRequest, frozen=True, tag="delete_checkpoint"):
    pass


class SetCheckpointTtl(SavedCheckpointRequest, frozen=True, tag="time_checkpoint"):
    ttl_s: float | None
    """Seconds from now until the checkpoint expires; None is never."""


class PublishCheckpoint(SavedCheckpointRequest, frozen=True, tag="publish_checkpoint"):
    """Let all tenants of this server read a checkpoint, or no longer. Idempotent."""

    public: bool


class ImportCheckpoint(Request, frozen=True, tag="import_checkpoint"):
    """Make a checkpoint of complete files in this folder of the imports: weights from elsewhere, as a run of their own.

    The files are in place before it is decided.
    """

    import_id: str
    name: str
    run_id: str
    base_model: str
    lora: model_options.LoraConfig | None
    ttl_s: float | None = None
    user_metadata: Mapping[str, str] = {}
    kind: ops.WeightsKind = "weights"
    optimizer: model_options.OptimizerName = "adamw"

    def create(self) -> ops.CreateModel:
        """A model that can load the weights."""
        return ops.CreateModel(self.run_id, self.base_model, self.lora, optimizer=self.optimizer)

    def save(self) -> ops.SaveWeights:
        """The save that would have made the checkpoint."""
        return ops.SaveWeights(self.run_id, 0, self.kind, self.name, ttl_s=self.ttl_s, user_metadata=self.user_metadata)


class ResolveReplay(Request, frozen=True, tag="resolve_replay"):
    """Accept the new numbers of a model that is stopped because its replay differed, or roll back to its last
    checkpoint."""

    model_id: str
    action: Literal["accept", "roll_back"]
    everything: bool = False
    """Whether it may be a model of another tenant."""

    @property
    def subject(self) -> str | None:
        return self.model_id


class AddEndpoint(Request, frozen=True, tag="add_endpoint"):
    """An inference engine at a URL that the settings allow. Idempotent, and resolves its address again."""

    name: str
    url: str
    engine: Literal["vllm", "transformers"]
    address: str = ""
    """What its host resolves to: filled in by the orchestrator before it is decided."""


class RemoveEndpoint(Request, frozen=True, tag="remove_endpoint"):
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
    | ResolveReplay
    | AddEndpoint
    | RemoveEndpoint
)


class Accepted(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="accepted"):
    """The future of an operation, new or submitted before."""

    future_id: str
    model_id: str


class Done(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="done"):
    """The request was carried out; there is nothing else to report."""
