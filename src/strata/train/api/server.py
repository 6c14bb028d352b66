"""The API server as a process: listeners, the link to the orchestrator, and a graceful shutdown."""

from __future__ import annotations

import asyncio
import hmac
import shutil
import socket
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import ExitStack, asynccontextmanager
from pathlib import Path
from typing import Final

import msgspec

from strata.base.atomic import write_file
from strata.base.clock import Clock, SystemClock
from strata.base.ids import Ids
from strata.base.private import require_private_folder
from strata.base.unix_socket import format_unix_address, listen_unix
from strata.http import server
from strata.http.body import BodyPace
from strata.http.budget import BodyBudget
from strata.http.protocol import HEADER_S, new_protocol
from strata.http.root import RootApp
from strata.http.server import listen, new_loop, server_config, stop_on_signals, url_of
from strata.identity.authenticate import Authenticator
from strata.train.api.context import REPLY_TIMEOUT_S, ApiContext, OrchestratorPort, RequestMetrics
from strata.train.api.keys import create_first_key, load_operator_token, open_key_database
from strata.train.api.routes import application
from strata.train.link.api import OrchestratorClient
from strata.train.link.sockets import publish_address
from strata.train.payload import Payloads
from strata.train.settings import ServerSettings, check_exposure

ADDRESS_FILE: Final = "api.address"
"""In the data folder: where the server listens, also when it has chosen the port itself."""
DRAIN_S: Final = 3
MAX_CONNECTIONS: Final = 4096


class APIServer:
    """Serves HTTP by one link to the orchestrator. It has no state of its own, so it can be restarted at any time."""

    def __init__(
        self,
        settings: ServerSettings,
        clock: Clock,
        *,
        number: int = 0,
        reply_timeout_s: float = REPLY_TIMEOUT_S,
        header_s: float = HEADER_S,
        pace: BodyPace | None = None,
    ) -> None:
        check_exposure(settings.server.host)
        self._settings = settings
        self._number = number
        self._clock = clock
        self._reply_timeout_s = reply_timeout_s
        self._header_s = header_s
        self._pace = pace or BodyPace()

    @asynccontextmanager
    async def application(self, orchestrator: OrchestratorPort) -> AsyncIterator[RootApp]:
        async with self.open_context(orchestrator) as context:
            yield application(context)

    @asynccontextmanager
    async def open_context(self, orchestrator: OrchestratorPort) -> AsyncIterator[ApiContext]:
        settings, clock = self._settings, self._clock
        require_private_folder(settings.data, "the server's files")
        # Uploads of a process that was killed.
        await asyncio.to_thread(_remove_uploads, settings.imports, self._number)
        shared = settings.server.api_servers > 1
        async with open_key_database(settings.identity_database, shared=shared) as identity:
            if not settings.server.identity_database:
                await create_first_key(identity, clock, settings.data)
            token = settings.server.operator_token or load_operator_token(settings.data)
            yield ApiContext(
                settings=settings,
                orchestrator=orchestrator,
                payloads=Payloads(settings.payloads),
                identity=identity,
                authenticator=Authenticator(identity, clock, authority=None, operator_token=token),
                clock=clock,
                ids=Ids(clock),
                reply_timeout_s=self._reply_timeout_s,
                pace=self._pace,
                bodies=BodyBudget(largest=settings.server.max_body_bytes),
                requests=RequestMetrics(self._number),
                number=self._number,
                # The same in all API servers: each accepts what another has signed.
                signing_key=hmac.digest(token.reveal().encode(), b"addresses of archives", "sha256"),
            )

    async def serve(self, listeners: Sequence[socket.socket], stop: asyncio.Event, ready: Callable[[], None]) -> None:
        """Serve on these sockets until `stop`. `ready` is called when all that a request needs is there."""
        async with (
            OrchestratorClient(self._settings, self._number) as orchestrator,
            self.application(orchestrator) as app,
        ):
            ready()
            await serve_app(app, listeners, stop, header_s=self._header_s)


async def serve_app(
    app: RootApp, listeners: Sequence[socket.socket], stop: asyncio.Event, *, header_s: float = HEADER_S
) -> None:
    """HTTP on these sockets until `stop`, then for a moment more, for what is under way."""
    # A head that does not come gets no reply: to clients of this protocol a 408 says that a result is not there yet.
    http = new_protocol(header_s, timeout_reply=b"")
    await server.serve_http(server_config(app, http, max_connections=MAX_CONNECTIONS, drain_s=DRAIN_S), listeners, stop)


def run(settings: ServerSettings, announce: Callable[[str], None], *, number: int = 0, port: int | None = None) -> None:
    """Until SIGTERM or SIGINT. `announce` gets a line for people that says where the server listens.

    `number` tells several on one port apart; `port` is the one that the launcher keeps for them.
    """
    with asyncio.Runner(loop_factory=new_loop) as runner:
        runner.run(_run(settings, announce, number, settings.server.port if port is None else port))


async def _run(settings: ServerSettings, announce: Callable[[str], None], number: int, port: int) -> None:
    stop = stop_on_signals()
    api = APIServer(settings, SystemClock(), number=number)
    with ExitStack() as stack:
        shared = settings.server.api_servers > 1
        tcp = stack.enter_context(listen(f"{settings.server.host}:{port}", shared=shared, free_port="server.port = 0"))
        listeners = [tcp]
        if number == 0:
            # Processes can share a port, but not a Unix socket.
            require_private_folder(settings.sockets, "the sockets")
            listeners.append(stack.enter_context(listen_unix(settings.api_socket)))

        def ready() -> None:
            publish_address(settings.data / ADDRESS_FILE, url_of(tcp))
            if settings.server.address_file is not None and number == 0:
                _publish_to_agent(settings, settings.server.address_file)
            announce(f"listening on {url_of(tcp)}")

        await api.serve(listeners, stop, ready)


def _publish_to_agent(settings: ServerSettings, file: Path) -> None:
    names = dict.fromkeys((settings.model.base_model, settings.model.public_name))
    address = {"address": format_unix_address(settings.api_socket), "models": list(names)}
    write_file(file, msgspec.json.encode(address), durable=False)


def _remove_uploads(imports: Path, number: int) -> None:
    for folder in imports.glob(f"{number}.*"):
        shutil.rmtree(folder, ignore_errors=True)
