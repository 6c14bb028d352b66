"""One request on one rank, its sequences, and when each of them is over."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final, Literal

import numpy as np
import torch

from strata.train.core.sampling import MISSING_LOGPROB, Sample, SampledSequence, TopLogprobs
from strata.train.runner.lora.adapter import Adapter
from strata.train.runner.sampling.kv_cache import KVPool
from strata.train.runner.sampling.sampling_ops import SeededRng, is_greedy

Decode = Callable[[Sequence[int]], str]
CONTEXT: Final = 4
"""Tokens that are read before those in question: some tokenizers write the first token of a text otherwise."""
BROKEN: Final = "\N{REPLACEMENT CHARACTER}"


def tokens_from(data: bytes) -> torch.Tensor:
    return torch.from_numpy(np.frombuffer(data, dtype="<i4").astype(np.int64))


def top_of(distribution: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Of each row the likeliest `k` tokens and their log-probabilities, filled up where there are no more."""
    values, tokens = distribution.topk(min(k, distribution.shape[-1]), dim=-1)
    none = values == -torch.inf
    values, tokens = values.masked_fill(none, MISSING_LOGPROB), tokens.masked_fill(none, 0)
    missing = (0, k - values.shape[-1])
    return (
        torch.nn.functional.pad(tokens, missing).to("cpu", torch.int32),
        torch.nn.functional.pad(values, missing, value=MISSING_LOGPROB).to("cpu", torch.float32),
    )


def top_logprobs(tokens: torch.Tensor, values: torch.Tensor) -> TopLogprobs:
    length, k = tokens.shape
    return TopLogprobs(tokens.numpy().tobytes(), values.numpy().tobytes(), k, length)


class StopStrings:
    """Looks for a string in what the newest tokens add to the text, also where it began in tokens before."""

    def __init__(self, decode: Decode, strings: Sequence[str], prompt: Sequence[int]) -> None:
        self._decode = decode
        self._strings = strings
        # Every token is at least one byte of the text.
        self._window = max(len(string.encode()) for string in strings)
        self._before = list(prompt[-CONTEXT:])

    def found(self, tokens: list[int]) -> bool:
        tail = tokens[-self._window :]
        before = [*self._before, *tokens[-self._window - CONTEXT : -self._window]][-CONTEXT:]
        known = self._decode(before).rstrip(BROKEN)
        text = self._decode([*before, *tail])[len(known) :]
        return any(string in text for string in self._strings)


def chance_name(sample: Sample) -> str:
    seed = sample.params.seed
    return f"{sample.sampler_id}/{sample.seq_id}" if seed is None else f"seed/{seed}"


@dataclass
class Request:
    """A client's request, as far as this rank has to do with it."""

    request_id: str
    sample: Sample
    prompt: torch.Tensor
    adapter: Adapter | None
    limit: int
    """Tokens that each sample may have."""
    place_length: int
    stops: frozenset[int]
    decode: Decode | None
    wants_prompt: bool
    """Whether this rank is the one to say something of the prompt."""
    share: str
    """Whose it is, as far as places go."""


@dataclass(eq=False)
class SequenceRun:
    request: Request
    index: int
    """Which of the request's samples it is."""
    shelf: KVPool
    place: int
    length: int = 0
    """Tokens that its place remembers."""
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    top_tokens: bytearray = field(default_factory=bytearray)
    top_logprobs: bytearray = field(default_factory=bytearray)
    chance: SeededRng | None = None
    strings: StopStrings | None = None

    def __post_init__(self) -> None:
        sample = self.request.sample
        params = sample.params
        if not is_greedy(params):
            self.chance = SeededRng(f"{chance_name(sample)}/{self.index}")
        if params.stop_strings and self.request.decode is not None:
            prompt = self.request.prompt[-CONTEXT:].tolist()
            self.strings = StopStrings(self.request.decode, params.stop_strings, prompt)

    def accept(self, token: int, logprob: float) -> Literal["stop", "length"] | None:
        """Append a token; says why the sequence is over, if it is."""
        self.tokens.append(token)
        self.logprobs.append(logprob)
        if token in self.request.stops or (self.strings is not None and self.strings.found(self.tokens)):
            return "stop"
        return "length" if len(self.tokens) >= self.request.limit else None

    def note_top(self, tokens: torch.Tensor, logprobs: torch.Tensor) -> None:
        """The likeliest in one place, as many as were asked for. Copied: the tensors of a step are as wide as the most
        that anybody in the batch asked for, and would be kept as a whole."""
        k = self.request.sample.topk_sample_logprobs
        self.top_tokens += tokens[:k].numpy().tobytes()
        self.top_logprobs += logprobs[:k].numpy().tobytes()

    def result(self, reason: Literal["stop", "length"]) -> SampledSequence:
        k = self.request.sample.topk_sample_logprobs
        top = TopLogprobs(bytes(self.top_tokens), bytes(self.top_logprobs), k, len(self.tokens)) if k else None
        return SampledSequence(
            tokens=np.asarray(self.tokens, dtype="<i4").tobytes(),
            logprobs=np.asarray(self.logprobs, dtype="<f4").tobytes(),
            stop_reason=reason,
            top=top,
        )
