"""The envelope of messages between API server and orchestrator: request id, tenant, body, output.

An API server keeps no state: every response carries the id of its request. `request_id` is the API server's and lives
as long as the request; `future_id` is the orchestrator's and lives as long as the future.
"""

from __future__ import annotations

from typing import Final

import msgspec

from strata.train.core.client_commands import Accepted, Command, Done
from strata.train.status import reports
from strata.train.status.queries import Query
from strata.train.status.rollouts import RolloutsView, RolloutView
from strata.train.status.views import (
    CheckpointList,
    CustomLossView,
    EndpointList,
    ErrorResponse,
    FutureResult,
    HealthReport,
    ModelCheckpointView,
    ModelList,
    ModelView,
    QueuePosition,
    ResultList,
    SamplerJoined,
    SamplerView,
    SamplesEnded,
    ServerView,
    SessionList,
    TokensSampled,
    UsageView,
)


class OrchestratorRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    request_id: str
    tenant: str
    """The tenant of the caller, as the API server has authenticated it: what belongs to another tenant does not exist
    for it."""
    body: Command | Query
    traceparent: str = ""
    """The trace that this request is part of; empty: none."""


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
    | reports.Views
    | RolloutView
    | RolloutsView
)


class OrchestratorOutputs(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    request_id: str
    output: Output


encode: Final = msgspec.msgpack.Encoder().encode


decode_request: Final = msgspec.msgpack.Decoder(OrchestratorRequest).decode


decode_outputs: Final = msgspec.msgpack.Decoder(OrchestratorOutputs).decode
