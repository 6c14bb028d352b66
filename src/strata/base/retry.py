"""How long to wait before a request is sent again: a back-off with jitter, and what a server asks for."""

from __future__ import annotations

import math
from email.utils import parsedate_to_datetime

import msgspec


class Backoff(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Doubling waits. Chance spreads those that failed together over half of the wait: they do not return together."""

    first_s: float = 5.0
    most_s: float = 600.0

    def delay_s(self, failures: int, chance: float) -> float:
        """The wait after `failures` failures of a kind (at least 1), for a `chance` of at least 0 and below 1."""
        # 2.0 ** 1024 overflows; long before that the cap holds.
        full = min(self.first_s * 2.0 ** min(max(failures, 1) - 1, 64), self.most_s)
        return full * (0.5 + chance / 2)


def retry_after_s(value: str | None, *, now_s: float) -> float:
    """Of a Retry-After header (RFC 9110): seconds, or a date; 0 for what is neither, and for what has passed."""
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
