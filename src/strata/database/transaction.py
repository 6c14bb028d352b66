"""One transaction for both databases: translates statements from PostgreSQL's form to SQLite's, with lists and bulk
inserts.

A statement is written as PostgreSQL reads it, with named parameters (`:job`). SQLite, where one thread writes, leaves
its casts and row locks out, and reads `= ANY(:ids)` and `unnest(:ids::text[], …) AS row (id, …)` of lists from JSON.
What SQLite alone needs stands in a comment, as `/* sqlite: INDEXED BY job_owner */`. What no such rule covers asks for
`engine`.
"""

from __future__ import annotations

import re
import sqlite3
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, nullcontext
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Final, Literal, Protocol, TypeVar

import msgspec

from strata.base.errors import Code, StrataError

if TYPE_CHECKING:
    from strata.database.postgres import Connection, Connections
    from strata.database.sqlite import SqliteThread

T = TypeVar("T")
Values = Mapping[str, Any]
Rows = list[tuple[Any, ...]]
NO_VALUES: Final[Values] = {}


class Transaction(Protocol):
    @property
    def engine(self) -> Literal["sqlite", "postgres"]: ...

    async def rows(self, statement: str, values: Values = NO_VALUES) -> Rows: ...

    async def changed(self, statement: str, values: Values = NO_VALUES) -> int:
        """Returns how many rows the statement changed."""

    async def execute(self, statement: str, values: Values = NO_VALUES) -> None:
        """Run the statement without looking at its result: a pipeline does not wait for it."""

    async def many(self, statement: str, values: Sequence[Values]) -> None:
        """Run the statement for each of the values.

        An INSERT of `VALUES (:id::text, '', …)`, all cast or constant, is one statement in PostgreSQL, however many
        rows it has.
        """

    async def rows_of_all(self, *statements: tuple[str, Values]) -> Sequence[Rows]:
        """The rows of each statement, in one round trip; each sees what those before it have locked."""

    def pipeline(self) -> AbstractAsyncContextManager[Any]:
        """Returns what is executed inside is sent together: it has run when the block ends."""

    async def lock(self, name: str) -> None:
        """Wait for the transactions that hold this name. It guards what has no row to be locked yet."""


Body = Callable[[Transaction], Coroutine[Any, Any, T]]


class Database(Protocol):
    @property
    def engine(self) -> Literal["sqlite", "postgres"]: ...

    async def run(self, body: Body[T], *, call_s: float | None = None) -> T:
        """Commit what the body changes, or nothing if it raises. `call_s` is the deadline of one that takes long."""

    async def run_each(self, bodies: Sequence[Body[T]]) -> list[T]:
        """Run them in their order, each in its own transaction: one that waits for a row has none of the others locked.

        Where writers take turns they all commit together.
        """

    async def read(self, body: Body[T]) -> T:
        """Run a body that changes nothing."""

    async def rows(self, statement: str, values: Values = NO_VALUES) -> Rows:
        """The rows of one statement that changes nothing."""

    async def returning(self, statement: str, values: Values = NO_VALUES) -> Rows:
        """The rows of one statement that changes them; it commits by itself."""

    async def changed(self, statement: str, values: Values = NO_VALUES) -> int:
        """Returns how many rows one statement changed; it commits by itself."""


class SqliteTransaction:
    engine: Final = "sqlite"

    def __init__(self, db: sqlite3.Connection) -> None:
        self._db = db

    async def rows(self, statement: str, values: Values = NO_VALUES) -> Rows:
        return self._run(statement, values).fetchall()

    async def changed(self, statement: str, values: Values = NO_VALUES) -> int:
        return self._run(statement, values).rowcount

    async def execute(self, statement: str, values: Values = NO_VALUES) -> None:
        self._run(statement, values)

    async def many(self, statement: str, values: Sequence[Values]) -> None:
        self._db.executemany(_to_sqlite(statement)[0], values)

    async def rows_of_all(self, *statements: tuple[str, Values]) -> Sequence[Rows]:
        return [self._run(statement, values).fetchall() for statement, values in statements]

    def pipeline(self) -> AbstractAsyncContextManager[None]:
        return nullcontext()

    async def lock(self, name: str) -> None:
        """Nothing: writers take turns."""

    def _run(self, statement: str, values: Values) -> sqlite3.Cursor:
        text, lists = _to_sqlite(statement)
        if lists:
            values = {**values, **{name: _encode_lists(name, values) for name in lists}}
        return self._db.execute(text, values)


def _encode_lists(name: str, values: Values) -> str:
    """The list of this name; or, of several names joined, the rows that these columns make."""
    columns = [values[each] for each in name.split(_AND)]
    return msgspec.json.encode(columns[0] if len(columns) == 1 else list(zip(*columns, strict=True))).decode()


class SqliteDatabase:
    engine: Final = "sqlite"

    def __init__(self, thread: SqliteThread) -> None:
        self._thread = thread

    async def run(self, body: Body[T], *, call_s: float | None = None) -> T:
        del call_s
        return await self._thread.write(lambda db: run_to_end(body(SqliteTransaction(db))))

    async def run_each(self, bodies: Sequence[Body[T]]) -> list[T]:
        return await self._thread.write(lambda db: [run_to_end(body(SqliteTransaction(db))) for body in bodies])

    async def read(self, body: Body[T]) -> T:
        return await self._thread.read(lambda db: run_to_end(body(SqliteTransaction(db))))

    async def rows(self, statement: str, values: Values = NO_VALUES) -> Rows:
        return await self.read(lambda tx: tx.rows(statement, values))

    async def returning(self, statement: str, values: Values = NO_VALUES) -> Rows:
        return await self.run(lambda tx: tx.rows(statement, values))

    async def changed(self, statement: str, values: Values = NO_VALUES) -> int:
        return await self.run(lambda tx: tx.changed(statement, values))


def run_to_end(body: Coroutine[Any, Any, T]) -> T:
    """The result of a coroutine that awaits nothing but statements, in a thread without a loop."""
    try:
        body.send(None)
    except StopIteration as end:
        result: T = end.value
        return result
    body.close()
    raise StrataError(Code.INTERNAL, "a transaction may await its own statements only")


class PostgresTransaction:
    engine: Final = "postgres"

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._pipelines = 0

    async def rows(self, statement: str, values: Values = NO_VALUES) -> Rows:
        return await self._connection.rows(_to_postgres(statement), values)

    async def changed(self, statement: str, values: Values = NO_VALUES) -> int:
        if not self._pipelines:
            return await self._connection.changed(_to_postgres(statement), values)
        # The number is there once the pipeline has waited for it.
        async with self._connection.pipeline():
            cursor = await self._connection.execute(_to_postgres(statement), values, prepare=True)
        return cursor.rowcount

    async def execute(self, statement: str, values: Values = NO_VALUES) -> None:
        await self._connection.execute(_to_postgres(statement), values, prepare=True)

    async def many(self, statement: str, values: Sequence[Values]) -> None:
        bulk = _to_bulk(statement) if len(values) > 1 else None
        if bulk is not None:
            text, names = bulk
            await self._connection.execute(text, {name: [row[name] for row in values] for name in names}, prepare=True)
        elif len(values) == 1:
            await self.execute(statement, values[0])
        elif values:
            await self._connection.cursor().executemany(_to_postgres(statement), values)

    async def rows_of_all(self, *statements: tuple[str, Values]) -> Sequence[Rows]:
        async with self._connection.pipeline():
            cursors = [
                await self._connection.execute(_to_postgres(statement), values, prepare=True, binary=True)
                for statement, values in statements
            ]
        return [await cursor.fetchall() for cursor in cursors]

    @asynccontextmanager
    async def pipeline(self) -> AsyncIterator[None]:
        self._pipelines += 1
        try:
            async with self._connection.pipeline():
                yield
        finally:
            self._pipelines -= 1

    async def lock(self, name: str) -> None:
        await self.execute("SELECT pg_advisory_xact_lock(hashtextextended(:name, 0))", {"name": name})


class PostgresDatabase:
    engine: Final = "postgres"

    def __init__(self, connections: Connections) -> None:
        self._connections = connections

    async def run(self, body: Body[T], *, call_s: float | None = None) -> T:
        async with self._connections.transaction(call_s) as connection:
            return await body(PostgresTransaction(connection))

    async def run_each(self, bodies: Sequence[Body[T]]) -> list[T]:
        return [await self.run(body) for body in bodies]

    async def read(self, body: Body[T]) -> T:
        async with self._connections.reading() as connection:
            return await body(PostgresTransaction(connection))

    async def rows(self, statement: str, values: Values = NO_VALUES) -> Rows:
        return await self._connections.run(_to_postgres(statement), values)

    async def returning(self, statement: str, values: Values = NO_VALUES) -> Rows:
        return await self._connections.run(_to_postgres(statement), values)

    async def changed(self, statement: str, values: Values = NO_VALUES) -> int:
        return await self._connections.write(_to_postgres(statement), values)


_LITERAL: Final = r"(?P<literal>'(?:[^']|'')*')"
_POSTGRES: Final = re.compile(rf"{_LITERAL}|(?P<cast>::)|:(?P<name>[a-z_]\w*)|(?P<percent>%)")
_SQLITE: Final = re.compile(
    r"convert_from\((?P<column>[\w.]+), 'UTF8'\)"
    rf"|{_LITERAL}|= ANY\(:(?P<list>\w+)(?:::\w+\[\])?\)|(?P<cast>::\w+(?:\[\])?)"
    r"|unnest\((?P<lists>:[^()]+)\) AS (?P<table>\w+) \((?P<columns>[\w, ]+)\)"
    r"|\b(?P<function>greatest|strpos|jsonb_array_length)(?=\()"
    r"|/\* sqlite: (?P<hint>[^*]+) \*/"
    r"|(?P<lock>\s*\bFOR (?:(?:NO KEY )?UPDATE|SHARE)\b(?: OF \w+)?(?: SKIP LOCKED)?)"
)
_AND: Final = "__"
_FUNCTIONS: Final = {"greatest": "max", "strpos": "instr", "jsonb_array_length": "json_array_length"}
_BULK: Final = re.compile(r"VALUES \(((?:(?::\w+::\w+|'\w*'|\w+)(?:, )?)+)\)")


@lru_cache(4096)
def _to_postgres(statement: str) -> str:
    # The driver takes every % for a parameter, in literals too.
    return _POSTGRES.sub(
        lambda found: f"%({found['name']})s" if found["name"] else found[0].replace("%", "%%"), statement
    )


@lru_cache(4096)
def _to_sqlite(statement: str) -> tuple[str, Sequence[str]]:
    """The text, and the names of its lists."""
    lists: list[str] = []

    def translate(found: re.Match[str]) -> str:
        if found["column"]:
            return f"CAST({found['column']} AS TEXT)"
        if found["list"]:
            lists.append(found["list"])
            return f"IN (SELECT value FROM json_each(:{found['list']}))"
        if found["lists"]:
            names = [each.split("::")[0].removeprefix(":") for each in found["lists"].split(", ")]
            columns = found["columns"].split(", ")
            lists.append(_AND.join(names))
            fields = ["value"] if len(names) == 1 else [f"json_extract(value, '$[{n}]')" for n in range(len(names))]
            select = ", ".join(f"{field} AS {column}" for field, column in zip(fields, columns, strict=True))
            return f"(SELECT {select} FROM json_each(:{lists[-1]})) AS {found['table']}"
        if found["function"]:
            return _FUNCTIONS[found["function"]]
        return found["literal"] or found["hint"] or ""

    return _SQLITE.sub(translate, statement), lists


@lru_cache(4096)
def _to_bulk(statement: str) -> tuple[str, Sequence[str]] | None:
    """An INSERT of one row as one of many, from an array of each column; its rows keep their order."""
    found = _BULK.search(statement)
    if found is None:
        return None
    values = found[1].split(", ")
    pairs = [each.removeprefix(":").split("::") for each in values if each.startswith(":")]
    names = [name for name, _ in pairs]
    columns = ", ".join(f'"{name}"' for name in names)
    arrays = ", ".join(f":{name}::{kind}[]" for name, kind in pairs)
    fields = ", ".join(f'"{each[1:].split("::")[0]}"' if each.startswith(":") else each for each in values)
    select = f"SELECT {fields} FROM unnest({arrays}) WITH ORDINALITY AS n ({columns}, place) ORDER BY place"
    return _to_postgres(statement.replace(found[0], select)), names
