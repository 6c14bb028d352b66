"""Limits failed authentication by address: a burst of 100, then 10 a second, and a log line a second."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from strata.base import log
from strata.http.anonymous import origin

BURST: Final = 100
PER_S: Final = 10.0
"""Failures from one address; each above this rate also closes the connection."""
LOG_S: Final = 1.0
_ADDRESSES: Final = 10_000
_log = log.get(__name__)


@dataclass(slots=True)
class _AddressRecord:
    level: float
    at_s: float
    logged_s: float = float("-inf")
    unlogged: int = 0


class AuthFailures:
    def __init__(
        self, burst: float = BURST, per_s: float = PER_S, *, monotonic_s: Callable[[], float] = time.monotonic
    ) -> None:
        self._burst = burst
        self._per_s = per_s
        self._monotonic_s = monotonic_s
        self._records: dict[str, _AddressRecord] = {}
        self._count = 0

    def record(self, address: str, method: str, path: str, reason: str) -> bool:
        """Count and log one failure; whether there are too many from this address."""
        self._count += 1
        now_s = self._monotonic_s()
        counted = origin(address)
        record = self._records.pop(counted, None) or _AddressRecord(0.0, now_s)
        # The newest are last, so the oldest is dropped first.
        self._records[counted] = record
        if len(self._records) > _ADDRESSES:
            del self._records[next(iter(self._records))]
        record.level = max(0.0, record.level - (now_s - record.at_s) * self._per_s) + 1
        record.at_s = now_s
        if now_s - record.logged_s >= LOG_S:
            _log.info(
                "authentication_failed",
                address=address,
                method=method[:16],
                path=path[:200],
                reason=reason,
                more=record.unlogged,
            )
            record.logged_s, record.unlogged = now_s, 0
        else:
            record.unlogged += 1
        return record.level > self._burst

    def take_count(self) -> int:
        """Returns how many failures there were since the last call."""
        count, self._count = self._count, 0
        return count
