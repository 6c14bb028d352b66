"""Distributes a weight over a group of ranks as a DTensor, and replaces it by the local tensor while its module
computes.

A weight is a distributed tensor, so that FSDP can shard it further and files show which part a rank holds. While its
module computes, it is replaced by what this rank computes with.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Shard

from strata.train.runner.collectives import MeshGroup

LocalWeight = Callable[[str, DTensor], torch.Tensor]
"""What a rank computes with, by the name of the weight in its module and the weight."""


class SplitModel(MeshGroup):
    """A model whose weights, or some of them, are split over a group of ranks. A rank alone has all of them."""

    _whole = False

    @contextmanager
    def unsplit(self) -> Iterator[None]:
        """Every layer gathers its weights and computes as on one rank: for a reference, without gradients."""
        self._whole = True
        try:
            yield
        finally:
            self._whole = False

    def gather(self, own: torch.Tensor) -> torch.Tensor:
        """The flat tensors of all ranks of the group, which are equally long, as rows in the order of the ranks."""
        gathered = own.new_empty(self.size * len(own))
        dist.all_gather_single(gathered, own, group=self.group)
        return gathered.view(self.size, -1)


def distribute_weight(weight: torch.Tensor, mesh: DeviceMesh, placement: Placement) -> nn.Parameter:
    """This rank's part of a weight that every rank has, or that has no memory yet. Nothing is communicated."""
    part = weight.detach()
    if isinstance(placement, Shard):
        part = torch.chunk(part, mesh.size(), placement.dim)[mesh.get_local_rank()].contiguous()
    shape, stride = weight.shape, weight.stride()
    distributed = DTensor.from_local(part, mesh, [placement], run_check=False, shape=shape, stride=stride)
    return nn.Parameter(distributed, requires_grad=weight.requires_grad)


def compute_locally(module: nn.Module, local: LocalWeight) -> None:
    """While the module computes, its weights are plain tensors."""
    distributed: list[dict[str, Any]] = []

    def take_parts(*unused: Any) -> None:
        del unused
        distributed.append(dict(module._parameters))
        for name, weight in distributed[-1].items():
            if isinstance(weight, DTensor):
                module._parameters[name] = local(name, weight)  # type: ignore[assignment]

    def put_back(*unused: Any) -> None:
        del unused
        module._parameters.update(distributed.pop())

    module.register_forward_pre_hook(take_parts)
    # Also after an error, which must not leave the parts.
    module.register_forward_hook(put_back, always_call=True)
