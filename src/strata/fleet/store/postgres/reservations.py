"""Reservations in PostgreSQL: a plan is made and applied in one transaction, by one hub at a time."""

from __future__ import annotations

from typing import Final

from strata.base.failpoint import failpoint
from strata.fleet.core.reservation import QueueView, Reservation, ReservationPlan, ReservationPlanner, WaitingJob
from strata.fleet.store.postgres.leases import Connection, cancel, record, release
from strata.fleet.store.rows import (
    GANG_MEMBERS,
    HELD_PLACES,
    QUEUE_HEADS,
    RESERVATIONS,
    decode_gang_members,
    decode_held_places,
    decode_reservations,
    encode_amounts,
    ended_reservations,
    new_reservations,
)

_LOCK: Final = 0x5354_5241_5441_0011
"""The advisory lock of a plan: of two hubs the second plans on what the first has written."""

HEADS: Final = QUEUE_HEADS.format(
    heads="unnest(%(classes)s::bigint[]) AS c (id) CROSS JOIN unnest(%(owners)s::text[]) AS o (name)"
    " CROSS JOIN LATERAL (SELECT seq, class_id, priority, owner, since FROM ready"
    "  WHERE class_id = c.id AND owner = o.name ORDER BY priority DESC, seq LIMIT 1) AS r"
)


async def apply_reservations(connection: Connection, planner: ReservationPlanner, now_s: float) -> ReservationPlan:
    await connection.execute("SELECT pg_advisory_xact_lock(%s)", (_LOCK,))
    async with connection.pipeline():
        options = {"classes": list(planner.classes), "owners": list(planner.owners)}
        found = await connection.execute(HEADS, options)
        counted = await connection.execute("SELECT count(*) FROM reservation")
        gangs = await connection.execute(GANG_MEMBERS.format(job="job"))
    heads = [WaitingJob(*row) for row in await found.fetchall()]
    (stored,) = await counted.fetchone()
    members = decode_gang_members(await gangs.fetchall())
    if not (stored or members or planner.is_needed(heads, now_s)):
        return ReservationPlan(stuck=planner.stuck(heads, now_s))
    async with connection.pipeline():
        reserved = await connection.execute(RESERVATIONS)
        refusals = await connection.execute("SELECT host_id, seq FROM job_refusal")
        places = await connection.execute(HELD_PLACES.format(join="JOIN"))
    before = decode_reservations(await reserved.fetchall())
    refused = set(await refusals.fetchall())
    held = decode_held_places(await places.fetchall())
    plan = planner.plan(QueueView(heads, before, held, members, refused), now_s)
    await _write(connection, plan, before, now_s, stored=stored)
    # In the order of ids, like all who lock several jobs; leases come after jobs.
    for job_id in sorted(plan.returned.keys() | plan.cancelled.keys()):
        if job_id in plan.cancelled:
            await cancel(connection, job_id, plan.cancelled[job_id], "hub", now_s)
        else:
            await release(connection, job_id, plan.returned[job_id], now_s)
    for each in sorted(plan.preempted):
        update = "UPDATE lease SET preempt = %s WHERE job_id = %s AND epoch = %s AND NOT expired"
        if (await connection.execute(update, (each.reason, each.job_id, each.epoch))).rowcount:
            await record(connection, now_s, "hub", "job.preempted", each.job_id, epoch=each.epoch, reason=each.reason)
    failpoint("fleet.reserve.written")
    return plan


async def _write(
    connection: Connection, plan: ReservationPlan, before: list[Reservation], now_s: float, *, stored: int
) -> None:
    if stored == len(before) and set(plan.reservations) == set(before):
        return
    await connection.execute("DELETE FROM reservation")
    await connection.cursor().executemany(
        "INSERT INTO reservation VALUES (%s, %s, %s, %s, %s)",
        [
            (each.host_id, each.job.seq, encode_amounts(each.amounts), each.kind, each.expires_at_s)
            for each in plan.reservations
        ],
    )
    for each in new_reservations(plan, before):
        await record(connection, now_s, "hub", "job.reserved", each.job.job_id, host=each.host_id)
    for each in ended_reservations(plan, before):
        await record(connection, now_s, "hub", "job.unreserved", each.job.job_id, host=each.host_id)
