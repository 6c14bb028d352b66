"""Webhooks: every event of the chosen kinds is posted to a URL, signed, in order and at least once.

How far it got is in the database, so a restart repeats at most the event that was under way. A receiver that fails is
tried again, ever less often, and nothing is skipped: the events wait in their table. A receiver recognises a repeated
event by `X-Strata-Delivery`, and ours by the signature:

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
from strata.database.events import Recorded
from strata.fleet import wire
from strata.fleet.http.feed import Feed
from strata.hub.outbound import Target, post
from strata.hub.records import Records

_PAGE: Final = 100


def sign(secret: Secret, timestamp: str, body: bytes) -> str:
    made = hmac.new(secret.reveal().encode(), f"{timestamp}.".encode() + body, hashlib.sha256)
    return f"v1={made.hexdigest()}"


class Courier:
    """Serves one webhook; `run_once` delivers what is due, or raises and is called again later."""

    def __init__(
        self, target: Target, secret: Secret, kinds: Sequence[str], *, read: Feed, records: Records, clock: Clock
    ) -> None:
        self._target = target
        self._secret = secret
        self._kinds = kinds
        self._feed = read
        self._records = records
        self._clock = clock
        # The URL may hold a token in its path; the name of the cursor must not.
        self._name = f"webhook:{hashlib.sha256(target.url.encode()).hexdigest()[:32]}"

    async def run_once(self) -> None:
        cursor = await self._records.cursor(self._name)
        if cursor is None:
            # A webhook that was just added is told of what happens, not of what has happened.
            await self._records.put_cursor(self._name, await self._feed.newest())
            return
        while page := await self._feed.after(cursor, _PAGE):
            for recorded in page:
                if self._wanted(recorded.event.kind):
                    await self._deliver(recorded)
                    failpoint("hub.webhook.delivered")
                    await self._records.put_cursor(self._name, recorded.cursor)
            cursor = page[-1].cursor
            await self._records.put_cursor(self._name, cursor)

    def _wanted(self, kind: str) -> bool:
        return not self._kinds or any(fnmatchcase(kind, pattern) for pattern in self._kinds)

    async def _deliver(self, recorded: Recorded) -> None:
        event = recorded.event
        message = wire.Event(
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
