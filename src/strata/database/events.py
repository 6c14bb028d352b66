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
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Self

import msgspec

from strata.base.errors import Code, StrataError
from strata.database.migrations import Component

if TYPE_CHECKING:
    from strata.database.postgres import Connections
    from strata.database.sqlite import SqliteThread

START: Final = ""
"""The cursor before the first event."""


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
    (
        """
        CREATE TABLE event (
          seq INTEGER PRIMARY KEY AUTOINCREMENT, at REAL NOT NULL, actor TEXT NOT NULL, kind TEXT NOT NULL,
          subject TEXT NOT NULL, body BLOB NOT NULL
        ) STRICT;
        CREATE INDEX event_subject ON event (subject, seq);
        """,
        """
        ALTER TABLE event ADD COLUMN address TEXT NOT NULL DEFAULT '';
        """,
    ),
)
POSTGRES: Final = Component(
    "event",
    (
        """
        CREATE TABLE event (
          tx bigint NOT NULL DEFAULT (pg_current_xact_id()::text::bigint), seq bigint GENERATED ALWAYS AS IDENTITY,
          at double precision NOT NULL, actor text NOT NULL, kind text NOT NULL, subject text NOT NULL,
          body bytea NOT NULL, PRIMARY KEY (tx, seq)
        );
        CREATE INDEX event_subject ON event (subject, tx, seq);
        """,
        """
        ALTER TABLE event ADD COLUMN address text NOT NULL DEFAULT '';
        """,
    ),
)

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
_encode: Final = msgspec.json.Encoder().encode
_decode: Final = msgspec.json.Decoder(dict[str, Any]).decode
_SQLITE_CURSOR: Final = re.compile(r"[0-9]{1,18}")
_POSTGRES_CURSOR: Final = re.compile(r"([0-9]{1,18})\.([0-9]{1,18})")


def record_sqlite(db: sqlite3.Connection, events: Iterable[EventRecord]) -> None:
    db.executemany(f"INSERT INTO event ({_COLUMNS}) VALUES (?, ?, ?, ?, ?, ?)", map(_row, events))


_INSERT: Final = f"INSERT INTO event ({_COLUMNS}) VALUES (%s, %s, %s, %s, %s, %s)"
_INSERT_MANY: Final = (
    f"INSERT INTO event ({_COLUMNS}) SELECT {_COLUMNS}"
    " FROM unnest(%s::float8[], %s::text[], %s::text[], %s::text[], %s::bytea[], %s::text[])"
    f" WITH ORDINALITY AS n ({_COLUMNS}, place) ORDER BY place"
)


async def record_postgres(connection: Any, events: Sequence[EventRecord]) -> None:
    if len(events) == 1:
        await connection.execute(_INSERT, _row(events[0]))
    elif events:
        columns = zip(*map(_row, events), strict=True)
        await connection.execute(_INSERT_MANY, [list(column) for column in columns])


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


def _numbers(form: re.Pattern[str], cursor: str) -> list[int]:
    if cursor == START:
        return [0] * max(1, form.groups)
    found = form.fullmatch(cursor)
    if found is None:
        raise StrataError(Code.INVALID, f"{cursor[:64]!r} is not a cursor of this feed", hint="start without one")
    return [int(number) for number in found.groups() or [found[0]]]
