"""From declarations to a router: decode, check who calls, answer. Nothing is served that was not declared."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
from starlette.datastructures import Headers
from starlette.routing import Route, Router
from starlette.types import Receive, Scope, Send

from strata.base.errors import Code, StrataError
from strata.base.failpoint import failpoint
from strata.fleet.http.body import QueryReader, decode
from strata.fleet.http.call import Call
from strata.fleet.http.site import Site
from strata.http.body import Incoming, check_media_type
from strata.http.declare import Endpoint, Upload
from strata.http.errors import HttpRefusal
from strata.http.reply import response
from strata.http.root import CALLER, WELCOME


class Served:
    """One endpoint as an ASGI application."""

    def __init__(self, site: Site, endpoint: Endpoint) -> None:
        self._site = site
        self._endpoint = endpoint
        shape = endpoint.signature()
        self._body: Any = shape.body
        self._decoder = None if shape.body in (None, Upload) else msgspec.json.Decoder(shape.body)
        self._query = None if shape.query is None else QueryReader(shape.query)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        caller = scope[CALLER]
        self._endpoint.need.check(caller)
        headers = Headers(scope=scope)
        call = Call(caller, scope["path_params"], headers, receive, scope[WELCOME])
        given: dict[str, Any] = {}
        if self._query is not None:
            given["query"] = self._query.read(scope["query_string"])
        elif scope["query_string"]:
            raise StrataError(Code.INVALID, "this takes no parameters in the URL")
        incoming = Incoming(receive, headers, self._endpoint.limit, self._site.pace)
        if self._body is Upload:
            given["body"] = incoming
        elif self._decoder is not None:
            check_media_type(headers)
            given["body"] = await decode(self._decoder, await incoming.whole() or b"{}")
        elif await incoming.whole():
            raise StrataError(Code.INVALID, "this takes no body")
        reply = await self._endpoint.handler(self._site, call, **given)
        if self._endpoint.method != "GET":
            self._site.feed.poke()
            failpoint("fleet.http.before_reply")
        await response(reply)(scope, receive, send)


class ByMethod:
    """All methods of a path."""

    def __init__(self, served: Mapping[str, Served]) -> None:
        self._served = served

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        served = self._served.get(scope["method"])
        if served is None:
            allowed = ", ".join(sorted(self._served))
            raise HttpRefusal(405, Code.UNSUPPORTED, f"{scope['method']} is not possible here; {allowed} is")
        await served(scope, receive, send)


def router(site: Site, table: Sequence[Endpoint]) -> Router:
    """In the order of the table: what hosts ask all the time comes first."""
    paths: dict[str, dict[str, Served]] = {}
    for endpoint in table:
        methods = paths.setdefault(endpoint.path, {})
        if endpoint.method in methods:
            raise StrataError(Code.INTERNAL, f"{endpoint.method} {endpoint.path} is declared twice")
        methods[endpoint.method] = Served(site, endpoint)
    routes = [Route(path, endpoint=ByMethod(methods)) for path, methods in paths.items()]
    return Router(routes, redirect_slashes=False, default=_nothing_here)


async def _nothing_here(scope: Scope, receive: Receive, send: Send) -> None:
    del receive, send
    raise StrataError(Code.NOT_FOUND, f"there is nothing at {scope['path'][:200]!r}", hint="GET /v1/openapi.json")
