"""Checkpoints as a worker sees them: what it stored, what is committed, and whether stored bytes are still the same."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from strata.base.digest import file_digest
from strata.base.errors import Code, StrataError
from strata.coord.pb import coordinator_pb2 as pb


@dataclass(frozen=True)
class Part:
    rank: int
    uri: str
    size: int
    digest: str


@dataclass(frozen=True)
class Manifest:
    """A committed checkpoint: what to load. Its world size is the number of parts."""

    checkpoint_id: str
    step: int
    generation: int
    parts: tuple[Part, ...]


@dataclass(frozen=True)
class Reported:
    step: int
    committed: bool
    missing_ranks: tuple[int, ...]
    tombstones: tuple[str, ...]
    """Paths of older parts that no recovery needs any more: delete them."""


def manifest(message: pb.CheckpointManifest) -> Manifest:
    parts = tuple(Part(each.rank, each.uri, each.size_bytes, each.digest) for each in message.parts)
    return Manifest(message.checkpoint_id, message.step, message.generation, parts)


@dataclass(frozen=True)
class Stored:
    """This worker's part, as it is stored."""

    uri: str
    size: int
    digest: str


def stored_part(path: str, digest: str | None, size: int | None) -> Stored:
    """Size and digest of a local file are read from it unless given."""
    if "://" in path:
        if size is None or digest is None:
            raise StrataError(Code.INVALID, f"the size and the digest of {path} have to be given: it is no local file")
        return Stored(path, size, digest)
    file = Path(path).absolute()
    try:
        return Stored(
            str(file),
            file.stat().st_size if size is None else size,
            file_digest(file) if digest is None else digest,
        )
    except OSError as error:
        raise StrataError(Code.INVALID, f"cannot read the part {file}: {error.strerror}") from error


def verify_part(path: str | Path, digest: str) -> None:
    """CORRUPT unless the bytes of a local file have this digest; an empty digest was never taken and says nothing."""
    try:
        found = file_digest(Path(path))
    except OSError as error:
        raise StrataError(Code.CORRUPT, f"cannot read the part {path}: {error.strerror}") from error
    if digest and found != digest:
        raise StrataError(Code.CORRUPT, f"the part {path} is not what was written: {found}, not {digest}")
