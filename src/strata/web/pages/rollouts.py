"""Pages of kept rollouts: list (100) by prompt with filter and order, tokens by turn (6,000) coloured by gap or log
probability, with the levels.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Annotated, Final, Literal

import msgspec

from strata.http.route import RESEARCHER, Route
from strata.train.status.rollouts import PromptGroup, RolloutFilter, RolloutSort
from strata.train.wire.rollouts import (
    ListedRollout,
    RolloutReply,
    RolloutsReply,
    RolloutToken,
    RolloutTurn,
    to_parameters,
)
from strata.web.page import Page, View
from strata.web.pages.training import model_label, place_of, read
from strata.web.render import url_with

LISTED: Final = 100
MAX_TOKENS: Final = 6000
"""Tokens of a rollout on its page."""
MAX_GIVEN: Final = 1000
"""Limits those that were not sampled: the last of each turn."""
GAP_LEVELS: Final = (1e-4, 1e-3, 1e-2, 1e-1)
"""Levels in nats: below the first there is no colour, from the last on the strongest."""
LOGPROB_LEVELS: Final = (0.105, 1.0, 2.303, 4.605)
"""Levels of minus a log probability: 90 %, 37 %, 10 % and 1 %."""
NO_TEXT: Final = "·"
BANDS: Final = 4
"""Styles of the versions of weights, which take turns."""
MAX_LEGEND: Final = 12
"""Versions that the legend names."""

Colour = Literal["gap", "sampler", "trainer", "version"]
Word = Annotated[str, msgspec.Meta(max_length=256)]
Bound = Annotated[str, msgspec.Meta(max_length=32)]


class RolloutsPageQuery(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    model: Word = ""
    prompt: Word = ""
    least: Bound = ""
    """The bounds of the reward as they were typed."""
    most: Bound = ""
    signal: bool = False
    sort: RolloutSort = "newest"
    view: Literal["prompts", "all"] = "prompts"

    def read_filter(self) -> tuple[RolloutFilter, str]:
        """Returns the filter, and what is wrong with it: a bound that is no number is left out."""
        bounds, wrong = {}, ""
        for name, text in (("reward_min", self.least), ("reward_max", self.most)):
            if text.strip():
                bounds[name] = _finite_number(text)
                if bounds[name] is None:
                    wrong = f"{text.strip()!r} is not a number, so it does not filter."
        chosen = RolloutFilter(
            model=self.model,
            prompt=self.prompt,
            signal=self.signal,
            sort=self.sort,
            by_prompt=self.view == "prompts",
            **bounds,
        )
        return chosen, wrong


class RolloutPageQuery(RolloutsPageQuery, frozen=True, kw_only=True, forbid_unknown_fields=True):
    by: Colour = "gap"
    """What the colours of the tokens say."""


@dataclass(frozen=True)
class TokenCell:
    text: str
    level: int
    """0 to 4: how strongly it is coloured."""
    words: str
    prompt: bool = False
    band: int | None = None
    """The style of the version that drew it, from 0; in place of a level."""


@dataclass(frozen=True)
class ListedGroup:
    group: PromptGroup
    rollouts: Sequence[ListedRollout]


@dataclass(frozen=True)
class ShownTurn:
    name: str
    turn: RolloutTurn
    begin: int
    """The first position that is shown."""
    cells: Sequence[TokenCell]

    @property
    def end(self) -> int:
        return self.begin + len(self.cells)


async def rollouts(page: Page, query: RolloutsPageQuery) -> View:
    """The rollouts that the caller chose to keep."""
    place = await place_of(page)
    chosen, wrong = query.read_filter()
    reply = await read(page, f"{place.api}/rollouts", RolloutsReply, limit=LISTED, **to_parameters(chosen))
    return page.render(
        "rollouts.html",
        title="Rollouts",
        section=place.section,
        every_s=10,
        crumbs=place.crumbs,
        place=place,
        reply=reply,
        groups=list(_by_prompt(reply)) if chosen.by_prompt else [],
        query=query,
        pairs=_pairs(page),
        wrong=wrong,
        model_label=model_label,
    )


async def rollout(page: Page, query: RolloutPageQuery) -> View:
    """One of them, turn by turn and token by token."""
    place = await place_of(page)
    chosen, _ = query.read_filter()
    listed = [(name, value) for name, value in _pairs(page) if name != "by"]
    path = place.rollout_api(page.path["rollout_id"])
    reply = await read(page, path, RolloutReply, **to_parameters(chosen))
    versions = Counter(each.version for each in reply.tokens if each.version is not None)
    bands = {version: number % BANDS for number, version in enumerate(sorted(versions))}
    turns = list(_shown_turns(reply, query.by, bands))
    return page.render(
        "rollout.html",
        title=f"Rollout {reply.summary.rollout_id.rpartition(':')[2]} of pass {reply.summary.seq_id}",
        section=place.section,
        crumbs=[*place.crumbs, (f"{place.pages}/rollouts{url_with(listed) if listed else ''}", "Rollouts")],
        place=place,
        reply=reply,
        rollout=reply.summary,
        turns=turns,
        versions=sorted(versions.items()),
        bands=bands,
        max_legend=MAX_LEGEND,
        hidden=len(reply.tokens) - sum(len(each.cells) for each in turns),
        query=query,
        pairs=_pairs(page),
        model_label=model_label,
    )


def _pairs(page: Page) -> list[tuple[str, str]]:
    """The parameters that say something: an empty field of the filter is sent too."""
    return [(name, value) for name, value in page.query if value]


def _by_prompt(reply: RolloutsReply) -> Iterator[ListedGroup]:
    """The groups of a list in which rollouts of a prompt come one after the other."""
    groups = {(each.model_id, each.prompt_id): each for each in reply.groups}
    for key, own in groupby(reply.rollouts, key=lambda each: each.group):
        yield ListedGroup(groups[key], list(own))


def _shown_turns(reply: RolloutReply, by: Colour, bands: Mapping[int, int]) -> Iterator[ShownTurn]:
    """The turns as far as they are shown: of those that were given the end, of the last answer the beginning."""
    room, before = MAX_TOKENS, None
    for turn in reply.turns:
        if not room:
            return
        length = min(turn.end - turn.begin, room)
        if turn.kind != "answer":
            length = min(length, MAX_GIVEN)
        begin = turn.begin if turn.kind == "answer" else turn.end - length
        tokens = reply.tokens[begin : begin + length]
        cells = [_cell(each, by, bands, given=turn.kind != "answer") for each in tokens]
        yield ShownTurn(_turn_name(turn, before), turn, begin, cells)
        room, before = room - length, turn


def _turn_name(turn: RolloutTurn, before: RolloutTurn | None) -> str:
    if turn.kind == "given" and before is not None and before.calls_tool:
        return "Result of the tool"
    if turn.kind == "answer" and turn.calls_tool:
        return "Answer with a call of a tool"
    return {"prompt": "Prompt", "answer": "Answer", "given": "Given"}[turn.kind]


def _cell(token: RolloutToken, by: Colour, bands: Mapping[int, int], *, given: bool) -> TokenCell:
    value = {"gap": token.gap, "sampler": token.sampler, "trainer": token.trainer, "version": None}[by]
    known = [
        f"{name} {number:.4g}"
        for name, number in (
            ("sampler", token.sampler),
            ("trainer", token.trainer),
            ("gap", token.gap),
            ("advantage", token.advantage),
            ("version", token.version),
        )
        if number is not None
    ]
    band = bands[token.version] if by == "version" and token.version is not None else None
    shown = visible_text(token.text if token.text is not None else f"[{token.token}]")
    level = 0 if given or value is None else gap_level(value) if by == "gap" else logprob_level(value)
    return TokenCell(shown, level, f"token {token.token}: {', '.join(known) or 'no log probability'}", given, band)


def visible_text(text: str) -> str:
    """A token that draws nothing, such as a part of a character, gets a mark."""
    return text.replace("\n", "↵\n") or NO_TEXT


def gap_level(gap: float) -> int:
    return sum(gap >= limit for limit in GAP_LEVELS)


def logprob_level(logprob: float) -> int:
    return sum(-logprob >= limit for limit in LOGPROB_LEVELS)


def _finite_number(text: str) -> float | None:
    try:
        value = float(text)
    except ValueError:
        return None
    return value if math.isfinite(value) else None


ROUTES = (
    Route("GET", "/training/{id}/rollouts", RESEARCHER, rollouts),
    Route("GET", "/training/{id}/rollouts/{rollout_id}", RESEARCHER, rollout),
)
