"""How an endpoint is declared: method, path, who may call it, and the function that answers.

What it reads and replies stands in the signature of that function and nowhere else. The routes, the OpenAPI document
and the abuse tests are made from the same declarations, so there is no route that one of them does not know.
"""

from __future__ import annotations

import types
import typing
from collections.abc import AsyncIterable, Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Literal

import msgspec

from strata.base.errors import Code, StrataError
from strata.identity.roles import Kind, Principal, Role

KIB: Final = 1024
MIB: Final = 1024 * KIB
Method = Literal["GET", "HEAD", "POST", "PUT", "DELETE"]
Handler = Callable[..., Awaitable[Any]]


@dataclass(frozen=True, slots=True)
class Need:
    """Who may call: people from a role on, hosts, or anybody at all."""

    role: Role | None = None
    host: bool = False
    public: bool = False

    def check(self, caller: Principal) -> None:
        if self.public or (self.host and caller.kind is Kind.HOST):
            return
        if self.role is None:
            caller.need_host()
        else:
            caller.need(self.role)

    def __str__(self) -> str:
        if self.public:
            return "anybody"
        words = [] if self.role is None else [self.role.name.lower()]
        return " or ".join([*words, *(["host"] if self.host else [])])


PUBLIC: Final = Need(public=True)
HOST: Final = Need(host=True)
VIEWER: Final = Need(Role.VIEWER)
RESEARCHER: Final = Need(Role.RESEARCHER)
OPERATOR: Final = Need(Role.OPERATOR)
ADMIN: Final = Need(Role.ADMIN)
READER: Final = Need(Role.VIEWER, host=True)
UPLOADER: Final = Need(Role.RESEARCHER, host=True)


class Content:
    """What is read or replied and is no message in JSON."""

    __slots__ = ()


class Upload(Content, AsyncIterable[bytes]):
    """A body as it comes: bounded in size, and not slower than it may be."""


@dataclass(frozen=True, slots=True)
class Answer(Content):
    """A reply that is made by the endpoint itself."""

    content: bytes | AsyncIterable[bytes]
    status: int = 200
    media_type: str = "application/json"
    headers: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Signature:
    """Each is a message, a kind of `Content`, a union of these, or None."""

    body: Any
    query: Any
    reply: Any
    """None for an empty reply."""


@dataclass(frozen=True, slots=True)
class Endpoint:
    method: Method
    path: str
    need: Need
    handler: Handler
    limit: int = 64 * KIB
    """Bytes of the body at most."""
    public_read: bool = False
    """A server that was told to show itself to everybody shows this."""

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
            if part is not None and not all(map(_declared, options(part))):
                raise StrataError(Code.INTERNAL, f"{self.name}: {part} is no message")
        return found


def options(part: Any) -> tuple[Any, ...]:
    """The members of a union, or the one type."""
    if isinstance(part, types.UnionType) or typing.get_origin(part) is typing.Union:
        return tuple(each for option in typing.get_args(part) for each in options(option))
    return (part,)


def _declared(part: Any) -> bool:
    return isinstance(part, type) and issubclass(part, msgspec.Struct | Content)
