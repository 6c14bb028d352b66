"""Webhooks: every event of the chosen kinds is posted to a URL, signed, in order and at least once.

The cursor of each webhook is in the database, so a restart repeats at most the event being delivered. A receiver
that fails is retried with backoff, and no event is skipped: the events wait in their table. A receiver recognises a
repeated delivery by `X-Strata-Delivery` (so that it can be idempotent), and the sender by the signature:

    X-Strata-Signature: v1=HMAC-SHA256(secret, "<X-Strata-Timestamp>.<body>")
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
from collections.abc import Sequence
from fnmatch import fnmatchcase
from typing import Final

import msgspec

from strata import __version__
from strata.base.clock import Clock
from strata.base.errors import Code, StrataError
from strata.base.failpoint import failpoint
from strata.base.secret import Secret
from strata.database.events import StoredEvent
from strata.fleet import wire
from strata.fleet.http.feed import Feed
from strata.hub.cursor_store import CursorStore
from strata.hub.outbound import WebhookTarget, post

_PAGE: Final = 100


def sign(secret: Secret, timestamp: str, body: bytes) -> str:
    mac = hmac.new(secret.reveal().encode(), f"{timestamp}.".encode() + body, hashlib.sha256)
    return f"v1={mac.hexdigest()}"


class WebhookDispatcher:
    """Delivers the event feed to one webhook. `run_once` delivers what is due, or raises; its loop retries later."""

    def __init__(
        self,
        target: WebhookTarget,
        secret: Secret,
        kinds: Sequence[str],
        *,
        feed: Feed,
        cursors: CursorStore,
        clock: Clock,
    ) -> None:
        self._target = target
        self._secret = secret
        self._kinds = kinds
        self._feed = feed
        self._cursors = cursors
        self._clock = clock
        # The URL may hold a token in its path; the name of the cursor must not.
        self._name = f"webhook:{hashlib.sha256(target.url.encode()).hexdigest()[:32]}"

    async def run_once(self) -> None:
        cursor = await self._cursors.cursor(self._name)
        if cursor is None:
            # A new webhook receives events from now on, not the history.
            await self._cursors.put_cursor(self._name, await self._feed.newest())
            return
        while page := await self._feed.after(cursor, _PAGE):
            for recorded in page:
                if self._is_subscribed(recorded.event.kind):
                    await self._deliver(recorded)
                    failpoint("hub.webhook.delivered")
                    await self._cursors.put_cursor(self._name, recorded.cursor)
            cursor = page[-1].cursor
            await self._cursors.put_cursor(self._name, cursor)

    def _is_subscribed(self, kind: str) -> bool:
        return not self._kinds or any(fnmatchcase(kind, pattern) for pattern in self._kinds)

    async def _deliver(self, recorded: StoredEvent) -> None:
        event = recorded.event
        message = wire.FeedEvent(
            cursor=recorded.cursor,
            at_s=event.at_s,
            actor=event.actor,
            kind=event.kind,
            subject=event.subject,
            body=event.body,
        )
        body = msgspec.json.encode(message)
        timestamp = str(int(self._clock.wall_s()))
        headers = {
            "Content-Type": "application/json",
            "User-Agent": f"strata/{__version__}",
            "X-Strata-Event": event.kind,
            "X-Strata-Delivery": recorded.cursor,
            "X-Strata-Timestamp": timestamp,
            "X-Strata-Signature": sign(self._secret, timestamp, body),
        }
        status = await asyncio.to_thread(post, self._target, body, headers)
        if not 200 <= status < 300:
            raise StrataError(Code.UNAVAILABLE, f"the webhook at {self._target.host} answered {status}")
