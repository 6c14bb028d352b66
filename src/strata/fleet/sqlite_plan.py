"""Applying a plan in SQLite: classes, jobs, policies and trainers in the one transaction that is open."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable, Mapping

from strata.base.failpoint import failpoint
from strata.fleet.core.hold import outdated_plan
from strata.fleet.core.job import Status
from strata.fleet.core.jobspec import JobSpec
from strata.fleet.core.plan import Change, Plan
from strata.fleet.rows import class_keys, encode
from strata.fleet.sqlite_leases import enqueue, record


def apply(db: sqlite3.Connection, plan: Plan, actor: str, now_s: float, *, source: str, declared: bool) -> None:
    for job_id in plan.new:
        if db.execute("SELECT 1 FROM job WHERE id = ?", (job_id,)).fetchone():
            raise outdated_plan(job_id)
    classes = _classes(db, class_keys([*plan.new.values(), *(change.spec for change in plan.changed)]))
    for job_id, spec in plan.new.items():
        _add(db, job_id, spec, classes[encode(spec.requirement)], now_s, declared=declared)
        record(db, now_s, actor, "job.created", job_id, model=spec.model, mode=spec.mode)
    for change in plan.changed:
        _change(db, change, classes[encode(change.spec.requirement)], now_s)
        record(db, now_s, actor, "job.changed", change.job_id, kinds=change.kinds)
    # Only now is every job there that another one may come after.
    _order(db, plan.new | {change.job_id: change.spec for change in plan.changed}, now_s)
    if declared:
        _adopt(db, [*plan.unchanged, *(change.job_id for change in plan.changed)], plan.orphaned)
    _put(db, "trainer", ((name, encode(spec)) for name, spec in plan.trainers.items()))
    _put(db, "policy", ((name, encode(spec)) for name, spec in plan.hosts.items()))
    db.executemany("DELETE FROM policy WHERE host = ?", ((name,) for name in plan.released_hosts))
    if not plan.empty:
        record(db, now_s, actor, "manifest.applied", source, summary=plan.summary())
    failpoint("fleet.apply.written")


def _classes(db: sqlite3.Connection, keys: Mapping[bytes, str]) -> dict[bytes, int]:
    """The ids of these classes by how they are written; new ones are added."""
    found: dict[bytes, int] = {}
    for written, key in keys.items():
        row = db.execute("SELECT id FROM req_class WHERE key = ?", (key,)).fetchone()
        if row is None:
            row = db.execute("INSERT INTO req_class (key, spec) VALUES (?, ?) RETURNING id", (key, written)).fetchone()
        found[written] = row[0]
    return found


def _add(db: sqlite3.Connection, job_id: str, spec: JobSpec, class_id: int, now_s: float, *, declared: bool) -> None:
    db.execute(
        "INSERT INTO job (id, spec, class_id, status, epoch, created_at, changed_at, not_before, host_id, reason,"
        " artifact, declared, orphaned, waits_for, model, sweep, priority, trainer, charged, lost, excused, checkpoint)"
        " VALUES (?, ?, ?, ?, 0, ?, ?, 0, '', '', '', ?, 0, 0, ?, ?, ?, ?, 0, 0, 0, '')",
        (
            job_id,
            encode(spec),
            class_id,
            Status.PENDING,
            now_s,
            now_s,
            declared,
            spec.model,
            spec.sweep,
            spec.priority,
            spec.trainer,
        ),
    )


def _change(db: sqlite3.Connection, change: Change, class_id: int, now_s: float) -> None:
    spec = change.spec
    db.execute(
        "UPDATE job SET spec = ?, class_id = ?, changed_at = ?, sweep = ?, priority = ?, trainer = ? WHERE id = ?",
        (
            encode(spec),
            class_id,
            now_s,
            spec.sweep,
            spec.priority,
            spec.trainer,
            change.job_id,
        ),
    )


def _order(db: sqlite3.Connection, jobs: Mapping[str, JobSpec], now_s: float) -> None:
    """Write what each job comes after, and let those that wait for nothing join the queue in their present class."""
    for job_id, spec in jobs.items():
        db.execute("DELETE FROM job_after WHERE job_id = ?", (job_id,))
        db.executemany("INSERT INTO job_after VALUES (?, ?)", ((job_id, needed) for needed in spec.after))
        seq, status = db.execute(
            "UPDATE job SET waits_for = (SELECT count(*) FROM job_after a LEFT JOIN job n ON n.id = a.needs"
            "  WHERE a.job_id = job.id AND n.status IS NOT 'completed') WHERE id = ? RETURNING seq, status",
            (job_id,),
        ).fetchone()
        db.execute("DELETE FROM ready WHERE seq = ?", (seq,))
        db.execute("DELETE FROM ripening WHERE seq = ?", (seq,))
        if status == Status.PENDING:
            enqueue(db, seq, now_s)


def _adopt(db: sqlite3.Connection, kept: Iterable[str], orphaned: Iterable[str]) -> None:
    db.executemany(
        "UPDATE job SET declared = 1, orphaned = 0 WHERE id = ? AND (orphaned OR NOT declared)",
        ((job_id,) for job_id in kept),
    )
    db.executemany("UPDATE job SET orphaned = 1 WHERE id = ?", ((job_id,) for job_id in orphaned))


def _put(db: sqlite3.Connection, table: str, rows: Iterable[tuple[str, bytes]]) -> None:
    db.executemany(f"INSERT OR REPLACE INTO {table} VALUES (?, ?)", rows)
