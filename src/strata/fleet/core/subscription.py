"""Subscriptions of people to events of jobs: which events one covers, and the message that is sent for an event."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Final, Literal

import msgspec

MESSAGE_LINES: Final = 10
_LINE: Final = 200
_METRICS: Final = 8

SubscribedEvent = Literal["completed", "failed", "cancelled", "retried", "host_lost", "started"]
KIND_OF: Final[Mapping[SubscribedEvent, str]] = {
    "completed": "job.completed",
    "failed": "job.failed",
    "cancelled": "job.cancelled",
    "retried": "job.retried",
    "host_lost": "job.expired",
    "started": "job.started",
}
"""How the event feed spells each."""
DEFAULT_EVENTS: Final[tuple[SubscribedEvent, ...]] = ("completed", "failed", "host_lost")


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
    severity: Literal["success", "warning", "failure", "info"] = "info"


class JobNews(msgspec.Struct, frozen=True, kw_only=True):
    """What a message says about one event of a job."""

    kind: str
    job_id: str
    label: str
    host: str = ""
    reason: str = ""
    metrics: Mapping[str, float] = {}
    log_tail: str = ""


_VERBS: Final[Mapping[str, tuple[str, Literal["success", "warning", "failure", "info"]]]] = {
    "job.completed": ("is completed", "success"),
    "job.failed": ("failed", "failure"),
    "job.cancelled": ("was cancelled", "warning"),
    "job.retried": ("is retried", "warning"),
    "job.expired": ("lost its host", "warning"),
    "job.started": ("runs", "info"),
}


def compose_message(news: JobNews) -> EventMessage:
    verb, severity = _VERBS[news.kind]
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
    return EventMessage(title=f"{news.label} {verb}", body="\n".join(lines), severity=severity)


def last_lines(text: str) -> Sequence[str]:
    """The last lines that are not empty, each shortened, and without control characters."""
    lines = [line.rstrip() for line in text.splitlines() if line.strip()][-MESSAGE_LINES:]
    return ["".join(char for char in line[:_LINE] if char.isprintable()) for line in lines]
