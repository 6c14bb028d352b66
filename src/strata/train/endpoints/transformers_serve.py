"""`transformers serve`, which takes the folder of a model for its name.

It loads whatever folder a request names, and keeps it until nobody has asked for it for a while; it has no word for an
adapter beside a base, and none for letting go of one model. So a version is a folder of its own, of links: a whole
model, or the base with the adapter in the same folder, which is a form that transformers reads. Once such a folder is
there, an engine that was started anew has it again. It answers in text without log probabilities, so it is never asked
for samples here.
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
from strata.train.core.sampling import Sample
from strata.train.endpoints.client import EngineClient, refuse
from strata.train.endpoints.engine import Version
from strata.train.settings import Inference

LIST_S: Final = 10.0
ADAPTER_CONFIG: Final = "adapter_config.json"
_OF_BASE: Final = frozenset({".json", ".safetensors", ".model", ".txt", ".jinja"})
"""Configuration, weights and tokenizer. What has to be unpickled is left behind."""


class _Progress(msgspec.Struct):
    status: str = ""
    message: str = ""


class TransformersEngine:
    def __init__(self, client: EngineClient, settings: Inference, published: Path, base: Path) -> None:
        self._client = client
        self._push_s = settings.push_timeout_s
        self._published = published
        self._base = base

    async def close(self) -> None:
        await self._client.close()

    async def versions(self) -> Sequence[str]:
        reply = await self._client.get("/health", timeout_s=LIST_S)
        if reply.status != 200:
            raise refuse(reply, "health")
        return await asyncio.to_thread(lambda: sorted(_names(self._published)))

    async def take(self, version: Version) -> None:
        """Loaded now, so that whoever asks first does not wait for it and what is wrong is found here."""
        await asyncio.to_thread(version.check)
        folder = await asyncio.to_thread(publish, self._published, version, self._base)
        reply = await self._client.post("/load_model", {"model": str(folder)}, timeout_s=self._push_s)
        last = _Progress()
        for line in reply.content.splitlines():
            if line.startswith(b"data: "):
                last = reply._replace(content=line.removeprefix(b"data: ")).read(_Progress)
        if reply.status != 200 or last.status != "ready":
            raise refuse(reply._replace(content=last.message.encode() or reply.content), "load_model")

    async def drop(self, name: str) -> None:
        """Nobody can ask for it any more. The engine forgets it when nobody has for `--model-timeout` seconds."""
        if name in await asyncio.to_thread(lambda: list(_names(self._published))):
            await asyncio.to_thread(shutil.rmtree, self._published / name)

    async def sample(self, version: Version, sample: Sample, seed: int) -> NoReturn:
        del version, sample, seed
        raise StrataError(Code.UNSUPPORTED, "transformers serve gives no log probabilities")


def _names(published: Path) -> Iterator[str]:
    if published.is_dir():
        yield from (each.name for each in published.iterdir() if not each.name.startswith("."))


def publish(published: Path, version: Version, base: Path) -> Path:
    """A folder by the version's name, which appears whole."""
    folder = published / version.name
    if folder.is_dir():
        return folder
    part = published / f".{version.name}.{secrets.token_hex(4)}"
    part.mkdir(parents=True, mode=0o700)
    try:
        for file in version.folder.iterdir():
            if version.whole or file.name.endswith(".safetensors"):
                (part / file.name).symlink_to(file)
        if not version.whole:
            _complete(part, version, base)
        part.rename(folder)
    except OSError:
        # Another push of the same version may have been faster.
        if not folder.is_dir():
            raise
    finally:
        shutil.rmtree(part, ignore_errors=True)
    return folder


def _complete(part: Path, version: Version, base: Path) -> None:
    if not (base / "config.json").is_file():
        raise StrataError(
            Code.UNSUPPORTED, "transformers serve can be told of an adapter only if the base is a local folder"
        )
    config: dict[str, Any] = msgspec.json.decode((version.folder / ADAPTER_CONFIG).read_bytes())
    # The engine need not have been started in the folder that the path is relative to.
    config["base_model_name_or_path"] = str(base)
    (part / ADAPTER_CONFIG).write_bytes(msgspec.json.encode(config))
    for file in base.iterdir():
        if file.suffix in _OF_BASE and file.is_file() and not (part / file.name).exists():
            (part / file.name).symlink_to(file)
