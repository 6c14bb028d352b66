"""Everything that later work builds on, copied out of the ranks and put back into others, bit for bit.

Of an adapter: its weights and moments, which all ranks have, and the gradients that wait for a step, which are each
rank's own until they are summed. Of a whole model, and of a copy of one to sample from: this rank's parts. A group of
another size takes the parts together: gradients are summed, shards cut anew.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from strata.base.errors import Code, StrataError
from strata.train.core import ops
from strata.train.runner.lora.adapter import Adapter
from strata.train.runner.model.trained import FullModel, LoraModel, TrainedModel, local, sharded_like
from strata.train.runner.passes.optimizer import MOMENTS
from strata.train.runner.snapshot.files import SHARED, Copied, Manifest, ModelPart, SamplerPart, own_file

Tensors = Mapping[str, torch.Tensor]
WEIGHTS = "weights"
GRADIENT = "gradient"


class Kept:
    """A sampler that lives in memory: of the base, of an adapter, or of a whole model."""

    def __init__(self, sampler_id: str, adapter: Adapter | None, whole: Tensors | None) -> None:
        self.sampler_id = sampler_id
        self.adapter = adapter
        self.whole = whole

    @property
    def part(self) -> SamplerPart:
        if self.adapter is not None:
            return SamplerPart(self.sampler_id, "adapter", self.adapter.config)
        return SamplerPart(self.sampler_id, "base" if self.whole is None else "whole")


def copied(manifest: Manifest, models: Iterable[TrainedModel], samplers: Sequence[Kept], *, first: bool) -> Copied:
    """In memory, so that training may go on: the only moment in which it does not.

    Each model is copied before the next one is asked for: those that are not on the device are there only so long.
    """
    shared: dict[str, torch.Tensor] = {}
    own: dict[str, torch.Tensor] = {}
    for number, model in enumerate(models):
        head = f"models.{number}"
        if isinstance(model, FullModel):
            own |= _copies(_named(head, _whole(model)))
        else:
            assert isinstance(model, LoraModel)
            if first:
                shared |= _copies(_named(head, _adapter(model)))
            if model.adapter.gradient is not None:
                own |= _copies({f"{head}.{GRADIENT}": model.adapter.gradient})
    for number, sampler in enumerate(samplers):
        head = f"samplers.{number}"
        if sampler.adapter is not None and first:
            shared |= _copies({f"{head}.{WEIGHTS}": sampler.adapter.flat})
        if sampler.whole is not None:
            parts = ((name, local(part)) for name, part in sampler.whole.items())
            own |= _copies(_named(f"{head}.{WEIGHTS}", parts))
    return Copied(manifest, shared, own)


def parts_of(models: Sequence[TrainedModel]) -> list[ModelPart]:
    return [ModelPart(model.created, model.optimizer.steps) for model in models]


def _adapter(model: LoraModel) -> Iterator[tuple[str, torch.Tensor]]:
    yield WEIGHTS, model.adapter.flat
    if model.optimizer.steps:
        yield from model.optimizer.moments()[0].items()


def _whole(model: FullModel) -> Iterator[tuple[str, torch.Tensor]]:
    moments = model.optimizer.moments() if model.optimizer.steps else []
    for number, (name, parameter) in enumerate(model.parameters.items()):
        yield f"{WEIGHTS}.{name}", local(parameter)
        if moments:
            yield from ((f"{part}.{name}", value) for part, value in moments[number].items())
        if parameter.grad is not None:
            yield f"{GRADIENT}.{name}", local(parameter.grad)


def _named(head: str, tensors: Iterator[tuple[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    return {f"{head}.{name}": tensor for name, tensor in tensors}


def _copies(tensors: Tensors) -> dict[str, torch.Tensor]:
    return {name: tensor.detach().to("cpu", copy=True).contiguous() for name, tensor in tensors.items()}


class Opened:
    """The files of a snapshot, as one rank of a group needs them: checked before, by all ranks together."""

    def __init__(self, folder: Path, manifest: Manifest, *, rank: int, ranks: int) -> None:
        self._same = manifest.ranks == ranks
        self._shared = load_file(folder / SHARED)
        whole = manifest.full and not self._same
        wanted = range(manifest.ranks) if whole else range(rank, manifest.ranks, ranks)
        self._parts = [load_file(folder / own_file(number)) for number in wanted]

    def shared(self, name: str, like: torch.Tensor) -> torch.Tensor:
        return _fitting(name, self._shared.get(name), like)

    def summed(self, name: str, like: torch.Tensor) -> torch.Tensor | None:
        """Of what ranks had each for itself; None if none of those that this rank stands for had any."""
        found = [_fitting(name, part[name], like) for part in self._parts if name in part]
        if not found:
            return None
        total = found[0].to(like.device, copy=True)
        for other in found[1:]:
            total += other.to(like.device)
        return total

    def sharded(self, name: str, like: DTensor) -> torch.Tensor | None:
        """This rank's part; None if it was nowhere."""
        found = [part[name] for part in self._parts if name in part]
        if not found:
            return None
        if self._same:
            return _fitting(name, found[0], local(like)).to(local(like).device, copy=True)
        if len(found) != len(self._parts):
            raise _wrong(name)
        (placement,) = like.placements
        whole = _fitting(name, torch.cat(found, placement.dim if isinstance(placement, Shard) else 0), like)
        cut = distribute_tensor(whole.to(local(like).device), like.device_mesh, like.placements, src_data_rank=None)
        return cut.to_local().clone()


def restorer(opened: Opened, number: int, steps: int, model: TrainedModel) -> Callable[[], None]:
    """Read and check everything of one model; what is returned puts it in place and cannot fail."""
    if isinstance(model, FullModel):
        return _restorer_of_whole(opened, f"models.{number}", steps, model)
    assert isinstance(model, LoraModel)
    head, adapter = f"models.{number}", model.adapter
    weights = opened.shared(f"{head}.{WEIGHTS}", adapter.flat)
    moments = {part: opened.shared(f"{head}.{part}", adapter.flat) for part in MOMENTS} if steps else {}
    gradient = opened.summed(f"{head}.{GRADIENT}", adapter.flat)

    def put() -> None:
        adapter.flat.copy_(weights)
        adapter.gradient = gradient
        model.optimizer.restore([moments], steps)

    return put


def _restorer_of_whole(opened: Opened, head: str, steps: int, model: FullModel) -> Callable[[], None]:
    weights, moments, gradients = [], [], {}
    for name, parameter in model.parameters.items():
        weights.append(_needed(f"{head}.{WEIGHTS}.{name}", opened, parameter))
        if steps:
            moments.append({part: _needed(f"{head}.{part}.{name}", opened, parameter) for part in MOMENTS})
        gradient = opened.sharded(f"{head}.{GRADIENT}.{name}", parameter)
        if gradient is not None:
            gradients[name] = gradient

    def put() -> None:
        for own, weight in zip(model.optimizer.parameters, weights, strict=True):
            own.data.copy_(weight)
        model.optimizer.restore(moments, steps)
        for name, parameter in model.parameters.items():
            parameter.grad = sharded_like(parameter, gradients[name]) if name in gradients else None

    return put


def sampled_from(opened: Opened, number: int, adapter: Adapter) -> Adapter:
    adapter.flat.copy_(opened.shared(f"samplers.{number}.{WEIGHTS}", adapter.flat))
    return adapter


def sampled_whole(opened: Opened, number: int, live: Mapping[str, DTensor], dtype: torch.dtype) -> Tensors:
    found = {}
    for name, parameter in live.items():
        like = sharded_like(parameter, local(parameter).to(dtype))
        found[name] = sharded_like(parameter, _needed(f"samplers.{number}.{WEIGHTS}.{name}", opened, like))
    return found


def check_base(manifest: Manifest, own: Manifest) -> None:
    """What was trained on another base would be put on this one without a word."""
    for name in ("arch", "parameters", "full"):
        there, here = getattr(manifest, name), getattr(own, name)
        if there != here:
            raise StrataError(Code.INVALID, f"the snapshot is of a server with {name} {there!r}, here it is {here!r}")


def lora_of(part: SamplerPart) -> ops.LoraConfig:
    if part.lora is None:
        raise _wrong(part.sampler_id)
    return part.lora


def _needed(name: str, opened: Opened, like: DTensor) -> torch.Tensor:
    found = opened.sharded(name, like)
    if found is None:
        raise _wrong(name)
    return found


def _fitting(name: str, found: torch.Tensor | None, like: torch.Tensor) -> torch.Tensor:
    if found is None or found.shape != like.shape or found.dtype != like.dtype:
        raise _wrong(name)
    return found


def _wrong(name: str) -> StrataError:
    return StrataError(Code.INVALID, f"{name} in the snapshot is not that of the model")
