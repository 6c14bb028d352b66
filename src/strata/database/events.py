"""The append-only event table that the components of one database share: who changed what, when.

An event is written in the transaction of its change (transactional outbox), so there is neither a change without its
event nor an event without its change. The table is the audit log and the feed of dashboards and webhooks at once. A
reader resumes from a cursor and never misses a row: PostgreSQL assigns numbers before it commits, so rows appear out of
order; therefore the cursor counts transactions, and the rows of a transaction are held back while an older one may
still commit.
"""

from __future__ import annotations

import re
import sqlite3
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any, Final, Self

import msgspec

from strata.base.errors import Code, StrataError
from strata.database.event_kinds import FREQUENT
from strata.database.migrations import Component
from strata.database.transaction import PostgresTransaction, SqliteTransaction, Transaction, run_to_end

if TYPE_CHECKING:
    from strata.database.postgres import Connections
    from strata.database.sqlite import SqliteThread

START: Final = ""
"""The cursor before the first event."""
NEWEST: Final = "newest"
"""The cursor behind the last event."""


class Actor(str):
    """Who did it, as events name the caller, and the address that the request came from.

    It is the name for everything but the event. msgspec encodes plain strings alone: `str(actor)` is one.
    """

    address: str

    def __new__(cls, name: str, address: str = "") -> Self:
        actor = super().__new__(cls, name)
        actor.address = address
        return actor


@dataclass(frozen=True, slots=True)
class EventRecord:
    at_s: float
    actor: str
    """Who did it: `host:…`, `key:…`, `operator`, `hub`."""
    kind: str
    """What happened, as `thing.verb` in the past: `job.claimed`, `key.revoked`."""
    subject: str
    """The id of what it happened to."""
    body: dict[str, Any]
    address: str = ""
    """Where the request came from, of an event that was read; one that is written has it in its actor."""


@dataclass(frozen=True, slots=True)
class StoredEvent:
    cursor: str
    event: EventRecord


SQLITE: Final = Component(
    "event",
    3,
    (
        # `event_kind`: newest first of one kind. The kinds of every job are left out (`FREQUENT`): they are found
        # without an index, and a claim has none to write.
        """
        CREATE TABLE event (
          seq INTEGER PRIMARY KEY AUTOINCREMENT, at REAL NOT NULL, actor TEXT NOT NULL, kind TEXT NOT NULL,
          subject TEXT NOT NULL, body BLOB NOT NULL, address TEXT NOT NULL DEFAULT ''
        ) STRICT;
        CREATE INDEX event_subject ON event (subject, seq);
        CREATE INDEX event_kind ON event (kind, seq)
          WHERE kind NOT IN ('job.claimed', 'job.started', 'job.completed');
        """,
    ),
)
POSTGRES: Final = Component(
    "event",
    3,
    (
        """
        CREATE TABLE event (
          tx bigint NOT NULL DEFAULT (pg_current_xact_id()::text::bigint), seq bigint GENERATED ALWAYS AS IDENTITY,
          at double precision NOT NULL, actor text NOT NULL, kind text NOT NULL, subject text NOT NULL,
          body bytea NOT NULL, address text NOT NULL DEFAULT '', PRIMARY KEY (tx, seq)
        );
        CREATE INDEX event_subject ON event (subject, tx, seq);
        CREATE INDEX event_kind ON event (kind, tx, seq)
          WHERE kind NOT IN ('job.claimed', 'job.started', 'job.completed');
        """,
    ),
)
_RARE: Final = f"kind NOT IN ({', '.join(map(repr, FREQUENT))})"
SCANNED: Final = 5000
"""How many events one page of a search looks at."""

POSITION: Final = """
coalesce(
  (SELECT min(seq) - 1 FROM event
   WHERE (tx, seq) > (split_part(cursor, '.', 1)::bigint, split_part(cursor, '.', 2)::bigint)),
  (SELECT max(seq) FROM event), 0)
"""
"""In PostgreSQL: the event number after which `cursor` resumes when the events are migrated to another server or to
SQLite, where the transaction numbers do not count. Events of concurrent transactions may be repeated, none is
skipped."""

_COLUMNS: Final = "at, actor, kind, subject, body, address"
_NAMES: Final = _COLUMNS.split(", ")
_encode: Final = msgspec.json.Encoder().encode
_decode: Final = msgspec.json.Decoder(dict[str, Any]).decode
_SQLITE_CURSOR: Final = re.compile(r"[0-9]{1,18}")
_POSTGRES_CURSOR: Final = re.compile(r"([0-9]{1,18})\.([0-9]{1,18})")


_INSERT: Final = (
    f"INSERT INTO event ({_COLUMNS})"
    " VALUES (:at::float8, :actor::text, :kind::text, :subject::text, :body::bytea, :address::text)"
)


async def record(tx: Transaction, events: Sequence[EventRecord]) -> None:
    await tx.many(_INSERT, [dict(zip(_NAMES, _row(event), strict=True)) for event in events])


def record_sqlite(db: sqlite3.Connection, events: Sequence[EventRecord]) -> None:
    run_to_end(record(SqliteTransaction(db), events))


async def record_postgres(connection: Any, events: Sequence[EventRecord]) -> None:
    await record(PostgresTransaction(connection), events)


async def read_sqlite(thread: SqliteThread, after: str, limit: int, *, subject: str = "") -> list[StoredEvent]:
    seq = _numbers(_SQLITE_CURSOR, after)[0]
    rows = await thread.read(
        lambda db: db.execute(
            f"SELECT seq, {_COLUMNS} FROM event"
            f" WHERE seq > ? {'AND subject = ?' if subject else ''} ORDER BY seq LIMIT ?",
            (seq, *([subject] if subject else []), limit),
        ).fetchall()
    )
    return [StoredEvent(str(number), _event(*rest)) for number, *rest in rows]


async def read_postgres(connections: Connections, after: str, limit: int, *, subject: str = "") -> list[StoredEvent]:
    tx, seq = _numbers(_POSTGRES_CURSOR, after)
    rows = await connections.run(
        f"SELECT tx, seq, {_COLUMNS} FROM event"
        " WHERE (tx, seq) > (%(tx)s, %(seq)s) AND tx < pg_snapshot_xmin(pg_current_snapshot())::text::bigint"
        f" {'AND subject = %(subject)s' if subject else ''} ORDER BY tx, seq LIMIT %(limit)s",
        {"tx": tx, "seq": seq, "subject": subject, "limit": limit},
    )
    return [StoredEvent(f"{tx}.{seq}", _event(*rest)) for tx, seq, *rest in rows]


@dataclass(frozen=True, slots=True, kw_only=True)
class EventFilter:
    subject: str = ""
    kinds: Sequence[str] = ()
    """Or globs of these; none: all."""
    search: str = ""
    """Without regard to case, in kind, subject, actor and body."""

    def matches(self, event: EventRecord) -> bool:
        if (self.subject and event.subject != self.subject) or not self.has_kind(event.kind):
            return False
        if not self.search:
            return True
        text = f"{event.kind}\n{event.subject}\n{event.actor}\n{_encode(event.body).decode()}"
        return self.search.casefold() in text.casefold()

    def has_kind(self, kind: str) -> bool:
        return not self.kinds or any(fnmatchcase(kind, pattern) for pattern in self.kinds)


@dataclass(frozen=True, slots=True)
class EventPage:
    """Newest first."""

    events: Sequence[StoredEvent]
    before: str
    """The cursor of the next page; empty at the end."""


_Position = tuple[int, ...]
_Fetch = Callable[[str, str, _Position | None, int], Awaitable[Sequence[tuple[_Position, EventRecord]]]]
"""Kind (or all), subject (or all), before which event, how many at most: newest first."""


async def read_before_sqlite(thread: SqliteThread, before: str, limit: int, wanted: EventFilter) -> EventPage:
    def select(db: sqlite3.Connection, kind: str, subject: str, position: _Position | None, count: int) -> list[Any]:
        where = ["seq < :seq"] if position else []
        where += ["subject = :subject"] if subject else []
        where += ["kind = :kind"] if kind else []
        where += [_RARE] if kind and kind not in FREQUENT else []
        condition = f"WHERE {' AND '.join(where)}" if where else ""
        values = {"seq": position[0] if position else 0, "subject": subject, "kind": kind, "count": count}
        return db.execute(
            f"SELECT seq, {_COLUMNS} FROM event {condition} ORDER BY seq DESC LIMIT :count", values
        ).fetchall()

    async def fetch(
        kind: str, subject: str, position: _Position | None, count: int
    ) -> Sequence[tuple[_Position, EventRecord]]:
        rows = await thread.read(lambda db: select(db, kind, subject, position, count))
        return [((seq,), _event(*rest)) for seq, *rest in rows]

    async def kinds() -> Sequence[str]:
        return [kind for (kind,) in await thread.read(lambda db: db.execute(_KINDS).fetchall())]

    return await _read_before(fetch, kinds, _position(_SQLITE_CURSOR, before), limit, wanted)


async def read_before_postgres(connections: Connections, before: str, limit: int, wanted: EventFilter) -> EventPage:
    async def fetch(
        kind: str, subject: str, position: _Position | None, count: int
    ) -> Sequence[tuple[_Position, EventRecord]]:
        where = ["tx < pg_snapshot_xmin(pg_current_snapshot())::text::bigint"]
        where += ["(tx, seq) < (%(tx)s, %(seq)s)"] if position else []
        where += ["subject = %(subject)s"] if subject else []
        where += ["kind = %(kind)s"] if kind else []
        where += [_RARE] if kind and kind not in FREQUENT else []
        tx, seq = position or (0, 0)
        rows = await connections.run(
            f"SELECT tx, seq, {_COLUMNS} FROM event WHERE {' AND '.join(where)}"
            " ORDER BY tx DESC, seq DESC LIMIT %(count)s",
            {"tx": tx, "seq": seq, "subject": subject, "kind": kind, "count": count},
        )
        return [((tx, seq), _event(*rest)) for tx, seq, *rest in rows]

    async def kinds() -> Sequence[str]:
        return [kind for (kind,) in await connections.run(_KINDS, {})]

    return await _read_before(fetch, kinds, _position(_POSTGRES_CURSOR, before), limit, wanted)


_KINDS: Final = (
    f"WITH RECURSIVE k (kind) AS (SELECT min(kind) FROM event WHERE {_RARE} UNION ALL"
    f" SELECT (SELECT min(kind) FROM event WHERE {_RARE} AND kind > k.kind) FROM k WHERE k.kind IS NOT NULL)"
    " SELECT kind FROM k WHERE kind IS NOT NULL"
)
"""From one kind to the next in the index."""


async def _read_before(
    fetch: _Fetch,
    kinds: Callable[[], Awaitable[Sequence[str]]],
    before: _Position | None,
    limit: int,
    wanted: EventFilter,
) -> EventPage:
    """Bounded work: the kinds that match are read one by one, as far as a page goes, and searched."""
    by_kind = bool(wanted.kinds) and not wanted.subject
    named = [kind for kind in (*FREQUENT, *await kinds()) if wanted.has_kind(kind)] if by_kind else [""]
    count = SCANNED if wanted.search or (wanted.subject and wanted.kinds) else limit
    found: list[tuple[_Position, EventRecord]] = []
    whole_from: _Position = ()
    """From here on up every kind was read."""
    for kind in named:
        rows = await fetch(kind, wanted.subject, before, count)
        if len(rows) == count:
            whole_from = max(whole_from, rows[-1][0])
        found += rows
    found.sort(key=lambda each: each[0], reverse=True)
    matching = [each for each in found if each[0] >= whole_from and wanted.matches(each[1])]
    if len(matching) >= limit:
        matching = matching[:limit]
        whole_from = matching[-1][0]
    events = [StoredEvent(_cursor(position), event) for position, event in matching]
    return EventPage(events, _cursor(whole_from))


async def drop_sqlite(thread: SqliteThread, before_s: float, limit: int) -> int:
    """Remove the oldest events, as far as they are from before this time; how many."""
    delete = (
        "DELETE FROM event WHERE seq IN (SELECT seq FROM (SELECT seq, at FROM event ORDER BY seq LIMIT ?) WHERE at < ?)"
    )
    return await thread.write(lambda db: db.execute(delete, (limit, before_s)).rowcount)


async def drop_postgres(connections: Connections, before_s: float, limit: int) -> int:
    delete = (
        "DELETE FROM event WHERE (tx, seq) IN (SELECT tx, seq FROM"
        " (SELECT tx, seq, at FROM event ORDER BY tx, seq LIMIT %(limit)s) AS oldest WHERE at < %(before)s)"
    )
    return await connections.write(delete, {"limit": limit, "before": before_s})


async def newest_sqlite(thread: SqliteThread) -> str:
    """The cursor of the last event: what comes after it is new."""
    ((seq,),) = await thread.read(lambda db: db.execute("SELECT coalesce(max(seq), 0) FROM event").fetchall())
    return str(seq)


async def newest_postgres(connections: Connections) -> str:
    rows = await connections.run(
        "SELECT tx, seq FROM event WHERE tx < pg_snapshot_xmin(pg_current_snapshot())::text::bigint"
        " ORDER BY tx DESC, seq DESC LIMIT 1",
        {},
    )
    return f"{rows[0][0]}.{rows[0][1]}" if rows else START


def _row(event: EventRecord) -> tuple[float, str, str, str, bytes, str]:
    address = event.actor.address if isinstance(event.actor, Actor) else event.address
    return event.at_s, str(event.actor), event.kind, event.subject, _encode(event.body), address


def _event(at_s: float, actor: str, kind: str, subject: str, body: bytes, address: str) -> EventRecord:
    return EventRecord(at_s, actor, kind, subject, _decode(body), address)


def _cursor(position: _Position) -> str:
    return ".".join(map(str, position))


def _position(form: re.Pattern[str], cursor: str) -> _Position | None:
    """None: the end of all events."""
    return None if cursor == NEWEST else tuple(_numbers(form, cursor))


def _numbers(form: re.Pattern[str], cursor: str) -> list[int]:
    if cursor == START:
        return [0] * max(1, form.groups)
    found = form.fullmatch(cursor)
    if found is None:
        raise StrataError(Code.INVALID, f"{cursor[:64]!r} is not a cursor of this feed", hint="start without one")
    return [int(number) for number in found.groups() or [found[0]]]
