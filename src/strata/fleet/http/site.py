"""What the routes work with: the services of one hub, handed to every handler."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from strata.base.clock import Clock
from strata.fleet.artifacts.service import Artifacts
from strata.fleet.http.feed import Feed
from strata.fleet.http.watch import Attempts, Watch
from strata.fleet.service import Fleet
from strata.fleet.streams import Streams
from strata.http.body import Pace
from strata.http.root import RootLimits
from strata.identity.authenticate import Authenticator
from strata.identity.ca import Authority
from strata.identity.enroll import Enrollment
from strata.identity.ports import IdentityStore


class Schemas(Protocol):
    """The JSON Schemas of trainers, as the last manifest gave them."""

    async def schemas(self) -> Mapping[str, Any]: ...

    async def put_schemas(self, schemas: Mapping[str, Any]) -> None: ...


@dataclass
class Writing:
    """Whether the last write that was tried for its own sake failed."""

    fails: bool = False


@dataclass(frozen=True, kw_only=True)
class Site:
    fleet: Fleet
    artifacts: Artifacts
    streams: Streams
    identity: IdentityStore
    enrollment: Enrollment
    authenticator: Authenticator
    authority: Authority
    schemas: Schemas
    feed: Feed
    clock: Clock
    tls: bool = False
    address: str = "the hub's Unix socket"
    """Where the hub's own user reaches it, for hints."""
    public_read: bool = False
    owner_only: bool = False
    """Jobs run as the hub's own user and can read its operator token, so whoever submits one is the hub's owner."""
    manifest: Path | None = None
    """The file that `reload` applies."""
    pace: Pace = field(default_factory=Pace)
    writing: Writing = field(default_factory=Writing)
    limits: RootLimits = field(default_factory=RootLimits)
    stopping: asyncio.Event = field(default_factory=asyncio.Event)
    watch: Watch = field(default_factory=Watch)
    attempts: Attempts = field(default_factory=Attempts)
