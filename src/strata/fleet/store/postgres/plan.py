"""Applying a plan in PostgreSQL: classes, jobs, policies and trainers in the one transaction that is open."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

from strata.base.failpoint import failpoint
from strata.database.events import EventRecord as Record
from strata.database.events import record_postgres
from strata.fleet.core.job import JobStatus
from strata.fleet.core.jobspec import DEFAULT_PROJECT, JobSpec, moved_start_s
from strata.fleet.core.lease_status import outdated_plan
from strata.fleet.core.ownership import Submitter, check_project, check_project_count, check_submission
from strata.fleet.core.plan import ApplyPlan
from strata.fleet.core.quota import OwnerUsage, check_specs, check_usage, quota_of
from strata.fleet.core.reservation import gang_key
from strata.fleet.store.postgres import tables as sql
from strata.fleet.store.postgres.leases import Connection, class_ids, enqueue, read_job, record, requeue
from strata.fleet.store.rows import QUOTAS, class_keys, decode_quotas, encode, used_gpu_hours

PLAN_LOCK: Final = 0x5354_5241_5441_0004
"""Plans are applied one at a time: each is the difference to what the one before left."""


async def apply_plan(  # noqa: PLR0913 (what a plan is applied with)
    connection: Connection,
    plan: ApplyPlan,
    actor: str,
    now_s: float,
    *,
    source: str,
    declared: bool,
    submitter: Submitter,
) -> None:
    await lock_plans(connection)
    await _check_current(connection, plan)
    await _take_project(connection, plan, submitter, now_s, declared=declared)
    await check_quota(connection, plan, submitter, now_s)
    changed = plan.requeued | {change.job_id: change.spec for change in plan.changed}
    takers = [*plan.requeued, *(change.job_id for change in plan.changed if "trainer" in change.kinds)]
    needed = {needed for spec in [*plan.new.values(), *changed.values()] for needed in spec.after}
    await _lock_dependencies(connection, needed, plan.requeued)
    await _put_trainers(connection, plan)
    await _put_policies(connection, plan)
    classes = await class_ids(connection, class_keys([*plan.new.values(), *changed.values()]))
    await _insert_jobs(connection, plan, classes, (actor, submitter.owner), now_s, declared=declared)
    await _move_starts(connection, {each.job_id: each.spec for each in plan.changed if "start" in each.kinds})
    await _update_jobs(connection, changed, classes, now_s)
    for job_id in sorted(plan.requeued):
        await requeue(connection, job_id, actor, now_s)
    # What made the result that does not count made this as well.
    await connection.execute("UPDATE job SET checkpoint = '' WHERE id = ANY(%s)", (list(plan.requeued),))
    await _assign_trainers(connection, takers)
    # Only now is every job there that another one may come after.
    await _write_dependencies(connection, plan.new, changed, now_s)
    if declared:
        await _mark_declared(connection, [*plan.unchanged, *changed], plan.orphaned, submitter.owner)
    await connection.execute("UPDATE job SET superseded = true WHERE id = ANY(%s)", (list(plan.superseded),))
    # With another command, source or class, a host that could not set a job up may do so now.
    await connection.execute(
        "DELETE FROM job_refusal USING job WHERE job.seq = job_refusal.seq AND id = ANY(%s)", (list(changed),)
    )
    await _record_jobs(connection, plan, actor, now_s)
    if not plan.empty:
        await record(connection, now_s, actor, "manifest.applied", source, summary=plan.summary())
    failpoint("fleet.apply.written")


async def lock_plans(connection: Connection) -> None:
    await connection.execute("SELECT pg_advisory_xact_lock(%s)", (PLAN_LOCK,))


async def _check_current(connection: Connection, plan: ApplyPlan) -> None:
    """CONFLICT when a job or a trainer is there that was not when this was planned."""
    cursor = await connection.execute("SELECT id FROM job WHERE id = ANY(%s) LIMIT 1", (list(plan.new),))
    there = await cursor.fetchone()
    if there is not None:
        raise outdated_plan(there[0])
    cursor = await connection.execute("SELECT name, digest FROM trainer_name WHERE project = %s", (plan.project,))
    plan.check_trainers(dict(await cursor.fetchall()))


async def _take_project(
    connection: Connection, plan: ApplyPlan, submitter: Submitter, now_s: float, *, declared: bool
) -> None:
    """FORBIDDEN when the project is another owner's; a project without an owner becomes the submitter's."""
    row = await (await connection.execute("SELECT owner FROM project WHERE name = %s", (plan.project,))).fetchone()
    (check_project if declared else check_submission)(submitter, plan.project, row[0] if row else "")
    if row is None and plan.project != DEFAULT_PROJECT:
        insert = "INSERT INTO project VALUES (%s, %s, %s)"
        await connection.execute(insert, (plan.project, submitter.owner, now_s))
        count = "SELECT count(*) FROM project WHERE owner = %s"
        ((owned,),) = await (await connection.execute(count, (submitter.owner,))).fetchall()
        check_project_count(submitter, owned - 1)


async def check_quota(connection: Connection, plan: ApplyPlan, submitter: Submitter, now_s: float) -> None:
    """Raise unless the quota of the submitter allows all jobs of the plan."""
    if submitter.operator:
        return
    quotas = decode_quotas(await (await connection.execute(QUOTAS)).fetchall())
    quota = quota_of(submitter.owner, quotas)
    changed = [change.spec for change in plan.changed]
    check_specs(submitter.owner, quota, [*plan.new.values(), *plan.requeued.values(), *changed])
    used = await read_usage(connection, submitter.owner, None if quota.gpu_hours is None else quota.window_s, now_s)
    check_usage(submitter.owner, quota, used, len(plan.new) + len(plan.requeued))


async def read_usage(connection: Connection, owner: str, window_s: float | None, now_s: float) -> OwnerUsage:
    """What the owner has in use; GPU hours only with a window, because all jobs of the owner are read for them."""
    cursor = await connection.execute(
        "SELECT count(*) FROM job WHERE owner = %s AND status IN ('pending', 'claimed', 'running')", (owner,)
    )
    ((jobs,),) = await cursor.fetchall()
    if window_s is None:
        return OwnerUsage(jobs=jobs)
    cursor = await connection.execute(
        "SELECT a.taken, a.claimed_at, coalesce(a.ended_at, l.expires_at) FROM job j JOIN attempt a ON a.job_id = j.id"
        " LEFT JOIN lease l ON l.job_id = a.job_id AND l.epoch = a.epoch AND l.expired"
        " WHERE j.owner = %s AND (a.ended_at IS NULL OR a.ended_at > %s) AND a.taken <> ''",
        (owner, now_s - window_s),
    )
    return OwnerUsage(jobs=jobs, gpu_hours=used_gpu_hours(await cursor.fetchall(), now_s - window_s, now_s))


async def _record_jobs(connection: Connection, plan: ApplyPlan, actor: str, now_s: float) -> None:
    told = [Record(now_s, actor, "job.created", id_, {"model": s.model, "mode": s.mode}) for id_, s in plan.new.items()]
    told += [Record(now_s, actor, "job.changed", each.job_id, {"kinds": each.kinds}) for each in plan.changed]
    await record_postgres(connection, told)


async def _lock_dependencies(connection: Connection, needed: set[str], requeued: Iterable[str]) -> None:
    """What a job comes after may be ending just now: either its end is counted here, or it sees who waits for it.
    Jobs after those that are requeued are counted as well.

    Before any other job is locked, because an end locks what was waited for and then those who waited.
    """
    select = (
        "SELECT 1 FROM job WHERE id = ANY(%s::text[] || ARRAY(SELECT o.needs FROM job_after r"
        " JOIN job_after o USING (job_id) WHERE r.needs = ANY(%s))) ORDER BY id FOR SHARE"
    )
    await connection.execute(select, (sorted(needed), list(requeued)))


async def _insert_jobs(
    connection: Connection,
    plan: ApplyPlan,
    classes: Mapping[bytes, int],
    by: tuple[str, str],
    now_s: float,
    *,
    declared: bool,
) -> None:
    """`by` is the actor, as events name it, and the owner."""
    if not plan.new:
        return
    rows = [
        (
            id_,
            encode(spec),
            classes[encode(spec.requirement)],
            *_sorted_by(spec),
            spec.project,
            spec.starts_at_s(now_s),
            gang_key(spec),
        )
        for id_, spec in plan.new.items()
    ]
    # One statement for all, in the order of the manifest: the older of two equal jobs is claimed first.
    await connection.execute(
        "INSERT INTO job (id, spec, class_id, status, epoch, created_at, changed_at, not_before, host_id, reason,"
        " artifact, declared, orphaned, waits_for, model, sweep, priority, trainer, charged, lost, excused, checkpoint,"
        " submitted_by, owner, project, label, gang, trainer_digest)"
        f" SELECT n.id, n.spec, n.class_id, '{JobStatus.PENDING}', 0, %s, %s, n.start, '', '', '', %s, false, 0,"
        " n.model, n.sweep, n.priority, n.trainer, 0, 0, 0, '', %s, %s, n.project, n.label, n.gang,"
        " coalesce(nullif(%s, ''), t.digest, '')"
        " FROM unnest(%s::text[], %s::bytea[], %s::bigint[], %s::text[], %s::text[], %s::int[], %s::text[], %s::text[],"
        "  %s::text[], %s::float8[], %s::text[])"
        " WITH ORDINALITY"
        " AS n (id, spec, class_id, model, sweep, priority, trainer, label, project, start, gang, place)"
        " LEFT JOIN trainer_name t ON t.project = n.project AND t.name = n.trainer ORDER BY n.place",
        (now_s, now_s, declared, *by, plan.pinned, *(list(column) for column in zip(*rows, strict=True))),
    )


async def _update_jobs(
    connection: Connection, jobs: Mapping[str, JobSpec], classes: Mapping[bytes, int], now_s: float
) -> None:
    # In the order of ids, like all who lock several jobs.
    for id_, spec in sorted(jobs.items()):
        await connection.execute(
            "UPDATE job SET spec = %s, class_id = %s, changed_at = %s, model = %s, sweep = %s, priority = %s,"
            " trainer = %s, label = %s WHERE id = %s",
            (encode(spec), classes[encode(spec.requirement)], now_s, *_sorted_by(spec), id_),
        )


async def _move_starts(connection: Connection, jobs: Mapping[str, JobSpec]) -> None:
    """Of jobs that wait, before their specs are changed: others have started, or count it when they are requeued."""
    for id_, spec in sorted(jobs.items()):
        # Locked first: a failure that is written in between would lose its back-off.
        await connection.execute("SELECT 1 FROM job WHERE id = %s FOR UPDATE", (id_,))
        row = await read_job(connection, id_)
        update = "UPDATE job SET not_before = %s WHERE id = %s AND status = 'pending'"
        start_s = moved_start_s(row.spec, spec, row.created_at_s, row.not_before_s)
        await connection.execute(update, (start_s, id_))


def _sorted_by(spec: JobSpec) -> tuple[Any, ...]:
    return spec.model, spec.sweep, spec.priority, spec.trainer, spec.label


async def _write_dependencies(
    connection: Connection, new: Mapping[str, JobSpec], changed: Mapping[str, JobSpec], now_s: float
) -> None:
    """Write what each job comes after, and let those that wait for nothing join the queue in their present class."""
    after = [(id_, needed) for id_, spec in sorted({**new, **changed}.items()) for needed in spec.after]
    await connection.execute("DELETE FROM job_after WHERE job_id = ANY(%s)", (list(changed),))
    await connection.execute(
        "INSERT INTO job_after SELECT * FROM unnest(%s::text[], %s::text[])",
        ([id_ for id_, _ in after], [needed for _, needed in after]),
    )
    counted = sorted({id_ for id_, _ in after} | changed.keys())
    await connection.execute(f"UPDATE job SET waits_for = {sql.WAITS_FOR} WHERE id = ANY(%s)", (counted,))
    select = "SELECT seq, id, status FROM job WHERE id = ANY(%s)"
    rows = await (await connection.execute(select, ([*new, *changed],))).fetchall()
    moved = [seq for seq, id_, _ in rows if id_ in changed]
    await connection.execute("DELETE FROM ready WHERE seq = ANY(%s)", (moved,))
    await connection.execute("DELETE FROM ripening WHERE seq = ANY(%s)", (moved,))
    await enqueue(connection, [seq for seq, _, status in rows if status == JobStatus.PENDING], now_s)


async def _assign_trainers(connection: Connection, jobs: Iterable[str]) -> None:
    """What their trainers' names stand for now. A result that came in since the plan was made keeps its own."""
    await connection.execute(
        "UPDATE job SET trainer_digest = coalesce("
        "  (SELECT digest FROM trainer_name t WHERE t.project = job.project AND t.name = job.trainer), '')"
        " WHERE id = ANY(%s) AND status <> 'completed'",
        (list(jobs),),
    )


async def _mark_declared(connection: Connection, kept: Sequence[str], orphaned: Iterable[str], owner: str) -> None:
    """The manifest has these jobs from now on. An attempt from before may still end in a result that is not its own."""
    await connection.execute(
        "UPDATE job SET declared = true, orphaned = false, superseded = false,"
        " owner = CASE WHEN declared THEN owner ELSE %s END,"
        " checkpoint = CASE WHEN declared THEN checkpoint ELSE '' END"
        " WHERE id = ANY(%s) AND (orphaned OR superseded OR NOT declared)"
        " AND (declared OR NOT EXISTS (SELECT 1 FROM lease WHERE lease.job_id = job.id))",
        (owner, list(kept)),
    )
    # A claim looks for a job in the queue of its owner.
    await connection.execute(
        "UPDATE ready SET owner = j.owner FROM job j"
        " WHERE j.seq = ready.seq AND j.id = ANY(%s) AND ready.owner <> j.owner",
        (list(kept),),
    )
    await connection.execute("UPDATE job SET orphaned = true WHERE id = ANY(%s)", (list(orphaned),))


async def _put_trainers(connection: Connection, plan: ApplyPlan) -> None:
    """A trainer is never changed: its name gets another digest, and jobs keep the one they carry."""
    for name, spec in sorted(plan.trainers.items()):
        digest = spec.digest
        await connection.execute("INSERT INTO trainer VALUES (%s, %s) ON CONFLICT DO NOTHING", (digest, spec.encode()))
        await connection.execute(
            "INSERT INTO trainer_name VALUES (%s, %s, %s)"
            " ON CONFLICT (project, name) DO UPDATE SET digest = excluded.digest",
            (plan.project, name, digest),
        )


async def _put_policies(connection: Connection, plan: ApplyPlan) -> None:
    for name, spec in sorted(plan.hosts.items()):
        changed = await connection.execute(
            "INSERT INTO policy (host, spec, project) VALUES (%s, %s, %s) ON CONFLICT (host) DO UPDATE"
            " SET spec = excluded.spec, project = excluded.project WHERE policy.project = excluded.project OR %s",
            (name, encode(spec), plan.project, plan.take_over),
        )
        if not changed.rowcount:
            raise outdated_plan(f"the policy of {name}")
