"""The application: FastAPI with the routes of the table, behind a root that knows every caller."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final

from fastapi import FastAPI, Request
from starlette.exceptions import HTTPException
from starlette.responses import Response
from starlette.types import Scope

from strata import __version__
from strata.base.errors import Code, StrataError
from strata.base.unix_socket import spell_address
from strata.http.declare import Endpoint
from strata.http.errors import HttpRefusal
from strata.http.root import (
    NOBODY,
    FirstHeaders,
    Identify,
    Root,
    RootLimits,
    check_channel,
    credentials,
    defect,
    exact,
)
from strata.identity.roles import Principal
from strata.train.api import openapi
from strata.train.api.errors import ERRORS
from strata.train.api.serve import served
from strata.train.api.site import Site

KEY_HEADER: Final = "X-API-Key"
_WHAT: Final = "server"


def application(site: Site, table: Sequence[Endpoint]) -> Root:
    app = described_app(table, lambda endpoint: served(site, endpoint))
    app.add_exception_handler(StrataError, _strata)
    app.add_exception_handler(HTTPException, _http)
    app.add_exception_handler(Exception, _defect)
    # A result is one piece and may be large: whoever asks for the next one without taking it is not waited for.
    limits = RootLimits(time_every_send=True, failures=site.failures)
    return Root(site.requests.counted(app, site.number), _door(site, table), ERRORS, what=_WHAT, limits=limits)


def _door(site: Site, table: Sequence[Endpoint]) -> Identify:
    """Takes `X-API-Key`, as the clients of this protocol send it, and what everything else of ours takes."""
    public = exact(endpoint for endpoint in table if endpoint.need.public)
    address = spell_address(site.settings.api_socket)

    async def identify(scope: Scope, headers: FirstHeaders) -> Principal:
        if (scope["method"], scope["path"]) in public:
            return NOBODY
        caller = await site.authenticator.identify(credentials(headers, key_header=KEY_HEADER))
        return check_channel(scope, caller, address)

    return identify


def described_app(table: Sequence[Endpoint], answer: Callable[[Endpoint], Callable[..., Any]]) -> FastAPI:
    """The routes of the table and their document."""
    # No page of its own: it would load scripts from elsewhere. The document is behind the same door as all the rest.
    app = FastAPI(title="Strata training server", version=__version__, docs_url=None, redoc_url=None, openapi_url=None)
    app.router.redirect_slashes = False
    schemas = openapi.schemas_of(table)
    for endpoint in (*table, openapi.endpoint(app)):
        app.add_api_route(
            endpoint.path,
            answer(endpoint),
            methods=[endpoint.method],
            name=endpoint.name,
            response_model=None,
            openapi_extra=openapi.operation(endpoint, schemas),
            operation_id=f"{endpoint.name}.{endpoint.path.strip('/').replace('/', '.')}",
            summary=endpoint.summary,
        )
    openapi.complete(app, schemas)
    return app


async def _strata(request: Request, error: Exception) -> Response:
    del request
    assert isinstance(error, StrataError)
    return ERRORS.render(error)


async def _http(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    if error.status_code == 405:
        return ERRORS.render(HttpRefusal(405, Code.UNSUPPORTED, f"{request.method} is not possible here"))
    if error.status_code == 404:
        return ERRORS.render(StrataError(Code.NOT_FOUND, f"there is nothing at {request.url.path[:200]!r}"))
    return ERRORS.render(HttpRefusal(error.status_code, Code.INVALID, str(error.detail)))


async def _defect(request: Request, error: Exception) -> Response:
    """The root logs it."""
    del request, error
    return ERRORS.render(defect(_WHAT))
