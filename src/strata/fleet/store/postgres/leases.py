"""Renewals and ends of attempts in PostgreSQL: functions of an open transaction, on rows they have locked."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import msgspec

from strata.base.errors import StrataError
from strata.base.failpoint import failpoint
from strata.database.events import EventRecord as Record
from strata.database.events import record_postgres
from strata.fleet.core.job import HELD, TERMINAL, Cause, JobEvent, JobStatus, advance
from strata.fleet.core.jobspec import gang_ids
from strata.fleet.core.lease import (
    ASLEEP,
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
    not_ended,
    not_refused,
    stale_attempt,
    unknown_job,
)
from strata.fleet.core.requirement import Needs
from strata.fleet.ports import AttemptKey, JobCompletion, JobFailure, JobRow, Renewal, RenewalResult
from strata.fleet.store.postgres import tables as sql
from strata.fleet.store.rows import (
    HELD_JOB,
    JOB,
    REFUSED,
    HeldJob,
    class_keys,
    decode_held_job,
    decode_job,
    decode_refused_jobs,
    encode,
)

Connection = Any
"""A psycopg connection: only the adapters of `strata.database` know its type."""


async def _load(connection: Connection, job_id: str) -> HeldJob | None:
    # Two statements: the first may have waited for the job, and then sees it as it is, but all else as it was before.
    async with connection.pipeline():
        job = await connection.execute(f"SELECT {HELD_JOB} FROM job WHERE id = %s FOR UPDATE", (job_id,), prepare=True)
        lease = await connection.execute("SELECT 1 FROM lease WHERE job_id = %s", (job_id,), prepare=True)
    row, leased = await job.fetchone(), await lease.fetchone()
    return None if row is None else decode_held_job(row, leased=leased is not None)


async def require_job(connection: Connection, job_id: str) -> HeldJob:
    job = await _load(connection, job_id)
    if job is None:
        raise unknown_job(job_id)
    return job


async def read_job(connection: Connection, job_id: str) -> JobRow:
    row = await (await connection.execute(f"SELECT {JOB} FROM job WHERE id = %s", (job_id,))).fetchone()
    if row is None:
        raise unknown_job(job_id)
    return decode_job(row)


async def lock_members(connection: Connection, job_id: str) -> dict[str, JobRow]:
    """All members of the gang of a job, locked in one order; a job that trains alone is its only member."""
    members = gang_ids(job_id, (await read_job(connection, job_id)).spec)
    # In the order of ids, like all who lock several jobs.
    for member in sorted(members):
        await require_job(connection, member)
    return {member: await read_job(connection, member) for member in members}


async def renew(connection: Connection, host_id: str, renewal: Renewal, lease_s: float, now_s: float) -> RenewalResult:
    """The one that the fast statement did not extend, or that begins to run."""
    job_id, epoch = renewal.job_id, renewal.epoch
    job = await _load(connection, job_id)
    if job is None:
        return RenewalResult(job_id=job_id, epoch=epoch, verdict="unknown")
    stands = job.lease_status(AttemptKey(host_id, job_id, epoch))
    if stands is LeaseStatus.ENDED:
        return RenewalResult(job_id=job_id, epoch=epoch, verdict="ended", status=job.status)
    if stands not in ALIVE:
        return RenewalResult(job_id=job_id, epoch=epoch, verdict="stale", status=job.status)
    expires_at_s = now_s + lease_s
    await connection.execute(
        "UPDATE lease SET expires_at = %s, expired = false WHERE job_id = %s", (expires_at_s, job_id)
    )
    status = await _revive_if_expired(connection, job_id, job, now_s)
    if renewal.running and status is JobStatus.CLAIMED:
        status = await _advance_status(connection, job, JobEvent.START, now_s, "")
        await connection.execute(
            "UPDATE attempt SET started_at = %s WHERE job_id = %s AND epoch = %s AND started_at IS NULL",
            (now_s, job_id, epoch),
        )
        await record(connection, now_s, f"host:{host_id}", "job.started", job_id, epoch=epoch)
    failpoint("fleet.renew.written")
    return RenewalResult(job_id=job_id, epoch=epoch, verdict="held", status=status, expires_at_s=expires_at_s)


async def _revive_if_expired(connection: Connection, job_id: str, job: HeldJob, now_s: float) -> JobStatus:
    """The status of a job whose host just spoke: what had expired is revived and leaves the queue."""
    if job.status is not JobStatus.PENDING:
        return job.status
    await connection.execute("DELETE FROM ready WHERE seq = %s", (job.seq,))
    await connection.execute("UPDATE lease SET expired = false WHERE job_id = %s", (job_id,))
    await record(connection, now_s, f"host:{job.host_id}", "job.revived", job_id, epoch=job.epoch)
    return await _advance_status(connection, job, JobEvent.REVIVE, now_s, "")


async def complete(
    connection: Connection, attempt: AttemptKey, completion: JobCompletion, now_s: float
) -> JobRow | StrataError:
    job = await require_job(connection, attempt.job_id)
    if job.lease_status(attempt) not in ALIVE:
        return await _late_result(connection, attempt, completion, job)
    if await _revive_if_expired(connection, attempt.job_id, job, now_s) is not job.status:
        job = await require_job(connection, attempt.job_id)
    facts = {**completion.facts, "metrics": dict(completion.metrics)}
    async with connection.pipeline():
        await _advance_status(connection, job, JobEvent.COMPLETE, now_s, "")
        # The trainer may have been changed since this attempt began: the result is of the one that it was given.
        await connection.execute(
            "UPDATE job SET artifact = %s, trainer_digest = a.trainer_digest FROM attempt a"
            " WHERE job.seq = %s AND a.job_id = job.id AND a.epoch = %s",
            (completion.artifact, job.seq, attempt.epoch),
        )
        await _end_attempt(connection, attempt.job_id, attempt.epoch, now_s, "completed")
        await _update_attempt(connection, attempt, artifact=completion.artifact, facts=encode(facts))
        await connection.execute("DELETE FROM lease WHERE job_id = %s", (attempt.job_id,))
        await record(
            connection,
            now_s,
            f"host:{attempt.host_id}",
            "job.completed",
            attempt.job_id,
            epoch=attempt.epoch,
            artifact=completion.artifact,
        )
    await recount_dependents(connection, attempt.job_id, now_s)
    failpoint("fleet.complete.written")
    return await read_job(connection, attempt.job_id)


async def _late_result(
    connection: Connection, attempt: AttemptKey, completion: JobCompletion, job: HeldJob
) -> JobRow | StrataError:
    """The same report again gets the same answer; another one is kept beside the attempt and refused."""
    told = await _previous_report(connection, attempt, "outcome, artifact")
    if told == ("completed", completion.artifact):
        return await read_job(connection, attempt.job_id)
    if told is not None and told[0] != "completed" and completion.artifact:
        await _update_attempt(connection, attempt, outcome="orphan", artifact=completion.artifact)
    if job.lease_status(attempt) is LeaseStatus.ENDED:
        return already_ended(attempt.job_id, job.status)
    return stale_attempt(attempt.job_id, attempt.epoch, job.epoch)


async def fail(
    connection: Connection,
    attempt: AttemptKey,
    failure: JobFailure,
    now_s: float,
    chance: float,
    eligible: Collection[str],
) -> JobRow:
    job = await require_job(connection, attempt.job_id)
    stands = job.lease_status(attempt)
    if stands not in ALIVE:
        if await _previous_report(connection, attempt, "cause, error") == (failure.cause, failure.error):
            return await read_job(connection, attempt.job_id)
        ended = stands is LeaseStatus.ENDED
        raise (
            already_ended(attempt.job_id, job.status)
            if ended
            else stale_attempt(attempt.job_id, attempt.epoch, job.epoch)
        )
    await _revive_if_expired(connection, attempt.job_id, job, now_s)
    job = await require_job(connection, attempt.job_id)
    if failure.cause is Cause.SETUP_ERROR:
        insert = "INSERT INTO job_refusal VALUES (%s, %s) ON CONFLICT DO NOTHING"
        await connection.execute(insert, (attempt.host_id, job.seq))
    cursor = await connection.execute("SELECT host_id FROM job_refusal WHERE seq = %s", (job.seq,))
    decision = after_failure(
        failure.cause,
        job.tally,
        job.spec.budget,
        now_s=now_s,
        chance=chance,
        hosts_left=len(set(eligible) - {host for (host,) in await cursor.fetchall()}),
    )
    decision = with_sleep(decision, failure.error)
    await _update_attempt(connection, attempt, error=failure.error, facts=encode(dict(failure.facts)))
    if failure.memory is not None:
        decision = with_more_memory(decision, failure.memory.had, len(eligible))
        await _move_to_class(connection, job, failure.memory.needs)
    await _apply_decision(connection, attempt.job_id, job, decision, now_s, f"host:{attempt.host_id}")
    failpoint("fleet.fail.written")
    return await read_job(connection, attempt.job_id)


async def fail_refused(connection: Connection, eligible: Mapping[str, Collection[str]], now_s: float) -> list[JobRow]:
    # In the order of ids, like all who lock several jobs; what was refused is read after that.
    await connection.execute("SELECT 1 FROM job WHERE id = ANY(%s) ORDER BY id FOR UPDATE", (list(eligible),))
    refused = decode_refused_jobs(await (await connection.execute(REFUSED)).fetchall())
    failed = [each.job_id for each in refused if each.job_id in eligible and each.is_unservable(eligible[each.job_id])]
    for job_id in failed:
        await _apply_decision(
            connection, job_id, await require_job(connection, job_id), after_setup_error(0, now_s), now_s, "hub"
        )
    return [await read_job(connection, job_id) for job_id in failed]


async def record_checkpoint(connection: Connection, attempt: AttemptKey, artifact: str, now_s: float) -> None:
    job = await require_job(connection, attempt.job_id)
    if job.lease_status(attempt) not in ALIVE:
        raise stale_attempt(attempt.job_id, attempt.epoch, job.epoch)
    await connection.execute("UPDATE job SET checkpoint = %s WHERE seq = %s", (artifact, job.seq))
    await _update_attempt(connection, attempt, checkpoint=artifact)
    actor = f"host:{attempt.host_id}"
    await record(connection, now_s, actor, "job.checkpointed", attempt.job_id, epoch=attempt.epoch, artifact=artifact)
    failpoint("fleet.checkpoint.written")


async def expire(connection: Connection, job_id: str, now_s: float) -> JobRow | None:
    """None when somebody else is at this job, or the lease was renewed since it was found: not due, or not now."""
    async with connection.pipeline():
        found = await connection.execute(f"SELECT {HELD_JOB} FROM job WHERE id = %s FOR UPDATE SKIP LOCKED", (job_id,))
        lease = await connection.execute(
            "SELECT 1 FROM lease WHERE job_id = %s AND NOT expired AND expires_at <= %s FOR UPDATE", (job_id, now_s)
        )
    row, due = await found.fetchone(), await lease.fetchone()
    if row is None or due is None:
        return None
    job = decode_held_job(row, leased=True)
    await _apply_decision(connection, job_id, job, after_expiry(job.tally, job.spec.budget, now_s=now_s), now_s, "hub")
    failpoint("fleet.expire.written")
    return await read_job(connection, job_id)


async def cancel(connection: Connection, job_id: str, reason: str, actor: str, now_s: float) -> JobRow:
    job = await require_job(connection, job_id)
    if job.status is not JobStatus.CANCELLED:
        decision = RetryDecision(event=JobEvent.CANCEL, cause=Cause.CANCELLED, not_before_s=now_s, reason=reason)
        await _apply_decision(connection, job_id, job, decision, now_s, actor)
    elif (await read_job(connection, job_id)).reason.startswith(ASLEEP) and not reason.startswith(ASLEEP):
        update = "UPDATE job SET changed_at = %s, reason = %s WHERE seq = %s"
        await connection.execute(update, (now_s, reason, job.seq))
        body = {"epoch": job.epoch, "cause": Cause.CANCELLED, "reason": reason}
        await record(connection, now_s, actor, "job.cancelled", job_id, **body)
    failpoint("fleet.cancel.written")
    return await read_job(connection, job_id)


async def release(connection: Connection, job_id: str, reason: str, now_s: float) -> None:
    """End the lease of a job that goes back to the queue at once, through no fault of its own."""
    job = await require_job(connection, job_id)
    if job.status in HELD:
        decision = RetryDecision(event=JobEvent.RETRY, cause=Cause.PREEMPTED, not_before_s=now_s, reason=reason)
        await _apply_decision(connection, job_id, job, decision, now_s, "hub")


async def requeue(connection: Connection, job_id: str, actor: str, now_s: float) -> JobRow:
    job = await require_job(connection, job_id)
    refused = await connection.execute("DELETE FROM job_refusal WHERE seq = %s", (job.seq,))
    if job.status is JobStatus.PENDING and not refused.rowcount:
        raise not_refused(job_id)
    await _advance_status(connection, job, JobEvent.REQUEUE, now_s, "requeued")
    await _move_to_class(connection, job, job.spec.needs)
    await connection.execute("DELETE FROM ripening WHERE seq = %s", (job.seq,))
    starts_at_s = job.spec.starts_at_s((await read_job(connection, job_id)).created_at_s)
    await connection.execute(
        "UPDATE job SET charged = 0, lost = 0, infra = 0, excused = 0, not_before = %s, artifact = '',"
        " archived = false, superseded = false WHERE seq = %s",
        (starts_at_s, job.seq),
    )
    await enqueue(connection, [job.seq], now_s)
    await recount_dependents(connection, job_id, now_s)
    await record(connection, now_s, actor, "job.requeued", job_id)
    return await read_job(connection, job_id)


async def archive(connection: Connection, job_id: str, actor: str, now_s: float) -> JobRow:
    job = await require_job(connection, job_id)
    if job.status not in TERMINAL:
        raise not_ended(job_id, job.status)
    changed = await connection.execute("UPDATE job SET archived = true WHERE seq = %s AND NOT archived", (job.seq,))
    if changed.rowcount:
        await record(connection, now_s, actor, "job.archived", job_id)
    return await read_job(connection, job_id)


async def _apply_decision(
    connection: Connection, job_id: str, job: HeldJob, decision: RetryDecision, now_s: float, actor: str
) -> None:
    """Let a ruling happen to the job and to the attempt that ends with it."""
    status = await _advance_status(connection, job, decision.event, now_s, decision.reason)
    if decision.event is JobEvent.EXPIRE:
        await connection.execute("UPDATE lease SET expired = true WHERE job_id = %s", (job_id,))
        await enqueue(connection, [job.seq], now_s)
        cursor = await connection.execute("SELECT seen FROM host_beat WHERE host_id = %s", (job.host_id,))
        seen = await cursor.fetchone()
        body = {"epoch": job.epoch, "reason": decision.reason, "seen_at_s": None if seen is None else seen[0]}
        await record(connection, now_s, actor, "job.expired", job_id, **body)
        return
    if job.leased:
        outcome = {JobEvent.FAIL: "failed", JobEvent.RETRY: "retried", JobEvent.CANCEL: "cancelled"}[decision.event]
        await _end_attempt(connection, job_id, job.epoch, now_s, outcome, decision.cause)
        column = attempt_counter(decision.cause)
        await connection.execute(f"UPDATE job SET {column} = {column} + 1 WHERE seq = %s", (job.seq,))
    await connection.execute("DELETE FROM lease WHERE job_id = %s", (job_id,))
    await connection.execute("DELETE FROM ready WHERE seq = %s", (job.seq,))
    await connection.execute("DELETE FROM ripening WHERE seq = %s", (job.seq,))
    await connection.execute("UPDATE job SET not_before = %s WHERE seq = %s", (decision.not_before_s, job.seq))
    if status is JobStatus.PENDING:
        await enqueue(connection, [job.seq], now_s)
    kinds = {JobEvent.FAIL: "job.failed", JobEvent.RETRY: "job.retried", JobEvent.CANCEL: "job.cancelled"}
    ended = {"epoch": job.epoch, "cause": decision.cause, "reason": decision.reason}
    await record(connection, now_s, actor, kinds[decision.event], job_id, **ended)


async def _move_to_class(connection: Connection, job: HeldJob, needs: Needs) -> None:
    """Let hosts with these needs claim it next, whatever its spec says."""
    (class_id,) = (await class_ids(connection, class_keys([msgspec.structs.replace(job.spec, needs=needs)]))).values()
    await connection.execute("UPDATE job SET class_id = %s WHERE seq = %s", (class_id, job.seq))


async def class_ids(connection: Connection, keys: Mapping[bytes, str]) -> dict[bytes, int]:
    """The ids of these classes by how they are written; new ones are added."""
    by_key = {key: written for written, key in keys.items()}
    known = await _existing_class_ids(connection, list(by_key))
    new = sorted(by_key.keys() - known.keys())
    if new:
        await connection.cursor().executemany(
            "INSERT INTO req_class (key, spec) VALUES (%s, %s) ON CONFLICT (key) DO NOTHING",
            [(key, by_key[key]) for key in new],
        )
        known |= await _existing_class_ids(connection, new)
    return {written: known[key] for written, key in keys.items()}


async def _existing_class_ids(connection: Connection, keys: list[str]) -> dict[str, int]:
    cursor = await connection.execute("SELECT key, id FROM req_class WHERE key = ANY(%s)", (keys,))
    return dict(await cursor.fetchall())


async def enqueue(connection: Connection, seqs: Sequence[int], now_s: float) -> None:
    """Pending jobs join the queue, or wait: for the end of their back-off, or for the jobs they come after."""
    values = {"seqs": list(seqs), "now": now_s}
    await connection.execute(
        "INSERT INTO ripening SELECT seq, not_before FROM job"
        " WHERE seq = ANY(%(seqs)s) AND waits_for = 0 AND not_before > %(now)s"
        " ON CONFLICT (seq) DO UPDATE SET not_before = excluded.not_before",
        values,
    )
    await connection.execute(
        "INSERT INTO ready SELECT seq, class_id, priority, %(now)s, owner FROM job"
        " WHERE seq = ANY(%(seqs)s) AND waits_for = 0 AND not_before <= %(now)s"
        " ON CONFLICT (seq) DO UPDATE SET class_id = excluded.class_id, priority = excluded.priority,"
        " owner = excluded.owner",
        values,
    )


async def recount_dependents(connection: Connection, job_id: str, now_s: float) -> None:
    """This job was completed, or is to run again: jobs after it join the queue, or leave it and wait."""
    cursor = await connection.execute(
        "SELECT id FROM job WHERE id IN (SELECT job_id FROM job_after WHERE needs = %s) ORDER BY id FOR UPDATE",
        (job_id,),
    )
    waiting: list[int] = []
    for (dependent,) in await cursor.fetchall():
        # Counted by a new statement after the lock: two prerequisites that end at once see each other here.
        row = await (
            await connection.execute(
                f"UPDATE job SET waits_for = {sql.WAITS_FOR} WHERE id = %s RETURNING seq, status, waits_for",
                (dependent,),
            )
        ).fetchone()
        seq, status, waits_for = row
        if waits_for:
            waiting.append(seq)
        elif status == JobStatus.PENDING:
            await enqueue(connection, [seq], now_s)
    if waiting:
        await connection.execute("DELETE FROM ready WHERE seq = ANY(%s)", (waiting,))
        await connection.execute("DELETE FROM ripening WHERE seq = ANY(%s)", (waiting,))


async def record(connection: Connection, at_s: float, actor: str, kind: str, subject: str, **body: Any) -> None:
    await record_postgres(connection, [Record(at_s, actor, kind, subject, body)])


async def _advance_status(
    connection: Connection, job: HeldJob, event: JobEvent, now_s: float, reason: str
) -> JobStatus:
    status = advance(job.status, event)
    if status in TERMINAL:
        await connection.execute("DELETE FROM job_refusal WHERE seq = %s", (job.seq,))
    await connection.execute(
        "UPDATE job SET status = %s, changed_at = %s, reason = %s WHERE seq = %s", (status, now_s, reason, job.seq)
    )
    return status


async def _end_attempt(
    connection: Connection, job_id: str, epoch: int, now_s: float, outcome: str, cause: Cause | None = None
) -> None:
    await connection.execute(
        "UPDATE attempt SET ended_at = %s, outcome = %s, cause = %s WHERE job_id = %s AND epoch = %s",
        (now_s, outcome, cause or "", job_id, epoch),
    )


async def _update_attempt(connection: Connection, attempt: AttemptKey, **columns: Any) -> None:
    assigned = ", ".join(f"{column} = %s" for column in columns)
    await connection.execute(
        f"UPDATE attempt SET {assigned} WHERE job_id = %s AND epoch = %s",
        (*columns.values(), attempt.job_id, attempt.epoch),
    )


async def _previous_report(connection: Connection, attempt: AttemptKey, columns: str) -> Any:
    """What this host has said about its attempt before; None if it never had it."""
    cursor = await connection.execute(
        f"SELECT {columns} FROM attempt WHERE job_id = %s AND epoch = %s AND host_id = %s",
        (attempt.job_id, attempt.epoch, attempt.host_id),
    )
    return await cursor.fetchone()
