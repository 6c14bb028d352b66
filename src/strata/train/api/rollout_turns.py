"""The turns of one request of a rollout session: its prompt goes on from the tokens of an earlier turn, and its replies
are recorded before the client gets them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import msgspec
import numpy as np

from strata.train.api.chat_prompt import ChatPrompt, render_after_reply, render_prompt
from strata.train.api.context import ApiContext
from strata.train.api.rollout_files import RolloutFiles, StoredSession, check_session_room
from strata.train.api.text import ModelText
from strata.train.core.rollout_session import (
    TOKEN_BYTES,
    Turn,
    TurnOrigin,
    conversation_keys,
    find_conversation,
    find_prefix,
    tokens_to,
)
from strata.train.core.sampling import SampledSequence, SampleResult

RECORD_BYTES: Final = 4096
"""More than a record has beside its tokens."""


@dataclass(frozen=True)
class _TurnPrompt:
    parent: int | None
    origin: TurnOrigin
    added: bytes
    """The tokens after those of the parent."""


@dataclass(frozen=True)
class TurnReply:
    """The reply to a request, of which each sample is a turn."""

    reply_id: str
    model: str
    version: str
    sampler_id: str
    temperature: float
    read: Callable[[SampledSequence], tuple[Mapping[str, Any] | None, str]]
    """The message that a sample is in a chat, as templates expect it, and the reason for its end that the client
    gets."""


class RolloutTurns:
    def __init__(self, context: ApiContext, files: RolloutFiles, tenant: str, stored: StoredSession) -> None:
        self._context = context
        self._files = files
        self._tenant = tenant
        self._stored = stored
        self._prompts: list[_TurnPrompt] = []
        self._conversation = b""

    async def chat_prompt(self, chat: ChatPrompt, text: ModelText) -> Sequence[int]:
        """The tokens of an earlier turn with what the template adds for the messages after it; of all messages where
        none is continued."""
        turns, templates = self._stored.turns, self._context.templates
        start = msgspec.json.encode([chat.tools, chat.variables], order="sorted")
        keys = await asyncio.to_thread(conversation_keys, start, map(canonical_message, chat.messages))
        self._conversation = keys[-1]
        origin: TurnOrigin = "start"
        if turns and any(each.get("role") == "assistant" for each in chat.messages):
            origin = "messages_changed"
        # At least one message has to be new.
        match = find_conversation(turns, keys[:-1])
        if match is not None and self._stored.head.prompts == "tokens":
            number, length = match
            added = await render_after_reply(chat, length - 1, text, templates)
            if added is not None:
                return self._continue(number, added)
            origin = "not_appended"
        elif match is not None:
            origin = "tokens_changed"
        prompt = await render_prompt(chat, text, templates)
        await asyncio.to_thread(self.add_prompt, prompt, origin)
        return prompt

    def _continue(self, number: int, added: Sequence[int]) -> Sequence[int]:
        turn = self._stored.turns[number]
        # The token that ended the reply is also the first that the template writes after it.
        ended = turn.finish_reason != "length" and pack_tokens(added[:1]) == turn.sampled[-TOKEN_BYTES:]
        packed = pack_tokens(added[1:] if ended else added)
        self._prompts.append(_TurnPrompt(number, "continued", packed))
        return unpack_tokens(tokens_to(self._stored.turns, number) + packed)

    def add_prompt(self, prompt: Sequence[int], origin: TurnOrigin = "start") -> None:
        """A prompt that continues the turn whose tokens it begins with, if there is one."""
        packed = pack_tokens(prompt)
        match = find_prefix(self._stored.turns, packed)
        if match is None:
            self._prompts.append(_TurnPrompt(None, origin, packed))
        else:
            self._prompts.append(_TurnPrompt(match[0], "continued", packed[match[1] :]))

    async def check_room(self, samples: int, sampled_bytes: int) -> None:
        """Refuses, before anything is sampled, what the session has no room for. `samples` are of each prompt."""
        added = sum(samples * (len(each.added) + RECORD_BYTES) for each in self._prompts)
        check_session_room(self._stored, samples * len(self._prompts), added + sampled_bytes)
        now_s = self._context.clock.wall_s()
        await asyncio.to_thread(self._files.check_room, self._tenant, now_s)

    async def record(self, index: int, result: SampleResult, reply: TurnReply) -> None:
        """Returns when the samples of a prompt are durable."""
        await asyncio.to_thread(self._record, index, result, reply)

    def _record(self, index: int, result: SampleResult, reply: TurnReply) -> None:
        prompt, now_s = self._prompts[index], self._context.clock.wall_s()
        turns = []
        for choice, sequence in enumerate(result.sequences):
            message, finish_reason = reply.read(sequence)
            turn = Turn(
                parent=prompt.parent,
                origin=prompt.origin,
                added=prompt.added,
                sampled=sequence.tokens,
                logprobs=sequence.logprobs,
                conversation=self._conversation_with(message),
                reply=reply.reply_id,
                choice=choice,
                model=reply.model,
                version=reply.version,
                sampler_id=reply.sampler_id,
                created_s=now_s,
                finish_reason=finish_reason,
                temperature=reply.temperature,
            )
            turns.append(turn)
        self._files.append(self._tenant, self._stored.head.session_id, turns, now_s)

    def _conversation_with(self, message: Mapping[str, Any] | None) -> bytes:
        if message is None or not self._conversation:
            return b""
        return conversation_keys(self._conversation, [canonical_message(message)])[0]


def pack_tokens(tokens: Sequence[int]) -> bytes:
    return np.asarray(tokens, dtype="<i4").tobytes()


def unpack_tokens(tokens: bytes) -> list[int]:
    unpacked: list[int] = np.frombuffer(tokens, "<i4").tolist()
    return unpacked


def canonical_message(message: Mapping[str, Any]) -> bytes:
    """A message of a chat without what client libraries add to it. Of a reply, what it says and calls: ids of calls are
    new in each reply, and some clients cut the space at its ends off."""
    content = message.get("content")
    if message.get("role") != "assistant":
        return msgspec.json.encode({key: value for key, value in message.items() if value is not None}, order="sorted")
    functions = [each.get("function") or {} for each in message.get("tool_calls") or ()]
    calls = [[each.get("name"), each.get("arguments")] for each in functions]
    said = content.strip() if isinstance(content, str) else ""
    return msgspec.json.encode(["assistant", said, calls], order="sorted")
