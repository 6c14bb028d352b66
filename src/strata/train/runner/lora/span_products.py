"""Multiplies each span of a packed row by the matrices of its adapter, and accumulates their gradients: span by span,
or all spans at once in grouped products.

`choose_products` is the only place that knows the devices. A loop over the spans starts six products for each, and
needs no memory besides the output. Grouped products start as many operations however many adapters a row has, and copy
the matrices of a layer into one tensor before. That pays where starting an operation takes longer than the operation,
and where torch has a kernel for it: elsewhere, `grouped_mm` is itself a loop, which reads the ends of the groups on the
host.

Either way no operation mixes the tokens of one adapter with the matrices of another, not even multiplied by zero: a
value that is not finite stays with its owner.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from itertools import accumulate
from typing import Final, Protocol

import numpy as np
import torch
from torch.nn.functional import grouped_mm

from strata.train.runner.passes.transfer import HostBuffer

Pair = tuple[torch.Tensor, torch.Tensor]
"""A and B of an adapter for one layer."""
ALIGNED_BYTES: Final = 16
"""Rows of every operand of a grouped product are a multiple of so many bytes."""
KERNELS: Final = (9, 10)
"""The major compute capabilities for which torch has a kernel of grouped products, of bfloat16."""

KEPT: Final = 64
"""How many rows' groups are kept, each of which layers with other adapters have more than once."""


@dataclass(frozen=True)
class AdaptedSpans:
    """What a layer computes for the spans of a row, in order."""

    lengths: Sequence[int]
    scales: Sequence[float]
    """Those of the adapters; 1 for spans without one."""
    pairs: Sequence[Pair | None]
    """None where the layer has no adapter."""


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
class _Groups:
    """The spans of a row as groups of grouped products; those without an adapter have matrices of zeros."""

    ends: torch.Tensor
    """The place after the last token of each."""
    rank: int
    """That of the largest adapter, aligned."""
    scales: float | torch.Tensor
    """The scale of each token, or of all."""
    picked: torch.Tensor | None
    """Which rows each group has of the matrices A of all adapters, which one of zeros follows. None: each has the next
    `rank` rows."""


class GroupedProducts:
    """All spans at once. The matrices of a layer are put together for its forward pass and again for its backward pass:
    kept between them, those of all layers would take as much memory as all adapters."""

    def __init__(self) -> None:
        self._groups: dict[tuple[object, ...], _Groups] = {}
        """Those of the last rows: the layers of a row share them, and it takes copies to the device to make them."""

    def add(self, output: torch.Tensor, inputs: torch.Tensor, spans: AdaptedSpans) -> list[torch.Tensor]:
        groups = self._group(spans, inputs)
        a, b = _stack(groups, spans.pairs, inputs.dtype)
        inner = grouped_mm(inputs, a.mT, offs=groups.ends).mul_(groups.scales)
        output.add_(grouped_mm(inner, b.mT, offs=groups.ends))
        return [inner]

    def backward(
        self, grad: torch.Tensor, inputs: torch.Tensor, inners: Sequence[torch.Tensor], spans: AdaptedSpans
    ) -> torch.Tensor:
        (inner,) = inners
        groups = self._group(spans, inputs)
        a, b = _stack(groups, spans.pairs, grad.dtype)
        grad_inner = grouped_mm(grad, b, offs=groups.ends).mul_(groups.scales)
        grad_a = grouped_mm(grad_inner.t(), inputs, offs=groups.ends)
        grad_b = grouped_mm(grad.t(), inner, offs=groups.ends)
        _accumulate_groups(spans.pairs, grad_a, grad_b)
        return grouped_mm(grad_inner, a, offs=groups.ends)

    def _group(self, spans: AdaptedSpans, inputs: torch.Tensor) -> _Groups:
        ranks = [0 if pair is None else len(pair[0]) for pair in spans.pairs]
        key = inputs.device, inputs.dtype, *spans.lengths, *spans.scales, *ranks
        if key not in self._groups:
            if len(self._groups) >= KEPT:
                self._groups.clear()
            self._groups[key] = _make_groups(spans, ranks, inputs)
        return self._groups[key]


def _make_groups(spans: AdaptedSpans, ranks: Sequence[int], inputs: torch.Tensor) -> _Groups:
    aligned = ALIGNED_BYTES // inputs.element_size()
    rank = -(-max(ranks) // aligned) * aligned
    buffer = HostBuffer()
    buffer.add([np.cumsum(spans.lengths)], "int32")
    has_scales, has_picked = len(set(spans.scales)) > 1, set(ranks) != {rank}
    if has_scales:
        buffer.add([np.repeat(spans.scales, spans.lengths)], "float32", (-1, 1))
    if has_picked:
        firsts, zero = [0, *accumulate(ranks)], sum(ranks)
        rows = [
            first + row if row < own else zero
            for first, own in zip(firsts[:-1], ranks, strict=True)
            for row in range(rank)
        ]
        buffer.add([np.array(rows)], "int64")
    ends, *others = buffer.move(inputs.device)
    of_tokens: float | torch.Tensor = others[0] if has_scales else spans.scales[0]
    return _Groups(ends, rank, of_tokens, others[-1] if has_picked else None)


def _stack(groups: _Groups, pairs: Sequence[Pair | None], dtype: torch.dtype) -> Pair:
    """A of all groups, (groups, rank, inputs), and B, (groups, outputs, rank)."""
    all_a, all_b = [pair[0] for pair in pairs if pair is not None], [pair[1] for pair in pairs if pair is not None]
    if groups.picked is None:
        return torch.stack(all_a).to(dtype), torch.stack(all_b).to(dtype)
    a = torch.cat([*all_a, all_a[0].new_zeros(1, all_a[0].shape[1])]).to(dtype)
    b = torch.cat([*all_b, all_b[0].new_zeros(len(all_b[0]), 1)], dim=1).to(dtype)
    a = a.index_select(0, groups.picked).view(len(pairs), groups.rank, -1)
    b = b.index_select(1, groups.picked).view(len(b), len(pairs), groups.rank)
    return a, b.transpose(0, 1).contiguous()


def _accumulate_groups(pairs: Sequence[Pair | None], grad_a: torch.Tensor, grad_b: torch.Tensor) -> None:
    """Add the gradients of all groups to those of their matrices, in one operation."""
    targets: list[torch.Tensor] = []
    added: list[torch.Tensor] = []
    for pair, of_a, of_b in zip(pairs, grad_a.float().unbind(), grad_b.float().unbind(), strict=True):
        if pair is None:
            continue
        for matrix, own in zip(pair, (of_a[: len(pair[0])], of_b[:, : len(pair[0])]), strict=True):
            if not matrix.requires_grad:
                continue
            if matrix.grad is None:
                matrix.grad = torch.zeros_like(matrix)
            targets.append(matrix.grad)
            added.append(own)
    if targets:
        torch._foreach_add_(targets, added)


LOOP: Final = LoopedProducts()


def choose_products(inputs: torch.Tensor, outputs: int, spans: int, grouped: GroupedProducts) -> SpanProducts:
    """Returns how to multiply so many spans in a layer of so many outputs: grouped where torch has a kernel for it."""
    widths = inputs.shape[-1], outputs
    is_aligned = not any(width * inputs.element_size() % ALIGNED_BYTES for width in widths)
    return grouped if spans > 1 and is_aligned and _has_kernel(inputs.device, inputs.dtype) else LOOP


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
