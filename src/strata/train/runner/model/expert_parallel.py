"""Expert parallelism: which rank holds which experts, and the exchange of tokens with them, forward and back.

The rows of the ranks are different ones, or slices of one row in a tensor group, whose ranks have the same tokens. The
pairs of a token and one of its experts travel to the rank that holds the expert, which computes all that the expert
does with them, and the results travel back: one exchange each way for a layer, forward and backward.

The host has to know how many pairs it receives from each rank. It reads them once for a layer and row: a layer that is
recomputed in the backward pass takes over which experts the forward pass has chosen for each token, and the numbers of
pairs (`ExpertParallel.checkpoint_contexts`).

Adapters of experts follow the experts: a rank holds those of its own experts, and adds them to the pairs that it
receives. The number of pairs that each rank sends is told by expert and adapter, so the receiver knows the adapter of
each pair; all ranks number the adapters of a pass alike (`Adapters.in_pass`).

An expert's weights are split over the group before FSDP shards them further, over the ranks that hold the same experts.
These ranks also share the gradients and the moments of the experts' adapters (`AdapterPlacement.holders`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Self

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, Shard
from torch.nn.functional import pad

from strata.base.errors import Code, StrataError
from strata.train.runner.collectives import exchange_rows
from strata.train.runner.experts import (
    ExpertDispatch,
    ExpertFunction,
    ExpertPairs,
    Routing,
    invert,
    pairs_of_groups,
    pairs_of_one,
    permute,
    route_pairs,
)
from strata.train.runner.lora.adapter import LoraPart
from strata.train.runner.lora.hooks import NumberedTokens
from strata.train.runner.lora.targets import LoraTarget, is_experts
from strata.train.runner.model.distributed_weights import SplitModel, compute_locally, distribute_weight


class DispatchSizes(NamedTuple):
    sent: Sequence[int]
    received: Sequence[int]
    """Pairs to each rank, and from each."""
    by_adapter: Sequence[int]
    """Received pairs without an adapter, and of each."""


@dataclass(frozen=True)
class _Dispatch:
    """How the pairs of this rank, sorted by expert, are sent, and how those that it receives are sorted."""

    group: dist.ProcessGroup
    sent: Sequence[int]
    received: Sequence[int]
    """Pairs to each rank, and from each."""
    order: torch.Tensor
    """The order of the received pairs, by expert."""
    place: torch.Tensor
    """Where each of them is in that order."""
    pairs: ExpertPairs
    """Those of the received pairs, in that order."""

    def run(self, compute: ExpertFunction, hidden: torch.Tensor) -> torch.Tensor:
        rows = permute(exchange_rows(hidden, self.sent, self.received, self.group), self.order, self.place)
        if len(rows):
            output = compute(rows, self.pairs)
        else:
            # The gradient of no rows is none that the kernel can compute; that of a row of zeros is zero.
            expert, ends = pad(self.pairs.expert, (0, 1)), self.pairs.ends + 1
            output = compute(pad(rows, (0, 0, 0, 1)), ExpertPairs(expert, ends, None))[:0]
        return exchange_rows(permute(output, self.place, self.order), self.received, self.sent, self.group)


class RoutedPairs(NamedTuple):
    """What is known of the pairs of a layer and row when they were counted."""

    groups: torch.Tensor
    """The expert and the adapter of each pair of this rank."""
    received: torch.Tensor
    """How many pairs of each group come from each rank."""
    sizes: DispatchSizes


class CheckpointContext:
    """The forward pass of a checkpointed layer, or its recomputation, which can happen again."""

    def __init__(self, experts: ExpertParallel, routed: list[RoutedPairs], *, is_recomputed: bool) -> None:
        self._experts = experts
        self._routed = routed
        self._is_recomputed = is_recomputed

    def __enter__(self) -> Self:
        self._recalled = iter(self._routed) if self._is_recomputed else None
        self._experts.checkpoint = self
        return self

    def __exit__(self, *unused: object) -> None:
        self._experts.checkpoint = None

    def recall(self, groups: torch.Tensor) -> RoutedPairs | None:
        """Returns in a recomputation what the forward pass has kept at the same place, else None."""
        if self._recalled is None:
            return None
        routed = next(self._recalled, None)
        if routed is None or routed.groups.shape != groups.shape:
            had = "none" if routed is None else tuple(routed.groups.shape)
            message = f"a layer is recomputed with pairs of shape {tuple(groups.shape)}; its forward pass had {had}"
            raise StrataError(Code.INTERNAL, message)
        return routed

    def keep(self, routed: RoutedPairs) -> None:
        self._routed.append(routed)


class ExpertParallel(SplitModel):
    """A model whose experts are split over an expert group. All ranks of the group call the model together, each with a
    row of its own."""

    checkpoint: CheckpointContext | None = None
    """The checkpointed layer that computes now."""

    def split(self, lm: nn.Module) -> None:
        """Replace the weights of all experts. Nothing is communicated."""
        modules = [module for module in lm.modules() if is_experts(module)]
        if not modules:
            raise StrataError(Code.UNSUPPORTED, "it has no experts that can be split")
        for module in modules:
            for name, weight in list(module.named_parameters(recurse=False)):
                setattr(module, name, distribute_weight(weight, self.mesh, Shard(0)))
            compute_locally(module, self._local)

    def lora_part(self, target: LoraTarget) -> LoraPart:
        """The adapters of the experts that this rank holds."""
        if self.size == 1:
            return LoraPart()
        each = target.experts // self.size
        first = self.rank * each
        return LoraPart(experts=range(first, first + each))

    def gather_experts(self, own: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Tensors of all experts, from those that each rank of the group holds, in one collective."""
        gathered = self.gather(torch.cat([each.reshape(-1) for each in own]))
        parts = torch.split(gathered, [each.numel() for each in own], dim=1)
        return [part.reshape(-1, *each.shape[1:]) for part, each in zip(parts, own, strict=True)]

    def checkpoint_contexts(self) -> tuple[CheckpointContext, CheckpointContext]:
        """Returns the contexts of the forward pass of a layer and of its recomputation (`torch.utils.checkpoint`).

        The inputs of both are the same bits, so the same experts are chosen. Kernels that round differently each time
        could choose others: other ranks, which have counted the pairs, would take them for what they are not. So the
        recomputation takes over the choice. What is kept for it belongs to the layer's graph, and goes with it, also
        if there is no backward pass."""
        routed: list[RoutedPairs] = []
        forward = CheckpointContext(self, routed, is_recomputed=False)
        return forward, CheckpointContext(self, routed, is_recomputed=True)

    def dispatch(self, routed: torch.Tensor, experts: int, tokens: NumberedTokens) -> tuple[Routing, ExpertDispatch]:
        """Dispatches pairs by the group of each: the expert, and of an expert first those without an adapter."""
        ranks, kinds = self.size, len(tokens.adapters)
        groups = routed * kinds + tokens.numbers
        known = None if self.checkpoint is None else self.checkpoint.recall(groups)
        routing = route_pairs(groups if known is None else known.groups, experts * kinds)
        if known is None:
            known = self._count_pairs(groups, routing.ends, kinds)
            if self.checkpoint is not None:
                self.checkpoint.keep(known)
        sizes = known.sizes
        numbers = torch.arange(experts * kinds // ranks, device=groups.device).repeat(ranks)
        group = torch.repeat_interleave(numbers, known.received, output_size=sum(sizes.received))
        order = torch.argsort(group, stable=True)
        by_expert = known.received.view(ranks, -1, kinds).sum(dim=0)
        pairs = _received_pairs(group[order], by_expert, tokens, sizes.by_adapter)
        return routing, _Dispatch(self.group, sizes.sent, sizes.received, order, invert(order), pairs)

    def _count_pairs(self, groups: torch.Tensor, ends: torch.Tensor, kinds: int) -> RoutedPairs:
        sent = torch.diff(ends.to(torch.int64), prepend=ends.new_zeros(1, dtype=torch.int64))
        received = torch.empty_like(sent)
        dist.all_to_all_single(received, sent, group=self.group)
        by_rank = received.view(self.size, -1, kinds)
        to_rank = sent.view(self.size, -1).sum(dim=1)
        sizes = self._read_sizes(to_rank, by_rank.sum(dim=(1, 2)), by_rank.sum(dim=(0, 1)))
        return RoutedPairs(groups, received, sizes)

    def _read_sizes(self, sent: torch.Tensor, received: torch.Tensor, adapted: torch.Tensor) -> DispatchSizes:
        """It waits for the device: they have to be known on the host."""
        numbers: list[int] = torch.cat([sent, received, adapted]).tolist()
        ranks = len(sent)
        return DispatchSizes(numbers[:ranks], numbers[ranks : 2 * ranks], numbers[2 * ranks :])

    def _local(self, name: str, weight: DTensor) -> torch.Tensor:
        del name
        return weight.full_tensor() if self._whole else weight.to_local()


def _received_pairs(
    group: torch.Tensor, by_expert: torch.Tensor, tokens: NumberedTokens, by_adapter: Sequence[int]
) -> ExpertPairs:
    """Received pairs, sorted by group. `by_expert` are those of each expert and adapter, `by_adapter` the sums."""
    if len(group) not in by_adapter:
        return pairs_of_groups(group, _ends(by_expert.view(-1)), tokens, by_adapter)
    # All are of one adapter, or none has one.
    kinds, place = len(by_adapter), by_adapter.index(len(group))
    ends = _ends(by_expert[:, place])
    return ExpertPairs(group // kinds, ends, pairs_of_one(tokens.adapters[place], ends))


def _ends(counts: torch.Tensor) -> torch.Tensor:
    return counts.cumsum(dim=0).to(torch.int32)
