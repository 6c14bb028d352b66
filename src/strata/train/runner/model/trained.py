"""The models in training: a LoRA adapter over the frozen base, or the base itself (full fine-tune).

Both accumulate gradients the same way. The gradients of a pass are staged until it is over: `commit` adds them to those
accumulated since the last optimizer step, summed over the ranks, and `discard` drops them. A step consumes the sum, and
`abort` drops everything accumulated.

The values of an adapter are on every rank. Its accumulated gradients and its moments are not: each rank has its share
of them, and makes the AdamW step of that share. Muon steps on whole matrices, so every rank has and makes all of it.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from typing import Protocol

import torch
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from strata.train.core import ops
from strata.train.runner.collectives import RankGroup
from strata.train.runner.lora import Adapter, is_finite
from strata.train.runner.passes.logprobs import PackedModel
from strata.train.runner.passes.optimizer import Moments, Optimizer, StepParams, StepResult, step_settings

Step = Generator[None, None, StepResult]
"""A step that pauses after the start of each of its collectives, so that several steps can overlap."""


class TrainedModel(Protocol):
    created: ops.CreateModel
    optimizer: Optimizer

    def begin(self) -> None: ...

    def is_finite(self) -> bool:
        """Whether all staged gradients of this rank are finite."""
        ...

    def commit(self) -> None: ...

    def discard(self) -> None: ...

    def abort(self) -> None: ...

    def step(self, params: StepParams) -> Step:
        """Make a step with the sum of the gradients over all ranks, or raise why it cannot be made."""
        ...

    def tensors(self) -> Iterator[torch.Tensor]:
        """Everything it holds on the device besides the base."""
        ...


class LoraModel:
    def __init__(self, created: ops.CreateModel, adapter: Adapter, ranks: RankGroup) -> None:
        self.created = created
        self.adapter = adapter
        self.is_sharded = created.optimizer == "adamw"
        self.share = ranks.share(adapter.size) if self.is_sharded else slice(0, adapter.size)
        """What this rank steps of the flat block: it has the gradients and moments of that part."""
        stepped = [adapter.flat[self.share]]
        self.optimizer = Optimizer(stepped, created.schedule, created.optimizer, adapter.matrices)
        self._ranks = ranks
        self._gradient: torch.Tensor | None = None
        self._summing: Callable[[], torch.Tensor] | None = None
        """Waits for the sum of the last pass over the ranks."""

    @property
    def gradient(self) -> torch.Tensor | None:
        """This rank's share of what is accumulated; None if nothing is, then on all ranks."""
        self._add_last()
        return self._gradient

    @gradient.setter
    def gradient(self, share: torch.Tensor | None) -> None:
        self._add_last()
        self._gradient = share

    def _add_last(self) -> None:
        if self._summing is not None:
            summed = self._summing()[: self.share.stop - self.share.start]
            self._summing = None
            self._gradient = summed if self._gradient is None else self._gradient.add_(summed)

    def begin(self) -> None:
        # The block of the last pass is free before there is another one.
        self._add_last()
        self.adapter.begin()

    def is_finite(self) -> bool:
        return self.adapter.is_finite()

    def commit(self) -> None:
        """A rank without tokens of this model takes part with zeros."""
        block = self.adapter.take()
        start = self._ranks.start_reduce_scatter if self.is_sharded else self._ranks.start_all_reduce
        self._summing = start(block)

    def discard(self) -> None:
        self.adapter.discard()

    def abort(self) -> None:
        self.gradient = None

    def step(self, params: StepParams) -> Step:
        step_settings(self.optimizer.name, params)  # Raises before the gradients are taken, on all ranks alike.
        gradient = self.gradient
        self.gradient = None
        if gradient is None:
            gradient = torch.zeros_like(self.adapter.flat[self.share])
        norm = torch.linalg.vector_norm(gradient).double()
        if not self.is_sharded:
            return self.optimizer.step([gradient], float(norm), params)
        squares = self._ranks.start_all_reduce(norm.square())
        yield
        result = self.optimizer.step([gradient], float(squares().sqrt()), params)
        gathered = self._ranks.start_all_gather(self.adapter.padded)
        yield
        gathered()
        return result

    def gather_moments(self) -> Moments | None:
        """Of the whole adapter, as flat blocks on rank 0; None on the others."""
        (own,) = self.optimizer.moments()
        if self.is_sharded:
            gathered = {name: self._ranks.gather_shares(value, self.adapter.size) for name, value in own.items()}
            own = {name: flat for name, flat in gathered.items() if flat is not None}
        return own if self._ranks.is_rank0 else None

    def tensors(self) -> Iterator[torch.Tensor]:
        yield self.adapter.padded
        if (gradient := self.gradient) is not None:
            yield gradient
        yield from self.optimizer.tensors()


class FullModel:
    """All weights of the base, sharded: each rank holds and updates its shard of every weight."""

    def __init__(self, created: ops.CreateModel, packed: PackedModel, ranks: RankGroup) -> None:
        self.created = created
        self.parameters: dict[str, DTensor] = dict(sharded(packed))
        """Those of this rank's stage, if there are stages."""
        self._stage = packed.stage
        self._tied = [] if packed.stage is None else packed.stage.tied_weights(packed.lm)
        self.optimizer = Optimizer([local(parameter) for parameter in self.parameters.values()], created.schedule)
        self._ranks = ranks
        self._accumulated: dict[str, torch.Tensor | None] = {}

    def begin(self) -> None:
        self._accumulated = {name: parameter.grad for name, parameter in self.parameters.items()}
        self.abort()

    def is_finite(self) -> bool:
        gradients = (parameter.grad for parameter in self.parameters.values())
        return all(is_finite(local(gradient)) for gradient in gradients if gradient is not None)

    def commit(self) -> None:
        self._sum_tied()
        for name, parameter in self.parameters.items():
            accumulated = self._accumulated.get(name)
            if accumulated is not None:
                parameter.grad = accumulated if parameter.grad is None else accumulated.add_(parameter.grad)
        self._accumulated = {}

    def _sum_tied(self) -> None:
        """Each of two stages has computed a part of the gradient."""
        for name in self._tied:
            gradient = self.parameters[name].grad
            if self._stage is not None and gradient is not None:
                self._stage.sum_tied(local(gradient))

    def discard(self) -> None:
        for name, parameter in self.parameters.items():
            parameter.grad = self._accumulated.get(name)
        self._accumulated = {}

    def abort(self) -> None:
        for parameter in self.parameters.values():
            parameter.grad = None

    def has_first_copy(self, name: str) -> bool:
        """Whether this rank's shard of a weight is the one that counts, and that is written."""
        is_elsewhere = name in self._tied and self._stage is not None and self._stage.is_last
        return not is_elsewhere and is_first_copy(self.parameters[name])

    def gradients(self) -> list[torch.Tensor]:
        """This rank's shards; FSDP has already summed them over the ranks."""
        return [
            torch.zeros_like(local(parameter)) if parameter.grad is None else local(parameter.grad)
            for parameter in self.parameters.values()
        ]

    def step(self, params: StepParams) -> Step:
        step_settings(self.optimizer.name, params)
        gradients = self.gradients()
        self.abort()
        # Each gradient counts once, however many copies there are.
        counted = [self.has_first_copy(name) for name in self.parameters]
        squares = [gradient.double().square().sum() * own for gradient, own in zip(gradients, counted, strict=True)]
        norm = self._ranks.start_all_reduce(torch.stack(squares).sum())
        yield
        return self.optimizer.step(gradients, float(norm().sqrt()), params)

    def tensors(self) -> Iterator[torch.Tensor]:
        yield from (local(parameter.grad) for parameter in self.parameters.values() if parameter.grad is not None)
        yield from self.optimizer.tensors()


def sharded(packed: PackedModel) -> Iterator[tuple[str, DTensor]]:
    """The weights under their names in the model's files."""
    for name, parameter in packed.lm.named_parameters():
        assert isinstance(parameter, DTensor)
        yield name, parameter


def local(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's shard of a sharded tensor, in the same memory."""
    return tensor.to_local().detach() if isinstance(tensor, DTensor) else tensor.detach()


def sharded_like(parameter: DTensor, shard: torch.Tensor) -> DTensor:
    """A tensor that is sharded as the parameter is, from this rank's shard."""
    mesh, placements = parameter.device_mesh, parameter.placements
    shape, stride = parameter.shape, parameter.stride()
    return DTensor.from_local(shard, mesh, placements, run_check=False, shape=shape, stride=stride)


def own_region(parameter: DTensor) -> tuple[slice, ...]:
    """Which part of the weight this rank holds."""
    shape, offsets = compute_local_shape_and_global_offset(parameter.shape, parameter.device_mesh, parameter.placements)
    return tuple(slice(offset, offset + length) for offset, length in zip(offsets, shape, strict=True))


def own_slice(full: torch.Tensor, parameter: DTensor) -> torch.Tensor:
    """A copy of this rank's shard of a full weight."""
    return full[own_region(parameter)].to(local(parameter).device if not full.is_meta else None, copy=True)


def mesh_size(parameter: DTensor, name: str) -> int:
    """The size of this dimension of the weight's mesh; 1 if the mesh does not have it."""
    mesh = parameter.device_mesh
    names = mesh.mesh_dim_names or ()
    return mesh.size(names.index(name)) if name in names else 1


def is_first_copy(parameter: DTensor) -> bool:
    """Whether this rank holds a shard of the first copy of the weight, of which there may be several."""
    mesh = parameter.device_mesh
    copies = [number for number, placement in enumerate(parameter.placements) if placement.is_replicate()]
    return not any(mesh.get_local_rank(number) for number in copies)
