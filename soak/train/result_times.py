"""When clients receive results, to measure how long a server was away."""

from __future__ import annotations

import asyncio
import math


class ResultTimes:
    """Results by the time their operation was sent: one in flight when a process died does not count as recovery."""

    def __init__(self) -> None:
        self._last_s = -math.inf
        self._changed = asyncio.Event()

    def note(self, sent_s: float) -> None:
        self._last_s = max(self._last_s, sent_s)
        self._changed.set()

    async def wait_sent_after(self, when_s: float) -> None:
        while self._last_s <= when_s:
            self._changed.clear()
            await self._changed.wait()
