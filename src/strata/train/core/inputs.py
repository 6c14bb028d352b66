"""What the orchestrator's core is asked to decide, and what it answers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from strata.train.core import ops
from strata.train.core.facts import Fact
from strata.train.core.state import Dispatch


@dataclass(frozen=True)
class OpenSession:
    tenant: str
    session_id: str
    at_s: float
    tags: Sequence[str] = ()
    user_metadata: Mapping[str, Any] | None = None
    sdk_version: str = ""


@dataclass(frozen=True)
class FinishSession:
    """Its models are unloaded when they have done what was accepted for them."""

    tenant: str
    session_id: str
    reason: str
    at_s: float


@dataclass(frozen=True)
class Accept:
    tenant: str
    operation: ops.Operation
    at_s: float
    session_id: str = ""


@dataclass(frozen=True)
class DispatchNext:
    """There may be room at the ranks. Decides one thing at a time: ask until nothing comes of it."""

    ranks: int
    max_context: int
    at_s: float


@dataclass(frozen=True)
class Answer:
    """The ranks' results of a dispatch. One that is not awaited any longer changes nothing."""

    number: int
    results: Sequence[ops.Result]
    at_s: float


@dataclass(frozen=True)
class AnswerQuantum:
    """What ended in a quantum; `left` is how many requests the ranks still have."""

    number: int
    ended: Sequence[tuple[str, ops.Result]]
    left: int
    at_s: float


@dataclass(frozen=True)
class Greet:
    """A group of ranks is spoken to from now on."""

    group: str


@dataclass(frozen=True)
class GiveUp:
    number: int
    reason: str
    at_s: float


@dataclass(frozen=True)
class Abort:
    tenant: str
    future_id: str
    at_s: float


@dataclass(frozen=True)
class DeleteCheckpoint:
    tenant: str
    run_id: str
    kind: Literal["weights", "sampler_weights"]
    name: str


@dataclass(frozen=True)
class Expire:
    at_s: float


Input = (
    OpenSession
    | FinishSession
    | Accept
    | DispatchNext
    | Answer
    | AnswerQuantum
    | Greet
    | GiveUp
    | Abort
    | DeleteCheckpoint
    | Expire
)


@dataclass(frozen=True)
class Done:
    pass


@dataclass(frozen=True)
class Taken:
    """The future of an operation, new or known."""

    future_id: str
    model_id: str


@dataclass(frozen=True)
class Dispatching:
    """To be told to the ranks once it is durable."""

    dispatch: Dispatch
    efficiency: float


@dataclass(frozen=True)
class Removed:
    """A checkpoint whose folder may go."""

    path: str


Reply = Done | Taken | Dispatching | Removed


@dataclass(frozen=True)
class Outcome:
    reply: Reply
    facts: tuple[Fact, ...] = ()
    ended: tuple[str, ...] = ()
    """Futures that have their result now."""
