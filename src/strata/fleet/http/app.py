"""The hub's application: a router for the table, behind a root that knows every caller."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from starlette.types import Scope

from strata.base.errors import Code, StrataError
from strata.fleet.http.serve import router
from strata.fleet.http.site import Site
from strata.http.declare import Endpoint
from strata.http.errors import PLAIN
from strata.http.root import NOBODY, PEER, FirstHeaders, Root, check_channel, credentials, exact
from strata.identity.authenticate import Credentials
from strata.identity.roles import Kind, Principal, Role

PASSER_BY: Final = Principal(Kind.KEY, "", Role.VIEWER)


def application(site: Site, table: Sequence[Endpoint]) -> Root:
    return Root(router(site, table), _Door(site, table).identify, PLAIN, what="hub", limits=site.limits)


class _Door:
    def __init__(self, site: Site, table: Sequence[Endpoint]) -> None:
        self._authenticator = site.authenticator
        self._address = site.address
        self._public = exact(endpoint for endpoint in table if endpoint.need.public)
        self._shown = exact(endpoint for endpoint in table if endpoint.public_read) if site.public_read else ()

    async def identify(self, scope: Scope, headers: FirstHeaders) -> Principal:
        given = credentials(headers, certificate_der=scope.get(PEER, b""))
        at = (scope["method"], scope["path"])
        if at in self._public:
            return NOBODY
        if at in self._shown and given == Credentials():
            return PASSER_BY
        if given.bearer.startswith("hst-") and scope["scheme"] == "https":
            raise StrataError(
                Code.UNAUTHENTICATED,
                "a host shows its certificate here; its secret is for the Unix socket of a hub on its own machine",
                hint="strata join",
            )
        return check_channel(scope, await self._authenticator.identify(given), self._address)
