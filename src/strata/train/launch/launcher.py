"""`Launcher`: ranks, orchestrator, API server, in this order; the other way round at the end.

Each says itself that it is ready: rank 0 by answering the orchestrator, the others through a pipe. Whatever dies is
started again alone. An API server and an orchestrator have nothing that is lost with them, and the ranks do not notice;
ranks that start anew restore the last snapshot, and the orchestrator tells them what came after it.
"""

from __future__ import annotations

import asyncio
import signal
import socket
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final

from strata.base import log
from strata.base.clock import Clock
from strata.base.errors import Code, StrataError
from strata.base.ids import Ids
from strata.train.launch import commands
from strata.train.launch.child import Child
from strata.train.launch.preflight import check_memory, check_model
from strata.train.link_keys import make_keys, read_keys
from strata.train.settings import ServerSettings, check_exposure

FREE_PORT: Final = "another process may have that port; server.port = 0 takes a free one"
STOP_S: Final = 15.0
"""How long each process may take to end."""
RANKS_S: Final = 5.0
"""How long the ranks may take to end by themselves before they are made to."""
START_S: Final = 60.0
"""How long orchestrator and API server may take to be there."""

_log = log.get(__name__)


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
            self._ranks = Child(commands.ranks(settings, file, environment), clock, lambda _: None)
        self._orchestrator = Child(commands.orchestrator(file, holder, environment), clock, self._hear_orchestrator)
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

        child = Child(commands.api_server(self._file, self._environment, number, port), self._clock, hear)
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
