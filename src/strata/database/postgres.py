"""Connections to PostgreSQL: timeouts, pool, prepared statements, checks of durability (`fsync`), and the table of
errors.

A pool that backs off for seconds after an outage, and a driver that cancels politely, both outlast our leases. Here a
call has a deadline; one that misses it loses its connection, closed without a handshake; the next call opens another.
The caller decides how often to retry.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Generator, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager, suppress
from typing import Any, Final

import psycopg
from psycopg import errors as pg_errors
from psycopg.conninfo import conninfo_to_dict
from psycopg.waiting import Ready, Wait, wait_async

from strata.base.errors import Code, StrataError

_CONNECT_S: Final = 5
_WAKE_S: Final = 1.0
"""How often a call that waits for a result polls. The driver's own default is to spin."""
_WRITES: Final = 16
_FEW: Final = 1000
_PREPARED: Final = 500
"""Statements that a connection keeps prepared: a hub has some hundreds, some of them with several types of values."""


class Connection(psycopg.AsyncConnection[Any]):
    """A cancelled call ends at once and closes its connection; it does not wait for the server to confirm."""

    _reused_cursor: psycopg.AsyncCursor[Any] | None = None

    async def rows(self, statement: str, values: Mapping[str, Any]) -> list[tuple[Any, ...]]:
        rows = await (await self._run(statement, values)).fetchall()
        if len(rows) > _FEW:
            # A cursor keeps its last result in memory.
            self._reused_cursor = None
        return rows

    async def changed(self, statement: str, values: Mapping[str, Any]) -> int:
        """Returns how many rows it changed."""
        return (await self._run(statement, values)).rowcount

    async def _run(self, statement: str, values: Mapping[str, Any]) -> psycopg.AsyncCursor[Any]:
        """Runs a statement by one cursor that is reused: a new one would look up the format of every type again."""
        if self._reused_cursor is None:
            self._reused_cursor = self.cursor(binary=True)
        return await self._reused_cursor.execute(statement, values, prepare=True)

    async def wait(self, gen: Any, interval: float = _WAKE_S, *limit: Any, **named_limit: Any) -> Any:
        try:
            return await wait_async(_write_at_once(gen), self.pgconn.socket, interval, *limit, **named_limit)
        except asyncio.CancelledError:
            self.pgconn.finish()
            # Left to the garbage collector, an unfinished generator would fail where no caller sees it.
            with suppress(psycopg.Error, RuntimeError):
                gen.close()
            raise


def _write_at_once(gen: Any) -> Generator[Any, Any, Any]:
    """Answers the driver's question whether it may write with yes: the event loop is asked only if it often was wrong.

    A socket is nearly always writable, and in a pipeline the driver asks several times for each statement.
    """
    try:
        asked = next(gen)
        while True:
            for _ in range(_WRITES):
                if not asked & Wait.W:
                    break
                asked = gen.send(Ready.W)
            asked = gen.send((yield asked))
    except StopIteration as ended:
        return ended.value


class Connections:
    """Holds up to `limit` connections with a deadline of `call_s` for each call; `what` names the component in
    messages.

    `by_index` is for components that read single rows of growing tables: a cached plan from when the table was small
    would scan all of it once it is large.
    """

    def __init__(self, url: str, limit: int, call_s: float, *, what: str, by_index: bool = False) -> None:
        _check_address(url)
        self._url = url
        self._what = what
        self._call_s = call_s
        self._by_index = by_index
        self._slots = asyncio.Semaphore(limit)
        self._idle: list[Connection] = []
        self._closed = False
        self.opened = 0
        """How many connections were opened so far."""
        self.observe: Callable[[float], None] | None = None
        """Called with the seconds that each statement or transaction took, with its wait for a connection."""

    async def run(self, statement: str, values: Mapping[str, Any]) -> list[tuple[Any, ...]]:
        """The rows of one statement, which commits by itself."""
        async with self.reading() as connection:
            return await connection.rows(statement, values)

    async def write(self, statement: str, values: Mapping[str, Any]) -> int:
        """Returns how many rows one statement changed; it commits by itself."""
        async with self.reading() as connection:
            return await connection.changed(statement, values)

    @asynccontextmanager
    async def transaction(self, call_s: float | None = None) -> AsyncIterator[Connection]:
        """Statements that commit together when the block ends, and all fail as our own error.

        `call_s` is the deadline of one that is known to take long.
        """
        with self._translated():
            async with self.acquire(call_s) as connection, connection.transaction():
                yield connection

    @asynccontextmanager
    async def reading(self) -> AsyncIterator[Connection]:
        """Statements of which each sees the latest commits: nothing is begun or committed for them."""
        with self._translated():
            async with self.acquire() as connection:
                yield connection

    @asynccontextmanager
    async def pipeline(self) -> AsyncIterator[Connection]:
        """Statements that commit together, sent before the first answer is read: one round trip.

        Answers are there when the block has ended. What is sent in a pipeline is one transaction by itself.
        """
        with self._translated():
            async with self.acquire() as connection, connection.pipeline():
                yield connection

    @contextmanager
    def _translated(self) -> Iterator[None]:
        try:
            yield
        except (psycopg.Error, TimeoutError) as error:
            raise to_strata_error(error, f"the {self._what} did not answer") from error

    @asynccontextmanager
    async def acquire(self, call_s: float | None = None) -> AsyncIterator[Connection]:
        """A connection for one statement, given back if nothing went wrong. TimeoutError after the deadline."""
        started_s = time.monotonic()
        async with asyncio.timeout(call_s or self._call_s) as deadline, self._slots:
            if self._closed:
                raise StrataError(Code.PRECONDITION, f"the {self._what} is closed")
            connection = self._idle.pop() if self._idle else await self._connect()
            whole = left = False
            try:
                yield connection
                whole = True
            except StrataError:
                # An error of our own: the transaction was rolled back, and the connection is healthy.
                whole = not connection.closed
                raise
            except asyncio.CancelledError:
                left = not deadline.expired()
                raise
            finally:
                if whole and not self._closed:
                    self._idle.append(connection)
                    if self.observe is not None:
                        self.observe(time.monotonic() - started_s)
                else:
                    await connection.close()
                    if not left:
                        # The cause has most likely broken all idle connections too.
                        await self._drop_idle()

    async def close(self) -> None:
        self._closed = True
        await self._drop_idle()

    async def _connect(self) -> Connection:
        connection = await Connection.connect(
            self._url,
            autocommit=True,
            connect_timeout=_CONNECT_S,
            application_name=f"strata {self._what}",
            keepalives_idle=5,
            keepalives_interval=2,
            keepalives_count=3,
            tcp_user_timeout=round(self._call_s * 1000),
        )
        connection.prepared_max = _PREPARED
        try:
            # A role or database may have this off by default; an acknowledged write must be durable.
            await connection.execute("SET synchronous_commit = on")
            await connection.execute("SET idle_in_transaction_session_timeout = '10s'")
            if self._by_index:
                # What has no index is read whole all the same; at that made-up price it would also be compiled first.
                # A bitmap has no order: the first job of an owner would cost as much as all of its jobs.
                await connection.execute("SET enable_seqscan = off; SET enable_bitmapscan = off; SET jit = off")
                # These statements have one good plan, which the planner would take long to find again for every call.
                await connection.execute("SET plan_cache_mode = force_generic_plan")
        except BaseException:
            await connection.close()
            raise
        self.opened += 1
        return connection

    async def _drop_idle(self) -> None:
        while self._idle:
            await self._idle.pop().close()


def _check_address(url: str) -> None:
    """INVALID for one that the driver cannot read, or reads otherwise than it was meant.

    What the driver itself says of it repeats a part of it, which may be the password. One with a raw @ or / ends early,
    and the rest of it is taken for a host or a port, which are named when nobody answers there.
    """
    try:
        read = conninfo_to_dict(url)
    except psycopg.ProgrammingError:
        readable = False
    else:
        hosts, ports = (str(read.get(name) or "").split(",") for name in ("host", "port"))
        # A socket without a file has an @ in front.
        readable = not any("@" in host[1:] for host in hosts) and all(not port or port.isdigit() for port in ports)
    if not readable:
        raise StrataError(
            Code.INVALID,
            "the address of the database cannot be read",
            hint="in a name or a password in it, % is written %25, @ is written %40, and / is written %2F",
        )


async def check_database(connection: psycopg.AsyncConnection[Any]) -> None:
    """Refuses a database that cannot store every text, and a server that can lose what it confirmed."""
    encoding = connection.info.parameter_status("server_encoding")
    if encoding != "UTF8":
        raise StrataError(
            Code.UNSUPPORTED,
            f"this PostgreSQL database has the encoding {encoding}, and Strata needs UTF8",
            hint="make it by CREATE DATABASE strata ENCODING 'UTF8' TEMPLATE template0",
        )
    (fsync,) = await (await connection.execute("SHOW fsync")).fetchone() or ("on",)
    if fsync != "on":
        raise StrataError(
            Code.UNSUPPORTED,
            "this PostgreSQL runs with fsync = off: it can lose what it confirmed",
            hint="set fsync = on",
        )


def to_strata_error(error: Exception, what: str) -> StrataError:
    if isinstance(error, pg_errors.DataCorrupted | pg_errors.IndexCorrupted):
        return StrataError(Code.CORRUPT, f"PostgreSQL reports damaged data: {error}")
    if isinstance(error, pg_errors.InsufficientPrivilege | pg_errors.InvalidPassword):
        return StrataError(Code.FORBIDDEN, f"{what}: {_one_line(error)}")
    if isinstance(error, pg_errors.DeadlockDetected | pg_errors.SerializationFailure):
        return StrataError(Code.UNAVAILABLE, f"{what}: {_one_line(error)}", hint="try again")
    if isinstance(error, psycopg.ProgrammingError | psycopg.DataError | psycopg.IntegrityError):
        return StrataError(Code.INTERNAL, f"{what}: {_one_line(error)}")
    return StrataError(Code.UNAVAILABLE, f"{what}: {_one_line(error)}", hint="check that PostgreSQL is running")


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split()) or type(error).__name__


def display_address(url: str) -> str:
    """The address for messages, without user or password; of several servers, all of them."""
    read = conninfo_to_dict(url)
    hosts, ports = (str(read.get(name) or "").split(",") for name in ("host", "port"))
    if len(ports) < len(hosts):
        ports = ports * len(hosts)
    servers = (f"{host or 'local socket'}:{port or 5432}" for host, port in zip(hosts, ports, strict=False))
    return f"{','.join(servers)}/{read.get('dbname') or ''}"
