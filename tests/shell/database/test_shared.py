"""A SQLite file of one process alone, or of several that all say so."""

from __future__ import annotations

import sqlite3
from pathlib import Path

import pytest

from strata.base.errors import Code, StrataError
from strata.database.sqlite import SqliteThread


class Table:
    what = "database"

    def check_file(self, db: sqlite3.Connection, path: Path, *, create: bool) -> None:
        """Any file will do."""

    def upgrade(self, db: sqlite3.Connection) -> None:
        db.execute("CREATE TABLE IF NOT EXISTS words (word TEXT)")


def write(db: sqlite3.Connection) -> None:
    db.execute("INSERT INTO words VALUES ('hello')")


def read(db: sqlite3.Connection) -> int:
    count: int = db.execute("SELECT count(*) FROM words").fetchone()[0]
    return count


async def test_what_one_writes_the_others_read_while_all_have_it_open(tmp_path: Path) -> None:
    both = [await SqliteThread.open(tmp_path / "file", Table(), shared=True) for _ in range(2)]
    try:
        for number, each in enumerate(both):
            await each.write(write)
            assert [await other.read(read) for other in both] == [number + 1] * 2
    finally:
        for each in both:
            await each.close()


@pytest.mark.parametrize("shared", [False, True])
async def test_who_wants_it_alone_does_not_get_it_beside_another(tmp_path: Path, shared: bool) -> None:
    first = await SqliteThread.open(tmp_path / "file", Table(), shared=shared)
    try:
        await first.write(write)
        with pytest.raises(StrataError) as refused:
            await SqliteThread.open(tmp_path / "file", Table())
        assert refused.value.code is Code.CONFLICT
    finally:
        await first.close()
