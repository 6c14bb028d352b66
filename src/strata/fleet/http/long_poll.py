"""Waits of handlers: for an event of the feed or a timeout, and a cache of which host has which attempt."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Final

from strata.fleet.ports import JobStore

_MAX_CACHED: Final = 10_000


async def wait_event(event: asyncio.Event, wait_s: float) -> bool:
    """Says whether the event was set in time."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(max(0.0, wait_s)):
            return await event.wait()
    return False


class AttemptHosts:
    """A cache of the host of each attempt: it never changes, and is looked up for every piece of every log."""

    def __init__(self) -> None:
        self._hosts: dict[tuple[str, int], str] = {}

    async def host(self, store: JobStore, job_id: str, epoch: int) -> str:
        """Empty if there is no such attempt."""
        key = (job_id, epoch)
        if key not in self._hosts:
            if len(self._hosts) >= _MAX_CACHED:
                self._hosts.clear()
            for attempt in await store.attempts(job_id):
                self._hosts[job_id, attempt.epoch] = attempt.host_id
        return self._hosts.get(key, "")
