"""Calls that wait until something becomes true: one shared future for each thing that can be waited for.

A waiter takes its place before it asks, so that what becomes true in between still wakes it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Hashable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Generic, TypeVar

Value = TypeVar("Value")


@dataclass
class _Place(Generic[Value]):
    woken: asyncio.Future[Value]
    waiters: int = 0


class Waiters(Generic[Value]):
    """Keeps a future for a key only while somebody waits for it."""

    def __init__(self) -> None:
        self._places: dict[Hashable, _Place[Value]] = {}

    def __len__(self) -> int:
        return len(self._places)

    @contextmanager
    def on(self, key: Hashable) -> Iterator[asyncio.Future[Value]]:
        """The future of a key. It is shared: wait with `until`, which leaves it alone when the caller gives up."""
        place = self._places.get(key)
        if place is None:
            place = self._places[key] = _Place(asyncio.get_running_loop().create_future())
        place.waiters += 1
        try:
            yield place.woken
        finally:
            place.waiters -= 1
            if not place.waiters and self._places.get(key) is place:
                del self._places[key]

    def wake(self, key: Hashable, value: Value) -> None:
        place = self._places.pop(key, None)
        if place is not None:
            place.woken.set_result(value)

    def cancel_all(self) -> None:
        """Nothing of what they wait for will be known here."""
        places, self._places = self._places, {}
        for place in places.values():
            place.woken.cancel()


async def until(woken: asyncio.Future[Value], timeout_s: float | None = None) -> bool:
    """Whether it came true in time; false too if it was cancelled."""
    await asyncio.wait([woken], timeout=timeout_s)
    return woken.done() and not woken.cancelled()
