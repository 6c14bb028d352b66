"""What every engine adapter keeps, whatever engine is behind it."""

from __future__ import annotations

import array
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import msgspec
import numpy as np
import pytest
import torch
from transformers import LogitsProcessorList, TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from strata.base.errors import Code, StrataError
from strata.train.core.sampling import MISSING_LOGPROB, SampledPart, SampledSequence, SampleOperation, SampleParams
from strata.train.endpoints.engine import Engine, ModelVersion
from strata.train.endpoints.vllm import VllmEngine

Ask = Callable[[ModelVersion], Awaitable[Sequence[int] | str]]
PROMPT: Final = (72, 101, 108, 108, 111)
NEAR: Final = 2e-3
"""Nats by which two programs may differ that compute the same in 32 bits."""
UNLIKELY: Final = 50.0
"""Of a chi-squared with four degrees of freedom: what a thing of one in ten million gives."""


@dataclass(frozen=True)
class Case:
    engine: Engine
    first: ModelVersion
    second: ModelVersion
    """Other weights of the same model."""
    ask: Ask
    """What the engine itself says under a version's name, not through the adapter."""
    logits: Callable[[ModelVersion, Sequence[int]], Any] | None = None
    """What the model says after these tokens, by a program that is neither ours nor the engine."""
    decode: Callable[[Sequence[int]], str] | None = None
    context: int = 512
    """Tokens of the longest sequence that the engine takes."""


async def an_engine_has_what_it_was_told_of_and_nothing_else(case: Case) -> None:
    engine = case.engine
    assert not {case.first.name, case.second.name} & set(await engine.versions())
    await engine.load_version(case.first)
    assert case.first.name in await engine.versions()
    told = await case.ask(case.first)
    await engine.load_version(case.first)
    assert (await engine.versions()).count(case.first.name) == 1
    assert await case.ask(case.first) == told
    await engine.load_version(case.second)
    assert await case.ask(case.second) != told
    assert case.second.name in await engine.versions()


async def files_that_are_gone_are_refused_and_the_engine_lives_on(case: Case) -> None:
    lost = ModelVersion("run-v999", case.first.folder.with_name("gone"), full=case.first.full)
    with pytest.raises(StrataError) as refused:
        await case.engine.load_version(lost)
    assert refused.value.code is Code.NOT_FOUND
    assert lost.name not in await case.engine.versions()
    await case.engine.load_version(case.second)
    await case.ask(case.second)


async def what_is_let_go_of_is_gone_and_the_other_stays(case: Case) -> None:
    """Not of models of full fine-tunes, of which there is one at a time."""
    engine = case.engine
    await engine.load_version(case.first)
    await engine.load_version(case.second)
    told = await case.ask(case.second)
    for _ in range(2):
        await engine.unload_version(case.first.name)
        assert case.first.name not in await engine.versions()
    assert await case.ask(case.second) == told
    await engine.load_version(case.first)
    assert case.first.name in await engine.versions()


async def a_streamed_sample_reports_its_tokens_and_is_the_plain_one(case: Case) -> None:
    prompt = array.array("i", [5, 6, 7]).tobytes()
    await case.engine.load_version(case.second)
    for temperature, samples in ((0.0, 2), (1.0, 2)):
        params = SampleParams(max_tokens=12, seed=3, temperature=temperature, end_tokens=False)
        plain = SampleOperation("s", 1, prompt, params, samples)
        expected = await case.engine.sample(case.second, plain, 3, _unexpected)
        parts: list[SampledPart] = []
        drawn = await case.engine.sample(case.second, msgspec.structs.replace(plain, stream=True), 3, parts.append)
        assert [each.tokens for each in drawn.sequences] == [each.tokens for each in expected.sequences]
        for index, sequence in enumerate(drawn.sequences):
            told = [each for each in parts if each.index == index]
            assert [each.start for each in told] == [0, *(each.end for each in told[:-1])]
            assert len(told) > 2
            tokens = b"".join(each.tokens for each in told)
            assert sequence.tokens.startswith(tokens)
            assert sequence.logprobs.startswith(b"".join(each.logprobs for each in told))
            assert len(tokens) < len(sequence.tokens), "the last token comes with the result"


def _processed(case: Case, tokens: Sequence[int], params: SampleParams) -> torch.Tensor:
    """Log probabilities of the distribution that the next token is drawn from, by transformers."""
    assert case.logits is not None
    warpers = LogitsProcessorList()
    if params.temperature not in (0.0, 1.0):
        warpers.append(TemperatureLogitsWarper(params.temperature))
    if params.top_k > 0:
        warpers.append(TopKLogitsWarper(params.top_k))
    if params.top_p < 1:
        warpers.append(TopPLogitsWarper(params.top_p))
    ids: Any = torch.tensor([list(tokens)])
    scores: Any = torch.as_tensor(case.logits(case.second, tokens), dtype=torch.float32)[None]
    return torch.log_softmax(warpers(ids, scores) if warpers else scores, dim=-1)[0]


def _tokens(sequence: SampledSequence) -> list[int]:
    return [int(each) for each in np.frombuffer(sequence.tokens, "<i4")]


async def _sample(case: Case, params: SampleParams, samples: int = 1, **more: Any) -> Any:
    prompt = array.array("i", PROMPT).tobytes()
    await case.engine.load_version(case.second)
    operation = SampleOperation("s", 1, prompt, params, samples, **more)
    return await case.engine.sample(case.second, operation, 7, _unexpected)


async def log_probabilities_are_those_of_the_distribution_that_is_drawn_from(case: Case) -> None:
    for temperature, top_k, top_p in ((0.7, 5, 1.0), (1.3, -1, 0.8), (0.5, 20, 0.9), (1.0, -1, 1.0), (0.0, 3, 0.5)):
        params = SampleParams(max_tokens=3, temperature=temperature, top_k=top_k, top_p=top_p, end_tokens=False)
        result = await _sample(case, params, 4, topk_sample_logprobs=7)
        for sequence in result.sequences:
            assert sequence.top is not None
            tops = np.frombuffer(sequence.top.tokens, "<i4").reshape(3, 7)
            top_values = np.frombuffer(sequence.top.logprobs, "<f4").reshape(3, 7)
            drawn = _tokens(sequence)
            for place, reported in enumerate(np.frombuffer(sequence.logprobs, "<f4")):
                expected = _processed(case, [*PROMPT, *drawn[:place]], params if temperature else SampleParams())
                assert abs(float(expected[drawn[place]]) - reported) < NEAR, (params, place)
                values, likeliest = expected.topk(7)
                possible = int(torch.isfinite(values).sum())
                assert tops[place, :possible].tolist() == likeliest[:possible].tolist()
                assert np.abs(top_values[place, :possible] - values[:possible].numpy()).max() < NEAR
                assert set(top_values[place, possible:]) <= {np.float32(MISSING_LOGPROB)}


async def tokens_are_drawn_as_often_as_they_are_likely(case: Case) -> None:
    params = SampleParams(max_tokens=1, temperature=1.5, top_k=5, end_tokens=False)
    samples = 1000
    result = await _sample(case, params, samples)
    counts = Counter(_tokens(sequence)[0] for sequence in result.sequences)
    shares = _processed(case, PROMPT, params).exp()
    expected = {token: samples * float(shares[token]) for token in shares.nonzero()[:, 0].tolist()}
    assert counts.keys() <= expected.keys()
    distance = sum((counts[token] - count) ** 2 / count for token, count in expected.items())
    assert distance < UNLIKELY, (counts, expected)


async def log_probabilities_of_a_prompt_are_the_models_own(case: Case) -> None:
    params = SampleParams(max_tokens=1, temperature=0.5, end_tokens=False)
    for last in (None, 2):
        result = await _sample(
            case, params, 2, prompt_logprobs=True, topk_prompt_logprobs=3, prompt_logprobs_last_n=last
        )
        first = 1 if last is None else len(PROMPT) - last
        own = np.frombuffer(result.prompt_logprobs, "<f4")
        assert result.top_prompt is not None
        tops = np.frombuffer(result.top_prompt.tokens, "<i4").reshape(len(PROMPT), 3)
        top_values = np.frombuffer(result.top_prompt.logprobs, "<f4").reshape(len(PROMPT), 3)
        assert np.isnan(own[:first]).all()
        assert set(top_values[:first].flat) == {np.float32(MISSING_LOGPROB)}
        for place in range(first, len(PROMPT)):
            expected = _processed(case, PROMPT[:place], SampleParams())
            assert abs(float(expected[PROMPT[place]]) - own[place]) < NEAR
            values, likeliest = expected.topk(3)
            assert tops[place].tolist() == likeliest.tolist()
            assert np.abs(top_values[place] - values.numpy()).max() < NEAR
    alone = await _sample(case, params, prompt_logprobs=True)
    assert alone.top_prompt is None


async def a_stop_string_ends_a_sample_with_the_token_that_completes_it(case: Case) -> None:
    assert case.decode is not None
    params = SampleParams(max_tokens=60, temperature=1.2, end_tokens=False)
    whole = _tokens((await _sample(case, params)).sequences[0])
    pairs = [case.decode(whole[at : at + 2]) for at in range(8, 58)]
    stop = next(text for text in pairs if len(text) > 1 and text.isascii() and text.isprintable())
    end = next(at for at in range(1, 61) if stop in case.decode(whole[:at]))
    stopping = msgspec.structs.replace(params, stop_strings=("never said \N{SNOWMAN}", stop))
    (sequence,) = (await _sample(case, stopping)).sequences
    assert (_tokens(sequence), sequence.stop_reason) == (whole[:end], "stop")
    token = msgspec.structs.replace(params, stop_tokens=(whole[4],))
    (sequence,) = (await _sample(case, token)).sequences
    assert (_tokens(sequence), sequence.stop_reason) == (whole[: whole.index(whole[4]) + 1], "stop")


async def a_sample_without_a_limit_ends_with_the_engines_context(case: Case) -> None:
    (sequence,) = (await _sample(case, SampleParams(temperature=0.9, end_tokens=False))).sequences
    assert (len(_tokens(sequence)), sequence.stop_reason) == (case.context - len(PROMPT), "length")
    with pytest.raises(StrataError) as refused:
        await _sample(case, SampleParams(max_tokens=case.context, end_tokens=False))
    assert refused.value.code is Code.UNSUPPORTED


async def an_engine_that_reports_other_log_probabilities_draws_only_what_it_reports(case: Case) -> None:
    """Of vLLM without `--logprobs-mode processed_logprobs`: nothing silently means something else."""
    for params in (SampleParams(max_tokens=1), SampleParams(max_tokens=1, temperature=0, top_k=3)):
        await _sample(case, params)
    for params in (SampleParams(max_tokens=1, temperature=0.5), SampleParams(max_tokens=1, top_k=3)):
        with pytest.raises(StrataError, match="processed_logprobs") as refused:
            await _sample(case, params)
        assert refused.value.code is Code.UNSUPPORTED


async def an_engine_that_slept_has_what_it_had(case: Case) -> None:
    """Of vLLM, which the server starts: twice, because a confirmation may be lost."""
    engine = case.engine
    assert isinstance(engine, VllmEngine)
    await engine.load_version(case.first)
    told = await case.ask(case.first)
    for _ in range(2):
        await engine.sleep()
        assert await engine.is_asleep()
    assert case.first.name in await engine.versions()
    for _ in range(2):
        await engine.wake()
        assert not await engine.is_asleep()
    assert await case.ask(case.first) == told


def _unexpected(part: SampledPart) -> None:
    raise AssertionError(f"it is not streamed: {part}")


ADAPTERS = (
    an_engine_has_what_it_was_told_of_and_nothing_else,
    files_that_are_gone_are_refused_and_the_engine_lives_on,
    what_is_let_go_of_is_gone_and_the_other_stays,
)
DRAWN = (
    a_streamed_sample_reports_its_tokens_and_is_the_plain_one,
    log_probabilities_are_those_of_the_distribution_that_is_drawn_from,
    tokens_are_drawn_as_often_as_they_are_likely,
    log_probabilities_of_a_prompt_are_the_models_own,
    a_stop_string_ends_a_sample_with_the_token_that_completes_it,
    a_sample_without_a_limit_ends_with_the_engines_context,
)
SAMPLERS = (*ADAPTERS, *DRAWN)
"""Of engines that samples are routed to."""
WHOLE = (*ADAPTERS[:2], *DRAWN)
SLEEPERS = (an_engine_that_slept_has_what_it_had,)
"""Of engines on devices: vLLM has no sleep on CPUs."""
