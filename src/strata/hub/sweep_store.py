"""The tables of sweeps: as their manifests declare them, and which point each number of a trial has.

What was tried is in the jobs, not here. A number is claimed before its job is queued, so two hubs that propose other
points for it queue one and the same job.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Protocol

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
    2,
    (
        """
        CREATE TABLE sweep (
          project TEXT NOT NULL, name TEXT NOT NULL, body BLOB NOT NULL, PRIMARY KEY (project, name)
        ) WITHOUT ROWID, STRICT;
        CREATE TABLE sweep_trial (
          project TEXT NOT NULL, digest TEXT NOT NULL, number INTEGER NOT NULL, point BLOB NOT NULL,
          PRIMARY KEY (project, digest, number)
        ) WITHOUT ROWID, STRICT;
        """,
    ),
)
POSTGRES: Final = Component(
    "sweep",
    2,
    (
        """
        CREATE TABLE sweep (
          project text NOT NULL, name text NOT NULL, body bytea NOT NULL, PRIMARY KEY (project, name)
        );
        CREATE TABLE sweep_trial (
          project text NOT NULL, digest text NOT NULL, number bigint NOT NULL, point bytea NOT NULL,
          PRIMARY KEY (project, digest, number)
        );
        """,
    ),
)
_SELECT: Final = "SELECT project, name, body FROM sweep"
_ORDER: Final = "ORDER BY project, name"
_encode: Final = msgspec.json.Encoder().encode
_decode: Final = msgspec.json.Decoder(StoredSweep).decode
_decode_point: Final = msgspec.json.Decoder(Point).decode


@dataclass(frozen=True)
class SweepChanges:
    """Sweeps as they are from now on, and the events of that."""

    puts: Sequence[StoredSweep] = ()
    events: Sequence[EventRecord] = ()


Decide = Callable[[Mapping[str, StoredSweep]], SweepChanges]
"""From the sweeps of a project, by name, to what changes in them."""


class SweepStore(Protocol):
    async def sweeps(self) -> Sequence[StoredSweep]: ...

    async def change(self, project: str, decide: Decide) -> None:
        """Change what `decide` says in one transaction; every other sweep stays as it is."""

    async def claim_trial(self, sweep: SearchSweep, number: int, point: Point) -> Point:
        """The point of the trial with this number: this one, or the one with which it was claimed before."""

    async def record(self, event: EventRecord) -> None: ...


def _digest(sweep: SearchSweep) -> str:
    """A sweep that is declared anew begins anew."""
    return sha256_hex(_encode(sweep))


def _row(row: Sequence[Any]) -> StoredSweep:
    project, name, body = row
    return msgspec.structs.replace(_decode(body), project=project, name=name)


def _outdated(there: Mapping[str, StoredSweep], puts: Sequence[StoredSweep]) -> list[str]:
    """The digests of the searches that are declared anew."""
    before = [(there[put.name].sweep, put.sweep) for put in puts if put.name in there]
    return [_digest(old) for old, new in before if old is not None and old != new]


class SqliteSweepStore:
    def __init__(self, thread: SqliteThread) -> None:
        self._thread = thread

    async def sweeps(self) -> Sequence[StoredSweep]:
        return list(map(_row, await self._thread.read(lambda db: db.execute(f"{_SELECT} {_ORDER}").fetchall())))

    async def change(self, project: str, decide: Decide) -> None:
        def change(db: sqlite3.Connection) -> None:
            rows = map(_row, db.execute(f"{_SELECT} WHERE project = ?", (project,)).fetchall())
            there = {row.name: row for row in rows}
            changes = decide(there)
            put = "INSERT INTO sweep VALUES (?, ?, ?) ON CONFLICT (project, name) DO UPDATE SET body = excluded.body"
            db.executemany(put, [(project, each.name, _encode(each)) for each in changes.puts])
            delete = "DELETE FROM sweep_trial WHERE project = ? AND digest = ?"
            db.executemany(delete, [(project, digest) for digest in _outdated(there, changes.puts)])
            record_sqlite(db, changes.events)

        await self._thread.write(change)

    async def claim_trial(self, sweep: SearchSweep, number: int, point: Point) -> Point:
        key = sweep.base.project, _digest(sweep), number

        def claim(db: sqlite3.Connection) -> bytes:
            db.execute("INSERT INTO sweep_trial VALUES (?, ?, ?, ?) ON CONFLICT DO NOTHING", (*key, _encode(point)))
            select = "SELECT point FROM sweep_trial WHERE (project, digest, number) = (?, ?, ?)"
            return bytes(db.execute(select, key).fetchone()[0])

        return _decode_point(await self._thread.write(claim))

    async def record(self, event: EventRecord) -> None:
        await self._thread.write(lambda db: record_sqlite(db, [event]))


class PostgresSweepStore:
    def __init__(self, connections: Connections) -> None:
        self._connections = connections

    async def sweeps(self) -> Sequence[StoredSweep]:
        return list(map(_row, await self._connections.run(f"{_SELECT} {_ORDER}", {})))

    async def change(self, project: str, decide: Decide) -> None:
        async with self._connections.transaction() as connection:
            # Who decides about a name that is not there yet locks no row.
            await connection.execute("LOCK TABLE sweep IN SHARE ROW EXCLUSIVE MODE")
            rows = await (await connection.execute(f"{_SELECT} WHERE project = %s", (project,))).fetchall()
            there = {row.name: row for row in map(_row, rows)}
            changes = decide(there)
            for each in changes.puts:
                await connection.execute(
                    "INSERT INTO sweep VALUES (%s, %s, %s) ON CONFLICT (project, name) DO UPDATE"
                    " SET body = excluded.body",
                    (project, each.name, _encode(each)),
                )
            delete = "DELETE FROM sweep_trial WHERE project = %s AND digest = ANY(%s)"
            await connection.execute(delete, (project, _outdated(there, changes.puts)))
            await record_postgres(connection, changes.events)

    async def claim_trial(self, sweep: SearchSweep, number: int, point: Point) -> Point:
        key = sweep.base.project, _digest(sweep), number
        async with self._connections.transaction() as connection:
            insert = "INSERT INTO sweep_trial VALUES (%s, %s, %s, %s) ON CONFLICT DO NOTHING"
            await connection.execute(insert, (*key, _encode(point)))
            # A statement of its own sees what another transaction committed while the first one waited for it.
            select = "SELECT point FROM sweep_trial WHERE (project, digest, number) = (%s, %s, %s)"
            rows = await (await connection.execute(select, key)).fetchall()
        return _decode_point(rows[0][0])

    async def record(self, event: EventRecord) -> None:
        async with self._connections.transaction() as connection:
            await record_postgres(connection, [event])
