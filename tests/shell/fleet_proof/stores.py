"""Real stores for many short histories: a file or memory each on SQLite, one emptied database on PostgreSQL."""

from __future__ import annotations

import asyncio
import random
import sqlite3
import tempfile
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any, Final, TypeVar, cast

from strata.database import events
from strata.database.migrations import SqliteComponents, upgrade_postgres
from strata.database.postgres import Connections
from strata.database.sqlite import SqliteThread
from strata.fleet.store.postgres import tables as postgres_tables
from strata.fleet.store.postgres.store import build_postgres_store
from strata.fleet.store.sqlite import tables as sqlite_tables
from strata.fleet.store.sqlite.store import build_sqlite_store
from strata.fleet.store.store import FleetStore
from tests.shell.fleet_proof.histories import run_history
from tests.support.postgres import PostgresDatabases

T = TypeVar("T")

COMPONENTS: Final = (events.SQLITE, sqlite_tables.COMPONENT)
SCHEMA: Final = SqliteComponents(COMPONENTS)
_IDLE: Final = list[sqlite3.Connection]()
"""Databases in memory that are not in use."""
_TABLES: Final = "job, job_after, ready, ripening, lease, reservation, attempt, event, req_class, host, host_beat"


async def open_sqlite(path: Path) -> FleetStore:
    return build_sqlite_store(await SqliteThread.open(path, SCHEMA))


class SqliteMemory:
    """A database in memory, used in the thread of its only caller: what `SqliteThread` does, one function for each
    transaction, without a disk to wait for and without a change of threads for every statement.

    All is rolled back at the end, and the next one uses the same connection: its tables are empty and its statements
    prepared.
    """

    def __init__(self, idle: list[sqlite3.Connection]) -> None:
        self._idle = idle
        self._db = idle.pop() if idle else _connect()
        self._db.execute("BEGIN")

    async def write(self, run: Callable[[sqlite3.Connection], T]) -> T:
        self._db.execute("SAVEPOINT one")
        try:
            return run(self._db)
        except BaseException:
            self._db.execute("ROLLBACK TO one")
            raise
        finally:
            self._db.execute("RELEASE one")

    async def read(self, run: Callable[[sqlite3.Connection], T]) -> T:
        return run(self._db)

    async def close(self) -> None:
        self._db.execute("ROLLBACK")
        self._idle.append(self._db)


def _connect() -> sqlite3.Connection:
    db = sqlite3.connect(":memory:", isolation_level=None, cached_statements=256)
    db.execute("PRAGMA foreign_keys = ON")
    db.execute("BEGIN")
    SCHEMA.upgrade(db)
    db.execute("COMMIT")
    return db


def open_memory() -> FleetStore:
    return build_sqlite_store(cast("SqliteThread", SqliteMemory(_IDLE)))


async def open_postgres(url: str) -> FleetStore:
    connections = Connections(url, 8, 60.0, what="hub")
    async with connections.acquire() as connection:
        await upgrade_postgres(connection, [events.POSTGRES, postgres_tables.COMPONENT])
    return build_postgres_store(connections)


async def sqlite_history(seed: int) -> str | None:
    with tempfile.TemporaryDirectory(prefix="strata-history-") as folder:
        store = await open_sqlite(Path(folder) / "hub.db")
        try:
            return await run_history(store, seed)
        finally:
            await store.close()


async def postgres_history(seed: int, server: PostgresDatabases, url: str) -> str | None:
    """Every third time all connections are ended by the server while the clients work."""
    store = await open_postgres(url)
    try:
        await store.database.changed(f"TRUNCATE {_TABLES} RESTART IDENTITY CASCADE")
        return await run_history(store, seed, hurt=_terminate(seed, server, url) if seed % 3 == 0 else None)
    finally:
        await store.close()


def _terminate(seed: int, server: PostgresDatabases, url: str) -> Callable[[], Coroutine[Any, Any, None]]:
    rng = random.Random(seed)

    async def terminate() -> None:
        for _ in range(2):
            # Not a wait for something: the moment of the blow is a part of the seed.
            await asyncio.sleep(rng.random() * 0.1)
            await asyncio.to_thread(server.terminate_backends, url)

    return terminate
