"""A clock that stands still until a test moves it."""

from __future__ import annotations

import asyncio
import heapq
import itertools


class ManualClock:
    """Stands still until `advance` moves it; sleepers wake in order of their due time."""

    def __init__(self, wall_s: float = 1_700_000_000.0) -> None:
        self._wall_s = wall_s
        self._monotonic_s = 0.0
        self._order = itertools.count()
        self._sleepers: list[tuple[float, int, asyncio.Future[None]]] = []

    def wall_s(self) -> float:
        return self._wall_s

    def monotonic_s(self) -> float:
        return self._monotonic_s

    async def sleep(self, seconds: float) -> None:
        woken = asyncio.get_running_loop().create_future()
        heapq.heappush(self._sleepers, (self._monotonic_s + max(seconds, 0.0), next(self._order), woken))
        await woken

    async def advance(self, seconds: float) -> None:
        """Move forward, letting everything that becomes due on the way run before time goes on."""
        until = self._monotonic_s + seconds
        await _settle()
        while self._sleepers and self._sleepers[0][0] <= until:
            due, _, woken = heapq.heappop(self._sleepers)
            self._move_to(max(due, self._monotonic_s))
            if not woken.done():
                woken.set_result(None)
            await _settle()
        self._move_to(until)

    def _move_to(self, monotonic_s: float) -> None:
        self._wall_s += monotonic_s - self._monotonic_s
        self._monotonic_s = monotonic_s


async def _settle() -> None:
    # A woken task may start others that sleep in their turn; a few turns of the loop let such chains reach their sleep.
    for _ in range(10):
        await asyncio.sleep(0)
