"""Writes a Hugging Face model folder in parts: `model.safetensors` files that are full at 64 MiB, their index, and
persistent buffers.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

import msgspec
import torch
from safetensors.torch import save_file
from torch import nn
from transformers import PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion

FILE_BYTES: Final = 64 << 20
"""A file is full when it has so many bytes; a layer is never split."""
WEIGHTS: Final = "model.safetensors"
INDEX: Final = "model.safetensors.index.json"

Tensors = Mapping[str, torch.Tensor]


def groups_of(lm: PreTrainedModel) -> list[list[str]]:
    """The names of the parameters, those of a layer together: the files of a model may store them in another form, and
    no conversion needs weights of two layers."""
    layers = [name for name, module in lm.named_modules() if isinstance(module, nn.ModuleList)]
    groups: dict[str, list[str]] = {}
    for name, _ in lm.named_parameters():
        group = next((_child(layer, name) for layer in layers if name.startswith(f"{layer}.")), name)
        groups.setdefault(group, []).append(name)
    return list(groups.values())


def _child(layers: str, name: str) -> str:
    return f"{layers}.{name.removeprefix(f'{layers}.').partition('.')[0]}"


class ModelWriter:
    """Writes the weights of a model into a folder, and its configuration at the end."""

    def __init__(self, lm: PreTrainedModel, folder: Path) -> None:
        self._lm = lm
        self._folder = folder
        self._pending: dict[str, torch.Tensor] = {}
        self._files: list[list[str]] = []
        self._bytes = 0

    def add(self, group: Tensors) -> None:
        """Weights by their names in the model, on the host."""
        stored: Tensors = revert_weight_conversion(self._lm, dict(group))
        self._pending |= {name: tensor.contiguous() for name, tensor in stored.items()}
        if sum(tensor.nbytes for tensor in self._pending.values()) >= FILE_BYTES:
            self._write()

    def _write(self) -> None:
        # Parts of a fused weight are views of one memory, which safetensors rejects.
        tensors = {name: _apart(tensor) for name, tensor in self._pending.items()}
        save_file(tensors, self._folder / _part(len(self._files)), {"format": "pt"})
        self._files.append(list(tensors))
        self._bytes += sum(tensor.nbytes for tensor in tensors.values())
        self._pending = {}

    def finish(self, dtype: torch.dtype) -> None:
        if self._pending:
            self._write()
        count = len(self._files)
        names = (
            [WEIGHTS] if count == 1 else [f"model-{number + 1:05}-of-{count:05}.safetensors" for number in range(count)]
        )
        for number, name in enumerate(names):
            (self._folder / _part(number)).rename(self._folder / name)
        if count > 1:
            places = {key: name for keys, name in zip(self._files, names, strict=True) for key in keys}
            index = {"metadata": {"total_size": self._bytes}, "weight_map": dict(sorted(places.items()))}
            (self._folder / INDEX).write_bytes(msgspec.json.format(msgspec.json.encode(index)))
        config: Any = self._lm.config
        config.architectures = [type(self._lm).__name__]
        config.dtype = dtype
        config.save_pretrained(str(self._folder))
        generation: Any = getattr(self._lm, "generation_config", None)
        if generation is not None:
            # Some models have one that transformers loads with a warning and refuses to save.
            with suppress(ValueError):
                generation.save_pretrained(str(self._folder))


def persistent_buffers(lm: PreTrainedModel) -> Iterator[tuple[str, torch.Tensor]]:
    """Buffers that belong to the weights, such as the bias of a router."""
    stored = lm.state_dict().keys()
    return ((name, buffer) for name, buffer in lm.named_buffers() if name in stored)


def write_model(lm: PreTrainedModel, folder: Path, groups: Iterable[Tensors], dtype: torch.dtype) -> None:
    writer = ModelWriter(lm, folder)
    for group in groups:
        writer.add(group)
    writer.finish(dtype)


def _part(number: int) -> str:
    return f"part-{number + 1:05}.safetensors"


def _apart(tensor: torch.Tensor) -> torch.Tensor:
    return tensor if tensor.untyped_storage().nbytes() == tensor.nbytes else tensor.clone()
