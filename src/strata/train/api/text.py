"""Chats and texts to tokens and back: which chat template is used, parsing of tool calls, stop strings at the end of a
stream, decoding of parts of characters.

Chat templates are those of the model's own files; a request brings data for them and never a template. A process with
limits renders them (`template_process`).
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any, Final, Literal, NamedTuple

import msgspec
import numpy as np

from strata.base.errors import Code, StrataError
from strata.train.api.template_process import ChatRendering, RenderedChat
from strata.train.core.sampling import (
    CONTEXT,
    REPLACEMENT,
    SampledPart,
    SampledSequence,
    cut_at_stop,
    decode_context,
)
from strata.train.grammar import CALL_END, CALL_START
from strata.train.wire.fields import invalid_field
from strata.train.wire.openai import CalledFunction, ToolCall
from strata.train.wire.sampling import top_pairs

_TEMPLATE_NAMES: Final = frozenset(
    {
        "add_generation_prompt", "chat_template", "continue_final_message", "conversations", "documents", "messages",
        "return_assistant_tokens_mask", "tools",
    }
)  # fmt: skip
_CACHED_TOKENS: Final = 100_000


class TokenText(NamedTuple):
    text: str
    logprob: float | None
    top: Sequence[tuple[str, float]]
    """The likeliest tokens at this position, likeliest first; empty if none were requested."""


class SampledText(NamedTuple):
    """A sample as a client of OpenAI's API reads it."""

    text: str
    """The text without the token or the string that stopped it."""
    token_ids: Sequence[int]
    """All that were sampled."""
    tokens: Sequence[TokenText]
    """The same with their log probabilities; empty if those are not wanted."""
    finish_reason: Literal["stop", "length"]


class ModelText:
    """The tokenizer of one model. Thread-safe: nothing of it changes after it is loaded."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        # Encoding may set padding and truncation at the first call; later calls find them set.
        tokenizer("a", add_special_tokens=False)
        self.special_tokens: frozenset[int] = frozenset(tokenizer.all_special_ids)
        self._longest_token = max(map(len, tokenizer.get_vocab()))
        self._token_text = lru_cache(_CACHED_TOKENS)(self._decode_token)

    @property
    def end_tokens(self) -> Sequence[int]:
        """The token that ends a reply of this model, by its tokenizer."""
        end = self._tokenizer.eos_token_id
        return () if end is None else (end,)

    def encode(self, text: str, room: int) -> Sequence[int]:
        """Encodes with the tokens that the model expects before a text, if any."""
        self._check_length("prompt", text, room)
        return self._encode(text, special=True)

    def prepare_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None,
        variables: Mapping[str, Any],
        room: int,
    ) -> ChatRendering:
        """A chat with the template of the model, to be rendered. INVALID if there is none, or the chat is too long."""
        reserved = _TEMPLATE_NAMES.intersection(variables) | {name for name in variables if name.startswith("_")}
        if reserved:
            raise invalid_field("chat_template_kwargs", f"has names that are not for callers: {sorted(variables)[:5]}")
        if not self._tokenizer.chat_template:
            raise StrataError(
                Code.INVALID, "the tokenizer of this model has no chat template", hint="use /v1/completions"
            )
        self._check_length("messages", "".join(str(each.get("content") or "") for each in messages), room)
        try:
            template = self._tokenizer.get_chat_template(tools=tools)
        except ValueError as error:
            raise _unrendered(str(error)) from None
        # Most templates know no developer, and leave out the messages of a role that they do not know.
        if "developer" not in template:
            messages = [_as_system(each) for each in messages]
        return ChatRendering(
            template=template,
            messages=messages,
            tools=tools,
            variables={**self._tokenizer.special_tokens_map, **variables},
            most_characters=room * self._longest_token,
        )

    def encode_chat(self, rendered: RenderedChat) -> Sequence[int]:
        """The prompt; INVALID if the template has made none."""
        if rendered.error:
            raise _unrendered(rendered.error)
        return self._encode(rendered.text, special=False)

    def _check_length(self, field: str, text: str, room: int) -> None:
        """Checks before the text is tokenized: no token is longer than the longest."""
        if len(text) > room * self._longest_token:
            raise invalid_field(field, f"has {len(text)} characters, and a rank has room for {room} tokens")

    def _encode(self, text: str, *, special: bool) -> Sequence[int]:
        tokens = self._tokenizer(text, add_special_tokens=special)["input_ids"]
        return [int(token) for token in tokens]

    def decode(self, tokens: Sequence[int], *, special: bool = False) -> str:
        text = self._tokenizer.decode(list(tokens), skip_special_tokens=not special, clean_up_tokenization_spaces=False)
        assert isinstance(text, str)
        return text

    def continuation(self, prompt: Sequence[int], tokens: Sequence[int]) -> str:
        """The text that these tokens add to that of the prompt."""
        before, context = decode_context(self.decode, prompt)
        return self.decode([*before, *tokens])[len(context) :]

    def token_text(self, token: int) -> str:
        return self._token_text(token)

    def _decode_token(self, token: int) -> str:
        return self.decode([token], special=True)

    def sampled(
        self, sequence: SampledSequence, stops: Sequence[str], prompt: Sequence[int], *, logprobs: bool
    ) -> SampledText:
        """`prompt` is what the sample continues; empty for a reply in a chat, which is a text of its own."""
        tokens: list[int] = np.frombuffer(sequence.tokens, "<i4").tolist()
        shown = tokens
        if sequence.stop_reason == "stop":
            whole = self.decode(tokens, special=True) if stops else ""
            if not any(stop in whole for stop in stops):
                shown = tokens[:-1]
        text = self.continuation(prompt, shown) if prompt else self.decode(shown)
        text = cut_at_stop(text, stops)
        described = self.describe_sampled(sequence) if logprobs else ()
        return SampledText(text, tokens, described, sequence.stop_reason)

    def describe_sampled(self, sequence: SampledSequence | SampledPart) -> Sequence[TokenText]:
        tokens: list[int] = np.frombuffer(sequence.tokens, "<i4").tolist()
        logprobs: list[float] = np.frombuffer(sequence.logprobs, "<f4").tolist()
        top = [] if sequence.top is None else top_pairs(sequence.top)
        return [self.describe(token, logprobs[place], top[place] if top else ()) for place, token in enumerate(tokens)]

    def describe(self, token: int, logprob: float | None, top: Sequence[tuple[int, float]]) -> TokenText:
        return TokenText(self.token_text(token), logprob, [(self.token_text(each), value) for each, value in top])


class TextStream:
    """The text of a sample while it runs. Text that was returned is never taken back, so it holds back what later
    tokens may change: a character of which bytes are missing, and what may be the beginning of a stop string or of a
    call of a tool."""

    def __init__(self, text: ModelText, stops: Sequence[str], prompt: Sequence[int], *, tools: bool) -> None:
        self._text = text
        self._stops = stops
        self._marks = (*stops, CALL_START) if tools else tuple(stops)
        self._tools = tools
        self._before = list(prompt[-2 * CONTEXT :])
        self._tokens: list[int] = []
        """The tokens whose text may still change."""
        self._held = ""
        self._returned = ""

    def add(self, tokens: Sequence[int]) -> str:
        """Returns what is sure of the text with these tokens, and was not before."""
        self._tokens += tokens
        added = self._text.continuation(self._before, self._tokens)
        if added.endswith(REPLACEMENT):
            return ""
        # Special tokens have no text: a run of them would leave no context.
        told = [token for token in self._tokens if token not in self._text.special_tokens]
        self._before, self._tokens = [*self._before, *told][-2 * CONTEXT :], []
        self._held += added
        sure = self._held[: self._sure()]
        self._held = self._held[len(sure) :]
        self._returned += sure
        return sure

    def _sure(self) -> int:
        """Returns how many characters of what is held can be returned."""
        text = self._held
        places = [place for place in map(text.find, self._marks) if place >= 0]
        end = min(places) if places else len(text) - max((_overlap(text, mark) for mark in self._marks), default=0)
        # The text before a call of a tool is returned without the space at its end.
        return len(text[:end].rstrip()) if self._tools else end

    def rest(self, text: str) -> str:
        """Returns what is left of the whole text, when it is known; UNAVAILABLE if it does not begin with what was
        returned."""
        if not text.startswith(self._returned):
            raise StrataError(
                Code.UNAVAILABLE,
                "the text of the sample differs from what was sent while it was drawn",
                hint="send the request again, without a stream",
            )
        return text[len(self._returned) :]


def _overlap(text: str, mark: str) -> int:
    """The length of the longest beginning of the mark, short of all of it, that the text ends with."""
    return next((length for length in range(min(len(mark) - 1, len(text)), 0, -1) if text.endswith(mark[:length])), 0)


def _unrendered(reason: str) -> StrataError:
    return invalid_field("messages", f"the chat template of the model cannot render them: {reason}")


def _as_system(message: Mapping[str, Any]) -> Mapping[str, Any]:
    """A message of a developer as one of the system, the older name of that role; any other as it is."""
    return {**message, "role": "system"} if message.get("role") == "developer" else message


class TextLoader:
    """Loads the tokenizer when the first request needs it: most API servers only see tokens."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._loading: asyncio.Task[ModelText] | None = None

    async def load(self) -> ModelText:
        """Once for all requests: loading takes seconds, and goes on if the client that was first disconnects."""
        if self._loading is None or (self._loading.done() and self._loading.exception() is not None):
            self._loading = asyncio.create_task(asyncio.to_thread(load_text, self._path))
        return await asyncio.shield(self._loading)


def load_text(path: str) -> ModelText:
    """Loads from the model's files, without network and without code from them. Blocking."""
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(path, local_files_only=True, trust_remote_code=False)
    except (OSError, ValueError) as error:
        raise StrataError(
            Code.UNSUPPORTED, f"texts need the tokenizer of the model, which cannot be loaded: {error}"
        ) from error
    return ModelText(tokenizer)


class _WrittenCall(msgspec.Struct):
    name: str
    arguments: dict[str, Any] = {}


_written: Final = msgspec.json.Decoder(_WrittenCall)


def parse_tool_calls(text: str) -> tuple[str, Sequence[ToolCall]]:
    """The text before the calls of tools that a reply has, and the calls; all of the text and none if it has none, or
    one cannot be read."""
    before, *parts = text.split(CALL_START)
    calls: list[ToolCall] = []
    for part in parts:
        try:
            written = _written.decode(part.partition(CALL_END)[0])
        except (msgspec.DecodeError, RecursionError):
            return text, ()
        function = CalledFunction(name=written.name, arguments=msgspec.json.encode(written.arguments).decode())
        calls.append(ToolCall(id=f"call_{secrets.token_hex(12)}", function=function))
    return (before.rstrip(), calls) if calls else (text, ())
