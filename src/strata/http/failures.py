"""Requests whose credentials are not good: told in the log by address, and slowed down when there are many."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from strata.base import log
from strata.http.strangers import origin

BURST: Final = 100
PER_S: Final = 10.0
"""From one address; what comes faster costs a new connection each."""
LOG_S: Final = 1.0
_ADDRESSES: Final = 10_000
_log = log.get(__name__)


@dataclass(slots=True)
class _Seen:
    level: float
    at_s: float
    told_s: float = float("-inf")
    untold: int = 0


class Failures:
    def __init__(
        self, burst: float = BURST, per_s: float = PER_S, *, monotonic_s: Callable[[], float] = time.monotonic
    ) -> None:
        self._burst = burst
        self._per_s = per_s
        self._monotonic_s = monotonic_s
        self._seen: dict[str, _Seen] = {}

    def note(self, address: str, method: str, path: str, reason: str) -> bool:
        """Count and log one failure; whether there are too many from this address."""
        now_s = self._monotonic_s()
        counted = origin(address)
        seen = self._seen.pop(counted, None) or _Seen(0.0, now_s)
        # The newest are last, so that the oldest is the one to forget.
        self._seen[counted] = seen
        if len(self._seen) > _ADDRESSES:
            del self._seen[next(iter(self._seen))]
        seen.level = max(0.0, seen.level - (now_s - seen.at_s) * self._per_s) + 1
        seen.at_s = now_s
        if now_s - seen.told_s >= LOG_S:
            _log.info(
                "authentication_failed",
                address=address,
                method=method[:16],
                path=path[:200],
                reason=reason,
                more=seen.untold,
            )
            seen.told_s, seen.untold = now_s, 0
        else:
            seen.untold += 1
        return seen.level > self._burst
