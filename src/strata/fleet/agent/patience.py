"""How often something is asked again, and in which threads it waits. Renewals have a thread of their own: an upload
that crawls must not cost the leases."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, Final, ParamSpec, TypeVar

from strata.base import log
from strata.base.errors import Code, StrataError
from strata.base.retry import Backoff

P = ParamSpec("P")
T = TypeVar("T")

TRANSIENT: Final = frozenset(
    {Code.UNAVAILABLE, Code.DEADLINE, Code.EXHAUSTED, Code.INTERNAL, Code.UNAUTHENTICATED, Code.FORBIDDEN}
)
"""Worth asking again: the hub may be back, or its operator may mend it. The rest stays as it is."""
BACKOFF: Final = Backoff(first_s=0.5, most_s=15.0)
_log = log.get(__name__)


@dataclass(frozen=True)
class Threads:
    beats: Executor = field(default_factory=lambda: ThreadPoolExecutor(1, "beat"))
    claims: Executor = field(default_factory=lambda: ThreadPoolExecutor(1, "claim"))
    work: Executor = field(default_factory=lambda: ThreadPoolExecutor(8, "work"))

    def close(self) -> None:
        for pool in (self.beats, self.claims, self.work):
            pool.shutdown(wait=False, cancel_futures=True)


async def within(pool: Executor, call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    return await asyncio.get_running_loop().run_in_executor(pool, lambda: call(*args, **kwargs))


class Patience:
    """Asks until there is an answer, or until `given_up` is set: then the last refusal is raised."""

    def __init__(self, given_up: asyncio.Event, *, chance: Callable[[], float] = random.random) -> None:
        self._given_up = given_up
        self._chance = chance

    async def ask(self, pool: Executor, what: str, call: Callable[[], T]) -> T:
        failures = 0
        while True:
            try:
                return await within(pool, call)
            except StrataError as error:
                if error.code not in TRANSIENT or self._given_up.is_set():
                    raise
                failures += 1
                delay_s = max(BACKOFF.delay_s(failures, self._chance()), _asked_for(error.detail.get("retry_after_s")))
                if failures in (1, 5) or failures % 20 == 0:
                    _log.warning("will ask again", what=what, failures=failures, reason=error.message)
                if await sleeps(self._given_up, delay_s):
                    raise


async def sleeps(event: asyncio.Event, seconds: float) -> bool:
    """Wait for so long at most; whether the event came."""
    try:
        async with asyncio.timeout(seconds):
            await event.wait()
    except TimeoutError:
        return False
    return True


def _asked_for(given: Any) -> float:
    return min(float(given), BACKOFF.most_s) if isinstance(given, int | float) else 0.0
