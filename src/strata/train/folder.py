"""The lock of a training server's data folder: one launcher at a time."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from strata.base.errors import Code, StrataError

LOCK: Final = "launcher.lock"


@contextmanager
def lock_folder(folder: Path) -> Iterator[None]:
    """Lock the folder until this process ends, whatever kills it: two launchers would replace each other's sockets.

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
