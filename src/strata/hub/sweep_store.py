"""The tables of sweeps that search: as their manifests declare them, and which point each number of a trial has.

What was tried is in the jobs, not here. A number is claimed before its job is queued, so two hubs that propose other
points for it queue one and the same job.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Final, Protocol

import msgspec

from strata.base.digest import sha256_hex
from strata.database.events import EventRecord, record_postgres, record_sqlite
from strata.database.migrations import Component
from strata.database.sqlite import SqliteThread
from strata.fleet.core.search import SearchSweep
from strata.fleet.core.sweep_plan import Point
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
        """
        CREATE TABLE sweep_trial (
          project TEXT NOT NULL, digest TEXT NOT NULL, number INTEGER NOT NULL, point BLOB NOT NULL,
          PRIMARY KEY (project, digest, number)
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
        """
        CREATE TABLE sweep_trial (
          project text NOT NULL, digest text NOT NULL, number bigint NOT NULL, point bytea NOT NULL,
          PRIMARY KEY (project, digest, number)
        );
        """,
    ),
)
_SELECT: Final = "SELECT body FROM sweep ORDER BY project, name"
_encode: Final = msgspec.json.Encoder().encode
_decode: Final = msgspec.json.Decoder(StoredSweep).decode
_decode_point: Final = msgspec.json.Decoder(Point).decode


class SweepStore(Protocol):
    async def sweeps(self) -> Sequence[StoredSweep]: ...

    async def replace(self, project: str, sweeps: Mapping[str, StoredSweep]) -> None:
        """Those of the project are these from now on."""

    async def claim_trial(self, sweep: SearchSweep, number: int, point: Point) -> Point:
        """The point of the trial with this number: this one, or the one with which it was claimed before."""

    async def record_failure(self, sweep: SearchSweep, reason: str, now_s: float) -> None:
        """An event that says why the sweep does not go on."""


def _digest(sweep: SearchSweep) -> str:
    """A sweep that is declared anew begins anew."""
    return sha256_hex(_encode(sweep))


def _failure(sweep: SearchSweep, reason: str, now_s: float) -> EventRecord:
    body = {"project": sweep.base.project, "reason": reason}
    return EventRecord(now_s, "hub", "sweep.failed", sweep.base.sweep, body)


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
            declared = msgspec.json.encode([_digest(each.sweep) for each in sweeps.values()])
            delete = "DELETE FROM sweep_trial WHERE project = ? AND digest NOT IN (SELECT value FROM json_each(?))"
            db.execute(delete, (project, declared.decode()))

        await self._thread.write(replace)

    async def claim_trial(self, sweep: SearchSweep, number: int, point: Point) -> Point:
        key = sweep.base.project, _digest(sweep), number

        def claim(db: sqlite3.Connection) -> bytes:
            db.execute("INSERT INTO sweep_trial VALUES (?, ?, ?, ?) ON CONFLICT DO NOTHING", (*key, _encode(point)))
            select = "SELECT point FROM sweep_trial WHERE (project, digest, number) = (?, ?, ?)"
            return bytes(db.execute(select, key).fetchone()[0])

        return _decode_point(await self._thread.write(claim))

    async def record_failure(self, sweep: SearchSweep, reason: str, now_s: float) -> None:
        await self._thread.write(lambda db: record_sqlite(db, [_failure(sweep, reason, now_s)]))


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
            declared = [_digest(each.sweep) for each in sweeps.values()]
            delete = "DELETE FROM sweep_trial WHERE project = %s AND NOT digest = ANY(%s)"
            await connection.execute(delete, (project, declared))

    async def claim_trial(self, sweep: SearchSweep, number: int, point: Point) -> Point:
        key = sweep.base.project, _digest(sweep), number
        async with self._connections.transaction() as connection:
            insert = "INSERT INTO sweep_trial VALUES (%s, %s, %s, %s) ON CONFLICT DO NOTHING"
            await connection.execute(insert, (*key, _encode(point)))
            # A statement of its own sees what another transaction committed while the first one waited for it.
            select = "SELECT point FROM sweep_trial WHERE (project, digest, number) = (%s, %s, %s)"
            rows = await (await connection.execute(select, key)).fetchall()
        return _decode_point(rows[0][0])

    async def record_failure(self, sweep: SearchSweep, reason: str, now_s: float) -> None:
        async with self._connections.transaction() as connection:
            await record_postgres(connection, [_failure(sweep, reason, now_s)])
