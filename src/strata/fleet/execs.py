"""Commands in running jobs (`strata exec`) at the hub: at most 4 open in a job and 2 MiB of output, the times until
they must start and report, and who may request one.

An exec belongs to one attempt, by its epoch, and ends with that attempt's lease. Its host learns of it with a
heartbeat, and runs it only after the hub has recorded which process of the agent does: at most once.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, Protocol

from strata.base.errors import Code, StrataError

MAX_OPEN: Final = 4
"""The most that are open of one job at a time."""
START_S: Final = 60.0
"""How long the host of the job has to start it."""
REPORT_S: Final = 60.0
"""How long after the time limit of the command its host has to report the end."""
MAX_OUTPUT: Final = 2 * 1024 * 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestedExec:
    job_id: str
    command: tuple[str, ...]
    timeout_s: float
    actor: str


@dataclass(frozen=True, slots=True)
class ExecRow:
    id: str
    job_id: str
    epoch: int
    """The epoch of the attempt in which it runs."""
    host_id: str
    actor: str
    command: tuple[str, ...]
    timeout_s: float
    expires_at_s: float
    run: str = ""
    """The process of the agent that runs it; empty: none has started it yet."""
    status: int | None = None
    """The exit status of the command; None: it has not ended, or never ran to its end."""
    error: str = ""
    """Why there is no exit status."""
    ended_at_s: float | None = None

    @property
    def stream(self) -> str:
        """The name of its output among the streams of its attempt."""
        return f"exec-{self.id}"


class ExecStore(Protocol):
    async def add(self, exec_id: str, request: RequestedExec, now_s: float) -> ExecRow | None:
        """None unless the job runs, and has fewer than `MAX_OPEN`."""

    async def find(self, exec_id: str) -> ExecRow | None: ...

    async def open_execs(self) -> Sequence[ExecRow]:
        """Those that have not ended."""

    async def start(self, exec_id: str, host_id: str, run: str, now_s: float) -> ExecRow | None:
        """None unless the host holds the lease, and no other process of its agent has started it. Idempotent."""

    async def end(
        self, exec_id: str, actor: str, now_s: float, *, run: str = "", status: int | None = None, error: str = ""
    ) -> ExecRow | None:
        """None if it has ended already, or another process runs it than `run`."""

    async def expire(self, now_s: float) -> None:
        """End those whose time is over, and those whose attempt has lost its lease."""


class ExecBoard:
    """The execs that have not ended, by host: read from the store once a second, because every heartbeat looks."""

    def __init__(self, store: ExecStore, now_s: Callable[[], float]) -> None:
        self._store = store
        self._now_s = now_s
        self._open: dict[str, list[ExecRow]] = {}

    def of_host(self, host_id: str) -> Sequence[ExecRow]:
        return self._open.get(host_id, ())

    async def run_once(self) -> None:
        rows = await self._store.open_execs()
        if rows:
            await self._store.expire(self._now_s())
            rows = await self._store.open_execs()
        self._open = {}
        for row in rows:
            self._open.setdefault(row.host_id, []).append(row)

    async def request(self, request: RequestedExec) -> ExecRow | None:
        row = await self._store.add(secrets.token_hex(8), request, self._now_s())
        if row is not None:
            self._open.setdefault(row.host_id, []).append(row)
        return row

    async def find(self, job_id: str, exec_id: str) -> ExecRow:
        row = await self._store.find(exec_id)
        if row is None or row.job_id != job_id:
            raise StrataError(Code.NOT_FOUND, f"{job_id} has no exec {exec_id[:100]!r}")
        return row

    async def start(self, row: ExecRow, host_id: str, run: str) -> ExecRow:
        """STALE if it must not run: it has ended, its lease has, or an earlier process of the agent has started it."""
        started = await self._store.start(row.id, host_id, run, self._now_s())
        if started is not None:
            return started
        restarted = bool(row.run) and row.run != run
        reason = "the agent of its host was restarted" if restarted else "the lease of its job has ended"
        await self._store.end(row.id, "hub", self._now_s(), error=reason)
        raise StrataError(Code.STALE, f"the exec {row.id} is not to be run: it has ended, or {reason}")

    async def end(self, row: ExecRow, actor: str, *, run: str = "", status: int | None = None, error: str = "") -> None:
        """Idempotent: of two ends the first counts."""
        await self._store.end(row.id, actor, self._now_s(), run=run, status=status, error=error)
