"""The processes of `bench coordinator`: our server as the command line starts it, the bare one, and the clients."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import Any, Final

import grpc
import psutil  # type: ignore[import-untyped]
from grpc_health.v1 import health_pb2

from bench.load_process import STRATA, Clients, started
from strata.coord.server.process import SERVICE
from tests.support.ports import port_of, reserve_port

START_S: Final = 20.0


@dataclass(frozen=True)
class Process:
    """A server under test."""

    address: str
    pid: int

    def cpu_s(self) -> float:
        times = psutil.Process(self.pid).cpu_times()
        return float(times.user + times.system)

    def rss_bytes(self) -> int:
        return int(psutil.Process(self.pid).memory_info().rss)


@asynccontextmanager
async def clients() -> AsyncIterator[Clients]:
    async with started(sys.executable, "-m", "bench.coordinator.load", settings={}) as process:
        yield Clients(process)


@asynccontextmanager
async def ours(database: str, interval_s: float = 600.0, program: str = STRATA) -> AsyncIterator[Process]:
    """The coordinator in its production form. By default nobody is lost for being silent while another case runs."""
    interval = {"STRATA_COORDINATOR_JOB_HEARTBEAT_INTERVAL_S": str(interval_s)}
    settings = {**interval, "STRATA_COORDINATOR_LOG_LEVEL": "error"}
    async with listening((program, "coordinator", "--database", database, "--listen"), settings) as server:
        yield server


@asynccontextmanager
async def bare() -> AsyncIterator[Process]:
    async with listening((sys.executable, "-m", "bench.coordinator.bare"), {}) as server:
        yield server


@asynccontextmanager
async def both(database: str) -> AsyncIterator[tuple[Process, Process]]:
    async with AsyncExitStack() as opened:
        yield await opened.enter_async_context(ours(database)), await opened.enter_async_context(bare())


@asynccontextmanager
async def listening(command: tuple[str, ...], settings: dict[str, str]) -> AsyncIterator[Process]:
    """A server whose last argument is where it listens, once it serves."""
    with reserve_port() as guard:
        address = f"127.0.0.1:{port_of(guard)}"
        async with started(*command, address, settings=settings) as process:
            await serving(address, process)
            yield Process(address, process.pid)


async def serving(address: str, process: asyncio.subprocess.Process) -> None:
    """Ours says that it serves once it leads; others know no health and are there when they answer at all."""
    async with asyncio.timeout(START_S), grpc.aio.insecure_channel(address) as channel:
        check: Any = channel.unary_unary("/grpc.health.v1.Health/Check")
        asked = health_pb2.HealthCheckRequest(service=SERVICE).SerializeToString()
        while process.returncode is None:
            try:
                status = health_pb2.HealthCheckResponse.FromString(await check(asked, wait_for_ready=True)).status
            except grpc.aio.AioRpcError as error:
                if error.code() is grpc.StatusCode.UNIMPLEMENTED:
                    return
            else:
                if status == health_pb2.HealthCheckResponse.SERVING:
                    return
            await asyncio.sleep(0.02)
    raise RuntimeError("a server of the bench ended before it served")
