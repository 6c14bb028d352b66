"""`Launcher`: ranks, orchestrator, API server, in this order; the other way round at the end.

Each says itself that it is ready: rank 0 by answering the orchestrator, the others through a pipe. Whatever dies is
started again alone. An API server and an orchestrator have nothing that is lost with them, and the ranks do not notice;
ranks that start anew restore the last snapshot, and the orchestrator tells them what came after it.
"""

from __future__ import annotations

import asyncio
import signal
import socket
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final

from strata.base import log
from strata.base.clock import Clock, SystemClock
from strata.base.errors import Code, StrataError
from strata.base.ids import Ids
from strata.base.private import require_private_folder, set_private_umask
from strata.base.settings import process_environment
from strata.train.folder import held
from strata.train.launch.preflight import check_memory, check_model
from strata.train.launch.supervised_process import EVENTS, Child, Command
from strata.train.link.keys import make_keys, read_keys
from strata.train.settings import ServerSettings, check_exposure

FREE_PORT: Final = "another process may have that port; server.port = 0 takes a free one"
STOP_S: Final = 15.0
"""How long each process may take to end."""
RANKS_S: Final = 5.0
"""How long the ranks may take to end by themselves before they are made to."""
START_S: Final = 60.0
"""How long orchestrator and API server may take to be there."""

_SECRETS: Final = frozenset(
    {"STRATA_SERVER_OPERATOR_TOKEN", "STRATA_SERVER_DATABASE", "STRATA_SERVER_IDENTITY_DATABASE"}
)
"""Variables that may hold a password or a token: only a process that needs one gets it."""

_log = log.get(__name__)


def run_launcher(settings: ServerSettings, file: Path, announce: Callable[[str], None]) -> None:
    set_private_umask()
    asyncio.run(_run_until_signal(settings, file.absolute(), announce))


async def _run_until_signal(settings: ServerSettings, file: Path, announce: Callable[[str], None]) -> None:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    require_private_folder(settings.data, "the server's files")
    with held(settings.data):
        await Launcher(settings, file, process_environment(), SystemClock()).run(stop, announce)


class Launcher:
    def __init__(self, settings: ServerSettings, file: Path, environment: Mapping[str, str], clock: Clock) -> None:
        self._settings = settings
        self._clock = clock
        holder = Ids(clock).new("launcher")
        self._attached = asyncio.Event()
        self._leading = asyncio.Event()
        self._address = ""
        self._file = file
        self._environment = environment
        self._ranks: Child | None = None
        if settings.ranks.mode == "auto":
            self._ranks = Child(rank_command(settings, file, environment), clock, lambda _: None)
        self._orchestrator = Child(orchestrator_command(file, holder, environment), clock, self._hear_orchestrator)
        self._api_servers: list[Child] = []
        self._keeping: list[asyncio.Task[None]] = []

    async def run(self, stop: asyncio.Event, announce: Callable[[str], None]) -> None:
        """Until told to stop. `announce` is told, for people, where the server listens."""
        self._prepare()
        guard = _keep_port(self._settings)
        stopping = asyncio.create_task(stop.wait())
        starting = asyncio.create_task(self._start(None if guard is None else int(guard.getsockname()[1])))
        try:
            await asyncio.wait([stopping, starting], return_when=asyncio.FIRST_COMPLETED)
            if starting.done():
                announce(starting.result())
                await asyncio.wait([stopping, *self._keeping], return_when=asyncio.FIRST_COMPLETED)
                for task in self._keeping:
                    if task.done():
                        task.result()
        finally:
            stopping.cancel()
            starting.cancel()
            await self._stop()
            if guard is not None:
                guard.close()

    def _prepare(self) -> None:
        settings = self._settings
        check_exposure(settings.server.host)
        # It is free now, or nothing is loaded for it: the API servers come last.
        _bound(settings).close()
        # An address that cannot be is said here, once, and not by each process that would listen there.
        _log.debug("links", requests=settings.requests, outputs=settings.outputs)
        over_tcp = settings.server.transport == "tcp" or settings.rank0.startswith(("tcp:", "file:"))
        if settings.ranks.mode == "auto":
            check_model(settings)
            check_memory(settings)
            if over_tcp:
                make_keys(settings.keys)
        elif over_tcp:
            # Whoever starts the ranks has a copy of them.
            read_keys(settings.keys)

    async def _start(self, port: int | None) -> str:
        if self._ranks is not None:
            self._keep(self._ranks)
        self._keep(self._orchestrator)
        await self._within(self._leading, START_S, "the orchestrator does not lead its journal")
        _log.info("waiting for the ranks", mode=self._settings.ranks.mode)
        await self._within(self._attached, self._settings.ranks.start_timeout_s, "the ranks are not there")
        # One after the other: the first makes the tables and the first key.
        for number in range(self._settings.server.api_servers):
            await self._start_api_server(number, port)
        return self._address

    async def _start_api_server(self, number: int, port: int | None) -> None:
        listening = asyncio.Event()

        def hear(event: str) -> None:
            word, _, address = event.partition(" ")
            if word == "ready":
                child.proven = True
                self._address = address
                listening.set()

        child = Child(api_server_command(self._file, self._environment, number, port), self._clock, hear)
        self._api_servers.append(child)
        self._keep(child)
        await self._within(listening, START_S, f"the {child.command.name} does not listen")

    def _keep(self, child: Child) -> None:
        self._keeping.append(asyncio.create_task(child.keep(), name=child.command.name))

    async def _within(self, event: asyncio.Event, limit_s: float, otherwise: str) -> None:
        """What a start waits for; over, too, if a process can never come."""
        waiting = asyncio.create_task(event.wait())
        try:
            await asyncio.wait([waiting, *self._keeping], timeout=limit_s, return_when=asyncio.FIRST_COMPLETED)
        finally:
            waiting.cancel()
        for task in self._keeping:
            if task.done():
                task.result()
        if not event.is_set():
            raise StrataError(Code.DEADLINE, f"{otherwise} after {limit_s:g} seconds", hint="the log above may say why")

    def _hear_orchestrator(self, event: str) -> None:
        word, _, group = event.partition(" ")
        match word:
            case "leading":
                self._orchestrator.proven = True
                self._leading.set()
            case "attached":
                if self._ranks is not None:
                    self._ranks.proven = True
                self._attached.set()
            case "stuck":
                if self._ranks is None:
                    _log.error("the ranks are stuck: whoever started them has to start them again", group=group)
                else:
                    _log.error("the ranks are stuck and are started again", group=group)
                    self._ranks.kill()
            case "lost":
                # They are dead, or about to be: torchrun ends the others when one is gone, and `keep` notices.
                pass
            case _:
                _log.warning("the orchestrator said something unknown", said=event)

    async def _stop(self) -> None:
        _log.info("stopping")
        await asyncio.gather(*(child.stop(STOP_S) for child in self._api_servers))
        if self._ranks is None:
            await self._orchestrator.stop(STOP_S)
        else:
            # It tells the ranks to end; they do so as soon as they have done what they are at.
            self._ranks.let_end()
            await self._orchestrator.stop(STOP_S, signal.SIGUSR1)
            await self._ranks.stop(STOP_S, after_s=RANKS_S)
        for task in self._keeping:
            task.cancel()
        if self._keeping:
            await asyncio.wait(self._keeping)
        _log.info("stopped")


def _keep_port(settings: ServerSettings) -> socket.socket | None:
    """A bound socket that never listens, so that several API servers get the same port, also after a restart. One that
    is alone takes its port itself."""
    return None if settings.server.api_servers == 1 else _bound(settings)


def _bound(settings: ServerSettings) -> socket.socket:
    """A socket on the server's port that shares it with listeners which share it too, and does not listen."""
    server = settings.server
    host = server.host.strip("[]")
    guard = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
    try:
        for option in (socket.SO_REUSEADDR, socket.SO_REUSEPORT):
            guard.setsockopt(socket.SOL_SOCKET, option, 1)
        guard.bind((host, server.port))
    except OSError as error:
        guard.close()
        raise StrataError(
            Code.UNAVAILABLE, f"cannot listen on {server.host}:{server.port}: {error}", hint=FREE_PORT
        ) from error
    return guard


def rank_command(settings: ServerSettings, file: Path, environment: Mapping[str, str]) -> Command:
    """All ranks of this machine under torchrun. It does not restart them itself: the launcher starts all of it anew."""
    given = {
        "OMP_NUM_THREADS": str(settings.ranks.threads),
        # The model is a local folder or in the local cache: nothing is fetched while a server starts.
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }
    if sys.platform == "linux":
        # One machine: what the ranks say to each other stays on it.
        given |= {"GLOO_SOCKET_IFNAME": "lo", "TP_SOCKET_IFNAME": "lo"}
    arguments = (sys.executable, "-m", "strata.train.runner.single_node", "--settings", str(file))
    return Command("ranks", arguments, _without(environment, _SECRETS) | given)


def orchestrator_command(file: Path, holder: str, environment: Mapping[str, str]) -> Command:
    """Under the launcher's name: the next one need not wait for the lease of one that is known to be dead."""
    module = ("-m", "strata.train.orchestrator", "--settings", str(file))
    arguments = (sys.executable, *module, "--events-fd", EVENTS, "--holder", holder)
    return Command("orchestrator", arguments, _without(environment, _SECRETS - {"STRATA_SERVER_DATABASE"}))


def api_server_command(file: Path, environment: Mapping[str, str], number: int = 0, port: int | None = None) -> Command:
    arguments = [sys.executable, "-m", "strata.train.api", "--settings", str(file), "--ready-fd", EVENTS]
    arguments += ["--number", str(number)]
    if port is not None:
        arguments += ["--port", str(port)]
    name = f"API server {number}" if number else "API server"
    return Command(name, arguments, _without(environment, {"STRATA_SERVER_DATABASE"}))


def _without(environment: Mapping[str, str], names: frozenset[str] | set[str]) -> dict[str, str]:
    return {name: value for name, value in environment.items() if name not in names}
