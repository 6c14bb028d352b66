"""Saves and loads a checkpoint by all ranks together: which rank writes what, checks of the manifest (rank and alpha,
kind of training, optimizer state), and the errors that all ranks raise.

Every function is called by every rank, in the same order. An error on one rank is raised on all, and changes no model.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final

import msgspec
import torch
from safetensors import SafetensorError

from strata.base.errors import Code, StrataError
from strata.base.failpoint import failpoint
from strata.train.checkpoints import checkpoint
from strata.train.checkpoints.checkpoint import CheckpointFile, CheckpointManifest, sync_and_digest
from strata.train.core import model_options
from strata.train.runner.checkpoint import formats, shards
from strata.train.runner.checkpoint.hugging_face_files import ModelWriter, groups_of, persistent_buffers
from strata.train.runner.collectives import RankGroup
from strata.train.runner.lora.adapter import Adapter
from strata.train.runner.model.base import BaseModel
from strata.train.runner.model.trained import FullModel, LoraModel, TrainedModel

Install = Callable[[], None]
"""Installs what was read, and cannot fail."""

_decode_files: Final = msgspec.msgpack.Decoder(dict[str, CheckpointFile]).decode


def save(
    folder: Path,
    manifest: CheckpointManifest,
    model: TrainedModel,
    base: BaseModel,
    ranks: RankGroup,
    *,
    overwrite: bool,
) -> None:
    optimizer = manifest.kind == "weights"
    if isinstance(model, FullModel) and optimizer:
        _save_shards(folder, manifest, model, base, ranks, overwrite=overwrite)
        return
    if isinstance(model, FullModel):
        _save_gathered(folder, manifest, model, base, ranks, overwrite=overwrite)
        return
    assert isinstance(model, LoraModel)
    fill = formats.adapter_writer(model.adapter, base, model.gather(optimizer=optimizer))
    with ranks.collective_errors():
        if ranks.is_rank0:
            checkpoint.write(folder, manifest, fill, overwrite=overwrite)


def _save_gathered(
    folder: Path, manifest: CheckpointManifest, model: FullModel, base: BaseModel, ranks: RankGroup, *, overwrite: bool
) -> None:
    """Saves in Hugging Face's format, by rank 0. The weights of one layer after the other are gathered for it."""
    temporary = checkpoint.temporary_folder(folder, ranks.all_gather_int(checkpoint.new_token())[0])
    is_new = False
    with ranks.collective_errors():
        if ranks.is_rank0:
            is_new = checkpoint.begin_write(folder, temporary, manifest, overwrite=overwrite)
    if not ranks.all_reduce_any([is_new])[0]:
        return
    writer = ModelWriter(base.lm, temporary)
    failure: Exception | None = None
    for group in groups_of(base.all_stages):
        # Every rank takes part in every collective, also if rank 0 has failed to write.
        weights = dict(formats.gather_weights_of(group, model, base, ranks))
        if ranks.is_rank0 and failure is None:
            try:
                writer.add(weights)
            except (OSError, SafetensorError) as error:
                failure = error
    with ranks.collective_errors():
        if failure is not None:
            raise failure
        if ranks.is_rank0:
            writer.add({name: buffer.detach().cpu() for name, buffer in persistent_buffers(base.lm)})
            writer.finish(torch.float32)
            formats.copy_tokenizer(base.settings.model, temporary)
            checkpoint.commit(folder, temporary, manifest, sync_and_digest(temporary.iterdir()))


def _save_shards(
    folder: Path, manifest: CheckpointManifest, model: FullModel, base: BaseModel, ranks: RankGroup, *, overwrite: bool
) -> None:
    # All ranks use rank 0's token.
    temporary = checkpoint.temporary_folder(folder, ranks.all_gather_int(checkpoint.new_token())[0])
    is_new = False
    files: dict[str, CheckpointFile] = {}
    with ranks.collective_errors():
        if ranks.is_rank0:
            is_new = checkpoint.begin_write(folder, temporary, manifest, overwrite=overwrite)
            if is_new:
                formats.write_config(base, temporary)
                files |= sync_and_digest(temporary.iterdir())
    if not ranks.all_reduce_any([is_new])[0]:
        return
    with ranks.collective_errors():
        if own := formats.own_state(model):
            outgoing = ranks.files.outgoing(temporary)
            outgoing.mkdir(parents=True, exist_ok=True, mode=0o700)
            file = shards.write(outgoing, own, ranks.rank)
            failpoint("train.checkpoint.after_shard")
            files |= sync_and_digest([file])
            ranks.files.send(temporary, [file])
            ranks.files.sent(temporary)
    gathered = ranks.gather(msgspec.msgpack.encode(files))
    with ranks.collective_errors():
        for rank, data in enumerate(gathered):
            of_rank = _decode_files(data)
            _check_visible(temporary, of_rank, rank)
            files |= of_rank
        if ranks.is_rank0:
            checkpoint.commit(folder, temporary, manifest, files)


def _check_visible(temporary: Path, files: Mapping[str, CheckpointFile], rank: int) -> None:
    for name, file in files.items():
        if not (temporary / name).is_file() or (temporary / name).stat().st_size != file.size:
            raise StrataError(
                Code.UNAVAILABLE,
                f"rank 0 does not see what rank {rank} wrote into {temporary}",
                hint="ranks that torchrun starts need one file system for checkpoints",
            )


def load(named: Path, model: TrainedModel, base: BaseModel, ranks: RankGroup, *, optimizer: bool) -> Install:
    """Read and check everything. No file is opened before all ranks together have verified all digests."""
    install: Install
    folder = fetch_folder(named, ranks)
    manifest = _read_manifest(folder, base, ranks)
    with ranks.collective_errors():
        name = folder.name
        if optimizer and manifest.kind != "weights":
            raise StrataError(Code.INVALID, f"{name!r} holds weights alone, no optimizer state")
        if (manifest.lora is None) != (model.created.lora is None):
            raise StrataError(Code.INVALID, f"{name!r} was made by the other kind of training (LoRA or full)")
        if isinstance(model, FullModel):
            install = formats.read_full(folder, model, base, optimizer=optimizer, steps=manifest.steps)
        else:
            assert isinstance(model, LoraModel)
            _check_scale(manifest.lora, model.adapter.config)
            install = formats.read_adapter(folder, model, manifest, optimizer=optimizer)
    ranks.files.drop(named)
    return install


def fetch_folder(named: Path, ranks: RankGroup) -> Path:
    """Let one rank of each host get the folder, if the ranks are on several; returns where it is on this one."""
    if ranks.local_size < ranks.size:
        with ranks.collective_errors():
            if ranks.local_rank == 0:
                ranks.files.fetch(named)
    return ranks.files.fetched(named)


def open_weights(named: Path, base: BaseModel, ranks: RankGroup) -> Adapter | dict[str, torch.Tensor]:
    """Load saved weights for a sampler, next to the live ones."""
    weights: Adapter | dict[str, torch.Tensor]
    folder = fetch_folder(named, ranks)
    manifest = _read_manifest(folder, base, ranks)
    lora = manifest.lora
    with ranks.collective_errors():
        if (lora is None) != base.settings.full:
            raise StrataError(Code.INVALID, f"{folder.name!r} was made by the other kind of training (LoRA or full)")
        if lora is None:
            weights = formats.full_parameters(folder, base)
        else:
            weights = base.new_sampled_adapter(lora, ranks.device)
            weights.install(formats.read_values(folder, weights, manifest))
    ranks.files.drop(named)
    return weights


def _read_manifest(folder: Path, base: BaseModel, ranks: RankGroup) -> CheckpointManifest:
    """Each rank of a host verifies the digests of a share of the files; when this returns, all files are verified."""
    with ranks.collective_errors():
        manifest = checkpoint.read(folder, share=(ranks.local_rank, ranks.local_size))
        for what, there, own in (
            ("base", manifest.base_model, base.info().name),
            ("architecture", manifest.arch, base.arch),
        ):
            if there != own:
                raise StrataError(
                    Code.INVALID, f"{folder.name!r} was made of another {what}: {there!r}, and this one is {own!r}"
                )
    return manifest


def _check_scale(there: model_options.LoraConfig | None, own: model_options.LoraConfig) -> None:
    """The matrices fit at any scale, but with another scale than in training they would change the base differently."""
    if there is not None and not math.isclose(there.alpha / there.rank, own.alpha / own.rank):
        raise StrataError(
            Code.INVALID,
            f"alpha is {there.alpha:g} with rank {there.rank} in the checkpoint, "
            f"{own.alpha:g} with rank {own.rank} in the model",
        )
