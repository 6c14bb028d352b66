"""What a request for samples needs, and whether it can be fulfilled at all."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final

import msgspec
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from strata.base.errors import Code, StrataError
from strata.train.core.sampling import Sample, check_result_size
from strata.train.runner.model.base import BaseModel
from strata.train.runner.passes.tensors import invalid
from strata.train.runner.sampling.kv_cache import place_length
from strata.train.runner.sampling.sequences import Decode, tokens_from

MOST_SAMPLES: Final = 1024
MOST_TOP: Final = 1024


class SamplerLimits(msgspec.Struct, frozen=True, kw_only=True):
    """Of each rank, but for `requests`."""

    sequences: int = 64
    """That are sampled at once; more wait."""
    cached_tokens: int = 32768
    """That can be remembered at once: the sum over the sequences, each as long as it may become."""
    prompt_tokens: int = 2048
    """Of prompts that are computed before those who run go on. A longer prompt is computed alone."""
    samplers: int = 64
    requests: int = 1024
    """That run or wait, on all ranks together; more are refused."""


class Terms:
    def __init__(self, base: BaseModel, limits: SamplerLimits) -> None:
        self.ends = _end_tokens(base)
        """Tokens with which the model itself ends a text."""
        self._vocabulary = base.vocabulary
        self._max_context = base.max_context
        self._cached = limits.cached_tokens
        self._path = base.settings.model
        self._tokenizer: PreTrainedTokenizerBase | None = None

    def check(self, sample: Sample) -> None:
        params = sample.params
        _require(1 <= sample.num_samples <= MOST_SAMPLES, f"num_samples must be 1 to {MOST_SAMPLES}")
        _require(len(sample.prompt) % 4 == 0 and sample.length > 0, "the prompt has no tokens")
        _require(params.max_tokens is None or params.max_tokens > 0, "max_tokens must be at least 1")
        _require(self.limit(sample) > 0, f"a prompt of {sample.length} tokens leaves no room for one more")
        tokens = tokens_from(sample.prompt)
        known = bool(((tokens >= 0) & (tokens < self._vocabulary)).all())
        _require(known, f"the prompt has tokens outside the vocabulary of {self._vocabulary}")
        _require(math.isfinite(params.temperature) and params.temperature >= 0, "temperature must be 0 or more")
        _require(params.top_k >= -1, "top_k must be -1, for no limit, or more")
        _require(0 < params.top_p <= 1, "top_p must be above 0 and at most 1")
        tops = (sample.topk_prompt_logprobs, sample.topk_sample_logprobs)
        _require(min(tops) >= 0 and max(tops) <= MOST_TOP, f"top-k logprobs are for 0 to {MOST_TOP} tokens")
        last = sample.prompt_logprobs_last_n
        _require(last is None or 1 <= last < sample.length, "prompt_logprobs_last_n must be 1 to all tokens but one")
        _require(0 <= sample.prompt_draws <= MOST_TOP, f"prompt_alt_tokens_k must be 0 to {MOST_TOP}")
        if sample.targets is not None:
            targets = tokens_from(sample.targets.tokens)
            known = bool(((targets >= -1) & (targets < self._vocabulary)).all())
            _require(known, f"target_prompt_logprobs has tokens outside the vocabulary of {self._vocabulary}")
        _require("" not in params.stop_strings, "a stop string is empty")
        if params.stop_strings:
            self.decoder()
        needed = self.place_length(sample)
        _require(needed <= self._cached, f"it needs {needed} cached tokens, and a rank has room for {self._cached}")
        check_result_size(sample, self.limit(sample))

    def limit(self, sample: Sample) -> int:
        """Tokens that each sample may have."""
        wanted = sample.params.max_tokens
        if wanted is None:
            return min(self._max_context, self._cached) - sample.length
        return min(wanted, self._max_context - sample.length)

    def place_length(self, sample: Sample) -> int:
        """What each sequence reserves. The last token that is sampled need not be remembered."""
        return place_length(sample.length + self.limit(sample) - 1, min(self._max_context, self._cached))

    def decoder(self) -> Decode:
        tokenizer = self._tokenizer or self._load()
        self._tokenizer = tokenizer

        def decode(tokens: Sequence[int]) -> str:
            text = tokenizer.decode(list(tokens), skip_special_tokens=False, clean_up_tokenization_spaces=False)
            assert isinstance(text, str)
            return text

        return decode

    def _load(self) -> PreTrainedTokenizerBase:
        try:
            found = AutoTokenizer.from_pretrained(self._path, local_files_only=True, trust_remote_code=False)
        except (OSError, ValueError) as error:
            raise StrataError(Code.UNSUPPORTED, f"stop strings need the model's tokenizer: {error}") from error
        assert isinstance(found, PreTrainedTokenizerBase)
        return found


def _require(true: bool, message: str) -> None:  # noqa: FBT001 - it reads as an assertion
    if not true:
        raise invalid(message)


def _end_tokens(base: BaseModel) -> frozenset[int]:
    """As the model's files say it; what belongs to generating comes before what belongs to the model."""
    generation = getattr(base.lm, "generation_config", None)
    for config in (generation, base.lm.config.get_text_config(decoder=True)):
        found = getattr(config, "eos_token_id", None)
        if found is not None:
            return frozenset(found if isinstance(found, list | tuple) else [found])
    return frozenset()
