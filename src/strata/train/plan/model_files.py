"""Reads the headers of safetensors files and `config.json`: shapes of the weights, without loading them."""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import msgspec

from strata.base.errors import Code, StrataError
from strata.train.hugging_face import CONFIG, WEIGHTS, find_folder

HEAD: Final = "lm_head.weight"
_MAX_HEADER: Final = 100 << 20


class WeightIndex(msgspec.Struct, frozen=True):
    weight_map: dict[str, str]
    """The file of each weight."""


class ModelFiles(msgspec.Struct, frozen=True):
    """What the headers of a model's files say."""

    shapes: Mapping[str, tuple[int, ...]]
    config: Mapping[str, Any]


def read_model_files(folder: Path) -> ModelFiles:
    shapes, config = dict(_weight_shapes(folder)), read_config(folder)
    if config.get("tie_word_embeddings") and list(shapes.values()).count(shapes.get(HEAD, ())) > 1:
        # Some files have a copy of the embeddings as the head; in memory they are one.
        del shapes[HEAD]
    return ModelFiles(shapes, config)


def find_model_files(model: str) -> ModelFiles | None:
    """Those of a folder, or of an id in the local cache; None if it is not here, or has no weights."""
    folder = find_folder(model)
    files = None if folder is None or not (folder / CONFIG).is_file() else read_model_files(folder)
    return files if files is not None and files.shapes else None


def read_config(folder: Path) -> dict[str, Any]:
    try:
        return msgspec.json.decode((folder / CONFIG).read_bytes(), type=dict[str, Any])
    except (OSError, msgspec.MsgspecError) as error:
        raise StrataError(Code.INVALID, f"{folder / CONFIG} cannot be read: {error}") from None


def _weight_shapes(folder: Path) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Name and shape of every tensor in the folder's safetensors files: their headers are JSON."""
    index = folder / "model.safetensors.index.json"
    # A folder may have the same weights in another format beside them.
    named = msgspec.json.decode(index.read_bytes(), type=WeightIndex).weight_map.values() if index.is_file() else None
    for file in sorted(folder.glob(WEIGHTS)):
        if named is not None and file.name not in named:
            continue
        with file.open("rb") as opened:
            (size,) = struct.unpack("<Q", opened.read(8))
            if size > _MAX_HEADER:
                raise StrataError(Code.CORRUPT, f"{file} is not a file of weights")
            try:
                header: dict[str, dict[str, Any]] = msgspec.json.decode(
                    opened.read(size), type=dict[str, dict[str, Any]]
                )
            except msgspec.MsgspecError as error:
                raise StrataError(Code.CORRUPT, f"{file} is not a file of weights: {error}") from error
        for name, entry in header.items():
            if name != "__metadata__":
                yield name, tuple(entry["shape"])
