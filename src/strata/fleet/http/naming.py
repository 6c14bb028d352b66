"""What a path calls things, and what they are: ids may be shortened as long as one thing only is meant."""

from __future__ import annotations

import re
from typing import Final

from strata.base.errors import Code, StrataError
from strata.base.ids import resolve_prefix
from strata.fleet.core.hold import unknown_job
from strata.fleet.http.call import Call
from strata.fleet.http.site import Site
from strata.fleet.ports import Hold, HostRow

_JOB: Final = re.compile(r"job1_[0-9a-f]{64}")
_ARTIFACT: Final = re.compile(r"artifact1_[0-9a-f]{64}")
_PREFIX: Final = re.compile(r"[0-9a-z_]{1,80}")


async def job_of(site: Site, call: Call) -> str:
    """The whole id of the job in the path. It may not exist: a whole id is not looked up here."""
    text = call.path["id"]
    if _JOB.fullmatch(text):
        return text
    if not _PREFIX.fullmatch(text):
        raise unknown_job(text[:100])
    return resolve_prefix(text, await site.fleet.store.find(text))


async def artifact_of(site: Site, call: Call) -> str:
    text = call.path["id"]
    if _ARTIFACT.fullmatch(text):
        return text
    if not _PREFIX.fullmatch(text):
        raise StrataError(Code.NOT_FOUND, f"there is no artifact {text[:100]!r}")
    return resolve_prefix(text, await site.artifacts.index.find(text))


async def host_of(site: Site, call: Call) -> HostRow:
    """By id or by name."""
    text = call.path["id"]
    found = [host for host in await site.fleet.hosts() if text in (host.id, host.name)]
    # A name may have been used by a host that was revoked since; the one that is here is meant.
    found = [host for host in found if host.id == text or host.state != "left"] or found[-1:]
    if not found:
        raise StrataError(Code.NOT_FOUND, f"there is no host {text[:100]!r}")
    return found[0]


def hold(call: Call, job_id: str, epoch: int) -> Hold:
    """An attempt of the calling host: whose it is follows from the credentials, never from a message."""
    return Hold(call.caller.need_host(), job_id, epoch)
