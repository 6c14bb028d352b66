"""Reads a folder for `strata init`: how many entries, levels and bytes at most, which files are read, links and special
files that are not, and the exclusive creation of the file that is written.
"""

from __future__ import annotations

import os
import stat
from collections import deque
from contextlib import suppress
from pathlib import Path
from typing import Final

from strata.base.errors import Code, StrataError
from strata.sdk.ignore_rules import IgnoreRules
from strata.sdk.init.findings import (
    FolderFile,
    FolderListing,
    is_data,
    is_script,
    is_settings,
    is_worth_listing,
)

MAX_ENTRIES: Final = 5_000
MAX_LEVELS: Final = 4
MAX_SCRIPTS: Final = 1 << 20
"""Bytes that are read of all scripts: the syntax tree of a hostile one takes 10 s for each MiB, and 1,000 times its
memory."""
MAX_OTHERS: Final = 4 << 20
"""Bytes that are read of all other files."""
MAX_FILE: Final = 256 << 10
"""Bytes that are read of one file."""
MAX_SETTINGS: Final = 64 << 10
"""Bytes that are read of one file of settings, such as pyproject.toml."""
_ENVIRONMENT: Final = "pyvenv.cfg"
_LEFT_OUT: Final = IgnoreRules("", (), nested=False)
"""What a bundle never has, such as caches. Patterns of .gitignore do not count: they often name the data."""


def scan_folder(folder: Path) -> FolderListing:
    """Lists the files of the folder that say what it is for; those nearest to its top come first."""
    try:
        top = os.scandir(folder)
    except OSError as error:
        raise StrataError(Code.INVALID, f"{folder} cannot be read: {error.strerror}") from error
    top.close()
    scan = _Scan(folder)
    scan.run()
    return scan.listing()


class _Scan:
    """A walk by levels, with what is left of its limits."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._files: list[FolderFile] = []
        self._notes: dict[str, None] = {}
        self._unreadable: list[str] = []
        self._entries = MAX_ENTRIES
        self._unread = {True: MAX_SCRIPTS, False: MAX_OTHERS}
        self._size = 0

    def listing(self) -> FolderListing:
        name = self._folder.resolve().name
        notes = [*self._notes]
        if self._unreadable:
            more = f" and {len(self._unreadable) - 1} more" if len(self._unreadable) > 1 else ""
            notes.append(f"cannot read {self._unreadable[0]}{more}")
        return FolderListing(name=name, files=tuple(self._files), size=self._size, notes=tuple(notes))

    def run(self) -> None:
        waiting = deque([""])
        while waiting and self._entries:
            waiting.extend(self._list(waiting.popleft()))
        if waiting:
            self._notes[f"looked at the first {MAX_ENTRIES} entries of the folder only"] = None

    def _list(self, prefix: str) -> list[str]:
        """Adds the files of a folder, and returns its folders."""
        folders: list[str] = []
        for entry in self._entries_of(prefix):
            path = f"{prefix}{entry.name}"
            is_folder = entry.is_dir(follow_symlinks=False)
            if _LEFT_OUT.covers(path, folder=is_folder) or (is_folder and entry.name.startswith(".")):
                continue
            if not entry.name.isprintable():
                self._notes["left out names that are no UTF-8 text or have control characters"] = None
            elif entry.is_symlink():
                self._notes["links are not followed"] = None
            elif is_folder and prefix.count("/") < MAX_LEVELS:
                folders.append(f"{path}/")
            elif is_folder:
                self._notes[f"looked into folders of the first {MAX_LEVELS + 1} levels only"] = None
            elif entry.is_file(follow_symlinks=False):
                self._add(path)
        return folders

    def _entries_of(self, prefix: str) -> list[os.DirEntry[str]]:
        entries: list[os.DirEntry[str]] = []
        try:
            with os.scandir(self._folder / prefix) as found:
                for entry in found:
                    if not self._entries:
                        self._notes[f"looked at the first {MAX_ENTRIES} entries of the folder only"] = None
                        break
                    self._entries -= 1
                    entries.append(entry)
        except OSError:
            self._unreadable.append(prefix)
        if prefix and any(entry.name == _ENVIRONMENT for entry in entries):
            return []
        return sorted(entries, key=lambda entry: entry.name)

    def _add(self, path: str) -> None:
        if not is_worth_listing(path):
            with suppress(OSError):
                self._size += (self._folder / path).lstat().st_size
            return
        try:
            file = self._read(path)
        except OSError:
            self._unreadable.append(path)
            return
        if file is not None:
            self._size += file.size
            self._files.append(file)

    def _read(self, path: str) -> FolderFile | None:
        # Between the listing and here the file may have become a link or a pipe.
        flags = os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_CLOEXEC", 0)
        with open(os.open(self._folder / path, flags), "rb") as opened:  # noqa: PTH123 (a descriptor)
            status = os.fstat(opened.fileno())
            if not stat.S_ISREG(status.st_mode):
                return None
            if not (is_script(path) or is_settings(path) or is_data(path)):
                return FolderFile(path=path, size=status.st_size)
            kind = is_script(path)
            limit = min(MAX_SETTINGS if is_settings(path) else MAX_FILE, self._unread[kind])
            if path.lower().endswith(".parquet"):
                # Its columns are at its end.
                opened.seek(max(0, status.st_size - limit))
            content = opened.read(limit)
        self._unread[kind] -= len(content)
        if not limit:
            read = f"{MAX_SCRIPTS >> 20} MiB of scripts" if kind else f"{MAX_OTHERS >> 20} MiB of data and settings"
            self._notes[f"read {read} only"] = None
        return FolderFile(path=path, size=status.st_size, content=content, whole=len(content) >= status.st_size)


def create_file(path: Path, text: str) -> None:
    """Creates the file; CONFLICT if anything has its name, also a link that leads nowhere."""
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_NOFOLLOW", 0), 0o666)
    except FileExistsError:
        raise StrataError(
            Code.CONFLICT,
            f"{path} exists already, and 'strata init' overwrites nothing",
            hint="move it away to have another one written",
        ) from None
    except OSError as error:
        raise StrataError(Code.INVALID, f"{path} cannot be written: {error.strerror}") from error
    try:
        with open(descriptor, "w", encoding="utf-8", newline="\n") as file:  # noqa: PTH123 (a descriptor)
            file.write(text)
    except OSError as error:
        # A part of a manifest may be a valid one of fewer jobs.
        path.unlink(missing_ok=True)
        raise StrataError(Code.EXHAUSTED, f"{path} cannot be written: {error.strerror}") from error
