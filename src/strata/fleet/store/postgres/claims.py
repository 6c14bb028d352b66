"""Claims in PostgreSQL: hosts with the same options share one statement.

A claim first locks its host and reads what it holds (`open_claims`): what a host has left cannot change until the claim
is committed, whichever hub serves it. The lock also makes claims idempotent: a retry that overtakes its first try waits
for it. `open_claims` leaves out claims that were answered before, and hosts that are not active.

Most hosts that claim hold nothing, so that is assumed, and the statements that follow from it are sent along: one round
trip. They pass over a host that does hold something; its claim takes two more, as does one that is known to hold
something, or that has to be fair between owners.

Joins are written so that the planner cannot choose a full scan: a plan made while a table is empty is cached, and would
read the whole table once it is full.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any, Final, Literal

from strata.base.failpoint import failpoint
from strata.database.event_kinds import JOB_CLAIMED, JOB_LOST
from strata.database.postgres import Connections
from strata.fleet.core.amounts import Amounts, Room, Taken
from strata.fleet.core.claiming import (
    OpenAttempt,
    displaced_attempts,
    grant_reserved,
    open_rooms,
    take_turns,
)
from strata.fleet.core.fair_share import JobOffer, OwnerShares
from strata.fleet.core.job import JobEvent, target
from strata.fleet.records import Claim, JobLease
from strata.fleet.store.queue import queue_order
from strata.fleet.store.rows import (
    decode_lease,
    decode_open_attempt,
    decode_open_reservation,
    decode_taken,
    encode,
)

Connection = Any
"""A psycopg connection: only the adapters of `strata.database` know its type."""
_ClaimName = tuple[str, str]
"""The host, and the claim id that the host chose."""
_Options = tuple[tuple[int, ...], tuple[float, ...], tuple[int, ...], str]
"""Classes; since when at the latest a job of each has to wait; which of the amounts of the claim a job of each takes;
and the host, if it is excluded for any job."""

_Place = tuple[_ClaimName, list[Taken], Mapping[int, Amounts]]
"""A claim that may take a job, what a job of each kind of amounts gets of its host, and the classes of the claim."""

OPEN: Final = """
SELECT host, claim, job_id, epoch, taken, expired, reserved, kind, expires_at
FROM open_claims(%(hosts)s::text[], %(claims)s::text[])
"""
"""The claims that are new; then, without a claim, the attempts of their hosts that have not ended, and the jobs for
which these are reserved."""

LOCK_EXPIRED: Final = """
SELECT id FROM job WHERE id = ANY(%(jobs)s::text[]) AND status = 'pending' FOR UPDATE SKIP LOCKED
"""
"""Jobs whose leases have expired, and that nobody revives meanwhile."""

END_DISPLACED: Final = f"""
WITH displaced AS (
  SELECT w.job_id, w.epoch FROM unnest(%(jobs)s::text[], %(epochs)s::bigint[]) AS w (job_id, epoch)
), ended AS (
  UPDATE attempt SET ended_at = %(now)s, outcome = 'lost', cause = 'host_lost'
  FROM displaced d WHERE attempt.job_id = d.job_id AND attempt.epoch = d.epoch
), counted AS (
  UPDATE job SET lost = lost + 1 FROM displaced d WHERE job.id = d.job_id
), told AS (
  INSERT INTO event (at, actor, kind, subject, body)
  SELECT %(now)s, 'hub', '{JOB_LOST}', job_id, convert_to('{{"epoch":' || epoch || '}}', 'UTF8') FROM displaced
)
DELETE FROM lease USING displaced d WHERE lease.job_id = d.job_id
"""
"""End attempts whose lease had expired, and whose place on the host goes to another now."""

OPENED: Final = f"""
WITH opened AS MATERIALIZED ({OPEN})
"""
"""The statement around `open_claims` sees the snapshot from before the lock, its own queries see what is there then."""
FREE: Final = """
w.host NOT IN (SELECT host FROM opened WHERE claim IS NULL)
AND (w.host, w.claim) IN (SELECT host, claim FROM opened WHERE claim IS NOT NULL)
"""
"""A new claim of a host that holds nothing and is not reserved."""
ONE_FREE: Final = "(SELECT array_agg(claim) FROM opened) = ARRAY[%(claim)s::text]"

MINE: Final = """
(SELECT count(*) FROM job_refusal x WHERE x.seq = r.seq AND x.host_id = ANY(%(hosts)s::text[])) = 0
"""
"""Jobs that no host of this statement is excluded for."""

ONE: Final = f"""
  SELECT r.seq, 1 AS place, %(host)s::text AS host, %(claim)s::text AS claim, %(taken)s::text AS taken
  FROM ready r JOIN job j USING (seq)
  WHERE r.class_id = %(class)s AND r.since <= %(latest)s AND {{free}}
    AND (SELECT count(*) FROM job_refusal x WHERE x.seq = r.seq AND x.host_id = %(host)s) = 0
  ORDER BY {queue_order("r")} LIMIT 1 FOR UPDATE OF r, j SKIP LOCKED
"""
"""The most frequent claim: one job of one class, without arrays and without sorting."""

SEVERAL: Final = f"""
  WITH fresh AS MATERIALIZED (
    SELECT host, claim, n, row_number() OVER (ORDER BY n) AS place
    FROM unnest(%(hosts)s::text[], %(claims)s::text[]) WITH ORDINALITY AS w (host, claim, n) WHERE {{free}}
  ), chosen AS MATERIALIZED (
    SELECT seq, kind, row_number() OVER (ORDER BY {queue_order("best")}) AS place FROM ({{best}}) AS best
  )
  SELECT chosen.seq, fresh.place, fresh.host, fresh.claim,
    (%(takes)s::text[])[(fresh.n - 1) * %(kinds)s::int + chosen.kind] AS taken
  FROM chosen JOIN fresh USING (place)
"""
"""`takes` has for each place and each kind of amounts what a job of that kind gets of the host."""

FIRST: Final = f"""
    SELECT r.seq, r.priority, 1 AS kind FROM ready r JOIN job j USING (seq)
    WHERE r.class_id = (%(classes)s::bigint[])[1] AND r.since <= (%(latest)s::float8[])[1] AND {MINE}
    ORDER BY {queue_order("r")} LIMIT {{count}} FOR UPDATE OF r, j SKIP LOCKED
"""
"""Takes of one class: the index is scanned until enough jobs are found that no other transaction has locked."""

BEST: Final = f"""
    SELECT b.seq, b.priority, b.kind FROM (
      SELECT o.seq, o.priority, o.class_id, ahead.kind FROM (
        SELECT wanted.class_id, wanted.latest, wanted.kind
        FROM unnest(%(classes)s::bigint[], %(latest)s::float8[], %(kind)s::int[]) AS wanted (class_id, latest, kind)
        CROSS JOIN LATERAL (
          SELECT r.seq, r.priority FROM ready r
          WHERE r.class_id = wanted.class_id AND r.since <= wanted.latest AND {MINE}
          ORDER BY {queue_order("r")} LIMIT 1
        ) AS head
        ORDER BY {queue_order("head")} LIMIT {{spare}}
      ) AS ahead CROSS JOIN LATERAL (
        SELECT r.seq, r.priority, r.class_id FROM ready r
        WHERE r.class_id = ahead.class_id AND r.since <= ahead.latest AND {MINE}
        ORDER BY {queue_order("r")} LIMIT {{spare}}
      ) AS o
      ORDER BY {queue_order("o")} LIMIT {{spare}}
    ) AS b JOIN ready r ON r.seq = b.seq AND r.class_id = b.class_id JOIN job j ON j.seq = b.seq
    ORDER BY {queue_order("b")} LIMIT {{count}} FOR UPDATE OF r, j SKIP LOCKED
"""
"""Takes of many classes: their heads are compared unlocked, since a claim that locked one job of each class would hide
all of them from everybody else. The best n jobs are in the n classes with the best heads, so only those are looked
into. The spare ones make up for those that others have locked meanwhile."""

OWNERS_OFFERS: Final = f"""
SELECT b.seq, wanted.class_id, b.priority, o.owner
FROM unnest(%(classes)s::bigint[], %(latest)s::float8[]) AS wanted (class_id, latest)
CROSS JOIN unnest(%(owners)s::text[]) AS o (owner)
CROSS JOIN LATERAL (
  SELECT r.seq, r.priority FROM ready r
  WHERE r.class_id = wanted.class_id AND r.owner = o.owner AND r.since <= wanted.latest AND {MINE}
  ORDER BY {queue_order("r")} LIMIT {{count}}
) AS b
"""
"""The best few jobs of each owner in each class."""

PICKED: Final = """
    SELECT r.seq, -b.place AS priority, b.kind
    FROM unnest(%(seqs)s::bigint[], %(picked_kinds)s::int[]) WITH ORDINALITY AS b (seq, kind, place)
    JOIN ready r ON r.seq = b.seq JOIN job j ON j.seq = b.seq
    ORDER BY b.place LIMIT {count} FOR UPDATE OF r, j SKIP LOCKED
"""

SPARE: Final = 4
"""More jobs than places are chosen: other transactions may have taken some."""

TAKE: Final = f"""
{{before}} given AS MATERIALIZED ({{given}}), gone AS (
  DELETE FROM ready USING given WHERE ready.seq = given.seq
), moved AS (
  UPDATE job SET status = '{target(JobEvent.CLAIM)}', epoch = epoch + 1, attempts = attempts + 1, changed_at = %(now)s,
    host_id = given.host, reason = '',
    lost = lost + CASE epoch WHEN 0 THEN 0 ELSE (SELECT count(*) FROM lease WHERE job_id = job.id) END
  FROM given WHERE job.seq = given.seq
  RETURNING id, epoch, attempts, spec, checkpoint, trainer_digest, given.place, given.host, given.claim,
    convert_to(given.taken, 'UTF8') AS taken
), replaced AS (
  UPDATE attempt SET ended_at = %(now)s, outcome = 'lost', cause = 'host_lost'
  WHERE job_id = ANY (ARRAY(SELECT id FROM moved WHERE moved.epoch > 1))
    AND epoch = (SELECT moved.epoch - 1 FROM moved WHERE moved.id = attempt.job_id)
    AND (SELECT count(*) FROM lease WHERE lease.job_id = attempt.job_id) > 0
  RETURNING job_id, epoch
), leased AS (
  INSERT INTO lease SELECT id, host, epoch, %(until)s, false FROM moved
  ON CONFLICT (job_id) DO UPDATE SET host_id = excluded.host_id, epoch = excluded.epoch,
    expires_at = excluded.expires_at, expired = false, preempt = ''
), tried AS (
  INSERT INTO attempt (job_id, epoch, host_id, claim_id, claimed_at, number, trainer_digest, taken,
    outcome, cause, error, artifact, checkpoint, facts)
  SELECT id, epoch, host, claim, %(now)s, attempts, trainer_digest, taken, '', '', '', '', '', '{{{{}}}}' FROM moved
), told AS (
  INSERT INTO event (at, actor, kind, subject, body)
  SELECT %(now)s, 'host:' || host, '{JOB_CLAIMED}', id, convert_to('{{{{"epoch":' || epoch || '}}}}', 'UTF8') FROM moved
  UNION ALL
  SELECT %(now)s, 'hub', '{JOB_LOST}', job_id, convert_to('{{{{"epoch":' || epoch || '}}}}', 'UTF8') FROM replaced
)
SELECT host, claim, id, epoch, %(until)s::float8, moved.spec, checkpoint, trainer_digest, trainer.spec, taken, place
FROM moved LEFT JOIN trainer ON trainer.digest = moved.trainer_digest {{after}} ORDER BY place
"""
"""Removes the job from the queue, and begins a lease and an attempt, in one statement."""
AND_OPENED: Final = "UNION ALL SELECT host, claim, NULL, 0, 0, NULL, NULL, NULL, NULL, NULL, 0 FROM opened"

PREVIOUS_LEASES: Final = f"""
SELECT a.host_id, a.claim_id, a.job_id, a.epoch, l.expires_at, j.spec, j.checkpoint, a.trainer_digest, t.spec, a.taken
FROM unnest(%(hosts)s::text[], %(claims)s::text[]) AS w (host, claim)
JOIN attempt a ON a.claim_id = w.claim AND a.host_id = w.host
JOIN lease l ON l.job_id = a.job_id AND l.epoch = a.epoch
JOIN job j ON j.id = a.job_id LEFT JOIN trainer t ON t.digest = a.trainer_digest
ORDER BY {queue_order("j")}
"""
"""What claims of these names were granted before and still hold."""


async def claim_jobs(
    connections: Connections,
    claims: Sequence[Claim],
    lease_s: float,
    now_s: float,
    shares: OwnerShares | None = None,
) -> Sequence[Sequence[JobLease]]:
    named = {(each.host_id, each.claim_id): each for each in claims}
    times = {"now": now_s, "until": now_s + lease_s}
    found, settled = list[Any](), set[_ClaimName]()
    first, *others = take_turns(named)
    # With shares the jobs are chosen between two round trips in any case.
    if assumed := {name: named[name] for name in first if shares is None and named[name].idle}:
        found, settled = await _claim_for_idle_hosts(connections, assumed, times)
    if later := {name: named[name] for turn in (first, *others) for name in turn if name not in settled}:
        found += await _claim_for_holding_hosts(connections, later, times, shares)
    given: dict[_ClaimName, list[JobLease]] = {name: [] for name in named}
    for row in found:
        given[row[0], row[1]].append(_decode_lease(row))
    return [given[each.host_id, each.claim_id] for each in claims]


async def _claim_for_idle_hosts(
    connections: Connections, named: Mapping[_ClaimName, Claim], times: dict[str, float]
) -> tuple[list[Any], set[_ClaimName]]:
    """Returns what was granted on the assumption that the hosts hold nothing, and the claims for which it was right."""
    statements = _idle_statements(named, times)
    if len(statements) == 1:
        rows = await connections.run(*statements[0])
    else:
        async with connections.pipeline() as connection:
            # All hosts are locked first, and in order.
            await connection.execute(OPEN, _names(list(named)), prepare=True, binary=True)
            cursors = [await connection.execute(*each, prepare=True, binary=True) for each in statements]
            failpoint("fleet.claim.written")
        rows = [row for each in cursors for row in await each.fetchall()]
    holding = {host for host, claim, *_ in rows if claim is None}
    settled = {(host, claim) for host, claim, job_id, *_ in rows if job_id is None and host not in holding}
    return [row for row in rows if row[2] is not None], settled


def _idle_statements(named: Mapping[_ClaimName, Claim], times: dict[str, float]) -> list[tuple[str, dict[str, Any]]]:
    """Makes statements for claims of hosts that are taken to hold nothing."""
    empty = {host_id: Room(wanted.capacity) for (host_id, _), wanted in named.items()}
    groups = _group_claims(list(named.items()), empty)
    return [_claim_statement(menu, places, times, idle=True) for menu, places in groups.items()]


async def _claim_for_holding_hosts(
    connections: Connections,
    named: Mapping[_ClaimName, Claim],
    times: dict[str, float],
    shares: OwnerShares | None,
) -> list[Any]:
    """Claims for hosts that hold something: what fits is decided between two round trips of one transaction. Claims
    that were answered before get the same leases again."""
    # What is sent in a pipeline is one transaction, also when an answer is read in between.
    async with connections.pipeline() as connection:
        cursor = await connection.execute(OPEN, _names(list(named)), prepare=True, binary=True)
        rows = await cursor.fetchall()
        fresh, rooms, expired = await _read_rooms(connection, rows, named)
        previous: list[Any] = []
        if repeated := list(named.keys() - set(fresh)):
            cursor = await connection.execute(PREVIOUS_LEASES, _names(repeated), prepare=True, binary=True)
            previous = await cursor.fetchall()
        found = await _claim_reserved(connection, rows, {name: named[name] for name in fresh}, rooms, times)
        answered = {(host, claim) for host, claim, *_ in found}
        turns = take_turns(name for name in fresh if name not in answered)
        cursors: list[Any] = []
        for number, turn in enumerate(turns):
            groups = _group_claims([(name, named[name]) for name in turn], rooms)
            if shares is None:
                statements = [_claim_statement(menu, places, times) for menu, places in groups.items()]
            else:
                statements = [
                    await _fair_statement(connection, menu, places, times, shares) for menu, places in groups.items()
                ]
            cursors = [await connection.execute(*each, prepare=True, binary=True) for each in statements]
            failpoint("fleet.claim.written")
            if expired or number + 1 < len(turns):
                # The next claim of a host sees what this one took, and expired leases give way to it.
                taken = [row for each in cursors for row in await each.fetchall()]
                for host_id, *_, each, _ in taken:
                    rooms[host_id].hold(decode_taken(each))
                found += taken
                cursors = []
        if expired and found:
            displaced = displaced_attempts(rooms, expired, {job_id: host_id for host_id, _, job_id, *_ in found})
            jobs, epochs = [job_id for job_id, _ in displaced], [epoch for _, epoch in displaced]
            await connection.execute(END_DISPLACED, {"jobs": jobs, "epochs": epochs, "now": times["now"]})
    return previous + found + [row for each in cursors for row in await each.fetchall()]


def _decode_lease(row: Sequence[Any]) -> JobLease:
    host_id, _, job_id, epoch, *rest = row
    return decode_lease(job_id, epoch, (host_id, *rest[:6]))


async def _read_rooms(
    connection: Connection, rows: Sequence[Any], named: Mapping[_ClaimName, Claim]
) -> tuple[list[_ClaimName], dict[str, Room], list[OpenAttempt]]:
    """The claims that are new, what their hosts have left beside their leases, and their attempts that have expired."""
    fresh = [(host, claim) for host, claim, *_ in rows if claim is not None]
    attempts = [decode_open_attempt((row[0], *row[2:6])) for row in rows if row[1] is None and not row[6]]
    revocable = [attempt.job_id for attempt in attempts if attempt.expired]
    if revocable:
        cursor = await connection.execute(LOCK_EXPIRED, {"jobs": revocable})
        locked = {job_id for (job_id,) in await cursor.fetchall()}
        # What somebody else has locked may be revived at this moment: it counts as held.
        attempts = [each._replace(expired=each.expired and each.job_id in locked) for each in attempts]
    return fresh, *open_rooms({name[0]: named[name].capacity for name in reversed(fresh)}, attempts)


async def _claim_reserved(
    connection: Connection,
    rows: Sequence[Any],
    fresh: Mapping[_ClaimName, Claim],
    rooms: Mapping[str, Room],
    times: dict[str, float],
) -> list[Any]:
    """The jobs for which the hosts are reserved, as far as they fit now. One that is locked is claimed or ended by
    another transaction."""
    reserved = [decode_open_reservation((row[0], row[4], *row[6:])) for row in rows if row[1] is None and row[6]]
    first = {host: fresh[host, claim] for host, claim in reversed(list(fresh))}
    granted: list[Any] = []
    counts = {host_id: claim.count for host_id, claim in first.items()}
    for host_id, seq, taken in grant_reserved(rooms, reserved, counts, times["now"]):
        place: _Place = ((host_id, first[host_id].claim_id), [taken], {})
        statement, values = _claim_statement(((0,), (math.inf,), (1,), ""), [place], times, how="picked")
        chosen = {**values, "seqs": _numbers([seq]), "picked_kinds": _numbers([1])}
        granted += await (await connection.execute(statement, chosen, prepare=True, binary=True)).fetchall()
    return granted


def _group_claims(fresh: Sequence[tuple[_ClaimName, Claim]], rooms: Mapping[str, Room]) -> dict[_Options, list[_Place]]:
    """Claims of different hosts: those with the same options share a statement."""
    alike: dict[_Options, list[_Place]] = {}
    for name, wanted in fresh:
        room, latest = rooms[wanted.host_id], wanted.held_back.get
        fits, kinds = room.fitting(wanted.classes)
        if not fits:
            continue
        numbers = {id(amounts): number for number, amounts in enumerate(kinds, start=1)}
        menu = (
            fits,
            tuple([latest(class_id, math.inf) for class_id in fits]),
            tuple([numbers[id(wanted.classes[class_id])] for class_id in fits]),
            wanted.host_id if wanted.refusing else "",
        )
        takes = [[taken] for taken in room.plan(kinds[0], wanted.count)]
        if len(kinds) > 1:
            takes = [[room.plan(amounts)[0] for amounts in kinds]]
        alike.setdefault(menu, []).extend([(name, each, wanted.classes) for each in takes])
    return alike


async def _fair_statement(
    connection: Connection,
    menu: _Options,
    places: Sequence[_Place],
    times: dict[str, float],
    shares: OwnerShares,
) -> tuple[str, dict[str, Any]]:
    """The statement that takes the jobs whose owners have the smallest shares. They are chosen unlocked; the spare ones
    make up for those that others have locked meanwhile."""
    classes, latest, kind, _ = menu
    count = len(places)
    values = {
        "classes": _numbers(classes),
        "latest": _numbers(latest),
        "owners": list(shares.owners),
        **_names([name for name, _, _ in places]),
    }
    cursor = await connection.execute(_heads(count + SPARE), values, prepare=True)
    offers = [JobOffer(*row) for row in await cursor.fetchall()]
    picked = shares.pick(offers, places[0][2], count, spare=SPARE)
    kinds = dict(zip(classes, kind, strict=True))
    statement, taken = _claim_statement(menu, places, times, how="picked")
    chosen = {
        "seqs": _numbers([each.seq for each in picked]),
        "picked_kinds": _numbers([kinds[each.class_id] for each in picked]),
    }
    return statement, {**taken, **chosen}


@lru_cache(256)
def _heads(count: int) -> str:
    return OWNERS_OFFERS.format(count=count)


def _claim_statement(
    menu: _Options,
    places: Sequence[_Place],
    times: dict[str, float],
    *,
    idle: bool = False,
    how: Literal["", "picked"] = "",
) -> tuple[str, dict[str, Any]]:
    """The statement for claims with the same options, each named as often as it may take a job, and its values."""
    classes, latest, kind, _ = menu
    takes = [encode(taken).decode() for _, each, _ in places for taken in each]
    if len(places) == len(classes) == 1 and not how:
        (((host, claim), _, _),) = places
        one = {"class": classes[0], "latest": latest[0], "host": host, "claim": claim, "taken": takes[0]}
        return _statement(1, "one", idle=idle), {**one, **_names([(host, claim)]), **times}
    values = {
        "classes": _numbers(classes),
        "latest": _numbers(latest),
        "kind": _numbers(kind),
        "kinds": max(kind),
        "takes": _texts(takes),
        **_names([name for name, _, _ in places]),
        **times,
    }
    return _statement(len(places), how or ("best" if len(classes) > 1 else "first"), idle=idle), values


@lru_cache(256)
def _statement(count: int, how: Literal["one", "first", "best", "picked"], *, idle: bool) -> str:
    around = {"before": f"{OPENED}," if idle else "WITH", "after": AND_OPENED if idle else ""}
    if how == "one":
        return TAKE.format(given=ONE.format(free=ONE_FREE if idle else "true"), **around)
    # A limit that is a parameter is planned as a tenth of the table: a sort of millions.
    best = {"best": BEST, "first": FIRST, "picked": PICKED}[how].format(count=count, spare=2 * count + 16)
    return TAKE.format(given=SEVERAL.format(best=best, free=FREE if idle else "true"), **around)


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
