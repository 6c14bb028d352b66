"""A running sequence and its group: stop strings, stop tokens, lengths, stop reasons, top log probabilities."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
import torch

from strata.train.core.sampling import (
    CONTEXT,
    MISSING_LOGPROB,
    DrawnPart,
    DrawnSequence,
    SampledPart,
    SampledSequence,
    SampleOperation,
    TopLogprobs,
    VersionSpan,
    VersionSpans,
    add_span,
    decode_context,
)
from strata.train.runner.lora.adapter import Adapter
from strata.train.runner.router_replay import RouterReplay
from strata.train.runner.sampling.kv_cache import KVPool
from strata.train.runner.sampling.logits_shape import LogitsShape
from strata.train.runner.sampling.sampling_ops import SeededRng

Decode = Callable[[Sequence[int]], str]


def tokens_from(data: bytes) -> torch.Tensor:
    return torch.from_numpy(np.frombuffer(data, dtype="<i4").astype(np.int64))


def top_of(distribution: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The `k` likeliest tokens of each row and their log probabilities, padded where there are fewer."""
    values, tokens = distribution.topk(min(k, distribution.shape[-1]), dim=-1)
    impossible = values == -torch.inf
    values, tokens = values.masked_fill(impossible, MISSING_LOGPROB), tokens.masked_fill(impossible, 0)
    missing = (0, k - values.shape[-1])
    return (
        torch.nn.functional.pad(tokens, missing).to("cpu", torch.int32),
        torch.nn.functional.pad(values, missing, value=MISSING_LOGPROB).to("cpu", torch.float32),
    )


def top_logprobs(tokens: torch.Tensor, values: torch.Tensor) -> TopLogprobs:
    length, k = tokens.shape
    return TopLogprobs(tokens.numpy().tobytes(), values.numpy().tobytes(), k, length)


class StopStrings:
    """Searches for stop strings in the text that the newest tokens add, also where one began in earlier tokens."""

    def __init__(self, decode: Decode, strings: Sequence[str], prompt: Sequence[int]) -> None:
        self._decode = decode
        self._strings = strings
        # Every token is at least one byte of the text.
        self._window = max(len(string.encode()) for string in strings)
        self._before = list(prompt[-2 * CONTEXT :])

    def match(self, tokens: list[int]) -> bool:
        tail = tokens[-self._window :]
        earlier = [*self._before, *tokens[-self._window - 2 * CONTEXT : -self._window]]
        before, context = decode_context(self._decode, earlier)
        text = self._decode([*before, *tail])[len(context) :]
        return any(string in text for string in self._strings)


def rng_name(sample: SampleOperation) -> str:
    seed = sample.params.seed
    return f"{sample.sampler_id}/{sample.seq_id}" if seed is None else f"seed/{seed}"


@dataclass
class SequenceGroup:
    """A client's request, with those of its sequences that run on this rank."""

    request_id: str
    sample: SampleOperation
    prompt: torch.Tensor
    adapter: Adapter | None
    limit: int
    """The most tokens of each sample."""
    slot_length: int
    stops: frozenset[int]
    decode: Decode | None
    wants_prompt: bool
    """Whether this rank computes the log probabilities of the prompt."""
    share: str
    """The tenant to whom its slots are charged."""
    weights: str
    """The name of its weights: that of its sampler, or of weights that in-flight samplers share."""
    version: int | None = None
    """The version of in-flight weights; it changes with them. None: the weights never change."""
    drawn: Mapping[int, DrawnSequence] = field(default_factory=dict)
    """What earlier ranks drew, by the place of the sequence."""
    routers: RouterReplay | None = None
    """What its routing is recorded with; None if it is not."""
    new_shape: Callable[[], LogitsShape] | None = None
    """Makes what shapes the logits of one sequence; None if nothing does."""

    @property
    def prefix_owner(self) -> str:
        """Prompts share a prefix only if one version computed both."""
        return self.sample.sampler_id if self.version is None else f"{self.sample.sampler_id}@{self.version}"


@dataclass(eq=False)
class RunningSequence:
    group: SequenceGroup
    index: int
    """The place among the request's samples."""
    pool: KVPool
    slot: int
    length: int = 0
    """Tokens in its slot of the KV cache."""
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    top_tokens: bytearray = field(default_factory=bytearray)
    top_logprobs: bytearray = field(default_factory=bytearray)
    routing: bytearray = field(default_factory=bytearray)
    """That of all tokens in its slot, if it is recorded."""
    rng: SeededRng | None = None
    strings: StopStrings | None = None
    versions: VersionSpans = ()
    reported: int = 0
    """Tokens that are durable, or in the report of this slice."""
    refill: bool = False
    """Keys and values of all its tokens but the newest are to be computed before the next step."""
    recomputed: bool = False
    """That was done since its newest token."""
    shape: LogitsShape | None = None

    def __post_init__(self) -> None:
        sample = self.group.sample
        params = sample.params
        if not params.is_greedy:
            self.rng = SeededRng(f"{rng_name(sample)}/{self.index}")
        self.length = len(self.group.prompt)
        if (drawn := self.group.drawn.get(self.index)) is not None:
            self._resume(drawn)
        if params.stop_strings and self.group.decode is not None:
            prompt = self.group.prompt[-2 * CONTEXT :].tolist()
            self.strings = StopStrings(self.group.decode, params.stop_strings, prompt)
        if self.group.new_shape is not None:
            self.shape = self.group.new_shape()
            for token in self.tokens:
                self.shape.accept(token)

    def _resume(self, drawn: DrawnSequence) -> None:
        """Go on after what earlier ranks drew, at the same place of the seeded numbers."""
        self.tokens = tokens_from(drawn.tokens).tolist()
        self.logprobs = np.frombuffer(drawn.logprobs, "<f4").tolist()
        self.versions, self.reported, self.refill = drawn.versions, drawn.length, True
        if drawn.top is not None:
            self.top_tokens, self.top_logprobs = bytearray(drawn.top.tokens), bytearray(drawn.top.logprobs)
        if self.rng is not None:
            for _ in range(drawn.length):
                self.rng.next()
        self.length += drawn.length - 1

    def accept(self, token: int, logprob: float) -> Literal["stop", "length"] | None:
        """Append a token. Returns the stop reason if the sequence has ended."""
        self.tokens.append(token)
        self.logprobs.append(logprob)
        if self.group.version is not None:
            self.versions = add_span(self.versions, VersionSpan(self.group.version, 1, self.recomputed))
            self.recomputed = False
        if self.shape is not None:
            self.shape.accept(token)
        if token in self.group.stops or (self.strings is not None and self.strings.match(self.tokens)):
            return "stop"
        return "length" if len(self.tokens) >= self.group.limit else None

    def record_top(self, tokens: torch.Tensor, logprobs: torch.Tensor) -> None:
        """Append the likeliest tokens of one position, as many as the request wants. Copied: the tensors of a step are
        as wide as the widest request of the batch, and a view would keep all of that alive."""
        k = self.group.sample.topk_sample_logprobs
        self.top_tokens += tokens[:k].numpy().tobytes()
        self.top_logprobs += logprobs[:k].numpy().tobytes()

    def take_drawn(self, reason: Literal["", "stop", "length"] = "") -> DrawnPart | None:
        """Returns what was drawn since the last report, by one version: a slice has no other. None if nothing was."""
        start, count = self.reported, len(self.tokens) - self.reported
        if not count or self.group.version is None:
            return None
        self.reported = len(self.tokens)
        last, k = self.versions[-1], self.group.sample.topk_sample_logprobs
        span = VersionSpan(last.version, count, last.recomputed and last.tokens == count)
        top = None
        if k:
            first = 4 * k * start
            top = TopLogprobs(bytes(self.top_tokens[first:]), bytes(self.top_logprobs[first:]), k, count)
        tokens, logprobs = np.asarray(self.tokens[start:], "<i4"), np.asarray(self.logprobs[start:], "<f4")
        return DrawnPart(self.index, start, DrawnSequence(tokens.tobytes(), logprobs.tobytes(), (span,), reason, top))

    def last_part(self) -> SampledPart:
        """The newest token."""
        place, k = len(self.tokens) - 1, self.group.sample.topk_sample_logprobs
        first = 4 * k * place
        top = TopLogprobs(bytes(self.top_tokens[first:]), bytes(self.top_logprobs[first:]), k, 1) if k else None
        tokens, logprobs = np.asarray(self.tokens[place:], "<i4"), np.asarray(self.logprobs[place:], "<f4")
        return SampledPart(self.index, place, tokens.tobytes(), logprobs.tobytes(), top)

    def result(self, reason: Literal["stop", "length"]) -> SampledSequence:
        k = self.group.sample.topk_sample_logprobs
        top = TopLogprobs(bytes(self.top_tokens), bytes(self.top_logprobs), k, len(self.tokens)) if k else None
        return SampledSequence(
            tokens=np.asarray(self.tokens, dtype="<i4").tobytes(),
            logprobs=np.asarray(self.logprobs, dtype="<f4").tobytes(),
            stop_reason=reason,
            top=top,
            versions=self.versions,
            routing=None if self.group.routers is None else self.group.routers.sampled(bytes(self.routing)),
        )
