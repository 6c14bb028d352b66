"""Routes that serve the base model's tokenizer files at the addresses of a Hugging Face Hub (`HF_ENDPOINT`).

`HF_ENDPOINT=http://HOST:5555/hf` and `HF_TOKEN=KEY` are all that transformers, and so the `tinker` SDK, needs. Only
files of the tokenizer are served, by their names, and never weights.
"""

from __future__ import annotations

import asyncio
from functools import lru_cache
from pathlib import Path
from typing import Final, NamedTuple

import msgspec

from strata.base.digest import sha256_hex
from strata.http.problem import ErrorReply, Problem
from strata.http.route import KIB, VIEWER, RawReply, Route
from strata.train.api.context import ApiCall
from strata.train.hugging_face import find_folder
from strata.train.peft.layers import TOKENIZER_FILES

PATH: Final = "/hf/{repository:path}/resolve/{revision}/{file}"
"""What clients of a Hub request."""


class _File(NamedTuple):
    content: bytes
    digest: str


async def file(call: ApiCall) -> RawReply:
    """A file of the tokenizer, as a Hugging Face Hub has it."""
    model = call.context.settings.model
    if call.path["repository"] not in (model.tokenizer_id, *model.base_models):
        return _missing("RepoNotFound", "there is no such model")
    folder = await asyncio.to_thread(find_folder, model.path) or Path(model.path)
    cached = await asyncio.to_thread(_read, folder, call.path["file"])
    if cached is None:
        return _missing("EntryNotFound", "the tokenizer has no such file")
    headers = {"ETag": f'"{cached.digest}"', "X-Repo-Commit": await asyncio.to_thread(_commit, folder)}
    return RawReply(cached.content, media_type="application/octet-stream", headers=headers)


async def file_head(call: ApiCall) -> RawReply:
    """Returns whether there is such a file, and which one."""
    return await file(call)


def _missing(reason: str, message: str) -> RawReply:
    """Replies with the error codes by which clients of a Hub distinguish a missing file from a failure."""
    reply = msgspec.json.encode(ErrorReply(error=Problem(code="NOT_FOUND", message=message)))
    return RawReply(reply, 404, headers={"X-Error-Code": reason})


def _read(folder: Path, name: str) -> _File | None:
    """Names are compared, never used as paths before that."""
    if name not in TOKENIZER_FILES or not (folder / name).is_file():
        return None
    status = (folder / name).stat()
    return _read_as(folder / name, status.st_mtime_ns, status.st_size)


@lru_cache(maxsize=2 * len(TOKENIZER_FILES))
def _read_as(path: Path, modified_ns: int, size: int) -> _File:
    del modified_ns, size
    content = path.read_bytes()
    return _File(content, sha256_hex(content))


def _commit(folder: Path) -> str:
    """Changes with any of the files, as a commit of a repository would."""
    files = (_read(folder, name) for name in TOKENIZER_FILES)
    return sha256_hex("".join(each.digest for each in files if each is not None).encode())[:40]


ROUTES = (
    Route("GET", PATH, VIEWER, file, KIB),
    Route("HEAD", PATH, VIEWER, file_head, KIB),
)
