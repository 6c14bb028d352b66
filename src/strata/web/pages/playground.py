"""Page of the playground: limits of prompt (100,000 characters), tokens (1,024) and temperature (2), defaults, and the
answer token by token.

It sends what a client of the OpenAI-compatible endpoints would send, with the rights of the person who is logged in: so
quotas and fairness between tenants hold, and a checkpoint of another tenant does not exist.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any, Final, Literal

import msgspec

from strata.base.errors import Code, StrataError
from strata.http.route import RESEARCHER, Route
from strata.train.wire.openai import ChatCompletion, ModelCards, TextCompletion
from strata.web.page import Form, Page, View
from strata.web.pages.rollouts import TokenCell, logprob_level, visible_text
from strata.web.pages.training import ServerPlace, place_of, read, read_reply

MAX_PROMPT: Final = 100_000
MAX_FORM_BYTES: Final = 2 << 20
"""The largest form with such a prompt: a character has up to 12 bytes in it."""
MAX_TOKENS: Final = 1024
MAX_TEMPERATURE: Final = 2.0
_SHOWN: Final = (Code.INVALID, Code.NOT_FOUND, Code.EXHAUSTED, Code.UNAVAILABLE, Code.PRECONDITION, Code.UNSUPPORTED)
"""Errors that are shown beside the prompt, so that it is not lost."""


class PlaygroundQuery(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    model: Annotated[str, msgspec.Meta(max_length=1000)] = ""


@dataclass(frozen=True)
class PlaygroundInput:
    model: str = ""
    prompt: str = ""
    form: Literal["chat", "text"] = "chat"
    temperature: float = 1.0
    max_tokens: int = 64


@dataclass(frozen=True)
class PlaygroundAnswer:
    text: str
    cells: Sequence[TokenCell]
    prompt_tokens: int
    tokens: int
    finish_reason: str
    seconds: float


async def playground(page: Page, query: PlaygroundQuery) -> View:
    """Try the base model and checkpoints."""
    return await _render(page, await place_of(page), PlaygroundInput(model=query.model), None, "")


async def answer(page: Page, form: Form) -> View:
    """The answer of a model to a prompt."""
    place = await place_of(page)
    given = PlaygroundInput(model=form.get("model", "")[:1000], prompt=form.get("prompt", "")[:MAX_PROMPT])
    try:
        given = read_input(form)
        return await _render(page, place, given, await _ask(page, place, given), "")
    except StrataError as error:
        if error.code not in _SHOWN:
            raise
        return await _render(page, place, given, None, f"{error.message}{f': {error.hint}' if error.hint else ''}")


def read_input(form: Form) -> PlaygroundInput:
    """Returns what a person typed; INVALID names the field."""
    given = PlaygroundInput(
        model=form.get("model", ""),
        # A browser sends line breaks as CR LF, and a model has seen LF.
        prompt=form.get("prompt", "").replace("\r\n", "\n"),
        form="text" if form.get("form") == "text" else "chat",
        temperature=_number(form, "temperature", 0.0, MAX_TEMPERATURE),
        max_tokens=int(_number(form, "max_tokens", 1, MAX_TOKENS)),
    )
    if not given.prompt or len(given.prompt) > MAX_PROMPT:
        raise StrataError(Code.INVALID, f"type a prompt of at most {MAX_PROMPT} characters")
    return given


def _number(form: Form, name: str, least: float, most: float) -> float:
    try:
        value = float(form.get(name, ""))
    except ValueError:
        value = -1.0
    if not least <= value <= most:
        raise StrataError(Code.INVALID, f"{name.replace('_', ' ')}: a number from {least:g} to {most:g}")
    return value


async def _ask(page: Page, place: ServerPlace, given: PlaygroundInput) -> PlaygroundAnswer:
    body: dict[str, Any] = {
        "model": given.model,
        "temperature": given.temperature,
        "max_tokens": given.max_tokens,
    }
    started_s = page.site.clock.monotonic_s()
    if given.form == "chat":
        body |= {"messages": [{"role": "user", "content": given.prompt}], "logprobs": True}
        chat = read_reply(await page.post(place.completions_api("chat/completions"), body), ChatCompletion)
        (choice,) = chat.choices
        tokens = [] if choice.logprobs is None else [(each.token, each.logprob) for each in choice.logprobs.content]
        text, usage, reason = choice.message.content or "", chat.usage, str(choice.finish_reason)
    else:
        body |= {"prompt": given.prompt, "logprobs": 0}
        reply = read_reply(await page.post(place.completions_api("completions"), body), TextCompletion)
        (written,) = reply.choices
        logprobs = written.logprobs
        known = () if logprobs is None else zip(logprobs.tokens, logprobs.token_logprobs, strict=True)
        tokens = [(token, value) for token, value in known if value is not None]
        assert reply.usage is not None, "a reply that is no stream has its usage"
        text, usage, reason = written.text, reply.usage, written.finish_reason or ""
    return PlaygroundAnswer(
        text,
        [_cell(token, logprob) for token, logprob in tokens],
        usage.prompt_tokens,
        usage.completion_tokens,
        reason,
        page.site.clock.monotonic_s() - started_s,
    )


def _cell(token: str, logprob: float) -> TokenCell:
    return TokenCell(visible_text(token), logprob_level(logprob), f"log probability {logprob:.4g}")


async def _render(
    page: Page, place: ServerPlace, given: PlaygroundInput, answered: PlaygroundAnswer | None, failure: str
) -> View:
    models = (await read(page, place.models_api, ModelCards)).data
    if not given.model and models:
        given = replace(given, model=models[0].id)
    return page.render(
        "playground.html",
        title="Playground",
        section=place.section,
        crumbs=place.crumbs,
        place=place,
        models=models,
        given=given,
        answer=answered,
        failure=failure,
        max_tokens=MAX_TOKENS,
        max_temperature=MAX_TEMPERATURE,
        max_prompt=MAX_PROMPT,
    )


ROUTES = (
    Route("GET", "/training/{id}/playground", RESEARCHER, playground),
    Route("POST", "/training/{id}/playground", RESEARCHER, answer, MAX_FORM_BYTES, owner="tenant"),
)
