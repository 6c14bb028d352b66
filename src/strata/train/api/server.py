"""The API server as a process: listeners, at most 4,096 connections, 3 s to drain, publication of its address to the
agent, cleaning of uploads.
"""

from __future__ import annotations

import asyncio
import hmac
import shutil
import socket
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import ExitStack, aclosing, asynccontextmanager
from pathlib import Path
from typing import Final

import msgspec

from strata.base.atomic import write_file
from strata.base.clock import Clock, SystemClock
from strata.base.ids import Ids
from strata.base.private import require_private_folder
from strata.base.settings import process_environment
from strata.base.unix_socket import format_unix_address, listen_unix
from strata.http import otel, server
from strata.http.app import BrowserPages
from strata.http.body import BodyPace
from strata.http.budget import BodyBudget
from strata.http.protocol import HEADER_S, new_protocol
from strata.http.root import RootApp
from strata.http.server import listen, new_loop, server_config, stop_on_signals, url_of
from strata.identity.authenticate import Authenticator
from strata.train.api.context import REPLY_TIMEOUT_S, ApiContext, ApiMetrics, OrchestratorPort
from strata.train.api.images import image_form
from strata.train.api.keys import load_operator_token
from strata.train.api.rollout_files import FOLDER, RolloutFiles
from strata.train.api.routes import application
from strata.train.api.template_process import TemplateRenderer
from strata.train.api.text import TextLoader
from strata.train.key_database import create_first_key, open_key_database
from strata.train.link.api import OrchestratorClient
from strata.train.link.sockets import publish_address
from strata.train.payload import Payloads
from strata.train.settings import ADDRESS_FILE, ServerSettings, check_exposure

DRAIN_S: Final = 3
MAX_CONNECTIONS: Final = 4096


MakePages = Callable[[ApiContext, asyncio.Event], BrowserPages]
"""The dashboard of a server; the event is set when the server stops."""


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
    async def application(
        self, orchestrator: OrchestratorPort, pages: MakePages | None = None, stop: asyncio.Event | None = None
    ) -> AsyncIterator[RootApp]:
        async with self.open_context(orchestrator) as context:
            made = None if pages is None else pages(context, stop or asyncio.Event())
            yield application(context, pages=made)

    @asynccontextmanager
    async def open_context(self, orchestrator: OrchestratorPort) -> AsyncIterator[ApiContext]:
        settings, clock = self._settings, self._clock
        require_private_folder(settings.data, "the server's files")
        # Uploads of a process that was killed.
        await asyncio.to_thread(_remove_uploads, settings.imports, self._number)
        await asyncio.to_thread(RolloutFiles(settings.data / FOLDER).remove_expired, clock.wall_s())
        shared = settings.server.api_servers > 1
        async with (
            open_key_database(settings.identity_database, shared=shared) as identity,
            aclosing(TemplateRenderer("templates")) as templates,
            aclosing(TemplateRenderer("grammars")) as grammars,
        ):
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
                text=TextLoader(settings.model.path),
                images=await asyncio.to_thread(image_form, settings),
                templates=templates,
                grammars=grammars,
                reply_timeout_s=self._reply_timeout_s,
                pace=self._pace,
                bodies=BodyBudget(largest=settings.server.max_body_bytes),
                metrics=ApiMetrics(self._number),
                number=self._number,
                # The same in all API servers: each accepts what another has signed.
                signing_key=hmac.digest(token.reveal().encode(), b"addresses of archives", "sha256"),
            )

    async def serve(
        self,
        listeners: Sequence[socket.socket],
        stop: asyncio.Event,
        ready: Callable[[], None],
        pages: MakePages | None = None,
    ) -> None:
        """Serve on these sockets until `stop`. `ready` is called when all that a request needs is there."""
        async with (
            OrchestratorClient(self._settings, self._number) as orchestrator,
            self.application(orchestrator, pages, stop) as app,
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


def run(
    settings: ServerSettings,
    announce: Callable[[str], None],
    *,
    number: int = 0,
    port: int | None = None,
    pages: MakePages | None = None,
) -> None:
    """Run until SIGTERM or SIGINT. `announce` gets the address where the server listens.

    `number` tells several on one port apart; `port` is the one that the launcher keeps for them. `pages` are for
    browsers, beside the API.
    """
    stop_traces = otel.configure("strata-api-server", process_environment())
    try:
        with asyncio.Runner(loop_factory=new_loop) as runner:
            runner.run(_run(settings, announce, number, settings.server.port if port is None else port, pages))
    finally:
        stop_traces()


async def _run(
    settings: ServerSettings, announce: Callable[[str], None], number: int, port: int, pages: MakePages | None
) -> None:
    stop = stop_on_signals()
    api = APIServer(settings, SystemClock(), number=number)
    with ExitStack() as stack:
        address = format_unix_address(settings.api_socket)
        listeners = []
        if settings.server.listen == "tcp":
            shared = settings.server.api_servers > 1
            place = f"{settings.server.host}:{port}"
            listeners.append(stack.enter_context(listen(place, shared=shared, free_port="server.port = 0")))
            address = url_of(listeners[0])
        if number == 0:
            # Processes can share a port, but not a Unix socket.
            require_private_folder(settings.sockets, "the sockets")
            listeners.append(stack.enter_context(listen_unix(settings.api_socket)))

        def ready() -> None:
            publish_address(settings.data / ADDRESS_FILE, address)
            if settings.server.address_file is not None and number == 0:
                _publish_to_agent(settings, settings.server.address_file)
            announce(address)

        await api.serve(listeners, stop, ready, pages)


def _publish_to_agent(settings: ServerSettings, file: Path) -> None:
    names = dict.fromkeys((settings.model.base_model, settings.model.public_name))
    address = {"address": format_unix_address(settings.api_socket), "models": list(names)}
    write_file(file, msgspec.json.encode(address), durable=False)


def _remove_uploads(imports: Path, number: int) -> None:
    for folder in imports.glob(f"{number}.*"):
        shutil.rmtree(folder, ignore_errors=True)
