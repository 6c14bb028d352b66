"""A pass over packed rows: forward, the losses, backward, and gradients that are added only if all went well."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field
from time import perf_counter

import torch

from strata.base.errors import Code, StrataError
from strata.train.core import ops
from strata.train.core.memory import out_of_memory_message
from strata.train.runner.collectives import RankGroup
from strata.train.runner.lora.adapter import Adapter, Span
from strata.train.runner.model.base import BaseModel
from strata.train.runner.model.memory import RowMemory, is_out_of_memory
from strata.train.runner.model.trained import LoraModel, TrainedModel
from strata.train.runner.passes.logprobs import Row
from strata.train.runner.passes.losses import RULES, Inputs, check_config, inputs_of, metrics_of
from strata.train.runner.passes.partition import Computed, Item, RankPass, RankReport, Refused
from strata.train.runner.passes.tensors import dense_of


@dataclass
class Times:
    forward_s: float = 0.0
    backward_s: float = 0.0
    tokens: int = 0


@dataclass(frozen=True)
class Document:
    """A datum in its row, ready to be computed."""

    item: int
    datum: int
    loss: ops.LossName
    inputs: Inputs
    adapter: Adapter | None


@dataclass
class Attempt:
    computed: list[Computed] = field(default_factory=list)
    refused: list[Refused] = field(default_factory=list)
    spoiled: frozenset[int] = frozenset()
    """Items of which nothing counts and nothing was added: the same on all ranks."""


class PassRunner:
    def __init__(
        self, base: BaseModel, ranks: RankGroup, models: Mapping[str, TrainedModel], memory: RowMemory
    ) -> None:
        self._base = base
        self._ranks = ranks
        self._memory = memory
        self._models = models
        self.times = Times()

    def run(self, work: RankPass) -> RankReport:
        """Items that cannot be computed are left out, on all ranks; the others are computed as if alone.

        A loss that is not finite may come from another item of the same row (a product of zero and infinity). So such
        an item is computed once more by itself; if it fails so, it has only itself to blame. What was finite, also on
        the way back, was not reached by it and counts: a broken model costs its company no more than its own time.
        """
        self.times = Times()
        rows, refused = self._prepare(work)
        if not work.replayed:
            refused += self._too_long(rows)
        bad = {one.item for one in refused}
        flags = self._ranks.all_reduce_any([item in bad for item in range(len(work.items))])
        live = [item for item, flag in enumerate(flags) if not flag]
        if not live:
            return RankReport((), refused)
        together = self._attempt(work, rows, live)
        computed = [one for one in together.computed if one.item not in together.spoiled]
        if len(live) == 1:
            return RankReport(computed, [*refused, *together.refused])
        for item in sorted(together.spoiled):
            alone = self._attempt(work, rows, [item])
            refused += alone.refused
            computed += [] if alone.spoiled else alone.computed
        return RankReport(computed, refused)

    def _prepare(self, work: RankPass) -> tuple[list[list[Document]], list[Refused]]:
        """Everything that may be wrong with a request is found here, before the ranks begin to wait for each other."""
        refused: list[Refused] = []
        for number, item in enumerate(work.items):
            try:
                self._check(item)
            except StrataError as error:
                refused.append(Refused(number, -1, error.code, error.message))
        bad = {one.item for one in refused}
        rows: list[list[Document]] = []
        for row in work.rows:
            documents: list[Document] = []
            for placed in row:
                item = work.items[placed.item]
                if placed.item in bad:
                    continue
                try:
                    inputs = inputs_of(item.loss, item.config, placed.content, self._base.vocabulary)
                    self._check_length(len(inputs.tokens))
                    here = inputs.to(self._ranks.device)
                except StrataError as error:
                    refused.append(Refused(placed.item, placed.datum, error.code, error.message))
                    continue
                except (RuntimeError, MemoryError) as error:
                    if not is_out_of_memory(error):
                        raise
                    message = out_of_memory_message(placed.content.length, self._memory.limit)
                    refused.append(Refused(placed.item, -1, Code.EXHAUSTED, message, memory=True))
                    continue
                model = self._models[item.model_id]
                adapter = model.adapter if isinstance(model, LoraModel) else None
                documents.append(Document(placed.item, placed.datum, item.loss, here, adapter))
            rows.append(documents)
        return rows, refused

    def _too_long(self, rows: Sequence[Sequence[Document]]) -> list[Refused]:
        """Of each row for which there is no memory now, the item with the most tokens, until the rest fits."""
        refused: list[Refused] = []
        for row in rows:
            left = _tokens_by_item(row)
            while (tokens := sum(left.values())) and not self._memory.fits(tokens):
                item = max(left, key=lambda each: left[each])
                message = out_of_memory_message(tokens, self._memory.limit)
                refused.append(Refused(item, -1, Code.EXHAUSTED, message, memory=True))
                del left[item]
        return refused

    def _check(self, item: Item) -> None:
        if item.model_id not in self._models:
            raise StrataError(Code.NOT_FOUND, f"there is no model {item.model_id!r}")
        check_config(item.loss, item.config)

    def _check_length(self, length: int) -> None:
        if length > self._base.max_context:
            raise StrataError(Code.INVALID, f"it has {length} tokens where the model takes {self._base.max_context}")

    def _attempt(self, work: RankPass, rows: Sequence[Sequence[Document]], live: Sequence[int]) -> Attempt:
        """All ranks together. Gradients are added to the models of which everything was finite on all of them."""
        models = {} if work.forward_only else {name: self._models[name] for name in _names(work.items, live)}
        attempt = Attempt()
        for model in models.values():
            model.begin()
        for documents in rows:
            own = _by_model([document for document in documents if document.item in live])
            of_items = _tokens_by_item(own)
            longest = max(of_items, key=lambda item: of_items[item], default=None)
            name = "" if longest is None else work.items[longest].model_id
            with self._memory.computing(name, sum(of_items.values())):
                self._row(own, attempt, backward=not work.forward_only)
        bad = {one.item for one in attempt.refused}
        flags = self._ranks.all_reduce_any([item in bad for item in live])
        attempt.spoiled = frozenset(item for item, flag in zip(live, flags, strict=True) if flag)
        broken = self._broken(models, {work.items[item].model_id for item in attempt.spoiled})
        for name, model in models.items():
            if name in broken:
                model.discard()
            else:
                model.commit()
        attempt.spoiled |= {item for item in live if work.items[item].model_id in broken}
        return attempt

    def _broken(self, models: Mapping[str, TrainedModel], spoiled: Set[str]) -> Set[str]:
        """The models whose gradients of this pass cannot be used, since some item of theirs is spoiled: they are one
        sum. And any other that something not finite came to on the way back."""
        if not models or not spoiled:
            return frozenset()
        flags = self._ranks.all_reduce_any([name in spoiled or not model.is_finite() for name, model in models.items()])
        return {name for name, flag in zip(models, flags, strict=True) if flag}

    def _row(self, documents: Sequence[Document], attempt: Attempt, *, backward: bool) -> None:
        """Also a row of nothing is computed: the other ranks meet this one in every layer."""
        row = _row(documents, self._ranks.device)
        started = perf_counter()
        with torch.set_grad_enabled(backward):
            logprobs = self._base.logprobs(row)
            if documents:
                sizes = [document.inputs.targets.numel() for document in documents]
                total = self._losses(documents, torch.split(logprobs, sizes), attempt)
            else:
                total = logprobs.sum() * 0
        between = perf_counter()
        if backward:
            total.backward()  # type: ignore[no-untyped-call]
            self.times.backward_s += perf_counter() - between
        self.times.forward_s += between - started
        self.times.tokens += sum(len(document.inputs.tokens) for document in documents)

    def _losses(
        self, documents: Sequence[Document], logprobs: Sequence[torch.Tensor], attempt: Attempt
    ) -> torch.Tensor:
        losses = []
        for document, flat in zip(documents, logprobs, strict=True):
            shaped = flat.view(document.inputs.targets.shape)
            terms = RULES[document.loss].loss(shaped, document.inputs)
            losses.append(terms.loss)
            metrics = metrics_of(terms, document.inputs, shaped)
            if not math.isfinite(metrics["loss:sum"]):
                message = f"its loss is {metrics['loss:sum']}"
                attempt.refused.append(Refused(document.item, document.datum, Code.INVALID, message))
                continue
            output = ops.DatumOutput({"logprobs": dense_of(shaped)})
            attempt.computed.append(Computed(document.item, document.datum, output, metrics))
        return torch.stack(losses).sum()


def _tokens_by_item(documents: Sequence[Document]) -> dict[int, int]:
    found: dict[int, int] = {}
    for document in documents:
        found[document.item] = found.get(document.item, 0) + len(document.inputs.tokens)
    return found


def _names(items: Sequence[Item], live: Sequence[int]) -> list[str]:
    """The models of these items, each once."""
    return list(dict.fromkeys(items[item].model_id for item in live))


def _by_model(documents: list[Document]) -> list[Document]:
    """Documents of one model side by side, so that its adapter is applied to them at once."""
    order: dict[int, int] = {}
    for document in documents:
        order.setdefault(id(document.adapter), len(order))
    return sorted(documents, key=lambda document: order[id(document.adapter)])


def _row(documents: Sequence[Document], device: torch.device) -> Row:
    if not documents:
        nothing = torch.zeros(1, dtype=torch.int64, device=device)
        return Row(tokens=nothing, documents=[1], spans=[Span(None, 1)], places=nothing, targets=nothing)
    lengths = [len(document.inputs.tokens) for document in documents]
    spans: list[Span] = []
    places: list[torch.Tensor] = []
    start = 0
    for document, length in zip(documents, lengths, strict=True):
        if spans and spans[-1].adapter is document.adapter:
            spans[-1] = Span(document.adapter, spans[-1].length + length)
        else:
            spans.append(Span(document.adapter, length))
        per_token = document.inputs.targets.numel() // length
        places.append(torch.arange(start, start + length, device=device).repeat_interleave(per_token))
        start += length
    return Row(
        tokens=torch.cat([document.inputs.tokens for document in documents]),
        documents=lengths,
        spans=spans,
        places=torch.cat(places),
        targets=torch.cat([document.inputs.targets.flatten() for document in documents]),
    )
