"""The journal in one SQLite file: schema, exclusive lock, leases, copies.

One connection in one thread does everything: it writes, reads and is the only checkpointer (SQLite releases in wide use
can damage a WAL that two connections checkpoint at once). The connection locks the file exclusively, so a second
process is rejected, and the kernel frees the lock when the first one dies. Whatever has queued up while one commit ran
shares the next: that is the group commit over streams; `Writer` adds the one within a stream.
"""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Final, Self

from strata.base.clock import Clock
from strata.base.errors import Code, StrataError
from strata.database.migrations import check_schema
from strata.database.sqlite import SqliteThread, is_empty, run_script
from strata.journal.encoding import checked_snapshot, checksum_of, pack, unpack
from strata.journal.port import (
    PAGE_BYTES,
    Batch,
    Lead,
    Snapshot,
    StreamStatus,
    beyond_head,
    check_candidate,
    check_facts,
    check_lease,
    check_position,
    check_snapshot,
    lease_held,
    not_covered,
    stale,
    truncated,
    unknown_stream,
    wrong_position,
)

_SCHEMA_VERSION: Final = 1
_SCHEMA: Final = """
CREATE TABLE journal_stream (
  stream TEXT PRIMARY KEY, epoch INTEGER NOT NULL, holder TEXT NOT NULL, head INTEGER NOT NULL, floor INTEGER NOT NULL
) WITHOUT ROWID, STRICT;
CREATE TABLE journal_batch (
  stream TEXT NOT NULL, last INTEGER NOT NULL, first INTEGER NOT NULL, epoch INTEGER NOT NULL,
  checksum INTEGER NOT NULL, facts BLOB NOT NULL, PRIMARY KEY (stream, last)
) WITHOUT ROWID, STRICT;
CREATE TABLE journal_snapshot (
  stream TEXT NOT NULL, position INTEGER NOT NULL, epoch INTEGER NOT NULL,
  checksum INTEGER NOT NULL, state BLOB NOT NULL, PRIMARY KEY (stream, position)
) WITHOUT ROWID, STRICT;
"""


class _Schema:
    what = "journal"

    def check_file(self, db: sqlite3.Connection, path: Path, *, create: bool) -> None:
        version = _version(db)
        if version == 0 and not (create and is_empty(db)):
            raise StrataError(
                Code.CONFLICT, f"{path} is not a journal", hint="give the file of a journal, or a new one"
            )
        if version:
            check_schema(f"the journal {path}", version, _SCHEMA_VERSION, _SCHEMA_VERSION)

    def upgrade(self, db: sqlite3.Connection) -> None:
        if _version(db) == 0:
            run_script(db, _SCHEMA)
            db.execute(f"PRAGMA user_version = {_SCHEMA_VERSION}")


class SqliteJournal:
    """Open with `await SqliteJournal.open(path, clock)`."""

    def __init__(self, thread: SqliteThread, clock: Clock) -> None:
        self._thread = thread
        self._clock = clock
        # Leases are in memory: the exclusive lock on the file proves that an earlier holder has ended.
        self._lease_until_s: dict[str, float] = {}
        self._growth: dict[str, asyncio.Event] = {}

    @classmethod
    async def open(cls, path: Path, clock: Clock, *, create: bool = True) -> Self:
        return cls(await SqliteThread.open(path, _Schema(), create=create), clock)

    async def lead(self, stream: str, holder: str, lease_s: float, *, expired_lease: str | None = None) -> Lead:
        check_candidate(stream, holder, lease_s)

        def take(db: sqlite3.Connection) -> Lead:
            row = db.execute("SELECT epoch, holder, head FROM journal_stream WHERE stream = ?", (stream,)).fetchone()
            epoch, current, head = row or (0, holder, 0)
            now_s = self._clock.monotonic_s()
            until_s = self._lease_until_s.get(stream, now_s)
            lease = f"{epoch}@{until_s}"
            if current != holder and until_s > now_s and lease != expired_lease:
                raise lease_held(stream, current, lease)
            self._lease_until_s[stream] = now_s + lease_s
            db.execute(
                "INSERT INTO journal_stream VALUES (?, ?, ?, 0, 0)"
                " ON CONFLICT (stream) DO UPDATE SET epoch = excluded.epoch, holder = excluded.holder",
                (stream, epoch + 1, holder),
            )
            return Lead(stream, epoch + 1, head)

        return await self._thread.write(take)

    async def renew(self, stream: str, epoch: int, lease_s: float) -> None:
        check_lease(lease_s)

        def extend(db: sqlite3.Connection) -> None:
            _fence(db, stream, epoch)
            self._lease_until_s[stream] = self._clock.monotonic_s() + lease_s

        await self._thread.read(extend)

    async def resign(self, stream: str, epoch: int) -> None:
        def end(db: sqlite3.Connection) -> None:
            if _epoch(db, stream) == epoch:
                self._lease_until_s.pop(stream, None)

        await self._thread.read(end)

    async def confirm(self, stream: str, epoch: int) -> None:
        await self._thread.read(lambda db: _fence(db, stream, epoch))

    async def append(self, stream: str, epoch: int, after: int, facts: Sequence[bytes]) -> int:
        check_facts(facts)
        check_position(after)
        blob, checksum = pack(facts)
        last = after + len(facts)

        def add(db: sqlite3.Connection) -> int:
            moved = db.execute(
                "UPDATE journal_stream SET head = ? WHERE stream = ? AND epoch = ? AND head = ?",
                (last, stream, epoch, after),
            )
            if moved.rowcount == 0:
                _recognise(db, stream, epoch, after, (last, checksum))
                return last
            db.execute(
                "INSERT INTO journal_batch VALUES (?, ?, ?, ?, ?, ?)", (stream, last, after + 1, epoch, checksum, blob)
            )
            return last

        try:
            return await self._thread.write(add)
        finally:
            # Also when the caller no longer waits: the append goes on, and a read is queued behind it.
            growth = self._growth.pop(stream, None)
            if growth is not None:
                growth.set()

    async def read(self, stream: str, after: int) -> list[Batch]:
        check_position(after)

        def page(db: sqlite3.Connection) -> list[Batch]:
            row = db.execute("SELECT floor FROM journal_stream WHERE stream = ?", (stream,)).fetchone()
            if row is None:
                raise unknown_stream(stream)
            if after < row[0]:
                raise truncated(stream, after, row[0])
            batches: list[Batch] = []
            size = 0
            for first, epoch, checksum, blob in db.execute(
                "SELECT first, epoch, checksum, facts FROM journal_batch WHERE stream = ? AND last > ? ORDER BY last",
                (stream, after),
            ):
                batches.append(unpack(stream, first, epoch, blob, checksum).after(after))
                size += len(blob)
                if size >= PAGE_BYTES:
                    break
            return batches

        return await self._thread.read(page)

    async def wait_for_growth(self, stream: str, after: int, timeout_s: float) -> int:
        try:
            async with asyncio.timeout(timeout_s):
                while True:
                    # Taken before the head is read: an append in between sets this event.
                    growth = self._growth.setdefault(stream, asyncio.Event())
                    head = await self._thread.read(lambda db: _head(db, stream))
                    if head > after:
                        return head
                    await growth.wait()
        except TimeoutError:
            return await self._thread.read(lambda db: _head(db, stream))

    async def save_snapshot(self, stream: str, epoch: int, snapshot: Snapshot) -> None:
        check_snapshot(snapshot)
        checksum = checksum_of(snapshot.state)

        def save(db: sqlite3.Connection) -> None:
            _fence(db, stream, epoch)
            head = _head(db, stream)
            if snapshot.position > head:
                raise beyond_head(stream, snapshot.position, head)
            db.execute(
                "INSERT INTO journal_snapshot VALUES (?, ?, ?, ?, ?) ON CONFLICT DO NOTHING",
                (stream, snapshot.position, snapshot.epoch, checksum, snapshot.state),
            )

        await self._thread.write(save)

    async def load_snapshot(self, stream: str) -> Snapshot | None:
        def load(db: sqlite3.Connection) -> Snapshot | None:
            _head(db, stream)
            row = db.execute(
                "SELECT position, epoch, state, checksum FROM journal_snapshot WHERE stream = ?"
                " ORDER BY position DESC LIMIT 1",
                (stream,),
            ).fetchone()
            return None if row is None else checked_snapshot(stream, *row)

        return await self._thread.read(load)

    async def truncate(self, stream: str, epoch: int, through: int) -> None:
        check_position(through)

        def forget(db: sqlite3.Connection) -> None:
            _fence(db, stream, epoch)
            covered = db.execute(
                "SELECT 1 FROM journal_snapshot WHERE stream = ? AND position >= ? LIMIT 1", (stream, through)
            ).fetchone()
            if covered is None:
                raise not_covered(stream, through)
            db.execute("UPDATE journal_stream SET floor = max(floor, ?) WHERE stream = ?", (through, stream))
            db.execute("DELETE FROM journal_batch WHERE stream = ? AND last <= ?", (stream, through))
            db.execute("DELETE FROM journal_snapshot WHERE stream = ? AND position < ?", (stream, through))

        await self._thread.write(forget)

    async def streams(self) -> list[StreamStatus]:
        now_s = self._clock.monotonic_s()

        def every_stream(db: sqlite3.Connection) -> list[StreamStatus]:
            rows = db.execute(
                "SELECT stream, epoch, holder, head, floor,"
                " (SELECT max(position) FROM journal_snapshot WHERE journal_snapshot.stream = journal_stream.stream)"
                " FROM journal_stream ORDER BY stream"
            )
            return [
                StreamStatus(
                    stream=stream,
                    epoch=epoch,
                    holder=holder,
                    led=self._lease_until_s.get(stream, now_s) > now_s,
                    head=head,
                    floor=floor,
                    snapshot=position,
                )
                for stream, epoch, holder, head, floor, position in rows
            ]

        return await self._thread.read(every_stream)

    async def copy_to(self, path: Path) -> None:
        """Copy the whole file, as it is at one moment, to a new one. Appends wait as long as that takes."""

        def copy(db: sqlite3.Connection) -> None:
            try:
                with closing(sqlite3.connect(path, isolation_level=None)) as target:
                    db.backup(target)
            except (sqlite3.Error, OSError) as error:
                raise StrataError(Code.UNAVAILABLE, f"the journal was not copied to {path}: {error}") from error

        await self._thread.run_exclusive(copy)

    async def close(self) -> None:
        await self._thread.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.close()


def _version(db: sqlite3.Connection) -> int:
    version: int = db.execute("PRAGMA user_version").fetchone()[0]
    return version


def _stream(db: sqlite3.Connection, stream: str) -> tuple[int, int]:
    row: tuple[int, int] | None = db.execute(
        "SELECT epoch, head FROM journal_stream WHERE stream = ?", (stream,)
    ).fetchone()
    if row is None:
        raise unknown_stream(stream)
    return row


def _head(db: sqlite3.Connection, stream: str) -> int:
    return _stream(db, stream)[1]


def _epoch(db: sqlite3.Connection, stream: str) -> int:
    return _stream(db, stream)[0]


def _fence(db: sqlite3.Connection, stream: str, epoch: int) -> None:
    current = _epoch(db, stream)
    if current != epoch:
        raise stale(stream, epoch, current)


def _recognise(db: sqlite3.Connection, stream: str, epoch: int, after: int, batch: tuple[int, int]) -> None:
    """Return if this very batch stands there already; else raise why it may not."""
    current, head = _stream(db, stream)
    last, checksum = batch
    found = db.execute(
        "SELECT 1 FROM journal_batch WHERE stream = ? AND last = ? AND first = ? AND epoch = ? AND checksum = ?",
        (stream, last, after + 1, epoch, checksum),
    ).fetchone()
    if found is None:
        raise stale(stream, epoch, current) if current != epoch else wrong_position(stream, after, head)
