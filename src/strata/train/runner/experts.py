"""Computes the experts of a mixture in grouped matrix multiplications, with their adapters: routing of tokens, order,
alignment.

transformers has the experts of a layer as one module with one fused weight, and computes them in a loop. Here the pairs
of a token and one of its experts are sorted by expert, so that a grouped matrix multiplication computes all experts at
once. It needs no number on the host: a loop waits for the device to learn which experts have tokens. What a family does
between and after the matrices (its gate with or without a clamp, biases, a norm) is called as its module defines it.

An adapter acts on the tokens of its span and on the matrices of their experts: two more grouped multiplications of the
same pairs, on the rank that holds the expert. Modules of another form keep their own computation (`is_experts`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol

import torch
from torch import nn
from torch.nn.functional import embedding, grouped_mm, pad

from strata.train.runner.lora.adapter import Adapter
from strata.train.runner.lora.hooks import Adapters, Span
from strata.train.runner.lora.targets import is_experts

ALIGNMENT: Final = 16
"""Rows of a matrix have to be a multiple of so many bytes for the kernel; those of an adapter's odd rank are not."""


@dataclass(frozen=True)
class AdaptedPairs:
    """The pairs of one adapter, among pairs that are sorted by expert."""

    adapter: Adapter
    places: torch.Tensor | None
    """The numbers of the experts; None if they are all."""
    ends: torch.Tensor
    """The place after the last pair of each expert."""


class ExpertDispatch(Protocol):
    """Products with experts, which this rank or other ranks hold."""

    def multiply(
        self, target: str, inputs: torch.Tensor, matrices: torch.Tensor, biases: torch.Tensor | None
    ) -> torch.Tensor:
        """Pairs that are sorted by expert, each by the matrix of its expert, with its bias if there are any, and with
        what its adapter adds to the weight `target`. Matrices and biases are those that this rank holds. All ranks of
        the group call it together."""
        ...


class PlanDispatch(Protocol):
    def __call__(self, ends: torch.Tensor, adapters: Sequence[Adapter]) -> ExpertDispatch:
        """Returns where to send pairs that are sorted by expert, and those of an expert by adapter: first those without
        one, then those of each of `adapters`. `ends` are after the last of each."""
        ...


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
        """Gathers the values of all tokens, from the slices of all ranks."""
        ...


def group_experts(
    model: nn.Module, adapters: Adapters, plan: PlanDispatch | None = None, group: TokenGroup | None = None
) -> None:
    """Replace the loops over experts in a model. With `plan`, this rank holds some of the experts only. With `group`,
    other ranks have the same tokens."""
    for name, module in model.named_modules():
        if is_experts(module):
            module.forward = _grouped_forward(name, module, adapters, plan, group)


@dataclass(frozen=True)
class _Routing:
    """The pairs of a token and one of its experts, sorted by group: by expert, or by expert and adapter. Within a group
    the order of the tokens is kept."""

    groups: int
    per_token: int
    """Experts of a token."""
    group: torch.Tensor
    """The group of each pair."""
    order: torch.Tensor
    """The number that each pair had before: those of a token are adjacent."""
    place: torch.Tensor
    """Where each of them is now."""
    ends: torch.Tensor
    """The place after the last pair of each group."""

    @property
    def tokens(self) -> torch.Tensor:
        return self.order // self.per_token

    def of_tokens(self, start: int, end: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns where the pairs of adjacent tokens are, and after which of them each expert ends."""
        places = self.place[start * self.per_token : end * self.per_token].sort().values
        return places, _ends(self.group[places], self.groups)


def _route(routed: torch.Tensor, groups: int) -> _Routing:
    """Pairs of so many groups: experts, or an adapter of an expert."""
    group, order = torch.sort(routed.reshape(-1), stable=True)
    place = invert(order)
    return _Routing(groups, routed.shape[1], group, order, place, _ends(group, groups))


def invert(order: torch.Tensor) -> torch.Tensor:
    """Returns where each element is in this order."""
    place = torch.empty_like(order)
    place[order] = torch.arange(len(order), device=order.device)
    return place


def _ends(sorted_groups: torch.Tensor, groups: int) -> torch.Tensor:
    numbers = torch.arange(groups, device=sorted_groups.device)
    return torch.searchsorted(sorted_groups, numbers, right=True, out_int32=True)


@dataclass(frozen=True)
class _OwnExperts:
    """This rank holds all experts."""

    routing: _Routing
    adapted: Sequence[AdaptedPairs]

    def multiply(
        self, target: str, inputs: torch.Tensor, matrices: torch.Tensor, biases: torch.Tensor | None
    ) -> torch.Tensor:
        output = add_biases(multiply_groups(inputs, matrices, self.routing.ends), self.routing.group, biases)
        return add_adapters(target, inputs, output, self.adapted)


def _grouped_forward(
    name: str, experts: Any, adapters: Adapters, plan: PlanDispatch | None, group: TokenGroup | None
) -> Any:
    count = experts.gate_up_proj.shape[0]

    def multiply(weight: str, inputs: torch.Tensor, dispatch: ExpertDispatch) -> torch.Tensor:
        """One of the two matrices of each expert, with its bias and its adapters."""
        matrix = getattr(experts, weight)
        biases = getattr(experts, f"{weight}_bias") if experts.has_bias else None
        return dispatch.multiply(f"{name}.{weight}", inputs, matrix if experts.is_transposed else matrix.mT, biases)

    def route(routed: torch.Tensor, spans: Sequence[Span]) -> tuple[_Routing, ExpertDispatch]:
        if plan is None:
            routing = _route(routed, count)
            return routing, _OwnExperts(routing, list(_adapted_pairs(routing, spans, name)))
        kinds = len(adapters.in_pass) + 1
        routing = _route(routed * kinds + _adapter_numbers(spans, adapters.in_pass, routed), count * kinds)
        return routing, plan(routing.ends, adapters.in_pass)

    def forward(hidden: torch.Tensor, routed: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """`hidden` is (tokens, dimensions); `routed` and `weights` are (tokens, experts per token)."""
        tokens, spans = len(hidden), adapters.row
        if group is not None:
            hidden, routed, weights = map(group.take_tokens, (hidden, routed, weights))
            spans = group.take_spans(spans, tokens)
        # `embedding` and not an index: several threads would add the gradients of an index in any order.
        with torch.no_grad():
            routing, dispatch = route(routed, spans)
        inner = multiply("gate_up_proj", embedding(routing.tokens, hidden), dispatch)
        output = multiply("down_proj", experts._apply_gate(inner), dispatch)
        if experts.has_post_expert_norm:
            output = experts.post_expert_norm(output)
        output = output * weights.reshape(-1)[routing.order][:, None]
        output = output[routing.place].view(*routed.shape, -1).sum(dim=1).to(hidden.dtype)
        return output if group is None else group.gather_tokens(output, tokens)

    return forward


def _adapter_numbers(spans: Sequence[Span], adapters: Sequence[Adapter], routed: torch.Tensor) -> torch.Tensor:
    """Returns for each token the number of its adapter, from 1; 0 if it has none. Its shape is (tokens, 1). (tokens,
    1)."""
    numbers = routed.new_zeros(len(routed), 1)
    start = 0
    for span in spans:
        if span.length and span.adapter is not None:
            numbers[start : start + span.length] = 1 + adapters.index(span.adapter)
        start += span.length
    return numbers


def add_biases(output: torch.Tensor, expert: torch.Tensor, biases: torch.Tensor | None) -> torch.Tensor:
    """Adds to each pair the bias of its expert."""
    return output if biases is None else output + embedding(expert, biases)


def _adapted_pairs(routing: _Routing, spans: Sequence[Span], name: str) -> Iterator[AdaptedPairs]:
    """Yields the pairs of the spans whose adapters have the experts `name`."""
    start = 0
    for span in spans:
        end = start + span.length
        if span.length and span.adapter is not None and f"{name}.down_proj" in span.adapter.pairs:
            places, ends = (None, routing.ends) if len(spans) == 1 else routing.of_tokens(start, end)
            yield AdaptedPairs(span.adapter, places, ends)
        start = end


def add_adapters(
    target: str, inputs: torch.Tensor, output: torch.Tensor, adapted: Sequence[AdaptedPairs]
) -> torch.Tensor:
    """Adds to each pair what its adapter adds to the weight `target` of its expert."""
    for pairs in adapted:
        if target not in pairs.adapter.pairs:
            continue
        a, b = (matrix.to(inputs.dtype) for matrix in pairs.adapter.pairs[target])
        if pairs.places is None:
            output = output + _delta(inputs, a, b, pairs.ends, pairs.adapter.scale)
        else:
            delta = _delta(inputs[pairs.places], a, b, pairs.ends, pairs.adapter.scale)
            output = output.index_add(0, pairs.places, delta)
    return output


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
