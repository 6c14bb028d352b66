"""Copies the server's state (journal, checkpoints, snapshots, payloads) into a folder for the agent, and keeps the last
two copies.

A copy is what a crash at one moment would have left. The journal is copied as it is at that moment. Checkpoints, rank
snapshots and payloads never change under their names: they are linked, once before and once after. So the copy has what
the journal refers to, and perhaps more, which garbage collection removes wherever the copy is used.
"""

from __future__ import annotations

import asyncio
import os
import shutil
from collections.abc import Awaitable, Callable
from contextlib import suppress
from pathlib import Path
from typing import Final

from strata.base import log
from strata.base.atomic import new_folder
from strata.base.failpoint import failpoint
from strata.train.orchestrator.state_store import StateStore
from strata.train.settings import ServerSettings

KEEP: Final = 2
"""Copies in the folder: the agent may still read the one before the last."""
JOURNAL: Final = "journal.db"
_TEMPORARY: Final = ".new"
_log = log.get(__name__)

CopyJournal = Callable[[Path], Awaitable[None]]


class StateCopy:
    def __init__(self, settings: ServerSettings, store: StateStore, copy_journal: CopyJournal) -> None:
        self._settings = settings
        self._store = store
        self._copy_journal = copy_journal
        self._folder = settings.copies
        self._copied_at: int | None = None
        """The position of the journal at the last copy."""

    async def run_once(self) -> None:
        """Make a copy, unless nothing has happened since the last one."""
        await self._store.wait_durable()
        position = self._store.position
        if position == self._copied_at:
            return
        settings = self._settings
        folders = (settings.checkpoint_folder, settings.snapshot_folder, settings.payloads)
        name = f"{round(self._store.clock.wall_s() * 1000):015d}"
        self._folder.mkdir(mode=0o700, exist_ok=True)
        with new_folder(self._folder / name, temporary=self._folder / _TEMPORARY, mode=0o700, durable=False) as copy:
            await asyncio.to_thread(_link_files, settings.data, folders, copy)
            failpoint("train.orchestrator.copy_linked")
            await self._copy_journal(copy / JOURNAL)
            failpoint("train.orchestrator.copy_journal")
            await asyncio.to_thread(_link_files, settings.data, folders, copy)
            await asyncio.to_thread(_copy_others, settings.data, copy)
        self._copied_at = position
        _log.info("state_copied", name=name, position=position)
        for old in sorted(each for each in self._folder.iterdir() if each.name.isdecimal())[:-KEEP]:
            await asyncio.to_thread(shutil.rmtree, old, ignore_errors=True)


def _link_files(data: Path, folders: tuple[Path, ...], copy: Path) -> None:
    """Link every file that has its final name. One that is removed meanwhile is not needed any more."""
    for folder in folders:
        for place, inner, names in os.walk(folder):
            inner[:] = [name for name in inner if not name.startswith(".")]
            target = copy / Path(place).relative_to(data)
            target.mkdir(mode=0o700, parents=True, exist_ok=True)
            for name in names:
                if not name.startswith("."):
                    with suppress(FileExistsError, FileNotFoundError):
                        os.link(Path(place, name), target / name)


def _copy_others(data: Path, copy: Path) -> None:
    """The small files of the data folder. The database of keys is not one: it is in use, and a fleet has the keys."""
    for path in data.iterdir():
        if path.is_file() and not path.is_symlink() and ".db" not in path.name and path.suffix != ".lock":
            shutil.copyfile(path, copy / path.name)
            (copy / path.name).chmod(0o600)
