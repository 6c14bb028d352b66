"""Out of a checkpoint into the forms that others read: an adapter for PEFT, or a model for Hugging Face.

Offline, from a folder that was verified, without ranks. Nothing is exported over something that is there.
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
from strata.train.archive import published
from strata.train.checkpoints import checkpoint
from strata.train.checkpoints.checkpoint import Manifest
from strata.train.core.ops import LoraConfig
from strata.train.peft import importer
from strata.train.peft.layers import ADAPTER, ADAPTER_CONFIG, HEADS
from strata.train.runner.checkpoint import shards
from strata.train.runner.checkpoint.formats import copy_tokenizer, read_flat
from strata.train.runner.lora.adapter import Adapter, is_turned, targets_of
from strata.train.runner.model.base import read
from strata.train.runner.passes.optimizer import MOMENTS

Form = Literal["peft", "hf"]

_MOMENT: Final = tuple(f"{part}." for part in MOMENTS)


class _AdapterConfig(msgspec.Struct, frozen=True):
    base_model_name_or_path: str


def export(folder: Path, out: Path, form: Form, base: str = "") -> Manifest:
    """Make `out`. `base` is the model an adapter is merged into, if it is not where the checkpoint says."""
    manifest = checkpoint.read(folder)
    _make(out, lambda part: _fill(folder, part, manifest, form, base))
    return manifest


def merge_fetched(folder: Path, out: Path, base: str) -> None:
    """A model of files that a server sent: of an adapter of PEFT, which is merged into `base`, or of a whole model."""
    _make(out, lambda part: _fill_fetched(folder, part, base))


def _fill_fetched(folder: Path, part: Path, base: str) -> None:
    if not (folder / ADAPTER_CONFIG).exists():
        for file in folder.iterdir():
            shutil.copyfile(file, part / file.name)
        return
    if not base:
        raise StrataError(Code.INVALID, "an adapter is merged into a model of this machine", hint="name it with --base")
    config = msgspec.json.decode((folder / ADAPTER_CONFIG).read_bytes(), type=importer.PeftConfig)
    lora = importer.examine(folder / ADAPTER, config, Path(base))
    arch = str(AutoConfig.from_pretrained(base, local_files_only=True, trust_remote_code=False).model_type)
    manifest = Manifest(model_id="", seq_id=0, kind="weights", base_model=base, arch=arch, lora=lora, steps=0)
    _merge(folder, part, manifest, lora, base)


def _make(out: Path, fill: Callable[[Path], None]) -> None:
    out.absolute().parent.mkdir(parents=True, exist_ok=True)
    with new_folder(out, temporary=out.absolute().with_name(f".{out.name}.part")) as part:
        fill(part)


def _fill(folder: Path, part: Path, manifest: Manifest, form: Form, base: str) -> None:
    if form == "peft" and manifest.lora is None:
        raise StrataError(Code.INVALID, f"{folder.name!r} is a whole model, no adapter", hint="use --format hf")
    if form == "hf" and manifest.lora is not None:
        _merge(folder, part, manifest, manifest.lora, base)
    elif shards.has_shards(folder):
        _from_shards(folder, part)
    else:
        for name in published(folder):
            shutil.copyfile(folder / name, part / name)


def _merge(folder: Path, part: Path, manifest: Manifest, lora: LoraConfig, base: str) -> None:
    """The base with what the adapter adds, in the numbers the base has. The sums are made in float32."""
    said = msgspec.json.decode((folder / ADAPTER_CONFIG).read_bytes(), type=_AdapterConfig)
    path = base or said.base_model_name_or_path
    lm = read(path, _dtype_of(path))
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
            weight.copy_(weight.float() + (added.T if is_turned(lm, name) else added))
    lm.save_pretrained(str(part))
    copy_tokenizer(path, part)


def _dtype_of(path: str) -> torch.dtype:
    try:
        dtype = AutoConfig.from_pretrained(path, local_files_only=True, trust_remote_code=False).dtype
    except (OSError, ValueError) as error:
        raise StrataError(
            Code.INVALID, f"cannot read the base {path}: {error}", hint="say where it is with --base"
        ) from error
    return dtype if isinstance(dtype, torch.dtype) else torch.float32


def _weight(lm: nn.Module, name: str) -> torch.Tensor:
    """Of a linear layer, or the fused one of all experts."""
    above, _, last = name.rpartition(".")
    found = getattr(lm.get_submodule(above), last)
    weight = found.weight if isinstance(found, nn.Module) else found
    assert isinstance(weight, torch.Tensor)
    return weight


def _untie(lm: PreTrainedModel) -> None:
    """A head that shares its weight with the embedding gets one of its own: the adapter is of the head alone."""
    text = lm.config.get_text_config(decoder=True)
    if not text.tie_word_embeddings:
        return
    head = lm.get_output_embeddings()  # type: ignore[no-untyped-call]
    assert isinstance(head, nn.Linear)
    head.weight = nn.Parameter(head.weight.detach().clone(), requires_grad=False)
    lm.config.tie_word_embeddings = False
    text.tie_word_embeddings = False


def _from_shards(folder: Path, part: Path) -> None:
    config = AutoConfig.from_pretrained(str(folder), local_files_only=True, trust_remote_code=False)
    config.dtype = torch.float32
    with torch.device("meta"):
        lm = AutoModelForCausalLM.from_config(config, trust_remote_code=False)  # type: ignore[no-untyped-call]
    state = shards.whole(folder, lambda name: not name.startswith(_MOMENT))
    own = {name for name, _ in lm.named_parameters()}
    if state.keys() != own:
        raise StrataError(Code.CORRUPT, f"not a whole model: {sorted(state.keys() ^ own)[0]}")
    lm.load_state_dict(state, assign=True, strict=False)
    lm.tie_weights()
    lm.save_pretrained(str(part))
    copy_tokenizer(str(folder), part)
