"""Messages about the event feed: the query with its filters, and an event."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec

from strata.fleet.artifacts.manifest import Word
from strata.fleet.wire.base import HubReply, Message, Page, Prefix, Text, WaitS


class EventsQuery(Message, frozen=True, kw_only=True):
    after: Prefix = ""
    """The `cursor` of the last event that was seen; `newest` for what comes from now on."""
    before: Prefix = ""
    """Newest first: what was before the event with this `cursor`; `newest` for the first page."""
    subject: Prefix = ""
    kind: Annotated[tuple[Word, ...], msgspec.Meta(max_length=16)] = ()
    """Kinds of events, or globs of these as in `job.*`."""
    search: Text = ""
    """A text to find in the kind, the subject, the actor and the details, without regard to case."""
    limit: Page = 100
    wait_s: WaitS = 0.0


class FeedEvent(HubReply, frozen=True, kw_only=True):
    cursor: str
    at_s: float
    actor: str
    kind: str
    subject: str
    body: dict[str, Any]
    address: str = ""
    """Where the request came from; empty for what the hub did itself, for the reports of hosts, and to callers who are
    neither the actor nor an operator."""


class EventsReply(HubReply, frozen=True, kw_only=True):
    events: tuple[FeedEvent, ...]
    cursor: str
    """Where to go on, also when there was nothing: as `after`, or as `before` when the newest come first. Empty: that
    was the first event of all."""
    more: bool = False
    """There may be more events that match: go on from `cursor`. A page looks at some thousand events at most."""
    hosts: dict[str, str] = {}
    """The names of the hosts that acted, by id; only where the newest come first."""
    keys: dict[str, str] = {}
    """The owners of the keys that acted, by their ids."""
    jobs: dict[str, str] = {}
    """The names of the jobs that the events are about, by id."""
