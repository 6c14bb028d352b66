"""Declares a route: method, path, access (`PUBLIC`, `VIEWER`, `OPERATOR`, `HOST` …), body limit (64 KiB by default),
and its signature.

What the handler reads and replies stands in its signature and nowhere else. The router, the OpenAPI document and the
abuse tests are made from the same declarations, so there is no route that one of them does not know.
"""

from __future__ import annotations

import types
import typing
from collections.abc import AsyncIterable, Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Generic, Literal, TypeVar

import msgspec
from starlette.datastructures import Headers
from starlette.types import Receive

from strata.base.errors import Code, StrataError
from strata.database.events import Actor
from strata.http.budget import BodyReservation
from strata.identity.roles import CallerKind, Principal, Role

KIB: Final = 1024
MIB: Final = 1024 * KIB
LIMIT_FROM_SETTINGS: Final = 0
"""A limit of bodies that is a setting of the server."""
Method = Literal["GET", "HEAD", "POST", "PUT", "DELETE"]
Handler = Callable[..., Awaitable[Any]]
S_co = TypeVar("S_co", covariant=True)


@dataclass(frozen=True, slots=True)
class Access:
    """Who may call: people from a role on, hosts, or any client at all."""

    role: Role | None = None
    host: bool = False
    public: bool = False

    def check(self, caller: Principal) -> None:
        if self.public or (self.host and caller.kind is CallerKind.HOST):
            return
        if self.role is None:
            caller.require_host()
        else:
            caller.require_role(self.role)

    def __str__(self) -> str:
        if self.public:
            return "anybody"
        words = [] if self.role is None else [self.role.name.lower()]
        return " or ".join([*words, *(["host"] if self.host else [])])


PUBLIC: Final = Access(public=True)
HOST: Final = Access(host=True)
VIEWER: Final = Access(Role.VIEWER)
RESEARCHER: Final = Access(Role.RESEARCHER)
OPERATOR: Final = Access(Role.OPERATOR)
ADMIN: Final = Access(Role.ADMIN)
READER: Final = Access(Role.VIEWER, host=True)
UPLOADER: Final = Access(Role.RESEARCHER, host=True)


OWNED: Final = {
    "artifact": "An artifact is of the owner who committed it first, and of the owners of the jobs that made it.",
    "caller": "Each caller has a space of its own: the path names nothing of another caller.",
    "data": "A name of data is of the owner who used it first.",
    "job": "A job is of the owner who queued it.",
    "project": "A project, with its schedules and secrets, is of the owner who used it first.",
    "sweep": "A sweep is of the owner whose manifest declared it.",
    "tenant": "What a training server has is of one tenant, hidden from all others; a hub names its caller as tenant.",
}
"""What belongs to somebody, and to whom. Only its owner and operators may change it, and what is of a tenant only the
tenant: `tests/abuse/test_hub_owners.py` and `test_train_tenants.py` try every route."""
READS: Final = "none: it changes nothing"


@dataclass(slots=True)
class HttpCall(Generic[S_co]):
    """One request, after its caller is known. `context` is what the handlers of a server work with."""

    context: S_co
    caller: Principal
    path: Mapping[str, str]
    """The parameters of the path."""
    headers: Headers
    receive: Receive
    reauthenticate: Callable[[], Awaitable[None]]
    """Raises if the credentials of the request are not good any more: for replies that take long."""
    method: str = ""
    target: str = ""
    """Path and query as they were sent, for a handler that forwards the request."""
    reservation: BodyReservation | None = None
    """What the body holds of the server's memory for bodies; None where there is no such budget."""

    @property
    def actor(self) -> Actor:
        return self.caller.actor

    async def disconnected(self) -> None:
        """Return when the client has closed the connection. Only after its body was read."""
        while (await self.receive())["type"] != "http.disconnect":
            pass

    def shrink_reservation(self, size: int) -> None:
        """Reserve at most so many bytes from now on: for a handler that has dropped its body and waits."""
        if self.reservation is not None:
            self.reservation.shrink(size)


class Content:
    """A body or a reply that is no JSON message."""

    __slots__ = ()


class Upload(Content, AsyncIterable[bytes]):
    """A body as it arrives: bounded in size, and not slower than the server allows."""


@dataclass(frozen=True, slots=True)
class RawBody(Content):
    """A whole body that the handler decodes itself, and the media type it was sent as."""

    content: bytes
    media_type: str


@dataclass(frozen=True, slots=True)
class RawReply(Content):
    """A reply that the handler encodes itself."""

    content: bytes | AsyncIterable[bytes]
    status: int = 200
    media_type: str = "application/json"
    headers: Mapping[str, str] = field(default_factory=dict)
    close: Callable[[], Awaitable[None]] | None = None
    """Called once when the reply is sent or its client has left, even if `content` was never read: a generator that has
    not started runs none of its own code then."""


@dataclass(frozen=True, slots=True)
class Signature:
    """What a client sends and gets: each is a message, a kind of `Content`, a union of these, or None."""

    body: Any
    query: Any
    reply: Any
    """None for an empty reply."""


@dataclass(frozen=True, slots=True)
class Route:
    method: Method
    path: str
    access: Access
    handler: Handler
    limit: int = 64 * KIB
    """Bytes of the body at most."""
    public_read: bool = False
    """Shown to clients without credentials by a server whose settings allow that."""
    any_query: bool = False
    """The handler takes the query as it was sent."""
    documented: Signature | None = None
    """What clients send and get, where that differs from the signature of the handler."""
    owner: str = ""
    """The owner of what it changes, if a person below an operator may call it: a word of `OWNED`, or `none: WHY`."""
    operation: str = ""
    """MODULE.NAME in the OpenAPI document, where that differs from the handler's own."""

    @property
    def name(self) -> str:
        return self.operation or f"{self.handler.__module__.rpartition('.')[2]}.{self.handler.__name__}"

    @property
    def summary(self) -> str:
        return (self.handler.__doc__ or "").strip().partition("\n")[0]

    def signature(self) -> Signature:
        signature = self.documented or signature_of(self.handler)
        for part in (signature.body, signature.query, signature.reply):
            if part is not None and not all(map(_is_declared, union_members(part))):
                raise StrataError(Code.INTERNAL, f"{self.name}: {part} is no message")
        return signature


def signature_of(handler: Handler) -> Signature:
    hints = typing.get_type_hints(handler, include_extras=True)
    reply = hints["return"]
    return Signature(hints.get("body"), hints.get("query"), None if reply is type(None) else reply)


def union_members(declared: Any) -> tuple[Any, ...]:
    """The members of a union, or the one type."""
    if isinstance(declared, types.UnionType) or typing.get_origin(declared) is typing.Union:
        return tuple(member for option in typing.get_args(declared) for member in union_members(option))
    return (declared,)


def is_message(declared: Any) -> bool:
    return isinstance(declared, type) and issubclass(declared, msgspec.Struct)


def _is_declared(declared: Any) -> bool:
    return isinstance(declared, type) and issubclass(declared, msgspec.Struct | Content)
