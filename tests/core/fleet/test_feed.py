"""The event feed of one hub, between the table and its listeners."""

from __future__ import annotations

from collections.abc import Sequence

from strata.database.event_kinds import HOST_LOST
from strata.database.events import EventRecord, StoredEvent
from strata.fleet.http.feed import Feed


async def test_an_event_that_is_written_counts_as_published_when_listeners_get_it() -> None:
    """Else a subscriber that has read everything up to the newest one would wait for the event after it."""
    table: list[StoredEvent] = []

    async def read(after: str, limit: int, *, subject: str = "") -> Sequence[StoredEvent]:
        del subject
        return [each for each in table if int(each.cursor) > int(after)][:limit]

    async def newest() -> str:
        return table[-1].cursor if table else "0"

    feed = Feed(read, newest)
    await feed.catch_up()
    table.append(StoredEvent("1", EventRecord(0.0, "hub", HOST_LOST, "host1", {})))
    assert (await feed.newest(), await feed.published(), await feed.after("0", 9)) == ("1", "0", [])
    await feed.catch_up()
    assert (await feed.published(), await feed.after("0", 9)) == ("1", table)
