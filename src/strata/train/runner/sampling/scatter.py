"""Requests spread over the ranks, sample by sample, and their results put together again. Rank 0 alone has this.

A sequence lives on one rank from its first token to its last. Each goes where the least is reserved; the samples of a
request that come to one rank share its prompt there.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

import msgspec

from strata.base.errors import StrataError
from strata.train.core.sampling import (
    AddedSample,
    EndedSample,
    Sample,
    SampledSequence,
    SampleFailed,
    SampleOutcome,
    SampleResult,
    SamplingSlice,
    SliceResult,
)
from strata.train.runner.passes.partition import OURS
from strata.train.runner.sampling.prompt_logprobs import PromptLogprobs


class RankAdded(msgspec.Struct, frozen=True, array_like=True):
    request_id: str
    sample: Sample
    indices: Sequence[int]
    """Which of the request's samples are this rank's."""
    prompt: bool
    """Whether it is also to say what was asked of the prompt."""
    share: str = ""


class RankQuantum(msgspec.Struct, frozen=True, array_like=True):
    """What one rank does in a quantum. `samplers` are the same for all: for each the ranks put weights together."""

    steps: int
    eager: bool
    samplers: Sequence[str]
    add: Sequence[RankAdded]
    cancel: Sequence[str]


class RankSampled(msgspec.Struct, frozen=True, array_like=True):
    """What came of it."""

    sequences: Sequence[tuple[str, int, SampledSequence]]
    prompts: Sequence[tuple[str, PromptLogprobs]]
    failed: Sequence[tuple[str, str]]
    running: int
    waiting: int
    free_sequences: int
    free_tokens: int
    sampled_tokens: int
    prompt_tokens: int


encode: Final = msgspec.msgpack.Encoder().encode
decode_quantum: Final = msgspec.msgpack.Decoder(RankQuantum).decode
decode_sampled: Final = msgspec.msgpack.Decoder(RankSampled).decode


@dataclass
class _Request:
    sample: Sample
    ranks: Mapping[int, Sequence[int]]
    cost: int
    """Of one sequence: the tokens that are reserved for it."""
    sequences: dict[int, SampledSequence] = field(default_factory=dict)
    prompt: PromptLogprobs = PromptLogprobs()  # noqa: RUF009 - it is frozen

    def result(self) -> SampleResult:
        ordered = [self.sequences[index] for index in range(self.sample.num_samples)]
        prompt = self.prompt
        return SampleResult(ordered, prompt.logprobs, prompt.top, prompt.targets, prompt.draws)


class SampleScatter:
    """`cut` and `put_together` are called in turn, once for each quantum.

    `cost` says what a sequence of a request reserves, or why the request cannot be sampled at all.
    """

    def __init__(self, ranks: int, cost: Callable[[Sample], int], max_requests: int) -> None:
        self._cost = cost
        self._max_requests = max_requests
        self._load = [0] * ranks
        self._requests: dict[str, _Request] = {}
        self._ended: list[EndedSample] = []
        self._dropped: dict[str, Sequence[int]] = {}
        """Requests that are over although ranks may still have sequences of them."""

    def cut(self, quantum: SamplingSlice) -> list[RankQuantum]:
        adds: list[list[RankAdded]] = [[] for _ in self._load]
        for one in quantum.add:
            # The same again is the same request.
            if one.request_id not in self._requests:
                self._add(one, adds)
        for request_id in quantum.cancel:
            if request_id in self._requests:
                self._end(request_id, SampleFailed("cancelled", "it was cancelled"))
        cancels = [[one for one, ranks in self._dropped.items() if rank in ranks] for rank in range(len(self._load))]
        self._dropped = {}
        samplers = sorted({request.sample.sampler_id for request in self._requests.values()})
        return [
            RankQuantum(quantum.steps, quantum.eager, samplers, add, cancel)
            for add, cancel in zip(adds, cancels, strict=True)
        ]

    def _add(self, one: AddedSample, adds: list[list[RankAdded]]) -> None:
        request_id, sample = one.request_id, one.sample
        try:
            cost = self._cost(sample)
        except StrataError as error:
            failed = SampleFailed("server" if error.code in OURS else "user", str(error))
            self._ended.append(EndedSample(request_id, failed))
            return
        if len(self._requests) >= self._max_requests:
            full = f"{self._max_requests} requests are being sampled already"
            self._ended.append(EndedSample(request_id, SampleFailed("server", full)))
            return
        ranks: dict[int, list[int]] = {}
        for index in range(sample.num_samples):
            rank = self._load.index(min(self._load))
            self._load[rank] += cost
            ranks.setdefault(rank, []).append(index)
        self._requests[request_id] = _Request(sample, ranks, cost)
        for rank, indices in ranks.items():
            adds[rank].append(RankAdded(request_id, sample, indices, indices[0] == 0, one.share))

    def put_together(self, reports: Sequence[RankSampled]) -> SliceResult:
        for report in reports:
            self._take(report)
        for request_id, request in list(self._requests.items()):
            if len(request.sequences) == request.sample.num_samples:
                self._end(request_id, request.result())
                # Every rank has told of the last of its sequences.
                del self._dropped[request_id]
        ended, self._ended = self._ended, []
        return SliceResult(
            ended=ended,
            requests=len(self._requests),
            running=sum(report.running for report in reports),
            waiting=sum(report.waiting for report in reports),
            free_sequences=sum(report.free_sequences for report in reports),
            free_tokens=sum(report.free_tokens for report in reports),
            sampled_tokens=sum(report.sampled_tokens for report in reports),
            prompt_tokens=sum(report.prompt_tokens for report in reports),
        )

    def _take(self, report: RankSampled) -> None:
        for request_id, about in report.prompts:
            if request_id in self._requests:
                self._requests[request_id].prompt = about
        for request_id, index, sequence in report.sequences:
            if request_id in self._requests:
                self._requests[request_id].sequences[index] = sequence
        for request_id, message in report.failed:
            if request_id in self._requests:
                self._end(request_id, SampleFailed("user", message))

    def _end(self, request_id: str, outcome: SampleOutcome) -> None:
        request = self._requests.pop(request_id)
        for rank, indices in request.ranks.items():
            self._load[rank] -= request.cost * len(indices)
        self._dropped[request_id] = list(request.ranks)
        self._ended.append(EndedSample(request_id, outcome))
