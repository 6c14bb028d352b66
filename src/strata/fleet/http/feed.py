"""The event feed of one hub: one reader of the table, any number of listeners, and nobody misses a row.

A listener that is close behind is served from memory; one that is far behind, or wants one subject only, reads the
table. Both go on from a cursor, so the two ways give the same rows.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Iterator, Sequence
from typing import Final, Protocol

from strata.base.notify import Broadcast
from strata.database.events import Recorded

POLL_S: Final = 1.0
"""How often the table is read although nobody poked: another hub may write to it too."""
GAP_S: Final = 0.02
"""Between two reads: a busy hub tells of many events at once."""
_KEPT: Final = 4096
_PAGE: Final = 1000


class Reads(Protocol):
    async def __call__(self, after: str, limit: int, *, subject: str = "") -> Sequence[Recorded]: ...


class Feed:
    def __init__(self, read: Reads, newest: Callable[[], Awaitable[str]]) -> None:
        self._read = read
        self._newest = newest
        self._cursor: str | None = None
        self._recent: list[Recorded] = []
        self._place: dict[str, int] = {}
        """Cursor to the index in `_recent` of what comes after it."""
        self._poked = asyncio.Event()
        self._changes = Broadcast()
        self.listeners = 0
        """Streams that are open."""

    def poke(self) -> None:
        """Something was written, perhaps."""
        self._poked.set()

    def wake(self) -> None:
        """Let everybody who waits look around: the hub stops."""
        self._changes.notify()

    @contextlib.contextmanager
    def listening(self) -> Iterator[None]:
        self.listeners += 1
        try:
            yield
        finally:
            self.listeners -= 1

    async def newest(self) -> str:
        return await self._newest()

    async def run_once(self) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(POLL_S):
                await self._poked.wait()
        self._poked.clear()
        await self.catch_up()

    async def catch_up(self) -> None:
        if self._cursor is None:
            self._cursor = await self._newest()
            self._place = {self._cursor: 0}
            self._changes.notify()
        while fresh := await self._read(self._cursor, _PAGE):
            self._keep(fresh)
            self._changes.notify()

    def next(self) -> asyncio.Event:
        """Set when there is more. Take it before reading: what comes in between is not missed."""
        return self._changes.next()

    async def after(self, cursor: str, limit: int, *, subject: str = "") -> Sequence[Recorded]:
        at = self._place.get(cursor)
        if at is None or subject:
            return await self._read(cursor, limit, subject=subject)
        return self._recent[at : at + limit]

    def _keep(self, fresh: Sequence[Recorded]) -> None:
        for each in fresh:
            self._recent.append(each)
            self._place[each.cursor] = len(self._recent)
        self._cursor = fresh[-1].cursor
        if len(self._recent) > 2 * _KEPT:
            dropped = len(self._recent) - _KEPT
            before = self._recent[dropped - 1].cursor
            del self._recent[:dropped]
            self._place = {before: 0} | {each.cursor: n for n, each in enumerate(self._recent, 1)}
