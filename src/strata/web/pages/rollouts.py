"""Pages of kept rollouts: list (100), tokens coloured by gap or log probability, with the levels."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Final, Literal

import msgspec

from strata.http.route import RESEARCHER, Route
from strata.train.wire.rollouts import RolloutReply, RolloutsReply, RolloutToken
from strata.web.page import Page, View
from strata.web.pages.training import model_label, place_of, read

LISTED: Final = 100
GAP_LEVELS: Final = (1e-4, 1e-3, 1e-2, 1e-1)
"""Levels in nats: below the first there is no colour, from the last on the strongest."""
LOGPROB_LEVELS: Final = (0.105, 1.0, 2.303, 4.605)
"""Levels of minus a log probability: 90 %, 37 %, 10 % and 1 %."""
NO_TEXT: Final = "·"

Colour = Literal["gap", "sampler", "trainer"]


class RolloutsPageQuery(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    model: Annotated[str, msgspec.Meta(max_length=256)] = ""


class RolloutPageQuery(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    by: Colour = "gap"
    """What the colours of the tokens say."""


@dataclass(frozen=True)
class TokenCell:
    text: str
    level: int
    """0 to 4: how strongly it is coloured."""
    words: str
    prompt: bool = False


async def rollouts(page: Page, query: RolloutsPageQuery) -> View:
    """The rollouts that the caller chose to keep."""
    place = await place_of(page)
    reply = await read(page, f"{place.api}/rollouts", RolloutsReply, limit=LISTED, model=query.model)
    return page.render(
        "rollouts.html",
        title="Rollouts",
        section=place.section,
        every_s=10,
        crumbs=place.crumbs,
        place=place,
        reply=reply,
        model=query.model,
        model_label=model_label,
    )


async def rollout(page: Page, query: RolloutPageQuery) -> View:
    """One of them, token by token."""
    place = await place_of(page)
    reply = await read(page, place.rollout_api(page.path["rollout_id"]), RolloutReply)
    return page.render(
        "rollout.html",
        title=f"Rollout {reply.summary.rollout_id.rpartition(':')[2]} of pass {reply.summary.seq_id}",
        section=place.section,
        crumbs=[*place.crumbs, (f"{place.pages}/rollouts", "Rollouts")],
        place=place,
        rollout=reply.summary,
        tokens=reply.tokens,
        by=query.by,
        cells=[
            _cell(each, query.by, prompt=number < reply.summary.prompt_tokens)
            for number, each in enumerate(reply.tokens)
        ],
        model_label=model_label,
    )


def _cell(token: RolloutToken, by: Colour, *, prompt: bool) -> TokenCell:
    value = {"gap": token.gap, "sampler": token.sampler, "trainer": token.trainer}[by]
    known = [
        f"{name} {number:.4g}"
        for name, number in (
            ("sampler", token.sampler),
            ("trainer", token.trainer),
            ("gap", token.gap),
            ("advantage", token.advantage),
        )
        if number is not None
    ]
    shown = visible_text(token.text if token.text is not None else f"[{token.token}]")
    level = 0 if prompt or value is None else gap_level(value) if by == "gap" else logprob_level(value)
    return TokenCell(shown, level, f"token {token.token}: {', '.join(known) or 'no log probability'}", prompt)


def visible_text(text: str) -> str:
    """A token that draws nothing, such as a part of a character, gets a mark."""
    return text.replace("\n", "↵\n") or NO_TEXT


def gap_level(gap: float) -> int:
    return sum(gap >= limit for limit in GAP_LEVELS)


def logprob_level(logprob: float) -> int:
    return sum(-logprob >= limit for limit in LOGPROB_LEVELS)


ROUTES = (
    Route("GET", "/training/{id}/rollouts", RESEARCHER, rollouts),
    Route("GET", "/training/{id}/rollouts/{rollout_id}", RESEARCHER, rollout),
)
