"""`every`: the only repeating loop, with its backoff after failures (60 s at most) and its largest share of time."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Final

from strata.base import log
from strata.base.clock import Clock
from strata.base.errors import Code, StrataError

_log = log.get(__name__)

RunOnce = Callable[[], Awaitable[None]]


MAX_PACED_S: Final = 10.0
"""The longest pause because of `max_share`."""


async def every(
    interval_s: float, run_once: RunOnce, *, clock: Clock, max_backoff_s: float = 60.0, max_share: float = 1.0
) -> None:
    """Run, wait, repeat until cancelled. A slow run skips the ticks it missed; a failing one is logged and backs off.

    With `max_share`, it runs for no more than this share of the time: work that grows with what there is becomes rarer,
    and leaves the rest of the process its time.

    This is one of the two places where any exception is caught: a loop that others rely on must outlive a bug in
    one of its turns. The other is the outermost handler of each process.
    """
    if not interval_s > 0:
        raise StrataError(Code.INVALID, f"a periodic task needs an interval of more than 0 seconds, not {interval_s}")
    failures = 0
    while True:
        started_s = clock.monotonic_s()
        try:
            await run_once()
            failures = 0
        except Exception:  # noqa: BLE001 - see above
            failures += 1
            _log.exception("periodic_task_failed", failures_in_a_row=failures)
        took_s = clock.monotonic_s() - started_s
        paced_s = 0.0 if failures else min(took_s / max_share - took_s, MAX_PACED_S)
        await clock.sleep(max(paced_s, _pause_s(interval_s, took_s, failures, max_backoff_s)))


def _pause_s(interval_s: float, took_s: float, failures: int, max_backoff_s: float) -> float:
    if failures > 1:
        return max(interval_s, min(max_backoff_s, interval_s * 2.0 ** min(failures - 1, 16)))
    if took_s <= interval_s:
        return interval_s - took_s
    return interval_s - took_s % interval_s
