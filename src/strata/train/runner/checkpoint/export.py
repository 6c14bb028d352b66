"""Exports a checkpoint offline as a PEFT adapter or a merged Hugging Face model: which base it needs, tied weights,
dtype, and its refusals.

It runs offline, without ranks, on a folder whose digests it verifies. It never overwrites anything.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal

import msgspec
import torch
from torch import nn
from transformers import AutoConfig, PreTrainedModel

from strata.base.atomic import new_folder
from strata.base.errors import Code, StrataError
from strata.train.checkpoints import checkpoint
from strata.train.checkpoints.archive import published
from strata.train.checkpoints.checkpoint import CheckpointManifest
from strata.train.core.model_options import LoraConfig
from strata.train.peft import importer
from strata.train.peft.layers import ADAPTER, ADAPTER_CONFIG, HEADS
from strata.train.plan.quantisation import QuantisedKind
from strata.train.runner.checkpoint import shards
from strata.train.runner.checkpoint.formats import copy_tokenizer, read_values
from strata.train.runner.checkpoint.hugging_face_files import groups_of, persistent_buffers, write_model
from strata.train.runner.lora.adapter import Adapter
from strata.train.runner.lora.targets import is_transposed, targets_of
from strata.train.runner.model.base import DTYPES
from strata.train.runner.model.loading import build_skeleton, read_groups, untie_what_files_untie
from strata.train.runner.model.quantised import QuantisedWeights, quantisable_layers, round_trip
from strata.train.runner.passes.optimizer import MOMENTS

Form = Literal["peft", "hf"]

GENERATION: Final = "generation_config.json"
_MOMENT: Final = tuple(f"{moment}." for names in MOMENTS.values() for moment in names)


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
    """Merge the adapter into the base, in the base's dtype, one layer after the other. The sums are computed in
    float32. The base is the one that the adapter was trained on: if that was quantised, with the same loss."""
    config = msgspec.json.decode((folder / ADAPTER_CONFIG).read_bytes(), type=_AdapterConfig)
    path = base or config.base_model_name_or_path
    dtype = _dtype_of(path)
    lm = build_skeleton(path, dtype)
    if str(lm.config.model_type) != manifest.arch:
        raise StrataError(
            Code.INVALID, f"{folder.name!r} belongs to a {manifest.arch}, and {path} is a {lm.config.model_type}"
        )
    for untied in untie_what_files_untie(lm, path):
        del lm.all_tied_weights_keys[untied]
    _say_what_is_tied(lm)
    adapter = Adapter(lora, targets_of(lm, lora), torch.device("cpu"))
    adapter.install(read_values(folder, adapter, manifest))
    head = _untie(lm) if HEADS.intersection(adapter.pairs) else {}
    merge = _Merge(lm, adapter, head, _trained_on(lm, folder))
    groups = read_groups(lm, path, dtype, groups_of(lm))
    write_model(lm, temporary, map(merge.group, groups), dtype)
    copy_tokenizer(path, temporary)
    if (generation := Path(path) / GENERATION).is_file():
        shutil.copyfile(generation, temporary / GENERATION)


def _trained_on(lm: nn.Module, folder: Path) -> Callable[[str, torch.Tensor], torch.Tensor]:
    """Returns the function from a weight of the base to the one that the adapter was trained on: the header of its file
    says how the base was quantised."""
    metadata = checkpoint.read_header(folder / ADAPTER).metadata
    if "quantise" not in metadata:
        return lambda _, weight: weight
    try:
        kind = msgspec.convert(metadata["quantise"], type=QuantisedKind)
        quantised = QuantisedWeights(kind, DTYPES[metadata["dtype"]])
    except (msgspec.ValidationError, KeyError) as error:
        raise StrataError(Code.CORRUPT, f"{ADAPTER} was trained on a base of a kind that is not known here") from error
    names = {f"{name}.weight" for name, _ in quantisable_layers(lm, quantised.kind)}
    return lambda name, weight: round_trip(weight, quantised) if name in names else weight


@dataclass(frozen=True)
class _Merge:
    lm: nn.Module
    adapter: Adapter
    head: Mapping[str, str]
    """The name of an embedding with that of the head which was tied to it."""
    trained_on: Callable[[str, torch.Tensor], torch.Tensor]

    @torch.no_grad()
    def group(self, group: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        copies = {self.head[name]: weight.clone() for name, weight in group.items() if name in self.head}
        return {name: self._weight(name, weight).to(weight.dtype) for name, weight in {**group, **copies}.items()}

    def _weight(self, name: str, weight: torch.Tensor) -> torch.Tensor:
        adapter, base = self.adapter, self.trained_on(name, weight)
        target = name if name in adapter.pairs else name.removesuffix(".weight")
        if target not in adapter.pairs:
            return base
        a, b = adapter.pairs[target]
        added = adapter.scale * (b @ a)
        return base.float() + (added.mT if is_transposed(self.lm, target) else added)


def _dtype_of(path: str) -> torch.dtype:
    try:
        dtype = AutoConfig.from_pretrained(path, local_files_only=True, trust_remote_code=False).dtype
    except (OSError, ValueError) as error:
        raise StrataError(
            Code.INVALID, f"cannot read the base {path}: {error}", hint="say where it is with --base"
        ) from error
    return dtype if isinstance(dtype, torch.dtype) else torch.float32


def _say_what_is_tied(lm: PreTrainedModel) -> None:
    """Says in the configuration what is tied: it may say otherwise than the files."""
    head: Any = lm.get_output_embeddings()  # type: ignore[no-untyped-call]
    if head is not None and head.weight is not lm.get_input_embeddings().weight:
        lm.config.tie_word_embeddings = False
        lm.config.get_text_config(decoder=True).tie_word_embeddings = False


def _untie(lm: PreTrainedModel) -> Mapping[str, str]:
    """A head that is tied to the embedding gets a weight of its own: the adapter changes the head alone. Returns the
    name of the embedding with that of the head's weight, if they are tied."""
    text = lm.config.get_text_config(decoder=True)
    if not text.tie_word_embeddings:
        return {}
    lm.config.tie_word_embeddings = False
    text.tie_word_embeddings = False
    embedding = lm.get_input_embeddings()
    head = lm.get_output_embeddings()  # type: ignore[no-untyped-call]
    names = {id(module): name for name, module in lm.named_modules()}
    return {f"{names[id(embedding)]}.weight": f"{names[id(head)]}.weight"}


def _from_shards(folder: Path, temporary: Path) -> None:
    lm = build_skeleton(str(folder), torch.float32)
    own = {name: parameter.shape for name, parameter in lm.named_parameters()}
    saved = {name for name in shards.chunks_of(folder) if not name.startswith(_MOMENT)}
    if saved != own.keys():
        raise StrataError(Code.CORRUPT, f"not a full model: {sorted(saved ^ own.keys())[0]}")
    if buffers := [name for name, _ in persistent_buffers(lm)]:
        raise StrataError(
            Code.UNSUPPORTED,
            f"{folder.name!r} cannot be exported: it does not hold {buffers[0]}",
            hint="export a checkpoint that was saved for sampling",
        )

    def read(names: Sequence[str]) -> dict[str, torch.Tensor]:
        state = {name: torch.empty(own[name], dtype=torch.float32) for name in names}
        shards.fill(folder, state)
        return state

    write_model(lm, temporary, (read(names) for names in groups_of(lm)), torch.float32)
    copy_tokenizer(str(folder), temporary)
