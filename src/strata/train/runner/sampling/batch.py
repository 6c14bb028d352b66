"""The running batch of a rank: sequences come in when there is room, go on together token by token, and leave alone.

A step is at most one pass over the prompts of those who come in and one over a single token of everybody. What belongs
to the rows of the second is made when somebody comes or goes, not with every token.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby

import torch

from strata.train.core.sampling import SampledSequence
from strata.train.runner.lora.adapter import Span
from strata.train.runner.sampling.attention import DecodePlan, KVPoolRows, PrefillPlan, Prompt
from strata.train.runner.sampling.inference_model import InferenceModel
from strata.train.runner.sampling.kv_cache import KVCache, KVPool
from strata.train.runner.sampling.prompt_logprobs import PromptLogprobs, prompt_logprobs_of
from strata.train.runner.sampling.sampling_ops import Chosen, Transform, sample_tokens
from strata.train.runner.sampling.sequences import Request, SequenceRun, top_of


@dataclass
class Outcomes:
    """What came of a quantum so far."""

    sequences: list[tuple[str, int, SampledSequence]] = field(default_factory=list)
    """By request, and which of its samples it is."""
    prompts: list[tuple[str, PromptLogprobs]] = field(default_factory=list)
    failed: list[tuple[str, str]] = field(default_factory=list)
    sampled_tokens: int = 0
    prompt_tokens: int = 0


class Rows:
    """The running sequences as rows of a step: those of one adapter side by side, so that it is applied but once."""

    def __init__(self, running: Iterable[SequenceRun], vocabulary: int, device: torch.device) -> None:
        adapters: dict[int, int] = {}
        shelves: dict[KVPool, int] = {}
        for run in running:
            adapters.setdefault(id(run.request.adapter), len(adapters))
            shelves.setdefault(run.shelf, len(shelves))
        self.runs = sorted(running, key=lambda run: (adapters[id(run.request.adapter)], shelves[run.shelf], run.place))
        self.spans = spans_of((run.request, 1) for run in self.runs)
        self.transform = Transform([run.request.sample.params for run in self.runs], vocabulary, device)
        self.tokens = torch.tensor([run.tokens[-1] for run in self.runs], device=device)
        self.positions = torch.tensor([run.length for run in self.runs], device=device)
        self.plan = DecodePlan([self._on(shelf, device) for shelf in shelves])

    def _on(self, shelf: KVPool, device: torch.device) -> KVPoolRows:
        own = sorted((run.place, row) for row, run in enumerate(self.runs) if run.shelf is shelf)
        rows = [row for _, row in own]
        return KVPoolRows(shelf, rows, [self.runs[row].length for row in rows], device)

    def advance(self, tokens: torch.Tensor) -> None:
        self.tokens = tokens
        self.positions += 1
        self.plan.advance()


class Batch:
    """Of all sequences with the same base weights. `key` is the name of those."""

    def __init__(self, key: str, cache: KVCache, twin: InferenceModel, prompt_tokens: int) -> None:
        self.key = key
        self.running: list[SequenceRun] = []
        self._waiting: dict[str, deque[tuple[Request, int]]] = {}
        """By share, in the order in which they come next."""
        self._cache = cache
        self._twin = twin
        self._prompt_tokens = prompt_tokens
        self._on: dict[KVPool, list[SequenceRun]] = {}
        self._rows: Rows | None = None

    @property
    def waiting(self) -> int:
        return sum(map(len, self._waiting.values()))

    def requests(self) -> Iterator[Request]:
        yield from (run.request for run in self.running)
        yield from (request for line in self._waiting.values() for request, _ in line)

    def add(self, request: Request, indices: Iterable[int]) -> None:
        self._waiting.setdefault(request.share, deque()).extend((request, index) for index in indices)

    def drop(self, request_ids: set[str]) -> None:
        """Forget all sequences of these requests; their places are free."""
        kept = {
            share: deque(one for one in line if one[0].request_id not in request_ids)
            for share, line in self._waiting.items()
        }
        self._waiting = {share: line for share, line in kept.items() if line}
        for run in [run for run in self.running if run.request.request_id in request_ids]:
            self._remove(run)

    def step(self, outcomes: Outcomes) -> None:
        admitted = self._admit()
        if admitted:
            self._prefill(admitted, outcomes)
        if self.running:
            self._decode(outcomes)

    def _admit(self) -> list[tuple[Request, list[SequenceRun]]]:
        """As long as there is room: of the share with the fewest places the one that came first. Nobody goes before one
        that is too large for the room there is. Samples of one request share the pass over its prompt."""
        groups: dict[str, tuple[Request, list[SequenceRun]]] = {}
        places = Counter(run.request.share for run in self.running)
        tokens = 0
        while self._waiting:
            share = min(self._waiting, key=places.__getitem__)
            request, index = self._waiting[share][0]
            new = request.request_id not in groups
            full = new and groups and tokens + len(request.prompt) > self._prompt_tokens
            if full or not self._cache.fits(request.place_length):
                break
            line = self._waiting.pop(share)
            line.popleft()
            if line:
                # Behind those with as few places: else they would never have one if there are more shares than places.
                self._waiting[share] = line
            places[share] += 1
            if new:
                groups[request.request_id] = request, []
                tokens += len(request.prompt)
            groups[request.request_id][1].append(self._start(request, index))
        return list(groups.values())

    def _start(self, request: Request, index: int) -> SequenceRun:
        shelf, place = self._cache.take(self.key, request.place_length)
        run = SequenceRun(request, index, shelf, place, length=len(request.prompt))
        self.running.append(run)
        self._on.setdefault(shelf, []).append(run)
        self._rows = None
        return run

    def _prefill(self, groups: list[tuple[Request, list[SequenceRun]]], outcomes: Outcomes) -> None:
        """Compute the prompts, and the first token of each sample."""
        # In the order of their first appearance, which is the same when it is all done again.
        order: dict[int, int] = {}
        for request, _ in groups:
            order.setdefault(id(request.adapter), len(order))
        groups = sorted(groups, key=lambda group: order[id(group[0].adapter)])
        requests = [request for request, _ in groups]
        lengths = [len(request.prompt) for request in requests]
        device = requests[0].prompt.device
        plan = PrefillPlan(
            [Prompt(len(request.prompt), [(run.shelf, run.place) for run in runs]) for request, runs in groups]
        )
        hidden = self._twin.hidden(
            torch.cat([request.prompt for request in requests]),
            torch.cat([torch.arange(length, device=device) for length in lengths]),
            spans_of(zip(requests, lengths, strict=True)),
            plan,
        )
        for request, own in zip(requests, torch.split(hidden, lengths), strict=True):
            if request.wants_prompt:
                outcomes.prompts.append((request.request_id, prompt_logprobs_of(self._twin, request, own)))
        last = hidden[torch.tensor(lengths, device=device).cumsum(0) - 1]
        logits = self._twin.logits(last, spans_of((request, 1) for request in requests))
        counts = torch.tensor([len(runs) for _, runs in groups], device=device)
        runs = [run for _, own in groups for run in own]
        transform = Transform([run.request.sample.params for run in runs], self._twin.vocabulary, device)
        chosen = sample_tokens(logits.repeat_interleave(counts, 0), transform, _uniform(runs, transform, device))
        outcomes.prompt_tokens += sum(lengths)
        self._accept(runs, chosen, outcomes)

    def _decode(self, outcomes: Outcomes) -> None:
        """One token more for everybody."""
        if self._rows is None:
            self._rows = Rows(self.running, self._twin.vocabulary, self.running[0].request.prompt.device)
        rows = self._rows
        hidden = self._twin.hidden(rows.tokens, rows.positions, rows.spans, rows.plan)
        logits = self._twin.logits(hidden, rows.spans)
        chosen = sample_tokens(logits, rows.transform, _uniform(rows.runs, rows.transform, rows.tokens.device))
        for run in rows.runs:
            run.length += 1
        rows.advance(chosen.tokens)
        self._accept(rows.runs, chosen, outcomes)

    def _accept(self, runs: Sequence[SequenceRun], chosen: Chosen, outcomes: Outcomes) -> None:
        self._note_top(runs, chosen)
        outcomes.sampled_tokens += len(runs)
        over: list[SequenceRun] = []
        bad: set[str] = set()
        for run, token, logprob in zip(runs, chosen.tokens.tolist(), chosen.logprobs.tolist(), strict=True):
            if not math.isfinite(logprob):
                bad.add(run.request.request_id)
                continue
            reason = run.accept(token, logprob)
            if reason is not None:
                over.append(run)
                outcomes.sequences.append((run.request.request_id, run.index, run.result(reason)))
        for run in over:
            self._remove(run)
        if bad:
            outcomes.failed += [(request_id, "the model's logits are not finite numbers") for request_id in bad]
            self.drop(bad)

    @staticmethod
    def _note_top(runs: Sequence[SequenceRun], chosen: Chosen) -> None:
        rows = [row for row, run in enumerate(runs) if run.request.sample.topk_sample_logprobs]
        if not rows:
            return
        most = max(runs[row].request.sample.topk_sample_logprobs for row in rows)
        tokens, values = top_of(chosen.distribution[rows], most)
        for place, row in enumerate(rows):
            runs[row].note_top(tokens[place], values[place])

    def _remove(self, run: SequenceRun) -> None:
        neighbours = self._on[run.shelf]
        last = neighbours.pop()
        self._cache.release(run.shelf, run.place, run.length, last.length)
        if last is not run:
            last.place = run.place
            neighbours[run.place] = last
        if not neighbours:
            del self._on[run.shelf]
        self.running.remove(run)
        self._rows = None


def spans_of(parts: Iterable[tuple[Request, int]]) -> list[Span]:
    """Neighbours with the same adapter are one span."""
    found = []
    for _, group in groupby(parts, key=lambda part: id(part[0].adapter)):
        own = list(group)
        found.append(Span(own[0][0].adapter, sum(length for _, length in own)))
    return found


def _uniform(runs: Sequence[SequenceRun], transform: Transform, device: torch.device) -> torch.Tensor | None:
    if not transform.draws:
        return None
    drawn = [0.0 if run.chance is None else run.chance.next() for run in runs]
    return torch.tensor(drawn, dtype=torch.float64, device=device)
