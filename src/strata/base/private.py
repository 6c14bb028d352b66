"""Files and folders that only their owner can read: umask, modes, checks of owner and permissions, and
their wording.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from strata.base.errors import Code, StrataError


def set_private_umask() -> None:
    """Files that this process creates from now on are readable by its user only. Every server calls this first."""
    if os.name == "posix":
        os.umask(0o077)


def require_private_folder(folder: Path, holds: str) -> None:
    """Create the folder if it is missing; INVALID if another user owns it or can read it.

    An open folder is not closed silently: other users may read it for a reason.
    """
    # One by one: `parents=True` would create the parents readable by all, and the data folder is such a parent.
    for each in (*reversed(folder.parents), folder):
        if not each.exists():
            each.mkdir(exist_ok=True, mode=0o700)
    if os.name != "posix":
        return
    status = folder.stat()
    if status.st_uid != os.geteuid():
        raise StrataError(Code.INVALID, f"{holds} would lie in {folder}, which belongs to another user")
    mode = status.st_mode & 0o777
    if mode & 0o077:
        raise StrataError(
            Code.INVALID, f"others could reach {holds} in {folder} (mode {mode:04o})", hint=f"chmod 700 {folder}"
        )


def private_folder(path: Path) -> Path:
    """The folder, created if it is missing, closed to other users; INVALID if it belongs to another user."""
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    if os.name == "posix":
        status = path.stat()
        if status.st_uid != os.geteuid():
            raise StrataError(Code.INVALID, f"{path} belongs to another user", hint="choose another state folder")
        if status.st_mode & 0o077:
            path.chmod(0o700)
    return path


def make_private_file(path: Path) -> None:
    """Create the file, or close an existing one to other users, before anything is written to it.

    Errors are suppressed: the caller opens the file next and reports them.
    """
    with contextlib.suppress(OSError):
        os.close(os.open(path, os.O_RDWR | os.O_CREAT | getattr(os, "O_CLOEXEC", 0), 0o600))
    if os.name == "posix" and path.exists():
        status = path.stat()
        if status.st_mode & 0o077 and status.st_uid == os.geteuid():
            path.chmod(0o600)
