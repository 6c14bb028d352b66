"""The event feed of one hub: reads the event table every second, keeps the newest 4,096 rows, wakes all listeners
without a gap, and writes a log line for each event.

A listener close to the end is served from memory; one that is far behind, or wants one subject only, reads the table.
Both continue from a cursor, so both get the same rows.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Iterator, Sequence
from typing import Final, Protocol

from strata.base import log
from strata.base.notify import Broadcast
from strata.database.event_kinds import FREQUENT
from strata.database.events import EventRecord, StoredEvent
from strata.fleet.wire.events import FeedEvent

POLL_S: Final = 1.0
"""How often the table is read without a notification: another hub may write to it too."""
GAP_S: Final = 0.02
"""Time between two reads: a busy hub publishes many events at once."""
_MAX_RECENT: Final = 4096
_PAGE: Final = 1000
_log = log.get(__name__)


def feed_event(recorded: StoredEvent, address: str = "") -> FeedEvent:
    """Returns an event as clients and webhooks get it. Only some may see the address that its request came from."""
    event = recorded.event
    return FeedEvent(
        cursor=recorded.cursor,
        at_s=event.at_s,
        actor=event.actor,
        kind=event.kind,
        subject=event.subject,
        body=event.body,
        address=address,
    )


class ReadEvents(Protocol):
    async def __call__(self, after: str, limit: int, *, subject: str = "") -> Sequence[StoredEvent]: ...


class Feed:
    def __init__(
        self,
        read: ReadEvents,
        newest: Callable[[], Awaitable[str]],
        on_published: Callable[[float], None] | None = None,
    ) -> None:
        """`on_published` is called with the time of each event that listeners get."""
        self._read = read
        self._newest = newest
        self._on_published = on_published
        self._cursor: str | None = None
        self._recent: list[StoredEvent] = []
        self._offsets: dict[str, int] = {}
        """Cursor to the index in `_recent` of what comes after it."""
        self._written = asyncio.Event()
        self._changes = Broadcast()
        self.listeners = 0
        """Streams that are open."""

    def notify_written(self) -> None:
        """A request may have written events: read the table soon."""
        self._written.set()

    def wake_listeners(self) -> None:
        """Wake all listeners: the hub stops."""
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

    async def published(self) -> str:
        """The last event that `after` gives to a listener close to the end: the table may hold later ones already."""
        return await self._newest() if self._cursor is None else self._cursor

    async def run_once(self) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(POLL_S):
                await self._written.wait()
        self._written.clear()
        await self.catch_up()

    async def catch_up(self) -> None:
        if self._cursor is None:
            self._cursor = await self._newest()
            self._offsets = {self._cursor: 0}
            self._changes.notify()
        while fresh := await self._read(self._cursor, _PAGE):
            self._keep(fresh)
            self._changes.notify()

    def next(self) -> asyncio.Event:
        """Set when there is more. Take it before reading: what comes in between is not missed."""
        return self._changes.next()

    async def after(self, cursor: str, limit: int, *, subject: str = "") -> Sequence[StoredEvent]:
        at = self._offsets.get(cursor)
        if at is None or subject:
            return await self._read(cursor, limit, subject=subject)
        return self._recent[at : at + limit]

    def _keep(self, fresh: Sequence[StoredEvent]) -> None:
        for each in fresh:
            log_event(each.event)
            if self._on_published is not None:
                self._on_published(each.event.at_s)
            self._recent.append(each)
            self._offsets[each.cursor] = len(self._recent)
        self._cursor = fresh[-1].cursor
        if len(self._recent) > 2 * _MAX_RECENT:
            dropped = len(self._recent) - _MAX_RECENT
            before = self._recent[dropped - 1].cursor
            del self._recent[:dropped]
            self._offsets = {before: 0} | {each.cursor: n for n, each in enumerate(self._recent, 1)}


def log_event(event: EventRecord) -> None:
    """One line for each event, `job_failed` for `job.failed`; those of which every job has one are for debugging."""
    write = _log.debug if event.kind in FREQUENT else _log.info
    write(event.kind.replace(".", "_"), subject=event.subject, actor=event.actor, at_s=event.at_s, detail=event.body)
