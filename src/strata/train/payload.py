"""Payloads too large for the journal and the links: files named by the SHA-256 of what they hold.

A digest is told to others only when the file and its name are on the disk. Reading checks the digest again: a payload
is what was written, or an error, never something else.
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
        """The folder's own name is on the disk."""

    def keep(self, data: bytes, *, inline_bytes: int = ops.INLINE_BYTES) -> ops.Payload:
        """As it is if it is small, else in a file that is durable when this returns."""
        return ops.Inline(data) if len(data) <= inline_bytes else self.store(data)

    def store(self, data: bytes) -> ops.Stored:
        """The same bytes twice are one file: a repeated request costs no space, and no second write."""
        sha256 = sha256_hex(data)
        place = self._place(sha256)
        if not _is_there(place):
            place.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            beside = place.with_name(f".{sha256}.{os.getpid()}.{os.urandom(4).hex()}")
            try:
                _write_synced(beside, data)
                failpoint("train.payload.before_rename")
                beside.replace(place)
            finally:
                beside.unlink(missing_ok=True)
            self._sync_names(place)
            failpoint("train.payload.after_rename")
        else:
            # Whoever wrote it may have died between the name and the sync of its folder.
            self._sync_names(place)
        return ops.Stored(sha256=sha256, size=len(data))

    def _sync_names(self, place: Path) -> None:
        """The name of the file, and those of the folders it lies in, which may have been made for it."""
        sync_folder(place.parent)
        sync_folder(self._folder)
        if not self._named:
            sync_folder(self._folder.parent)
            self._named = True

    def read(self, payload: ops.Payload) -> bytes:
        """NOT_FOUND if the file is gone, CORRUPT if it is not what its name says."""
        if isinstance(payload, ops.Inline):
            return payload.data
        try:
            data = self._place(payload.sha256).read_bytes()
        except FileNotFoundError as error:
            raise StrataError(Code.NOT_FOUND, f"there is no payload {payload.sha256}") from error
        except OSError as error:
            raise StrataError(Code.UNAVAILABLE, f"cannot read payload {payload.sha256}: {error.strerror}") from error
        if len(data) != payload.size or sha256_hex(data) != payload.sha256:
            raise StrataError(Code.CORRUPT, f"the file of payload {payload.sha256} holds something else")
        return data

    def forget(self, payload: ops.Stored) -> None:
        self._place(payload.sha256).unlink(missing_ok=True)

    def forget_all_but(self, needed: Set[str], before_s: float) -> tuple[int, int]:
        """Remove what nobody needs and nobody brought since then; how many went, and how many were too young.

        What begins with a dot is what a writer that died has left, or whoever removed old ones before.
        """
        gone = young = 0
        folders = sorted(self._folder.glob("[0-9a-f][0-9a-f]"))
        for aside in (each for folder in folders for each in sorted(folder.glob(f".*{_GONE}"))):
            _put_back(aside, needed, before_s)
        for file in (each for folder in folders for each in folder.iterdir()):
            if file.name in needed:
                continue
            removed = _remove_if_old(file, before_s)
            gone, young = gone + removed, young + (not removed)
        return gone, young

    def _place(self, sha256: str) -> Path:
        if not _DIGEST.fullmatch(sha256):
            raise StrataError(Code.INVALID, f"{sha256!r} is not a SHA-256")
        return self._folder / sha256[:2] / sha256


def _is_there(place: Path) -> bool:
    """Looking at it makes it young: whoever removes old ones leaves it to us."""
    try:
        os.utime(place)
    except FileNotFoundError:
        return False
    return True


def _remove_if_old(file: Path, before_s: float) -> bool:
    """Whether it went. Somebody may bring the same bytes at this moment, and believe that they are there."""
    try:
        if file.stat().st_mtime >= before_s:
            return False
        aside = file.with_name(f".{file.name.removeprefix('.').removesuffix(_GONE)}{_GONE}")
        file.rename(aside)
        failpoint("train.payload.aside")
        if aside.stat().st_mtime >= before_s:
            aside.rename(file)
            return False
        aside.unlink()
    except FileNotFoundError:
        return True
    return True


def _put_back(aside: Path, needed: Set[str], before_s: float) -> None:
    """What was on its way out when its remover died, and what somebody was told, in that moment, is there."""
    sha256 = aside.name.removeprefix(".").removesuffix(_GONE)
    try:
        if _DIGEST.fullmatch(sha256) and (sha256 in needed or aside.stat().st_mtime >= before_s):
            with contextlib.suppress(FileExistsError):
                # Not a rename: one that was written anew meanwhile is younger, and stays.
                os.link(aside, aside.with_name(sha256))
            sync_folder(aside.parent)
            aside.unlink()
    except FileNotFoundError:
        return


def _write_synced(path: Path, data: bytes) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
