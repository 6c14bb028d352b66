"""Real `strata agent` processes for fault injection, with the children that they started."""

from __future__ import annotations

import asyncio
import json
import os
import re
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from signal import SIGKILL, Signals
from typing import Any, Final, TypeVar

from soak.hub_process import ROOT, ArmedFailpoint
from soak.trees import CURRENT
from strata.base.atomic import read_json
from strata.base.errors import Code, StrataError
from strata.base.secret import Secret
from strata.fleet.agent.identity import connect_to_hub, save_local
from strata.fleet.agent.state import AttemptRecord
from strata.fleet.client.hub_client import HubClient
from strata.fleet.wire.identities import LocalHostReply

T = TypeVar("T")

POLL_S: Final = 0.02


class FreezeAtFailpoint(ArmedFailpoint):
    """Freeze at the failpoint instead, until SIGCONT."""

    @property
    def program(self) -> Sequence[str]:
        return (sys.executable, "-m", "soak.fleet_agent.fault_injection", self.failpoint, str(self.skip))


def failpoints(*folders: str) -> list[str]:
    """Every failpoint in these folders of the source."""
    sources = [path for folder in folders for path in (ROOT / "src/strata" / folder).rglob("*.py")]
    return sorted({name for path in sources for name in re.findall(r'failpoint\("([^"]+)"\)', path.read_text("utf-8"))})


@dataclass(frozen=True)
class Child:
    """An attempt on its host, by the files there."""

    job_id: str
    epoch: int
    supervisor: int
    pid: int


class AgentProcess:
    """One after the other, processes with the same state and work folder. Their children may outlive them."""

    def __init__(self, folder: Path, name: str, slots: int) -> None:
        self.name = name
        self.log = folder / f"{name}.log"
        self.state = folder / name / "state"
        self.work = folder / name / "work"
        self.host_id = ""
        settings = {
            "STATE": str(self.state),
            "WORK": str(self.work),
            "SLOTS": str(slots),
            "MIN_FREE_GIB": "0",
            "POLL_S": "5",
            "GRACE_S": "5",
            "LOG_FORMAT": "json",
            # Its trainers lie in folders that a sandbox hides.
            "SANDBOX_MODE": "off",
        }
        own = {"PATH": os.defpath, "PYTHONFAULTHANDLER": "1"}
        self._environ = own | {f"STRATA_AGENT_{name}": value for name, value in settings.items()}
        self.tree = CURRENT
        """What the next start runs."""
        self._process: asyncio.subprocess.Process | None = None
        self._dying: asyncio.Task[float] | None = None
        self.crashes: list[str] = []
        """Exits that the campaign did not cause: all but SIGKILL, from outside or at a failpoint."""

    @property
    def is_running(self) -> bool:
        return self._process is not None and self._process.returncode is None

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    async def start(self, arm: ArmedFailpoint | None = None) -> None:
        command = (self.tree.program,) if arm is None else arm.program
        with self.log.open("ab") as log:
            self._process = await asyncio.create_subprocess_exec(
                *command,
                "agent",
                env=self._environ | {"PYTHONPATH": self.tree.python_path},
                stdin=asyncio.subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                cwd=ROOT,
            )
        self._dying = asyncio.create_task(self._death(self._process))

    def signal(self, number: Signals) -> None:
        assert self._process is not None
        with suppress(ProcessLookupError):
            self._process.send_signal(number)

    async def died(self, within_s: float | None = None) -> bool:
        assert self._dying is not None
        await asyncio.wait([self._dying], timeout=within_s)
        return self._dying.done()

    async def kill(self) -> float:
        """SIGKILL; the wall clock when it was sent."""
        sent_s = time.time()
        self.signal(SIGKILL)
        await self.died()
        return sent_s

    def logged_count(self, text: str, since: int = 0) -> int:
        """How often this text occurs in the log after the first `since` bytes."""
        return self.log.read_bytes()[since:].count(text.encode()) if self.log.exists() else 0

    async def _death(self, process: asyncio.subprocess.Process) -> float:
        status = await process.wait()
        if status != -SIGKILL:
            self.crashes.append(f"{self.name} ended with status {status}: {self.log}")
        return time.time()

    def enrol(self, url: str, made: LocalHostReply) -> None:
        self.host_id = made.host_id
        save_local(self.state, url, host_id=made.host_id, name=self.name, secret=Secret(made.secret))

    def client(self) -> HubClient:
        """With this host's own credentials."""
        return connect_to_hub(self.state)

    def children(self) -> list[Child]:
        """Attempts whose child runs now."""
        found = []
        for folder in self._attempts():
            with suppress(FileNotFoundError, ValueError, KeyError):
                pids: dict[str, Any] = json.loads((folder / "pid.json").read_text())
                record = read_json(folder / "record.json", AttemptRecord)
                if record is not None and is_alive(pids["child"]) and not (folder / "exit.json").exists():
                    lease = record.lease
                    found.append(Child(lease.job_id, lease.epoch, pids["supervisor"], pids["child"]))
        return found

    def is_idle(self) -> bool:
        """Whether no files of an attempt are left."""
        return not self._attempts()

    def processes(self) -> list[int]:
        """Processes of this host beside the agent: supervisors, and children, found by their environment."""
        own = str(self.state.parent).encode()
        found = []
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit() and int(entry.name) not in (os.getpid(), self.pid):
                with suppress(OSError):
                    where = (entry / "cmdline").read_bytes() + (entry / "environ").read_bytes()
                    if own + b"/" in where and is_alive(int(entry.name)):
                        found.append(int(entry.name))
        return found

    async def kill_host(self) -> float:
        """Agent, supervisors and children: as in a power failure."""
        sent_s = time.time()
        self.signal(SIGKILL)
        # A process may start another while it dies.
        while pids := self.processes():
            for pid in pids:
                with suppress(ProcessLookupError):
                    os.kill(pid, SIGKILL)
            await asyncio.sleep(POLL_S)
        await self.died()
        return sent_s

    def signal_host(self, number: Signals) -> None:
        self.signal(number)
        for pid in self.processes():
            with suppress(ProcessLookupError):
                os.kill(pid, number)

    async def close(self) -> None:
        if self._process is not None:
            await self.kill_host()

    def _attempts(self) -> list[Path]:
        with suppress(FileNotFoundError):
            return sorted((self.state / "attempts").iterdir())
        return []


def is_alive(pid: int) -> bool:
    """Whether a process runs; a zombie does not."""
    return _state(pid) not in ("", "Z", "X")


def is_frozen(pid: int) -> bool:
    return _state(pid) == "T"


def _state(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return ""


async def wait_until(look: Callable[[], T | None], within_s: float, what: str) -> T:
    """Poll `look` in a thread until its result is true. While the hub is away, it is called again."""
    until_s = time.monotonic() + within_s
    while True:
        try:
            if found := await asyncio.to_thread(look):
                return found
        except StrataError as error:
            if error.code not in (Code.UNAVAILABLE, Code.DEADLINE):
                raise
        if time.monotonic() > until_s:
            raise TimeoutError(f"not within {within_s:g} s: {what}")
        await asyncio.sleep(POLL_S)
