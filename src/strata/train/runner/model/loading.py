"""Loads a model from its files, whole or straight into shards: conversion of names, fused experts, tied weights,
quantised layers, and the errors of missing ones.

A sharded model is never whole in the memory of a rank. transformers builds it without memory, `distribute` replaces its
parameters by sharded ones, and then the loader of transformers reads of each file what this rank holds, and fuses the
experts that the files keep apart. The loader cannot do that for every conversion between files and parameters: a model
with another one is read as a whole on each rank and sharded afterwards (`model_read_whole` in the log).

The layers of a base that is quantised are read here, one weight after the other: each rank reads the rows that it
holds, and quantises them. Unquantised, no rank ever has more than its rows of one of these weights.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Final, NamedTuple

import torch
from safetensors import safe_open
from torch import nn
from torch.distributed.tensor import DTensor
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    Concatenate,
    MergeModulelist,
    WeightConverter,
    WeightRenaming,
    convert_and_load_state_dict_in_model,
    rename_source_key,
)
from transformers.distributed.configuration_utils import DistributedConfig
from transformers.modeling_utils import LoadStateDictConfig
from transformers.utils import logging as transformers_logging

from strata.base import log
from strata.base.errors import Code, StrataError
from strata.train.hugging_face import find_folder
from strata.train.plan.quantisation import Quantise
from strata.train.runner.model.quantised import PARAMETERS, quantise_rows, quantised_layers, replace_layers
from strata.train.runner.model.startup_check import unsupported_errors
from strata.train.runner.model.trained import local, own_region

ROWS: Final = 4096
"""Rows of two weights that are compared at a time."""
EAGER: Final[Mapping[str, Any]] = {"attn_implementation": "eager", "experts_implementation": "eager"}
"""The arithmetic as the family defines it."""
Distribute = Callable[[PreTrainedModel], None]
"""Replaces the parameters of a model by sharded ones, without communication. The model may have no memory yet."""
Cut = Callable[[PreTrainedModel], None]
"""Removes modules that are not needed on this rank. Their weights are not read."""
_log = log.get(__name__)


def load_lm(path: str, dtype: torch.dtype) -> PreTrainedModel:
    """A causal language model from a local folder or the local cache: safetensors only, and no remote code."""
    return _from_pretrained(auto_class(_read_config(path)), path, dtype)


def auto_class(config: PreTrainedConfig) -> Any:
    """Returns the class that reads a model: of some families that take images there is none of the text alone."""
    kind = type(config)
    with_images = kind in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING and kind not in MODEL_FOR_CAUSAL_LM_MAPPING
    return AutoModelForImageTextToText if with_images else AutoModelForCausalLM


def _read_config(path: str) -> PreTrainedConfig:
    config: PreTrainedConfig = AutoConfig.from_pretrained(path, local_files_only=True, trust_remote_code=False)
    return config


def build_skeleton(path: str, dtype: torch.dtype) -> PreTrainedModel:
    """The modules of a model with the shapes of its parameters, without memory for them."""
    try:
        config = _read_config(path)
        with torch.device("meta"):
            skeleton = auto_class(config).from_config(
                config, dtype=dtype, trust_remote_code=False, attn_implementation="eager"
            )
    except (OSError, ValueError) as error:
        raise StrataError(Code.INVALID, f"cannot load the model {path}: {error}") from error
    assert isinstance(skeleton, PreTrainedModel)
    return skeleton


def _keep_all(lm: PreTrainedModel) -> None:
    del lm


class RankPart(NamedTuple):
    """What a rank has of a model."""

    distribute: Distribute
    shards: int = 1
    """How many times `distribute` shards parameters along their first dimension."""
    cut: Cut = _keep_all


def tie_skeleton(skeleton: PreTrainedModel, path: str) -> PreTrainedModel:
    """The skeleton with the weights tied that a loaded model ties."""
    skeleton.tie_weights()
    untie_what_files_untie(skeleton, path)
    return skeleton


def load_sharded(
    path: str, dtype: torch.dtype, device: torch.device, part: RankPart, quantise: Quantise = ""
) -> PreTrainedModel:
    """This rank's part of a model."""
    skeleton = build_skeleton(path, dtype)
    reason = _unreadable_in_shards(skeleton, path, part.shards)
    if reason:
        _log.warning("model_read_whole", model=path, reason=reason)
        lm = load_lm(path, dtype)
        if quantise:
            replace_layers(lm, quantise)
        part.cut(lm)
        part.distribute(lm)
    else:
        lm = _read_shards(type(skeleton), path, dtype, device, part, quantise)
        _read_quantised(lm, skeleton, path, dtype)
    for parameter in lm.parameters():
        _own_memory(parameter)
    return lm


def _read_shards(
    model_class: type[PreTrainedModel],
    path: str,
    dtype: torch.dtype,
    device: torch.device,
    part: RankPart,
    quantise: Quantise,
) -> PreTrainedModel:
    def prepare_distribute_model(cls: Any, config: Any, device_map: Any = None) -> tuple[Any, Any, None]:
        del cls
        return config, device_map, None

    tied: dict[str, str] = {}

    def maybe_distribute_model(cls: Any, lm: PreTrainedModel, config: Any, mesh: Any) -> PreTrainedModel:
        del cls, config, mesh
        # transformers ties weights when they are loaded, and sharding has to know before.
        lm.tie_weights(recompute_mapping=False)
        untie_what_files_untie(lm, path)
        if quantise:
            replace_layers(lm, quantise)
            _leave_out_quantised(lm)
        part.cut(lm)
        tied.update(_first_names(lm))
        part.distribute(lm)
        return lm

    def initialize_weights(lm: PreTrainedModel) -> None:
        # The family's own code computes with sharded weights here.
        with unsupported_errors(str(lm.config.model_type)):
            model_class.initialize_weights(lm)  # type: ignore[no-untyped-call]

    # transformers calls the first two where it would shard the model itself, by its own plan.
    distributing: Any = type(
        model_class.__name__,
        (model_class,),
        {
            "__module__": model_class.__module__,
            "prepare_distribute_model": classmethod(prepare_distribute_model),
            "maybe_distribute_model": classmethod(maybe_distribute_model),
            "initialize_weights": initialize_weights,
        },
    )
    device_map = None if device.type == "cpu" else device
    lm = _from_pretrained(distributing, path, dtype, distributed_config=DistributedConfig(), device_map=device_map)
    lm.__class__ = model_class
    del lm.config.distributed_config
    if _first_names(lm) != tied:
        raise StrataError(Code.UNSUPPORTED, "its files tie other weights than its configuration")
    return lm


def _leave_out_quantised(lm: PreTrainedModel) -> None:
    """transformers neither reads the weights that are quantised, nor reports that they are missing."""
    names = [re.escape(name) for name, _ in quantised_layers(lm)]
    parameters = "|".join(PARAMETERS)
    lm._keys_to_ignore_on_load_missing = {
        *(lm._keys_to_ignore_on_load_missing or ()),
        *(rf"^{name}\.({parameters})$" for name in names),
    }
    lm._keys_to_ignore_on_load_unexpected = {
        *(lm._keys_to_ignore_on_load_unexpected or ()),
        *(rf"^{name}\.weight$" for name in names),
    }


def _read_quantised(lm: PreTrainedModel, skeleton: PreTrainedModel, path: str, dtype: torch.dtype) -> None:
    """The weights of quantised layers, which are stored as they are in the model, perhaps by other names."""
    layers = {f"{name}.weight": layer for name, layer in quantised_layers(lm)}
    if not layers:
        return
    names = _names_in_model(skeleton, path, get_model_conversion_mapping(skeleton))
    with ExitStack() as stack:
        opened = [stack.enter_context(safe_open(file, framework="pt")) for file in _files(path)]
        stored = {names[key]: file.get_slice(key) for file in opened for key in file.keys()}  # noqa: SIM118
        if missing := sorted(layers.keys() - stored.keys()):
            raise StrataError(Code.INVALID, f"cannot load the model {path}: its files have no {missing[0]}")
        for name, layer in layers.items():
            if stored[name].get_shape() != [layer.out_features, layer.in_features]:
                raise StrataError(Code.INVALID, f"cannot load the model {path}: {name} does not fit")
            rows = own_region(layer.codes)[0] if isinstance(layer.codes, DTensor) else slice(None)
            read = stored[name][rows].to(device=layer.codes.device, dtype=dtype)
            for parameter, values in zip((layer.codes, layer.scales), quantise_rows(read, layer.kind), strict=True):
                local(parameter).copy_(values)


def _from_pretrained(model_class: Any, path: str, dtype: torch.dtype, **options: Any) -> PreTrainedModel:
    transformers_logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    try:
        model, report = model_class.from_pretrained(
            path,
            dtype=dtype,
            use_safetensors=True,
            output_loading_info=True,
            trust_remote_code=False,
            local_files_only=True,
            **EAGER,
            **options,
        )
    except torch.OutOfMemoryError:
        raise
    except (OSError, ValueError, RuntimeError) as error:
        # A conversion of weights that fails is a RuntimeError of transformers.
        raise StrataError(Code.INVALID, f"cannot load the model {path}: {error}") from error
    if missing := sorted(report["missing_keys"]):
        # transformers would make up random numbers for them.
        raise StrataError(Code.INVALID, f"cannot load the model {path}: its files have no {missing[0]}")
    assert isinstance(model, PreTrainedModel)
    return model


def read_groups(
    skeleton: PreTrainedModel, path: str, dtype: torch.dtype, groups: Sequence[Sequence[str]]
) -> Iterator[dict[str, torch.Tensor]]:
    """The weights of a model, one group after the other, and then the buffers that its files hold."""
    transformers_logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    mapping: list[Any] = get_model_conversion_mapping(skeleton)
    names_of = _names_in_model(skeleton, path, mapping)
    stored_buffers = [name for name in skeleton.state_dict() if name in dict(skeleton.named_buffers())]
    config = LoadStateDictConfig(dtype=dtype, dtype_plan=skeleton._get_dtype_plan(dtype), weight_mapping=mapping)
    tied = skeleton.all_tied_weights_keys
    with ExitStack() as stack:
        opened = [stack.enter_context(safe_open(file, framework="pt")) for file in _files(path)]
        stored = {key: file for file in opened for key in file.keys()}  # noqa: SIM118
        for group in [*groups, stored_buffers] if stored_buffers else groups:
            # A tied weight may be stored by any of its names.
            wanted = set(group) | {target for target, source in tied.items() if source in group}
            slices = {key: stored[key].get_slice(key) for key, name in names_of.items() if name in wanted}
            report, _ = convert_and_load_state_dict_in_model(skeleton, slices, config)
            if unfit := [*report.conversion_errors, *(name for name, *_ in report.mismatched_keys)]:
                raise StrataError(Code.INVALID, f"cannot load the model {path}: {unfit[0]} does not fit")
            weights = {name: _take(skeleton, name, tied) for name in group}
            if missing := [name for name, weight in weights.items() if weight.is_meta]:
                raise StrataError(Code.INVALID, f"cannot load the model {path}: its files have no {missing[0]}")
            yield weights


def _take(skeleton: PreTrainedModel, name: str, tied: Mapping[str, str]) -> torch.Tensor:
    """Returns what was read by this name or by that of a weight that is tied to it. The skeleton keeps no memory."""
    found = torch.empty(0, device="meta")
    for each in (name, *(target for target, source in tied.items() if source == name)):
        module, last = parent_of(skeleton, each)
        weight: torch.Tensor = getattr(module, last)
        if not weight.is_meta:
            found = weight.detach()
            empty = torch.empty_like(found, device="meta")
            setattr(module, last, nn.Parameter(empty) if last in module._parameters else empty)
    return found


def _names_in_model(skeleton: PreTrainedModel, path: str, mapping: Sequence[Any]) -> dict[str, str]:
    """The name of the parameter or buffer that each stored tensor is part of."""
    renamings = [entry for entry in mapping if isinstance(entry, WeightRenaming)]
    converters = [entry for entry in mapping if isinstance(entry, WeightConverter)]
    state = skeleton.state_dict()
    prefix = skeleton.base_model_prefix
    names: dict[str, str] = {}
    for key in _stored_names(path):
        name, _ = rename_source_key(key, renamings, converters, prefix, state)
        names[key] = name if name in state else rename_source_key(key, [], [], prefix, state)[0]
    return names


def _unreadable_in_shards(skeleton: PreTrainedModel, path: str, shards: int) -> str:
    """Says why the loader of transformers cannot read shards of this model; empty if it can.

    It slices what it reads before it converts it. That is right if the conversion stacks whole experts, since shards
    are slices along the experts, and wrong for one that joins or splits along the first dimension.
    """
    mapping = get_model_conversion_mapping(skeleton)
    renamings = [entry for entry in mapping if isinstance(entry, WeightRenaming)]
    converters = [entry for entry in mapping if isinstance(entry, WeightConverter)]
    by_pattern = {pattern: converter for converter in converters for pattern in converter.source_patterns}
    shapes = {name: parameter.shape for name, parameter in skeleton.named_parameters(remove_duplicate=False)}
    for key in _stored_names(path):
        name, pattern = rename_source_key(key, renamings, converters, skeleton.base_model_prefix, dict(shapes))
        if pattern is None or name not in shapes:
            continue
        if not _stacks_experts(by_pattern[pattern]):
            return f"{name} is stored in another form, {key}"
        experts = shapes[name][0]
        if -(-experts // shards) * (shards - 1) >= experts:
            return f"{name} has {experts} experts, which leaves some of {shards} shards empty"
    return ""


def _stacks_experts(converter: WeightConverter) -> bool:
    match converter.operations:
        case [MergeModulelist(dim=0)] | [MergeModulelist(dim=0), Concatenate(dim=1)]:
            return True
    return False


def _files(path: str) -> list[Path]:
    folder = find_folder(path)
    return sorted(folder.glob("*.safetensors")) if folder is not None else []


def _stored_names(path: str) -> Iterator[str]:
    for file in _files(path):
        with safe_open(file, framework="pt") as opened:
            yield from opened.keys()


def untie_what_files_untie(lm: PreTrainedModel, path: str) -> list[str]:
    """The configuration may tie weights that the files store apart and with different values. Then they are two.
    Returns the names of those that have a parameter of their own now."""
    untied = []
    tied: Mapping[str, str] = lm.all_tied_weights_keys
    with ExitStack() as stack:
        opened = [stack.enter_context(safe_open(file, framework="pt")) for file in _files(path)]
        stored = {name: file for file in opened for name in file.keys()}  # noqa: SIM118
        for target, source in tied.items():
            if target in stored and source in stored and not _are_equal(stored, target, source):
                module, last = parent_of(lm, target)
                setattr(module, last, nn.Parameter(torch.empty_like(getattr(module, last))))
                untied.append(target)
    return untied


def _are_equal(stored: Mapping[str, Any], one: str, other: str) -> bool:
    first, second = stored[one].get_slice(one), stored[other].get_slice(other)
    if first.get_shape() != second.get_shape():
        return False
    rows = range(0, first.get_shape()[0], ROWS)
    return all(torch.equal(first[start : start + ROWS], second[start : start + ROWS]) for start in rows)


def _first_names(lm: nn.Module) -> dict[str, str]:
    """Returns for each parameter the first of its names: two names of a tied weight have the same."""
    first: dict[int, str] = {}
    parameters = lm.named_parameters(remove_duplicate=False)
    return {name: first.setdefault(id(parameter), name) for name, parameter in parameters}


def _own_memory(parameter: torch.Tensor) -> None:
    """A weight that was read without a change lies in the pages of its file: it would change with the file, and a
    server that sleeps could not give them back."""
    local = parameter._local_tensor if isinstance(parameter, DTensor) else parameter.data
    if local.untyped_storage().resizable():
        return
    if isinstance(parameter, DTensor):
        parameter._local_tensor = local.clone()
    else:
        parameter.data = local.clone()


def parent_of(model: nn.Module, name: str) -> tuple[nn.Module, str]:
    """The module that has this parameter or buffer, and its name there."""
    path, _, last = name.rpartition(".")
    return model.get_submodule(path), last
