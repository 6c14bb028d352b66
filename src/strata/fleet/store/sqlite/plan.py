"""Applying a plan in SQLite: classes, jobs, policies and trainers in the one transaction that is open."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable, Mapping, Sequence

from strata.base.failpoint import failpoint
from strata.fleet.core.job import JobStatus
from strata.fleet.core.jobspec import DEFAULT_PROJECT, JobSpec, moved_start_s
from strata.fleet.core.lease_status import outdated_plan
from strata.fleet.core.ownership import Submitter, check_project, check_project_count, check_submission
from strata.fleet.core.plan import ApplyPlan
from strata.fleet.core.quota import OwnerUsage, check_specs, check_usage, quota_of
from strata.fleet.core.reservation import gang_key
from strata.fleet.store.rows import QUOTAS, class_keys, decode_quotas, encode, used_gpu_hours
from strata.fleet.store.sqlite.leases import class_ids, enqueue, read_job, record, requeue


def apply_plan(  # noqa: PLR0913 (what a plan is applied with)
    db: sqlite3.Connection,
    plan: ApplyPlan,
    actor: str,
    now_s: float,
    *,
    source: str,
    declared: bool,
    submitter: Submitter,
) -> None:
    _check_current(db, plan)
    _check_project(db, plan, submitter, declared=declared)
    check_quota(db, plan, submitter, now_s)
    _take_project(db, plan, submitter, now_s)
    _put_trainers(db, plan)
    _put_policies(db, plan)
    written = plan.new | plan.requeued | {change.job_id: change.spec for change in plan.changed}
    classes = class_ids(db, class_keys(written.values()))
    for job_id, spec in plan.new.items():
        class_id = classes[encode(spec.requirement)]
        _insert_job(db, job_id, spec, class_id, now_s, (actor, submitter.owner), pinned=plan.pinned, declared=declared)
        record(db, now_s, actor, "job.created", job_id, model=spec.model, mode=spec.mode)
    for change in plan.changed:
        if "start" in change.kinds:
            _move_start(db, change.job_id, change.spec)
        _update_job(db, change.job_id, change.spec, classes[encode(change.spec.requirement)], now_s)
        if "trainer" in change.kinds:
            _assign_trainer(db, change.job_id)
        record(db, now_s, actor, "job.changed", change.job_id, kinds=change.kinds)
    for job_id, spec in plan.requeued.items():
        _update_job(db, job_id, spec, classes[encode(spec.requirement)], now_s)
        requeue(db, job_id, actor, now_s)
        # What made the result that does not count made this as well.
        db.execute("UPDATE job SET checkpoint = '' WHERE id = ?", (job_id,))
        _assign_trainer(db, job_id)
    # Only now is every job there that another one may come after.
    _write_dependencies(db, written, now_s)
    if declared:
        kept = [*plan.unchanged, *plan.requeued, *(change.job_id for change in plan.changed)]
        _mark_declared(db, kept, plan.orphaned, submitter.owner)
    db.executemany("UPDATE job SET superseded = 1 WHERE id = ?", ((job_id,) for job_id in plan.superseded))
    # With another command, source or class, a host that could not set a job up may do so now.
    mended = ((change.job_id,) for change in plan.changed)
    db.executemany("DELETE FROM job_refusal WHERE seq = (SELECT seq FROM job WHERE id = ?)", mended)
    if not plan.empty:
        record(db, now_s, actor, "manifest.applied", source, summary=plan.summary())
    failpoint("fleet.apply.written")


def _check_current(db: sqlite3.Connection, plan: ApplyPlan) -> None:
    """CONFLICT when a job or a trainer is there that was not when this was planned."""
    for job_id in plan.new:
        if db.execute("SELECT 1 FROM job WHERE id = ?", (job_id,)).fetchone():
            raise outdated_plan(job_id)
    plan.check_trainers(
        dict(db.execute("SELECT name, digest FROM trainer_name WHERE project = ?", (plan.project,)).fetchall())
    )


def _check_project(db: sqlite3.Connection, plan: ApplyPlan, submitter: Submitter, *, declared: bool) -> None:
    """FORBIDDEN when the project is another owner's."""
    row = db.execute("SELECT owner FROM project WHERE name = ?", (plan.project,)).fetchone()
    (check_project if declared else check_submission)(submitter, plan.project, row[0] if row else "")


def _take_project(db: sqlite3.Connection, plan: ApplyPlan, submitter: Submitter, now_s: float) -> None:
    """A project without an owner becomes the submitter's."""
    if plan.project != DEFAULT_PROJECT:
        insert = "INSERT INTO project VALUES (?, ?, ?) ON CONFLICT DO NOTHING"
        if db.execute(insert, (plan.project, submitter.owner, now_s)).rowcount:
            ((owned,),) = db.execute("SELECT count(*) FROM project WHERE owner = ?", (submitter.owner,))
            check_project_count(submitter, owned - 1)


def check_quota(db: sqlite3.Connection, plan: ApplyPlan, submitter: Submitter, now_s: float) -> None:
    """Raise unless the quota of the submitter allows all jobs of the plan."""
    if submitter.operator:
        return
    quota = quota_of(submitter.owner, decode_quotas(db.execute(QUOTAS)))
    changed = [change.spec for change in plan.changed]
    check_specs(submitter.owner, quota, [*plan.new.values(), *plan.requeued.values(), *changed])
    used = read_usage(db, submitter.owner, None if quota.gpu_hours is None else quota.window_s, now_s)
    check_usage(submitter.owner, quota, used, len(plan.new) + len(plan.requeued))


def read_usage(db: sqlite3.Connection, owner: str, window_s: float | None, now_s: float) -> OwnerUsage:
    """What the owner has in use; GPU hours only with a window, because all jobs of the owner are read for them."""
    ((jobs,),) = db.execute(
        "SELECT count(*) FROM job WHERE owner = ? AND status IN ('pending', 'claimed', 'running')", (owner,)
    )
    if window_s is None:
        return OwnerUsage(jobs=jobs)
    attempts = db.execute(
        "SELECT a.taken, a.claimed_at, coalesce(a.ended_at, l.expires_at) FROM job j JOIN attempt a ON a.job_id = j.id"
        " LEFT JOIN lease l ON l.job_id = a.job_id AND l.epoch = a.epoch AND l.expired"
        " WHERE j.owner = ? AND (a.ended_at IS NULL OR a.ended_at > ?) AND a.taken <> x''",
        (owner, now_s - window_s),
    )
    return OwnerUsage(jobs=jobs, gpu_hours=used_gpu_hours(attempts, now_s - window_s, now_s))


def _insert_job(  # noqa: PLR0913 (the columns of a job that are not in its spec)
    db: sqlite3.Connection,
    job_id: str,
    spec: JobSpec,
    class_id: int,
    now_s: float,
    by: tuple[str, str],
    *,
    pinned: str,
    declared: bool,
) -> None:
    """`by` is the actor, as events name it, and the owner."""
    db.execute(
        "INSERT INTO job (id, spec, class_id, status, epoch, created_at, changed_at, not_before, host_id, reason,"
        " artifact, declared, orphaned, waits_for, model, sweep, priority, trainer, charged, lost, excused, checkpoint,"
        " project, submitted_by, owner, label, gang, trainer_digest)"
        " VALUES (?, ?, ?, ?, 0, ?, ?, ?, '', '', '', ?, 0, 0, ?, ?, ?, ?, 0, 0, 0, '', ?, ?, ?, ?, ?,"
        "  coalesce(nullif(?, ''), (SELECT digest FROM trainer_name WHERE project = ? AND name = ?), ''))",
        (
            job_id,
            encode(spec),
            class_id,
            JobStatus.PENDING,
            now_s,
            now_s,
            spec.starts_at_s(now_s),
            declared,
            spec.model,
            spec.sweep,
            spec.priority,
            spec.trainer,
            spec.project,
            *by,
            spec.label,
            gang_key(spec),
            pinned,
            spec.project,
            spec.trainer,
        ),
    )


def _update_job(db: sqlite3.Connection, job_id: str, spec: JobSpec, class_id: int, now_s: float) -> None:
    db.execute(
        "UPDATE job SET spec = ?, class_id = ?, changed_at = ?, sweep = ?, priority = ?, trainer = ?, label = ?"
        " WHERE id = ?",
        (
            encode(spec),
            class_id,
            now_s,
            spec.sweep,
            spec.priority,
            spec.trainer,
            spec.label,
            job_id,
        ),
    )


def _move_start(db: sqlite3.Connection, job_id: str, spec: JobSpec) -> None:
    """Of a job that waits, before its spec is changed: another one has started already, or counts it when requeued."""
    row = read_job(db, job_id)
    update = "UPDATE job SET not_before = ? WHERE id = ? AND status = 'pending'"
    db.execute(update, (moved_start_s(row.spec, spec, row.created_at_s, row.not_before_s), job_id))


def _assign_trainer(db: sqlite3.Connection, job_id: str) -> None:
    """What its trainer's name stands for now. A result that came in since the plan was made keeps its own."""
    db.execute(
        "UPDATE job SET trainer_digest = coalesce("
        "  (SELECT digest FROM trainer_name t WHERE t.project = job.project AND t.name = job.trainer), '')"
        " WHERE id = ? AND status <> 'completed'",
        (job_id,),
    )


def _write_dependencies(db: sqlite3.Connection, jobs: Mapping[str, JobSpec], now_s: float) -> None:
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
        if status == JobStatus.PENDING:
            enqueue(db, seq, now_s)


def _mark_declared(db: sqlite3.Connection, kept: Sequence[str], orphaned: Iterable[str], owner: str) -> None:
    """The manifest has these jobs from now on. An attempt from before may still end in a result that is not its own."""
    db.executemany(
        "UPDATE job SET declared = 1, orphaned = 0, superseded = 0,"
        " owner = CASE declared WHEN 1 THEN owner ELSE ? END,"
        " checkpoint = CASE declared WHEN 1 THEN checkpoint ELSE '' END"
        " WHERE id = ? AND (orphaned OR superseded OR NOT declared)"
        " AND (declared OR NOT EXISTS (SELECT 1 FROM lease WHERE lease.job_id = job.id))",
        ((owner, job_id) for job_id in kept),
    )
    # A claim looks for a job in the queue of its owner.
    db.executemany(
        "UPDATE ready SET owner = ? WHERE seq = (SELECT seq FROM job WHERE id = ? AND owner = ?) AND owner <> ?",
        ((owner, job_id, owner, owner) for job_id in kept),
    )
    db.executemany("UPDATE job SET orphaned = 1 WHERE id = ?", ((job_id,) for job_id in orphaned))


def _put_trainers(db: sqlite3.Connection, plan: ApplyPlan) -> None:
    """A trainer is never changed: its name gets another digest, and jobs keep the one they carry."""
    db.executemany(
        "INSERT INTO trainer VALUES (?, ?) ON CONFLICT DO NOTHING",
        ((spec.digest, spec.encode()) for spec in plan.trainers.values()),
    )
    db.executemany(
        "INSERT INTO trainer_name VALUES (?, ?, ?) ON CONFLICT (project, name) DO UPDATE SET digest = excluded.digest",
        ((plan.project, name, spec.digest) for name, spec in plan.trainers.items()),
    )


def _put_policies(db: sqlite3.Connection, plan: ApplyPlan) -> None:
    for name, spec in plan.hosts.items():
        changed = db.execute(
            "INSERT INTO policy (host, spec, project) VALUES (?, ?, ?) ON CONFLICT (host) DO UPDATE"
            " SET spec = excluded.spec, project = excluded.project WHERE policy.project = excluded.project OR ?",
            (name, encode(spec), plan.project, plan.take_over),
        )
        if not changed.rowcount:
            raise outdated_plan(f"the policy of {name}")
