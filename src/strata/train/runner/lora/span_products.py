"""Multiplies each span of a packed row by the matrices of its adapter, and accumulates their gradients: span by span,
or all spans at once, in grouped products or in a batch.

`choose_products` is the only place that knows the devices. A loop over the spans starts six products for each, and
needs no memory besides the output. Grouped products start as many operations however many adapters a row has, and copy
the matrices of a layer into one tensor before. That pays where starting an operation takes longer than the operation,
and where torch has a kernel for it: elsewhere, `grouped_mm` is itself a loop, which reads the ends of the groups on the
host. On a processor, short spans are a batch of products of one size.

Either way no operation mixes the tokens of one adapter with the matrices of another, not even multiplied by zero: a
value that is not finite stays with its owner.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from itertools import accumulate
from typing import Final, Protocol, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn.functional import grouped_mm

from strata.train.runner.passes.transfer import HostBuffer

T = TypeVar("T")
Key = tuple[object, ...]
Pair = tuple[torch.Tensor, torch.Tensor]
"""A and B of an adapter for one layer."""
ALIGNED_BYTES: Final = 16
"""Rows of every operand of a grouped product are a multiple of so many bytes."""
KERNELS: Final = (9, 10)
"""The major compute capabilities for which torch has a kernel of grouped products, of bfloat16."""

MOST_GROUPS: Final = 1023
"""The most groups that this kernel takes."""
SPAN_NUMBERS: Final = 1 << 16
"""Starting the products of a span takes a processor about as long as moving so many numbers."""
KEPT: Final = 64
"""How many rows' groups are kept, each of which layers with other adapters have more than once."""


@dataclass(frozen=True)
class AdaptedSpans:
    """What a layer computes for the spans of a row, in order."""

    lengths: Sequence[int]
    scales: Sequence[float]
    """Those of the adapters; that of another one for spans without one."""
    pairs: Sequence[Pair | None]
    """None where the layer has no adapter."""

    @cached_property
    def ranks(self) -> Sequence[int]:
        return _ranks_of(self.pairs)


@dataclass(frozen=True)
class AdaptedExperts:
    """What a layer computes for pairs of a token and an expert. They are sorted by expert, those of an expert by
    adapter. The host does not know how many each has."""

    ends: torch.Tensor
    """The place after the last pair of each adapter of each expert."""
    scales: float | torch.Tensor
    """Those of all pairs, or that of each."""
    pairs: Sequence[Pair | None]
    """A and B of all experts, (experts, …), of each adapter. None where the layer has none."""

    @cached_property
    def ranks(self) -> Sequence[int]:
        return _ranks_of(self.pairs)


def _ranks_of(pairs: Sequence[Pair | None]) -> list[int]:
    return [0 if pair is None else pair[0].shape[-2] for pair in pairs]


class SpanProducts(Protocol):
    """How the spans of a row are multiplied. Tensors have a row for each token of the spans, in order."""

    def add(self, output: torch.Tensor, inputs: torch.Tensor, spans: AdaptedSpans) -> list[torch.Tensor]:
        """Adds B A x, times the adapter's scale, to the output of each span. Returns what `backward` needs: A x."""
        ...

    def backward(
        self, grad: torch.Tensor, inputs: torch.Tensor, inners: Sequence[torch.Tensor], spans: AdaptedSpans
    ) -> torch.Tensor:
        """Returns the gradient of the inputs, and adds those of A and B to their `grad`."""
        ...


class LoopedProducts:
    """Span by span."""

    def add(self, output: torch.Tensor, inputs: torch.Tensor, spans: AdaptedSpans) -> list[torch.Tensor]:
        inners = []
        parts = zip(spans.scales, spans.pairs, _split(inputs, spans), _split(output, spans), strict=True)
        for scale, pair, own, out in parts:
            if pair is None:
                continue
            a, b = _cast(pair, inputs.dtype)
            inner = torch.mm(own, a.t())
            out.addmm_(inner, b.t(), alpha=scale)
            inners.append(inner)
        return inners

    def backward(
        self, grad: torch.Tensor, inputs: torch.Tensor, inners: Sequence[torch.Tensor], spans: AdaptedSpans
    ) -> torch.Tensor:
        if len(spans.pairs) == 1:
            ((scale, pair),) = zip(spans.scales, spans.pairs, strict=True)
            assert pair is not None
            grad_inner, a = _accumulate_span(grad, inputs, inners[0], scale, pair)
            return torch.addmm(inputs, grad_inner, a, beta=0, alpha=scale)
        # Tokens without an adapter contribute nothing.
        grad_inputs = torch.zeros_like(inputs) if None in spans.pairs else torch.empty_like(inputs)
        tokens = _split(inputs, spans), _split(grad, spans), _split(grad_inputs, spans)
        remaining = iter(inners)
        for scale, pair, own, grad_own, out in zip(spans.scales, spans.pairs, *tokens, strict=True):
            if pair is None:
                continue
            grad_inner, a = _accumulate_span(grad_own, own, next(remaining), scale, pair)
            out.addmm_(grad_inner, a, beta=0, alpha=scale)
        return grad_inputs


def _accumulate_span(
    grad: torch.Tensor, inputs: torch.Tensor, inner: torch.Tensor, scale: float, pair: Pair
) -> tuple[torch.Tensor, torch.Tensor]:
    """Adds the gradients of A and B. Returns the factors of that of the inputs."""
    a, b = _cast(pair, grad.dtype)
    grad_inner = torch.mm(grad, b)
    _accumulate(pair[0], grad_inner.t(), inputs, scale)
    _accumulate(pair[1], grad.t(), inner, scale)
    return grad_inner, a


def _split(tokens: torch.Tensor, spans: AdaptedSpans) -> Sequence[torch.Tensor]:
    return torch.split(tokens, list(spans.lengths))


@dataclass(frozen=True)
class _Stacking:
    """How the matrices of adapters are put together; those of no adapter are zeros."""

    rank: int
    """That of the largest adapter, aligned."""
    picked: torch.Tensor | None
    """Which rows each group has of the matrices A of all adapters, which one of zeros follows. None: each has the next
    `rank` rows."""

    def stack(self, pairs: Sequence[Pair | None], dtype: torch.dtype) -> Pair:
        """A of all groups, (groups, rank, inputs), and B, (groups, outputs, rank). With experts, the groups of an
        expert are adjacent."""
        all_a, all_b = [pair[0] for pair in pairs if pair is not None], [pair[1] for pair in pairs if pair is not None]
        if self.picked is None:
            a, b = torch.stack(all_a, dim=-3).to(dtype), torch.stack(all_b, dim=-3).to(dtype)
        else:
            first_a, first_b = all_a[0], all_b[0]
            a = torch.cat([*all_a, first_a.new_zeros(*first_a.shape[:-2], 1, first_a.shape[-1])], dim=-2).to(dtype)
            b = torch.cat([*all_b, first_b.new_zeros(*first_b.shape[:-1], 1)], dim=-1).to(dtype)
            a = a.index_select(-2, self.picked)
            b = b.index_select(-1, self.picked).view(*b.shape[:-1], len(pairs), self.rank)
            b = b.transpose(-3, -2).contiguous()
        return a.view(-1, self.rank, a.shape[-1]), b.view(-1, *b.shape[-2:])


@dataclass(frozen=True)
class _Groups:
    """The spans of a row as groups of grouped products."""

    ends: torch.Tensor
    """The place after the last token of each."""
    scales: float | torch.Tensor
    """The scale of each token, or of all."""
    stacking: _Stacking


class GroupedProducts:
    """All spans at once, or all experts of all adapters. The matrices of a layer are put together for its forward pass
    and again for its backward pass: kept between them, those of all layers would take as much memory as all
    adapters."""

    def __init__(self, most_groups: int = MOST_GROUPS) -> None:
        self.most_groups = most_groups
        self._groups: dict[Key, _Groups] = {}
        """Those of the last rows: the layers of a row share them, and it takes copies to the device to make them."""
        self._stackings: dict[Key, _Stacking] = {}

    def add(
        self, output: torch.Tensor, inputs: torch.Tensor, spans: AdaptedSpans | AdaptedExperts
    ) -> list[torch.Tensor]:
        groups = self._group(spans, inputs)
        a, b = groups.stacking.stack(spans.pairs, inputs.dtype)
        inner = grouped_mm(inputs, a.mT, offs=groups.ends).mul_(groups.scales)
        output.add_(grouped_mm(inner, b.mT, offs=groups.ends))
        return [inner]

    def backward(
        self,
        grad: torch.Tensor,
        inputs: torch.Tensor,
        inners: Sequence[torch.Tensor],
        spans: AdaptedSpans | AdaptedExperts,
    ) -> torch.Tensor:
        (inner,) = inners
        groups = self._group(spans, inputs)
        a, b = groups.stacking.stack(spans.pairs, grad.dtype)
        grad_inner = grouped_mm(grad, b, offs=groups.ends).mul_(groups.scales)
        grad_a = grouped_mm(grad_inner.t(), inputs, offs=groups.ends)
        grad_b = grouped_mm(grad.t(), inner, offs=groups.ends)
        _accumulate_groups(spans.pairs, grad_a, grad_b)
        return grouped_mm(grad_inner, a, offs=groups.ends)

    def _group(self, spans: AdaptedSpans | AdaptedExperts, inputs: torch.Tensor) -> _Groups:
        ranks = spans.ranks
        if isinstance(spans, AdaptedExperts):
            key: Key = (inputs.device, inputs.dtype, *ranks)
            stacking = keep(self._stackings, key, lambda: _make_stacking(ranks, inputs))
            return _Groups(spans.ends, spans.scales, stacking)
        key = inputs.device, inputs.dtype, *spans.lengths, *spans.scales, *ranks
        return keep(self._groups, key, lambda: _make_groups(spans, ranks, inputs))


def split_groups(
    pairs: Sequence[Pair | None], ends: torch.Tensor, most: int
) -> Iterator[tuple[Sequence[Pair | None], torch.Tensor]]:
    """Yields the pairs of experts so that no more than so many groups are multiplied at once: those of some adapters,
    to whose experts the tokens of the adapters before and behind belong without one."""
    kinds = len(pairs)
    if len(ends) <= most:
        yield pairs, ends
        return
    columns = ends.view(-1, kinds)
    step = most // len(columns) - 2
    for first in range(0, kinds, step):
        last = min(first + step, kinds)
        before, behind = [None] * (first > 0), [None] * (last < kinds)
        own = columns[:, first - len(before) : last]
        yield (
            [*before, *pairs[first:last], *behind],
            torch.cat([own, columns[:, -1:]], 1).view(-1) if behind else own.reshape(-1),
        )


def keep(kept: dict[Key, T], key: Key, make: Callable[[], T]) -> T:
    """Returns what is kept for a row, or makes it: the layers of a row share it."""
    if key not in kept:
        if len(kept) >= KEPT:
            kept.clear()
        kept[key] = make()
    return kept[key]


def _make_groups(spans: AdaptedSpans, ranks: Sequence[int], inputs: torch.Tensor) -> _Groups:
    rank, rows = _stacked_rows(ranks, inputs)
    buffer = HostBuffer()
    buffer.add([np.cumsum(spans.lengths)], "int32")
    has_scales = len(set(spans.scales)) > 1
    if has_scales:
        buffer.add([np.repeat(spans.scales, spans.lengths)], "float32", (-1, 1))
    if rows is not None:
        buffer.add([rows], "int64")
    ends, *others = buffer.move(inputs.device)
    of_tokens: float | torch.Tensor = others[0] if has_scales else spans.scales[0]
    return _Groups(ends, of_tokens, _Stacking(rank, others[-1] if rows is not None else None))


def _make_stacking(ranks: Sequence[int], inputs: torch.Tensor) -> _Stacking:
    rank, rows = _stacked_rows(ranks, inputs)
    if rows is None:
        return _Stacking(rank, None)
    buffer = HostBuffer()
    buffer.add([rows], "int64")
    return _Stacking(rank, *buffer.move(inputs.device))


def _stacked_rows(ranks: Sequence[int], inputs: torch.Tensor) -> tuple[int, NDArray[np.int64] | None]:
    """Returns the rank of all groups, and what `_Stacking` picks."""
    aligned = ALIGNED_BYTES // inputs.element_size()
    rank = -(-max(ranks) // aligned) * aligned
    if set(ranks) == {rank}:
        return rank, None
    firsts, zero = [0, *accumulate(ranks)], sum(ranks)
    rows = [
        first + row if row < own else zero for first, own in zip(firsts[:-1], ranks, strict=True) for row in range(rank)
    ]
    return rank, np.array(rows)


def _accumulate_groups(pairs: Sequence[Pair | None], grad_a: torch.Tensor, grad_b: torch.Tensor) -> None:
    """Add the gradients of all groups to those of their matrices, in one operation."""
    targets: list[torch.Tensor] = []
    added: list[torch.Tensor] = []
    # With experts, the groups of an expert are adjacent: one dimension more, and that of adapters behind it.
    some = next(pair[0] for pair in pairs if pair is not None)
    experts = () if some.ndim == 2 else (-1,)
    of_all = (grad.float().view(*experts, len(pairs), *grad.shape[1:]).unbind(-3) for grad in (grad_a, grad_b))
    for pair, of_a, of_b in zip(pairs, *of_all, strict=True):
        if pair is None:
            continue
        rank = pair[0].shape[-2]
        own = (of_a, of_b) if rank == grad_a.shape[-2] else (of_a[..., :rank, :], of_b[..., :rank])
        for matrix, gradient in zip(pair, own, strict=True):
            if not matrix.requires_grad:
                continue
            total = matrix.grad
            if total is None:
                total = matrix.grad = torch.zeros_like(matrix)
            targets.append(total)
            added.append(gradient)
    if targets:
        torch._foreach_add_(targets, added)


@dataclass(frozen=True)
class _Batch:
    """The spans of a row as a batch of products, of as many tokens each as the longest has."""

    count: int
    scales: float | torch.Tensor
    """The scale of each span, or of all."""
    stacking: _Stacking
    tokens: torch.Tensor | None
    """Which token of the row each one of the batch is; the first of its span where the span has no more. None: spans
    are equally long."""
    is_own: torch.Tensor | None
    """1 for each token of the batch that its span has, 0 for what was added."""
    places: torch.Tensor | None
    """Where the tokens of the row are in the batch."""

    def take(self, rows: torch.Tensor) -> torch.Tensor:
        taken = rows if self.tokens is None else rows.index_select(0, self.tokens)
        return taken.view(self.count, -1, rows.shape[-1])

    def put(self, taken: torch.Tensor) -> torch.Tensor:
        rows = taken.view(-1, taken.shape[-1])
        return rows if self.places is None else rows.index_select(0, self.places)


class BatchedProducts:
    """All spans at once on a processor, where spans are so short that starting products takes longer than products.
    Spans of different lengths are padded with tokens of their own, whose gradients are zero."""

    def __init__(self) -> None:
        self._batches: dict[Key, _Batch] = {}

    def add(self, output: torch.Tensor, inputs: torch.Tensor, spans: AdaptedSpans) -> list[torch.Tensor]:
        batch = self._batch(spans, inputs)
        a, b = batch.stacking.stack(spans.pairs, inputs.dtype)
        inner = torch.bmm(batch.take(inputs), a.mT).mul_(batch.scales)
        if batch.tokens is None:
            output.view(batch.count, -1, output.shape[-1]).baddbmm_(inner, b.mT)
        else:
            output.add_(batch.put(torch.bmm(inner, b.mT)))
        return [inner]

    def backward(
        self, grad: torch.Tensor, inputs: torch.Tensor, inners: Sequence[torch.Tensor], spans: AdaptedSpans
    ) -> torch.Tensor:
        (inner,) = inners
        batch = self._batch(spans, inputs)
        a, b = batch.stacking.stack(spans.pairs, grad.dtype)
        grad = batch.take(grad)
        if batch.is_own is not None:
            grad.mul_(batch.is_own)
        grad_inner = torch.bmm(grad, b).mul_(batch.scales)
        _accumulate_groups(spans.pairs, torch.bmm(grad_inner.mT, batch.take(inputs)), torch.bmm(grad.mT, inner))
        return batch.put(torch.bmm(grad_inner, a))

    def _batch(self, spans: AdaptedSpans, inputs: torch.Tensor) -> _Batch:
        key = inputs.dtype, *spans.lengths, *spans.scales, *spans.ranks
        return keep(self._batches, key, lambda: _make_batch(spans, inputs))


def _make_batch(spans: AdaptedSpans, inputs: torch.Tensor) -> _Batch:
    lengths, scales = spans.lengths, spans.scales
    stacking = _make_stacking(spans.ranks, inputs)
    of_spans: float | torch.Tensor = scales[0]
    if len(set(scales)) > 1:
        of_spans = torch.tensor(scales, dtype=inputs.dtype).view(-1, 1, 1)
    if len(set(lengths)) == 1:
        return _Batch(len(lengths), of_spans, stacking, None, None, None)
    starts = np.cumsum([0, *lengths[:-1]])
    place = np.arange(max(lengths))
    is_own = place < np.array(lengths)[:, None]
    tokens = np.where(is_own, starts[:, None] + place, starts[:, None])
    weights = torch.from_numpy(is_own).to(inputs.dtype)[..., None]
    indices = torch.from_numpy(tokens.reshape(-1)), torch.from_numpy(np.flatnonzero(is_own))
    return _Batch(len(lengths), of_spans, stacking, indices[0], weights, indices[1])


LOOP: Final = LoopedProducts()


def choose_products(
    inputs: torch.Tensor,
    output: torch.Tensor,
    spans: AdaptedSpans | AdaptedExperts,
    grouped: GroupedProducts,
    batched: BatchedProducts,
) -> SpanProducts:
    """Returns how to multiply spans in a layer with these inputs and outputs: grouped where torch has a kernel for it,
    and short spans on a processor in a batch."""
    if len(spans.pairs) == 1:
        return LOOP
    widths = inputs.shape[-1], output.shape[-1]
    if isinstance(spans, AdaptedSpans) and inputs.device.type == "cpu":
        return batched if inputs.dtype is torch.float32 and _are_short(spans, sum(widths)) else LOOP
    if isinstance(spans, AdaptedExperts) and 3 * len(spans.ends) > len(spans.pairs) * grouped.most_groups:
        # Not even one adapter at a time.
        return LOOP
    is_aligned = not any(width * inputs.element_size() % ALIGNED_BYTES for width in widths)
    return grouped if is_aligned and _has_kernel(inputs.device, inputs.dtype) else LOOP


def _are_short(spans: AdaptedSpans, width: int) -> bool:
    """Says whether a batch of spans is faster than a loop. It copies the matrices of each span and adds gradients to
    theirs, and moves tokens unless spans are equally long."""
    longest, rank = max(spans.lengths), max(spans.ranks)
    if not all(spans.lengths):
        # A span without tokens has none of its own to be padded with.
        return False
    moved = 5 * rank * width
    if any(length < longest for length in spans.lengths):
        moved += 4 * longest * width
    return moved <= SPAN_NUMBERS


@cache
def _has_kernel(device: torch.device, dtype: torch.dtype) -> bool:
    if device.type != "cuda" or dtype is not torch.bfloat16 or torch.version.hip is not None:
        return False
    return torch.cuda.is_available() and torch.cuda.get_device_capability(device)[0] in KERNELS


def _cast(pair: Pair, dtype: torch.dtype) -> Pair:
    # Asking costs less than a conversion that does nothing, which counts with short spans.
    return pair if pair[0].dtype is dtype else (pair[0].to(dtype), pair[1].to(dtype))


def _accumulate(matrix: torch.Tensor, left: torch.Tensor, right: torch.Tensor, scale: float) -> None:
    """Add the product of two matrices, times the scale, to the gradient of a matrix."""
    if not matrix.requires_grad:
        return
    if matrix.grad is None:
        matrix.grad = torch.zeros_like(matrix)
    if matrix.grad.dtype is left.dtype:
        matrix.grad.addmm_(left, right, alpha=scale)
    else:
        # Not by autograd, which warns of the gradient of a part of a matrix: its rows are not adjacent.
        matrix.grad.add_(torch.mm(left, right), alpha=scale)
