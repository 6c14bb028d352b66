"""Retry: default backoff (5 to 600 s) with jitter, `RetryPolicy`, and the wait that Retry-After requests."""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable
from email.utils import parsedate_to_datetime
from typing import TYPE_CHECKING, TypeVar

import msgspec

from strata.base.errors import Code, StrataError

if TYPE_CHECKING:
    from strata.base.clock import Clock

T = TypeVar("T")


class Backoff(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Exponential backoff. Jitter spreads clients that failed together over half of the delay."""

    first_s: float = 5.0
    most_s: float = 600.0

    def delay_s(self, failures: int, chance: float) -> float:
        """The wait after `failures` failures of a kind (at least 1), for a `chance` of at least 0 and below 1."""
        # 2.0 ** 1024 overflows; long before that the cap holds.
        full = min(self.first_s * 2.0 ** min(max(failures, 1) - 1, 64), self.most_s)
        return full * (0.5 + chance / 2)


class RetryPolicy(msgspec.Struct, frozen=True, kw_only=True):
    """Says which errors are transient, how long to wait between attempts, and for how long to retry."""

    backoff: Backoff
    transient: frozenset[Code] = frozenset({Code.UNAVAILABLE})
    give_up_after_s: float = math.inf
    """Time since the first attempt after which a failure is final."""


def no_jitter() -> float:
    """A `chance` for a single caller, whose retries meet those of no other."""
    return 1.0


async def retry(
    call: Callable[[], Awaitable[T]],
    policy: RetryPolicy,
    *,
    clock: Clock,
    chance: Callable[[], float],
    on_retry: Callable[[StrataError, int], None] = lambda _error, _failures: None,
) -> T:
    """The result of `call`, which must be idempotent: it is repeated while it fails with a transient error.

    `on_retry` is called with each error that is retried, and with the number of failures so far.
    """
    started_s = clock.monotonic_s()
    failures = 0
    while True:
        try:
            return await call()
        except StrataError as error:
            if error.code not in policy.transient or clock.monotonic_s() - started_s > policy.give_up_after_s:
                raise
            failures += 1
            on_retry(error, failures)
        await clock.sleep(policy.backoff.delay_s(failures, chance()))


def retry_after_s(value: str | None, *, now_s: float) -> float:
    """Reads a Retry-After header (RFC 9110): seconds, or a date; 0 for what is neither, and for what has passed. 0 for
    what is neither, and for what has passed."""
    if not value:
        return 0.0
    try:
        asked_s = float(value)
    except ValueError:
        asked_s = date_s(value, default_s=now_s) - now_s
    return max(0.0, asked_s) if math.isfinite(asked_s) else 0.0


def date_s(value: str | None, *, default_s: float) -> float:
    """The wall seconds of an HTTP-date, in any of its three forms; the default where it is none."""
    try:
        return parsedate_to_datetime(value or "").timestamp()
    except (ValueError, OverflowError, TypeError, IndexError):
        return default_s
