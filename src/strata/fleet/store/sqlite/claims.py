"""SQL of claims in SQLite: choosing jobs for hosts with the same options, leasing them, and ending attempts that they
displace.

A batch reads once for all hosts with the same options, and writes each table once: the work per claim limits how many
hosts one hub serves.
"""

from __future__ import annotations

import math
import sqlite3
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any, Final

from strata.base.failpoint import failpoint
from strata.database.event_kinds import JOB_CLAIMED, JOB_LOST
from strata.database.events import EventRecord as Record
from strata.database.events import record_sqlite
from strata.fleet.core.amounts import Room, Taken
from strata.fleet.core.claiming import (
    OpenAttempt,
    OpenReservation,
    displaced_attempts,
    grant_reserved,
    open_rooms,
    take_turns,
)
from strata.fleet.core.fair_share import JobOffer, OwnerShares
from strata.fleet.core.job import Cause, JobEvent, target
from strata.fleet.core.lease import attempt_counter
from strata.fleet.records import Claim, JobLease
from strata.fleet.store.queue import queue_order
from strata.fleet.store.rows import (
    decode_lease,
    decode_open_attempt,
    decode_open_reservation,
    encode,
)

_ClaimName = tuple[str, str]
"""The host, and the claim id that the host chose."""
_Options = tuple[tuple[int, ...], tuple[tuple[int, float], ...], str]
"""Classes; of some of them since when at the latest a job has to wait; and the host, if it is excluded for any job."""
_Grant = tuple[_ClaimName, int, Taken]
"""A job for a claim, and what it takes of the host."""

_CLAIMED: Final = target(JobEvent.CLAIM)

CLAIMANTS: Final = """
SELECT h.id, w.claim, h.state = 'active', EXISTS (SELECT 1 FROM attempt WHERE host_id = h.id AND claim_id = w.claim),
  EXISTS (SELECT 1 FROM job_refusal WHERE host_id = h.id),
  EXISTS (SELECT 1 FROM attempt INDEXED BY attempt_open WHERE host_id = h.id AND ended_at IS NULL),
  EXISTS (SELECT 1 FROM reservation WHERE host_id = h.id)
FROM (SELECT json_extract(value, '$[0]') AS host, json_extract(value, '$[1]') AS claim FROM json_each(?)) AS w
CROSS JOIN host AS h ON h.id = w.host
"""
"""Reads for each claim whether its host is active, whether the claim was answered before (claims are idempotent), and
whether its host is excluded for any job, holds any, and is reserved for any."""

OPEN: Final = """
SELECT a.host_id, a.job_id, a.epoch, a.taken, l.expired FROM json_each(?) AS h
CROSS JOIN attempt AS a INDEXED BY attempt_open ON a.host_id = h.value AND a.ended_at IS NULL
CROSS JOIN lease AS l ON l.job_id = a.job_id AND l.epoch = a.epoch
"""
"""The attempts of these hosts that have not ended, and whether their leases have expired."""

RESERVED: Final = """
SELECT v.host_id, v.amounts, v.seq, v.kind, v.expires_at FROM json_each(?) AS h
CROSS JOIN reservation AS v ON v.host_id = h.value CROSS JOIN ready AS r ON r.seq = v.seq
WHERE v.kind <> 'missed' AND NOT EXISTS (SELECT 1 FROM job_refusal AS x WHERE x.host_id = v.host_id AND x.seq = v.seq)
ORDER BY v.seq
"""
"""What these hosts keep free for jobs that still wait."""

PREVIOUS_LEASES: Final = f"""
SELECT a.job_id, a.epoch, l.host_id, l.expires_at, j.spec, j.checkpoint, a.trainer_digest, t.spec, a.taken
FROM attempt a JOIN job j ON j.id = a.job_id JOIN lease l ON l.job_id = a.job_id AND l.epoch = a.epoch
LEFT JOIN trainer t ON t.digest = a.trainer_digest WHERE a.host_id = ? AND a.claim_id = ?
ORDER BY {queue_order("j")}
"""
"""The leases that a claim was granted before and still holds."""

OFFERED: Final = f"""
SELECT -priority, seq FROM ready WHERE class_id = :class AND since <= :latest {{mine}}
ORDER BY {queue_order("ready")} LIMIT :count
"""

HEADS: Final = f"""
SELECT -r.priority, r.seq, c.value FROM json_each(:classes) AS c CROSS JOIN ready AS r
ON r.seq = (SELECT seq FROM ready WHERE class_id = c.value {{mine}} ORDER BY {queue_order("ready")} LIMIT 1)
"""
"""The best job of each class. CROSS JOIN fixes the join order: the other way round it reads the whole queue."""

OWNERS_HEADS: Final = f"""
SELECT r.seq, r.class_id, r.priority, r.owner FROM json_each(:classes) AS c CROSS JOIN json_each(:owners) AS o
CROSS JOIN ready AS r ON r.seq = (
  SELECT seq FROM ready INDEXED BY ready_owner
  WHERE class_id = json_extract(c.value, '$[0]') AND owner = o.value
    AND since <= json_extract(c.value, '$[1]') {{mine}}
  ORDER BY {queue_order("ready")} LIMIT 1)
"""
"""The best job of each owner in each class."""

OWNERS_OFFERS: Final = f"""
SELECT seq, priority FROM ready INDEXED BY ready_owner
WHERE class_id = :class AND owner = :owner AND since <= :latest {{mine}} ORDER BY {queue_order("ready")} LIMIT :count
"""

_FOREVER_S: Final = 1e300
"""JSON has no infinity."""
_MINE: Final = "AND NOT EXISTS (SELECT 1 FROM job_refusal WHERE host_id = :host AND job_refusal.seq = ready.seq)"
"""The condition for a host that is excluded for some jobs."""

LOAD: Final = """
SELECT j.seq, j.id, j.epoch, j.attempts, j.spec, j.checkpoint, j.trainer_digest, t.spec, l.job_id IS NOT NULL
FROM json_each(?) AS s CROSS JOIN job AS j ON j.seq = s.value
LEFT JOIN trainer AS t ON t.digest = j.trainer_digest LEFT JOIN lease AS l ON l.job_id = j.id
"""

LEASE: Final = """
INSERT INTO lease (job_id, host_id, epoch, expires_at, expired) VALUES (?, ?, ?, ?, 0) ON CONFLICT (job_id) DO UPDATE
SET host_id = excluded.host_id, epoch = excluded.epoch, expires_at = excluded.expires_at, expired = 0, preempt = ''
"""

ATTEMPT: Final = """
INSERT INTO attempt (job_id, epoch, host_id, claim_id, claimed_at, number, trainer_digest, taken,
  outcome, cause, error, artifact, checkpoint, facts)
VALUES (?, ?, ?, ?, ?, ?, ?, ?, '', '', '', '', '', x'7b7d')
"""


def claim_jobs(
    db: sqlite3.Connection, claims: Sequence[Claim], lease_s: float, now_s: float, shares: OwnerShares | None = None
) -> list[list[JobLease]]:
    named = {(each.host_id, each.claim_id): each for each in claims}
    given: dict[_ClaimName, list[JobLease]] = {name: [] for name in named}
    fresh, attempts, reserved = _read_claimants(db, named, given)
    rooms, expired = open_rooms({name[0]: named[name].capacity for name in reversed(fresh)}, attempts)
    granted: list[JobLease] = []

    def grant(grants: Sequence[_Grant]) -> None:
        leases = _lease_jobs(db, grants, lease_s, now_s)
        for (name, _, _), lease in zip(grants, leases, strict=True):
            given[name].append(lease)
        granted.extend(leases)

    if reserved:
        first = {name[0]: named[name] for name in reversed(fresh)}
        found = grant_reserved(rooms, reserved, {host_id: claim.count for host_id, claim in first.items()}, now_s)
        grant([((host_id, first[host_id].claim_id), seq, taken) for host_id, seq, taken in found])
        fresh = {name: host for name, host in fresh.items() if not given[name]}
    for turn in take_turns(fresh):
        for grants in _choose_jobs(db, [(name, named[name], fresh[name]) for name in turn], rooms, shares):
            grant(grants)
    if granted and expired:
        displaced = displaced_attempts(rooms, expired, {each.job_id: each.host_id for each in granted})
        _end_lost_attempts(db, displaced, now_s)
        db.executemany("DELETE FROM lease WHERE job_id = ?", [(job_id,) for job_id, _ in displaced])
    return [given[each.host_id, each.claim_id] for each in claims]


def _read_claimants(
    db: sqlite3.Connection, named: Collection[_ClaimName], given: dict[_ClaimName, list[JobLease]]
) -> tuple[dict[_ClaimName, str], Iterable[OpenAttempt], Sequence[OpenReservation]]:
    """The claims that are new, each with its host if that is excluded for any job; what their hosts hold; and for which
    jobs these are reserved.

    Claims that were answered before are `given` the same leases.
    """
    fresh: dict[_ClaimName, str] = {}
    holding: dict[str, None] = {}
    reserved: dict[str, None] = {}
    rows = db.execute(CLAIMANTS, (encode(list(named)),)).fetchall()
    for host_id, claim_id, active, answered, refusing, holds, reserves in rows:
        name = (host_id, claim_id)
        if answered:
            leases = db.execute(PREVIOUS_LEASES, name)
            given[name] = [decode_lease(job_id, epoch, rest) for job_id, epoch, *rest in leases]
        elif active:
            fresh[name] = host_id if refusing else ""
            if holds:
                holding[host_id] = None
            if reserves:
                reserved[host_id] = None
    attempts = db.execute(OPEN, (encode(list(holding)),)).fetchall() if holding else []
    kept = db.execute(RESERVED, (encode(list(reserved)),)).fetchall() if reserved else []
    return fresh, [decode_open_attempt(row) for row in attempts], [decode_open_reservation(row) for row in kept]


def _choose_jobs(
    db: sqlite3.Connection,
    fresh: Sequence[tuple[_ClaimName, Claim, str]],
    rooms: Mapping[str, Room],
    shares: OwnerShares | None,
) -> Iterator[list[_Grant]]:
    """Claims of different hosts: which job each gets, and what of its host goes with it.

    What was chosen leaves the queue before the next is asked for.
    """
    alike: dict[_Options, list[tuple[_ClaimName, Claim, Taken | None]]] = {}
    for name, wanted, host in fresh:
        room, held_back = rooms[wanted.host_id], wanted.held_back
        fits, kinds = room.fitting(wanted.classes)
        if fits:
            latest = tuple([(class_id, held_back[class_id]) for class_id in held_back if class_id in fits])
            planned: Sequence[Taken | None] = room.plan(kinds[0], wanted.count) if len(kinds) == 1 else [None]
            alike.setdefault((fits, latest, host), []).extend([(name, wanted, taken) for taken in planned])
    for menu, places in alike.items():
        granted: list[_Grant] = []
        if shares is None:
            chosen = _best_jobs(db, menu, len(places))
        else:
            offers = _owners_offers(db, menu, len(places), shares.owners)
            chosen = [(each.seq, each.class_id) for each in shares.pick(offers, places[0][1].classes, len(places))]
        for (name, wanted, fixed), (seq, class_id) in zip(places, chosen, strict=False):
            taken = fixed or rooms[wanted.host_id].plan(wanted.classes[class_id])[0]
            rooms[wanted.host_id].hold(taken)
            granted.append((name, seq, taken))
        yield granted


def _owners_offers(db: sqlite3.Connection, menu: _Options, count: int, owners: Sequence[str]) -> list[JobOffer]:
    """The best few jobs of each owner in each class, of the highest priorities that the claims can reach."""
    classes, held_back, host = menu
    latest = dict(held_back)
    wanted = encode([(class_id, latest.get(class_id, _FOREVER_S)) for class_id in classes])
    values = {"classes": wanted, "owners": encode(owners), "host": host}
    heads = [JobOffer(*row) for row in db.execute(_statement_for(host, OWNERS_HEADS), values)]
    if count == 1:
        return heads
    offers = []
    for head in heads:
        rows = db.execute(
            _statement_for(host, OWNERS_OFFERS),
            {
                "class": head.class_id,
                "owner": head.owner,
                "latest": latest.get(head.class_id, _FOREVER_S),
                "count": count,
                "host": host,
            },
        )
        offers += [JobOffer(seq, head.class_id, priority, head.owner) for seq, priority in rows]
    return offers


def _best_jobs(db: sqlite3.Connection, menu: _Options, count: int) -> list[tuple[int, int]]:
    """The best `count` pending jobs, each with its class: they are in the `count` classes with the best heads."""
    classes, held_back, host = menu
    latest = dict(held_back)
    if len(classes) > 1:
        free = [class_id for class_id in classes if class_id not in latest]
        heads = db.execute(_statement_for(host, HEADS), {"classes": encode(free), "host": host}).fetchall()
        for class_id, latest_s in held_back:
            heads += [(*head, class_id) for head in _class_offers(db, class_id, latest_s, 1, host)]
        best = sorted(heads)[:count]
        if count == 1:
            return [(seq, class_id) for _, seq, class_id in best]
        classes = tuple([class_id for _, _, class_id in best])
    offers = sorted(_offers(db, classes, latest, count, host))
    return [(seq, class_id) for _, seq, class_id in offers[:count]]


def _offers(
    db: sqlite3.Connection, classes: Sequence[int], held_back: Mapping[int, float], count: int, host: str
) -> list[tuple[int, int, int]]:
    """The best few jobs of each class: order, job, class."""
    offers: list[tuple[int, int, int]] = []
    for class_id in classes:
        rows = _class_offers(db, class_id, held_back.get(class_id, math.inf), count, host)
        offers += [(order, seq, class_id) for order, seq in rows]
    return offers


def _class_offers(
    db: sqlite3.Connection, class_id: int, latest_s: float, count: int, host: str
) -> list[tuple[int, int]]:
    """Order and job of the best few jobs of one class."""
    values = {"class": class_id, "latest": latest_s, "count": count, "host": host}
    return db.execute(_statement_for(host, OFFERED), values).fetchall()


@lru_cache(16)
def _statement(text: str, *, mine: bool) -> str:
    return text.format(mine=_MINE if mine else "")


def _statement_for(host: str, text: str) -> str:
    return _statement(text, mine=bool(host))


def _lease_jobs(db: sqlite3.Connection, grants: Sequence[_Grant], lease_s: float, now_s: float) -> list[JobLease]:
    """Grant each of these jobs to its claim: remove it from the queue, and begin a lease and an attempt."""
    if not grants:
        return []
    seqs = [seq for _, seq, _ in grants]
    rows = {seq: rest for seq, *rest in db.execute(LOAD, (encode(seqs),))}
    until_s = now_s + lease_s
    leases: list[JobLease] = []
    moves: list[tuple[Any, ...]] = []
    attempts: list[tuple[Any, ...]] = []
    replaced: list[tuple[str, int]] = []
    for (host_id, claim_id), seq, taken in grants:
        job_id, epoch, attempts_before, spec, checkpoint, digest, trainer, leased = rows[seq]
        if leased:
            replaced.append((job_id, epoch))
        leases.append(decode_lease(job_id, epoch + 1, (host_id, until_s, spec, checkpoint, digest, trainer, taken)))
        moves.append((_CLAIMED, epoch + 1, now_s, host_id, seq))
        attempts.append((job_id, epoch + 1, host_id, claim_id, now_s, attempts_before + 1, digest, encode(taken)))
    db.executemany("DELETE FROM ready WHERE seq = ?", [(seq,) for seq in seqs])
    db.executemany(
        "UPDATE job SET status = ?, epoch = ?, attempts = attempts + 1, changed_at = ?, host_id = ?, reason = ''"
        " WHERE seq = ?",
        moves,
    )
    if replaced:
        _end_lost_attempts(db, replaced, now_s)
    db.executemany(LEASE, [(each.job_id, each.host_id, each.epoch, until_s) for each in leases])
    db.executemany(ATTEMPT, attempts)
    record_sqlite(
        db,
        [Record(now_s, f"host:{each.host_id}", JOB_CLAIMED, each.job_id, {"epoch": each.epoch}) for each in leases],
    )
    failpoint("fleet.claim.written")
    return leases


def _end_lost_attempts(db: sqlite3.Connection, lost: Sequence[tuple[str, int]], now_s: float) -> None:
    """End the attempts whose lease had expired, and whose job or whose place on the host goes to another now."""
    db.executemany(
        "UPDATE attempt SET ended_at = ?, outcome = 'lost', cause = ? WHERE job_id = ? AND epoch = ?",
        [(now_s, Cause.HOST_LOST, job_id, epoch) for job_id, epoch in lost],
    )
    column = attempt_counter(Cause.HOST_LOST)
    db.executemany(f"UPDATE job SET {column} = {column} + 1 WHERE id = ?", [(job_id,) for job_id, _ in lost])
    record_sqlite(db, [Record(now_s, "hub", JOB_LOST, job_id, {"epoch": epoch}) for job_id, epoch in lost])
