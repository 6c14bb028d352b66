"""Runs a pass over packed rows: checks of datums, forward, losses (also those of groups), backward, gradient
accumulation, and rejection of rows that are too large.

Each row is a micro-batch. The gradients of a pass are committed to a model only if all of them are finite.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from time import perf_counter
from typing import Final, TypeVar

import msgspec
import torch
from torch.distributed.fsdp import FSDPModule

from strata.base.errors import Code, StrataError
from strata.base.support import report_experimental
from strata.train.core import model_options, ops
from strata.train.core.out_of_memory import out_of_memory_message
from strata.train.core.router_replay import ROUTER_REPLAY
from strata.train.runner.collectives import RankGroup
from strata.train.runner.model.base import BaseModel
from strata.train.runner.model.images import filler, read_images
from strata.train.runner.model.pipeline_parallel import RowStep, plan_steps
from strata.train.runner.model.process_memory import is_out_of_memory
from strata.train.runner.model.replay_check import verify_router_replay
from strata.train.runner.model.row_limit import RowMemory
from strata.train.runner.model.trained import LoraModel, TrainedModel
from strata.train.runner.passes.custom_loss import GroupLoss, GroupMember, check_group, compute_group
from strata.train.runner.passes.losses import RULES, check_config, measure_loss, read_custom_inputs, read_inputs
from strata.train.runner.passes.packed_row import (
    DatumImage,
    PackedDocument,
    Place,
    RowContents,
    group_by_adapter,
    pack_row,
)
from strata.train.runner.passes.partition import (
    ComputedDatum,
    ItemFailure,
    PackedDatum,
    RankPass,
    RankPassItem,
    RankReport,
)
from strata.train.runner.passes.row_results import RowLosses, RowResults
from strata.train.runner.passes.transfer import wait_for_copies

T = TypeVar("T")


class SplitDatum(msgspec.Struct, frozen=True, array_like=True):
    """A datum whose group is in several rows: what rank 0 needs to compute the loss of the group."""

    item: int
    datum: int
    logprobs: ops.Dense
    inputs: Mapping[str, ops.Dense]


class SplitGradient(msgspec.Struct, frozen=True, array_like=True):
    """The gradient of the loss of its group by the log probabilities of a datum; empty if it was not requested."""

    item: int
    datum: int
    gradient: ops.Dense | None
    metrics: Mapping[str, float]


_encode: Final = msgspec.msgpack.Encoder().encode
_decode_split: Final = msgspec.msgpack.Decoder(list[SplitDatum]).decode
_decode_gradients: Final = msgspec.msgpack.Decoder(list[SplitGradient]).decode


@dataclass
class PassTimes:
    forward_s: float = 0.0
    backward_s: float = 0.0
    tokens: int = 0


@dataclass
class PassOutcome:
    computed: list[ComputedDatum] = field(default_factory=list)
    failures: list[ItemFailure] = field(default_factory=list)
    gradients: dict[Place, SplitGradient] = field(default_factory=dict)
    """Gradients of datums whose groups are in several rows."""
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
        self._replay_problem: str | None = None
        """Why routing cannot be replayed, empty if it can; None before it was asked for."""

    def require_router_replay(self) -> None:
        """UNSUPPORTED if these ranks cannot replay routing. All ranks call it together."""
        if self._replay_problem is None:
            self._replay_problem = verify_router_replay(self._base, self._ranks)
            if self._ranks.is_rank0 and not self._replay_problem:
                report_experimental([ROUTER_REPLAY])
        if self._replay_problem:
            raise StrataError(Code.UNSUPPORTED, f"{ROUTER_REPLAY}: {self._replay_problem}")

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
            failures += _check_groups(rows[-1])
            failures += self._check_neighbours(rows[-1])
        return rows, failures

    def _check_neighbours(self, row: Sequence[PackedDocument]) -> list[ItemFailure]:
        """A journal may have rows that were packed with a release in which this family could be."""
        if self._base.rows == "packed" or len(row) <= 1:
            return []
        message = "its row has other documents, and this model takes one document per row"
        return [ItemFailure(each.item, each.datum, Code.UNSUPPORTED, message) for each in row]

    def _read(self, packed: PackedDatum, item: RankPassItem) -> PackedDocument | ItemFailure:
        """Validate one datum, on the host."""
        try:
            if item.custom is not None:
                inputs = read_custom_inputs(item.custom, packed.content, self._base.vocabulary)
            else:
                inputs = read_inputs(item.loss, item.config, packed.content, self._base.vocabulary)
            self._check_length(len(inputs.tokens))
            images = read_images(packed.content, self._base.images)
            replayed = packed.routing
            routing = None if replayed is None else self._base.routers.read(replayed, len(inputs.tokens))
        except StrataError as error:
            return ItemFailure(packed.item, packed.datum, error.code, error.message)
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            return self._too_large(packed.item, packed.content.length)
        model = self._models[item.model_id]
        adapter = model.adapter if isinstance(model, LoraModel) else None
        return PackedDocument(
            packed.item,
            packed.datum,
            item.loss,
            inputs,
            adapter,
            item.custom,
            item.group_size,
            item.groups,
            item.split,
            images,
            routing,
        )

    def _reject_oversized(self, rows: Sequence[Sequence[PackedDocument]]) -> list[ItemFailure]:
        """Rejects of rows that do not fit into memory together now the item with the most tokens, until the rest fits.
        Without stages, of each row."""
        failures: list[ItemFailure] = []
        in_flight = min(self._base.settings.parallel.pipeline, len(rows))
        for first in range(len(rows) - in_flight + 1):
            remaining = _tokens_by_item([document for row in rows[first : first + in_flight] for document in row])
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
        if item.replays:
            # Ranks of today may be others than those that created the model.
            self.require_router_replay()
        if (item.custom is None) == (item.loss is model_options.LossName.CUSTOM):
            raise StrataError(Code.INVALID, "the loss custom has a graph, and no other loss has one")

    def _check_length(self, length: int) -> None:
        if length > self._base.max_context:
            raise StrataError(Code.INVALID, f"it has {length} tokens where the model takes {self._base.max_context}")

    def _compute(self, work: RankPass, rows: Sequence[Sequence[PackedDocument]], items: Sequence[int]) -> PassOutcome:
        """Compute these items, on all ranks together, and commit the gradients that are finite on all of them."""
        self._number_adapters(work, items)
        models = {} if work.forward_only else self._begin(work, items)
        outcome = PassOutcome()
        split = [item for item in items if work.items[item].split]
        if split:
            self._compute_split(work, rows, split, outcome)
        wanted = [group_by_adapter([document for document in row if document.item in items]) for row in rows]
        self._compute_rows(work, wanted, outcome)
        failed = self._on_any_rank(items, {failure.item for failure in outcome.failures})
        tainted = self._commit(models, {work.items[item].model_id for item in failed})
        outcome.tainted = failed | {item for item in items if work.items[item].model_id in tainted}
        return outcome

    def _compute_split(
        self, work: RankPass, rows: Sequence[Sequence[PackedDocument]], split: Sequence[int], outcome: PassOutcome
    ) -> None:
        """The first of two passes for groups that are in several rows: rank 0 gets all log probabilities, and computes
        the losses and their gradients. The second pass then needs no more than those of its own rows."""
        own: list[SplitDatum] = []
        for number, documents in enumerate(rows):
            wanted = group_by_adapter([document for document in documents if document.item in split])
            with self._computing(work, _tokens_by_item(wanted)), torch.no_grad():
                contents = self._pack(wanted, work, number, losses=False)
                logprobs = self._base.logprobs(contents.row)
            if wanted and self._base.mesh.is_first_of_row:
                own += _split_datums(wanted, logprobs)
        gathered = [datum for data in self._ranks.gather(_encode(own)) for datum in _decode_split(data)]
        tokens: Counter[int] = Counter()
        for datum in gathered:
            tokens[datum.item] += datum.logprobs.shape[0]
        with self._computing(work, tokens):
            computed, failures = _compute_gathered(work, gathered) if self._ranks.is_rank0 else ([], [])
        outcome.failures += failures
        shared = _decode_gradients(self._ranks.all_gather_bytes(_encode(computed))[0])
        outcome.gradients = {(each.item, each.datum): each for each in shared}

    def _computing(self, work: RankPass, tokens: Mapping[int, int]) -> AbstractContextManager[None]:
        """Compute so many tokens of each item. The record names the model of the item that has most of them."""
        name = work.items[max(tokens, key=tokens.__getitem__)].model_id if tokens else ""
        return self._memory.computing(name, sum(tokens.values()))

    def _number_adapters(self, work: RankPass, items: Sequence[int]) -> None:
        """All ranks have the same items, and so number the adapters of a pass alike."""
        models = [self._models[work.items[item].model_id] for item in items]
        adapters = (model.adapter for model in models if isinstance(model, LoraModel))
        self._base.adapters.in_pass = list(dict.fromkeys(adapters))

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

    def _compute_rows(self, work: RankPass, rows: Sequence[list[PackedDocument]], outcome: PassOutcome) -> None:
        """Each row forward and, unless the pass is forward only, backward: row after row, or as the schedule of this
        rank's stage has it."""
        backward = not work.forward_only
        totals: dict[int, torch.Tensor] = {}
        results: list[RowResults] = []
        for step in self._steps(len(rows), backward=backward):
            with self._computing(work, _tokens_by_item(rows[step.row])):
                if not step.is_backward:
                    pack = partial(self._pack, rows[step.row], work, step.row)
                    totals[step.row] = self._forward(pack, results, outcome, backward=backward)
                else:
                    self._base.reduce_gradients(enabled=step.row == len(rows) - 1)
                    self._backward(totals[step.row])
                if step.is_backward or not backward:
                    del totals[step.row]
        self._collect(results, outcome, backward=backward)

    def _steps(self, rows: int, *, backward: bool) -> list[RowStep]:
        if not backward:
            return [RowStep(row, is_backward=False) for row in range(rows)]
        return plan_steps(self._base.settings.parallel.pipeline, self._base.mesh.stage.number, rows)

    def _pack(
        self, documents: Sequence[PackedDocument], work: RankPass, row: int, *, losses: bool = True
    ) -> RowContents:
        """Packs a row; with losses, if it has documents and this rank is of the last stage."""
        base = self._base
        return pack_row(
            documents,
            self._ranks.device,
            slices=base.mesh.context.size,
            losses=losses and bool(documents) and base.mesh.stage.is_last,
            fillers=self._fillers(documents, work.images[row] if work.images else 0),
        )

    def _fillers(self, documents: Sequence[PackedDocument], images: int) -> Sequence[DatumImage]:
        """Images beyond those of the documents, for the collectives in which other ranks gather the tower."""
        form = self._base.images
        if isinstance(form, str) or not isinstance(self._base.packed, FSDPModule):
            return ()
        return [filler(form)] * (images - sum(len(document.images) for document in documents))

    def _forward(
        self, pack: Callable[[], RowContents], results: list[RowResults], outcome: PassOutcome, *, backward: bool
    ) -> torch.Tensor:
        """One micro-batch, up to its loss. An empty row is computed too: the other ranks wait in the collectives of
        every layer."""
        started = perf_counter()
        contents = pack()
        has_losses = bool(contents.documents) and self._base.mesh.stage.is_last
        losses = RowLosses()
        with torch.set_grad_enabled(backward):
            logprobs = self._base.logprobs(contents.row)
            if has_losses:
                total = self._losses(contents, logprobs, outcome, losses, backward=backward)
                results.append(RowResults.start(contents, logprobs, losses))
            else:
                total = logprobs.sum() * 0
        self.times.forward_s += perf_counter() - started
        self.times.tokens += sum(len(document.inputs.tokens) for document in contents.documents)
        return total

    def _backward(self, total: torch.Tensor) -> None:
        started = perf_counter()
        total.backward()  # type: ignore[no-untyped-call]
        self.times.backward_s += perf_counter() - started

    def _collect(self, results: Sequence[RowResults], outcome: PassOutcome, *, backward: bool) -> None:
        """Results are read when all work of the pass was started: reading one of them waits for the device."""
        started = perf_counter()
        wait_for_copies(self._ranks.device)
        for each in chain.from_iterable(row.read() for row in results):
            if isinstance(each, ItemFailure):
                outcome.failures.append(each)
            else:
                outcome.computed.append(each)
        waited_s = perf_counter() - started
        if backward:
            self.times.backward_s += waited_s
        else:
            self.times.forward_s += waited_s

    def _losses(
        self, contents: RowContents, logprobs: torch.Tensor, outcome: PassOutcome, losses: RowLosses, *, backward: bool
    ) -> torch.Tensor:
        """The sum of all losses of a row. Each kind of loss is computed at once for all of its documents."""
        totals = []
        for batch, own in zip(contents.batches, contents.of_batches(logprobs), strict=True):
            terms = RULES[batch.loss].loss(own, batch.inputs)
            totals.append(terms.loss.sum())
            losses.measured.append(measure_loss(terms, batch.inputs, own))
        if contents.custom:
            totals += self._custom_losses(contents, logprobs, outcome, losses, backward=backward)
        return torch.stack(totals).sum() if len(totals) > 1 else totals[0]

    def _custom_losses(
        self, contents: RowContents, logprobs: torch.Tensor, outcome: PassOutcome, losses: RowLosses, *, backward: bool
    ) -> list[torch.Tensor]:
        groups: defaultdict[Place, list[tuple[PackedDocument, GroupMember]]] = defaultdict(list)
        for document, flat in zip(contents.documents, torch.split(logprobs, contents.sizes), strict=True):
            if document.custom is not None:
                shaped = flat.view(document.inputs.targets.shape)
                groups[document.group].append((document, GroupMember(shaped, contents.custom[document.place])))
        totals = []
        for members in groups.values():
            members.sort(key=lambda member: member[0].datum)
            totals += self._group_losses(members, outcome, losses, backward=backward)
        return totals

    def _group_losses(
        self,
        members: Sequence[tuple[PackedDocument, GroupMember]],
        outcome: PassOutcome,
        losses: RowLosses,
        *,
        backward: bool,
    ) -> list[torch.Tensor]:
        """Returns for each member a number with the gradient of its group's loss: that loss itself needs no second
        backward."""
        first = members[0][0]
        if first.split:
            computed = [outcome.gradients.get((document.item, document.datum)) for document, _ in members]
        else:
            assert first.custom is not None
            try:
                loss = compute_group(first.custom, [member for _, member in members], backward=backward)
            except StrataError as error:
                outcome.failures.append(ItemFailure(first.item, first.datum, error.code, error.message))
                return [member.logprobs.sum() * 0 for _, member in members]
            sizes = [member.logprobs.numel() for _, member in members]
            computed = list(_gradients_of(first.item, first.datum, loss, sizes))
        totals = []
        for (document, member), gradient in zip(members, computed, strict=True):
            logprobs = member.logprobs
            if gradient is None:
                # Rank 0 has reported why.
                totals.append(logprobs.sum() * 0)
                continue
            losses.of_groups[document.place] = gradient.metrics
            weights = torch.zeros_like(logprobs) if gradient.gradient is None else _from_dense(gradient.gradient)
            totals.append((weights.to(logprobs.device) * logprobs).sum())
        return totals


def _gradients_of(item: int, first: int, loss: GroupLoss, tokens: Sequence[int]) -> Iterator[SplitGradient]:
    """Yields the gradient of each member of a group; its loss and metrics are those of the first."""
    for place, count in enumerate(tokens):
        metrics = {"loss:sum": 0.0 if place else loss.loss, "tokens:sum": float(count)}
        gradient = _to_dense(loss.gradients[place]) if loss.gradients else None
        yield SplitGradient(item, first + place, gradient, metrics if place else {**metrics, **loss.metrics})


def _check_groups(row: Sequence[PackedDocument]) -> list[ItemFailure]:
    """Failures of groups in this row whose graph does not fit their shapes, or would compute too much."""
    groups: defaultdict[Place, list[PackedDocument]] = defaultdict(list)
    for document in row:
        if document.custom is not None and not document.split:
            groups[document.group].append(document)
    failures: dict[int, ItemFailure] = {}
    checked: set[tuple[object, ...]] = set()
    for (item, _), documents in groups.items():
        documents.sort(key=lambda document: document.datum)
        members = [
            GroupMember(torch.from_numpy(document.inputs.weights), document.inputs.custom) for document in documents
        ]
        shapes = (item, *(each.shape for member in members for each in (member.logprobs, *member.inputs.values())))
        if item in failures or shapes in checked:
            continue
        checked.add(shapes)
        assert documents[0].custom is not None
        try:
            check_group(documents[0].custom, members, documents[0].groups)
        except StrataError as error:
            failures[item] = ItemFailure(item, documents[0].datum, error.code, error.message)
    return list(failures.values())


def _split_datums(documents: Sequence[PackedDocument], logprobs: torch.Tensor) -> Iterator[SplitDatum]:
    sizes = [document.inputs.targets.size for document in documents]
    for document, flat in zip(documents, torch.split(logprobs, sizes), strict=True):
        shaped = flat.view(document.inputs.targets.shape)
        inputs = {name: _to_dense(tensor) for name, tensor in document.inputs.custom.items()}
        yield SplitDatum(document.item, document.datum, _to_dense(shaped), inputs)


def _compute_gathered(work: RankPass, datums: Sequence[SplitDatum]) -> tuple[list[SplitGradient], list[ItemFailure]]:
    """The losses of groups whose datums are of several rows, on rank 0."""
    groups: defaultdict[Place, list[SplitDatum]] = defaultdict(list)
    for datum in datums:
        groups[datum.item, datum.datum // work.items[datum.item].group_size].append(datum)
    computed: list[SplitGradient] = []
    failures: dict[int, ItemFailure] = {}
    for (item, _), group in sorted(groups.items()):
        group.sort(key=lambda datum: datum.datum)
        custom = work.items[item].custom
        assert custom is not None
        members = [
            GroupMember(_from_dense(datum.logprobs), {name: _from_dense(each) for name, each in datum.inputs.items()})
            for datum in group
        ]
        try:
            check_group(custom, members, work.items[item].groups)
            loss = compute_group(custom, members, backward=not work.forward_only)
        except StrataError as error:
            failures.setdefault(item, ItemFailure(item, group[0].datum, error.code, error.message))
            continue
        computed += _gradients_of(item, group[0].datum, loss, [member.logprobs.numel() for member in members])
    return computed, list(failures.values())


def _to_dense(tensor: torch.Tensor) -> ops.Dense:
    """Encode a tensor as float32, or as int64 if it has whole numbers."""
    dtype = ops.DType.F32 if tensor.is_floating_point() else ops.DType.I64
    plain = tensor.detach().to("cpu", _TORCH[dtype]).contiguous()
    return ops.Dense(dtype, tuple(plain.shape), plain.numpy().tobytes())


def _from_dense(dense: ops.Dense) -> torch.Tensor:
    return torch.frombuffer(bytearray(dense.data), dtype=_TORCH[dense.dtype]).view(dense.shape)


_TORCH: Final = {ops.DType.F32: torch.float32, ops.DType.I64: torch.int64}


def _tokens_by_item(documents: Sequence[PackedDocument]) -> dict[int, int]:
    tokens: dict[int, int] = {}
    for document in documents:
        tokens[document.item] = tokens.get(document.item, 0) + len(document.inputs.tokens)
    return tokens
