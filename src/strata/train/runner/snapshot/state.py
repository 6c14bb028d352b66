"""The state of a snapshot: every tensor that later work depends on, copied from the ranks and restored bit for bit.

Of a LoRA adapter: its weights and moments, which all ranks have, and the accumulated gradients, which differ from rank
to rank until they are summed. Of a full fine-tune, and of a sampler's copy of one: this rank's shards. A group of
another size combines the files of several ranks: it sums gradients and reshards weights.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from strata.base.errors import Code, StrataError
from strata.train.core import ops
from strata.train.runner.lora import Adapter
from strata.train.runner.model.trained import FullModel, LoraModel, TrainedModel, local, sharded_like
from strata.train.runner.passes.optimizer import MOMENTS
from strata.train.runner.snapshot.files import (
    SHARED,
    SnapshotCopy,
    SnapshotManifest,
    SnapshotModel,
    SnapshotSampler,
    rank_file,
)

Tensors = Mapping[str, torch.Tensor]
WEIGHTS = "weights"
GRADIENT = "gradient"


class SamplerTensors:
    """An open sampler: of the base, of an adapter, or of a full model."""

    def __init__(self, sampler_id: str, adapter: Adapter | None, full: Tensors | None) -> None:
        self.sampler_id = sampler_id
        self.adapter = adapter
        self.full = full

    @property
    def manifest_entry(self) -> SnapshotSampler:
        if self.adapter is not None:
            return SnapshotSampler(self.sampler_id, "adapter", self.adapter.config)
        return SnapshotSampler(self.sampler_id, "base" if self.full is None else "whole")

    def shared(self) -> Iterator[tuple[str, torch.Tensor]]:
        """What is the same on all ranks."""
        if self.adapter is not None:
            yield WEIGHTS, self.adapter.flat

    def own(self) -> Iterator[tuple[str, torch.Tensor]]:
        """This rank's shards."""
        if self.full is not None:
            yield from ((f"{WEIGHTS}.{name}", local(shard)) for name, shard in self.full.items())


def copy_state(
    manifest: SnapshotManifest, models: Iterable[TrainedModel], samplers: Sequence[SamplerTensors], *, is_rank0: bool
) -> SnapshotCopy:
    """Copy everything to memory. Training waits for this and for nothing else of a snapshot.

    Each model is copied before the next one is requested: an offloaded model is loaded only that long.
    """
    shared: dict[str, torch.Tensor] = {}
    own: dict[str, torch.Tensor] = {}
    for number, model in enumerate(models):
        if is_rank0:
            shared |= _copies(f"models.{number}", _shared_tensors(model))
        own |= _copies(f"models.{number}", _own_tensors(model))
    for number, sampler in enumerate(samplers):
        if is_rank0:
            shared |= _copies(f"samplers.{number}", sampler.shared())
        own |= _copies(f"samplers.{number}", sampler.own())
    return SnapshotCopy(manifest, shared, own)


def model_entries(models: Sequence[TrainedModel]) -> list[SnapshotModel]:
    return [SnapshotModel(model.created, model.optimizer.steps) for model in models]


def _shared_tensors(model: TrainedModel) -> Iterator[tuple[str, torch.Tensor]]:
    """What all ranks have: the weights and moments of an adapter."""
    if isinstance(model, LoraModel):
        yield WEIGHTS, model.adapter.flat
        if model.optimizer.steps:
            yield from model.optimizer.moments()[0].items()


def _own_tensors(model: TrainedModel) -> Iterator[tuple[str, torch.Tensor]]:
    """What this rank alone has: the accumulated gradients of an adapter, the shards of a full model."""
    if isinstance(model, FullModel):
        yield from _full_tensors(model)
        return
    assert isinstance(model, LoraModel)
    if model.adapter.gradient is not None:
        yield GRADIENT, model.adapter.gradient


def _full_tensors(model: FullModel) -> Iterator[tuple[str, torch.Tensor]]:
    moments = model.optimizer.moments() if model.optimizer.steps else []
    for number, (name, parameter) in enumerate(model.parameters.items()):
        yield f"{WEIGHTS}.{name}", local(parameter)
        if moments:
            yield from ((f"{moment}.{name}", value) for moment, value in moments[number].items())
        if parameter.grad is not None:
            yield f"{GRADIENT}.{name}", local(parameter.grad)


def _copies(prefix: str, tensors: Iterator[tuple[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    return {f"{prefix}.{name}": tensor.detach().to("cpu", copy=True).contiguous() for name, tensor in tensors}


class SnapshotReader:
    """The files of a snapshot that one rank needs. All ranks together have verified them before."""

    def __init__(self, folder: Path, manifest: SnapshotManifest, *, rank: int, ranks: int) -> None:
        self._same_size = manifest.ranks == ranks
        self._shared = load_file(folder / SHARED)
        reshard = manifest.full and not self._same_size
        wanted = range(manifest.ranks) if reshard else range(rank, manifest.ranks, ranks)
        self._of_ranks = [load_file(folder / rank_file(number)) for number in wanted]

    def shared(self, name: str, like: torch.Tensor) -> torch.Tensor:
        return _check_fit(name, self._shared.get(name), like)

    def summed(self, name: str, like: torch.Tensor) -> torch.Tensor | None:
        """The sum of what several ranks had; None if none of the ranks that this one replaces had any."""
        tensors = [_check_fit(name, tensors[name], like) for tensors in self._of_ranks if name in tensors]
        if not tensors:
            return None
        total = tensors[0].to(like.device, copy=True)
        for other in tensors[1:]:
            total += other.to(like.device)
        return total

    def sharded(self, name: str, like: DTensor) -> torch.Tensor | None:
        """This rank's shard; None if no rank had the tensor."""
        shards = [tensors[name] for tensors in self._of_ranks if name in tensors]
        if not shards:
            return None
        if self._same_size:
            return _check_fit(name, shards[0], local(like)).to(local(like).device, copy=True)
        if len(shards) != len(self._of_ranks):
            raise _mismatch(name)
        (placement,) = like.placements
        full = _check_fit(name, torch.cat(shards, placement.dim if isinstance(placement, Shard) else 0), like)
        resharded = distribute_tensor(
            full.to(local(like).device), like.device_mesh, like.placements, src_data_rank=None
        )
        return resharded.to_local().clone()


def read_model(reader: SnapshotReader, number: int, steps: int, model: TrainedModel) -> Callable[[], None]:
    """Read and check everything of one model; the returned function installs it and cannot fail."""
    if isinstance(model, FullModel):
        return _read_full(reader, f"models.{number}", steps, model)
    assert isinstance(model, LoraModel)
    prefix, adapter = f"models.{number}", model.adapter
    weights = reader.shared(f"{prefix}.{WEIGHTS}", adapter.flat)
    moments = {moment: reader.shared(f"{prefix}.{moment}", adapter.flat) for moment in MOMENTS} if steps else {}
    gradient = reader.summed(f"{prefix}.{GRADIENT}", adapter.flat)

    def install() -> None:
        adapter.flat.copy_(weights)
        adapter.gradient = gradient
        model.optimizer.restore([moments], steps)

    return install


def _read_full(reader: SnapshotReader, prefix: str, steps: int, model: FullModel) -> Callable[[], None]:
    weights, moments, gradients = [], [], {}
    for name, parameter in model.parameters.items():
        weights.append(_read_shard(f"{prefix}.{WEIGHTS}.{name}", reader, parameter))
        if steps:
            moments.append({moment: _read_shard(f"{prefix}.{moment}.{name}", reader, parameter) for moment in MOMENTS})
        gradient = reader.sharded(f"{prefix}.{GRADIENT}.{name}", parameter)
        if gradient is not None:
            gradients[name] = gradient

    def install() -> None:
        for parameter, weight in zip(model.optimizer.parameters, weights, strict=True):
            parameter.data.copy_(weight)
        model.optimizer.restore(moments, steps)
        for name, sharded in model.parameters.items():
            sharded.grad = sharded_like(sharded, gradients[name]) if name in gradients else None

    return install


def read_sampler_adapter(reader: SnapshotReader, number: int, adapter: Adapter) -> Adapter:
    adapter.flat.copy_(reader.shared(f"samplers.{number}.{WEIGHTS}", adapter.flat))
    return adapter


def read_sampler_full(reader: SnapshotReader, number: int, live: Mapping[str, DTensor], dtype: torch.dtype) -> Tensors:
    weights = {}
    for name, parameter in live.items():
        like = sharded_like(parameter, local(parameter).to(dtype))
        weights[name] = sharded_like(parameter, _read_shard(f"samplers.{number}.{WEIGHTS}.{name}", reader, like))
    return weights


def check_base(manifest: SnapshotManifest, own: SnapshotManifest) -> None:
    """A snapshot of another base must not be restored: its adapters would silently be applied to this one."""
    for name in ("arch", "parameters", "full"):
        there, here = getattr(manifest, name), getattr(own, name)
        if there != here:
            raise StrataError(Code.INVALID, f"the snapshot is of a server with {name} {there!r}, here it is {here!r}")


def sampler_lora(sampler: SnapshotSampler) -> ops.LoraConfig:
    if sampler.lora is None:
        raise _mismatch(sampler.sampler_id)
    return sampler.lora


def _read_shard(name: str, reader: SnapshotReader, like: DTensor) -> torch.Tensor:
    shard = reader.sharded(name, like)
    if shard is None:
        raise _mismatch(name)
    return shard


def _check_fit(name: str, tensor: torch.Tensor | None, like: torch.Tensor) -> torch.Tensor:
    if tensor is None or tensor.shape != like.shape or tensor.dtype != like.dtype:
        raise _mismatch(name)
    return tensor


def _mismatch(name: str) -> StrataError:
    return StrataError(Code.INVALID, f"{name} in the snapshot does not fit the model")
