"""Computes the experts of a mixture in grouped matrix multiplications, with their adapters: routing of tokens, order,
alignment.

transformers has the experts of a layer as one module with one fused weight, and computes them in a loop. Here the pairs
of a token and one of its experts are sorted by expert, so that a grouped matrix multiplication computes all experts at
once. It needs no number on the host: a loop waits for the device to learn which experts have tokens. What a family does
between and after the matrices (its gate with or without a clamp, biases, a norm) is called as its module defines it.

All that an expert does with a pair is one function of sorted pairs, which is called where the expert is: on this rank,
or on the ranks that hold the experts (`ExpertDispatch`). The token's rank multiplies what comes back by the weight of
the pair, and adds it up.

An adapter acts on the tokens of its span and on the matrices of their experts: two more grouped multiplications of the
same pairs, on the rank that holds the expert. Where torch has a kernel, the pairs of all adapters are multiplied at
once, as groups of an expert and an adapter; elsewhere adapter by adapter. Modules of another form keep their own
computation (`is_experts`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol

import torch
from torch import nn
from torch.nn.functional import embedding, grouped_mm, pad

from strata.train.runner.lora.adapter import Adapter
from strata.train.runner.lora.hooks import AdaptedPairs, Adapters, NumberedTokens, Span
from strata.train.runner.lora.targets import is_experts
from strata.train.runner.router_replay import RouterReplay, block_of

ALIGNMENT: Final = 16
"""Rows of a matrix have to be a multiple of so many bytes for the kernel; those of an adapter's odd rank are not."""


@dataclass(frozen=True)
class ExpertPairs:
    """Pairs of a token and one of its experts on the rank that holds the expert, sorted by expert."""

    expert: torch.Tensor
    """The number of the expert of each, among those that the rank holds."""
    ends: torch.Tensor
    """The place after the last pair of each of these experts."""
    adapted: AdaptedPairs | None
    """The pairs by adapter; None if no adapter has the experts."""


ExpertFunction = Callable[[torch.Tensor, ExpertPairs], torch.Tensor]
"""What experts make of the hidden states of pairs: for each of them as many numbers."""


class ExpertDispatch(Protocol):
    """Where the experts of sorted pairs are: on this rank or on others."""

    def run(self, compute: ExpertFunction, hidden: torch.Tensor) -> torch.Tensor:
        """Runs the function on the pairs where their experts are, and returns what it makes of each, in their order.
        All ranks of the group call it together."""
        ...


class PlanDispatch(Protocol):
    def __call__(self, routed: torch.Tensor, experts: int, tokens: NumberedTokens) -> tuple[Routing, ExpertDispatch]:
        """Returns the routing of pairs by expert and adapter, and where to send them. `routed` are (tokens, experts per
        token). The first of the adapters is none."""
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
    model: nn.Module,
    adapters: Adapters,
    plan: PlanDispatch | None = None,
    group: TokenGroup | None = None,
    routers: RouterReplay | None = None,
) -> None:
    """Replace the loops over experts in a model. With `plan`, this rank holds some of the experts only. With `group`,
    other ranks have the same tokens. `routers` records what routers choose, and has them choose what it says."""
    routers = routers or RouterReplay()
    for name, module in model.named_modules():
        if is_experts(module):
            routers.add_layer(block_of(model, name), len(module.gate_up_proj))
            module.forward = _grouped_forward(name, module, adapters, plan, group, routers)


@dataclass(frozen=True)
class Routing:
    """The pairs of a token and one of its experts, sorted by group: by expert, or by expert and adapter. Within a group
    the order of the tokens is kept."""

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


def route_pairs(routed: torch.Tensor, groups: int) -> Routing:
    """Pairs of so many groups: experts, or an adapter of an expert."""
    group, order = torch.sort(routed.reshape(-1), stable=True)
    place = invert(order)
    return Routing(routed.shape[1], group, order, place, _ends(group, groups))


def invert(order: torch.Tensor) -> torch.Tensor:
    """Returns where each element is in this order."""
    place = torch.empty_like(order)
    place[order] = torch.arange(len(order), device=order.device)
    return place


def _ends(sorted_groups: torch.Tensor, groups: int) -> torch.Tensor:
    numbers = torch.arange(groups, device=sorted_groups.device)
    return torch.searchsorted(sorted_groups, numbers, right=True, out_int32=True)


class _Permute(torch.autograd.Function):
    """The rows in another order. Their gradient takes the order back: that of an index is added to zeros, row by
    row."""

    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, order: torch.Tensor, place: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(place)
        return rows[order]

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        (place,) = ctx.saved_tensors
        return grads[0][place], None, None


def permute(rows: torch.Tensor, order: torch.Tensor, place: torch.Tensor) -> torch.Tensor:
    """Returns all rows in this order; `place` is where each of them then is."""
    return _Permute.apply(rows, order, place)  # type: ignore[no-any-return, no-untyped-call]


@dataclass(frozen=True)
class _OwnExperts:
    """This rank holds all experts."""

    pairs: ExpertPairs

    def run(self, compute: ExpertFunction, hidden: torch.Tensor) -> torch.Tensor:
        return compute(hidden, self.pairs)


def _grouped_forward(
    name: str,
    experts: Any,
    adapters: Adapters,
    plan: PlanDispatch | None,
    group: TokenGroup | None,
    routers: RouterReplay,
) -> Any:
    count = experts.gate_up_proj.shape[0]

    def multiply(weight: str, inputs: torch.Tensor, pairs: ExpertPairs) -> torch.Tensor:
        """One of the two matrices of each expert that this rank holds, with its bias and its adapters."""
        matrices = getattr(experts, weight)
        output = multiply_groups(inputs, matrices if experts.is_transposed else matrices.mT, pairs.ends)
        if experts.has_bias:
            output = output + embedding(pairs.expert, getattr(experts, f"{weight}_bias"))
        if pairs.adapted is None:
            return output
        added = adapters.add_to_pairs(f"{name}.{weight}", inputs, output, pairs.adapted)
        return _add_each(f"{name}.{weight}", inputs, output, pairs.adapted) if added is None else added

    def compute(hidden: torch.Tensor, pairs: ExpertPairs) -> torch.Tensor:
        inner = experts._apply_gate(multiply("gate_up_proj", hidden, pairs))
        output = multiply("down_proj", inner, pairs)
        return experts.post_expert_norm(output) if experts.has_post_expert_norm else output

    def route(routed: torch.Tensor, spans: Sequence[Span]) -> tuple[Routing, ExpertDispatch]:
        spans = _spans_of_experts(spans, name, len(routed))
        if plan is not None:
            return plan(routed, count, adapters.number_tokens(spans, [None, *adapters.in_pass], routed.device))
        kinds = list(dict.fromkeys(span.adapter for span in spans))
        if len(kinds) == 1:
            routing = route_pairs(routed, count)
            adapted = pairs_of_one(kinds[0], routing.ends)
            return routing, _OwnExperts(ExpertPairs(routing.group, routing.ends, adapted))
        tokens = adapters.number_tokens(spans, kinds, routed.device)
        routing = route_pairs(routed * len(kinds) + tokens.numbers, count * len(kinds))
        pairs = pairs_of_groups(routing.group, routing.ends, tokens, _sizes_of(spans, kinds, routed.shape[1]))
        return routing, _OwnExperts(pairs)

    def forward(hidden: torch.Tensor, routed: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """`hidden` is (tokens, dimensions); `routed` and `weights` are (tokens, experts per token)."""
        tokens, spans = len(hidden), adapters.row
        routers.record(routed)
        if group is not None:
            hidden, routed, weights = map(group.take_tokens, (hidden, routed, weights))
            spans = group.take_spans(spans, tokens)
        with torch.no_grad():
            routing, dispatch = route(routed, spans)
        # `embedding` and not an index: several threads would add the gradients of an index in any order.
        output = dispatch.run(compute, embedding(routing.tokens, hidden))
        output = permute(output, routing.place, routing.order).view(*routed.shape, -1)
        output = (output * weights[..., None]).sum(dim=1).to(hidden.dtype)
        return output if group is None else group.gather_tokens(output, tokens)

    return forward


def _spans_of_experts(spans: Sequence[Span], name: str, tokens: int) -> list[Span]:
    """The spans of so many tokens, with an adapter where it has the experts `name`. Tokens behind the spans have
    none."""
    target = f"{name}.down_proj"
    own = [Span(span.adapter if _has(span.adapter, target) else None, span.length) for span in spans if span.length]
    without = tokens - sum(span.length for span in own)
    return [*own, Span(None, without)] if without else own


def _has(adapter: Adapter | None, target: str) -> bool:
    return adapter is not None and target in adapter.pairs


def _sizes_of(spans: Sequence[Span], adapters: Sequence[Adapter | None], per_token: int) -> list[int]:
    """The pairs of each of these adapters."""
    return [sum(span.length for span in spans if span.adapter is each) * per_token for each in adapters]


def pairs_of_one(adapter: Adapter | None, ends: torch.Tensor) -> AdaptedPairs | None:
    """Pairs that all have this adapter, or none. `ends` are those of the experts."""
    return None if adapter is None else AdaptedPairs([adapter], ends, adapter.scale)


def pairs_of_groups(
    group: torch.Tensor, ends: torch.Tensor, tokens: NumberedTokens, sizes: Sequence[int]
) -> ExpertPairs:
    """Pairs that are sorted by group: by expert and, of an expert, by adapter. `sizes` are the pairs of each
    adapter."""
    kinds = len(tokens.adapters)
    adapted = AdaptedPairs(tokens.adapters, ends, tokens.scales, group % kinds, sizes)
    return ExpertPairs(group // kinds, ends[kinds - 1 :: kinds].contiguous(), adapted)


def _add_each(target: str, inputs: torch.Tensor, output: torch.Tensor, adapted: AdaptedPairs) -> torch.Tensor:
    """Adds to each pair what its adapter adds to the weight `target` of its expert, adapter by adapter."""
    for pairs in adapted.parts:
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
