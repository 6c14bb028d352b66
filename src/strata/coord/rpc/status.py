"""From an error to what a gRPC client gets: the only table from code to status, and the trailing metadata."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import grpc

from strata.base.errors import Code, StrataError

STATUS_OF: Final[Mapping[Code, grpc.StatusCode]] = {
    Code.INVALID: grpc.StatusCode.INVALID_ARGUMENT,
    Code.UNAUTHENTICATED: grpc.StatusCode.UNAUTHENTICATED,
    Code.FORBIDDEN: grpc.StatusCode.PERMISSION_DENIED,
    Code.NOT_FOUND: grpc.StatusCode.NOT_FOUND,
    Code.GONE: grpc.StatusCode.NOT_FOUND,
    Code.CONFLICT: grpc.StatusCode.ALREADY_EXISTS,
    Code.PRECONDITION: grpc.StatusCode.FAILED_PRECONDITION,
    Code.STALE: grpc.StatusCode.FAILED_PRECONDITION,
    Code.EXHAUSTED: grpc.StatusCode.RESOURCE_EXHAUSTED,
    Code.UNAVAILABLE: grpc.StatusCode.UNAVAILABLE,
    Code.DEADLINE: grpc.StatusCode.DEADLINE_EXCEEDED,
    Code.UNSUPPORTED: grpc.StatusCode.UNIMPLEMENTED,
    Code.CORRUPT: grpc.StatusCode.INTERNAL,
    Code.INTERNAL: grpc.StatusCode.INTERNAL,
}
assert STATUS_OF.keys() == set(Code), "every code needs a status"

DEFAULT_RETRY_S: Final = 0.5
_REASONS: Final = (
    "not-registered",
    "stale-generation",
    "stale-incarnation",
    "recover-first",
    "job-finished",
    "job-running",
    "evicted",
    "unknown-worker",
    "unknown-dataset",
    "unknown-job",
)


def trailing(error: StrataError) -> tuple[tuple[str, str], ...]:
    found: list[tuple[str, str]] = []
    if error.code in (Code.UNAVAILABLE, Code.EXHAUSTED):
        retry_s = float(error.detail.get("retry_after_s", DEFAULT_RETRY_S))
        found.append(("strata-retry-after-ms", str(max(1, round(retry_s * 1000)))))
    reason = error.detail.get("reason")
    if reason in _REASONS:
        found.append(("strata-reason", str(reason)))
    if reason == "stale-generation":
        found.append(("strata-generation", str(error.detail["generation"])))
    return tuple(found)


def number(code: grpc.StatusCode) -> int:
    value: int = code.value[0]
    return value
