"""The table from error code to HTTP status, Retry-After, and the making of error replies."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any, Final

import msgspec
from starlette.responses import Response
from starlette.types import Scope

from strata.base.errors import Code, StrataError
from strata.http.openai_error import is_openai_path, openai_error
from strata.http.problem import ErrorReply, Problem

STATUS_OF: Final[Mapping[Code, int]] = {
    Code.INVALID: 400,
    Code.UNAUTHENTICATED: 401,
    Code.FORBIDDEN: 403,
    Code.NOT_FOUND: 404,
    Code.CONFLICT: 409,
    Code.PRECONDITION: 409,
    Code.STALE: 412,
    Code.GONE: 410,
    Code.EXHAUSTED: 429,
    Code.UNAVAILABLE: 503,
    Code.DEADLINE: 504,
    Code.UNSUPPORTED: 501,
    Code.CORRUPT: 500,
    Code.INTERNAL: 500,
}
assert STATUS_OF.keys() == set(Code), "every code needs a status"

RETRY_AFTER_S: Final = 1
ErrorPage = Callable[[Scope, Mapping[bytes, bytes], StrataError, int], Response | None]
"""An error as a page for a person, from the request, its first headers and the status; None for a client that is no
browser."""


class HttpRefusal(StrataError):  # noqa: N818 - it is the one error type, with a status of its own
    """A refusal with a status of its own: a body that is too large or too slow, a method that is not there."""

    def __init__(self, status: int, code: Code, message: str, *, hint: str | None = None, **detail: Any) -> None:
        super().__init__(code, message, hint=hint, **detail)
        self.status = status


@dataclass(frozen=True)
class ErrorTable:
    """The error replies of one server: clients that retry some statuses may need others for some codes."""

    instead: Mapping[Code, int]
    """Statuses that differ from `STATUS_OF`."""
    final: Collection[Code]
    """Codes whose replies have `x-should-retry: false`."""
    page: ErrorPage | None = None

    def status_of(self, error: StrataError) -> int:
        if isinstance(error, HttpRefusal):
            return error.status
        return self.instead.get(error.code) or STATUS_OF[error.code]

    def respond(self, error: StrataError, scope: Scope, headers: Mapping[bytes, bytes]) -> Response:
        """Replies with a page for a browser, if the server has pages; else with JSON."""
        page = None if self.page is None else self.page(scope, headers, error, self.status_of(error))
        return page or self.render(error, scope["path"])

    def render(self, error: StrataError, path: str = "") -> Response:
        status = self.status_of(error)
        reply = openai_error(error, status) if is_openai_path(path) else error_reply(error)
        headers: dict[str, str] = {}
        if error.code is Code.UNAUTHENTICATED:
            headers["WWW-Authenticate"] = 'Bearer realm="strata"'
        if error.code in (Code.UNAVAILABLE, Code.EXHAUSTED):
            headers["Retry-After"] = str(error.detail.get("retry_after_s", RETRY_AFTER_S))
        if error.code in self.final:
            headers["x-should-retry"] = "false"
        return Response(
            msgspec.json.encode(reply),
            status_code=status,
            headers=headers,
            media_type="application/json",
        )


def error_reply(error: StrataError) -> ErrorReply:
    # Detail is for programs: JSON where possible, else text.
    detail = {name: msgspec.to_builtins(value, enc_hook=str) for name, value in error.detail.items()}
    return ErrorReply(error=Problem(code=error.code.value, message=error.message, hint=error.hint, detail=detail))


PLAIN: Final = ErrorTable(instead={}, final=())
