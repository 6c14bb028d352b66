"""Stores logs, metrics and exec output as one append-only file per stream: pieces by offset, at most 4 MiB a piece, 512
MiB a stream, 2 GiB a job.

The agent sends the offset of the first byte of a piece, so appending is idempotent: a repeated piece is recognised, a
missing one is an error. The reply says how many bytes are stored, and the agent continues from there. Each attempt has
files of its own, so a host whose lease expired never writes into the files of its successor. No job row is touched:
logs are the largest load.

Hubs on one database share the folder. A piece is written at its own offset, never "at the end", so two hubs that get
the same piece at once write the same bytes to the same place.
"""

from __future__ import annotations

import asyncio
import os
import re
from pathlib import Path
from typing import Final, Literal

from strata.base.atomic import sync_folder
from strata.base.errors import Code, StrataError
from strata.base.failpoint import failpoint

Name = Literal["log", "metrics"]
MAX_PIECE: Final = 4 * 1024 * 1024
MAX_STREAM: Final = 512 * 1024 * 1024
"""The size of one stream of an attempt; an agent sends no more than half of it."""
MAX_JOB: Final = 2 * 1024 * 1024 * 1024
"""The size of all streams of all attempts of a job."""
_COUNTED: Final = 1024 * 1024
"""The streams of a job are added up whenever one of them begins another piece of this size."""
_JOB: Final = re.compile(r"job[0-9]+_[0-9a-f]{64}")
_NAME: Final = re.compile(r"log|metrics|exec-[0-9a-f]{16}")


class AttemptStreams:
    def __init__(
        self, folder: Path, *, max_bytes: int = MAX_STREAM, max_job_bytes: int = MAX_JOB, keep_free_bytes: int = 0
    ) -> None:
        self._folder = folder
        self._max_bytes = max_bytes
        self._max_job_bytes = max_job_bytes
        self._keep_free_bytes = keep_free_bytes
        self._locks: dict[Path, asyncio.Lock] = {}

    async def append(self, job_id: str, epoch: int, name: str, offset: int, piece: bytes, *, last: bool = False) -> int:
        """Returns how many bytes of the stream are stored now. `last`: they are on the disk, not only in the kernel."""
        path = self._path(job_id, epoch, name)
        if len(piece) > MAX_PIECE:
            raise StrataError(Code.INVALID, f"a piece of a stream has at most {MAX_PIECE} bytes")
        lock = self._locks.setdefault(path, asyncio.Lock())
        try:
            async with lock:
                return await asyncio.to_thread(self._write, path, offset, piece, last=last)
        finally:
            if not lock.locked():
                self._locks.pop(path, None)

    async def read(self, job_id: str, epoch: int, name: str, offset: int, limit: int = MAX_PIECE) -> bytes:
        """Reads from `offset` on, at most `limit` bytes; nothing at the end, nor if nothing was ever sent."""
        return await asyncio.to_thread(_read, self._path(job_id, epoch, name), offset, min(limit, MAX_PIECE))

    async def size(self, job_id: str, epoch: int, name: str) -> int:
        return await asyncio.to_thread(_size, self._path(job_id, epoch, name))

    def _path(self, job_id: str, epoch: int, name: str) -> Path:
        # Ids come from outside, and become a path only if they are ids.
        if not _JOB.fullmatch(job_id) or epoch < 1 or not _NAME.fullmatch(name):
            raise StrataError(Code.NOT_FOUND, "there is no such stream")
        digest = job_id.rpartition("_")[2]
        return self._folder / digest[:2] / job_id / f"{epoch}.{name}"

    def _write(self, path: Path, offset: int, piece: bytes, *, last: bool) -> int:
        stored = _size(path)
        if offset > stored:
            raise StrataError(
                Code.PRECONDITION,
                f"bytes {stored} to {offset} are missing here",
                hint="send again from there",
                size=stored,
            )
        new = piece[stored - offset :]
        if stored + len(new) > self._max_bytes:
            raise StrataError(Code.EXHAUSTED, f"a stream has at most {self._max_bytes} bytes", size=stored)
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        if new:
            self._check_room(path, stored, len(new))
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            _write_whole(descriptor, new, stored)
            failpoint("fleet.streams.written")
            if last:
                os.fsync(descriptor)
                sync_folder(path.parent)
        finally:
            os.close(descriptor)
        return stored + len(new)

    def _check_room(self, path: Path, stored: int, more: int) -> None:
        found = os.statvfs(path.parent)
        if found.f_bavail * found.f_frsize < self._keep_free_bytes + more:
            raise StrataError(
                Code.EXHAUSTED, "the disk of the hub has no room for logs and metrics", hint="free some space"
            )
        if stored and (stored + more) // _COUNTED == stored // _COUNTED:
            return
        if sum(entry.stat().st_size for entry in os.scandir(path.parent)) + more > self._max_job_bytes:
            raise StrataError(
                Code.EXHAUSTED, f"logs and metrics of a job have at most {self._max_job_bytes} bytes", size=stored
            )


def _write_whole(descriptor: int, data: bytes, offset: int) -> None:
    left = memoryview(data)
    while left:
        written = os.pwrite(descriptor, left, offset)
        left, offset = left[written:], offset + written


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0


def _read(path: Path, offset: int, limit: int) -> bytes:
    try:
        with path.open("rb") as file:
            file.seek(offset)
            return file.read(limit)
    except FileNotFoundError:
        return b""
