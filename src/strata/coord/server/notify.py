"""Calls that wait until something becomes true: one shared place for each thing that can be waited for.

A waiter takes its place before it asks, so that what becomes true in between still wakes it. Ten thousand may wait for
one thing: waking them, and each of them giving up, costs the same for every one of them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Hashable
from types import TracebackType
from typing import Generic, TypeVar

Value = TypeVar("Value")


class Happening(Generic[Value]):
    """What is waited for. It is shared: wait with `until`."""

    def __init__(self) -> None:
        self._values: list[Value] = []
        self._cancelled = False
        # By waiter, so that one that gives up need not be searched for.
        self._waiting: dict[asyncio.Future[None], None] = {}

    def done(self) -> bool:
        return bool(self._values) or self._cancelled

    def cancelled(self) -> bool:
        """Whether nobody here will ever know."""
        return self._cancelled

    def result(self) -> Value:
        return self._values[0]

    def happen(self, value: Value) -> None:
        self._values.append(value)
        self._wake()

    def cancel(self) -> None:
        self._cancelled = True
        self._wake()

    async def wait(self, timeout_s: float | None) -> None:
        loop = asyncio.get_running_loop()
        mine: asyncio.Future[None] = loop.create_future()
        self._waiting[mine] = None
        timer = loop.call_later(timeout_s, _resolve, mine) if timeout_s is not None else None
        try:
            await mine
        finally:
            self._waiting.pop(mine, None)
            if timer is not None:
                timer.cancel()

    def _wake(self) -> None:
        waiting, self._waiting = self._waiting, {}
        for mine in waiting:
            _resolve(mine)


def _resolve(mine: asyncio.Future[None]) -> None:
    if not mine.done():
        mine.set_result(None)


class Waiters(Generic[Value]):
    """Keeps a place for a key only while somebody waits for it."""

    def __init__(self) -> None:
        self._places: dict[Hashable, _Place[Value]] = {}

    def __len__(self) -> int:
        return len(self._places)

    def on(self, key: Hashable) -> _Place[Value]:
        """For a `with` statement: a place with those who wait for the same."""
        place = self._places.get(key)
        if place is None:
            place = self._places[key] = _Place(key, self._places)
        return place

    def wake(self, key: Hashable, value: Value) -> None:
        place = self._places.pop(key, None)
        if place is not None:
            place.happening.happen(value)

    def cancel_all(self) -> None:
        """Nothing of what they wait for will be known here."""
        places, self._places = self._places, {}
        for place in places.values():
            place.happening.cancel()


class _Place(Generic[Value]):
    """Entered by each of those who wait there."""

    def __init__(self, key: Hashable, places: dict[Hashable, _Place[Value]]) -> None:
        self.happening: Happening[Value] = Happening()
        self._key = key
        self._places = places
        self._entered = 0

    def __enter__(self) -> Happening[Value]:
        self._entered += 1
        return self.happening

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._entered -= 1
        if not self._entered and self._places.get(self._key) is self:
            del self._places[self._key]


async def until(happening: Happening[Value], timeout_s: float | None = None) -> bool:
    """Whether it came true in time; false too if it was cancelled."""
    if not happening.done():
        await happening.wait(timeout_s)
    return happening.done() and not happening.cancelled()
