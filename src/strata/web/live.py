"""The stream of changed topics to open pages: at most one a second, 256 viewers, which topics an event has.

A topic is `jobs`, `job:ID`, `hosts`, `host:ID`, … A page that gets a topic of its own fetches its content again. Each
topic is published at most once a second, so a busy hub costs its viewers one rendering a second and no more.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Collection, Iterable, Sequence
from typing import Any, Final, Protocol

import msgspec

from strata.base.errors import Code, StrataError
from strata.base.notify import Broadcast
from strata.database.events import StoredEvent
from strata.http.route import VIEWER, HttpCall, RawReply, Route

PUBLISH_S: Final = 1.0
TICK_S: Final = 5.0
"""A sign that the stream lives, and a check of the credentials, after so long without a change."""
MAX_VIEWERS: Final = 256
_MAX_TOPICS: Final = 10_000
_PAGE: Final = 1000


class EventSource(Protocol):
    """The feed of events, as the hub has it."""

    def next(self) -> asyncio.Event: ...

    async def newest(self) -> str: ...

    async def after(self, cursor: str, limit: int, *, subject: str = "") -> Sequence[StoredEvent]: ...


class NoEvents:
    """The feed of a server without one: its open pages fetch their content again by time."""

    def next(self) -> asyncio.Event:
        return asyncio.Event()

    async def newest(self) -> str:
        return ""

    async def after(self, cursor: str, limit: int, *, subject: str = "") -> Sequence[StoredEvent]:
        del cursor, limit, subject
        return ()


class LiveQuery(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    topics: str = ""
    """The topics with spaces between."""


class LiveTopics:
    def __init__(self, source: EventSource, stopping: asyncio.Event) -> None:
        self._source = source
        self._stopping = stopping
        self._cursor: str | None = None
        self._published: dict[str, tuple[int, float]] = {}
        """The number and the time of each topic's last publication."""
        self._pending: dict[str, float] = {}
        """When each topic that has changed is due."""
        self._changes = Broadcast()
        self.viewers = 0
        self.number = 0
        """The number of the last publication."""

    async def run_once(self) -> None:
        """Read what is new, and publish the topics that are due."""
        if self._cursor is None:
            self._cursor = await self._source.newest()
        changed = self._source.next()
        events = await self._source.after(self._cursor, _PAGE)
        now_s = asyncio.get_running_loop().time()
        for each in events:
            self._cursor = each.cursor
            for topic in topics_of(each.event.kind, each.event.subject):
                last_s = self._published.get(topic, (0, now_s - PUBLISH_S))[1]
                self._pending.setdefault(topic, last_s + PUBLISH_S)
        due = [topic for topic, at_s in self._pending.items() if at_s <= now_s]
        if due:
            self._publish(due, now_s)
        if len(events) < _PAGE:
            wait_s = min([PUBLISH_S, *(at_s - now_s for at_s in self._pending.values())])
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(max(0.01, wait_s)):
                    await changed.wait()
        if self._stopping.is_set():
            self._changes.notify()

    def _publish(self, topics: Iterable[str], now_s: float) -> None:
        self.number += 1
        for topic in topics:
            del self._pending[topic]
            # The newest are last, so the oldest are dropped first.
            self._published.pop(topic, None)
            self._published[topic] = (self.number, now_s)
        while len(self._published) > _MAX_TOPICS:
            del self._published[next(iter(self._published))]
        self._changes.notify()

    def changed_since(self, number: int, topics: Collection[str]) -> list[str]:
        """Those of these topics that were published after this publication."""
        return [topic for topic in topics if self._published.get(topic, (0, 0.0))[0] > number]

    async def stream(self, call: HttpCall[Any], query: LiveQuery) -> RawReply:
        """The topics of a page as they change, as server-sent events."""
        topics = frozenset(query.topics.split()[:32])
        if self.viewers >= MAX_VIEWERS:
            raise StrataError(Code.EXHAUSTED, f"{MAX_VIEWERS} pages are open already")
        return RawReply(self._frames(call, topics), media_type="text/event-stream")

    async def _frames(self, call: HttpCall[Any], topics: Collection[str]) -> AsyncIterator[bytes]:
        self.viewers += 1
        try:
            number, clock = self.number, asyncio.get_running_loop().time
            ticked_s = clock()
            yield b"retry: 2000\nevent: tick\ndata: \n\n"
            while not self._stopping.is_set():
                changes = self._changes.next()
                changed, number = self.changed_since(number, topics), self.number
                if changed:
                    # A topic is a word, so it breaks no line.
                    yield f"event: change\ndata: {' '.join(sorted(changed))}\n\n".encode()
                if clock() - ticked_s >= TICK_S:
                    await call.reauthenticate()
                    ticked_s = clock()
                    yield b"event: tick\ndata: \n\n"
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(max(0.01, ticked_s + TICK_S - clock())):
                        await changes.wait()
        finally:
            self.viewers -= 1

    def routes(self) -> Sequence[Route]:
        return [Route("GET", "/live", VIEWER, self.stream, operation="web.live")]


def topics_of(kind: str, subject: str) -> tuple[str, ...]:
    """Returns the topics of an event: that of its list, that of its subject, and that of all events."""
    thing = kind.partition(".")[0]
    return (f"{thing}s", f"{thing}:{subject}", "events")
