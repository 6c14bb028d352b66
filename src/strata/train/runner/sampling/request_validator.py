"""Validates sample requests against model and rank: at most 1,024 samples and top-k, the limits of `SamplerLimits`,
stop tokens, and the length that is reserved.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Final

import msgspec
import torch
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from strata.base.errors import Code, StrataError
from strata.train.core.sampling import MAX_TOP_K, SampleOperation, SampleParams, check_result_size
from strata.train.grammar import GrammarCompiler
from strata.train.runner.model.base import BaseModel
from strata.train.runner.sampling.kv_cache import slot_length
from strata.train.runner.sampling.logits_shape import LogitsShape, Matcher
from strata.train.runner.sampling.sequences import Decode, tokens_from

MAX_SAMPLES: Final = 1024


class SamplerLimits(msgspec.Struct, frozen=True, kw_only=True):
    """The limits of each rank, except `requests`."""

    sequences: int = 64
    """Sequences that run at once; more wait."""
    cached_tokens: int = 32768
    """Capacity of the KV cache: the sum over the sequences, each as long as it may become."""
    prefix_tokens: int = 8192
    """Tokens of earlier prompts that are kept for reuse, in room of the KV cache that no sequence needs."""
    prompt_tokens: int = 2048
    """Tokens of one prefill, before running sequences decode again. A longer prompt has a prefill of its own."""
    samplers: int = 64
    requests: int = 1024
    """Requests that run or wait, on all ranks together; more are rejected."""


class RequestValidator:
    def __init__(self, base: BaseModel, limits: SamplerLimits) -> None:
        self.end_tokens = _end_tokens(base)
        """End-of-sequence tokens of the model."""
        self._vocabulary = base.vocabulary
        self._max_context = base.max_context
        self._cached = limits.cached_tokens
        self._path = base.settings.model
        self._tokenizer: PreTrainedTokenizerBase | None = None
        self._grammars: GrammarCompiler | None = None

    def check(self, sample: SampleOperation, routing_bytes: int = 0) -> None:
        """The routing of a token takes so many bytes."""
        params = sample.params
        _require(1 <= sample.num_samples <= MAX_SAMPLES, f"num_samples must be 1 to {MAX_SAMPLES}")
        _require(len(sample.prompt) % 4 == 0 and sample.length > 0, "the prompt has no tokens")
        _require(params.max_tokens is None or params.max_tokens > 0, "max_tokens must be at least 1")
        _require(self.limit(sample) > 0, f"a prompt of {sample.length} tokens leaves no room for one more")
        tokens = tokens_from(sample.prompt)
        in_vocabulary = bool(((tokens >= 0) & (tokens < self._vocabulary)).all())
        _require(in_vocabulary, f"the prompt has tokens outside the vocabulary of {self._vocabulary}")
        _require(math.isfinite(params.temperature) and params.temperature >= 0, "temperature must be 0 or more")
        _require(params.top_k >= -1, "top_k must be -1, for no limit, or more")
        _require(0 < params.top_p <= 1, "top_p must be above 0 and at most 1")
        tops = (sample.topk_prompt_logprobs, sample.topk_sample_logprobs)
        _require(min(tops) >= 0 and max(tops) <= MAX_TOP_K, f"top-k logprobs are for 0 to {MAX_TOP_K} tokens")
        last = sample.prompt_logprobs_last_n
        _require(last is None or 1 <= last < sample.length, "prompt_logprobs_last_n must be 1 to all tokens but one")
        _require(0 <= sample.prompt_draws <= MAX_TOP_K, f"prompt_alt_tokens_k must be 0 to {MAX_TOP_K}")
        if sample.targets is not None:
            targets = tokens_from(sample.targets.tokens)
            in_vocabulary = bool(((targets >= -1) & (targets < self._vocabulary)).all())
            _require(in_vocabulary, f"target_prompt_logprobs has tokens outside the vocabulary of {self._vocabulary}")
        self._check_shape(params)
        _require("" not in params.stop_strings, "a stop string is empty")
        if params.stop_strings:
            self.decoder()
        needed = self.slot_length(sample)
        _require(needed <= self._cached, f"it needs {needed} cached tokens, and a rank has room for {self._cached}")
        check_result_size(sample, self.limit(sample), routing_bytes)

    def limit(self, sample: SampleOperation) -> int:
        """The most tokens of each sample."""
        wanted = sample.params.max_tokens
        if wanted is None:
            return min(self._max_context, self._cached) - sample.length
        return min(wanted, self._max_context - sample.length)

    def slot_length(self, sample: SampleOperation) -> int:
        """The tokens that each sequence reserves in the KV cache. The last token that is sampled need not be cached."""
        return slot_length(sample.length + self.limit(sample) - 1, min(self._max_context, self._cached))

    def _check_shape(self, params: SampleParams) -> None:
        penalties = (params.presence_penalty, params.frequency_penalty, *(bias for _, bias in params.logit_bias))
        _require(all(map(math.isfinite, penalties)), "penalties and biases must be finite numbers")
        factor = params.repetition_penalty
        _require(math.isfinite(factor) and factor > 0, "repetition_penalty must be above 0")
        _require(0 <= params.min_p <= 1, "min_p must be 0 to 1")
        in_vocabulary = all(0 <= token < self._vocabulary for token, _ in params.logit_bias)
        _require(in_vocabulary, f"logit_bias has tokens outside the vocabulary of {self._vocabulary}")
        if params.grammar:
            self._matcher(params.grammar)

    def shape_maker(self, params: SampleParams, prompt: torch.Tensor) -> Callable[[], LogitsShape] | None:
        """Makes what shapes the logits of each sequence; None if nothing does."""
        if not params.shapes_logits:
            return None

        def make() -> LogitsShape:
            matcher = self._matcher(params.grammar) if params.grammar else None
            return LogitsShape(params, prompt, self._vocabulary, matcher)

        return make

    def _matcher(self, grammar: str) -> Matcher:
        if self._grammars is None:
            self._grammars = GrammarCompiler(self._load_tokenizer(), self.end_tokens, self._vocabulary)
        return self._grammars.matcher(grammar)

    def decoder(self) -> Decode:
        tokenizer = self._load_tokenizer()

        def decode(tokens: Sequence[int]) -> str:
            text = tokenizer.decode(list(tokens), skip_special_tokens=False, clean_up_tokenization_spaces=False)
            assert isinstance(text, str)
            return text

        return decode

    def _load_tokenizer(self) -> PreTrainedTokenizerBase:
        if self._tokenizer is not None:
            return self._tokenizer
        try:
            tokenizer = AutoTokenizer.from_pretrained(self._path, local_files_only=True, trust_remote_code=False)
        except (OSError, ValueError) as error:
            reason = f"stop strings and grammars need the model's tokenizer: {error}"
            raise StrataError(Code.UNSUPPORTED, reason) from error
        assert isinstance(tokenizer, PreTrainedTokenizerBase)
        self._tokenizer = tokenizer
        return tokenizer


def _require(condition: bool, message: str) -> None:  # noqa: FBT001 - it reads as an assertion
    if not condition:
        raise StrataError(Code.INVALID, message)


def _end_tokens(base: BaseModel) -> frozenset[int]:
    """Reads them from the model's files; the generation config takes precedence over the model config."""
    generation = getattr(base.lm, "generation_config", None)
    for config in (generation, base.lm.config.get_text_config(decoder=True)):
        tokens = getattr(config, "eos_token_id", None)
        if tokens is not None:
            return frozenset(tokens if isinstance(tokens, list | tuple) else [tokens])
    return frozenset()
