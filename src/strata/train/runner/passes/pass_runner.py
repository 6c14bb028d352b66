"""A forward_backward pass over packed rows: forward, losses, backward, and gradient accumulation.

Each row is a micro-batch. The gradients of a pass are committed to a model only if all of them are finite.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field
from time import perf_counter
from typing import TypeVar

import torch

from strata.base.errors import Code, StrataError
from strata.train.core import ops
from strata.train.core.memory import out_of_memory_message
from strata.train.runner.collectives import RankGroup
from strata.train.runner.lora import Adapter, Span
from strata.train.runner.model.base import BaseModel
from strata.train.runner.model.memory import RowMemory, is_out_of_memory
from strata.train.runner.model.trained import LoraModel, TrainedModel
from strata.train.runner.passes.logprobs import PackedRow
from strata.train.runner.passes.losses import RULES, LossInputs, check_config, metrics_of, read_inputs
from strata.train.runner.passes.partition import (
    ComputedDatum,
    ItemFailure,
    PackedDatum,
    RankPass,
    RankPassItem,
    RankReport,
)

T = TypeVar("T")


@dataclass
class PassTimes:
    forward_s: float = 0.0
    backward_s: float = 0.0
    tokens: int = 0


@dataclass(frozen=True)
class PackedDocument:
    """A datum in its row, ready to be computed."""

    item: int
    datum: int
    loss: ops.LossName
    inputs: LossInputs
    adapter: Adapter | None


@dataclass
class PassOutcome:
    computed: list[ComputedDatum] = field(default_factory=list)
    failures: list[ItemFailure] = field(default_factory=list)
    tainted: frozenset[int] = frozenset()
    """Items whose results and gradients were discarded: the same on all ranks."""


class PassRunner:
    def __init__(
        self, base: BaseModel, ranks: RankGroup, models: Mapping[str, TrainedModel], memory: RowMemory
    ) -> None:
        self._base = base
        self._ranks = ranks
        self._memory = memory
        self._models = models
        self.times = PassTimes()

    def run(self, work: RankPass) -> RankReport:
        """Items that cannot be computed are left out, on all ranks; the others are computed as if alone.

        A loss that is not finite may come from another item of the same row (zero times infinity). So such an item is
        computed once more by itself; if it fails again, the fault is its own. An item whose numbers were all finite,
        in the backward pass too, was not tainted and counts: a broken model costs the other tenants only its own time.
        """
        self.times = PassTimes()
        rows, failures = self._prepare(work)
        if not work.replayed:
            failures += self._reject_oversized(rows)
        numbers = range(len(work.items))
        rejected = self._on_any_rank(numbers, {failure.item for failure in failures})
        items = [item for item in numbers if item not in rejected]
        if not items:
            return RankReport((), failures)
        outcome = self._compute(work, rows, items)
        computed = [datum for datum in outcome.computed if datum.item not in outcome.tainted]
        if len(items) == 1:
            return RankReport(computed, [*failures, *outcome.failures])
        for item in sorted(outcome.tainted):
            alone = self._compute(work, rows, [item])
            failures += alone.failures
            computed += [] if alone.tainted else alone.computed
        return RankReport(computed, failures)

    def _prepare(self, work: RankPass) -> tuple[list[list[PackedDocument]], list[ItemFailure]]:
        """Validate the whole request here, before the first collective of the pass."""
        failures = self._check_items(work.items)
        rejected = {failure.item for failure in failures}
        rows: list[list[PackedDocument]] = []
        for row in work.rows:
            read = [self._read(packed, work.items[packed.item]) for packed in row if packed.item not in rejected]
            rows.append([document for document in read if isinstance(document, PackedDocument)])
            failures += [failure for failure in read if isinstance(failure, ItemFailure)]
        return rows, failures

    def _read(self, packed: PackedDatum, item: RankPassItem) -> PackedDocument | ItemFailure:
        """Validate one datum and move it to the device."""
        try:
            inputs = read_inputs(item.loss, item.config, packed.content, self._base.vocabulary)
            self._check_length(len(inputs.tokens))
            on_device = inputs.to(self._ranks.device)
        except StrataError as error:
            return ItemFailure(packed.item, packed.datum, error.code, error.message)
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            return self._too_large(packed.item, packed.content.length)
        model = self._models[item.model_id]
        adapter = model.adapter if isinstance(model, LoraModel) else None
        return PackedDocument(packed.item, packed.datum, item.loss, on_device, adapter)

    def _reject_oversized(self, rows: Sequence[Sequence[PackedDocument]]) -> list[ItemFailure]:
        """Of each row that does not fit into memory now, reject the item with the most tokens until the rest fits."""
        failures: list[ItemFailure] = []
        for row in rows:
            remaining = _tokens_by_item(row)
            while (tokens := sum(remaining.values())) and not self._memory.fits(tokens):
                largest = max(remaining, key=remaining.__getitem__)
                failures.append(self._too_large(largest, tokens))
                del remaining[largest]
        return failures

    def _too_large(self, item: int, tokens: int) -> ItemFailure:
        return ItemFailure(item, -1, Code.EXHAUSTED, out_of_memory_message(tokens, self._memory.limit), memory=True)

    def _check_items(self, items: Sequence[RankPassItem]) -> list[ItemFailure]:
        failures: list[ItemFailure] = []
        for number, item in enumerate(items):
            try:
                self._check(item)
            except StrataError as error:
                failures.append(ItemFailure(number, -1, error.code, error.message))
        return failures

    def _check(self, item: RankPassItem) -> None:
        if item.model_id not in self._models:
            raise StrataError(Code.NOT_FOUND, f"there is no model {item.model_id!r}")
        check_config(item.loss, item.config)

    def _check_length(self, length: int) -> None:
        if length > self._base.max_context:
            raise StrataError(Code.INVALID, f"it has {length} tokens where the model takes {self._base.max_context}")

    def _compute(self, work: RankPass, rows: Sequence[Sequence[PackedDocument]], items: Sequence[int]) -> PassOutcome:
        """Compute these items, on all ranks together, and commit the gradients that are finite on all of them."""
        models = {} if work.forward_only else self._begin(work, items)
        outcome = PassOutcome()
        for documents in rows:
            wanted = _group_by_adapter([document for document in documents if document.item in items])
            tokens = _tokens_by_item(wanted)
            name = work.items[max(tokens, key=tokens.__getitem__)].model_id if tokens else ""
            with self._memory.computing(name, sum(tokens.values())):
                self._compute_row(wanted, outcome, backward=not work.forward_only)
        failed = self._on_any_rank(items, {failure.item for failure in outcome.failures})
        tainted = self._commit(models, {work.items[item].model_id for item in failed})
        outcome.tainted = failed | {item for item in items if work.items[item].model_id in tainted}
        return outcome

    def _begin(self, work: RankPass, items: Sequence[int]) -> dict[str, TrainedModel]:
        """Begin to stage the gradients of the models of these items."""
        names = dict.fromkeys(work.items[number].model_id for number in items)
        models = {name: self._models[name] for name in names}
        for model in models.values():
            model.begin()
        return models

    def _commit(self, models: Mapping[str, TrainedModel], failed: Set[str]) -> Set[str]:
        """Commit the gradients of this pass, or discard those that cannot be used and return their models: those of a
        failed item, because a model's gradients are one sum, and any other that a value which is not finite reached in
        the backward pass."""
        tainted: Set[str] = frozenset()
        if models and failed:
            own = {name for name, model in models.items() if name in failed or not model.is_finite()}
            tainted = self._on_any_rank(list(models), own)
        for name, model in models.items():
            if name in tainted:
                model.discard()
            else:
                model.commit()
        return tainted

    def _on_any_rank(self, all_of: Sequence[T], own: Set[T]) -> frozenset[T]:
        """Those of `all_of` that are in `own` on any rank. All ranks call it with the same `all_of`."""
        flags = self._ranks.all_reduce_any([each in own for each in all_of])
        return frozenset(each for each, flag in zip(all_of, flags, strict=True) if flag)

    def _compute_row(self, documents: Sequence[PackedDocument], outcome: PassOutcome, *, backward: bool) -> None:
        """One micro-batch. An empty row is computed too: the other ranks wait in the collectives of every layer."""
        row = _pack(documents, self._ranks.device)
        started = perf_counter()
        with torch.set_grad_enabled(backward):
            logprobs = self._base.logprobs(row)
            if documents:
                sizes = [document.inputs.targets.numel() for document in documents]
                total = self._losses(documents, torch.split(logprobs, sizes), outcome)
            else:
                total = logprobs.sum() * 0
        forwarded = perf_counter()
        if backward:
            total.backward()  # type: ignore[no-untyped-call]
            self.times.backward_s += perf_counter() - forwarded
        self.times.forward_s += forwarded - started
        self.times.tokens += sum(len(document.inputs.tokens) for document in documents)

    def _losses(
        self, documents: Sequence[PackedDocument], logprobs: Sequence[torch.Tensor], outcome: PassOutcome
    ) -> torch.Tensor:
        losses = []
        for document, flat in zip(documents, logprobs, strict=True):
            shaped = flat.view(document.inputs.targets.shape)
            terms = RULES[document.loss].loss(shaped, document.inputs)
            losses.append(terms.loss)
            metrics = metrics_of(terms, document.inputs, shaped)
            if not math.isfinite(metrics["loss:sum"]):
                message = f"its loss is {metrics['loss:sum']}"
                outcome.failures.append(ItemFailure(document.item, document.datum, Code.INVALID, message))
                continue
            output = ops.DatumOutput({"logprobs": _to_dense(shaped)})
            outcome.computed.append(ComputedDatum(document.item, document.datum, output, metrics))
        return torch.stack(losses).sum()


def _to_dense(tensor: torch.Tensor) -> ops.Dense:
    """Encode a tensor as float32."""
    plain = tensor.detach().to("cpu", torch.float32).contiguous()
    return ops.Dense(ops.DType.F32, tuple(plain.shape), plain.numpy().tobytes())


def _tokens_by_item(documents: Sequence[PackedDocument]) -> dict[int, int]:
    tokens: dict[int, int] = {}
    for document in documents:
        tokens[document.item] = tokens.get(document.item, 0) + len(document.inputs.tokens)
    return tokens


def _group_by_adapter(documents: list[PackedDocument]) -> list[PackedDocument]:
    """Documents of one adapter are adjacent, so that it is applied to them at once."""
    order: dict[int, int] = {}
    for document in documents:
        order.setdefault(id(document.adapter), len(order))
    return sorted(documents, key=lambda document: order[id(document.adapter)])


def _pack(documents: Sequence[PackedDocument], device: torch.device) -> PackedRow:
    if not documents:
        zero = torch.zeros(1, dtype=torch.int64, device=device)
        return PackedRow(tokens=zero, documents=[1], spans=[Span(None, 1)], logit_indices=zero, targets=zero)
    lengths = [len(document.inputs.tokens) for document in documents]
    spans: list[Span] = []
    logit_indices: list[torch.Tensor] = []
    start = 0
    for document, length in zip(documents, lengths, strict=True):
        if spans and spans[-1].adapter is document.adapter:
            spans[-1] = Span(document.adapter, spans[-1].length + length)
        else:
            spans.append(Span(document.adapter, length))
        per_token = document.inputs.targets.numel() // length
        logit_indices.append(torch.arange(start, start + length, device=device).repeat_interleave(per_token))
        start += length
    return PackedRow(
        tokens=torch.cat([document.inputs.tokens for document in documents]),
        documents=lengths,
        spans=spans,
        logit_indices=torch.cat(logit_indices),
        targets=torch.cat([document.inputs.targets.flatten() for document in documents]),
    )
