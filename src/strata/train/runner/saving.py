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
from strata.train.runner import shards, weights
from strata.train.runner.lora import Adapter, targets_of
from strata.train.runner.model import Base
from strata.train.runner.ranks import Ranks
from strata.train.runner.trained import AdapterModel, Trained, WholeModel

Put = Callable[[], None]
"""Puts what was read in its place, and cannot fail."""

_decode_files: Final = msgspec.msgpack.Decoder(dict[str, File]).decode


def save(folder: Path, manifest: Manifest, model: Trained, base: Base, ranks: Ranks, *, overwrite: bool) -> None:
    optimizer = manifest.kind == "weights"
    if isinstance(model, WholeModel) and optimizer:
        _save_shards(folder, manifest, model, base, ranks, overwrite=overwrite)
        return
    if isinstance(model, WholeModel):
        fill = weights.whole_writer(base, weights.gather_whole(model, first=ranks.first))
    else:
        assert isinstance(model, AdapterModel)
        fill = weights.adapter_writer(model, base, optimizer=optimizer)
    with ranks.in_step():
        if ranks.first:
            checkpoint.write(folder, manifest, fill, overwrite=overwrite)


def _save_shards(
    folder: Path, manifest: Manifest, model: WholeModel, base: Base, ranks: Ranks, *, overwrite: bool
) -> None:
    # That of rank 0 is the one of all.
    part = checkpoint.part_of(folder, ranks.numbers(checkpoint.new_token())[0])
    begun = False
    files: dict[str, File] = {}
    with ranks.in_step():
        if ranks.first:
            begun = checkpoint.begin(folder, part, manifest, overwrite=overwrite)
            if begun:
                weights.write_words(base, part)
                files |= seal(part.iterdir())
    if not ranks.any_of([begun])[0]:
        return
    with ranks.in_step():
        file = shards.write(part, weights.whole_state(model, optimizer=True), ranks.rank)
        failpoint("train.checkpoint.after_shard")
        files |= seal([file])
    said = ranks.gather(msgspec.msgpack.encode(files))
    with ranks.in_step():
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


def load(folder: Path, model: Trained, base: Base, ranks: Ranks, *, optimizer: bool) -> Put:
    """Read and check everything. Nothing is opened before all ranks agree that every file is what was written."""
    put: Put
    manifest = _read(folder, base, ranks)
    with ranks.in_step():
        name = folder.name
        if optimizer and manifest.kind != "weights":
            raise StrataError(Code.INVALID, f"{name!r} holds weights alone, no state of an optimizer")
        if (manifest.lora is None) != (model.created.lora is None):
            raise StrataError(Code.INVALID, f"{name!r} was made by the other kind of training")
        if isinstance(model, WholeModel):
            put = weights.read_whole(folder, model, optimizer=optimizer, steps=manifest.steps)
        else:
            assert isinstance(model, AdapterModel)
            _check_scale(manifest.lora, model.adapter.config)
            put = weights.read_adapter(folder, model, manifest, optimizer=optimizer)
    return put


def open_weights(folder: Path, base: Base, ranks: Ranks) -> Adapter | dict[str, torch.Tensor]:
    """Saved weights beside the live ones, to sample from."""
    found: Adapter | dict[str, torch.Tensor]
    manifest = _read(folder, base, ranks)
    lora = manifest.lora
    with ranks.in_step():
        if (lora is None) != base.settings.full:
            raise StrataError(Code.INVALID, f"{folder.name!r} was made by the other kind of training")
        if lora is None:
            found = weights.whole_parameters(folder, base.packed)
        else:
            found = Adapter(lora, targets_of(base.lm, lora), ranks.device)
            found.flat.copy_(weights.read_flat(folder, found, manifest))
    return found


def _read(folder: Path, base: Base, ranks: Ranks) -> Manifest:
    """Each rank computes the digests of some files; together they have seen all of them when this returns."""
    with ranks.in_step():
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
