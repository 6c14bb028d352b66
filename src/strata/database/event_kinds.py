"""The names of all events (`job.created`, `host.lost` …), each with its words for people.

Every component of the hub's database records or reads events, so the names stand beside the event table, below all of
them. A kind is `thing.verb` in the past. It is stored, sent to webhooks and quoted in runbooks: a name never changes
its meaning.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

_PREDICATES: dict[str, str] = {}


def _kind(name: str, predicate: str) -> str:
    _PREDICATES[name] = predicate
    return name


JOB_CREATED: Final = _kind("job.created", "was queued")
JOB_CHANGED: Final = _kind("job.changed", "was changed by a manifest")
JOB_CLAIMED: Final = _kind("job.claimed", "was claimed by a host")
JOB_STARTED: Final = _kind("job.started", "runs")
JOB_SERVING: Final = _kind("job.serving", "serves requests")
JOB_CHECKPOINTED: Final = _kind("job.checkpointed", "stored a checkpoint")
JOB_COMPLETED: Final = _kind("job.completed", "is completed")
JOB_FAILED: Final = _kind("job.failed", "failed")
JOB_RETRIED: Final = _kind("job.retried", "is retried")
JOB_CANCELLED: Final = _kind("job.cancelled", "was cancelled")
JOB_REQUEUED: Final = _kind("job.requeued", "was queued again after its end")
JOB_ARCHIVED: Final = _kind("job.archived", "was archived")
JOB_EXPIRED: Final = _kind("job.expired", "lost its host")
"""The lease ran out. Its host may still report in time (`JOB_REVIVED`), or another one takes it (`JOB_LOST`)."""
JOB_REVIVED: Final = _kind("job.revived", "runs on: its host reported in time after the lease ran out")
JOB_LOST: Final = _kind("job.lost", "was taken over by another host after the lease ran out")
JOB_PREEMPTED: Final = _kind("job.preempted", "makes room for a job of higher priority")
JOB_RESERVED: Final = _kind("job.reserved", "has a host reserved, which drains for it")
JOB_UNRESERVED: Final = _kind("job.unreserved", "has the host no longer reserved")
JOB_EXEC_REQUESTED: Final = _kind("job.exec_requested", "gets a command to run beside it")
JOB_EXEC_ENDED: Final = _kind("job.exec_ended", "has no command beside it any more: it ended")

HOST_REGISTERED: Final = _kind("host.registered", "registered")
HOST_ENROLLED: Final = _kind("host.enrolled", "was enrolled")
HOST_CERTIFIED: Final = _kind("host.certified", "got a certificate")
HOST_REVOKED: Final = _kind("host.revoked", "was revoked")
HOST_LOST: Final = _kind("host.lost", "is lost: it was silent for longer than a lease")
HOST_RETURNED: Final = _kind("host.returned", "is back after it was lost")
HOST_STATE_SET: Final = MappingProxyType(
    {
        "active": _kind("host.active", "takes jobs again"),
        "draining": _kind("host.draining", "finishes its jobs and takes no more"),
        "paused": _kind("host.paused", "is paused"),
        "quarantined": _kind("host.quarantined", "is quarantined"),
        "left": _kind("host.left", "left the fleet"),
    }
)
"""The kind of event by the state that was set."""

COORDINATOR_CERTIFIED: Final = _kind("coordinator.certified", "got a certificate as a coordinator")

KEY_MADE: Final = _kind("key.made", "was made")
KEY_REVOKED: Final = _kind("key.revoked", "was revoked")
INVITE_MADE: Final = _kind("invite.made", "was made")
INVITE_REVOKED: Final = _kind("invite.revoked", "was revoked")
REVOKED: Final = MappingProxyType({"key": KEY_REVOKED, "invite": INVITE_REVOKED, "host": HOST_REVOKED})
"""The kind of event by the credential that was revoked."""
SESSION_OPENED: Final = _kind("session.opened", "was opened by a login")
SESSION_CLOSED: Final = _kind("session.closed", "was closed by a logout")

QUOTA_CHANGED: Final = _kind("quota.changed", "was changed")
SWEEP_DECLARED: Final = _kind("sweep.declared", "was declared or changed by a manifest")
SWEEP_STOPPED: Final = _kind("sweep.stopped", "was stopped")
SWEEP_RESUMED: Final = _kind("sweep.resumed", "goes on")
SWEEP_FAILED: Final = _kind("sweep.failed", "cannot queue its next trial")
SCHEDULE_DECLARED: Final = _kind("schedule.declared", "was declared or changed by a manifest")
SCHEDULE_QUEUED: Final = _kind("schedule.queued", "queued a run")
SCHEDULE_SKIPPED: Final = _kind("schedule.skipped", "left out a run")
SCHEDULE_PAUSED: Final = _kind("schedule.paused", "is paused")
SCHEDULE_RESUMED: Final = _kind("schedule.resumed", "goes on")
SCHEDULE_REMOVED: Final = _kind("schedule.removed", "was removed")

ARTIFACT_COMMITTED: Final = _kind("artifact.committed", "was committed")
ARTIFACT_PINNED: Final = _kind("artifact.pinned", "was pinned, and is kept")
ARTIFACT_UNPINNED: Final = _kind("artifact.unpinned", "is no longer pinned")
ARTIFACT_WITHDRAWN: Final = _kind("artifact.withdrawn", "was withdrawn")
ARTIFACT_REMOVED: Final = _kind("artifact.removed", "was removed")
CHUNK_DAMAGED: Final = _kind("chunk.damaged", "is damaged, and in quarantine until it is uploaded again")
HUB_RESTORED: Final = _kind("hub.restored", "was restored from a backup")

PREDICATES: Final[Mapping[str, str]] = MappingProxyType(_PREDICATES)
"""What happened to the subject of each kind, as in "SUBJECT was queued"."""
FREQUENT: Final = (JOB_CLAIMED, JOB_STARTED, JOB_COMPLETED)
"""Kinds of which every job has one: the index of kinds leaves them out."""
ENDED: Final = (JOB_COMPLETED, JOB_FAILED, JOB_CANCELLED)
