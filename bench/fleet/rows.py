"""Pending jobs by the million, made by the databases themselves, and the bare claims the stores are held against."""

from __future__ import annotations

import asyncio
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any, Final, Self

import psycopg

from strata.database import events
from strata.database.migrations import SqliteComponents, upgrade_postgres
from strata.database.postgres import Connections
from strata.database.sqlite import SqliteThread
from strata.fleet.core.requirement import RequirementClass
from strata.fleet.store.postgres import tables as postgres_tables
from strata.fleet.store.postgres.store import build_postgres_store
from strata.fleet.store.rows import encode
from strata.fleet.store.sqlite import tables as sqlite_tables
from strata.fleet.store.sqlite.store import build_sqlite_store
from strata.fleet.store.store import FleetStore
from strata.hub.tables import open_tables

HOSTS: Final = 64
FLEET: Final = 4096
"""Hosts of a fleet."""
CLAIMANTS: Final = 32_768
"""Hosts that claim in turn: so many that each has one claim, for which it holds nothing, as a host with one slot."""
FILL_S: Final = 3600.0
_COLUMNS: Final = (
    "id, spec, class_id, status, epoch, created_at, changed_at, not_before, host_id, reason, artifact, declared,"
    " orphaned, waits_for, model, sweep, priority, trainer, charged, lost, excused, checkpoint"
)
RARE: Final = 2
"""Where there are two classes, every hundredth job is of the second, and of the least priority."""
_POSTGRES_JOBS: Final = f"""
INSERT INTO job ({_COLUMNS})
SELECT 'job1_' || lpad(to_hex(n), 64, '0'),
  convert_to('{{"model":"m' || c || '","seed":' || n || '}}', 'UTF8'), c + 1, 'pending', 0, 0, 0, 0, '', '', '', true,
  false, 0, 'm' || c, '', CASE WHEN c = 1 AND %(classes)s = {RARE} THEN -1 ELSE n %% 3 END, 'default', 0, 0, 0, ''
FROM generate_series(1, %(jobs)s) AS n,
  LATERAL (SELECT CASE WHEN %(classes)s = {RARE} THEN (n %% 100 = 0)::int ELSE n %% %(classes)s END AS c) AS which
"""
_SQLITE_JOBS: Final = f"""
WITH RECURSIVE numbers (n) AS (SELECT 1 WHERE :jobs UNION ALL SELECT n + 1 FROM numbers WHERE n < :jobs)
INSERT INTO job ({_COLUMNS})
SELECT printf('job1_%064x', n), CAST('{{"model":"m' || c || '","seed":' || n || '}}' AS BLOB), c + 1, 'pending', 0, 0.0,
  0.0, 0.0, '', '', '', 1, 0, 0, 'm' || c, '', CASE WHEN c = 1 AND :classes = {RARE} THEN -1 ELSE n % 3 END, 'default',
  0, 0, 0, ''
FROM (SELECT n, CASE WHEN :classes = {RARE} THEN n % 100 = 0 ELSE n % :classes END AS c FROM numbers)
"""
_HOST_COLUMNS: Final = "id, name, capability, registered_at, state, state_reason, agent_version, pool"
_SQLITE_HOSTS: Final = f"""
WITH RECURSIVE numbers (n) AS (SELECT 0 UNION ALL SELECT n + 1 FROM numbers WHERE n < :hosts - 1)
INSERT INTO host ({_HOST_COLUMNS})
SELECT 'host_' || n, 'h' || n, CAST('{{"hostname":"h","slots":64}}' AS BLOB), 0.0, 'active', '', '', '' FROM numbers
"""
_POSTGRES_HOSTS: Final = f"""
INSERT INTO host ({_HOST_COLUMNS})
SELECT 'host_' || n, 'h' || n, convert_to('{{"hostname":"h","slots":64}}', 'UTF8'), 0, 'active', '', '', ''
FROM generate_series(0, %(hosts)s - 1) AS n
"""
_LEASE: Final = "lease (job_id, host_id, epoch, expires_at, expired)"
_ATTEMPT: Final = (
    "attempt (job_id, epoch, host_id, claim_id, claimed_at, started_at, ended_at, outcome, cause, error, artifact,"
    " checkpoint, facts, number)"
)
"""By name: a later column has a default."""
_OWNERS: Final = "UPDATE job SET owner = 'owner-' || (seq % {owners})"
_READY: Final = "INSERT INTO ready SELECT seq, class_id, priority, 0, owner FROM job"


def _classes(count: int) -> list[tuple[str, bytes]]:
    made = [RequirementClass(f"m{number}", "default") for number in range(count)]
    return [(each.key, encode(each)) for each in made]


async def fill(database: str, jobs: int) -> None:
    """The database of a hub, with so many pending jobs of one class."""
    async with open_tables(database):
        pass
    kind, _, path = database.partition(":")
    if kind == "sqlite":
        with closing(sqlite3.connect(path)) as db, db:
            _fill_sqlite(db, jobs, 1)
        return
    async with await psycopg.AsyncConnection.connect(database) as connection:
        await _fill_postgres(connection, jobs, 1)
    async with await psycopg.AsyncConnection.connect(database, autocommit=True) as connection:
        await connection.execute("VACUUM ANALYZE")


def _fill_sqlite(db: sqlite3.Connection, jobs: int, classes: int, owners: int = 1) -> None:
    db.executemany("INSERT OR IGNORE INTO req_class (key, spec) VALUES (?, ?)", _classes(classes))
    db.execute(_SQLITE_JOBS, {"jobs": jobs, "classes": classes})
    db.execute(_OWNERS.format(owners=owners))
    db.execute(_READY)


async def _fill_postgres(connection: Any, jobs: int, classes: int, owners: int = 1) -> None:
    for row in _classes(classes):
        await connection.execute("INSERT INTO req_class (key, spec) VALUES (%s, %s)", row)
    await connection.execute(_POSTGRES_JOBS, {"jobs": jobs, "classes": classes})
    await connection.execute(_OWNERS.format(owners=owners))
    await connection.execute(_READY)


async def sqlite_store(path: Path, jobs: int, classes: int = 1, owners: int = 1, hosts: int = FLEET) -> FleetStore:
    thread = await SqliteThread.open(path, SqliteComponents([events.SQLITE, sqlite_tables.COMPONENT]))
    store = build_sqlite_store(thread)
    await thread.write(lambda db: _fill_sqlite(db, jobs, classes, owners))
    await thread.write(lambda db: db.execute(_SQLITE_HOSTS, {"hosts": hosts}))
    return store


async def postgres_store(url: str, jobs: int, classes: int = 1, owners: int = 1, hosts: int = FLEET) -> FleetStore:
    connections = Connections(url, 8, FILL_S, what="bench", by_index=True)
    async with connections.acquire() as connection:
        await upgrade_postgres(connection, [events.POSTGRES, postgres_tables.COMPONENT])
    async with connections.transaction() as connection:
        await _fill_postgres(connection, jobs, classes, owners)
        await connection.execute(_POSTGRES_HOSTS, {"hosts": hosts})
    async with connections.acquire() as connection:
        await connection.execute("VACUUM ANALYZE")
    return build_postgres_store(connections)


class BareSqlite:
    """The statements of a claim, one after the other in one transaction, with nothing around them.

    On a file of its own with the same rows and the same durability, and in the caller's thread.
    """

    def __init__(self, path: Path) -> None:
        self._db = sqlite3.connect(path, isolation_level=None, check_same_thread=False, cached_statements=256)
        for setting in ("locking_mode = EXCLUSIVE", "journal_mode = WAL", "synchronous = FULL", "fullfsync = ON"):
            self._db.execute(f"PRAGMA {setting}")
        self._number = 0

    @classmethod
    async def open(cls, path: Path, jobs: int) -> Self:
        await (await sqlite_store(path, 0)).close()
        bare = cls(path)
        # Filled by this very connection, as the stores are: a log that has grown before is cheaper to flush.
        bare._db.execute("BEGIN")
        _fill_sqlite(bare._db, jobs, 1)
        bare._db.execute("COMMIT")
        return bare

    def claim(self, count: int = 1) -> None:
        db = self._db
        db.execute("BEGIN IMMEDIATE")
        select = "SELECT seq FROM ready WHERE class_id = 1 ORDER BY priority DESC, seq LIMIT ?"
        for (seq,) in db.execute(select, (count,)).fetchall():
            self._number += 1
            host = f"host_{self._number % HOSTS}"
            db.execute("DELETE FROM ready WHERE seq = ?", (seq,))
            job_id, epoch, _ = db.execute(
                "UPDATE job SET status = 'claimed', epoch = epoch + 1, host_id = ? WHERE seq = ?"
                " RETURNING id, epoch, spec",
                (host, seq),
            ).fetchone()
            db.execute(f"INSERT INTO {_LEASE} VALUES (?, ?, ?, 45.0, 0)", (job_id, host, epoch))
            db.execute(
                f"INSERT INTO {_ATTEMPT} VALUES (?, ?, ?, ?, 1.0, NULL, NULL, '', '', '', '', '', x'7b7d', 1)",
                (job_id, epoch, host, f"c{self._number}"),
            )
            db.execute(
                "INSERT INTO event (at, actor, kind, subject, body) VALUES (1.0, ?, 'job.claimed', ?, ?)",
                (f"host:{host}", job_id, b'{"epoch":1}'),
            )
        db.execute("COMMIT")

    def renew(self, jobs: list[str]) -> None:
        self._number += 1
        self._db.execute("BEGIN IMMEDIATE")
        update = "UPDATE lease SET expires_at = ? WHERE job_id = ? AND epoch = 1 AND host_id = 'host_0'"
        self._db.executemany(update, [(float(self._number), job_id) for job_id in jobs])
        self._db.execute("COMMIT")

    def leased(self, count: int) -> list[str]:
        rows = self._db.execute("SELECT job_id FROM lease LIMIT ?", (count,)).fetchall()
        return [job_id for (job_id,) in rows]

    def close(self) -> None:
        self._db.close()


_BARE_CLAIM: Final = f"""
WITH chosen AS (
  SELECT seq FROM ready WHERE class_id = $1 ORDER BY priority DESC, seq LIMIT {{count}} FOR UPDATE SKIP LOCKED
), gone AS (DELETE FROM ready USING chosen WHERE ready.seq = chosen.seq RETURNING ready.seq)
INSERT INTO {_LEASE} SELECT 'job1_' || lpad(to_hex(seq), 64, '0'), 'host_0', 1, 45.0, false FROM gone RETURNING job_id
"""
_BARE_WRITES: Final = f"""
WITH chosen AS (
  SELECT seq FROM ready WHERE class_id = $1 ORDER BY priority DESC, seq LIMIT {{count}} FOR UPDATE SKIP LOCKED
), gone AS (
  DELETE FROM ready USING chosen WHERE ready.seq = chosen.seq
), moved AS (
  UPDATE job SET status = 'claimed', epoch = epoch + 1, host_id = 'host_' || chosen.seq % {{hosts}}
  FROM chosen WHERE job.seq = chosen.seq RETURNING id, epoch, spec, host_id AS host, $2 || chosen.seq AS claim
), leased AS (
  INSERT INTO {_LEASE} SELECT id, host, epoch, 45.0, false FROM moved
), tried AS (
  INSERT INTO {_ATTEMPT} SELECT id, epoch, host, claim, 1.0, NULL, NULL, '', '', '', '', '', '{{{{}}}}', 1 FROM moved
), told AS (
  INSERT INTO event (at, actor, kind, subject, body)
  SELECT 1.0, 'host:' || host, 'job.claimed', id, '{{{{"epoch":1}}}}' FROM moved
)
SELECT id, epoch, spec FROM moved
"""


class BarePostgres:
    """Prepared statements on open connections to a database of its own with the same rows.

    `claim` is the smallest thing that could be called a claim: a row leaves one table and another joins a second.
    `claim_with_records` also does what makes it one: the job's status, the attempt and the event.
    """

    def __init__(self, connections: list[psycopg.AsyncConnection[Any]]) -> None:
        self._connections = connections
        self._free: asyncio.Queue[Any] = asyncio.Queue()
        for connection in connections:
            self._free.put_nowait(psycopg.AsyncRawCursor(connection))
        self._number = 0

    @classmethod
    async def open(cls, url: str, jobs: int, connections: int, *, queue_only: bool = False) -> Self:
        """`queue_only` has places in the queue without the jobs they are of, which `claim` does not look at."""
        await (await postgres_store(url, 0 if queue_only else jobs)).close()
        opened = [await psycopg.AsyncConnection.connect(url, autocommit=True) for _ in range(connections)]
        for connection in opened:
            await connection.execute("SET synchronous_commit = on")
        if queue_only:
            fill = (
                "INSERT INTO ready (seq, class_id, priority, since)"
                " SELECT n, 1, n % 3, 0 FROM generate_series(1, $1::bigint) AS n"
            )
            await psycopg.AsyncRawCursor(opened[0]).execute(fill, (jobs,))
            await opened[0].execute("VACUUM ANALYZE")
        return cls(opened)

    async def claim(self, count: int = 1) -> None:
        await self._run(_BARE_CLAIM.format(count=count), (1,))

    async def claim_with_records(self, count: int = 1) -> None:
        await self._run(_BARE_WRITES.format(count=count, hosts=HOSTS), (1, "c"))

    async def renew(self, jobs: list[str]) -> None:
        self._number += 1
        update = "UPDATE lease SET expires_at = $1 WHERE job_id = ANY($2::text[]) AND host_id = 'host_0' RETURNING 1"
        await self._run(update, (float(self._number), jobs))

    async def _run(self, statement: str, values: tuple[Any, ...]) -> None:
        cursor = await self._free.get()
        await cursor.execute(statement, values, prepare=True, binary=True)
        await cursor.fetchall()
        self._free.put_nowait(cursor)

    async def close(self) -> None:
        await asyncio.gather(*(connection.close() for connection in self._connections))
