"""Claims in PostgreSQL: a batch of them is one round trip, and hosts that may take the same share one statement.

The lock of a claim's name comes first and in a statement of its own: a retry that overtakes its first try waits for it,
and the statement after the lock sees what the first try was given.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, Final

from strata.database.postgres import Connections
from strata.fleet.core.fit import fitting
from strata.fleet.core.job import Event, target
from strata.fleet.ports import Claim, Lease
from strata.fleet.rows import lease_of

_Name = tuple[str, str]
"""Of a claim: its host, and what the host calls it."""

LOCK: Final = """
SELECT pg_advisory_xact_lock(key) FROM (
  SELECT DISTINCT hashtextextended(host || ' ' || claim, 7) AS key
  FROM unnest(%(hosts)s::text[], %(claims)s::text[]) AS w (host, claim) ORDER BY key
) AS ordered
"""

ASKING: Final = """
  SELECT row_number() OVER (ORDER BY w.n) AS place, w.host, w.claim
  FROM unnest(%(hosts)s::text[], %(claims)s::text[]) WITH ORDINALITY AS w (host, claim, n)
  JOIN host ON host.id = w.host AND host.state = 'active'
  WHERE NOT EXISTS (SELECT FROM attempt WHERE claim_id = w.claim AND host_id = w.host)
"""
"""A host that is not active, or a claim that was answered before, takes nothing."""

FIRST: Final = """
    SELECT r.seq, r.priority FROM ready r JOIN job j USING (seq)
    WHERE r.class_id = (%(classes)s::bigint[])[1] AND r.since <= (%(latest)s::float8[])[1]
    ORDER BY r.priority DESC, r.seq LIMIT {count} FOR UPDATE SKIP LOCKED
"""
"""Of one class: the index is walked until enough are found that nobody else is at."""

BEST: Final = """
    SELECT b.seq, b.priority FROM (
      SELECT o.seq, o.priority, o.class_id
      FROM unnest(%(classes)s::bigint[], %(latest)s::float8[]) AS wanted (class_id, latest)
      CROSS JOIN LATERAL (
        SELECT r.seq, r.priority, r.class_id FROM ready r
        WHERE r.class_id = wanted.class_id AND r.since <= wanted.latest
        ORDER BY r.priority DESC, r.seq LIMIT {spare}
      ) AS o
      ORDER BY o.priority DESC, o.seq LIMIT {spare}
    ) AS b JOIN ready r ON r.seq = b.seq AND r.class_id = b.class_id JOIN job j ON j.seq = b.seq
    ORDER BY b.priority DESC, b.seq LIMIT {count} FOR UPDATE OF r, j SKIP LOCKED
"""
"""Of many classes: their heads are compared unlocked, since a claim that locked one job of each class would hide all of
them from everybody else. The spare ones make up for those that others have locked meanwhile."""

OFFERED: Final = """
SELECT r.seq, wanted.slots
FROM unnest(%(classes)s::bigint[], %(slots)s::int[], %(latest)s::float8[]) AS wanted (class_id, slots, latest)
CROSS JOIN LATERAL (
  SELECT r.seq, r.priority FROM ready r JOIN job j USING (seq)
  WHERE r.class_id = wanted.class_id AND r.since <= wanted.latest
  ORDER BY r.priority DESC, r.seq LIMIT %(count)s FOR UPDATE SKIP LOCKED
) AS r
ORDER BY r.priority DESC, r.seq
"""
"""For one claim of several jobs that take different numbers of slots: which of them fit is reckoned by the caller."""

TAKE: Final = f"""
WITH asking AS MATERIALIZED ({ASKING}), chosen AS MATERIALIZED ({{chosen}}), given AS MATERIALIZED (
  SELECT chosen.seq, asking.place, asking.host, asking.claim FROM chosen JOIN asking USING (place)
), gone AS (
  DELETE FROM ready USING given WHERE ready.seq = given.seq
), moved AS (
  UPDATE job SET status = '{target(Event.CLAIM)}', epoch = epoch + 1, changed_at = %(now)s, host_id = given.host,
    reason = '', lost = lost + (SELECT count(*) FROM lease WHERE job_id = job.id)
  FROM given WHERE job.seq = given.seq
  RETURNING id, epoch, spec, checkpoint, trainer, given.place, given.host, given.claim
), replaced AS (
  UPDATE attempt SET ended_at = %(now)s, outcome = 'lost', cause = 'host_lost'
  FROM moved JOIN lease ON lease.job_id = moved.id WHERE attempt.job_id = moved.id AND attempt.epoch = moved.epoch - 1
), leased AS (
  INSERT INTO lease SELECT id, host, epoch, %(until)s, false FROM moved
  ON CONFLICT (job_id) DO UPDATE SET host_id = excluded.host_id, epoch = excluded.epoch,
    expires_at = excluded.expires_at, expired = false
), tried AS (
  INSERT INTO attempt SELECT id, epoch, host, claim, %(now)s, NULL, NULL, '', '', '', '', '', '{{{{}}}}' FROM moved
), told AS (
  INSERT INTO event (at, actor, kind, subject, body)
  SELECT %(now)s, 'host:' || host, 'job.claimed', id, convert_to('{{{{"epoch":' || epoch || '}}}}', 'UTF8') FROM moved
)
SELECT host, claim, id, epoch, %(until)s::float8, moved.spec, checkpoint, trainer.spec
FROM moved LEFT JOIN trainer ON trainer.name = moved.trainer ORDER BY place
"""
"""A claim is the end of a place in the queue and the beginning of a lease and an attempt, in one statement."""

GIVEN: Final = """
SELECT a.host_id, a.claim_id, a.job_id, a.epoch, l.expires_at, j.spec, j.checkpoint, t.spec
FROM unnest(%(hosts)s::text[], %(claims)s::text[]) AS w (host, claim)
JOIN attempt a ON a.claim_id = w.claim AND a.host_id = w.host
JOIN lease l ON l.job_id = a.job_id AND l.epoch = a.epoch
JOIN job j ON j.id = a.job_id LEFT JOIN trainer t ON t.name = j.trainer
ORDER BY j.priority DESC, j.seq
"""
"""What claims of these names were given before and still hold."""


async def claim(
    connections: Connections, claims: Sequence[Claim], lease_s: float, now_s: float
) -> Sequence[Sequence[Lease]]:
    named = {(each.host_id, each.claim_id): each for each in claims}
    times = {"now": now_s, "until": now_s + lease_s}
    alike: dict[Any, list[Claim]] = {}
    found: list[tuple[Any, ...]] = []
    for each in named.values():
        slots = _slots(each)
        if len(set(slots.values())) > 1 and each.count > 1:
            found += await _fit(connections, each, slots, times)
        elif slots:
            menu = (tuple(slots), tuple(each.held_back.get(class_id, math.inf) for class_id in slots))
            alike.setdefault(menu, []).append(each)
    found += await _take(connections, alike, times)
    answered = {(row[0], row[1]) for row in found}
    unanswered = [name for name in named if name not in answered]
    if unanswered:
        found += await connections.run(GIVEN, _names(unanswered))
    given: dict[_Name, list[Lease]] = {name: [] for name in named}
    for host_id, claim_id, job_id, epoch, *rest in found:
        given[host_id, claim_id].append(lease_of(job_id, epoch, (host_id, *rest)))
    return [given[each.host_id, each.claim_id] for each in claims]


def _slots(wanted: Claim) -> dict[int, int]:
    """The classes a job of which fits, and what it takes."""
    return {class_id: slots for class_id, slots in wanted.classes.items() if slots <= wanted.slots}


async def _take(connections: Connections, alike: dict[Any, list[Claim]], times: dict[str, float]) -> list[Any]:
    if not alike:
        return []
    cursors = []
    everybody = [(each.host_id, each.claim_id) for asking in alike.values() for each in asking]
    async with connections.pipeline() as connection:
        await connection.execute(LOCK, _names(everybody), prepare=True)
        for (classes, latest), asking in alike.items():
            places = [(each.host_id, each.claim_id) for each in asking for _ in range(_count(each))]
            values = {"classes": list(classes), "latest": list(latest), **_names(places), **times}
            take = _statement(len(places), many=len(classes) > 1)
            cursors.append(await connection.execute(take, values, prepare=True, binary=True))
    return [row for cursor in cursors for row in await cursor.fetchall()]


def _count(wanted: Claim) -> int:
    """How many jobs it can take, all of which take the same slots if it asks for more than one."""
    each = max(1, next(iter(_slots(wanted).values())))
    return max(1, min(wanted.count, wanted.slots // each))


@lru_cache(256)
def _statement(count: int, *, many: bool) -> str:
    # A limit that is a parameter is planned as a tenth of the table: a sort of millions.
    chosen = (BEST if many else FIRST).format(count=count, spare=2 * count + 16)
    return TAKE.format(chosen=_placed(chosen))


def _placed(chosen: str) -> str:
    return f"SELECT seq, row_number() OVER (ORDER BY priority DESC, seq) AS place FROM ({chosen}) AS best"


THESE: Final = TAKE.format(chosen="SELECT seq, place FROM unnest(%(seqs)s::bigint[]) WITH ORDINALITY AS s (seq, place)")


async def _fit(connections: Connections, wanted: Claim, slots: dict[int, int], times: dict[str, float]) -> list[Any]:
    name = [(wanted.host_id, wanted.claim_id)]
    offer = {
        "classes": list(slots),
        "slots": list(slots.values()),
        "latest": [wanted.held_back.get(class_id, math.inf) for class_id in slots],
        "count": wanted.count,
    }
    async with connections.transaction() as connection:
        await connection.execute(LOCK, _names(name))
        offered = await (await connection.execute(OFFERED, offer)).fetchall()
        seqs = fitting(offered, slots=wanted.slots, count=wanted.count)
        cursor = await connection.execute(THESE, {"seqs": seqs, **_names(name * len(seqs)), **times}, binary=True)
        rows: list[Any] = await cursor.fetchall()
        return rows


def _names(names: Sequence[_Name]) -> dict[str, list[str]]:
    return {"hosts": [host for host, _ in names], "claims": [claim for _, claim in names]}
