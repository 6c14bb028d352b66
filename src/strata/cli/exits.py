"""What the exit status of `strata` says to a script: the only table from error code to exit status."""

from __future__ import annotations

from collections.abc import Mapping
from enum import IntEnum
from typing import Final

from strata.base.errors import Code


class Exit(IntEnum):
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


EXIT_OF: Final[Mapping[Code, Exit]] = {
    Code.INVALID: Exit.USAGE,
    Code.UNSUPPORTED: Exit.USAGE,
    Code.UNAVAILABLE: Exit.UNREACHABLE,
    Code.UNAUTHENTICATED: Exit.AUTH,
    Code.FORBIDDEN: Exit.AUTH,
    Code.STALE: Exit.STALE,
    Code.NOT_FOUND: Exit.NOT_FOUND,
    Code.GONE: Exit.NOT_FOUND,
    Code.DEADLINE: Exit.UNFINISHED,
    Code.CONFLICT: Exit.FAILED,
    Code.PRECONDITION: Exit.FAILED,
    Code.EXHAUSTED: Exit.FAILED,
    Code.CORRUPT: Exit.FAILED,
    Code.INTERNAL: Exit.INTERNAL,
}

assert EXIT_OF.keys() == set(Code), "every code needs an exit status"
