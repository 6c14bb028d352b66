"""A handful of connections to PostgreSQL that fail fast and come back at once.

A pool that backs off for seconds after an outage, and a driver that cancels politely, both outlast our leases. Here a
call has a deadline; one that misses it loses its connection, closed without asking; the next one connects anew. How
often to try is the caller's business: all our loops pace themselves.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, Final

import psycopg
from psycopg.waiting import wait_async

from strata.base.errors import Code, StrataError

_CONNECT_S: Final = 5


class _Connection(psycopg.AsyncConnection[Any]):
    """Does not wait for a server's goodbye: a cancelled call ends now, and its connection with it."""

    async def wait(self, gen: Any, *timing: Any, **named_timing: Any) -> Any:
        try:
            return await wait_async(gen, self.pgconn.socket, *timing, **named_timing)
        except asyncio.CancelledError:
            self.pgconn.finish()
            raise


class Connections:
    def __init__(self, url: str, limit: int, call_s: float) -> None:
        self._url = url
        self._call_s = call_s
        self._slots = asyncio.Semaphore(limit)
        self._idle: list[_Connection] = []
        self._closed = False

    @asynccontextmanager
    async def use(self) -> AsyncIterator[_Connection]:
        """A connection for one statement, given back if nothing went wrong. TimeoutError after the deadline."""
        async with asyncio.timeout(self._call_s), self._slots:
            if self._closed:
                raise StrataError(Code.PRECONDITION, "the journal is closed")
            connection = self._idle.pop() if self._idle else await self._connect()
            whole = False
            try:
                yield connection
                whole = True
            finally:
                self._idle.append(connection)
                if not whole or self._closed:
                    # What broke one connection has most likely broken all that stand idle.
                    await self._drop_idle()

    async def close(self) -> None:
        self._closed = True
        await self._drop_idle()

    async def _connect(self) -> _Connection:
        connection = await _Connection.connect(
            self._url,
            autocommit=True,
            connect_timeout=_CONNECT_S,
            application_name="strata journal",
            keepalives_idle=5,
            keepalives_interval=2,
            keepalives_count=3,
            tcp_user_timeout=round(self._call_s * 1000),
        )
        try:
            # A role or database may have this off by default; a reply before the flush would break the first promise.
            await connection.execute("SET synchronous_commit = on")
            await connection.execute("SET idle_in_transaction_session_timeout = '10s'")
        except BaseException:
            await connection.close()
            raise
        return connection

    async def _drop_idle(self) -> None:
        while self._idle:
            await self._idle.pop().close()
