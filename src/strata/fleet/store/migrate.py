"""Copies a hub's database from SQLite to PostgreSQL or back, 5,000 rows at a time, and compares every table by
checksum.

Tables have the same names and columns in both. Two things differ: booleans, and the transaction numbers that PostgreSQL
has in the event table. No hub may run meanwhile. Leases are copied as they are: hosts go on working and renew them in
the new database, so nothing is fenced. The SQLite file is sealed after the migration.
"""

from __future__ import annotations

import hashlib
import sqlite3
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from graphlib import TopologicalSorter
from typing import TYPE_CHECKING, Any, Final

from strata.base.errors import Code, StrataError
from strata.database.events import POSITION
from strata.database.migrations import SCHEMA_LOCK, seal

if TYPE_CHECKING:
    from strata.database.postgres import Connections
    from strata.database.sqlite import SqliteThread

_ROWS: Final = 5_000
_WORLD: Final = 2**256
_SKIPPED: Final = {"strata_schema", "strata_sealed", "job_count"}
"""Not copied. The counts of jobs are kept by triggers, which count what is copied."""
_CLOCKED: Final = {"event": "tx"}
"""A column that only PostgreSQL has: 0 is before every transaction of its own."""
_CURSORS: Final = "hub_cursor"
"""The cursors of the readers of the event feed: formatted differently in each database, at the same position."""
_READERS: Final = "cursor <> ''"
"""The rows of readers that have read something."""


@dataclass
class TableChecksum:
    """Rows of a table in any order: how many, and the sum of their digests."""

    rows: int = 0
    digest: int = 0

    def add(self, row: Sequence[Any]) -> None:
        self.rows += 1
        self.digest = (self.digest + int.from_bytes(hashlib.sha256(_canonical(row)).digest(), "big")) % _WORLD


@dataclass(frozen=True)
class MigratedRows:
    """The number of rows copied, by table."""

    rows: Mapping[str, int]


@dataclass(frozen=True)
class _Table:
    name: str
    columns: tuple[str, ...]
    truths: frozenset[int] = field(default_factory=frozenset)
    """Places of columns that are truth values in PostgreSQL and 0 or 1 in SQLite."""

    def as_truths(self, row: Sequence[Any]) -> list[Any]:
        return [bool(value) if place in self.truths else value for place, value in enumerate(row)]

    def as_numbers(self, row: Sequence[Any]) -> list[Any]:
        return [int(value) if place in self.truths else value for place, value in enumerate(row)]


async def to_postgres(thread: SqliteThread, connections: Connections, now_s: float) -> MigratedRows:
    """Copies into a database that has the tables of the same components, all empty."""
    async with connections.transaction() as connection:
        tables = await _common_tables(connection, await thread.read(_sqlite_columns))
        await _require_empty(connection, tables)
        tallies = {}
        for table in tables:
            tallies[table.name] = sent = TableChecksum()
            columns = ", ".join(table.columns)
            clock = _CLOCKED.get(table.name)
            into = f"{columns}, {clock}" if clock else columns
            async with connection.cursor().copy(f"COPY {table.name} ({into}) FROM STDIN") as copy:
                async for row in _pages(thread, f"SELECT {columns} FROM {table.name}"):
                    sent.add(row)
                    await copy.write_row([*table.as_truths(row), *([0] if clock else [])])
            await _advance_sequence(connection, table.name)
        for table in tables:
            _compare(table.name, tallies[table.name], await _tally_postgres(connection, table))
        if _CURSORS in tallies:
            await connection.execute(f"UPDATE {_CURSORS} SET cursor = '0.' || cursor WHERE {_READERS}")
    await thread.write(lambda db: seal(db, f"it was moved to PostgreSQL at {now_s:.0f}"))
    return MigratedRows({name: tally.rows for name, tally in tallies.items()})


async def to_sqlite(connections: Connections, thread: SqliteThread) -> MigratedRows:
    """Copies into a file that has the tables of the same components, all empty."""
    async with connections.transaction() as connection:
        await connection.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ")
        tables = await _common_tables(connection, await thread.read(_sqlite_columns))
        await thread.read(lambda db: _require_empty_sqlite(db, tables))
        tallies = {table.name: TableChecksum() for table in tables}
        for table in tables:
            async with connection.cursor("move", binary=True) as cursor:
                await cursor.execute(f"SELECT {', '.join(table.columns)} FROM {table.name}")
                while page := [table.as_numbers(row) for row in await cursor.fetchmany(_ROWS)]:
                    for row in page:
                        tallies[table.name].add(row)
                    await thread.write(lambda db, table=table, page=page: _insert(db, table, page))  # type: ignore[misc]
        for table in tables:
            select = f"SELECT {', '.join(table.columns)} FROM {table.name}"
            arrived = TableChecksum()
            async for row in _pages(thread, select):
                arrived.add(row)
            _compare(table.name, tallies[table.name], arrived)
        if _CURSORS in tallies:
            select = f"SELECT ({POSITION})::text, name FROM {_CURSORS} WHERE {_READERS}"
            places = await (await connection.execute(select)).fetchall()
            await thread.write(lambda db: _write_cursors(db, places))
    return MigratedRows({name: tally.rows for name, tally in tallies.items()})


def _sqlite_columns(db: sqlite3.Connection) -> dict[str, tuple[str, ...]]:
    names = db.execute("SELECT name FROM sqlite_schema WHERE type = 'table' AND name NOT LIKE 'sqlite\\_%' ESCAPE '\\'")
    return {
        name: tuple(column for (column,) in db.execute("SELECT name FROM pragma_table_info(?)", (name,)))
        for (name,) in names.fetchall()
        if name not in _SKIPPED
    }


async def _common_tables(connection: Any, there: Mapping[str, tuple[str, ...]]) -> list[_Table]:
    """The tables of both, those first that others refer to."""
    await connection.execute("SELECT pg_advisory_xact_lock(%s)", (SCHEMA_LOCK,))
    here = await _postgres_columns(connection)
    differing = {name for name in here.keys() | there.keys() if set(here.get(name, ())) != set(there.get(name, ()))}
    if differing:
        raise StrataError(
            Code.PRECONDITION,
            f"the two databases have different tables: {', '.join(sorted(differing))}",
            hint="open both with the same version of Strata first",
        )
    tables = []
    for name in await _dependency_order(connection, here):
        truths = (place for place, column in enumerate(there[name]) if here[name][column] == "boolean")
        tables.append(_Table(name, there[name], frozenset(truths)))
    return tables


async def _postgres_columns(connection: Any) -> dict[str, dict[str, str]]:
    """The tables, each with its columns and their types."""
    cursor = await connection.execute(
        "SELECT table_name, column_name, data_type FROM information_schema.columns"
        " WHERE table_schema = current_schema() ORDER BY table_name, ordinal_position"
    )
    tables: dict[str, dict[str, str]] = {}
    for name, column, kind in await cursor.fetchall():
        if name not in _SKIPPED and _CLOCKED.get(name) != column:
            tables.setdefault(name, {})[column] = kind
    return tables


async def _dependency_order(connection: Any, names: Iterable[str]) -> list[str]:
    cursor = await connection.execute(
        "SELECT conrelid::regclass::text, confrelid::regclass::text FROM pg_constraint"
        " WHERE contype = 'f' AND connamespace = current_schema()::regnamespace"
    )
    needs: dict[str, set[str]] = {name: set() for name in names}
    for name, needed in await cursor.fetchall():
        needs[name].add(needed)
    return list(TopologicalSorter(needs).static_order())


async def _require_empty(connection: Any, tables: Iterable[_Table]) -> None:
    for table in tables:
        await connection.execute(f"LOCK TABLE {table.name} IN EXCLUSIVE MODE")
        if await (await connection.execute(f"SELECT 1 FROM {table.name} LIMIT 1")).fetchone():
            raise _not_empty(table.name)


def _require_empty_sqlite(db: sqlite3.Connection, tables: Iterable[_Table]) -> None:
    for table in tables:
        if db.execute(f"SELECT 1 FROM {table.name} LIMIT 1").fetchone():
            raise _not_empty(table.name)


def _not_empty(table: str) -> StrataError:
    return StrataError(Code.CONFLICT, f"there are rows in {table} already", hint="move into an empty database")


async def _pages(thread: SqliteThread, select: str) -> Any:
    """All rows, some at a time: the thread has a cursor open in between, and nobody else uses it."""
    cursor = await thread.read(lambda db: db.execute(select))
    while page := await thread.read(lambda _: cursor.fetchmany(_ROWS)):
        for row in page:
            yield row


async def _advance_sequence(connection: Any, table: str) -> None:
    cursor = await connection.execute(
        "SELECT column_name FROM information_schema.columns"
        " WHERE table_schema = current_schema() AND table_name = %s AND is_identity = 'YES'",
        (table,),
    )
    for (column,) in await cursor.fetchall():
        await connection.execute(
            f"SELECT setval(pg_get_serial_sequence('{table}', '{column}'), max({column})) FROM {table}"
            f" HAVING max({column}) IS NOT NULL"
        )


def _write_cursors(db: sqlite3.Connection, places: Sequence[tuple[str, str]]) -> None:
    db.executemany(f"UPDATE {_CURSORS} SET cursor = ? WHERE name = ?", places)


async def _tally_postgres(connection: Any, table: _Table) -> TableChecksum:
    found = TableChecksum()
    async with connection.cursor("tally", binary=True) as cursor:
        await cursor.execute(f"SELECT {', '.join(table.columns)} FROM {table.name}")
        while page := await cursor.fetchmany(_ROWS):
            for row in page:
                found.add(table.as_numbers(row))
    return found


def _insert(db: sqlite3.Connection, table: _Table, page: Sequence[Sequence[Any]]) -> None:
    places = ", ".join("?" * len(table.columns))
    db.executemany(f"INSERT INTO {table.name} ({', '.join(table.columns)}) VALUES ({places})", page)


def _compare(table: str, sent: TableChecksum, arrived: TableChecksum) -> None:
    if sent != arrived:
        raise StrataError(
            Code.CORRUPT, f"{table}: {sent.rows} rows were sent and {arrived.rows} arrived, or they differ"
        )


def _canonical(row: Sequence[Any]) -> bytes:
    """Each value with its kind and length: no two different rows look alike."""
    parts = []
    for value in row:
        raw = bytes(value) if isinstance(value, bytes | memoryview) else repr(value).encode()
        parts.append(f"{type(value).__name__}:{len(raw)}:".encode() + raw)
    return b"".join(parts)
