"""Reads credentials of a request (bearer, operator token, certificate, cookie, Unix socket), and decides on which
channel each is accepted, with the refusals.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping
from dataclasses import replace
from typing import Final, Protocol

from starlette.types import Scope

from strata.base.errors import Code, StrataError
from strata.http.errors import HttpRefusal
from strata.http.route import Route
from strata.identity.authenticate import Credentials
from strata.identity.roles import CallerKind, Principal, Role

CLIENT_CERTIFICATE: Final = "strata.client_certificate"
"""Key of the scope: the client certificate that TLS has verified, in DER."""
UNIX_SOCKET: Final = "strata.unix_socket"
"""Key of the scope: the connection came by the server's Unix socket, which only its owner can reach."""

ANONYMOUS: Final = Principal(CallerKind.KEY, "", None)
ANONYMOUS_VIEWER: Final = Principal(CallerKind.KEY, "", Role.VIEWER)
"""A client without credentials, on the routes that the settings of a server make public."""

NO_CREDENTIALS: Final = Credentials()
API_PATHS: Final = ("/v1/", "/api/")
FirstHeaders = Mapping[bytes, bytes]
"""Names in lower case; of a repeated header the first."""
Identify = Callable[[Scope, FirstHeaders], Awaitable[Principal]]


class CredentialCheck(Protocol):
    async def identify(self, credentials: Credentials) -> Principal: ...


class RequestAuthenticator:
    """`address` is the server's Unix socket, for hints. `key_header` is a header for keys besides `Authorization`, on
    paths that begin with `key_header_below`. `session_cookie` is the cookie of browser sessions; empty: none is
    taken."""

    def __init__(  # noqa: PLR0913 (where credentials may be)
        self,
        routes: Iterable[Route],
        authenticator: CredentialCheck,
        *,
        address: str,
        key_header: str = "",
        key_header_below: str = "/",
        public_read: bool = False,
        session_cookie: str = "",
    ) -> None:
        routes = tuple(routes)
        self._session_cookie = session_cookie
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
        if credentials == NO_CREDENTIALS and (session := self._read_session(scope, headers)):
            caller = await self._authenticator.identify(Credentials(session=session))
            return caller if is_private(scope) else with_limited_role(caller)
        if wanted in self._shown and credentials == NO_CREDENTIALS:
            return ANONYMOUS_VIEWER
        if credentials.bearer.startswith("hst-") and scope["scheme"] == "https":
            raise StrataError(
                Code.UNAUTHENTICATED,
                "a host shows its certificate here; its secret is for the Unix socket of a hub on its own machine",
                hint="strata join",
            )
        return check_channel(scope, await self._authenticator.identify(credentials), self._address)

    def _read_session(self, scope: Scope, headers: FirstHeaders) -> str:
        """A browser adds its cookie to any request to this server, also to one that a foreign page makes. So it counts
        for reading, and for the dashboard's own actions, which need a CSRF token; it never counts for an API call that
        changes something."""
        changes = scope["method"] not in ("GET", "HEAD")
        if not self._session_cookie or (changes and scope["path"].startswith(API_PATHS)):
            return ""
        return read_cookie(headers, self._session_cookie)


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


def read_cookie(headers: FirstHeaders, name: str) -> str:
    for part in headers.get(b"cookie", b"").decode("latin-1").split(";"):
        key, _, value = part.strip().partition("=")
        if key == name:
            return value
    return ""


def is_private(scope: Scope) -> bool:
    """No other user of the machine can read or pose as this connection."""
    return scope["scheme"] == "https" or bool(scope.get(UNIX_SOCKET, False))


def with_limited_role(caller: Principal) -> Principal:
    """A browser on plain TCP acts with a researcher's rights at most: another user of the machine who takes the port
    would get its cookie, and any other server of the machine does, because cookies do not know ports."""
    if caller.role is not None and caller.role > Role.RESEARCHER:
        return replace(caller, role=Role.RESEARCHER)
    return caller


def check_channel(scope: Scope, caller: Principal, address: str) -> Principal:
    """FORBIDDEN for more than a researcher's rights over plain TCP: a client that sends such a secret there would one
    day send it to another user of the machine who has taken the port. `address` is the server's Unix socket."""
    if is_private(scope) or (caller.role is not None and caller.role <= Role.RESEARCHER):
        return caller
    secret = {CallerKind.OPERATOR: "the operator token", CallerKind.HOST: "a host's secret"}.get(
        caller.kind, "a key of an operator or an admin"
    )
    raise StrataError(
        Code.FORBIDDEN,
        f"{secret} is not taken over TCP without TLS: any user of this machine could pose as the server",
        hint=f"use {address}, or a key of a viewer or a researcher",
    )
