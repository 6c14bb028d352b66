"""Schedules at the hub: SQL, declaring, pausing, resuming, at most 1,000 of an owner, and the loop that queues a due
run; with the notes about skipped ones.

A run is queued first and its schedule moved on after that. The id of a run follows from the schedule and the time that
was due, so whoever does it again, another hub or this one after a crash, finds the job and only moves the schedule on:
each due time has one run. However many due times passed while no hub ran, one run is queued, for the first of them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from datetime import UTC, tzinfo
from typing import TYPE_CHECKING, Any, Final
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

import msgspec

from strata.base import log
from strata.base.errors import Code, StrataError
from strata.base.failpoint import failpoint
from strata.database import event_kinds
from strata.database.events import EventRecord, record
from strata.database.migrations import Component
from strata.database.transaction import Database, Transaction, Values
from strata.fleet.core.job import TERMINAL
from strata.fleet.core.jobspec import JobSpec
from strata.fleet.core.ownership import Submitter, check_owners
from strata.fleet.core.plan import ApplyPlan
from strata.fleet.core.schedule import JobSchedule, first_due_s, run_spec
from strata.fleet.records import ScheduleRow, StoredSchedule
from strata.fleet.service.fleet import Fleet
from strata.identity.authenticate import is_valid_actor

if TYPE_CHECKING:
    from strata.fleet.http.context import HubContext

MAX_OF_OWNER: Final = 1000
"""Schedules of one owner who is no operator."""
BATCH: Final = 100
"""Due schedules that are read at once."""
_REFUSED: Final = frozenset(
    {Code.EXHAUSTED, Code.FORBIDDEN, Code.INVALID, Code.NOT_FOUND, Code.PRECONDITION, Code.UNSUPPORTED}
)
"""The run cannot be queued as things are: it is left out, with the reason. After another error it is tried again."""
_log = log.get(__name__)

POSTGRES: Final = Component(
    "schedule",
    1,
    (
        """
        CREATE TABLE schedule (
          project text NOT NULL, name text NOT NULL, body bytea NOT NULL, next_due double precision NOT NULL,
          paused boolean NOT NULL, last_job text NOT NULL, note text NOT NULL, PRIMARY KEY (project, name)
        );
        CREATE INDEX schedule_due ON schedule (next_due) WHERE NOT paused;
        """,
    ),
)
SQLITE: Final = POSTGRES.in_sqlite()
_SELECT: Final = "SELECT project, name, body, next_due, paused, last_job, note FROM schedule"
ALL: Final = f"{_SELECT} ORDER BY project, name"
DUE: Final = f"{_SELECT} WHERE NOT paused AND next_due <= :now ORDER BY next_due LIMIT {BATCH}"
PUT: Final = (
    "INSERT INTO schedule VALUES (:project, :name, :body, :next_due, false, '', '')"
    " ON CONFLICT (project, name) DO UPDATE SET body = excluded.body, next_due = excluded.next_due"
)
_KEY: Final = "project = :project AND name = :name"
PAUSE: Final = f"UPDATE schedule SET paused = true, note = :note WHERE {_KEY} AND NOT paused"
RESUME: Final = f"UPDATE schedule SET paused = false, note = '', next_due = :next_due WHERE {_KEY} AND paused"
REMOVE: Final = f"DELETE FROM schedule WHERE {_KEY}"
ADVANCE: Final = (
    "UPDATE schedule SET next_due = :next_due, last_job = :last_job, note = :note"
    f" WHERE {_KEY} AND next_due = :due AND NOT paused"
)
"""Only for the hub that is first: another one may have moved it on, paused it or changed it."""

_encode: Final = msgspec.json.Encoder().encode
_decode: Final = msgspec.json.Decoder(StoredSchedule).decode


class ScheduleStore:
    def __init__(self, database: Database) -> None:
        self._database = database

    async def rows(self, select: str, **values: Any) -> Sequence[ScheduleRow]:
        """`ALL` or `DUE`."""
        return list(map(_row, await self._database.rows(select, values)))

    async def write(self, statement: str, values: Values, event: EventRecord) -> bool:
        """Says whether the statement changed a row; the event is written with it if it did."""

        async def change(tx: Transaction) -> bool:
            changed = await tx.changed(statement, values) > 0
            await record(tx, [event] if changed else [])
            return changed

        return await self._database.run(change)


def _row(row: Sequence[Any]) -> ScheduleRow:
    project, name, body, next_due_s, paused, last_job, note = row
    return ScheduleRow(project, name, _decode(body), next_due_s, bool(paused), last_job, note)


def load_zone(name: str) -> tzinfo:
    """INVALID for a time zone that this machine does not know."""
    if name == "UTC":
        return UTC
    try:
        return ZoneInfo(name)
    except (ZoneInfoNotFoundError, ValueError, OSError):
        raise StrataError(
            Code.INVALID,
            f"the hub knows no time zone {name!r}",
            hint="a name such as Europe/Berlin; without the tzdata of its system the hub knows UTC alone",
        ) from None


async def _due_s(schedule: JobSchedule, now_s: float) -> float:
    """Returns when it is due, from a thread: to look through nine years takes a while, and so does the file of
    a time zone."""
    return await asyncio.to_thread(lambda: first_due_s(schedule, now_s, load_zone(schedule.timezone)))


class DeclaredSchedules:
    """What manifests declare, and people pause, resume and remove."""

    def __init__(self, store: ScheduleStore, fleet: Fleet) -> None:
        self._store = store
        self._fleet = fleet

    async def check(
        self, project: str, schedules: Mapping[str, JobSchedule], submitter: Submitter
    ) -> Mapping[str, float]:
        if not schedules:
            return {}
        rows = await self._store.rows(ALL)
        there = {row.name: row for row in rows if row.project == project}
        for name in schedules:
            if name in there:
                _check_owner(there[name], submitter)
        owned = sum(row.stored.submitter.owner == submitter.owner for row in rows)
        if not submitter.operator and owned + len(schedules.keys() - there.keys()) > MAX_OF_OWNER:
            raise StrataError(
                Code.EXHAUSTED,
                f"{submitter.owner} has {owned} schedules already, and at most {MAX_OF_OWNER} are allowed",
                hint="strata schedules remove",
            )
        now_s = self._fleet.now_s()
        return {name: await _due_s(each, now_s) for name, each in schedules.items()}

    async def declare(self, project: str, schedules: Mapping[str, StoredSchedule]) -> None:
        there = {row.name: row for row in await self._store.rows(ALL) if row.project == project}
        now_s = self._fleet.now_s()
        for name, wanted in schedules.items():
            row = there.get(name)
            stored = wanted if row is None else _changed(row.stored, wanted)
            if row is not None and row.stored == stored:
                continue
            if row is not None and row.stored.schedule == stored.schedule:
                due_s = row.next_due_s
            else:
                due_s = await _due_s(stored.schedule, now_s)
            values = {"project": project, "name": name, "body": _encode(stored), "next_due": due_s}
            body = {"cron": stored.schedule.cron, "timezone": stored.schedule.timezone}
            event = EventRecord(now_s, stored.actor, event_kinds.SCHEDULE_DECLARED, f"{project}/{name}", body)
            await self._store.write(PUT, values, event)

    async def listed(self) -> Sequence[ScheduleRow]:
        return await self._store.rows(ALL)

    async def pause(self, project: str, name: str, actor: str, submitter: Submitter) -> ScheduleRow:
        row = await self._find(project, name, submitter)
        await pause(self._store, row, actor, f"paused by {submitter.owner}", self._fleet.now_s())
        return await self._find(project, name, submitter)

    async def resume(self, project: str, name: str, actor: str, submitter: Submitter) -> ScheduleRow:
        row = await self._find(project, name, submitter)
        now_s, schedule = self._fleet.now_s(), row.stored.schedule
        due_s = await _due_s(schedule, now_s)
        values = {"project": project, "name": name, "next_due": due_s}
        await self._store.write(
            RESUME, values, EventRecord(now_s, actor, event_kinds.SCHEDULE_RESUMED, f"{project}/{name}", {})
        )
        return await self._find(project, name, submitter)

    async def remove(self, project: str, name: str, actor: str, submitter: Submitter) -> None:
        await self._find(project, name, submitter)
        event = EventRecord(self._fleet.now_s(), actor, event_kinds.SCHEDULE_REMOVED, f"{project}/{name}", {})
        await self._store.write(REMOVE, {"project": project, "name": name}, event)

    async def _find(self, project: str, name: str, submitter: Submitter) -> ScheduleRow:
        for row in await self._store.rows(ALL):
            if (row.project, row.name) == (project, name):
                _check_owner(row, submitter)
                return row
        raise StrataError(Code.NOT_FOUND, f"there is no schedule {name[:64]!r} in project {project[:64]!r}")


def _changed(before: StoredSchedule, wanted: StoredSchedule) -> StoredSchedule:
    """An operator changes what the schedule of another owner does, not whose it is."""
    if before.submitter.owner == wanted.submitter.owner:
        return wanted
    return msgspec.structs.replace(before, schedule=wanted.schedule, trainer=wanted.trainer)


def _check_owner(row: ScheduleRow, submitter: Submitter) -> None:
    check_owners(submitter, [(f"the schedule {row.name}", row.stored.submitter.owner)])


async def pause(store: ScheduleStore, row: ScheduleRow, actor: str, reason: str, now_s: float) -> None:
    values = {"project": row.project, "name": row.name, "note": reason}
    event = EventRecord(now_s, actor, event_kinds.SCHEDULE_PAUSED, f"{row.project}/{row.name}", {"reason": reason})
    await store.write(PAUSE, values, event)


class ScheduleRunner:
    def __init__(self, store: ScheduleStore, context: HubContext) -> None:
        self._store = store
        self._fleet = context.fleet
        self._identity = context.identity
        self._require_sandbox = context.require_sandbox

    async def run_once(self) -> None:
        for row in await self._store.rows(DUE, now=self._fleet.now_s()):
            try:
                await self._take_turn(row)
            except StrataError as error:
                # One schedule does not hold up the others; it is due until it was served.
                _log.warning("schedule_failed", project=row.project, schedule=row.name, reason=error.message)

    async def _take_turn(self, row: ScheduleRow) -> None:
        if not await is_valid_actor(self._identity, row.stored.actor, self._fleet.now_s()):
            reason = f"the key of {row.stored.submitter.owner} is not valid any more"
            await pause(self._store, row, "hub", reason, self._fleet.now_s())
            return
        schedule = row.stored.schedule
        spec = run_spec(schedule, row.next_due_s).with_sandbox(self._require_sandbox)
        note = "" if await self._fleet.jobs.find(spec.id) is not None else await self._queue(row, spec)
        failpoint("fleet.schedule.queued")
        now_s = self._fleet.now_s()
        values = {
            "project": row.project,
            "name": row.name,
            "due": row.next_due_s,
            "next_due": await _due_s(schedule, now_s),
            "last_job": row.last_job if note else spec.id,
            "note": note,
        }
        body = {"due": spec.due, "reason": note} if note else {"due": spec.due, "job": spec.id}
        kind = event_kinds.SCHEDULE_SKIPPED if note else event_kinds.SCHEDULE_QUEUED
        await self._store.write(ADVANCE, values, EventRecord(now_s, "hub", kind, f"{row.project}/{row.name}", body))

    async def _queue(self, row: ScheduleRow, spec: JobSpec) -> str:
        """Says why the run is left out; empty if it is queued now."""
        last = await self._fleet.jobs.find(row.last_job) if row.last_job else None
        if row.stored.schedule.overlap == "skip" and last is not None and last.status not in TERMINAL:
            return f"the run of {spec.due} was left out: the one of {last.spec.due} is {last.status}"
        plan = ApplyPlan(
            project=spec.project,
            new={spec.id: spec},
            superseded=() if last is None else (last.id,),
            pinned=row.stored.trainer,
        )
        try:
            await self._fleet.jobs.apply(
                plan,
                row.stored.actor,
                source=f"schedule {row.name}",
                declared=False,
                submitter=row.stored.submitter,
            )
        except StrataError as error:
            if error.code is Code.CONFLICT and await self._fleet.jobs.find(spec.id) is not None:
                return ""
            if error.code in _REFUSED:
                return f"the run of {spec.due} was left out: {error.message}"
            raise
        return ""
