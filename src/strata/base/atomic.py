"""Replaces files and folders atomically: temporary name, fsync, rename, exchange of two folders, JSON files.

Every function follows one pattern: write under a temporary name in the same folder, fsync the content, rename, fsync
the folder that holds the name.
"""

from __future__ import annotations

import ctypes
import errno
import os
import secrets
import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final, TypeVar

import msgspec

from strata.base.errors import Code, StrataError

T = TypeVar("T")

_AT_FDCWD: Final = -100
_RENAME_EXCHANGE: Final = 2


def temporary_path(path: Path) -> Path:
    """A hidden name in the same folder that no other writer uses."""
    return path.with_name(f".{path.name}.{secrets.token_hex(8)}.partial")


def write_file(path: Path, content: bytes | Iterable[bytes], *, mode: int = 0o600, durable: bool = True) -> None:
    """Replace a file. With `durable` the new content survives a power failure once this returns."""
    temporary = temporary_path(path)
    try:
        _write_new(temporary, content, mode=mode, durable=durable)
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    if durable:
        sync_folder(path.parent)


def write_json(path: Path, value: msgspec.Struct) -> None:
    write_file(path, msgspec.json.encode(value))


def read_json(path: Path, kind: type[T]) -> T | None:
    """None if there is no such file; CORRUPT if it holds something else."""
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        return None
    try:
        return msgspec.json.decode(content, type=kind)
    except msgspec.DecodeError as error:
        raise StrataError(Code.CORRUPT, f"{path} cannot be read: {error}") from error


def create_file(path: Path, content: bytes, *, mode: int = 0o600) -> bool:
    """Write a file that does not exist yet. Of several writers the first wins: False for the others."""
    temporary = temporary_path(path)
    try:
        _write_new(temporary, content, mode=mode, durable=True)
        try:
            os.link(temporary, path)
        except FileExistsError:
            return False
        return True
    finally:
        temporary.unlink(missing_ok=True)


@contextmanager
def new_folder(path: Path, *, temporary: Path | None = None, mode: int = 0o777, durable: bool = True) -> Iterator[Path]:
    """A temporary folder to fill, renamed to `path` at the end of the block, and removed if the block fails.

    CONFLICT if `path` exists. A `temporary` name that the caller chose may be left over from a killed process: it is
    cleared first.
    """
    if path.is_symlink() or path.exists():
        raise StrataError(Code.CONFLICT, f"{path} is there already", hint="give the name of a new folder")
    path = path.absolute()
    folder = temporary or temporary_path(path)
    if temporary is not None:
        shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(mode=mode)
    try:
        yield folder
        if durable:
            sync_tree(folder)
        try:
            folder.rename(path)
        except OSError as error:
            raise StrataError(Code.CONFLICT, f"{path} is there already: {error.strerror}") from error
        if durable:
            sync_folder(path.parent)
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise


def rename_file(temporary: Path, path: Path) -> int:
    """Publish a file that another library wrote: fsync it, rename it, fsync the folder. Returns its size."""
    size = temporary.stat().st_size
    sync_file(temporary)
    temporary.replace(path)
    sync_folder(path.parent)
    return size


def exchange_folders(one: Path, other: Path) -> None:
    """Both folders swap their names in one step: at no moment is a name missing. UNSUPPORTED by some file systems."""
    libc = ctypes.CDLL(None, use_errno=True)
    failed = errno.ENOSYS
    if hasattr(libc, "renameat2"):
        done = libc.renameat2(_AT_FDCWD, os.fsencode(one), _AT_FDCWD, os.fsencode(other), _RENAME_EXCHANGE)
        failed = 0 if done == 0 else ctypes.get_errno()
    if failed in (errno.ENOSYS, errno.EINVAL):
        raise StrataError(
            Code.UNSUPPORTED,
            f"the file system of {other.parent} cannot exchange two folders, so {other.name!r} stays as it is",
            hint="save under another name",
        )
    if failed:
        raise OSError(failed, os.strerror(failed), str(other))


def sync_file(path: Path) -> None:
    """Bring the content of a file to the disk."""
    # Not read-only: Windows syncs only a file that may be written.
    descriptor = os.open(path, os.O_RDONLY if os.name == "posix" else os.O_RDWR)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_folder(folder: Path) -> None:
    """Make the names in a folder durable. Windows has no such call and does it by itself."""
    if not hasattr(os, "O_DIRECTORY"):
        return
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_tree(folder: Path) -> None:
    """Bring all files below a folder to the disk, then their names."""
    for above, _, names in os.walk(folder, topdown=False):
        for name in names:
            if not (path := Path(above, name)).is_symlink():
                sync_file(path)
        sync_folder(Path(above))


def _write_new(path: Path, content: bytes | Iterable[bytes], *, mode: int, durable: bool) -> None:
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_BINARY", 0)
    with os.fdopen(os.open(path, flags, mode), "wb") as file:
        if hasattr(os, "fchmod"):
            # Exactly this mode, whatever the umask.
            os.fchmod(file.fileno(), mode)
        for piece in (content,) if isinstance(content, bytes) else content:
            file.write(piece)
        if durable:
            file.flush()
            os.fsync(file.fileno())
