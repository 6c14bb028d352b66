"""SQL of the hub's own rows: cursors of webhooks and subscriptions, leases between hubs (30 s), schemas of trainers;
and `FeedDelivery`, which delivers the event feed once, in pages of 100.

Several hubs on one database read the feed for the same receivers. `FeedDelivery` lets one hub at a time do so, under a
lease that expires with a hub that died, and moves the cursor only from where it was: a hub that was frozen meanwhile
cannot move it back.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any, Final, Protocol

import msgspec

from strata.base import log
from strata.base.loop import RunOnce
from strata.database.events import StoredEvent
from strata.database.migrations import Component
from strata.database.transaction import Database, Transaction
from strata.fleet.http.feed import Feed

POSTGRES: Final = Component(
    "hub",
    3,
    (
        """
        CREATE TABLE hub_cursor (name text PRIMARY KEY, cursor text NOT NULL);
        CREATE TABLE hub_schema (trainer text PRIMARY KEY, body bytea NOT NULL);
        CREATE TABLE hub_health (id bigint PRIMARY KEY, probes bigint NOT NULL);
        CREATE TABLE hub_lease (name text PRIMARY KEY, holder text NOT NULL, expires_at double precision NOT NULL);
        """,
    ),
)
SQLITE: Final = POSTGRES.in_sqlite()
_PROBE: Final = "INSERT INTO hub_health VALUES (1, 1) ON CONFLICT (id) DO UPDATE SET probes = hub_health.probes + 1"
LEASE_S: Final = 30.0
"""Longer than any one delivery takes: another hub goes on so long after the death of the one that delivered."""
_PAGE: Final = 100
_NOW: Final = {
    "sqlite": "(julianday('now') - 2440587.5) * 86400.0",
    "postgres": "extract(epoch FROM clock_timestamp())",
}
"""The clock of the database: those of the hubs may differ."""
_log = log.get(__name__)
_encode: Final = msgspec.json.Encoder().encode


class Leases(Protocol):
    async def acquire(self, name: str, holder: str, lease_s: float) -> bool:
        """Take or renew the lease; False while another holder has it."""

    async def release(self, name: str, holder: str) -> None: ...


class CursorStore:
    def __init__(self, database: Database) -> None:
        self._database = database

    async def cursor(self, name: str) -> str | None:
        """None if no reader of this name has read anything yet."""
        rows = await self._database.rows("SELECT cursor FROM hub_cursor WHERE name = :name", {"name": name})
        return str(rows[0][0]) if rows else None

    async def put_cursor(self, name: str, cursor: str) -> None:
        insert = (
            "INSERT INTO hub_cursor VALUES (:name, :cursor) ON CONFLICT (name) DO UPDATE SET cursor = excluded.cursor"
        )
        await self._database.changed(insert, {"name": name, "cursor": cursor})

    async def advance_cursor(self, name: str, before: str, after: str) -> bool:
        """False if the cursor is not at `before` any more."""
        update = "UPDATE hub_cursor SET cursor = :after WHERE name = :name AND cursor = :before"
        return await self._database.changed(update, {"name": name, "before": before, "after": after}) > 0

    async def acquire(self, name: str, holder: str, lease_s: float) -> bool:
        async def acquire(tx: Transaction) -> int:
            now = _NOW[tx.engine]
            return await tx.changed(
                f"INSERT INTO hub_lease VALUES (:name, :holder, {now} + :lease_s)"
                " ON CONFLICT (name) DO UPDATE SET holder = excluded.holder, expires_at = excluded.expires_at"
                f" WHERE hub_lease.holder = excluded.holder OR hub_lease.expires_at <= {now}",
                {"name": name, "holder": holder, "lease_s": lease_s},
            )

        return await self._database.run(acquire) > 0

    async def release(self, name: str, holder: str) -> None:
        delete = "DELETE FROM hub_lease WHERE name = :name AND holder = :holder"
        await self._database.changed(delete, {"name": name, "holder": holder})

    async def schemas(self, trainers: Collection[str] | None = None) -> Mapping[str, bytes]:
        """The JSON of these trainers' schemas, or of all."""
        where = "" if trainers is None else " WHERE trainer = ANY(:trainers)"
        return dict(
            await self._database.rows(
                f"SELECT trainer, body FROM hub_schema{where}", {"trainers": list(trainers or ())}
            )
        )

    async def put_schemas(self, schemas: Mapping[str, Any]) -> None:
        insert = (
            "INSERT INTO hub_schema VALUES (:trainer::text, :body::bytea)"
            " ON CONFLICT (trainer) DO UPDATE SET body = excluded.body"
        )
        rows = [{"trainer": trainer, "body": _encode(schema)} for trainer, schema in schemas.items()]
        await self._database.run(lambda tx: tx.many(insert, rows))

    async def probe_write(self) -> None:
        """Write one row; raises if the database cannot be written to."""
        await self._database.changed(_PROBE)


async def run_leased(leases: Leases, name: str, holder: str, run_once: RunOnce, *, lease_s: float) -> bool:
    """Run once, under a lease that is renewed meanwhile. False if another holder has it, or got it before the end.

    Without the lease the run is cancelled, and so it is if the lease cannot be renewed.
    """
    if not await leases.acquire(name, holder, lease_s):
        return False
    run = asyncio.ensure_future(run_once())
    try:
        while not run.done():
            await asyncio.wait([run], timeout=lease_s / 3)
            if not run.done() and not await leases.acquire(name, holder, lease_s):
                _log.warning("lease_lost", name=name, holder=holder)
                return False
        await run
        return True
    finally:
        run.cancel()
        await asyncio.wait([run])
        await leases.release(name, holder)


@dataclass(frozen=True)
class FeedDelivery:
    """Delivers the event feed to receivers, to each from one hub at a time: `holder` is this hub."""

    feed: Feed
    cursors: CursorStore
    holder: str

    async def deliver(self, name: str, send: Callable[[StoredEvent], Awaitable[bool]]) -> bool:
        """Pass every event after the cursor `name` to `send`, in order; False if another hub does so.

        `send` returns whether it sent the event to its receiver; then the cursor is moved before the next one.
        """
        cursor = await self.cursors.cursor(name)
        if cursor is None:
            # A new receiver gets events from now on, not the history.
            await self.skip(name)
            return True
        if not await self.feed.after(cursor, 1):
            return True
        if not await self._acquire(name):
            return False
        try:
            return await self._deliver_pages(name, send)
        finally:
            await self.cursors.release(name, self.holder)

    async def skip(self, name: str) -> None:
        """Leave out all events until now."""
        await self.cursors.put_cursor(name, await self.feed.newest())

    async def _deliver_pages(self, name: str, send: Callable[[StoredEvent], Awaitable[bool]]) -> bool:
        # Read again: the hub that had the lease before has moved it.
        stored = await self.cursors.cursor(name)
        if stored is None:
            return False
        cursor = stored
        while page := await self.feed.after(cursor, _PAGE):
            for event in page:
                if await send(event):
                    if not await self.cursors.advance_cursor(name, stored, event.cursor):
                        return False
                    stored = event.cursor
                    if not await self._acquire(name):
                        return False
            cursor = page[-1].cursor
            if cursor != stored and not await self.cursors.advance_cursor(name, stored, cursor):
                return False
            stored = cursor
        return True

    async def _acquire(self, name: str) -> bool:
        return await self.cursors.acquire(name, self.holder, LEASE_S)
