"""What is journaled: everything that the orchestrator has to know again after a restart, and nothing else."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final, Literal

import msgspec

from strata.train.core import ops
from strata.train.core.commands import Row
from strata.train.core.sampling import QuantumPlan


class _Fact(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    pass


class SessionOpened(_Fact, frozen=True, tag="session_opened"):
    session_id: str
    tenant: str
    at_s: float
    tags: Sequence[str] = ()
    user_metadata: Mapping[str, Any] = {}
    sdk_version: str = ""


class SessionFinished(_Fact, frozen=True, tag="session_finished"):
    session_id: str
    reason: str
    at_s: float


class Accepted(_Fact, frozen=True, tag="accepted"):
    """Durable before the client hears of it: from here on the operation is done once, whatever dies."""

    future_id: str
    tenant: str
    operation: ops.Operation
    digest: str
    at_s: float
    session_id: str = ""


class Dispatched(_Fact, frozen=True, tag="dispatched"):
    """Durable before the ranks hear of it: the exact composition, so that it can be told again in the same words."""

    number: int
    future_ids: Sequence[str]
    rows: Sequence[Sequence[Row]] = ()
    path: str = ""
    """The folder of a checkpoint, under that of all checkpoints."""
    close: Sequence[str] = ()
    """Samplers that make room for a new one."""
    quantum: QuantumPlan | None = None
    """The futures are then the requests that the quantum adds; none of them ends with this dispatch as such."""


class QuantumEnded(_Fact, frozen=True, tag="quantum_ended"):
    """The ranks answered a quantum. What ended in it has facts of its own."""

    number: int


class RanksRenewed(_Fact, frozen=True, tag="ranks_renewed"):
    """Another group of ranks is spoken to: what the one before remembered of sequences is lost, and begins again."""

    group: str


class Finished(_Fact, frozen=True, tag="finished"):
    future_id: str
    result: ops.Result
    at_s: float


class GivenUp(_Fact, frozen=True, tag="given_up"):
    """A dispatch that ranks died of, or never came back from. No group of ranks is ever told it again."""

    number: int
    reason: str
    at_s: float


class CheckpointDeleted(_Fact, frozen=True, tag="checkpoint_deleted"):
    run_id: str
    kind: Literal["weights", "sampler_weights"]
    name: str


class Expired(_Fact, frozen=True, tag="expired"):
    """Results that ended at this moment or before are gone."""

    until_s: float


Fact = (
    SessionOpened
    | SessionFinished
    | Accepted
    | Dispatched
    | QuantumEnded
    | RanksRenewed
    | Finished
    | GivenUp
    | CheckpointDeleted
    | Expired
)

encode: Final = msgspec.msgpack.Encoder().encode
decode: Final = msgspec.msgpack.Decoder(Fact).decode
