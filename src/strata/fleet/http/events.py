"""Routes of the event feed: a page at a time, or server-sent events that continue from a cursor."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from typing import Final

import msgspec

from strata.base.errors import Code, StrataError
from strata.database.events import StoredEvent
from strata.fleet import wire
from strata.fleet.http.context import HubCall, HubContext, submitter_of
from strata.fleet.http.long_poll import until_disconnect, wait_event
from strata.http.route import RawReply

NEWEST: Final = "newest"
HEARTBEAT_S: Final = 10.0
"""A comment after so long without an event: proxies keep the connection."""
CHECK_S: Final = 1.0
"""How often the credentials of a listener are checked again: a revoked one is disconnected."""
MAX_LISTENERS: Final = 512
_PAGE: Final = 256
_encode: Final = msgspec.json.Encoder().encode


async def events(call: HubCall, query: wire.EventsQuery) -> wire.EventsReply | RawReply:
    """What has changed, who did it, and when. `Accept: text/event-stream` makes it a stream."""
    context = call.context
    after = call.headers.get("last-event-id") or query.after
    if after == NEWEST:
        after = await context.feed.newest()
    if "text/event-stream" not in call.headers.get("accept", ""):
        return await _page(context, call, after, query)
    # The first read is made here, so an invalid cursor is refused and does not break the stream.
    first = await context.feed.after(after, _PAGE, subject=query.subject)
    if context.feed.listeners >= MAX_LISTENERS:
        raise StrataError(Code.EXHAUSTED, f"{MAX_LISTENERS} listeners are connected already")
    return RawReply(_stream(context, call, after, first, query.subject), media_type="text/event-stream")


async def _page(context: HubContext, call: HubCall, after: str, query: wire.EventsQuery) -> wire.EventsReply:
    events = await context.feed.after(after, query.limit, subject=query.subject)
    if not events and query.wait_s:
        events = await until_disconnect(call, context.stopping, _wait(context, after, query))
        # The wait may have taken a minute, and the caller may have been revoked since.
        await call.reauthenticate()
    cursor = events[-1].cursor if events else after
    return wire.EventsReply(events=tuple(_event(each, call) for each in events), cursor=cursor)


async def _wait(context: HubContext, after: str, query: wire.EventsQuery) -> Sequence[StoredEvent]:
    until_s = context.clock.monotonic_s() + query.wait_s
    while True:
        changed = context.feed.next()
        events = await context.feed.after(after, query.limit, subject=query.subject)
        left_s = until_s - context.clock.monotonic_s()
        if events or left_s <= 0:
            return events
        await wait_event(changed, left_s)


async def _stream(
    context: HubContext, call: HubCall, after: str, first: Sequence[StoredEvent], subject: str
) -> AsyncIterator[bytes]:
    with context.feed.listening():
        yield b"retry: 1000\n\n"
        events = first
        checked_s = sent_s = context.clock.monotonic_s()
        while not context.stopping.is_set():
            if context.clock.monotonic_s() - checked_s >= CHECK_S:
                await call.reauthenticate()
                checked_s = context.clock.monotonic_s()
            if events:
                yield b"".join(_frame(each, call) for each in events)
                after, sent_s = events[-1].cursor, context.clock.monotonic_s()
            elif context.clock.monotonic_s() - sent_s >= HEARTBEAT_S:
                yield b": still here\n\n"
                sent_s = context.clock.monotonic_s()
            changed = context.feed.next()
            events = await context.feed.after(after, _PAGE, subject=subject)
            if not events:
                await wait_event(changed, CHECK_S)


def _frame(recorded: StoredEvent, call: HubCall) -> bytes:
    event = recorded.event
    # JSON has no line breaks, and kinds are identifiers.
    return b"id: %b\nevent: %b\ndata: %b\n\n" % (
        recorded.cursor.encode(),
        event.kind.encode(),
        _encode(_event(recorded, call)),
    )


def _event(recorded: StoredEvent, call: HubCall) -> wire.FeedEvent:
    """Where people work is for operators to see, and for themselves."""
    event = recorded.event
    shown = submitter_of(call).operator or event.actor == call.actor
    return wire.FeedEvent(
        cursor=recorded.cursor,
        at_s=event.at_s,
        actor=event.actor,
        kind=event.kind,
        subject=event.subject,
        body=event.body,
        address=event.address if shown else "",
    )
