"""Locks on files and folders, held by one process until it ends."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from strata.base.errors import Code, StrataError


def try_lock(path: Path, *, shared: bool = False) -> int | None:
    """The descriptor that holds the lock, not inherited by children; None if another process holds it."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        if sys.platform == "win32":
            import msvcrt

            msvcrt.locking(descriptor, msvcrt.LK_NBLCK, 1)
        else:
            import fcntl

            fcntl.flock(descriptor, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
    except OSError:
        os.close(descriptor)
        return None
    return descriptor


def is_locked(path: Path) -> bool:
    """Says whether another process holds the lock. One that tries to take it in this very moment may be refused."""
    try:
        descriptor = try_lock(path, shared=True) if path.exists() else -1
    except PermissionError as error:
        raise StrataError(Code.FORBIDDEN, f"{path.parent} belongs to another user") from error
    if descriptor is not None and descriptor >= 0:
        os.close(descriptor)
    return descriptor is None


@contextmanager
def lock_folder(folder: Path, name: str, *, taken: str, hint: str | None = None) -> Iterator[None]:
    """Hold the lock in the file `name` of the folder; CONFLICT with the message `taken` if another process has it."""
    descriptor = try_lock(folder / name)
    if descriptor is None:
        raise StrataError(Code.CONFLICT, taken, hint=hint)
    try:
        yield
    finally:
        os.close(descriptor)
