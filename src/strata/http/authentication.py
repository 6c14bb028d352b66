"""Who calls: credentials from headers, certificates and channels, before any route is looked up."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping
from typing import Final

from starlette.types import Scope

from strata.base.errors import Code, StrataError
from strata.http.errors import HttpRefusal
from strata.http.route import Route
from strata.identity.authenticate import Authenticator, Credentials
from strata.identity.roles import CallerKind, Principal, Role

CLIENT_CERTIFICATE: Final = "strata.client_certificate"
"""In the scope: the client certificate that TLS has verified, in DER."""
UNIX_SOCKET: Final = "strata.unix_socket"
"""In the scope: the connection came by the server's Unix socket, which only its owner can reach."""

ANONYMOUS: Final = Principal(CallerKind.KEY, "", None)
ANONYMOUS_VIEWER: Final = Principal(CallerKind.KEY, "", Role.VIEWER)
"""A client without credentials, on the routes that the settings of a server make public."""

FirstHeaders = Mapping[bytes, bytes]
"""Names in lower case; of a repeated header the first."""
Identify = Callable[[Scope, FirstHeaders], Awaitable[Principal]]


class RequestAuthenticator:
    """`address` is the server's Unix socket, for hints. `key_header` is a header for keys besides `Authorization`, on
    paths that begin with `key_header_below`."""

    def __init__(
        self,
        routes: Iterable[Route],
        authenticator: Authenticator,
        *,
        address: str,
        key_header: str = "",
        key_header_below: str = "/",
        public_read: bool = False,
    ) -> None:
        routes = tuple(routes)
        self._authenticator = authenticator
        self._address = address
        self._key_header = key_header
        self._key_header_below = key_header_below
        self._public = _exact_paths(route for route in routes if route.access.public)
        self._shown = _exact_paths(route for route in routes if route.public_read) if public_read else ()

    async def identify(self, scope: Scope, headers: FirstHeaders) -> Principal:
        """The caller; UNAUTHENTICATED or FORBIDDEN if there is none that may call this server."""
        wanted = (scope["method"], scope["path"])
        if wanted in self._public:
            return ANONYMOUS
        certificate = scope.get(CLIENT_CERTIFICATE, b"")
        key_header = self._key_header if scope["path"].startswith(self._key_header_below) else ""
        credentials = read_credentials(headers, key_header=key_header, certificate_der=certificate)
        if wanted in self._shown and credentials == Credentials():
            return ANONYMOUS_VIEWER
        if credentials.bearer.startswith("hst-") and scope["scheme"] == "https":
            raise StrataError(
                Code.UNAUTHENTICATED,
                "a host shows its certificate here; its secret is for the Unix socket of a hub on its own machine",
                hint="strata join",
            )
        return check_channel(scope, await self._authenticator.identify(credentials), self._address)


def _exact_paths(routes: Iterable[Route]) -> Collection[tuple[str, str]]:
    """Methods and paths that need no credentials; compared as they are, so they have no parameters."""
    paths = frozenset((route.method, route.path) for route in routes)
    assert not any("{" in path for _, path in paths)
    return paths


def read_credentials(headers: FirstHeaders, *, key_header: str = "", certificate_der: bytes = b"") -> Credentials:
    """The credentials in the headers. A key in `key_header` counts before a bearer token."""
    key = headers.get(key_header.lower().encode(), b"").decode("latin-1").strip() if key_header else ""
    kind, _, bearer = headers.get(b"authorization", b"").decode("latin-1").partition(" ")
    if not key and kind and kind.lower() != "bearer":
        ways = f"`{key_header}: …` or `Authorization: Bearer …`" if key_header else "`Authorization: Bearer …`"
        raise HttpRefusal(401, Code.UNAUTHENTICATED, f"credentials come as {ways}")
    return Credentials(
        bearer=key or bearer.strip(),
        operator_token=headers.get(b"x-operator-token", b"").decode("latin-1"),
        certificate_der=certificate_der,
    )


def check_channel(scope: Scope, caller: Principal, address: str) -> Principal:
    """FORBIDDEN for more than a researcher's rights over plain TCP: a client that sends such a secret there would one
    day send it to another user of the machine who has taken the port. `address` is the server's Unix socket."""
    private = scope["scheme"] == "https" or scope.get(UNIX_SOCKET, False)
    if private or (caller.role is not None and caller.role <= Role.RESEARCHER):
        return caller
    secret = {CallerKind.OPERATOR: "the operator token", CallerKind.HOST: "a host's secret"}.get(
        caller.kind, "a key of an operator or an admin"
    )
    raise StrataError(
        Code.FORBIDDEN,
        f"{secret} is not taken over TCP without TLS: any user of this machine could pose as the server",
        hint=f"use {address}, or a key of a viewer or a researcher",
    )
