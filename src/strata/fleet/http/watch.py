"""Long polls: wait for something, but not for a client that has left, nor past the end of the hub."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Coroutine
from typing import Any, Final, TypeVar
from weakref import WeakValueDictionary

from starlette.requests import ClientDisconnect

from strata.base.errors import Code, StrataError
from strata.fleet.ports import Store
from strata.http.route import HttpCall

T = TypeVar("T")

_REMEMBERED: Final = 10_000


async def patiently(call: HttpCall[Any], stopping: asyncio.Event, work: Coroutine[Any, Any, T]) -> T:
    """The result of `work`, unless the client leaves or the hub stops before."""
    doing = asyncio.create_task(work)
    others = [asyncio.create_task(call.disconnected()), asyncio.create_task(stopping.wait())]
    try:
        await asyncio.wait([doing, *others], return_when=asyncio.FIRST_COMPLETED)
        if doing.done():
            return doing.result()
        if others[0].done():
            raise ClientDisconnect
        raise StrataError(Code.UNAVAILABLE, "this hub is stopping", hint="send the same request again")
    finally:
        for task in (doing, *others):
            task.cancel()
        await asyncio.wait([doing, *others])


async def either(event: asyncio.Event, wait_s: float) -> bool:
    """Whether the event came in time."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(max(0.0, wait_s)):
            return await event.wait()
    return False


class Watch:
    """Wakes those who follow a stream when something was appended to it."""

    def __init__(self) -> None:
        # Those who wait hold the event; when the last of them has gone, so has the entry.
        self._events: WeakValueDictionary[tuple[str, int, str], asyncio.Event] = WeakValueDictionary()

    def next(self, key: tuple[str, int, str]) -> asyncio.Event:
        """Set at the next piece. Take it before looking: what comes in between is not missed."""
        event = self._events.get(key)
        if event is None:
            event = self._events[key] = asyncio.Event()
        return event

    def tell(self, key: tuple[str, int, str]) -> None:
        event = self._events.pop(key, None)
        if event is not None:
            event.set()


class Attempts:
    """Which host an attempt is of. That never changes, and is asked with every line of every log."""

    def __init__(self) -> None:
        self._hosts: dict[tuple[str, int], str] = {}

    async def host(self, store: Store, job_id: str, epoch: int) -> str:
        """Empty if there is no such attempt."""
        key = (job_id, epoch)
        if key not in self._hosts:
            if len(self._hosts) >= _REMEMBERED:
                self._hosts.clear()
            for attempt in await store.attempts(job_id):
                self._hosts[job_id, attempt.epoch] = attempt.host_id
        return self._hosts.get(key, "")
