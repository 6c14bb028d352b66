"""Hubs to test: one inside the test's own loop on a real socket, and real processes of the command line."""

from __future__ import annotations

import asyncio
import itertools
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Self, TypeVar

import httpx
import msgspec

from strata.base.clock import SystemClock
from strata.base.unix_socket import listen_unix
from strata.fleet.core.jobspec import JobSpec
from strata.fleet.core.manifest import parse_manifest
from strata.fleet.core.plan import ApplyPlan
from strata.fleet.wire.hosts import RegisterReply
from strata.fleet.wire.identities import HubKeyReply, LocalHostReply
from strata.fleet.wire.leases import ClaimReply, LeaseGiven
from strata.http.problem import ErrorReply
from strata.hub.compose import TOKEN_FILE, Hub, open_hub
from strata.hub.server import listening, serve
from strata.hub.settings import SOCKET, HubSettings
from tests.support.unix import short_path

STRATA: Final = str(Path(sys.executable).with_name("strata"))
TIMEOUT_S: Final = 30.0
T = TypeVar("T")


def manifest_body(text: str, source: str = "m.toml", **more: Any) -> dict[str, Any]:
    """The body of `POST /v1/manifest` for a manifest that is written as TOML."""
    return {"manifest": msgspec.to_builtins(parse_manifest(text, source).resolve()), **more}


@dataclass
class HostClient:
    id: str
    http: httpx.AsyncClient

    async def register(self, **capability: Any) -> RegisterReply:
        body = {"capability": {"hostname": "h", **capability}}
        return ok(await self.http.post("/v1/host/register", json=body), RegisterReply)

    async def claim(self, claim_id: str = "c1", **more: Any) -> Sequence[LeaseGiven]:
        reply = await self.http.post("/v1/job/claim", json={"claim_id": claim_id, **more})
        return ok(reply, ClaimReply).leases


@dataclass
class Running:
    hub: Hub
    url: str
    data: Path
    files: Path
    verify: Any = True
    stack: AsyncExitStack = field(default_factory=AsyncExitStack)
    stop: asyncio.Event = field(default_factory=asyncio.Event)
    names: Iterator[int] = field(default_factory=itertools.count)

    async def client(self, **headers: str) -> httpx.AsyncClient:
        """Over TCP, as SDKs and browsers reach it."""
        client = httpx.AsyncClient(base_url=self.url, headers=headers, timeout=TIMEOUT_S, verify=self.verify)
        return await self.stack.enter_async_context(client)

    async def private_client(self, **headers: str) -> httpx.AsyncClient:
        """Over TLS, or else over the Unix socket."""
        if self.url.startswith("https:"):
            return await self.client(**headers)
        transport = httpx.AsyncHTTPTransport(uds=self.stack.enter_context(short_path(self.data / SOCKET)))
        client = httpx.AsyncClient(base_url="http://hub", headers=headers, timeout=TIMEOUT_S, transport=transport)
        return await self.stack.enter_async_context(client)

    async def operator(self) -> httpx.AsyncClient:
        return await self.private_client(**{"X-Operator-Token": (self.files / TOKEN_FILE).read_text().strip()})

    async def with_role(self, role: str, name: str = "") -> httpx.AsyncClient:
        """A client with a key of its own. Without a name it is an owner of its own, too."""
        name = name or f"{role}-{next(self.names)}"
        made = await (await self.operator()).post("/v1/keys", json={"name": name, "role": role})
        client = self.private_client if role in ("operator", "admin") else self.client
        return await client(Authorization=f"Bearer {ok(made, HubKeyReply).secret}")

    async def host(self, name: str, **capability: Any) -> HostClient:
        made = ok(await (await self.operator()).post("/v1/hosts/local", json={"name": name}), LocalHostReply)
        host = HostClient(made.host_id, await self.private_client(Authorization=f"Bearer {made.secret}"))
        await host.register(**capability)
        return host

    async def add(self, *specs: JobSpec) -> list[str]:
        await self.hub.context.fleet.jobs.apply(ApplyPlan(new={spec.id: spec for spec in specs}), "test", source="test")
        return [spec.id for spec in specs]

    async def close(self) -> None:
        self.stop.set()


@asynccontextmanager
async def running(data: Path, **settings: Any) -> AsyncIterator[Running]:
    own: dict[str, Any] = {"drain_s": 1, "keep_free_bytes": 0, "max_failures": 1_000_000, **settings}
    wanted = HubSettings(data=data, listen="127.0.0.1:0", **own)
    clock = SystemClock()
    async with open_hub(wanted, clock) as hub:
        with listening(wanted) as listeners:
            verify: Any = True
            if wanted.tls.enabled:
                import ssl

                verify = ssl.create_default_context(cadata=hub.context.authority.certificate_pem.decode())
            running = Running(hub, listeners.url, data, wanted.files, verify)
            serving = asyncio.create_task(serve(hub, wanted, clock, listeners, running.stop))
            try:
                async with running.stack:
                    yield running
            finally:
                running.stop.set()
                await serving


@asynccontextmanager
async def replying(
    path: Path, content: bytes, status: bytes = b"200 OK", heads: list[bytes] | None = None
) -> AsyncIterator[list[bytes]]:
    """A server that replies with this content, and the first lines of the requests it got; `heads` gets all lines."""
    got: list[bytes] = []

    async def reply(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        received = await reader.readuntil(b"\r\n\r\n")
        got.append(received.splitlines()[0])
        if heads is not None:
            heads.append(received)
        head = b"HTTP/1.1 %s\r\nconnection: close\r\ncontent-length: %d\r\n\r\n" % (status, len(content))
        writer.write(head + content)
        await writer.drain()
        writer.close()

    path.parent.mkdir(parents=True, mode=0o700, exist_ok=True)
    async with await asyncio.start_unix_server(reply, sock=listen_unix(path)):
        yield got


def ok(reply: httpx.Response, kind: type[T]) -> T:
    assert reply.status_code == 200, (reply.status_code, reply.text)
    return msgspec.json.decode(reply.content, type=kind)


def refused(reply: httpx.Response) -> tuple[int, str]:
    """Status and code; every refusal has the one form."""
    return reply.status_code, msgspec.json.decode(reply.content, type=ErrorReply).error.code


class Process:
    """`strata hub` as a process of its own."""

    def __init__(self, data: Path, *arguments: str, python: Sequence[str] = (STRATA,)) -> None:
        self.data = data
        self._stack = ExitStack()
        self._process = subprocess.Popen(
            [*python, "hub", "--listen", "127.0.0.1:0", "--data", str(data), "--log-format", "json", *arguments],
            stderr=subprocess.PIPE,
            text=True,
        )
        assert self._process.stderr is not None
        self.said = [self._process.stderr.readline()]
        self.url = self.said[0].partition("listening on ")[2].partition(" and ")[0].strip()

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def token(self) -> str:
        return (self.data / TOKEN_FILE).read_text().strip()

    def client(self) -> httpx.Client:
        headers = {"X-Operator-Token": self.token}
        return httpx.Client(base_url="http://hub", headers=headers, timeout=TIMEOUT_S, transport=self.transport())

    def transport(self) -> httpx.HTTPTransport:
        """Over the Unix socket."""
        return httpx.HTTPTransport(uds=self._stack.enter_context(short_path(self.data / SOCKET)))

    def end(self, number: int = signal.SIGTERM) -> tuple[int, str]:
        """Its exit status, and all it said."""
        if self._process.poll() is None:
            os.kill(self.pid, number)
        _, rest = self._process.communicate(timeout=60)
        self.said.append(rest)
        return self._process.returncode, "".join(self.said)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self._stack.close()
        if self._process.poll() is None:
            self._process.kill()
        self._process.communicate(timeout=60)


@contextmanager
def process(data: Path, *arguments: str, python: Sequence[str] = (STRATA,)) -> Iterator[Process]:
    with Process(data, *arguments, python=python) as started:
        yield started
