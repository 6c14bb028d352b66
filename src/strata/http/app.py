"""Makes an ASGI application of routes: matching paths, 404 and 405 with their wording, replies, pages of a browser."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import msgspec
from starlette.datastructures import Headers
from starlette.responses import Response, StreamingResponse
from starlette.routing import compile_path
from starlette.types import Receive, Scope, Send

from strata.base.errors import Code, StrataError
from strata.http.authentication import Identify
from strata.http.errors import PLAIN, ErrorPage, ErrorTable, HttpRefusal
from strata.http.reading import ReadingRules, RequestReader
from strata.http.root import CALLER, REAUTHENTICATE, ROUTE, OnReply, RootApp, RootLimits
from strata.http.route import HttpCall, RawReply, Route

_encode: Final = msgspec.json.Encoder().encode


@dataclass(frozen=True, kw_only=True)
class Serving:
    """What the routes of one server are served with. `context` is handed to every handler, in a `call_type`."""

    context: Any
    server: str
    """What the reply to a request that met a defect calls the server."""
    document_path: str
    """Where the OpenAPI document is, for hints."""
    rules: ReadingRules
    errors: ErrorTable = PLAIN
    limits: RootLimits = field(default_factory=RootLimits)
    call_type: type[HttpCall[Any]] = HttpCall
    before_reply: Callable[[Route], None] | None = None
    """Called when a handler has returned, before its reply is sent."""
    on_reply: OnReply | None = None
    """Called with the status of every reply to an authenticated caller."""


@dataclass(frozen=True, kw_only=True)
class BrowserPages:
    """What a server shows to browsers, besides its API."""

    routes: Sequence[Route]
    session_cookie: str
    error_page: ErrorPage


def build_app(routes: Sequence[Route], serving: Serving, identify: Identify) -> RootApp:
    return RootApp(
        Router(routes, serving),
        identify,
        serving.errors,
        server=serving.server,
        limits=serving.limits,
        on_reply=serving.on_reply,
    )


class RouteApp:
    """One route as an ASGI application: check who calls, decode, handle, encode."""

    def __init__(self, route: Route, serving: Serving) -> None:
        self._route = route
        self._serving = serving
        self._reader = RequestReader(route, serving.rules)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        route, serving, budget = self._route, self._serving, self._serving.rules.budget
        caller = scope[CALLER]
        route.access.check(caller)
        headers = Headers(scope=scope)
        call = serving.call_type(
            serving.context,
            caller,
            scope["path_params"],
            headers,
            receive,
            scope[REAUTHENTICATE],
            scope["method"],
            _target(scope),
        )
        arguments = self._reader.read_query(scope["query_string"])
        if budget is None:
            arguments |= await self._reader.read_body(receive, headers, None)
            reply = await self._handle(call, arguments)
        else:
            owner = "" if route.access.public else await budget.owner(caller)
            with budget.budget.reserve(owner) as reservation:
                call.reservation = reservation
                arguments |= await self._reader.read_body(receive, headers, reservation)
                reply = await self._handle(call, arguments)
        try:
            if serving.before_reply is not None:
                serving.before_reply(route)
            await send_reply(reply, scope, receive, send)
        finally:
            if isinstance(reply, RawReply) and reply.close is not None:
                await reply.close()

    async def _handle(self, call: HttpCall[Any], arguments: dict[str, Any]) -> Any:
        handling = self._route.handler(call, **arguments)
        # The handler alone has the body now. Nothing counts it any more when the handler has returned or dropped it, so
        # it must not stay in memory while a slow client reads the reply.
        arguments.clear()
        return await handling


def _target(scope: Scope) -> str:
    query = scope["query_string"].decode("latin-1")
    path: str = scope["raw_path"].decode("latin-1")
    return f"{path}?{query}" if query else path


class Router:
    """Tries the routes in the order of the table, so what clients request all the time comes first."""

    def __init__(self, routes: Sequence[Route], serving: Serving) -> None:
        apps: dict[str, dict[str, RouteApp]] = {}
        for route in routes:
            methods = apps.setdefault(route.path, {})
            if route.method in methods:
                raise StrataError(Code.INTERNAL, f"{route.method} {route.path} is declared twice")
            methods[route.method] = RouteApp(route, serving)
        self._paths = [(path, compile_path(path)[0], methods) for path, methods in apps.items()]
        self._document_path = serving.document_path

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        method, path = scope["method"], scope["path"]
        allowed: set[str] = set()
        for template, pattern, methods in self._paths:
            match = pattern.match(path)
            if match is None:
                continue
            scope.setdefault(ROUTE, template)
            app = methods.get(method)
            if app is not None:
                scope[ROUTE] = template
                scope["path_params"] = match.groupdict()
                await app(scope, receive, send)
                return
            allowed |= methods.keys()
        if allowed:
            possible = ", ".join(sorted(allowed))
            raise HttpRefusal(405, Code.UNSUPPORTED, f"{method} is not possible here; {possible} is")
        raise StrataError(Code.NOT_FOUND, f"there is nothing at {path[:200]!r}", hint=f"GET {self._document_path}")


async def send_reply(reply: Any, scope: Scope, receive: Receive, send: Send) -> None:
    if isinstance(reply, RawReply):
        kind: type[Response] = Response if isinstance(reply.content, bytes) else StreamingResponse
        response = kind(reply.content, reply.status, dict(reply.headers), media_type=reply.media_type)
        await response(scope, receive, send)
        return
    # Most replies by far are messages, and starlette's class of responses costs more than their encoding.
    body = b"" if reply is None else _encode(reply)
    headers = [] if reply is None else [(b"content-length", b"%d" % len(body)), (b"content-type", b"application/json")]
    await send({"type": "http.response.start", "status": 204 if reply is None else 200, "headers": headers})
    await send({"type": "http.response.body", "body": body})
