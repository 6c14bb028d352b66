"""Read a feed of events to a known point.

PostgreSQL holds an event back while any older transaction of the server is under way, also one of another database,
and the tests that run beside this one have such transactions. What was written is therefore told a little later, and
that something is *not* told can be seen only when something written after it has been. So a test writes a last event,
the marker, and reads up to it: the feed is in the order of transactions, and whatever is before the marker is whole.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Final

from strata.database.events import START, StoredEvent

ARRIVES_S: Final = 25.0
"""How long a transaction of another test may hold the feed up. Longer is a finding. Also a `wait_s` of
the hub: less than the 30 s after which the clients of the tests give up."""

ReadEvents = Callable[[str, int], Awaitable[Sequence[StoredEvent]]]
"""A page of the feed: after this cursor, so many."""


async def told_before(marker: str, read: ReadEvents, *, page_size: int = 1000) -> list[StoredEvent]:
    """All that the feed tells, page after page, before the first event whose subject is `marker`."""
    seen: list[StoredEvent] = []
    async with asyncio.timeout(ARRIVES_S):
        while marker not in (subjects := [each.event.subject for each in seen]):
            seen += await read(seen[-1].cursor if seen else START, page_size)
    return seen[: subjects.index(marker)]
