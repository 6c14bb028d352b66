"""The notices of a fleet that need a person, worst first: their wording, their one suggested action, and when a silent
host, a full disk, an old backup or a growing backlog becomes one.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final, Literal, NamedTuple

import msgspec

AttentionKind = Literal[
    "hub_disk", "hub_backup", "lost_host", "quarantined_host", "unservable_jobs", "failed_job", "failed_jobs", "backlog"
]
AttentionAction = Literal["free_disk", "back_up", "show_host", "resume_host", "show_job", "list_failed", "list_waiting"]

OF_FLEET: Final[frozenset[AttentionKind]] = frozenset({"hub_disk", "hub_backup", "lost_host", "quarantined_host"})
"""What concerns the jobs of every project."""
SHOWN: Final = 5
"""Failed jobs that are shown one by one, and hosts of a kind."""
BACKLOG_JOBS: Final = 10
BACKLOG_WAIT_S: Final = 600.0
BACKLOG_SPAN_S: Final = 3600.0
BACKLOG_GROWTH: Final = 1.5
"""A queue is a backlog when so many jobs wait, the first of them for so long, and it has grown by so much in the
span."""
_MIB: Final = 1024 * 1024


class AttentionItem(msgspec.Struct, frozen=True):
    """Something that a person has to look at."""

    kind: AttentionKind
    what: str
    since_s: float
    why: str
    action: AttentionAction
    """One thing to do about it, with `subject`."""
    fix: str
    """The same in words."""
    subject: str = ""
    """The id of the job or host."""
    jobs: int = 1
    """How many it is about."""


class HubDisk(NamedTuple):
    free_bytes: int
    keep_free_bytes: int
    writable: bool
    """The last write to the database succeeded."""


def check_disk(disk: HubDisk, now_s: float) -> Iterable[AttentionItem]:
    if not disk.writable:
        why = f"a write to its database failed; {disk.free_bytes // _MIB} MiB are free"
        yield AttentionItem("hub_disk", "The hub cannot write", now_s, why, "free_disk", "free some space on its disk")
    elif disk.free_bytes < 2 * disk.keep_free_bytes:
        why = f"{disk.free_bytes // _MIB} MiB are free; below {disk.keep_free_bytes // _MIB} no artifact or log is kept"
        what = "The hub's disk is nearly full"
        yield AttentionItem(
            "hub_disk", what, now_s, why, "free_disk", "remove artifacts, or free some space on its disk"
        )


class HubBackups(NamedTuple):
    """The scheduled backups of a hub."""

    newest_at_s: float | None
    """None: there is no complete one."""
    max_age_s: float
    reason: str = ""
    """Why there is none."""


def check_backups(backups: HubBackups | None, now_s: float) -> Iterable[AttentionItem]:
    """None: no backups are scheduled."""
    if backups is None:
        return
    fix = "see journalctl -u strata-hub-backup, or run 'strata backup'"
    if backups.newest_at_s is None:
        yield AttentionItem("hub_backup", "The hub has no backup", now_s, backups.reason, "back_up", fix)
    elif now_s - backups.newest_at_s > backups.max_age_s:
        hours = round((now_s - backups.newest_at_s) / 3600)
        why = f"the newest complete one is {hours} hours old; it may be {backups.max_age_s / 3600:g}"
        since_s = backups.newest_at_s + backups.max_age_s
        yield AttentionItem("hub_backup", "The hub's backup is old", since_s, why, "back_up", fix)


class SilentHost(NamedTuple):
    host_id: str
    name: str
    seen_at_s: float


def check_silent(hosts: Sequence[SilentHost]) -> Iterable[AttentionItem]:
    for each in sorted(hosts, key=lambda host: -host.seen_at_s)[:SHOWN]:
        yield AttentionItem(
            "lost_host",
            f"{each.name} does not answer",
            each.seen_at_s,
            "the hub has heard nothing from its agent since then; its jobs went to other hosts",
            "show_host",
            "look at the machine and its agent; remove the host if it is gone for good",
            each.host_id,
        )
    if len(hosts) > SHOWN:
        more = len(hosts) - SHOWN
        since_s = min(host.seen_at_s for host in hosts)
        yield AttentionItem(
            "lost_host", f"{more} more hosts do not answer", since_s, "", "show_host", "look at the list of hosts"
        )


def check_quarantined(host_id: str, name: str, reason: str, since_s: float) -> AttentionItem:
    fix = "mend the host, then resume it"
    return AttentionItem("quarantined_host", f"{name} is quarantined", since_s, reason, "resume_host", fix, host_id)


def check_unservable(job_id: str, label: str, jobs: int, since_s: float, headline: str, fix: str) -> AttentionItem:
    what = f"{label} can run nowhere" if jobs == 1 else f"{label} and {jobs - 1} more jobs can run nowhere"
    return AttentionItem("unservable_jobs", what, since_s, headline, "show_job", fix or "change the job", job_id, jobs)


class FailedJob(NamedTuple):
    job_id: str
    label: str
    at_s: float
    reason: str


def check_failed(failed: Sequence[FailedJob]) -> Iterable[AttentionItem]:
    """Newest first, of the last day; archived ones are none."""
    for each in failed[:SHOWN]:
        reason = each.reason.strip().partition("\n")[0]
        fix = "look at its log, then requeue or archive it"
        yield AttentionItem("failed_job", f"{each.label} failed", each.at_s, reason, "show_job", fix, each.job_id)
    more = len(failed) - SHOWN
    if more > 0:
        what = f"{more} more jobs failed in the last day"
        yield AttentionItem(
            "failed_jobs", what, failed[-1].at_s, "", "list_failed", "look at the failed jobs", jobs=more
        )


def check_backlog(
    history: Sequence[tuple[float, float]], waiting: int, longest_wait_s: float, now_s: float
) -> Iterable[AttentionItem]:
    """`history` is how many jobs waited, and when, oldest first."""
    recent = [(at_s, jobs) for at_s, jobs in history if at_s >= now_s - BACKLOG_SPAN_S]
    if waiting < BACKLOG_JOBS or longest_wait_s < BACKLOG_WAIT_S or not recent:
        return
    # The last time it was that short: it has grown since.
    since_s, least = min(recent, key=lambda point: (point[1], -point[0]))
    if waiting < BACKLOG_GROWTH * max(least, 1.0):
        return
    minutes = round(longest_wait_s / 60)
    why = f"{waiting} jobs wait, {round(least)} did then; the first has waited for {minutes} minutes"
    fix = "add hosts, or look at what holds the queue up"
    yield AttentionItem("backlog", "The queue grows", since_s, why, "list_waiting", fix, jobs=waiting)
