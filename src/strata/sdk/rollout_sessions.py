"""`RolloutSession`: records what a harness that speaks OpenAI's protocol samples, and returns it as datums with the
tokens that were sampled.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from strata.sdk.operations import Datum
from strata.sdk.server_calls import SendRequest, ServerCalls, get, post

_PATH = "/v1/rollout_sessions"


@dataclass(frozen=True)
class RolloutBranch:
    """One row of tokens: a conversation, or one way that it went. Numbers are for each token."""

    turns: Sequence[int]
    replies: Sequence[str]
    """The ids of its replies, as the harness got them."""
    tokens: Sequence[int]
    weights: Sequence[float]
    """1 for what was sampled in this branch, 0 for what was given to the model."""
    logprobs: Sequence[float]
    """Those of the distribution that the token was drawn from."""

    def datum(self, advantage: float) -> Datum:
        """Makes a datum for a loss that learns from samples: the advantage at each sampled token."""
        weights = self.weights[1:]
        return Datum(
            self.tokens[:-1],
            self.tokens[1:],
            weights=weights,
            advantages=[advantage * weight for weight in weights],
            logprobs=self.logprobs[1:],
        )


class RolloutSession:
    def __init__(self, calls: ServerCalls, server: str, session_id: str) -> None:
        self._calls = calls
        self._path = f"{_PATH}/{session_id}"
        self.id = session_id
        self.base_url = f"{server.rstrip('/')}{self._path}"
        """What the harness takes for the address of OpenAI's API; its key is one of the same tenant."""

    @classmethod
    def open(cls, calls: ServerCalls, server: str, prompts: str) -> RolloutSession:
        return cls(calls, server, str(calls.json(post(_PATH, {"prompts": prompts}))["id"]))

    def turns(self) -> Sequence[dict[str, Any]]:
        """The turns in order, without their tokens: parent, origin, reply, model, version, finish_reason …"""
        turns: Sequence[dict[str, Any]] = self._calls.json(get(self._path))["turns"]
        return turns

    def branches(self) -> Sequence[RolloutBranch]:
        """All that was sampled so far. NOT_FOUND if the session has expired: it is never returned in part."""
        return list(self._pages())

    def _pages(self) -> Iterator[RolloutBranch]:
        first: int | None = 0
        while first is not None:
            page = self._calls.json(get(f"{self._path}?first_branch={first}"))
            yield from (RolloutBranch(**each) for each in page["branches"])
            first = page["next_branch"]

    def delete(self) -> None:
        self._calls.json(SendRequest("DELETE", self._path))
