"""Backups of a SQLite database in use: requested by a file (looked at every second, timeout 30 s), and their errors.

That is a hub, or the coordinator of `strata up`. Its own user may write to its folder of backups, and therefore may
request one. File names there:

    NAME.wanted   a request
    NAME.db       the backup; it gets this name when it is complete
    NAME.failed   the reason why there is none
"""

from __future__ import annotations

import secrets
import shutil
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from pathlib import Path
from typing import Final

from strata.base.atomic import sync_file, write_file
from strata.base.clock import Clock
from strata.base.errors import Code, StrataError

FOLDER: Final = "backups"
REQUEST: Final = ".wanted"
BACKUP: Final = ".db"
FAILURE: Final = ".failed"
INTERVAL_S: Final = 1.0
"""How often the process looks for requests."""
TIMEOUT_S: Final = 30.0
"""How long a client waits without any progress."""
_POLL_S: Final = 0.1
_NAME_BYTES: Final = 8

CopyDatabase = Callable[[Path, float], Awaitable[object]]


class OnlineBackup:
    """The side of the process: `run_once` serves the pending requests."""

    def __init__(self, folder: Path, copy: CopyDatabase, clock: Clock) -> None:
        self._folder = folder
        self._copy = copy
        self._clock = clock
        self._folder.mkdir(mode=0o700, exist_ok=True)
        # Left by an earlier process for clients that have gone; a client that still waits gets a new backup. Files with
        # names that `request_backup` never gives belong to somebody else and stay.
        for suffix in (f"{BACKUP}*", FAILURE):
            for stray in self._folder.glob(f"{'[0-9a-f]' * 2 * _NAME_BYTES}{suffix}"):
                with suppress(OSError):
                    stray.unlink()

    async def run_once(self) -> None:
        for request in sorted(self._folder.glob(f"*{REQUEST}")):
            try:
                await self._copy(request.with_suffix(BACKUP), self._clock.wall_s())
            except StrataError as error:
                write_file(request.with_suffix(FAILURE), error.message.encode())
            try:
                request.unlink()
            except FileNotFoundError:
                # The client has given up meanwhile and will not fetch the backup.
                for suffix in (BACKUP, FAILURE):
                    request.with_suffix(suffix).unlink(missing_ok=True)


def request_backup(folder: Path, target: Path) -> None:
    """The client's side: request a backup from the process with this folder of backups, and copy it to `target`."""
    request = folder / f"{secrets.token_hex(_NAME_BYTES)}{REQUEST}"
    try:
        write_file(request, b"")
        _wait_for_backup(request)
        shutil.copyfile(request.with_suffix(BACKUP), target)
        sync_file(target)
    except OSError as error:
        raise StrataError(
            Code.UNAVAILABLE,
            f"a process uses the database, and {request.parent} cannot be used: {error.strerror}",
            hint="run this as the hub's user, with the --data of that hub",
        ) from error
    finally:
        for suffix in (REQUEST, BACKUP, FAILURE):
            with suppress(OSError):
                request.with_suffix(suffix).unlink(missing_ok=True)


def _wait_for_backup(request: Path) -> None:
    """Returns when the backup is complete. While the database is copied, a partial file beside it grows."""
    backup, failure = request.with_suffix(BACKUP), request.with_suffix(FAILURE)
    partial = backup.with_name(f"{backup.name}.partial")
    deadline_s = time.monotonic() + TIMEOUT_S
    size = -1
    while not backup.exists():
        if failure.exists():
            raise StrataError(Code.UNAVAILABLE, failure.read_text())
        with suppress(FileNotFoundError):
            size_now = partial.stat().st_size
            if size_now != size:
                size, deadline_s = size_now, time.monotonic() + TIMEOUT_S
        if time.monotonic() > deadline_s:
            raise StrataError(
                Code.UNAVAILABLE,
                f"a process uses the database and does not answer in {request.parent}",
                hint="is it a hub with this --data, and of this version?",
            )
        time.sleep(_POLL_S)
