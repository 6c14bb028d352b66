"""SQL of leases: renew, complete, fail, expire, cancel, release and requeue, each guarded by status, epoch and host of
the locked row.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from functools import partial
from typing import Any, Final, NamedTuple

import msgspec

from strata.base.errors import StrataError
from strata.base.failpoint import failpoint
from strata.database import event_kinds
from strata.database.transaction import Body, Database, Rows, Transaction, Values
from strata.fleet.core.job import HELD, TERMINAL, Cause, JobEvent, JobStatus, advance
from strata.fleet.core.jobspec import JobSpec, gang_ids
from strata.fleet.core.lease import (
    ASLEEP,
    AttemptCounts,
    RetryDecision,
    after_expiry,
    after_failure,
    after_setup_error,
    attempt_counter,
    with_more_memory,
    with_sleep,
)
from strata.fleet.core.lease_status import (
    ALIVE,
    LeaseStatus,
    already_ended,
    lease_status,
    not_ended,
    not_refused,
    stale_attempt,
    unknown_job,
)
from strata.fleet.core.requirement import Needs
from strata.fleet.records import AttemptKey, JobCompletion, JobFailure, JobRow, RefusedJob, Renewal, RenewalResult
from strata.fleet.store.queue import class_ids, dequeue, enqueue, record, recount_dependents
from strata.fleet.store.rows import JOB, class_keys, decode_job, decode_spec, encode

EXTEND: Final = """
WITH mine AS (
  SELECT l.job_id FROM unnest(:jobs::text[], :epochs::bigint[]) AS w (job_id, epoch) CROSS JOIN lease l
  WHERE l.job_id = w.job_id AND l.epoch = w.epoch AND l.host_id = :host AND NOT l.expired
  ORDER BY l.job_id FOR UPDATE OF l
)
UPDATE lease SET expires_at = :until FROM mine WHERE lease.job_id = mine.job_id AND NOT lease.expired
RETURNING lease.job_id, lease.epoch, (SELECT status FROM job WHERE id = lease.job_id), lease.preempt
"""
"""What is held and not expired, in one statement and without touching a job."""
LOCK_JOB: Final = (
    "SELECT seq, status, epoch, host_id, spec, charged, lost, infra, excused FROM job WHERE id = :job FOR UPDATE"
)
_REFUSED: Final = (
    "SELECT j.id, j.class_id, r.host_id FROM job_refusal r JOIN job j ON j.seq = r.seq WHERE j.status = 'pending'"
    " AND NOT EXISTS (SELECT 1 FROM lease WHERE job_id = j.id) ORDER BY j.id"
)


class HeldJob(NamedTuple):
    """The columns of a job that a decision about its lease needs, from `LOCK_JOB`, and whether the lease row exists."""

    seq: int
    status: JobStatus
    epoch: int
    host_id: str
    leased: bool
    spec: JobSpec
    tally: AttemptCounts

    def lease_status(self, attempt: AttemptKey) -> LeaseStatus:
        claimed = (attempt.epoch, attempt.host_id)
        return lease_status(self.status, current=(self.epoch, self.host_id), claimed=claimed, leased=self.leased)


def _decode_held_job(row: Sequence[Any], *, leased: bool) -> HeldJob:
    seq, status, epoch, host_id, spec, charged, lost, infra, excused = row
    tally = AttemptCounts(charged=charged, lost=lost, infra=infra, excused=excused)
    return HeldJob(seq, JobStatus(status), epoch, host_id, leased, decode_spec(spec), tally)


async def _lock_job(tx: Transaction, job_id: str) -> HeldJob | None:
    # Two statements: the first may have waited for the job, and then sees it as it is, but all else as it was before.
    lease = "SELECT 1 FROM lease WHERE job_id = :job"
    job, leased = await tx.rows_of_all((LOCK_JOB, {"job": job_id}), (lease, {"job": job_id}))
    return _decode_held_job(job[0], leased=bool(leased)) if job else None


async def require_job(tx: Transaction, job_id: str) -> HeldJob:
    job = await _lock_job(tx, job_id)
    if job is None:
        raise unknown_job(job_id)
    return job


async def read_job(tx: Transaction, job_id: str) -> JobRow:
    rows = await tx.rows(f"SELECT {JOB} FROM job WHERE id = :job", {"job": job_id})
    if not rows:
        raise unknown_job(job_id)
    return decode_job(rows[0])


async def lock_members(tx: Transaction, job_id: str) -> dict[str, JobRow]:
    """All members of the gang of a job, locked in one order; a job that trains alone is its only member."""
    members = gang_ids(job_id, (await read_job(tx, job_id)).spec)
    # In the order of ids, like all who lock several jobs.
    for member in sorted(members):
        await require_job(tx, member)
    return {member: await read_job(tx, member) for member in members}


async def renew(
    database: Database, host_id: str, renewals: Sequence[Renewal], lease_s: float, now_s: float
) -> list[RenewalResult]:
    """Most renewals only extend a lease that is held: one statement extends those and commits by itself.

    The others lock their jobs before their leases, each in its own transaction; in SQLite one commit is for all.
    """

    async def renew_all(tx: Transaction) -> list[RenewalResult]:
        async def run_each(bodies: Sequence[Body[RenewalResult]]) -> list[RenewalResult]:
            return [await body(tx) for body in bodies]

        return await _renew_leases(tx.rows, run_each, host_id, renewals, lease_s, now_s)

    if database.engine == "sqlite":
        return await database.run(renew_all)
    return await _renew_leases(database.returning, database.run_each, host_id, renewals, lease_s, now_s)


async def _renew_leases(
    change: Callable[[str, Values], Awaitable[Rows]],
    run_each: Callable[[Sequence[Body[RenewalResult]]], Awaitable[list[RenewalResult]]],
    host_id: str,
    renewals: Sequence[Renewal],
    lease_s: float,
    now_s: float,
) -> list[RenewalResult]:
    until_s = now_s + lease_s
    values = {"jobs": [each.job_id for each in renewals], "epochs": [each.epoch for each in renewals]}
    extended = await change(EXTEND, {**values, "host": host_id, "until": until_s})
    held = {
        (job_id, epoch): RenewalResult(
            job_id=job_id,
            epoch=epoch,
            verdict="held",
            status=JobStatus(status),
            expires_at_s=until_s,
            preempt=preempt,
        )
        for job_id, epoch, status, preempt in extended
    }
    rest = []
    for each in renewals:
        result = held.get((each.job_id, each.epoch))
        if result is None or (each.running and result.status is JobStatus.CLAIMED):
            rest.append(each)
    if rest:
        bodies = [partial(_renew_job, host_id=host_id, renewal=each, lease_s=lease_s, now_s=now_s) for each in rest]
        for result in await run_each(bodies):
            held[result.job_id, result.epoch] = result
    return [held[each.job_id, each.epoch] for each in renewals]


async def _renew_job(tx: Transaction, host_id: str, renewal: Renewal, lease_s: float, now_s: float) -> RenewalResult:
    """The renewal of a lease that has expired or ended, or whose job begins to run."""
    job_id, epoch = renewal.job_id, renewal.epoch
    job = await _lock_job(tx, job_id)
    if job is None:
        return RenewalResult(job_id=job_id, epoch=epoch, verdict="unknown")
    stands = job.lease_status(AttemptKey(host_id, job_id, epoch))
    if stands is LeaseStatus.ENDED:
        return RenewalResult(job_id=job_id, epoch=epoch, verdict="ended", status=job.status)
    if stands not in ALIVE:
        return RenewalResult(job_id=job_id, epoch=epoch, verdict="stale", status=job.status)
    expires_at_s = now_s + lease_s
    update = "UPDATE lease SET expires_at = :until, expired = false WHERE job_id = :job"
    await tx.execute(update, {"until": expires_at_s, "job": job_id})
    status = await _revive_if_expired(tx, job_id, job, now_s)
    if renewal.running and status is JobStatus.CLAIMED:
        status = await _advance_status(tx, job, JobEvent.START, now_s, "")
        await tx.execute(
            "UPDATE attempt SET started_at = :now WHERE job_id = :job AND epoch = :epoch AND started_at IS NULL",
            {"now": now_s, "job": job_id, "epoch": epoch},
        )
        await record(tx, now_s, f"host:{host_id}", event_kinds.JOB_STARTED, job_id, epoch=epoch)
    failpoint("fleet.renew.written")
    return RenewalResult(job_id=job_id, epoch=epoch, verdict="held", status=status, expires_at_s=expires_at_s)


async def _revive_if_expired(tx: Transaction, job_id: str, job: HeldJob, now_s: float) -> JobStatus:
    """The status of a job whose host sent a request: an expired lease is revived, and the job leaves the queue."""
    if job.status is not JobStatus.PENDING:
        return job.status
    await tx.execute("DELETE FROM ready WHERE seq = :seq", {"seq": job.seq})
    await tx.execute("UPDATE lease SET expired = false WHERE job_id = :job", {"job": job_id})
    await record(tx, now_s, f"host:{job.host_id}", event_kinds.JOB_REVIVED, job_id, epoch=job.epoch)
    return await _advance_status(tx, job, JobEvent.REVIVE, now_s, "")


async def complete(
    tx: Transaction, attempt: AttemptKey, completion: JobCompletion, now_s: float
) -> JobRow | StrataError:
    """An error is returned, not raised, so that what was written about a late result is committed."""
    job_id = attempt.job_id
    job = await require_job(tx, job_id)
    if job.lease_status(attempt) not in ALIVE:
        return await _late_result(tx, attempt, completion, job)
    if await _revive_if_expired(tx, job_id, job, now_s) is not job.status:
        job = await require_job(tx, job_id)
    facts = {**completion.facts, "metrics": dict(completion.metrics)}
    artifact = completion.artifact
    async with tx.pipeline():
        await _advance_status(tx, job, JobEvent.COMPLETE, now_s, "")
        # The trainer may have been changed since this attempt began: the result is of the one that it was given.
        await tx.execute(
            "UPDATE job SET artifact = :artifact, trainer_digest = a.trainer_digest FROM attempt a"
            " WHERE job.seq = :seq AND a.job_id = job.id AND a.epoch = :epoch",
            {"artifact": artifact, "seq": job.seq, "epoch": attempt.epoch},
        )
        await _end_attempt(tx, job_id, attempt.epoch, now_s, "completed")
        await _update_attempt(tx, attempt, artifact=artifact, facts=encode(facts))
        await tx.execute("DELETE FROM lease WHERE job_id = :job", {"job": job_id})
        actor = f"host:{attempt.host_id}"
        await record(tx, now_s, actor, event_kinds.JOB_COMPLETED, job_id, epoch=attempt.epoch, artifact=artifact)
    await recount_dependents(tx, job_id, now_s)
    failpoint("fleet.complete.written")
    return await read_job(tx, job_id)


async def _late_result(
    tx: Transaction, attempt: AttemptKey, completion: JobCompletion, job: HeldJob
) -> JobRow | StrataError:
    """The same report again gets the same reply; another one is kept beside the attempt and refused."""
    reported = await _previous_report(tx, attempt, "outcome, artifact")
    if reported == ("completed", completion.artifact):
        return await read_job(tx, attempt.job_id)
    if reported is not None and reported[0] != "completed" and completion.artifact:
        await _update_attempt(tx, attempt, outcome="orphan", artifact=completion.artifact)
    return _not_alive(attempt, job)


def _not_alive(attempt: AttemptKey, job: HeldJob) -> StrataError:
    if job.lease_status(attempt) is LeaseStatus.ENDED:
        return already_ended(attempt.job_id, job.status)
    return stale_attempt(attempt.job_id, attempt.epoch, job.epoch)


async def fail(
    tx: Transaction,
    attempt: AttemptKey,
    failure: JobFailure,
    now_s: float,
    chance: float,
    eligible: Collection[str],
) -> JobRow:
    job = await require_job(tx, attempt.job_id)
    if job.lease_status(attempt) not in ALIVE:
        if await _previous_report(tx, attempt, "cause, error") == (failure.cause, failure.error):
            return await read_job(tx, attempt.job_id)
        raise _not_alive(attempt, job)
    await _revive_if_expired(tx, attempt.job_id, job, now_s)
    job = await require_job(tx, attempt.job_id)
    if failure.cause is Cause.SETUP_ERROR:
        insert = "INSERT INTO job_refusal (host_id, seq) VALUES (:host, :seq) ON CONFLICT DO NOTHING"
        await tx.execute(insert, {"host": attempt.host_id, "seq": job.seq})
    refused = await tx.rows("SELECT host_id FROM job_refusal WHERE seq = :seq", {"seq": job.seq})
    decision = after_failure(
        failure.cause,
        job.tally,
        job.spec.budget,
        now_s=now_s,
        chance=chance,
        hosts_left=len(set(eligible) - {host for (host,) in refused}),
    )
    decision = with_sleep(decision, failure.error)
    await _update_attempt(tx, attempt, error=failure.error, facts=encode(dict(failure.facts)))
    if failure.memory is not None:
        decision = with_more_memory(decision, failure.memory.had, len(eligible))
        await _move_to_class(tx, job, failure.memory.needs)
    await _apply_decision(tx, attempt.job_id, job, decision, now_s, f"host:{attempt.host_id}")
    failpoint("fleet.fail.written")
    return await read_job(tx, attempt.job_id)


async def read_refused_jobs(tx: Transaction) -> list[RefusedJob]:
    classes: dict[str, int] = {}
    hosts: dict[str, set[str]] = {}
    for job_id, class_id, host_id in await tx.rows(_REFUSED):
        classes[job_id] = class_id
        hosts.setdefault(job_id, set()).add(host_id)
    return [RefusedJob(job_id=id_, class_id=classes[id_], hosts=frozenset(hosts[id_])) for id_ in hosts]


async def fail_refused(tx: Transaction, eligible: Mapping[str, Collection[str]], now_s: float) -> list[JobRow]:
    # In the order of ids, like all who lock several jobs; what was refused is read after that.
    await tx.execute("SELECT 1 FROM job WHERE id = ANY(:jobs) ORDER BY id FOR UPDATE", {"jobs": list(eligible)})
    refused = await read_refused_jobs(tx)
    failed = [each.job_id for each in refused if each.job_id in eligible and each.is_unservable(eligible[each.job_id])]
    for job_id in failed:
        await _apply_decision(tx, job_id, await require_job(tx, job_id), after_setup_error(0, now_s), now_s, "hub")
    return [await read_job(tx, job_id) for job_id in failed]


async def record_checkpoint(tx: Transaction, attempt: AttemptKey, artifact: str, now_s: float) -> None:
    job = await require_job(tx, attempt.job_id)
    if job.lease_status(attempt) not in ALIVE:
        raise stale_attempt(attempt.job_id, attempt.epoch, job.epoch)
    await tx.execute("UPDATE job SET checkpoint = :artifact WHERE seq = :seq", {"artifact": artifact, "seq": job.seq})
    await _update_attempt(tx, attempt, checkpoint=artifact)
    actor = f"host:{attempt.host_id}"
    await record(tx, now_s, actor, event_kinds.JOB_CHECKPOINTED, attempt.job_id, epoch=attempt.epoch, artifact=artifact)
    failpoint("fleet.checkpoint.written")


async def expire_leases(database: Database, now_s: float, limit: int) -> list[JobRow]:
    due = await database.rows(
        "SELECT job_id FROM lease WHERE NOT expired AND expires_at <= :now ORDER BY expires_at LIMIT :limit",
        {"now": now_s, "limit": limit},
    )
    if not due:
        return []
    # One transaction each: a job that somebody works on holds up nobody else's.
    rows = await database.run_each([partial(_expire, job_id=job_id, now_s=now_s) for (job_id,) in due])
    return [row for row in rows if row is not None]


async def _expire(tx: Transaction, job_id: str, now_s: float) -> JobRow | None:
    """None when somebody else is at this job, or the lease was renewed since it was found: not due, or not now."""
    lease = "SELECT 1 FROM lease WHERE job_id = :job AND NOT expired AND expires_at <= :now FOR UPDATE"
    found, due = await tx.rows_of_all(
        (f"{LOCK_JOB} SKIP LOCKED", {"job": job_id}), (lease, {"job": job_id, "now": now_s})
    )
    if not found or not due:
        return None
    job = _decode_held_job(found[0], leased=True)
    await _apply_decision(tx, job_id, job, after_expiry(job.tally, job.spec.budget, now_s=now_s), now_s, "hub")
    failpoint("fleet.expire.written")
    return await read_job(tx, job_id)


async def cancel(tx: Transaction, job_id: str, reason: str, actor: str, now_s: float) -> JobRow:
    job = await require_job(tx, job_id)
    if job.status is not JobStatus.CANCELLED:
        decision = RetryDecision(event=JobEvent.CANCEL, cause=Cause.CANCELLED, not_before_s=now_s, reason=reason)
        await _apply_decision(tx, job_id, job, decision, now_s, actor)
    elif (await read_job(tx, job_id)).reason.startswith(ASLEEP) and not reason.startswith(ASLEEP):
        update = "UPDATE job SET changed_at = :now, reason = :reason WHERE seq = :seq"
        await tx.execute(update, {"now": now_s, "reason": reason, "seq": job.seq})
        body = {"epoch": job.epoch, "cause": Cause.CANCELLED, "reason": reason}
        await record(tx, now_s, actor, event_kinds.JOB_CANCELLED, job_id, **body)
    failpoint("fleet.cancel.written")
    return await read_job(tx, job_id)


async def release(tx: Transaction, job_id: str, reason: str, now_s: float) -> None:
    """End the lease of a job that goes back to the queue at once, through no fault of its own."""
    job = await require_job(tx, job_id)
    if job.status in HELD:
        decision = RetryDecision(event=JobEvent.RETRY, cause=Cause.PREEMPTED, not_before_s=now_s, reason=reason)
        await _apply_decision(tx, job_id, job, decision, now_s, "hub")


async def requeue(tx: Transaction, job_id: str, actor: str, now_s: float) -> None:
    job = await require_job(tx, job_id)
    refused = await tx.changed("DELETE FROM job_refusal WHERE seq = :seq", {"seq": job.seq})
    if job.status is JobStatus.PENDING and not refused:
        raise not_refused(job_id)
    await _advance_status(tx, job, JobEvent.REQUEUE, now_s, "requeued")
    await _move_to_class(tx, job, job.spec.needs)
    await tx.execute("DELETE FROM ripening WHERE seq = :seq", {"seq": job.seq})
    starts_at_s = job.spec.starts_at_s((await read_job(tx, job_id)).created_at_s)
    await tx.execute(
        "UPDATE job SET charged = 0, lost = 0, infra = 0, excused = 0, not_before = :start, artifact = '',"
        " archived = false, superseded = false WHERE seq = :seq",
        {"start": starts_at_s, "seq": job.seq},
    )
    await enqueue(tx, [job.seq], now_s)
    await recount_dependents(tx, job_id, now_s)
    await record(tx, now_s, actor, event_kinds.JOB_REQUEUED, job_id)


async def archive(tx: Transaction, job_id: str, actor: str, now_s: float) -> None:
    job = await require_job(tx, job_id)
    if job.status not in TERMINAL:
        raise not_ended(job_id, job.status)
    if await tx.changed("UPDATE job SET archived = true WHERE seq = :seq AND NOT archived", {"seq": job.seq}):
        await record(tx, now_s, actor, event_kinds.JOB_ARCHIVED, job_id)


async def _apply_decision(
    tx: Transaction, job_id: str, job: HeldJob, decision: RetryDecision, now_s: float, actor: str
) -> None:
    """Apply a decision to the job and to the attempt that ends with it."""
    status = await _advance_status(tx, job, decision.event, now_s, decision.reason)
    if decision.event is JobEvent.EXPIRE:
        await tx.execute("UPDATE lease SET expired = true WHERE job_id = :job", {"job": job_id})
        await enqueue(tx, [job.seq], now_s)
        seen = await tx.rows("SELECT seen FROM host_beat WHERE host_id = :host", {"host": job.host_id})
        body = {"epoch": job.epoch, "reason": decision.reason, "seen_at_s": seen[0][0] if seen else None}
        await record(tx, now_s, actor, event_kinds.JOB_EXPIRED, job_id, **body)
        return
    async with tx.pipeline():
        if job.leased:
            outcome = {JobEvent.FAIL: "failed", JobEvent.RETRY: "retried", JobEvent.CANCEL: "cancelled"}
            await _end_attempt(tx, job_id, job.epoch, now_s, outcome[decision.event], decision.cause)
            column = attempt_counter(decision.cause)
            await tx.execute(f"UPDATE job SET {column} = {column} + 1 WHERE seq = :seq", {"seq": job.seq})
        await tx.execute("DELETE FROM lease WHERE job_id = :job", {"job": job_id})
        await dequeue(tx, [job.seq])
        not_before = {"not_before": decision.not_before_s, "seq": job.seq}
        await tx.execute("UPDATE job SET not_before = :not_before WHERE seq = :seq", not_before)
        if status is JobStatus.PENDING:
            await enqueue(tx, [job.seq], now_s)
        kinds = {
            JobEvent.FAIL: event_kinds.JOB_FAILED,
            JobEvent.RETRY: event_kinds.JOB_RETRIED,
            JobEvent.CANCEL: event_kinds.JOB_CANCELLED,
        }
        body = {"epoch": job.epoch, "cause": decision.cause, "reason": decision.reason}
        await record(tx, now_s, actor, kinds[decision.event], job_id, **body)


async def _move_to_class(tx: Transaction, job: HeldJob, needs: Needs) -> None:
    """Let hosts with these needs claim it next, whatever its spec says."""
    (class_id,) = (await class_ids(tx, class_keys([msgspec.structs.replace(job.spec, needs=needs)]))).values()
    await tx.execute("UPDATE job SET class_id = :class WHERE seq = :seq", {"class": class_id, "seq": job.seq})


async def _advance_status(tx: Transaction, job: HeldJob, event: JobEvent, now_s: float, reason: str) -> JobStatus:
    status = advance(job.status, event)
    if status in TERMINAL:
        await tx.execute("DELETE FROM job_refusal WHERE seq = :seq", {"seq": job.seq})
    await tx.execute(
        "UPDATE job SET status = :status, changed_at = :now, reason = :reason WHERE seq = :seq",
        {"status": status, "now": now_s, "reason": reason, "seq": job.seq},
    )
    return status


async def _end_attempt(
    tx: Transaction, job_id: str, epoch: int, now_s: float, outcome: str, cause: Cause | None = None
) -> None:
    await tx.execute(
        "UPDATE attempt SET ended_at = :now, outcome = :outcome, cause = :cause WHERE job_id = :job AND epoch = :epoch",
        {"now": now_s, "outcome": outcome, "cause": cause or "", "job": job_id, "epoch": epoch},
    )


async def _update_attempt(tx: Transaction, attempt: AttemptKey, **columns: Any) -> None:
    assigned = ", ".join(f"{column} = :{column}" for column in columns)
    await tx.execute(
        f"UPDATE attempt SET {assigned} WHERE job_id = :job AND epoch = :epoch",
        {**columns, "job": attempt.job_id, "epoch": attempt.epoch},
    )


async def _previous_report(tx: Transaction, attempt: AttemptKey, columns: str) -> Any:
    """Returns what this host has reported about its attempt before; None if it never had it."""
    rows = await tx.rows(
        f"SELECT {columns} FROM attempt WHERE job_id = :job AND epoch = :epoch AND host_id = :host",
        {"job": attempt.job_id, "epoch": attempt.epoch, "host": attempt.host_id},
    )
    return rows[0] if rows else None
