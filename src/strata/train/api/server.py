"""The API server as a process: listens, answers, and ends gracefully when told to."""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import signal
import socket
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from typing import Any, Final

import uvicorn

from strata.base import log
from strata.base.clock import Clock, SystemClock
from strata.base.errors import Code, StrataError
from strata.base.ids import Ids
from strata.identity.authenticate import Authenticator
from strata.train.api.app import application
from strata.train.api.identity import first_key, open_identity, operator_token
from strata.train.api.protocol import PatientProtocol
from strata.train.api.root import Root
from strata.train.api.site import ANSWER_S, Orchestrator, Site
from strata.train.api.table import TABLE
from strata.train.link import OrchestratorClient, publish_address
from strata.train.payload import Payloads
from strata.train.settings import ServerSettings

ADDRESS_FILE: Final = "api.address"
"""In the data folder: where the server listens, for whoever let it choose a port."""
KEEP_ALIVE_S: Final = 75
DRAIN_S: Final = 3
MAX_CONNECTIONS: Final = 4096
_log = log.get(__name__)


class APIServer:
    """HTTP in front, one link to the orchestrator behind. It can be ended and started at any time: it keeps nothing."""

    def __init__(self, settings: ServerSettings, clock: Clock, *, answer_s: float = ANSWER_S) -> None:
        check_exposure(settings.server.host)
        self._settings = settings
        self._clock = clock
        self._answer_s = answer_s

    @asynccontextmanager
    async def application(self, orchestrator: Orchestrator) -> AsyncIterator[Root]:
        settings, clock = self._settings, self._clock
        settings.data.mkdir(parents=True, exist_ok=True, mode=0o700)
        async with open_identity(settings.identity_database) as identity:
            if not settings.server.identity_database:
                await first_key(identity, clock, settings.data)
            token = settings.server.operator_token or operator_token(settings.data)
            site = Site(
                settings=settings,
                orchestrator=orchestrator,
                payloads=Payloads(settings.payloads),
                identity=identity,
                authenticator=Authenticator(identity, clock, authority=None, operator_token=token),
                clock=clock,
                ids=Ids(clock),
                answer_s=self._answer_s,
            )
            yield application(site, TABLE)

    async def serve(self, listener: socket.socket, stop: asyncio.Event, ready: Callable[[], None]) -> None:
        """Answer on this socket until `stop`. `ready` is called when everything is there that an answer needs."""
        async with (
            OrchestratorClient(self._settings) as orchestrator,
            self.application(orchestrator) as app,
        ):
            ready()
            await answer(app, listener, stop)


async def answer(app: Root, listener: socket.socket, stop: asyncio.Event) -> None:
    """HTTP on this socket until `stop`, then for a moment more, for what is under way."""
    server = _HttpServer(_config(app))
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    stopping = asyncio.create_task(stop.wait())
    try:
        await asyncio.wait([serving, stopping], return_when=asyncio.FIRST_COMPLETED)
        _log.info("stopping")
        server.should_exit = True
        await serving
    finally:
        for task in (stopping, serving):
            task.cancel()
        await asyncio.wait([stopping, serving])


def run(settings: ServerSettings, announce: Callable[[str], None]) -> None:
    """Until SIGTERM or SIGINT. `announce` is told, for people, where the server listens."""
    with asyncio.Runner(loop_factory=_new_loop) as runner:
        runner.run(_run(settings, announce))


async def _run(settings: ServerSettings, announce: Callable[[str], None]) -> None:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    server = APIServer(settings, SystemClock())
    with listen(settings.server.host, settings.server.port) as listener:

        def ready() -> None:
            publish_address(settings.data / ADDRESS_FILE, url_of(listener))
            announce(f"listening on {url_of(listener)}")

        await server.serve(listener, stop, ready)


class _HttpServer(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Signals are the process's matter, not the server's."""
        yield


def _config(app: Root) -> uvicorn.Config:
    return uvicorn.Config(
        app,
        http=PatientProtocol,
        ws="none",
        lifespan="off",
        interface="asgi3",
        log_config=None,
        access_log=False,
        # A header must not be able to say who calls, nor that the connection is encrypted.
        proxy_headers=False,
        server_header=False,
        limit_concurrency=MAX_CONNECTIONS,
        timeout_keep_alive=KEEP_ALIVE_S,
        timeout_graceful_shutdown=DRAIN_S,
    )


def check_exposure(host: str) -> None:
    """Refuse to be reached from other machines in the clear: keys and batches would be everybody's."""
    try:
        loopback = host == "localhost" or ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        loopback = False
    if not loopback:
        raise StrataError(
            Code.INVALID,
            f"{host} can be reached from other machines, and everything would be sent in the clear",
            hint="listen on 127.0.0.1, and put a proxy that speaks TLS in front",
        )


def listen(host: str, port: int) -> socket.socket:
    bare = host.strip("[]")
    try:
        family = socket.AF_INET6 if ":" in bare else socket.AF_INET
        return socket.create_server((bare, port), family=family, backlog=2048)
    except OSError as error:
        raise StrataError(
            Code.UNAVAILABLE, f"cannot listen on {host}:{port}: {error}", hint="is another process using that port?"
        ) from error


def url_of(listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    return f"http://{f'[{host}]' if ':' in host else host}:{port}"


def _new_loop() -> asyncio.AbstractEventLoop:
    if sys.platform == "win32":
        return asyncio.new_event_loop()
    import uvloop

    loop: Any = uvloop.new_event_loop()
    return loop  # type: ignore[no-any-return]
