"""Calls the public API for a page in the hub's process, with the caller's rights."""

from __future__ import annotations

import typing
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from re import Pattern
from typing import Any, Protocol

import msgspec
from starlette.datastructures import Headers
from starlette.routing import compile_path

from strata.base.errors import Code, StrataError
from strata.http.route import HttpCall, Route

Query = Mapping[str, object]


class Api(Protocol):
    """What pages read and act through."""

    async def request(self, call: HttpCall[Any], method: str, path: str, query: Query, body: object) -> Any:
        """The reply message of this route to the caller of `call`. Parameters that are None or empty are left out."""


@dataclass(frozen=True)
class _ApiRoute:
    route: Route
    pattern: Pattern[str]
    query: Any
    body: Any


class LocalApi:
    """The API of the server that shows the dashboard: no request leaves the process, and every check is made."""

    def __init__(self, routes: Sequence[Route]) -> None:
        self._routes: dict[str, list[_ApiRoute]] = {}
        for route in routes:
            hints = typing.get_type_hints(route.handler)
            declared = _ApiRoute(route, compile_path(route.path)[0], hints.get("query"), hints.get("body"))
            self._routes.setdefault(route.method, []).append(declared)

    async def request(self, call: HttpCall[Any], method: str, path: str, query: Query, body: object) -> Any:
        for each in self._routes.get(method, ()):
            match = each.pattern.match(path)
            if match is not None:
                return await _handle(each, call, path, match.groupdict(), query, body)
        raise StrataError(Code.NOT_FOUND, f"this server has no {method} {path}")


async def _handle(
    declared: _ApiRoute, call: HttpCall[Any], path: str, parameters: Mapping[str, str], query: Query, body: object
) -> Any:
    declared.route.access.check(call.caller)
    # Without the headers of the browser: it accepts other types, and resumes other streams, than the API's clients.
    inner = type(call)(
        call.context,
        call.caller,
        parameters,
        Headers({}),
        call.receive,
        call.reauthenticate,
        declared.route.method,
        path,
    )
    arguments: dict[str, Any] = {}
    if declared.query is not None:
        arguments["query"] = _convert({name: value for name, value in query.items() if value}, declared.query)
    if declared.body is not None:
        arguments["body"] = body if isinstance(body, declared.body) else _convert(body or {}, declared.body)
    return await declared.route.handler(inner, **arguments)


def _convert(values: object, message: Any) -> Any:
    try:
        return msgspec.convert(values, message, strict=False)
    except msgspec.ValidationError as error:
        raise StrataError(Code.INVALID, str(error)) from None
