"""TCP proxies on loopback: one that loses, holds, delays and cuts, as the network between a client and a server under
test does, and a load balancer in front of several servers.

They know bytes and connections, nothing of any protocol. All controls are plain calls that act from then on; the waits
let a test go on when something has happened rather than after a time.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import socket
import struct
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Final, Self

from tests.support.ports import port_of, reserve_port

_CHUNK_BYTES: Final = 65536
_CHUNKS_IN_FLIGHT: Final = 64
_RESET_ON_CLOSE: Final = struct.pack("ii", 1, 0)


@dataclass(frozen=True)
class _Received:
    """What came in, and when it may go out. No bytes: the sender closed its side; None: it was reset."""

    due_s: float
    data: bytes | None


@dataclass(eq=False)
class _Link:
    """One client's connection and the one to the server behind it."""

    client: socket.socket
    writers: list[asyncio.StreamWriter] = field(default_factory=list)
    bytes_held: int = 0
    has_hole: bool = False

    def abort(self) -> None:
        """Close both sides with RST, as a crashed host does. What was closed properly before stays so."""
        for writer in self.writers:
            if not writer.transport.is_closing():
                _reset_on_close(writer.get_extra_info("socket"))
            writer.transport.abort()
        if not self.writers and self.client.fileno() != -1:
            _reset_on_close(self.client)
            self.client.close()


class ChaosProxy:
    """`async with ChaosProxy(host, port) as proxy:`, then connect to 127.0.0.1 at `proxy.port`.

    `delay_s` holds every byte that long, each way, however many are under way. A connection that lost bytes never gets
    later ones, because no TCP stream has a hole: `heal` cuts it.
    """

    def __init__(self, target_host: str, target_port: int, *, delay_s: float = 0.0) -> None:
        self.delay_s = delay_s
        self.bytes_to_server = 0
        self.bytes_to_client = 0
        self.bytes_swallowed = 0
        self._target = (target_host, target_port)
        self._port_guard = reserve_port()
        self.port = port_of(self._port_guard)
        self._listener: socket.socket | None = None
        self._links: dict[asyncio.Task[None], _Link] = {}
        self._swallowing = False
        self._flowing = asyncio.Event()
        self._flowing.set()
        self._changed = asyncio.Event()

    async def __aenter__(self) -> Self:
        self._listen()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.refuse()
        self.cut()
        await self.until(lambda: self.connections == 0)
        self._port_guard.close()

    @property
    def connections(self) -> int:
        return len(self._links)

    @property
    def bytes_held(self) -> int:
        """Received and not passed on yet: they wait for `delay_s` or for the end of a stall."""
        return sum(link.bytes_held for link in self._links.values())

    def swallow_replies(self) -> None:
        """The server receives everything, the client nothing, not even the end of the connection. Resets the counts."""
        self.bytes_swallowed = 0
        self._swallowing = True

    def stall(self) -> None:
        """Nothing arrives in either direction and nothing closes, until `heal` lets it all through."""
        self._flowing.clear()

    def refuse(self) -> None:
        """A new connection is refused; those that exist live on."""
        if self._listener is not None:
            asyncio.get_running_loop().remove_reader(self._listener)
            self._listener.close()
            self._listener = None

    def cut(self) -> None:
        """Reset the connections there are, on both sides; new ones are welcome."""
        for task, link in self._links.items():
            link.abort()
            task.cancel()

    def heal(self) -> None:
        """End every fault but `delay_s`. Held bytes go on; a connection that lost bytes is cut."""
        self._swallowing = False
        for task, link in self._links.items():
            if link.has_hole:
                link.abort()
                task.cancel()
        self._flowing.set()
        if self._listener is None:
            self._listen()

    async def swallowed(self, *, at_least: int) -> None:
        """Wait until the server has answered that many bytes since `swallow_replies`, none of which arrived."""
        await self.until(lambda: self.bytes_swallowed >= at_least)

    async def held(self, *, at_least: int) -> None:
        await self.until(lambda: self.bytes_held >= at_least)

    async def until(self, condition: Callable[[], bool]) -> None:
        """Wait for any condition on the counters, `connections` included; it is looked at after each change."""
        while not condition():
            await self._changed.wait()

    def _notify(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    def _listen(self) -> None:
        self._listener = socket.create_server(("127.0.0.1", self.port), backlog=512)
        self._listener.settimeout(0)
        asyncio.get_running_loop().add_reader(self._listener, self._accept, self._listener)

    def _accept(self, listener: socket.socket) -> None:
        try:
            client, _ = listener.accept()
        except (BlockingIOError, ConnectionAbortedError):
            return
        client.settimeout(0)
        link = _Link(client)
        task = asyncio.create_task(self._carry(link))
        self._links[task] = link
        task.add_done_callback(self._forget)
        self._notify()

    def _forget(self, task: asyncio.Task[None]) -> None:
        # However the task ended, even before its first step, no socket stays open.
        self._links.pop(task).abort()
        self._notify()
        if not task.cancelled():
            task.result()

    async def _carry(self, link: _Link) -> None:
        try:
            from_client, to_client = await asyncio.open_connection(sock=link.client)
            link.writers.append(to_client)
            from_server, to_server = await asyncio.open_connection(*self._target)
            link.writers.append(to_server)
            requests: asyncio.Queue[_Received] = asyncio.Queue(_CHUNKS_IN_FLIGHT)
            replies: asyncio.Queue[_Received] = asyncio.Queue(_CHUNKS_IN_FLIGHT)
            async with asyncio.TaskGroup() as both_ways:
                both_ways.create_task(self._receive(from_client, requests, link))
                both_ways.create_task(self._receive(from_server, replies, link))
                both_ways.create_task(self._pass_on(requests, to_server, link, replies=False))
                both_ways.create_task(self._pass_on(replies, to_client, link, replies=True))
            for writer in link.writers:
                writer.close()
                await writer.wait_closed()
        except* OSError:
            # One side is gone without a goodbye, or was never there: the other one is to learn it the same way.
            link.abort()

    async def _receive(self, reader: asyncio.StreamReader, queue: asyncio.Queue[_Received], link: _Link) -> None:
        now_s = asyncio.get_running_loop().time
        data: bytes | None = b"."
        while data:
            try:
                data = await reader.read(_CHUNK_BYTES)
            except OSError:
                data = None
            link.bytes_held += len(data or b"")
            self._notify()
            await queue.put(_Received(now_s() + self.delay_s, data))

    async def _pass_on(
        self, queue: asyncio.Queue[_Received], writer: asyncio.StreamWriter, link: _Link, *, replies: bool
    ) -> None:
        now_s = asyncio.get_running_loop().time
        data: bytes | None = b"."
        while data:
            received = await queue.get()
            data = received.data
            if received.due_s > now_s():
                await asyncio.sleep(received.due_s - now_s())
            await self._flowing.wait()
            if replies and self._swallowing:
                link.has_hole = True
                self.bytes_swallowed += len(data or b"")
                if not data:
                    # The ending is lost as well: the connection stays open until it is cut.
                    await asyncio.get_running_loop().create_future()
            else:
                await _write(writer, data)
                self._count_passed(len(data or b""), replies=replies)
            link.bytes_held -= len(data or b"")
            self._notify()

    def _count_passed(self, size: int, *, replies: bool) -> None:
        if replies:
            self.bytes_to_client += size
        else:
            self.bytes_to_server += size


async def _write(writer: asyncio.StreamWriter, data: bytes | None) -> None:
    if data is None:
        raise ConnectionResetError
    if data:
        writer.write(data)
        await writer.drain()
    else:
        writer.write_eof()


def _reset_on_close(connection: socket.socket) -> None:
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET_ON_CLOSE)


class LoadBalancer:
    """`async with LoadBalancer(ports) as balancer:`, then connect to 127.0.0.1 at `balancer.port`.

    Each connection goes to the next server that accepts one. When its server dies it breaks, as with any balancer of
    TCP: the client has to repeat its request.
    """

    def __init__(self, ports: Sequence[int]) -> None:
        self._ports = ports
        self._turns = itertools.count()
        self._server: asyncio.Server | None = None
        self.port = 0
        self.broken = 0
        """Connections whose server closed them first."""
        self.connected: Counter[int] = Counter()
        """Connections so far, by the port of their server."""
        self.open: Counter[int] = Counter()
        """Those that neither side has closed."""

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self._forward, "127.0.0.1", 0)
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._server is not None
        self._server.close()

    async def _forward(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        turn = next(self._turns)
        for place in range(len(self._ports)):
            port = self._ports[(turn + place) % len(self._ports)]
            try:
                server = await asyncio.open_connection("127.0.0.1", port)
            except OSError:
                continue
            self.connected[port] += 1
            self.open[port] += 1
            break
        else:
            writer.transport.abort()
            return
        up = asyncio.create_task(_copy(reader, server[1]))
        down = asyncio.create_task(_copy(server[0], writer))
        try:
            await asyncio.wait([up, down], return_when=asyncio.FIRST_COMPLETED)
            self.broken += down.done() and not up.done()
        finally:
            self.open[port] -= 1
            for task in (up, down):
                task.cancel()
            for each in (writer, server[1]):
                each.transport.abort()


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(OSError):
        while data := await reader.read(_CHUNK_BYTES):
            writer.write(data)
            await writer.drain()
