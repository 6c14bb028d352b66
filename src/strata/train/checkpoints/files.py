"""Files of a checkpoint: fsynced and digested at the same time; headers of tensors are validated before any use."""

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
"""Metadata that our writers put into a header. Any other key is rejected."""
THREADS: Final = 4

_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,199}\.(safetensors|json|jinja)")


class CheckpointFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    digest: str
    size: int


class TensorEntry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One tensor in the header of a file."""

    dtype: str
    shape: list[int]
    data_offsets: tuple[int, int]


class TensorHeader(msgspec.Struct, frozen=True):
    tensors: Mapping[str, TensorEntry]
    metadata: Mapping[str, str]


def is_allowed_name(name: str) -> bool:
    """Whether a checkpoint may hold a file of that name: tensors, JSON or a chat template."""
    return _NAME.fullmatch(name) is not None


def sync_and_digest(files: Iterable[Path]) -> dict[str, CheckpointFile]:
    """Make files durable. While the disk writes, the digests are computed from the page cache."""
    paths = sorted(files)
    failpoint("train.checkpoint.before_seal")
    for path in paths:
        if not is_allowed_name(path.name):
            raise StrataError(Code.INTERNAL, f"{path.name!r} is no name for a file of a checkpoint")
    with ThreadPoolExecutor(THREADS) as pool:
        syncing = [pool.submit(sync_file, path) for path in paths]
        found = list(pool.map(file_digest, paths))
        for each in syncing:
            each.result()
    return {path.name: CheckpointFile(digest, path.stat().st_size) for path, digest in zip(paths, found, strict=True)}


def file_digests(files: Sequence[Path]) -> list[str]:
    with ThreadPoolExecutor(THREADS) as pool:
        return list(pool.map(file_digest, files))


def check_header(file: Path) -> None:
    if file.suffix == ".safetensors":
        read_header(file)


def read_header(file: Path) -> TensorHeader:
    """The header of a safetensors file; CORRUPT if it is too long, malformed or has unknown metadata."""
    size = file.stat().st_size
    with file.open("rb") as opened:
        length = int.from_bytes(opened.read(8), "little")
        if size < 8 or length > min(HEADER_LIMIT, size - 8):
            raise _not_tensors(file, f"its header would have {length} bytes")
        data = opened.read(length)
    try:
        parts = msgspec.json.decode(data, type=dict[str, msgspec.Raw])
        metadata = msgspec.json.decode(parts.pop("__metadata__", b"{}"), type=dict[str, str])
        tensors = {name: msgspec.json.decode(part, type=TensorEntry) for name, part in parts.items()}
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise _not_tensors(file, str(error)) from error
    if strange := sorted(metadata.keys() - HEADER_KEYS):
        raise _not_tensors(file, f"the header has the unknown metadata {strange[0]!r}")
    return TensorHeader(tensors, metadata)


def _not_tensors(file: Path, why: str) -> StrataError:
    return StrataError(Code.CORRUPT, f"{file.name} is not a file of tensors: {why}")
