"""Requests for samples in vLLM's form, and its replies: tokens, log probabilities of samples and prompts, the likeliest
tokens, streams.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Literal

import msgspec
import numpy as np

from strata.base.errors import Code, StrataError
from strata.train.core.sampling import (
    MAX_RESULT_BYTES,
    MAX_TOP_K,
    MISSING_LOGPROB,
    SampledPart,
    SampledSequence,
    SampleOperation,
    SampleResult,
    TopLogprobs,
)
from strata.train.endpoints.client import MAX_EXCERPT, MAX_REPLY
from strata.train.endpoints.engine import ReportPart

TOKEN_BYTES: Final = 96
"""The most that a sampled token takes in a reply, without its likeliest tokens."""
TOP_BYTES: Final = 48
"""The most that one of the likeliest takes."""
PROMPT_BYTES: Final = 128
"""The most that one of the likeliest takes at a place of the prompt, with its text."""
_IMPOSSIBLE: Final = -9999.0
"""What vLLM writes for a log probability of minus infinity."""
_FORCED: Final = -1e-3
_PREFIX: Final = "token_id:"
_MAX_TOKEN: Final = 2**31 - 1


class _Logprobs(msgspec.Struct):
    token_logprobs: Sequence[float]
    top_logprobs: Sequence[Mapping[str, float] | None] | None = None


class _PromptLogprob(msgspec.Struct):
    logprob: float


class _Choice(msgspec.Struct):
    index: int
    token_ids: Sequence[int]
    logprobs: _Logprobs
    finish_reason: str
    prompt_logprobs: Sequence[Mapping[int, _PromptLogprob] | None] | None = None


class Completion(msgspec.Struct):
    model: str
    choices: Sequence[_Choice]


class _PartChoice(msgspec.Struct):
    index: int
    token_ids: Sequence[int] | None = None
    logprobs: _Logprobs | None = None
    finish_reason: str | None = None


class _Event(msgspec.Struct):
    """An event of a stream: a part of some choices, or an error."""

    model: str = ""
    choices: Sequence[_PartChoice] = ()
    error: Any = None


_events: Final = msgspec.json.Decoder(_Event)
_DATA: Final = b"data: "
_LAST: Final = b"[DONE]"


def completion_request(model: str, sample: SampleOperation, seed: int, context: int | None) -> dict[str, Any]:
    """`context` is the engine's, for a sample without a limit. UNSUPPORTED for numbers that mean something else to
    vLLM, as -1 for the whole vocabulary: the ranks reject them with the reason."""
    params, last = sample.params, sample.prompt_logprobs_last_n
    tops = (sample.topk_sample_logprobs, sample.topk_prompt_logprobs)
    if min(tops) < 0 or max(tops) > MAX_TOP_K or (last is not None and not 1 <= last < sample.length):
        raise StrataError(Code.UNSUPPORTED, "the engine has no such log probabilities")
    max_tokens = params.max_tokens
    if max_tokens is None:
        if context is None:
            raise StrataError(Code.UNSUPPORTED, "the engine does not say how long a sequence may be")
        max_tokens = context - sample.length
    return {
        "model": model,
        "prompt": np.frombuffer(sample.prompt, "<i4").tolist(),
        # Greedy samples are all the same, and engines reject n > 1 for them.
        "n": _drawn(sample),
        "max_tokens": max_tokens,
        "temperature": 0.0 if params.is_greedy else params.temperature,
        "top_p": params.top_p,
        "top_k": params.top_k if params.top_k > 0 else -1,
        # Else the generation config of the model would set them.
        "min_p": 0.0,
        "repetition_penalty": 1.0,
        "seed": seed,
        "stop": list(params.stop_strings),
        "stop_token_ids": list(params.stop_tokens),
        "ignore_eos": not params.end_tokens,
        "logprobs": sample.topk_sample_logprobs,
        "prompt_logprobs": sample.topk_prompt_logprobs if sample.wants_prompt else None,
        "return_token_ids": True,
        "return_tokens_as_token_ids": True,
        "skip_special_tokens": False,
    }


def forced_token_request(model: str, prompt: bytes, token: int) -> dict[str, Any]:
    """Ask for one token, which is the only one allowed."""
    return {
        "model": model,
        "prompt": np.frombuffer(prompt, "<i4")[:1].tolist(),
        "n": 1,
        "max_tokens": 1,
        "temperature": 0.0,
        "allowed_token_ids": [token],
        "logprobs": 0,
        "return_token_ids": True,
    }


def is_forced(completion: Completion) -> bool:
    """Says whether the only token that was allowed is reported as certain."""
    return [each > _FORCED for choice in completion.choices for each in choice.logprobs.token_logprobs] == [True]


def completion_bytes(sample: SampleOperation, tokens: int) -> int:
    """The most that a reply may have without the prompt."""
    return _drawn(sample) * tokens * (TOKEN_BYTES + TOP_BYTES * (1 + sample.topk_sample_logprobs))


def check_prompt_size(sample: SampleOperation) -> None:
    """UNSUPPORTED if the reply could be too long: vLLM repeats what it says of the prompt in each sample."""
    if sample.wants_prompt:
        size = _drawn(sample) * sample.length * PROMPT_BYTES * (1 + sample.topk_prompt_logprobs)
        if size > MAX_REPLY:
            raise StrataError(Code.UNSUPPORTED, f"the engine's reply could have {size >> 20} MiB")


def _drawn(sample: SampleOperation) -> int:
    return 1 if sample.params.is_greedy else sample.num_samples


@dataclass
class _Drawn:
    """What a stream has brought of a choice."""

    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    tops: list[Mapping[str, float] | None] = field(default_factory=list)
    finish_reason: str = ""


class CompletionStream:
    """Reads the events of a stream, reports their tokens, and puts the completion together."""

    def __init__(self, sample: SampleOperation, report: ReportPart) -> None:
        self._choices = _drawn(sample)
        self._copies = sample.num_samples if sample.params.is_greedy else 1
        self._k = sample.topk_sample_logprobs
        self._room = MAX_RESULT_BYTES // (2 * np.dtype("<f4").itemsize * (1 + self._k))
        self._report = report
        self._model = ""
        self._drawn: dict[int, _Drawn] = {}
        self._ended = False

    def read_line(self, line: bytes) -> None:
        if not line.startswith(_DATA):
            return
        data = line.removeprefix(_DATA).strip()
        if data == _LAST:
            self._ended = True
            return
        try:
            event = _events.decode(data)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            raise StrataError(Code.UNAVAILABLE, f"the engine's stream cannot be read: {error}") from None
        if event.error is not None:
            raise StrataError(Code.UNAVAILABLE, f"the engine failed: {str(event.error)[:MAX_EXCERPT]!r}")
        self._model = event.model or self._model
        for choice in event.choices:
            self._read(choice)

    def _read(self, choice: _PartChoice) -> None:
        tokens = list(choice.token_ids or ())
        logprobs = [] if choice.logprobs is None else list(choice.logprobs.token_logprobs)
        tops = [] if choice.logprobs is None or not self._k else list(choice.logprobs.top_logprobs or ())
        self._room -= max(len(tokens), len(logprobs), len(tops))
        if self._room < 0 or not 0 <= choice.index < self._choices:
            raise StrataError(Code.UNAVAILABLE, "the engine's stream has more than was requested")
        drawn = self._drawn.setdefault(choice.index, _Drawn())
        start = len(drawn.tokens)
        drawn.tokens += tokens
        drawn.logprobs += logprobs
        drawn.tops += tops
        drawn.finish_reason = choice.finish_reason or drawn.finish_reason
        # The last token may be one that is not shown.
        shown = len(tokens) - (1 if drawn.finish_reason else 0)
        if shown > 0:
            packed, numbers = _pack(tokens[:shown], logprobs[:shown])
            top = _pack_tops(tops[:shown], shown, self._k)
            # Greedy samples are all the same, and one was drawn for all of them.
            for index in range(self._copies) if self._copies > 1 else (choice.index,):
                self._report(SampledPart(index, start, packed, numbers, top))

    def completion(self) -> Completion:
        if not self._ended:
            raise StrataError(Code.UNAVAILABLE, "the engine's stream broke off")
        choices = [
            _Choice(index, drawn.tokens, _Logprobs(drawn.logprobs, drawn.tops), drawn.finish_reason)
            for index, drawn in self._drawn.items()
        ]
        return Completion(self._model, choices)


def read_completion(completion: Completion, model: str, sample: SampleOperation) -> SampleResult:
    """UNAVAILABLE unless the reply has every requested number, from the requested weights. UNSUPPORTED if the engine's
    context has cut a sample, which vLLM does not say."""
    choices = sorted(completion.choices, key=lambda choice: choice.index)
    wanted = _drawn(sample)
    if completion.model != model or len(choices) != wanted:
        raise StrataError(Code.UNAVAILABLE, f"the engine replied with {len(choices)} samples of {completion.model!r}")
    limit = sample.params.max_tokens
    if limit is not None and any(each.finish_reason == "length" and len(each.token_ids) < limit for each in choices):
        raise StrataError(Code.UNSUPPORTED, f"the engine's context has no room for {limit} tokens after this prompt")
    sequences = [_sequence(choice, sample.topk_sample_logprobs) for choice in choices]
    sequences *= sample.num_samples if wanted < sample.num_samples else 1
    if not sample.wants_prompt:
        return SampleResult(sequences)
    prompt, top = _read_prompt(choices[0].prompt_logprobs or (), sample)
    return SampleResult(sequences, prompt_logprobs=prompt, top_prompt=top)


def _sequence(choice: _Choice, k: int) -> SampledSequence:
    tokens, logprobs = _pack(choice.token_ids, choice.logprobs.token_logprobs)
    stopped: Literal["stop", "length"] = "length" if choice.finish_reason == "length" else "stop"
    top = _pack_tops(choice.logprobs.top_logprobs or (), len(choice.token_ids), k)
    return SampledSequence(tokens, logprobs, stopped, top)


def _pack(tokens: Sequence[int], logprobs: Sequence[float]) -> tuple[bytes, bytes]:
    if not tokens or len(tokens) != len(logprobs) or not np.isfinite(logprobs).all():
        raise StrataError(Code.UNAVAILABLE, "the engine's log probabilities are not those of its tokens")
    try:
        return np.asarray(tokens, "<i4").tobytes(), np.asarray(logprobs, "<f4").tobytes()
    except OverflowError:
        raise StrataError(Code.UNAVAILABLE, "the engine's tokens are out of range") from None


def _pack_tops(places: Sequence[Mapping[str, float] | None], length: int, k: int) -> TopLogprobs | None:
    if not k:
        return None
    try:
        values = [{int(name.removeprefix(_PREFIX)): each for name, each in (place or {}).items()} for place in places]
    except ValueError:
        raise StrataError(Code.UNAVAILABLE, "the engine's likeliest tokens have no numbers") from None
    return _likeliest(values, length, k)


def _likeliest(places: Sequence[Mapping[int, float]], length: int, k: int) -> TopLogprobs:
    """The `k` likeliest of each place. vLLM adds the token of the place itself to them."""
    tokens, logprobs = np.zeros((length, k), "<i4"), np.full((length, k), MISSING_LOGPROB, "<f4")
    if len(places) != length:
        raise StrataError(Code.UNAVAILABLE, "the engine's likeliest tokens are not of its tokens")
    for place, values in enumerate(places):
        possible = [(token, value) for token, value in values.items() if value > _IMPOSSIBLE]
        for rank, (token, value) in enumerate(sorted(possible, key=lambda each: (-each[1], each[0]))[:k]):
            if not 0 <= token <= _MAX_TOKEN:
                raise StrataError(Code.UNAVAILABLE, "the engine's likeliest tokens are out of range")
            tokens[place, rank], logprobs[place, rank] = token, value
    return TopLogprobs(tokens.tobytes(), logprobs.tobytes(), k, length)


def _read_prompt(
    places: Sequence[Mapping[int, _PromptLogprob] | None], sample: SampleOperation
) -> tuple[bytes | None, TopLogprobs | None]:
    prompt, k = np.frombuffer(sample.prompt, "<i4").tolist(), sample.topk_prompt_logprobs
    if len(places) != len(prompt):
        raise StrataError(Code.UNAVAILABLE, "the engine's log probabilities are not those of the prompt")
    last = sample.prompt_logprobs_last_n
    first = 1 if last is None else len(prompt) - last
    values = [
        {} if place is None or at < first else {token: each.logprob for token, each in place.items()}
        for at, place in enumerate(places)
    ]
    own = None
    if sample.prompt_logprobs:
        scored = [each.get(token, np.nan) for token, each in zip(prompt, values, strict=True)]
        if not np.isfinite(scored[first:]).all():
            raise StrataError(Code.UNAVAILABLE, "the engine's log probabilities are not those of the prompt")
        own = np.asarray(scored, "<f4").tobytes()
    return own, _likeliest(values, len(prompt), k) if k else None
