"""The models in training, LoRA or full: staged and committed gradients, step, abort, shares of ranks, and tensors to
save.

Both accumulate gradients the same way. The gradients of a pass are staged until it is over: `commit` adds them to those
accumulated since the last optimizer step, summed over the ranks, and `discard` drops them. A step consumes the sum, and
`abort` drops everything accumulated.

The values of an adapter are on every rank of the stage that computes its layer, except those of experts and of layers
that are split over a tensor group: they are on the ranks that hold the experts, or the same part of the layer.
Accumulated gradients and moments are shared by the ranks that have the values: each has its share of them, and makes
the AdamW step of that share. Muon steps on whole matrices, so each of these ranks has and makes all of it, and all
ranks of a stage have the values of split layers.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Sequence
from typing import Final, Protocol

import torch
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from strata.train.core import ops
from strata.train.runner.collectives import RankGroup
from strata.train.runner.lora.adapter import Adapter, is_finite
from strata.train.runner.passes.logprobs import PackedModel
from strata.train.runner.passes.optimizer import Optimizer, StepParams, StepResult, step_settings, sum_squares

WEIGHTS: Final = "weights"
"""What the values are called beside the moments of an optimizer."""
Step = Generator[None, None, StepResult]
"""A step that pauses after the start of each of its collectives, so that several steps can overlap."""


class TrainedModel(Protocol):
    created: ops.CreateModel
    optimizer: Optimizer

    def begin(self) -> None: ...

    def is_finite(self) -> bool:
        """Says whether all staged gradients of this rank are finite."""
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
        assert self.is_sharded or adapter.split is None
        self.stepped = [block.share if self.is_sharded else slice(0, block.size) for block in adapter.blocks]
        """What this rank steps of each block: it has the gradients and moments of that part."""
        values = [block.flat[part] for block, part in zip(adapter.blocks, self.stepped, strict=True)]
        matrices = [block.matrices for block in adapter.blocks]
        self.optimizer = Optimizer(values, created.schedule, created.optimizer, matrices)
        self._ranks = ranks
        self._gradients: list[torch.Tensor] | None = None
        self._summing: list[Callable[[], torch.Tensor]] = []
        """Wait for the sums of the last pass over the ranks, of each block."""

    @property
    def gradients(self) -> list[torch.Tensor] | None:
        """Returns what is accumulated, of the part of each block that this rank steps; None if nothing is, then on all
        ranks."""
        self._add_last()
        return self._gradients

    @gradients.setter
    def gradients(self, parts: list[torch.Tensor] | None) -> None:
        self._add_last()
        self._gradients = parts

    def _add_last(self) -> None:
        if not self._summing:
            return
        summed = [wait()[: part.stop - part.start] for wait, part in zip(self._summing, self.stepped, strict=True)]
        self._summing = []
        if self._gradients is None:
            self._gradients = summed
            return
        for total, last in zip(self._gradients, summed, strict=True):
            total.add_(last)

    def begin(self) -> None:
        # The blocks of the last pass are free before there are others.
        self._add_last()
        self.adapter.begin()

    def is_finite(self) -> bool:
        return self.adapter.is_finite()

    def commit(self) -> None:
        """A rank without tokens of this model takes part with zeros."""
        for block, staged in zip(self.adapter.blocks, self.adapter.take(), strict=True):
            start = block.group.start_reduce_scatter if self.is_sharded else block.group.start_all_reduce
            self._summing.append(start(staged))

    def discard(self) -> None:
        self.adapter.discard()

    def abort(self) -> None:
        self.gradients = None

    def step(self, params: StepParams) -> Step:
        step_settings(self.optimizer.name, params)  # Raises before the gradients are taken, on all ranks alike.
        gradients = self.gradients
        self.gradients = None
        if gradients is None:
            gradients = [torch.zeros_like(parameter) for parameter in self.optimizer.parameters]
        # Each number counts once, however many ranks have it.
        squares = self._ranks.start_all_reduce(sum_squares(self.own_shares(gradients)))
        yield
        result = self.optimizer.step(gradients, float(squares().sqrt()), params)
        if self.is_sharded:
            gathered = [block.group.start_all_gather(block.padded) for block in self.adapter.blocks]
            yield
            for wait in gathered:
                wait()
        return result

    def own_shares(self, parts: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """This rank's shares of the blocks, from the parts that it steps."""
        if self.is_sharded:
            return list(parts)
        return [part[block.share] for block, part in zip(self.adapter.blocks, parts, strict=True)]

    def shares(self, *, optimizer: bool) -> dict[str, list[torch.Tensor]]:
        """This rank's shares of the values of each block, and of the moments if requested. Each number is in the share
        of one rank."""
        shares = {WEIGHTS: [block.flat[block.share] for block in self.adapter.blocks]}
        if optimizer:
            moments = self.optimizer.moments()
            for name in self.optimizer.moment_names:
                shares[name] = self.own_shares([of_part[name] for of_part in moments])
        return shares

    def gather(self, *, optimizer: bool) -> dict[str, torch.Tensor]:
        """Values of the whole adapter, and moments if requested, as flat blocks on rank 0; the others get none."""
        shares, gathered = self.shares(optimizer=optimizer), {}
        if self.adapter.is_whole:
            # Rank 0 has them.
            del shares[WEIGHTS]
        if shares:
            own = {name: torch.cat(parts) for name, parts in shares.items()}
            runs = [run for block in self.adapter.blocks for run in block.share_runs]
            gathered = self._ranks.gather_places(own, runs, self.adapter.size)
        if self.adapter.is_whole and self._ranks.is_rank0:
            gathered[WEIGHTS] = self.adapter.flat
        return gathered

    def tensors(self) -> Iterator[torch.Tensor]:
        yield from (block.padded for block in self.adapter.blocks)
        yield from self.gradients or ()
        yield from self.optimizer.tensors()


class FullModel:
    """All weights of the base, sharded: each rank holds and updates its shard of every weight."""

    def __init__(self, created: ops.CreateModel, packed: PackedModel, ranks: RankGroup) -> None:
        self.created = created
        self.parameters: dict[str, DTensor] = dict(sharded(packed))
        """Those of this rank's stage, if there are stages."""
        self._stage = packed.stage
        self._tied = packed.stage.tied_weights(packed.lm)
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
            if gradient is not None:
                self._stage.sum_tied(local(gradient))

    def discard(self) -> None:
        for name, parameter in self.parameters.items():
            parameter.grad = self._accumulated.get(name)
        self._accumulated = {}

    def abort(self) -> None:
        for parameter in self.parameters.values():
            parameter.grad = None

    def has_first_copy(self, name: str) -> bool:
        """Says whether this rank's shard of a weight is the one that counts, and that is written."""
        is_elsewhere = name in self._tied and self._stage.is_last
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
        counted = [own for name, own in zip(self.parameters, gradients, strict=True) if self.has_first_copy(name)]
        squares = sum_squares(counted) if counted else gradients[0].new_zeros((), dtype=torch.float64)
        norm = self._ranks.start_all_reduce(squares)
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
    # Not by `from_local`, which copies what is in the memory of the host to the device of the mesh.
    meta = TensorMeta(parameter.shape, parameter.stride(), shard.dtype)
    spec = DTensorSpec(parameter.device_mesh, parameter.placements, meta)
    return DTensor(shard, spec, requires_grad=False)  # type: ignore[no-untyped-call]


def own_region(parameter: DTensor) -> tuple[slice, ...]:
    """Returns the part of the weight that this rank holds."""
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
    """Says whether this rank holds a shard of the first copy of the weight, of which there may be several."""
    mesh = parameter.device_mesh
    copies = [number for number, placement in enumerate(parameter.placements) if placement.is_replicate()]
    return not any(mesh.get_local_rank(number) for number in copies)
