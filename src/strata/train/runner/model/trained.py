"""The models being trained: an adapter over the frozen base, or the base itself. Both keep gradients the same way.

Gradients of a pass are apart until it is over. `commit` adds them to what the model has since its last step, `discard`
forgets them; a step uses the sum over the ranks once, and an `abort` forgets all.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Protocol

import torch
from torch.distributed.tensor import DTensor

from strata.train.core import ops
from strata.train.runner.collectives import RankGroup
from strata.train.runner.lora.adapter import Adapter
from strata.train.runner.passes.logprobs import PackedModel
from strata.train.runner.passes.optimizer import Optimizer, Stepped


class TrainedModel(Protocol):
    created: ops.CreateModel
    optimizer: Optimizer

    def begin(self) -> None: ...

    def is_finite(self) -> bool:
        """Whether all gradients are that this rank has of the pass."""
        ...

    def commit(self) -> None: ...

    def discard(self) -> None: ...

    def abort(self) -> None: ...

    def start_step(self, adam: ops.AdamParams) -> Callable[[], Stepped]:
        """Begun is the sum over the ranks; what is returned makes the step with it, or says why it cannot be made."""
        ...

    def tensors(self) -> Iterator[torch.Tensor]:
        """All that it keeps on the device beside the base."""
        ...


class LoraModel:
    def __init__(self, created: ops.CreateModel, adapter: Adapter, ranks: RankGroup) -> None:
        self.created = created
        self.adapter = adapter
        self.optimizer = Optimizer([adapter.flat], created.schedule)
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

    def start_step(self, adam: ops.AdamParams) -> Callable[[], Stepped]:
        """A rank that saw no token of this model adds nothing to the sum, but takes part in it."""
        own = self.adapter.gradient
        self.adapter.gradient = None
        summed = self._ranks.start_sum(torch.zeros_like(self.adapter.flat) if own is None else own)

        def step() -> Stepped:
            gradient = summed()
            return self.optimizer.step([gradient], float(torch.linalg.vector_norm(gradient)), adam)

        return step

    def tensors(self) -> Iterator[torch.Tensor]:
        yield self.adapter.flat
        if self.adapter.gradient is not None:
            yield self.adapter.gradient
        yield from self.optimizer.tensors()


class FullModel:
    """All weights of the base. Each rank has, and updates, its part of every one of them."""

    def __init__(self, created: ops.CreateModel, packed: PackedModel, ranks: RankGroup) -> None:
        self.created = created
        self.parameters: dict[str, DTensor] = dict(sharded(packed))
        self.optimizer = Optimizer([local(parameter) for parameter in self.parameters.values()], created.schedule)
        self._ranks = ranks
        self._kept: dict[str, torch.Tensor | None] = {}

    def begin(self) -> None:
        self._kept = {name: parameter.grad for name, parameter in self.parameters.items()}
        self.abort()

    def is_finite(self) -> bool:
        return all(bool(gradient.isfinite().all()) for gradient in self.gradients())

    def commit(self) -> None:
        for name, parameter in self.parameters.items():
            kept = self._kept.get(name)
            if kept is not None:
                parameter.grad = kept if parameter.grad is None else kept.add_(parameter.grad)
        self._kept = {}

    def discard(self) -> None:
        for name, parameter in self.parameters.items():
            parameter.grad = self._kept.get(name)
        self._kept = {}

    def abort(self) -> None:
        for parameter in self.parameters.values():
            parameter.grad = None

    def gradients(self) -> list[torch.Tensor]:
        """This rank's parts; the engine has summed them over the ranks already."""
        return [
            torch.zeros_like(local(parameter)) if parameter.grad is None else local(parameter.grad)
            for parameter in self.parameters.values()
        ]

    def start_step(self, adam: ops.AdamParams) -> Callable[[], Stepped]:
        gradients = self.gradients()
        self.abort()
        squares = torch.stack([gradient.double().square().sum() for gradient in gradients]).sum()
        summed = self._ranks.start_sum(squares)
        return lambda: self.optimizer.step(gradients, float(summed().sqrt()), adam)

    def tensors(self) -> Iterator[torch.Tensor]:
        yield from (local(parameter.grad) for parameter in self.parameters.values() if parameter.grad is not None)
        yield from self.optimizer.tensors()


def sharded(packed: PackedModel) -> Iterator[tuple[str, DTensor]]:
    """The weights under the names that the model's own files use."""
    for name, parameter in packed.lm.named_parameters():
        assert isinstance(parameter, DTensor)
        yield name, parameter


def local(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's part of a sharded tensor, in the same memory."""
    return tensor.to_local().detach() if isinstance(tensor, DTensor) else tensor.detach()


def sharded_like(parameter: DTensor, part: torch.Tensor) -> DTensor:
    """This rank's part of a tensor that is sharded as the parameter is."""
    mesh, placements = parameter.device_mesh, parameter.placements
    shape, stride = parameter.shape, parameter.stride()
    return DTensor.from_local(part, mesh, placements, run_check=False, shape=shape, stride=stride)
