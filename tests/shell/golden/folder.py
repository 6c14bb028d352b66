"""The golden files of a version: where they are, and what a later version has to find in them.

A version has a folder with four parts: `hub`, `journals`, `weights` and `settings`. What files mean stands beside them.
"""

from __future__ import annotations

import gzip
import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final, TypeVar

import msgspec

from strata import __version__

GOLDEN: Final = Path(__file__).parents[2] / "golden"
RELEASED: Final = GOLDEN / "released.json"
"""The SHA-256 of each file of each released version."""
MEANING: Final = "meaning.json"
ENDING: Final = ".gz"

T = TypeVar("T")


class HubMeaning(msgspec.Struct, frozen=True, kw_only=True):
    """Credentials in it are made up, and open nothing but the database."""

    at_s: float
    """The time of day at which the hub stopped."""
    key: str
    """The API key of the researcher alice."""
    hosts: Mapping[str, str]
    """The bearer secrets of the hosts, by name."""
    secrets_key: str
    secrets: Mapping[str, Mapping[str, str]]
    """The values that are encrypted with it, by scope and name."""
    description: Mapping[str, Any]
    events: Sequence[str]


class JournalMeaning(msgspec.Struct, frozen=True, kw_only=True):
    stream: str
    """All of its facts are there, and a snapshot of the state after the last of them."""
    compacted: str
    """A stream of the same facts, of which those at the beginning are in a snapshot alone."""
    position: int
    digest: str
    """The SHA-256 of the state in the snapshot of `stream`."""
    rules: Mapping[str, Any] = {}
    """The rules that the training server decided by."""


class SnapshotMeaning(msgspec.Struct, frozen=True, kw_only=True):
    number: int
    digest: str


def version_in_development() -> str:
    return __version__.partition(".dev")[0]


def versions() -> list[str]:
    return sorted(each.name for each in GOLDEN.iterdir() if each.is_dir())


def digests(folder: Path) -> dict[str, str]:
    """The SHA-256 of each file below a folder, by its path."""
    files = sorted(each for each in folder.rglob("*") if each.is_file())
    return {each.relative_to(folder).as_posix(): hashlib.sha256(each.read_bytes()).hexdigest() for each in files}


def read_released() -> dict[str, dict[str, str]]:
    return msgspec.json.decode(RELEASED.read_bytes(), type=dict[str, dict[str, str]])


def write_meaning(part: Path, meaning: Any) -> None:
    (part / MEANING).write_bytes(msgspec.json.format(msgspec.json.encode(meaning), indent=1) + b"\n")


def read_meaning(part: Path, kind: type[T]) -> T:
    return msgspec.json.decode((part / MEANING).read_bytes(), type=kind)


def pack(file: Path, folder: Path) -> None:
    """Compresses a file; the same content is the same bytes."""
    (folder / f"{file.name}{ENDING}").write_bytes(gzip.compress(file.read_bytes(), mtime=0))


def unpack(file: Path, folder: Path) -> Path:
    unpacked = folder / file.stem
    unpacked.write_bytes(gzip.decompress(file.read_bytes()))
    return unpacked


def contains(now: Any, recorded: Any) -> bool:
    """Says whether all of `recorded` is in `now`, which may have more fields but no more elements."""
    if isinstance(recorded, Mapping):
        return isinstance(now, Mapping) and all(
            key in now and contains(now[key], value) for key, value in recorded.items()
        )
    if isinstance(recorded, list | tuple):
        return isinstance(now, list | tuple) and len(now) == len(recorded) and all(map(contains, now, recorded))
    return bool(now == recorded)
