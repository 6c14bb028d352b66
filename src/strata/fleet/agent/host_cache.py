"""A cache of folders on this host, for environments and datasets: layout, locks, who uses a folder, and when it is
evicted (by size, or after 30 idle days).

NAME.lock         held while an attempt makes the folder, or this process removes it
NAME/content/     what attempts use
NAME/users/KEY    the attempt KEY uses it: it is not removed while the attempt's folder is there
NAME/ready.json   written last: a folder without it is the rest of work that was interrupted, and is never used
"""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import msgspec

from strata.base import log
from strata.base.atomic import read_json, write_json
from strata.base.errors import Code, StrataError
from strata.base.file_lock import try_lock
from strata.fleet.agent.attempt_folder import make_passable
from strata.fleet.agent.path_names import PathName

POLL_S: Final = 0.1
MAX_IDLE_S: Final = 30 * 86_400.0
_log = log.get(__name__)


class CacheEntry(msgspec.Struct, frozen=True, kw_only=True):
    """`ready.json`: a folder that is complete."""

    size_bytes: int
    facts: dict[str, Any] = {}


@dataclass(frozen=True, slots=True)
class HostCache:
    folder: Path
    attempts: Path
    """The folders of attempts: an entry is in use while one of its users is there."""
    max_bytes: int

    def content(self, name: PathName) -> Path:
        return self.folder / name / "content"

    def provide(
        self,
        name: PathName,
        key: PathName,
        make: Callable[[Path], CacheEntry],
        wanted: Callable[[], bool],
        usable: Callable[[Path], bool] = lambda _: True,
    ) -> tuple[CacheEntry, bool]:
        """The entry, and whether it was there. `make` fills the folder that it is given; `key` is the attempt.

        An entry whose content is not `usable` any more is made again.
        Attempts that need the same entry wait for one of them; STALE when this one is no longer `wanted`.
        """
        _create(self.folder)
        with self._locked(name, wanted):
            entry = self.read(name) if usable(self.content(name)) else None
            cached = entry is not None
            if entry is None:
                self.evict(time.time())
                entry = self._make(self.folder / name, make)
            os.utime(self.folder / name / "ready.json")
            (self.folder / name / "users" / key).touch()
        return entry, cached

    def read(self, name: str) -> CacheEntry | None:
        """None unless the entry is complete."""
        return read_json(self.folder / name / "ready.json", CacheEntry)

    def size_bytes(self) -> int:
        """Returns the size of the entries that are complete."""
        return sum(entry.size_bytes for each in self._folders() if (entry := self.read(each.name)) is not None)

    def evict(self, now_s: float) -> None:
        """Remove entries that were not used for long, and the least recently used ones of too many bytes."""
        folders = self._folders()
        entries = {each: self.read(each.name) for each in folders}
        total = sum(entry.size_bytes for entry in entries.values() if entry is not None)
        for folder in sorted(folders, key=_used_at_s):
            entry = entries[folder]
            if entry is not None and now_s - _used_at_s(folder) <= MAX_IDLE_S and total <= self.max_bytes:
                continue
            if self._remove_unused(folder):
                total -= 0 if entry is None else entry.size_bytes
                _log.info("cache_entry_evicted", cache=self.folder.name, entry=folder.name)

    def _folders(self) -> list[Path]:
        """Lists the folders of entries, complete or not: their locks are files beside them."""
        return [each for each in self.folder.iterdir() if each.is_dir()] if self.folder.is_dir() else []

    def _make(self, folder: Path, make: Callable[[Path], CacheEntry]) -> CacheEntry:
        shutil.rmtree(folder, ignore_errors=True)
        _create(folder)
        (folder / "users").mkdir(mode=0o700)
        try:
            entry = make(folder)
            write_json(folder / "ready.json", entry)
        except BaseException:
            shutil.rmtree(folder, ignore_errors=True)
            raise
        return entry

    def _remove_unused(self, folder: Path) -> bool:
        lock = try_lock(self.folder / f"{folder.name}.lock")
        if lock is None:
            return False
        try:
            if self._in_use(folder):
                return False
            # First the mark: a removal that is interrupted leaves no entry that seems complete.
            (folder / "ready.json").unlink(missing_ok=True)
            shutil.rmtree(folder, ignore_errors=True)
            return True
        finally:
            os.close(lock)

    def _in_use(self, folder: Path) -> bool:
        in_use = False
        for user in (folder / "users").iterdir() if (folder / "users").is_dir() else ():
            if (self.attempts / user.name).exists():
                in_use = True
            else:
                user.unlink(missing_ok=True)
        return in_use

    @contextmanager
    def _locked(self, name: PathName, wanted: Callable[[], bool]) -> Iterator[None]:
        path = self.folder / f"{name}.lock"
        while (lock := try_lock(path)) is None:
            if not wanted():
                raise StrataError(Code.STALE, "the attempt was stopped while it was prepared")
            time.sleep(POLL_S)
        try:
            yield
        finally:
            os.close(lock)


def _create(folder: Path) -> None:
    """A folder through which the users of jobs reach what is in it."""
    folder.mkdir(parents=True, exist_ok=True)
    make_passable(folder)


def _used_at_s(folder: Path) -> float:
    with suppress(OSError):
        return (folder / "ready.json").stat().st_mtime
    return 0.0
