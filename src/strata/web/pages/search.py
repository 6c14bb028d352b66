"""Page of search over jobs, hosts, models and artifacts: 20 results of each."""

from __future__ import annotations

import asyncio
from typing import Annotated, Final

import msgspec

from strata.fleet.wire.artifacts import ArtifactRecord, ArtifactsReply
from strata.fleet.wire.hosts import HostPageReply, HostSummary
from strata.fleet.wire.jobs import Job, JobsReply
from strata.http.route import VIEWER, Route
from strata.web.page import Page, View

LIMIT: Final = 20


class SearchQuery(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    q: Annotated[str, msgspec.Meta(max_length=128)] = ""


async def search(page: Page, query: SearchQuery) -> View:
    """Returns what matches the word."""
    word = query.q.strip()
    jobs: tuple[Job, ...] = ()
    hosts: tuple[HostSummary, ...] = ()
    artifacts: tuple[ArtifactRecord, ...] = ()
    if word:
        found = await asyncio.gather(
            page.get("/v1/jobs", JobsReply, search=word, order="newest", limit=LIMIT),
            page.get("/v1/hosts", HostPageReply, search=word, limit=LIMIT),
            page.get("/v1/artifacts", ArtifactsReply, model=word, limit=LIMIT),
        )
        jobs, hosts, artifacts = found[0].jobs, found[1].hosts, found[2].artifacts
    return page.render("search.html", title="Search", word=word, jobs=jobs, hosts=hosts, artifacts=artifacts)


ROUTES = (Route("GET", "/search", VIEWER, search),)
