"""Guards against a full disk: a reserve of 16 MiB for the database, and a write probe every 2 s."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import Final

from strata.base import log
from strata.base.errors import StrataError
from strata.fleet.http.context import WriteProbe
from strata.hub.cursor_store import CursorStore

CHECK_S: Final = 2.0
RESERVE_BYTES: Final = 16 << 20
FILE: Final = "reserve"
_log = log.get(__name__)


class DiskGuard:
    """Releases the reserved space when the disk is full, so that keys can still be revoked and leases renewed."""

    def __init__(self, data: Path, store: CursorStore, writing: WriteProbe) -> None:
        self._path = data / FILE
        self._store = store
        self._writing = writing
        self._without_reserve = False

    async def run_once(self) -> None:
        try:
            await asyncio.to_thread(self._keep_reserve)
        except OSError as error:
            if not self._without_reserve:
                _log.error("no_disk_reserve", reason=str(error))
            self._without_reserve = True
        else:
            self._without_reserve = False
        try:
            await self._store.probe_write()
        except StrataError as error:
            if not self._writing.fails:
                _log.error("database_not_writable", reason=error.message)
            self._writing.fails = True
            return
        self._writing.fails = False

    def _keep_reserve(self) -> None:
        filesystem = os.statvfs(self._path.parent)
        free = filesystem.f_bavail * filesystem.f_frsize
        if free < RESERVE_BYTES // 4 and self._path.exists():
            self._path.unlink()
            _log.error("disk_full", reserve_released=RESERVE_BYTES)
        elif free > 4 * RESERVE_BYTES and not self._is_complete():
            descriptor = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
            try:
                os.posix_fallocate(descriptor, 0, RESERVE_BYTES)
            except OSError:
                self._path.unlink()
                raise
            finally:
                os.close(descriptor)

    def _is_complete(self) -> bool:
        return self._path.exists() and self._path.stat().st_size >= RESERVE_BYTES
