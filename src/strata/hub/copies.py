"""Copies of a SQLite database in use, which is open to the hub alone: asked for and delivered as files.

Whoever can write to `backups` in the data folder may ask, and that is the hub's own user. In there, under any name:

    NAME.wanted   somebody asks
    NAME.db       the copy, whole when it has this name
    NAME.failed   why there is none
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
WANTED: Final = ".wanted"
MADE: Final = ".db"
FAILED: Final = ".failed"
LOOK_S: Final = 1.0
"""How often the hub looks."""
ANSWER_S: Final = 30.0
"""So long may nothing happen before whoever asked gives up."""
_POLL_S: Final = 0.1
_NAME_BYTES: Final = 8

Copy = Callable[[Path, float], Awaitable[int]]


class Copier:
    """The hub's side: `run_once` makes the copies that were asked for."""

    def __init__(self, data: Path, copy: Copy, clock: Clock) -> None:
        self._folder = data / FOLDER
        self._copy = copy
        self._clock = clock
        self._folder.mkdir(mode=0o700, exist_ok=True)
        # Of an earlier hub, for those who have gone. Who still waits gets a new one; a name that `ask` does not give is
        # that of a file which somebody else put there.
        for suffix in (f"{MADE}*", FAILED):
            for stray in self._folder.glob(f"{'[0-9a-f]' * 2 * _NAME_BYTES}{suffix}"):
                with suppress(OSError):
                    stray.unlink()

    async def run_once(self) -> None:
        for wanted in sorted(self._folder.glob(f"*{WANTED}")):
            try:
                await self._copy(wanted.with_suffix(MADE), self._clock.wall_s())
            except StrataError as error:
                write_file(wanted.with_suffix(FAILED), error.message.encode())
            try:
                wanted.unlink()
            except FileNotFoundError:
                # Whoever asked has given up meanwhile, and will not come for it.
                for suffix in (MADE, FAILED):
                    wanted.with_suffix(suffix).unlink(missing_ok=True)


def ask(data: Path, target: Path) -> None:
    """The other side: have a copy made, and take it to `target`."""
    wanted = data / FOLDER / f"{secrets.token_hex(_NAME_BYTES)}{WANTED}"
    try:
        write_file(wanted, b"")
        _wait(wanted)
        shutil.copyfile(wanted.with_suffix(MADE), target)
        sync_file(target)
    except OSError as error:
        raise StrataError(
            Code.UNAVAILABLE,
            f"a process uses the database, and {wanted.parent} cannot be used: {error.strerror}",
            hint="run this as the hub's user, with the --data of that hub",
        ) from error
    finally:
        for suffix in (WANTED, MADE, FAILED):
            with suppress(OSError):
                wanted.with_suffix(suffix).unlink(missing_ok=True)


def _wait(wanted: Path) -> None:
    """Returns when the copy is there. While the hub makes it, a file beside it grows."""
    made, failed = wanted.with_suffix(MADE), wanted.with_suffix(FAILED)
    growing = made.with_name(f"{made.name}.partial")
    until_s = time.monotonic() + ANSWER_S
    size = -1
    while not made.exists():
        if failed.exists():
            raise StrataError(Code.UNAVAILABLE, failed.read_text())
        with suppress(FileNotFoundError):
            seen = growing.stat().st_size
            if seen != size:
                size, until_s = seen, time.monotonic() + ANSWER_S
        if time.monotonic() > until_s:
            raise StrataError(
                Code.UNAVAILABLE,
                f"a process uses the database and does not answer in {wanted.parent}",
                hint="is it a hub with this --data, and of this version?",
            )
        time.sleep(_POLL_S)
