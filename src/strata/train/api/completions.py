"""OpenAI-compatible endpoints: models, chat completions and completions, from the base model and every checkpoint.

A request becomes the sample operations that the training protocol has, of the tenant of its key. So quotas, admission
and fairness hold for it, and the built-in sampler or an engine samples it. A sample whose client goes away is
cancelled.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, Generic, TypeVar

import msgspec
import numpy as np

from strata.base.errors import Code, StrataError
from strata.http.disconnect import until_disconnect
from strata.http.errors import STATUS_OF
from strata.http.openai_error import openai_error
from strata.http.route import KIB, MIB, RESEARCHER, VIEWER, RawReply, Route
from strata.train.api.context import ApiCall
from strata.train.api.futures import read_sample
from strata.train.api.sampler_cache import abort_all
from strata.train.api.sampling import check_prompt_fits
from strata.train.api.text import ModelText, SampledText, TokenText, parse_tool_calls
from strata.train.core import messages, ops
from strata.train.core.sampling import REPLACEMENT, SampleOperation, SampleResult, result_bytes
from strata.train.wire import bodies, openai
from strata.train.wire.fields import invalid_field
from strata.train.wire.sampling import top_pairs

MAX_BODY: Final = 4 * MIB
MAX_RESULT_BYTES: Final = 4 << 20
"""Of the results of one request, 8 bytes for each token with its log probability: JSON takes ten times as much."""
STREAM: Final = "text/event-stream"
COMMENT_S: Final = 10.0
"""How often a stream that waits sends a comment, so that a client that went away is noticed."""
RETRY_S: Final = 0.5
SAMPLED_KINDS: Final = ("weights", "sampler_weights")
TOKEN_BYTES: Final = 4
"""Of a token in a packed prompt."""
NO_TEXT: Final = SampledText("", 0, (), "length")
"""A sample of which nothing is shown."""

Reply = TypeVar("Reply", openai.ChatCompletion, openai.TextCompletion)


@dataclass(frozen=True)
class _Weights:
    """What a request samples from; no saved weights are the base model."""

    saved: ops.SavedWeights | None = None
    version: str = ""


async def list_models(call: ApiCall) -> openai.ModelCards:
    """The models that can be sampled: the base model, and the caller's checkpoints, the newest first"""
    server = await call.request(messages.DescribeServer(), messages.ServerView)
    checkpoints = (await call.request(messages.ListCheckpoints(), messages.CheckpointList)).checkpoints
    newest = sorted(checkpoints, key=lambda each: each.saved_at_s, reverse=True)
    owner = (await call.context.tenant(call.caller)).removeprefix("key:")
    cards = [] if server.full else [_base_card(server.base_model)]
    cards += [_card(each, owner) for each in newest if each.kind in SAMPLED_KINDS]
    return openai.ModelCards(data=cards)


async def show_model(call: ApiCall) -> openai.ModelCard:
    """One model that can be sampled"""
    name = call.path["model"]
    checkpoint = await _find_checkpoint(call, name)
    if checkpoint is None:
        return _base_card(name)
    return _card(checkpoint, (await call.context.tenant(call.caller)).removeprefix("key:"))


def _base_card(name: str) -> openai.ModelCard:
    return openai.ModelCard(id=name, created=0, owned_by="strata", root=name)


def _card(checkpoint: messages.ModelCheckpointView, owner: str) -> openai.ModelCard:
    saved_at = int(checkpoint.saved_at_s)
    return openai.ModelCard(id=checkpoint.path, created=saved_at, owned_by=owner, root=checkpoint.base_model)


async def _find_checkpoint(call: ApiCall, model: str) -> messages.ModelCheckpointView | None:
    """The checkpoint of this name; None if it names the base model; NOT_FOUND if it names nothing of the caller's."""
    if model in call.context.settings.model.base_models:
        return None
    missing = StrataError(
        Code.NOT_FOUND, f"there is no model {model[:200]!r}", hint="GET /v1/models lists them", path="model"
    )
    try:
        run_id, kind, name = bodies.tinker_path(model)
    except StrataError:
        raise missing from None
    if kind not in SAMPLED_KINDS:
        raise missing
    return await call.request(messages.DescribeCheckpoint(run_id, kind, name), messages.ModelCheckpointView)


async def _find_weights(call: ApiCall, model: str) -> _Weights:
    checkpoint = await _find_checkpoint(call, model)
    if checkpoint is not None:
        saved = ops.SavedWeights(checkpoint.run_id, checkpoint.kind, checkpoint.name)
        return _Weights(saved, f"{checkpoint.folder}@{checkpoint.saved_at_s}")
    if call.context.settings.model.training == "full":
        raise invalid_field("model", "this server does full fine-tunes: the base model is not kept beside the model")
    return _Weights()


async def chat_completions(call: ApiCall, body: openai.ChatBody) -> openai.ChatCompletion | RawReply:
    """Reply to a chat, by the model's own template → one reply, or a stream of events"""
    plan = await _plan_chat(call, body)
    # It would be held while the samples run, and may be large.
    del body
    return await _complete(call, plan)


async def _plan_chat(call: ApiCall, body: openai.ChatBody) -> _Plan[openai.ChatCompletion]:
    body.check()
    messages_, tools = body.template_messages(), body.offered_tools
    weights, room, text = await _prepare(call, body.model)
    variables = body.chat_template_kwargs or {}
    prompt = await asyncio.to_thread(text.render_chat, messages_, tools, variables, room)
    params = body.params(body.token_limit, text.end_tokens)
    template = SampleOperation("", 0, _pack(prompt), params, body.samples, topk_sample_logprobs=body.top)
    return _Plan(weights, room, [template], _Chat(call, body, text, [template.prompt]))


async def completions(call: ApiCall, body: openai.CompletionBody) -> openai.TextCompletion | RawReply:
    """Continue texts, or tokens → one reply, or a stream of events"""
    plan = await _plan_texts(call, body)
    del body
    return await _complete(call, plan)


async def _plan_texts(call: ApiCall, body: openai.CompletionBody) -> _Plan[openai.TextCompletion]:
    body.check()
    sent = body.prompts()
    weights, room, text = await _prepare(call, body.model)
    prompts = await asyncio.to_thread(
        lambda: [text.encode(each, room) if isinstance(each, str) else each for each in sent]
    )
    top, wants_prompt = body.logprobs or 0, bool(body.echo) and body.logprobs is not None
    templates = [
        SampleOperation(
            "",
            0,
            _pack(prompt),
            body.params(max(body.generated, 1)),
            body.samples,
            prompt_logprobs=wants_prompt,
            topk_prompt_logprobs=top if wants_prompt else 0,
            topk_sample_logprobs=top,
        )
        for prompt in prompts
    ]
    return _Plan(weights, room, templates, _Texts(call, body, text, [each.prompt for each in templates]))


async def _prepare(call: ApiCall, model: str) -> tuple[_Weights, int, ModelText]:
    """What a request samples from, the tokens that fit, and the tokenizer."""
    weights = await _find_weights(call, model)
    settings = call.context.settings
    server = await call.request(messages.DescribeServer(), messages.ServerView)
    room = min(server.max_context or settings.sampling.cached_tokens, settings.sampling.cached_tokens)
    return weights, room, await call.context.text.load()


def _pack(tokens: Sequence[int]) -> bytes:
    if not tokens:
        raise invalid_field("prompt", "has no tokens")
    return np.asarray(tokens, dtype="<i4").tobytes()


def _unpack(prompt: bytes) -> list[int]:
    tokens: list[int] = np.frombuffer(prompt, "<i4").tolist()
    return tokens


class _Form(ABC, Generic[Reply]):
    """How the samples of a request are written. Has nothing of the body that is large but the prompts, packed."""

    def __init__(
        self, call: ApiCall, body: openai.GenerationBody, text: ModelText, prompts: Sequence[bytes], *, logprobs: bool
    ) -> None:
        self.text = text
        self.prompts = prompts
        self.logprobs = logprobs
        self.stream = bool(body.stream)
        self.model = body.model
        self.created = int(call.context.clock.wall_s())
        self.wants_usage_chunk = body.wants_usage_chunk
        self._stops = body.stop_strings
        self._sampled = 0

    @abstractmethod
    def reply(self, name: str, results: Sequence[SampleResult]) -> Reply: ...

    @abstractmethod
    def chunks(self, name: str, index: int, result: SampleResult) -> Iterator[msgspec.Struct]:
        """The events of the samples of the prompt with this index."""

    @abstractmethod
    def usage_chunk(self, name: str) -> msgspec.Struct | None:
        """The last event, if the client wants it."""

    def events(self, name: str, index: int, result: SampleResult) -> Sequence[bytes]:
        """`chunks`, encoded. Blocking."""
        return [_event(chunk) for chunk in self.chunks(name, index, result)]

    def usage(self) -> openai.TokenUsage:
        return openai.usage_of(sum(map(len, self.prompts)) // TOKEN_BYTES, self._sampled)

    def sampled(self, result: SampleResult, prompt: Sequence[int]) -> list[SampledText]:
        texts = [self.text.sampled(each, self._stops, prompt, logprobs=self.logprobs) for each in result.sequences]
        self._sampled += sum(each.length for each in texts)
        return texts


@dataclass(frozen=True)
class _Plan(Generic[Reply]):
    """The samples of a request, and how they are written."""

    weights: _Weights
    room: int
    templates: Sequence[SampleOperation]
    """Without their sampler and their numbers there."""
    form: _Form[Reply]


async def _complete(call: ApiCall, plan: _Plan[Reply]) -> Reply | RawReply:
    weights, templates, form = plan.weights, plan.templates, plan.form
    _check_size(templates, plan.room)

    def make(sampler_id: str, numbers: Iterator[int]) -> Sequence[SampleOperation]:
        named = partial(msgspec.structs.replace, sampler_id=sampler_id)
        return [named(each, seq_id=next(numbers)) for each in templates]

    futures = await call.context.samplers.submit(call, weights.saved, weights.version, make)
    call.shrink_reservation(sum(len(each.prompt) for each in templates))
    if form.stream:
        return _stream_reply(call, futures, form)
    results = await _results_or_abort(call, futures)
    return await asyncio.to_thread(form.reply, futures[0], results)


def _check_size(operations: Sequence[SampleOperation], room: int) -> None:
    """Before anything is made durable: what no rank can take, and what would not fit into a reply."""
    size = 0
    for operation in operations:
        check_prompt_fits(operation, room)
        most = room - operation.length
        size += result_bytes(operation, min(operation.params.max_tokens or most, most))
    if size > MAX_RESULT_BYTES:
        raise StrataError(
            Code.INVALID,
            f"the reply could have {size // 8} tokens and log probabilities, and {MAX_RESULT_BYTES // 8} is the most",
            hint="set max_tokens, or ask for fewer prompts, samples or log probabilities",
        )


async def _await_result(call: ApiCall, future_id: str) -> SampleResult:
    """The result of a sample. It is durable, so a failure of the orchestrator only delays it."""
    while True:
        try:
            outcome = await call.watch(future_id, call.context.settings.server.poll_s)
        except StrataError as error:
            if error.code not in (Code.UNAVAILABLE, Code.EXHAUSTED, Code.DEADLINE):
                raise
            await asyncio.sleep(RETRY_S)
            continue
        if isinstance(outcome, messages.QueuePosition):
            await call.reauthenticate()
            continue
        if isinstance(outcome.result, ops.SampleDone):
            return await asyncio.to_thread(read_sample, call, outcome.result)
        if not isinstance(outcome.result, ops.Failed):
            raise StrataError(Code.INTERNAL, f"{future_id} is no sample")
        code = Code.INVALID if outcome.result.category == "user" else Code.UNAVAILABLE
        raise StrataError(code, outcome.result.message)


async def _results_or_abort(call: ApiCall, futures: Sequence[str]) -> Sequence[SampleResult]:
    """All results; if the client disconnects or one fails, the others are cancelled."""
    try:
        return await until_disconnect(call, asyncio.Event(), _await_results(call, futures))
    except BaseException:
        await abort_all(call, futures)
        raise


async def _await_results(call: ApiCall, futures: Sequence[str]) -> Sequence[SampleResult]:
    return await asyncio.gather(*(_await_result(call, future_id) for future_id in futures))


def _stream_reply(call: ApiCall, futures: Sequence[str], form: _Form[Any]) -> RawReply:
    unfinished = set(futures)

    async def abort_unfinished() -> None:
        """Not in the stream itself: it never starts if its client has left before."""
        if unfinished:
            # In a task of its own: this one may be cancelled already.
            call.context.samplers.abort_later(call, [*unfinished])

    content = _stream(call, futures, unfinished, form)
    return RawReply(content, media_type=STREAM, headers={"X-Accel-Buffering": "no"}, close=abort_unfinished)


async def _stream(
    call: ApiCall, futures: Sequence[str], unfinished: set[str], form: _Form[Any]
) -> AsyncIterator[bytes]:
    """Each sample when it has ended: the ranks report no parts of a sample that runs. Takes it out of `unfinished`."""
    places = {asyncio.create_task(_await_result(call, future_id)): index for index, future_id in enumerate(futures)}
    waiting = set(places)
    try:
        while waiting:
            done, waiting = await asyncio.wait(waiting, timeout=COMMENT_S, return_when=asyncio.FIRST_COMPLETED)
            if not done:
                yield b": waiting\n\n"
            for task in done:
                place, result = places[task], task.result()
                unfinished.discard(futures[place])
                for event in await asyncio.to_thread(form.events, futures[0], place, result):
                    yield event
        last = form.usage_chunk(futures[0])
        if last is not None:
            yield _event(last)
    except StrataError as error:
        # The head of the reply is sent, so the error is an event.
        yield _event(openai_error(error, STATUS_OF[error.code]))
    finally:
        for task in waiting:
            task.cancel()
    yield b"data: [DONE]\n\n"


def _event(message: msgspec.Struct) -> bytes:
    return b"data: " + msgspec.json.encode(message) + b"\n\n"


class _Chat(_Form[openai.ChatCompletion]):
    def __init__(self, call: ApiCall, body: openai.ChatBody, text: ModelText, prompts: Sequence[bytes]) -> None:
        super().__init__(call, body, text, prompts, logprobs=bool(body.logprobs))
        self._has_tools = bool(body.offered_tools)

    def reply(self, name: str, results: Sequence[SampleResult]) -> openai.ChatCompletion:
        choices = self._choices(results[0])
        return openai.ChatCompletion(
            id=f"chatcmpl-{name}", created=self.created, model=self.model, choices=choices, usage=self.usage()
        )

    def _choices(self, result: SampleResult) -> list[openai.ChatChoice]:
        return [self._choice(index, sample) for index, sample in enumerate(self.sampled(result, ()))]

    def _choice(self, index: int, sample: SampledText) -> openai.ChatChoice:
        content, calls = parse_tool_calls(sample.text) if self._has_tools else (sample.text, ())
        message = openai.ChatMessage(content=content)
        if calls:
            message = openai.ChatMessage(content=content or None, tool_calls=calls)
        return openai.ChatChoice(
            index=index,
            message=message,
            logprobs=_chat_logprobs(sample.tokens) if self.logprobs else None,
            finish_reason="tool_calls" if calls else sample.finish_reason,
        )

    def chunks(self, name: str, index: int, result: SampleResult) -> Iterator[msgspec.Struct]:
        del index
        for choice in self._choices(result):
            message = choice.message
            calls = () if message.tool_calls is msgspec.UNSET else message.tool_calls
            numbered = [msgspec.structs.replace(each, index=place) for place, each in enumerate(calls)]
            delta = openai.ChatDelta(role="assistant", content=message.content, tool_calls=numbered)
            yield self._chunk(name, openai.ChatChunkChoice(index=choice.index, delta=delta, logprobs=choice.logprobs))
            ended = openai.ChatChunkChoice(
                index=choice.index, delta=openai.ChatDelta(), finish_reason=choice.finish_reason
            )
            yield self._chunk(name, ended)

    def usage_chunk(self, name: str) -> msgspec.Struct | None:
        return self._chunk(name, usage=self.usage()) if self.wants_usage_chunk else None

    def _chunk(
        self, name: str, *choices: openai.ChatChunkChoice, usage: openai.TokenUsage | None = None
    ) -> openai.ChatChunk:
        return openai.ChatChunk(
            id=f"chatcmpl-{name}", created=self.created, model=self.model, choices=choices, usage=usage
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


class _Texts(_Form[openai.TextCompletion]):
    def __init__(self, call: ApiCall, body: openai.CompletionBody, text: ModelText, prompts: Sequence[bytes]) -> None:
        super().__init__(call, body, text, prompts, logprobs=body.logprobs is not None)
        self._echoes = bool(body.echo)
        self._generates = body.generated > 0
        self._samples = body.samples

    def reply(self, name: str, results: Sequence[SampleResult]) -> openai.TextCompletion:
        choices = [choice for index, result in enumerate(results) for choice in self._choices(index, result)]
        return self._completion(name, choices, self.usage())

    def chunks(self, name: str, index: int, result: SampleResult) -> Iterator[msgspec.Struct]:
        for choice in self._choices(index, result):
            yield self._completion(name, [choice])

    def usage_chunk(self, name: str) -> msgspec.Struct | None:
        return self._completion(name, (), self.usage()) if self.wants_usage_chunk else None

    def _completion(
        self, name: str, choices: Sequence[openai.TextChoice], usage: openai.TokenUsage | None = None
    ) -> openai.TextCompletion:
        return openai.TextCompletion(
            id=f"cmpl-{name}", created=self.created, model=self.model, choices=choices, usage=usage
        )

    def _choices(self, index: int, result: SampleResult) -> list[openai.TextChoice]:
        prompt = _unpack(self.prompts[index])
        first = index * self._samples
        echoed = self._echo(prompt, result) if self._echoes else None
        # A sampler samples at least one token; where none is wanted it is neither shown nor counted.
        samples = self.sampled(result, prompt) if self._generates else [NO_TEXT] * len(result.sequences)
        return [self._choice(first + place, sample, echoed) for place, sample in enumerate(samples)]

    def _echo(self, prompt: Sequence[int], result: SampleResult) -> SampledText:
        """The prompt, as if it had been sampled."""
        text = self.text.decode(prompt)
        if not self.logprobs:
            return SampledText(text, len(prompt), (), "length")
        own: list[float | None] = [None] * len(prompt)
        if result.prompt_logprobs is not None:
            values = np.frombuffer(result.prompt_logprobs, "<f4").tolist()
            own = [None if value != value else value for value in values]  # noqa: PLR0124 (NaN is not equal to itself)
        top = [] if result.top_prompt is None else top_pairs(result.top_prompt)
        tokens = [
            self.text.describe(token, own[place], top[place] if top else ()) for place, token in enumerate(prompt)
        ]
        return SampledText(text, len(prompt), tokens, "length")

    def _choice(self, index: int, sample: SampledText, echoed: SampledText | None) -> openai.TextChoice:
        shown, tokens = sample.text, sample.tokens
        if echoed is not None:
            shown, tokens = echoed.text + shown, [*echoed.tokens, *tokens]
        return openai.TextChoice(
            index=index,
            text=shown,
            logprobs=_text_logprobs(tokens) if self.logprobs else None,
            finish_reason=sample.finish_reason,
        )


def _text_logprobs(tokens: Sequence[TokenText]) -> openai.TextLogprobs:
    offsets, offset = [], 0
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


ROUTES = (
    Route("POST", "/v1/chat/completions", RESEARCHER, chat_completions, MAX_BODY),
    Route("POST", "/v1/completions", RESEARCHER, completions, MAX_BODY),
    Route("GET", "/v1/models", VIEWER, list_models, KIB),
    Route("GET", "/v1/models/{model:path}", VIEWER, show_model, KIB),
)
