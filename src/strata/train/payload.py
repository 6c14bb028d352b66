"""Stores large batches and results as files named by their SHA-256: durable writes, verified reads, and removal of
those that nothing refers to.

A digest is handed out only when the file and its name are durable. Reading verifies the digest again: a payload is what
was written, or an error.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Set
from pathlib import Path
from typing import Final

from strata.base.atomic import sync_folder
from strata.base.digest import sha256_hex
from strata.base.errors import Code, StrataError
from strata.base.failpoint import failpoint
from strata.train.core import ops

_DIGEST: Final = re.compile(r"[0-9a-f]{64}")
_GONE: Final = ".gone"


class Payloads:
    """One folder of payloads. Blocking: a process with an event loop calls it in a thread."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._named = False
        """The name of the folder itself is durable."""

    def keep(self, data: bytes, *, inline_bytes: int = ops.INLINE_BYTES) -> ops.Payload:
        """Inline if it is small, else in a file that is durable when this returns."""
        return ops.InlinePayload(data) if len(data) <= inline_bytes else self.store(data)

    def store(self, data: bytes) -> ops.StoredPayload:
        """The same bytes twice are one file: a repeated request costs no space, and no second write."""
        sha256 = sha256_hex(data)
        path = self._path(sha256)
        if not _touch(path):
            path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            temporary = path.with_name(f".{sha256}.{os.getpid()}.{os.urandom(4).hex()}")
            try:
                _write_synced(temporary, data)
                failpoint("train.payload.before_rename")
                temporary.replace(path)
            finally:
                temporary.unlink(missing_ok=True)
            self._sync_names(path)
            failpoint("train.payload.after_rename")
        else:
            # Its writer may have died between the rename and the fsync of the folder.
            self._sync_names(path)
        return ops.StoredPayload(sha256=sha256, size=len(data))

    def _sync_names(self, path: Path) -> None:
        """The name of the file, and those of the folders it lies in, which may have been made for it."""
        sync_folder(path.parent)
        sync_folder(self._folder)
        if not self._named:
            sync_folder(self._folder.parent)
            self._named = True

    def read(self, payload: ops.Payload) -> bytes:
        """NOT_FOUND if the file is gone, CORRUPT if it is not what its name says."""
        if isinstance(payload, ops.InlinePayload):
            return payload.data
        try:
            data = self._path(payload.sha256).read_bytes()
        except FileNotFoundError as error:
            raise StrataError(Code.NOT_FOUND, f"there is no payload {payload.sha256}") from error
        except OSError as error:
            raise StrataError(Code.UNAVAILABLE, f"cannot read payload {payload.sha256}: {error.strerror}") from error
        if len(data) != payload.size or sha256_hex(data) != payload.sha256:
            raise StrataError(Code.CORRUPT, f"the file of payload {payload.sha256} holds something else")
        return data

    def remove(self, payload: ops.StoredPayload) -> None:
        self._path(payload.sha256).unlink(missing_ok=True)

    def remove_unreferenced(self, referenced: Set[str], before_s: float) -> tuple[int, int]:
        """Remove unreferenced files that were not written since; returns how many went, and how many were too young.

        A name that begins with a dot was left by a writer that died, or by an interrupted removal.
        """
        removed = young = 0
        folders = sorted(self._folder.glob("[0-9a-f][0-9a-f]"))
        for doomed in (path for folder in folders for path in sorted(folder.glob(f".*{_GONE}"))):
            _undo_removal(doomed, referenced, before_s)
        for file in (path for folder in folders for path in folder.iterdir()):
            if file.name in referenced:
                continue
            was_removed = _remove_if_old(file, before_s)
            removed, young = removed + was_removed, young + (not was_removed)
        return removed, young

    def _path(self, sha256: str) -> Path:
        if not _DIGEST.fullmatch(sha256):
            raise StrataError(Code.INVALID, f"{sha256!r} is not a SHA-256")
        return self._folder / sha256[:2] / sha256


def _touch(path: Path) -> bool:
    """Says whether the file exists. Resets its age, so that a concurrent removal of old files leaves it."""
    try:
        os.utime(path)
    except FileNotFoundError:
        return False
    return True


def _remove_if_old(file: Path, before_s: float) -> bool:
    """Says whether it was removed. A writer may store the same bytes at this moment and rely on the file."""
    try:
        if file.stat().st_mtime >= before_s:
            return False
        doomed = file.with_name(f".{file.name.removeprefix('.').removesuffix(_GONE)}{_GONE}")
        file.rename(doomed)
        failpoint("train.payload.aside")
        if doomed.stat().st_mtime >= before_s:
            doomed.rename(file)
            return False
        doomed.unlink()
    except FileNotFoundError:
        return True
    return True


def _undo_removal(doomed: Path, referenced: Set[str], before_s: float) -> None:
    """Put a file back whose removal was interrupted if it is referenced, or a writer relied on it meanwhile."""
    sha256 = doomed.name.removeprefix(".").removesuffix(_GONE)
    try:
        if _DIGEST.fullmatch(sha256) and (sha256 in referenced or doomed.stat().st_mtime >= before_s):
            with contextlib.suppress(FileExistsError):
                # Not a rename: a file that was written again meanwhile is younger, and stays.
                os.link(doomed, doomed.with_name(sha256))
            sync_folder(doomed.parent)
            doomed.unlink()
    except FileNotFoundError:
        return


def _write_synced(path: Path, data: bytes) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
