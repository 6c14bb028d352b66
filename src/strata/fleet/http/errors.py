"""From an error to what an HTTP client gets: the only table from code to status, and the one form of an error body."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import msgspec
from starlette.responses import Response

from strata.base.errors import Code, StrataError
from strata.fleet.wire import ErrorReply, Problem

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
    """What HTTP itself has a status for: a body that is too large or too slow, a method that is not there."""

    def __init__(self, status: int, code: Code, message: str, *, hint: str | None = None, **detail: Any) -> None:
        super().__init__(code, message, hint=hint, **detail)
        self.status = status


def status_of(error: StrataError) -> int:
    return error.status if isinstance(error, HttpRefusal) else STATUS_OF[error.code]


def render(error: StrataError) -> Response:
    detail = {name: _plain(value) for name, value in error.detail.items()}
    problem = Problem(code=error.code.value, message=error.message, hint=error.hint, detail=detail)
    headers: dict[str, str] = {}
    if error.code is Code.UNAUTHENTICATED:
        headers["WWW-Authenticate"] = 'Bearer realm="strata"'
    if error.code in (Code.UNAVAILABLE, Code.EXHAUSTED):
        headers["Retry-After"] = str(error.detail.get("retry_after_s", RETRY_AFTER_S))
    return Response(
        msgspec.json.encode(ErrorReply(error=problem)),
        status_code=status_of(error),
        headers=headers,
        media_type="application/json",
    )


def _plain(value: Any) -> Any:
    """Detail is for programs: JSON as far as it goes, and words where it does not."""
    return msgspec.to_builtins(value, enc_hook=str)
