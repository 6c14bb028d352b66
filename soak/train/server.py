"""`strata serve` as a process, and its own processes by name, so that they can be killed one by one."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal

import httpx
import zmq.asyncio

from soak.train import fault_injection
from soak.trees import CURRENT, Tree
from strata.base.clock import SystemClock
from strata.base.settings import process_environment
from strata.journal.open import open_journal
from strata.journal.replay import replay
from strata.train.core import commands, facts
from strata.train.launch.supervised_process import descendants
from strata.train.link.rank import ConnectRequest, connect_rank
from strata.train.link.sockets import load_keys
from strata.train.settings import ServerSettings, load_settings
from tests.support.ports import port_of, reserve_port

Victim = Literal["orchestrator", "api", "rank", "rank 0", "rank 1", "rank 2", "rank 3", "launcher"]
"""`rank` is any of them."""
RankGroup = Literal["real", "pretending"]
START_S: Final = 180.0
NO_SNAPSHOTS: Final = "every_dispatches = 0\nevery_s = 0\nevery_payload_mb = 0\nevery_replay_s = 0"
THERE_S: Final = 60.0
GONE_S: Final = 45.0
"""How long what a dead launcher started may take to be gone: the ranks of `connect` have half a minute."""
LOOK_S: Final = 0.02
NOT_COPIED: Final = ("checkpoints", "snapshots", "run", "launcher.lock")
"""What is made anew by a server that is to do everything again."""
_TINY: Final = """
import sys
from pathlib import Path
from strata.train.runner.model.tiny import TinyModel, make
make(Path(sys.argv[1]), TinyModel(hidden=int(sys.argv[2])))
"""


def make_model(folder: Path, hidden: int = 64) -> None:
    """In a process of its own: torch stays out of this one."""
    subprocess.run([sys.executable, "-c", _TINY, str(folder), str(hidden)], check=True, timeout=START_S)


@dataclass(frozen=True)
class ServeOptions:
    """A server for campaigns."""

    packed: bool = False
    """Operations of several models in one pass."""
    more: str = ""
    """Settings."""
    ranks: str = ""
    """Settings of the ranks."""
    mesh: str = ""
    """The settings of a mesh of four ranks, on which the base is; without it two ranks have all of it."""
    armed: bool = False
    """Its processes can be told to die at failpoints."""
    start_s: float = START_S
    """How long it may take to be ready."""
    journal: Path | None = None
    """The data of a server that has ended, whose journal is done again from its first dispatch."""
    data_bytes: int = 0
    """What each of its processes may allocate; 0 is no limit."""
    tree: Tree = CURRENT
    """What it runs first."""


DEFAULT_OPTIONS: Final = ServeOptions()


class ServeProcess:
    """Real ranks are the launcher's; those that pretend are started here, and the launcher connects to them."""

    def __init__(
        self, folder: Path, model: Path, port: int, ranks: RankGroup, snapshots: str, options: ServeOptions
    ) -> None:
        folder.mkdir(parents=True)
        self.folder = folder
        self.url = f"http://127.0.0.1:{port}"
        self._ranks = ranks
        self._start_s = options.start_s
        self._file = folder / "server.toml"
        mode = "auto" if ranks == "real" else "connect"
        nproc, base = (4, "replicated_mb = 0") if options.mesh else (2, "")
        self._file.write_text(
            f'[server]\ndata = "{folder}/d"\nport = {port}\npoll_s = 2.0\nlease_s = 1.0\n'
            f'[model]\npath = "{model}"\nname = "tiny"\nslots = 64\nmax_lora_rank = 8\n{base}\n'
            f'[ranks]\nnproc = {nproc}\nbackend = "gloo"\nmode = "{mode}"\n{options.ranks}\n'
            # Without packing nothing depends on who came when, and results can be compared bit by bit.
            f"[limits]\npack_tenants = {str(options.packed).lower()}\n[snapshots]\n{snapshots}\n{options.more}"
            f"\n[parallel]\n{options.mesh}\n",
            encoding="utf-8",
        )
        self.settings: ServerSettings = load_settings(self._file, environ={})
        self.orders = folder / "armed"
        self._environment = dict(process_environment())
        if options.armed:
            self._environment["PYTHONPATH"] = fault_injection.prepare(self.orders)
        self._data_bytes = options.data_bytes
        self.tree = options.tree
        """What the next start runs."""
        self._pretending: asyncio.subprocess.Process | None = None
        self._launcher: asyncio.subprocess.Process | None = None

    async def start(self) -> None:
        if self._ranks == "pretending":
            await self.start_ranks()
        await self._launch()

    async def start_ranks(self) -> None:
        """Those that pretend."""
        own = ("--settings", str(self._file), "--applied", str(self.applied_file))
        self._pretending = await self._spawn("-m", "tests.support.fake_ranks", *own)

    async def ranks_end(self) -> int:
        """Their exit status."""
        assert self._pretending is not None
        return await self._pretending.wait()

    async def restart(self) -> list[int]:
        """As whoever supervises it: at once when the launcher is dead, with all that it left behind still there.
        Returns what it had started."""
        left = descendants(self.launcher_pid)
        os.kill(self.launcher_pid, signal.SIGKILL)
        assert self._launcher is not None
        await self._launcher.wait()
        await self._launch()
        return left

    async def _launch(self) -> None:
        log = self.folder / "serve.log"
        before = log.stat().st_size if log.exists() else 0
        code = "from strata.cli.main import main; main()"
        if self._data_bytes:
            limits = (self._data_bytes, self._data_bytes)
            code = f"import resource; resource.setrlimit(resource.RLIMIT_DATA, {limits}); {code}"
        self._launcher = await self._spawn("-c", code, "serve", str(self._file))
        async with asyncio.timeout(self._start_s):
            # The launcher says so when everything is there; its words are in the log.
            while b"strata serve: http" not in log.read_bytes()[before:]:
                if self._launcher.returncode is not None:
                    raise RuntimeError(f"strata serve ended: {self.log_tail()}")
                await asyncio.sleep(0.1)

    async def _spawn(self, *arguments: str) -> asyncio.subprocess.Process:
        with (self.folder / "serve.log").open("ab") as log:
            return await asyncio.create_subprocess_exec(
                self.tree.python,
                *arguments,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=self._environment,
                cwd=self.tree.root,
            )

    @property
    def key(self) -> str:
        return (self.settings.data / "api.key").read_text(encoding="utf-8").strip()

    @property
    def settings_file(self) -> Path:
        return self._file

    @property
    def applied_file(self) -> Path:
        return self.folder / "applied.log"

    def log_tail(self) -> str:
        return (self.folder / "serve.log").read_text(encoding="utf-8", errors="replace")[-3000:]

    def pids(self, victim: Victim) -> list[int]:
        if victim == "launcher":
            return [self.launcher_pid]
        module, _, rank = victim.partition(" ")
        return [
            pid for pid in descendants(self.launcher_pid) if runs_module(pid, fault_injection.MODULES[module], rank)
        ]

    def kill(self, victim: Victim) -> bool:
        """One process, now; False if there is none at this moment."""
        for pid in self.pids(victim)[:1]:
            os.kill(pid, signal.SIGKILL)
            return True
        return False

    async def there(self, victim: Victim) -> None:
        """What is being started may be missing for a moment."""
        async with asyncio.timeout(THERE_S):
            await until(lambda: self.pids(victim))

    def kill_ranks(self) -> None:
        """All of them at once."""
        for pid in self.pids("rank"):
            os.kill(pid, signal.SIGKILL)

    def logged(self, event: str) -> list[dict[str, Any]]:
        """What the processes said of this."""
        lines = (self.folder / "serve.log").read_text(encoding="utf-8", errors="replace").splitlines()
        return [json.loads(line) for line in lines if line.startswith("{") and f'"{event}"' in line]

    @property
    def launcher_pid(self) -> int:
        assert self._launcher is not None
        return self._launcher.pid

    def group(self) -> list[int]:
        """Which processes the ranks are."""
        if self._ranks == "pretending":
            there = self._pretending
            return [there.pid] if there is not None and there.returncode is None else []
        return self.pids("rank")

    async def idle(self) -> None:
        """Nothing waits or runs any more."""
        async with asyncio.timeout(START_S), httpx.AsyncClient(base_url=self.url, timeout=START_S) as http:
            while True:
                told = (await http.get("/api/v1/status", headers={"X-API-Key": self.key})).raise_for_status().json()
                if not told["waiting"] and not told["running"]:
                    return
                await asyncio.sleep(LOOK_S)

    async def applied(self) -> int:
        """What rank 0 itself says it applied last. It is asked as by the next orchestrator, so this is the end."""
        context = zmq.asyncio.Context()
        generation = 1 << 40
        try:
            async with asyncio.timeout(START_S):
                connection = await connect_rank(
                    context, self.settings.rank0, load_keys(self.settings), ConnectRequest(generation, 1)
                )
                assert connection is not None
                await connection.send(commands.Attach(generation, self.settings.stream))
                attached = await connection.receive()
                connection.close()
        finally:
            context.destroy(linger=0)
        assert isinstance(attached, commands.AttachReply), attached
        return attached.applied

    async def stop(self) -> int:
        """The status of the launcher after SIGTERM."""
        status = 0
        if (serve := self._launcher) is not None:
            if serve.returncode is None:
                serve.terminate()
            status = await serve.wait()
        if (child := self._pretending) is not None:
            if child.returncode is None:
                child.kill()
            await child.wait()
        return status

    def restored(self) -> int:
        """How often ranks that started anew began from a snapshot."""
        return (self.folder / "serve.log").read_bytes().count(b"model_snapshot_restored")

    async def journaled(self) -> list[facts.Fact]:
        """What was not let go."""
        async with await open_journal(self.settings.database, SystemClock()) as journal:
            (floor,) = [each.floor for each in await journal.streams() if each.stream == self.settings.stream]
            batches = [batch async for batch in replay(journal, self.settings.stream, floor)]
        return [facts.decode(fact) for batch in batches for fact in batch.facts]


def runs_module(pid: int, module: str, rank: str) -> bool:
    """Whether a process runs this module, as this rank if one is named. A rank has a name of its own: it is forked, and
    shows the command line of its parent."""
    try:
        words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
        name = Path(f"/proc/{pid}/comm").read_text(encoding="utf-8").strip()
    except OSError:
        return False
    if module == fault_injection.MODULES["rank"]:
        return name.startswith(f"strata-rank-{rank}")
    return module.encode() in words


async def until(holds: Callable[[], object]) -> None:
    """Of other processes only this can be seen: what is there now."""
    while not holds():  # noqa: ASYNC110 - nobody tells
        await asyncio.sleep(LOOK_S)


async def gone(pids: Sequence[int]) -> list[int]:
    """Those that are not, after some patience."""
    with suppress(TimeoutError):
        async with asyncio.timeout(GONE_S):
            await until(lambda: not any(map(_is_running, pids)))
    return [*filter(_is_running, pids)]


def _is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@asynccontextmanager
async def serving(
    folder: Path,
    model: Path,
    ranks: RankGroup,
    *,
    snapshots: str = NO_SNAPSHOTS,
    options: ServeOptions = DEFAULT_OPTIONS,
) -> AsyncIterator[ServeProcess]:
    with reserve_port() as reserved:
        server = ServeProcess(folder, model, port_of(reserved), ranks, snapshots, options)
        if options.journal is not None:
            shutil.copytree(options.journal, server.settings.data, ignore=shutil.ignore_patterns(*NOT_COPIED))
        try:
            await server.start()
            yield server
        finally:
            await server.stop()
