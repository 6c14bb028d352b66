"""The table of every route that a hub serves, its OpenAPI document, and the application."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Final

from strata.base.failpoint import failpoint
from strata.fleet.http import routes as fleet
from strata.http.app import BrowserPages, Serving, build_app
from strata.http.authentication import RequestAuthenticator
from strata.http.errors import PLAIN
from strata.http.openapi import BINARY, DocumentSpec, with_document
from strata.http.reading import ReadingRules
from strata.http.root import RootApp
from strata.http.route import KIB, READER, Access, Route
from strata.hub import gangs
from strata.hub.context import GatewayContext
from strata.hub.gateway import server_views, servers

DOCUMENT_PATH: Final = "/v1/openapi.json"


def _security(access: Access) -> Sequence[str]:
    if access.public:
        return ()
    return ("bearer", *(["operator"] if access.role is not None else []), *(["certificate"] if access.host else []))


DOCUMENT: Final = DocumentSpec(
    title="Strata hub",
    security_schemes={
        "bearer": {"type": "http", "scheme": "bearer"},
        "operator": {"type": "apiKey", "in": "header", "name": "X-Operator-Token"},
        "certificate": {"type": "mutualTLS"},
    },
    security=_security,
    raw_body={"application/octet-stream": BINARY},
    raw_reply={
        "events.events": "text/event-stream",
        "logs.metrics": "application/x-ndjson",
        "metrics.expose": "text/plain",
    },
)
ROUTES: Final = with_document(
    (*fleet.ROUTES, *gangs.ROUTES, *server_views.ROUTES, *servers.ROUTES),
    DOCUMENT_PATH,
    READER,
    DOCUMENT,
    limit=64 * KIB,
    operation="about.openapi",
)


def application(context: GatewayContext, pages: BrowserPages) -> RootApp:
    """`pages` is the dashboard: its routes come after those of the API."""
    routes = (*ROUTES, *pages.routes)
    authenticator = RequestAuthenticator(
        routes,
        context.authenticator,
        address=context.address,
        # The header of the `tinker` SDK, for the routes that are forwarded to training servers.
        key_header="X-API-Key",
        key_header_below="/api/v1/",
        public_read=context.public_read,
        session_cookie=pages.session_cookie,
    )

    def before_reply(route: Route) -> None:
        if route.method != "GET":
            context.feed.notify_written()
            failpoint("fleet.http.before_reply")

    serving = Serving(
        context=context,
        server="hub",
        document_path=DOCUMENT_PATH,
        rules=ReadingRules(pace=context.pace),
        limits=context.limits,
        before_reply=before_reply,
        errors=replace(PLAIN, page=pages.error_page),
        on_reply=context.hub_metrics.requests.count,
    )
    return build_app(routes, serving, authenticator.identify)
