"""When clients hear results, so that it can be said how long a server was away."""

from __future__ import annotations

import asyncio
import math


class Heard:
    """Results of operations, by when these were sent: one on its way when a process died says nothing of the next."""

    def __init__(self) -> None:
        self._last_s = -math.inf
        self._changed = asyncio.Event()

    def note(self, sent_s: float) -> None:
        self._last_s = max(self._last_s, sent_s)
        self._changed.set()

    async def one_sent_after(self, when_s: float) -> None:
        while self._last_s <= when_s:
            self._changed.clear()
            await self._changed.wait()
