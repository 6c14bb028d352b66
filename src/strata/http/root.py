"""The root of an application: nobody gets past it unknown, and no failure leaves it without a form.

A path that does not exist is told only to those who may look: to everybody else all of it is one closed door.
"""

from __future__ import annotations

import asyncio
import itertools
import re
import secrets
import time
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, Protocol

from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from strata.base import log
from strata.base.errors import Code, StrataError
from strata.http.body import MAX_QUERY
from strata.http.declare import Endpoint
from strata.http.errors import ErrorTable, HttpRefusal
from strata.http.failures import Failures
from strata.identity.authenticate import Credentials
from strata.identity.roles import Kind, Principal, Role

CALLER: Final = "strata.caller"
"""Where in the scope an endpoint finds who calls."""
WELCOME: Final = "strata.welcome"
"""Where it finds the function that asks again whether the caller may be here: for replies that go on for long."""
PEER: Final = "strata.peer"
"""Where the server puts the client certificate that TLS has verified, in DER."""
CONNECTION: Final = "strata.connection"
"""Where the server puts what `KnownConnection` describes."""
UNIX: Final = "strata.unix"
"""Where the server notes that a connection came by its Unix socket, which only its owner can reach."""
SEND_S: Final = 30.0
"""A client that does not take a piece of a reply for so long is cut off."""
PIECE: Final = 256 * 1024
"""Larger bodies are sent in pieces, each when the one before is on its way."""

NOBODY: Final = Principal(Kind.KEY, "", None)
_REQUEST_ID: Final = re.compile(rb"[A-Za-z0-9._-]{1,64}")
_log = log.get(__name__)

FirstHeaders = Mapping[bytes, bytes]
"""Names in lower case; of a repeated header the first."""
Identify = Callable[[Scope, FirstHeaders], Awaitable[Principal]]


class KnownConnection(Protocol):
    """What the root tells the connection a request came by."""

    def show_credentials(self) -> None: ...

    def abort(self) -> None: ...


@dataclass(frozen=True)
class RootLimits:
    """A reply in one small piece is handed to the connection at once and waits only for one before it that was not
    taken. `time_every_send` bounds that too, at the price of a timer for each request.
    """

    time_every_send: bool = False
    send_s: float = SEND_S
    failures: Failures = field(default_factory=Failures)


class Root:
    """`identify` says who calls, or refuses. `what` is how the server speaks of itself when it has a defect."""

    def __init__(
        self, app: ASGIApp, identify: Identify, errors: ErrorTable, *, what: str, limits: RootLimits | None = None
    ) -> None:
        self._app = app
        self._identify = identify
        self._errors = errors
        self._what = what
        self._limits = limits or RootLimits()
        self._prefix = secrets.token_hex(4)
        self._requests = itertools.count(1)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            raise StrataError(Code.UNSUPPORTED, f"{scope['type']} is not served here")
        headers = _first(scope["headers"])
        given = headers.get(b"x-request-id", b"")
        request_id = given.decode() if _REQUEST_ID.fullmatch(given) else f"{self._prefix}{next(self._requests):08x}"
        answer = _Answer(send, request_id, self._limits)
        with log.correlation(request_id):
            started_s = time.monotonic()
            error = await self._serve(scope, headers, receive, answer)
            if error is not None and not answer.status:
                await self._errors.render(error)(scope, receive, answer.send)
            _log.debug(
                "request",
                method=scope["method"],
                path=scope["path"],
                status=answer.status,
                caller=scope[CALLER].actor if CALLER in scope else "",
                took_ms=round((time.monotonic() - started_s) * 1000, 1),
            )

    async def _serve(
        self, scope: Scope, headers: FirstHeaders, receive: Receive, answer: _Answer
    ) -> StrataError | None:
        try:
            scope[CALLER] = await self._identified(scope, headers, answer)

            async def welcome() -> None:
                await self._identify(scope, headers)

            scope[WELCOME] = welcome
            _check_url(scope)
            await self._app(scope, receive, answer.send)
        except StrataError as error:
            if answer.status:
                _log.warning("a reply broke off", path=scope["path"], reason=error.message)
            elif error.code in (Code.INTERNAL, Code.CORRUPT):
                _log.exception("a request failed", path=scope["path"])
            return error
        except ClientDisconnect:
            return None
        except TimeoutError:
            _log.info("a client does not take its reply", path=scope["path"])
            connection: KnownConnection | None = scope.get(CONNECTION)
            if connection is not None:
                connection.abort()
            return StrataError(Code.DEADLINE, "it took too long")
        except Exception:  # noqa: BLE001 - the outermost handler: a defect must not take the connection's word away
            _log.exception("a request met a defect", method=scope["method"], path=scope["path"])
            return defect(self._what)
        return None

    async def _identified(self, scope: Scope, headers: FirstHeaders, answer: _Answer) -> Principal:
        try:
            caller = await self._identify(scope, headers)
        except StrataError as error:
            if error.code is not Code.UNAUTHENTICATED:
                raise
            address = (scope.get("client") or ("",))[0]
            if self._limits.failures.note(address, scope["method"], scope["path"], error.message):
                # The next guess needs a new connection, of which an address has few.
                answer.closing = True
                raise StrataError(
                    Code.EXHAUSTED, "too many requests with credentials that are not good", hint="strata login"
                ) from error
            raise
        connection: KnownConnection | None = scope.get(CONNECTION)
        if connection is not None and (caller.id or caller.kind is Kind.OPERATOR):
            connection.show_credentials()
        return caller


def defect(what: str) -> StrataError:
    return StrataError(Code.INTERNAL, f"a defect of the {what}; its log has more under the request id")


def exact(endpoints: Iterable[Endpoint]) -> Collection[tuple[str, str]]:
    """Methods and paths that are let through unknown callers; compared as they are, so they have no parameters."""
    found = frozenset((endpoint.method, endpoint.path) for endpoint in endpoints)
    assert not any("{" in path for _, path in found)
    return found


def credentials(headers: FirstHeaders, *, key_header: str = "", certificate_der: bytes = b"") -> Credentials:
    """What the headers carry. A key in `key_header`, if the server's clients have one, counts before a bearer token."""
    key = headers.get(key_header.lower().encode(), b"").decode("latin-1").strip() if key_header else ""
    kind, _, bearer = headers.get(b"authorization", b"").decode("latin-1").partition(" ")
    if not key and kind and kind.lower() != "bearer":
        ways = f"`{key_header}: …` or `Authorization: Bearer …`" if key_header else "`Authorization: Bearer …`"
        raise HttpRefusal(401, Code.UNAUTHENTICATED, f"credentials come as {ways}")
    return Credentials(
        bearer=key or bearer.strip(),
        operator_token=headers.get(b"x-operator-token", b"").decode("latin-1"),
        certificate_der=certificate_der,
    )


def check_channel(scope: Scope, caller: Principal, address: str) -> Principal:
    """FORBIDDEN for more than a researcher's rights over plain TCP: whoever sends such a secret there would one day
    send it to another user of the machine who took the port. `address` is the server's Unix socket."""
    private = scope["scheme"] == "https" or scope.get(UNIX, False)
    if private or (caller.role is not None and caller.role <= Role.RESEARCHER):
        return caller
    what = {Kind.OPERATOR: "the operator token", Kind.HOST: "a host's secret"}.get(
        caller.kind, "a key of an operator or an admin"
    )
    raise StrataError(
        Code.FORBIDDEN,
        f"{what} is not taken over TCP without TLS: any user of this machine could pose as the server",
        hint=f"use {address}, or a key of a viewer or a researcher",
    )


def _check_url(scope: Scope) -> None:
    if b"%00" in scope["raw_path"] or len(scope["query_string"]) > MAX_QUERY:
        raise StrataError(Code.INVALID, "this URL cannot be one of ours")


def _first(headers: Sequence[tuple[bytes, bytes]]) -> FirstHeaders:
    found: dict[bytes, bytes] = {}
    for name, value in headers:
        found.setdefault(name, value)
    return found


class _Answer:
    """Sends, with what every reply has in common, and remembers whether it has begun."""

    def __init__(self, send: Send, request_id: str, limits: RootLimits) -> None:
        self._send = send
        self._limits = limits
        self._headers = [
            (b"x-request-id", request_id.encode()),
            (b"cache-control", b"no-store"),
            (b"x-content-type-options", b"nosniff"),
        ]
        self.status = 0
        self.closing = False

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
            message["headers"] = [*message.get("headers", []), *self._headers]
            if self.closing:
                message["headers"].append((b"connection", b"close"))
        body, more = message.get("body", b""), message.get("more_body", False)
        for start in range(0, len(body) - PIECE, PIECE):
            await self._timed({**message, "body": body[start : start + PIECE], "more_body": True})
        if len(body) > PIECE:
            message = {**message, "body": body[(len(body) - 1) // PIECE * PIECE :]}
        if self._limits.time_every_send or more or len(body) > PIECE:
            await self._timed(message)
        else:
            await self._send(message)

    async def _timed(self, message: Message) -> None:
        async with asyncio.timeout(self._limits.send_s):
            await self._send(message)
