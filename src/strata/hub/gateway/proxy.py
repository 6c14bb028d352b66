"""Forwards requests to training servers: connections (512), timeouts (connect 5 s, reply 180 s), body limits, passed
headers, the tenant's headers, and limits of completions.

A server trusts the hub by the key of its attempt, and takes the tenant from the hub. The caller's own credentials never
reach it. Nothing here chooses a server: `servers` does.
"""

from __future__ import annotations

import os
import re
import ssl
from collections import Counter
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Final
from urllib.parse import quote, unquote

from strata.base import trace
from strata.base.errors import Code, StrataError
from strata.base.unix_socket import open_socket, parse_unix_address
from strata.fleet.wire.leases import TLS
from strata.http.budget import BodyBudget
from strata.http.route import RawReply
from strata.http.zstd import decompress_frames
from strata.identity.roles import Role
from strata.train.api import front

if TYPE_CHECKING:
    import httpx

MAX_BODY: Final = 256 << 20
CONNECT_S: Final = 5.0
REPLY_S: Final = 180.0
"""How long a server may take for each piece of most replies; its long polls wait for half a minute."""
CONNECTIONS: Final = 512
"""Connections to one server."""
MAX_COMPLETIONS: Final = CONNECTIONS // 4
"""Completions of one tenant at a time: each has a connection to its server until its samples have ended."""
MAX_MERGED: Final = 16 << 20
"""Bytes of a reply that the hub itself reads."""
SMALL: Final = 1 << 20
"""A reply of known size up to this is read whole; a larger one is passed on piece by piece."""
TOKEN: Final = re.compile(r"token=([A-Za-z0-9_-]*)")
"""The query of a signed URL. One that can be read in two ways would be checked by one token, and fetched by another."""
_OWN_FOLDER: Final = re.compile(r"(.*?/servers/[0-9a-f]+)/(.+)")
"""The folder of a server on its host, which the server may write to, and what is inside."""
_REQUEST_HEADERS: Final = frozenset(
    {"accept", "accept-encoding", "content-encoding", "content-type", "host", "if-none-match", "range", "traceparent",
     "x-request-id"}
)  # fmt: skip
_REPLY_HEADERS: Final = frozenset(
    {"accept-ranges", "content-disposition", "content-encoding", "content-range", "etag", "retry-after",
     "x-error-code", "x-repo-commit", "x-should-retry"}
)  # fmt: skip
_BYTES: Final = "application/octet-stream"
_MEDIA_TYPES: Final = frozenset(
    {"application/json", _BYTES, "application/x-protobuf", "application/x-strata-msgpack", "application/x-tar",
     "text/event-stream", "text/plain"}
)  # fmt: skip
"""Media types that no browser takes for a page: the reply comes from the origin of the hub, where its people are logged
in."""
ARCHIVE: Final = "/api/v1/archive"
"""Where a server may send a client to."""


@dataclass(frozen=True, slots=True)
class Tenant:
    """The caller as a training server knows it: by the name of its key."""

    name: str
    role: Role
    sees_all: bool = False
    """Other tenants by name: only for what an operator of the hub reads."""
    key_id: str = ""
    """The key that the caller used: URLs that the server signs end with it."""

    def headers(self) -> dict[str, str]:
        role = min(self.role, Role.RESEARCHER)
        headers = {front.TENANT: quote(self.name, safe=""), front.ROLE: role.name.lower()}
        headers |= {front.KEY_ID: self.key_id} if self.key_id else {}
        return headers | ({front.SEES_ALL: "yes"} if self.sees_all else {})


@dataclass(frozen=True, slots=True, kw_only=True)
class ForwardedRequest:
    method: str
    target: str
    """Path and query."""
    headers: Mapping[str, str]
    content: bytes = b""
    reply_s: float = REPLY_S
    """How long the server may take for each piece of its reply."""

    @property
    def is_compressed(self) -> bool:
        return self.headers.get("content-encoding", "").lower() == "zstd"

    def unpacked(self, limit: int) -> bytes:
        """The content as it is after decompression."""
        return decompress_frames(self.content, limit) if self.is_compressed else self.content

    def with_headers(self, headers: Mapping[str, str]) -> ForwardedRequest:
        return replace(self, headers={**self.headers, **headers})


def passed_headers(headers: Mapping[str, str], *, tls: bool) -> dict[str, str]:
    """Those of the caller's headers that a server gets."""
    passed = {name: value for name, value in headers.items() if name.lower() in _REQUEST_HEADERS}
    return passed | {"x-forwarded-proto": "https" if tls else "http"}


def check_target(target: str) -> None:
    """INVALID if the path could be read as another one: the server gets it as it was sent."""
    path = target.partition("?")[0]
    if "%2f" in path.lower() or not {".", ".."}.isdisjoint(unquote(path).replace("\\", "/").split("/")):
        raise StrataError(Code.INVALID, f"{path[:200]!r} is not the path of a request to a training server")


@dataclass(frozen=True, slots=True)
class ServerConnections:
    """The connections to one address."""

    client: httpx.AsyncClient
    extensions: Mapping[str, str] = field(default_factory=dict)
    """Extensions of each request: whose certificate the peer has to show."""
    socket: int | None = None
    """A descriptor of the Unix socket: it stays this one, whatever its path leads to later."""

    async def close(self) -> None:
        await self.client.aclose()
        if self.socket is not None:
            os.close(self.socket)


@dataclass
class CompletionLimit:
    """Bounds the completions in flight of each tenant."""

    limit: int = MAX_COMPLETIONS
    _in_flight: Counter[str] = field(default_factory=Counter)

    @contextmanager
    def admit(self, tenant: str) -> Iterator[None]:
        """EXHAUSTED if the tenant has as many already."""
        if self._in_flight[tenant] >= self.limit:
            message = f"{self.limit} completions of {tenant!r} are in flight, and no more are possible"
            raise StrataError(Code.EXHAUSTED, message, hint="send it again when one of them has ended")
        self._in_flight[tenant] += 1
        try:
            yield
        finally:
            self._in_flight[tenant] -= 1
            if not self._in_flight[tenant]:
                del self._in_flight[tenant]


@dataclass
class ServerProxy:
    """Connections to the servers, by address."""

    bodies: BodyBudget = field(default_factory=lambda: BodyBudget(largest=MAX_BODY))
    completions: CompletionLimit = field(default_factory=CompletionLimit)
    tls: ssl.SSLContext | None = None
    """TLS for servers on other machines: the hub's certificate, and the authority of its hosts alone."""
    _open: dict[str, ServerConnections] = field(default_factory=dict)
    _replaced: list[ServerConnections] = field(default_factory=list)
    """Connections to sockets in whose place their servers have made others."""

    async def send(self, address: str, request: ForwardedRequest, *, key: str, tenant: Tenant | None) -> RawReply:
        """The server's reply; UNAVAILABLE if it cannot be reached. Without a tenant nobody's word is given."""
        import httpx

        headers = dict(request.headers)
        if traceparent := trace.traceparent():
            headers[trace.HEADER] = traceparent
        if tenant is not None:
            headers |= tenant.headers() | {front.KEY: key}
        check_target(request.target)
        try:
            connections = self._connections(address)
        except OSError as error:
            reason = error.strerror or type(error).__name__
            raise StrataError(
                Code.UNAVAILABLE, f"the training server cannot be reached: {reason}", hint="try again"
            ) from error
        client = connections.client
        sent = client.build_request(
            request.method,
            request.target,
            headers=headers,
            content=request.content,
            timeout=httpx.Timeout(request.reply_s, connect=CONNECT_S),
            extensions=dict(connections.extensions),
        )
        try:
            reply = await client.send(sent, stream=True)
        except (httpx.TransportError, httpx.InvalidURL) as error:
            raise StrataError(
                Code.UNAVAILABLE, f"the training server cannot be reached: {type(error).__name__}", hint="try again"
            ) from error
        try:
            passed = _reply_headers(request, reply)
        except StrataError:
            await reply.aclose()
            raise
        media_type = passed.pop("content-type")
        size = reply.headers.get("content-length", "")
        if request.method == "HEAD" and reply.status_code >= 300:
            # A caller that tries another server drops this reply, and a generator that never ran closes nothing.
            await reply.aclose()
            return RawReply(b"", reply.status_code, media_type, passed)
        if request.method == "HEAD" and size.isdecimal():
            # The size is of the content that a GET would get.
            passed["content-length"] = size
            return RawReply(_pieces(reply), reply.status_code, media_type, passed, reply.aclose)
        if reply.status_code == 204 or (size.isdecimal() and int(size) <= SMALL):
            content = b"".join([piece async for piece in _pieces(reply)])
            return RawReply(content, reply.status_code, media_type, passed)
        return RawReply(_pieces(reply), reply.status_code, media_type, passed, reply.aclose)

    def forget(self, addresses: set[str]) -> list[ServerConnections]:
        """Take out the connections to all but these addresses; the caller closes them."""
        gone = [*self._replaced, *(self._open.pop(address) for address in set(self._open) - addresses)]
        self._replaced.clear()
        return gone

    async def close(self) -> None:
        for connections in self.forget(set()):
            await connections.close()

    def _connections(self, address: str) -> ServerConnections:
        known = self._open.get(address)
        socket = _open_socket(parse_unix_address(address)) if address.startswith("unix:") else None
        if known is not None:
            if socket is None or known.socket is None:
                return known
            if os.path.samestat(os.fstat(socket), os.fstat(known.socket)):
                os.close(socket)
                return known
            self._replaced.append(known)
        made = self._open[address] = self._connect(address, socket)
        return made

    def _connect(self, address: str, socket: int | None) -> ServerConnections:
        import httpx

        limits = httpx.Limits(max_connections=CONNECTIONS, max_keepalive_connections=32)
        timeout = httpx.Timeout(REPLY_S, connect=CONNECT_S)
        # The address of a server on another machine names the certificate of its host: `tls://NAME@HOST:PORT`.
        name, _, place = address.removeprefix(TLS).partition("@")
        if socket is not None:
            uds = f"/proc/self/fd/{socket}"
            transport = httpx.AsyncHTTPTransport(uds=uds, limits=limits, trust_env=False)
            base_url, extensions = "http://server", {}
        elif address.startswith(TLS) and self.tls is not None:
            transport = httpx.AsyncHTTPTransport(verify=self.tls, limits=limits, trust_env=False)
            base_url, extensions = f"https://{place}", {"sni_hostname": name}
        else:
            raise StrataError(Code.UNAVAILABLE, "this hub does not know how to reach the training server")
        client = httpx.AsyncClient(
            transport=transport, base_url=base_url, timeout=timeout, follow_redirects=False, trust_env=False
        )
        return ServerConnections(client, extensions, socket)


def _reply_headers(request: ForwardedRequest, reply: httpx.Response) -> dict[str, str]:
    """Returns what a client gets of the headers of a reply. UNAVAILABLE if it redirects to more than an archive of this
    hub."""
    passed = {name: value for name, value in reply.headers.items() if name in _REPLY_HEADERS}
    # Without its parameters: a browser reads `application/json;, text/html` as two types, and takes the last.
    media_type = reply.headers.get("content-type", "application/json").partition(";")[0].strip().lower()
    if media_type not in _MEDIA_TYPES:
        media_type = _BYTES
        passed["content-disposition"] = "attachment"
    passed["content-type"] = media_type
    if 300 <= reply.status_code < 400 and reply.status_code != 304:
        location = reply.headers.get("location", "")
        own = f"{request.headers.get('x-forwarded-proto', '')}://{request.headers.get('host', '')}{ARCHIVE}?"
        if reply.status_code != 302 or not location.startswith(own) or not TOKEN.fullmatch(location[len(own) :]):
            raise StrataError(Code.UNAVAILABLE, "the training server redirects to what is no archive of this hub")
        passed["location"] = location
    return passed


def _open_socket(path: Path) -> int:
    found = _OWN_FOLDER.fullmatch(str(path))
    return open_socket(Path("/"), str(path)[1:]) if found is None else open_socket(Path(found[1]), found[2])


async def read_whole(reply: RawReply) -> bytes:
    """The content of a reply that the hub itself reads; EXHAUSTED if it is too large for that."""
    if isinstance(reply.content, bytes):
        return reply.content
    parts: list[bytes] = []
    size = 0
    async for part in reply.content:
        size += len(part)
        if size > MAX_MERGED:
            raise StrataError(Code.EXHAUSTED, "a list of a training server is too long", hint="use a smaller limit")
        parts.append(part)
    return b"".join(parts)


async def _pieces(reply: httpx.Response) -> AsyncIterator[bytes]:
    """Yields the pieces as they came over the wire: what the server compressed stays so."""
    import httpx

    try:
        async for piece in reply.aiter_raw():
            yield piece
    except httpx.TransportError as error:
        raise StrataError(
            Code.UNAVAILABLE, f"the training server broke its reply off: {type(error).__name__}", hint="try again"
        ) from error
    finally:
        await reply.aclose()
