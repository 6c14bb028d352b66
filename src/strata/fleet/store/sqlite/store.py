"""The fleet in the hub's SQLite file: one writer, so a transaction is a function that nothing can interleave with."""

from __future__ import annotations

import sqlite3
from collections.abc import Collection, Mapping, Sequence
from typing import Any, Final

import msgspec
from msgspec import to_builtins

from strata.base.errors import Code, StrataError
from strata.database import events
from strata.database.events import EventFilter, EventPage
from strata.database.sqlite import SqliteThread
from strata.database.transaction import SqliteDatabase
from strata.fleet.core.amounts import Taken
from strata.fleet.core.fair_share import OwnerShares
from strata.fleet.core.goodput import LEDGER_EVENTS
from strata.fleet.core.job import UNFINISHED
from strata.fleet.core.jobspec import TrainerSpec
from strata.fleet.core.lease_status import stale_attempt
from strata.fleet.core.ownership import OPERATOR, Submitter
from strata.fleet.core.plan import ApplyPlan, ExistingJob, HostPolicy, RegisteredTrainer, requeued_members
from strata.fleet.core.quota import OwnerUsage, Quota
from strata.fleet.core.requirement import RequirementClass
from strata.fleet.core.reservation import Reservation, ReservationPlan, ReservationPlanner
from strata.fleet.core.samples import LATE_S, RESOLUTIONS, SamplePoint, average
from strata.fleet.ports import (
    AttemptKey,
    AttemptRow,
    Claim,
    ClassRow,
    Counts,
    HostRow,
    JobCompletion,
    JobFailure,
    JobFilter,
    JobLease,
    JobLedger,
    JobOnHost,
    JobRow,
    OwnerUsages,
    RefusedJob,
    Renewal,
    RenewalResult,
    ServerRow,
    SweepRow,
    TrialRow,
    WaitingClass,
)
from strata.fleet.store.rows import (
    ATTEMPT,
    EXISTING_JOB,
    HELD,
    HELD_AMOUNTS,
    HELD_BY_OWNER,
    HOST,
    JOBS_ON,
    KEPT_COUNTS,
    LEASES_FIRST,
    LEDGER_ATTEMPTS,
    LEDGER_EVENTS_SINCE,
    LOST_HOSTS,
    OWNER_GPU_S,
    OWNER_JOBS,
    OWNERS,
    POLICIES,
    PUBLISH,
    QUOTAS,
    READY,
    READY_OF,
    REFUSED,
    RESERVATIONS,
    SERVERS,
    SWEEPS,
    TRAINERS,
    TRIALS,
    WAITING_CLASSES,
    HostDecoder,
    JobsDialect,
    decode_attempt,
    decode_existing_job,
    decode_held,
    decode_host,
    decode_job,
    decode_jobs_on_hosts,
    decode_known_trainer,
    decode_ledger,
    decode_points,
    decode_policies,
    decode_quotas,
    decode_refused_jobs,
    decode_reservations,
    decode_server,
    decode_sweeps,
    decode_taken,
    decode_trainers,
    decode_trials,
    encode,
    encode_quota,
    held_cards,
    kept_counts,
    owner_usages,
    select_jobs,
    unfinished_members,
)
from strata.fleet.store.sqlite import leases, tables
from strata.fleet.store.sqlite.claims import claim_jobs
from strata.fleet.store.sqlite.plan import apply_plan, check_quota, read_usage
from strata.fleet.store.sqlite.reservations import apply_reservations

_JOBS: Final = JobsDialect(
    mark=":{}",
    one_of="{} IN (SELECT value FROM json_each({}))",
    listed=encode,
    contains="instr({}, lower({})) > 0",
    searched="job INDEXED BY job_search",
    searched_text=tables.SEARCHED_TEXT,
    ended="job INDEXED BY job_ended",
    failed="job INDEXED BY job_failed",
    held="job INDEXED BY job_held",
    newest="job NOT INDEXED",
    servers="job INDEXED BY job_server",
    may_serve=tables.MAY_SERVE,
)
_ONLY: Final = ":project IN ('', project)"
_LEDGER: Final = LEDGER_ATTEMPTS.format(
    ended="attempt INDEXED BY attempt_ended",
    since=":since",
    limit=":limit",
    only=":project IN ('', j.project)",
    attempt="CROSS JOIN attempt a ON a.job_id = w.job_id AND a.epoch = w.epoch",
)
_LEDGER_EVENTS: Final = LEDGER_EVENTS_SINCE.format(kind=":kind", since=":since", order="seq DESC", limit=":limit")
_GPU_S: Final = OWNER_GPU_S.format(
    cards="(json_array_length(CAST(a.taken AS TEXT), '$.cards')"
    " * coalesce(json_extract(CAST(a.taken AS TEXT), '$.gpu_share'), 1.0))",
    has_cards="instr(a.taken, CAST('\"cards\"' AS BLOB)) > 0",
    largest="max",
    now=":now",
    since=":since",
)
_PUBLISH: Final = PUBLISH.format(**{name: f":{name}" for name in ("address", "models", "now", "job", "epoch", "host")})


class SqliteStore:
    """On a thread that has the components `event` and `fleet`."""

    def __init__(self, thread: SqliteThread) -> None:
        self._thread = thread
        self._hosts = HostDecoder()

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
        await self._thread.write(
            lambda db: apply_plan(db, plan, actor, now_s, source=source, declared=declared, submitter=submitter)
        )

    async def existing_jobs(self) -> Mapping[str, ExistingJob]:
        return {
            id_: decode_existing_job(rest) for id_, *rest in await self._rows(f"SELECT id, {EXISTING_JOB} FROM job", ())
        }

    async def projects(self) -> Mapping[str, str]:
        return dict(await self._rows("SELECT name, owner FROM project", ()))

    async def quotas(self) -> Mapping[str, Quota]:
        return decode_quotas(await self._rows(QUOTAS, ()))

    async def set_quota(self, owner: str, quota: Quota | None, actor: str, now_s: float) -> None:
        def change(db: sqlite3.Connection) -> None:
            if quota is None:
                db.execute("DELETE FROM quota WHERE owner = ?", (owner,))
            else:
                upsert = "INSERT INTO quota VALUES (?, ?) ON CONFLICT (owner) DO UPDATE SET spec = excluded.spec"
                db.execute(upsert, (owner, encode_quota(quota)))
            leases.record(db, now_s, actor, "quota.changed", owner, quota=None if quota is None else to_builtins(quota))

        await self._thread.write(change)

    async def usage(self, owner: str, window_s: float, now_s: float) -> OwnerUsage:
        return await self._thread.read(lambda db: read_usage(db, owner, window_s, now_s))

    async def usages(self, window_s: float, now_s: float) -> OwnerUsages:
        jobs = await self._rows(OWNER_JOBS.format(job="job INDEXED BY job_owner"), ())
        return owner_usages(jobs, await self._rows(_GPU_S, {"now": now_s, "since": now_s - window_s}))

    async def owners(self) -> Collection[str]:
        return [owner for (owner,) in await self._rows(OWNERS.format(job="job INDEXED BY job_owner"), ())]

    async def classes(self, after_id: int = 0) -> Sequence[ClassRow]:
        rows = await self._rows("SELECT id, spec FROM req_class WHERE id > ? ORDER BY id", (after_id,))
        decode = msgspec.json.Decoder(RequirementClass).decode
        return [ClassRow(id=id_, requirement=decode(spec)) for id_, spec in rows]

    async def policies(self) -> Mapping[str, HostPolicy]:
        return decode_policies(await self._rows(POLICIES, ()))

    async def trainers(self) -> Mapping[tuple[str, str], RegisteredTrainer]:
        return decode_trainers(await self._rows(TRAINERS, ()))

    async def trainer(self, digest: str) -> TrainerSpec:
        return decode_known_trainer(await self._rows("SELECT spec FROM trainer WHERE digest = ?", (digest,)), digest)

    async def register_host(self, host: HostRow, actor: str) -> HostRow:
        def register(db: sqlite3.Connection) -> HostRow:
            before = db.execute("SELECT capability, state FROM host WHERE id = ?", (host.id,)).fetchone()
            capability, labels = encode(host.capability), encode(dict(host.labels))
            db.execute(
                "INSERT INTO host (id, name, capability, registered_at, state, state_reason, agent_version, pool,"
                " labels) VALUES (?, ?, ?, ?, 'active', '', ?, ?, ?) ON CONFLICT (id) DO UPDATE SET"
                " name = excluded.name, capability = excluded.capability, agent_version = excluded.agent_version,"
                " pool = excluded.pool, labels = excluded.labels,"
                " state = CASE state WHEN 'left' THEN 'active' ELSE state END",
                (host.id, host.name, capability, host.registered_at_s, host.agent_version, host.pool, labels),
            )
            db.execute("DELETE FROM job_refusal WHERE host_id = ?", (host.id,))
            _record_heartbeats(db, {host.id: host.registered_at_s})
            if before is None or before[0] != capability or before[1] == "left":
                leases.record(db, host.registered_at_s, actor, "host.registered", host.id, name=host.name)
            return _host(db, host.id)

        return await self._thread.write(register)

    async def hosts(self) -> Sequence[HostRow]:
        select = f"SELECT {HOST} FROM host LEFT JOIN host_beat ON host_id = id"
        return self._hosts.decode(await self._rows(select, ()))

    async def find_hosts(self, text: str) -> Sequence[HostRow]:
        select = (
            f"SELECT {HOST} FROM host LEFT JOIN host_beat ON host_id = id WHERE id = ? OR name = ? ORDER BY name, id"
        )
        return [decode_host(row) for row in await self._rows(select, (text, text))]

    async def set_host_state(self, host_id: str, state: str, reason: str, actor: str, now_s: float) -> HostRow:
        def change(db: sqlite3.Connection) -> HostRow:
            if _host(db, host_id).state != state:
                update = "UPDATE host SET state = ?, state_reason = ? WHERE id = ?"
                db.execute(update, (state, reason, host_id))
                leases.record(db, now_s, actor, f"host.{state}", host_id, reason=reason)
            return _host(db, host_id)

        return await self._thread.write(change)

    async def record_heartbeats(self, seen: Mapping[str, float]) -> None:
        await self._thread.write(lambda db: _record_heartbeats(db, seen))

    async def record_lost_hosts(self, silent_since_s: float, now_s: float) -> int:
        def lose(db: sqlite3.Connection) -> int:
            lost = db.execute(LOST_HOSTS.format(since=":since"), {"since": silent_since_s}).fetchall()
            db.executemany("INSERT INTO host_lost VALUES (?, ?)", lost)
            for host_id, seen_at_s in lost:
                leases.record(db, now_s, "hub", "host.lost", host_id, seen_at_s=seen_at_s)
            return len(lost)

        return await self._thread.write(lose)

    async def held_by_owner(self) -> Sequence[tuple[str, Taken, int]]:
        rows = await self._rows(HELD_BY_OWNER.format(join=LEASES_FIRST), ())
        return [(owner, decode_taken(taken), leases) for owner, taken, leases in rows]

    async def claim(
        self, claims: Sequence[Claim], lease_s: float, now_s: float, shares: OwnerShares | None = None
    ) -> Sequence[Sequence[JobLease]]:
        return await self._thread.write(lambda db: claim_jobs(db, claims, lease_s, now_s, shares))

    async def reserve(self, planner: ReservationPlanner, now_s: float) -> ReservationPlan:
        return await self._thread.write(lambda db: apply_reservations(db, planner, now_s))

    async def reservations(self) -> Sequence[Reservation]:
        return decode_reservations(await self._rows(RESERVATIONS, ()))

    async def renew(
        self, host_id: str, renewals: Sequence[Renewal], lease_s: float, now_s: float
    ) -> Sequence[RenewalResult]:
        return await self._thread.write(lambda db: leases.renew(db, host_id, renewals, lease_s, now_s))

    async def complete(self, attempt: AttemptKey, completion: JobCompletion, now_s: float) -> JobRow:
        done = await self._thread.write(lambda db: leases.complete(db, attempt, completion, now_s))
        if isinstance(done, StrataError):
            raise done
        return done

    async def fail(
        self, attempt: AttemptKey, failure: JobFailure, now_s: float, *, chance: float, eligible: Collection[str] = ()
    ) -> JobRow:
        return await self._thread.write(lambda db: leases.fail(db, attempt, failure, now_s, chance, eligible))

    async def record_checkpoint(self, attempt: AttemptKey, artifact: str, now_s: float) -> None:
        await self._thread.write(lambda db: leases.record_checkpoint(db, attempt, artifact, now_s))

    async def publish_server(self, attempt: AttemptKey, address: str, models: Sequence[str], now_s: float) -> None:
        def publish(db: sqlite3.Connection) -> None:
            values = {"address": address, "models": encode(list(models)), "now": now_s}
            values |= {"job": attempt.job_id, "epoch": attempt.epoch, "host": attempt.host_id}
            if not db.execute(_PUBLISH, values).rowcount:
                raise stale_attempt(attempt.job_id, attempt.epoch, leases.read_job(db, attempt.job_id).epoch)
            actor = f"host:{attempt.host_id}"
            leases.record(db, now_s, actor, "job.serving", attempt.job_id, epoch=attempt.epoch, address=address)

        await self._thread.write(publish)

    async def touch_server(self, job_id: str, now_s: float) -> None:
        update = "UPDATE server SET used_at = ? WHERE job_id = ? AND used_at < ?"
        await self._thread.write(lambda db: db.execute(update, (now_s, job_id, now_s)))

    async def servers(self) -> Sequence[ServerRow]:
        return [decode_server(row) for row in await self._rows(SERVERS, ())]

    async def cancel(self, job_id: str, reason: str, actor: str, now_s: float) -> JobRow:
        def end(db: sqlite3.Connection) -> JobRow:
            for member in unfinished_members(leases.read_members(db, job_id)) or [job_id]:
                leases.cancel(db, member, reason, actor, now_s)
            return leases.read_job(db, job_id)

        return await self._thread.write(end)

    async def requeue(self, job_id: str, actor: str, now_s: float, *, submitter: Submitter = OPERATOR) -> JobRow:
        def run_again(db: sqlite3.Connection) -> JobRow:
            rows = leases.read_members(db, job_id)
            members = requeued_members(job_id, {member: (row.status, row.spec) for member, row in rows.items()})
            check_quota(db, ApplyPlan(requeued=members), submitter, now_s)
            for member, spec in members.items():
                if spec != rows[member].spec:
                    db.execute("UPDATE job SET spec = ? WHERE id = ?", (encode(spec), member))
                leases.requeue(db, member, actor, now_s)
            return leases.read_job(db, job_id)

        return await self._thread.write(run_again)

    async def archive(self, job_id: str, actor: str, now_s: float) -> JobRow:
        def hide(db: sqlite3.Connection) -> JobRow:
            for member in leases.read_members(db, job_id):
                leases.archive(db, member, actor, now_s)
            return leases.read_job(db, job_id)

        return await self._thread.write(hide)

    async def expire_leases(self, now_s: float, limit: int = 1000) -> Sequence[JobRow]:
        def expire(db: sqlite3.Connection) -> list[JobRow]:
            select = "SELECT job_id FROM lease WHERE NOT expired AND expires_at <= ? ORDER BY expires_at LIMIT ?"
            due = db.execute(select, (now_s, limit)).fetchall()
            return [leases.expire(db, job_id, now_s) for (job_id,) in due]

        return await self._thread.write(expire)

    async def release_backoffs(self, now_s: float, limit: int = 1000) -> int:
        def promote(db: sqlite3.Connection) -> int:
            select = "SELECT seq FROM ripening WHERE not_before <= ? ORDER BY not_before LIMIT ?"
            due = db.execute(select, (now_s, limit)).fetchall()
            db.executemany("DELETE FROM ripening WHERE seq = ?", due)
            for (seq,) in due:
                leases.enqueue(db, seq, now_s)
            return len(due)

        return await self._thread.write(promote)

    async def job(self, job_id: str) -> JobRow:
        return await self._thread.read(lambda db: leases.read_job(db, job_id))

    async def find(self, prefix: str, limit: int = 6) -> Sequence[str]:
        whole = prefix if prefix.startswith("job") else f"job1_{prefix}"
        # '~' sorts after every character of an id.
        rows = await self._rows(
            "SELECT id FROM job WHERE id >= ? AND id < ? ORDER BY id LIMIT ?", (whole, f"{whole}~", limit)
        )
        return [id_ for (id_,) in rows]

    async def jobs(self, wanted: JobFilter) -> Sequence[JobRow]:
        return [decode_job(row) for row in await self._rows(*select_jobs(wanted, _JOBS))]

    async def attempts(self, job_id: str) -> Sequence[AttemptRow]:
        await self.job(job_id)
        select = f"SELECT {ATTEMPT} FROM attempt WHERE job_id = ? ORDER BY epoch"
        return [decode_attempt(row) for row in await self._rows(select, (job_id,))]

    async def held(self) -> Mapping[str, Sequence[Taken]]:
        return decode_held(await self._rows(HELD.format(join=LEASES_FIRST), ()))

    async def jobs_on(self, host_ids: Sequence[str]) -> Mapping[str, Sequence[JobOnHost]]:
        listed = "a.host_id IN (SELECT value FROM json_each(?))"
        return decode_jobs_on_hosts(await self._rows(JOBS_ON.format(listed=listed), (encode(list(host_ids)).decode(),)))

    async def sweeps(self) -> Sequence[SweepRow]:
        return decode_sweeps(await self._rows(SWEEPS, ()))

    async def trials(self, project: str, sweep: str) -> Sequence[TrialRow]:
        select = TRIALS.format(project=":project", sweep=":sweep")
        return decode_trials(await self._rows(select, {"project": project, "sweep": sweep}))

    async def refusals(self, job_id: str) -> Sequence[str]:
        select = "SELECT r.host_id FROM job_refusal r JOIN job j ON j.seq = r.seq WHERE j.id = ? ORDER BY 1"
        rows = await self._rows(select, (job_id,))
        return [host_id for (host_id,) in rows]

    async def refused_jobs(self) -> Sequence[RefusedJob]:
        return decode_refused_jobs(await self._rows(REFUSED, ()))

    async def fail_refused(self, eligible: Mapping[str, Collection[str]], now_s: float) -> Sequence[JobRow]:
        return await self._thread.write(lambda db: leases.fail_refused(db, eligible, now_s))

    async def refusing_hosts(self) -> Collection[str]:
        return {host_id for (host_id,) in await self._rows("SELECT DISTINCT host_id FROM job_refusal", ())}

    async def unfinished_classes(self) -> Collection[int]:
        select = f"SELECT DISTINCT class_id FROM job WHERE status IN ({', '.join('?' * len(UNFINISHED))})"
        return {class_id for (class_id,) in await self._rows(select, UNFINISHED)}

    async def infra_jobs(self, host_id: str) -> Sequence[str]:
        rows = await self._rows(
            "SELECT DISTINCT job_id FROM attempt WHERE host_id = :host AND cause = 'infra' AND ended_at >"
            " coalesce((SELECT max(ended_at) FROM attempt WHERE host_id = :host AND outcome = 'completed'), 0)",
            {"host": host_id},
        )
        return [job_id for (job_id,) in rows]

    async def counts(self, project: str = "") -> Counts:
        rows = await self._rows(KEPT_COUNTS.format(only=_ONLY, held=_JOBS.held), {"project": project})
        ((ready, hosts),) = await self._rows("SELECT (SELECT count(*) FROM ready), (SELECT count(*) FROM host)", ())
        return Counts(by_status=kept_counts(rows), ready=ready, hosts=hosts)

    async def compact_counts(self) -> None:
        """Nothing to do: the one writer adds to the row of a count."""

    async def held_cards(self) -> float:
        return held_cards(await self._rows(HELD_AMOUNTS.format(join=LEASES_FIRST), ()))

    async def waiting_classes(self, project: str = "") -> Sequence[WaitingClass]:
        ready = READY_OF.format(project=":project") if project else READY
        rows = await self._rows(WAITING_CLASSES.format(ready=ready), {"project": project} if project else {})
        return [WaitingClass(*row) for row in rows]

    async def ledger(self, since_s: float, project: str, limit: int) -> JobLedger:
        values = {"since": since_s, "project": project, "limit": limit}
        rows = await self._rows(_LEDGER, values)
        events = [row for kind in LEDGER_EVENTS for row in await self._rows(_LEDGER_EVENTS, {**values, "kind": kind})]
        return decode_ledger(rows, events, limit)

    async def record_samples(self, points: Sequence[SamplePoint]) -> None:
        await self._thread.write(lambda db: _write_samples(db, 0, points))

    async def roll_up_samples(self, now_s: float) -> None:
        def roll_up(db: sqlite3.Connection) -> None:
            for step_s, _, source_s in RESOLUTIONS[1:]:
                (last,) = db.execute("SELECT max(at) FROM host_sample WHERE step = ?", (step_s,)).fetchone()
                select = "SELECT host_id, at, body FROM host_sample WHERE step = ? AND at >= ? AND at < ?"
                until_s = (now_s - LATE_S) // step_s * step_s
                rows = db.execute(select, (source_s, 0.0 if last is None else last + step_s, until_s))
                _write_samples(db, step_s, average(decode_points(rows), step_s))
            for step_s, keep_s, _ in RESOLUTIONS:
                db.execute("DELETE FROM host_sample WHERE step = ? AND at < ?", (step_s, now_s - keep_s))

        await self._thread.write(roll_up)

    async def samples(self, host_id: str, step_s: int, since_s: float) -> Sequence[SamplePoint]:
        select = "SELECT host_id, at, body FROM host_sample WHERE host_id = ? AND step = ? AND at >= ? ORDER BY at"
        return decode_points(await self._rows(select, (host_id, step_s, since_s)))

    async def events(self, after: str, limit: int, *, subject: str = "") -> Sequence[events.StoredEvent]:
        return await events.read(SqliteDatabase(self._thread), after, limit, subject=subject)

    async def events_before(self, before: str, limit: int, wanted: EventFilter) -> EventPage:
        return await events.read_before(SqliteDatabase(self._thread), before, limit, wanted)

    async def drop_events(self, before_s: float, limit: int = 10_000) -> int:
        return await events.drop(SqliteDatabase(self._thread), before_s, limit)

    async def close(self) -> None:
        await self._thread.close()

    async def _rows(self, select: str, values: Sequence[Any] | Mapping[str, Any]) -> list[Any]:
        return await self._thread.read(lambda db: db.execute(select, values).fetchall())


def _host(db: sqlite3.Connection, host_id: str) -> HostRow:
    row = db.execute(f"SELECT {HOST} FROM host LEFT JOIN host_beat ON host_id = id WHERE id = ?", (host_id,)).fetchone()
    if row is None:
        raise StrataError(Code.NOT_FOUND, f"there is no host {host_id!r}")
    return decode_host(row)


def _write_samples(db: sqlite3.Connection, step_s: int, points: Sequence[SamplePoint]) -> None:
    db.executemany(
        "INSERT OR REPLACE INTO host_sample SELECT ?1, ?2, ?3, ?4"
        " WHERE ?2 = 'fleet' OR EXISTS (SELECT 1 FROM host WHERE id = ?2)",
        ((step_s, point.host_id, point.at_s, encode(point.values)) for point in points),
    )


def _record_heartbeats(db: sqlite3.Connection, seen: Mapping[str, float]) -> None:
    db.executemany(
        "INSERT INTO host_beat SELECT id, ? FROM host WHERE id = ?"
        " ON CONFLICT (host_id) DO UPDATE SET seen = max(seen, excluded.seen)",
        ((seen_at_s, host_id) for host_id, seen_at_s in seen.items()),
    )
    for host_id, since_s in db.execute("SELECT host_id, since FROM host_lost").fetchall():
        if host_id in seen:
            db.execute("DELETE FROM host_lost WHERE host_id = ?", (host_id,))
            leases.record(db, seen[host_id], "hub", "host.returned", host_id, silent_s=seen[host_id] - since_s)
