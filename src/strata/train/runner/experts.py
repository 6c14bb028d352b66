"""The experts of a mixture: all tokens of a row through their experts in two grouped matrix multiplications.

transformers has the experts of a layer as one module with one fused weight, and computes them in a loop. Here the pairs
of a token and one of its experts are sorted by expert, so that a grouped matrix multiplication computes all experts at
once. It needs no number on the host: a loop waits for the device to learn which experts have tokens. What a family does
between and after the matrices (its gate with or without a clamp, biases, a norm) is called as its module defines it.

An adapter acts on the tokens of its span and on the matrices of their experts: two more grouped multiplications of the
same pairs. Modules of another form keep their own computation (`is_experts`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol

import torch
from torch import nn
from torch.nn.functional import embedding, grouped_mm, pad

from strata.train.runner.lora import Adapters, Span, is_experts

ALIGNMENT: Final = 16
"""Rows of a matrix have to be a multiple of so many bytes for the kernel; those of an adapter's odd rank are not."""


class ExpertDispatch(Protocol):
    """Products with experts that other ranks hold."""

    def multiply(self, inputs: torch.Tensor, matrices: torch.Tensor, biases: torch.Tensor | None) -> torch.Tensor:
        """Pairs that are sorted by expert, each by the matrix of its expert, with its bias if there are any. Matrices
        and biases are those that this rank holds. All ranks of the group call it together."""
        ...


PlanDispatch = Callable[[torch.Tensor], ExpertDispatch]
"""Where to send pairs that are sorted by expert, by the ends of the experts among them."""


class TokenGroup(Protocol):
    """Ranks that all have the same tokens, of which each computes a slice."""

    def take_tokens(self, values: torch.Tensor) -> torch.Tensor:
        """This rank's slice of what there is for each token, one or more. Zeros are added for tokens that no rank has.
        Gradients are those of all ranks."""
        ...

    def take_spans(self, spans: Sequence[Span], tokens: int) -> Sequence[Span]:
        """Those of the same slice, of so many tokens in all."""
        ...

    def gather_tokens(self, values: torch.Tensor, tokens: int) -> torch.Tensor:
        """Of all tokens, from the slices of all ranks."""
        ...


def group_experts(
    model: nn.Module, adapters: Adapters | None, plan: PlanDispatch | None = None, group: TokenGroup | None = None
) -> None:
    """Replace the loops over experts in a model. With `plan`, this rank holds some of the experts only. With `group`,
    other ranks have the same tokens."""
    for name, module in model.named_modules():
        if is_experts(module):
            module.forward = _grouped_forward(name, module, adapters, plan, group)


@dataclass(frozen=True)
class _Routing:
    """The pairs of a token and one of its experts, sorted by expert; a token's own order is kept."""

    experts: int
    per_token: int
    """Experts of a token."""
    expert: torch.Tensor
    """Of each pair."""
    order: torch.Tensor
    """The number that each pair had before: those of a token are adjacent."""
    place: torch.Tensor
    """Where each of them is now."""
    ends: torch.Tensor
    """After the last pair of each expert."""

    @property
    def tokens(self) -> torch.Tensor:
        return self.order // self.per_token

    def of_tokens(self, start: int, end: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Where the pairs of adjacent tokens are, and after which of them each expert ends."""
        places = self.place[start * self.per_token : end * self.per_token].sort().values
        return places, _ends(self.expert[places], self.experts)


def _route(routed: torch.Tensor, experts: int) -> _Routing:
    expert, order = torch.sort(routed.reshape(-1), stable=True)
    place = torch.empty_like(order)
    place[order] = torch.arange(len(order), device=order.device)
    return _Routing(experts, routed.shape[1], expert, order, place, _ends(expert, experts))


def _ends(sorted_experts: torch.Tensor, experts: int) -> torch.Tensor:
    numbers = torch.arange(experts, device=sorted_experts.device)
    return torch.searchsorted(sorted_experts, numbers, right=True, out_int32=True)


@dataclass(frozen=True)
class _OwnExperts:
    """This rank holds all experts."""

    routing: _Routing

    def multiply(self, inputs: torch.Tensor, matrices: torch.Tensor, biases: torch.Tensor | None) -> torch.Tensor:
        return add_biases(multiply_groups(inputs, matrices, self.routing.ends), self.routing.expert, biases)


def _grouped_forward(
    name: str, experts: Any, adapters: Adapters | None, plan: PlanDispatch | None, group: TokenGroup | None
) -> Any:
    count = experts.gate_up_proj.shape[0]

    def multiply(
        weight: str, inputs: torch.Tensor, routing: _Routing, dispatch: ExpertDispatch, spans: Sequence[Span]
    ) -> torch.Tensor:
        """One of the two matrices of each expert, with its bias and its adapters."""
        matrix = getattr(experts, weight)
        biases = getattr(experts, f"{weight}_bias") if experts.has_bias else None
        output = dispatch.multiply(inputs, matrix if experts.is_transposed else matrix.mT, biases)
        return _add_adapters(f"{name}.{weight}", inputs, output, routing, spans)

    def forward(hidden: torch.Tensor, routed: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """`hidden` is (tokens, dimensions); `routed` and `weights` are (tokens, experts per token)."""
        tokens, spans = len(hidden), () if adapters is None else adapters.row
        if group is not None:
            hidden, routed, weights = map(group.take_tokens, (hidden, routed, weights))
            spans = group.take_spans(spans, tokens)
        # `embedding` and not an index: several threads would add the gradients of an index in any order.
        with torch.no_grad():
            routing = _route(routed, count)
            dispatch: ExpertDispatch = _OwnExperts(routing) if plan is None else plan(routing.ends)
        inner = multiply("gate_up_proj", embedding(routing.tokens, hidden), routing, dispatch, spans)
        output = multiply("down_proj", experts._apply_gate(inner), routing, dispatch, spans)
        if experts.has_post_expert_norm:
            output = experts.post_expert_norm(output)
        output = output * weights.reshape(-1)[routing.order][:, None]
        output = output[routing.place].view(*routed.shape, -1).sum(dim=1).to(hidden.dtype)
        return output if group is None else group.gather_tokens(output, tokens)

    return forward


def add_biases(output: torch.Tensor, expert: torch.Tensor, biases: torch.Tensor | None) -> torch.Tensor:
    """To each pair that of its expert."""
    return output if biases is None else output + embedding(expert, biases)


def _add_adapters(
    target: str, inputs: torch.Tensor, output: torch.Tensor, routing: _Routing, spans: Sequence[Span]
) -> torch.Tensor:
    for span, start, end in _adapted_spans(target, spans):
        assert span.adapter is not None
        a, b = (matrix.to(inputs.dtype) for matrix in span.adapter.pairs[target])
        if len(spans) == 1:
            output = output + _delta(inputs, a, b, routing.ends, span.adapter.scale)
        else:
            places, ends = routing.of_tokens(start, end)
            output = output.index_add(0, places, _delta(inputs[places], a, b, ends, span.adapter.scale))
    return output


def _adapted_spans(target: str, spans: Sequence[Span]) -> Iterator[tuple[Span, int, int]]:
    """Spans with an adapter of this weight, and their first and last tokens."""
    start = 0
    for span in spans:
        if span.length and span.adapter is not None and target in span.adapter.pairs:
            yield span, start, start + span.length
        start += span.length


def _delta(inputs: torch.Tensor, a: torch.Tensor, b: torch.Tensor, ends: torch.Tensor, scale: float) -> torch.Tensor:
    """B A x of each pair's expert, times the scale, which is applied to the narrow side."""
    return multiply_groups(multiply_groups(inputs, a.mT, ends) * scale, b.mT, ends)


def multiply_groups(inputs: torch.Tensor, matrices: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    """The inputs up to each end by the matrix of its group, (groups, inputs, outputs)."""
    _, rows, columns = matrices.shape
    aligned = ALIGNMENT // matrices.element_size()
    if rows % aligned == 0 and columns % aligned == 0:
        return grouped_mm(inputs, matrices, offs=ends)
    # Zeros add nothing to a product, and the columns that they add to the result are dropped.
    inputs = pad(inputs, (0, -rows % aligned))
    matrices = pad(matrices, (0, -columns % aligned, 0, -rows % aligned))
    return grouped_mm(inputs, matrices, offs=ends)[:, :columns]
