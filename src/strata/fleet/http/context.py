"""What the handlers of the hub work with: its services, one request, and the ids that a path names."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Protocol, TypeAlias

from strata.base.clock import Clock
from strata.base.errors import Code, StrataError
from strata.base.ids import resolve_prefix
from strata.fleet.artifacts.service import Artifacts
from strata.fleet.core.hold import unknown_job
from strata.fleet.http.feed import Feed
from strata.fleet.http.watch import Attempts, Watch
from strata.fleet.ports import Hold, HostRow
from strata.fleet.service import Fleet
from strata.fleet.streams import Streams
from strata.http.body import BodyPace
from strata.http.root import RootLimits
from strata.http.route import HttpCall
from strata.identity.authenticate import Authenticator
from strata.identity.ca import Authority
from strata.identity.enroll import Enrollment
from strata.identity.ports import IdentityStore

_JOB: Final = re.compile(r"job1_[0-9a-f]{64}")
_ARTIFACT: Final = re.compile(r"artifact1_[0-9a-f]{64}")
_PREFIX: Final = re.compile(r"[0-9a-z_]{1,80}")


class TrainerSchemas(Protocol):
    """The JSON Schemas of trainers, as the last manifest gave them."""

    async def schemas(self) -> Mapping[str, Any]: ...

    async def put_schemas(self, schemas: Mapping[str, Any]) -> None: ...


@dataclass
class Writing:
    """Whether the last write that was tried for its own sake failed."""

    fails: bool = False


@dataclass(frozen=True, kw_only=True)
class HubContext:
    fleet: Fleet
    artifacts: Artifacts
    streams: Streams
    identity: IdentityStore
    enrollment: Enrollment
    authenticator: Authenticator
    authority: Authority
    schemas: TrainerSchemas
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
    pace: BodyPace = field(default_factory=BodyPace)
    writing: Writing = field(default_factory=Writing)
    limits: RootLimits = field(default_factory=RootLimits)
    stopping: asyncio.Event = field(default_factory=asyncio.Event)
    watch: Watch = field(default_factory=Watch)
    attempts: Attempts = field(default_factory=Attempts)


HubCall: TypeAlias = HttpCall[HubContext]


async def job_of(context: HubContext, call: HubCall) -> str:
    """The whole id of the job in the path. It may not exist: a whole id is not looked up here."""
    text = call.path["id"]
    if _JOB.fullmatch(text):
        return text
    if not _PREFIX.fullmatch(text):
        raise unknown_job(text[:100])
    return resolve_prefix(text, await context.fleet.store.find(text))


async def artifact_of(context: HubContext, call: HubCall) -> str:
    text = call.path["id"]
    if _ARTIFACT.fullmatch(text):
        return text
    if not _PREFIX.fullmatch(text):
        raise StrataError(Code.NOT_FOUND, f"there is no artifact {text[:100]!r}")
    return resolve_prefix(text, await context.artifacts.index.find(text))


async def host_of(context: HubContext, call: HubCall) -> HostRow:
    """By id or by name."""
    text = call.path["id"]
    found = [host for host in await context.fleet.hosts() if text in (host.id, host.name)]
    # A name may have been used by a host that was revoked since; the one that is here is meant.
    found = [host for host in found if host.id == text or host.state != "left"] or found[-1:]
    if not found:
        raise StrataError(Code.NOT_FOUND, f"there is no host {text[:100]!r}")
    return found[0]


def hold(call: HubCall, job_id: str, epoch: int) -> Hold:
    """An attempt of the calling host: whose it is follows from the credentials, never from a message."""
    return Hold(call.caller.need_host(), job_id, epoch)
