"""Writes the samples of an OpenAI-compatible request: chat and text choices, log probabilities, usage, and the chunks
of a stream. Tokens become text in `text`.

What a stream has sent of a sample is never taken back. A sample that ranks or an engine had to draw again, and whose
tokens differ from those that were sent, ends the stream with an error.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final, Generic, TypeVar

import msgspec
import numpy as np

from strata.base.errors import Code, StrataError
from strata.train.api.context import ApiCall
from strata.train.api.text import ModelText, SampledText, TextStream, TokenText, parse_tool_calls
from strata.train.core.sampling import REPLACEMENT, SampledPart, SampledSequence, SampleOperation, SampleResult
from strata.train.wire import openai
from strata.train.wire.sampling import top_pairs

TOKEN_BYTES: Final = 4
"""Bytes of a token in a packed prompt."""
NO_TEXT: Final = SampledText("", (), (), "length")
"""A sample of which nothing is shown."""

Reply = TypeVar("Reply", openai.ChatCompletion, openai.TextCompletion)


def encode_event(message: msgspec.Struct) -> bytes:
    return b"data: " + msgspec.json.encode(message) + b"\n\n"


def _unpack(tokens: bytes) -> list[int]:
    unpacked: list[int] = np.frombuffer(tokens, "<i4").tolist()
    return unpacked


class _SentChoice:
    """What a stream has sent of a sample."""

    def __init__(self, text: TextStream) -> None:
        self.text = text
        self.tokens = bytearray()
        self.characters = 0
        """Characters of the texts of its tokens."""
        self.begun = False

    @property
    def count(self) -> int:
        return len(self.tokens) // TOKEN_BYTES

    def check_same(self, sequence: SampledSequence) -> None:
        if not sequence.tokens.startswith(self.tokens):
            raise StrataError(
                Code.UNAVAILABLE,
                "after a failure the sample was drawn again, and its tokens differ from those that were sent",
                hint="send the request again",
            )


class CompletionForm(ABC, Generic[Reply]):
    """Has nothing of the body that is large but the prompts, packed."""

    def __init__(
        self,
        call: ApiCall,
        body: openai.GenerationBody,
        text: ModelText,
        samples: Sequence[SampleOperation],
        *,
        logprobs: bool,
    ) -> None:
        self.text = text
        self.prompts = [each.prompt for each in samples]
        self.logprobs = logprobs
        self.token_ids = bool(body.return_token_ids)
        self.stream = bool(body.stream)
        self.model = body.model
        self.created = int(call.context.clock.wall_s())
        self.wants_usage_chunk = body.wants_usage_chunk
        self.temperature = samples[0].params.temperature
        self.samples = body.samples
        """The number of samples of each prompt."""
        self.stops = body.stop_strings
        self._streams_tokens = samples[0].stream
        self._sampled = 0
        self._sent: dict[tuple[int, int], _SentChoice] = {}
        """What was sent, by prompt and sample."""

    @abstractmethod
    def reply_id(self, name: str) -> str: ...

    @abstractmethod
    def read_reply(self, sequence: SampledSequence) -> tuple[Mapping[str, Any] | None, str]:
        """The message that a sample is in a chat, as templates expect it, and the reason for its end."""

    @abstractmethod
    def reply(self, name: str, results: Sequence[SampleResult]) -> Reply: ...

    @abstractmethod
    def part_chunk(self, name: str, index: int, part: SampledPart) -> msgspec.Struct | None:
        """The event of new tokens of the prompt with this index; None if they show nothing yet."""

    @abstractmethod
    def last_chunks(self, name: str, index: int, result: SampleResult) -> Iterator[msgspec.Struct]:
        """The events of what was not sent yet of the samples of the prompt with this index."""

    @abstractmethod
    def usage_chunk(self, name: str) -> msgspec.Struct | None:
        """The last event, if the client wants it."""

    @abstractmethod
    def text_stream(self, index: int) -> TextStream:
        """Returns the stream of a sample of the prompt with this index."""

    def counts(self, index: int) -> Sequence[int]:
        """Returns how many tokens of each sample of a prompt were sent; empty if they are sent with the result only."""
        if not self._streams_tokens:
            return ()
        sent = [self._sent.get((index, sample)) for sample in range(self.samples)]
        return [0 if each is None else each.count for each in sent]

    def events(self, name: str, index: int, outcome: SampleResult | Sequence[SampledPart]) -> Sequence[bytes]:
        """The events of tokens, or of a result, of the prompt with this index. Blocking."""
        if isinstance(outcome, SampleResult):
            return [encode_event(chunk) for chunk in self.last_chunks(name, index, outcome)]
        chunks = [self.part_chunk(name, index, part) for part in outcome]
        return [encode_event(chunk) for chunk in chunks if chunk is not None]

    def sent(self, index: int, sample: int) -> _SentChoice:
        place = index, sample
        if place not in self._sent:
            self._sent[place] = _SentChoice(self.text_stream(index))
        return self._sent[place]

    def read_part(self, sent: _SentChoice, part: SampledPart) -> tuple[str, Sequence[TokenText]]:
        """The text and the tokens that a part adds."""
        sent.tokens += part.tokens
        return sent.text.add(_unpack(part.tokens)), self.text.describe_sampled(part) if self.logprobs else ()

    def ids(self, tokens: Sequence[int]) -> openai.TokenIds:
        return tokens if self.token_ids else msgspec.UNSET

    def prompt_ids(self, index: int) -> openai.TokenIds:
        return _unpack(self.prompts[index]) if self.token_ids else msgspec.UNSET

    def usage(self) -> openai.TokenUsage:
        return openai.usage_of(sum(map(len, self.prompts)) // TOKEN_BYTES, self._sampled)

    def sampled(self, result: SampleResult, prompt: Sequence[int]) -> list[SampledText]:
        texts = [self.text.sampled(each, self.stops, prompt, logprobs=self.logprobs) for each in result.sequences]
        self._sampled += sum(len(each.token_ids) for each in texts)
        return texts


class ChatForm(CompletionForm[openai.ChatCompletion]):
    def __init__(
        self, call: ApiCall, body: openai.ChatBody, text: ModelText, samples: Sequence[SampleOperation]
    ) -> None:
        super().__init__(call, body, text, samples, logprobs=bool(body.logprobs))
        self._has_tools = bool(body.offered_tools)

    def reply_id(self, name: str) -> str:
        return f"chatcmpl-{name}"

    def read_reply(self, sequence: SampledSequence) -> tuple[Mapping[str, Any] | None, str]:
        sample = self.text.sampled(sequence, self.stops, (), logprobs=False)
        content, calls = self._parse(sample.text)
        message = {"role": "assistant", "content": content, "tool_calls": [msgspec.to_builtins(each) for each in calls]}
        return openai.template_message("messages", message), "tool_calls" if calls else sample.finish_reason

    def reply(self, name: str, results: Sequence[SampleResult]) -> openai.ChatCompletion:
        choices = [self._choice(index, sample) for index, sample in enumerate(self.sampled(results[0], ()))]
        return openai.ChatCompletion(
            id=self.reply_id(name),
            created=self.created,
            model=self.model,
            choices=choices,
            usage=self.usage(),
            prompt_token_ids=self.prompt_ids(0),
        )

    def _parse(self, text: str) -> tuple[str, Sequence[openai.ToolCall]]:
        return parse_tool_calls(text) if self._has_tools else (text, ())

    def _choice(self, index: int, sample: SampledText) -> openai.ChatChoice:
        content, calls = self._parse(sample.text)
        message = openai.ChatMessage(content=content)
        if calls:
            message = openai.ChatMessage(content=content or None, tool_calls=calls)
        return openai.ChatChoice(
            index=index,
            message=message,
            logprobs=_chat_logprobs(sample.tokens) if self.logprobs else None,
            finish_reason="tool_calls" if calls else sample.finish_reason,
            token_ids=self.ids(sample.token_ids),
        )

    def text_stream(self, index: int) -> TextStream:
        """A reply in a chat is a text of its own."""
        del index
        return TextStream(self.text, self.stops, (), tools=self._has_tools)

    def part_chunk(self, name: str, index: int, part: SampledPart) -> msgspec.Struct | None:
        sent = self.sent(index, part.index)
        text, tokens = self.read_part(sent, part)
        if not text and not tokens and not self.token_ids:
            return None
        return self._delta(name, part.index, text, tokens, _unpack(part.tokens))

    def last_chunks(self, name: str, index: int, result: SampleResult) -> Iterator[msgspec.Struct]:
        for place, sample in enumerate(self.sampled(result, ())):
            sent = self.sent(index, place)
            sent.check_same(result.sequences[place])
            content, calls = self._parse(sample.text)
            rest, tokens = sent.text.rest(content), sample.tokens[sent.count :]
            token_ids = sample.token_ids[sent.count :]
            if rest or tokens or calls or not sent.begun or (token_ids and self.token_ids):
                shown = rest if rest or not calls else None
                yield self._delta(name, place, shown, tokens, token_ids, calls)
            ended = openai.ChatChunkChoice(
                index=place, delta=openai.ChatDelta(), finish_reason="tool_calls" if calls else sample.finish_reason
            )
            yield self._chunk(name, ended)

    def _delta(
        self,
        name: str,
        place: int,
        content: str | None,
        tokens: Sequence[TokenText],
        token_ids: Sequence[int],
        calls: Sequence[openai.ToolCall] = (),
    ) -> openai.ChatChunk:
        sent = self.sent(0, place)
        numbered = [msgspec.structs.replace(each, index=number) for number, each in enumerate(calls)]
        delta = openai.ChatDelta(role=None if sent.begun else "assistant", content=content, tool_calls=numbered)
        prompt = msgspec.UNSET if sent.begun or place else self.prompt_ids(0)
        sent.begun = True
        choice = openai.ChatChunkChoice(
            index=place,
            delta=delta,
            logprobs=_chat_logprobs(tokens) if self.logprobs else None,
            token_ids=self.ids(token_ids),
        )
        return msgspec.structs.replace(self._chunk(name, choice), prompt_token_ids=prompt)

    def usage_chunk(self, name: str) -> msgspec.Struct | None:
        return self._chunk(name, usage=self.usage()) if self.wants_usage_chunk else None

    def _chunk(
        self, name: str, *choices: openai.ChatChunkChoice, usage: openai.TokenUsage | None = None
    ) -> openai.ChatChunk:
        return openai.ChatChunk(
            id=self.reply_id(name), created=self.created, model=self.model, choices=choices, usage=usage
        )


def _chat_logprobs(tokens: Sequence[TokenText]) -> openai.ChatLogprobs:
    content = [
        _token_logprob(
            each.text, each.logprob or 0.0, top_logprobs=[_token_logprob(text, value) for text, value in each.top]
        )
        for each in tokens
    ]
    return openai.ChatLogprobs(content=content)


def _token_logprob(text: str, logprob: float, **more: Any) -> openai.TokenLogprob:
    broken = REPLACEMENT in text
    return openai.TokenLogprob(token=text, logprob=logprob, bytes=None if broken else list(text.encode()), **more)


class TextForm(CompletionForm[openai.TextCompletion]):
    def __init__(
        self, call: ApiCall, body: openai.CompletionBody, text: ModelText, samples: Sequence[SampleOperation]
    ) -> None:
        super().__init__(call, body, text, samples, logprobs=body.logprobs is not None)
        self._echoes = bool(body.echo)
        self._generates = body.generated > 0

    def reply_id(self, name: str) -> str:
        return f"cmpl-{name}"

    def read_reply(self, sequence: SampledSequence) -> tuple[Mapping[str, Any] | None, str]:
        return None, sequence.stop_reason

    def reply(self, name: str, results: Sequence[SampleResult]) -> openai.TextCompletion:
        choices = [choice for index, result in enumerate(results) for choice in self._rest(index, result)]
        return self._completion(name, choices, self.usage())

    def text_stream(self, index: int) -> TextStream:
        return TextStream(self.text, self.stops, _unpack(self.prompts[index]), tools=False)

    def part_chunk(self, name: str, index: int, part: SampledPart) -> msgspec.Struct | None:
        sent = self.sent(index, part.index)
        text, tokens = self.read_part(sent, part)
        if not text and not tokens and not self.token_ids:
            return None
        echoed = self._echo(_unpack(self.prompts[index])) if self._echoes and not sent.begun else None
        choice = self._choice(index, part.index, text, tokens, echoed, _unpack(part.tokens))
        return self._completion(name, [choice])

    def last_chunks(self, name: str, index: int, result: SampleResult) -> Iterator[msgspec.Struct]:
        for choice in self._rest(index, result):
            yield self._completion(name, [choice])

    def usage_chunk(self, name: str) -> msgspec.Struct | None:
        return self._completion(name, (), self.usage()) if self.wants_usage_chunk else None

    def _completion(
        self, name: str, choices: Sequence[openai.TextChoice], usage: openai.TokenUsage | None = None
    ) -> openai.TextCompletion:
        return openai.TextCompletion(
            id=self.reply_id(name), created=self.created, model=self.model, choices=choices, usage=usage
        )

    def _rest(self, index: int, result: SampleResult) -> Iterator[openai.TextChoice]:
        """Yields what was not sent yet of the samples of a prompt: all of them unless it is a stream."""
        prompt = _unpack(self.prompts[index])
        echoed = self._echo(prompt, result) if self._echoes else None
        # A sampler samples at least one token; where none is wanted it is neither shown nor counted.
        samples = self.sampled(result, prompt) if self._generates else [NO_TEXT] * len(result.sequences)
        for place, sample in enumerate(samples):
            sent = self.sent(index, place)
            sent.check_same(result.sequences[place])
            rest, tokens = sent.text.rest(sample.text), sample.tokens[sent.count :]
            token_ids = sample.token_ids[sent.count :]
            choice = self._choice(index, place, rest, tokens, None if sent.begun else echoed, token_ids)
            yield msgspec.structs.replace(choice, finish_reason=sample.finish_reason)

    def _echo(self, prompt: Sequence[int], result: SampleResult | None = None) -> SampledText:
        """The prompt, as if it had been sampled."""
        text = self.text.decode(prompt)
        if not self.logprobs:
            return SampledText(text, prompt, (), "length")
        own: list[float | None] = [None] * len(prompt)
        if result is not None and result.prompt_logprobs is not None:
            values = np.frombuffer(result.prompt_logprobs, "<f4").tolist()
            own = [None if value != value else value for value in values]  # noqa: PLR0124 (NaN is not equal to itself)
        top = [] if result is None or result.top_prompt is None else top_pairs(result.top_prompt)
        tokens = [
            self.text.describe(token, own[place], top[place] if top else ()) for place, token in enumerate(prompt)
        ]
        return SampledText(text, prompt, tokens, "length")

    def _choice(
        self,
        index: int,
        place: int,
        text: str,
        tokens: Sequence[TokenText],
        echoed: SampledText | None,
        token_ids: Sequence[int],
    ) -> openai.TextChoice:
        sent = self.sent(index, place)
        if echoed is not None:
            text, tokens = echoed.text + text, [*echoed.tokens, *tokens]
        first = sent.characters
        sent.characters += sum(len(each.text) for each in tokens)
        prompt_ids = msgspec.UNSET if sent.begun else self.prompt_ids(index)
        sent.begun = True
        return openai.TextChoice(
            index=index * self.samples + place,
            text=text,
            logprobs=_text_logprobs(tokens, first) if self.logprobs else None,
            finish_reason=None,
            token_ids=self.ids(token_ids),
            prompt_token_ids=prompt_ids,
        )


def _text_logprobs(tokens: Sequence[TokenText], first: int) -> openai.TextLogprobs:
    """`first` is the place of the first token in its text."""
    offsets, offset = [], first
    for each in tokens:
        offsets.append(offset)
        offset += len(each.text)
    return openai.TextLogprobs(
        tokens=[each.text for each in tokens],
        token_logprobs=[each.logprob for each in tokens],
        top_logprobs=[_top(each) for each in tokens],
        text_offset=offsets,
    )


def _top(token: TokenText) -> dict[str, float] | None:
    """The likeliest tokens, and the one that is there. Of tokens with one text the likeliest counts."""
    if token.logprob is None:
        return None
    top: dict[str, float] = {}
    for text, value in token.top:
        top.setdefault(text, value)
    top.setdefault(token.text, token.logprob)
    return top
