"""Page of the list of jobs: columns, filters, 50 rows."""

from __future__ import annotations

from typing import Annotated, Final, Literal

import msgspec

from strata.fleet.core.job import JobStatus
from strata.fleet.wire.jobs import JobsReply
from strata.http.route import VIEWER, Route
from strata.web.page import Page, View

LIMIT: Final = 50
COLUMNS: Final = ("host", "attempt", "owner", "project", "model", "sweep", "priority", "seed", "changed", "created")
SHOWN: Final = ("host", "attempt", "owner", "changed")
"""Columns unless the URL names others; name, status and id are always there."""
Word = Annotated[str, msgspec.Meta(max_length=256)]


class JobsPageQuery(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    q: Word = ""
    status: tuple[JobStatus, ...] = ()
    project: Word = ""
    owner: Word = ""
    sweep: Word = ""
    host: Word = ""
    hidden: bool = False
    columns: tuple[Word, ...] = ()
    order: Literal["newest", "ended", "id"] = "newest"
    after: Word = ""


async def jobs(page: Page, query: JobsPageQuery) -> View:
    """Jobs that match the filter, a page at a time."""
    same = {name: getattr(query, name) for name in ("status", "project", "owner", "sweep", "host", "order", "after")}
    hidden = "true" if query.hidden else "false"
    reply = await page.get("/v1/jobs", JobsReply, search=query.q, hidden=hidden, progress="true", limit=LIMIT, **same)
    return page.render(
        "jobs.html",
        title="Jobs",
        section="/jobs",
        topics=["jobs"],
        query=query,
        jobs=reply.jobs,
        next=reply.next,
        by_status=reply.by_status,
        statuses=tuple(JobStatus),
        columns=[column for column in COLUMNS if column in (query.columns or SHOWN)],
        all_columns=COLUMNS,
        host_names=reply.hosts,
    )


ROUTES = (Route("GET", "/jobs", VIEWER, jobs),)
