"""Kept rollouts of the caller: which there are, and each of them token by token."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Final, Literal
from urllib.parse import quote

import msgspec

from strata.base.errors import Code, StrataError
from strata.fleet.wire.jobs import JobReply
from strata.http.route import RESEARCHER, Route
from strata.train.wire.rollouts import RolloutReply, RolloutsReply, RolloutToken
from strata.web.page import Page, View
from strata.web.pages.training import model_label, read

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
class ServerPlace:
    """Where the pages and the API of a training server are."""

    pages: str
    api: str
    title: str
    crumbs: Sequence[tuple[str, str]]
    section: str

    def rollout_path(self, rollout_id: str) -> str:
        return f"{self.pages}/rollouts/{quote(rollout_id, safe=':')}"

    def rollout_api(self, rollout_id: str) -> str:
        name = "rollouts" if self.api.startswith("/api/") else "rollout"
        return f"{self.api}/{name}/{quote(rollout_id, safe=':')}"

    @property
    def models_api(self) -> str:
        return "/v1/models" if self.api.startswith("/api/") else f"{self.api}/models"

    def completions_api(self, name: Literal["completions", "chat/completions"]) -> str:
        return f"/v1/{name}" if self.api.startswith("/api/") else f"{self.api}/{name}"


LONE: Final = ServerPlace("", "/api/v1", "Training server", [("/", "Training server")], "/")


@dataclass(frozen=True)
class TokenCell:
    text: str
    level: int
    """0 to 4: how strongly it is coloured."""
    words: str
    prompt: bool = False


async def place_of(page: Page) -> ServerPlace:
    """Returns the place of the training server at a hub that the path names."""
    job = (await page.get(f"/v1/job/{page.path['id']}", JobReply)).job
    if job.spec.kind != "server":
        raise StrataError(Code.NOT_FOUND, f"{job.spec.label} is no training server")
    pages = f"/training/{job.id}"
    crumbs = [("/training", "Training"), (pages, job.spec.label)]
    return ServerPlace(pages, f"/v1/server/{job.id}", job.spec.label, crumbs, "/training")


async def rollouts(page: Page, query: RolloutsPageQuery) -> View:
    """The rollouts that the caller chose to keep."""
    return await render_rollouts(page, query, await place_of(page))


async def rollout(page: Page, query: RolloutPageQuery) -> View:
    """One of them, token by token."""
    return await render_rollout(page, query, await place_of(page))


async def render_rollouts(page: Page, query: RolloutsPageQuery, place: ServerPlace) -> View:
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


async def render_rollout(page: Page, query: RolloutPageQuery, place: ServerPlace) -> View:
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
