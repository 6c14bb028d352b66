"""What a snapshot holds of adapters, full models and samplers, how it is copied from the ranks, and how it is restored
to another number of ranks.

Of a LoRA adapter: this rank's share of weights, moments and accumulated gradients; of a sampler's, that of the weights.
Of a full fine-tune, and of a sampler's copy of one: this rank's shards, if it is the first copy of the model. A rank
reads the slices of other ranks' shards that it holds and has not written itself: the weights of an adapter, and in a
group of another shape anything.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import torch
from safetensors import safe_open
from torch.distributed.tensor import DTensor

from strata.base.errors import Code, StrataError
from strata.train.core import model_options
from strata.train.runner.checkpoint.shards import SHARDING, ShardOffsets
from strata.train.runner.lora.adapter import Adapter, AdapterBlock, Run
from strata.train.runner.model.offload import CudaMemory
from strata.train.runner.model.trained import (
    WEIGHTS,
    FullModel,
    LoraModel,
    TrainedModel,
    is_first_copy,
    local,
    own_region,
    sharded_like,
)
from strata.train.runner.snapshot.files import (
    RUNS,
    SnapshotCopy,
    SnapshotManifest,
    SnapshotModel,
    SnapshotSampler,
    rank_file,
)

Tensors = Mapping[str, torch.Tensor]
GRADIENT = "gradient"


@dataclass(frozen=True)
class OwnTensor:
    """A tensor that this rank alone writes."""

    name: str
    tensor: torch.Tensor
    offsets: Sequence[int] = ()
    """Where a shard begins in its weight."""
    runs: Sequence[Run] | None = None
    """Where the numbers of a share of an adapter are in the whole adapter."""


class SamplerTensors:
    """An open sampler: of the base, of an adapter, or of a full model."""

    def __init__(
        self, sampler_id: str, adapter: Adapter | None, full: Tensors | None, version: int | None = None
    ) -> None:
        self.sampler_id = sampler_id
        self.adapter = adapter
        self.full = full
        self.version = version

    @property
    def manifest_entry(self) -> SnapshotSampler:
        if self.adapter is not None:
            return SnapshotSampler(self.sampler_id, "adapter", self.adapter.config, self.adapter.layout, self.version)
        return SnapshotSampler(self.sampler_id, "base" if self.full is None else "whole")

    def own(self) -> Iterator[OwnTensor]:
        """This rank's shares or shards."""
        if self.adapter is not None:
            yield from _shares(self.adapter, {WEIGHTS: [block.flat[block.share] for block in self.adapter.blocks]})
        for name, shard in (self.full or {}).items():
            assert isinstance(shard, DTensor)
            if is_first_copy(shard):
                yield _shard(f"{WEIGHTS}.{name}", local(shard), shard)


class HostCopies:
    """Copies of tensors in the memory of the host, as the tensors are when they are copied.

    Those of CUDA devices go to pinned memory, on a stream of their own: they begin when all work that was started
    before is done, and the host waits for none of them. Until they are done, what is copied must not be changed in
    place (`hold_writes`); it may be freed. Not through a copy on the device: there may be no room for a second one.
    """

    def __init__(self, device: torch.device) -> None:
        self._stream: torch.cuda.Stream | None = None
        if device.type == "cuda":
            self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._memory = CudaMemory(device)
        self.has_gradients = False
        """Whether accumulated gradients are among them."""

    def copy(self, tensor: torch.Tensor) -> torch.Tensor:
        tensor = tensor.detach()
        if self._stream is None or not tensor.is_cuda:
            return tensor.to("cpu", copy=True).contiguous()
        self._stream.wait_stream(torch.cuda.current_stream(tensor.device))
        with torch.cuda.stream(self._stream):
            copied = self._memory.pinned(tensor.nbytes).view(tensor.dtype).view(tensor.shape)
            copied.copy_(tensor, non_blocking=True)
        # Its memory is not given to another tensor before it is copied.
        tensor.record_stream(self._stream)
        return copied

    def hold_writes(self) -> None:
        """Let work of the device that is started from now on wait for the copies."""
        if self._stream is not None:
            torch.cuda.current_stream(self._stream.device).wait_stream(self._stream)

    def wait(self) -> None:
        """Wait until all are there. Any thread may call it."""
        if self._stream is not None:
            self._stream.synchronize()


def copy_state(
    manifest: SnapshotManifest, models: Iterable[TrainedModel], samplers: Sequence[SamplerTensors], copies: HostCopies
) -> SnapshotCopy:
    """Copy everything to memory. Training waits for this and for nothing else of a snapshot.

    Each model is copied before the next one is requested: an offloaded model is loaded only that long.
    """
    own: dict[str, torch.Tensor] = {}
    offsets: dict[str, Sequence[int]] = {}
    runs: dict[str, Sequence[Run]] = {}

    def add_own(prefix: str, tensors: Iterator[OwnTensor]) -> None:
        for each in tensors:
            name = f"{prefix}.{each.name}"
            own[name] = copies.copy(each.tensor)
            copies.has_gradients |= each.name.startswith(GRADIENT)
            if each.runs is None:
                offsets[name] = each.offsets
            else:
                runs[name] = each.runs

    for number, model in enumerate(models):
        add_own(f"models.{number}", _own_tensors(model))
    for number, sampler in enumerate(samplers):
        add_own(f"samplers.{number}", sampler.own())
    return SnapshotCopy(manifest, own, offsets, runs, copies.wait)


def model_entries(models: Sequence[TrainedModel]) -> list[SnapshotModel]:
    layouts = [model.adapter.layout if isinstance(model, LoraModel) else "" for model in models]
    return [
        SnapshotModel(model.created, model.optimizer.steps, layout)
        for model, layout in zip(models, layouts, strict=True)
    ]


def _own_tensors(model: TrainedModel) -> Iterator[OwnTensor]:
    """Yields what this rank writes: its share of an adapter, or its shards of a full model."""
    if isinstance(model, FullModel):
        yield from _full_tensors(model)
        return
    assert isinstance(model, LoraModel)
    shares = model.shares(optimizer=model.optimizer.steps > 0)
    if (gradients := model.gradients) is not None:
        shares[GRADIENT] = model.own_shares(gradients)
    yield from _shares(model.adapter, shares)


def _shares(adapter: Adapter, shares: Mapping[str, Sequence[torch.Tensor]]) -> Iterator[OwnTensor]:
    """Yields this rank's share of each block of each kind, if it has one: what no rank has written was not there."""
    for number, block in enumerate(adapter.blocks):
        runs = block.share_runs
        for kind, of_blocks in shares.items() if runs else ():
            yield OwnTensor(f"{kind}.{number}", of_blocks[number], runs=runs)


def _full_tensors(model: FullModel) -> Iterator[OwnTensor]:
    moments = model.optimizer.moments() if model.optimizer.steps else []
    for number, (name, parameter) in enumerate(model.parameters.items()):
        if not model.has_first_copy(name):
            continue
        yield _shard(f"{WEIGHTS}.{name}", local(parameter), parameter)
        for moment, value in moments[number].items() if moments else ():
            yield _shard(f"{moment}.{name}", value, parameter)
        if parameter.grad is not None:
            yield _shard(f"{GRADIENT}.{name}", local(parameter.grad), parameter)


def _shard(name: str, tensor: torch.Tensor, parameter: DTensor) -> OwnTensor:
    return OwnTensor(name, tensor, [part.start for part in own_region(parameter)])


class _RankFile:
    """The tensors of one rank's file, of which nothing is in memory until it is read."""

    def __init__(self, file: Path) -> None:
        opened: Any = safe_open(file, framework="pt")
        self._file = opened
        self.names = frozenset(self._file.keys())
        metadata: dict[str, str] = self._file.metadata() or {}
        self.offsets = msgspec.json.decode(metadata.get(SHARDING, "{}"), type=dict[str, ShardOffsets])
        self.shares: dict[str, list[tuple[str, list[Run]]]] = {}
        """The names of the shares of each kind of numbers of an adapter, and their runs."""
        for name, runs in msgspec.json.decode(metadata.get(RUNS, "{}"), type=dict[str, list[Run]]).items():
            self.shares.setdefault(name.rpartition(".")[0], []).append((name, runs))

    def shape(self, name: str) -> list[int]:
        return list(self._file.get_slice(name).get_shape())

    def read(self, name: str) -> torch.Tensor:
        tensor: torch.Tensor = self._file.get_tensor(name)
        return tensor

    def read_region(self, name: str, region: Sequence[slice]) -> torch.Tensor:
        if not region:
            return self.read(name)
        tensor: torch.Tensor = self._file.get_slice(name)[tuple(region)]
        return tensor


class SnapshotReader:
    """The files of a snapshot that one rank needs. All ranks together have verified them before."""

    def __init__(self, folder: Path, manifest: SnapshotManifest, *, rank: int) -> None:
        self._folder = folder
        self._opened: dict[int, _RankFile] = {}
        # Its own file first: in a group of the same shape, it has all shards of this rank.
        self._order = sorted(range(manifest.ranks), key=lambda number: number != rank)

    def _file(self, rank: int) -> _RankFile:
        if rank not in self._opened:
            self._opened[rank] = _RankFile(self._folder / rank_file(rank))
        return self._opened[rank]

    def part(self, name: str, block: AdapterBlock, part: slice) -> torch.Tensor | None:
        """A part of a block of an adapter; None if no rank had the numbers."""
        like = block.flat[part]
        read = torch.empty_like(like)
        missing, is_there = read.numel(), False
        wanted = block.runs(part)
        # Each number is in the share of one rank.
        for file in map(self._file, self._order):
            for share, runs in file.shares.get(name, ()):
                is_there = True
                for here, there in _overlaps(wanted, runs) if missing else ():
                    read[here] = _check_fit(share, file.read_region(share, [there]), like[here]).to(like.device)
                    missing -= here.stop - here.start
        if is_there and missing:
            raise _mismatch(name)
        return read if is_there else None

    def sharded(self, name: str, wanted: Sequence[slice], like: torch.Tensor) -> torch.Tensor | None:
        """This rank's shard, from the shards of all ranks that overlap with it; None if no rank had the tensor."""
        shard = torch.empty_like(like, memory_format=torch.contiguous_format)
        missing, is_there = shard.numel(), False
        read: set[tuple[int, ...]] = set()
        for number in self._order:
            if name not in self._file(number).names:
                continue
            is_there = True
            if not missing:
                break
            offsets = tuple(self._offsets(number, name))
            if offsets not in read:
                read.add(offsets)
                missing -= self._copy_overlap(number, name, offsets, wanted, shard)
        if is_there and missing:
            raise _mismatch(name)
        return shard if is_there else None

    def _copy_overlap(
        self, rank: int, name: str, offsets: Sequence[int], wanted: Sequence[slice], shard: torch.Tensor
    ) -> int:
        """Copy what a rank's shard and the wanted one have in common; returns the number of elements."""
        file = self._file(rank)
        shape = file.shape(name)
        if not len(shape) == len(offsets) == len(wanted):
            raise _mismatch(name)
        starts = [max(part.start, offset) for part, offset in zip(wanted, offsets, strict=True)]
        stops = [min(part.stop, offset + size) for part, offset, size in zip(wanted, offsets, shape, strict=True)]
        if any(start >= stop for start, stop in zip(starts, stops, strict=True)):
            return 0
        ends = list(zip(starts, stops, strict=True))
        there = [slice(start - at, stop - at) for (start, stop), at in zip(ends, offsets, strict=True)]
        here = tuple(slice(start - at.start, stop - at.start) for (start, stop), at in zip(ends, wanted, strict=True))
        piece = file.read_region(name, there)
        if piece.dtype != shard.dtype:
            raise _mismatch(name)
        shard[here] = piece.to(shard.device)
        return piece.numel()

    def _offsets(self, rank: int, name: str) -> Sequence[int]:
        offsets = self._file(rank).offsets
        if name not in offsets:
            raise _mismatch(name)
        return offsets[name].saved_offsets


def check_layout(name: str, layout: str, adapter: Adapter) -> None:
    """The numbers of an adapter have no names: they must be those of the same tensors at the same places."""
    if layout != adapter.layout:
        raise _mismatch(name)


def _overlaps(wanted: Sequence[Run], there: Sequence[Run]) -> Iterator[tuple[slice, slice]]:
    """Yields where the numbers that two tensors have in common are in each of them, from the runs of both in ascending
    order. Numbers that are adjacent in both are read at once: all, if the runs are the same."""
    adjacent: tuple[slice, slice] | None = None
    for here, source in _common_runs(wanted, there):
        if adjacent is not None and (adjacent[0].stop, adjacent[1].stop) == (here.start, source.start):
            adjacent = slice(adjacent[0].start, here.stop), slice(adjacent[1].start, source.stop)
            continue
        if adjacent is not None:
            yield adjacent
        adjacent = here, source
    if adjacent is not None:
        yield adjacent


def _common_runs(wanted: Sequence[Run], there: Sequence[Run]) -> Iterator[tuple[slice, slice]]:
    here_at = there_at = number = 0
    for start, stop in wanted:
        while number < len(there):
            first, last = max(start, there[number][0]), min(stop, there[number][1])
            if first < last:
                here = slice(here_at + first - start, here_at + last - start)
                begin = there_at + first - there[number][0]
                yield here, slice(begin, begin + last - first)
            if there[number][1] > stop:
                break
            there_at += there[number][1] - there[number][0]
            number += 1
        here_at += stop - start


def read_model(reader: SnapshotReader, number: int, entry: SnapshotModel, model: TrainedModel) -> Callable[[], None]:
    """Read and check everything of one model; the returned function installs it and cannot fail."""
    prefix, steps = f"models.{number}", entry.steps
    if isinstance(model, FullModel):
        return _read_full(reader, prefix, steps, model)
    assert isinstance(model, LoraModel)
    adapter = model.adapter
    check_layout(f"{prefix}.{WEIGHTS}", entry.layout, adapter)
    names = model.optimizer.moment_names if steps else ()
    weights, moments, gradients = [], [], []
    for block, part in zip(adapter.blocks, model.stepped, strict=True):
        weights.append(_read_part(f"{prefix}.{WEIGHTS}", reader, block, slice(0, block.size)))
        moments.append({moment: _read_part(f"{prefix}.{moment}", reader, block, part) for moment in names})
        gradients.append(reader.part(f"{prefix}.{GRADIENT}", block, part))
    accumulated = [each for each in gradients if each is not None]

    def install() -> None:
        adapter.install(weights)
        model.gradients = accumulated if len(accumulated) == len(gradients) else None
        model.optimizer.restore(moments, steps)

    return install


def _read_part(name: str, reader: SnapshotReader, block: AdapterBlock, part: slice) -> torch.Tensor:
    read = reader.part(name, block, part)
    if read is None:
        raise _mismatch(name)
    return read


def _read_full(reader: SnapshotReader, prefix: str, steps: int, model: FullModel) -> Callable[[], None]:
    weights, moments, gradients = [], [], {}
    names = model.optimizer.moment_names
    for name, parameter in model.parameters.items():
        weights.append(_read_shard(f"{prefix}.{WEIGHTS}.{name}", reader, parameter))
        if steps:
            moments.append({moment: _read_shard(f"{prefix}.{moment}.{name}", reader, parameter) for moment in names})
        gradient = reader.sharded(f"{prefix}.{GRADIENT}.{name}", own_region(parameter), local(parameter))
        if gradient is not None:
            gradients[name] = gradient

    def install() -> None:
        for parameter, weight in zip(model.optimizer.parameters, weights, strict=True):
            parameter.data.copy_(weight)
        model.optimizer.restore(moments, steps)
        for name, sharded in model.parameters.items():
            sharded.grad = sharded_like(sharded, gradients[name]) if name in gradients else None

    return install


def read_sampler_adapter(reader: SnapshotReader, number: int, entry: SnapshotSampler, adapter: Adapter) -> None:
    name = f"samplers.{number}.{WEIGHTS}"
    check_layout(name, entry.layout, adapter)
    adapter.install([_read_part(name, reader, block, slice(0, block.size)) for block in adapter.blocks])


def read_sampler_full(reader: SnapshotReader, number: int, live: Mapping[str, DTensor], dtype: torch.dtype) -> Tensors:
    weights = {}
    for name, parameter in live.items():
        like = sharded_like(parameter, local(parameter).to(dtype))
        weights[name] = sharded_like(parameter, _read_shard(f"samplers.{number}.{WEIGHTS}.{name}", reader, like))
    return weights


def check_base(manifest: SnapshotManifest, own: SnapshotManifest) -> None:
    """A snapshot of another base must not be restored: its adapters would silently be applied to this one."""
    for name in ("arch", "parameters", "full", "quantise"):
        there, here = getattr(manifest, name), getattr(own, name)
        if there != here:
            raise StrataError(Code.INVALID, f"the snapshot is of a server with {name} {there!r}, here it is {here!r}")


def sampler_lora(sampler: SnapshotSampler) -> model_options.LoraConfig:
    if sampler.lora is None:
        raise _mismatch(sampler.sampler_id)
    return sampler.lora


def _read_shard(name: str, reader: SnapshotReader, like: DTensor) -> torch.Tensor:
    shard = reader.sharded(name, own_region(like), local(like))
    if shard is None:
        raise _mismatch(name)
    return shard


def _check_fit(name: str, tensor: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    if tensor.shape != like.shape or tensor.dtype != like.dtype:
        raise _mismatch(name)
    return tensor


def _mismatch(name: str) -> StrataError:
    return StrataError(Code.INVALID, f"{name} in the snapshot does not fit the model")
