"""The server's own folders: of the owner alone, and of one launcher at a time."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from strata.base.errors import Code, StrataError

LOCK: Final = "launcher.lock"


def make_private(folder: Path, holds: str) -> None:
    """Made if it is not there. One that others can look into is refused: it may be theirs for a reason."""
    # One by one: `parents=True` would make those above for everybody, and the data folder is above the sockets.
    for each in (*reversed(folder.parents), folder):
        if not each.exists():
            each.mkdir(exist_ok=True, mode=0o700)
    mode = folder.stat().st_mode & 0o777
    if mode & 0o077:
        raise StrataError(
            Code.INVALID, f"others could reach {holds} in {folder} (mode {mode:04o})", hint=f"chmod 700 {folder}"
        )


@contextmanager
def held(folder: Path) -> Iterator[None]:
    """For one process at a time, as long as it lives, whatever kills it: two would take each other's sockets.

    The descriptor is not inherited: children that outlive their launcher do not keep the next one out.
    """
    descriptor = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise StrataError(
                Code.CONFLICT, f"another server runs in {folder}", hint="give each one a server.data of its own"
            ) from error
        yield
    finally:
        os.close(descriptor)
