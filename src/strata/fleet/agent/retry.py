"""Retries calls to the hub with backoff (0.5 to 15 s): which errors are transient, and the thread pools of heartbeats,
claims and uploads.

Heartbeats have a pool of their own: an upload that crawls must not cost the leases.
"""

from __future__ import annotations

import asyncio
import contextvars
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
"""Worth a retry: the hub may come back, or its operator may repair it. Other errors do not go away by themselves."""
BACKOFF: Final = Backoff(first_s=0.5, most_s=15.0)
_log = log.get(__name__)


@dataclass(frozen=True)
class ThreadPools:
    heartbeats: Executor = field(default_factory=lambda: ThreadPoolExecutor(1, "heartbeat"))
    claims: Executor = field(default_factory=lambda: ThreadPoolExecutor(1, "claim"))
    prepare: Executor = field(default_factory=lambda: ThreadPoolExecutor(64, "prepare"))
    """A build of an environment takes minutes, and other attempts wait for it."""
    work: Executor = field(default_factory=lambda: ThreadPoolExecutor(8, "work"))

    def close(self) -> None:
        for pool in (self.heartbeats, self.claims, self.prepare, self.work):
            pool.shutdown(wait=False, cancel_futures=True)


async def run_in(pool: Executor, call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    # The thread continues the trace of this task.
    context = contextvars.copy_context()
    return await asyncio.get_running_loop().run_in_executor(pool, lambda: context.run(call, *args, **kwargs))


async def retry(
    pool: Executor,
    operation: str,
    call: Callable[[], T],
    *,
    cancelled: asyncio.Event,
    chance: Callable[[], float] = random.random,
) -> T:
    """Retry transient errors until the call succeeds. When `cancelled` is set, the last error is raised."""
    failures = 0
    while True:
        try:
            return await run_in(pool, call)
        except StrataError as error:
            if error.code not in TRANSIENT or cancelled.is_set():
                raise
            failures += 1
            delay_s = max(BACKOFF.delay_s(failures, chance()), _requested_delay_s(error.detail.get("retry_after_s")))
            if failures in (1, 5) or failures % 20 == 0:
                _log.warning("hub_call_retried", operation=operation, failures=failures, reason=error.message)
            if await wait_or_timeout(cancelled, delay_s):
                raise


async def wait_or_timeout(event: asyncio.Event, timeout_s: float) -> bool:
    """Wait for the event, at most so long; whether it was set."""
    try:
        async with asyncio.timeout(timeout_s):
            await event.wait()
    except TimeoutError:
        return False
    return True


def _requested_delay_s(retry_after_s: Any) -> float:
    return min(float(retry_after_s), BACKOFF.most_s) if isinstance(retry_after_s, int | float) else 0.0
