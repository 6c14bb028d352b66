"""A real `strata hub` process to kill and restart, always on the same port, data folder and database."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from soak.trees import CURRENT
from strata.base.errors import StrataError
from strata.base.secret import read_secret
from strata.fleet.client.hub_client import HubClient
from strata.fleet.wire.overview import StatusReply
from strata.hub.compose import TOKEN_FILE
from strata.hub.settings import SOCKET
from tests.support.ports import port_of, reserve_port

ROOT: Final = Path(__file__).parents[1]
STRATA: Final = CURRENT.program
READY_S: Final = 180.0
_POLL_S: Final = 0.01


@dataclass(frozen=True)
class ArmedFailpoint:
    """Die at the hit of a failpoint after the first `skip` ones."""

    failpoint: str
    skip: int = 0

    @property
    def program(self) -> Sequence[str]:
        return (sys.executable, "-m", "soak.coord.fault_injection", self.failpoint, str(self.skip))


class HubProcess:
    """One after the other, processes with the same address, data folder and database.

    `settings` are variables without their prefix, as in `{"STALE_AFTER_S": "6"}`; `database` is `hub.db` in the data
    folder unless set.
    """

    def __init__(
        self,
        folder: Path,
        *,
        database: str = "",
        settings: Mapping[str, str] | None = None,
        config: Path | None = None,
        program: Sequence[str] = (),
    ) -> None:
        """`program` stands for that of the tree."""
        self._guard = reserve_port()
        self.port = port_of(self._guard)
        address = f"127.0.0.1:{self.port}"
        self.url = f"http://{address}"
        given = {"KEEP_FREE_BYTES": "0", **(settings or {})}
        self.data = folder / "hub"
        self.files = Path(given.get("SHARED", self.data))
        self.address = f"unix:{self.data / SOCKET}"
        self.log = folder / "hub.log"
        self._program = program
        self.tree = CURRENT
        """What the next start runs."""
        self._args = ["hub", "--listen", address, "--data", str(self.data), "--log-format", "json"]
        self._args += ["--database", database] if database else []
        self._args += ["--config", str(config)] if config else []
        # A crash of its own leaves the stacks of all threads in the log.
        own = {"PATH": os.defpath, "PYTHONFAULTHANDLER": "1"}
        self._environ = own | {f"STRATA_HUB_{name}": value for name, value in given.items()}
        self._process: asyncio.subprocess.Process | None = None
        self._dying: asyncio.Task[float] | None = None
        self.started_s = 0.0
        """By the monotonic clock, the last time."""
        self.crashes: list[str] = []
        """Ends that nobody asked for: all but SIGKILL, our own or at a failpoint."""

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    @property
    def runs(self) -> bool:
        return self._process is not None and self._process.returncode is None

    async def start(self, arm: ArmedFailpoint | None = None) -> None:
        """Only start it: `ready` waits until it answers."""
        command = (self._program or (self.tree.program,)) if arm is None else arm.program
        self.started_s = time.monotonic()
        with self.log.open("ab") as log:
            self._process = await asyncio.create_subprocess_exec(
                *command,
                *self._args,
                env=self._environ | {"PYTHONPATH": self.tree.python_path},
                stderr=log,
                stdout=log,
                stdin=asyncio.subprocess.DEVNULL,
                cwd=ROOT,
            )
        self._dying = asyncio.create_task(self._death(self._process))

    async def first_start(self) -> None:
        await self.start()
        if await self.ready() is None:
            raise RuntimeError(f"the hub does not start; its log is {self.log}")

    async def ready(self, within_s: float = READY_S) -> float | None:
        """When it answered from its database, by the monotonic clock; None if it was killed before that."""
        until_s = time.monotonic() + within_s
        while time.monotonic() < until_s:
            if not self.runs:
                return None
            if await asyncio.to_thread(self._answers):
                return time.monotonic()
            await asyncio.sleep(_POLL_S)
        raise TimeoutError(f"{self.url} is not ready; its log is {self.log}")

    def operator(self, *, timeout_s: float = 30.0) -> HubClient:
        """May do everything. Once it has been ready."""
        return HubClient(self.address, bearer=read_secret(self.files / TOKEN_FILE), timeout_s=timeout_s)

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
        if self.runs:
            self._process.send_signal(number)

    async def close(self) -> None:
        if self.runs:
            await self.kill()
        self._guard.close()

    def memory_mb(self) -> float:
        """The most memory that this process has ever had resident."""
        status = Path(f"/proc/{self.pid}/status").read_text("utf-8")
        return int(re.findall(r"VmHWM:\s+(\d+) kB", status)[0]) / 1024

    def _answers(self) -> bool:
        try:
            with self.operator(timeout_s=5.0) as client:
                client.call("GET", "/v1/status", StatusReply)
        except StrataError:
            return False
        return True

    async def _death(self, process: asyncio.subprocess.Process) -> float:
        status = await process.wait()
        if status != -signal.SIGKILL:
            self.crashes.append(f"the hub ended with status {status}: {self.log}")
        return time.monotonic()
