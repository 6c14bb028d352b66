"""Files of a checkpoint: brought to the disk and digested at the same time, and looked at before they are opened."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Final

import msgspec

from strata.base.atomic import sync_file
from strata.base.digest import file_digest
from strata.base.errors import Code, StrataError
from strata.base.failpoint import failpoint

HEADER_LIMIT: Final = 32 << 20
"""Of a file of tensors: enough for some hundred thousand of them."""
HEADER_KEYS: Final = frozenset({"format", "DCP_SHARDING_INFO", "DCP_VERSION"})
"""What the writers of our files say about them; nothing else is looked at, so nothing else is taken."""
THREADS: Final = 4

_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,199}\.(safetensors|json|jinja)")


class File(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    digest: str
    size: int


class Stored(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One tensor in the header of a file."""

    dtype: str
    shape: list[int]
    data_offsets: tuple[int, int]


class Header(msgspec.Struct, frozen=True):
    tensors: Mapping[str, Stored]
    metadata: Mapping[str, str]


def allowed(name: str) -> bool:
    """Whether a checkpoint may hold a file of that name: numbers, or words."""
    return _NAME.fullmatch(name) is not None


def seal(files: Iterable[Path]) -> dict[str, File]:
    """Bring them to the disk. While it writes, their digests are computed from what is still in memory."""
    paths = sorted(files)
    failpoint("train.checkpoint.before_seal")
    for path in paths:
        if not allowed(path.name):
            raise StrataError(Code.INTERNAL, f"{path.name!r} is no name for a file of a checkpoint")
    with ThreadPoolExecutor(THREADS) as pool:
        syncing = [pool.submit(sync_file, path) for path in paths]
        found = list(pool.map(file_digest, paths))
        for each in syncing:
            each.result()
    return {path.name: File(digest, path.stat().st_size) for path, digest in zip(paths, found, strict=True)}


def digests(files: Sequence[Path]) -> list[str]:
    with ThreadPoolExecutor(THREADS) as pool:
        return list(pool.map(file_digest, files))


def check_header(file: Path) -> None:
    if file.suffix == ".safetensors":
        header_of(file)


def header_of(file: Path) -> Header:
    """What a file of tensors says it holds. It is short enough, well formed, and says nothing that we do not know."""
    size = file.stat().st_size
    with file.open("rb") as opened:
        length = int.from_bytes(opened.read(8), "little")
        if size < 8 or length > min(HEADER_LIMIT, size - 8):
            raise _no_tensors(file, f"its header would have {length} bytes")
        data = opened.read(length)
    try:
        parts = msgspec.json.decode(data, type=dict[str, msgspec.Raw])
        metadata = msgspec.json.decode(parts.pop("__metadata__", b"{}"), type=dict[str, str])
        tensors = {name: msgspec.json.decode(part, type=Stored) for name, part in parts.items()}
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise _no_tensors(file, str(error)) from error
    if strange := sorted(metadata.keys() - HEADER_KEYS):
        raise _no_tensors(file, f"nobody here wrote {strange[0]!r} into a header")
    return Header(tensors, metadata)


def _no_tensors(file: Path, why: str) -> StrataError:
    return StrataError(Code.CORRUPT, f"{file.name} is not a file of tensors as we write them: {why}")
