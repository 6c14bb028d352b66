"""The hub's own rows: the cursor of every webhook in the event feed, the schemas of trainers, and the write probe."""

from __future__ import annotations

import sqlite3
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final, Protocol

import msgspec

from strata.database.migrations import Component
from strata.database.sqlite import SqliteThread

if TYPE_CHECKING:
    from strata.database.postgres import Connections

SQLITE: Final = Component(
    "hub",
    (
        """
        CREATE TABLE hub_cursor (name TEXT PRIMARY KEY, cursor TEXT NOT NULL) WITHOUT ROWID, STRICT;
        CREATE TABLE hub_schema (trainer TEXT PRIMARY KEY, body BLOB NOT NULL) WITHOUT ROWID, STRICT;
        """,
        """
        CREATE TABLE hub_health (id INTEGER PRIMARY KEY, probes INTEGER NOT NULL) STRICT;
        DELETE FROM hub_cursor WHERE name = 'health';
        """,
    ),
)
POSTGRES: Final = Component(
    "hub",
    (
        """
        CREATE TABLE hub_cursor (name text PRIMARY KEY, cursor text NOT NULL);
        CREATE TABLE hub_schema (trainer text PRIMARY KEY, body bytea NOT NULL);
        """,
        """
        CREATE TABLE hub_health (id bigint PRIMARY KEY, probes bigint NOT NULL);
        DELETE FROM hub_cursor WHERE name = 'health';
        """,
    ),
)
_PROBE: Final = "INSERT INTO hub_health VALUES (1, 1) ON CONFLICT (id) DO UPDATE SET probes = hub_health.probes + 1"
_encode: Final = msgspec.json.Encoder().encode
_decode: Final = msgspec.json.Decoder().decode


class CursorStore(Protocol):
    async def cursor(self, name: str) -> str | None:
        """None if no reader of this name has read anything yet."""

    async def put_cursor(self, name: str, cursor: str) -> None: ...

    async def schemas(self) -> Mapping[str, Any]: ...

    async def put_schemas(self, schemas: Mapping[str, Any]) -> None: ...

    async def probe_write(self) -> None:
        """Write one row; raises if the database cannot be written to."""


class SqliteCursorStore:
    def __init__(self, thread: SqliteThread) -> None:
        self._thread = thread

    async def cursor(self, name: str) -> str | None:
        select = "SELECT cursor FROM hub_cursor WHERE name = ?"
        row = await self._thread.read(lambda db: db.execute(select, (name,)).fetchone())
        return None if row is None else str(row[0])

    async def put_cursor(self, name: str, cursor: str) -> None:
        insert = "INSERT INTO hub_cursor VALUES (?, ?) ON CONFLICT (name) DO UPDATE SET cursor = excluded.cursor"
        await self._thread.write(lambda db: db.execute(insert, (name, cursor)))

    async def schemas(self) -> Mapping[str, Any]:
        rows = await self._thread.read(lambda db: db.execute("SELECT trainer, body FROM hub_schema").fetchall())
        return {trainer: _decode(body) for trainer, body in rows}

    async def put_schemas(self, schemas: Mapping[str, Any]) -> None:
        insert = "INSERT INTO hub_schema VALUES (?, ?) ON CONFLICT (trainer) DO UPDATE SET body = excluded.body"
        rows = [(trainer, _encode(schema)) for trainer, schema in schemas.items()]

        def put(db: sqlite3.Connection) -> None:
            db.executemany(insert, rows)

        await self._thread.write(put)

    async def probe_write(self) -> None:
        await self._thread.write(lambda db: db.execute(_PROBE))


class PostgresCursorStore:
    def __init__(self, connections: Connections) -> None:
        self._connections = connections

    async def cursor(self, name: str) -> str | None:
        rows = await self._connections.run("SELECT cursor FROM hub_cursor WHERE name = %(name)s", {"name": name})
        return str(rows[0][0]) if rows else None

    async def put_cursor(self, name: str, cursor: str) -> None:
        await self._connections.write(
            "INSERT INTO hub_cursor VALUES (%(name)s, %(cursor)s)"
            " ON CONFLICT (name) DO UPDATE SET cursor = excluded.cursor",
            {"name": name, "cursor": cursor},
        )

    async def schemas(self) -> Mapping[str, Any]:
        rows = await self._connections.run("SELECT trainer, body FROM hub_schema", {})
        return {trainer: _decode(body) for trainer, body in rows}

    async def put_schemas(self, schemas: Mapping[str, Any]) -> None:
        async with self._connections.transaction() as connection:
            await connection.cursor().executemany(
                "INSERT INTO hub_schema VALUES (%s, %s) ON CONFLICT (trainer) DO UPDATE SET body = excluded.body",
                [(trainer, _encode(schema)) for trainer, schema in schemas.items()],
            )

    async def probe_write(self) -> None:
        await self._connections.write(_PROBE, {})
