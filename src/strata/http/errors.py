"""Error replies: the table from code to status, and their one form."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, Final

import msgspec
from starlette.responses import Response

from strata.base.errors import Code, StrataError
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

    def status_of(self, error: StrataError) -> int:
        if isinstance(error, HttpRefusal):
            return error.status
        return self.instead.get(error.code) or STATUS_OF[error.code]

    def render(self, error: StrataError) -> Response:
        # Detail is for programs: JSON where possible, else text.
        detail = {name: msgspec.to_builtins(value, enc_hook=str) for name, value in error.detail.items()}
        problem = Problem(code=error.code.value, message=error.message, hint=error.hint, detail=detail)
        headers: dict[str, str] = {}
        if error.code is Code.UNAUTHENTICATED:
            headers["WWW-Authenticate"] = 'Bearer realm="strata"'
        if error.code in (Code.UNAVAILABLE, Code.EXHAUSTED):
            headers["Retry-After"] = str(error.detail.get("retry_after_s", RETRY_AFTER_S))
        if error.code in self.final:
            headers["x-should-retry"] = "false"
        return Response(
            msgspec.json.encode(ErrorReply(error=problem)),
            status_code=self.status_of(error),
            headers=headers,
            media_type="application/json",
        )


PLAIN: Final = ErrorTable(instead={}, final=())
