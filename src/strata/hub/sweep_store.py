"""The table of sweeps that search, as their manifests declare them. What was tried is in the jobs, not here."""

from __future__ import annotations

import sqlite3
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Final, Protocol

import msgspec

from strata.database.migrations import Component
from strata.database.sqlite import SqliteThread
from strata.fleet.ports import StoredSweep

if TYPE_CHECKING:
    from strata.database.postgres import Connections

SQLITE: Final = Component(
    "sweep",
    (
        """
        CREATE TABLE sweep (
          project TEXT NOT NULL, name TEXT NOT NULL, body BLOB NOT NULL, PRIMARY KEY (project, name)
        ) WITHOUT ROWID, STRICT;
        """,
    ),
)
POSTGRES: Final = Component(
    "sweep",
    (
        """
        CREATE TABLE sweep (
          project text NOT NULL, name text NOT NULL, body bytea NOT NULL, PRIMARY KEY (project, name)
        );
        """,
    ),
)
_SELECT: Final = "SELECT body FROM sweep ORDER BY project, name"
_encode: Final = msgspec.json.Encoder().encode
_decode: Final = msgspec.json.Decoder(StoredSweep).decode


class SweepStore(Protocol):
    async def sweeps(self) -> Sequence[StoredSweep]: ...

    async def replace(self, project: str, sweeps: Mapping[str, StoredSweep]) -> None:
        """Those of the project are these from now on."""


class SqliteSweepStore:
    def __init__(self, thread: SqliteThread) -> None:
        self._thread = thread

    async def sweeps(self) -> Sequence[StoredSweep]:
        rows = await self._thread.read(lambda db: db.execute(_SELECT).fetchall())
        return [_decode(body) for (body,) in rows]

    async def replace(self, project: str, sweeps: Mapping[str, StoredSweep]) -> None:
        def replace(db: sqlite3.Connection) -> None:
            db.execute("DELETE FROM sweep WHERE project = ?", (project,))
            rows = [(project, name, _encode(sweep)) for name, sweep in sweeps.items()]
            db.executemany("INSERT INTO sweep VALUES (?, ?, ?)", rows)

        await self._thread.write(replace)


class PostgresSweepStore:
    def __init__(self, connections: Connections) -> None:
        self._connections = connections

    async def sweeps(self) -> Sequence[StoredSweep]:
        return [_decode(row[0]) for row in await self._connections.run(_SELECT, {})]

    async def replace(self, project: str, sweeps: Mapping[str, StoredSweep]) -> None:
        async with self._connections.transaction() as connection:
            await connection.execute("DELETE FROM sweep WHERE project = %s", (project,))
            for name, sweep in sweeps.items():
                await connection.execute("INSERT INTO sweep VALUES (%s, %s, %s)", (project, name, _encode(sweep)))
