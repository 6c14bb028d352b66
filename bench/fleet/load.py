"""The hosts of `bench fleet` over HTTP, in a process of their own: sockets on uvloop, the same code for both sides.

Each host has a connection of its own that stays open, and one request under way at a time. Requests are bytes and
replies are only measured and counted: what the clients cost is nobody's figure.
"""

from __future__ import annotations

import asyncio
import gc
import itertools
import resource
import sys
from collections.abc import Callable, Sequence
from time import perf_counter
from typing import Any, Final, assert_never

import msgspec
import uvloop

from bench.load_process import Figures
from strata.fleet.wire.leases import ClaimReply, HeartbeatsRequest, LeaseGiven, LeaseHeld

LENGTH: Final = b"content-length: "
WAIT_S: Final = 60.0


class Host(msgspec.Struct, frozen=True):
    """Who asks, and by what secret it is known."""

    id: str
    secret: str


class Claims(msgspec.Struct, frozen=True, tag=True):
    """One host after the other claims a job, `at_once` of them at a time.

    Figures: claims a second, bytes of a reply, jobs that came twice.
    """

    address: str
    hosts: Sequence[Host]
    at_once: int
    seconds: float


class Hold(msgspec.Struct, frozen=True, tag=True):
    """Every host claims so many jobs and says that they run; what it holds is renewed from now on. No figures."""

    address: str
    hosts: Sequence[Host]
    leases: int


class Beats(msgspec.Struct, frozen=True, tag=True):
    """Every host renews all it holds, again and again. Figures: calls a second, bytes of a reply, leases held on."""

    address: str
    hosts: Sequence[Host]
    seconds: float


class Stay(msgspec.Struct, frozen=True, tag=True):
    """Every host waits for a job on one connection, and renews all it holds on another, as agents do.

    With a `poll_s` of 0 it waits for none.

    Figures: claims that ended without a job, and heartbeats, both a second, and the slowest heartbeat in ms.
    """

    address: str
    hosts: Sequence[Host]
    poll_s: float
    beat_s: float
    seconds: float


Order = Claims | Hold | Beats | Stay


class Connection(asyncio.Protocol):
    """Requests one after the other; a reply is its status and its body."""

    def __init__(self) -> None:
        self._transport: asyncio.WriteTransport | None = None
        self._received = b""
        self._reply: asyncio.Future[bytes] | None = None

    def connection_made(self, transport: Any) -> None:
        self._transport = transport

    def connection_lost(self, exc: Exception | None) -> None:
        if self._reply is not None and not self._reply.done():
            self._reply.set_exception(ConnectionError(f"the server hung up: {exc}"))

    def data_received(self, data: bytes) -> None:
        self._received += data
        head, found, body = self._received.partition(b"\r\n\r\n")
        if not found or self._reply is None:
            return
        at = head.lower().index(LENGTH) + len(LENGTH)
        if len(body) < int(head[at:].partition(b"\r\n")[0]):
            return
        self._received = b""
        if not head.startswith(b"HTTP/1.1 200"):
            self._reply.set_exception(RuntimeError(f"{head.decode()} {body.decode()}"))
        else:
            self._reply.set_result(body)

    def send(self, head: bytes, body: bytes) -> asyncio.Future[bytes]:
        assert self._transport is not None
        self._reply = asyncio.get_running_loop().create_future()
        self._transport.write(head + b"%d\r\n\r\n" % len(body) + body)
        return self._reply

    def close(self) -> None:
        assert self._transport is not None
        self._transport.close()


class Load:
    def __init__(self) -> None:
        self._open: dict[tuple[str, str, str], Connection] = {}
        self._held: dict[str, bytes] = {}
        self._names = itertools.count(1)
        self._given: dict[str, set[bytes]] = {}
        """By the address of the server that gave them."""

    async def carry_out(self, order: Order) -> list[float]:
        match order:
            case Claims(address, hosts, at_once, seconds):
                turns = [hosts[start::at_once] for start in range(at_once)]
                replies = await self._repeat(address, "/v1/job/claim", turns, seconds, self._new_claim)
                twice = self._count_twice(address, replies)
                return [len(replies) / seconds, len(replies[0]), twice]
            case Hold(address, hosts, leases):
                for host in hosts:
                    await self._hold(address, host, leases)
                return []
            case Beats(address, hosts, seconds):
                replies = await self._repeat(
                    address, "/v1/heartbeats", [[each] for each in hosts], seconds, self._renewals
                )
                return [len(replies) / seconds, len(replies[0]), sum(r.count(b'"continue"') for r in replies) / seconds]
            case Stay():
                return await self._stay(order)
            case _:
                assert_never(order)

    async def _stay(self, order: Stay) -> list[float]:
        until_s = perf_counter() + order.seconds
        polls, beats_ms = 0, list[float]()

        async def poll(host: Host) -> None:
            nonlocal polls
            connection = await self._keep_connection(order.address, host, "polls")
            while perf_counter() < until_s:
                claim = b'{"claim_id":"stay-%d","wait_s":%f}' % (next(self._names), order.poll_s)
                reply = await connection.send(_head("/v1/job/claim", host), claim)
                assert b'"leases":[]' in reply, "there was a job"
                polls += 1

        async def beat(host: Host, number: int) -> None:
            connection = await self._keep_connection(order.address, host)
            due_s = perf_counter() + order.beat_s * number / len(order.hosts)
            while perf_counter() < until_s:
                await asyncio.sleep(due_s - perf_counter())
                started_s = perf_counter()
                reply = await connection.send(_head("/v1/heartbeats", host), self._held[host.id])
                assert b'"stop"' not in reply, "a lease was lost"
                beats_ms.append((perf_counter() - started_s) * 1000)
                due_s += order.beat_s

        async with asyncio.timeout(order.seconds + order.poll_s + order.beat_s + WAIT_S):
            polling = order.hosts if order.poll_s else []
            await asyncio.gather(*map(poll, polling), *map(beat, order.hosts, itertools.count()))
        return [polls / order.seconds, len(beats_ms) / order.seconds, max(beats_ms)]

    def _new_claim(self, _: Host) -> bytes:
        return b'{"claim_id":"load-%d"}' % next(self._names)

    def _renewals(self, host: Host) -> bytes:
        return self._held[host.id]

    def _count_twice(self, address: str, replies: list[bytes]) -> int:
        """Claims that were answered with nothing, or with what another was given: neither is a claim."""
        given = self._given.setdefault(address, set())
        fresh = {job for reply in replies if (job := reply.partition(b'"job_id":"')[2][:69])} - given
        given |= fresh
        return len(replies) - len(fresh)

    async def _hold(self, address: str, host: Host, leases: int) -> None:
        connection = await self._keep_connection(address, host)
        given = list[LeaseGiven]()
        while len(given) < leases:
            claim = msgspec.json.encode({"claim_id": f"hold-{next(self._names)}", "count": leases - len(given)})
            reply = await connection.send(_head("/v1/job/claim", host), claim)
            more = msgspec.json.decode(reply, type=ClaimReply).leases
            assert more, "the bench ran out of jobs"
            given += more
        held = tuple(LeaseHeld(job_id=lease.job_id, epoch=lease.epoch, running=True) for lease in given)
        self._held[host.id] = msgspec.json.encode(HeartbeatsRequest(leases=held))
        await connection.send(_head("/v1/heartbeats", host), self._held[host.id])

    async def _repeat(
        self, address: str, path: str, turns: Sequence[Sequence[Host]], seconds: float, body: Callable[[Host], bytes]
    ) -> list[bytes]:
        """On a new connection for each list of hosts, who take turns on it: the server closes one that was idle."""
        connections = [await _connect(address) for _ in turns]
        replies: list[bytes] = []
        until_s = perf_counter() + seconds

        async def ask(hosts: Sequence[Host], connection: Connection) -> None:
            heads = itertools.cycle([(_head(path, host), host) for host in hosts])
            while perf_counter() < until_s:
                head, host = next(heads)
                replies.append(await connection.send(head, body(host)))

        async with asyncio.timeout(seconds + WAIT_S):
            await asyncio.gather(*map(ask, turns, connections))
        for connection in connections:
            connection.close()
        return replies

    async def _keep_connection(self, address: str, host: Host, purpose: str = "") -> Connection:
        key = (address, host.id, purpose)
        if key not in self._open:
            self._open[key] = await _connect(address)
        return self._open[key]


async def _connect(address: str) -> Connection:
    _, connection = await asyncio.get_running_loop().create_unix_connection(Connection, address)
    return connection


def _head(path: str, host: Host) -> bytes:
    lines = (
        f"POST {path} HTTP/1.1",
        "Host: hub",
        f"Authorization: Bearer {host.secret}",
        "Content-Type: application/json",
        "Content-Length: ",
    )
    return "\r\n".join(lines).encode()


async def main() -> None:
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    load = Load()
    decode = msgspec.json.Decoder(Order).decode
    for line in iter(sys.stdin.readline, ""):
        order = decode(line)
        gc.collect()
        gc.disable()
        values = await load.carry_out(order)
        gc.enable()
        print(msgspec.json.encode(Figures(values)).decode(), flush=True)


if __name__ == "__main__":
    uvloop.run(main())
