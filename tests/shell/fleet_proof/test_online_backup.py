"""Copies that a hub makes for others: nothing of them stays behind, whoever gives up, and when."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from strata.base.clock import SystemClock
from strata.base.errors import Code, StrataError
from strata.database import events
from strata.database.migrations import SqliteComponents
from strata.database.online_backup import FOLDER, OnlineBackup
from strata.database.sqlite import SqliteThread
from strata.fleet.store.backup import backup_sqlite


@pytest.fixture
async def thread(tmp_path: Path) -> AsyncIterator[SqliteThread]:
    opened = await SqliteThread.open(tmp_path / "hub.db", SqliteComponents((events.SQLITE,)))
    yield opened
    await opened.close()


def left(data: Path) -> list[str]:
    return sorted(path.name for path in (data / FOLDER).iterdir())


async def test_a_copy_stays_for_whoever_asked(thread: SqliteThread, tmp_path: Path) -> None:
    copier = OnlineBackup(tmp_path / FOLDER, lambda path, now_s: backup_sqlite(thread, path, now_s), SystemClock())
    (tmp_path / FOLDER / "a.wanted").touch()
    await copier.run_once()
    assert left(tmp_path) == ["a.db"]


@pytest.mark.parametrize("fails", [False, True])
async def test_a_copy_that_nobody_waits_for_any_more_is_removed(
    thread: SqliteThread, tmp_path: Path, fails: bool
) -> None:
    async def copy(path: Path, now_s: float) -> int:
        made = await backup_sqlite(thread, path, now_s)
        # Whoever asked has gone while the copy was checked.
        path.with_suffix(".wanted").unlink()
        if fails:
            raise StrataError(Code.UNAVAILABLE, "the disk is full")
        return made

    copier = OnlineBackup(tmp_path / FOLDER, copy, SystemClock())
    (tmp_path / FOLDER / "a.wanted").touch()
    await copier.run_once()
    assert left(tmp_path) == []


async def test_a_hub_that_starts_removes_what_an_earlier_one_left_and_answers_who_still_waits(
    thread: SqliteThread, tmp_path: Path
) -> None:
    (tmp_path / FOLDER).mkdir()
    one, other = "0123456789abcdef", "fedcba9876543210"
    strays = (f"{one}.db", f"{one}.failed", f"{other}.db.partial", f"{other}.db.partial-journal")
    for name in (*strays, f"{other}.wanted", "monday.db"):
        (tmp_path / FOLDER / name).touch()
    copier = OnlineBackup(tmp_path / FOLDER, lambda path, now_s: backup_sqlite(thread, path, now_s), SystemClock())
    assert left(tmp_path) == [f"{other}.wanted", "monday.db"], "what a person put there stays"
    await copier.run_once()
    assert left(tmp_path) == [f"{other}.db", "monday.db"]
