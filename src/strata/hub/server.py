"""The hub as a process: opens listeners, prints its addresses at start, raises the limit of open files (65,536), ticks,
and shuts down gracefully.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import socket
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import uvicorn

from strata.base import log
from strata.base.clock import Clock, SystemClock
from strata.base.errors import StrataError
from strata.base.loop import every
from strata.base.private import set_private_umask
from strata.base.settings import process_environment
from strata.base.support import report_experimental
from strata.base.unix_socket import format_unix_address, listen_unix
from strata.http import otel
from strata.http.protocol import new_protocol
from strata.http.server import listen, new_loop, serve_http, server_config, stop_on_signals, url_of
from strata.hub.compose import TOKEN_FILE, Hub, open_hub
from strata.hub.settings import HubSettings, check_exposure

OPEN_FILES = 65_536
_log = log.get(__name__)


def run(settings: HubSettings, announce: Callable[[str], None]) -> None:
    """Run the hub until SIGTERM or SIGINT. `announce` is told, for people, where the hub listens."""
    check_exposure(settings)
    set_private_umask()
    _allow_files()
    gc.collect()
    gc.freeze()
    stop_traces = otel.configure("strata-hub", process_environment())
    try:
        with asyncio.Runner(loop_factory=new_loop) as runner:
            runner.run(_serve(settings, SystemClock(), announce))
    finally:
        stop_traces()


async def _serve(settings: HubSettings, clock: Clock, announce: Callable[[str], None]) -> None:
    stop = stop_on_signals()
    async with open_hub(settings, clock) as hub:
        with listening(settings) as listeners:
            announce(_announcement(settings, listeners.url, hub.context.authority.pin))
            await serve(hub, settings, clock, listeners, stop)


@dataclass(frozen=True)
class Listeners:
    sockets: Sequence[socket.socket]
    url: str
    """The URL for SDKs and browsers, and with TLS for other machines."""
    address: str
    """The address of the Unix socket."""


@contextlib.contextmanager
def listening(settings: HubSettings) -> Iterator[Listeners]:
    """Listen on TCP, and on the Unix socket in the data folder."""
    free_port = f"--listen {settings.listen.rpartition(':')[0]}:0"
    with listen(settings.listen, free_port=free_port) as tcp, listen_unix(settings.socket) as unix:
        try:
            yield Listeners((tcp, unix), url_of(tcp, tls=settings.tls.enabled), format_unix_address(settings.socket))
        finally:
            settings.socket.unlink(missing_ok=True)


async def serve(hub: Hub, settings: HubSettings, clock: Clock, listeners: Listeners, stop: asyncio.Event) -> None:
    """Answer on these sockets until `stop`, then let the requests finish that are under way."""
    hub.context.served.url = listeners.url
    report_experimental()
    looping = [
        asyncio.create_task(
            every(
                each.interval_s, each.run_once, clock=clock, max_backoff_s=each.max_backoff_s, max_share=each.max_share
            )
        )
        for each in hub.loops
    ]

    def leaving() -> None:
        hub.context.stopping.set()
        hub.context.feed.wake_listeners()

    try:
        await serve_http(_config(hub, settings), listeners.sockets, stop, leaving=leaving)
        # Heartbeats since the last tick would be lost otherwise.
        with contextlib.suppress(StrataError):
            await hub.context.fleet.hosts.flush_heartbeats()
        _log.info("hub_stopped")
    finally:
        for task in looping:
            task.cancel()
        await asyncio.wait(looping)


def _config(hub: Hub, settings: HubSettings) -> uvicorn.Config:
    return server_config(
        hub.app,
        new_protocol(settings.header_s, send_s=settings.send_s),
        max_connections=settings.max_connections,
        drain_s=settings.drain_s,
        tls=None if hub.tls is None else hub.tls.context,
    )


def _announcement(settings: HubSettings, url: str, pin: str) -> str:
    # What `strata login` asks a person to compare.
    shown = f", pin {pin}" if settings.tls.enabled else ""
    where = "" if settings.operator_token else f", operator token in {settings.files / TOKEN_FILE}"
    return f"listening on {url} and {format_unix_address(settings.socket)}{where}{shown}, dashboard {url}/"


def _allow_files() -> None:
    """A connection is an open file; what is allowed by default is often a thousand."""
    if sys.platform != "win32":
        import resource

        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        wanted = OPEN_FILES if hard == resource.RLIM_INFINITY else min(OPEN_FILES, hard)
        if soft != resource.RLIM_INFINITY and soft < wanted:
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
