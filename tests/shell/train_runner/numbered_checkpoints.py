"""Small checkpoints that say which they are: every file of one has its number in it."""

from __future__ import annotations

import json
from pathlib import Path

from strata.base.errors import Code, StrataError
from strata.train.checkpoints import checkpoint


def contents(number: int) -> dict[str, bytes]:
    header = json.dumps({f"t{number}": {"dtype": "U8", "shape": [64], "data_offsets": [0, 64]}}).encode()
    tensors = len(header).to_bytes(8, "little") + header + bytes([number]) * 64
    return {"adapter_model.safetensors": tensors, "adapter_config.json": json.dumps({"r": number}).encode()}


def found(folder: Path) -> int | None:
    """Which checkpoint a reader gets: a whole one, None if there is none, and never anything else."""
    try:
        manifest = checkpoint.read(folder)
    except StrataError as error:
        if error.code is Code.NOT_FOUND:
            return None
        raise
    for name, data in contents(manifest.seq_id).items():
        assert (folder / name).read_bytes() == data, "a mixture"
    return manifest.seq_id


def left_over(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.parent.iterdir() if path != folder)
