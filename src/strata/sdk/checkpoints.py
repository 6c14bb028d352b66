"""Files of a training server over HTTP: download, list, delete and import of checkpoints and adapters, and the
tokenizer.
"""

from __future__ import annotations

import io
import tarfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Final
from urllib.parse import quote, urlsplit

import msgspec

from strata.base.atomic import new_folder
from strata.base.errors import Code, StrataError
from strata.base.progress import ReportProgress, no_progress
from strata.fleet.client.hub_client import HubClient
from strata.train.peft.layers import ADAPTER_CONFIG, TOKENIZER_FILES
from strata.train.wire.replies import CheckpointReply, CheckpointsReply

SCHEME: Final = "tinker://"
KINDS: Final = ("weights", "sampler_weights")
ADAPTER_FILES: Final = (ADAPTER_CONFIG, "adapter_model.safetensors")
PICKLED: Final = "adapter_model.bin"


class _Urls(msgspec.Struct, frozen=True):
    urls: Mapping[str, str]


class _Supported(msgspec.Struct, frozen=True):
    model_name: str


class _ImportQuery(msgspec.Struct, frozen=True):
    name: str


class _Page(msgspec.Struct, frozen=True):
    offset: int
    limit: int = 1000


class _Imported(msgspec.Struct, frozen=True):
    path: str


class _Capabilities(msgspec.Struct, frozen=True):
    supported_models: list[_Supported]


def fetch_checkpoint(client: HubClient, path: str, folder: Path, report: ReportProgress = no_progress) -> None:
    """The files of `tinker://RUN/weights/NAME` into a folder that is there: PEFT's form, or Hugging Face's.

    Progress is reported in bytes of each file.
    """
    urls = client.call("GET", f"{_route(path)}/external_weights_urls", _Urls).urls
    for name, url in urls.items():
        if not name or name in (".", "..") or "/" in name or "\\" in name:
            raise StrataError(Code.INVALID, f"the server names a file {name[:200]!r}")
        there = urlsplit(url)
        # Only the path and the query of the URL: the server is where the client reached it, whatever Host it has seen.
        with (folder / name).open("xb") as file:
            client.download(f"{there.path}?{there.query}", file, report)


def delete_checkpoint(client: HubClient, path: str) -> None:
    client.request("DELETE", _route(path), None, "", None, None)


def served_models(client: HubClient) -> list[str]:
    """The names of the base models that a server trains."""
    reply = client.call("GET", "/api/v1/get_server_capabilities", _Capabilities)
    return [each.model_name for each in reply.supported_models]


def fetch_tokenizer(client: HubClient, out: Path) -> list[str]:
    """The tokenizer of the server's model as a new folder, which transformers loads; the names of its files."""
    if out.exists():
        raise StrataError(Code.CONFLICT, f"{out} is there already", hint="give the name of a new folder")
    model = served_models(client)[0]
    files: dict[str, bytes] = {}
    for name in TOKENIZER_FILES:
        try:
            files[name] = client.fetch(f"/hf/{quote(model)}/resolve/main/{name}").content
        except StrataError as error:
            if error.code is not Code.NOT_FOUND:
                raise
    if not files.keys() - {"config.json"}:
        raise StrataError(
            Code.NOT_FOUND,
            "the server has no files of a tokenizer",
            hint="load the tokenizer by the model's id",
        )

    def fill(part: Path) -> None:
        for name, content in files.items():
            (part / name).write_bytes(content)

    _make(out, fill)
    return [*files]


def fetch_adapter(client: HubClient, path: str, out: Path, report: ReportProgress = no_progress) -> None:
    """A checkpoint as a new folder in PEFT's form."""
    if out.exists():
        raise StrataError(Code.CONFLICT, f"{out} is there already", hint="give the name of a new folder")

    def fill(part: Path) -> None:
        fetch_checkpoint(client, path, part, report)
        if not (part / ADAPTER_CONFIG).exists():
            raise StrataError(Code.INVALID, f"{path} is a full fine-tune, no adapter", hint="use --format hf")

    _make(out, fill)


def list_checkpoints(client: HubClient) -> Iterator[CheckpointReply]:
    """The caller's checkpoints, the newest first, with what they were trained with."""
    offset = 0
    while page := client.call("GET", "/api/v1/checkpoints", CheckpointsReply, query=_Page(offset)).checkpoints:
        yield from page
        offset += len(page)


def import_adapter(client: HubClient, folder: Path, name: str) -> str:
    """The path of the checkpoint that the server makes of the folder, which PEFT saved. Repeating it is safe."""
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w") as archive:
        for file in ADAPTER_FILES:
            try:
                archive.add(folder / file, file)
            except OSError as error:
                pickled = (folder / PICKLED).exists() and not (folder / ADAPTER_FILES[1]).exists()
                raise StrataError(
                    Code.NOT_FOUND,
                    f"cannot read {folder / file}: {error.strerror}",
                    hint="pickled weights are never read: save it with safe_serialization=True" if pickled else None,
                ) from error
    reply = client.request(
        "POST", "/api/v1/import_weights", packed.getvalue(), "application/x-tar", _ImportQuery(name), timeout_s=None
    )
    return msgspec.json.decode(reply.content, type=_Imported).path


def _make(out: Path, fill: Callable[[Path], None]) -> None:
    out.absolute().parent.mkdir(parents=True, exist_ok=True)
    with new_folder(out, temporary=out.absolute().with_name(f".{out.name}.part"), durable=False) as part:
        fill(part)


def _route(path: str) -> str:
    """Returns the route of `tinker://RUN/weights/NAME` at the server."""
    parts = path.removeprefix(SCHEME).split("/")
    if not path.startswith(SCHEME) or len(parts) != 3 or parts[1] not in KINDS or not all(parts):
        raise StrataError(Code.INVALID, f"{path!r} is no path of a checkpoint", hint="tinker://RUN/weights/NAME")
    run_id, kind, name = parts
    return f"/api/v1/training_runs/{quote(run_id)}/checkpoints/{kind}/{quote(name)}"
