"""The blocking HTTP client of the hub (agent, CLI, SDK): timeout 30 s, retries for 20 s, TLS, `unix:` addresses, the
largest reply, the clock skew that is tolerated, and where secrets may be sent.

An address is `unix:PATH`, `https://…`, or `http://…` on loopback. On loopback any user of the machine may listen, so
only a key of a viewer or a researcher is sent there.

Requests are idempotent unless the caller says otherwise. So a request on a pooled connection that the hub had closed is
sent again on a new one, and a client with `retry_for_s` repeats one whose connection broke, or whose reply was
UNAVAILABLE: another hub behind the same address may serve it. Where no process listens it fails at once. All other
retries are the caller's. The `Date` of a reply tells the skew between the two clocks.
"""

from __future__ import annotations

import contextlib
import http.client
import random
import socket
import ssl
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from pathlib import Path
from typing import IO, Any, Final, Self, TypeVar
from urllib.parse import SplitResult, urlencode, urlsplit

import msgspec

from strata import __version__
from strata.base import trace
from strata.base.clock import SystemClock
from strata.base.errors import Code, StrataError
from strata.base.loopback import is_loopback_host
from strata.base.progress import ReportProgress, no_progress
from strata.base.retry import Backoff, date_s, retry_after_s
from strata.base.secret import Secret
from strata.base.unix_socket import SCHEME as UNIX
from strata.base.unix_socket import connect_unix, parse_unix_address
from strata.http.problem import ErrorReply
from strata.identity.tokens import KEY_PREFIX, is_scoped_key

T = TypeVar("T")

TIMEOUT_S: Final = 30.0
RETRY_FOR_S: Final = 20.0
MAX_SKEW_S: Final = 300.0
"""How far the clock may be from the hub's: certificates are valid for a day."""
"""How long a command of a person repeats a request: a load balancer notices a dead hub sooner."""
_BACKOFF: Final = Backoff(first_s=0.1, most_s=2.0)
MAX_REPLY: Final = 64 << 20
_MAX_IDLE: Final = 8
_PIECE: Final = 1 << 20
_NOT_SENT: Final = (ConnectionRefusedError, FileNotFoundError, socket.gaierror, ssl.SSLCertVerificationError)
"""Errors after which no connection was there on which a request could be sent."""
_CODE_OF: Final[Mapping[int, Code]] = {
    400: Code.INVALID,
    401: Code.UNAUTHENTICATED,
    403: Code.FORBIDDEN,
    404: Code.NOT_FOUND,
    408: Code.UNAVAILABLE,
    409: Code.CONFLICT,
    410: Code.GONE,
    412: Code.STALE,
    413: Code.INVALID,
    429: Code.EXHAUSTED,
}
"""The codes of replies without the hub's error body, for example from a proxy."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TlsFiles:
    """PEM files. Only the hub's own certificate authority is trusted, none of the system's."""

    ca: Path
    certificate: Path | None = None
    key: Path | None = None


@dataclass(frozen=True, slots=True)
class HubResponse:
    status: int
    headers: Mapping[str, str]
    """Names in lower case."""
    content: bytes


class UnixConnection(http.client.HTTPConnection):
    """HTTP over a Unix socket, to a process of the same user or of root."""

    def __init__(self, path: Path) -> None:
        super().__init__("localhost")
        self._path = path

    def connect(self) -> None:
        # The pool sets the timeout before each request.
        self.sock = connect_unix(self._path, self.timeout)


class HubClient:
    """Thread-safe: each request has a connection of its own from the pool."""

    def __init__(
        self,
        url: str,
        *,
        bearer: Secret | None = None,
        tls: TlsFiles | None = None,
        timeout_s: float = TIMEOUT_S,
        server: str = "hub",
        retry_for_s: float = 0.0,
    ) -> None:
        """`server` is the name of the server in error messages."""
        self.url = url
        self._at = _split(url)
        if self._at.scheme == "http" and bearer is not None:
            check_cleartext(url, bearer)
        self._server = server
        self._where = url if url.startswith(UNIX) else self._at.netloc
        self._bearer = bearer
        self._tls = tls
        self._timeout_s = timeout_s
        self._retry_for_s = retry_for_s
        self._context = _context(self._at.scheme, tls)
        self._lock = threading.Lock()
        self._idle: list[http.client.HTTPConnection] = []
        self._busy: set[http.client.HTTPConnection] = set()
        self._closed = False
        self.ahead_s: float | None = None
        """How far this machine's clock is ahead of the hub's, by the last reply; None before one."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def call(
        self,
        method: str,
        path: str,
        reply: type[T],
        *,
        body: msgspec.Struct | None = None,
        query: msgspec.Struct | None = None,
        timeout_s: float | None = None,
    ) -> T:
        """Send a message and decode the reply; `type(None)` for a reply without content."""
        content = None if body is None else msgspec.json.encode(body)
        return self._decode(self.request(method, path, content, "application/json", query, timeout_s), reply)

    def call_once(self, method: str, path: str, reply: type[T], *, body: msgspec.Struct | None = None) -> T:
        """`call` for what is not idempotent: sent once, so its effect is unknown if the connection breaks."""
        content = None if body is None else msgspec.json.encode(body)
        try:
            return self._decode(self._send(method, path, content, "application/json", pooled=False), reply)
        except StrataError as error:
            if error.code is not Code.UNAVAILABLE or isinstance(error.__cause__, _NOT_SENT):
                raise
            raise StrataError(
                error.code, error.message, hint="it may have been done: look before you try again", **error.detail
            ) from error

    def send(self, method: str, path: str, content: bytes, reply: type[T], *, query: msgspec.Struct | None = None) -> T:
        """Send bytes and decode the reply."""
        return self._decode(self.request(method, path, content, "application/octet-stream", query, None), reply)

    def fetch(self, path: str, *, query: msgspec.Struct | None = None, timeout_s: float | None = None) -> HubResponse:
        return self.request("GET", path, None, "", query, timeout_s)

    def request(
        self,
        method: str,
        path: str,
        content: bytes | None,
        media_type: str,
        query: msgspec.Struct | None,
        timeout_s: float | None,
    ) -> HubResponse:
        target = path + encode_query(query)
        until_s = time.monotonic() + self._retry_for_s
        failures = 0
        while True:
            try:
                return self._send(method, target, content, media_type, timeout_s)
            except StrataError as error:
                if failures and method == "DELETE" and error.code in (Code.NOT_FOUND, Code.GONE):
                    # A request before this one has removed it.
                    return HubResponse(204, {}, b"")
                left_s = until_s - time.monotonic()
                if error.code is not Code.UNAVAILABLE or _is_absent(error) or self._closed or left_s <= 0:
                    raise
            failures += 1
            time.sleep(min(left_s, _BACKOFF.delay_s(failures, random.random())))  # noqa: S311 - jitter

    def _send(
        self,
        method: str,
        path: str,
        content: bytes | None,
        media_type: str,
        timeout_s: float | None = None,
        *,
        pooled: bool = True,
    ) -> HubResponse:
        headers = {"Accept": "application/json", "User-Agent": f"strata/{__version__}"}
        if content is not None:
            headers["Content-Type"] = media_type
        if traceparent := trace.traceparent():
            headers[trace.HEADER] = traceparent
        if self._bearer is not None:
            headers["Authorization"] = f"Bearer {self._bearer.reveal()}"
        target = self._below(path)
        reply = self._exchange(
            lambda connection: exchange(connection, method, target, content, headers),
            timeout_s or self._timeout_s,
            pooled=pooled,
        )
        self._note_date(reply)
        if reply.status >= 300:
            raise _problem(reply, f"{method} {path.partition('?')[0]}")
        return reply

    def download(self, target: str, to: IO[bytes], report: ReportProgress = no_progress) -> None:
        """Download a file of any size from an address whose query carries the credentials."""

        def copy(connection: http.client.HTTPConnection) -> HubResponse:
            to.seek(0)
            to.truncate()
            connection.request("GET", self._below(target))
            response = connection.getresponse()
            if response.status >= 300:
                headers = {name.lower(): value for name, value in response.getheaders()}
                return HubResponse(response.status, headers, response.read(_PIECE))
            total = response.length or 0
            while piece := response.read(_PIECE):
                to.write(piece)
                report(to.tell(), total)
            if response.length:
                raise http.client.IncompleteRead(b"", response.length)
            return HubResponse(response.status, {"connection": "close"}, b"")

        reply = self._exchange(copy, self._timeout_s)
        if reply.status >= 300:
            raise _problem(reply, f"GET {target.partition('?')[0]}")

    def _below(self, path: str) -> str:
        return path if self._at.scheme == "unix" else self._at.path.rstrip("/") + path

    def reload(self) -> None:
        """Read the renewed certificate. Requests in flight finish on their old connections."""
        context = _context(self._at.scheme, self._tls)
        with self._lock:
            self._context = context
            idle, self._idle = self._idle, []
        for connection in idle:
            connection.close()

    def close(self) -> None:
        """Abort requests in flight, also a long poll: they fail as UNAVAILABLE."""
        with self._lock:
            self._closed = True
            idle, self._idle = self._idle, []
            busy = list(self._busy)
        for connection in idle:
            connection.close()
        for connection in busy:
            _interrupt(connection)

    def _exchange(
        self, do: Callable[[http.client.HTTPConnection], HubResponse], timeout_s: float, *, pooled: bool = True
    ) -> HubResponse:
        connection = self._take_idle() if pooled else None
        try:
            if connection is not None:
                with contextlib.suppress(ConnectionError, http.client.HTTPException, ssl.SSLError):
                    return self._request_on(connection, do, timeout_s)
            return self._request_on(self._connection(), do, timeout_s)
        except ssl.SSLCertVerificationError as error:
            raise StrataError(
                Code.UNAVAILABLE,
                f"{self._where} is not the {self._server} this host joined: {error.verify_message}",
                hint="if the hub was set up again, join it again",
            ) from error
        except (OSError, http.client.HTTPException) as error:
            raise self._unreachable(error) from error

    def _request_on(
        self,
        connection: http.client.HTTPConnection,
        do: Callable[[http.client.HTTPConnection], HubResponse],
        timeout_s: float,
    ) -> HubResponse:
        with self._lock:
            if self._closed:
                raise StrataError(Code.UNAVAILABLE, "this client is closed")
            self._busy.add(connection)
        connection.timeout = timeout_s
        if connection.sock is not None:
            connection.sock.settimeout(timeout_s)
        reusable = False
        try:
            reply = do(connection)
            reusable = reply.headers.get("connection", "").lower() != "close"
            return reply
        finally:
            with self._lock:
                self._busy.discard(connection)
                keep = reusable and len(self._idle) < _MAX_IDLE and not self._closed
                if keep:
                    self._idle.append(connection)
            if not keep:
                connection.close()

    def _take_idle(self) -> http.client.HTTPConnection | None:
        with self._lock:
            return self._idle.pop() if self._idle else None

    def _unreachable(self, error: Exception) -> StrataError:
        absent = self._at.scheme == "unix" and isinstance(error, (FileNotFoundError, ConnectionRefusedError))
        reason: object = "it is not running" if absent else error
        if isinstance(error, ConnectionRefusedError) and not absent:
            reason = f"nothing listens on port {self._at.port}"
        unanswered = self._at.scheme != "unix" and _is_unanswered(error)
        hints = _START if absent else _CHECK if unanswered else {}
        return StrataError(
            Code.UNAVAILABLE,
            f"the {self._server} at {self._where} cannot be reached: {reason}",
            hint=hints.get(self._server),
        )

    def _connection(self) -> http.client.HTTPConnection:
        if self._at.scheme == "unix":
            return UnixConnection(Path(self._at.path))
        host, port = self._at.hostname or "", self._at.port
        if self._context is not None:
            return http.client.HTTPSConnection(host, port, context=self._context)
        return http.client.HTTPConnection(host, port)

    def _decode(self, reply: HubResponse, kind: type[T]) -> T:
        if kind is type(None):
            return None
        try:
            return msgspec.json.decode(reply.content, type=kind)
        except msgspec.DecodeError as error:
            raise StrataError(
                Code.UNSUPPORTED,
                f"the {self._server}'s reply does not fit this version: {error}",
                hint=f"upgrade this program to the {self._server}'s version",
            ) from error

    def _note_date(self, reply: HubResponse) -> None:
        with contextlib.suppress(KeyError, ValueError, TypeError):
            self.ahead_s = time.time() - parsedate_to_datetime(reply.headers["date"]).timestamp()


def exchange(
    connection: http.client.HTTPConnection,
    method: str,
    target: str,
    content: bytes | None,
    headers: Mapping[str, str],
) -> HubResponse:
    connection.request(method, target, body=content, headers=dict(headers))
    response = connection.getresponse()
    received = response.read(MAX_REPLY + 1)
    if response.length and len(received) <= MAX_REPLY:
        # When a number of bytes is requested, the standard library reads a short reply without an error.
        raise http.client.IncompleteRead(received, response.length)
    if len(received) > MAX_REPLY:
        raise http.client.HTTPException(f"a reply of more than {MAX_REPLY} bytes")
    return HubResponse(response.status, {name.lower(): value for name, value in response.getheaders()}, received)


def transfer(method: str, url: str, content: bytes | None = None, *, timeout_s: float = TIMEOUT_S) -> bytes:
    """Upload or download at a signed URL of the object store: without our credentials, with the system's CAs."""
    at = _split(url)
    context = ssl.create_default_context() if at.scheme == "https" else None
    host, port = at.hostname or "", at.port
    connection = (
        http.client.HTTPConnection(host, port, timeout=timeout_s)
        if context is None
        else http.client.HTTPSConnection(host, port, timeout=timeout_s, context=context)
    )
    target = (at.path or "/") + (f"?{at.query}" if at.query else "")
    try:
        reply = exchange(connection, method, target, content, {})
    except (OSError, http.client.HTTPException) as error:
        # The address carries a signature, so it stays out of the message.
        raise StrataError(Code.UNAVAILABLE, f"the object store at {at.netloc} cannot be reached: {error}") from error
    finally:
        connection.close()
    if reply.status >= 300:
        raise StrataError(
            Code.UNAVAILABLE, f"the object store at {at.netloc} answered {method} with status {reply.status}"
        )
    return reply.content


def encode_query(query: msgspec.Struct | None) -> str:
    """The fields that differ from their defaults; lists as repeated names."""
    if query is None:
        return ""
    pairs: list[tuple[str, str]] = []
    for field in msgspec.structs.fields(query):
        value = getattr(query, field.name)
        if value == field.default:
            continue
        values = value if isinstance(value, tuple) else (value,)
        pairs += [(field.encode_name, _encode_value(element)) for element in values]
    return f"?{urlencode(pairs)}" if pairs else ""


def _encode_value(value: object) -> str:
    plain = msgspec.to_builtins(value)
    return ("true" if plain else "false") if isinstance(plain, bool) else str(plain)


_START: Final = {"hub": "strata up starts one on this machine; strata contexts shows which server is used"}
"""How to start a server that is not running, by its kind."""
_CHECK: Final = {"hub": "check the address, which strata contexts shows, and that strata hub or strata up runs there"}
"""What to do about a server at a port that does not answer, by its kind."""


def check_cleartext(url: str, bearer: Secret) -> None:
    """INVALID if this secret must not be sent to `http://…`, where the server is not authenticated."""
    if not is_loopback_host(urlsplit(url).hostname or ""):
        raise StrataError(Code.INVALID, f"the secret would be sent to {url} in the clear", hint="use https")
    if not is_scoped_key(bearer):
        raise StrataError(
            Code.INVALID,
            f"this is no key of a viewer or a researcher ({KEY_PREFIX}-…), and no other secret is sent to {url}:"
            " any user of this machine could listen there",
            hint="copy the whole key; with another secret use the Unix socket: unix:DATA/hub.sock of a hub,"
            " unix:DATA/run/api of a training server",
        )


def _split(url: str) -> SplitResult:
    if url.startswith(UNIX):
        return SplitResult("unix", "", str(parse_unix_address(url)), "", "")
    at = urlsplit(url)
    try:
        valid = at.scheme in ("http", "https") and bool(at.hostname) and (at.port or 1) > 0
    except ValueError:
        valid = False
    if not valid or at.username is not None:
        raise StrataError(Code.INVALID, f"{at.netloc.rpartition('@')[2]!r} is not the address of a hub")
    return at


def _context(scheme: str, tls: TlsFiles | None) -> ssl.SSLContext | None:
    if scheme != "https":
        return None
    try:
        context = ssl.create_default_context(cafile=None if tls is None else str(tls.ca))
        if tls is not None and tls.certificate is not None:
            context.load_cert_chain(tls.certificate, tls.key)
    except (OSError, ssl.SSLError) as error:
        raise StrataError(Code.INVALID, f"the certificates of this host cannot be used: {error}") from error
    return context


def _interrupt(connection: http.client.HTTPConnection) -> None:
    sock = connection.sock
    if sock is not None:
        with contextlib.suppress(OSError):
            sock.shutdown(socket.SHUT_RDWR)


def _is_absent(error: StrataError) -> bool:
    """Says whether the address itself cannot be reached, or is that of another server: no retry within seconds
    helps."""
    cause = error.__cause__
    return cause is not None and (_is_unanswered(cause) or isinstance(cause, ssl.SSLCertVerificationError))


def _is_unanswered(cause: BaseException) -> bool:
    """Says whether nothing answered at the address; a connection that broke was there before."""
    broken = isinstance(cause, (ConnectionError, http.client.HTTPException, ssl.SSLError))
    return not broken or isinstance(cause, ConnectionRefusedError)


def _problem(reply: HubResponse, what: str) -> StrataError:
    fallback = _CODE_OF.get(reply.status, Code.UNAVAILABLE if reply.status >= 500 else Code.INTERNAL)
    detail: dict[str, Any] = {}
    if "retry-after" in reply.headers:
        now_s = date_s(reply.headers.get("date"), default_s=SystemClock().wall_s())
        detail["retry_after_s"] = retry_after_s(reply.headers["retry-after"], now_s=now_s)
    try:
        problem = msgspec.json.decode(reply.content, type=ErrorReply).error
        code = Code(problem.code)
    except (msgspec.DecodeError, ValueError):
        return StrataError(fallback, f"{what}: status {reply.status}", status=reply.status, **detail)
    return StrataError(code, problem.message, hint=problem.hint, **(problem.detail | detail))
