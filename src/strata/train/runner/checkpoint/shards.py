"""Sharded checkpoints of full models in torch.distributed.checkpoint's format: names of shard files, their headers, and
the reading of another number of shards.

The storage is torch's own for safetensors: what it would otherwise keep in a pickled `.metadata` is in the headers of
the files. Its global planning pickles too, between the ranks, and is not used: each rank plans alone. A rank's shard is
its own, so there is nothing to coordinate; a reader finds the shards by the headers.
"""

from __future__ import annotations

import dataclasses
import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import msgspec
import torch
from safetensors.torch import save_file
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from strata.base.errors import Code, StrataError
from strata.train.checkpoints.checkpoint import read_header

SHARDS: Final = "shard-*.safetensors"
SHARDING: Final = "DCP_SHARDING_INFO"
DTYPE: Final = "F32"

State = dict[str, torch.Tensor]


class ShardOffsets(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Where a shard begins in its weight, as torch writes it into the header of a file."""

    saved_offsets: list[int]


@dataclasses.dataclass(frozen=True)
class ShardChunk:
    offsets: Sequence[int]
    shape: Sequence[int]


class _OwnShard(HuggingFaceStorageWriter):
    def __init__(self, folder: Path, rank: int) -> None:
        super().__init__(str(folder), save_distributed=True)
        self.file = folder / f"shard-{rank + 1:05}-model-00001-of-00001.safetensors"

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        return plans

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write the same file as torch would, directly from the memory of the weights: torch would make two copies."""
        tensors: State = {}
        offsets: dict[str, ShardOffsets] = {}
        for item in plan.items:
            assert item.tensor_data is not None
            name = item.index.fqn
            tensor = planner.resolve_data(item)
            assert isinstance(tensor, torch.Tensor)
            tensors[name] = tensor.detach().cpu().contiguous()
            offsets[name] = ShardOffsets(list(item.tensor_data.chunk.offsets))
        metadata = {SHARDING: msgspec.json.encode(offsets).decode(), "DCP_VERSION": "1.0", "format": "pt"}
        save_file(tensors, self.file, metadata)
        done: Future[list[WriteResult]] = Future()
        done.set_result([])
        return done


class _OwnPlan(DefaultSavePlanner):
    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        """torch would report the other ranks' shards as missing here. The reader checks that none is missing."""
        return all_plans, Metadata({})


def write(folder: Path, state: State, rank: int) -> Path:
    """Write this rank's shards of `state`; returns the file. Ranks do not wait for each other."""
    writer = _OwnShard(folder, rank)
    with warnings.catch_warnings():
        # It warns that it assumes a single process. Otherwise it would wait for ranks that have nothing to write.
        warnings.simplefilter("ignore")
        save(state, storage_writer=writer, planner=_OwnPlan(), no_dist=True)
    return writer.file


def has_shards(folder: Path) -> bool:
    return any(folder.glob(SHARDS))


def fill(folder: Path, state: State) -> None:
    """Read into the tensors of `state`, sharded or not, whatever the number of ranks that wrote them."""
    chunks = chunks_of(folder)
    for name, tensor in state.items():
        check_complete(name, chunks.get(name, ()), tensor.shape)
    with warnings.catch_warnings():
        # It warns that it assumes a single process, which is how each rank reads.
        warnings.simplefilter("ignore")
        load(state, storage_reader=HuggingFaceStorageReader(str(folder)), no_dist=True)


def read_unsharded(folder: Path, wanted: Callable[[str], bool] = lambda _: True) -> State:
    """The wanted tensors of the folder, merged from their shards, in this process."""
    state = {
        name: torch.empty([max(ends) for ends in zip(*map(_ends, chunks), strict=True)], dtype=torch.float32)
        for name, chunks in chunks_of(folder).items()
        if wanted(name)
    }
    fill(folder, state)
    return state


def chunks_of(folder: Path) -> Mapping[str, Sequence[ShardChunk]]:
    chunks: dict[str, list[ShardChunk]] = {}
    for file in sorted(folder.glob(SHARDS)):
        header = read_header(file)
        try:
            offsets = msgspec.json.decode(header.metadata.get(SHARDING, "{}"), type=dict[str, ShardOffsets])
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            raise _damaged(file.name, str(error)) from error
        for name, stored in header.tensors.items():
            chunk = offsets.get(name)
            if chunk is None or len(chunk.saved_offsets) != len(stored.shape) or stored.dtype != DTYPE:
                raise _damaged(file.name, f"{name} has no offsets in a model")
            chunks.setdefault(name, []).append(ShardChunk(chunk.saved_offsets, stored.shape))
    return chunks


def check_complete(name: str, chunks: Sequence[ShardChunk], shape: Sequence[int]) -> None:
    """Check that the chunks leave no gap and do not overlap. torch does not check; it would leave a gap unfilled."""
    filled = [chunk for chunk in chunks if math.prod(chunk.shape)]
    extent = [max(ends) for ends in zip(*map(_ends, filled), strict=True)]
    if filled and not _is_grid(filled, extent):
        raise _damaged(name, "its shards do not fit together")
    if not filled or extent != list(shape):
        raise StrataError(Code.INVALID, f"{name} in the checkpoint does not fit the model")


def _is_grid(chunks: Sequence[ShardChunk], shape: Sequence[int], dimension: int = 0) -> bool:
    """Says whether the chunks are slices along this dimension, one after the other, each again of slices along the
    next."""
    if dimension == len(shape):
        return len(chunks) == 1
    slices: dict[tuple[int, int], list[ShardChunk]] = {}
    for chunk in chunks:
        slices.setdefault((chunk.offsets[dimension], chunk.shape[dimension]), []).append(chunk)
    end = 0
    for offset, length in sorted(slices):
        if offset != end:
            return False
        end += length
    return end == shape[dimension] and all(_is_grid(each, shape, dimension + 1) for each in slices.values())


def _ends(chunk: ShardChunk) -> list[int]:
    return [offset + length for offset, length in zip(chunk.offsets, chunk.shape, strict=True)]


def _damaged(what: str, why: str) -> StrataError:
    return StrataError(Code.CORRUPT, f"{what} is not part of a full model: {why}")


def empty_like(state: Mapping[str, Any]) -> State:
    """New tensors with the same sharding: the live ones stay unchanged until everything is read."""
    return {name: torch.empty_like(tensor) for name, tensor in state.items()}
