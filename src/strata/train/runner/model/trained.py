"""The models in training: a LoRA adapter over the frozen base, or the base itself (full fine-tune).

Both accumulate gradients the same way. The gradients of a pass are staged until it is over: `commit` adds them to those
accumulated since the last optimizer step, `discard` drops them. A step consumes the sum over the ranks, and `abort`
drops everything accumulated.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Protocol

import torch
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from strata.train.core import ops
from strata.train.runner.collectives import RankGroup
from strata.train.runner.lora import Adapter, is_finite
from strata.train.runner.passes.logprobs import PackedModel
from strata.train.runner.passes.optimizer import Optimizer, StepParams, StepResult, step_settings


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

    def start_step(self, params: StepParams) -> Callable[[], StepResult]:
        """Start the all-reduce of the gradients. The returned function makes the step, or raises why it cannot."""
        ...

    def tensors(self) -> Iterator[torch.Tensor]:
        """Everything it holds on the device besides the base."""
        ...


class LoraModel:
    def __init__(self, created: ops.CreateModel, adapter: Adapter, ranks: RankGroup) -> None:
        self.created = created
        self.adapter = adapter
        self.optimizer = Optimizer([adapter.flat], created.schedule, created.optimizer, adapter.matrices)
        self._ranks = ranks

    def begin(self) -> None:
        self.adapter.begin()

    def is_finite(self) -> bool:
        return self.adapter.is_finite()

    def commit(self) -> None:
        self.adapter.commit()

    def discard(self) -> None:
        self.adapter.discard()

    def abort(self) -> None:
        self.adapter.gradient = None

    def start_step(self, params: StepParams) -> Callable[[], StepResult]:
        """A rank without tokens of this model takes part in the all-reduce with zeros."""
        step_settings(self.optimizer.name, params)  # Raises before the gradients are taken, on all ranks alike.
        accumulated = self.adapter.gradient
        self.adapter.gradient = None
        wait = self._ranks.start_all_reduce(torch.zeros_like(self.adapter.flat) if accumulated is None else accumulated)

        def step() -> StepResult:
            gradient = wait()
            return self.optimizer.step([gradient], float(torch.linalg.vector_norm(gradient)), params)

        return step

    def tensors(self) -> Iterator[torch.Tensor]:
        yield self.adapter.flat
        if self.adapter.gradient is not None:
            yield self.adapter.gradient
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

    def start_step(self, params: StepParams) -> Callable[[], StepResult]:
        step_settings(self.optimizer.name, params)
        gradients = self.gradients()
        self.abort()
        # Each gradient counts once, however many copies there are.
        counted = [self.has_first_copy(name) for name in self.parameters]
        squares = [gradient.double().square().sum() * own for gradient, own in zip(gradients, counted, strict=True)]
        wait = self._ranks.start_all_reduce(torch.stack(squares).sum())
        return lambda: self.optimizer.step(gradients, float(wait().sqrt()), params)

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
