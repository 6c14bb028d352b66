"""The JSON form of an error body: code, message, hint, detail. Clients read it too."""

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
