"""Expert parallelism: each rank of an expert group holds some experts of every layer, and computes them for all ranks.

The rows of the ranks are different ones, or slices of one row in a tensor group, whose ranks have the same tokens. The
pairs of a token and one of its experts travel to the rank that holds the
expert, and the product with the expert's matrix travels back: one exchange each way for each of the two matrices. What
lies between the matrices, and adapters, is computed where the token is, as without expert parallelism. So an adapter,
which every rank has in full, needs to know nothing of other ranks' rows.

An expert's weights are split over the group before FSDP shards them further, over the ranks that hold the same experts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, Shard
from torch.nn.functional import pad

from strata.base.errors import Code, StrataError
from strata.train.runner.collectives import exchange_rows
from strata.train.runner.experts import ExpertDispatch, add_biases, multiply_groups
from strata.train.runner.lora import is_experts
from strata.train.runner.model.distributed_weights import SplitModel, compute_locally, distribute_weight


@dataclass(frozen=True)
class _Dispatch:
    """How the pairs of this rank, sorted by expert, are sent, and how those that it receives are sorted."""

    group: dist.ProcessGroup
    sent: Sequence[int]
    received: Sequence[int]
    """Pairs to each rank, and from each."""
    order: torch.Tensor
    """Of the received pairs, by expert."""
    place: torch.Tensor
    """Where each of them is in that order."""
    expert: torch.Tensor
    """The number of each of them, in that order, among those that this rank holds."""
    ends: torch.Tensor
    """After the last of each expert that this rank holds."""

    def multiply(self, inputs: torch.Tensor, matrices: torch.Tensor, biases: torch.Tensor | None) -> torch.Tensor:
        there = exchange_rows(inputs, self.sent, self.received, self.group)
        rows, expert, ends = there[self.order], self.expert, self.ends
        if not len(rows):
            # The gradient of no rows is none that the kernel can compute; that of a row of zeros is zero.
            rows, expert, ends = pad(rows, (0, 0, 0, 1)), pad(expert, (0, 1)), ends + 1
        output = add_biases(multiply_groups(rows, matrices, ends), expert, biases)[self.place]
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
                setattr(module, name, distribute_weight(weight, self._mesh, Shard(0)))
            compute_locally(module, self._local)

    def dispatch(self, ends: torch.Tensor) -> ExpertDispatch:
        """For pairs that are sorted by expert; `ends` are after the last pair of each expert."""
        ranks = self._mesh.size()
        counts = torch.diff(ends.to(torch.int64), prepend=ends.new_zeros(1, dtype=torch.int64))
        incoming = torch.empty_like(counts)
        dist.all_to_all_single(incoming, counts, group=self._group)
        by_rank = incoming.view(ranks, -1)
        sent, received = self._read_sizes(counts.view(ranks, -1).sum(dim=1), by_rank.sum(dim=1))
        experts = torch.arange(by_rank.shape[1], device=ends.device).repeat(ranks)
        expert = torch.repeat_interleave(experts, incoming, output_size=sum(received))
        order = torch.argsort(expert, stable=True)
        place = torch.empty_like(order)
        place[order] = torch.arange(len(order), device=order.device)
        local_ends = by_rank.sum(dim=0).cumsum(dim=0).to(torch.int32)
        return _Dispatch(self._group, sent, received, order, place, expert[order], local_ends)

    def _read_sizes(self, sent: torch.Tensor, received: torch.Tensor) -> tuple[Sequence[int], Sequence[int]]:
        """Pairs to each rank, and from each. It waits for the device: they have to be known on the host."""
        sizes: list[list[int]] = torch.stack([sent, received]).tolist()
        return sizes[0], sizes[1]

    def _local(self, name: str, weight: DTensor) -> torch.Tensor:
        del name
        return weight.full_tensor() if self._whole else weight.to_local()
