"""Real coordinator processes for fault injection, on a port that stays theirs."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import grpc
from grpc_health.v1 import health_pb2

from soak.trees import CURRENT
from strata.coord.server.process import SERVICE
from tests.support.ports import port_of, reserve_port

ROOT: Final = Path(__file__).parents[2]
READY_S: Final = 120.0
_POLL_S: Final = 0.01
_EAGER: Final = (("grpc.initial_reconnect_backoff_ms", 50), ("grpc.max_reconnect_backoff_ms", 200))


@dataclass(frozen=True)
class Arm:
    """Die at the hit of a failpoint after the first `skip` ones."""

    failpoint: str
    skip: int


def failpoints(database: str) -> list[str]:
    """Every failpoint in the source that a coordinator on this kind of database (sqlite, postgres) can reach."""
    other = {"sqlite": "postgres", "postgres": "sqlite"}[database]
    sources = [
        path for layer in ("coord", "journal", "database") for path in (ROOT / "src/strata" / layer).rglob("*.py")
    ]
    named = {name for path in sources for name in re.findall(r'failpoint\("([^"]+)"\)', path.read_text("utf-8"))}
    # Nobody upgrades a database that is as new as the program.
    return sorted(name for name in named if f".{other}." not in name and not name.endswith("upgrade"))


class Coordinator:
    """One after the other, processes with the same address and database."""

    def __init__(self, database: str, folder: Path, name: str, settings: Mapping[str, str]) -> None:
        self._guard = reserve_port()
        self.address = f"127.0.0.1:{port_of(self._guard)}"
        self.log = folder / f"{name}.log"
        self._args = ["coordinator", "--listen", self.address, "--database", database, "--log-format", "json"]
        # A crash of its own leaves the stacks of all threads in the log.
        self._environ = {"PATH": os.defpath, "PYTHONFAULTHANDLER": "1", **settings}
        self.tree = CURRENT
        """What the next start runs."""
        self._process: asyncio.subprocess.Process | None = None
        self._dying: asyncio.Task[float] | None = None
        self.crashes: list[str] = []
        """Unexpected exits: all but SIGKILL, by the campaign or at a failpoint."""

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    @property
    def runs(self) -> bool:
        return self._process is not None and self._process.returncode is None

    async def start(self, arm: Arm | None = None) -> None:
        command = (
            [self.tree.program]
            if arm is None
            else [sys.executable, "-m", "soak.coord.fault_injection", arm.failpoint, str(arm.skip)]
        )
        with self.log.open("ab") as log:
            self._process = await asyncio.create_subprocess_exec(
                *command,
                *self._args,
                env=self._environ | {"PYTHONPATH": self.tree.python_path},
                stderr=log,
                stdin=asyncio.subprocess.DEVNULL,
                cwd=ROOT,
            )
        self._dying = asyncio.create_task(self._death(self._process))

    async def died(self, within_s: float | None = None) -> float | None:
        """When it died, by the monotonic clock; None if it lives on."""
        assert self._dying is not None
        await asyncio.wait([self._dying], timeout=within_s)
        return self._dying.result() if self._dying.done() else None

    async def kill(self) -> float:
        """SIGKILL; when it was sent."""
        sent_s = time.monotonic()
        self.signal(signal.SIGKILL)
        await self.died()
        return sent_s

    def signal(self, number: signal.Signals) -> None:
        assert self._process is not None
        self._process.send_signal(number)

    async def close(self) -> None:
        if self.runs:
            await self.kill()
        self._guard.close()

    async def leads(self) -> None:
        await self._until(health_pb2.HealthCheckResponse.SERVING)

    async def stands_by(self) -> None:
        """It listens and does not lead; or it leads already, if no other does."""
        await self._until(health_pb2.HealthCheckResponse.NOT_SERVING, health_pb2.HealthCheckResponse.SERVING)

    async def is_leading(self) -> bool:
        async with grpc.aio.insecure_channel(self.address) as channel:
            return await _health(channel) == health_pb2.HealthCheckResponse.SERVING

    def memory_mb(self) -> float:
        """The most memory that this process has ever had resident."""
        status = Path(f"/proc/{self.pid}/status").read_text("utf-8")
        return int(re.findall(r"VmHWM:\s+(\d+) kB", status)[0]) / 1024

    async def _death(self, process: asyncio.subprocess.Process) -> float:
        status = await process.wait()
        if status != -signal.SIGKILL:
            self.crashes.append(f"a coordinator ended with status {status}: {self.log}")
        return time.monotonic()

    async def _until(self, *wanted: int) -> None:
        until_s = time.monotonic() + READY_S
        async with grpc.aio.insecure_channel(self.address, options=_EAGER) as channel:
            while time.monotonic() < until_s and self.runs:
                if await _health(channel) in wanted:
                    return
                await asyncio.sleep(_POLL_S)
        raise TimeoutError(f"{self.address} is not ready; its log is {self.log}")


async def _health(channel: grpc.aio.Channel) -> int | None:
    """Without the generated stub, whose published types do not know its methods. None: no answer."""
    check = channel.unary_unary(
        "/grpc.health.v1.Health/Check",
        request_serializer=health_pb2.HealthCheckRequest.SerializeToString,
        response_deserializer=health_pb2.HealthCheckResponse.FromString,
    )
    try:
        found = await check(health_pb2.HealthCheckRequest(service=SERVICE), timeout=2.0)
    except grpc.aio.AioRpcError:
        return None
    return int(found.status)
