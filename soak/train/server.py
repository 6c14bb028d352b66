"""`strata serve` as a process, and its own processes by name, so that they can be killed one by one."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Final, Literal

import zmq.asyncio

from strata.base.clock import SystemClock
from strata.journal.open import open_journal
from strata.journal.replay import replay
from strata.testing.ports import port_of, reserve_port
from strata.train.core import commands, facts
from strata.train.launch.child import descendants
from strata.train.link import Knock, keys_of, knock
from strata.train.settings import ServerSettings, load_settings

Victim = Literal["orchestrator", "api", "rank"]
Ranks = Literal["real", "pretending"]
START_S: Final = 180.0
_MODULES: Final = {
    "orchestrator": "strata.train.orchestrator",
    "api": "strata.train.api",
    "rank": "strata.train.runner",
}
_TINY: Final = """
import sys
from pathlib import Path
from strata.train.runner.tiny import TinyModel, make
make(Path(sys.argv[1]), TinyModel())
"""


def make_model(folder: Path) -> None:
    """In a process of its own: torch stays out of this one."""
    subprocess.run([sys.executable, "-c", _TINY, str(folder)], check=True, timeout=START_S)


class ServeProcess:
    """Real ranks are the launcher's; those that pretend are started here, and the launcher connects to them."""

    def __init__(self, folder: Path, model: Path, port: int, ranks: Ranks) -> None:
        folder.mkdir(parents=True)
        self.folder = folder
        self.url = f"http://127.0.0.1:{port}"
        self._ranks = ranks
        self._file = folder / "server.toml"
        mode = "auto" if ranks == "real" else "connect"
        self._file.write_text(
            f'[server]\ndata = "{folder}/d"\nport = {port}\npoll_s = 2.0\nlease_s = 1.0\n'
            f'[model]\npath = "{model}"\nname = "tiny"\nslots = 64\nmax_lora_rank = 8\n'
            f'[ranks]\nnproc = 2\nbackend = "gloo"\nmode = "{mode}"\n'
            # Composition must not depend on who came when: results are compared bit by bit.
            "[limits]\npack_tenants = false\n",
            encoding="utf-8",
        )
        self.settings: ServerSettings = load_settings(self._file, environ={})
        self._children: list[asyncio.subprocess.Process] = []

    async def start(self) -> None:
        log = (self.folder / "serve.log").open("wb")
        own = ("--settings", str(self._file))
        with log:
            if self._ranks == "pretending":
                await self._spawn(log.fileno(), "strata.testing.fake_ranks", *own, "--applied", str(self.applied_file))
            serve = await self._spawn(log.fileno(), "strata.cli.main", "serve", str(self._file))
        async with asyncio.timeout(START_S):
            # The launcher says so when everything is there; its words are in the log.
            while b"strata serve: http" not in (self.folder / "serve.log").read_bytes():
                if serve.returncode is not None:
                    raise RuntimeError(f"strata serve ended: {self.log_tail()}")
                await asyncio.sleep(0.1)

    async def _spawn(self, log: int, module: str, *arguments: str) -> asyncio.subprocess.Process:
        if module == "strata.cli.main":
            words = [sys.executable, "-c", "from strata.cli.main import main; main()", *arguments]
        else:
            words = [sys.executable, "-m", module, *arguments]
        child = await asyncio.create_subprocess_exec(*words, stdout=log, stderr=log, stdin=asyncio.subprocess.DEVNULL)
        self._children.append(child)
        return child

    @property
    def key(self) -> str:
        return (self.settings.data / "api.key").read_text(encoding="utf-8").strip()

    @property
    def applied_file(self) -> Path:
        return self.folder / "applied.log"

    def log_tail(self) -> str:
        return (self.folder / "serve.log").read_text(encoding="utf-8", errors="replace")[-3000:]

    def pids(self, victim: Victim) -> list[int]:
        found = []
        for pid in descendants(self.launcher_pid):
            try:
                words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
            except OSError:
                continue
            if _MODULES[victim].encode() in words:
                found.append(pid)
        return found

    def kill(self, victim: Victim) -> bool:
        """One process, now; False if there is none at this moment."""
        for pid in self.pids(victim)[:1]:
            os.kill(pid, signal.SIGKILL)
            return True
        return False

    @property
    def launcher_pid(self) -> int:
        return self._children[-1].pid

    def group(self) -> list[int]:
        """Which processes the ranks are."""
        if self._ranks == "pretending":
            return [child.pid for child in self._children[:-1] if child.returncode is None]
        return self.pids("rank")

    async def applied(self) -> int:
        """What rank 0 itself says it applied last. It is asked as by the next orchestrator, so this is the end."""
        context = zmq.asyncio.Context()
        generation = 1 << 40
        try:
            async with asyncio.timeout(START_S):
                connection = await knock(context, self.settings.rank0, keys_of(self.settings), Knock(generation, 1))
                assert connection is not None
                await connection.send(commands.Attach(generation, self.settings.stream))
                attached = await connection.receive()
                connection.close()
        finally:
            context.destroy(linger=0)
        assert isinstance(attached, commands.Attached), attached
        return attached.applied

    async def stop(self) -> int:
        """The status of the launcher after SIGTERM."""
        *others, serve = self._children
        if serve.returncode is None:
            serve.terminate()
        status = await serve.wait()
        for child in others:
            if child.returncode is None:
                child.kill()
            await child.wait()
        return status

    async def journaled(self) -> list[facts.Fact]:
        async with await open_journal(self.settings.database, SystemClock()) as journal:
            batches = [batch async for batch in replay(journal, self.settings.stream)]
        return [facts.decode(fact) for batch in batches for fact in batch.facts]


@asynccontextmanager
async def serving(folder: Path, model: Path, ranks: Ranks) -> AsyncIterator[ServeProcess]:
    with reserve_port() as reserved:
        server = ServeProcess(folder, model, port_of(reserved), ranks)
        try:
            await server.start()
            yield server
        finally:
            await server.stop()
