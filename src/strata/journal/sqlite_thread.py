"""The one thread that owns the one SQLite connection: it runs queued jobs and commits whole groups of them at once."""

from __future__ import annotations

import asyncio
import contextlib
import queue
import sqlite3
import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, TypeVar

from strata.base.errors import Code, StrataError
from strata.base.failpoint import failpoint

T = TypeVar("T")

_GROUP: Final = 1024
"""Jobs that share a commit at most, so that the first of them does not wait for ever."""


@dataclass(frozen=True)
class Schema:
    tables: str
    version: int


Run = Callable[[sqlite3.Connection], Any]


@dataclass(frozen=True)
class _Job:
    run: Run
    writes: bool
    reply: asyncio.Future[Any]


@dataclass(frozen=True)
class _Done:
    job: _Job
    result: Any
    error: Exception | None


class WriterThread:
    """`write` and `read` run a function on the connection. A write is committed before its caller hears of it.

    A function that raises StrataError must not have changed anything before: it shares its transaction with others.
    """

    def __init__(self, path: Path, schema: Schema, *, create: bool) -> None:
        self.opened: Future[None] = Future()
        self._path = path
        self._schema = schema
        self._create = create
        self._loop = asyncio.get_running_loop()
        self._queue: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._broken: StrataError | None = None
        self._thread = threading.Thread(target=self._serve, name=f"journal {path.name}", daemon=True)
        self._thread.start()

    async def write(self, run: Callable[[sqlite3.Connection], T]) -> T:
        return await self._ask(run, writes=True)

    async def read(self, run: Callable[[sqlite3.Connection], T]) -> T:
        return await self._ask(run, writes=False)

    def close(self) -> None:
        """Finish what is queued and release the file. Blocks."""
        self._queue.put(None)
        self._thread.join()

    async def _ask(self, run: Callable[[sqlite3.Connection], T], *, writes: bool) -> T:
        if not self._thread.is_alive():
            raise StrataError(Code.UNAVAILABLE, f"the journal {self._path} is closed")
        reply: asyncio.Future[T] = self._loop.create_future()
        self._queue.put(_Job(run, writes, reply))
        return await reply

    def _serve(self) -> None:
        try:
            db = _connect(self._path, self._schema, create=self._create)
        except StrataError as error:
            self.opened.set_exception(error)
            return
        self.opened.set_result(None)
        open_for_jobs = True
        while open_for_jobs:
            jobs: list[_Job] = []
            found = self._queue.get()
            while found is not None:
                jobs.append(found)
                if len(jobs) == _GROUP or self._queue.empty():
                    break
                found = self._queue.get()
            open_for_jobs = found is not None
            if jobs:
                done = self._run_group(db, jobs)
                self._loop.call_soon_threadsafe(_deliver, done)
        db.close()

    def _run_group(self, db: sqlite3.Connection, jobs: list[_Job]) -> list[_Done]:
        if self._broken is not None:
            return [_Done(job, None, self._broken) for job in jobs]
        writes = any(job.writes for job in jobs)
        try:
            if writes:
                db.execute("BEGIN IMMEDIATE")
            done = [_run(db, job) for job in jobs]
            if writes:
                failpoint("journal.sqlite.before_commit")
                db.execute("COMMIT")
                failpoint("journal.sqlite.after_commit")
        except sqlite3.Error as error:
            _roll_back(db)
            failure = self._failed(error)
            return [_Done(job, None, failure) for job in jobs]
        except Exception as error:  # noqa: BLE001 - this thread's outermost handler: the callers get it, not nobody
            _roll_back(db)
            return [_Done(job, None, error) for job in jobs]
        return done

    def _failed(self, error: sqlite3.Error) -> StrataError:
        if getattr(error, "sqlite_errorcode", None) == sqlite3.SQLITE_FULL:
            return StrataError(
                Code.UNAVAILABLE, f"no space left for the journal {self._path}", hint="free some disk space"
            )
        # After a failed fsync nobody knows what the disk holds; only a fresh start reads it again.
        code = Code.CORRUPT if isinstance(error, sqlite3.DatabaseError) and _is_malformed(error) else Code.UNAVAILABLE
        self._broken = StrataError(
            code,
            f"the journal {self._path} failed: {error}",
            hint="this process takes no more writes; mend the disk and restart it",
        )
        return self._broken


def _roll_back(db: sqlite3.Connection) -> None:
    # A disk that fails may fail here too; a connection that is closed without a commit rolls back as well.
    with contextlib.suppress(sqlite3.Error):
        if db.in_transaction:
            db.execute("ROLLBACK")


def _run(db: sqlite3.Connection, job: _Job) -> _Done:
    try:
        return _Done(job, job.run(db), None)
    except StrataError as error:
        return _Done(job, None, error)


def _deliver(done: list[_Done]) -> None:
    for each in done:
        if each.job.reply.done():
            continue
        if each.error is not None:
            each.job.reply.set_exception(each.error)
        else:
            each.job.reply.set_result(each.result)


def _connect(path: Path, schema: Schema, *, create: bool) -> sqlite3.Connection:
    if not create and not path.exists():
        raise StrataError(Code.NOT_FOUND, f"there is no journal at {path}")
    try:
        db = sqlite3.connect(path, timeout=0, isolation_level=None, cached_statements=64)
        try:
            _prepare(db, path, schema, create=create)
        except BaseException:
            db.close()
            raise
    except sqlite3.Error as error:
        raise _not_opened(path, error) from error
    return db


def _prepare(db: sqlite3.Connection, path: Path, schema: Schema, *, create: bool) -> None:
    db.execute("PRAGMA locking_mode = EXCLUSIVE")
    version = db.execute("PRAGMA user_version").fetchone()[0]
    empty = db.execute("SELECT count(*) FROM sqlite_schema").fetchone()[0] == 0
    if version == 0 and not (create and empty):
        raise StrataError(Code.CONFLICT, f"{path} is not a journal", hint="give the file of a journal, or a new one")
    if version not in (0, schema.version):
        raise StrataError(
            Code.UNSUPPORTED,
            f"the journal {path} has schema version {version}; this Strata knows {schema.version}",
            hint="it was written by another version: upgrade Strata",
        )
    # Exclusive before WAL keeps the WAL's index in this process's memory, with no file to share.
    db.execute("PRAGMA journal_mode = WAL")
    db.execute("PRAGMA synchronous = FULL")
    db.execute("PRAGMA fullfsync = ON")
    db.execute("BEGIN EXCLUSIVE")
    if version == 0:
        for statement in filter(str.strip, schema.tables.split(";")):
            db.execute(statement)
        db.execute(f"PRAGMA user_version = {schema.version}")
    db.execute("COMMIT")


def _not_opened(path: Path, error: sqlite3.Error) -> StrataError:
    if getattr(error, "sqlite_errorcode", None) in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED):
        return StrataError(
            Code.CONFLICT,
            f"the journal {path} is in use by another process",
            hint="a SQLite journal serves one process; stop that one, or use PostgreSQL",
        )
    if _is_malformed(error):
        return StrataError(Code.CORRUPT, f"{path} is not a journal or is damaged: {error}")
    return StrataError(Code.UNAVAILABLE, f"the journal {path} cannot be opened: {error}")


def _is_malformed(error: sqlite3.Error) -> bool:
    return getattr(error, "sqlite_errorcode", None) in (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB)
