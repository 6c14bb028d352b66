"""First page of the dashboard: attention, figures, running and ended jobs (8), host tiles (48)."""

from __future__ import annotations

import asyncio
from typing import Annotated, Final

import msgspec

from strata.fleet.wire.hosts import HostPageReply
from strata.fleet.wire.jobs import JobsReply
from strata.fleet.wire.overview import OverviewReply
from strata.http.route import VIEWER, Route
from strata.web.page import Page, View

SHOWN: Final = 8
TILES: Final = 48


class OverviewPageQuery(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    project: Annotated[str, msgspec.Meta(max_length=64)] = ""


async def overview(page: Page, query: OverviewPageQuery) -> View:
    """Returns what needs attention, and what the fleet does."""
    figures, running, ended, hosts = await asyncio.gather(
        page.get("/v1/overview", OverviewReply, project=query.project),
        page.get(
            "/v1/jobs",
            JobsReply,
            status=["running", "claimed"],
            project=query.project,
            order="newest",
            progress="true",
            limit=SHOWN,
        ),
        page.get("/v1/jobs", JobsReply, project=query.project, order="ended", hidden="false", limit=SHOWN),
        page.get("/v1/hosts", HostPageReply, limit=TILES),
    )
    return page.render(
        "overview.html",
        title="Overview",
        section="/",
        topics=["jobs", "hosts"],
        every_s=10,
        figures=figures,
        counts=running.by_status,
        running=running.jobs,
        ended=ended.jobs,
        hosts=hosts.hosts,
        more_hosts=hosts.total - len(hosts.hosts),
        host_names={**running.hosts, **ended.hosts},
        project=query.project,
    )


ROUTES = (Route("GET", "/", VIEWER, overview),)
