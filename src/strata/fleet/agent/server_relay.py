"""Relays a hub on another machine to a server's Unix socket over mutual TLS: which certificate it accepts, handshake
timeout 10 s, 1,024 connections.

It listens with TLS, shows the certificate that the hub's authority has given to this host, and accepts one peer alone:
the hub, by a certificate that no host has. Then it passes bytes on. It authenticates machines; whose request it is, the
hub says to the server with the key of the attempt.
"""

from __future__ import annotations

import asyncio
import os
import socket
import ssl
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Self
from urllib.parse import urlsplit

from strata.base import log
from strata.base.errors import Code, StrataError
from strata.base.unix_socket import open_socket
from strata.fleet.client.hub_client import TlsFiles

SCHEME: Final = "tls://"
HUB_NAME: Final = ("URI", "strata://hub")
"""The name in the certificate of the hub, as `strata.identity.ca` makes it."""
HANDSHAKE_S: Final = 10.0
MAX_CONNECTIONS: Final = 1024
_PIECE: Final = 256 * 1024
_log = log.get(__name__)


@dataclass(frozen=True, slots=True)
class RelayTarget:
    """A socket in the data folder of a server. The server may replace it, and lead to no other one."""

    folder: Path
    inside: str


class ServerRelay:
    """Made by `open`, for one target."""

    def __init__(self, files: TlsFiles, target: RelayTarget) -> None:
        self.target = target
        self.address = ""
        """Where the hub reaches the target."""
        self._files = files
        self._context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self._context.minimum_version = ssl.TLSVersion.TLSv1_2
        self._context.verify_mode = ssl.CERT_REQUIRED
        self._loaded = 0
        self._server: asyncio.Server | None = None
        self._connections: set[asyncio.Task[None]] = set()

    @classmethod
    async def open(cls, files: TlsFiles, target: RelayTarget, host: str) -> Self:
        """A relay that listens on a free port of this address."""
        relay = cls(files, target)
        try:
            relay._context.load_verify_locations(files.ca)
            relay.reload()
            relay._server = await asyncio.start_server(
                relay._accept, host, 0, ssl=relay._context, ssl_handshake_timeout=HANDSHAKE_S
            )
        except OSError as error:
            raise StrataError(
                Code.UNAVAILABLE,
                f"the hub cannot reach servers of this host at {host}: {error}",
                hint="set agent.advertise to an address of this host that the hub reaches",
            ) from error
        port = relay._server.sockets[0].getsockname()[1]
        relay.address = f"{SCHEME}[{host}]:{port}" if ":" in host else f"{SCHEME}{host}:{port}"
        return relay

    def reload(self) -> None:
        """Show the certificate that is there now: it is renewed every few hours."""
        certificate = self._files.certificate
        assert certificate is not None, "a relay shows a certificate"
        written_ns = certificate.stat().st_mtime_ns
        if written_ns != self._loaded:
            self._context.load_cert_chain(certificate, self._files.key)
            self._loaded = written_ns

    async def close(self) -> None:
        if self._server is not None:
            self._server.close()
        for connection in self._connections:
            connection.cancel()
        if self._connections:
            await asyncio.wait(self._connections)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None, "asyncio calls this in a task"
        self._connections.add(task)
        task.add_done_callback(self._connections.discard)
        try:
            if not is_hub(writer.get_extra_info("peercert")):
                _log.warning("relay_peer_refused", peer=str(writer.get_extra_info("peername")))
            elif len(self._connections) <= MAX_CONNECTIONS:
                await self._relay(reader, writer)
        except OSError as error:
            # The server has just ended, or a peer is gone: the hub sees the end of the connection.
            _log.debug("relay_connection_ended", reason=str(error))
        finally:
            writer.close()

    async def _relay(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        descriptor = open_socket(self.target.folder, self.target.inside)
        try:
            from_server, to_server = await asyncio.open_unix_connection(f"/proc/self/fd/{descriptor}")
        finally:
            os.close(descriptor)
        passing = [asyncio.create_task(_pass_on(reader, to_server)), asyncio.create_task(_pass_on(from_server, writer))]
        try:
            # HTTP needs no half-closed connections: the end of one direction is the end of both.
            await asyncio.wait(passing, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in passing:
                task.cancel()
            await asyncio.wait(passing)
            to_server.close()


async def _pass_on(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with suppress(OSError):
        while piece := await reader.read(_PIECE):
            writer.write(piece)
            await writer.drain()


def is_hub(certificate: Any) -> bool:
    """Says whether the peer's certificate, which TLS has verified, is the hub's."""
    return bool(certificate) and HUB_NAME in certificate.get("subjectAltName", ())


def own_address(hub_url: str) -> str:
    """The address of this host from which it reaches its hub. Nothing is sent."""
    hub = urlsplit(hub_url)
    try:
        found = socket.getaddrinfo(hub.hostname, hub.port or 443, type=socket.SOCK_DGRAM)
        family, kind, protocol, _, address = found[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.connect(address)
            return str(probe.getsockname()[0])
    except OSError as error:
        raise StrataError(
            Code.UNAVAILABLE, f"the way to the hub {hub.hostname} is not known: {error}", hint="set agent.advertise"
        ) from error
