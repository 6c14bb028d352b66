"""SQL of the queue: its order (priority, age), entering and leaving it, dependencies that end, and backoffs that are
over.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from strata.database.events import EventRecord
from strata.database.events import record as record_events
from strata.database.transaction import Transaction
from strata.fleet.core.job import JobStatus

WAITS_FOR: Final = (
    "(SELECT count(*) FROM job_after a LEFT JOIN job n ON n.id = a.needs"
    " WHERE a.job_id = job.id AND coalesce(n.status, '') <> 'completed')"
)
_WAITING: Final = "FROM job WHERE seq = ANY(:seqs) AND waits_for = 0 AND not_before"


def queue_order(row: str) -> str:
    """Returns the order in which jobs leave the queue, for ORDER BY: `row` has their `priority` and `seq`. The
    indexes `ready_order` and `ready_owner` have this order too, and so have `fair_share` and `reservation` among jobs
    of one owner."""
    return f"{row}.priority DESC, {row}.seq"


async def enqueue(tx: Transaction, seqs: Sequence[int], now_s: float) -> None:
    """Pending jobs join the queue, or wait: for the end of their back-off, or for the jobs they come after."""
    values = {"seqs": list(seqs), "now": now_s}
    async with tx.pipeline():
        await tx.execute(
            f"INSERT INTO ripening (seq, not_before) SELECT seq, not_before {_WAITING} > :now"
            " ON CONFLICT (seq) DO UPDATE SET not_before = excluded.not_before",
            values,
        )
        await tx.execute(
            "INSERT INTO ready (seq, class_id, priority, since, owner)"
            f" SELECT seq, class_id, priority, :now, owner {_WAITING} <= :now"
            " ON CONFLICT (seq) DO UPDATE SET class_id = excluded.class_id, priority = excluded.priority,"
            " owner = excluded.owner",
            values,
        )


async def dequeue(tx: Transaction, seqs: Sequence[int]) -> None:
    """Jobs that wait no longer, or for other jobs, leave the queue."""
    async with tx.pipeline():
        await tx.execute("DELETE FROM ready WHERE seq = ANY(:seqs)", {"seqs": list(seqs)})
        await tx.execute("DELETE FROM ripening WHERE seq = ANY(:seqs)", {"seqs": list(seqs)})


async def recount_dependents(tx: Transaction, job_id: str, now_s: float) -> None:
    """This job was completed, or is to run again: jobs after it join the queue, or leave it and wait."""
    dependents = await tx.rows(
        "SELECT id FROM job WHERE id IN (SELECT job_id FROM job_after WHERE needs = :job) ORDER BY id FOR UPDATE",
        {"job": job_id},
    )
    # Counted by a new statement after the lock: two prerequisites that end at once see each other here.
    update = f"UPDATE job SET waits_for = {WAITS_FOR} WHERE id = :job RETURNING seq, status, waits_for"
    waiting: list[int] = []
    for (dependent,) in dependents:
        ((seq, status, waits_for),) = await tx.rows(update, {"job": dependent})
        if waits_for:
            waiting.append(seq)
        elif status == JobStatus.PENDING:
            await enqueue(tx, [seq], now_s)
    if waiting:
        await dequeue(tx, waiting)


async def release_backoffs(tx: Transaction, now_s: float, limit: int) -> int:
    due = await tx.rows(
        "DELETE FROM ripening WHERE seq IN (SELECT r.seq FROM ripening r JOIN job j USING (seq)"
        " WHERE r.not_before <= :now ORDER BY r.not_before LIMIT :limit FOR UPDATE SKIP LOCKED) RETURNING seq",
        {"now": now_s, "limit": limit},
    )
    if due:
        await enqueue(tx, [seq for (seq,) in due], now_s)
    return len(due)


async def class_ids(tx: Transaction, keys: Mapping[bytes, str]) -> dict[bytes, int]:
    """The ids of these classes by how they are encoded; new ones are added."""
    select = "SELECT key, id FROM req_class WHERE key = ANY(:keys)"
    by_key = {key: encoded for encoded, key in keys.items()}
    known: dict[str, int] = dict(await tx.rows(select, {"keys": list(by_key)}))
    if new := sorted(by_key.keys() - known.keys()):
        insert = "INSERT INTO req_class (key, spec) VALUES (:key::text, :spec::bytea) ON CONFLICT (key) DO NOTHING"
        await tx.many(insert, [{"key": key, "spec": by_key[key]} for key in new])
        known |= dict(await tx.rows(select, {"keys": new}))
    return {encoded: known[key] for encoded, key in keys.items()}


async def record(tx: Transaction, at_s: float, actor: str, kind: str, subject: str, **body: Any) -> None:
    await record_events(tx, [EventRecord(at_s, actor, kind, subject, body)])
