"""The root of an application: authentication before routes, request ids, security headers, send timeout (30 s), and the
reply to every failure.

Only a caller with credentials learns whether a path exists; all other clients get the same refusal for every path.
"""

from __future__ import annotations

import asyncio
import itertools
import re
import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final, Protocol

from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from strata.base import log, trace
from strata.base.errors import Code, StrataError
from strata.http.anonymous import Networks, client_address
from strata.http.auth_failures import AuthFailures
from strata.http.authentication import FirstHeaders, Identify
from strata.http.body import MAX_QUERY
from strata.http.errors import ErrorTable
from strata.identity.roles import CallerKind, Principal

CALLER: Final = "strata.caller"
"""Key of the scope: the principal who calls."""
REAUTHENTICATE: Final = "strata.reauthenticate"
"""Key of the scope: the function that checks the credentials of the request once more, for replies that take long."""
ROUTE: Final = "strata.route"
"""Key of the scope, after routing: the path of the route, with the names of its parameters."""
STARTED: Final = "strata.started"
"""Key of the scope: when the head of the request was read, of the monotonic clock."""
CONNECTION: Final = "strata.connection"
"""Key of the scope: the `ClientConnection` that the request came by."""
SEND_S: Final = 30.0
"""A client that does not take a piece of a reply for so long is disconnected."""
PIECE: Final = 256 * 1024
"""Larger bodies are sent in pieces, each when the one before is on its way."""

NO_PAGE: Final = b"sandbox; default-src 'none'"
"""The policy of a reply that names none: a browser that shows it runs nothing of it, and gives it no origin."""
TLS_ONLY: Final = b"max-age=31536000"
"""A browser that has reached the server over TLS never tries it without, for a year."""

_DEFAULTS: Final = ((b"cache-control", b"no-store"), (b"content-security-policy", NO_PAGE))
"""Headers of a reply that does not have its own."""
_REQUEST_ID: Final = re.compile(rb"[A-Za-z0-9._-]{1,64}")
_log = log.get(__name__)

OnReply = Callable[[Scope, int], None]


class ClientConnection(Protocol):
    """What the root tells the connection of a request."""

    def mark_authenticated(self) -> None: ...

    def abort(self) -> None: ...


@dataclass(frozen=True)
class RootLimits:
    """A reply in one small piece is handed to the connection at once and waits only for one before it that was not
    taken. `time_every_send` bounds that too, at the price of a timer for each request.
    """

    time_every_send: bool = False
    send_s: float = SEND_S
    failures: AuthFailures = field(default_factory=AuthFailures)
    trusted_proxies: Networks = ()
    """Proxies whose `X-Forwarded-For` names the client."""


class RootApp:
    """`server` is what the reply to a request that met a defect calls the server. `on_reply` is called with the status
    of every reply to an authenticated caller."""

    def __init__(
        self,
        app: ASGIApp,
        identify: Identify,
        errors: ErrorTable,
        *,
        server: str,
        limits: RootLimits | None = None,
        on_reply: OnReply | None = None,
    ) -> None:
        self._app = app
        self._identify = identify
        self._errors = errors
        self._server = server
        self._limits = limits or RootLimits()
        self._on_reply = on_reply
        self._prefix = secrets.token_hex(4)
        self._requests = itertools.count(1)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            raise StrataError(Code.UNSUPPORTED, f"{scope['type']} is not served here")
        headers = _first_headers(scope["headers"])
        scope[STARTED] = started_s = time.monotonic()
        parent = headers.get(b"traceparent", b"").decode("latin-1")
        parent = parent if parent and trace.trace_id(parent) else ""
        with trace.span("HTTP", kind="server", parent=parent) as span:
            request_id = self._request_id(headers, trace.traceparent() or parent)
            reply = _Reply(send, scope, request_id, self._limits, self._on_reply)
            with log.correlation(request_id):
                await self._respond(scope, headers, receive, reply, started_s)
            if span is not None:
                _describe(span, scope, request_id, reply.status)

    def _request_id(self, headers: FirstHeaders, traceparent: str) -> str:
        """The id that the client sent, or that of its trace, or a new one."""
        sent = headers.get(b"x-request-id")
        if sent and _REQUEST_ID.fullmatch(sent):
            return sent.decode()
        return trace.trace_id(traceparent) or f"{self._prefix}{next(self._requests):08x}"

    async def _respond(
        self, scope: Scope, headers: FirstHeaders, receive: Receive, reply: _Reply, started_s: float
    ) -> None:
        error = await self._serve(scope, headers, receive, reply)
        if error is not None and not reply.status:
            await self._errors.respond(error, scope, headers)(scope, receive, reply.send)
        if _log.debugs:
            _log.debug(
                "request",
                method=scope["method"],
                path=scope["path"],
                status=reply.status,
                caller=str(scope[CALLER].actor) if CALLER in scope else "",
                took_ms=round((time.monotonic() - started_s) * 1000, 1),
            )

    async def _serve(self, scope: Scope, headers: FirstHeaders, receive: Receive, reply: _Reply) -> StrataError | None:
        try:
            scope[CALLER] = await self._authenticate(scope, headers, reply)

            async def reauthenticate() -> None:
                await self._identify(scope, headers)

            scope[REAUTHENTICATE] = reauthenticate
            _check_url(scope)
            await self._app(scope, receive, reply.send)
        except StrataError as error:
            if reply.status:
                _log.warning("reply_aborted", path=scope["path"], reason=error.message)
            elif error.code in (Code.INTERNAL, Code.CORRUPT):
                _log.exception("request_failed", path=scope["path"])
            return error
        except ClientDisconnect:
            return None
        except TimeoutError:
            _log.info("reply_not_taken", path=scope["path"])
            connection: ClientConnection | None = scope.get(CONNECTION)
            if connection is not None:
                connection.abort()
            return StrataError(Code.DEADLINE, "it took too long")
        except Exception:  # noqa: BLE001 - the outermost handler: also a defect gets a reply
            _log.exception("request_crashed", method=scope["method"], path=scope["path"])
            return StrataError(Code.INTERNAL, f"a defect of the {self._server}; its log has more under the request id")
        return None

    async def _authenticate(self, scope: Scope, headers: FirstHeaders, reply: _Reply) -> Principal:
        try:
            caller = await self._identify(scope, headers)
        except StrataError as error:
            if error.code is not Code.UNAUTHENTICATED:
                raise
            address = client_address(scope, self._limits.trusted_proxies)
            if self._limits.failures.record(address, scope["method"], scope["path"], error.message):
                # The next guess needs a new connection, of which an address has few.
                reply.closing = True
                raise StrataError(
                    Code.EXHAUSTED, "too many requests with credentials that are not good", hint="strata login"
                ) from error
            raise
        connection: ClientConnection | None = scope.get(CONNECTION)
        if connection is not None and (caller.id or caller.kind is CallerKind.OPERATOR):
            connection.mark_authenticated()
        return caller.at(client_address(scope, self._limits.trusted_proxies))


def _describe(span: trace.TraceSpan, scope: Scope, request_id: str, status: int) -> None:
    """Describes the request by the conventions of OpenTelemetry. The path itself stays out: it has names and ids of
    clients."""
    route = scope.get(ROUTE, "")
    if route:
        span.update_name(f"{scope['method']} {route}")
        span.set_attribute("http.route", route)
    span.set_attribute("http.request.method", scope["method"] if route else "_OTHER")
    span.set_attribute("http.response.status_code", status)
    span.set_attribute("strata.request_id", request_id)


def _check_url(scope: Scope) -> None:
    if b"%00" in scope["raw_path"] or len(scope["query_string"]) > MAX_QUERY:
        raise StrataError(Code.INVALID, "this URL cannot be one of ours")


def _first_headers(headers: Sequence[tuple[bytes, bytes]]) -> FirstHeaders:
    first: dict[bytes, bytes] = {}
    for name, value in headers:
        first.setdefault(name, value)
    return first


class _Reply:
    """Sends a reply with the headers that every reply has, and remembers whether it has begun."""

    def __init__(self, send: Send, scope: Scope, request_id: str, limits: RootLimits, on_reply: OnReply | None) -> None:
        self._send = send
        self._scope = scope
        self._limits = limits
        self._on_reply = on_reply
        self._headers = [
            (b"x-request-id", request_id.encode()),
            (b"x-content-type-options", b"nosniff"),
        ]
        if scope.get("scheme") == "https":
            self._headers.append((b"strict-transport-security", TLS_ONLY))
        self.status = 0
        self.closing = False

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
            if self._on_reply is not None and CALLER in self._scope:
                self._on_reply(self._scope, self.status)
            own = message.get("headers", [])
            names = {name for name, _ in own}
            message["headers"] = [*own, *self._headers, *(each for each in _DEFAULTS if each[0] not in names)]
            if self.closing:
                message["headers"].append((b"connection", b"close"))
        body, more = message.get("body", b""), message.get("more_body", False)
        if len(body) <= PIECE and not more and not self._limits.time_every_send:
            await self._send(message)
            return
        for start in range(0, len(body) - PIECE, PIECE):
            await self._send_in_time({**message, "body": body[start : start + PIECE], "more_body": True})
        if len(body) > PIECE:
            message = {**message, "body": body[(len(body) - 1) // PIECE * PIECE :]}
        await self._send_in_time(message)

    async def _send_in_time(self, message: Message) -> None:
        async with asyncio.timeout(self._limits.send_s):
            await self._send(message)
