"""Routes of the event feed: a page, a long poll, or server-sent events with a heartbeat every 10 s; at most 512
listeners; and the names of hosts, keys and jobs beside the events.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from typing import Final

import msgspec

from strata.base.errors import Code, StrataError
from strata.database.events import NEWEST, EventFilter, StoredEvent
from strata.fleet.http.context import HubCall, HubContext, submitter_of
from strata.fleet.http.feed import feed_event
from strata.fleet.http.long_poll import wait_event
from strata.fleet.records import JobFilter
from strata.fleet.wire.events import EventsQuery, EventsReply, FeedEvent
from strata.http.disconnect import until_disconnect
from strata.http.route import RawReply

HEARTBEAT_S: Final = 10.0
"""A comment after so long without an event: proxies keep the connection."""
CHECK_S: Final = 1.0
"""How often the credentials of a listener are checked again: a revoked one is disconnected."""
MAX_LISTENERS: Final = 512
_PAGE: Final = 256
_HOST: Final = "host:"
_KEY: Final = "key:"
_encode: Final = msgspec.json.Encoder().encode


async def events(call: HubCall, query: EventsQuery) -> EventsReply | RawReply:
    """Returns what has changed, who did it, and when. `Accept: text/event-stream` makes it a stream."""
    context = call.context
    if query.before:
        return await _page_before(call, query)
    after = call.headers.get("last-event-id") or query.after
    if after == NEWEST:
        after = await context.feed.newest()
    if "text/event-stream" not in call.headers.get("accept", ""):
        return await _page(call, after, query)
    # The first read is made here, so an invalid cursor is refused and does not break the stream.
    first = await context.feed.after(after, _PAGE, subject=query.subject)
    if context.feed.listeners >= MAX_LISTENERS:
        raise StrataError(Code.EXHAUSTED, f"{MAX_LISTENERS} listeners are connected already")
    return RawReply(_stream(call, after, first, _filter(query)), media_type="text/event-stream")


def _filter(query: EventsQuery) -> EventFilter:
    return EventFilter(subject=query.subject, kinds=query.kind, search=query.search)


async def _page_before(call: HubCall, query: EventsQuery) -> EventsReply:
    page = await call.context.fleet.store.events.read_before(query.before, query.limit, _filter(query))
    shown = tuple(_event(each, call) for each in page.events)
    hosts = {each.actor.removeprefix(_HOST) for each in shown if each.actor.startswith(_HOST)}
    hosts |= {host for each in shown if isinstance(host := each.body.get("host"), str)}
    names = dict(await call.context.fleet.hosts.names(hosts)) if hosts else {}
    keys, jobs = await _keys(call.context, shown), await _jobs(call.context, shown)
    return EventsReply(events=shown, cursor=page.before, more=bool(page.before), hosts=names, keys=keys, jobs=jobs)


async def _keys(context: HubContext, shown: Sequence[FeedEvent]) -> dict[str, str]:
    ids = {each.actor.removeprefix(_KEY) for each in shown if each.actor.startswith(_KEY)}
    found = [await context.identity.key(id_) for id_ in sorted(ids)]
    return {key.id: key.name for key in found if key is not None and key.name}


async def _jobs(context: HubContext, shown: Sequence[FeedEvent]) -> dict[str, str]:
    ids = list({each.subject for each in shown if each.kind.startswith("job.")})
    rows = await context.fleet.store.jobs.select(JobFilter(ids=ids, limit=len(ids))) if ids else ()
    return {row.id: row.spec.label for row in rows}


async def _page(call: HubCall, after: str, query: EventsQuery) -> EventsReply:
    context = call.context
    events = await context.feed.after(after, query.limit, subject=query.subject)
    if not events and query.wait_s:
        events = await until_disconnect(call, context.stopping, _wait(context, after, query))
        # The wait may have taken a minute, and the caller may have been revoked since.
        await call.reauthenticate()
    cursor = events[-1].cursor if events else after
    wanted = _filter(query)
    shown = tuple(_event(each, call) for each in events if wanted.matches(each.event))
    keys, jobs = await _keys(context, shown), await _jobs(context, shown)
    return EventsReply(events=shown, cursor=cursor, more=len(events) == query.limit, keys=keys, jobs=jobs)


async def _wait(context: HubContext, after: str, query: EventsQuery) -> Sequence[StoredEvent]:
    """Waits until there are events, also such that are not wanted: the caller goes on from there."""
    until_s = context.clock.monotonic_s() + query.wait_s
    while True:
        changed = context.feed.next()
        events = await context.feed.after(after, query.limit, subject=query.subject)
        left_s = until_s - context.clock.monotonic_s()
        if events or left_s <= 0:
            return events
        await wait_event(changed, left_s)


async def _stream(call: HubCall, after: str, first: Sequence[StoredEvent], wanted: EventFilter) -> AsyncIterator[bytes]:
    context = call.context
    with context.feed.listening():
        yield b"retry: 1000\n\n"
        events = first
        checked_s = sent_s = context.clock.monotonic_s()
        while not context.stopping.is_set():
            if context.clock.monotonic_s() - checked_s >= CHECK_S:
                await call.reauthenticate()
                checked_s = context.clock.monotonic_s()
            frames = b"".join(_frame(each, call) for each in events if wanted.matches(each.event))
            if events:
                after = events[-1].cursor
            if frames:
                yield frames
                sent_s = context.clock.monotonic_s()
            elif context.clock.monotonic_s() - sent_s >= HEARTBEAT_S:
                yield b": still here\n\n"
                sent_s = context.clock.monotonic_s()
            changed = context.feed.next()
            events = await context.feed.after(after, _PAGE, subject=wanted.subject)
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


def _event(recorded: StoredEvent, call: HubCall) -> FeedEvent:
    """Returns where people work is for operators to see, and for themselves."""
    event = recorded.event
    shown = submitter_of(call).operator or event.actor == call.actor
    return feed_event(recorded, event.address if shown else "")
