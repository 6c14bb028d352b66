"""Checkpoints of models, by all ranks together: who writes what, and what must be right before anything is taken over.

Every function is called by every rank, in the same order. What fails on one fails on all, and changes no model.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final

import msgspec
import torch

from strata.base.errors import Code, StrataError
from strata.base.failpoint import failpoint
from strata.train.checkpoints import checkpoint
from strata.train.checkpoints.checkpoint import Manifest
from strata.train.checkpoints.files import File, seal
from strata.train.core import ops
from strata.train.runner.checkpoint import formats, shards
from strata.train.runner.collectives import RankGroup
from strata.train.runner.lora.adapter import Adapter, targets_of
from strata.train.runner.model.base import BaseModel
from strata.train.runner.model.trained import FullModel, LoraModel, TrainedModel

Put = Callable[[], None]
"""Puts what was read in its place, and cannot fail."""

_decode_files: Final = msgspec.msgpack.Decoder(dict[str, File]).decode


def save(
    folder: Path, manifest: Manifest, model: TrainedModel, base: BaseModel, ranks: RankGroup, *, overwrite: bool
) -> None:
    optimizer = manifest.kind == "weights"
    if isinstance(model, FullModel) and optimizer:
        _save_shards(folder, manifest, model, base, ranks, overwrite=overwrite)
        return
    if isinstance(model, FullModel):
        fill = formats.whole_writer(base, formats.gather_whole(model, first=ranks.first))
    else:
        assert isinstance(model, LoraModel)
        fill = formats.adapter_writer(model, base, optimizer=optimizer)
    with ranks.collective_errors():
        if ranks.first:
            checkpoint.write(folder, manifest, fill, overwrite=overwrite)


def _save_shards(
    folder: Path, manifest: Manifest, model: FullModel, base: BaseModel, ranks: RankGroup, *, overwrite: bool
) -> None:
    # That of rank 0 is the one of all.
    part = checkpoint.part_of(folder, ranks.numbers(checkpoint.new_token())[0])
    begun = False
    files: dict[str, File] = {}
    with ranks.collective_errors():
        if ranks.first:
            begun = checkpoint.begin(folder, part, manifest, overwrite=overwrite)
            if begun:
                formats.write_words(base, part)
                files |= seal(part.iterdir())
    if not ranks.all_reduce_any([begun])[0]:
        return
    with ranks.collective_errors():
        file = shards.write(part, formats.whole_state(model, optimizer=True), ranks.rank)
        failpoint("train.checkpoint.after_shard")
        files |= seal([file])
    said = ranks.gather(msgspec.msgpack.encode(files))
    with ranks.collective_errors():
        for rank, data in enumerate(said):
            own = _decode_files(data)
            _check_there(part, own, rank)
            files |= own
        if ranks.first:
            checkpoint.commit(folder, part, manifest, files)


def _check_there(part: Path, files: Mapping[str, File], rank: int) -> None:
    for name, file in files.items():
        if not (part / name).is_file() or (part / name).stat().st_size != file.size:
            raise StrataError(
                Code.UNAVAILABLE,
                f"rank 0 does not see what rank {rank} wrote into {part}",
                hint="all ranks need one file system for checkpoints",
            )


def load(folder: Path, model: TrainedModel, base: BaseModel, ranks: RankGroup, *, optimizer: bool) -> Put:
    """Read and check everything. Nothing is opened before all ranks agree that every file is what was written."""
    put: Put
    manifest = _read(folder, base, ranks)
    with ranks.collective_errors():
        name = folder.name
        if optimizer and manifest.kind != "weights":
            raise StrataError(Code.INVALID, f"{name!r} holds weights alone, no state of an optimizer")
        if (manifest.lora is None) != (model.created.lora is None):
            raise StrataError(Code.INVALID, f"{name!r} was made by the other kind of training")
        if isinstance(model, FullModel):
            put = formats.read_whole(folder, model, optimizer=optimizer, steps=manifest.steps)
        else:
            assert isinstance(model, LoraModel)
            _check_scale(manifest.lora, model.adapter.config)
            put = formats.read_adapter(folder, model, manifest, optimizer=optimizer)
    return put


def open_weights(folder: Path, base: BaseModel, ranks: RankGroup) -> Adapter | dict[str, torch.Tensor]:
    """Saved weights beside the live ones, to sample from."""
    found: Adapter | dict[str, torch.Tensor]
    manifest = _read(folder, base, ranks)
    lora = manifest.lora
    with ranks.collective_errors():
        if (lora is None) != base.settings.full:
            raise StrataError(Code.INVALID, f"{folder.name!r} was made by the other kind of training")
        if lora is None:
            found = formats.whole_parameters(folder, base.packed)
        else:
            found = Adapter(lora, targets_of(base.lm, lora), ranks.device)
            found.flat.copy_(formats.read_flat(folder, found, manifest))
    return found


def _read(folder: Path, base: BaseModel, ranks: RankGroup) -> Manifest:
    """Each rank computes the digests of some files; together they have seen all of them when this returns."""
    with ranks.collective_errors():
        manifest = checkpoint.read(folder, share=(ranks.rank, ranks.size))
        for what, there, own in (
            ("base", manifest.base_model, base.info().name),
            ("architecture", manifest.arch, base.arch),
        ):
            if there != own:
                raise StrataError(
                    Code.INVALID, f"{folder.name!r} was made of another {what}: {there!r}, and this one is {own!r}"
                )
    return manifest


def _check_scale(there: ops.LoraConfig | None, own: ops.LoraConfig) -> None:
    """The matrices fit whatever the scale they were trained with; what they do to the base would be another thing."""
    if there is not None and not math.isclose(there.alpha / there.rank, own.alpha / own.rank):
        raise StrataError(
            Code.INVALID,
            f"alpha is {there.alpha:g} with rank {there.rank} in the checkpoint, "
            f"{own.alpha:g} with rank {own.rank} in the model",
        )
