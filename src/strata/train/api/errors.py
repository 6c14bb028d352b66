"""From an error to what an HTTP client gets: the only table from code to status, and the one form of an error body.

The clients of this protocol repeat 408, 409, 429 and everything from 500 on by themselves. So what would fail again is
none of these where that can be helped, and says so in `x-should-retry` where it cannot.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import msgspec
from starlette.responses import Response

from strata.base.errors import Code, StrataError
from strata.train.wire.replies import ErrorReply, Problem

STATUS_OF: Final[Mapping[Code, int]] = {
    Code.INVALID: 400,
    Code.UNAUTHENTICATED: 401,
    Code.FORBIDDEN: 403,
    Code.NOT_FOUND: 404,
    Code.CONFLICT: 422,
    Code.PRECONDITION: 422,
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

FINAL: Final = frozenset({Code.CONFLICT, Code.PRECONDITION, Code.UNSUPPORTED, Code.CORRUPT})
"""Asking again does not help."""
RETRY_AFTER_S: Final = 1


class HttpRefusal(StrataError):  # noqa: N818 - it is the one error type, with a status of its own
    """What HTTP itself has a status for: a body that is too large or too slow, a method that is not there."""

    def __init__(self, status: int, code: Code, message: str, *, hint: str | None = None, **detail: Any) -> None:
        super().__init__(code, message, hint=hint, **detail)
        self.status = status


def render(error: StrataError) -> Response:
    detail = {name: msgspec.to_builtins(value, enc_hook=str) for name, value in error.detail.items()}
    problem = Problem(code=error.code.value, message=error.message, hint=error.hint, detail=detail)
    headers: dict[str, str] = {}
    if error.code is Code.UNAUTHENTICATED:
        headers["WWW-Authenticate"] = 'Bearer realm="strata"'
    if error.code in (Code.UNAVAILABLE, Code.EXHAUSTED):
        headers["Retry-After"] = str(error.detail.get("retry_after_s", RETRY_AFTER_S))
    if error.code in FINAL:
        headers["x-should-retry"] = "false"
    return Response(
        msgspec.json.encode(ErrorReply(error=problem)),
        status_code=error.status if isinstance(error, HttpRefusal) else STATUS_OF[error.code],
        headers=headers,
        media_type="application/json",
    )
