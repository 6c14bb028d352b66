"""A source bundle becomes a folder, and nothing of it gets outside: whoever made the archive is not trusted.

Not the filters of `tarfile`, which the older of the Pythons that we run on (3.11.0 to 3.11.3) do not have. Files and
folders come first and symbolic links last, so that nothing is ever written through a link, nor is a link made through
another one that leads outside; then every link is followed, to see that it stays inside. The root of an absolute path
is taken off, as every tar does; a name that comes again replaces what had it before. Of a mode only that a file can be
executed is kept. A hard link becomes a copy, and counts as one.
"""

from __future__ import annotations

import os
import shutil
import tarfile
from pathlib import Path, PurePosixPath
from typing import Final

from strata.base.errors import Code, StrataError

MAX_UNPACKED: Final = 8 << 30
MAX_MEMBERS: Final = 500_000


def unpack(archive: Path, target: Path) -> None:
    """A tar file, plain or compressed as Python can read it. `target` appears whole, or not at all."""
    partial = target.with_name(f".{target.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir()
    try:
        with tarfile.open(archive) as tar:
            _unpack(tar, partial)
    except (tarfile.TarError, EOFError, OSError, ValueError) as error:
        shutil.rmtree(partial, ignore_errors=True)
        raise StrataError(Code.PRECONDITION, f"the source bundle cannot be unpacked: {error}") from error
    except StrataError:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    partial.rename(target)


def _unpack(tar: tarfile.TarFile, folder: Path) -> None:
    links: dict[PurePosixPath, str] = {}
    unpacked = 0
    for number, member in enumerate(tar):
        # A hard link has no size of its own.
        linked = folder / _inside(member.linkname) if member.islnk() else None
        unpacked += linked.stat().st_size if linked is not None and linked.is_file() else member.size
        if unpacked > MAX_UNPACKED or number >= MAX_MEMBERS:
            raise StrataError(
                Code.EXHAUSTED, f"the source has more than {MAX_UNPACKED} bytes, or more than {MAX_MEMBERS} files"
            )
        name = _inside(member.name)
        links.pop(name, None)
        if member.isdir():
            (folder / name).mkdir(parents=True, exist_ok=True)
        elif member.issym():
            links[name] = member.linkname
        elif member.isreg():
            _write(tar, member, folder / name)
        elif linked is not None:
            _copy(linked, folder / name)
        else:
            raise _refused(member.name, "it is neither a file nor a folder nor a link")
    _link(folder, links)


def _inside(name: str) -> PurePosixPath:
    path = PurePosixPath(name.lstrip("/"))
    if ".." in path.parts or "\0" in name:
        raise _refused(name, "it would be outside of the folder")
    if os.name == "nt" and any(character in name for character in '\\:<>"|?*'):
        raise _refused(name, "this system cannot have such a name")
    return path


def _write(tar: tarfile.TarFile, member: tarfile.TarInfo, path: Path) -> None:
    source = tar.extractfile(member)
    assert source is not None, "a file has content"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.unlink(missing_ok=True)
    with source, path.open("xb") as file:
        shutil.copyfileobj(source, file)
    path.chmod(0o755 if member.mode & 0o100 else 0o644)


def _copy(source: Path, path: Path) -> None:
    """A hard link: to a file of this archive that came before."""
    if not source.is_file():
        raise _refused(path.name, "it is a link to a file that is not in the archive")
    if source != path:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.unlink(missing_ok=True)
        shutil.copy(source, path)


def _link(folder: Path, links: dict[PurePosixPath, str]) -> None:
    root = os.path.realpath(folder)
    for name, target in links.items():
        path = folder / name
        # Before anything is touched: a link that was made just now may be on the way.
        if PurePosixPath(target).is_absolute() or not _below(root, path.parent):
            raise _refused(str(name), "it is a link that leads outside of the folder")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.unlink(missing_ok=True)
        path.symlink_to(target)
    for name in links:
        # Only when all are there: one link may lead through another.
        if not _below(root, folder / name):
            raise _refused(str(name), "it is a link that leads outside of the folder")


def _below(root: str, path: Path) -> bool:
    return os.path.commonpath([root, os.path.realpath(path)]) == root


def _refused(name: str, reason: str) -> StrataError:
    return StrataError(Code.PRECONDITION, f"the source bundle cannot be unpacked: {name[:200]!r}: {reason}")
