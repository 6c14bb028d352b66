"""Makes the prompt of a chat: by the template of the model, or what it writes after a reply whose tokens are kept."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from strata.train.api.template_process import RenderedChat, TemplateRenderer
from strata.train.api.text import ModelText


@dataclass(frozen=True)
class ChatPrompt:
    """A chat as templates expect it."""

    messages: Sequence[Mapping[str, Any]]
    tools: Sequence[Mapping[str, Any]] | None
    variables: Mapping[str, Any]
    room: int
    """Tokens that fit."""


async def render_prompt(chat: ChatPrompt, text: ModelText, templates: TemplateRenderer) -> Sequence[int]:
    rendered = await _render(chat, chat.messages, text, templates)
    return await asyncio.to_thread(text.encode_chat, rendered)


async def render_after_reply(
    chat: ChatPrompt, place: int, text: ModelText, templates: TemplateRenderer
) -> Sequence[int] | None:
    """The tokens of what the template writes after the content of the reply `messages[place]`. None if the template
    cannot write that: it fails for such a chat, or does not write the reply once.

    The reply is rendered as a word of chance, whose place is looked up in the text: its own tokens are kept, so it does
    not matter how the template would have written it.
    """
    mark = secrets.token_hex(16)
    marked = [*chat.messages[:place], {"role": "assistant", "content": mark}, *chat.messages[place + 1 :]]
    rendered = await _render(chat, marked, text, templates)
    before, _, after = rendered.text.rpartition(mark)
    if rendered.error or mark in before or mark not in rendered.text:
        return None
    return await asyncio.to_thread(text.encode_chat, RenderedChat(after))


async def _render(
    chat: ChatPrompt, messages: Sequence[Mapping[str, Any]], text: ModelText, templates: TemplateRenderer
) -> RenderedChat:
    rendering = await asyncio.to_thread(text.prepare_chat, messages, chat.tools, chat.variables, chat.room)
    return await templates.render(rendering)
