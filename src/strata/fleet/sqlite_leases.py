"""Claims, renewals and ends of attempts in SQLite: functions of the open transaction, called in the one thread.

A function that refuses has changed nothing yet, or returns its refusal instead of raising it: it may share its
transaction with others.
"""

from __future__ import annotations

import math
import sqlite3
from typing import Any, Final

from strata.base.errors import StrataError
from strata.database.events import Event as Record
from strata.database.events import record_sqlite
from strata.fleet.core.fit import fitting
from strata.fleet.core.hold import ALIVE, Standing, already_ended, stale, unknown_job
from strata.fleet.core.job import Cause, Event, Status, advance, target
from strata.fleet.core.lease import Ruling, after_expiry, after_failure
from strata.fleet.ports import Claim, Completion, Failure, Hold, JobRow, Lease, Renewal, Renewed
from strata.fleet.rows import HELD, Held, counted, encode, held_of, lease_of
from strata.fleet.sqlite_tables import read_job

_CLAIMED: Final = target(Event.CLAIM)
GIVEN: Final = """
SELECT a.job_id, a.epoch FROM attempt a JOIN job j ON j.id = a.job_id WHERE a.host_id = ? AND a.claim_id = ?
ORDER BY j.priority DESC, j.seq
"""


def _load(db: sqlite3.Connection, job_id: str) -> Held | None:
    row = db.execute(
        f"SELECT {HELD}, EXISTS (SELECT 1 FROM lease WHERE job_id = job.id) FROM job WHERE id = ?", (job_id,)
    ).fetchone()
    return None if row is None else held_of(row[:-1], leased=bool(row[-1]))


def _need(db: sqlite3.Connection, job_id: str) -> Held:
    job = _load(db, job_id)
    if job is None:
        raise unknown_job(job_id)
    return job


def claim(db: sqlite3.Connection, wanted: Claim, lease_s: float, now_s: float) -> list[Lease]:
    given = db.execute(GIVEN, (wanted.host_id, wanted.claim_id)).fetchall()
    if given:
        return [lease for job_id, epoch in given if (lease := _lease(db, job_id, epoch)) is not None]
    state = db.execute("SELECT state FROM host WHERE id = ?", (wanted.host_id,)).fetchone()
    if state != ("active",):
        return []
    return [_take(db, seq, wanted, lease_s, now_s) for seq in _choose(db, wanted)]


def _choose(db: sqlite3.Connection, wanted: Claim) -> list[int]:
    """The best waiting jobs of these classes that fit: each class offers its first few, the best of all are taken."""
    offers: list[tuple[int, int, int]] = []
    for class_id, slots in wanted.classes.items():
        if slots <= wanted.slots:
            rows = db.execute(
                "SELECT -priority, seq FROM ready WHERE class_id = ? AND since <= ?"
                " ORDER BY priority DESC, seq LIMIT ?",
                (class_id, wanted.held_back.get(class_id, math.inf), wanted.count),
            )
            offers += [(order, seq, slots) for order, seq in rows]
    return fitting(((seq, slots) for _, seq, slots in sorted(offers)), slots=wanted.slots, count=wanted.count)


def _take(db: sqlite3.Connection, seq: int, wanted: Claim, lease_s: float, now_s: float) -> Lease:
    db.execute("DELETE FROM ready WHERE seq = ?", (seq,))
    # Nothing is looked up inside RETURNING: SQLite reads whole tables there.
    job_id, epoch, spec, checkpoint, trainer_name = db.execute(
        "UPDATE job SET status = ?, epoch = epoch + 1, changed_at = ?, host_id = ?, reason = '' WHERE seq = ?"
        " RETURNING id, epoch, spec, checkpoint, trainer",
        (_CLAIMED, now_s, wanted.host_id, seq),
    ).fetchone()
    (trainer,) = db.execute("SELECT spec FROM trainer WHERE name = ?", (trainer_name,)).fetchone() or (None,)
    expires_at_s = now_s + lease_s
    replaced = db.execute(
        "UPDATE lease SET host_id = ?, epoch = ?, expires_at = ?, expired = 0 WHERE job_id = ?",
        (wanted.host_id, epoch, expires_at_s, job_id),
    )
    if replaced.rowcount:
        # The host that let its lease run out is replaced from here on: this is the moment its attempt is over.
        _end_attempt(db, job_id, epoch - 1, now_s, "lost", Cause.HOST_LOST)
        _count(db, job_id, Cause.HOST_LOST)
    else:
        db.execute("INSERT INTO lease VALUES (?, ?, ?, ?, 0)", (job_id, wanted.host_id, epoch, expires_at_s))
    db.execute(
        "INSERT INTO attempt VALUES (?, ?, ?, ?, ?, NULL, NULL, '', '', '', '', '', x'7b7d')",
        (job_id, epoch, wanted.host_id, wanted.claim_id, now_s),
    )
    record(db, now_s, f"host:{wanted.host_id}", "job.claimed", job_id, epoch=epoch)
    return lease_of(job_id, epoch, (wanted.host_id, expires_at_s, spec, checkpoint, trainer))


def _lease(db: sqlite3.Connection, job_id: str, epoch: int) -> Lease | None:
    row = db.execute(
        "SELECT l.host_id, l.expires_at, j.spec, j.checkpoint, t.spec FROM lease l JOIN job j ON j.id = l.job_id"
        " LEFT JOIN trainer t ON t.name = j.trainer WHERE l.job_id = ? AND l.epoch = ?",
        (job_id, epoch),
    ).fetchone()
    return None if row is None else lease_of(job_id, epoch, row)


def renew(db: sqlite3.Connection, host_id: str, renewal: Renewal, lease_s: float, now_s: float) -> Renewed:
    job_id, epoch = renewal.job_id, renewal.epoch
    job = _load(db, job_id)
    if job is None:
        return Renewed(job_id=job_id, epoch=epoch, verdict="unknown")
    stands = job.standing(Hold(host_id, job_id, epoch))
    if stands is Standing.ENDED:
        return Renewed(job_id=job_id, epoch=epoch, verdict="ended", status=job.status)
    if stands not in ALIVE:
        return Renewed(job_id=job_id, epoch=epoch, verdict="stale", status=job.status)
    expires_at_s = now_s + lease_s
    db.execute("UPDATE lease SET expires_at = ?, expired = 0 WHERE job_id = ?", (expires_at_s, job_id))
    status = _alive(db, job_id, job, now_s)
    if renewal.running and status is Status.CLAIMED:
        status = _move(db, job, Event.START, now_s, "")
        update = "UPDATE attempt SET started_at = ? WHERE job_id = ? AND epoch = ? AND started_at IS NULL"
        db.execute(update, (now_s, job_id, epoch))
        record(db, now_s, f"host:{host_id}", "job.started", job_id, epoch=epoch)
    return Renewed(job_id=job_id, epoch=epoch, verdict="held", status=status, expires_at_s=expires_at_s)


def _alive(db: sqlite3.Connection, job_id: str, job: Held, now_s: float) -> Status:
    """The status of a job whose host just spoke: what had expired is revived and leaves the queue."""
    if job.status is not Status.PENDING:
        return job.status
    db.execute("DELETE FROM ready WHERE seq = ?", (job.seq,))
    db.execute("UPDATE lease SET expired = 0 WHERE job_id = ?", (job_id,))
    record(db, now_s, f"host:{job.host_id}", "job.revived", job_id, epoch=job.epoch)
    return _move(db, job, Event.REVIVE, now_s, "")


def complete(db: sqlite3.Connection, hold: Hold, completion: Completion, now_s: float) -> JobRow | StrataError:
    job = _need(db, hold.job_id)
    if job.standing(hold) not in ALIVE:
        return _late_result(db, hold, completion, job)
    _alive(db, hold.job_id, job, now_s)
    _move(db, _need(db, hold.job_id), Event.COMPLETE, now_s, "")
    db.execute("UPDATE job SET artifact = ? WHERE seq = ?", (completion.artifact, job.seq))
    _end_attempt(db, hold.job_id, hold.epoch, now_s, "completed")
    facts = {**completion.facts, "metrics": dict(completion.metrics)}
    _note(db, hold, artifact=completion.artifact, facts=encode(facts))
    db.execute("DELETE FROM lease WHERE job_id = ?", (hold.job_id,))
    release_dependents(db, hold.job_id, now_s)
    record(
        db, now_s, f"host:{hold.host_id}", "job.completed", hold.job_id, epoch=hold.epoch, artifact=completion.artifact
    )
    return read_job(db, hold.job_id)


def _late_result(db: sqlite3.Connection, hold: Hold, completion: Completion, job: Held) -> JobRow | StrataError:
    """The same report again gets the same answer; another one is kept beside the attempt and refused."""
    told = _told(db, hold, "outcome, artifact")
    if told == ("completed", completion.artifact):
        return read_job(db, hold.job_id)
    if told is not None and told[0] != "completed" and completion.artifact:
        _note(db, hold, outcome="orphan", artifact=completion.artifact)
    if job.standing(hold) is Standing.ENDED:
        return already_ended(hold.job_id, job.status)
    return stale(hold.job_id, hold.epoch, job.epoch)


def fail(db: sqlite3.Connection, hold: Hold, failure: Failure, now_s: float, chance: float) -> JobRow:
    job = _need(db, hold.job_id)
    stands = job.standing(hold)
    if stands not in ALIVE:
        if _told(db, hold, "cause, error") == (failure.cause, failure.error):
            return read_job(db, hold.job_id)
        ended = stands is Standing.ENDED
        raise already_ended(hold.job_id, job.status) if ended else stale(hold.job_id, hold.epoch, job.epoch)
    _alive(db, hold.job_id, job, now_s)
    job = _need(db, hold.job_id)
    ruling = after_failure(failure.cause, job.tally, job.spec.budget, now_s=now_s, chance=chance)
    _note(db, hold, error=failure.error, facts=encode(dict(failure.facts)))
    _rule(db, hold.job_id, job, ruling, now_s, f"host:{hold.host_id}")
    return read_job(db, hold.job_id)


def checkpointed(db: sqlite3.Connection, hold: Hold, artifact: str, now_s: float) -> None:
    job = _need(db, hold.job_id)
    if job.standing(hold) not in ALIVE:
        raise stale(hold.job_id, hold.epoch, job.epoch)
    db.execute("UPDATE job SET checkpoint = ? WHERE seq = ?", (artifact, job.seq))
    _note(db, hold, checkpoint=artifact)
    record(db, now_s, f"host:{hold.host_id}", "job.checkpointed", hold.job_id, epoch=hold.epoch, artifact=artifact)


def expire(db: sqlite3.Connection, job_id: str, now_s: float) -> JobRow:
    job = _need(db, job_id)
    _rule(db, job_id, job, after_expiry(job.tally, job.spec.budget, now_s=now_s), now_s, "hub")
    return read_job(db, job_id)


def cancel(db: sqlite3.Connection, job_id: str, reason: str, actor: str, now_s: float) -> JobRow:
    job = _need(db, job_id)
    if job.status is Status.CANCELLED:
        return read_job(db, job_id)
    ruling = Ruling(event=Event.CANCEL, cause=Cause.CANCELLED, not_before_s=now_s, reason=reason)
    _rule(db, job_id, job, ruling, now_s, actor)
    return read_job(db, job_id)


def requeue(db: sqlite3.Connection, job_id: str, actor: str, now_s: float) -> JobRow:
    job = _need(db, job_id)
    _move(db, job, Event.REQUEUE, now_s, "requeued")
    db.execute(
        "UPDATE job SET charged = 0, lost = 0, excused = 0, not_before = 0, artifact = '' WHERE seq = ?", (job.seq,)
    )
    enqueue(db, job.seq, now_s)
    record(db, now_s, actor, "job.requeued", job_id)
    return read_job(db, job_id)


def _rule(db: sqlite3.Connection, job_id: str, job: Held, ruling: Ruling, now_s: float, actor: str) -> None:
    """Let a ruling happen to the job and to the attempt that ends with it."""
    if ruling.event is Event.EXPIRE:
        _move(db, job, Event.EXPIRE, now_s, ruling.reason)
        db.execute("UPDATE lease SET expired = 1 WHERE job_id = ?", (job_id,))
        enqueue(db, job.seq, now_s)
        record(db, now_s, actor, "job.expired", job_id, epoch=job.epoch, reason=ruling.reason)
        return
    status = _move(db, job, ruling.event, now_s, ruling.reason)
    if job.leased:
        outcome = {Event.FAIL: "failed", Event.RETRY: "retried", Event.CANCEL: "cancelled"}[ruling.event]
        _end_attempt(db, job_id, job.epoch, now_s, outcome, ruling.cause)
        _count(db, job_id, ruling.cause)
    db.execute("DELETE FROM lease WHERE job_id = ?", (job_id,))
    db.execute("DELETE FROM ready WHERE seq = ?", (job.seq,))
    db.execute("DELETE FROM ripening WHERE seq = ?", (job.seq,))
    db.execute("UPDATE job SET not_before = ? WHERE seq = ?", (ruling.not_before_s, job.seq))
    if status is Status.PENDING:
        enqueue(db, job.seq, now_s)
    kind = {Event.FAIL: "job.failed", Event.RETRY: "job.retried", Event.CANCEL: "job.cancelled"}[ruling.event]
    record(db, now_s, actor, kind, job_id, epoch=job.epoch, cause=ruling.cause, reason=ruling.reason)


def enqueue(db: sqlite3.Connection, seq: int, now_s: float) -> None:
    """A pending job joins the queue, or waits: for the end of its back-off, or for the jobs it comes after."""
    row = db.execute("SELECT not_before, waits_for FROM job WHERE seq = ?", (seq,)).fetchone()
    not_before_s, waits_for = row
    if waits_for:
        return
    if not_before_s > now_s:
        db.execute("INSERT OR REPLACE INTO ripening VALUES (?, ?)", (seq, not_before_s))
        return
    db.execute("INSERT OR REPLACE INTO ready SELECT seq, class_id, priority, ? FROM job WHERE seq = ?", (now_s, seq))


def release_dependents(db: sqlite3.Connection, job_id: str, now_s: float) -> None:
    """Jobs that came after this one, and after nothing else that is unfinished, join the queue."""
    dependents = db.execute(
        "UPDATE job SET waits_for = (SELECT count(*) FROM job_after a LEFT JOIN job n ON n.id = a.needs"
        "  WHERE a.job_id = job.id AND n.status IS NOT 'completed')"
        " WHERE id IN (SELECT job_id FROM job_after WHERE needs = ?) RETURNING seq, status, waits_for",
        (job_id,),
    ).fetchall()
    for seq, status, waits_for in dependents:
        if status == Status.PENDING and not waits_for:
            enqueue(db, seq, now_s)


def record(db: sqlite3.Connection, at_s: float, actor: str, kind: str, subject: str, **body: Any) -> None:
    record_sqlite(db, [Record(at_s, actor, kind, subject, body)])


def _move(db: sqlite3.Connection, job: Held, event: Event, now_s: float, reason: str) -> Status:
    status = advance(job.status, event)
    db.execute("UPDATE job SET status = ?, changed_at = ?, reason = ? WHERE seq = ?", (status, now_s, reason, job.seq))
    return status


def _end_attempt(
    db: sqlite3.Connection, job_id: str, epoch: int, now_s: float, outcome: str, cause: Cause | None = None
) -> None:
    db.execute(
        "UPDATE attempt SET ended_at = ?, outcome = ?, cause = ? WHERE job_id = ? AND epoch = ?",
        (now_s, outcome, cause or "", job_id, epoch),
    )


def _note(db: sqlite3.Connection, hold: Hold, **columns: Any) -> None:
    assigned = ", ".join(f"{column} = ?" for column in columns)
    db.execute(
        f"UPDATE attempt SET {assigned} WHERE job_id = ? AND epoch = ?", (*columns.values(), hold.job_id, hold.epoch)
    )


def _told(db: sqlite3.Connection, hold: Hold, columns: str) -> Any:
    """What this host has said about its attempt before; None if it never had it."""
    return db.execute(
        f"SELECT {columns} FROM attempt WHERE job_id = ? AND epoch = ? AND host_id = ?",
        (hold.job_id, hold.epoch, hold.host_id),
    ).fetchone()


def _count(db: sqlite3.Connection, job_id: str, cause: Cause) -> None:
    column = counted(cause)
    db.execute(f"UPDATE job SET {column} = {column} + 1 WHERE id = ?", (job_id,))
