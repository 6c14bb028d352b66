"""Adapter for the engine `transformers serve`: a version is a folder of links; loads, lists, and refuses what it cannot
do.

It loads any folder that a request names, and unloads it after an idle timeout; it has no API for an adapter on a base,
and none to unload one model. So a version is a folder of its own, of symbolic links: a full model, or the base with the
adapter in the same folder, which transformers can load. Such a folder survives a restart of the engine. The engine
replies with text without log probabilities, so samples are never routed to it.
"""

from __future__ import annotations

import asyncio
import secrets
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final, NoReturn

import msgspec

from strata.base.errors import Code, StrataError
from strata.train.core.sampling import SampleOperation
from strata.train.endpoints.client import EngineClient, engine_error
from strata.train.endpoints.engine import ModelVersion, ReportPart
from strata.train.inference_settings import InferenceSettings

LIST_S: Final = 10.0
ADAPTER_CONFIG: Final = "adapter_config.json"
_BASE_SUFFIXES: Final = frozenset({".json", ".safetensors", ".model", ".txt", ".jinja"})
"""Configuration, weights and tokenizer. Pickled files are left out."""


class _Progress(msgspec.Struct):
    status: str = ""
    message: str = ""


class TransformersEngine:
    def __init__(self, client: EngineClient, settings: InferenceSettings, published: Path, base: Path) -> None:
        self._client = client
        self._push_s = settings.push_timeout_s
        self._published = published
        self._base = base

    async def close(self) -> None:
        await self._client.close()

    async def versions(self) -> Sequence[str]:
        reply = await self._client.get("/health", timeout_s=LIST_S)
        if reply.status != 200:
            raise engine_error(reply, "health")
        return await asyncio.to_thread(lambda: sorted(_names(self._published)))

    async def load_version(self, version: ModelVersion) -> None:
        """Load it now, so that the first client does not wait for it and errors show here."""
        await asyncio.to_thread(version.check)
        folder = await asyncio.to_thread(link_version, self._published, version, self._base)
        reply = await self._client.post("/load_model", {"model": str(folder)}, timeout_s=self._push_s)
        progress = _Progress()
        for line in reply.content.splitlines():
            if line.startswith(b"data: "):
                progress = reply._replace(content=line.removeprefix(b"data: ")).read(_Progress)
        if reply.status != 200 or progress.status != "ready":
            raise engine_error(reply._replace(content=progress.message.encode() or reply.content), "load_model")

    async def unload_version(self, name: str) -> None:
        """Remove the folder: no request can name it any more. The engine unloads it after its `--model-timeout`."""
        if name in await asyncio.to_thread(lambda: list(_names(self._published))):
            await asyncio.to_thread(shutil.rmtree, self._published / name)

    async def sample(self, version: ModelVersion, sample: SampleOperation, seed: int, report: ReportPart) -> NoReturn:
        del version, sample, seed, report
        raise StrataError(Code.UNSUPPORTED, "transformers serve gives no log probabilities")


def _names(published: Path) -> Iterator[str]:
    if published.is_dir():
        yield from (entry.name for entry in published.iterdir() if not entry.name.startswith("."))


def link_version(published: Path, version: ModelVersion, base: Path) -> Path:
    """Create the folder of a version, atomically."""
    folder = published / version.name
    if folder.is_dir():
        return folder
    part = published / f".{version.name}.{secrets.token_hex(4)}"
    part.mkdir(parents=True, mode=0o700)
    try:
        for file in version.folder.iterdir():
            if version.full or file.name.endswith(".safetensors"):
                (part / file.name).symlink_to(file)
        if not version.full:
            _add_base(part, version, base)
        part.rename(folder)
    except OSError:
        # A concurrent push of the same version may have been faster.
        if not folder.is_dir():
            raise
    finally:
        shutil.rmtree(part, ignore_errors=True)
    return folder


def _add_base(part: Path, version: ModelVersion, base: Path) -> None:
    if not (base / "config.json").is_file():
        raise StrataError(Code.UNSUPPORTED, "transformers serve can load an adapter only if the base is a local folder")
    config: dict[str, Any] = msgspec.json.decode((version.folder / ADAPTER_CONFIG).read_bytes())
    # An absolute path, because the engine may run in another working directory.
    config["base_model_name_or_path"] = str(base)
    (part / ADAPTER_CONFIG).write_bytes(msgspec.json.encode(config))
    for file in base.iterdir():
        if file.suffix in _BASE_SUFFIXES and file.is_file() and not (part / file.name).exists():
            (part / file.name).symlink_to(file)
