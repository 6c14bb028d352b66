"""Kept rollouts as JSON: query and its parameters, summaries with text, and one token by token, in turns."""

from __future__ import annotations

import math
import struct
from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Annotated, Any, Final, Literal, Protocol

import msgspec

from strata.train.core.sampling import REPLACEMENT
from strata.train.status.rollouts import (
    EXCERPT_TOKENS,
    KeptRollout,
    PromptGroup,
    RolloutExcerpt,
    RolloutFilter,
    RolloutSummary,
    RolloutsView,
    RolloutView,
)

EXCERPT_CHARACTERS: Final = 300


class TokenDecoder(Protocol):
    """The tokenizer of the model."""

    def token_text(self, token: int) -> str: ...

    def decode(self, tokens: Sequence[int], *, special: bool = False) -> str: ...


class RolloutsQuery(RolloutFilter, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    limit: Annotated[int, msgspec.Meta(ge=1, le=1000)] = 100


class ListedRollout(RolloutSummary, frozen=True, kw_only=True):
    prompt_text: str | None = None
    """The end of the prompt in one line; None if the server has no tokenizer."""
    answer_text: str | None = None
    """The beginning of what follows it."""


class RolloutsReply(msgspec.Struct, frozen=True, kw_only=True):
    rollouts: Sequence[ListedRollout]
    """Those that match, in the order of the query."""
    total: int
    """How many match."""
    kept: int = 0
    """How many the caller has."""
    groups: Sequence[PromptGroup] = ()
    """Groups of the listed rollouts; each has all kept rollouts of its prompt, also those that do not match."""


class RolloutToken(msgspec.Struct, frozen=True, kw_only=True):
    token: int
    text: str | None
    """None if the server has no tokenizer."""
    sampler: float | None = None
    """Log probability; None for a token that was not sampled."""
    trainer: float | None = None
    """Log probability; None for the first token, which nothing predicts."""
    gap: float | None = None
    """Absolute difference, in nats."""
    advantage: float | None = None
    version: int | None = None
    """The sequence number of the save whose weights drew it; None if that is not known, or it was not sampled."""


class RolloutTurn(msgspec.Struct, frozen=True, kw_only=True):
    """Tokens one after the other that were all sampled, or all given."""

    kind: Literal["prompt", "answer", "given"]
    begin: int
    end: int
    """The position after the last token."""
    calls_tool: bool = False
    """Whether an answer has the mark with which calls of tools begin."""


class RolloutReply(msgspec.Struct, frozen=True, kw_only=True):
    summary: RolloutSummary
    tokens: Sequence[RolloutToken]
    turns: Sequence[RolloutTurn] = ()
    group: PromptGroup | None = None
    previous: str = ""
    """The id of the one before it among those that match the query; empty: there is none."""
    next: str = ""
    position: int = 0
    """Counts from 1 among those that match; 0: it does not match."""
    total: int = 0


def to_parameters(query: RolloutFilter) -> dict[str, str]:
    """The parameters of a URL: without defaults, which a server of an earlier version may not know."""
    values: dict[str, Any] = msgspec.to_builtins(query)
    return {name: "true" if value is True else str(value) for name, value in values.items()}


def rollouts_reply(view: RolloutsView, text: TokenDecoder | None) -> RolloutsReply:
    return RolloutsReply(
        rollouts=[_listed(each, text) for each in view.rollouts],
        total=view.total,
        kept=view.kept,
        groups=view.groups,
    )


def _listed(excerpt: RolloutExcerpt, text: TokenDecoder | None) -> ListedRollout:
    prompt, answer = None, None
    if text is not None:
        prompt, answer = (_one_line(text.decode(_unpack("i", each))) for each in (excerpt.prompt, excerpt.answer))
        answer = answer[:EXCERPT_CHARACTERS]
        if len(prompt) > EXCERPT_CHARACTERS or excerpt.summary.prompt_tokens > EXCERPT_TOKENS:
            prompt = f"…{prompt[-EXCERPT_CHARACTERS:]}"
    return ListedRollout(**msgspec.structs.asdict(excerpt.summary), prompt_text=prompt, answer_text=answer)


def _one_line(text: str) -> str:
    """An excerpt may begin or end within a character."""
    return " ".join(text.strip(REPLACEMENT).split())


def rollout_reply(view: RolloutView, text: TokenDecoder | None, call_mark: str) -> RolloutReply:
    """`call_mark` is what a call of a tool begins with in an answer."""
    tokens = _unpack("i", view.rollout.tokens)
    return RolloutReply(
        summary=view.rollout.summary,
        tokens=list(_tokens(view.rollout, tokens, text)),
        turns=list(_turns(view.rollout.sampled, tokens, text, call_mark)),
        group=view.group,
        previous=view.previous,
        next=view.next,
        position=view.position,
        total=view.total,
    )


def _tokens(rollout: KeptRollout, tokens: Sequence[int], text: TokenDecoder | None) -> Iterator[RolloutToken]:
    sampler, trainer, advantages = (
        [None, *map(_finite, _unpack("f", each))] for each in (rollout.sampler, rollout.trainer, rollout.advantages)
    )
    versions = [-1, *(_unpack("i", rollout.versions) or [-1] * len(rollout.sampled))]
    for place, token in enumerate(tokens):
        shown = None if text is None else text.token_text(token)
        drawn, learned = sampler[place], trainer[place]
        if not place or not rollout.sampled[place - 1]:
            yield RolloutToken(token=token, text=shown, trainer=learned)
            continue
        yield RolloutToken(
            token=token,
            text=shown,
            sampler=drawn,
            trainer=learned,
            gap=None if drawn is None or learned is None else abs(learned - drawn),
            advantage=advantages[place],
            version=versions[place] if versions[place] >= 0 else None,
        )


def _turns(sampled: bytes, tokens: Sequence[int], text: TokenDecoder | None, call_mark: str) -> Iterator[RolloutTurn]:
    begin = 0
    for answer, places in groupby([0, *sampled]):
        end = begin + len(list(places))
        if answer:
            calls_tool = text is not None and call_mark in text.decode(tokens[begin:end], special=True)
            yield RolloutTurn(kind="answer", begin=begin, end=end, calls_tool=calls_tool)
        else:
            yield RolloutTurn(kind="given" if begin else "prompt", begin=begin, end=end)
        begin = end


def _finite(value: float) -> float | None:
    """JSON has no other numbers."""
    return value if math.isfinite(value) else None


def _unpack(kind: str, data: bytes) -> list[Any]:
    """Numbers of 4 bytes each. Not by numpy, which a hub need not have."""
    return list(struct.unpack(f"<{len(data) // 4}{kind}", data))
