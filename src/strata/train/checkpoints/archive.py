"""A checkpoint as one tar file: which members it has (at most 16), in which order, and what is refused in an uploaded
one.

What comes in is read without being unpacked anywhere: names are compared, never used as paths, and only plain files are
taken.
"""

from __future__ import annotations

import io
import tarfile
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Final

from strata.base.errors import Code, StrataError
from strata.base.tar import TarKind, TarReader
from strata.train.checkpoints import checkpoint

MEDIA_TYPE: Final = "application/x-tar"
OPTIMIZER: Final = "optimizer"
"""Prefix of the files with optimizer state, which are no part of an exported checkpoint."""
SHARD: Final = "shard-"
MEMBERS: Final = 16
_BLOCK: Final = 512
_TOP: Final = ("", ".", "/")
"""Names of the folder that an archive was made of."""
_PIECE: Final = 1 << 20


@dataclass(frozen=True)
class Archive:
    """Open files that were checked. Whoever removes the checkpoint now does not take them away."""

    files: Sequence[tuple[str, int, IO[bytes]]]
    closing: ExitStack

    @property
    def size(self) -> int:
        return sum(len(_head(name, size)) + size + -size % _BLOCK for name, size, _ in self.files) + 2 * _BLOCK

    def content(self) -> Iterator[bytes]:
        """Yields the content of all files, one after the other."""
        with self.closing:
            for _, _, file in self.files:
                while part := file.read(_PIECE):
                    yield part

    def parts(self) -> Iterator[bytes]:
        with self.closing:
            for name, size, file in self.files:
                yield _head(name, size)
                while part := file.read(_PIECE):
                    yield part
                yield bytes(-size % _BLOCK)
            yield bytes(2 * _BLOCK)


def open_archive(folder: Path, only: str | None = None) -> Archive:
    """NOT_FOUND if there is no checkpoint, CORRUPT if a file is not what was written."""
    with ExitStack() as stack:
        names = published(folder) if only is None else [only]
        try:
            opened = [(name, stack.enter_context((folder / name).open("rb"))) for name in names]
        except FileNotFoundError as error:
            raise StrataError(Code.NOT_FOUND, "the checkpoint is gone") from error
        found = checkpoint.read(folder).files
        if missing := [name for name in names if name not in found]:
            raise StrataError(Code.NOT_FOUND, f"there is no file {missing[0]!r} in the checkpoint")
        return Archive([(name, found[name].size, file) for name, file in opened], stack.pop_all())


def published(folder: Path) -> list[str]:
    """The files of a checkpoint that make a folder of PEFT's or Hugging Face's."""
    try:
        names = sorted(file.name for file in folder.iterdir())
    except FileNotFoundError as error:
        raise StrataError(Code.NOT_FOUND, "the checkpoint is gone") from error
    if any(name.startswith(SHARD) for name in names):
        raise StrataError(
            Code.PRECONDITION,
            "the checkpoint of a full fine-tune that training continues from is kept in shards",
            hint="save it with save_weights_for_sampler",
        )
    return [name for name in names if name != checkpoint.MANIFEST and not name.startswith((OPTIMIZER, "."))]


def _head(name: str, size: int) -> bytes:
    member = tarfile.TarInfo(name)
    member.size, member.mode = size, 0o644
    return member.tobuf(tarfile.PAX_FORMAT)


def read_members(raw: bytes, wanted: Collection[str], ignored: Collection[str] = ()) -> Mapping[str, bytes]:
    """The plain files of a tar that is not compressed. INVALID if anything else is in it, or something missing."""
    found: dict[str, bytes] = {}
    names, allowed = ", ".join(sorted(wanted)), {*wanted, *ignored}
    archive = TarReader(io.BytesIO(raw))
    for count, member in enumerate(archive):
        name = member.name.removeprefix("./")
        if count >= MEMBERS or name in found:
            raise StrataError(Code.INVALID, f"the archive has more files than {names}")
        if member.kind is TarKind.FOLDER and name in _TOP:
            continue
        if member.size > len(raw):
            raise StrataError(Code.INVALID, f"{name[:200]!r} would be longer than the archive")
        if member.kind is not TarKind.FILE or name not in allowed:
            raise StrataError(Code.INVALID, f"{name[:200]!r} is none of {names}")
        if name in wanted:
            found[name] = b"".join(archive.pieces())
    if missing := sorted(set(wanted) - found.keys()):
        raise StrataError(Code.INVALID, f"there is no {missing[0]} in the archive")
    return found
