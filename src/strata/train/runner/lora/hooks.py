"""The forward hooks that add the output of each span's adapter to the layers of a packed row, with their gradient."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import Any

import numpy as np
import torch
from torch import nn

from strata.train.peft.layers import kind_of
from strata.train.runner.lora.adapter import Adapter
from strata.train.runner.lora.span_products import (
    AdaptedExperts,
    AdaptedSpans,
    BatchedProducts,
    GroupedProducts,
    Key,
    SpanProducts,
    choose_products,
    keep,
    split_groups,
)
from strata.train.runner.lora.targets import linear_shape
from strata.train.runner.passes.transfer import HostBuffer


@dataclass(frozen=True)
class Span:
    """Adjacent tokens of a row that belong to one adapter, or to none."""

    adapter: Adapter | None
    length: int


@dataclass(frozen=True)
class NumberedTokens:
    """Which of some adapters each token of a row has."""

    adapters: Sequence[Adapter | None]
    """Each once; None for tokens without one."""
    numbers: torch.Tensor
    """The place in this sequence of the adapter of each token: (tokens, 1)."""
    scales: float | torch.Tensor
    """The scale of each adapter, (adapters, 1), or of all."""


@dataclass(frozen=True)
class AdaptedPairs:
    """Pairs of a token and one of its experts, sorted by expert, those of an expert by adapter."""

    adapters: Sequence[Adapter | None]
    ends: torch.Tensor
    """The place after the last pair of each adapter of each expert."""
    scales: float | torch.Tensor
    """The scale of each adapter, (adapters, 1), or of all."""
    numbers: torch.Tensor | None = None
    """The place of each pair's adapter in `adapters`; None if there is one adapter."""
    sizes: Sequence[int] = ()
    """How many pairs each of several adapters has."""

    @cached_property
    def scales_of_pairs(self) -> float | torch.Tensor:
        if self.numbers is None or not isinstance(self.scales, torch.Tensor):
            return self.scales
        return self.scales[self.numbers]

    @cached_property
    def parts(self) -> Sequence[PairsOfAdapter]:
        """The pairs of each adapter."""
        if self.numbers is None:
            return [PairsOfAdapter(each, None, self.ends) for each in self.adapters if each is not None]
        order = torch.argsort(self.numbers, stable=True)
        counts = self.ends.diff(prepend=self.ends.new_zeros(1)).view(-1, len(self.adapters))
        ends = counts.cumsum(dim=0, dtype=torch.int32).t().contiguous()
        starts = accumulate(self.sizes, initial=0)
        return [
            PairsOfAdapter(adapter, order[start : start + size], own)
            for adapter, size, start, own in zip(self.adapters, self.sizes, starts, ends, strict=False)
            if adapter is not None and size
        ]


@dataclass(frozen=True)
class PairsOfAdapter:
    adapter: Adapter
    places: torch.Tensor | None
    """Which of all pairs these are; None if they are all."""
    ends: torch.Tensor
    """The place after the last one of each expert."""


class Adapters:
    """The forward hooks in the base, and the spans of the row that they compute. They are set again when the backward
    pass of the row begins: layers that are recomputed in it must add the same."""

    def __init__(self) -> None:
        self.row: Sequence[Span] = ()
        self.head_row: Sequence[Span] = ()
        """The spans of the tokens whose logits are computed: the row or a chunk of it."""
        self.in_pass: Sequence[Adapter] = ()
        """Those of the rows of all ranks, in the same order on every rank. Only ranks that compute experts for each
        other need to know them."""
        self.products: SpanProducts | None = None
        """How spans are multiplied; None: as fits the device."""
        self._grouped, self._batched = GroupedProducts(), BatchedProducts()
        self._numbers: dict[Key, list[torch.Tensor]] = {}

    def add_hooks(self, model: nn.Module, wrap: Callable[[Any], Any] = lambda hook: hook) -> None:
        """`wrap` is applied to each hook."""
        for name, module in model.named_modules():
            if kind_of(name) is not None and linear_shape(module) is not None:
                # First of all: outputs of a layer that is split over ranks are summed or gathered after it.
                hook = wrap(self._hook(name, head=kind_of(name) == "unembed"))
                module.register_forward_hook(hook, prepend=True)

    def restore_row(self, spans: Sequence[Span], gradient: torch.Tensor) -> None:
        """A hook of what a row computes, for its backward pass."""
        del gradient
        self.row = spans

    def _hook(self, name: str, *, head: bool) -> Any:
        def add(module: nn.Module, args: tuple[torch.Tensor, ...], output: torch.Tensor) -> torch.Tensor:
            del module
            return self.add(name, args[0], output, self.head_row if head else self.row)

        return add

    def add(self, name: str, inputs: torch.Tensor, output: torch.Tensor, spans: Sequence[Span]) -> torch.Tensor:
        """Add what each span's adapter contributes to the layer `name`; tokens are the second last dimension.

        `output` is modified in place, so it must be fresh from its layer.
        """
        pairs = [None if span.adapter is None else span.adapter.pairs.get(name) for span in spans]
        # That of tokens without an adapter counts nothing: one scale for all saves an operation.
        some = next((span.adapter.scale for span in spans if span.adapter is not None), 1.0)
        scales = [some if span.adapter is None else span.adapter.scale for span in spans]
        return self._add(inputs, output, AdaptedSpans([span.length for span in spans], scales, pairs))

    def add_to_pairs(
        self, name: str, inputs: torch.Tensor, output: torch.Tensor, pairs: AdaptedPairs
    ) -> torch.Tensor | None:
        """Add to all pairs at once what their adapters contribute to the experts `name`, in place. Returns None where
        each adapter has to be added for itself."""
        matrices = [None if adapter is None else adapter.pairs.get(name) for adapter in pairs.adapters]
        adapted = AdaptedExperts(pairs.ends, pairs.scales_of_pairs, matrices)
        products = self.products or choose_products(inputs, output, adapted, self._grouped, self._batched)
        if not isinstance(products, GroupedProducts):
            return None
        for some, ends in split_groups(matrices, pairs.ends, products.most_groups):
            output = self._add(inputs, output, AdaptedExperts(ends, adapted.scales, some))
        return output

    def number_tokens(
        self, spans: Sequence[Span], adapters: Sequence[Adapter | None], device: torch.device
    ) -> NumberedTokens:
        """Returns which of these adapters each token has. The layers of a row share one copy to the device."""
        places = {adapter: place for place, adapter in enumerate(adapters)}
        numbers = [places[span.adapter] for span in spans]
        some = next((adapter.scale for adapter in adapters if adapter is not None), 1.0)
        scales = [some if adapter is None else adapter.scale for adapter in adapters]
        key = device, tuple(numbers), tuple(span.length for span in spans), tuple(scales)
        moved = keep(self._numbers, key, lambda: _move_numbers(spans, numbers, scales, device))
        return NumberedTokens(adapters, moved[0], moved[1] if len(set(scales)) > 1 else some)

    def _add(self, inputs: torch.Tensor, output: torch.Tensor, spans: AdaptedSpans | AdaptedExperts) -> torch.Tensor:
        matrices = [matrix for pair in spans.pairs if pair is not None for matrix in pair]
        if not matrices:
            return output
        products = self.products or choose_products(inputs, output, spans, self._grouped, self._batched)
        if not torch.is_grad_enabled():
            rows = inputs.reshape(-1, inputs.shape[-1])
            products.add(output.view(-1, output.shape[-1]), rows, spans)  # type: ignore[arg-type]  # chosen for them
            return output
        trained = next((matrix for matrix in matrices if matrix.requires_grad), None)
        added: torch.Tensor = _AddSpans.apply(output, inputs, trained, products, spans)  # type: ignore[no-untyped-call]
        return added


def _move_numbers(
    spans: Sequence[Span], numbers: Sequence[int], scales: Sequence[float], device: torch.device
) -> list[torch.Tensor]:
    buffer = HostBuffer()
    buffer.add([np.repeat(np.array(numbers), [span.length for span in spans])], "int64", (-1, 1))
    buffer.add([np.array(scales)], "float32", (-1, 1))
    return buffer.move(device)


class _AddSpans(torch.autograd.Function):
    """Adds B A x to each span. Gradients of A and B go directly to their `grad`, which is in the adapter's staging
    block (`Adapter.begin`). Autograd gets one matrix (`trained`), from which it sees that there are any: following all
    of them costs more than their products if spans are short."""

    @staticmethod
    def forward(
        ctx: Any,
        output: torch.Tensor,
        inputs: torch.Tensor,
        trained: torch.Tensor | None,
        products: SpanProducts,
        spans: AdaptedSpans,
    ) -> torch.Tensor:
        del trained
        rows = inputs.reshape(-1, inputs.shape[-1])
        inners = products.add(output.view(-1, output.shape[-1]), rows, spans)
        ctx.shape = inputs.shape
        # Not by save_for_backward: gradients accumulate in `.grad` of the very parameters, not of copies.
        ctx.products, ctx.spans = products, spans
        ctx.save_for_backward(rows, *inners)
        ctx.mark_dirty(output)
        return output

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        rows, *inners = ctx.saved_tensors
        grad = grads[0].reshape(-1, grads[0].shape[-1])
        grad_inputs = ctx.products.backward(grad, rows, inners, ctx.spans)
        return grads[0], grad_inputs.view(ctx.shape), None, None, None


def slice_spans(spans: Sequence[Span], start: int, end: int) -> list[Span]:
    """The spans of the tokens from `start` to `end` of the row."""
    sliced: list[Span] = []
    offset = 0
    for span in spans:
        length = min(offset + span.length, end) - max(offset, start)
        if length > 0:
            sliced.append(Span(span.adapter, length))
        offset += span.length
    return sliced
