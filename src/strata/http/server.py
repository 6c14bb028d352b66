"""Runs an HTTP server: listeners, uvicorn's options, keep-alive (75 s), signals, graceful shutdown."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import signal
import socket
import ssl
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final

import uvicorn
from starlette.types import ASGIApp

from strata.base import log
from strata.base.errors import Code, StrataError
from strata.base.unix_socket import BACKLOG
from strata.http.protocol import LimitedProtocol

KEEP_ALIVE_S: Final = 75
"""Longer than the pause between two heartbeats: a host keeps its connection, and its TLS session with it."""
_log = log.get(__name__)


class HttpServer(uvicorn.Server):
    """Serves on TCP, with TLS if the configuration has it, and on Unix sockets without."""

    def __init__(self, config: uvicorn.Config, unix: Sequence[socket.socket] = ()) -> None:
        super().__init__(config)
        self._unix = unix

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        # Not through uvicorn, which would wait a minute for a TLS handshake.
        await super().startup([])
        loop, tls, protocol = asyncio.get_running_loop(), self.config.ssl, self.config.http_protocol_class
        assert issubclass(protocol, LimitedProtocol)
        handshake_s = None if tls is None else protocol.header_s
        for listener in sockets or ():
            self.servers.append(
                await loop.create_server(
                    self._new_connection, sock=listener, backlog=BACKLOG, ssl=tls, ssl_handshake_timeout=handshake_s
                )
            )
        for listener in self._unix:
            # Not create_unix_server: Python 3.13 would stat the name that the socket was bound by, which is gone.
            self.servers.append(await loop.create_server(self._new_connection, sock=listener, backlog=BACKLOG))

    def _new_connection(self) -> asyncio.Protocol:
        protocol: asyncio.Protocol = self.config.http_protocol_class(  # type: ignore[call-arg]
            config=self.config, server_state=self.server_state, app_state=self.lifespan.state
        )
        return protocol

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Signals are the process's matter, not the server's."""
        yield


def server_config(
    app: ASGIApp,
    protocol: type[LimitedProtocol],
    *,
    max_connections: int,
    drain_s: float,
    tls: ssl.SSLContext | None = None,
) -> uvicorn.Config:
    """`drain_s` is how long requests in flight may take when the server stops."""
    return uvicorn.Config(
        app,
        http=protocol,
        ws="none",
        lifespan="off",
        interface="asgi3",
        log_config=None,
        access_log=False,
        # A header must not be able to claim an identity, nor that the connection is encrypted.
        proxy_headers=False,
        server_header=False,
        limit_concurrency=max_connections,
        timeout_keep_alive=KEEP_ALIVE_S,
        timeout_graceful_shutdown=max(1, round(drain_s)),
        ssl_context_factory=None if tls is None else lambda _config, _default: tls,
    )


async def serve_http(
    config: uvicorn.Config,
    listeners: Sequence[socket.socket],
    stop: asyncio.Event,
    *,
    leaving: Callable[[], None] | None = None,
) -> None:
    """Serve on these sockets until `stop`, then call `leaving` and drain the requests in flight."""
    unix = [each for each in listeners if each.family == socket.AF_UNIX]
    server = HttpServer(config, unix)
    serving = asyncio.create_task(server.serve(sockets=[each for each in listeners if each not in unix]))
    stopping = asyncio.create_task(stop.wait())
    try:
        await asyncio.wait([serving, stopping], return_when=asyncio.FIRST_COMPLETED)
        _log.info("stopping")
        if leaving is not None:
            leaving()
        server.should_exit = True
        await serving
    finally:
        for task in (stopping, serving):
            task.cancel()
        await asyncio.wait([stopping, serving])


def listen(address: str, *, shared: bool = False, free_port: str = "") -> socket.socket:
    """`address` is HOST:PORT; port 0 takes a free one. On a `shared` one several processes can listen.

    `free_port` is the option or setting that takes a free port, for the hint.
    """
    host, _, port = address.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        return socket.create_server((host, int(port)), family=family, backlog=BACKLOG, reuse_port=shared)
    except (OSError, ValueError, OverflowError) as error:
        taken = isinstance(error, OSError) and error.errno == errno.EADDRINUSE
        reason = "another process has that port" if taken else error
        hint = f"{free_port} takes a free one" if taken and free_port else None
        raise StrataError(Code.UNAVAILABLE, f"cannot listen on {address}: {reason}", hint=hint) from error


def url_of(listener: socket.socket, *, tls: bool = False) -> str:
    host, port = listener.getsockname()[:2]
    return f"{'https' if tls else 'http'}://{f'[{host}]' if ':' in host else host}:{port}"


def stop_on_signals() -> asyncio.Event:
    """Set by SIGTERM or SIGINT."""
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    return stop


def new_loop() -> asyncio.AbstractEventLoop:
    if sys.platform == "win32":
        return asyncio.new_event_loop()
    import uvloop

    loop: Any = uvloop.new_event_loop()
    return loop  # type: ignore[no-any-return]
