"""The forward hooks that add the output of each span's adapter to the layers of a packed row, with their gradient."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from strata.train.peft.layers import kind_of
from strata.train.runner.lora.adapter import Adapter
from strata.train.runner.lora.span_products import AdaptedSpans, GroupedProducts, SpanProducts, choose_products
from strata.train.runner.lora.targets import linear_shape


@dataclass(frozen=True)
class Span:
    """Adjacent tokens of a row that belong to one adapter, or to none."""

    adapter: Adapter | None
    length: int


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
        self._grouped = GroupedProducts()

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
        matrices = [matrix for pair in pairs if pair is not None for matrix in pair]
        if not matrices:
            return output
        scales = [1.0 if span.adapter is None else span.adapter.scale for span in spans]
        adapted = AdaptedSpans([span.length for span in spans], scales, pairs)
        products = self.products or choose_products(inputs, output.shape[-1], len(spans), self._grouped)
        trained = next((matrix for matrix in matrices if matrix.requires_grad), None)
        added: torch.Tensor = _AddSpans.apply(output, inputs, trained, products, adapted)  # type: ignore[no-untyped-call]
        return added


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
