"""The journal in PostgreSQL: leases, fenced writes, and standbys that poll the head (every 0.05 s).

Every write is one autocommitted statement (`postgres_sql.py`) that locks the stream's row, checks the epoch and does
the work, so there is no moment between the check and the write. The database's clock alone decides whether a lease has
run out. There is no NOTIFY (it takes a lock that all commits share): a standby polls the head, one indexed row.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple, Self

import psycopg

from strata.base.clock import Clock
from strata.base.errors import Code, StrataError
from strata.base.failpoint import failpoint
from strata.database.migrations import check_schema
from strata.database.postgres import Connections, check_database, display_address, to_strata_error
from strata.journal import postgres_sql as sql
from strata.journal.encoding import checked_snapshot, checksum_of, pack, unpack
from strata.journal.port import (
    PAGE_BYTES,
    Batch,
    Lead,
    Snapshot,
    StreamStatus,
    beyond_head,
    check_candidate,
    check_facts,
    check_lease,
    check_position,
    check_snapshot,
    lease_held,
    not_covered,
    stale,
    truncated,
    unknown_stream,
    went_back,
    wrong_position,
)

_PAGE_ROWS: Final = 512
_POLL_S: Final = 0.05


class _Known(NamedTuple):
    """The newest that this process knows to be committed in a stream."""

    epoch: int = 0
    last: int = 0
    batch: Mapping[str, Any] | None = None
    """What `FIND_BATCH` needs of the one that ends at `last`; None if only a snapshot is known."""


_NOTHING: Final = _Known()


class PostgresJournal:
    """Open with `await PostgresJournal.open(url, clock)`.

    It refuses a database that has lost what this process saw committed there, as one does that was restored, or a
    standby that was promoted before it had received everything.
    """

    def __init__(self, connections: Connections, clock: Clock) -> None:
        self._connections = connections
        self._clock = clock
        self._known: dict[str, _Known] = {}
        self._checked_at: dict[str, int] = {}
        """How many connections had been opened when what is known of a stream was last looked for."""

    @classmethod
    async def open(
        cls, url: str, clock: Clock, *, create: bool = True, connections: int = 4, call_s: float = 5.0
    ) -> Self:
        """`call_s` bounds every call: keep it below the leases this journal is used with."""
        journal = cls(Connections(url, connections, call_s, what="journal"), clock)
        try:
            async with journal._connections.acquire() as connection:
                await _prepare(connection, create=create)
        except (psycopg.Error, TimeoutError) as error:
            raise to_strata_error(error, f"the journal at {display_address(url)} cannot be opened") from error
        except BaseException:
            await journal.close()
            raise
        return journal

    async def lead(self, stream: str, holder: str, lease_s: float, *, expired_lease: str | None = None) -> Lead:
        check_candidate(stream, holder, lease_s)
        values = {"stream": stream, "holder": holder, "lease_s": lease_s, "expired_lease": expired_lease or ""}
        known = self._known.get(stream, _NOTHING)
        if known.last:
            await self._check_known(stream)
        rows = await self._connections.run(sql.LEAD, values)
        if not rows:
            raise lease_held(stream, *(await self._connections.run(sql.LEASE, {"stream": stream}))[0])
        failpoint("journal.postgres.after_lead")
        lead = Lead(stream, *rows[0])
        if lead.epoch <= known.epoch or lead.head < known.last:
            raise went_back(stream, known.last, lead.head)
        self._know(stream, known._replace(epoch=lead.epoch))
        return lead

    async def renew(self, stream: str, epoch: int, lease_s: float) -> None:
        check_lease(lease_s)
        if not await self._connections.write(sql.RENEW, {"stream": stream, "epoch": epoch, "lease_s": lease_s}):
            await self.confirm(stream, epoch)

    async def resign(self, stream: str, epoch: int) -> None:
        if not await self._connections.write(sql.RESIGN, {"stream": stream, "epoch": epoch}):
            await self._row(stream)

    async def confirm(self, stream: str, epoch: int) -> None:
        current, _, _ = await self._row(stream)
        if current != epoch:
            raise stale(stream, epoch, current)

    async def append(self, stream: str, epoch: int, after: int, facts: Sequence[bytes]) -> int:
        check_facts(facts)
        check_position(after)
        blob, checksum = pack(facts)
        last = after + len(facts)
        identity = _identity(stream, after + 1, last, epoch, checksum)
        batch = {**identity, "after": after, "facts": blob}
        failpoint("journal.postgres.before_append")
        if not await self._connections.write(sql.APPEND, batch):
            await self._recognise(batch)
        self._know(stream, _Known(epoch, last, identity))
        failpoint("journal.postgres.after_append")
        return last

    async def _recognise(self, batch: Mapping[str, Any]) -> None:
        """Return if this very batch stands there already; else raise why it may not."""
        stream, epoch = batch["stream"], batch["epoch"]
        current, head, _ = await self._row(stream)
        if await self._connections.run(sql.FIND_BATCH, batch):
            return
        raise stale(stream, epoch, current) if current != epoch else wrong_position(stream, batch["after"], head)

    async def read(self, stream: str, after: int) -> list[Batch]:
        check_position(after)
        rows = await self._connections.run(
            sql.PAGE, {"stream": stream, "after": after, "limit": _PAGE_ROWS, "bytes": PAGE_BYTES}
        )
        # Asked after the rows: a truncation in between would otherwise make a gap look like an empty page.
        _, _, floor = await self._row(stream)
        if after < floor:
            raise truncated(stream, after, floor)
        found = [unpack(stream, first, epoch, blob, checksum) for first, epoch, checksum, blob in rows]
        if self._checked_at.get(stream) != self._connections.opened:
            # The database may be another one than before.
            await self._check_known(stream)
        if found:
            first, epoch, checksum, _ = rows[-1]
            self._know(stream, _Known(epoch, found[-1].last, _identity(stream, first, found[-1].last, epoch, checksum)))
        return [batch.after(after) for batch in found]

    def _know(self, stream: str, new: _Known) -> None:
        known = self._known.get(stream, _NOTHING)
        newest = new if new.last >= known.last else known
        self._known[stream] = newest._replace(epoch=max(known.epoch, new.epoch))

    async def _check_known(self, stream: str) -> None:
        """Raise if the newest batch that this process knows is not there."""
        opened, known = self._connections.opened, self._known.get(stream, _NOTHING)
        _, head, floor = await self._row(stream)
        if known.batch is not None and known.last > floor:
            there = await self._connections.run(sql.FIND_BATCH, known.batch)
            if not there and known.last > (await self._row(stream))[2]:
                raise went_back(stream, known.last, head)
        self._checked_at[stream] = opened

    async def wait_for_growth(self, stream: str, after: int, timeout_s: float) -> int:
        until_s = self._clock.monotonic_s() + timeout_s
        while True:
            _, head, _ = await self._row(stream)
            left_s = until_s - self._clock.monotonic_s()
            if head > after or left_s <= 0:
                return head
            await self._clock.sleep(min(_POLL_S, left_s))

    async def save_snapshot(self, stream: str, epoch: int, snapshot: Snapshot) -> None:
        check_snapshot(snapshot)
        failpoint("journal.postgres.before_snapshot")
        saved = await self._connections.write(
            sql.SAVE_SNAPSHOT,
            {
                "stream": stream,
                "epoch": epoch,
                "position": snapshot.position,
                "taken_epoch": snapshot.epoch,
                "checksum": checksum_of(snapshot.state),
                "state": snapshot.state,
            },
        )
        if not saved:
            current, head, _ = await self._row(stream)
            raise stale(stream, epoch, current) if current != epoch else beyond_head(stream, snapshot.position, head)
        failpoint("journal.postgres.after_snapshot")

    async def load_snapshot(self, stream: str) -> Snapshot | None:
        rows = await self._connections.run(sql.LOAD_SNAPSHOT, {"stream": stream})
        if not rows:
            await self._row(stream)
            return None
        snapshot = checked_snapshot(stream, *rows[0])
        self._know(stream, _Known(snapshot.epoch, snapshot.position))
        return snapshot

    async def truncate(self, stream: str, epoch: int, through: int) -> None:
        check_position(through)
        values = {"stream": stream, "epoch": epoch, "through": through}
        if not await self._connections.write(sql.MOVE_FLOOR, values):
            await self.confirm(stream, epoch)
            raise not_covered(stream, through)
        failpoint("journal.postgres.after_floor")
        while await self._connections.write(sql.SWEEP_BATCHES, values):
            failpoint("journal.postgres.after_sweep")
        await self._connections.write(sql.SWEEP_SNAPSHOTS, values)

    async def streams(self) -> list[StreamStatus]:
        return [StreamStatus(*row) for row in await self._connections.run(sql.STREAMS, {})]

    async def close(self) -> None:
        await self._connections.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.close()

    async def _row(self, stream: str) -> tuple[int, int, int]:
        # Of before the statement: what is committed while it runs need not be in its answer.
        known = self._known.get(stream, _NOTHING)
        rows = await self._connections.run(
            "SELECT epoch, head, floor FROM journal_stream WHERE stream = %(stream)s", {"stream": stream}
        )
        if not rows and not known.last:
            raise unknown_stream(stream)
        epoch, head, floor = rows[0] if rows else (0, 0, 0)
        if epoch < known.epoch or head < known.last:
            raise went_back(stream, known.last, head)
        return epoch, head, floor


def _identity(stream: str, first: int, last: int, epoch: int, checksum: int) -> dict[str, Any]:
    """Returns what `FIND_BATCH` recognises a batch by."""
    return {"stream": stream, "first": first, "last": last, "epoch": epoch, "checksum": checksum}


async def _prepare(connection: psycopg.AsyncConnection[Any], *, create: bool) -> None:
    await check_database(connection)
    async with connection.transaction():
        await connection.execute("SELECT pg_advisory_xact_lock(%s)", (sql.SCHEMA_LOCK,))
        found = await (await connection.execute("SELECT to_regclass('journal_schema')")).fetchone()
        if found is None or found[0] is None:
            if not create:
                raise StrataError(Code.NOT_FOUND, "there is no journal in this database")
            await connection.execute(sql.SCHEMA)
        (version,) = await (await connection.execute("SELECT version FROM journal_schema")).fetchone() or (0,)
    check_schema("the tables of the journal", version, sql.SCHEMA_VERSION, sql.SCHEMA_VERSION)
