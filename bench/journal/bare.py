"""The bare engines the journal is held against: the same drivers and durability, one row per fact, nothing around it.

Each is written as well as its driver allows: it is the yardstick. Measured and slower on PostgreSQL than one prepared
VALUES list over a raw cursor: `unnest` of arrays, binary COPY, `executemany`.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, Final, Self

import psycopg

_CURSOR_ROWS: Final = 10_000
_INSERT: Final = "INSERT INTO bare VALUES (?, ?, ?, ?)"


class BarePostgres:
    """One open connection and one table with a row per fact."""

    def __init__(self, connection: psycopg.AsyncConnection[tuple[Any, ...]]) -> None:
        self._connection = connection
        self._cursor = psycopg.AsyncRawCursor(connection)
        self._position = 0

    @classmethod
    async def open(cls, url: str) -> Self:
        connection = await psycopg.AsyncConnection.connect(url, autocommit=True)
        await connection.execute("SET synchronous_commit = on")
        await connection.execute("DROP TABLE IF EXISTS bare")
        await connection.execute(
            "CREATE TABLE bare (stream text NOT NULL, position bigint NOT NULL, epoch bigint NOT NULL,"
            " fact bytea NOT NULL, PRIMARY KEY (stream, position))"
        )
        return cls(connection)

    async def append(self, facts: Sequence[bytes]) -> None:
        await self._cursor.execute(_insert(len(facts)), ("bare", self._position + 1, 1, *facts), prepare=True)
        self._position += len(facts)

    async def read_all(self) -> int:
        """How many facts a server-side cursor hands over."""
        count = 0
        async with self._connection.transaction(), self._connection.cursor("all", binary=True) as cursor:
            await cursor.execute("SELECT position, epoch, fact FROM bare WHERE stream = 'bare' ORDER BY position")
            while rows := await cursor.fetchmany(_CURSOR_ROWS):
                for _ in rows:
                    count += 1
        return count

    async def close(self) -> None:
        await self._connection.close()


@lru_cache
def _insert(rows: int) -> str:
    first = "($1::text, $2::bigint, $3::bigint, $4::bytea)"
    others = (f"($1, $2 + {row}, $3, ${row + 4})" for row in range(1, rows))
    return f"INSERT INTO bare (stream, position, epoch, fact) VALUES {', '.join((first, *others))}"


class BareSqlite:
    """One connection, in use by one thread at a time, and one table with a row per fact."""

    def __init__(self, path: Path) -> None:
        self._db = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
        for setting in ("locking_mode = EXCLUSIVE", "journal_mode = WAL", "synchronous = FULL", "fullfsync = ON"):
            self._db.execute(f"PRAGMA {setting}")
        self._db.execute(
            "CREATE TABLE bare (stream TEXT NOT NULL, position INTEGER NOT NULL, epoch INTEGER NOT NULL,"
            " fact BLOB NOT NULL, PRIMARY KEY (stream, position)) WITHOUT ROWID, STRICT"
        )
        self._position = 0

    def append(self, facts: Sequence[bytes]) -> None:
        rows = [("bare", position, 1, fact) for position, fact in enumerate(facts, self._position + 1)]
        self._db.execute("BEGIN IMMEDIATE")
        self._db.executemany(_INSERT, rows)
        self._db.execute("COMMIT")
        self._position += len(facts)

    def append_one(self, fact: bytes) -> None:
        """A lone statement commits itself; `BEGIN` and `COMMIT` would only cost."""
        self._db.execute(_INSERT, ("bare", self._position + 1, 1, fact))
        self._position += 1

    def read_all(self) -> int:
        count = 0
        cursor = self._db.execute("SELECT position, epoch, fact FROM bare WHERE stream = 'bare' ORDER BY position")
        while rows := cursor.fetchmany(_CURSOR_ROWS):
            for _ in rows:
                count += 1
        return count

    def close(self) -> None:
        self._db.close()
