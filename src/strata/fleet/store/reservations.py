"""SQL of reservations: reads what the planner needs (heads of the queue, held places, gangs), and writes its plan."""

from __future__ import annotations

from functools import lru_cache
from typing import Final

from strata.base.failpoint import failpoint
from strata.database import event_kinds
from strata.database.transaction import Rows, Transaction
from strata.fleet.core.job import JobStatus
from strata.fleet.core.reservation import (
    GangMember,
    HeldPlace,
    QueueView,
    Reservation,
    ReservationPlan,
    ReservationPlanner,
    WaitingJob,
    added_reservations,
    ended_reservations,
)
from strata.fleet.store.leases import cancel, release
from strata.fleet.store.queue import queue_order, record
from strata.fleet.store.rows import (
    LEASED,
    UNFINISHED_JOB,
    decode_amounts,
    decode_spec,
    decode_taken,
    encode_amounts,
)

_WAITING: Final = "r.seq, j.id, r.class_id, r.priority, r.owner, r.since, j.gang"
_RESERVATIONS: Final = (
    f"SELECT v.host_id, v.amounts, v.kind, v.expires_at, {_WAITING} FROM reservation v JOIN ready r ON r.seq = v.seq"
    " JOIN job j ON j.seq = v.seq ORDER BY v.host_id, v.seq"
)
"""A reservation counts while its job waits in the queue."""
_GANG_MEMBERS: Final = (
    f"SELECT j.gang, j.id, j.status, j.spec, {_WAITING} FROM job j LEFT JOIN ready r ON r.seq = j.seq"
    " WHERE j.gang <> '' AND j.gang IN"
    f" (SELECT gang FROM job /* sqlite: INDEXED BY job_gang_open */ WHERE gang <> '' AND {UNFINISHED_JOB})"
    " ORDER BY j.gang, j.seq"
)
"""Names the index: without it SQLite would read all jobs that wait."""
_HELD_PLACES: Final = (
    "SELECT a.host_id, a.job_id, a.epoch, a.taken, j.priority, a.claimed_at, j.gang, s.job_id IS NOT NULL,"
    " j.checkpoint <> '', l.preempt <> ''"
    " FROM lease l CROSS JOIN attempt a JOIN job j ON j.id = l.job_id LEFT JOIN server s ON s.job_id = l.job_id"
    f" WHERE {LEASED}"
)
_HEADS_OF: Final = f"SELECT {_WAITING} FROM {{heads}} JOIN job j ON j.seq = r.seq"
_OPTIONS: Final = "unnest(:classes::bigint[]) AS c (id) CROSS JOIN unnest(:owners::text[]) AS o (name)"
_FIRST: Final = f"class_id = c.id AND owner = o.name ORDER BY {queue_order('ready')} LIMIT 1"
_HEADS: Final = {
    "sqlite": _HEADS_OF.format(
        heads=f"{_OPTIONS} CROSS JOIN ready AS r"
        f" ON r.seq = (SELECT seq FROM ready INDEXED BY ready_owner WHERE {_FIRST})"
    ),
    "postgres": _HEADS_OF.format(
        heads=f"{_OPTIONS} CROSS JOIN LATERAL"
        f" (SELECT seq, class_id, priority, owner, since FROM ready WHERE {_FIRST}) AS r"
    ),
}
"""The first job of each owner in each class."""


async def read_reservations(tx: Transaction) -> list[Reservation]:
    return _decode_reservations(await tx.rows(_RESERVATIONS))


async def apply_reservations(tx: Transaction, planner: ReservationPlanner, now_s: float) -> ReservationPlan:
    # Of two hubs the second plans on what the first has written.
    await tx.lock("fleet.reservations")
    options = {"classes": list(planner.classes), "owners": list(planner.owners)}
    found, ((stored,),), gangs = await tx.rows_of_all(
        (_HEADS[tx.engine], options), ("SELECT count(*) FROM reservation", {}), (_GANG_MEMBERS, {})
    )
    heads = [WaitingJob(*row) for row in found]
    members = _decode_gang_members(gangs)
    if not (stored or members or planner.is_needed(heads, now_s)):
        return ReservationPlan(stuck=planner.stuck(heads, now_s))
    reserved, refused, places = await tx.rows_of_all(
        (_RESERVATIONS, {}), ("SELECT host_id, seq FROM job_refusal", {}), (_HELD_PLACES, {})
    )
    before = _decode_reservations(reserved)
    view = QueueView(heads, before, _decode_held_places(places), members, {(host, seq) for host, seq in refused})
    plan = planner.plan(view, now_s)
    await _write(tx, plan, before, now_s, stored=stored)
    # In the order of ids, like all who lock several jobs; leases come after jobs.
    for job_id in sorted(plan.returned.keys() | plan.cancelled.keys()):
        if job_id in plan.cancelled:
            await cancel(tx, job_id, plan.cancelled[job_id], "hub", now_s)
        else:
            await release(tx, job_id, plan.returned[job_id], now_s)
    for each in sorted(plan.preempted):
        update = "UPDATE lease SET preempt = :reason WHERE job_id = :job AND epoch = :epoch AND NOT expired"
        if await tx.changed(update, {"reason": each.reason, "job": each.job_id, "epoch": each.epoch}):
            await record(tx, now_s, "hub", event_kinds.JOB_PREEMPTED, each.job_id, epoch=each.epoch, reason=each.reason)
    failpoint("fleet.reserve.written")
    return plan


async def _write(
    tx: Transaction, plan: ReservationPlan, before: list[Reservation], now_s: float, *, stored: int
) -> None:
    if stored == len(before) and set(plan.reservations) == set(before):
        return
    await tx.execute("DELETE FROM reservation")
    await tx.many(
        "INSERT INTO reservation (host_id, seq, amounts, kind, expires_at)"
        " VALUES (:host::text, :seq::bigint, :amounts::bytea, :kind::text, :expires_at::float8)",
        [
            {
                "host": each.host_id,
                "seq": each.job.seq,
                "amounts": encode_amounts(each.amounts),
                "kind": each.kind,
                "expires_at": each.expires_at_s,
            }
            for each in plan.reservations
        ],
    )
    for each in added_reservations(plan.reservations, before):
        await record(tx, now_s, "hub", event_kinds.JOB_RESERVED, each.job.job_id, host=each.host_id)
    for each in ended_reservations(plan.reservations, before):
        await record(tx, now_s, "hub", event_kinds.JOB_UNRESERVED, each.job.job_id, host=each.host_id)


def _decode_reservations(rows: Rows) -> list[Reservation]:
    return [
        Reservation(host_id, WaitingJob(*job), decode_amounts(amounts), kind, expires_at_s)
        for host_id, amounts, kind, expires_at_s, *job in rows
    ]


def _decode_gang_members(rows: Rows) -> list[GangMember]:
    members = []
    for gang, job_id, status, spec, *job in rows:
        size, min_size = _gang_size(bytes(spec))
        waiting = None if job[0] is None else WaitingJob(*job)
        members.append(GangMember(gang, job_id, JobStatus(status), size, min_size, waiting))
    return members


@lru_cache(1024)
def _gang_size(spec: bytes) -> tuple[int, int]:
    """Read again and again while a gang waits."""
    gang = decode_spec(spec).gang
    return (1, 1) if gang is None else (gang.size, gang.min_size)


def _decode_held_places(rows: Rows) -> list[HeldPlace]:
    # Attempts are many, and what they take is much the same.
    taken = lru_cache(256)(decode_taken)
    return [
        HeldPlace(host_id, job_id, epoch, taken(text), priority, at_s, gang, bool(endless), bool(resumes), bool(yields))
        for host_id, job_id, epoch, text, priority, at_s, gang, endless, resumes, yields in rows
    ]
