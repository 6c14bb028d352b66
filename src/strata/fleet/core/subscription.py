"""Subscriptions to events of jobs and hosts: which events there are, which are the default, and the title and text of
the message (lines of log, metrics) that is sent.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Final, Literal

import msgspec

from strata.database import event_kinds

MESSAGE_LINES: Final = 10
_LINE: Final = 200
_METRICS: Final = 8

SubscribedEvent = Literal["completed", "failed", "cancelled", "retried", "expired", "started", "host_lost"]
Severity = Literal["success", "warning", "failure", "info"]
KIND_OF: Final[Mapping[SubscribedEvent, str]] = {
    "completed": event_kinds.JOB_COMPLETED,
    "failed": event_kinds.JOB_FAILED,
    "cancelled": event_kinds.JOB_CANCELLED,
    "retried": event_kinds.JOB_RETRIED,
    "expired": event_kinds.JOB_EXPIRED,
    "started": event_kinds.JOB_STARTED,
    "host_lost": event_kinds.HOST_LOST,
}
"""How the event feed spells each."""
DEFAULT_EVENTS: Final[tuple[SubscribedEvent, ...]] = ("completed", "failed", "expired")
_SEVERITIES: Final[Mapping[str, Severity]] = {
    event_kinds.JOB_COMPLETED: "success",
    event_kinds.JOB_FAILED: "failure",
    event_kinds.JOB_STARTED: "info",
}
"""The severity of kinds that are no warning."""


class Subscription(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The hub encrypts it as a whole, because the URL holds a token."""

    url: str
    service: str
    """What Apprise calls the service of the URL, as in `Slack`."""
    events: Annotated[tuple[SubscribedEvent, ...], msgspec.Meta(min_length=1)] = DEFAULT_EVENTS
    project: str = ""
    """Jobs of this project; empty: the owner's own jobs, unless `all_jobs`."""
    all_jobs: bool = False

    def covers_kind(self, kind: str) -> bool:
        return any(KIND_OF[event] == kind for event in self.events)

    def covers_job(self, subscriber: str, *, owner: str, project: str) -> bool:
        """`subscriber` and `owner` are the names of keys."""
        if self.all_jobs:
            return True
        return project == self.project if self.project else owner == subscriber


class EventMessage(msgspec.Struct, frozen=True, kw_only=True):
    title: str
    body: str
    severity: Severity = "info"


class JobNews(msgspec.Struct, frozen=True, kw_only=True):
    """What a message says about one event of a job."""

    kind: str
    job_id: str
    label: str
    host: str = ""
    reason: str = ""
    metrics: Mapping[str, float] = {}
    log_tail: str = ""


def compose_message(news: JobNews) -> EventMessage:
    short = news.job_id.partition("_")[2][:10]
    lines = [f"job: {news.label} ({short})"]
    if news.host:
        lines.append(f"host: {news.host}")
    if news.reason:
        lines.append(f"reason: {news.reason}")
    if news.metrics:
        shown = [f"{name} {value:.4g}" for name, value in list(news.metrics.items())[:_METRICS]]
        lines.append(f"metrics: {', '.join(shown)}")
    tail = last_lines(news.log_tail)
    if tail:
        lines += ["", "last lines:", *tail]
    lines += ["", f"strata show {short}"]
    return _message(news.kind, news.label, lines)


def compose_host_message(kind: str, host: str) -> EventMessage:
    return _message(kind, host, [f"host: {host}", "", "strata hosts"])


def _message(kind: str, subject: str, lines: Sequence[str]) -> EventMessage:
    title = f"{subject} {event_kinds.PREDICATES[kind]}"
    return EventMessage(title=title, body="\n".join(lines), severity=_SEVERITIES.get(kind, "warning"))


def last_lines(text: str) -> Sequence[str]:
    """The last lines that are not empty, each shortened, and without control characters."""
    lines = [line.rstrip() for line in text.splitlines() if line.strip()][-MESSAGE_LINES:]
    return ["".join(char for char in line[:_LINE] if char.isprintable()) for line in lines]
