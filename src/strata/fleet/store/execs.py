"""SQL of the table of execs: add, start, end, expire; rows are kept for a day."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Final

import msgspec

from strata.database import event_kinds
from strata.database.events import EventRecord, record
from strata.database.migrations import Component
from strata.database.transaction import NO_VALUES, Database, Transaction, Values
from strata.fleet.execs import MAX_OPEN, REPORT_S, START_S, ExecRow, RequestedExec

KEPT_S: Final = 86_400.0
"""How long one that has ended can be read."""
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
SQLITE: Final = POSTGRES.in_sqlite()
_COLUMNS: Final = "id, job_id, epoch, host_id, actor, command, timeout, expires_at, run, status, error, ended_at"
"""The columns in the order of the fields of `ExecRow`."""
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
_decode_command: Final[Callable[[Any], tuple[str, ...]]] = msgspec.json.Decoder(tuple[str, ...]).decode

Event = Callable[[ExecRow], EventRecord]


class ExecTable:
    """The store of execs."""

    def __init__(self, database: Database) -> None:
        self._database = database

    async def add(self, exec_id: str, request: RequestedExec, now_s: float) -> ExecRow | None:
        await self._change(_FORGET, {"before": now_s - KEPT_S})
        values = {
            "id": exec_id,
            "job": request.job_id,
            "actor": request.actor,
            "command": msgspec.json.encode(request.command),
            "timeout": request.timeout_s,
            "until": now_s + START_S,
        }
        # Without the lock, two requests at the same time would not count each other.
        return _only(await self._change(_ADD, values, lambda row: _requested(row, now_s), lock=_LOCK_JOB))

    async def find(self, exec_id: str) -> ExecRow | None:
        return _only(await self._read(_FIND, {"id": exec_id}))

    async def open_execs(self) -> Sequence[ExecRow]:
        return await self._read(_OPEN)

    async def start(self, exec_id: str, host_id: str, run: str, now_s: float) -> ExecRow | None:
        values = {"id": exec_id, "host": host_id, "run": run, "now": now_s}
        return _only(await self._change(_START, values))

    async def end(
        self, exec_id: str, actor: str, now_s: float, *, run: str = "", status: int | None = None, error: str = ""
    ) -> ExecRow | None:
        values = {"id": exec_id, "run": run, "status": status, "error": error, "now": now_s}
        return _only(await self._change(_END, values, lambda row: _ended(row, actor, now_s)))

    async def expire(self, now_s: float) -> None:
        await self._change(_EXPIRE, {"now": now_s}, lambda row: _ended(row, "hub", now_s))

    async def _read(self, statement: str, values: Values = NO_VALUES) -> Sequence[ExecRow]:
        return _decode(await self._database.rows(statement, values))

    async def _change(
        self, statement: str, values: Values, event: Event | None = None, *, lock: str = ""
    ) -> Sequence[ExecRow]:
        """Run a statement whose rows are execs, with an event for each in the same transaction; `lock` comes first."""

        async def change(tx: Transaction) -> Sequence[ExecRow]:
            if lock:
                await tx.rows(lock, values)
            rows = _decode(await tx.rows(statement, values))
            await record(tx, [event(row) for row in rows] if event else [])
            return rows

        return await self._database.run(change)


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
    return [replace(row, command=_decode_command(row.command)) for row in (ExecRow(*each) for each in rows)]
