"""Expert parallelism: which rank holds which experts, and the exchange of tokens with them, forward and back.

The rows of the ranks are different ones, or slices of one row in a tensor group, whose ranks have the same tokens. The
pairs of a token and one of its experts travel to the rank that holds the expert, and the product with the expert's
matrix travels back: one exchange each way for each of the two matrices. What lies between the matrices is computed
where the token is, as without expert parallelism.

Adapters of experts follow the experts: a rank holds those of its own experts, and adds them to the pairs that it
receives. The number of pairs that each rank sends is told by expert and adapter, so the receiver knows the adapter of
each pair; all ranks number the adapters of a pass alike (`Adapters.in_pass`).

An expert's weights are split over the group before FSDP shards them further, over the ranks that hold the same experts.
These ranks also share the gradients and the moments of the experts' adapters (`AdapterPlacement.holders`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, Shard
from torch.nn.functional import pad

from strata.base.errors import Code, StrataError
from strata.train.runner.collectives import exchange_rows
from strata.train.runner.experts import (
    AdaptedPairs,
    ExpertDispatch,
    add_adapters,
    add_biases,
    invert,
    multiply_groups,
)
from strata.train.runner.lora.adapter import Adapter, LoraPart
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
    expert: torch.Tensor
    """The number of each of them, in that order, among those that this rank holds."""
    ends: torch.Tensor
    """The place after the last pair of each expert that this rank holds."""
    adapted: Sequence[AdaptedPairs]
    """Those of the received pairs that have an adapter, in that order."""

    def multiply(
        self, target: str, inputs: torch.Tensor, matrices: torch.Tensor, biases: torch.Tensor | None
    ) -> torch.Tensor:
        rows = exchange_rows(inputs, self.sent, self.received, self.group)[self.order]
        expert, ends = self.expert, self.ends
        if not len(rows):
            # The gradient of no rows is none that the kernel can compute; that of a row of zeros is zero.
            rows, expert, ends = pad(rows, (0, 0, 0, 1)), pad(expert, (0, 1)), ends + 1
        output = add_biases(multiply_groups(rows, matrices, ends), expert, biases)
        output = add_adapters(target, rows, output, self.adapted)[self.place]
        return exchange_rows(output, self.received, self.sent, self.group)


class ExpertParallel(SplitModel):
    """A model whose experts are split over an expert group. All ranks of the group call the model together, each with a
    row of its own."""

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

    def dispatch(self, ends: torch.Tensor, adapters: Sequence[Adapter]) -> ExpertDispatch:
        """Dispatches pairs that are sorted by expert, and those of an expert by adapter: first those without one.
        `ends` are after the last pair of each."""
        ranks, kinds = self.size, len(adapters) + 1
        counts = torch.diff(ends.to(torch.int64), prepend=ends.new_zeros(1, dtype=torch.int64))
        incoming = torch.empty_like(counts)
        dist.all_to_all_single(incoming, counts, group=self.group)
        by_rank = incoming.view(ranks, -1, kinds)
        sizes = self._read_sizes(counts.view(ranks, -1).sum(dim=1), by_rank.sum(dim=(1, 2)), by_rank.sum(dim=(0, 1)))
        groups = torch.arange(by_rank.shape[1] * kinds, device=ends.device).repeat(ranks)
        group = torch.repeat_interleave(groups, incoming, output_size=sum(sizes.received))
        order = torch.argsort(group, stable=True)
        by_expert = by_rank.sum(dim=0)
        return _Dispatch(
            self.group,
            sizes.sent,
            sizes.received,
            order,
            invert(order),
            group[order] // kinds,
            _ends(by_expert.sum(dim=1)),
            list(_adapted_pairs(adapters, group[order] % kinds, by_expert, sizes.by_adapter)),
        )

    def _read_sizes(self, sent: torch.Tensor, received: torch.Tensor, adapted: torch.Tensor) -> DispatchSizes:
        """It waits for the device: they have to be known on the host."""
        numbers: list[int] = torch.cat([sent, received, adapted]).tolist()
        ranks = len(sent)
        return DispatchSizes(numbers[:ranks], numbers[ranks : 2 * ranks], numbers[2 * ranks :])

    def _local(self, name: str, weight: DTensor) -> torch.Tensor:
        del name
        return weight.full_tensor() if self._whole else weight.to_local()


def _adapted_pairs(
    adapters: Sequence[Adapter], number: torch.Tensor, by_expert: torch.Tensor, by_adapter: Sequence[int]
) -> Iterator[AdaptedPairs]:
    """Yields received pairs that are sorted by expert; `number` is that of each pair's adapter, from 1."""
    is_one = len(number) in by_adapter
    # Without an index if all pairs are of one adapter.
    order = None if is_one else torch.argsort(number, stable=True)
    start = 0
    for place, size in enumerate(by_adapter):
        if place and size:
            own = None if order is None else order[start : start + size]
            yield AdaptedPairs(adapters[place - 1], own, _ends(by_expert[:, place]))
        start += size


def _ends(counts: torch.Tensor) -> torch.Tensor:
    return counts.cumsum(dim=0).to(torch.int32)
