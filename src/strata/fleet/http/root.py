"""The root of the application: nobody gets past it unknown, and no failure leaves it without a form.

A path that does not exist is told only to those who may look: to everybody else all of it is one closed door.
"""

from __future__ import annotations

import asyncio
import itertools
import re
import secrets
import time
from collections.abc import Collection, Sequence
from typing import Any, Final

from starlette.requests import ClientDisconnect
from starlette.types import Message, Receive, Scope, Send

from strata.base import log
from strata.base.errors import Code, StrataError
from strata.fleet.http.body import MAX_QUERY
from strata.fleet.http.declare import Endpoint
from strata.fleet.http.errors import HttpRefusal, render
from strata.fleet.http.serve import CALLER, WELCOME, router
from strata.fleet.http.site import Site
from strata.identity.authenticate import Credentials
from strata.identity.roles import Kind, Principal, Role

PEER: Final = "strata.peer"
"""Where the server puts the client certificate that TLS has verified, in DER."""
SEND_S: Final = 60.0
"""Whoever does not take a piece of a reply for so long has lost interest."""

NOBODY: Final = Principal(Kind.KEY, "", None)
PASSER_BY: Final = Principal(Kind.KEY, "", Role.VIEWER)
_REQUEST_ID: Final = re.compile(rb"[A-Za-z0-9._-]{1,64}")
_log = log.get(__name__)


class Root:
    def __init__(self, site: Site, table: Sequence[Endpoint]) -> None:
        self._site = site
        self._router = router(site, table)
        self._prefix = secrets.token_hex(4)
        self._requests = itertools.count(1)
        self._public = _exact(endpoint for endpoint in table if endpoint.need.public)
        self._shown = _exact(endpoint for endpoint in table if endpoint.public_read) if site.public_read else ()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            raise StrataError(Code.UNSUPPORTED, f"{scope['type']} is not served here")
        headers = _first(scope["headers"])
        given = headers.get(b"x-request-id", b"")
        request_id = given.decode() if _REQUEST_ID.fullmatch(given) else f"{self._prefix}{next(self._requests):08x}"
        answer = _Answer(send, request_id)
        with log.correlation(request_id):
            started_s = time.monotonic()
            error = await self._serve(scope, headers, receive, answer)
            if error is not None and not answer.status:
                await render(error)(scope, receive, answer.send)
            _log.debug(
                "request",
                method=scope["method"],
                path=scope["path"],
                status=answer.status,
                caller=scope[CALLER].actor if CALLER in scope else "",
                took_ms=round((time.monotonic() - started_s) * 1000, 1),
            )

    async def _serve(
        self, scope: Scope, headers: dict[bytes, bytes], receive: Receive, answer: _Answer
    ) -> StrataError | None:
        try:
            credentials = _credentials(scope, headers)
            scope[CALLER] = await self._identify(scope, credentials)

            async def welcome() -> None:
                await self._identify(scope, credentials)

            scope[WELCOME] = welcome
            _check_url(scope)
            await self._router(scope, receive, answer.send)
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
            return StrataError(Code.DEADLINE, "it took too long")
        except Exception:  # noqa: BLE001 - the outermost handler: a defect must not take the connection's word away
            _log.exception("a request met a defect", method=scope["method"], path=scope["path"])
            return StrataError(Code.INTERNAL, "a defect of the hub; its log has more under the request id")
        return None

    async def _identify(self, scope: Scope, credentials: Credentials) -> Principal:
        at = (scope["method"], scope["path"])
        if at in self._public:
            return NOBODY
        if at in self._shown and credentials == Credentials():
            return PASSER_BY
        if credentials.bearer.startswith("hst-") and scope["scheme"] == "https":
            raise StrataError(
                Code.UNAUTHENTICATED,
                "a host shows its certificate here; its secret is for a hub on loopback without TLS",
                hint="strata join",
            )
        return await self._site.authenticator.identify(credentials)


def _exact(endpoints: Any) -> Collection[tuple[str, str]]:
    """Methods and paths that are let through unknown callers; compared as they are, so they have no parameters."""
    found = frozenset((endpoint.method, endpoint.path) for endpoint in endpoints)
    assert not any("{" in path for _, path in found)
    return found


def _check_url(scope: Scope) -> None:
    if b"%00" in scope["raw_path"] or len(scope["query_string"]) > MAX_QUERY:
        raise StrataError(Code.INVALID, "this URL cannot be one of ours")


def _first(headers: Sequence[tuple[bytes, bytes]]) -> dict[bytes, bytes]:
    found: dict[bytes, bytes] = {}
    for name, value in headers:
        found.setdefault(name, value)
    return found


def _credentials(scope: Scope, headers: dict[bytes, bytes]) -> Credentials:
    kind, _, bearer = headers.get(b"authorization", b"").decode("latin-1").partition(" ")
    if kind and kind.lower() != "bearer":
        raise HttpRefusal(401, Code.UNAUTHENTICATED, "credentials come as `Authorization: Bearer …`")
    return Credentials(
        bearer=bearer.strip(),
        operator_token=headers.get(b"x-operator-token", b"").decode("latin-1"),
        certificate_der=scope.get(PEER, b""),
    )


class _Answer:
    """Sends, with what every reply has in common, and remembers whether it has begun."""

    def __init__(self, send: Send, request_id: str) -> None:
        self._send = send
        self._headers = [
            (b"x-request-id", request_id.encode()),
            (b"cache-control", b"no-store"),
            (b"x-content-type-options", b"nosniff"),
        ]
        self.status = 0

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
            message["headers"] = [*message.get("headers", []), *self._headers]
        if message.get("more_body", False):
            async with asyncio.timeout(SEND_S):
                await self._send(message)
        else:
            await self._send(message)
