"""What the models look like in files: adapters as PEFT reads them, whole models as Hugging Face does or in shards.

The moments of an optimizer have the names of the weights they belong to. All are safetensors.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import msgspec
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from torch.distributed.tensor import DTensor, distribute_tensor

from strata.base.errors import Code, StrataError
from strata.train.checkpoints.checkpoint import Manifest
from strata.train.core.ops import LoraConfig
from strata.train.core.state import IMPORTED
from strata.train.peft.layers import ADAPTER, ADAPTER_CONFIG, PREFIX, peft_layer
from strata.train.runner.checkpoint import shards
from strata.train.runner.lora.adapter import Adapter, sides_of
from strata.train.runner.model.base import BaseModel, read, tokenizer_files
from strata.train.runner.model.trained import FullModel, LoraModel, local, sharded, sharded_like
from strata.train.runner.passes.logprobs import PackedModel
from strata.train.runner.passes.optimizer import MOMENTS

OPTIMIZER: Final = "optimizer.safetensors"

Fill = Callable[[Path], None]


def adapter_writer(model: LoraModel, base: BaseModel, *, optimizer: bool) -> Fill:
    """On one rank alone: all have the same."""

    def fill(folder: Path) -> None:
        adapter = model.adapter
        save_file(to_peft(adapter.views(adapter.flat)), folder / ADAPTER, {"format": "pt"})
        config = msgspec.json.encode(_peft_config(adapter, base))
        (folder / ADAPTER_CONFIG).write_bytes(msgspec.json.format(config))
        if optimizer:
            moments = model.optimizer.moments()[0]
            kept = {f"{part}.{name}": view for part in MOMENTS for name, view in adapter.views(moments[part]).items()}
            save_file(_plain(kept), folder / OPTIMIZER)

    return fill


def read_adapter(folder: Path, model: LoraModel, manifest: Manifest, *, optimizer: bool) -> Callable[[], None]:
    """Read and check everything; what is returned puts it in place and cannot fail."""
    adapter, steps = model.adapter, manifest.steps
    weights = read_flat(folder, adapter, manifest)
    moments: dict[str, torch.Tensor] = {}
    if optimizer and steps:
        kept = load_file(folder / OPTIMIZER)
        for part in MOMENTS:
            own = {name.removeprefix(f"{part}."): value for name, value in kept.items() if name.startswith(f"{part}.")}
            moments[part] = _flat(adapter, own)

    def put() -> None:
        adapter.flat.copy_(weights)
        adapter.gradient = None
        model.optimizer.restore([moments], steps if optimizer else 0)

    return put


def read_flat(folder: Path, adapter: Adapter, manifest: Manifest) -> torch.Tensor:
    """The weights as one block. Layers that an adapter from elsewhere lacks are as in a new model, and add nothing yet.

    What was saved here lacks none, and nobody who trains other kinds of layers is given some of them.
    """
    parts = _from_peft(load_file(folder / ADAPTER), adapter)
    imported = manifest.model_id.startswith(IMPORTED) and _kinds(manifest.lora) == _kinds(adapter.config)
    if imported and parts.keys() < adapter.shapes.keys():
        new = torch.empty(adapter.size, dtype=torch.float32)
        adapter.fill_new(new, manifest.digest)
        parts = {**adapter.views(new), **parts}
    return _flat(adapter, parts)


def _kinds(lora: LoraConfig | None) -> tuple[bool, ...]:
    return () if lora is None else (lora.train_attn, lora.train_mlp, lora.train_unembed)


def whole_parameters(folder: Path, packed: PackedModel) -> dict[str, torch.Tensor]:
    """A saved model's weights, sharded as the live ones are."""
    live = dict(sharded(packed))
    if shards.has_shards(folder):
        state = shards.empty_like({name: parameter.detach() for name, parameter in live.items()})
        shards.fill(folder, state)
        return state
    parts = _own_parts(str(folder), live)
    return {name: sharded_like(parameter, part) for (name, parameter), part in zip(live.items(), parts, strict=True)}


def _flat(adapter: Adapter, parts: Mapping[str, torch.Tensor]) -> torch.Tensor:
    # Filled to the last place below, or not used.
    flat = torch.empty_like(adapter.flat)
    views = adapter.views(flat)
    if parts.keys() != views.keys():
        strange = sorted(parts.keys() ^ views.keys())[0]
        raise StrataError(Code.INVALID, f"the checkpoint does not train what the model trains: {strange}")
    for name, view in views.items():
        if parts[name].shape != view.shape:
            raise StrataError(
                Code.INVALID,
                f"{name} is {tuple(parts[name].shape)} in the checkpoint, {tuple(view.shape)} in the model",
            )
        view.copy_(parts[name])
    return flat


def _peft_config(adapter: Adapter, base: BaseModel) -> Mapping[str, Any]:
    linear = [name for name, (a, _) in adapter.pairs.items() if a.ndim == 2]
    experts = [".".join(name.split(".")[-3:]) for name, (a, _) in adapter.pairs.items() if a.ndim == 3]
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base.settings.public_name or base.info().name,
        "r": adapter.config.rank,
        "lora_alpha": adapter.config.alpha,
        "lora_dropout": 0.0,
        "bias": "none",
        "target_modules": _target_modules(base.lm, linear),
        "target_parameters": list(dict.fromkeys(experts)) or None,
        "inference_mode": True,
    }


def _target_modules(lm: nn.Module, targets: Sequence[str]) -> list[str]:
    """Endings of names by which PEFT finds these layers and no others: as short as they can be."""
    others = {name for name, module in lm.named_modules() if sides_of(module) is not None} - set(targets)
    endings = set()
    for target in targets:
        parts = target.split(".")
        candidates = [".".join(parts[-length:]) for length in range(1, len(parts) + 1)]
        endings.add(next(one for one in candidates if not any(f".{name}".endswith(f".{one}") for name in others)))
    return sorted(endings)


def to_peft(views: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return _plain({_peft_name(name): _stacked(name, view) for name, view in views.items()})


def _from_peft(found: Mapping[str, torch.Tensor], adapter: Adapter) -> dict[str, torch.Tensor]:
    own = {_peft_name(name): name for name in adapter.shapes}
    parts = {}
    for there, tensor in found.items():
        name = own.get(there, there)
        shape = adapter.shapes.get(name, ())
        parts[name] = _unstacked(name, tensor, shape) if len(shape) == 3 else tensor
    return parts


def _peft_name(name: str) -> str:
    """`layer.lora_A` is `layer.lora_A.weight` there."""
    target, _, part = name.rpartition(".")
    return f"{PREFIX}{peft_layer(target)}.{part}.weight"


def _stacked(name: str, view: torch.Tensor) -> torch.Tensor:
    """PEFT has the matrices of all experts in one: A one below the other, B with the expert as the fastest index."""
    if view.ndim == 2:
        return view
    if name.endswith("lora_A"):
        return view.reshape(-1, view.shape[-1])
    return view.permute(1, 2, 0).reshape(view.shape[1], -1)


def _unstacked(name: str, tensor: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
    experts, rows, columns = shape
    if tensor.numel() != experts * rows * columns:
        return tensor
    if name.endswith("lora_A"):
        return tensor.reshape(shape)
    return tensor.reshape(rows, columns, experts).permute(2, 0, 1)


def _plain(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Safetensors takes no two names for one memory."""
    return {name: tensor.detach().to("cpu", copy=True).contiguous() for name, tensor in tensors.items()}


def whole_state(model: FullModel, *, optimizer: bool) -> dict[str, torch.Tensor]:
    """Weights and moments under the names of the files, sharded over the ranks, in the memory they live in."""
    state: dict[str, torch.Tensor] = {}
    for (name, parameter), own in zip(model.parameters.items(), model.optimizer.moments(), strict=True):
        state[name] = parameter.detach()
        state |= {f"{part}.{name}": sharded_like(parameter, own[part]) for part in MOMENTS if optimizer}
    return state


def gather_whole(model: FullModel, *, first: bool) -> dict[str, torch.Tensor]:
    """The weights, put together from all ranks. Every rank calls it; rank 0 gets them."""
    found: dict[str, torch.Tensor] = {}
    for name, parameter in model.parameters.items():
        whole = parameter.full_tensor().detach().cpu()
        if first:
            found[name] = whole
    return found


def whole_writer(base: BaseModel, found: dict[str, torch.Tensor]) -> Fill:
    def fill(folder: Path) -> None:
        base.lm.save_pretrained(str(folder), state_dict=found)
        copy_tokenizer(base.settings.model, folder)

    return fill


def write_words(base: BaseModel, folder: Path) -> None:
    """What is no number: with it, the shards can be made a model of without the base."""
    base.lm.config.save_pretrained(str(folder))
    copy_tokenizer(base.settings.model, folder)


def copy_tokenizer(model: str, folder: Path) -> None:
    for file in tokenizer_files(model):
        shutil.copyfile(file, folder / file.name)


def read_whole(folder: Path, model: FullModel, *, optimizer: bool, steps: int) -> Callable[[], None]:
    """From shards, or without the optimizer from a folder that Hugging Face reads too."""
    moments: list[dict[str, torch.Tensor]] = []
    if shards.has_shards(folder):
        state = shards.empty_like(whole_state(model, optimizer=optimizer and steps > 0))
        shards.fill(folder, state)
        found = [local(state[name]) for name in model.parameters]
        if optimizer and steps:
            moments = [{part: local(state[f"{part}.{name}"]) for part in MOMENTS} for name in model.parameters]
    elif optimizer:
        raise StrataError(Code.INVALID, f"{folder.name!r} holds no state of an optimizer")
    else:
        found = whole_weights(str(folder), model)

    def put() -> None:
        put_whole(found, model)
        model.optimizer.restore(moments, steps if optimizer else 0)

    return put


def whole_weights(path: str, model: FullModel) -> list[torch.Tensor]:
    """This rank's part of every weight in a folder of a whole model."""
    return _own_parts(path, model.parameters)


def _own_parts(path: str, parameters: Mapping[str, DTensor]) -> list[torch.Tensor]:
    found = dict(read(path, torch.float32).named_parameters())
    parts = []
    for name, parameter in parameters.items():
        if name not in found or found[name].shape != parameter.shape:
            raise StrataError(Code.INVALID, f"{name} in the checkpoint is not that of the model")
        parts.append(_own_part(found[name].detach(), parameter))
    return parts


def put_whole(weights: list[torch.Tensor], model: FullModel) -> None:
    model.abort()
    for own, weight in zip(model.optimizer.parameters, weights, strict=True):
        own.data.copy_(weight)


def _own_part(whole: torch.Tensor, parameter: DTensor) -> torch.Tensor:
    """Without communication: every rank has read the whole."""
    device = parameter.to_local().device
    made = distribute_tensor(whole.to(device), parameter.device_mesh, parameter.placements, src_data_rank=None)
    return made.to_local().clone()
