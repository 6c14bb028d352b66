"""A folder that one process at a time may use. The kernel returns the lock when that process ends, however it ends."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from strata.base.errors import Code, StrataError


def is_locked(folder: Path, name: str) -> bool:
    """Says whether another process holds the lock. One that tries to take it in this very moment may be refused."""
    try:
        descriptor = os.open(folder / name, os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:
        return False
    except PermissionError as error:
        raise StrataError(Code.FORBIDDEN, f"{folder} belongs to another user") from error
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(descriptor)
    return False


@contextmanager
def lock_folder(folder: Path, name: str, *, taken: str, hint: str) -> Iterator[None]:
    """Hold the lock in the file `name` of the folder; CONFLICT with the message `taken` if another process has it.

    The descriptor is not inherited: children that outlive this process do not keep the next one out.
    """
    descriptor = os.open(folder / name, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise StrataError(Code.CONFLICT, taken, hint=hint) from error
        yield
    finally:
        os.close(descriptor)
