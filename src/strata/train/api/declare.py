"""How an endpoint is declared: method, path, who may call it, and the function that answers.

What it reads and replies stands in the signature of that function and nowhere else. The routes, the OpenAPI document
and the abuse tests are made from the same declarations, so there is no route that one of them does not know.

A function that returns an operation of the core is handed on: the operation is made durable and the client gets its
future. If the content of such a request cannot be read, it becomes an operation that fails in its place, because the
clients count on after a refusal and everything after it would wait for ever.
"""

from __future__ import annotations

import types
import typing
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Literal

import msgspec
from starlette.requests import Request

from strata.base.errors import Code, StrataError
from strata.identity.roles import Role
from strata.train.core import ops

KIB: Final = 1024
MIB: Final = 1024 * KIB
BATCH: Final = 0
"""A limit that is the server's setting."""
Method = Literal["GET", "POST", "PUT", "DELETE"]
Handler = Callable[..., Awaitable[Any]]


@dataclass(frozen=True, slots=True)
class Raw:
    """A body that is more than a little JSON, and how it says that it is written."""

    content: bytes
    media_type: str


@dataclass(frozen=True, slots=True)
class Answer:
    """A reply that is made by the endpoint itself."""

    content: bytes
    status: int = 200
    media_type: str = "application/json"
    headers: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Signature:
    body: Any
    """A Struct, `Raw`, or None."""
    query: Any
    reply: Any
    """A Struct, `Answer`, operations of the core, or None for an empty reply."""

    @property
    def operates(self) -> bool:
        return self.reply is not None and set(options(self.reply)) <= _OPERATIONS


@dataclass(frozen=True, slots=True)
class Endpoint:
    method: Method
    path: str
    role: Role | None
    """None: anybody at all may call it."""
    handler: Handler
    limit: int = 64 * KIB
    """Bytes of the body at most."""

    @property
    def name(self) -> str:
        return f"{self.handler.__module__.rpartition('.')[2]}.{self.handler.__name__}"

    @property
    def summary(self) -> str:
        return (self.handler.__doc__ or "").strip().partition("\n")[0]

    def signature(self) -> Signature:
        hints = typing.get_type_hints(self.handler, include_extras=True)
        reply = hints["return"]
        found = Signature(hints.get("body"), hints.get("query"), None if reply is type(None) else reply)
        for part in (found.body, found.query, found.reply):
            if part is not None and not all(issubclass(each, msgspec.Struct | Raw | Answer) for each in options(part)):
                raise StrataError(Code.INTERNAL, f"{self.name}: {part} is no message")
        return found


def options(part: Any) -> tuple[type, ...]:
    """The members of a union, or the one type."""
    if isinstance(part, types.UnionType) or typing.get_origin(part) is typing.Union:
        return tuple(each for option in typing.get_args(part) for each in options(option))
    return (part,)


_OPERATIONS: Final = set(options(ops.Operation))


def media_type(request: Request) -> str:
    return request.headers.get("content-type", "").partition(";")[0].strip().lower()
