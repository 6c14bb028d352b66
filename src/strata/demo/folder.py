"""The folder of one demo: private, temporary, with a lock that its processes hold; and removal of those that killed
demos left."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from strata.base.errors import Code, StrataError
from strata.base.file_lock import try_lock

PREFIX: Final = "strata-demo-"
LOCK: Final = "strata-demo.lock"
LEAST_FREE: Final = 1 << 30
"""XDG_RUNTIME_DIR lies in memory, as a rule: with less room the folder of temporary files is used."""
_TRIES: Final = 10


@dataclass(frozen=True)
class DemoFolder:
    path: Path
    lock: int
    """The descriptor that holds the lock. Whoever inherits it holds the lock too."""


def base_folders(environ: Mapping[str, str]) -> list[Path]:
    """Returns where demos may be: the folder of this user's session, if there is one, and that of temporary files."""
    session = Path(environ.get("XDG_RUNTIME_DIR") or "/nonexistent")
    folders = [session] if session.is_absolute() and os.access(session, os.W_OK | os.X_OK) else []
    return [*folders, Path(tempfile.gettempdir())]


def open_folder(bases: list[Path]) -> DemoFolder:
    """A new folder in the first of these that has room."""
    base = next((each for each in bases if shutil.disk_usage(each).free >= LEAST_FREE), bases[-1])
    for _ in range(_TRIES):
        path = Path(tempfile.mkdtemp(prefix=PREFIX, dir=base))
        try:
            lock = try_lock(path / LOCK)
        except FileNotFoundError:
            continue
        # Another demo that starts at this moment may have found it without a lock, and removes it.
        if lock is not None and (path / LOCK).exists():
            return DemoFolder(path, lock)
        if lock is not None:
            os.close(lock)
    raise StrataError(Code.UNAVAILABLE, f"no folder could be made in {base}: other demos start all the time")


def remove_abandoned(bases: list[Path]) -> list[Path]:
    """Remove the folders of this user's demos of which no process is left. Returns those that were there."""
    removed = []
    for base in dict.fromkeys(bases):
        for path in base.glob(f"{PREFIX}*"):
            try:
                if not _is_demo(path):
                    continue
                lock = try_lock(path / LOCK)
            except OSError:
                # Another demo removes it at this moment, or nobody may read it.
                continue
            if lock is None:
                continue
            try:
                shutil.rmtree(path, ignore_errors=True)
            finally:
                os.close(lock)
            removed.append(path)
    return removed


def _is_demo(path: Path) -> bool:
    """Says whether a demo of this user made the folder: it has the lock, or nothing yet."""
    if path.is_symlink() or not path.is_dir() or path.stat().st_uid != os.geteuid():
        return False
    names = {each.name for each in path.iterdir()}
    return not names or (LOCK in names and not (path / LOCK).is_symlink())
