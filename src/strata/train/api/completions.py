"""Routes of the OpenAI-compatible endpoints (models, chat completions, completions): limits of request and reply (4
MiB), planning of the samples, streaming with a comment every 10 s, retries, cancellation.

A request becomes the sample operations that the training protocol has, of the tenant of its key. So quotas, admission
and fairness hold for it, and the built-in sampler or an engine samples it. A sample whose client goes away is
cancelled.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, Generic

import msgspec

from strata.base.errors import Code, StrataError
from strata.http.disconnect import until_disconnect
from strata.http.errors import STATUS_OF
from strata.http.openai_error import openai_error
from strata.http.route import KIB, MIB, RESEARCHER, VIEWER, RawReply, Route
from strata.train.api.chat_prompt import ChatPrompt, render_prompt
from strata.train.api.completion_replies import ChatForm, CompletionForm, Reply, TextForm, encode_event
from strata.train.api.context import ApiCall
from strata.train.api.futures import read_sample
from strata.train.api.rollout_turns import RolloutTurns, TurnReply, pack_tokens
from strata.train.api.sampler_cache import SampledSource, abort_all
from strata.train.api.sampling import check_prompt_fits
from strata.train.api.template_process import GrammarCheck
from strata.train.api.text import ModelText
from strata.train.core import ops
from strata.train.core.sampling import SampledPart, SampleOperation, SampleResult, result_bytes
from strata.train.grammar import check_library
from strata.train.status import queries, views
from strata.train.wire import bodies, openai
from strata.train.wire.fields import invalid_field
from strata.train.wire.sampling import is_sampler_id

MAX_BODY: Final = 4 * MIB
MAX_RESULT_BYTES: Final = 4 << 20
"""Bytes of the results of one request, 8 bytes for each token with its log probability: JSON takes ten times as
much."""
STREAM: Final = "text/event-stream"
COMMENT_S: Final = 10.0
"""How often a stream that waits sends a comment, so that a client that went away is noticed."""
WAITING: Final = (b": waiting\n\n",)
RETRY_S: Final = 0.5
SAMPLED_KINDS: Final = ("weights", "sampler_weights")


@dataclass(frozen=True)
class _Weights:
    """What a request samples from."""

    source: SampledSource = None
    version: str = ""


async def list_models(call: ApiCall) -> openai.ModelCards:
    """The models that can be sampled: the base model, and the caller's checkpoints, the newest first"""
    server = await call.request(queries.DescribeServer(), views.ServerView)
    checkpoints = (await call.request(queries.ListCheckpoints(), views.CheckpointList)).checkpoints
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


def _card(checkpoint: views.ModelCheckpointView, owner: str) -> openai.ModelCard:
    saved_at = int(checkpoint.saved_at_s)
    return openai.ModelCard(id=checkpoint.path, created=saved_at, owned_by=owner, root=checkpoint.base_model)


async def _find_checkpoint(call: ApiCall, model: str) -> views.ModelCheckpointView | None:
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
    return await call.request(queries.DescribeCheckpoint(run_id, kind, name), views.ModelCheckpointView)


async def _find_weights(call: ApiCall, model: str) -> _Weights:
    if is_sampler_id(model):
        return _Weights(model, model)
    checkpoint = await _find_checkpoint(call, model)
    if checkpoint is not None:
        saved = ops.SavedWeights(checkpoint.run_id, checkpoint.kind, checkpoint.name)
        return _Weights(saved, f"{checkpoint.folder}@{checkpoint.saved_at_s}")
    if call.context.settings.model.training == "full":
        raise invalid_field("model", "this server does full fine-tunes: the base model is not kept beside the model")
    return _Weights()


async def chat_completions(call: ApiCall, body: openai.ChatBody) -> openai.ChatCompletion | RawReply:
    """Reply to a chat, by the model's own template → one reply, or a stream of events"""
    plan = await plan_chat(call, body)
    # It would be held while the samples run, and may be large.
    del body
    return await complete(call, plan)


async def plan_chat(
    call: ApiCall, body: openai.ChatBody, turns: RolloutTurns | None = None
) -> CompletionPlan[openai.ChatCompletion]:
    """`turns` record the replies, and make the prompt continue an earlier one."""
    body.check()
    messages = body.template_messages()
    weights, room, text = await _prepare(call, body.model)
    chat = ChatPrompt(messages, body.offered_tools, body.chat_template_kwargs or {}, room)
    grammar = await _checked_grammar(call, body)
    prompt = await _chat_tokens(call, body.prompt_token_ids, chat, text, turns)
    params = body.params(body.token_limit, text.end_tokens, grammar)
    template = SampleOperation(
        "", 0, _pack(prompt), params, body.samples, topk_sample_logprobs=body.top, stream=bool(body.stream)
    )
    return CompletionPlan(weights, room, [template], ChatForm(call, body, text, [template]), turns)


async def _checked_grammar(call: ApiCall, body: openai.ChatBody) -> str:
    grammar = await asyncio.to_thread(body.grammar)
    if grammar:
        check_library()
        checked = await call.context.grammars.render(GrammarCheck(grammar))
        if checked.error:
            field = "tools" if body.response_format is None else "response_format"
            raise invalid_field(field, f"the schema cannot be enforced: {checked.error}")
    return grammar


async def _chat_tokens(
    call: ApiCall, sent: Sequence[int] | None, chat: ChatPrompt, text: ModelText, turns: RolloutTurns | None
) -> Sequence[int]:
    if sent is None and turns is not None:
        return await turns.chat_prompt(chat, text)
    if sent is None:
        return await render_prompt(chat, text, call.context.templates)
    if turns is not None:
        await asyncio.to_thread(turns.add_prompt, sent)
    return sent


async def completions(call: ApiCall, body: openai.CompletionBody) -> openai.TextCompletion | RawReply:
    """Continue texts, or tokens → one reply, or a stream of events"""
    plan = await plan_texts(call, body)
    del body
    return await complete(call, plan)


async def plan_texts(
    call: ApiCall, body: openai.CompletionBody, turns: RolloutTurns | None = None
) -> CompletionPlan[openai.TextCompletion]:
    """`turns` record the samples."""
    body.check()
    sent = body.prompts()
    weights, room, text = await _prepare(call, body.model)
    prompts = await asyncio.to_thread(
        lambda: [text.encode(each, room) if isinstance(each, str) else each for each in sent]
    )
    if body.generated == 0:
        # What is sampled is not shown.
        turns = None
    if turns is not None:
        for prompt in prompts:
            await asyncio.to_thread(turns.add_prompt, prompt)
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
            # The log probabilities of a prompt come first in a reply, and are there with the result.
            stream=bool(body.stream) and body.generated > 0 and not wants_prompt,
        )
        for prompt in prompts
    ]
    return CompletionPlan(weights, room, templates, TextForm(call, body, text, templates), turns)


async def _prepare(call: ApiCall, model: str) -> tuple[_Weights, int, ModelText]:
    """Returns what a request samples from, the tokens that fit, and the tokenizer."""
    weights = await _find_weights(call, model)
    settings = call.context.settings
    server = await call.request(queries.DescribeServer(), views.ServerView)
    room = min(server.max_context or settings.sampling.cached_tokens, settings.sampling.cached_tokens)
    return weights, room, await call.context.text.load()


def _pack(tokens: Sequence[int]) -> bytes:
    if not tokens:
        raise invalid_field("prompt", "has no tokens")
    return pack_tokens(tokens)


@dataclass(frozen=True)
class CompletionPlan(Generic[Reply]):
    """The samples of a request, and how they are written."""

    weights: _Weights
    room: int
    templates: Sequence[SampleOperation]
    """The operations without their sampler and their numbers there."""
    form: CompletionForm[Reply]
    turns: RolloutTurns | None
    """Records the samples, if they are of a rollout session."""


Record = Callable[[int, SampleResult], Awaitable[None]]
"""Called with the samples of each prompt before the client gets them."""


async def complete(call: ApiCall, plan: CompletionPlan[Reply]) -> Reply | RawReply:
    weights, templates, form, turns = plan.weights, plan.templates, plan.form, plan.turns
    size = _check_size(templates, plan.room)
    if turns is not None:
        await turns.check_room(form.samples, size)
    sampler = ""

    def make(sampler_id: str, numbers: Iterator[int]) -> Sequence[SampleOperation]:
        nonlocal sampler
        sampler = sampler_id
        named = partial(msgspec.structs.replace, sampler_id=sampler_id)
        return [named(each, seq_id=next(numbers)) for each in templates]

    futures = await call.context.samplers.submit(call, weights.source, weights.version, make)
    call.shrink_reservation(sum(len(each.prompt) for each in templates))
    reply_id = form.reply_id(futures[0])
    reply = TurnReply(reply_id, form.model, weights.version, sampler, form.temperature, form.read_reply)

    async def record(index: int, result: SampleResult) -> None:
        if turns is not None:
            await turns.record(index, result, reply)

    if form.stream:
        return _stream_reply(call, futures, form, record)
    results = await _results_or_abort(call, futures)
    for index, result in enumerate(results):
        await record(index, result)
    return await asyncio.to_thread(form.reply, futures[0], results)


def _check_size(operations: Sequence[SampleOperation], room: int) -> int:
    """Returns the most bytes of the results. Refuses, before anything is made durable, what no rank can take, and what
    would not fit into a reply."""
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
    return size


async def _await_outcome(
    call: ApiCall, future_id: str, counts: Sequence[int] = ()
) -> SampleResult | Sequence[SampledPart]:
    """The result of a sample, or tokens beyond these counts before that. A result is durable, so a failure of the
    orchestrator only delays it."""
    poll_s = call.context.settings.server.poll_s
    while True:
        try:
            outcome = await (call.watch_tokens(future_id, counts, poll_s) if counts else call.watch(future_id, poll_s))
        except StrataError as error:
            if error.code not in (Code.UNAVAILABLE, Code.EXHAUSTED, Code.DEADLINE):
                raise
            await asyncio.sleep(RETRY_S)
            continue
        if isinstance(outcome, views.QueuePosition):
            await call.reauthenticate()
            continue
        if isinstance(outcome, views.TokensSampled):
            return outcome.parts
        if isinstance(outcome.result, ops.SampleDone):
            return await asyncio.to_thread(read_sample, call, outcome.result)
        if not isinstance(outcome.result, ops.Failed):
            raise StrataError(Code.INTERNAL, f"{future_id} is no sample")
        code = Code.INVALID if outcome.result.category == "user" else Code.UNAVAILABLE
        raise StrataError(code, outcome.result.message)


async def _await_result(call: ApiCall, future_id: str) -> SampleResult:
    outcome = await _await_outcome(call, future_id)
    assert isinstance(outcome, SampleResult), "no tokens were asked for"
    return outcome


async def _results_or_abort(call: ApiCall, futures: Sequence[str]) -> Sequence[SampleResult]:
    """All results; if the client disconnects or one fails, the others are cancelled."""
    try:
        return await until_disconnect(call, asyncio.Event(), _await_results(call, futures))
    except BaseException:
        await abort_all(call, futures)
        raise


async def _await_results(call: ApiCall, futures: Sequence[str]) -> Sequence[SampleResult]:
    return await asyncio.gather(*(_await_result(call, future_id) for future_id in futures))


def _stream_reply(call: ApiCall, futures: Sequence[str], form: CompletionForm[Any], record: Record) -> RawReply:
    unfinished = set(futures)

    async def abort_unfinished() -> None:
        """Not in the stream itself: it never starts if its client has left before."""
        if unfinished:
            # In a task of its own: this one may be cancelled already.
            call.context.samplers.abort_later(call, [*unfinished])

    content = _stream(call, futures, unfinished, form, record)
    return RawReply(content, media_type=STREAM, headers={"X-Accel-Buffering": "no"}, close=abort_unfinished)


async def _stream(
    call: ApiCall, futures: Sequence[str], unfinished: set[str], form: CompletionForm[Any], record: Record
) -> AsyncIterator[bytes]:
    """Tokens when they are sampled, and the end of each sample, which takes it out of `unfinished`."""
    name = futures[0]
    try:
        async with aclosing(_outcomes(call, futures, form)) as outcomes:
            async for index, outcome in outcomes:
                if isinstance(outcome, SampleResult):
                    unfinished.discard(futures[index])
                    await record(index, outcome)
                for event in await asyncio.to_thread(form.events, name, index, outcome) if outcome else WAITING:
                    yield event
        last = form.usage_chunk(name)
        if last is not None:
            yield encode_event(last)
    except StrataError as error:
        # The head of the reply is sent, so the error is an event.
        yield encode_event(openai_error(error, STATUS_OF[error.code]))
    yield b"data: [DONE]\n\n"


async def _outcomes(
    call: ApiCall, futures: Sequence[str], form: CompletionForm[Any]
) -> AsyncGenerator[tuple[int, SampleResult | Sequence[SampledPart]]]:
    """New tokens of each prompt until its result; none, now and then, while there are none. The next tokens of a
    prompt are asked for when these were sent: a client that reads slowly gets more of them at a time."""

    def wait_for(index: int) -> asyncio.Task[SampleResult | Sequence[SampledPart]]:
        return asyncio.create_task(_await_outcome(call, futures[index], form.counts(index)), name=str(index))

    clock, recheck_s = call.context.clock, call.context.settings.server.poll_s
    checked_s, waiting = clock.monotonic_s(), set(map(wait_for, range(len(futures))))
    try:
        while waiting:
            done, waiting = await asyncio.wait(waiting, timeout=COMMENT_S, return_when=asyncio.FIRST_COMPLETED)
            if clock.monotonic_s() >= checked_s + recheck_s:
                await call.reauthenticate()
                checked_s = clock.monotonic_s()
            if not done:
                yield 0, ()
            for task in done:
                index, outcome = int(task.get_name()), task.result()
                yield index, outcome
                if not isinstance(outcome, SampleResult):
                    waiting.add(wait_for(index))
    finally:
        for task in waiting:
            task.cancel()


ROUTES = (
    Route("POST", "/v1/chat/completions", RESEARCHER, chat_completions, MAX_BODY, owner="tenant"),
    Route("POST", "/v1/completions", RESEARCHER, completions, MAX_BODY, owner="tenant"),
    Route("GET", "/v1/models", VIEWER, list_models, KIB),
    Route("GET", "/v1/models/{model:path}", VIEWER, show_model, KIB),
)
