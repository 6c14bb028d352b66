"""Coordinators to test: one inside the test's own loop, and real processes of the command line."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time
from collections.abc import AsyncIterator, Container, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import grpc
import msgspec
from grpc_health.v1 import health_pb2

from strata.base.clock import SystemClock
from strata.coord.core.job_config import JobConfig
from strata.coord.pb import coordinator_pb2 as pb
from strata.coord.pb import coordinator_pb2_grpc as pb_grpc
from strata.coord.server.authenticator import TokenAuthenticator
from strata.coord.server.process import SERVICE, CoordinatorServer
from strata.coord.server.service import CoordinatorService
from strata.coord.server.tokens import Tokens
from strata.coord.settings import CoordinatorSettings, ServerTls
from tests.support.memory_journal import MemoryJournal

STRATA: Final = str(Path(sys.executable).with_name("strata"))
QUICK: Final = JobConfig(settle_s=0.05)
PING_TIMEOUT_S: Final = 3.0
"""Where a test waits for a frozen worker, it does not wait as long as the default."""
CLIENT: Final = (
    ("grpc.use_local_subchannel_pool", 1),
    # The default of a second would be most of what a failover takes.
    ("grpc.initial_reconnect_backoff_ms", 50),
    # How long one attempt to connect may take at least; it is no pause.
    ("grpc.min_reconnect_backoff_ms", 5_000),
    ("grpc.max_reconnect_backoff_ms", 200),
)


@dataclass(frozen=True)
class Running:
    """A coordinator in this process, and a channel to it."""

    service: CoordinatorService
    address: str
    stub: pb_grpc.CoordinatorAsyncStub
    channel: grpc.aio.Channel


@asynccontextmanager
async def in_process(
    job: JobConfig = QUICK,
    *,
    tokens: Tokens | None = None,
    revoked: Container[str] = frozenset(),
    tls: ServerTls | None = None,
    credentials: grpc.ChannelCredentials | None = None,
    standby: bool = False,
    ping_timeout_s: float = 15.0,
) -> AsyncIterator[Running]:
    clock = SystemClock()
    journal = MemoryJournal(clock)
    options = CoordinatorSettings(job=job)
    if standby:
        # It takes over from a leader that has not renewed for so long.
        options = msgspec.structs.replace(options, lease_s=3_600)
        await journal.lead(options.stream, "somebody-else", 3_600)
    service = CoordinatorService(journal, clock, options)
    settings = CoordinatorSettings(listen="127.0.0.1:0", drain_s=0, tls=tls, ping_timeout_s=ping_timeout_s)
    server = CoordinatorServer(service, TokenAuthenticator(tokens, clock, revoked), settings)
    await server.start(lambda line: None)
    stop = asyncio.Event()
    serving = asyncio.create_task(server.serve_until(stop))
    while not (service.leads or standby):
        await asyncio.sleep(0)
    address = f"127.0.0.1:{server.port}"
    try:
        async with connect(address, credentials) as channel:
            yield Running(service, address, pb_grpc.CoordinatorStub(channel), channel)
    finally:
        stop.set()
        await serving


def connect(address: str, credentials: grpc.ChannelCredentials | None = None) -> grpc.aio.Channel:
    """A connection of its own, as another process would have."""
    if credentials is None:
        return grpc.aio.insecure_channel(address, options=CLIENT)
    return grpc.aio.secure_channel(address, credentials, options=CLIENT)


def as_worker(worker_id: str, **more: str) -> tuple[tuple[str, str], ...]:
    return (("strata-worker", worker_id), *more.items())


async def refused(call: Any) -> grpc.aio.AioRpcError:
    """The error of a call that must fail."""
    try:
        await call
    except grpc.aio.AioRpcError as error:
        return error
    raise AssertionError("the call was answered")


def trailing(error: grpc.aio.AioRpcError) -> dict[str, str | bytes]:
    return dict(error.trailing_metadata() or ())


async def patiently(make: Any, *args: Any, within_s: float = 30.0, **named: Any) -> Any:
    """Call until it is not UNAVAILABLE, waiting as told: what every worker does."""
    until_s = time.monotonic() + within_s
    while True:
        try:
            return await make(*args, timeout=max(0.1, until_s - time.monotonic()), **named)
        except grpc.aio.AioRpcError as error:
            if error.code() is not grpc.StatusCode.UNAVAILABLE or time.monotonic() > until_s:
                raise
            await asyncio.sleep(min(0.1, int(trailing(error).get("strata-retry-after-ms", "20")) / 1000))


class CoordinatorProcess:
    """`strata coordinator`, started by `start` and ended by `close` whatever happened to it."""

    def __init__(self, database: str, port: int, settings: Mapping[str, str] | None = None) -> None:
        self.address = f"127.0.0.1:{port}"
        self._args = ["coordinator", "--listen", self.address, "--database", database]
        self._environ = {
            "PATH": os.defpath,
            "STRATA_COORDINATOR_JOB_SETTLE_S": "0.05",
            "STRATA_COORDINATOR_PING_TIMEOUT_S": str(PING_TIMEOUT_S),
            **(settings or {}),
        }
        self._process: asyncio.subprocess.Process | None = None

    @property
    def process(self) -> asyncio.subprocess.Process:
        assert self._process is not None
        return self._process

    async def start(self) -> None:
        self._process = await asyncio.create_subprocess_exec(
            STRATA, *self._args, env=self._environ, stderr=asyncio.subprocess.DEVNULL
        )

    def signal(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    async def kill(self) -> None:
        self.process.kill()
        await self.process.wait()

    async def close(self) -> None:
        if self._process is not None and self._process.returncode is None:
            await self.kill()

    async def serving(self) -> float:
        """Wait until it leads; how long that took."""
        return await self._until(health_pb2.HealthCheckResponse.SERVING)

    async def standing_by(self) -> None:
        await self._until(health_pb2.HealthCheckResponse.NOT_SERVING)

    async def _until(self, status: int, within_s: float = 30.0) -> float:
        began_s = time.monotonic()
        async with connect(self.address) as channel:
            while time.monotonic() - began_s < within_s:
                try:
                    if await health(channel, SERVICE) == status:
                        return time.monotonic() - began_s
                except grpc.aio.AioRpcError:
                    pass
                await asyncio.sleep(0.01)
        raise AssertionError(f"{self.address} is not {status}")


async def health(channel: grpc.aio.Channel, service: str) -> int:
    """Without the generated stub, whose published types do not know its methods."""
    check = channel.unary_unary(
        "/grpc.health.v1.Health/Check",
        request_serializer=health_pb2.HealthCheckRequest.SerializeToString,
        response_deserializer=health_pb2.HealthCheckResponse.FromString,
    )
    found = await check(health_pb2.HealthCheckRequest(service=service), timeout=0.5)
    return int(found.status)


async def register(stub: pb_grpc.CoordinatorAsyncStub, *worker_ids: str, job: str = "") -> pb.WorkerConfig:
    """All of them, in one generation; the answer to the last."""
    given = [pb.WorkerInfo(worker_id=worker_id, job_id=job, incarnation=f"{worker_id}-1") for worker_id in worker_ids]
    await asyncio.gather(*(patiently(stub.RegisterWorker, each) for each in given))
    # Some may have been answered in a generation before the last came.
    while True:
        found: list[pb.WorkerConfig] = await asyncio.gather(*(patiently(stub.RegisterWorker, each) for each in given))
        if {each.generation for each in found} == {found[0].generation} and found[0].world_size >= len(given):
            return found[-1]
