"""Errors in the form of OpenAI's API, and the paths that have it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import msgspec

from strata.base.errors import Code, StrataError

OPENAI_PATHS: Final = ("/v1/models", "/v1/chat/completions", "/v1/completions")
_SESSIONS: Final = "/v1/rollout_sessions/"
_IN_SESSION: Final = ("/completions", "/models")
_CODES: Final[Mapping[Code, str]] = {
    Code.UNAUTHENTICATED: "invalid_api_key",
    Code.NOT_FOUND: "model_not_found",
    Code.EXHAUSTED: "rate_limit_exceeded",
}
"""Codes that clients of OpenAI know by another name."""
_TYPES: Final[Mapping[int, str]] = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    429: "rate_limit_error",
}


class OpenAiProblem(msgspec.Struct, frozen=True, kw_only=True):
    message: str
    type: str
    param: str | None
    """The parameter that is wrong."""
    code: str


class OpenAiError(msgspec.Struct, frozen=True, kw_only=True):
    error: OpenAiProblem


def is_openai_path(path: str) -> bool:
    in_session = path.startswith(_SESSIONS) and path.endswith(_IN_SESSION)
    return path in OPENAI_PATHS or path.startswith("/v1/models/") or in_session


def openai_error(error: StrataError, status: int) -> OpenAiError:
    kind = "server_error" if status >= 500 else _TYPES.get(status, "invalid_request_error")
    param = error.detail.get("path")
    # A model is what a request names, unless the error says otherwise.
    is_model = error.code is not Code.NOT_FOUND or param in (None, "model")
    code = _CODES.get(error.code, error.code.value) if is_model else error.code.value
    problem = OpenAiProblem(message=str(error), type=kind, param=param, code=code)
    return OpenAiError(error=problem)
