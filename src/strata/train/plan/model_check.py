"""Checks for `strata models check` what a server would make of a model: support of its family (`families.json`), LoRA
targets, and the memory that it needs.

Whether a family is supported is what the tests of this version found for each of them; `docs/families.md` has the same
table. The start-up check of a server has the last word, with the real weights.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Final, Literal

import msgspec

from strata.base.errors import Code, StrataError
from strata.train.combinations import Combination, assess, assess_groups
from strata.train.families import Support, family_of, support_of
from strata.train.hugging_face import find_folder
from strata.train.images import find_image_form
from strata.train.peft.layers import TOWERS
from strata.train.plan.defaults import Choice, resolve_settings
from strata.train.plan.device_values import Dtype
from strata.train.plan.devices import Hardware, repeated
from strata.train.plan.model_cost import estimate
from strata.train.plan.model_files import ModelFiles, read_model_files
from strata.train.plan.quantisation import Quantise
from strata.train.settings import LimitSettings, ModelSettings, RankSettings, ServerSection, ServerSettings

KERNELS: Final = {"fused_layers": "liger", "attention": "FA3"}


class MemoryNeed(msgspec.Struct, frozen=True, kw_only=True):
    """The memory of each rank, and so of each device."""

    training: Literal["lora", "full"]
    dtype: Dtype
    quantise: Quantise
    start_bytes: int
    """The least to start with."""
    full_bytes: int
    """Bytes with every slot in use, a full KV cache, and several passes before a step."""


class ModelReport(msgspec.Struct, frozen=True, kw_only=True):
    family: str
    support: Support
    why: str
    """Why a family is refused or unproven, or what adapters cannot train."""
    rows: str
    """What a server does otherwise for a family whose documents are not packed."""
    lora: str
    """The kinds of layers that adapters can be trained for."""
    towers: Sequence[str]
    """Modules for images and sounds, and their projectors: no pass over text calls them, and they are never trained."""
    no_images: str
    """Why passes take no images; empty if they do."""
    sampler: str
    groups: Mapping[str, str]
    """Whether it can be on groups of ranks of each kind and have fused kernels, with the reason."""
    parameters: int
    ranks: int
    settings: Sequence[Choice]
    """What a server of this machine would choose, with the reasons."""
    memory: Sequence[MemoryNeed]


def check_model_files(model: str, machine: Hardware, ranks: int | None = None) -> ModelReport:
    """Reports of a server on this machine; with so many ranks, as if it had a device for each. NOT_FOUND if there is no
    such model here, INVALID if it has no weights."""
    folder = find_folder(model)
    if folder is None:
        raise StrataError(
            Code.NOT_FOUND,
            f"there is no model in {model}, neither a folder nor in the cache",
            hint=f"strata models pull {model}",
        )
    files = read_model_files(folder)
    if not files.shapes:
        raise StrataError(Code.INVALID, f"{folder} has no weights in safetensors")
    family = family_of(folder)
    outcome = support_of(family)
    if ranks is not None and machine.devices:
        machine = msgspec.structs.replace(machine, devices=repeated(machine.devices, ranks))
    chosen = resolve_settings(_settings(ranks), machine, files)
    return ModelReport(
        family=family,
        support=outcome.support,
        why=outcome.why,
        rows=outcome.row_sentence,
        lora=outcome.lora,
        towers=sorted({part for name in files.shapes for part in TOWERS.intersection(name.split("."))}),
        no_images=form if isinstance(form := find_image_form(model, Combination()), str) else "",
        sampler=outcome.sampler,
        groups={
            **{
                setting: verdict.level + (f": {verdict.why}" if verdict.why else "")
                for setting, verdict in assess_groups(files.config).items()
            },
            **{f"model.{name}": _fused_kernel(files.config, **{name: kernel}) for name, kernel in KERNELS.items()},
        },
        parameters=sum(math.prod(shape) for shape in files.shapes.values()),
        ranks=chosen.settings.by_device.nproc,
        settings=chosen.choices,
        memory=[
            *(
                _need(files, machine, ranks, training="lora", dtype="bfloat16", quantise=kind)
                for kind in ("nf4", "int8")
            ),
            *(
                _need(files, machine, ranks, training=training, dtype=dtype)
                for training in ("lora", "full")
                for dtype in ("bfloat16", "float32")
            ),
        ],
    )


def _fused_kernel(config: Mapping[str, Any], **kernel: Any) -> str:
    """No device has run any of them."""
    verdict = assess(Combination(**kernel, config=config))
    return f"refused: {verdict.why}" if verdict.level == "refused" else "experimental"


def _settings(ranks: int | None, **model: Any) -> ServerSettings:
    return ServerSettings(
        server=ServerSection(),
        model=ModelSettings(path="", **model),
        ranks=RankSettings(nproc=ranks),
        limits=LimitSettings(),
    )


def _need(files: ModelFiles, machine: Hardware, ranks: int | None, **model: Any) -> MemoryNeed:
    resolution = resolve_settings(_settings(ranks, **model), machine, files)
    settings = resolution.settings
    needed = estimate(settings, files, resolution.device)
    return MemoryNeed(
        training=settings.model.training,
        dtype=settings.by_device.dtype,
        quantise=settings.model.quantise,
        start_bytes=needed.base,
        full_bytes=needed.full,
    )
