"""How large an answer may be: what clients usually ask for fits, and whatever could grow without end is refused."""

from __future__ import annotations

from typing import Any

import pytest

from strata.base.errors import Code, StrataError
from strata.train.core.sampling import (
    MAX_RESULT_BYTES,
    Draws,
    Layout,
    SampledSequence,
    SampleOperation,
    SampleParams,
    SampleResult,
    TargetLogprobs,
    Targets,
    TopLogprobs,
    check_result_size,
    encode_result,
    result_bytes,
)

LONG = 32_768


def asked(prompt: int = 8, **fields: Any) -> SampleOperation:
    return SampleOperation("sampler", 0, bytes(4 * prompt), SampleParams(), **fields)


@pytest.mark.parametrize(
    ("sample", "tokens"),
    [
        (asked(LONG, prompt_logprobs=True), 1),
        (asked(131_072, prompt_logprobs=True, topk_prompt_logprobs=20), 1),
        (asked(num_samples=64, topk_sample_logprobs=20), 4096),
        (asked(num_samples=64), LONG),
        (asked(num_samples=1024), 4096),
        (asked(LONG, topk_prompt_logprobs=20, prompt_draws=20, num_samples=16, topk_sample_logprobs=20), 4096),
    ],
)
def test_what_clients_usually_ask_for_can_be_answered(sample: SampleOperation, tokens: int) -> None:
    check_result_size(sample, tokens)


@pytest.mark.parametrize(
    ("sample", "tokens", "said"),
    [
        (asked(LONG, topk_prompt_logprobs=1024), 1, "a prompt of 32768"),
        (asked(LONG, prompt_draws=1024), 1, "a prompt of 32768"),
        (asked(num_samples=1024, topk_sample_logprobs=1024), 4096, "could have 32800 MiB"),
        (asked(topk_sample_logprobs=1024), 8192, "num_samples 1, up to 8192 tokens each"),
        (asked(num_samples=1024), LONG, "num_samples 1024, up to 32768 tokens each"),
    ],
)
def test_an_answer_that_could_fill_the_memory_is_refused_in_words(
    sample: SampleOperation, tokens: int, said: str
) -> None:
    with pytest.raises(StrataError, match=said) as refused:
        check_result_size(sample, tokens)
    assert refused.value.code is Code.INVALID


def test_the_most_is_allowed_and_a_byte_more_is_not() -> None:
    tokens = MAX_RESULT_BYTES // 8
    check_result_size(asked(), tokens)
    with pytest.raises(StrataError, match="64 MiB is the most"):
        check_result_size(asked(1, prompt_logprobs=True), tokens)


def test_the_size_that_is_reckoned_with_is_that_of_the_result() -> None:
    """But for what every sequence has around its numbers, a few dozen bytes."""
    length, tokens, samples, k, top, draws = 100, 50, 3, 4, 5, 6
    targets = Targets(bytes(4 * 7 * (length - 1)), Layout((length - 1, 7)))
    sample = asked(
        length,
        num_samples=samples,
        topk_sample_logprobs=k,
        prompt_logprobs=True,
        topk_prompt_logprobs=top,
        prompt_draws=draws,
        targets=targets,
    )
    width = 4 * tokens
    sequence = SampledSequence(
        bytes(width), bytes(width), "length", TopLogprobs(bytes(width * k), bytes(width * k), k, tokens)
    )
    result = SampleResult(
        [sequence] * samples,
        bytes(4 * length),
        TopLogprobs(bytes(4 * top * length), bytes(4 * top * length), top, length),
        TargetLogprobs(bytes(len(targets.tokens)), targets.layout),
        Draws(bytes(4 * draws * (length - 1)), bytes(4 * draws * (length - 1)), draws, length - 1),
    )
    assert result_bytes(sample, tokens) == pytest.approx(len(encode_result(result)), rel=0.05)
