"""The list of all pages, the navigation of the dashboard (names, order, icons), and error pages."""

from __future__ import annotations

from collections.abc import Sequence
from types import ModuleType
from typing import Final

from starlette.responses import Response
from starlette.types import Scope

from strata.base.clock import Clock
from strata.base.errors import Code, StrataError
from strata.http.app import BrowserPages
from strata.http.auth_failures import AuthFailures
from strata.http.authentication import API_PATHS, FirstHeaders
from strata.http.root import CALLER
from strata.http.route import Route
from strata.web.api import Api
from strata.web.assets import Assets
from strata.web.documents import BASE, HOME, document_routes, find_documents
from strata.web.live import LiveTopics
from strata.web.page import SECURITY_HEADERS, FragmentCache, NavEntry, PageAuthenticator, ProjectList, Site, to_route
from strata.web.pages import (
    artifacts,
    events,
    gangs,
    hosts,
    job,
    jobs,
    login,
    overview,
    people,
    playground,
    rollouts,
    search,
    sweeps,
    training,
)
from strata.web.render import ADVICE, make_environment
from strata.web.session import SessionCookie

PAGES: Final[Sequence[ModuleType]] = (
    overview,
    jobs,
    job,
    sweeps,
    hosts,
    training,
    rollouts,
    playground,
    artifacts,
    events,
    people,
    gangs,
    search,
    login,
)
NAVIGATION: Final = (
    NavEntry(path="/", name="Overview", icon="overview"),
    NavEntry(path="/jobs", name="Jobs", icon="jobs"),
    NavEntry(path="/sweeps", name="Sweeps", icon="sweeps"),
    NavEntry(path="/hosts", name="Hosts", icon="hosts"),
    NavEntry(path="/gangs", name="Gangs", icon="gangs"),
    NavEntry(path="/training", name="Training", icon="training"),
    NavEntry(path="/artifacts", name="Artifacts", icon="artifacts"),
    NavEntry(path="/events", name="Events", icon="events"),
    NavEntry(path="/people", name="People", icon="people"),
    NavEntry(path=BASE + HOME, name="Documents", icon="documents"),
)
"""The rail; entries whose page a server does not have are left out."""


def build_pages(  # noqa: PLR0913 (what a server gives its dashboard)
    *,
    api: Api,
    clock: Clock,
    authenticator: PageAuthenticator,
    failures: AuthFailures,
    live: LiveTopics,
    server_id: str,
    tls: bool,
    pages: Sequence[ModuleType] = PAGES,
) -> BrowserPages:
    """Builds the pages of a server. `server_id` tells the cookies of servers on one machine apart."""
    assets = Assets()
    documents = find_documents()
    declared: list[Route] = [route for module in pages for route in module.ROUTES]
    served = {route.path for route in declared} | {BASE + path for path in documents.paths}
    environment = make_environment({"asset": assets.url, "documents": BASE + HOME if documents.paths else ""})
    site = Site(
        api=api,
        clock=clock,
        authenticator=authenticator,
        failures=failures,
        cookie=SessionCookie(server_id, tls=tls),
        assets=assets,
        live=live,
        environment=environment,
        navigation=[entry for entry in NAVIGATION if entry.path in served],
        tls=tls,
        fragments=FragmentCache(clock, live),
        projects=ProjectList(clock),
    )

    def error_page(scope: Scope, headers: FirstHeaders, error: StrataError, status: int) -> Response | None:
        return _error_page(site, scope, headers, error, status)

    routes = [
        *(to_route(route, site) for route in declared),
        *login.login_routes(site),
        *document_routes(documents, environment, SECURITY_HEADERS),
        *live.routes(),
        *assets.routes(),
    ]
    return BrowserPages(routes=routes, session_cookie=site.cookie.name, error_page=error_page)


def _error_page(site: Site, scope: Scope, headers: FirstHeaders, error: StrataError, status: int) -> Response | None:
    """Returns what happened, why, and what to do; an unknown caller is sent to the login instead."""
    fragment = headers.get(b"hx-request") == b"true"
    is_browser = fragment or b"text/html" in headers.get(b"accept", b"")
    if not is_browser or scope["path"].startswith(API_PATHS):
        return None
    if error.code is Code.UNAUTHENTICATED:
        path: str = scope["raw_path"].decode("latin-1")
        query = scope["query_string"].decode("latin-1")
        target = f"{path}?{query}" if query else path
        there = login.login_path("/" if fragment or scope["method"] != "GET" else target)
        location = {"HX-Redirect": there} if fragment else {"Location": there}
        return Response(status_code=200 if fragment else 303, headers={**SECURITY_HEADERS, **location})
    caller = scope.get(CALLER)
    html = site.environment.get_template("error.html").render(
        error=error,
        status=status,
        advice=error.hint or ADVICE.get(error.code, ""),
        known=caller is not None and caller.role is not None,
        fragment=fragment,
    )
    return Response(html, status, dict(SECURITY_HEADERS), "text/html; charset=utf-8")
