"""The application: FastAPI with the routes of the table, behind a root that knows every caller."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from fastapi import FastAPI, Request
from starlette.exceptions import HTTPException
from starlette.responses import Response

from strata import __version__
from strata.base.errors import Code, StrataError
from strata.train.api import openapi
from strata.train.api.declare import Endpoint
from strata.train.api.errors import HttpRefusal, render
from strata.train.api.root import Root
from strata.train.api.serve import served
from strata.train.api.site import Site


def application(site: Site, table: Sequence[Endpoint]) -> Root:
    app = described_app(table, lambda endpoint: served(site, endpoint))
    app.add_exception_handler(StrataError, _strata)
    app.add_exception_handler(HTTPException, _http)
    app.add_exception_handler(Exception, _defect)
    public = [(each.method, each.path) for each in table if each.role is None]
    return Root(app, site.authenticator, public)


def described_app(table: Sequence[Endpoint], answer: Callable[[Endpoint], Callable[..., Any]]) -> FastAPI:
    """The routes of the table and their document."""
    # No page of its own: it would load scripts from elsewhere. The document is behind the same door as all the rest.
    app = FastAPI(title="Strata training server", version=__version__, docs_url=None, redoc_url=None, openapi_url=None)
    app.router.redirect_slashes = False
    described = openapi.Described(table)
    for endpoint in (*table, openapi.endpoint(app)):
        app.add_api_route(
            endpoint.path,
            answer(endpoint),
            methods=[endpoint.method],
            name=endpoint.name,
            response_model=None,
            openapi_extra=described.operation(endpoint),
            operation_id=f"{endpoint.name}.{endpoint.path.strip('/').replace('/', '.')}",
            summary=endpoint.summary,
        )
    openapi.complete(app, described)
    return app


async def _strata(request: Request, error: Exception) -> Response:
    del request
    assert isinstance(error, StrataError)
    return render(error)


async def _http(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    if error.status_code == 405:
        return render(HttpRefusal(405, Code.UNSUPPORTED, f"{request.method} is not possible here"))
    if error.status_code == 404:
        return render(StrataError(Code.NOT_FOUND, f"there is nothing at {request.url.path[:200]!r}"))
    return render(HttpRefusal(error.status_code, Code.INVALID, str(error.detail)))


async def _defect(request: Request, error: Exception) -> Response:
    """The root logs it."""
    del request, error
    return render(StrataError(Code.INTERNAL, "a defect of the server; its log has more under the request id"))
