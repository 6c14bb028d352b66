"""Scatters sample requests over the ranks by reserved tokens, and merges their results; rank 0 alone does this.

A sequence runs on one rank from its first token to its last: on the rank with the fewest reserved tokens. The samples
of a request that run on one rank share the prefill of its prompt there.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

import msgspec

from strata.base.errors import StrataError
from strata.train.core.sampling import (
    AddedSample,
    DrawnPart,
    DrawnSequence,
    EndedSample,
    SampledPart,
    SampledSequence,
    SampleFailed,
    SampleOperation,
    SampleOutcome,
    SampleResult,
    SamplingSlice,
    SliceResult,
)
from strata.train.runner.passes.partition import SERVER_ERRORS
from strata.train.runner.sampling.prompt_logprobs import PromptLogprobs


class SliceOutcomes(msgspec.Struct, array_like=True):
    """What a time slice has produced so far."""

    sequences: list[tuple[str, int, SampledSequence]] = []
    """Sequences by request, with the place among its samples."""
    prompts: list[tuple[str, PromptLogprobs]] = []
    failed: list[tuple[str, str]] = []
    streamed: list[tuple[str, SampledPart]] = []
    """Tokens by request of samples that run on, in order, if their client reads them meanwhile."""
    sampled_tokens: int = 0
    prompt_tokens: int = 0
    reused_tokens: int = 0
    """Tokens of prompts that the prefix cache had."""
    drawn: list[tuple[str, DrawnPart]] = []
    """What was added to in-flight samples, by request."""

    @property
    def ended(self) -> int:
        return len(self.sequences) + len(self.failed)


class RankSequences(msgspec.Struct, frozen=True, array_like=True):
    """A request's sequences that a rank is to start."""

    request_id: str
    sample: SampleOperation
    indices: Sequence[int]
    """The request's samples that run on this rank."""
    prompt: bool
    """Whether this rank also computes the log probabilities of the prompt."""
    share: str = ""
    weights: str = ""
    """In-flight weights; empty: those of its sampler."""
    drawn: Mapping[int, DrawnSequence] = {}
    """What earlier ranks drew of these sequences."""
    routing: bool = False


class RankSlice(msgspec.Struct, frozen=True, array_like=True):
    """One rank's part of a time slice. `weights` are the same on all ranks: they gather each."""

    steps: int
    eager: bool
    weights: Sequence[str]
    add: Sequence[RankSequences]
    cancel: Sequence[str]


class RankSliceResult(msgspec.Struct, frozen=True, array_like=True):
    """What a rank produced in a time slice, and what it has left."""

    outcomes: SliceOutcomes
    running: int
    waiting: int
    free_sequences: int
    free_tokens: int


encode: Final = msgspec.msgpack.Encoder().encode
decode_slice: Final = msgspec.msgpack.Decoder(RankSlice).decode
decode_slice_result: Final = msgspec.msgpack.Decoder(RankSliceResult).decode


@dataclass
class _Request:
    sample: SampleOperation
    weights: str
    ranks: Mapping[int, Sequence[int]]
    cost: int
    """Tokens that each sequence reserves in the KV cache."""
    sequences: dict[int, SampledSequence] = field(default_factory=dict)
    prompt: PromptLogprobs = PromptLogprobs()  # noqa: RUF009 - it is frozen

    def result(self) -> SampleResult:
        ordered = [self.sequences[index] for index in range(self.sample.num_samples)]
        prompt = self.prompt
        return SampleResult(ordered, prompt.logprobs, prompt.top, prompt.targets, prompt.draws)


class SampleScatter:
    """`partition` and `merge` are called in turn, once for each time slice.

    `cost` returns the tokens that a sequence of a request reserves, or raises why the request cannot be sampled.
    """

    def __init__(self, ranks: int, cost: Callable[[AddedSample], int], max_requests: int) -> None:
        self._cost = cost
        self._max_requests = max_requests
        self._load = [0] * ranks
        self._requests: dict[str, _Request] = {}
        self._ended: list[EndedSample] = []
        self._dropped: dict[str, Sequence[int]] = {}
        """Requests that have ended although ranks may still run sequences of them."""

    def partition(self, time_slice: SamplingSlice) -> list[RankSlice]:
        adds: list[list[RankSequences]] = [[] for _ in self._load]
        for added in time_slice.add:
            # Idempotent: a request that is added again is the same request.
            if added.request_id not in self._requests:
                self._add(added, adds)
        for request_id in time_slice.cancel:
            if request_id in self._requests:
                self._end(request_id, SampleFailed("cancelled", "it was cancelled"))
        cancels = self._take_dropped()
        weights = sorted({request.weights for request in self._requests.values()})
        return [
            RankSlice(time_slice.steps, time_slice.eager, weights, add, cancel)
            for add, cancel in zip(adds, cancels, strict=True)
        ]

    def _take_dropped(self) -> list[list[str]]:
        """The requests that each rank is to drop."""
        dropped, self._dropped = self._dropped, {}
        return [
            [request_id for request_id, ranks in dropped.items() if rank in ranks] for rank in range(len(self._load))
        ]

    def _add(self, added: AddedSample, adds: list[list[RankSequences]]) -> None:
        request_id, sample = added.request_id, added.sample
        try:
            cost = self._cost(added)
        except StrataError as error:
            failed = SampleFailed("server" if error.code in SERVER_ERRORS else "user", str(error))
            self._ended.append(EndedSample(request_id, failed))
            return
        if len(self._requests) >= self._max_requests:
            message = f"{self._max_requests} requests are being sampled already"
            self._ended.append(EndedSample(request_id, SampleFailed("server", message)))
            return
        ranks: dict[int, list[int]] = {}
        done = {index: each for index, each in added.drawn.items() if each.stop_reason}
        left = [index for index in range(sample.num_samples) if index not in done]
        for index in left:
            rank = self._load.index(min(self._load))
            self._load[rank] += cost
            ranks.setdefault(rank, []).append(index)
        self._requests[request_id] = request = _Request(sample, added.weights_name, ranks, cost)
        for index, sequence in done.items():
            assert sequence.stop_reason, "it has ended"
            request.sequences[index] = SampledSequence(
                sequence.tokens, sequence.logprobs, sequence.stop_reason, sequence.top, sequence.versions
            )
        for rank, indices in ranks.items():
            drawn = {index: added.drawn[index] for index in indices if index in added.drawn}
            first = indices[0] == left[0]
            adds[rank].append(
                RankSequences(request_id, sample, indices, first, added.share, added.weights, drawn, added.routing)
            )

    def merge(self, reports: Sequence[RankSliceResult]) -> SliceResult:
        for report in reports:
            self._collect(report.outcomes)
        for request_id, request in list(self._requests.items()):
            if len(request.sequences) == request.sample.num_samples:
                self._end(request_id, request.result())
                # Every rank has reported the last of its sequences.
                del self._dropped[request_id]
        ended, self._ended = self._ended, []
        return SliceResult(
            ended=ended,
            requests=len(self._requests),
            running=sum(report.running for report in reports),
            waiting=sum(report.waiting for report in reports),
            free_sequences=sum(report.free_sequences for report in reports),
            free_tokens=sum(report.free_tokens for report in reports),
            sampled_tokens=sum(report.outcomes.sampled_tokens for report in reports),
            prompt_tokens=sum(report.outcomes.prompt_tokens for report in reports),
            reused_tokens=sum(report.outcomes.reused_tokens for report in reports),
            drawn=self._drawn(reports),
        )

    def _drawn(self, reports: Sequence[RankSliceResult]) -> Mapping[str, Sequence[DrawnPart]]:
        """Only of samples that run on: a result has all tokens."""
        drawn: dict[str, list[DrawnPart]] = {}
        for request_id, part in (each for report in reports for each in report.outcomes.drawn):
            if request_id in self._requests:
                drawn.setdefault(request_id, []).append(part)
        return drawn

    def _collect(self, report: SliceOutcomes) -> None:
        for request_id, prompt in report.prompts:
            if request_id in self._requests:
                self._requests[request_id].prompt = prompt
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
