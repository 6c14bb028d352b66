"""Rollout sessions as JSON: the request that opens one, its turns, and its branches token by token, in pages."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Annotated, Final, Literal

import msgspec
import numpy as np

from strata.train.core.rollout_session import (
    TOKEN_BYTES,
    Branch,
    PromptMode,
    Turn,
    TurnOrigin,
    branch_ends,
    build_branch,
    count_turns,
)

PATH: Final = "/v1/rollout_sessions"
PAGE_TOKENS: Final = 1 << 20
"""A page ends with the branch that has more tokens than this, together with those before it."""


class OpenRolloutSession(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    prompts: PromptMode = "tokens"
    """`tokens`: a prompt goes on from the tokens of the turn that its messages continue. `template`: it is always what
    the template makes of all messages."""


class RolloutQuery(msgspec.Struct, frozen=True, kw_only=True):
    first_branch: Annotated[int, msgspec.Meta(ge=0)] = 0


class RolloutSessionCard(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    base_path: str
    """What clients of OpenAI's API put behind the address of the server."""
    size: int
    """Bytes."""
    expires_at: int
    object: Literal["rollout_session"] = "rollout_session"


class RolloutSessionCards(msgspec.Struct, frozen=True, kw_only=True):
    data: Sequence[RolloutSessionCard]
    """The newest first."""
    object: Literal["list"] = "list"


class RolloutTurnReply(msgspec.Struct, frozen=True, kw_only=True):
    turn: int
    parent: int | None
    origin: TurnOrigin
    """Why it has that parent, or none."""
    reply: str
    """The id of the reply that the client got."""
    choice: int
    model: str
    version: str
    sampler_id: str
    created: int
    prompt_tokens: int
    sampled_tokens: int
    finish_reason: str
    temperature: float


class RolloutBranchReply(msgspec.Struct, frozen=True, kw_only=True):
    """A path from a start to a turn that no other continues; one number for each token."""

    turns: Sequence[int]
    replies: Sequence[str]
    tokens: Sequence[int]
    weights: Sequence[float]
    """1 for what was sampled here, and in no branch before this one; else 0."""
    logprobs: Sequence[float]
    """Those of the distribution that the token was drawn from; 0 where the weight is."""


class RolloutSessionReply(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    base_path: str
    prompts: PromptMode
    created: int
    expires_at: int
    turns: Sequence[RolloutTurnReply]
    branches: Sequence[RolloutBranchReply]
    next_branch: int | None
    """The first branch of the next page."""
    object: Literal["rollout_session"] = "rollout_session"


def base_path(session_id: str) -> str:
    return f"{PATH}/{session_id}"


def turn_replies(turns: Sequence[Turn]) -> Sequence[RolloutTurnReply]:
    ends: list[int] = []
    replies = []
    for number, turn in enumerate(turns):
        prompt = (0 if turn.parent is None else ends[turn.parent]) + len(turn.added) // TOKEN_BYTES
        sampled = len(turn.sampled) // TOKEN_BYTES
        ends.append(prompt + sampled)
        replies.append(
            RolloutTurnReply(
                turn=number,
                parent=turn.parent,
                origin=turn.origin,
                reply=turn.reply,
                choice=turn.choice,
                model=turn.model,
                version=turn.version,
                sampler_id=turn.sampler_id,
                created=int(turn.created_s),
                prompt_tokens=prompt,
                sampled_tokens=sampled,
                finish_reason=turn.finish_reason,
                temperature=turn.temperature,
            )
        )
    return replies


def branch_page(turns: Sequence[Turn], first: int) -> tuple[Sequence[RolloutBranchReply], int | None]:
    """The branches from this one on, as many as a page has, and the first of the next page."""
    ends = branch_ends(turns)
    page, tokens = [], 0
    for branch in _branches(turns, ends, first):
        page.append(_branch_reply(turns, branch))
        tokens += len(branch.is_sampled)
        if tokens > PAGE_TOKENS:
            break
    following = first + len(page)
    return page, following if following < len(ends) else None


def _branches(turns: Sequence[Turn], ends: Sequence[int], first: int) -> Iterator[Branch]:
    counted = count_turns(turns, ends)
    for end in ends[first:]:
        yield build_branch(turns, end, counted)


def _branch_reply(turns: Sequence[Turn], branch: Branch) -> RolloutBranchReply:
    return RolloutBranchReply(
        turns=branch.turns,
        replies=[turns[each].reply for each in branch.turns],
        tokens=np.frombuffer(branch.tokens, "<i4").tolist(),
        weights=np.frombuffer(branch.is_sampled, "u1").astype(float).tolist(),
        logprobs=np.frombuffer(branch.logprobs, "<f4").tolist(),
    )
