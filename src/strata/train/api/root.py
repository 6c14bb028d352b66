"""The root of the application: nobody gets past it unknown, and no failure leaves it without a form.

A path that does not exist is told only to those who may look: to everybody else all of it is one closed door.
"""

from __future__ import annotations

import asyncio
import re
import secrets
import time
from collections.abc import Collection, Sequence
from typing import Final

from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from strata.base import log
from strata.base.errors import Code, StrataError
from strata.identity.authenticate import Authenticator, Credentials
from strata.identity.roles import Kind, Principal
from strata.train.api.body import MAX_QUERY
from strata.train.api.errors import HttpRefusal, render
from strata.train.api.serve import CALLER

NOBODY: Final = Principal(Kind.KEY, "", None)
_REQUEST_ID: Final = re.compile(rb"[A-Za-z0-9._-]{1,64}")
_log = log.get(__name__)


class Root:
    """`public` are the methods and paths that anybody may call; compared as they are, so they have no parameters."""

    def __init__(self, app: ASGIApp, authenticator: Authenticator, public: Collection[tuple[str, str]]) -> None:
        assert not any("{" in path for _, path in public)
        self._app = app
        self._authenticator = authenticator
        self._public = frozenset(public)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            raise StrataError(Code.UNSUPPORTED, f"{scope['type']} is not served here")
        headers = _first(scope["headers"])
        given = headers.get(b"x-request-id", b"")
        request_id = given.decode() if _REQUEST_ID.fullmatch(given) else secrets.token_hex(8)
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
            if (scope["method"], scope["path"]) in self._public:
                scope[CALLER] = NOBODY
            else:
                scope[CALLER] = await self._authenticator.identify(_credentials(headers))
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
            return StrataError(Code.DEADLINE, "it took too long")
        except Exception:  # noqa: BLE001 - the outermost handler: a defect must not take the connection's word away
            _log.exception("a request met a defect", method=scope["method"], path=scope["path"])
            return StrataError(Code.INTERNAL, "a defect of the server; its log has more under the request id")
        return None


def _check_url(scope: Scope) -> None:
    if b"%00" in scope["raw_path"] or len(scope["query_string"]) > MAX_QUERY:
        raise StrataError(Code.INVALID, "this URL cannot be one of ours")


def _first(headers: Sequence[tuple[bytes, bytes]]) -> dict[bytes, bytes]:
    found: dict[bytes, bytes] = {}
    for name, value in headers:
        found.setdefault(name, value)
    return found


def _credentials(headers: dict[bytes, bytes]) -> Credentials:
    """`X-API-Key`, as the clients of this protocol send it, or a bearer token, as everything else of ours takes it."""
    key = headers.get(b"x-api-key", b"").decode("latin-1").strip()
    kind, _, bearer = headers.get(b"authorization", b"").decode("latin-1").partition(" ")
    if not key and kind and kind.lower() != "bearer":
        raise HttpRefusal(401, Code.UNAUTHENTICATED, "credentials come as `X-API-Key: …` or `Authorization: Bearer …`")
    return Credentials(
        bearer=key or bearer.strip(), operator_token=headers.get(b"x-operator-token", b"").decode("latin-1")
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
        async with asyncio.timeout(60.0):
            await self._send(message)
