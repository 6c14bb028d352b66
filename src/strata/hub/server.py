"""The hub as a process: listens, ticks, and ends gracefully when told to."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import signal
import socket
import sys
from collections.abc import Callable, Iterator
from typing import Any

import uvicorn

from strata.base import log
from strata.base.clock import Clock, SystemClock
from strata.base.errors import Code, StrataError
from strata.base.loop import every
from strata.hub.compose import TOKEN_FILE, Hub, open_hub
from strata.hub.protocol import protocol
from strata.hub.settings import HubSettings, check_exposure

KEEP_ALIVE_S = 75
"""Longer than the pause between two heartbeats: a host keeps its connection, and its TLS session with it."""
OPEN_FILES = 65_536
_log = log.get(__name__)


def run(settings: HubSettings, announce: Callable[[str], None]) -> None:
    """Until SIGTERM or SIGINT. `announce` is told, for people, where the hub listens."""
    check_exposure(settings)
    _allow_files()
    gc.collect()
    gc.freeze()
    with asyncio.Runner(loop_factory=_new_loop) as runner:
        runner.run(_serve(settings, SystemClock(), announce))


async def _serve(settings: HubSettings, clock: Clock, announce: Callable[[str], None]) -> None:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    async with open_hub(settings, clock) as hub:
        with listen(settings.listen) as listener:
            announce(_told(settings, listener))
            await serve(hub, settings, clock, listener, stop)


async def serve(hub: Hub, settings: HubSettings, clock: Clock, listener: socket.socket, stop: asyncio.Event) -> None:
    """Answer on this socket until `stop`, then let the requests finish that are under way."""
    server = HttpServer(_config(hub, settings))
    looping = [
        asyncio.create_task(every(each.interval_s, each.run_once, clock=clock, max_backoff_s=each.max_backoff_s))
        for each in hub.loops
    ]
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    stopping = asyncio.create_task(stop.wait())
    try:
        await asyncio.wait([serving, stopping], return_when=asyncio.FIRST_COMPLETED)
        _log.info("stopping")
        hub.site.stopping.set()
        hub.site.feed.wake()
        server.should_exit = True
        await serving
        # What was heard since the last tick would be forgotten otherwise.
        with contextlib.suppress(StrataError):
            await hub.site.fleet.flush_beats()
        _log.info("stopped")
    finally:
        for task in (*looping, stopping, serving):
            task.cancel()
        await asyncio.wait([*looping, stopping, serving])


class HttpServer(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Signals are the process's matter, not the server's."""
        yield


def _config(hub: Hub, settings: HubSettings) -> uvicorn.Config:
    tls = hub.tls
    return uvicorn.Config(
        hub.app,
        http=protocol(settings.header_s),
        ws="none",
        lifespan="off",
        interface="asgi3",
        log_config=None,
        access_log=False,
        # A header must not be able to say who calls, nor that the connection is encrypted.
        proxy_headers=False,
        server_header=False,
        limit_concurrency=settings.max_connections,
        timeout_keep_alive=KEEP_ALIVE_S,
        timeout_graceful_shutdown=max(1, round(settings.drain_s)),
        ssl_context_factory=None if tls is None else lambda _config, _default: tls.context,
    )


def listen(address: str) -> socket.socket:
    host, _, port = address.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        return socket.create_server((host, int(port)), family=family, backlog=2048)
    except (OSError, ValueError, OverflowError) as error:
        raise StrataError(
            Code.UNAVAILABLE, f"cannot listen on {address}: {error}", hint="is another process using that port?"
        ) from error


def url_of(settings: HubSettings, listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    scheme = "https" if settings.tls.enabled else "http"
    return f"{scheme}://{f'[{host}]' if ':' in host else host}:{port}"


def _told(settings: HubSettings, listener: socket.socket) -> str:
    where = "" if settings.operator_token else f", operator token in {settings.data.expanduser() / TOKEN_FILE}"
    return f"listening on {url_of(settings, listener)}{where}"


def _new_loop() -> asyncio.AbstractEventLoop:
    if sys.platform == "win32":
        return asyncio.new_event_loop()
    import uvloop

    loop: Any = uvloop.new_event_loop()
    return loop  # type: ignore[no-any-return]


def _allow_files() -> None:
    """A connection is an open file; what is allowed by default is often a thousand."""
    if sys.platform != "win32":
        import resource

        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        wanted = OPEN_FILES if hard == resource.RLIM_INFINITY else min(OPEN_FILES, hard)
        if soft != resource.RLIM_INFINITY and soft < wanted:
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
