"""The append-only event table: writing an event in its transaction, cursors, filters, pages, and dropping old ones.

An event is written in the transaction of its change (transactional outbox), so there is neither a change without its
event nor an event without its change. The table is the audit log and the feed of dashboards and webhooks at once. A
reader resumes from a cursor and never misses a row: PostgreSQL assigns numbers before it commits, so rows appear out of
order; therefore the cursor counts transactions, and the rows of a transaction are held back while an older one may
still commit.
"""

from __future__ import annotations

import re
import sqlite3
from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, Final, Literal, Self

import msgspec

from strata.base.errors import Code, StrataError
from strata.database.event_kinds import FREQUENT
from strata.database.migrations import Component
from strata.database.transaction import Database, SqliteTransaction, Transaction, run_to_end

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
"""The event number, in PostgreSQL, after which `cursor` resumes when the events are migrated to another server or to
SQLite, where the transaction numbers do not count. Events of concurrent transactions may be repeated, none is
skipped."""

_COLUMNS: Final = "at, actor, kind, subject, body, address"
_NAMES: Final = _COLUMNS.split(", ")
_encode: Final = msgspec.json.Encoder().encode
_decode: Final = msgspec.json.Decoder(dict[str, Any]).decode
_INSERT: Final = (
    f"INSERT INTO event ({_COLUMNS})"
    " VALUES (:at::float8, :actor::text, :kind::text, :subject::text, :body::bytea, :address::text)"
)


async def record(tx: Transaction, events: Sequence[EventRecord]) -> None:
    await tx.many(_INSERT, [dict(zip(_NAMES, _row(event), strict=True)) for event in events])


def record_sqlite(db: sqlite3.Connection, events: Sequence[EventRecord]) -> None:
    run_to_end(record(SqliteTransaction(db), events))


@dataclass(frozen=True, slots=True)
class _Order:
    """How an engine orders the events."""

    columns: tuple[str, ...]
    visible: str
    """The condition of a row behind which no other row can appear any more."""
    cursor: re.Pattern[str]

    @property
    def names(self) -> str:
        return ", ".join(self.columns)

    def compare(self, sign: Literal["<", ">"]) -> str:
        return f"({self.names}) {sign} ({', '.join(f':{column}' for column in self.columns)})"

    def decode(self, row: Sequence[Any]) -> tuple[_Position, EventRecord]:
        """Decode the columns of the order and `_COLUMNS`."""
        count = len(self.columns)
        at_s, actor, kind, subject, body, address = row[count:]
        return tuple(row[:count]), EventRecord(at_s, actor, kind, subject, _decode(body), address)

    def position(self, cursor: str) -> _Position:
        if cursor == START:
            return (0,) * len(self.columns)
        match = self.cursor.fullmatch(cursor)
        if match is None:
            raise StrataError(Code.INVALID, f"{cursor[:64]!r} is not a cursor of this feed", hint="start without one")
        return tuple(map(int, match.groups()))


_Position = tuple[int, ...]
_ORDERS: Final = {
    "sqlite": _Order(("seq",), "true", re.compile(r"([0-9]{1,18})")),
    "postgres": _Order(
        ("tx", "seq"),
        "tx < pg_snapshot_xmin(pg_current_snapshot())::text::bigint",
        re.compile(r"([0-9]{1,18})\.([0-9]{1,18})"),
    ),
}


async def read(database: Database, after: str, limit: int, *, subject: str = "") -> list[StoredEvent]:
    async def select(tx: Transaction) -> list[StoredEvent]:
        order = _ORDERS[tx.engine]
        values = dict(zip(order.columns, order.position(after), strict=True))
        rows = await tx.rows(
            f"SELECT {order.names}, {_COLUMNS} FROM event WHERE {order.compare('>')} AND {order.visible}"
            f"{' AND subject = :subject' if subject else ''} ORDER BY {order.names} LIMIT :limit",
            {**values, "subject": subject, "limit": limit},
        )
        return [StoredEvent(_cursor(position), event) for position, event in map(order.decode, rows)]

    return await database.read(select)


@dataclass(frozen=True, slots=True, kw_only=True)
class EventFilter:
    subject: str = ""
    kinds: Sequence[str] = ()
    """Or globs of these; none: all."""
    search: str = ""
    """A text to find in kind, subject, actor and body, without regard to case."""

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


_KINDS: Final = (
    f"WITH RECURSIVE k (kind) AS (SELECT min(kind) FROM event WHERE {_RARE} UNION ALL"
    f" SELECT (SELECT min(kind) FROM event WHERE {_RARE} AND kind > k.kind) FROM k WHERE k.kind IS NOT NULL)"
    " SELECT kind FROM k WHERE kind IS NOT NULL"
)
"""Walks from one kind to the next in the index."""


async def read_before(database: Database, before: str, limit: int, wanted: EventFilter) -> EventPage:
    """Read a page with bounded work: the kinds that match one by one, as far as a page goes, and search them.

    Each is a read of its own, so that writers come in between.
    """
    by_kind = bool(wanted.kinds) and not wanted.subject
    kinds = [*FREQUENT, *(kind for (kind,) in await database.rows(_KINDS))] if by_kind else []
    named = [kind for kind in kinds if wanted.has_kind(kind)] if by_kind else [""]
    count = SCANNED if wanted.search or (wanted.subject and wanted.kinds) else limit
    found: list[tuple[_Position, EventRecord]] = []
    whole_from: _Position = ()
    """Every kind was read from this position on."""
    for kind in named:
        rows = await _select_before(database, before, count, kind=kind, subject=wanted.subject)
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


async def _select_before(
    database: Database, before: str, count: int, *, kind: str = "", subject: str = ""
) -> list[tuple[_Position, EventRecord]]:
    """Select newest first; of all kinds and subjects where none is named."""

    async def select(tx: Transaction) -> list[tuple[_Position, EventRecord]]:
        order = _ORDERS[tx.engine]
        position = () if before == NEWEST else order.position(before)
        where = [order.visible]
        where += [order.compare("<")] if position else []
        where += ["subject = :subject"] if subject else []
        where += ["kind = :kind"] if kind else []
        where += [_RARE] if kind and kind not in FREQUENT else []
        newest_first = ", ".join(f"{column} DESC" for column in order.columns)
        rows = await tx.rows(
            f"SELECT {order.names}, {_COLUMNS} FROM event WHERE {' AND '.join(where)}"
            f" ORDER BY {newest_first} LIMIT :count",
            {**dict(zip(order.columns, position, strict=False)), "subject": subject, "kind": kind, "count": count},
        )
        return list(map(order.decode, rows))

    return await database.read(select)


async def drop(database: Database, before_s: float, limit: int) -> int:
    """Remove the oldest events, as far as they are from before this time; how many."""

    async def delete(tx: Transaction) -> int:
        names = _ORDERS[tx.engine].names
        return await tx.changed(
            f"DELETE FROM event WHERE ({names}) IN (SELECT {names} FROM"
            f" (SELECT {names}, at FROM event ORDER BY {names} LIMIT :limit) AS oldest WHERE at < :before)",
            {"limit": limit, "before": before_s},
        )

    return await database.run(delete)


async def newest(database: Database) -> str:
    """The cursor of the last event: what comes after it is new."""
    rows = await _select_before(database, NEWEST, 1)
    return _cursor(rows[0][0]) if rows else START


def _row(event: EventRecord) -> tuple[float, str, str, str, bytes, str]:
    address = event.actor.address if isinstance(event.actor, Actor) else event.address
    return event.at_s, str(event.actor), event.kind, event.subject, _encode(event.body), address


def _cursor(position: _Position) -> str:
    return ".".join(map(str, position))
