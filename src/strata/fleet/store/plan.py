"""SQL of applying a plan in one transaction: inserting and changing jobs, dependencies, trainers, policies, and the
check that the plan is not outdated.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, Final

import msgspec

from strata.base.errors import Code, StrataError
from strata.base.failpoint import failpoint
from strata.database import event_kinds
from strata.database.events import EventRecord
from strata.database.events import record as record_events
from strata.database.transaction import Database, Transaction
from strata.fleet.core.job import JobStatus
from strata.fleet.core.jobspec import DEFAULT_PROJECT, HostSpec, JobSpec, TrainerSpec, moved_start_s
from strata.fleet.core.lease_status import outdated_plan
from strata.fleet.core.ownership import OPERATOR, Submitter, check_project, check_project_count, check_submission
from strata.fleet.core.plan import ApplyPlan, ExistingJob, HostPolicy, RegisteredTrainer
from strata.fleet.core.quota import check_specs, check_usage, quota_of
from strata.fleet.core.requirement import RequirementClass
from strata.fleet.core.reservation import gang_key
from strata.fleet.records import ClassRow
from strata.fleet.store.leases import read_job, requeue
from strata.fleet.store.owners import read_quotas, read_usage
from strata.fleet.store.queue import WAITS_FOR, class_ids, dequeue, enqueue, record
from strata.fleet.store.rows import UNFINISHED_JOB, class_keys, decode_spec, decode_trainer, encode

APPLY_S: Final = 120.0
"""A plan may have tens of thousands of jobs, and is one transaction."""
_TRAINERS: Final = (
    "SELECT n.project, n.name, n.digest, t.spec FROM trainer_name n JOIN trainer t ON t.digest = n.digest"
)
_INSERT_JOB: Final = (
    "INSERT INTO job (id, spec, class_id, status, epoch, created_at, changed_at, not_before, host_id, reason, artifact,"
    " declared, orphaned, waits_for, model, sweep, priority, trainer, charged, lost, excused, checkpoint, submitted_by,"
    " owner, project, label, gang, trainer_digest) VALUES (:id::text, :spec::bytea, :class_id::bigint,"
    f" '{JobStatus.PENDING}', 0, :created_at::float8, :changed_at::float8, :not_before::float8, '', '', '',"
    " :declared::boolean, false, 0, :model::text, :sweep::text, :priority::integer, :trainer::text, 0, 0, 0, '',"
    " :submitted_by::text, :owner::text, :project::text, :label::text, :gang::text, :trainer_digest::text)"
)
_UPDATE_JOB: Final = (
    "UPDATE job SET spec = :spec, class_id = :class_id, changed_at = :changed_at, model = :model, sweep = :sweep,"
    " priority = :priority, trainer = :trainer, label = :label WHERE id = :id"
)

_decode_policy: Final = msgspec.json.Decoder(HostSpec).decode
_decode_requirement: Final = msgspec.json.Decoder(RequirementClass).decode


class PlanTable:
    def __init__(self, database: Database) -> None:
        self._database = database

    async def apply(
        self,
        plan: ApplyPlan,
        actor: str,
        now_s: float,
        *,
        source: str,
        declared: bool = True,
        submitter: Submitter = OPERATOR,
    ) -> None:
        await self._database.run(
            lambda tx: apply_plan(tx, plan, actor, now_s, source=source, declared=declared, submitter=submitter),
            call_s=APPLY_S,
        )

    async def existing_jobs(self) -> Mapping[str, ExistingJob]:
        rows = await self._database.rows("SELECT id, spec, status, declared, trainer_digest, owner FROM job")
        return {
            job_id: ExistingJob(
                spec=decode_spec(spec), status=JobStatus(status), declared=bool(declared), trainer=digest, owner=owner
            )
            for job_id, spec, status, declared, digest, owner in rows
        }

    async def classes(self, after_id: int = 0) -> Sequence[ClassRow]:
        select = "SELECT id, spec FROM req_class WHERE id > :after ORDER BY id"
        rows = await self._database.rows(select, {"after": after_id})
        return [ClassRow(id=id_, requirement=_decode_requirement(spec)) for id_, spec in rows]

    async def unfinished_classes(self) -> Collection[int]:
        select = f"SELECT DISTINCT class_id FROM job WHERE {UNFINISHED_JOB}"
        return {class_id for (class_id,) in await self._database.rows(select)}

    async def policies(self) -> Mapping[str, HostPolicy]:
        rows = await self._database.rows("SELECT host, spec, project FROM policy")
        return {host: HostPolicy(spec=_decode_policy(spec), project=project) for host, spec, project in rows}

    async def trainers(self) -> Mapping[tuple[str, str], RegisteredTrainer]:
        return {
            (project, name): RegisteredTrainer(digest=digest, spec=decode_trainer(spec))
            for project, name, digest, spec in await self._database.rows(_TRAINERS)
        }

    async def trainer(self, digest: str) -> TrainerSpec:
        rows = await self._database.rows("SELECT spec FROM trainer WHERE digest = :digest", {"digest": digest})
        if not rows:
            raise StrataError(Code.NOT_FOUND, f"there is no trainer {digest[:100]!r}")
        return decode_trainer(rows[0][0])


async def apply_plan(  # noqa: PLR0913 (what a plan is applied with)
    tx: Transaction,
    plan: ApplyPlan,
    actor: str,
    now_s: float,
    *,
    source: str,
    declared: bool,
    submitter: Submitter,
) -> None:
    await lock_plans(tx)
    await _check_current(tx, plan)
    await _take_project(tx, plan, submitter, now_s, declared=declared)
    await check_quota(tx, plan, submitter, now_s)
    changed = plan.requeued | {change.job_id: change.spec for change in plan.changed}
    await _lock_dependencies(tx, [*plan.new.values(), *changed.values()], plan.requeued)
    await _put_trainers(tx, plan)
    await _put_policies(tx, plan)
    classes = await class_ids(tx, class_keys([*plan.new.values(), *changed.values()]))
    await _insert_jobs(tx, plan, classes, (actor, submitter.owner), now_s, declared=declared)
    await _move_starts(tx, {each.job_id: each.spec for each in plan.changed if "start" in each.kinds})
    # In the order of ids, like all who lock several jobs.
    updated = [{**_columns(job_id, spec, classes), "changed_at": now_s} for job_id, spec in sorted(changed.items())]
    await tx.many(_UPDATE_JOB, updated)
    for job_id in sorted(plan.requeued):
        await requeue(tx, job_id, actor, now_s)
    # What made the result that does not count made this as well.
    await _update_jobs(tx, "checkpoint = ''", plan.requeued)
    await _assign_trainers(tx, [*plan.requeued, *(each.job_id for each in plan.changed if "trainer" in each.kinds)])
    # Only now is every job there that another one may come after.
    await _write_dependencies(tx, plan.new, changed, now_s)
    if declared:
        await _mark_declared(tx, [*plan.unchanged, *changed], plan.orphaned, submitter.owner)
    await _update_jobs(tx, "superseded = true", plan.superseded)
    # With another command, source or class, a host that could not set a job up may do so now.
    delete = "DELETE FROM job_refusal WHERE seq IN (SELECT seq FROM job WHERE id = ANY(:jobs))"
    await tx.execute(delete, {"jobs": list(changed)})
    await _record_jobs(tx, plan, actor, now_s)
    if not plan.empty:
        await record(tx, now_s, actor, "manifest.applied", source, summary=plan.summary())
    failpoint("fleet.apply.written")


async def lock_plans(tx: Transaction) -> None:
    """Plans are applied one at a time: each is the difference to what the one before left."""
    await tx.lock("fleet.plan")


async def _check_current(tx: Transaction, plan: ApplyPlan) -> None:
    """CONFLICT when a job or a trainer is there that was not when this was planned."""
    there = await tx.rows("SELECT id FROM job WHERE id = ANY(:jobs) LIMIT 1", {"jobs": list(plan.new)})
    if there:
        raise outdated_plan(there[0][0])
    select = "SELECT name, digest FROM trainer_name WHERE project = :project"
    plan.check_trainers(dict(await tx.rows(select, {"project": plan.project})))


async def _take_project(
    tx: Transaction, plan: ApplyPlan, submitter: Submitter, now_s: float, *, declared: bool
) -> None:
    """FORBIDDEN when the project is another owner's; a project without an owner becomes the submitter's."""
    rows = await tx.rows("SELECT owner FROM project WHERE name = :project", {"project": plan.project})
    (check_project if declared else check_submission)(submitter, plan.project, rows[0][0] if rows else "")
    if not rows and plan.project != DEFAULT_PROJECT:
        insert = "INSERT INTO project (name, owner, made_at) VALUES (:name, :owner, :now)"
        await tx.execute(insert, {"name": plan.project, "owner": submitter.owner, "now": now_s})
        count = "SELECT count(*) FROM project WHERE owner = :owner"
        ((owned,),) = await tx.rows(count, {"owner": submitter.owner})
        check_project_count(submitter, owned - 1)


async def check_quota(tx: Transaction, plan: ApplyPlan, submitter: Submitter, now_s: float) -> None:
    """Raise unless the quota of the submitter allows all jobs of the plan."""
    if submitter.operator:
        return
    quota = quota_of(submitter.owner, await read_quotas(tx))
    changed = [change.spec for change in plan.changed]
    check_specs(submitter.owner, quota, [*plan.new.values(), *plan.requeued.values(), *changed])
    used = await read_usage(tx, submitter.owner, None if quota.gpu_hours is None else quota.window_s, now_s)
    check_usage(submitter.owner, quota, used, len(plan.new) + len(plan.requeued))


async def _record_jobs(tx: Transaction, plan: ApplyPlan, actor: str, now_s: float) -> None:
    events = [
        EventRecord(now_s, actor, event_kinds.JOB_CREATED, job_id, {"model": spec.model, "mode": spec.mode})
        for job_id, spec in plan.new.items()
    ]
    events += [
        EventRecord(now_s, actor, event_kinds.JOB_CHANGED, each.job_id, {"kinds": each.kinds}) for each in plan.changed
    ]
    await record_events(tx, events)


async def _lock_dependencies(tx: Transaction, specs: Iterable[JobSpec], requeued: Iterable[str]) -> None:
    """Locks what a job comes after, which may be ending just now: either its end is counted here, or it sees who waits.
    Jobs after those that are requeued are counted as well.

    Before any other job is locked, because an end locks what was waited for and then those who waited.
    """
    needed = {needed for spec in specs for needed in spec.after}
    select = (
        "SELECT o.needs FROM job_after r JOIN job_after o ON o.job_id = r.job_id WHERE r.needs = ANY(:requeued::text[])"
    )
    if requeued := list(requeued):
        needed.update(needs for (needs,) in await tx.rows(select, {"requeued": requeued}))
    lock = "SELECT 1 FROM job WHERE id = ANY(:needed::text[]) ORDER BY id FOR SHARE"
    await tx.execute(lock, {"needed": sorted(needed)})


def _columns(job_id: str, spec: JobSpec, classes: Mapping[bytes, int]) -> dict[str, Any]:
    return {
        "id": job_id,
        "spec": encode(spec),
        "class_id": classes[encode(spec.requirement)],
        "model": spec.model,
        "sweep": spec.sweep,
        "priority": spec.priority,
        "trainer": spec.trainer,
        "label": spec.label,
    }


async def _insert_jobs(
    tx: Transaction,
    plan: ApplyPlan,
    classes: Mapping[bytes, int],
    by: tuple[str, str],
    now_s: float,
    *,
    declared: bool,
) -> None:
    """`by` is the actor, as events name it, and the owner."""
    submitted_by, owner = by
    select = "SELECT project, name, digest FROM trainer_name WHERE project = ANY(:projects)"
    names = await tx.rows(select, {"projects": list({spec.project for spec in plan.new.values()})})
    digests = {(project, name): digest for project, name, digest in names}
    rows = [
        {
            **_columns(job_id, spec, classes),
            "created_at": now_s,
            "changed_at": now_s,
            "not_before": spec.starts_at_s(now_s),
            "declared": declared,
            "submitted_by": str(submitted_by),
            "owner": owner,
            "project": spec.project,
            "gang": gang_key(spec),
            "trainer_digest": plan.pinned or digests.get((spec.project, spec.trainer), ""),
        }
        for job_id, spec in plan.new.items()
    ]
    # In the order of the manifest: the older of two equal jobs is claimed first.
    await tx.many(_INSERT_JOB, rows)


async def _update_jobs(tx: Transaction, change: str, jobs: Iterable[str]) -> None:
    await tx.execute(f"UPDATE job SET {change} WHERE id = ANY(:jobs)", {"jobs": list(jobs)})


async def _move_starts(tx: Transaction, jobs: Mapping[str, JobSpec]) -> None:
    """Moves the starts of jobs that wait, before their specs are changed: others have started, or count it when they
    are requeued."""
    for job_id, spec in sorted(jobs.items()):
        # Locked first: a failure that is written in between would lose its back-off.
        await tx.execute("SELECT 1 FROM job WHERE id = :job FOR UPDATE", {"job": job_id})
        row = await read_job(tx, job_id)
        start_s = moved_start_s(row.spec, spec, row.created_at_s, row.not_before_s)
        update = "UPDATE job SET not_before = :start WHERE id = :job AND status = 'pending'"
        await tx.execute(update, {"start": start_s, "job": job_id})


async def _write_dependencies(
    tx: Transaction, new: Mapping[str, JobSpec], changed: Mapping[str, JobSpec], now_s: float
) -> None:
    """Write what each job comes after, and let those that wait for nothing join the queue in their present class."""
    after = [
        {"job_id": job_id, "needs": needs}
        for job_id, spec in sorted({**new, **changed}.items())
        for needs in spec.after
    ]
    await tx.execute("DELETE FROM job_after WHERE job_id = ANY(:jobs)", {"jobs": list(changed)})
    await tx.many("INSERT INTO job_after (job_id, needs) VALUES (:job_id::text, :needs::text)", after)
    await _update_jobs(tx, f"waits_for = {WAITS_FOR}", sorted({row["job_id"] for row in after} | changed.keys()))
    rows = await tx.rows("SELECT seq, id, status FROM job WHERE id = ANY(:jobs)", {"jobs": [*new, *changed]})
    await dequeue(tx, [seq for seq, job_id, _ in rows if job_id in changed])
    await enqueue(tx, [seq for seq, _, status in rows if status == JobStatus.PENDING], now_s)


async def _assign_trainers(tx: Transaction, jobs: Sequence[str]) -> None:
    """Assigns what their trainers' names stand for now. A result that came in since the plan was made keeps its own."""
    await tx.execute(
        "UPDATE job SET trainer_digest = coalesce("
        "  (SELECT digest FROM trainer_name t WHERE t.project = job.project AND t.name = job.trainer), '')"
        " WHERE id = ANY(:jobs) AND status <> 'completed'",
        {"jobs": jobs},
    )


async def _mark_declared(tx: Transaction, kept: Sequence[str], orphaned: Iterable[str], owner: str) -> None:
    """The manifest has these jobs from now on. An attempt from before may still end in a result that is not its own."""
    await tx.execute(
        "UPDATE job SET declared = true, orphaned = false, superseded = false,"
        " owner = CASE WHEN declared THEN owner ELSE :owner END,"
        " checkpoint = CASE WHEN declared THEN checkpoint ELSE '' END"
        " WHERE id = ANY(:kept) AND (orphaned OR superseded OR NOT declared)"
        " AND (declared OR NOT EXISTS (SELECT 1 FROM lease WHERE lease.job_id = job.id))",
        {"owner": owner, "kept": kept},
    )
    # A claim looks for a job in the queue of its owner.
    await tx.execute(
        "UPDATE ready SET owner = j.owner FROM job j"
        " WHERE j.seq = ready.seq AND j.id = ANY(:kept) AND ready.owner <> j.owner",
        {"kept": kept},
    )
    await _update_jobs(tx, "orphaned = true", orphaned)


async def _put_trainers(tx: Transaction, plan: ApplyPlan) -> None:
    """A trainer is never changed: its name gets another digest, and jobs keep the one they carry."""
    trainers = sorted(plan.trainers.items())
    await tx.many(
        "INSERT INTO trainer (digest, spec) VALUES (:digest::text, :spec::bytea) ON CONFLICT DO NOTHING",
        [{"digest": spec.digest, "spec": spec.encode()} for _, spec in trainers],
    )
    await tx.many(
        "INSERT INTO trainer_name (project, name, digest) VALUES (:project::text, :name::text, :digest::text)"
        " ON CONFLICT (project, name) DO UPDATE SET digest = excluded.digest",
        [{"project": plan.project, "name": name, "digest": spec.digest} for name, spec in trainers],
    )


async def _put_policies(tx: Transaction, plan: ApplyPlan) -> None:
    for name, spec in sorted(plan.hosts.items()):
        changed = await tx.changed(
            "INSERT INTO policy (host, spec, project) VALUES (:host, :spec, :project) ON CONFLICT (host) DO UPDATE"
            " SET spec = excluded.spec, project = excluded.project"
            " WHERE policy.project = excluded.project OR :take_over",
            {"host": name, "spec": encode(spec), "project": plan.project, "take_over": plan.take_over},
        )
        if not changed:
            raise outdated_plan(f"the policy of {name}")
