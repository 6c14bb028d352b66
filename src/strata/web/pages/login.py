"""Pages of login and logout: key, operator token, login link; and refusals."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any
from urllib.parse import urlencode

import msgspec

from strata.base.errors import Code, StrataError
from strata.http.route import KIB, PUBLIC, VIEWER, HttpCall, RawBody, RawReply, Route
from strata.identity.authenticate import Credentials
from strata.identity.roles import Principal, Role
from strata.web.page import SECURITY_HEADERS, Form, Page, Site, redirect
from strata.web.session import check_same_origin, local_path, read_form


class LoginQuery(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    next: str = ""
    code: str = ""
    """The code of a login link."""


def login_routes(site: Site) -> Sequence[Route]:
    """Open to all; the server serves them as they are."""

    def form_page(*, error: str = "", code: str = "", following: str = "/", status: int = 200) -> RawReply:
        html = site.environment.get_template("login.html").render(
            error=error, code=code, following=following, tls=site.tls
        )
        return RawReply(html.encode(), status, "text/html; charset=utf-8", SECURITY_HEADERS)

    async def show_login(call: HttpCall[Any], query: LoginQuery) -> RawReply:
        """The form to log in."""
        del call
        return form_page(code=query.code[:64], following=local_path(query.next))

    async def log_in(call: HttpCall[Any], body: RawBody) -> RawReply:
        """Open a session, if the key is good."""
        check_same_origin(call.headers)
        form = read_form(body)
        following = local_path(form.get("next", ""))
        address = call.caller.address
        try:
            if form.get("code"):
                token = await site.authenticator.redeem_code(form["code"], address)
            else:
                token = await site.authenticator.open_session(await _identify(site, form.get("key", ""), address))
        except StrataError as error:
            if error.code not in (Code.UNAUTHENTICATED, Code.FORBIDDEN):
                raise
            if site.failures.record(address, "POST", "/login", error.message):
                # The next guess needs a new connection, of which an address has few.
                refused = form_page(
                    error="too many logins with keys that are not good", following=following, status=429
                )
                return replace(refused, headers={**refused.headers, "Connection": "close"})
            return form_page(error=error.message, following=following, status=403)
        return redirect(following, **{"Set-Cookie": site.cookie.set(token)})

    return (
        Route("GET", "/login", PUBLIC, show_login, operation="web.show_login"),
        Route(
            "POST",
            "/login",
            PUBLIC,
            log_in,
            4 * KIB,
            owner="none: a key opens a new session of its owner",
            operation="web.log_in",
        ),
    )


async def _identify(site: Site, key: str, address: str) -> Principal:
    text = key.strip()
    if text.startswith("hst-"):
        raise StrataError(Code.FORBIDDEN, "this is the secret of a host, not a key of a person")
    caller = await site.authenticator.identify(Credentials(bearer=text))
    if not site.tls and (caller.role is None or caller.role > Role.RESEARCHER):
        raise StrataError(
            Code.FORBIDDEN,
            "the operator token and keys of operators are not taken without TLS; run: strata dashboard",
        )
    return Principal(caller.kind, caller.id, caller.role, caller.name, address)


async def log_out(page: Page, form: Form) -> RawReply:
    """End this session."""
    del form
    await page.site.authenticator.close_session(page.session, page.caller)
    return redirect("/login", **{"Set-Cookie": page.site.cookie.clear()})


def login_path(target: str) -> str:
    """The login that continues at this path."""
    return "/login" if target in ("/", "") else f"/login?{urlencode({'next': target})}"


ROUTES = (Route("POST", "/logout", VIEWER, log_out, 4 * KIB, owner="caller"),)
