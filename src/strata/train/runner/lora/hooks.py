"""The forward hooks that add the output of each span's adapter to the layers of a packed row, with their gradient."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from strata.train.peft.layers import kind_of
from strata.train.runner.lora.adapter import Adapter
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

    @staticmethod
    def add(name: str, inputs: torch.Tensor, output: torch.Tensor, spans: Sequence[Span]) -> torch.Tensor:
        """Add what each span's adapter contributes to the layer `name`; tokens are the second last dimension.

        `output` is modified in place, so it must be fresh from its layer.
        """
        plan: list[_AdaptedSpan] = []
        matrices: list[torch.Tensor] = []
        start = 0
        for span in spans:
            if span.adapter is not None and name in span.adapter.pairs:
                plan.append(_AdaptedSpan(start, start + span.length, span.adapter.scale))
                matrices.extend(span.adapter.pairs[name])
            start += span.length
        if not plan:
            return output
        return _AddSpans.apply(output, inputs, plan, *matrices)  # type: ignore[no-any-return, no-untyped-call]


@dataclass(frozen=True)
class _AdaptedSpan:
    start: int
    end: int
    scale: float


class _AddSpans(torch.autograd.Function):
    """Adds B A x to each span by one matrix multiplication: no second array as large as the output, in the forward or
    backward pass, however many adapters share a row. Gradients go directly to the adapter's staging block."""

    @staticmethod
    def forward(
        ctx: Any, output: torch.Tensor, inputs: torch.Tensor, plan: Sequence[_AdaptedSpan], *matrices: torch.Tensor
    ) -> torch.Tensor:
        rows = inputs.reshape(-1, inputs.shape[-1])
        flat = output.view(-1, output.shape[-1])
        inners = []
        for span, a, b in zip(plan, matrices[::2], matrices[1::2], strict=True):
            inner = torch.mm(rows[span.start : span.end], a.to(rows.dtype).t())
            flat[span.start : span.end].addmm_(inner, b.to(rows.dtype).t(), alpha=span.scale)
            inners.append(inner)
        ctx.plan = plan
        ctx.shape = inputs.shape
        # Not by save_for_backward: gradients accumulate in `.grad` of the very parameters, not of copies.
        ctx.matrices = matrices
        ctx.save_for_backward(rows, *inners)
        ctx.mark_dirty(output)
        return output

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[Any, ...]:
        rows, *inners = ctx.saved_tensors
        grad = grads[0].reshape(-1, grads[0].shape[-1])
        # Tokens without an adapter contribute nothing to the gradient of the inputs.
        grad_inputs = torch.zeros_like(rows)
        grad_matrices: list[torch.Tensor | None] = []
        for span, a, b, inner in zip(ctx.plan, ctx.matrices[::2], ctx.matrices[1::2], inners, strict=True):
            grad_span, inputs = grad[span.start : span.end], rows[span.start : span.end]
            grad_inner = torch.mm(grad_span, b.to(grad_span.dtype))
            grad_matrices += [
                _accumulate(a, grad_inner.t(), inputs, span.scale),
                _accumulate(b, grad_span.t(), inner, span.scale),
            ]
            grad_inputs[span.start : span.end].addmm_(grad_inner, a.to(grad_span.dtype), beta=0, alpha=span.scale)
        return grads[0], grad_inputs.view(ctx.shape), None, *grad_matrices


def _accumulate(matrix: torch.Tensor, left: torch.Tensor, right: torch.Tensor, scale: float) -> torch.Tensor | None:
    """The gradient of a matrix; None if it was added to the staging block (`Adapter.begin`)."""
    if matrix.grad is None:
        return torch.mm(left, right).mul_(scale).to(matrix.dtype)
    if matrix.grad.dtype == left.dtype:
        matrix.grad.addmm_(left, right, alpha=scale)
    else:
        # Not by autograd, which warns of the gradient of a part of a matrix: its rows are not adjacent.
        matrix.grad.add_(torch.mm(left, right), alpha=scale)
    return None


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
