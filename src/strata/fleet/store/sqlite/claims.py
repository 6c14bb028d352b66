"""Claims in SQLite: functions of the open transaction, called in the one thread.

A batch reads once for all hosts with the same options, and writes each table once: the work per claim limits how many
hosts one hub serves.
"""

from __future__ import annotations

import math
import sqlite3
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any, Final

from strata.base.failpoint import failpoint
from strata.database.events import EventRecord as Record
from strata.database.events import record_sqlite
from strata.fleet.core.job import Cause, JobEvent, target
from strata.fleet.core.lease import attempt_counter
from strata.fleet.core.match import fit_slots
from strata.fleet.ports import Claim, JobLease
from strata.fleet.store.rows import decode_lease, encode

_ClaimName = tuple[str, str]
"""The host, and the claim id that the host chose."""
_Options = tuple[tuple[int, ...], tuple[tuple[int, float], ...], str]
"""Classes; of some of them since when at the latest a job has to wait; and the host, if it is excluded for any job."""

_CLAIMED: Final = target(JobEvent.CLAIM)

CLAIMANTS: Final = """
SELECT h.id, w.claim, h.state = 'active', EXISTS (SELECT 1 FROM attempt WHERE host_id = h.id AND claim_id = w.claim),
  EXISTS (SELECT 1 FROM job_refusal WHERE host_id = h.id)
FROM (SELECT json_extract(value, '$[0]') AS host, json_extract(value, '$[1]') AS claim FROM json_each(?)) AS w
CROSS JOIN host AS h ON h.id = w.host
"""
"""Per claim: whether its host is active, whether the claim was answered before (claims are idempotent), and whether its
host is excluded for any job."""

PREVIOUS_LEASES: Final = """
SELECT a.job_id, a.epoch, l.host_id, l.expires_at, j.spec, j.checkpoint, a.trainer_digest, t.spec
FROM attempt a JOIN job j ON j.id = a.job_id JOIN lease l ON l.job_id = a.job_id AND l.epoch = a.epoch
LEFT JOIN trainer t ON t.digest = a.trainer_digest WHERE a.host_id = ? AND a.claim_id = ?
ORDER BY j.priority DESC, j.seq
"""
"""The leases that a claim was granted before and still holds."""

OFFERED: Final = """
SELECT -priority, seq FROM ready WHERE class_id = :class AND since <= :latest {mine}
ORDER BY priority DESC, seq LIMIT :count
"""

HEADS: Final = """
SELECT -r.priority, r.seq, c.value FROM json_each(:classes) AS c CROSS JOIN ready AS r
ON r.seq = (SELECT seq FROM ready WHERE class_id = c.value {mine} ORDER BY priority DESC, seq LIMIT 1)
"""
"""The best job of each class. CROSS JOIN fixes the join order: the other way round it reads the whole queue."""

_MINE: Final = "AND NOT EXISTS (SELECT 1 FROM job_refusal WHERE host_id = :host AND job_refusal.seq = ready.seq)"
"""For a host that is excluded for some jobs."""

LOAD: Final = """
SELECT j.seq, j.id, j.epoch, j.attempts, j.spec, j.checkpoint, j.trainer_digest, t.spec, l.job_id IS NOT NULL
FROM json_each(?) AS s CROSS JOIN job AS j ON j.seq = s.value
LEFT JOIN trainer AS t ON t.digest = j.trainer_digest LEFT JOIN lease AS l ON l.job_id = j.id
"""

LEASE: Final = """
INSERT INTO lease VALUES (?, ?, ?, ?, 0) ON CONFLICT (job_id) DO UPDATE
SET host_id = excluded.host_id, epoch = excluded.epoch, expires_at = excluded.expires_at, expired = 0
"""

ATTEMPT: Final = """
INSERT INTO attempt (job_id, epoch, host_id, claim_id, claimed_at, number, trainer_digest,
  outcome, cause, error, artifact, checkpoint, facts)
VALUES (?, ?, ?, ?, ?, ?, ?, '', '', '', '', '', x'7b7d')
"""


def claim_jobs(db: sqlite3.Connection, claims: Sequence[Claim], lease_s: float, now_s: float) -> list[list[JobLease]]:
    named = {(each.host_id, each.claim_id): each for each in claims}
    given: dict[_ClaimName, list[JobLease]] = {name: [] for name in named}
    alike: dict[_Options, list[_ClaimName]] = {}
    for host_id, claim_id, active, answered, refusing in db.execute(CLAIMANTS, (encode(list(named)),)).fetchall():
        host = host_id if refusing else ""
        name = (host_id, claim_id)
        wanted = named[name]
        if answered:
            given[name] = _previous_leases(db, name)
        elif active and wanted.count == 1:
            alike.setdefault(_options(wanted, host), []).append(name)
        elif active:
            given[name] = _lease_jobs(db, [(name, seq) for seq in _fitting_jobs(db, wanted, host)], lease_s, now_s)
    for menu, names in alike.items():
        taken = list(zip(names, _best_jobs(db, menu, len(names)), strict=False))
        for (name, _), lease in zip(taken, _lease_jobs(db, taken, lease_s, now_s), strict=True):
            given[name].append(lease)
    return [given[each.host_id, each.claim_id] for each in claims]


def _previous_leases(db: sqlite3.Connection, name: _ClaimName) -> list[JobLease]:
    return [decode_lease(job_id, epoch, rest) for job_id, epoch, *rest in db.execute(PREVIOUS_LEASES, name)]


def _options(wanted: Claim, host: str) -> _Options:
    classes, slots, held_back = wanted.classes, wanted.slots, wanted.held_back
    fits = tuple([class_id for class_id, takes in classes.items() if takes <= slots])
    return fits, tuple([(class_id, held_back[class_id]) for class_id in fits if class_id in held_back]), host


def _best_jobs(db: sqlite3.Connection, menu: _Options, count: int) -> list[int]:
    """The best `count` pending jobs: they are in at most `count` classes, namely those with the best heads."""
    classes, held_back, host = menu
    latest = dict(held_back)
    if len(classes) > 1:
        free = [class_id for class_id in classes if class_id not in latest]
        heads = db.execute(_statement_for(host, HEADS), {"classes": encode(free), "host": host}).fetchall()
        for class_id, latest_s in held_back:
            heads += [(*head, class_id) for head in _class_offers(db, class_id, latest_s, 1, host)]
        best = sorted(heads)[:count]
        if count == 1:
            return [seq for _, seq, _ in best]
        classes = tuple([class_id for _, _, class_id in best])
    offers = sorted(_offers(db, dict.fromkeys(classes, 0), latest, count, host))
    return [seq for _, seq, _ in offers[:count]]


def _fitting_jobs(db: sqlite3.Connection, wanted: Claim, host: str) -> list[int]:
    """For a claim of several jobs: a job that does not fit lets a smaller one pass."""
    classes = {class_id: takes for class_id, takes in wanted.classes.items() if takes <= wanted.slots}
    offers = sorted(_offers(db, classes, wanted.held_back, wanted.count, host))
    return fit_slots(((seq, takes) for _, seq, takes in offers), slots=wanted.slots, count=wanted.count)


def _offers(
    db: sqlite3.Connection, classes: Mapping[int, int], held_back: Mapping[int, float], count: int, host: str
) -> list[tuple[int, int, int]]:
    """The best few jobs of each class: order, job, slots."""
    offers: list[tuple[int, int, int]] = []
    for class_id, takes in classes.items():
        rows = _class_offers(db, class_id, held_back.get(class_id, math.inf), count, host)
        offers += [(order, seq, takes) for order, seq in rows]
    return offers


def _class_offers(
    db: sqlite3.Connection, class_id: int, latest_s: float, count: int, host: str
) -> list[tuple[int, int]]:
    """Order and job of the best few jobs of one class."""
    values = {"class": class_id, "latest": latest_s, "count": count, "host": host}
    return db.execute(_statement_for(host, OFFERED), values).fetchall()


@lru_cache(8)
def _statement(text: str, *, mine: bool) -> str:
    return text.format(mine=_MINE if mine else "")


def _statement_for(host: str, text: str) -> str:
    return _statement(text, mine=bool(host))


def _lease_jobs(
    db: sqlite3.Connection, taken: Sequence[tuple[_ClaimName, int]], lease_s: float, now_s: float
) -> list[JobLease]:
    """Grant each of these jobs to its claim: remove it from the queue, and begin a lease and an attempt."""
    if not taken:
        return []
    seqs = [seq for _, seq in taken]
    rows = {seq: rest for seq, *rest in db.execute(LOAD, (encode(seqs),))}
    until_s = now_s + lease_s
    leases: list[JobLease] = []
    moves: list[tuple[Any, ...]] = []
    attempts: list[tuple[Any, ...]] = []
    replaced: list[tuple[int, str, int]] = []
    for (host_id, claim_id), seq in taken:
        job_id, epoch, attempts_before, spec, checkpoint, digest, trainer, leased = rows[seq]
        if leased:
            replaced.append((seq, job_id, epoch))
        leases.append(decode_lease(job_id, epoch + 1, (host_id, until_s, spec, checkpoint, digest, trainer)))
        moves.append((_CLAIMED, epoch + 1, now_s, host_id, seq))
        attempts.append((job_id, epoch + 1, host_id, claim_id, now_s, attempts_before + 1, digest))
    db.executemany("DELETE FROM ready WHERE seq = ?", [(seq,) for seq in seqs])
    db.executemany(
        "UPDATE job SET status = ?, epoch = ?, attempts = attempts + 1, changed_at = ?, host_id = ?, reason = ''"
        " WHERE seq = ?",
        moves,
    )
    if replaced:
        _end_replaced_attempts(db, replaced, now_s)
    db.executemany(LEASE, [(each.job_id, each.host_id, each.epoch, until_s) for each in leases])
    db.executemany(ATTEMPT, attempts)
    record_sqlite(
        db,
        [Record(now_s, f"host:{each.host_id}", "job.claimed", each.job_id, {"epoch": each.epoch}) for each in leases],
    )
    failpoint("fleet.claim.written")
    return leases


def _end_replaced_attempts(db: sqlite3.Connection, replaced: Sequence[tuple[int, str, int]], now_s: float) -> None:
    """End the attempts whose lease had expired and whose job is claimed by another host now."""
    db.executemany(
        "UPDATE attempt SET ended_at = ?, outcome = 'lost', cause = ? WHERE job_id = ? AND epoch = ?",
        [(now_s, Cause.HOST_LOST, job_id, epoch) for _, job_id, epoch in replaced],
    )
    column = attempt_counter(Cause.HOST_LOST)
    db.executemany(f"UPDATE job SET {column} = {column} + 1 WHERE seq = ?", [(seq,) for seq, _, _ in replaced])
