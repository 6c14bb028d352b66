"""Long polls: a handler waits for work to finish, until the client disconnects or the hub stops."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Coroutine
from typing import Any, Final, TypeVar

from starlette.requests import ClientDisconnect

from strata.base.errors import Code, StrataError
from strata.fleet.ports import Store
from strata.http.route import HttpCall

T = TypeVar("T")

_MAX_CACHED: Final = 10_000


async def until_disconnect(call: HttpCall[Any], stopping: asyncio.Event, work: Coroutine[Any, Any, T]) -> T:
    """The result of `work`; cancelled if the client disconnects or the hub stops before."""
    working = asyncio.create_task(work)
    others = [asyncio.create_task(call.disconnected()), asyncio.create_task(stopping.wait())]
    try:
        await asyncio.wait([working, *others], return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            return working.result()
        if others[0].done():
            raise ClientDisconnect
        raise StrataError(Code.UNAVAILABLE, "this hub is stopping", hint="send the same request again")
    finally:
        for task in (working, *others):
            task.cancel()
        await asyncio.wait([working, *others])


async def wait_event(event: asyncio.Event, wait_s: float) -> bool:
    """Whether the event was set in time."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(max(0.0, wait_s)):
            return await event.wait()
    return False


class AttemptHosts:
    """A cache of the host of each attempt: it never changes, and is looked up for every piece of every log."""

    def __init__(self) -> None:
        self._hosts: dict[tuple[str, int], str] = {}

    async def host(self, store: Store, job_id: str, epoch: int) -> str:
        """Empty if there is no such attempt."""
        key = (job_id, epoch)
        if key not in self._hosts:
            if len(self._hosts) >= _MAX_CACHED:
                self._hosts.clear()
            for attempt in await store.attempts(job_id):
                self._hosts[job_id, attempt.epoch] = attempt.host_id
        return self._hosts.get(key, "")
