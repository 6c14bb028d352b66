from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass, field

import psycopg
import pytest

from tests.support.postgres import PostgresServer
from tests.support.proxy import ChaosProxy

BIG = b"x" * 3_000_000


@dataclass
class Echo:
    """A server that answers what it hears, remembers it, and hangs up when it hears `bye`."""

    port: int = 0
    heard: bytearray = field(default_factory=bytearray)
    resets: int = 0
    ended: asyncio.Event = field(default_factory=asyncio.Event)

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while data := await reader.read(65536):
                self.heard += data
                writer.write(data)
                await writer.drain()
                if data == b"bye":
                    break
        except ConnectionResetError:
            self.resets += 1
        finally:
            writer.close()
            self.ended.set()


@pytest.fixture
async def echo() -> AsyncIterator[Echo]:
    echo = Echo()
    server = await asyncio.start_server(echo.serve, "127.0.0.1", 0)
    echo.port = server.sockets[0].getsockname()[1]
    async with server:
        yield echo


@pytest.fixture
async def proxy(echo: Echo) -> AsyncIterator[ChaosProxy]:
    async with ChaosProxy("127.0.0.1", echo.port) as proxy:
        yield proxy


@contextlib.asynccontextmanager
async def connected(proxy: ChaosProxy) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    reader, writer = await asyncio.open_connection("127.0.0.1", proxy.port)
    try:
        yield reader, writer
    finally:
        writer.close()
        with contextlib.suppress(OSError):
            await writer.wait_closed()


async def test_without_faults_it_passes_everything_and_both_ends_of_a_stream(proxy: ChaosProxy, echo: Echo) -> None:
    async with connected(proxy) as (reader, writer):
        writer.write(BIG)
        writer.write_eof()
        assert await reader.read(-1) == BIG
    await proxy.until(lambda: proxy.connections == 0)
    assert (proxy.bytes_to_server, proxy.bytes_to_client, proxy.bytes_held) == (len(BIG), len(BIG), 0)
    assert echo.resets == 0


async def test_a_swallowed_reply_was_heard_by_the_server_and_never_arrives(proxy: ChaosProxy, echo: Echo) -> None:
    async with connected(proxy) as (reader, writer):
        writer.write(b"before")
        assert await reader.readexactly(6) == b"before"
        proxy.swallow_replies()
        writer.write(b"lost")
        await proxy.swallowed(at_least=4)
        assert bytes(echo.heard) == b"beforelost"
        assert proxy.bytes_to_client == 6
        proxy.cut()
        with pytest.raises(ConnectionResetError):
            await reader.read(1)


async def test_a_connection_that_lost_bytes_is_cut_by_heal_and_a_new_one_works(proxy: ChaosProxy) -> None:
    proxy.swallow_replies()
    async with connected(proxy) as (reader, writer):
        writer.write(b"lost")
        await proxy.swallowed(at_least=4)
        proxy.heal()
        with pytest.raises(ConnectionResetError):
            await reader.read(1)
    proxy.swallow_replies()
    assert proxy.bytes_swallowed == 0
    proxy.heal()
    async with connected(proxy) as (reader, writer):
        writer.write(b"again")
        assert await reader.readexactly(5) == b"again"


async def test_while_replies_are_swallowed_the_client_does_not_hear_the_server_hang_up(
    proxy: ChaosProxy, echo: Echo
) -> None:
    async with connected(proxy) as (reader, writer):
        proxy.swallow_replies()
        writer.write(b"bye")
        await echo.ended.wait()
        await proxy.swallowed(at_least=3)
        assert not reader.at_eof()
        writer.write(b"anybody there?")
        await proxy.until(lambda: proxy.bytes_to_server == 17)
        proxy.heal()
        with pytest.raises(ConnectionResetError):
            await reader.read(1)


async def test_cut_resets_both_sides_and_lets_new_connections_in(proxy: ChaosProxy, echo: Echo) -> None:
    async with connected(proxy) as (reader, writer):
        writer.write(b"hello")
        await reader.readexactly(5)
        proxy.cut()
        with pytest.raises(ConnectionResetError):
            await reader.read(1)
        await echo.ended.wait()
        assert echo.resets == 1
    await proxy.until(lambda: proxy.connections == 0)
    async with connected(proxy) as (reader, writer):
        writer.write(b"again")
        assert await reader.readexactly(5) == b"again"


async def test_refuse_keeps_old_connections_and_takes_no_new_one_until_heal(proxy: ChaosProxy) -> None:
    async with connected(proxy) as (reader, writer):
        await proxy.until(lambda: proxy.connections == 1)
        proxy.refuse()
        with pytest.raises(ConnectionRefusedError):
            await asyncio.open_connection("127.0.0.1", proxy.port)
        writer.write(b"still here")
        assert await reader.readexactly(10) == b"still here"
        proxy.heal()
        async with connected(proxy) as (second_reader, second_writer):
            second_writer.write(b"welcome")
            assert await second_reader.readexactly(7) == b"welcome"


async def test_a_stall_holds_bytes_and_endings_until_heal(proxy: ChaosProxy, echo: Echo) -> None:
    async with connected(proxy) as (reader, writer):
        proxy.stall()
        writer.write(b"wait")
        writer.write_eof()
        await proxy.held(at_least=4)
        assert echo.heard == b""
        assert not echo.ended.is_set()
        proxy.heal()
        assert await reader.read(-1) == b"wait"


async def test_a_stalled_connection_can_be_cut(proxy: ChaosProxy) -> None:
    async with connected(proxy) as (reader, writer):
        proxy.stall()
        writer.write(b"wait")
        await proxy.held(at_least=4)
        proxy.cut()
        with pytest.raises(ConnectionResetError):
            await reader.read(1)
    await proxy.until(lambda: proxy.connections == 0)
    assert proxy.bytes_held == 0


async def test_a_delay_is_added_each_way_and_does_not_add_up_over_bytes(proxy: ChaosProxy) -> None:
    now_s = asyncio.get_running_loop().time
    async with connected(proxy) as (reader, writer):
        writer.write(b"x")
        await reader.readexactly(1)
        proxy.delay_s = 0.1
        began_s = now_s()
        writer.write(BIG)
        assert await reader.readexactly(len(BIG)) == BIG
        # Handled one after another the 46 chunks each way would take at least 9 s.
        assert 0.2 <= now_s() - began_s < 3.0


async def test_a_server_that_is_not_there_resets_the_client() -> None:
    async with ChaosProxy("127.0.0.1", 1) as proxy, connected(proxy) as (reader, _):
        with pytest.raises(ConnectionResetError):
            await reader.read(1)


async def test_leaving_the_proxy_while_bytes_are_held_leaves_nothing_behind(echo: Echo) -> None:
    async with ChaosProxy("127.0.0.1", echo.port) as proxy:
        reader, writer = await asyncio.open_connection("127.0.0.1", proxy.port)
        proxy.stall()
        writer.write(b"wait")
        await proxy.held(at_least=4)
    assert proxy.connections == 0
    with pytest.raises(ConnectionResetError):
        await reader.read(1)
    writer.close()


async def test_a_commit_whose_reply_was_lost_is_in_the_database(own_postgres_server: PostgresServer) -> None:
    async with ChaosProxy("127.0.0.1", own_postgres_server.port) as proxy:
        url = own_postgres_server.create_database()
        through_proxy = url.replace(f":{own_postgres_server.port}/", f":{proxy.port}/")
        connection = await psycopg.AsyncConnection.connect(through_proxy)
        async with contextlib.AsyncExitStack() as closing:
            closing.push_async_callback(connection.close)
            await connection.execute("CREATE TABLE numbers (number int)")
            await connection.execute("INSERT INTO numbers VALUES (1)")
            proxy.swallow_replies()
            commit = asyncio.create_task(connection.commit())
            await proxy.swallowed(at_least=1)
            assert not commit.done()
            proxy.cut()
            with pytest.raises(psycopg.OperationalError):
                await commit
    with psycopg.connect(url) as reader:
        assert reader.execute("SELECT number FROM numbers").fetchall() == [(1,)]
