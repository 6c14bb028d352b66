"""First page of a coordinator without a hub: redirects to the list of gangs."""

from __future__ import annotations

from strata.http.route import VIEWER, RawReply, Route
from strata.web.page import Page, redirect


async def start(page: Page) -> RawReply:
    """The list of gangs."""
    del page
    return redirect("/gangs")


ROUTES = (Route("GET", "/", VIEWER, start),)
