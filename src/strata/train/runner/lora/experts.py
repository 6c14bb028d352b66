"""LoRA adapters of mixture-of-experts layers, whose experts are one module with one fused weight.

The loop over the experts of transformers is repeated here because an adapter acts between its two matrices: on the
tokens of a span, and on the matrix of their expert. What a family does between and after them (its gate with or without
a clamp, biases, a norm) is called as its module defines it. Modules of another form keep their own loop and get no
adapter (`is_experts`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn.functional import linear, one_hot

from strata.train.runner.lora.adapter import Adapters, Span, delta, is_experts


def adapt_experts(model: nn.Module, adapters: Adapters) -> None:
    for name, module in model.named_modules():
        if is_experts(module):
            module.forward = _forward(name, module, adapters)


def _forward(name: str, experts: Any, adapters: Adapters) -> Any:
    biased = experts.has_bias

    def forward(hidden: torch.Tensor, routed: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """`hidden` is (tokens, dimensions); `routed` and `weights` are (tokens, experts per token)."""
        total = torch.zeros_like(hidden)
        with torch.no_grad():
            mask = one_hot(routed, num_classes=experts.gate_up_proj.shape[0]).permute(2, 1, 0)
            active = mask.sum(dim=(-1, -2)).nonzero().flatten().tolist()
        span_of = _span_numbers(adapters.row, hidden)
        first = _matrices(f"{name}.gate_up_proj", adapters.row)
        second = _matrices(f"{name}.down_proj", adapters.row)
        for expert in active:
            which, token = torch.where(mask[expert])
            spans = span_of[token]
            state = hidden[token]
            up = linear(state, experts.gate_up_proj[expert], experts.gate_up_proj_bias[expert] if biased else None)
            inner = experts._apply_gate(_add(first, expert, state, up, spans))
            down = linear(inner, experts.down_proj[expert], experts.down_proj_bias[expert] if biased else None)
            down = _add(second, expert, inner, down, spans)
            if experts.has_post_expert_norm:
                down = experts.post_expert_norm(down)
            total.index_add_(0, token, (down * weights[token, which, None]).to(total.dtype))
        return total

    return forward


def _span_numbers(spans: Sequence[Span], hidden: torch.Tensor) -> torch.Tensor:
    """The number of each token's span."""
    lengths = torch.tensor([span.length for span in spans] or [len(hidden)], device=hidden.device)
    return torch.arange(len(lengths), device=hidden.device).repeat_interleave(lengths)


@dataclass(frozen=True)
class _Matrices:
    """A and B of each expert for one span, and the scale. Unbound once, so that the gradient is stacked once."""

    number: int
    a: Sequence[torch.Tensor]
    b: Sequence[torch.Tensor]
    scale: float


def _matrices(name: str, spans: Sequence[Span]) -> list[_Matrices]:
    matrices = []
    for number, span in enumerate(spans):
        if span.adapter is not None and name in span.adapter.pairs:
            a, b = span.adapter.pairs[name]
            matrices.append(_Matrices(number, a.unbind(), b.unbind(), span.adapter.scale))
    return matrices


def _add(
    matrices: Sequence[_Matrices], expert: int, inputs: torch.Tensor, output: torch.Tensor, spans: torch.Tensor
) -> torch.Tensor:
    for of_span in matrices:
        tokens = (spans == of_span.number).nonzero().flatten()
        if len(tokens):
            added = delta(inputs[tokens], of_span.a[expert], of_span.b[expert], of_span.scale)
            output = output.index_add(0, tokens, added)
    return output
