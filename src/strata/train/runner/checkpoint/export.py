"""Export of a checkpoint: an adapter for PEFT, or a model for Hugging Face.

It runs offline, without ranks, on a folder whose digests it verifies. It never overwrites anything.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Final, Literal

import msgspec
import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from strata.base.atomic import new_folder
from strata.base.errors import Code, StrataError
from strata.train.checkpoints import checkpoint
from strata.train.checkpoints.archive import published
from strata.train.checkpoints.checkpoint import CheckpointManifest
from strata.train.core.ops import LoraConfig
from strata.train.peft import importer
from strata.train.peft.layers import ADAPTER, ADAPTER_CONFIG, HEADS
from strata.train.runner.checkpoint import shards
from strata.train.runner.checkpoint.formats import copy_tokenizer, read_flat
from strata.train.runner.lora import Adapter, is_transposed, targets_of
from strata.train.runner.model.base import load_lm
from strata.train.runner.passes.optimizer import MOMENTS

Form = Literal["peft", "hf"]

_MOMENT: Final = tuple(f"{moment}." for moment in MOMENTS)


class _AdapterConfig(msgspec.Struct, frozen=True):
    base_model_name_or_path: str


def export(folder: Path, out: Path, form: Form, base: str = "") -> CheckpointManifest:
    """Export to `out`. `base` is the model to merge an adapter into, if it is not where the checkpoint says."""
    manifest = checkpoint.read(folder)
    _create(out, lambda temporary: _fill(folder, temporary, manifest, form, base))
    return manifest


def merge_fetched(folder: Path, out: Path, base: str) -> None:
    """A model from files that a server sent: a PEFT adapter, which is merged into `base`, or a full model."""
    _create(out, lambda temporary: _fill_fetched(folder, temporary, base))


def _fill_fetched(folder: Path, temporary: Path, base: str) -> None:
    if not (folder / ADAPTER_CONFIG).exists():
        for file in folder.iterdir():
            shutil.copyfile(file, temporary / file.name)
        return
    if not base:
        raise StrataError(Code.INVALID, "an adapter is merged into a model of this machine", hint="name it with --base")
    config = msgspec.json.decode((folder / ADAPTER_CONFIG).read_bytes(), type=importer.PeftConfig)
    lora = importer.examine(folder / ADAPTER, config, Path(base))
    arch = str(AutoConfig.from_pretrained(base, local_files_only=True, trust_remote_code=False).model_type)
    manifest = CheckpointManifest(model_id="", seq_id=0, kind="weights", base_model=base, arch=arch, lora=lora, steps=0)
    _merge(folder, temporary, manifest, lora, base)


def _create(out: Path, fill: Callable[[Path], None]) -> None:
    out.absolute().parent.mkdir(parents=True, exist_ok=True)
    with new_folder(out, temporary=out.absolute().with_name(f".{out.name}.part")) as temporary:
        fill(temporary)


def _fill(folder: Path, temporary: Path, manifest: CheckpointManifest, form: Form, base: str) -> None:
    if form == "peft" and manifest.lora is None:
        raise StrataError(Code.INVALID, f"{folder.name!r} is a full model, not an adapter", hint="use --format hf")
    if form == "hf" and manifest.lora is not None:
        _merge(folder, temporary, manifest, manifest.lora, base)
    elif shards.has_shards(folder):
        _from_shards(folder, temporary)
    else:
        for name in published(folder):
            shutil.copyfile(folder / name, temporary / name)


def _merge(folder: Path, temporary: Path, manifest: CheckpointManifest, lora: LoraConfig, base: str) -> None:
    """Merge the adapter into the base, in the base's dtype. The sums are computed in float32."""
    config = msgspec.json.decode((folder / ADAPTER_CONFIG).read_bytes(), type=_AdapterConfig)
    path = base or config.base_model_name_or_path
    lm = load_lm(path, _dtype_of(path))
    if str(lm.config.model_type) != manifest.arch:
        raise StrataError(
            Code.INVALID, f"{folder.name!r} belongs to a {manifest.arch}, and {path} is a {lm.config.model_type}"
        )
    adapter = Adapter(lora, targets_of(lm, lora), torch.device("cpu"))
    adapter.flat.copy_(read_flat(folder, adapter, manifest))
    if HEADS.intersection(adapter.pairs):
        _untie(lm)
    with torch.no_grad():
        for name, (a, b) in adapter.pairs.items():
            weight = _weight(lm, name)
            added = adapter.scale * (b @ a)
            weight.copy_(weight.float() + (added.T if is_transposed(lm, name) else added))
    lm.save_pretrained(str(temporary))
    copy_tokenizer(path, temporary)


def _dtype_of(path: str) -> torch.dtype:
    try:
        dtype = AutoConfig.from_pretrained(path, local_files_only=True, trust_remote_code=False).dtype
    except (OSError, ValueError) as error:
        raise StrataError(
            Code.INVALID, f"cannot read the base {path}: {error}", hint="say where it is with --base"
        ) from error
    return dtype if isinstance(dtype, torch.dtype) else torch.float32


def _weight(lm: nn.Module, name: str) -> torch.Tensor:
    """The weight of a linear layer, or the fused weight of all experts."""
    above, _, last = name.rpartition(".")
    layer = getattr(lm.get_submodule(above), last)
    weight = layer.weight if isinstance(layer, nn.Module) else layer
    assert isinstance(weight, torch.Tensor)
    return weight


def _untie(lm: PreTrainedModel) -> None:
    """A head that is tied to the embedding gets a weight of its own: the adapter changes the head alone."""
    text = lm.config.get_text_config(decoder=True)
    if not text.tie_word_embeddings:
        return
    head = lm.get_output_embeddings()  # type: ignore[no-untyped-call]
    assert isinstance(head, nn.Linear)
    head.weight = nn.Parameter(head.weight.detach().clone(), requires_grad=False)
    lm.config.tie_word_embeddings = False
    text.tie_word_embeddings = False


def _from_shards(folder: Path, temporary: Path) -> None:
    config = AutoConfig.from_pretrained(str(folder), local_files_only=True, trust_remote_code=False)
    config.dtype = torch.float32
    with torch.device("meta"):
        lm = AutoModelForCausalLM.from_config(config, trust_remote_code=False)  # type: ignore[no-untyped-call]
    state = shards.read_unsharded(folder, lambda name: not name.startswith(_MOMENT))
    own = {name for name, _ in lm.named_parameters()}
    if state.keys() != own:
        raise StrataError(Code.CORRUPT, f"not a full model: {sorted(state.keys() ^ own)[0]}")
    lm.load_state_dict(state, assign=True, strict=False)
    lm.tie_weights()
    lm.save_pretrained(str(temporary))
    copy_tokenizer(str(folder), temporary)
