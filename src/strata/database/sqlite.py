"""The one thread that owns a SQLite connection: group commit (1,024 functions), pragmas, waiting for a lock (5 s), and
errors.
"""

from __future__ import annotations

import asyncio
import contextlib
import queue
import sqlite3
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any, Final, NamedTuple, Protocol, Self, TypeVar

from strata.base.errors import Code, StrataError
from strata.base.failpoint import failpoint
from strata.base.private import make_private_file

T = TypeVar("T")

_SHARED_WAIT_S: Final = 5.0
"""Busy timeout: how long another process may hold the write lock."""
_GROUP: Final = 1024
"""Functions per commit at most, so that the first of them does not wait too long."""


class SqliteSchema(Protocol):
    """Checks that a file is ours before it is used, and upgrades its tables."""

    what: str
    """What messages call the file: `journal`, `database`."""

    def check_file(self, db: sqlite3.Connection, path: Path, *, create: bool) -> None:
        """Raise unless this file is ours, or empty and to be created. Nothing may be written yet."""

    def upgrade(self, db: sqlite3.Connection) -> None:
        """Make the tables what this version needs, inside the transaction that is open."""


Run = Callable[[sqlite3.Connection], Any]


class _Job(NamedTuple):
    run: Run
    writes: bool
    alone: bool
    reply: asyncio.Future[Any]


class _Done(NamedTuple):
    job: _Job
    result: Any
    error: Exception | None


class SqliteThread:
    """Open with `await SqliteThread.open(path, schema)`.

    `write` and `read` run a function on the connection. A write is committed before it returns.

    A function that raises StrataError must not have changed anything before: it shares its transaction with others.
    """

    def __init__(self, path: Path, schema: SqliteSchema, *, create: bool, shared: bool = False) -> None:
        self.opened: Future[None] = Future()
        self._path = path
        self._schema = schema
        self._create = create
        self._shared = shared
        self._loop = asyncio.get_running_loop()
        self._queue: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._next: _Job | None = None
        self.observe: Callable[[float], None] | None = None
        """Called with the seconds that each function took, with its wait in the queue."""
        self._broken: StrataError | None = None
        self._stopped = False
        self._thread = threading.Thread(target=self._run_thread, name=f"{schema.what} {path.name}", daemon=True)
        self._thread.start()

    @classmethod
    async def open(cls, path: Path, schema: SqliteSchema, *, create: bool = True, shared: bool = False) -> Self:
        """A `shared` one may be open in other processes of this machine, if they all open it so."""
        thread = cls(path, schema, create=create, shared=shared)
        try:
            await asyncio.wrap_future(thread.opened)
        except BaseException:
            # A caller that is cancelled must not leave the file locked.
            await thread.close()
            raise
        return thread

    async def close(self) -> None:
        """Finish what is queued and release the file."""
        self.stop()
        await asyncio.to_thread(self._thread.join)

    async def write(self, run: Callable[[sqlite3.Connection], T]) -> T:
        return await self._submit(run, writes=True)

    async def read(self, run: Callable[[sqlite3.Connection], T]) -> T:
        return await self._submit(run, writes=False)

    async def run_exclusive(self, run: Callable[[sqlite3.Connection], T]) -> T:
        """Run outside of any transaction, as a copy of the whole file needs; all other jobs wait.

        An error of SQLite that is not about this file has to be caught in there: it would end this database.
        """
        return await self._submit(run, writes=False, alone=True)

    def stop(self) -> None:
        """Take no more jobs; finish those that are queued, then release the file."""
        if not self._stopped:
            self._stopped = True
            self._queue.put(None)

    async def _submit(self, run: Callable[[sqlite3.Connection], T], *, writes: bool, alone: bool = False) -> T:
        if self._stopped:
            raise StrataError(Code.PRECONDITION, f"the {self._schema.what} {self._path.name} is closed")
        if asyncio.get_running_loop() is not self._loop:
            raise StrataError(Code.INTERNAL, f"a {self._schema.what} belongs to the event loop it was opened in")
        reply: asyncio.Future[T] = self._loop.create_future()
        started_s = time.monotonic()
        self._queue.put(_Job(run, writes, alone, reply))
        result = await reply
        if self.observe is not None:
            self.observe(time.monotonic() - started_s)
        return result

    def _run_thread(self) -> None:
        # From here on the opener may be cancelled, but the future gets a result or an error all the same.
        self.opened.set_running_or_notify_cancel()
        try:
            db = _connect(self._path, self._schema, create=self._create, shared=self._shared)
        except Exception as error:  # noqa: BLE001 - this thread's outermost handler: the opener gets it
            self.opened.set_exception(error)
            return
        self.opened.set_result(None)
        while jobs := self._next_group():
            done = self._run_group(db, jobs)
            # A loop that was closed meanwhile has no callers left.
            with contextlib.suppress(RuntimeError):
                self._loop.call_soon_threadsafe(_deliver, done)
        db.close()

    def _next_group(self) -> list[_Job]:
        """Wait for a job and take what has queued up behind it; nothing when stopped."""
        jobs: list[_Job] = []
        while not jobs or (len(jobs) < _GROUP and not self._queue.empty()):
            job = self._next or self._queue.get()
            self._next = None
            if job is None:
                if jobs:
                    self._queue.put(None)
                break
            if job.alone and jobs:
                self._next = job
                break
            jobs.append(job)
            if job.alone:
                break
        return jobs

    def _run_group(self, db: sqlite3.Connection, jobs: list[_Job]) -> list[_Done]:
        if self._broken is not None:
            return [_Done(job, None, self._broken) for job in jobs]
        writes = any(job.writes for job in jobs)
        try:
            if writes:
                db.execute("BEGIN IMMEDIATE")
            done = [_run(db, job, alone=len(jobs) == 1) for job in jobs]
            if writes and db.in_transaction:
                failpoint("database.sqlite.before_commit")
                db.execute("COMMIT")
                failpoint("database.sqlite.after_commit")
        except sqlite3.Error as error:
            _roll_back(db)
            failure = self._to_error(error)
            return [_Done(job, None, failure) for job in jobs]
        return done

    def _to_error(self, error: sqlite3.Error) -> StrataError:
        if getattr(error, "sqlite_errorcode", None) == sqlite3.SQLITE_FULL:
            return StrataError(
                Code.UNAVAILABLE,
                f"no space left for the {self._schema.what} {self._path.name}",
                hint="free some disk space",
            )
        if self._shared and getattr(error, "sqlite_errorcode", 0) & 0xFF == sqlite3.SQLITE_BUSY:
            return StrataError(
                Code.UNAVAILABLE, f"another process holds the {self._schema.what} {self._path.name}", hint="try again"
            )
        # After a failed fsync the content of the disk is unknown; only a restart reads it again.
        self._broken = StrataError(
            Code.CORRUPT,
            f"the {self._schema.what} {self._path.name} failed: {error}",
            hint="this process takes no more writes; mend the disk and restart it",
        )
        return self._broken


def _roll_back(db: sqlite3.Connection) -> None:
    # A disk that fails may fail here too; a connection that is closed without a commit rolls back as well.
    with contextlib.suppress(sqlite3.Error):
        if db.in_transaction:
            db.execute("ROLLBACK")


def _run(db: sqlite3.Connection, job: _Job, *, alone: bool) -> _Done:
    """One job. Its own error is rolled back and returned to its caller; a failing disk fails the whole group."""
    shared = job.writes and not alone
    if shared:
        db.execute("SAVEPOINT job")
    try:
        result = job.run(db)
    except Exception as error:
        if isinstance(error, sqlite3.Error) and _is_fatal(error):
            raise
        if shared:
            db.execute("ROLLBACK TO job")
            db.execute("RELEASE job")
        elif job.writes:
            _roll_back(db)
        return _Done(job, None, error)
    if shared:
        db.execute("RELEASE job")
    return _Done(job, result, None)


def _is_fatal(error: sqlite3.Error) -> bool:
    code = getattr(error, "sqlite_errorcode", 0) & 0xFF
    return code in (
        sqlite3.SQLITE_IOERR,
        sqlite3.SQLITE_CORRUPT,
        sqlite3.SQLITE_NOTADB,
        sqlite3.SQLITE_FULL,
        sqlite3.SQLITE_READONLY,
        sqlite3.SQLITE_NOMEM,
        sqlite3.SQLITE_BUSY,
        sqlite3.SQLITE_CANTOPEN,
    )


def _deliver(done: list[_Done]) -> None:
    for each in done:
        if each.job.reply.done():
            continue
        if each.error is not None:
            each.job.reply.set_exception(each.error)
        else:
            each.job.reply.set_result(each.result)


def _connect(path: Path, schema: SqliteSchema, *, create: bool, shared: bool) -> sqlite3.Connection:
    try:
        if not create and not path.exists():
            raise StrataError(Code.NOT_FOUND, f"there is no {schema.what} at {path}")
        # Its log and index files take over who may read them.
        make_private_file(path)
        wait_s = _SHARED_WAIT_S if shared else 0
        db = sqlite3.connect(path, timeout=wait_s, isolation_level=None, cached_statements=256)
        try:
            _prepare(db, path, schema, create=create, shared=shared)
        except BaseException:
            db.close()
            raise
    except sqlite3.Error as error:
        raise _not_opened(path, schema.what, error) from error
    except (OSError, ValueError) as error:
        raise StrataError(Code.INVALID, f"{str(path)!r} cannot be the path of a {schema.what}: {error}") from error
    return db


def _prepare(db: sqlite3.Connection, path: Path, schema: SqliteSchema, *, create: bool, shared: bool) -> None:
    db.execute(f"PRAGMA locking_mode = {'NORMAL' if shared else 'EXCLUSIVE'}")
    schema.check_file(db, path, create=create)
    # Exclusive before WAL keeps the WAL's index in this process's memory, with no file to share.
    db.execute("PRAGMA journal_mode = WAL")
    db.execute("PRAGMA synchronous = FULL")
    db.execute("PRAGMA fullfsync = ON")
    db.execute("PRAGMA foreign_keys = ON")
    db.execute("BEGIN EXCLUSIVE")
    schema.upgrade(db)
    db.execute("COMMIT")


def is_empty(db: sqlite3.Connection) -> bool:
    return db.execute("SELECT 1 FROM sqlite_schema LIMIT 1").fetchone() is None


def run_script(db: sqlite3.Connection, script: str) -> None:
    """Each statement of `script` inside the open transaction; `executescript` would commit it first."""
    statement = ""
    for piece in script.split(";"):
        statement += piece + ";"
        if sqlite3.complete_statement(statement):
            db.execute(statement)
            statement = ""
    if statement.strip():
        db.execute(statement)


def _not_opened(path: Path, what: str, error: sqlite3.Error) -> StrataError:
    if getattr(error, "sqlite_errorcode", None) in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED):
        return StrataError(
            Code.CONFLICT,
            f"the {what} {path} is in use by another process",
            hint=f"a SQLite {what} serves one process; stop that one, or use PostgreSQL",
        )
    if getattr(error, "sqlite_errorcode", None) in (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB):
        return StrataError(Code.CORRUPT, f"{path} is not a {what} or is damaged: {error}")
    return StrataError(Code.UNAVAILABLE, f"the {what} {path} cannot be opened: {error}")
