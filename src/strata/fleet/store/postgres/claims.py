"""Claims in PostgreSQL: a batch of claims is one round trip, and hosts with the same options share one statement.

Claims are idempotent. `new_claims` tells a new claim from a repeated one: under an advisory lock on the claim's name,
so that a retry that overtakes its first try waits for it, and by a query of its own after the lock, because the
statement around it still sees the snapshot from before the lock. It leaves out hosts that are not active.

Joins are written so that the planner cannot choose a full scan: a plan made while a table is empty is cached, and would
read the whole table once it is full.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, Final, Literal

from strata.base.failpoint import failpoint
from strata.database.postgres import Connections
from strata.fleet.core.job import JobEvent, target
from strata.fleet.core.match import fit_slots
from strata.fleet.ports import Claim, JobLease
from strata.fleet.store.rows import decode_lease

_ClaimName = tuple[str, str]
"""The host, and the claim id that the host chose."""
_Options = tuple[tuple[int, ...], tuple[float, ...], str]
"""Classes; since when at the latest a job of each has to wait; and the host, if it is excluded for any job."""

LOCK: Final = """
SELECT pg_advisory_xact_lock(key) FROM (
  SELECT DISTINCT hashtextextended(host || ' ' || claim, 7) AS key
  FROM unnest(%(hosts)s::text[], %(claims)s::text[]) AS w (host, claim) ORDER BY key
) AS ordered
"""
"""Before several statements of one transaction: transactions lock the same names in the same order, no deadlock."""

IS_NEW: Final = "SELECT is_new_claim(%(host)s, %(claim)s)"
NEW: Final = "SELECT place, host, claim FROM new_claims(%(hosts)s::text[], %(claims)s::text[])"

MINE: Final = """
(SELECT count(*) FROM job_refusal x WHERE x.seq = r.seq AND x.host_id = ANY(%(hosts)s::text[])) = 0
"""
"""Jobs that no host of this statement is excluded for."""

ONE: Final = """
  SELECT r.seq, 1 AS place, %(host)s::text AS host, %(claim)s::text AS claim FROM ready r JOIN job j USING (seq)
  WHERE r.class_id = %(class)s AND r.since <= %(latest)s AND ({new})
    AND (SELECT count(*) FROM job_refusal x WHERE x.seq = r.seq AND x.host_id = %(host)s) = 0
  ORDER BY r.priority DESC, r.seq LIMIT 1 FOR UPDATE OF r, j SKIP LOCKED
"""
"""The most frequent claim: one job of one class, without arrays and without sorting."""

SEVERAL: Final = """
  WITH asking AS MATERIALIZED ({new}), chosen AS MATERIALIZED ({chosen})
  SELECT chosen.seq, asking.place, asking.host, asking.claim FROM chosen JOIN asking USING (place)
"""

FIRST: Final = f"""
    SELECT r.seq, r.priority FROM ready r JOIN job j USING (seq)
    WHERE r.class_id = (%(classes)s::bigint[])[1] AND r.since <= (%(latest)s::float8[])[1] AND {MINE}
    ORDER BY r.priority DESC, r.seq LIMIT {{count}} FOR UPDATE OF r, j SKIP LOCKED
"""
"""Of one class: the index is scanned until enough jobs are found that no other transaction has locked."""

BEST: Final = f"""
    SELECT b.seq, b.priority FROM (
      SELECT o.seq, o.priority, o.class_id FROM (
        SELECT wanted.class_id, wanted.latest
        FROM unnest(%(classes)s::bigint[], %(latest)s::float8[]) AS wanted (class_id, latest)
        CROSS JOIN LATERAL (
          SELECT r.seq, r.priority FROM ready r
          WHERE r.class_id = wanted.class_id AND r.since <= wanted.latest AND {MINE}
          ORDER BY r.priority DESC, r.seq LIMIT 1
        ) AS head
        ORDER BY head.priority DESC, head.seq LIMIT {{spare}}
      ) AS ahead CROSS JOIN LATERAL (
        SELECT r.seq, r.priority, r.class_id FROM ready r
        WHERE r.class_id = ahead.class_id AND r.since <= ahead.latest AND {MINE}
        ORDER BY r.priority DESC, r.seq LIMIT {{spare}}
      ) AS o
      ORDER BY o.priority DESC, o.seq LIMIT {{spare}}
    ) AS b JOIN ready r ON r.seq = b.seq AND r.class_id = b.class_id JOIN job j ON j.seq = b.seq
    ORDER BY b.priority DESC, b.seq LIMIT {{count}} FOR UPDATE OF r, j SKIP LOCKED
"""
"""Of many classes: their heads are compared unlocked, since a claim that locked one job of each class would hide all of
them from everybody else. The best n jobs are in the n classes with the best heads, so only those are looked into. The
spare ones make up for those that others have locked meanwhile."""

OFFERED: Final = f"""
SELECT r.seq, wanted.slots
FROM unnest(%(classes)s::bigint[], %(slots)s::int[], %(latest)s::float8[]) AS wanted (class_id, slots, latest)
CROSS JOIN LATERAL (
  SELECT r.seq, r.priority FROM ready r JOIN job j USING (seq)
  WHERE r.class_id = wanted.class_id AND r.since <= wanted.latest AND {MINE}
  ORDER BY r.priority DESC, r.seq LIMIT %(count)s FOR UPDATE SKIP LOCKED
) AS r
ORDER BY r.priority DESC, r.seq
"""
"""For one claim of several jobs that need different numbers of slots: `fit_slots` chooses which of them fit."""

THESE: Final = "SELECT seq, place FROM unnest(%(seqs)s::bigint[]) WITH ORDINALITY AS s (seq, place)"

TAKE: Final = f"""
WITH given AS MATERIALIZED ({{given}}), gone AS (
  DELETE FROM ready USING given WHERE ready.seq = given.seq
), moved AS (
  UPDATE job SET status = '{target(JobEvent.CLAIM)}', epoch = epoch + 1, attempts = attempts + 1, changed_at = %(now)s,
    host_id = given.host, reason = '',
    lost = lost + CASE epoch WHEN 0 THEN 0 ELSE (SELECT count(*) FROM lease WHERE job_id = job.id) END
  FROM given WHERE job.seq = given.seq
  RETURNING id, epoch, attempts, spec, checkpoint, trainer_digest, given.place, given.host, given.claim
), replaced AS (
  UPDATE attempt SET ended_at = %(now)s, outcome = 'lost', cause = 'host_lost'
  WHERE job_id = ANY (ARRAY(SELECT id FROM moved WHERE moved.epoch > 1))
    AND epoch = (SELECT moved.epoch - 1 FROM moved WHERE moved.id = attempt.job_id)
    AND (SELECT count(*) FROM lease WHERE lease.job_id = attempt.job_id) > 0
), leased AS (
  INSERT INTO lease SELECT id, host, epoch, %(until)s, false FROM moved
  ON CONFLICT (job_id) DO UPDATE SET host_id = excluded.host_id, epoch = excluded.epoch,
    expires_at = excluded.expires_at, expired = false
), tried AS (
  INSERT INTO attempt (job_id, epoch, host_id, claim_id, claimed_at, number, trainer_digest,
    outcome, cause, error, artifact, checkpoint, facts)
  SELECT id, epoch, host, claim, %(now)s, attempts, trainer_digest, '', '', '', '', '', '{{{{}}}}' FROM moved
), told AS (
  INSERT INTO event (at, actor, kind, subject, body)
  SELECT %(now)s, 'host:' || host, 'job.claimed', id, convert_to('{{{{"epoch":' || epoch || '}}}}', 'UTF8') FROM moved
)
SELECT host, claim, id, epoch, %(until)s::float8, moved.spec, checkpoint, trainer_digest, trainer.spec
FROM moved LEFT JOIN trainer ON trainer.digest = moved.trainer_digest ORDER BY place
"""
"""In one statement: remove the job from the queue, and begin a lease and an attempt."""

PREVIOUS_LEASES: Final = """
SELECT a.host_id, a.claim_id, a.job_id, a.epoch, l.expires_at, j.spec, j.checkpoint, a.trainer_digest, t.spec
FROM unnest(%(hosts)s::text[], %(claims)s::text[]) AS w (host, claim)
JOIN attempt a ON a.claim_id = w.claim AND a.host_id = w.host
JOIN lease l ON l.job_id = a.job_id AND l.epoch = a.epoch
JOIN job j ON j.id = a.job_id LEFT JOIN trainer t ON t.digest = a.trainer_digest
ORDER BY j.priority DESC, j.seq
"""
"""What claims of these names were granted before and still hold."""


async def claim_jobs(
    connections: Connections, claims: Sequence[Claim], lease_s: float, now_s: float
) -> Sequence[Sequence[JobLease]]:
    named = {(each.host_id, each.claim_id): each for each in claims}
    times = {"now": now_s, "until": now_s + lease_s}
    alike: dict[_Options, list[_ClaimName]] = {}
    found: list[tuple[Any, ...]] = []
    for name, each in named.items():
        slots = {class_id: takes for class_id, takes in each.classes.items() if takes <= each.slots}
        if each.count > 1 and len(set(slots.values())) > 1:
            found += await _claim_fitting_jobs(connections, each, slots, times)
        elif slots:
            latest = each.held_back.get
            alone = name[0] if each.refusing else ""
            menu = (tuple(slots), tuple([latest(class_id, math.inf) for class_id in slots]), alone)
            alike.setdefault(menu, []).extend([name] * _count(each, slots))
    found += await _lease_jobs(connections, alike, times)
    given: dict[_ClaimName, list[JobLease]] = {name: [] for name in named}
    for host_id, claim_id, job_id, epoch, *rest in found:
        given[host_id, claim_id].append(decode_lease(job_id, epoch, (host_id, *rest)))
    unanswered = [name for name, leases in given.items() if not leases]
    if unanswered:
        for host_id, claim_id, job_id, epoch, *rest in await connections.run(PREVIOUS_LEASES, _names(unanswered)):
            given[host_id, claim_id].append(decode_lease(job_id, epoch, (host_id, *rest)))
    return [given[each.host_id, each.claim_id] for each in claims]


def _count(wanted: Claim, slots: dict[int, int]) -> int:
    """How many jobs the claim can take; if it asks for several, all of them need the same number of slots."""
    if wanted.count == 1:
        return 1
    each = max(1, next(iter(slots.values())))
    return max(1, min(wanted.count, wanted.slots // each))


async def _lease_jobs(
    connections: Connections, alike: dict[_Options, list[_ClaimName]], times: dict[str, float]
) -> list[Any]:
    asked = [_claim_statement(menu, places, times) for menu, places in alike.items()]
    if len(asked) == 1:
        # One statement is written and committed at once: a crash in between is a crash before it.
        failpoint("fleet.claim.written")
        return await connections.run(*asked[0])
    if not asked:
        return []
    cursors = []
    everybody = [name for places in alike.values() for name in places]
    async with connections.pipeline() as connection:
        await connection.execute(LOCK, _names(everybody), prepare=True)
        for statement, values in asked:
            cursors.append(await connection.execute(statement, values, prepare=True, binary=True))
        failpoint("fleet.claim.written")
    return [row for cursor in cursors for row in await cursor.fetchall()]


def _claim_statement(
    menu: _Options, places: Sequence[_ClaimName], times: dict[str, float]
) -> tuple[str, dict[str, Any]]:
    """The statement for claims with the same options, each named as often as it may take a job, and its values."""
    classes, latest, _ = menu
    if len(places) == len(classes) == 1:
        ((host, claim),) = places
        return _statement(1, "one"), {"class": classes[0], "latest": latest[0], "host": host, "claim": claim, **times}
    values = {"classes": _numbers(classes), "latest": _numbers(latest), **_names(places), **times}
    return _statement(len(places), "best" if len(classes) > 1 else "first"), values


@lru_cache(256)
def _statement(count: int, how: Literal["one", "first", "best", "these"]) -> str:
    if how == "one":
        return TAKE.format(given=ONE.format(new=IS_NEW))
    if how == "these":
        return TAKE.format(given=SEVERAL.format(new=NEW, chosen=THESE))
    # A limit that is a parameter is planned as a tenth of the table: a sort of millions.
    best = (BEST if how == "best" else FIRST).format(count=count, spare=2 * count + 16)
    placed = f"SELECT seq, row_number() OVER (ORDER BY priority DESC, seq) AS place FROM ({best}) AS best"
    return TAKE.format(given=SEVERAL.format(new=NEW, chosen=placed))


async def _claim_fitting_jobs(
    connections: Connections, wanted: Claim, slots: dict[int, int], times: dict[str, float]
) -> list[Any]:
    name = [(wanted.host_id, wanted.claim_id)]
    offer = {
        "classes": _numbers(list(slots)),
        "slots": _numbers(list(slots.values())),
        "latest": _numbers([wanted.held_back.get(class_id, math.inf) for class_id in slots]),
        "count": wanted.count,
        **_names(name),
    }
    async with connections.transaction() as connection:
        await connection.execute(LOCK, _names(name))
        offered = await (await connection.execute(OFFERED, offer)).fetchall()
        seqs = fit_slots(offered, slots=wanted.slots, count=wanted.count)
        values = {"seqs": seqs, **_names(name * len(seqs)), **times}
        cursor = await connection.execute(_statement(len(seqs), "these"), values, binary=True)
        rows: list[Any] = await cursor.fetchall()
        return rows


def _names(names: Sequence[_ClaimName]) -> dict[str, str]:
    return {"hosts": _texts([host for host, _ in names]), "claims": _texts([claim for _, claim in names])}


# Array literals as text: the driver takes longer to encode arrays than the database to parse them.


def _numbers(values: Sequence[float]) -> str:
    return f"{{{','.join(map(repr, values))}}}"


def _texts(values: Sequence[str]) -> str:
    whole = "\0".join(values)
    if '"' in whole or "\\" in whole:
        values = [value.replace("\\", "\\\\").replace('"', '\\"') for value in values]
    return '{"' + '","'.join(values) + '"}' if values else "{}"
