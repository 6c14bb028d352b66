"""One body of a transaction runs the same on both databases."""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path

import pytest

from strata.base.errors import Code, StrataError
from strata.database.postgres import Connections
from strata.database.sqlite import SqliteThread
from strata.database.transaction import Database, PostgresDatabase, SqliteDatabase, Transaction

ADD = "INSERT INTO word (n, word) VALUES (:n::bigint, :word::text)"
ALL = "SELECT n, word FROM word ORDER BY n"


class Table:
    what = "database"

    def check_file(self, db: sqlite3.Connection, path: Path, *, create: bool) -> None:
        """Any file will do."""

    def upgrade(self, db: sqlite3.Connection) -> None:
        db.execute("CREATE TABLE IF NOT EXISTS word (n INTEGER PRIMARY KEY, word TEXT) STRICT")


@pytest.fixture(params=["sqlite", "postgres"])
async def database(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Database]:
    if request.param == "sqlite":
        thread = await SqliteThread.open(tmp_path / "file", Table())
        yield SqliteDatabase(thread)
        await thread.close()
        return
    connections = Connections(request.getfixturevalue("postgres_url"), 2, 60.0, what="test")
    await connections.write("CREATE TABLE word (n bigint PRIMARY KEY, word text)", {})
    yield PostgresDatabase(connections)
    await connections.close()


async def add(database: Database, *words: str) -> None:
    async def body(tx: Transaction) -> None:
        await tx.many(ADD, [{"n": n, "word": word} for n, word in enumerate(words)])

    await database.run(body)


async def test_a_statement_names_its_values_and_uses_one_of_them_twice(database: Database) -> None:
    await add(database, "a", "b")
    select = "SELECT word FROM word WHERE n = :n OR (n > :n AND word = :word)"
    assert await database.rows(select, {"n": 0, "word": "b"}) == [("a",), ("b",)]
    assert await database.changed("UPDATE word SET word = :word WHERE n <= :n", {"n": 5, "word": "c"}) == 2
    deleted = await database.returning("DELETE FROM word WHERE n = :n RETURNING n, word", {"n": 1})
    assert deleted == [(1, "c")]
    assert await database.rows(ALL) == [(0, "c")]


async def test_text_casts_locks_and_lists_are_read_as_they_are_meant(database: Database) -> None:
    await add(database, "10%", "it's :n", "x")

    async def body(tx: Transaction) -> list[object]:
        return [
            await tx.rows("SELECT n FROM word WHERE word = '10%' OR word LIKE '%:n' ORDER BY n"),
            await tx.rows("SELECT n FROM word WHERE word = 'it''s :n' AND n = :n::bigint FOR UPDATE", {"n": 1}),
            await tx.rows("SELECT n FROM word WHERE n = ANY(:ids::bigint[]) ORDER BY n", {"ids": [0, 2, 7]}),
            await tx.rows("SELECT n FROM word WHERE word = ANY(:words)", {"words": ["x", "it's"]}),
            await tx.changed(
                "UPDATE word SET word = ':n' WHERE n IN (SELECT n FROM word WHERE n > :n FOR UPDATE SKIP LOCKED)",
                {"n": 1},
            ),
            await tx.rows("SELECT word FROM word WHERE n % 2 = 0 ORDER BY n"),
        ]

    assert await database.run(body) == [[(0,), (1,)], [(1,)], [(0,), (2,)], [(2,)], 1, [("10%",), (":n",)]]


async def test_json_in_bytes_is_read_by_its_keys(database: Database) -> None:
    select = "SELECT convert_from(body, 'UTF8')::json ->> 'kind' FROM (SELECT :body::bytea AS body) AS row"
    assert await database.rows(select, {"body": b'{"kind": "server"}'}) == [("server",)]


async def test_lists_beside_each_other_are_the_columns_of_rows(database: Database) -> None:
    await add(database, "a", "b", "c")
    select = (
        "SELECT w.n, w.word FROM unnest(:numbers::bigint[], :words::text[]) AS w (n, word)"
        " CROSS JOIN word WHERE word.n = w.n AND word.word = w.word"
    )
    assert await database.rows(select, {"numbers": [2, 0, 1], "words": ["c", "b", "b"]}) == [(2, "c"), (1, "b")]
    assert await database.rows("SELECT o.n FROM unnest(:one::bigint[]) AS o (n)", {"one": [5]}) == [(5,)]


async def test_functions_have_their_name_in_each_database_and_a_comment_is_for_sqlite(database: Database) -> None:
    await add(database, "abc")
    select = "SELECT greatest(n, 7), strpos(word, 'c') FROM word /* sqlite: NOT INDEXED */ WHERE word <> 'greatest('"
    assert await database.rows(select) == [(7, 3)]
    forced = database.rows("SELECT n FROM word /* sqlite: INDEXED BY no_index */")
    if isinstance(database, SqliteDatabase):
        with pytest.raises(sqlite3.OperationalError, match="no_index"):
            await forced
    else:
        assert await forced == [(0,)]


async def test_constants_stand_beside_the_values_of_many_rows(database: Database) -> None:
    insert = "INSERT INTO word (word, n) VALUES ('same', :n::bigint)"
    await database.run(lambda tx: tx.many(insert, [{"n": n} for n in (2, 1)]))
    assert await database.rows(ALL) == [(1, "same"), (2, "same")]


async def test_bodies_that_run_each_by_themselves_return_their_results_in_order(database: Database) -> None:
    async def insert(tx: Transaction, n: int) -> int:
        return n + await tx.changed(ADD, {"n": n, "word": "w"})

    assert await database.run_each([partial(insert, n=n) for n in (2, 1)]) == [3, 2]
    assert await database.rows(ALL) == [(1, "w"), (2, "w")]


@pytest.mark.parametrize("count", [0, 1, 3])
@pytest.mark.parametrize("statement", [ADD, "INSERT INTO word (n, word) VALUES (:n, :word)"])
async def test_many_rows_are_added_in_their_order(database: Database, count: int, statement: str) -> None:
    values = [{"n": n, "word": "x" * n or None} for n in range(count)]

    async def body(tx: Transaction) -> None:
        await tx.many(statement, values)

    await database.run(body)
    assert await database.rows(ALL) == [(row["n"], row["word"]) for row in values]


async def test_rows_that_are_there_are_left_alone_by_many(database: Database) -> None:
    await add(database, "a", "b")

    async def body(tx: Transaction) -> None:
        again = [{"n": n, "word": "again"} for n in range(3)]
        await tx.many(f"{ADD} ON CONFLICT (n) DO NOTHING", again)

    await database.run(body)
    assert await database.rows(ALL) == [(0, "a"), (1, "b"), (2, "again")]


async def test_a_refusal_takes_back_what_its_own_body_changed_and_nothing_else(database: Database) -> None:
    async def refused(tx: Transaction) -> None:
        await tx.execute(ADD, {"n": 1, "word": "refused"})
        raise StrataError(Code.STALE, "somebody else has it")

    async def accepted(tx: Transaction) -> None:
        await tx.execute(ADD, {"n": 2, "word": "accepted"})

    results = await asyncio.gather(database.run(refused), database.run(accepted), return_exceptions=True)
    assert isinstance(results[0], StrataError)
    assert results[0].code is Code.STALE
    assert await database.rows(ALL) == [(2, "accepted")]


async def test_a_pipeline_counts_what_changed_and_sees_its_own_changes(database: Database) -> None:
    async def body(tx: Transaction) -> list[object]:
        async with tx.pipeline():
            await tx.execute(ADD, {"n": 1, "word": "a"})
            await tx.many(ADD, [{"n": 2, "word": "b"}, {"n": 3, "word": "c"}])
            changed = await tx.changed("UPDATE word SET word = 'd' WHERE n > :n", {"n": 1})
            async with tx.pipeline():
                await tx.execute(ADD, {"n": 4, "word": "e"})
            inside = await tx.rows("SELECT count(*) FROM word")
            none = await tx.changed("UPDATE word SET word = 'd' WHERE n > :n", {"n": 9})
        return [changed, inside, none]

    assert await database.run(body) == [2, [(4,)], 0]
    assert await database.rows(ALL) == [(1, "a"), (2, "d"), (3, "d"), (4, "e")]


async def test_several_selects_go_together(database: Database) -> None:
    await add(database, "a", "b")

    async def body(tx: Transaction) -> object:
        await tx.lock("words")
        return await tx.rows_of_all(
            ("SELECT word FROM word WHERE n = :n FOR UPDATE", {"n": 1}), ("SELECT n FROM word ORDER BY n", {})
        )

    assert await database.run(body) == [[("b",)], [(0,), (1,)]]
    assert await database.read(body) == [[("b",)], [(0,), (1,)]]


async def test_a_body_that_awaits_something_else_is_refused_where_it_would_hold_up_the_writers(tmp_path: Path) -> None:
    thread = await SqliteThread.open(tmp_path / "file", Table())
    database = SqliteDatabase(thread)

    async def body(tx: Transaction) -> None:
        await tx.execute(ADD, {"n": 1, "word": "a"})
        await asyncio.sleep(0)

    with pytest.raises(StrataError, match="may await its own statements only"):
        await database.run(body)
    assert await database.rows(ALL) == []
    await thread.close()


async def test_a_pipeline_sends_a_statement_before_the_one_ahead_of_it_has_run(postgres_url: str) -> None:
    connections = Connections(postgres_url, 2, 60.0, what="test")
    await connections.write("CREATE TABLE word (n bigint PRIMARY KEY, word text)", {})
    async with connections.acquire() as holder:
        await holder.execute("SELECT pg_advisory_lock(1)")

        async def body(tx: Transaction) -> None:
            async with tx.pipeline():
                await tx.execute("SELECT pg_advisory_xact_lock(1)")
                await tx.execute(ADD, {"n": 1, "word": "a"})
                await holder.execute("SELECT pg_advisory_unlock(1)")

        await PostgresDatabase(connections).run(body)
    assert await connections.run(ALL, {}) == [(1, "a")]
    await connections.close()
