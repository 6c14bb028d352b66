"""Roles (viewer, researcher, operator, admin) and principals, and the errors when a role is missing."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import IntEnum, StrEnum

from strata.base.errors import Code, StrataError
from strata.database.events import Actor


class Role(IntEnum):
    """Each may do what the ones before it may."""

    VIEWER = 1
    """Reads jobs, hosts, logs and artifacts."""
    RESEARCHER = 2
    """Submits jobs and sources, changes jobs and projects of her own, trains models through a training server."""
    OPERATOR = 3
    """Changes the jobs and projects of all, sets quotas, invites, drains and revokes hosts."""
    ADMIN = 4
    """Makes and revokes keys."""

    @classmethod
    def named(cls, name: str) -> Role:
        try:
            return cls[name.upper()]
        except KeyError:
            names = ", ".join(role.name.lower() for role in cls)
            raise StrataError(Code.INVALID, f"{name!r} is not a role", hint=f"one of {names}") from None


class CallerKind(StrEnum):
    KEY = "key"
    HOST = "host"
    OPERATOR = "operator"
    TENANT = "tenant"
    """Whom a hub has authenticated, and names to a training server that trusts it."""


@dataclass(frozen=True, slots=True)
class Principal:
    kind: CallerKind
    id: str
    role: Role | None
    """None for a host: what it may do follows from the leases it holds."""
    name: str = ""
    """Whom a key was made for. Keys of one name are of one owner."""
    address: str = field(default="", compare=False)
    """Where the request came from, as the server sees it."""

    @property
    def owner(self) -> str:
        """Returns who owns what the caller queues: it stays the same when a key is renewed under its name."""
        return self.name or self.id or str(self.kind)

    @property
    def actor(self) -> Actor:
        """Returns how events name the caller."""
        return Actor(f"{self.kind}:{self.id}" if self.id else str(self.kind), self.address)

    def at(self, address: str) -> Principal:
        """The same caller, whose request came from this address."""
        return Principal(self.kind, self.id, self.role, self.name, address)

    def require_role(self, role: Role) -> None:
        if self.role is None or self.role < role:
            have = "a host" if self.role is None else f"the role {self.role.name.lower()}"
            raise StrataError(Code.FORBIDDEN, f"this needs the role {role.name.lower()}; the caller has {have}")

    def require_host(self) -> str:
        """The id of the calling host."""
        if self.kind is not CallerKind.HOST:
            raise StrataError(Code.FORBIDDEN, "only an enrolled host may do this", hint="strata join")
        return self.id


OPERATOR = Principal(CallerKind.OPERATOR, "", Role.ADMIN)
"""The caller with the hub's operator token."""
