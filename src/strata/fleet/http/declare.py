"""How an endpoint is declared: method, path, who may call it, and the function that answers.

What it reads and replies stands in the signature of that function and nowhere else. The router, the OpenAPI document
and the abuse tests are made from the same declarations, so there is no route that one of them does not know.
"""

from __future__ import annotations

import typing
from collections.abc import AsyncIterable, Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Literal

import msgspec
from starlette.datastructures import Headers
from starlette.types import Receive

from strata.base.errors import Code, StrataError
from strata.identity.roles import Kind, Principal, Role

KIB: Final = 1024
MIB: Final = 1024 * KIB
Method = Literal["GET", "POST", "PUT", "DELETE"]


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


@dataclass(slots=True)
class Call:
    """One request, after its caller is known."""

    caller: Principal
    path: Mapping[str, str]
    headers: Headers
    receive: Receive
    welcome: Callable[[], Awaitable[None]]
    """Asks again whether the caller may be here: for replies that go on for long."""

    @property
    def actor(self) -> str:
        return self.caller.actor

    async def gone(self) -> None:
        """Returns when the client has left. Only after its body was read."""
        while (await self.receive())["type"] != "http.disconnect":
            pass


class Upload(AsyncIterable[bytes]):
    """A body that is not JSON, as it comes: bounded in size, and not slower than it may be."""


@dataclass(frozen=True, slots=True)
class Download:
    """A reply that is not JSON."""

    content: bytes | AsyncIterable[bytes]
    media_type: str = "application/octet-stream"
    headers: Mapping[str, str] = field(default_factory=dict)


Handler = Callable[..., Awaitable[Any]]


@dataclass(frozen=True, slots=True)
class Signature:
    body: Any
    """A Struct, `Upload`, or None."""
    query: Any
    reply: Any
    """A Struct, `Download`, or None for an empty reply."""


@dataclass(frozen=True, slots=True)
class Endpoint:
    method: Method
    path: str
    need: Need
    handler: Handler
    limit: int = 64 * KIB
    """Bytes of the body at most."""
    public_read: bool = False
    """A hub that was told to show itself to everybody shows this."""

    @property
    def name(self) -> str:
        return f"{self.handler.__module__.rpartition('.')[2]}.{self.handler.__name__}"

    @property
    def summary(self) -> str:
        return (self.handler.__doc__ or "").strip().partition("\n")[0]

    def signature(self) -> Signature:
        hints = typing.get_type_hints(self.handler, include_extras=True)
        found = Signature(hints.get("body"), hints.get("query"), _none(hints["return"]))
        for part in (found.body, found.query, found.reply):
            if part not in (None, Upload) and not _declared(part):
                raise StrataError(Code.INTERNAL, f"{self.name}: {part} is no message")
        return found


def _none(hint: Any) -> Any:
    return None if hint is type(None) else hint


def _declared(part: Any) -> bool:
    options = typing.get_args(part) or (part,)
    return all(isinstance(each, type) and issubclass(each, msgspec.Struct | Download) for each in options)
