"""What a full disk may not stop: a reserve for the database, and a write now and then that shows it still can."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import Final

from strata.base import log
from strata.base.errors import StrataError
from strata.fleet.http.context import WriteProbe
from strata.hub.records import Records

CHECK_S: Final = 2.0
RESERVE_BYTES: Final = 16 << 20
FILE: Final = "reserve"
_log = log.get(__name__)


class DiskGuard:
    """Gives the reserve back when the disk is full, so that keys can be revoked and hosts heard, and takes it again."""

    def __init__(self, data: Path, records: Records, writing: WriteProbe) -> None:
        self._path = data / FILE
        self._records = records
        self._writing = writing
        self._checks = 0
        self._without = False

    async def run_once(self) -> None:
        try:
            await asyncio.to_thread(self._keep_reserve)
        except OSError as error:
            if not self._without:
                _log.error("no_disk_reserve", reason=str(error))
            self._without = True
        else:
            self._without = False
        self._checks += 1
        try:
            await self._records.put_cursor("health", str(self._checks))
        except StrataError as error:
            if not self._writing.fails:
                _log.error("database_not_writable", reason=error.message)
            self._writing.fails = True
            return
        self._writing.fails = False

    def _keep_reserve(self) -> None:
        found = os.statvfs(self._path.parent)
        free = found.f_bavail * found.f_frsize
        if free < RESERVE_BYTES // 4 and self._path.exists():
            self._path.unlink()
            _log.error("disk_full", reserve_released=RESERVE_BYTES)
        elif free > 4 * RESERVE_BYTES and not self._whole():
            descriptor = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
            try:
                os.posix_fallocate(descriptor, 0, RESERVE_BYTES)
            except OSError:
                self._path.unlink()
                raise
            finally:
                os.close(descriptor)

    def _whole(self) -> bool:
        return self._path.exists() and self._path.stat().st_size >= RESERVE_BYTES
