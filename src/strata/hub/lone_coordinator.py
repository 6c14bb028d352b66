"""The dashboard of a coordinator without a hub: its pages, login by operator's token, sessions in memory (1,000),
limits of its server.

It is for one machine, so it listens on loopback alone and changes nothing. Where the coordinator needs tokens, a person
logs in with an operator's token for all jobs; sessions live in memory.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections.abc import Callable, Container
from dataclasses import dataclass, replace
from typing import Any, Final

from starlette.types import Scope

from strata.base.clock import Clock, SystemClock
from strata.base.errors import Code, StrataError
from strata.base.loopback import is_loopback_address, is_loopback_host
from strata.coord.server.tokens import ALL_JOBS, Claims, RevokedTokens, TokenRole, Tokens
from strata.coord.settings import CoordinatorSettings
from strata.coord.worker.settings import Tls
from strata.http.app import Serving, build_app
from strata.http.authentication import ANONYMOUS, ANONYMOUS_VIEWER, FirstHeaders, RequestAuthenticator
from strata.http.errors import PLAIN
from strata.http.protocol import new_protocol
from strata.http.reading import ReadingRules
from strata.http.root import RootApp, RootLimits
from strata.http.server import listen, new_loop, serve_http, server_config, stop_on_signals, url_of
from strata.hub import gangs as gang_routes
from strata.hub.gangs import CoordinatorGangs
from strata.identity.authenticate import Credentials
from strata.identity.records import BrowserSession
from strata.identity.roles import CallerKind, Principal, Role
from strata.identity.sessions import extended_until_s, has_ended, new_session
from strata.web.api import LocalApi
from strata.web.live import LiveTopics, NoEvents
from strata.web.pages import gangs, login, lone
from strata.web.routes import build_pages

PAGES: Final = (lone, gangs, login)
MAX_SESSIONS: Final = 1_000
HEADER_S: Final = 10.0
CONNECTIONS: Final = 256
DRAIN_S: Final = 2.0


@dataclass(frozen=True)
class LoneContext:
    """What the routes of gangs need of a server."""

    gangs: CoordinatorGangs


class TokenSessions:
    """Who reads the dashboard: anybody on this machine, or a person with an operator's token for all jobs."""

    def __init__(self, tokens: Tokens | None, clock: Clock, revoked: Container[str] = frozenset()) -> None:
        self._tokens = tokens
        self._clock = clock
        self._revoked = revoked
        self._sessions: dict[str, tuple[Claims, BrowserSession]] = {}
        """Sessions by token. One ends with the operator's token that opened it, if not before."""
        self._opening: dict[str, Claims] = {}
        """The token by which each principal was identified."""

    async def identify(self, credentials: Credentials) -> Principal:
        if self._tokens is None:
            return ANONYMOUS_VIEWER
        if credentials.bearer:
            claims = self._tokens.read(credentials.bearer, self._clock.wall_s())
            self._check(claims)
            self._opening[claims.id] = claims
            while len(self._opening) > MAX_SESSIONS:
                del self._opening[next(iter(self._opening))]
            return Principal(CallerKind.KEY, claims.id, Role.VIEWER, "operator")
        now_s = self._clock.wall_s()
        opened = self._sessions.get(credentials.session)
        if opened is None or has_ended(opened[1], now_s):
            raise StrataError(Code.UNAUTHENTICATED, "this dashboard needs an operator's token", hint="log in")
        claims, session = opened
        self._check(claims)
        if (until_s := extended_until_s(session, now_s)) is not None:
            self._sessions[credentials.session] = (claims, replace(session, expires_at_s=until_s))
        return Principal(CallerKind.KEY, claims.id, Role.VIEWER, "operator")

    def _check(self, claims: Claims) -> None:
        if claims.role is not TokenRole.OPERATOR or claims.job != ALL_JOBS:
            raise StrataError(
                Code.FORBIDDEN,
                "the dashboard shows all jobs: it needs an operator's token for all of them;"
                " run: strata coordinator token --role operator --job '*'",
            )
        if self._clock.wall_s() >= claims.expires_s:
            raise StrataError(Code.UNAUTHENTICATED, "the token has expired", hint="log in with a new one")
        if claims.id and claims.id in self._revoked:
            raise StrataError(Code.UNAUTHENTICATED, "the token has been revoked")

    async def open_session(self, caller: Principal) -> str:
        claims = self._opening.pop(caller.id, None)
        if claims is None:
            raise StrataError(Code.FORBIDDEN, "this dashboard needs no login")
        token, session = new_session(claims.id, self._clock.wall_s())
        self._sessions[token] = (claims, session)
        while len(self._sessions) > MAX_SESSIONS:
            del self._sessions[next(iter(self._sessions))]
        return token

    async def redeem_code(self, code: str, address: str) -> str:
        del code, address
        raise StrataError(Code.FORBIDDEN, "a coordinator has no login links")

    async def close_session(self, token: str, caller: Principal) -> None:
        del caller
        self._sessions.pop(token, None)


def make_app(source: CoordinatorGangs, sessions: TokenSessions, clock: Clock, stopping: asyncio.Event) -> RootApp:
    limits = RootLimits()
    pages = build_pages(
        api=LocalApi(gang_routes.ROUTES),
        clock=clock,
        authenticator=sessions,
        failures=limits.failures,
        live=LiveTopics(NoEvents(), stopping),
        server_id=secrets.token_hex(4),
        tls=False,
        pages=PAGES,
    )
    routes = (*gang_routes.ROUTES, *pages.routes)
    authenticator = RequestAuthenticator(routes, sessions, address="", session_cookie=pages.session_cookie)

    async def identify(scope: Scope, headers: FirstHeaders) -> Principal:
        caller = await authenticator.identify(scope, headers)
        given = headers.get(b"host", b"").decode("latin-1")
        name, _, port = given.rpartition(":")
        at_home = is_loopback_host((name if port.isdigit() else given).removeprefix("[").removesuffix("]"))
        if caller != ANONYMOUS and not at_home:
            # Else a page of another site could read this one, once its name is made to mean this machine.
            raise StrataError(Code.FORBIDDEN, "this dashboard is called by the address of its own machine")
        return caller

    serving = Serving(
        context=LoneContext(source),
        server="dashboard",
        document_path="",
        rules=ReadingRules(),
        errors=replace(PLAIN, page=pages.error_page),
        limits=limits,
    )
    return build_app(routes, serving, identify)


def run(settings: CoordinatorSettings, at: str, address: str, tls: Tls | None, announce: Callable[[str], None]) -> None:
    """Run until SIGTERM or SIGINT."""
    if not is_loopback_address(at):
        raise StrataError(
            Code.INVALID,
            f"{at} can be reached from other machines",
            hint="listen on 127.0.0.1 and use ssh -L, or let a hub show the coordinator (hub.coordinator)",
        )
    with asyncio.Runner(loop_factory=new_loop) as runner:
        runner.run(_serve(settings, at, address, tls, announce))


async def _serve(
    settings: CoordinatorSettings, at: str, address: str, tls: Tls | None, announce: Callable[[str], None]
) -> None:
    clock, stop, stopping = SystemClock(), stop_on_signals(), asyncio.Event()
    tokens = None if settings.token_secret is None else Tokens(settings.token_secret)
    revoked = RevokedTokens(settings.revoked_tokens, clock) if settings.revoked_tokens else frozenset[str]()
    source = CoordinatorGangs(address, clock, tls=tls, tokens=tokens, signs_as="dashboard")
    app = make_app(source, TokenSessions(tokens, clock, revoked), clock, stopping)
    config: Any = server_config(app, new_protocol(HEADER_S), max_connections=CONNECTIONS, drain_s=DRAIN_S)
    with listen(at, free_port="--listen 127.0.0.1:0") as listener, contextlib.suppress(asyncio.CancelledError):
        announce(f"dashboard of the coordinator at {address}: {url_of(listener)}/gangs")
        try:
            await serve_http(config, (listener,), stop, leaving=stopping.set)
        finally:
            await source.close()
