"""Reservations in SQLite: a plan is made and applied in the one transaction that is open."""

from __future__ import annotations

import sqlite3
from typing import Final

from strata.base.failpoint import failpoint
from strata.fleet.core.reservation import QueueView, Reservation, ReservationPlan, ReservationPlanner, WaitingJob
from strata.fleet.store.rows import (
    GANG_MEMBERS,
    HELD_PLACES,
    LEASES_FIRST,
    QUEUE_HEADS,
    RESERVATIONS,
    decode_gang_members,
    decode_held_places,
    decode_reservations,
    encode,
    encode_amounts,
    ended_reservations,
    new_reservations,
)
from strata.fleet.store.sqlite.leases import cancel, record, release

HEADS: Final = QUEUE_HEADS.format(
    heads="json_each(?) AS c CROSS JOIN json_each(?) AS o CROSS JOIN ready AS r ON r.seq = ("
    " SELECT seq FROM ready INDEXED BY ready_owner WHERE class_id = c.value AND owner = o.value"
    " ORDER BY priority DESC, seq LIMIT 1)"
)

MEMBERS: Final = GANG_MEMBERS.format(job="job INDEXED BY job_gang_open")


def apply_reservations(db: sqlite3.Connection, planner: ReservationPlanner, now_s: float) -> ReservationPlan:
    options = (encode(list(planner.classes)), encode(list(planner.owners)))
    heads = [WaitingJob(*row) for row in db.execute(HEADS, options)]
    stored = db.execute("SELECT count(*) FROM reservation").fetchone()[0]
    members = decode_gang_members(db.execute(MEMBERS))
    if not (stored or members or planner.is_needed(heads, now_s)):
        return ReservationPlan(stuck=planner.stuck(heads, now_s))
    before = decode_reservations(db.execute(RESERVATIONS))
    refused = set(db.execute("SELECT host_id, seq FROM job_refusal"))
    held = decode_held_places(db.execute(HELD_PLACES.format(join=LEASES_FIRST)))
    plan = planner.plan(QueueView(heads, before, held, members, refused), now_s)
    _write(db, plan, before, now_s, stored=stored)
    for job_id, reason in plan.returned.items():
        release(db, job_id, reason, now_s)
    for job_id, reason in plan.cancelled.items():
        cancel(db, job_id, reason, "hub", now_s)
    for each in plan.preempted:
        update = "UPDATE lease SET preempt = ? WHERE job_id = ? AND epoch = ? AND NOT expired"
        if db.execute(update, (each.reason, each.job_id, each.epoch)).rowcount:
            record(db, now_s, "hub", "job.preempted", each.job_id, epoch=each.epoch, reason=each.reason)
    failpoint("fleet.reserve.written")
    return plan


def _write(
    db: sqlite3.Connection, plan: ReservationPlan, before: list[Reservation], now_s: float, *, stored: int
) -> None:
    if stored == len(before) and set(plan.reservations) == set(before):
        return
    db.execute("DELETE FROM reservation")
    db.executemany(
        "INSERT INTO reservation VALUES (?, ?, ?, ?, ?)",
        [
            (each.host_id, each.job.seq, encode_amounts(each.amounts), each.kind, each.expires_at_s)
            for each in plan.reservations
        ],
    )
    for each in new_reservations(plan, before):
        record(db, now_s, "hub", "job.reserved", each.job.job_id, host=each.host_id)
    for each in ended_reservations(plan, before):
        record(db, now_s, "hub", "job.unreserved", each.job.job_id, host=each.host_id)
