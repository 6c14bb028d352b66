"""A source becomes a folder, and nothing of it gets outside: the sender of the archive is not trusted.

Files and folders come first and symbolic links last, so that nothing is ever written through a link, nor is a link made
through another one that leads outside; then every link is followed, to see that it stays inside. The root of an
absolute path is taken off, as every tar does; a name that comes again replaces what had it before. Of a mode only that
a file can be executed is kept. A hard link becomes a copy, and counts as one.
"""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from io import BufferedReader
from pathlib import Path, PurePosixPath
from typing import Final

from strata.base.errors import Code, StrataError
from strata.base.tar import TarKind, TarReader, decompressed

MAX_UNPACKED: Final = 8 << 30
MAX_MEMBERS: Final = 500_000
_OF_THE_HOST: Final = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EROFS, errno.ENOMEM, errno.EMFILE})
"""What no archive brings about: the disk is full or broken."""


@dataclass(frozen=True, slots=True)
class UnpackLimits:
    max_bytes: int = MAX_UNPACKED
    max_members: int = MAX_MEMBERS
    any_link: bool = False
    """Links may lead outside: those of a git repository, which are what was committed."""


def unpack(archive: BufferedReader, folder: Path, limits: UnpackLimits | None = None) -> None:
    """A tar file, plain or compressed with gzip, bzip2 or xz, into a folder that is there and empty."""
    try:
        _unpack(TarReader(decompressed(archive)), folder, limits or UnpackLimits())
    except StrataError as error:
        raise StrataError(Code.PRECONDITION, f"the source bundle cannot be unpacked: {error.message}") from error
    except (OSError, ValueError) as error:
        if isinstance(error, OSError) and error.errno in _OF_THE_HOST:
            raise
        raise StrataError(Code.PRECONDITION, f"the source bundle cannot be unpacked: {error}") from error


def _unpack(tar: TarReader, folder: Path, limits: UnpackLimits) -> None:
    links: dict[PurePosixPath, str] = {}
    unpacked = 0
    for number, member in enumerate(tar):
        # A hard link has no size of its own.
        linked = folder / _inside(member.target) if member.kind is TarKind.HARD_LINK else None
        unpacked += linked.stat().st_size if linked is not None and linked.is_file() else member.size
        if unpacked > limits.max_bytes or number >= limits.max_members:
            raise StrataError(
                Code.PRECONDITION, f"it has more than {limits.max_bytes} bytes, or more than {limits.max_members} files"
            )
        name = _inside(member.name)
        links.pop(name, None)
        if member.kind is TarKind.FOLDER:
            (folder / name).mkdir(parents=True, exist_ok=True)
        elif member.kind is TarKind.LINK:
            links[name] = member.target
        elif member.kind is TarKind.FILE:
            _write(tar.pieces(), folder / name, executable=bool(member.mode & 0o100))
        elif linked is not None:
            _copy(linked, folder / name)
        else:
            raise _refused(member.name, "it is neither a file nor a folder nor a link")
    _link(folder, links, any_link=limits.any_link)


def _inside(name: str) -> PurePosixPath:
    path = PurePosixPath(name.lstrip("/"))
    if ".." in path.parts or "\0" in name:
        raise _refused(name, "it would be outside of the folder")
    if os.name == "nt" and any(character in name for character in '\\:<>"|?*'):
        raise _refused(name, "this system cannot have such a name")
    return path


def _write(pieces: Iterator[bytes], path: Path, *, executable: bool) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.unlink(missing_ok=True)
    with path.open("xb") as file:
        for piece in pieces:
            file.write(piece)
    path.chmod(0o755 if executable else 0o644)


def _copy(source: Path, path: Path) -> None:
    """A hard link: to a file of this archive that came before."""
    if not source.is_file():
        raise _refused(path.name, "it is a link to a file that is not in the archive")
    if source != path:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.unlink(missing_ok=True)
        shutil.copy(source, path)


def _link(folder: Path, links: dict[PurePosixPath, str], *, any_link: bool) -> None:
    root = os.path.realpath(folder)
    for name, target in links.items():
        path = folder / name
        # Before anything is touched: a link that was made just now may be on the way.
        if not _below(root, path.parent) or (PurePosixPath(target).is_absolute() and not any_link):
            raise _refused(str(name), "it is a link that leads outside of the folder")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.unlink(missing_ok=True)
        path.symlink_to(target)
    for name in () if any_link else links:
        # Only when all are there: one link may lead through another.
        if not _below(root, folder / name):
            raise _refused(str(name), "it is a link that leads outside of the folder")


def _below(root: str, path: Path) -> bool:
    return os.path.commonpath([root, os.path.realpath(path)]) == root


def _refused(name: str, reason: str) -> StrataError:
    return StrataError(Code.PRECONDITION, f"{name[:200]!r}: {reason}")
