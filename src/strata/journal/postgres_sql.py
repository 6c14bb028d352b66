"""The SQL of the PostgreSQL journal: its schema, and one statement for each write."""

from __future__ import annotations

from typing import Final

SCHEMA_VERSION: Final = 1
SCHEMA_LOCK: Final = 0x5354_5241_5441_0001
"""Advisory lock under which one process at a time creates or upgrades the tables."""

SCHEMA: Final = """
CREATE TABLE IF NOT EXISTS journal_schema (version integer NOT NULL);
CREATE TABLE IF NOT EXISTS journal_stream (
  stream text PRIMARY KEY, epoch bigint NOT NULL, holder text NOT NULL, expires_at timestamptz NOT NULL,
  head bigint NOT NULL, floor bigint NOT NULL
) WITH (fillfactor = 50);
CREATE TABLE IF NOT EXISTS journal_batch (
  stream text NOT NULL, last bigint NOT NULL, first bigint NOT NULL, epoch bigint NOT NULL,
  checksum bigint NOT NULL, facts bytea NOT NULL, PRIMARY KEY (stream, last)
);
CREATE TABLE IF NOT EXISTS journal_snapshot (
  stream text NOT NULL, position bigint NOT NULL, epoch bigint NOT NULL,
  checksum bigint NOT NULL, state bytea NOT NULL, PRIMARY KEY (stream, position)
);
ALTER TABLE journal_batch ALTER COLUMN facts SET STORAGE EXTERNAL;
ALTER TABLE journal_snapshot ALTER COLUMN state SET STORAGE EXTERNAL;
INSERT INTO journal_schema SELECT 1 WHERE NOT EXISTS (SELECT FROM journal_schema);
"""

LEAD: Final = """
INSERT INTO journal_stream AS s (stream, epoch, holder, expires_at, head, floor)
VALUES (%(stream)s, 1, %(holder)s, clock_timestamp() + make_interval(secs => %(lease_s)s), 0, 0)
ON CONFLICT (stream) DO UPDATE
SET epoch = s.epoch + 1, holder = excluded.holder, expires_at = excluded.expires_at
WHERE s.holder = excluded.holder OR s.expires_at <= clock_timestamp()
  OR s.epoch || '@' || extract(epoch from s.expires_at) = %(expired_lease)s
RETURNING epoch, head
"""
LEASE: Final = """
SELECT holder, epoch || '@' || extract(epoch from expires_at) FROM journal_stream WHERE stream = %(stream)s
"""
RENEW: Final = """
UPDATE journal_stream SET expires_at = clock_timestamp() + make_interval(secs => %(lease_s)s)
WHERE stream = %(stream)s AND epoch = %(epoch)s
"""
RESIGN: Final = """
UPDATE journal_stream SET expires_at = clock_timestamp() WHERE stream = %(stream)s AND epoch = %(epoch)s
"""
APPEND: Final = """
WITH led AS (
  UPDATE journal_stream SET head = %(last)s
  WHERE stream = %(stream)s AND epoch = %(epoch)s AND head = %(after)s
  RETURNING stream
)
INSERT INTO journal_batch (stream, last, first, epoch, checksum, facts)
SELECT stream, %(last)s, %(first)s, %(epoch)s, %(checksum)s, %(facts)b FROM led
"""
FIND_BATCH: Final = """
SELECT 1 FROM journal_batch
WHERE stream = %(stream)s AND last = %(last)s AND first = %(first)s AND epoch = %(epoch)s AND checksum = %(checksum)s
"""
PAGE: Final = """
SELECT first, epoch, checksum, facts FROM (
  SELECT *, sum(octet_length(facts)) OVER (ORDER BY last) - octet_length(facts) AS bytes_before
  FROM journal_batch WHERE stream = %(stream)s AND last > %(after)s ORDER BY last LIMIT %(limit)s
) AS batches WHERE bytes_before < %(bytes)s ORDER BY last
"""
"""The server ends the page: what is read beyond it would be sent, dropped and sent again. The length of a stored value
is known without fetching it."""
SAVE_SNAPSHOT: Final = """
WITH led AS (
  SELECT stream FROM journal_stream WHERE stream = %(stream)s AND epoch = %(epoch)s AND head >= %(position)s
)
INSERT INTO journal_snapshot (stream, position, epoch, checksum, state)
SELECT stream, %(position)s, %(taken_epoch)s, %(checksum)s, %(state)b FROM led
ON CONFLICT (stream, position) DO UPDATE SET position = excluded.position
"""
LOAD_SNAPSHOT: Final = """
SELECT position, epoch, state, checksum FROM journal_snapshot WHERE stream = %(stream)s ORDER BY position DESC LIMIT 1
"""
MOVE_FLOOR: Final = """
UPDATE journal_stream SET floor = greatest(floor, %(through)s)
WHERE stream = %(stream)s AND epoch = %(epoch)s AND EXISTS (
  SELECT FROM journal_snapshot WHERE stream = %(stream)s AND position >= %(through)s)
"""
# No reader needs what lies below a committed floor, so its deletion needs no fence and runs in small batches.
SWEEP_BATCHES: Final = """
DELETE FROM journal_batch WHERE ctid IN (
  SELECT ctid FROM journal_batch WHERE stream = %(stream)s AND last <= %(through)s LIMIT 5000)
"""
SWEEP_SNAPSHOTS: Final = """
DELETE FROM journal_snapshot WHERE stream = %(stream)s AND position < %(through)s
"""
STREAMS: Final = """
SELECT stream, epoch, holder, expires_at > clock_timestamp(), head, floor,
       (SELECT max(position) FROM journal_snapshot n WHERE n.stream = s.stream)
FROM journal_stream s ORDER BY stream
"""
