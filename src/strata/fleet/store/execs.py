"""The table of execs: the same statements in SQLite and in PostgreSQL."""

from __future__ import annotations

import re
import sqlite3
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, Protocol

import msgspec

from strata.database import event_kinds
from strata.database.events import EventRecord, record_postgres, record_sqlite
from strata.database.migrations import Component
from strata.database.sqlite import SqliteThread
from strata.fleet.execs import MAX_OPEN, REPORT_S, START_S, ExecRow, RequestedExec

if TYPE_CHECKING:
    from strata.database.postgres import Connections

KEPT_S: Final = 86_400.0
"""How long one that has ended can be read."""
SQLITE: Final = Component(
    "exec",
    1,
    (
        """
        CREATE TABLE exec (
          id TEXT PRIMARY KEY, job_id TEXT NOT NULL, epoch INTEGER NOT NULL, host_id TEXT NOT NULL,
          actor TEXT NOT NULL, command BLOB NOT NULL, timeout REAL NOT NULL, expires_at REAL NOT NULL,
          run TEXT NOT NULL DEFAULT '', status INTEGER, error TEXT NOT NULL DEFAULT '', ended_at REAL
        ) WITHOUT ROWID, STRICT;
        CREATE INDEX exec_open ON exec (job_id) WHERE ended_at IS NULL;
        CREATE INDEX exec_ended ON exec (ended_at) WHERE ended_at IS NOT NULL;
        """,
    ),
)
POSTGRES: Final = Component(
    "exec",
    1,
    (
        """
        CREATE TABLE exec (
          id text PRIMARY KEY, job_id text COLLATE "C" NOT NULL, epoch bigint NOT NULL, host_id text NOT NULL,
          actor text NOT NULL, command bytea NOT NULL, timeout double precision NOT NULL,
          expires_at double precision NOT NULL, run text NOT NULL DEFAULT '', status integer,
          error text NOT NULL DEFAULT '', ended_at double precision
        );
        CREATE INDEX exec_open ON exec (job_id) WHERE ended_at IS NULL;
        CREATE INDEX exec_ended ON exec (ended_at) WHERE ended_at IS NOT NULL;
        """,
    ),
)
_COLUMNS: Final = "id, job_id, epoch, host_id, actor, command, timeout, expires_at, run, status, error, ended_at"
_LEASED: Final = (
    "EXISTS (SELECT 1 FROM job WHERE job.id = exec.job_id AND job.epoch = exec.epoch"
    " AND job.status IN ('claimed', 'running'))"
)
_FORGET: Final = f"DELETE FROM exec WHERE ended_at IS NOT NULL AND ended_at < :before RETURNING {_COLUMNS}"
_LOCK_JOB: Final = "SELECT 1 FROM job WHERE id = :job FOR UPDATE"
_ADD: Final = (
    "INSERT INTO exec (id, job_id, epoch, host_id, actor, command, timeout, expires_at)"
    " SELECT :id, job.id, job.epoch, job.host_id, :actor, :command, :timeout, :until FROM job"
    " WHERE job.id = :job AND job.status = 'running'"
    f" AND (SELECT count(*) FROM exec WHERE job_id = :job AND ended_at IS NULL) < {MAX_OPEN} RETURNING {_COLUMNS}"
)
_FIND: Final = f"SELECT {_COLUMNS} FROM exec WHERE id = :id"
_OPEN: Final = f"SELECT {_COLUMNS} FROM exec WHERE ended_at IS NULL ORDER BY id"
_START: Final = (
    f"UPDATE exec SET run = :run, expires_at = :now + timeout + {REPORT_S} WHERE id = :id AND host_id = :host"
    f" AND ended_at IS NULL AND expires_at > :now AND run IN ('', :run) AND {_LEASED} RETURNING {_COLUMNS}"
)
_END: Final = (
    "UPDATE exec SET status = :status, error = :error, ended_at = :now WHERE id = :id AND ended_at IS NULL"
    f" AND (run = :run OR :run = '') RETURNING {_COLUMNS}"
)
_EXPIRE: Final = (
    "UPDATE exec SET error = CASE WHEN expires_at > :now THEN 'the lease of its job has ended'"
    " WHEN run = '' THEN 'its host did not start it in time' ELSE 'its host did not report its end' END,"
    f" ended_at = :now WHERE ended_at IS NULL AND (expires_at <= :now OR NOT {_LEASED}) RETURNING {_COLUMNS}"
)
_PLACE: Final = re.compile(r":([a-z]+)")
_decode_command: Final = msgspec.json.Decoder(tuple[str, ...]).decode

Values = Mapping[str, Any]
Event = Callable[[ExecRow], EventRecord]


class ExecRows(Protocol):
    """Runs one statement, whose rows are execs."""

    async def read(self, statement: str, values: Values) -> Sequence[ExecRow]: ...

    async def change(
        self, statement: str, values: Values, event: Event | None = None, *, lock: str = ""
    ) -> Sequence[ExecRow]:
        """With an event for each row, in the same transaction. `lock` comes first where writers do not take turns."""


class SqliteExecRows:
    def __init__(self, thread: SqliteThread) -> None:
        self._thread = thread

    async def read(self, statement: str, values: Values) -> Sequence[ExecRow]:
        return await self._thread.read(lambda db: _decode(db.execute(statement, values).fetchall()))

    async def change(
        self,
        statement: str,
        values: Values,
        event: Event | None = None,
        *,
        lock: str = "",  # noqa: ARG002
    ) -> Sequence[ExecRow]:
        def change(db: sqlite3.Connection) -> Sequence[ExecRow]:
            rows = _decode(db.execute(statement, values).fetchall())
            record_sqlite(db, [event(row) for row in rows] if event else [])
            return rows

        return await self._thread.write(change)


class PostgresExecRows:
    def __init__(self, connections: Connections) -> None:
        self._connections = connections

    async def read(self, statement: str, values: Values) -> Sequence[ExecRow]:
        return _decode(await self._connections.run(_PLACE.sub(r"%(\1)s", statement), values))

    async def change(
        self, statement: str, values: Values, event: Event | None = None, *, lock: str = ""
    ) -> Sequence[ExecRow]:
        async with self._connections.transaction() as connection:
            if lock:
                await connection.execute(_PLACE.sub(r"%(\1)s", lock), values)
            cursor = await connection.execute(_PLACE.sub(r"%(\1)s", statement), values)
            rows = _decode(await cursor.fetchall())
            await record_postgres(connection, [event(row) for row in rows] if event else [])
            return rows


class ExecTable:
    """The store of execs, on the rows of either database."""

    def __init__(self, rows: ExecRows) -> None:
        self._rows = rows

    async def add(self, exec_id: str, request: RequestedExec, now_s: float) -> ExecRow | None:
        await self._rows.change(_FORGET, {"before": now_s - KEPT_S})
        values = {
            "id": exec_id,
            "job": request.job_id,
            "actor": request.actor,
            "command": msgspec.json.encode(request.command),
            "timeout": request.timeout_s,
            "until": now_s + START_S,
        }
        # Without the lock, two requests at the same time would not count each other.
        return _only(await self._rows.change(_ADD, values, lambda row: _requested(row, now_s), lock=_LOCK_JOB))

    async def find(self, exec_id: str) -> ExecRow | None:
        return _only(await self._rows.read(_FIND, {"id": exec_id}))

    async def open_execs(self) -> Sequence[ExecRow]:
        return await self._rows.read(_OPEN, {})

    async def start(self, exec_id: str, host_id: str, run: str, now_s: float) -> ExecRow | None:
        values = {"id": exec_id, "host": host_id, "run": run, "now": now_s}
        return _only(await self._rows.change(_START, values))

    async def end(
        self, exec_id: str, actor: str, now_s: float, *, run: str = "", status: int | None = None, error: str = ""
    ) -> ExecRow | None:
        values = {"id": exec_id, "run": run, "status": status, "error": error, "now": now_s}
        return _only(await self._rows.change(_END, values, lambda row: _ended(row, actor, now_s)))

    async def expire(self, now_s: float) -> None:
        await self._rows.change(_EXPIRE, {"now": now_s}, lambda row: _ended(row, "hub", now_s))


def _only(rows: Sequence[ExecRow]) -> ExecRow | None:
    return rows[0] if rows else None


def _requested(row: ExecRow, now_s: float) -> EventRecord:
    # Everybody can read events, and arguments may be secret.
    program, *arguments = row.command
    body = {"exec": row.id, "program": program, "arguments": len(arguments), "epoch": row.epoch, "host": row.host_id}
    return EventRecord(now_s, row.actor, event_kinds.JOB_EXEC_REQUESTED, row.job_id, body)


def _ended(row: ExecRow, actor: str, now_s: float) -> EventRecord:
    body = {"exec": row.id, "status": row.status, "error": row.error, "epoch": row.epoch}
    return EventRecord(now_s, actor, event_kinds.JOB_EXEC_ENDED, row.job_id, body)


def _decode(rows: Sequence[tuple[Any, ...]]) -> Sequence[ExecRow]:
    return [
        ExecRow(
            id=id_,
            job_id=job_id,
            epoch=epoch,
            host_id=host_id,
            actor=actor,
            command=_decode_command(command),
            timeout_s=timeout,
            expires_at_s=expires_at,
            run=run,
            status=status,
            error=error,
            ended_at_s=ended_at,
        )
        for id_, job_id, epoch, host_id, actor, command, timeout, expires_at, run, status, error, ended_at in rows
    ]
