"""Builds the dashboard of a training server without a hub."""

from __future__ import annotations

import asyncio

from strata.base.digest import sha256_hex
from strata.http.app import BrowserPages
from strata.train.api import completions, service
from strata.train.api.context import ApiContext
from strata.web.api import LocalApi
from strata.web.live import LiveTopics, NoEvents
from strata.web.pages import login, lone_server
from strata.web.routes import build_pages


def server_pages(context: ApiContext, stopping: asyncio.Event) -> BrowserPages:
    """Returns what browsers see of the server."""
    return build_pages(
        api=LocalApi((*service.ROUTES, *completions.ROUTES)),
        clock=context.clock,
        authenticator=context.authenticator,
        failures=context.failures,
        live=LiveTopics(NoEvents(), stopping),
        server_id=sha256_hex(str(context.settings.data).encode())[:8],
        tls=False,
        pages=(lone_server, login),
    )
