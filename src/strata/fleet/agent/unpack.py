"""Unpacks a source archive into a folder and nothing outside of it: at most 8 GiB and 500,000 members, links last, and
the wording of refusals.

Files and folders are written first and symbolic links last, so that nothing is ever written through a link, nor is a
link created through another one that leads outside; then every link is resolved, to check that it stays inside. The
root of an absolute path is removed, as every tar does; a name that occurs again replaces the earlier member. Of a mode
only the executable bit is kept. A hard link becomes a copy, and counts as one.
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
from strata.base.tar import TarKind, TarMember, TarReader, decompress_stream

MAX_UNPACKED: Final = 8 << 30
MAX_MEMBERS: Final = 500_000
_HOST_ERRNOS: Final = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EROFS, errno.ENOMEM, errno.EMFILE})
"""OS errors that no archive can cause: the disk is full or broken."""


@dataclass(frozen=True, slots=True)
class UnpackLimits:
    max_bytes: int = MAX_UNPACKED
    max_members: int = MAX_MEMBERS
    any_link: bool = False
    """Links may lead outside: for a git repository, whose links are part of the commit."""
    private: bool = False
    """Files are readable by their owner alone."""


def unpack(archive: BufferedReader, folder: Path, limits: UnpackLimits | None = None) -> None:
    """Unpack a tar file, plain or compressed with gzip, bzip2 or xz, into an existing empty folder."""
    try:
        _unpack(TarReader(decompress_stream(archive)), folder, limits or UnpackLimits())
    except StrataError as error:
        raise StrataError(Code.PRECONDITION, f"the source bundle cannot be unpacked: {error.message}") from error
    except (OSError, ValueError) as error:
        if isinstance(error, OSError) and error.errno in _HOST_ERRNOS:
            raise
        raise StrataError(Code.PRECONDITION, f"the source bundle cannot be unpacked: {error}") from error


def _unpack(tar: TarReader, folder: Path, limits: UnpackLimits) -> None:
    links: dict[PurePosixPath, str] = {}
    unpacked = 0
    for number, member in enumerate(tar):
        # A hard link has no size of its own.
        linked = folder / _relative_path(member.target) if member.kind is TarKind.HARD_LINK else None
        unpacked += linked.stat().st_size if linked is not None and linked.is_file() else member.size
        if unpacked > limits.max_bytes or number >= limits.max_members:
            raise StrataError(
                Code.PRECONDITION, f"it has more than {limits.max_bytes} bytes, or more than {limits.max_members} files"
            )
        name = _relative_path(member.name)
        links.pop(name, None)
        if member.kind is TarKind.LINK:
            links[name] = member.target
        elif linked is not None:
            _copy(linked, folder / name)
        else:
            _unpack_member(tar, member, folder / name, mask=0o700 if limits.private else 0o777)
    _create_links(folder, links, any_link=limits.any_link)


def _unpack_member(tar: TarReader, member: TarMember, path: Path, *, mask: int) -> None:
    if member.kind is TarKind.FOLDER:
        path.mkdir(parents=True, exist_ok=True)
    elif member.kind is TarKind.FILE:
        _write(tar.pieces(), path, mode=mask & (0o755 if member.mode & 0o100 else 0o644))
    else:
        raise _rejected(member.name, "it is neither a file nor a folder nor a link")


def _relative_path(name: str) -> PurePosixPath:
    path = PurePosixPath(name.lstrip("/"))
    if ".." in path.parts or "\0" in name:
        raise _rejected(name, "it would be outside of the folder")
    if os.name == "nt" and any(character in name for character in '\\:<>"|?*'):
        raise _rejected(name, "this system cannot have such a name")
    return path


def _write(pieces: Iterator[bytes], path: Path, *, mode: int) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.unlink(missing_ok=True)
    with path.open("xb") as file:
        for piece in pieces:
            file.write(piece)
    path.chmod(mode)


def _copy(source: Path, path: Path) -> None:
    """A hard link: to an earlier file of this archive."""
    if not source.is_file():
        raise _rejected(path.name, "it is a link to a file that is not in the archive")
    if source != path:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.unlink(missing_ok=True)
        shutil.copy(source, path)


def _create_links(folder: Path, links: dict[PurePosixPath, str], *, any_link: bool) -> None:
    root = os.path.realpath(folder)
    for name, target in links.items():
        path = folder / name
        # Before anything is written: a link that was just created may be part of the path.
        if not _is_below(root, path.parent) or (PurePosixPath(target).is_absolute() and not any_link):
            raise _rejected(str(name), "it is a link that leads outside of the folder")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.unlink(missing_ok=True)
        path.symlink_to(target)
    for name in () if any_link else links:
        # Only when all links exist: one may lead through another.
        if not _is_below(root, folder / name):
            raise _rejected(str(name), "it is a link that leads outside of the folder")


def _is_below(root: str, path: Path) -> bool:
    return os.path.commonpath([root, os.path.realpath(path)]) == root


def _rejected(name: str, reason: str) -> StrataError:
    return StrataError(Code.PRECONDITION, f"{name[:200]!r}: {reason}")
