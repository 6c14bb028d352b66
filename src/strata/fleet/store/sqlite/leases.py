"""Renewals and ends of attempts in SQLite: functions of the open transaction, called in the one writer thread.

A function that rejects a request has changed nothing yet, or returns the error instead of raising it: it may share its
transaction with other requests.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Collection, Mapping, Sequence
from typing import Any, Final

import msgspec

from strata.base.errors import StrataError
from strata.base.failpoint import failpoint
from strata.database.events import EventRecord as Record
from strata.database.events import record_sqlite
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

EXTENDED: Final = """
SELECT l.job_id, l.epoch, j.status, l.preempt
FROM (SELECT json_extract(value, '$[0]') AS job_id, json_extract(value, '$[1]') AS epoch FROM json_each(?)) AS w
CROSS JOIN lease AS l ON l.job_id = w.job_id AND l.epoch = w.epoch JOIN job AS j ON j.id = l.job_id
WHERE l.host_id = ? AND NOT l.expired
"""
"""Leases that are held and not expired."""


def _load(db: sqlite3.Connection, job_id: str) -> HeldJob | None:
    row = db.execute(
        f"SELECT {HELD_JOB}, EXISTS (SELECT 1 FROM lease WHERE job_id = job.id) FROM job WHERE id = ?", (job_id,)
    ).fetchone()
    return None if row is None else decode_held_job(row[:-1], leased=bool(row[-1]))


def _require_job(db: sqlite3.Connection, job_id: str) -> HeldJob:
    job = _load(db, job_id)
    if job is None:
        raise unknown_job(job_id)
    return job


def read_job(db: sqlite3.Connection, job_id: str) -> JobRow:
    row = db.execute(f"SELECT {JOB} FROM job WHERE id = ?", (job_id,)).fetchone()
    if row is None:
        raise unknown_job(job_id)
    return decode_job(row)


def read_members(db: sqlite3.Connection, job_id: str) -> dict[str, JobRow]:
    """All members of the gang of a job; a job that trains alone is its only member."""
    return {member: read_job(db, member) for member in gang_ids(job_id, read_job(db, job_id).spec)}


def renew(
    db: sqlite3.Connection, host_id: str, renewals: Sequence[Renewal], lease_s: float, now_s: float
) -> list[RenewalResult]:
    """Most renewals only extend a lease that is held: those are found and extended in one statement."""
    asked = encode([(each.job_id, each.epoch) for each in renewals])
    held = {(job_id, epoch): rest for job_id, epoch, *rest in db.execute(EXTENDED, (asked, host_id))}
    until_s = now_s + lease_s
    results: list[RenewalResult] = []
    extended: list[tuple[float, str, int, str]] = []
    for each in renewals:
        job_id, epoch = each.job_id, each.epoch
        status, preempt = held.get((job_id, epoch), (None, ""))
        if status is None or (each.running and status == JobStatus.CLAIMED):
            results.append(_renew_one(db, host_id, each, lease_s, now_s))
        else:
            extended.append((until_s, job_id, epoch, host_id))
            status = JobStatus(status)
            results.append(
                RenewalResult(
                    job_id=job_id, epoch=epoch, verdict="held", status=status, expires_at_s=until_s, preempt=preempt
                )
            )
    update = "UPDATE lease SET expires_at = ? WHERE job_id = ? AND epoch = ? AND host_id = ? AND NOT expired"
    db.executemany(update, extended)
    failpoint("fleet.renew.written")
    return results


def _renew_one(db: sqlite3.Connection, host_id: str, renewal: Renewal, lease_s: float, now_s: float) -> RenewalResult:
    job_id, epoch = renewal.job_id, renewal.epoch
    job = _load(db, job_id)
    if job is None:
        return RenewalResult(job_id=job_id, epoch=epoch, verdict="unknown")
    stands = job.lease_status(AttemptKey(host_id, job_id, epoch))
    if stands is LeaseStatus.ENDED:
        return RenewalResult(job_id=job_id, epoch=epoch, verdict="ended", status=job.status)
    if stands not in ALIVE:
        return RenewalResult(job_id=job_id, epoch=epoch, verdict="stale", status=job.status)
    expires_at_s = now_s + lease_s
    db.execute("UPDATE lease SET expires_at = ?, expired = 0 WHERE job_id = ?", (expires_at_s, job_id))
    status = _revive_if_expired(db, job_id, job, now_s)
    if renewal.running and status is JobStatus.CLAIMED:
        status = _advance_status(db, job, JobEvent.START, now_s, "")
        update = "UPDATE attempt SET started_at = ? WHERE job_id = ? AND epoch = ? AND started_at IS NULL"
        db.execute(update, (now_s, job_id, epoch))
        record(db, now_s, f"host:{host_id}", "job.started", job_id, epoch=epoch)
    return RenewalResult(job_id=job_id, epoch=epoch, verdict="held", status=status, expires_at_s=expires_at_s)


def _revive_if_expired(db: sqlite3.Connection, job_id: str, job: HeldJob, now_s: float) -> JobStatus:
    """The status of a job whose host sent a request: an expired lease is revived, and the job leaves the queue."""
    if job.status is not JobStatus.PENDING:
        return job.status
    db.execute("DELETE FROM ready WHERE seq = ?", (job.seq,))
    db.execute("UPDATE lease SET expired = 0 WHERE job_id = ?", (job_id,))
    record(db, now_s, f"host:{job.host_id}", "job.revived", job_id, epoch=job.epoch)
    return _advance_status(db, job, JobEvent.REVIVE, now_s, "")


def complete(
    db: sqlite3.Connection, attempt: AttemptKey, completion: JobCompletion, now_s: float
) -> JobRow | StrataError:
    job = _require_job(db, attempt.job_id)
    if job.lease_status(attempt) not in ALIVE:
        return _late_result(db, attempt, completion, job)
    _revive_if_expired(db, attempt.job_id, job, now_s)
    _advance_status(db, _require_job(db, attempt.job_id), JobEvent.COMPLETE, now_s, "")
    # The trainer may have been changed since this attempt began: the result is of the one that it was given.
    db.execute(
        "UPDATE job SET artifact = ?, trainer_digest ="
        " (SELECT trainer_digest FROM attempt WHERE job_id = job.id AND epoch = ?) WHERE seq = ?",
        (completion.artifact, attempt.epoch, job.seq),
    )
    _end_attempt(db, attempt.job_id, attempt.epoch, now_s, "completed")
    facts = {**completion.facts, "metrics": dict(completion.metrics)}
    _update_attempt(db, attempt, artifact=completion.artifact, facts=encode(facts))
    db.execute("DELETE FROM lease WHERE job_id = ?", (attempt.job_id,))
    recount_dependents(db, attempt.job_id, now_s)
    record(
        db,
        now_s,
        f"host:{attempt.host_id}",
        "job.completed",
        attempt.job_id,
        epoch=attempt.epoch,
        artifact=completion.artifact,
    )
    failpoint("fleet.complete.written")
    return read_job(db, attempt.job_id)


def _late_result(
    db: sqlite3.Connection, attempt: AttemptKey, completion: JobCompletion, job: HeldJob
) -> JobRow | StrataError:
    """The same report again gets the same answer; another one is kept beside the attempt and refused."""
    told = _previous_report(db, attempt, "outcome, artifact")
    if told == ("completed", completion.artifact):
        return read_job(db, attempt.job_id)
    if told is not None and told[0] != "completed" and completion.artifact:
        _update_attempt(db, attempt, outcome="orphan", artifact=completion.artifact)
    if job.lease_status(attempt) is LeaseStatus.ENDED:
        return already_ended(attempt.job_id, job.status)
    return stale_attempt(attempt.job_id, attempt.epoch, job.epoch)


def fail(
    db: sqlite3.Connection,
    attempt: AttemptKey,
    failure: JobFailure,
    now_s: float,
    chance: float,
    eligible: Collection[str],
) -> JobRow:
    job = _require_job(db, attempt.job_id)
    stands = job.lease_status(attempt)
    if stands not in ALIVE:
        if _previous_report(db, attempt, "cause, error") == (failure.cause, failure.error):
            return read_job(db, attempt.job_id)
        ended = stands is LeaseStatus.ENDED
        raise (
            already_ended(attempt.job_id, job.status)
            if ended
            else stale_attempt(attempt.job_id, attempt.epoch, job.epoch)
        )
    _revive_if_expired(db, attempt.job_id, job, now_s)
    job = _require_job(db, attempt.job_id)
    if failure.cause is Cause.SETUP_ERROR:
        db.execute("INSERT OR IGNORE INTO job_refusal VALUES (?, ?)", (attempt.host_id, job.seq))
    refused = {host for (host,) in db.execute("SELECT host_id FROM job_refusal WHERE seq = ?", (job.seq,))}
    decision = after_failure(
        failure.cause,
        job.tally,
        job.spec.budget,
        now_s=now_s,
        chance=chance,
        hosts_left=len(set(eligible) - refused),
    )
    decision = with_sleep(decision, failure.error)
    _update_attempt(db, attempt, error=failure.error, facts=encode(dict(failure.facts)))
    if failure.memory is not None:
        decision = with_more_memory(decision, failure.memory.had, len(eligible))
        _move_to_class(db, job, failure.memory.needs)
    _apply_decision(db, attempt.job_id, job, decision, now_s, f"host:{attempt.host_id}")
    failpoint("fleet.fail.written")
    return read_job(db, attempt.job_id)


def fail_refused(db: sqlite3.Connection, eligible: Mapping[str, Collection[str]], now_s: float) -> list[JobRow]:
    refused = decode_refused_jobs(db.execute(REFUSED))
    failed = [each.job_id for each in refused if each.job_id in eligible and each.is_unservable(eligible[each.job_id])]
    for job_id in failed:
        _apply_decision(db, job_id, _require_job(db, job_id), after_setup_error(0, now_s), now_s, "hub")
    return [read_job(db, job_id) for job_id in failed]


def record_checkpoint(db: sqlite3.Connection, attempt: AttemptKey, artifact: str, now_s: float) -> None:
    job = _require_job(db, attempt.job_id)
    if job.lease_status(attempt) not in ALIVE:
        raise stale_attempt(attempt.job_id, attempt.epoch, job.epoch)
    db.execute("UPDATE job SET checkpoint = ? WHERE seq = ?", (artifact, job.seq))
    _update_attempt(db, attempt, checkpoint=artifact)
    record(
        db, now_s, f"host:{attempt.host_id}", "job.checkpointed", attempt.job_id, epoch=attempt.epoch, artifact=artifact
    )
    failpoint("fleet.checkpoint.written")


def expire(db: sqlite3.Connection, job_id: str, now_s: float) -> JobRow:
    job = _require_job(db, job_id)
    _apply_decision(db, job_id, job, after_expiry(job.tally, job.spec.budget, now_s=now_s), now_s, "hub")
    failpoint("fleet.expire.written")
    return read_job(db, job_id)


def cancel(db: sqlite3.Connection, job_id: str, reason: str, actor: str, now_s: float) -> JobRow:
    job = _require_job(db, job_id)
    if job.status is JobStatus.CANCELLED:
        if read_job(db, job_id).reason.startswith(ASLEEP) and not reason.startswith(ASLEEP):
            db.execute("UPDATE job SET changed_at = ?, reason = ? WHERE seq = ?", (now_s, reason, job.seq))
            cause = Cause.CANCELLED
            record(db, now_s, actor, "job.cancelled", job_id, epoch=job.epoch, cause=cause, reason=reason)
        return read_job(db, job_id)
    decision = RetryDecision(event=JobEvent.CANCEL, cause=Cause.CANCELLED, not_before_s=now_s, reason=reason)
    _apply_decision(db, job_id, job, decision, now_s, actor)
    failpoint("fleet.cancel.written")
    return read_job(db, job_id)


def release(db: sqlite3.Connection, job_id: str, reason: str, now_s: float) -> None:
    """End the lease of a job that goes back to the queue at once, through no fault of its own."""
    job = _require_job(db, job_id)
    if job.status in HELD:
        decision = RetryDecision(event=JobEvent.RETRY, cause=Cause.PREEMPTED, not_before_s=now_s, reason=reason)
        _apply_decision(db, job_id, job, decision, now_s, "hub")


def requeue(db: sqlite3.Connection, job_id: str, actor: str, now_s: float) -> JobRow:
    job = _require_job(db, job_id)
    starts_at_s = job.spec.starts_at_s(read_job(db, job_id).created_at_s)
    refused = db.execute("SELECT 1 FROM job_refusal WHERE seq = ?", (job.seq,)).fetchone()
    if job.status is JobStatus.PENDING and refused is None:
        raise not_refused(job_id)
    _advance_status(db, job, JobEvent.REQUEUE, now_s, "requeued")
    _move_to_class(db, job, job.spec.needs)
    db.execute("DELETE FROM job_refusal WHERE seq = ?", (job.seq,))
    db.execute("DELETE FROM ripening WHERE seq = ?", (job.seq,))
    db.execute(
        "UPDATE job SET charged = 0, lost = 0, infra = 0, excused = 0, not_before = ?, artifact = '', archived = 0,"
        " superseded = 0 WHERE seq = ?",
        (starts_at_s, job.seq),
    )
    enqueue(db, job.seq, now_s)
    recount_dependents(db, job_id, now_s)
    record(db, now_s, actor, "job.requeued", job_id)
    return read_job(db, job_id)


def archive(db: sqlite3.Connection, job_id: str, actor: str, now_s: float) -> JobRow:
    row = read_job(db, job_id)
    if row.status not in TERMINAL:
        raise not_ended(job_id, row.status)
    if not row.archived:
        db.execute("UPDATE job SET archived = 1 WHERE id = ?", (job_id,))
        record(db, now_s, actor, "job.archived", job_id)
    return read_job(db, job_id)


def _apply_decision(
    db: sqlite3.Connection, job_id: str, job: HeldJob, decision: RetryDecision, now_s: float, actor: str
) -> None:
    """Let a ruling happen to the job and to the attempt that ends with it."""
    if decision.event is JobEvent.EXPIRE:
        _advance_status(db, job, JobEvent.EXPIRE, now_s, decision.reason)
        db.execute("UPDATE lease SET expired = 1 WHERE job_id = ?", (job_id,))
        enqueue(db, job.seq, now_s)
        seen = db.execute("SELECT seen FROM host_beat WHERE host_id = ?", (job.host_id,)).fetchone()
        seen_at_s = None if seen is None else seen[0]
        record(db, now_s, actor, "job.expired", job_id, epoch=job.epoch, reason=decision.reason, seen_at_s=seen_at_s)
        return
    status = _advance_status(db, job, decision.event, now_s, decision.reason)
    if job.leased:
        outcome = {JobEvent.FAIL: "failed", JobEvent.RETRY: "retried", JobEvent.CANCEL: "cancelled"}[decision.event]
        _end_attempt(db, job_id, job.epoch, now_s, outcome, decision.cause)
        _count_attempt(db, job_id, decision.cause)
    db.execute("DELETE FROM lease WHERE job_id = ?", (job_id,))
    db.execute("DELETE FROM ready WHERE seq = ?", (job.seq,))
    db.execute("DELETE FROM ripening WHERE seq = ?", (job.seq,))
    db.execute("UPDATE job SET not_before = ? WHERE seq = ?", (decision.not_before_s, job.seq))
    if status is JobStatus.PENDING:
        enqueue(db, job.seq, now_s)
    kinds = {JobEvent.FAIL: "job.failed", JobEvent.RETRY: "job.retried", JobEvent.CANCEL: "job.cancelled"}
    record(
        db, now_s, actor, kinds[decision.event], job_id, epoch=job.epoch, cause=decision.cause, reason=decision.reason
    )


def _move_to_class(db: sqlite3.Connection, job: HeldJob, needs: Needs) -> None:
    """Let hosts with these needs claim it next, whatever its spec says."""
    (class_id,) = class_ids(db, class_keys([msgspec.structs.replace(job.spec, needs=needs)])).values()
    db.execute("UPDATE job SET class_id = ? WHERE seq = ?", (class_id, job.seq))


def class_ids(db: sqlite3.Connection, keys: Mapping[bytes, str]) -> dict[bytes, int]:
    """The ids of these classes by how they are written; new ones are added."""
    found: dict[bytes, int] = {}
    for written, key in keys.items():
        row = db.execute("SELECT id FROM req_class WHERE key = ?", (key,)).fetchone()
        if row is None:
            row = db.execute("INSERT INTO req_class (key, spec) VALUES (?, ?) RETURNING id", (key, written)).fetchone()
        found[written] = row[0]
    return found


def enqueue(db: sqlite3.Connection, seq: int, now_s: float) -> None:
    """A pending job joins the queue, or waits: for the end of its back-off, or for the jobs it comes after."""
    row = db.execute("SELECT not_before, waits_for FROM job WHERE seq = ?", (seq,)).fetchone()
    not_before_s, waits_for = row
    if waits_for:
        return
    if not_before_s > now_s:
        db.execute("INSERT OR REPLACE INTO ripening VALUES (?, ?)", (seq, not_before_s))
        return
    db.execute(
        "INSERT OR REPLACE INTO ready SELECT seq, class_id, priority, ?, owner FROM job WHERE seq = ?", (now_s, seq)
    )


def recount_dependents(db: sqlite3.Connection, job_id: str, now_s: float) -> None:
    """This job was completed, or is to run again: jobs after it join the queue, or leave it and wait."""
    dependents = db.execute(
        "UPDATE job SET waits_for = (SELECT count(*) FROM job_after a LEFT JOIN job n ON n.id = a.needs"
        "  WHERE a.job_id = job.id AND n.status IS NOT 'completed')"
        " WHERE id IN (SELECT job_id FROM job_after WHERE needs = ?) RETURNING seq, status, waits_for",
        (job_id,),
    ).fetchall()
    for seq, status, waits_for in dependents:
        if waits_for:
            db.execute("DELETE FROM ready WHERE seq = ?", (seq,))
            db.execute("DELETE FROM ripening WHERE seq = ?", (seq,))
        elif status == JobStatus.PENDING:
            enqueue(db, seq, now_s)


def record(db: sqlite3.Connection, at_s: float, actor: str, kind: str, subject: str, **body: Any) -> None:
    record_sqlite(db, [Record(at_s, actor, kind, subject, body)])


def _advance_status(db: sqlite3.Connection, job: HeldJob, event: JobEvent, now_s: float, reason: str) -> JobStatus:
    status = advance(job.status, event)
    if status in TERMINAL:
        db.execute("DELETE FROM job_refusal WHERE seq = ?", (job.seq,))
    db.execute("UPDATE job SET status = ?, changed_at = ?, reason = ? WHERE seq = ?", (status, now_s, reason, job.seq))
    return status


def _end_attempt(
    db: sqlite3.Connection, job_id: str, epoch: int, now_s: float, outcome: str, cause: Cause | None = None
) -> None:
    db.execute(
        "UPDATE attempt SET ended_at = ?, outcome = ?, cause = ? WHERE job_id = ? AND epoch = ?",
        (now_s, outcome, cause or "", job_id, epoch),
    )


def _update_attempt(db: sqlite3.Connection, attempt: AttemptKey, **columns: Any) -> None:
    assigned = ", ".join(f"{column} = ?" for column in columns)
    db.execute(
        f"UPDATE attempt SET {assigned} WHERE job_id = ? AND epoch = ?",
        (*columns.values(), attempt.job_id, attempt.epoch),
    )


def _previous_report(db: sqlite3.Connection, attempt: AttemptKey, columns: str) -> Any:
    """What this host has said about its attempt before; None if it never had it."""
    return db.execute(
        f"SELECT {columns} FROM attempt WHERE job_id = ? AND epoch = ? AND host_id = ?",
        (attempt.job_id, attempt.epoch, attempt.host_id),
    ).fetchone()


def _count_attempt(db: sqlite3.Connection, job_id: str, cause: Cause) -> None:
    column = attempt_counter(cause)
    db.execute(f"UPDATE job SET {column} = {column} + 1 WHERE id = ?", (job_id,))
