"""The exit statuses of `strata`, and the table from error code to exit status."""

from __future__ import annotations

from collections.abc import Mapping
from enum import IntEnum
from typing import Final

from strata.base.errors import Code


class ExitCode(IntEnum):
    """docs/commands.md has the same numbers, with what each means to a script; a test compares the two."""

    OK = 0
    USAGE = 2
    UNREACHABLE = 3
    AUTH = 4
    STALE = 5
    UNSCHEDULABLE = 6
    INTERNAL = 70
    FAILED = 100
    UNFINISHED = 101
    NOT_FOUND = 102
    CANCELLED = 103
    INTERRUPTED = 130
    BROKEN_PIPE = 141


EXIT_CODE_OF: Final[Mapping[Code, ExitCode]] = {
    Code.INVALID: ExitCode.USAGE,
    Code.UNSUPPORTED: ExitCode.USAGE,
    Code.UNAVAILABLE: ExitCode.UNREACHABLE,
    Code.UNAUTHENTICATED: ExitCode.AUTH,
    Code.FORBIDDEN: ExitCode.AUTH,
    Code.STALE: ExitCode.STALE,
    Code.NOT_FOUND: ExitCode.NOT_FOUND,
    Code.GONE: ExitCode.NOT_FOUND,
    Code.DEADLINE: ExitCode.UNFINISHED,
    Code.CONFLICT: ExitCode.FAILED,
    Code.PRECONDITION: ExitCode.FAILED,
    Code.EXHAUSTED: ExitCode.FAILED,
    Code.CORRUPT: ExitCode.FAILED,
    Code.INTERNAL: ExitCode.INTERNAL,
}

assert EXIT_CODE_OF.keys() == set(Code), "every code needs an exit status"
