"""Bodies and replies about inference endpoints, and the request to publish a model's weights to them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Literal

import msgspec

from strata.train.core import messages, ops
from strata.train.wire.bodies import Name, Seq, StrictBody, Text, checkpoint_name


class AddEndpointBody(StrictBody, frozen=True, kw_only=True):
    url: Text
    engine: Literal["vllm", "transformers"] = "vllm"
    name: Name | None = None
    """Host and port unless given."""

    def to_request(self) -> messages.AddEndpoint:
        location = self.url.partition("://")[2].rstrip("/")
        name = self.name if self.name is not None else "".join(each if each.isalnum() else "-" for each in location)
        return messages.AddEndpoint(name.strip("-")[:128] if self.name is None else name, self.url, self.engine)


class RemoveEndpointBody(StrictBody, frozen=True, kw_only=True):
    name: Name


class SyncWeightsBody(StrictBody, frozen=True, kw_only=True):
    model_id: Name
    seq_id: Seq
    name: Name | None = None
    """Of the saved weights; after the sequence number unless given."""
    endpoints: Annotated[tuple[Name, ...], msgspec.Meta(max_length=64)] = ()
    """All of them unless given."""
    ttl_seconds: Annotated[float, msgspec.Meta(gt=0, le=3.2e8)] | None = None

    def operation(self) -> ops.SyncWeights:
        name = checkpoint_name(self.name) if self.name is not None else f"sync-{self.seq_id}"
        return ops.SyncWeights(self.model_id, self.seq_id, name, self.endpoints, self.ttl_seconds)


class EndpointReply(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    url: str
    address: str
    engine: str
    added_at_s: float
    reachable: bool
    message: str
    versions: Sequence[str]
    published: Sequence[str]


class EndpointsReply(msgspec.Struct, frozen=True, kw_only=True):
    endpoints: Sequence[EndpointReply]


class EndpointAddedReply(msgspec.Struct, frozen=True, kw_only=True):
    name: str


def endpoints_of(found: messages.EndpointList) -> EndpointsReply:
    return EndpointsReply(endpoints=[EndpointReply(**msgspec.structs.asdict(each)) for each in found.endpoints])
