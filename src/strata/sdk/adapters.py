"""Bring an adapter that was made elsewhere to a training server."""

from __future__ import annotations

import io
import tarfile
from pathlib import Path
from typing import Final

import msgspec

from strata.base.errors import Code, StrataError
from strata.fleet.client import HubClient

FILES: Final = ("adapter_config.json", "adapter_model.safetensors")
PICKLED: Final = "adapter_model.bin"


class _Query(msgspec.Struct, frozen=True):
    name: str


class _Imported(msgspec.Struct, frozen=True):
    path: str


def import_adapter(client: HubClient, folder: Path, name: str) -> str:
    """The path of the checkpoint that the server makes of the folder, which PEFT saved. Repeating it is safe."""
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w") as archive:
        for file in FILES:
            try:
                archive.add(folder / file, file)
            except OSError as error:
                pickled = (folder / PICKLED).exists() and not (folder / FILES[1]).exists()
                raise StrataError(
                    Code.NOT_FOUND,
                    f"cannot read {folder / file}: {error.strerror}",
                    hint="pickled weights are never read: save it with safe_serialization=True" if pickled else None,
                ) from error
    reply = client.request(
        "POST", "/api/v1/import_weights", packed.getvalue(), "application/x-tar", _Query(name), timeout_s=None
    )
    return msgspec.json.decode(reply.content, type=_Imported).path
