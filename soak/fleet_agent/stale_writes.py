"""Sends what a replaced host may still send, with its own credentials, and the documented replies to it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from strata.base.errors import Code, StrataError
from strata.fleet.artifacts.manifest import EMPTY_SHA256, ArtifactFile, ArtifactKind, ArtifactManifest, Lineage
from strata.fleet.client.hub_api import HubApi
from strata.fleet.client.hub_client import HubClient
from strata.fleet.core.job import Cause
from strata.fleet.core.jobspec import JobSpec
from strata.fleet.wire.leases import CompleteRequest, LeaseGiven, LeaseHeld

EXPECTED: Final = {
    **dict.fromkeys(("complete", "fail", "checkpoint", "result"), Code.STALE.value),
    "renewal": "stop stale",
}


def send_all(client: HubClient, job_id: str, epoch: int) -> dict[str, str]:
    """By message, the error code of the reply, or `accepted`."""
    hub = HubApi(client)
    lease = LeaseGiven(job_id=job_id, epoch=epoch, expires_in_s=0.0, spec=JobSpec(model="counting"))
    manifest = ArtifactManifest(files=(ArtifactFile(path="late", size=0, sha256=EMPTY_SHA256),))
    writes: dict[str, Callable[[], object]] = {
        "complete": lambda: hub.complete(lease, CompleteRequest(epoch=epoch)),
        "fail": lambda: hub.fail(lease, Cause.USER_ERROR, "late", {}),
        "checkpoint": lambda: hub.commit(lease, manifest, Lineage(kind=ArtifactKind.CHECKPOINT, model="counting")),
        "result": lambda: hub.commit(lease, manifest, Lineage(kind=ArtifactKind.RESULT, model="counting")),
    }
    replies = {name: _reply_code(write) for name, write in writes.items()}
    (verdict,) = hub.renew((LeaseHeld(job_id=job_id, epoch=epoch, running=True),)).verdicts
    return replies | {"renewal": f"{verdict.verdict} {verdict.cause}"}


def _reply_code(write: Callable[[], object]) -> str:
    try:
        write()
    except StrataError as error:
        return error.code.value
    return "accepted"
