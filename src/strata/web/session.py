"""Browser sessions: the cookie's attributes, the CSRF token, same-origin checks, forms of at most 64 fields; with the
refusals. Lifetimes are in `identity.sessions`.

A form is taken from a page of this server alone: the browser says so (`Sec-Fetch-Site: same-origin`, which no page can
forge), and the form has the CSRF token, which only a page of this session knows.
"""

from __future__ import annotations

import hmac
import re
from collections.abc import Mapping
from typing import Final
from urllib.parse import parse_qsl

from starlette.datastructures import Headers

from strata.base.errors import Code, StrataError
from strata.http.authentication import read_cookie
from strata.http.route import RawBody
from strata.identity.sessions import SESSION_S

CSRF_FIELD: Final = "csrf"
FORM: Final = "application/x-www-form-urlencoded"
_MAX_FIELDS: Final = 64
_LOCAL_PATH: Final = re.compile(r"/(?![/\\])[!-~]*")


class SessionCookie:
    """`server` tells the cookies of several servers on one machine apart: browsers send them to every port."""

    def __init__(self, server: str, *, tls: bool) -> None:
        self.name = f"__Host-strata-{server}" if tls else f"strata-{server}"
        self._attributes = f"; Path=/; HttpOnly; SameSite=Strict{'; Secure' if tls else ''}"

    def set(self, token: str) -> str:
        return f"{self.name}={token}; Max-Age={SESSION_S:.0f}{self._attributes}"

    def clear(self) -> str:
        return f"{self.name}=; Max-Age=0{self._attributes}"

    def read(self, headers: Headers) -> str:
        return read_cookie({b"cookie": headers.get("cookie", "").encode("latin-1")}, self.name)


def csrf_token(session: str) -> str:
    """Follows from the token of the session, which scripts cannot read and the server does not keep."""
    return hmac.digest(session.encode(), b"csrf", "sha256").hex() if session else ""


def check_same_origin(headers: Headers) -> None:
    """FORBIDDEN for a form that another site made the browser send."""
    if headers.get("sec-fetch-site", "") != "same-origin":
        raise StrataError(
            Code.FORBIDDEN, "this form did not come from a page of this server", hint="open the page again, and retry"
        )


def read_form(body: RawBody) -> dict[str, str]:
    if body.media_type != FORM and body.content:
        raise StrataError(Code.INVALID, f"a form is sent as {FORM}")
    try:
        pairs = parse_qsl(body.content.decode(), keep_blank_values=True, errors="strict", max_num_fields=_MAX_FIELDS)
    except ValueError:
        raise StrataError(Code.INVALID, "this form cannot be read") from None
    if any("\0" in text for pair in pairs for text in pair):
        raise StrataError(Code.INVALID, "a field of the form has a NUL character")
    return dict(pairs)


def check_form(headers: Headers, form: Mapping[str, str], session: str) -> None:
    """FORBIDDEN unless the form came from a page of this session."""
    check_same_origin(headers)
    sent = form.get(CSRF_FIELD, "") or headers.get("x-csrf-token", "")
    if not session or not hmac.compare_digest(sent.encode(), csrf_token(session).encode()):
        raise StrataError(Code.FORBIDDEN, "this form is from another session", hint="open the page again, and retry")


def local_path(text: str) -> str:
    """A path of this server to continue at, or its root: a link may not lead a browser elsewhere after the login."""
    return text if _LOCAL_PATH.fullmatch(text) else "/"
