"""One suite: a test that asks for `journal` runs on each adapter, and on the one the simulation reaches by wire."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import pytest

from strata.base.clock import SystemClock
from strata.journal.port import Journal
from strata.journal.postgres import PostgresJournal
from strata.journal.sqlite import SqliteJournal
from tests.support.memory_journal import MemoryDisk, MemoryJournal
from tests.support.remote_journal import RemoteJournal, serve

OpenJournal = Callable[[], Awaitable[Journal]]


@pytest.fixture(params=["memory", "remote", "sqlite", "postgres"])
def open_again(request: pytest.FixtureRequest, tmp_path: Path) -> OpenJournal:
    """Opens the same stored journal each time it is called."""
    clock = SystemClock()
    if request.param == "memory":
        disk = MemoryDisk()

        async def open_memory() -> Journal:
            return MemoryJournal(clock, disk)

        return open_memory
    if request.param == "remote":
        far_disk = MemoryDisk()

        async def open_remote() -> Journal:
            far = MemoryJournal(clock, far_disk)
            return RemoteJournal(lambda payload: serve(far, payload))

        return open_remote
    if request.param == "sqlite":
        return lambda: SqliteJournal.open(tmp_path / "journal.db", clock)
    url: str = request.getfixturevalue("postgres_url")
    return lambda: PostgresJournal.open(url, clock)


@pytest.fixture
async def journal(open_again: OpenJournal) -> AsyncIterator[Journal]:
    async with await open_again() as opened:
        yield opened
