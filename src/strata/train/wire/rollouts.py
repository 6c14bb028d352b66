"""Kept rollouts as JSON: query, summary, and one token by token."""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Sequence
from typing import Annotated, Any

import msgspec

from strata.train.core.ops import MAX_NAME
from strata.train.status.rollouts import KeptRollout, RolloutSummary

TokenText = Callable[[int], str]


class RolloutsQuery(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    model: Annotated[str, msgspec.Meta(max_length=MAX_NAME)] = ""
    """The id of a model; empty: all models of the caller."""
    limit: Annotated[int, msgspec.Meta(ge=1, le=1000)] = 100


class RolloutsReply(msgspec.Struct, frozen=True, kw_only=True):
    rollouts: Sequence[RolloutSummary]
    """Newest first."""
    total: int


class RolloutToken(msgspec.Struct, frozen=True, kw_only=True):
    token: int
    text: str | None
    """None if the server has no tokenizer."""
    sampler: float | None = None
    """Log probability; None for the first token, which nothing predicts, and for those of the prompt."""
    trainer: float | None = None
    """Log probability; None for the first token."""
    gap: float | None = None
    """Absolute difference, in nats."""
    advantage: float | None = None
    version: int | None = None
    """The sequence number of the save whose weights drew it; None if that is not known, and for the prompt."""


class RolloutReply(msgspec.Struct, frozen=True, kw_only=True):
    summary: RolloutSummary
    tokens: Sequence[RolloutToken]


def rollout_reply(rollout: KeptRollout, text_of: TokenText | None) -> RolloutReply:
    tokens = _unpack("i", rollout.tokens)
    sampler, trainer, advantages = (
        _unpack("f", each) for each in (rollout.sampler, rollout.trainer, rollout.advantages)
    )
    versions = _unpack("i", rollout.versions) or [-1] * len(sampler)
    described = []
    for place, token in enumerate(tokens):
        text = None if text_of is None else text_of(token)
        if place < rollout.summary.prompt_tokens:
            known = _finite(trainer[place - 1]) if place else None
            described.append(RolloutToken(token=token, text=text, trainer=known))
            continue
        drawn, learned = _finite(sampler[place - 1]), _finite(trainer[place - 1])
        described.append(
            RolloutToken(
                token=token,
                text=text,
                sampler=drawn,
                trainer=learned,
                gap=None if drawn is None or learned is None else abs(learned - drawn),
                advantage=_finite(advantages[place - 1]),
                version=versions[place - 1] if versions[place - 1] >= 0 else None,
            )
        )
    return RolloutReply(summary=rollout.summary, tokens=described)


def _finite(value: float) -> float | None:
    """JSON has no other numbers."""
    return value if math.isfinite(value) else None


def _unpack(kind: str, data: bytes) -> list[Any]:
    """Numbers of 4 bytes each. Not by numpy, which a hub need not have."""
    return list(struct.unpack(f"<{len(data) // 4}{kind}", data))
