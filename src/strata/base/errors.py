"""The one error type of Strata, `StrataError`, and the closed list of its codes (`Code`).

A code says what the caller can do next; the sentence says what happened. The edges (CLI, HTTP, gRPC) each keep one
table from code to exit status, HTTP status or gRPC status. Nothing else is raised on purpose across a module border.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import Any


class Code(StrEnum):
    """What went wrong, in terms of what the caller can do about it."""

    INVALID = "invalid"
    """The request can never succeed as it is: change it."""
    UNAUTHENTICATED = "unauthenticated"
    """The caller is unknown: present credentials."""
    FORBIDDEN = "forbidden"
    """The caller is known and not allowed to do this."""
    NOT_FOUND = "not_found"
    """It does not exist, or it belongs to another tenant."""
    CONFLICT = "conflict"
    """Something else exists already, or another process holds it."""
    PRECONDITION = "precondition"
    """Right request, wrong moment: another step has to come first."""
    STALE = "stale"
    """The fencing token is not the current one: the caller was replaced and must stop."""
    GONE = "gone"
    """It existed and was removed on purpose."""
    EXHAUSTED = "exhausted"
    """A bounded queue, quota or disk is full: back off."""
    UNAVAILABLE = "unavailable"
    """It may work later. If the request was sent, whether it took effect is unknown: retry with the same identity."""
    DEADLINE = "deadline"
    """The time the caller allowed is over."""
    CORRUPT = "corrupt"
    """Stored bytes are not what was written."""
    UNSUPPORTED = "unsupported"
    """This installation or version cannot do it."""
    INTERNAL = "internal"
    """A defect in Strata."""


class StrataError(Exception):
    """A failure with a code, a sentence for a person, an optional next step and machine-readable detail."""

    def __init__(self, code: Code, message: str, *, hint: str | None = None, **detail: Any) -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self.hint = hint
        self.detail: Mapping[str, Any] = detail

    def __str__(self) -> str:
        return f"{self.message} ({self.hint})" if self.hint else self.message

    def __repr__(self) -> str:
        return f"StrataError({self.code.value}, {self.message!r})"
