"""The retry policy of everything that waits for a journal whose database is away: backoff and Retry-After."""

from __future__ import annotations

from typing import Final

from strata.base.retry import Backoff, RetryPolicy

BACKOFF: Final = Backoff(first_s=0.02, most_s=0.25)
RETRY: Final = RetryPolicy(backoff=BACKOFF)
RETRY_AFTER_S: Final = BACKOFF.most_s
"""The delay that clients get with an error while no process leads, and that of a follower without a journal."""
