"""Continuous batching: when waiting sequences are admitted, prefill of prompts, one decode step of all, and removal of
ended ones.

A step is at most one prefill, over the prompts of the sequences that were admitted, the refill of those that go on
without keys and values of the present weights, and one decode, over a single token of every running sequence. What
belongs to the rows of a decode is rebuilt when a sequence joins or leaves, not with every token.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import accumulate, groupby

import torch

from strata.train.runner.lora.adapter import Adapter
from strata.train.runner.lora.hooks import Span
from strata.train.runner.sampling.inference_model import InferenceModel
from strata.train.runner.sampling.kv_cache import (
    BLOCK,
    DecodePlan,
    KVCache,
    KVPool,
    KVPoolRows,
    PrefillPlan,
    PrefixBlock,
    Prompt,
)
from strata.train.runner.sampling.prompt_logprobs import compute_prompt_logprobs
from strata.train.runner.sampling.sampling_ops import LogitsProcessor, SampledTokens, sample_tokens
from strata.train.runner.sampling.scatter import SliceOutcomes
from strata.train.runner.sampling.sequences import RunningSequence, SequenceGroup, top_of

Admitted = list[tuple[SequenceGroup, list[RunningSequence]]]


class DecodeRows:
    """The running sequences as rows of a decode: those of one adapter are adjacent, so that it is applied once."""

    def __init__(self, running: Iterable[RunningSequence], vocabulary: int, device: torch.device) -> None:
        adapters: dict[int, int] = {}
        pools: dict[KVPool, int] = {}
        for sequence in running:
            adapters.setdefault(id(sequence.group.adapter), len(adapters))
            pools.setdefault(sequence.pool, len(pools))
        self.sequences = sorted(
            running, key=lambda sequence: (adapters[id(sequence.group.adapter)], pools[sequence.pool], sequence.slot)
        )
        self.spans = spans_of((sequence.group, 1) for sequence in self.sequences)
        self.processor = _processor_of(self.sequences, vocabulary, device)
        self.tokens = torch.tensor([sequence.tokens[-1] for sequence in self.sequences], device=device)
        self.positions = torch.tensor([sequence.length for sequence in self.sequences], device=device)
        self.plan = DecodePlan([self._pool_rows(pool, device) for pool in pools])

    def _pool_rows(self, pool: KVPool, device: torch.device) -> KVPoolRows:
        by_slot = sorted((sequence.slot, row) for row, sequence in enumerate(self.sequences) if sequence.pool is pool)
        rows = [row for _, row in by_slot]
        return KVPoolRows(pool, rows, [self.sequences[row].length for row in rows], device)

    def advance(self, tokens: torch.Tensor) -> None:
        self.tokens = tokens
        self.positions += 1
        self.plan.advance()


class RunningBatch:
    """All sequences with the same base weights, which `key` names."""

    def __init__(self, key: str, cache: KVCache, model: InferenceModel, prompt_tokens: int) -> None:
        self.key = key
        self.running: list[RunningSequence] = []
        self._waiting: dict[str, deque[tuple[SequenceGroup, int]]] = {}
        """Waiting samples by tenant share, in the order of admission."""
        self._cache = cache
        self._model = model
        self._prompt_tokens = prompt_tokens
        self._by_pool: dict[KVPool, list[RunningSequence]] = {}
        self._rows: DecodeRows | None = None

    @property
    def waiting(self) -> int:
        return sum(map(len, self._waiting.values()))

    def groups(self) -> Iterator[SequenceGroup]:
        yield from (sequence.group for sequence in self.running)
        yield from (group for queue in self._waiting.values() for group, _ in queue)

    def add(self, group: SequenceGroup, indices: Iterable[int]) -> None:
        self._waiting.setdefault(group.share, deque()).extend((group, index) for index in indices)

    def drop(self, request_ids: set[str]) -> None:
        """Remove all sequences of these requests and free their slots."""
        remaining = {
            share: deque(entry for entry in queue if entry[0].request_id not in request_ids)
            for share, queue in self._waiting.items()
        }
        self._waiting = {share: queue for share, queue in remaining.items() if queue}
        for sequence in [sequence for sequence in self.running if sequence.group.request_id in request_ids]:
            self._remove(sequence)

    def step(self, outcomes: SliceOutcomes) -> None:
        admitted = self._admit()
        if admitted:
            self._prefill(admitted, outcomes)
        self._refill(outcomes)
        if self.running:
            self._decode(outcomes)

    def _admit(self) -> Admitted:
        """Admit waiting sequences while the KV cache has room: first come, first served, of the share with the fewest
        slots. No sequence overtakes one that is too large for the room there is. The samples of one request share one
        prefill of its prompt."""
        admitted: dict[str, tuple[SequenceGroup, list[RunningSequence]]] = {}
        slots = Counter(sequence.group.share for sequence in self.running)
        tokens = 0
        while self._waiting:
            share = min(self._waiting, key=slots.__getitem__)
            group, index = self._waiting[share][0]
            new = group.request_id not in admitted
            full = new and admitted and tokens + len(group.prompt) > self._prompt_tokens
            if full or not self._cache.fits(group.slot_length):
                break
            queue = self._waiting.pop(share)
            queue.popleft()
            if queue:
                # To the end: with more shares than slots, the shares behind it would otherwise never get one.
                self._waiting[share] = queue
            slots[share] += 1
            sequence = self._start(group, index)
            if sequence.refill:
                continue
            if new:
                admitted[group.request_id] = group, []
                tokens += len(group.prompt)
            admitted[group.request_id][1].append(sequence)
        return list(admitted.values())

    def _start(self, group: SequenceGroup, index: int) -> RunningSequence:
        pool, slot = self._cache.allocate(self.key, group.slot_length)
        sequence = RunningSequence(group, index, pool, slot)
        self.running.append(sequence)
        self._by_pool.setdefault(pool, []).append(sequence)
        self._rows = None
        return sequence

    def _prefill(self, admitted: Admitted, outcomes: SliceOutcomes) -> None:
        """Compute the prompts into the KV cache, and sample the first token of each sequence."""
        admitted = _group_by_adapter(admitted)
        plan = [self._plan_prompt(group, sequences) for group, sequences in admitted]
        with self._recording(group for group, _ in admitted) as routing:
            hidden = self._prompt_hidden(admitted, plan)
        lengths = [prompt.length for prompt in plan]
        starts = accumulate(lengths, initial=0)
        for (group, sequences), prompt, start in zip(admitted, plan, starts, strict=False):
            first, routed = sequences[0], b""
            if group.routers is not None:
                routed = b"".join(
                    [*(block.routing for block in prompt.prefix), *routing[start : start + prompt.length]]
                )
            for sequence in sequences:
                sequence.routing += routed
            self._cache.remember(group.prefix_owner, group.sample.prompt, first.pool, first.slot, routed)
        for (group, _), prompt_hidden in zip(admitted, torch.split(hidden, lengths), strict=True):
            if group.wants_prompt:
                outcomes.prompts.append((group.request_id, compute_prompt_logprobs(self._model, group, prompt_hidden)))
        outcomes.prompt_tokens += sum(lengths)
        outcomes.reused_tokens += sum(prompt.reused for prompt in plan)
        last = torch.tensor(lengths, device=hidden.device).cumsum(0) - 1
        self._sample_first(admitted, hidden[last], outcomes)

    def _refill(self, outcomes: SliceOutcomes) -> None:
        """Compute the keys and values of sequences that go on without those of the present weights: of their prompt and
        of all tokens but the newest, which the next decode step computes."""
        stale = [sequence for sequence in self.running if sequence.refill]
        while stale:
            tokens = itertools.accumulate(sequence.length for sequence in stale)
            count = max(sum(total <= self._prompt_tokens for total in tokens), 1)
            self._refill_some(stale[:count], outcomes)
            stale = stale[count:]

    def _refill_some(self, sequences: Sequence[RunningSequence], outcomes: SliceOutcomes) -> None:
        sequences = sorted(sequences, key=lambda sequence: id(sequence.group.adapter))
        parts = []
        for each in sequences:
            drawn = torch.tensor(each.tokens[:-1], dtype=torch.int64, device=each.group.prompt.device)
            parts.append(torch.cat([each.group.prompt, drawn]))
        hidden = self._model.hidden(
            torch.cat(parts),
            torch.cat([torch.arange(len(part), device=part.device) for part in parts]),
            spans_of((each.group, each.length) for each in sequences),
            PrefillPlan([Prompt(each.length, [(each.pool, each.slot)]) for each in sequences]),
        )
        for each, states in zip(sequences, torch.split(hidden, [each.length for each in sequences]), strict=True):
            each.refill, each.recomputed = False, True
            group = each.group
            if group.wants_prompt:
                prompt = compute_prompt_logprobs(self._model, group, states[: len(group.prompt)])
                outcomes.prompts.append((group.request_id, prompt))
                group.wants_prompt = False
        outcomes.prompt_tokens += len(hidden)

    def replace_weights(self, weights: str, adapter: Adapter, version: int, *, recompute: bool) -> None:
        """Draw on with a new version of weights that in-flight samplers share."""
        for group in self.groups():
            if group.weights == weights:
                group.adapter, group.version = adapter, version
        for sequence in self.running:
            sequence.refill |= recompute and sequence.group.weights == weights
        self._rows = None

    def take_drawn(self, outcomes: SliceOutcomes) -> None:
        """Report what in-flight samples that run on have drawn."""
        for sequence in self.running:
            if (part := sequence.take_drawn()) is not None:
                outcomes.drawn.append((sequence.group.request_id, part))

    def _plan_prompt(self, group: SequenceGroup, sequences: Sequence[RunningSequence]) -> Prompt:
        """Log probabilities of a prompt need the hidden states of all its tokens, so nothing of it is reused."""
        prefix = [] if group.wants_prompt else self._match_prefix(group)
        slots = [(sequence.pool, sequence.slot) for sequence in sequences]
        return Prompt(len(group.prompt) - len(prefix) * BLOCK, slots, prefix)

    def _match_prefix(self, group: SequenceGroup) -> Sequence[PrefixBlock]:
        recorded = group.routers is not None
        return self._cache.prefixes.match(group.prefix_owner, group.sample.prompt, routing=recorded)

    @contextmanager
    def _recording(self, groups: Iterable[SequenceGroup]) -> Iterator[list[bytes]]:
        """Record the routing of what is computed, if it is of any of these groups: a list that has it, token by token,
        when the context ends."""
        routing: list[bytes] = []
        if all(group.routers is None for group in groups):
            yield routing
            return
        routers = self._model.routers
        routers.start_recording()
        yield routing
        routing += [each.tobytes() for each in routers.encode(routers.take_recorded())]

    def _prompt_hidden(self, admitted: Admitted, plan: Sequence[Prompt]) -> torch.Tensor:
        """The hidden states of what is computed of all prompts, one after the other."""
        parts = [(group.prompt, prompt.reused) for (group, _), prompt in zip(admitted, plan, strict=True)]
        return self._model.hidden(
            torch.cat([tokens[reused:] for tokens, reused in parts]),
            torch.cat([torch.arange(reused, len(tokens), device=tokens.device) for tokens, reused in parts]),
            spans_of((group, prompt.length) for (group, _), prompt in zip(admitted, plan, strict=True)),
            PrefillPlan(plan),
        )

    def _sample_first(self, admitted: Admitted, hidden: torch.Tensor, outcomes: SliceOutcomes) -> None:
        """Sample the first token of each sequence from the hidden state of its prompt's last token."""
        device = hidden.device
        logits = self._model.logits(hidden, spans_of((group, 1) for group, _ in admitted))
        counts = torch.tensor([len(sequences) for _, sequences in admitted], device=device)
        sequences = [sequence for _, of_group in admitted for sequence in of_group]
        processor = _processor_of(sequences, self._model.vocabulary, device)
        uniform = _draw_uniform(sequences, processor, device)
        sampled = sample_tokens(logits.repeat_interleave(counts, 0), processor, uniform)
        self._accept(sequences, sampled, outcomes)

    def _decode(self, outcomes: SliceOutcomes) -> None:
        """Sample one more token of every running sequence."""
        if self._rows is None:
            self._rows = DecodeRows(self.running, self._model.vocabulary, self.running[0].group.prompt.device)
        rows = self._rows
        with self._recording(sequence.group for sequence in rows.sequences) as routing:
            hidden = self._model.hidden(rows.tokens, rows.positions, rows.spans, rows.plan)
        logits = self._model.logits(hidden, rows.spans)
        uniform = _draw_uniform(rows.sequences, rows.processor, rows.tokens.device)
        sampled = sample_tokens(logits, rows.processor, uniform)
        for row, sequence in enumerate(rows.sequences):
            sequence.length += 1
            if sequence.group.routers is not None:
                sequence.routing += routing[row]
        rows.advance(sampled.tokens)
        self._accept(rows.sequences, sampled, outcomes)

    def _accept(self, sequences: Sequence[RunningSequence], sampled: SampledTokens, outcomes: SliceOutcomes) -> None:
        self._record_top(sequences, sampled)
        outcomes.sampled_tokens += len(sequences)
        finished: list[RunningSequence] = []
        failures: dict[str, str] = {}
        for sequence, token, logprob in zip(sequences, sampled.tokens.tolist(), sampled.logprobs.tolist(), strict=True):
            if not math.isfinite(logprob):
                failures[sequence.group.request_id] = "the model's logits are not finite numbers"
                continue
            reason = sequence.accept(token, logprob)
            failure = "" if reason is not None or sequence.shape is None else sequence.shape.failure
            if failure:
                failures[sequence.group.request_id] = failure
            elif reason is not None:
                finished.append(sequence)
                if (part := sequence.take_drawn(reason)) is not None:
                    outcomes.drawn.append((sequence.group.request_id, part))
                outcomes.sequences.append((sequence.group.request_id, sequence.index, sequence.result(reason)))
            elif sequence.group.sample.stream and sequence.group.version is None:
                # Tokens of an in-flight sample may be drawn otherwise until they are durable.
                outcomes.streamed.append((sequence.group.request_id, sequence.last_part()))
        for sequence in finished:
            self._remove(sequence)
        if failures:
            outcomes.failed += failures.items()
            self.drop(set(failures))

    @staticmethod
    def _record_top(sequences: Sequence[RunningSequence], sampled: SampledTokens) -> None:
        rows = [row for row, sequence in enumerate(sequences) if sequence.group.sample.topk_sample_logprobs]
        if not rows:
            return
        most = max(sequences[row].group.sample.topk_sample_logprobs for row in rows)
        tokens, logprobs = top_of(sampled.distribution[rows], most)
        for number, row in enumerate(rows):
            sequences[row].record_top(tokens[number], logprobs[number])

    def _remove(self, sequence: RunningSequence) -> None:
        """Free the slot; the sequence in the last slot of the pool moves there."""
        neighbours = self._by_pool[sequence.pool]
        last = neighbours.pop()
        self._cache.free(sequence.pool, sequence.slot, sequence.length, last.length)
        if last is not sequence:
            last.slot = sequence.slot
            neighbours[sequence.slot] = last
        if not neighbours:
            del self._by_pool[sequence.pool]
        self.running.remove(sequence)
        self._rows = None


def _group_by_adapter(admitted: Admitted) -> Admitted:
    """Groups of one adapter are adjacent, by first appearance: the same order when this is replayed."""
    order: dict[int, int] = {}
    for group, _ in admitted:
        order.setdefault(id(group.adapter), len(order))
    return sorted(admitted, key=lambda entry: order[id(entry[0].adapter)])


def spans_of(lengths: Iterable[tuple[SequenceGroup, int]]) -> list[Span]:
    """Neighbours with the same adapter are one span."""
    spans = []
    for _, neighbours in groupby(lengths, key=lambda entry: id(entry[0].adapter)):
        entries = list(neighbours)
        spans.append(Span(entries[0][0].adapter, sum(length for _, length in entries)))
    return spans


def _processor_of(sequences: Sequence[RunningSequence], vocabulary: int, device: torch.device) -> LogitsProcessor:
    params = [sequence.group.sample.params for sequence in sequences]
    return LogitsProcessor(params, vocabulary, device, [sequence.shape for sequence in sequences])


def _draw_uniform(
    sequences: Sequence[RunningSequence], processor: LogitsProcessor, device: torch.device
) -> torch.Tensor | None:
    if not processor.draws:
        return None
    numbers = [0.0 if sequence.rng is None else sequence.rng.next() for sequence in sequences]
    return torch.tensor(numbers, dtype=torch.float64, device=device)
