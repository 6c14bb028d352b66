"""The same suite on both databases: a test takes `store`, and `read_events` to see what was recorded."""

from __future__ import annotations

from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path

import pytest

from strata.database import events
from strata.database.migrations import SqliteComponents, upgrade_postgres
from strata.database.postgres import Connections
from strata.database.sqlite import SqliteThread
from strata.database.transaction import Database, PostgresDatabase, SqliteDatabase
from strata.identity.store import POSTGRES, SQLITE, IdentityStore
from tests.support.feed import ReadEvents


@pytest.fixture(params=["sqlite", "postgres"])
async def opened(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[tuple[IdentityStore, ReadEvents]]:
    if request.param == "sqlite":
        thread = await SqliteThread.open(tmp_path / "hub.db", SqliteComponents([events.SQLITE, SQLITE]))
        yield _on(SqliteDatabase(thread))
        await thread.close()
        return
    connections = Connections(request.getfixturevalue("postgres_url"), 8, 60.0, what="hub")
    async with connections.acquire() as connection:
        await upgrade_postgres(connection, [events.POSTGRES, POSTGRES])
    yield _on(PostgresDatabase(connections))
    await connections.close()


@pytest.fixture
def store(opened: tuple[IdentityStore, ReadEvents]) -> IdentityStore:
    return opened[0]


@pytest.fixture
def read_events(opened: tuple[IdentityStore, ReadEvents]) -> ReadEvents:
    return opened[1]


def _on(database: Database) -> tuple[IdentityStore, ReadEvents]:
    return IdentityStore(database), partial(events.read, database)
