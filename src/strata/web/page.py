"""Turns a handler into a page or an action: `Page`, security headers, cached fragments (1 s), the list of projects (15
s), confirmation, redirect.

A page module declares `ROUTES` as `Route`s whose handlers take a `Page` first:

    async def hosts(page: Page, query: HostsPageQuery) -> View:
        reply = await page.get("/v1/workers", HostsReply)
        return page.render("hosts.html", title="Hosts", topics=["hosts"], hosts=reply.hosts)

    async def drain(page: Page, form: Form) -> str:
        await page.post(f"/v1/host/{page.path['id']}/drain", HostStateRequest(reason=form.get("reason", "")))
        return f"/hosts/{page.path['id']}"

    ROUTES = (Route("GET", "/hosts", VIEWER, hosts), Route("POST", "/hosts/{id}/drain", OPERATOR, drain))

A GET gives a `View`, or a `RawReply` for a download. A POST has passed its CSRF checks when its handler runs, and gives
the path to continue at. A template (`templates/hosts.html`) holds the content alone; `base.html` is put around it here.
"""

from __future__ import annotations

import asyncio
import functools
import math
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Any, Final, Protocol, TypeAlias, TypeVar

from jinja2 import Environment
from markupsafe import Markup

from strata.base.clock import Clock
from strata.base.errors import Code, StrataError
from strata.fleet.core.jobspec import DEFAULT_PROJECT
from strata.fleet.wire.manifests import TrainersReply
from strata.http.auth_failures import AuthFailures
from strata.http.authentication import ANONYMOUS_VIEWER
from strata.http.body import read_pairs
from strata.http.route import Content, HttpCall, RawBody, RawReply, Route, signature_of
from strata.identity.authenticate import Credentials
from strata.identity.roles import Principal, Role
from strata.web.api import Api
from strata.web.assets import Assets
from strata.web.live import LiveTopics
from strata.web.render import CSRF_MARK
from strata.web.session import SessionCookie, check_form, csrf_token, local_path, read_form

T = TypeVar("T")
Form: TypeAlias = Mapping[str, str]

FRESH_S: Final = 1.0
"""How old content may be that another viewer gets."""
PROJECTS_S: Final = 15.0
_MAX_FRAGMENTS: Final = 512
SECURITY_HEADERS: Final[Mapping[str, str]] = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:;"
    " connect-src 'self'; form-action 'self'; base-uri 'none'; frame-ancestors 'none'",
    "Referrer-Policy": "same-origin",
    "X-Frame-Options": "DENY",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Vary": "Cookie, HX-Request",
}
_DOWNLOAD_HEADERS: Final = {
    name: value for name, value in SECURITY_HEADERS.items() if name != "Content-Security-Policy"
}


@dataclass(frozen=True)
class View(Content):
    """The content of a page, for everybody who may see the same."""

    title: str
    html: str
    topics: tuple[str, ...] = ()
    """The live topics at which an open page fetches it again."""
    every_s: float = 0.0
    """An open page also fetches it again after so long; 0: not."""
    section: str = ""
    """The path of the entry in the rail."""
    status: int = 200


@dataclass(frozen=True, kw_only=True)
class NavEntry:
    path: str
    name: str
    icon: str


class PageAuthenticator(Protocol):
    """Who logs in and out, as the pages need it."""

    async def identify(self, credentials: Credentials) -> Principal: ...

    async def open_session(self, caller: Principal) -> str: ...

    async def redeem_code(self, code: str, address: str) -> str: ...

    async def close_session(self, token: str, caller: Principal) -> None: ...


@dataclass(frozen=True, kw_only=True)
class Site:
    """What all pages of a server share."""

    api: Api
    clock: Clock
    authenticator: PageAuthenticator
    failures: AuthFailures
    cookie: SessionCookie
    assets: Assets
    live: LiveTopics
    environment: Environment
    navigation: Sequence[NavEntry]
    tls: bool
    fragments: FragmentCache
    projects: ProjectList


class Page:
    def __init__(self, site: Site, call: HttpCall[Any]) -> None:
        self.site = site
        self.call = call
        self.path = call.path
        self.session = site.cookie.read(call.headers)

    @property
    def caller(self) -> Principal:
        return self.call.caller

    @property
    def now_s(self) -> float:
        return self.site.clock.wall_s()

    @property
    def query(self) -> list[tuple[str, str]]:
        """The parameters of the URL as they were sent, for links that change one of them."""
        return read_pairs(self.call.target.partition("?")[2].encode("latin-1"))

    def may(self, role: Role) -> bool:
        return self.caller.role is not None and self.caller.role >= role

    def may_change(self, owner: str) -> bool:
        """Says whether the caller may cancel or requeue what this owner has queued."""
        return self.may(Role.OPERATOR) or (self.may(Role.RESEARCHER) and owner == self.caller.owner)

    async def get(self, path: str, kind: type[T], /, **query: object) -> T:
        reply = await self.site.api.request(self.call, "GET", path, query, None)
        assert isinstance(reply, kind), f"{path} replies with {type(reply).__name__}"
        return reply

    async def find(self, path: str, kind: type[T], /, **query: object) -> T | None:
        """None where there is no such thing, or the caller may not see it."""
        try:
            return await self.get(path, kind, **query)
        except StrataError as error:
            if error.code in (Code.NOT_FOUND, Code.FORBIDDEN):
                return None
            raise

    async def post(self, path: str, body: object = None) -> Any:
        return await self.site.api.request(self.call, "POST", path, {}, body)

    def render(
        self,
        template: str,
        *,
        title: str,
        topics: Sequence[str] = (),
        every_s: float = 0.0,
        section: str = "",
        http_status: int = 200,
        **values: Any,
    ) -> View:
        html = self.site.environment.get_template(template).render(
            page=self, title=title, now_s=self.now_s, me=self.caller, Role=Role, **values
        )
        return View(title, html, tuple(topics), every_s, section, http_status)

    async def reply(self, view: View) -> RawReply:
        """The content alone for htmx, else the whole page."""
        html = view.html if self.call.headers.get("hx-request") == "true" else await self._whole(view)
        html = html.replace(CSRF_MARK, csrf_token(self.session))
        return RawReply(html.encode(), view.status, "text/html; charset=utf-8", SECURITY_HEADERS)

    async def _whole(self, view: View) -> str:
        projects = await self.site.projects.names(self)
        return self.site.environment.get_template("base.html").render(
            page=self,
            view=view,
            content=Markup(view.html),  # noqa: S704 (rendered by a template, which has escaped it)
            now_s=self.now_s,
            me=self.caller,
            url=self.call.target,
            project=dict(self.query).get("project", ""),
            projects=projects,
            navigation=self.site.navigation,
            limited=not self.site.tls,
            view_time=datetime.fromtimestamp(self.now_s, UTC).strftime("%H:%M:%S UTC"),
        )


class FragmentCache:
    """Rendered content, shared by all viewers that may see the same: rendered once at a time, and at most once a second
    unless a topic of it was published since."""

    def __init__(self, clock: Clock, live: LiveTopics) -> None:
        self._clock = clock
        self._live = live
        self._entries: dict[object, _Fragment] = {}

    async def view(self, key: object, make: Callable[[], Awaitable[View]]) -> View:
        entry = self._entries.get(key)
        if entry is None or not self._is_fresh(entry):
            entry = _Fragment(asyncio.ensure_future(make()), self._clock.monotonic_s(), self._live.number)
            self._entries.pop(key, None)
            self._entries[key] = entry
            while len(self._entries) > _MAX_FRAGMENTS:
                del self._entries[next(iter(self._entries))]
        # Shielded: a viewer that disconnects must not take the content from the others.
        return await asyncio.shield(entry.rendering)

    def clear(self) -> None:
        """Somebody has changed something, and shall see it."""
        self._entries.clear()

    def _is_fresh(self, entry: _Fragment) -> bool:
        if self._clock.monotonic_s() - entry.made_s >= FRESH_S:
            return False
        if not entry.rendering.done():
            return not self._live.number > entry.number
        if entry.rendering.cancelled() or entry.rendering.exception() is not None:
            return False
        return not self._live.changed_since(entry.number, entry.rendering.result().topics)


class ProjectList:
    """The projects that have declared a trainer, for the switcher in the frame."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._names: Sequence[str] = ()
        self._read_s = -math.inf

    async def names(self, page: Page) -> Sequence[str]:
        if self._clock.monotonic_s() - self._read_s >= PROJECTS_S:
            self._read_s = self._clock.monotonic_s()
            reply = await page.find("/v1/trainers", TrainersReply)
            names = () if reply is None else reply.trainers
            self._names = sorted({name.partition("/")[0] if "/" in name else DEFAULT_PROJECT for name in names})
        return self._names


@dataclass(frozen=True)
class _Fragment:
    rendering: asyncio.Future[View]
    made_s: float
    number: int
    """The number of the last publication of live topics before it was rendered."""


def to_route(route: Route, site: Site) -> Route:
    """The route of a page as the server serves it."""
    if route.method == "POST":
        return replace(route, handler=_act(route, site), operation=route.name)
    if signature_of(route.handler).reply is View:
        return replace(route, handler=_show(route, site), operation=route.name)
    return replace(route, handler=_fetch(route, site), operation=route.name)


def _show(route: Route, site: Site) -> Callable[..., Awaitable[RawReply]]:
    @functools.wraps(route.handler)
    async def show(call: HttpCall[Any], **arguments: Any) -> RawReply:
        page = Page(site, call)
        if route.access.public:
            return await page.reply(await route.handler(page, **arguments))
        role, owner = call.caller.role, call.caller.owner
        inner = page
        if role is Role.VIEWER:
            # All viewers see the same, so it is rendered for none of them in particular.
            inner, owner = Page(site, replace(call, caller=ANONYMOUS_VIEWER)), ""
        view = await site.fragments.view(
            (call.target, role, owner), functools.partial(route.handler, inner, **arguments)
        )
        return await page.reply(view)

    return show


def _fetch(route: Route, site: Site) -> Callable[..., Awaitable[RawReply]]:
    @functools.wraps(route.handler)
    async def fetch(call: HttpCall[Any], **arguments: Any) -> RawReply:
        reply: RawReply = await route.handler(Page(site, call), **arguments)
        # A download is no page: it gets the policy of all other replies.
        return replace(reply, headers={**_DOWNLOAD_HEADERS, **reply.headers})

    return fetch


def _act(route: Route, site: Site) -> Callable[..., Awaitable[RawReply]]:
    async def act(call: HttpCall[Any], body: RawBody) -> RawReply:
        page = Page(site, call)
        form = read_form(body)
        check_form(call.headers, form, page.session)
        if form.get("question") and form.get("confirmed") != "1":
            return await page.reply(_confirm(page, form))
        result: str | View | RawReply = await route.handler(page, form)
        site.fragments.clear()
        if isinstance(result, RawReply):
            return result
        return await page.reply(result) if isinstance(result, View) else redirect(result)

    act.__doc__ = route.handler.__doc__
    return act


def _confirm(page: Page, form: Form) -> View:
    """The question of an action as a page, for browsers without scripts; with scripts it was a dialog."""
    fields = {name: value for name, value in form.items() if name not in ("csrf", "question", "label", "back")}
    return page.render(
        "confirm.html",
        title="Confirm",
        question=form["question"],
        label=form.get("label", "Continue"),
        back=local_path(form.get("back", "")),
        fields=fields,
        path=page.call.target,
    )


def redirect(path: str, **headers: str) -> RawReply:
    return RawReply(b"", 303, "text/plain", {**SECURITY_HEADERS, "Location": path, **headers})
