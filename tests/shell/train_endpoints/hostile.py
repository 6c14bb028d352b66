"""Servers that are no engine, and mean no good."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

Say = Callable[[asyncio.StreamWriter], Awaitable[None]]


@dataclass
class Hostile:
    url: str = ""
    port: int = 0
    heard: list[bytes] = field(default_factory=list)
    """The head of every request."""


@asynccontextmanager
async def hostile(say: Say) -> AsyncIterator[Hostile]:
    found = Hostile()

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            found.heard.append(await reader.readuntil(b"\r\n\r\n"))
            await say(writer)
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        finally:
            writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    found.port = server.sockets[0].getsockname()[1]
    found.url = f"http://127.0.0.1:{found.port}"
    try:
        yield found
    finally:
        server.close()


def says(head: str, body: bytes = b"") -> Say:
    async def say(writer: asyncio.StreamWriter) -> None:
        writer.write(head.replace("\n", "\r\n").encode() + b"\r\n\r\n" + body)
        await writer.drain()

    return say


async def never_ends(writer: asyncio.StreamWriter) -> None:
    writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nConnection: close\r\n\r\n")
    while True:
        writer.write(b" " * (1 << 20))
        await writer.drain()


async def drips(writer: asyncio.StreamWriter) -> None:
    """A byte now and then: each of them in time, and all of them never."""
    writer.write(b"HTTP/1.1 200 OK\r\nConnection: close\r\n\r\n")
    while True:
        writer.write(b" ")
        await writer.drain()
        await asyncio.sleep(0.02)


async def is_silent(writer: asyncio.StreamWriter) -> None:
    del writer
    await asyncio.sleep(3600)
