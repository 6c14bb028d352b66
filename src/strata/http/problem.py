"""The one form of an error body. Clients read it too, so this imports no server."""

from __future__ import annotations

from typing import Any

import msgspec


class Problem(msgspec.Struct, frozen=True, kw_only=True):
    code: str
    message: str
    hint: str | None = None
    detail: dict[str, Any] = {}


class ErrorReply(msgspec.Struct, frozen=True, kw_only=True):
    error: Problem
