"""What the models look like in files: adapters as PEFT reads them, whole models as Hugging Face does.

The moments of the optimizer lie beside, under the names of the weights they belong to. All are safetensors.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import msgspec
import torch
from safetensors.torch import load_file, save_file
from torch.distributed.tensor import DTensor, distribute_tensor

from strata.base.errors import Code, StrataError
from strata.train.runner.lora import Adapter
from strata.train.runner.model import Base, read, tokenizer_files
from strata.train.runner.optimizer import MOMENTS
from strata.train.runner.packed import PackedModel
from strata.train.runner.trained import AdapterModel, WholeModel, sharded

ADAPTER: Final = "adapter_model.safetensors"
ADAPTER_CONFIG: Final = "adapter_config.json"
OPTIMIZER: Final = "optimizer.safetensors"
PREFIX: Final = "base_model.model."

Fill = Callable[[Path], None]


def adapter_writer(model: AdapterModel, base: Base, *, optimizer: bool) -> Fill:
    """On one rank alone: all have the same."""

    def fill(folder: Path) -> None:
        adapter = model.adapter
        save_file(to_peft(adapter.views(adapter.flat)), folder / ADAPTER, {"format": "pt"})
        (folder / ADAPTER_CONFIG).write_bytes(msgspec.json.format(msgspec.json.encode(_peft_config(adapter, base))))
        if optimizer:
            moments = model.optimizer.moments()[0]
            kept = {f"{part}.{name}": view for part in MOMENTS for name, view in adapter.views(moments[part]).items()}
            save_file(_plain(kept), folder / OPTIMIZER)

    return fill


def read_adapter(folder: Path, model: AdapterModel, *, optimizer: bool, steps: int) -> Callable[[], None]:
    """Read and check everything; what is returned puts it in place and cannot fail."""
    adapter = model.adapter
    device = adapter.flat.device
    weights = _flat(adapter, _from_peft(load_file(folder / ADAPTER), adapter), device)
    moments: dict[str, torch.Tensor] = {}
    if optimizer:
        kept = load_file(folder / OPTIMIZER)
        for part in MOMENTS:
            own = {name.removeprefix(f"{part}."): value for name, value in kept.items() if name.startswith(f"{part}.")}
            moments[part] = _flat(adapter, own, device)

    def put() -> None:
        adapter.flat.copy_(weights)
        adapter.gradient = None
        model.optimizer.restore([moments], steps if optimizer else 0)

    return put


def fill_adapter(folder: Path, adapter: Adapter) -> None:
    adapter.flat.copy_(_flat(adapter, _from_peft(load_file(folder / ADAPTER), adapter), adapter.flat.device))


def whole_parameters(folder: Path, packed: PackedModel) -> dict[str, torch.Tensor]:
    """A saved model's weights, sharded as the live ones are."""
    live = dict(sharded(packed))
    parts = _own_parts(str(folder), live)
    return {name: _like(parameter, part) for (name, parameter), part in zip(live.items(), parts, strict=True)}


def _flat(adapter: Adapter, parts: Mapping[str, torch.Tensor], device: torch.device) -> torch.Tensor:
    flat = torch.zeros(adapter.size, dtype=torch.float32, device=device)
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


def _peft_config(adapter: Adapter, base: Base) -> Mapping[str, Any]:
    modules = {name.rpartition(".")[2] for name, (a, _) in adapter.pairs.items() if a.ndim == 2}
    experts = [".".join(name.split(".")[-3:]) for name, (a, _) in adapter.pairs.items() if a.ndim == 3]
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base.settings.model,
        "r": adapter.config.rank,
        "lora_alpha": adapter.config.alpha,
        "lora_dropout": 0.0,
        "bias": "none",
        "target_modules": sorted(modules),
        "target_parameters": list(dict.fromkeys(experts)) or None,
        "inference_mode": True,
    }


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
    """`layer.lora_A` is `layer.lora_A.weight` there. PEFT wraps a module with two fused weights twice, the first of
    them inside the second."""
    layer, _, part = name.rpartition(".")
    if layer.endswith(".experts.gate_up_proj"):
        layer = layer.removesuffix("gate_up_proj") + "base_layer"
    elif layer.endswith(".experts.down_proj"):
        layer = layer.removesuffix(".down_proj")
    return f"{PREFIX}{layer}.{part}.weight"


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


def gather_whole(model: WholeModel, *, optimizer: bool, first: bool) -> tuple[dict[str, torch.Tensor], ...]:
    """Weights, and moments if asked for, put together from all ranks. Every rank calls it; rank 0 gets them."""
    weights: dict[str, torch.Tensor] = {}
    moments: dict[str, torch.Tensor] = {}
    for (name, parameter), own in zip(model.parameters.items(), model.optimizer.moments(), strict=True):
        for kept, key, tensor in _parts(name, parameter, own, optimizer=optimizer):
            whole = tensor.full_tensor().detach().cpu()
            if first:
                (moments if kept else weights)[key] = whole
    return weights, moments


def _parts(
    name: str, parameter: DTensor, moments: Mapping[str, torch.Tensor], *, optimizer: bool
) -> Iterator[tuple[bool, str, DTensor]]:
    yield False, name, parameter
    for part in MOMENTS if optimizer else ():
        yield True, f"{part}.{name}", _like(parameter, moments[part])


def _like(parameter: DTensor, part: torch.Tensor) -> DTensor:
    mesh, placements = parameter.device_mesh, parameter.placements
    shape, stride = parameter.shape, parameter.stride()
    return DTensor.from_local(part, mesh, placements, run_check=False, shape=shape, stride=stride)


def whole_writer(base: Base, weights: dict[str, torch.Tensor], moments: dict[str, torch.Tensor]) -> Fill:
    def fill(folder: Path) -> None:
        base.lm.save_pretrained(str(folder), state_dict=weights)
        for file in tokenizer_files(base.settings.model):
            shutil.copy(file, folder)
        if moments:
            save_file(_plain(moments), folder / OPTIMIZER)

    return fill


def read_whole(folder: Path, model: WholeModel, *, optimizer: bool, steps: int) -> Callable[[], None]:
    weights = whole_weights(str(folder), model)
    kept = load_file(folder / OPTIMIZER) if optimizer else {}
    moments = []
    for name, parameter in model.parameters.items() if optimizer else ():
        own = {}
        for part in MOMENTS:
            found = kept.get(f"{part}.{name}")
            if found is None or found.shape != parameter.shape:
                raise StrataError(Code.INVALID, f"the moments of {name} in the checkpoint are not those of the model")
            own[part] = _own_part(found, parameter)
        moments.append(own)

    def put() -> None:
        put_whole(weights, model)
        model.optimizer.restore(moments, steps if optimizer else 0)

    return put


def whole_weights(path: str, model: WholeModel) -> list[torch.Tensor]:
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


def put_whole(weights: list[torch.Tensor], model: WholeModel) -> None:
    model.abort()
    for own, weight in zip(model.optimizer.parameters, weights, strict=True):
        own.data.copy_(weight)


def _own_part(whole: torch.Tensor, parameter: DTensor) -> torch.Tensor:
    """Without communication: every rank has read the whole."""
    device = parameter.to_local().device
    made = distribute_tensor(whole.to(device), parameter.device_mesh, parameter.placements, src_data_rank=None)
    return made.to_local().clone()
