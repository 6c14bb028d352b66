"""Converts models to the files of a checkpoint and back: names of tensors as PEFT and Hugging Face have them, adapter
config, optimizer state (`optimizer.safetensors`), and the errors when they do not fit.

The moments of an optimizer have the names of the weights they belong to. All files are safetensors.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from pathlib import Path
from typing import Any, Final

import msgspec
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from strata.base.errors import Code, StrataError
from strata.train.checkpoints.checkpoint import CheckpointManifest
from strata.train.core.model_options import LoraConfig
from strata.train.core.state import IMPORTED
from strata.train.peft.layers import ADAPTER, ADAPTER_CONFIG, PREFIX, peft_layer
from strata.train.runner.checkpoint import shards
from strata.train.runner.collectives import RankGroup
from strata.train.runner.lora.adapter import Adapter
from strata.train.runner.lora.targets import linear_shape
from strata.train.runner.model.base import BaseModel, tokenizer_files
from strata.train.runner.model.loading import RankPart, load_sharded, parent_of
from strata.train.runner.model.trained import (
    WEIGHTS,
    FullModel,
    LoraModel,
    local,
    mesh_size,
    own_slice,
    sharded,
    sharded_like,
)

OPTIMIZER: Final = "optimizer.safetensors"

Fill = Callable[[Path], None]


def adapter_writer(adapter: Adapter, base: BaseModel, flat: Mapping[str, torch.Tensor]) -> Fill:
    """Writes an adapter, and the moments of its optimizer if they are given: flat blocks of the whole adapter. One rank
    calls it."""

    def fill(folder: Path) -> None:
        values = adapter.views(flat[WEIGHTS])
        save_file(to_peft(values), folder / ADAPTER, {"format": "pt", **_quantised_from(base)})
        config = msgspec.json.encode(_peft_config(adapter, base))
        (folder / ADAPTER_CONFIG).write_bytes(msgspec.json.format(config))
        named = {
            f"{moment}.{name}": view
            for moment, block in flat.items()
            if moment != WEIGHTS
            for name, view in adapter.views(block).items()
        }
        if named:
            save_file(_cpu_copies(named), folder / OPTIMIZER)

    return fill


def _quantised_from(base: BaseModel) -> dict[str, str]:
    """Returns how the base was quantised that an adapter was trained on, and from which dtype: a merge has to do the
    same."""
    settings = base.settings
    return {"quantise": settings.quantise, "dtype": settings.dtype} if settings.quantise else {}


def read_adapter(
    folder: Path, model: LoraModel, manifest: CheckpointManifest, *, optimizer: bool
) -> Callable[[], None]:
    """Read and check everything; the returned function installs it and cannot fail."""
    adapter, steps = model.adapter, manifest.steps
    weights = read_values(folder, adapter, manifest)
    moments: list[dict[str, torch.Tensor]] = [{} for _ in adapter.blocks]
    if optimizer and steps:
        saved = load_file(folder / OPTIMIZER)
        for moment in model.optimizer.moment_names:
            prefix = f"{moment}."
            tensors = {name.removeprefix(prefix): value for name, value in saved.items() if name.startswith(prefix)}
            if not tensors:
                raise StrataError(
                    Code.INVALID, f"the state of the optimizer in the checkpoint is not one of {model.optimizer.name}"
                )
            for own, block, part in zip(moments, _flatten(adapter, tensors), model.stepped, strict=True):
                own[moment] = block[part]

    def install() -> None:
        adapter.install(weights)
        model.gradients = None
        model.optimizer.restore(moments, steps if optimizer else 0)

    return install


def read_values(folder: Path, adapter: Adapter, manifest: CheckpointManifest) -> list[torch.Tensor]:
    """The values as flat blocks, as this rank holds them. Layers that an imported adapter lacks are initialised as in a
    new model.

    An adapter that was saved here lacks no layer, and a model that trains other kinds of layers is rejected.
    """
    tensors = _from_peft(load_file(folder / ADAPTER), adapter)
    imported = manifest.model_id.startswith(IMPORTED) and _kinds(manifest.lora) == _kinds(adapter.config)
    if imported and tensors.keys() < adapter.shapes.keys():
        tensors |= {name: adapter.draw(name, manifest.digest) for name in adapter.shapes.keys() - tensors.keys()}
    return _flatten(adapter, tensors)


def _kinds(lora: LoraConfig | None) -> tuple[bool, ...]:
    return () if lora is None else (lora.train_attn, lora.train_mlp, lora.train_unembed)


def full_parameters(folder: Path, base: BaseModel) -> dict[str, torch.Tensor]:
    """The weights of a saved full model, sharded as the live ones are."""
    live = dict(sharded(base.packed))
    if shards.has_shards(folder):
        state = shards.empty_like({name: parameter.detach() for name, parameter in live.items()})
        shards.fill(folder, state)
        return state
    own = read_own_shards(str(folder), live, base)
    return {name: sharded_like(parameter, shard) for (name, parameter), shard in zip(live.items(), own, strict=True)}


def _flatten(adapter: Adapter, tensors: Mapping[str, torch.Tensor]) -> list[torch.Tensor]:
    """Flat blocks, as this rank holds them, from the tensors of the whole adapter."""
    if tensors.keys() != adapter.shapes.keys():
        difference = sorted(tensors.keys() ^ adapter.shapes.keys())[0]
        raise StrataError(Code.INVALID, f"the checkpoint does not train what the model trains: {difference}")
    for name, shape in adapter.shapes.items():
        if tensors[name].shape != shape:
            raise StrataError(
                Code.INVALID, f"{name} is {tuple(tensors[name].shape)} in the checkpoint, {shape} in the model"
            )
    # Every element is written below.
    flats = [torch.empty_like(block.flat) for block in adapter.blocks]
    for name, view in adapter.held_views(flats).items():
        view.copy_(adapter.take_own(name, tensors[name]))
    return flats


def _peft_config(adapter: Adapter, base: BaseModel) -> Mapping[str, Any]:
    linear = [target.name for target in adapter.targets if not target.experts]
    experts = [".".join(target.name.split(".")[-3:]) for target in adapter.targets if target.experts]
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base.settings.public_name or base.info().name,
        "r": adapter.config.rank,
        "lora_alpha": adapter.config.alpha,
        "lora_dropout": 0.0,
        "bias": "none",
        "target_modules": _target_modules(base.all_stages, linear),
        "target_parameters": list(dict.fromkeys(experts)) or None,
        "inference_mode": True,
    }


def _target_modules(lm: nn.Module, targets: Sequence[str]) -> list[str]:
    """The shortest suffixes of names by which PEFT finds these layers and no others."""
    others = {name for name, module in lm.named_modules() if linear_shape(module) is not None} - set(targets)
    suffixes = set()
    for target in targets:
        parts = target.split(".")
        candidates = [".".join(parts[-length:]) for length in range(1, len(parts) + 1)]
        suffixes.add(
            next(suffix for suffix in candidates if not any(f".{name}".endswith(f".{suffix}") for name in others))
        )
    return sorted(suffixes)


def to_peft(views: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return _cpu_copies({_peft_name(name): _stack_experts(name, view) for name, view in views.items()})


def _from_peft(saved: Mapping[str, torch.Tensor], adapter: Adapter) -> dict[str, torch.Tensor]:
    names = {_peft_name(name): name for name in adapter.shapes}
    tensors = {}
    for peft_name, tensor in saved.items():
        name = names.get(peft_name, peft_name)
        shape = adapter.shapes.get(name, ())
        tensors[name] = _unstack_experts(name, tensor, shape) if len(shape) == 3 else tensor
    return tensors


def _peft_name(name: str) -> str:
    """`layer.lora_A` is `layer.lora_A.weight` in PEFT."""
    target, _, part = name.rpartition(".")
    return f"{PREFIX}{peft_layer(target)}.{part}.weight"


def _stack_experts(name: str, view: torch.Tensor) -> torch.Tensor:
    """PEFT stores the matrices of all experts as one: A stacked by rows, B with the expert as the fastest index."""
    if view.ndim == 2:
        return view
    if name.endswith("lora_A"):
        return view.reshape(-1, view.shape[-1])
    return view.permute(1, 2, 0).reshape(view.shape[1], -1)


def _unstack_experts(name: str, tensor: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
    experts, rows, columns = shape
    if tensor.numel() != experts * rows * columns:
        return tensor
    if name.endswith("lora_A"):
        return tensor.reshape(shape)
    return tensor.reshape(rows, columns, experts).permute(2, 0, 1)


def _cpu_copies(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Copies, because safetensors rejects two names for the same memory."""
    return {name: tensor.detach().to("cpu", copy=True).contiguous() for name, tensor in tensors.items()}


def own_state(model: FullModel) -> dict[str, torch.Tensor]:
    """Returns what this rank writes: of each weight one copy is written, however many there are."""
    own = {name for name in model.parameters if model.has_first_copy(name)}
    return dict(_state_of(model, own, optimizer=True))


def full_state(model: FullModel, *, optimizer: bool) -> dict[str, DTensor]:
    """Weights and moments under their names in the files, sharded over the ranks, without a copy."""
    return dict(_state_of(model, model.parameters.keys(), optimizer=optimizer))


def _state_of(model: FullModel, names: Set[str], *, optimizer: bool) -> Iterator[tuple[str, DTensor]]:
    for (name, parameter), own in zip(model.parameters.items(), model.optimizer.moments(), strict=True):
        if name in names:
            yield name, sharded_like(parameter, local(parameter))
            for moment, value in own.items() if optimizer else ():
                yield f"{moment}.{name}", sharded_like(parameter, value)


def gather_weights_of(
    names: Sequence[str], model: FullModel, base: BaseModel, ranks: RankGroup
) -> Iterator[tuple[str, torch.Tensor]]:
    """Gather some weights from all ranks, one after the other. Every rank calls it; rank 0 gets them on the host."""
    for name in names:
        parameter = model.parameters.get(name)
        full = None if parameter is None else parameter.full_tensor().detach()
        if not base.mesh.stage.is_only:
            full = ranks.send_to_rank0(full, base.all_stages.get_parameter(name))
        if ranks.is_rank0:
            assert full is not None
            yield name, full.cpu()


def write_config(base: BaseModel, folder: Path) -> None:
    """Config and tokenizer: with them, the shards can be exported as a model without the base."""
    base.lm.config.save_pretrained(str(folder))
    copy_tokenizer(base.settings.model, folder)


def copy_tokenizer(model: str, folder: Path) -> None:
    for file in tokenizer_files(model):
        shutil.copyfile(file, folder / file.name)


def read_full(folder: Path, model: FullModel, base: BaseModel, *, optimizer: bool, steps: int) -> Callable[[], None]:
    """Reads from shards, or without the optimizer from a folder in Hugging Face's format."""
    moments: list[dict[str, torch.Tensor]] = []
    if shards.has_shards(folder):
        state = shards.empty_like(full_state(model, optimizer=optimizer and steps > 0))
        shards.fill(folder, state)
        weights = [local(state[name]) for name in model.parameters]
        if optimizer and steps:
            names = model.optimizer.moment_names
            moments = [{moment: local(state[f"{moment}.{name}"]) for moment in names} for name in model.parameters]
    elif optimizer:
        raise StrataError(Code.INVALID, f"{folder.name!r} holds no optimizer state")
    else:
        weights = read_own_shards(str(folder), model.parameters, base)

    def install() -> None:
        install_weights(weights, model)
        model.optimizer.restore(moments, steps if optimizer else 0)

    return install


def read_own_shards(path: str, parameters: Mapping[str, DTensor], base: BaseModel) -> list[torch.Tensor]:
    """This rank's shard of every weight of a full model in Hugging Face's format."""
    like = next(iter(parameters.values()))
    shards_of_weight = mesh_size(like, "shard")

    def distribute(lm: PreTrainedModel) -> None:
        own: dict[int, nn.Parameter] = {}
        for name, weight in list(lm.named_parameters(remove_duplicate=False)):
            if id(weight) not in own:
                if name not in parameters or weight.shape != parameters[name].shape:
                    raise StrataError(Code.INVALID, f"{name} in the checkpoint does not fit the model")
                shard = sharded_like(parameters[name], own_slice(weight.detach(), parameters[name]))
                own[id(weight)] = nn.Parameter(shard, requires_grad=False)
            module, last = parent_of(lm, name)
            setattr(module, last, own[id(weight)])

    lm = load_sharded(path, torch.float32, local(like).device, RankPart(distribute, shards_of_weight, base.cut))
    saved = dict(lm.named_parameters())
    if saved.keys() != parameters.keys():
        difference = sorted(saved.keys() ^ parameters.keys())[0]
        raise StrataError(Code.INVALID, f"{difference} in the checkpoint does not fit the model")
    return [local(saved[name]).to(local(like).device) for name in parameters]


def install_weights(weights: list[torch.Tensor], model: FullModel) -> None:
    model.abort()
    for parameter, weight in zip(model.optimizer.parameters, weights, strict=True):
        parameter.data.copy_(weight)
