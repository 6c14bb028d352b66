"""Backup and restore of a hub's SQLite database, checks that a backup is whole, and the fencing of a restored one
(epochs raised by 1,000,000) before a hub serves from it.

A backup has none of the claims after it was taken, and the hosts that made them are still at work. So a restored
database is fenced: every job's epoch is raised beyond all epochs that may have been granted since, and held jobs are
pending again. A host with a lease from before the restore gets STALE and stops.

The file of a backup is sealed, so that no hub serves from it unfenced. PostgreSQL has its own tools (`pg_dump`);
`fence` fences what they restored.

Not in the database, and so not in its backup: artifacts, logs and the keys of the authority.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Final

from strata.base.atomic import rename_file
from strata.base.errors import Code, StrataError
from strata.database import event_kinds
from strata.database.events import POSITION, EventRecord, record
from strata.database.migrations import Component, SqliteComponents, read_seal, seal, unseal
from strata.database.sqlite import SqliteThread
from strata.database.transaction import SqliteTransaction, Transaction, run_to_end
from strata.fleet.core.job import JobEvent, sources, target
from strata.fleet.store.lists import ENDED

EPOCHS: Final = 1_000_000
"""How far a restore raises every epoch. An attempt takes seconds at least: no job had so many since a backup."""
EVENTS: Final = 1_000_000_000
"""How far it raises the numbers of events: a reader that is ahead of the backup must not skip the new ones."""
_LOST: Final = "the hub was restored from a backup"

_FENCE: Final = (
    "UPDATE attempt SET ended_at = :now, outcome = 'lost', cause = 'host_lost', error = :why WHERE EXISTS"
    " (SELECT 1 FROM lease WHERE lease.job_id = attempt.job_id AND lease.epoch = attempt.epoch)",
    f"UPDATE job SET status = '{target(JobEvent.EXPIRE)}', changed_at = :now, reason = :why"
    f" WHERE status IN ({', '.join(repr(status.value) for status in sources(JobEvent.EXPIRE))})",
    "DELETE FROM lease",
    "INSERT INTO ready SELECT seq, class_id, priority, :now, owner FROM job"
    f" WHERE status = '{target(JobEvent.EXPIRE)}' AND waits_for = 0"
    " AND NOT EXISTS (SELECT 1 FROM ready WHERE ready.seq = job.seq)"
    " AND NOT EXISTS (SELECT 1 FROM ripening WHERE ripening.seq = job.seq)",
    f"UPDATE job SET epoch = epoch + {EPOCHS}",
    # Rows that came back without their triggers were not counted.
    "DELETE FROM job_count",
    "INSERT INTO job_count SELECT project, shown, count(*) FROM (SELECT project, CASE"
    f" WHEN NOT {ENDED} THEN 'open' WHEN archived OR superseded THEN '' ELSE status END AS shown FROM job) AS j"
    " WHERE shown <> '' GROUP BY project, shown",
)
"""The same in both databases, in this order."""
_INVITES: Final = "UPDATE identity_invite SET revoked_at = :now WHERE used_by = '' AND revoked_at IS NULL"
"""An invitation that was used since the backup would be good for a second host."""
_SESSIONS: Final = "DELETE FROM identity_session"
"""A person who has logged out since the backup would be logged in again."""

_CURSORS: Final = f"UPDATE hub_cursor SET cursor = '0.' || {POSITION} WHERE cursor <> ''"
"""The cursors of the readers of the feed: the same position, where transactions count from 0 again."""


_HAS_TABLE: Final = {
    "sqlite": "SELECT 1 FROM sqlite_schema WHERE name = :name",
    "postgres": "SELECT 1 WHERE to_regclass(:name) IS NOT NULL",
}


async def backup_sqlite(thread: SqliteThread, path: Path, now_s: float) -> int:
    """Copy the database that is in use into a new file; its size in bytes. Writers wait as long as the copy takes."""
    beside = path.with_name(f"{path.name}.partial")

    def copy(db: sqlite3.Connection) -> int:
        if path.exists():
            raise StrataError(Code.CONFLICT, f"{path} is there already", hint="a backup overwrites nothing")
        try:
            beside.unlink(missing_ok=True)
            with closing(sqlite3.connect(beside, isolation_level=None)) as target:
                # Not a file anybody relies on before it is synced and has its name.
                target.execute("PRAGMA synchronous = OFF")
                db.backup(target)
                target.execute("PRAGMA journal_mode = DELETE")
                seal(target, f"it is a backup taken at {now_s:.0f}; restore it")
                _check_whole(target, path)
            return rename_file(beside, path)
        except (sqlite3.Error, OSError) as error:
            beside.unlink(missing_ok=True)
            raise StrataError(Code.UNAVAILABLE, f"the backup {path} was not written: {error}") from error

    return await thread.run_exclusive(copy)


def require_absent(path: Path) -> None:
    """CONFLICT unless a new database may get this name.

    The log of one that lay there counts too: SQLite plays it back onto whatever it finds, and would undo the fence.
    """
    for taken in (path, Path(f"{path}-wal"), Path(f"{path}-journal")):
        if taken.exists():
            hint = f"move the damaged database away first, with {path.name}-wal and {path.name}-journal"
            raise StrataError(Code.CONFLICT, f"{taken} is there already", hint=hint)


def restore_sqlite(backup: Path, path: Path, components: Sequence[Component], now_s: float) -> None:
    """Make a database to serve from out of a backup. The file appears whole and fenced, or not at all."""
    require_absent(path)
    beside = path.with_name(f"{path.name}.partial")
    beside.unlink(missing_ok=True)
    try:
        with closing(_open_backup(backup)) as source, closing(sqlite3.connect(beside, isolation_level=None)) as db:
            source.backup(db)
            _check_whole(db, backup)
            db.execute("BEGIN IMMEDIATE")
            unseal(db)
            schema = SqliteComponents(components)
            schema.check_file(db, backup, create=False)
            schema.upgrade(db)
            run_to_end(fence(SqliteTransaction(db), now_s))
            db.execute("COMMIT")
        rename_file(beside, path)
    except (sqlite3.Error, OSError) as error:
        raise StrataError(Code.CORRUPT, f"{backup} was not restored: {error}") from error
    finally:
        beside.unlink(missing_ok=True)


async def fence(tx: Transaction, now_s: float) -> None:
    """Take every job from its host. In PostgreSQL: after `pg_restore`, and before the first hub starts."""
    values = {"now": now_s, "why": _LOST, "events": EVENTS}
    for statement in _FENCE:
        await tx.execute(statement, values)
    if await tx.rows(_HAS_TABLE[tx.engine], {"name": "identity_invite"}):
        await tx.execute(_INVITES, values)
        await tx.execute(_SESSIONS)
    if tx.engine == "sqlite":
        await tx.execute("UPDATE sqlite_sequence SET seq = seq + :events WHERE name = 'event'", values)
    else:
        # Transactions are numbered by the server that ran them: those of another one may be in this one's future. Those
        # who read the events go on from the same place.
        if await tx.rows(_HAS_TABLE[tx.engine], {"name": "hub_cursor"}):
            await tx.execute(_CURSORS)
        await tx.execute("UPDATE event SET tx = 0 WHERE tx <> 0")
    await record(tx, [EventRecord(now_s, "operator", event_kinds.HUB_RESTORED, "hub", {"epochs": EPOCHS})])


def _open_backup(path: Path) -> sqlite3.Connection:
    if not path.is_file():
        raise StrataError(Code.NOT_FOUND, f"there is no backup at {path}")
    db = sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True, isolation_level=None)
    try:
        sealed = read_seal(db)
    except BaseException:
        db.close()
        raise
    if sealed is None:
        db.close()
        raise StrataError(Code.CONFLICT, f"{path} is not a backup", hint="give a file that a backup has written")
    return db


def _check_whole(db: sqlite3.Connection, path: Path) -> None:
    problems = [row[0] for row in db.execute("PRAGMA integrity_check(3)").fetchall() if row[0] != "ok"]
    problems += [f"{row[0]} misses its {row[2]}" for row in db.execute("PRAGMA foreign_key_check").fetchmany(3)]
    if problems:
        raise StrataError(Code.CORRUPT, f"{path} is damaged: {'; '.join(problems)}")
