"""What every engine adapter keeps, whatever engine is behind it."""

from __future__ import annotations

import array
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

import msgspec
import pytest

from strata.base.errors import Code, StrataError
from strata.train.core.sampling import SampledPart, SampleOperation, SampleParams
from strata.train.endpoints.engine import Engine, ModelVersion
from strata.train.endpoints.vllm import VllmEngine

Ask = Callable[[ModelVersion], Awaitable[Sequence[int] | str]]


@dataclass(frozen=True)
class Case:
    engine: Engine
    first: ModelVersion
    second: ModelVersion
    """Other weights of the same model."""
    ask: Ask
    """What the engine itself says under a version's name, not through the adapter."""


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
SAMPLERS = (*ADAPTERS, a_streamed_sample_reports_its_tokens_and_is_the_plain_one)
"""Of engines that samples are routed to."""
WHOLE = (*ADAPTERS[:2], *SAMPLERS[-1:])
SLEEPERS = (an_engine_that_slept_has_what_it_had,)
"""Of engines on devices: vLLM has no sleep on CPUs."""
