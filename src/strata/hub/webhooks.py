"""Webhooks: the signature, headers and body of a delivery, which events a webhook gets, and its retry. Cursors are in
`cursor_store`, the connection in `outbound`.

The cursor of each webhook is in the database, so a restart repeats at most the event being delivered. Of several hubs
on one database one at a time delivers to a webhook. A receiver that fails is retried with backoff, and no event is
skipped: the events wait in their table. A receiver recognises a repeated delivery by `X-Strata-Delivery` (so that it
can be idempotent), and the sender by the signature:

    X-Strata-Signature: v1=HMAC-SHA256(secret, "<X-Strata-Timestamp>.<body>")
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
from collections.abc import Sequence
from fnmatch import fnmatchcase

import msgspec

from strata import __version__
from strata.base.clock import Clock
from strata.base.errors import Code, StrataError
from strata.base.failpoint import failpoint
from strata.base.secret import Secret
from strata.database.events import StoredEvent
from strata.fleet.http.feed import feed_event
from strata.hub.cursor_store import FeedDelivery
from strata.hub.outbound import WebhookTarget, post


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
        delivery: FeedDelivery,
        clock: Clock,
    ) -> None:
        self._target = target
        self._secret = secret
        self._kinds = kinds
        self._delivery = delivery
        self._clock = clock
        # The URL may hold a token in its path; the name of the cursor must not.
        self._name = f"webhook:{hashlib.sha256(target.url.encode()).hexdigest()[:32]}"

    async def run_once(self) -> None:
        await self._delivery.deliver(self._name, self._send)

    async def _send(self, recorded: StoredEvent) -> bool:
        if not self._is_subscribed(recorded.event.kind):
            return False
        await self._post(recorded)
        failpoint("hub.webhook.delivered")
        return True

    def _is_subscribed(self, kind: str) -> bool:
        return not self._kinds or any(fnmatchcase(kind, pattern) for pattern in self._kinds)

    async def _post(self, recorded: StoredEvent) -> None:
        event = recorded.event
        body = msgspec.json.encode(feed_event(recorded))
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
