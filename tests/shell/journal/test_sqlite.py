"""What only the SQLite journal has: one process, one file, and what happens when that file is hurt."""

from __future__ import annotations

import asyncio
import shutil
import sqlite3
import subprocess
import sys
from pathlib import Path

import pytest

from strata.base.clock import SystemClock
from strata.base.errors import Code, StrataError
from strata.journal.open import open_journal
from strata.journal.port import Snapshot
from strata.journal.replay import replay
from strata.journal.sqlite import SqliteJournal

OPEN_IT = """
import asyncio, sys
from strata.base.clock import SystemClock
from strata.journal.sqlite import SqliteJournal
from pathlib import Path
asyncio.run(SqliteJournal.open(Path(sys.argv[1]), SystemClock()))
"""


async def opened(path: Path) -> SqliteJournal:
    return await SqliteJournal.open(path, SystemClock())


async def refusal(path: Path, *, create: bool = True) -> StrataError:
    with pytest.raises(StrataError) as caught:
        await SqliteJournal.open(path, SystemClock(), create=create)
    return caught.value


async def test_a_second_process_is_refused(tmp_path: Path) -> None:
    async with await opened(tmp_path / "journal.db"):
        second = subprocess.run(
            [sys.executable, "-c", OPEN_IT, str(tmp_path / "journal.db")], capture_output=True, text=True, check=False
        )
    assert second.returncode != 0
    assert "in use by another process" in second.stderr
    async with await opened(tmp_path / "journal.db"):
        pass


async def test_a_second_opening_in_the_same_process_is_refused_too(tmp_path: Path) -> None:
    async with await opened(tmp_path / "journal.db"):
        assert (await refusal(tmp_path / "journal.db")).code is Code.CONFLICT


async def test_somebody_elses_database_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "other.db"
    with sqlite3.connect(path) as db:
        db.execute("CREATE TABLE precious (x)")
    db.close()
    before = path.read_bytes()
    assert (await refusal(path)).code is Code.CONFLICT
    assert (await refusal(path, create=False)).code is Code.CONFLICT
    assert path.read_bytes() == before


async def test_a_look_creates_nothing(tmp_path: Path) -> None:
    assert (await refusal(tmp_path / "none.db", create=False)).code is Code.NOT_FOUND
    assert list(tmp_path.iterdir()) == []


async def test_what_is_no_database_is_said_to_be_damaged(tmp_path: Path) -> None:
    path = tmp_path / "text.db"
    path.write_bytes(b"this is not a database, and long enough to be read as one. " * 50)
    assert (await refusal(path)).code is Code.CORRUPT


async def test_a_directory_that_is_not_there_is_unavailable(tmp_path: Path) -> None:
    assert (await refusal(tmp_path / "missing" / "journal.db")).code is Code.UNAVAILABLE


async def test_a_newer_schema_is_refused(tmp_path: Path) -> None:
    async with await opened(tmp_path / "journal.db"):
        pass
    with sqlite3.connect(tmp_path / "journal.db") as db:
        db.execute("PRAGMA user_version = 99")
    db.close()
    refused = await refusal(tmp_path / "journal.db")
    assert refused.code is Code.UNSUPPORTED
    assert refused.message.endswith("journal.db: schema 99 of a newer version; this version reads 1")


async def test_a_full_disk_refuses_the_append_and_goes_on_once_there_is_room(tmp_path: Path) -> None:
    async with await opened(tmp_path / "journal.db") as journal:
        lead = await journal.lead("s", "a", 60.0)
        pages = await journal._thread.read(lambda db: db.execute("PRAGMA page_count").fetchone()[0])
        await journal._thread.read(lambda db: db.execute(f"PRAGMA max_page_count = {pages + 4}").fetchone())
        with pytest.raises(StrataError, match="no space left") as caught:
            await journal.append("s", lead.epoch, 0, [b"x" * 100_000])
        assert caught.value.code is Code.UNAVAILABLE
        await journal._thread.read(lambda db: db.execute("PRAGMA max_page_count = 1000000").fetchone())
        assert await journal.append("s", lead.epoch, 0, [b"x" * 100_000]) == 1


async def test_bytes_that_changed_at_rest_are_found(tmp_path: Path) -> None:
    path = tmp_path / "journal.db"
    async with await opened(path) as journal:
        lead = await journal.lead("s", "a", 60.0)
        await journal.append("s", lead.epoch, 0, [b"first"])
        await journal.append("s", lead.epoch, 1, [b"second"])
        await journal.save_snapshot("s", lead.epoch, Snapshot(1, lead.epoch, b"state"))
    with sqlite3.connect(path) as db:
        db.execute("UPDATE journal_batch SET facts = CAST(replace(facts, 'second', 'sEcond') AS BLOB) WHERE last = 2")
        db.execute("UPDATE journal_snapshot SET state = x'00'")
    db.close()
    async with await opened(path) as journal:
        with pytest.raises(StrataError) as caught:
            await journal.read("s", 0)
        assert caught.value.code is Code.CORRUPT
        with pytest.raises(StrataError) as caught:
            await journal.load_snapshot("s")
        assert caught.value.code is Code.CORRUPT


async def test_a_missing_batch_is_a_gap_and_not_silence(tmp_path: Path) -> None:
    path = tmp_path / "journal.db"
    async with await opened(path) as journal:
        lead = await journal.lead("s", "a", 60.0)
        for position in range(3):
            await journal.append("s", lead.epoch, position, [b"%d" % position])
    with sqlite3.connect(path) as db:
        db.execute("DELETE FROM journal_batch WHERE last = 2")
    db.close()
    async with await opened(path) as journal:
        with pytest.raises(StrataError, match="gap") as caught:
            assert [batch async for batch in replay(journal, "s")]
        assert caught.value.code is Code.CORRUPT


async def test_a_write_ahead_log_torn_at_any_place_gives_a_prefix_of_whole_batches(tmp_path: Path) -> None:
    """As after a power cut: what was synced is there, what was not may be there in part."""
    live = tmp_path / "journal.db"
    wal = tmp_path / "journal.db-wal"
    lengths: list[int] = []
    async with await opened(live) as journal:
        lead = await journal.lead("s", "a", 60.0)
        for number in range(12):
            lengths.append(wal.stat().st_size)
            await journal.append("s", lead.epoch, 3 * number, [b"%d-%d" % (number, part) * 40 for part in range(3)])
        for name in (live, wal):
            shutil.copy(name, tmp_path / f"copy-{name.name}")
    log = (tmp_path / f"copy-{wal.name}").read_bytes()
    torn = tmp_path / "torn"
    for length in [*range(lengths[0], len(log), 997), *lengths, *(length - 1 for length in lengths[1:]), len(log)]:
        shutil.rmtree(torn, ignore_errors=True)
        torn.mkdir()
        shutil.copy(tmp_path / f"copy-{live.name}", torn / "journal.db")
        (torn / "journal.db-wal").write_bytes(log[:length])
        async with await opened(torn / "journal.db") as journal:
            batches = [batch async for batch in replay(journal, "s")]
        whole = sum(committed <= length for committed in [*lengths[1:], len(log)])
        assert len(batches) == whole, f"torn at {length}"
        assert all(len(batch.facts) == 3 for batch in batches)


@pytest.mark.parametrize("address", ["mysql://x/y", "", "http://x"])
async def test_an_unknown_database_is_refused_without_repeating_what_may_be_secret(address: str) -> None:
    with pytest.raises(StrataError) as caught:
        await open_journal(address, SystemClock())
    assert caught.value.code is Code.INVALID


async def test_what_is_asked_while_closing_is_answered_or_refused_but_never_left(tmp_path: Path) -> None:
    journal = await opened(tmp_path / "journal.db")
    lead = await journal.lead("s", "a", 60.0)
    last = asyncio.create_task(journal.append("s", lead.epoch, 0, [b"x" * 1_000_000]))
    await asyncio.sleep(0)
    closing = asyncio.create_task(journal.close())
    await asyncio.sleep(0)
    async with asyncio.timeout(5):
        with pytest.raises(StrataError, match="closed"):
            await journal.append("s", lead.epoch, 1, [b"y"])
        assert await last == 1
        await closing


@pytest.mark.parametrize("name", ["x" * 300, "nul\x00"])
@pytest.mark.parametrize("create", [True, False])
async def test_an_impossible_path_is_refused(tmp_path: Path, name: str, create: bool) -> None:
    async with asyncio.timeout(5):
        refused = await refusal(tmp_path / name, create=create)
    assert refused.code in (Code.INVALID, Code.UNAVAILABLE, Code.NOT_FOUND)


async def test_an_opening_that_was_given_up_leaves_the_file_free(tmp_path: Path) -> None:
    opening = asyncio.create_task(opened(tmp_path / "journal.db"))
    await asyncio.sleep(0)
    opening.cancel()
    await asyncio.wait([opening])
    async with asyncio.timeout(5), await opened(tmp_path / "journal.db"):
        pass


async def test_one_callers_mistake_is_nobody_elses(tmp_path: Path) -> None:
    async with await opened(tmp_path / "journal.db") as journal:
        lead = await journal.lead("s", "a", 60.0)

        def wrong(db: sqlite3.Connection) -> None:
            db.execute("UPDATE journal_stream SET head = 99")
            db.execute("INSERT INTO journal_batch VALUES (1)")

        good = [journal.append("s", lead.epoch, 0, [b"x"]), journal.confirm("s", lead.epoch)]
        outcomes = await asyncio.gather(
            *good, journal._thread.write(wrong), journal.load_snapshot("s"), return_exceptions=True
        )
        assert outcomes[0] == 1
        assert isinstance(outcomes[2], sqlite3.Error)
        assert await journal.append("s", lead.epoch, 1, [b"y"]) == 2


async def test_a_tail_hears_of_an_append_whose_caller_has_gone(tmp_path: Path) -> None:
    async with await opened(tmp_path / "journal.db") as journal:
        lead = await journal.lead("s", "a", 60.0)
        waiting = asyncio.create_task(journal.wait_for_growth("s", 0, 30.0))
        await asyncio.sleep(0.01)
        appending = asyncio.create_task(journal.append("s", lead.epoch, 0, [b"x"]))
        await asyncio.sleep(0)
        appending.cancel()
        async with asyncio.timeout(5):
            assert await waiting == 1
