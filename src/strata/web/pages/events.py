"""Page of events: 50 rows, search, kinds, links of subjects."""

from __future__ import annotations

from typing import Annotated, Final
from urllib.parse import quote

import msgspec

from strata.fleet.wire.events import EventsReply, FeedEvent
from strata.http.route import VIEWER, Route
from strata.web.page import Page, View

PAGE: Final = 50
Word = Annotated[str, msgspec.Meta(max_length=256)]
Id = Annotated[str, msgspec.Meta(max_length=128)]
KINDS: Final = {
    "Jobs": "job.*",
    "Hosts": "host.*",
    "Sweeps": "sweep.*",
    "Schedules": "schedule.*",
    "Artifacts": "artifact.*",
    "Keys": "key.*",
    "Invites": "invite.*",
    "Sessions": "session.*",
    "Quotas": "quota.*",
}
_PATHS: Final = {"job": "/jobs/", "host": "/hosts/", "artifact": "/artifacts/"}


class EventsPageQuery(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    q: Word = ""
    kind: Word = ""
    """A kind, or a glob as in `job.*`."""
    subject: Id = ""
    before: Id = ""
    project: Word = ""


async def show_events(page: Page, query: EventsPageQuery) -> View:
    """Returns what has happened, who did it, and when."""
    reply = await page.get(
        "/v1/events",
        EventsReply,
        before=query.before or "newest",
        kind=(query.kind,) if query.kind else (),
        search=query.q,
        subject=query.subject,
        limit=PAGE,
    )
    return page.render(
        "events.html",
        title="Events",
        # Older pages do not change.
        topics=[] if query.before else ["events"],
        section="/events",
        query=query,
        events=reply.events,
        host_names=reply.hosts,
        key_names=reply.keys,
        job_names=reply.jobs,
        kinds=KINDS,
        older=reply.cursor if reply.more else "",
        subject_path=subject_path,
    )


def subject_path(event: FeedEvent) -> str:
    """The page of what the event is about; empty where there is none."""
    thing = event.kind.partition(".")[0]
    if thing == "sweep":
        project = str(event.body.get("project", "default"))
        return f"/sweeps/{quote(project, safe='')}/{quote(event.subject)}"
    return f"{_PATHS[thing]}{quote(event.subject, safe='')}" if thing in _PATHS and event.subject else ""


ROUTES = (Route("GET", "/events", VIEWER, show_events),)
