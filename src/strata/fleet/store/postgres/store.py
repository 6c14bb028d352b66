"""The fleet in PostgreSQL: for many hubs. Short transactions on locked rows; nothing is decided on what may change."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any, Final

import msgspec
from msgspec import to_builtins

from strata.base.errors import Code, StrataError
from strata.database import events
from strata.database.events import EventFilter, EventPage
from strata.database.postgres import Connections
from strata.database.transaction import PostgresDatabase
from strata.fleet.core.amounts import Taken
from strata.fleet.core.fair_share import OwnerShares
from strata.fleet.core.goodput import LEDGER_EVENTS
from strata.fleet.core.job import UNFINISHED, JobStatus
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
from strata.fleet.store.postgres import leases
from strata.fleet.store.postgres import tables as sql
from strata.fleet.store.postgres.claims import claim_jobs
from strata.fleet.store.postgres.plan import apply_plan, check_quota, lock_plans, read_usage
from strata.fleet.store.postgres.reservations import apply_reservations
from strata.fleet.store.rows import (
    ATTEMPT,
    EXISTING_JOB,
    HELD,
    HELD_AMOUNTS,
    HELD_BY_OWNER,
    HOST,
    JOBS_ON,
    KEPT_COUNTS,
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
    MatchingJobs,
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

APPLY_S: Final = 120.0
"""A plan may have tens of thousands of jobs, and is one transaction; the usage of a month may have as many attempts."""
_LEDGER: Final = LEDGER_ATTEMPTS.format(
    ended="attempt",
    since="%(since)s",
    limit="%(limit)s",
    only="{only}",
    # The planner would read all attempts there ever were.
    attempt="CROSS JOIN LATERAL (SELECT * FROM attempt t"
    " WHERE t.job_id = w.job_id AND t.epoch = w.epoch OFFSET 0) AS a",
)
_GPU_S: Final = OWNER_GPU_S.format(
    cards="(SELECT jsonb_array_length(t -> 'cards') * coalesce((t ->> 'gpu_share')::float8, 1.0)"
    " FROM (SELECT convert_from(a.taken, 'UTF8')::jsonb AS t) AS x)",
    has_cards="position('\"cards\"'::bytea IN a.taken) > 0",
    largest="greatest",
    now="%(now)s",
    since="%(since)s",
)
_LEDGER_EVENTS: Final = LEDGER_EVENTS_SINCE.format(
    kind="%(kind)s", since="%(since)s", order="tx DESC, seq DESC", limit="%(limit)s"
)
_PUBLISH: Final = PUBLISH.format(
    **{name: f"%({name})s" for name in ("address", "models", "now", "job", "epoch", "host")}
)
_HOSTS = f"SELECT {HOST} FROM host LEFT JOIN host_beat ON host_id = id"
FEW_HOSTS: Final = 100
"""The jobs of so many hosts are found by their index."""
NEWEST_MATCHES: Final = 1000
"""So many jobs of each kind of match a search looks at first."""
_JOBS: Final = JobsDialect(
    mark="%({})s",
    one_of="{} = ANY({})",
    listed=list,
    contains="strpos({}, lower({})) > 0",
    searched="job",
    # In one text: to lower its case costs more than to put it together.
    searched_text=r"lower(label || E'\n' || owner || E'\n' || project || E'\n' || model || E'\n' || sweep)",
    ended="job",
    failed="job",
    held="job",
    newest="job",
    servers="job",
    may_serve=sql.MAY_SERVE,
    # The planner would read all jobs a second time, to have them in order.
    by_match="(SELECT DISTINCT seq AS match FROM ({matches}) AS m ORDER BY match DESC OFFSET 0) AS matching"
    " CROSS JOIN LATERAL (SELECT * FROM job WHERE job.seq = matching.match AND {where} OFFSET 0) AS job",
)


class PostgresStore:
    """On connections to a database that has the components `event` and `fleet`."""

    def __init__(self, connections: Connections, *, newest_matches: int = NEWEST_MATCHES) -> None:
        self._connections = connections
        self._newest_matches = newest_matches
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
        async with self._connections.transaction(APPLY_S) as connection:
            await apply_plan(connection, plan, actor, now_s, source=source, declared=declared, submitter=submitter)

    async def existing_jobs(self) -> Mapping[str, ExistingJob]:
        rows = await self._connections.run(f"SELECT id, {EXISTING_JOB} FROM job", {})
        return {id_: decode_existing_job(rest) for id_, *rest in rows}

    async def projects(self) -> Mapping[str, str]:
        return dict(await self._connections.run("SELECT name, owner FROM project", {}))

    async def quotas(self) -> Mapping[str, Quota]:
        return decode_quotas(await self._connections.run(QUOTAS, {}))

    async def set_quota(self, owner: str, quota: Quota | None, actor: str, now_s: float) -> None:
        async with self._connections.transaction() as connection:
            if quota is None:
                await connection.execute("DELETE FROM quota WHERE owner = %s", (owner,))
            else:
                upsert = "INSERT INTO quota VALUES (%s, %s) ON CONFLICT (owner) DO UPDATE SET spec = excluded.spec"
                await connection.execute(upsert, (owner, encode_quota(quota)))
            body = None if quota is None else to_builtins(quota)
            await leases.record(connection, now_s, actor, "quota.changed", owner, quota=body)

    async def usage(self, owner: str, window_s: float, now_s: float) -> OwnerUsage:
        async with self._connections.transaction() as connection:
            return await read_usage(connection, owner, window_s, now_s)

    async def usages(self, window_s: float, now_s: float) -> OwnerUsages:
        jobs = await self._connections.run(OWNER_JOBS.format(job="job"), {})
        async with self._connections.transaction(APPLY_S) as connection:
            # Most attempts are read, which an index makes dearer.
            await connection.execute("SET LOCAL enable_seqscan = on")
            cursor = await connection.execute(_GPU_S, {"now": now_s, "since": now_s - window_s})
            return owner_usages(jobs, await cursor.fetchall())

    async def owners(self) -> Collection[str]:
        return [owner for (owner,) in await self._connections.run(OWNERS.format(job="job"), {})]

    async def classes(self, after_id: int = 0) -> Sequence[ClassRow]:
        select = "SELECT id, spec FROM req_class WHERE id > %(after)s ORDER BY id"
        decode = msgspec.json.Decoder(RequirementClass).decode
        rows = await self._connections.run(select, {"after": after_id})
        return [ClassRow(id=id_, requirement=decode(spec)) for id_, spec in rows]

    async def policies(self) -> Mapping[str, HostPolicy]:
        return decode_policies(await self._connections.run(POLICIES, {}))

    async def trainers(self) -> Mapping[tuple[str, str], RegisteredTrainer]:
        return decode_trainers(await self._connections.run(TRAINERS, {}))

    async def trainer(self, digest: str) -> TrainerSpec:
        select = "SELECT spec FROM trainer WHERE digest = %(digest)s"
        return decode_known_trainer(await self._connections.run(select, {"digest": digest}), digest)

    async def register_host(self, host: HostRow, actor: str) -> HostRow:
        async with self._connections.transaction() as connection:
            select = "SELECT capability, state FROM host WHERE id = %s FOR UPDATE"
            before = await (await connection.execute(select, (host.id,))).fetchone()
            capability, labels = encode(host.capability), encode(dict(host.labels))
            await connection.execute(
                "INSERT INTO host (id, name, capability, registered_at, state, state_reason, agent_version, pool,"
                " labels) VALUES (%s, %s, %s, %s, 'active', '', %s, %s, %s) ON CONFLICT (id) DO UPDATE SET"
                " name = excluded.name, capability = excluded.capability, agent_version = excluded.agent_version,"
                " pool = excluded.pool, labels = excluded.labels,"
                " state = CASE host.state WHEN 'left' THEN 'active' ELSE host.state END",
                (host.id, host.name, capability, host.registered_at_s, host.agent_version, host.pool, labels),
            )
            # What is locked is being deleted already, by the end of its job, a requeue or a plan.
            await connection.execute(
                "DELETE FROM job_refusal WHERE host_id = %s AND seq IN"
                " (SELECT seq FROM job_refusal WHERE host_id = %s FOR UPDATE SKIP LOCKED)",
                (host.id, host.id),
            )
            await _record_heartbeats(connection, {host.id: host.registered_at_s})
            if before is None or before[0] != capability or before[1] == "left":
                await leases.record(connection, host.registered_at_s, actor, "host.registered", host.id, name=host.name)
            return await _host(connection, host.id)

    async def hosts(self) -> Sequence[HostRow]:
        # Sorted here: there the rows with all they have would be sorted on disk.
        return self._hosts.decode(await self._connections.run(_HOSTS, {}))

    async def find_hosts(self, text: str) -> Sequence[HostRow]:
        rows = await self._connections.run(
            f"{_HOSTS} WHERE id = %(text)s OR name = %(text)s ORDER BY name, id", {"text": text}
        )
        return [decode_host(row) for row in rows]

    async def set_host_state(self, host_id: str, state: str, reason: str, actor: str, now_s: float) -> HostRow:
        async with self._connections.transaction() as connection:
            update = "UPDATE host SET state = %s, state_reason = %s WHERE id = %s AND state <> %s"
            changed = await connection.execute(update, (state, reason, host_id, state))
            if changed.rowcount:
                await leases.record(connection, now_s, actor, f"host.{state}", host_id, reason=reason)
            return await _host(connection, host_id)

    async def record_heartbeats(self, seen: Mapping[str, float]) -> None:
        async with self._connections.transaction() as connection:
            await _record_heartbeats(connection, seen)

    async def record_lost_hosts(self, silent_since_s: float, now_s: float) -> int:
        async with self._connections.transaction() as connection:
            insert = f"INSERT INTO host_lost {LOST_HOSTS.format(since='%s')} ON CONFLICT DO NOTHING RETURNING *"
            lost = await (await connection.execute(insert, (silent_since_s,))).fetchall()
            for host_id, seen_at_s in lost:
                await leases.record(connection, now_s, "hub", "host.lost", host_id, seen_at_s=seen_at_s)
            return len(lost)

    async def held_by_owner(self) -> Sequence[tuple[str, Taken, int]]:
        rows = await self._connections.run(HELD_BY_OWNER.format(join="JOIN"), {})
        return [(owner, decode_taken(taken), leases) for owner, taken, leases in rows]

    async def claim(
        self, claims: Sequence[Claim], lease_s: float, now_s: float, shares: OwnerShares | None = None
    ) -> Sequence[Sequence[JobLease]]:
        return await claim_jobs(self._connections, claims, lease_s, now_s, shares)

    async def reserve(self, planner: ReservationPlanner, now_s: float) -> ReservationPlan:
        async with self._connections.transaction() as connection:
            return await apply_reservations(connection, planner, now_s)

    async def reservations(self) -> Sequence[Reservation]:
        return decode_reservations(await self._connections.run(RESERVATIONS, {}))

    async def renew(
        self, host_id: str, renewals: Sequence[Renewal], lease_s: float, now_s: float
    ) -> Sequence[RenewalResult]:
        until_s = now_s + lease_s
        extended = await self._connections.run(
            sql.EXTEND,
            {
                "jobs": [each.job_id for each in renewals],
                "epochs": [each.epoch for each in renewals],
                "host": host_id,
                "until": until_s,
            },
        )
        held = {(job_id, epoch): (JobStatus(status), preempt) for job_id, epoch, status, preempt in extended}
        results = []
        for each in renewals:
            status, preempt = held.get((each.job_id, each.epoch), (None, ""))
            if status is None or (each.running and status is JobStatus.CLAIMED):
                async with self._connections.transaction() as connection:
                    results.append(await leases.renew(connection, host_id, each, lease_s, now_s))
            else:
                results.append(
                    RenewalResult(
                        job_id=each.job_id,
                        epoch=each.epoch,
                        verdict="held",
                        status=status,
                        expires_at_s=until_s,
                        preempt=preempt,
                    )
                )
        return results

    async def complete(self, attempt: AttemptKey, completion: JobCompletion, now_s: float) -> JobRow:
        async with self._connections.transaction() as connection:
            done = await leases.complete(connection, attempt, completion, now_s)
        if isinstance(done, StrataError):
            raise done
        return done

    async def fail(
        self, attempt: AttemptKey, failure: JobFailure, now_s: float, *, chance: float, eligible: Collection[str] = ()
    ) -> JobRow:
        async with self._connections.transaction() as connection:
            return await leases.fail(connection, attempt, failure, now_s, chance, eligible)

    async def record_checkpoint(self, attempt: AttemptKey, artifact: str, now_s: float) -> None:
        async with self._connections.transaction() as connection:
            await leases.record_checkpoint(connection, attempt, artifact, now_s)

    async def publish_server(self, attempt: AttemptKey, address: str, models: Sequence[str], now_s: float) -> None:
        values = {"address": address, "models": encode(list(models)), "now": now_s}
        values |= {"job": attempt.job_id, "epoch": attempt.epoch, "host": attempt.host_id}
        async with self._connections.transaction() as connection:
            published = await connection.execute(_PUBLISH, values)
            if not published.rowcount:
                current = await leases.require_job(connection, attempt.job_id)
                raise stale_attempt(attempt.job_id, attempt.epoch, current.epoch)
            actor = f"host:{attempt.host_id}"
            await leases.record(
                connection, now_s, actor, "job.serving", attempt.job_id, epoch=attempt.epoch, address=address
            )

    async def touch_server(self, job_id: str, now_s: float) -> None:
        async with self._connections.transaction() as connection:
            update = "UPDATE server SET used_at = %s WHERE job_id = %s AND used_at < %s"
            await connection.execute(update, (now_s, job_id, now_s))

    async def servers(self) -> Sequence[ServerRow]:
        return [decode_server(row) for row in await self._connections.run(SERVERS, {})]

    async def cancel(self, job_id: str, reason: str, actor: str, now_s: float) -> JobRow:
        async with self._connections.transaction() as connection:
            for member in unfinished_members(await leases.lock_members(connection, job_id)) or [job_id]:
                await leases.cancel(connection, member, reason, actor, now_s)
            return await leases.read_job(connection, job_id)

    async def requeue(self, job_id: str, actor: str, now_s: float, *, submitter: Submitter = OPERATOR) -> JobRow:
        async with self._connections.transaction() as connection:
            if not submitter.operator:
                # Requests of one owner are counted one after the other.
                await lock_plans(connection)
            rows = await leases.lock_members(connection, job_id)
            members = requeued_members(job_id, {member: (row.status, row.spec) for member, row in rows.items()})
            await check_quota(connection, ApplyPlan(requeued=members), submitter, now_s)
            for member, spec in members.items():
                if spec != rows[member].spec:
                    await connection.execute("UPDATE job SET spec = %s WHERE id = %s", (encode(spec), member))
                await leases.requeue(connection, member, actor, now_s)
            return await leases.read_job(connection, job_id)

    async def archive(self, job_id: str, actor: str, now_s: float) -> JobRow:
        async with self._connections.transaction() as connection:
            for member in await leases.lock_members(connection, job_id):
                await leases.archive(connection, member, actor, now_s)
            return await leases.read_job(connection, job_id)

    async def expire_leases(self, now_s: float, limit: int = 1000) -> Sequence[JobRow]:
        select = (
            "SELECT job_id FROM lease WHERE NOT expired AND expires_at <= %(now)s ORDER BY expires_at LIMIT %(limit)s"
        )
        due = await self._connections.run(select, {"now": now_s, "limit": limit})
        expired = []
        for (job_id,) in due:
            # One transaction each: a job that somebody works on holds up nobody else's.
            async with self._connections.transaction() as connection:
                row = await leases.expire(connection, job_id, now_s)
            if row is not None:
                expired.append(row)
        return expired

    async def release_backoffs(self, now_s: float, limit: int = 1000) -> int:
        async with self._connections.transaction() as connection:
            cursor = await connection.execute(
                "DELETE FROM ripening WHERE seq IN (SELECT r.seq FROM ripening r JOIN job j USING (seq)"
                " WHERE r.not_before <= %s ORDER BY r.not_before LIMIT %s FOR UPDATE SKIP LOCKED) RETURNING seq",
                (now_s, limit),
            )
            due = await cursor.fetchall()
            await leases.enqueue(connection, [seq for (seq,) in due], now_s)
            return len(due)

    async def job(self, job_id: str) -> JobRow:
        async with self._connections.transaction() as connection:
            return await leases.read_job(connection, job_id)

    async def find(self, prefix: str, limit: int = 6) -> Sequence[str]:
        whole = prefix if prefix.startswith("job") else f"job1_{prefix}"
        # '~' sorts after every character of an id.
        rows = await self._connections.run(
            "SELECT id FROM job WHERE id >= %(low)s AND id < %(high)s ORDER BY id LIMIT %(limit)s",
            {"low": whole, "high": f"{whole}~", "limit": limit},
        )
        return [id_ for (id_,) in rows]

    async def jobs(self, wanted: JobFilter) -> Sequence[JobRow]:
        if wanted.search and wanted.order == "newest":
            return await self._search_newest(wanted)
        return [decode_job(row) for row in await self._connections.run(*select_jobs(wanted, _JOBS))]

    async def _search_newest(self, wanted: JobFilter) -> Sequence[JobRow]:
        """What many jobs match is found among the newest ones, without looking at all."""
        is_named = _JOBS.contains.format("lower(name)", "%(needle)s")
        select = f"SELECT id FROM host WHERE {is_named} LIMIT {FEW_HOSTS + 1}"
        hosts = [id_ for (id_,) in await self._connections.run(select, {"needle": wanted.search})]
        named = hosts if len(hosts) <= FEW_HOSTS else None
        rows: list[tuple[Any, ...]] = []
        for most in (self._newest_matches, None):
            rows = await self._connections.run(*select_jobs(wanted, _JOBS, MatchingJobs(named, most)))
            if len(rows) >= wanted.limit:
                break
        return [decode_job(row) for row in rows]

    async def attempts(self, job_id: str) -> Sequence[AttemptRow]:
        await self.job(job_id)
        select = f"SELECT {ATTEMPT} FROM attempt WHERE job_id = %(id)s ORDER BY epoch"
        return [decode_attempt(row) for row in await self._connections.run(select, {"id": job_id})]

    async def held(self) -> Mapping[str, Sequence[Taken]]:
        return decode_held(await self._connections.run(HELD.format(join="JOIN"), {}))

    async def jobs_on(self, host_ids: Sequence[str]) -> Mapping[str, Sequence[JobOnHost]]:
        select = JOBS_ON.format(listed="a.host_id || '' = ANY(%(hosts)s)")
        return decode_jobs_on_hosts(await self._connections.run(select, {"hosts": list(host_ids)}))

    async def sweeps(self) -> Sequence[SweepRow]:
        return decode_sweeps(await self._connections.run(SWEEPS, {}))

    async def trials(self, project: str, sweep: str) -> Sequence[TrialRow]:
        select = TRIALS.format(project="%(project)s", sweep="%(sweep)s")
        return decode_trials(await self._connections.run(select, {"project": project, "sweep": sweep}))

    async def refusals(self, job_id: str) -> Sequence[str]:
        select = "SELECT r.host_id FROM job_refusal r JOIN job j ON j.seq = r.seq WHERE j.id = %(id)s ORDER BY 1"
        return [host_id for (host_id,) in await self._connections.run(select, {"id": job_id})]

    async def refused_jobs(self) -> Sequence[RefusedJob]:
        return decode_refused_jobs(await self._connections.run(REFUSED, {}))

    async def fail_refused(self, eligible: Mapping[str, Collection[str]], now_s: float) -> Sequence[JobRow]:
        async with self._connections.transaction() as connection:
            return await leases.fail_refused(connection, eligible, now_s)

    async def refusing_hosts(self) -> Collection[str]:
        rows = await self._connections.run("SELECT DISTINCT host_id FROM job_refusal", {})
        return {host_id for (host_id,) in rows}

    async def unfinished_classes(self) -> Collection[int]:
        select = "SELECT DISTINCT class_id FROM job WHERE status = ANY(%(unfinished)s)"
        rows = await self._connections.run(select, {"unfinished": list(UNFINISHED)})
        return {class_id for (class_id,) in rows}

    async def infra_jobs(self, host_id: str) -> Sequence[str]:
        rows = await self._connections.run(
            "SELECT DISTINCT job_id FROM attempt WHERE host_id = %(host)s AND cause = 'infra' AND ended_at >"
            " coalesce((SELECT max(ended_at) FROM attempt WHERE host_id = %(host)s AND outcome = 'completed'), 0)",
            {"host": host_id},
        )
        return [job_id for (job_id,) in rows]

    async def counts(self, project: str = "") -> Counts:
        only = "project = %(project)s" if project else "true"
        rows = await self._connections.run(KEPT_COUNTS.format(only=only, held=_JOBS.held), {"project": project})
        ((ready, hosts),) = await self._connections.run(
            "SELECT (SELECT count(*) FROM ready), (SELECT count(*) FROM host)", {}
        )
        return Counts(by_status=kept_counts(rows), ready=ready, hosts=hosts)

    async def compact_counts(self) -> None:
        await self._connections.write(sql.COMPACT_COUNTS, {})

    async def held_cards(self) -> float:
        return held_cards(await self._connections.run(HELD_AMOUNTS.format(join="JOIN"), {}))

    async def waiting_classes(self, project: str = "") -> Sequence[WaitingClass]:
        ready = READY_OF.format(project="%(project)s") if project else READY
        rows = await self._connections.run(WAITING_CLASSES.format(ready=ready), {"project": project})
        return [WaitingClass(*row) for row in rows]

    async def ledger(self, since_s: float, project: str, limit: int) -> JobLedger:
        values = {"since": since_s, "project": project, "limit": limit}
        only = "j.project = %(project)s" if project else "true"
        rows = await self._connections.run(_LEDGER.format(only=only), values)
        events = [
            row
            for kind in LEDGER_EVENTS
            for row in await self._connections.run(_LEDGER_EVENTS, {**values, "kind": kind})
        ]
        return decode_ledger(rows, events, limit)

    async def record_samples(self, points: Sequence[SamplePoint]) -> None:
        await self._write_samples(0, points)

    async def roll_up_samples(self, now_s: float) -> None:
        for step_s, _, source_s in RESOLUTIONS[1:]:
            select = """
            SELECT host_id, at, body FROM host_sample WHERE step = %(source)s AND at < %(until)s
              AND at >= (SELECT coalesce(max(at) + %(step)s, 0) FROM host_sample WHERE step = %(step)s)
            """
            until_s = (now_s - LATE_S) // step_s * step_s
            rows = await self._connections.run(select, {"source": source_s, "step": step_s, "until": until_s})
            await self._write_samples(step_s, average(decode_points(rows), step_s))
        for step_s, keep_s, _ in RESOLUTIONS:
            delete = "DELETE FROM host_sample WHERE step = %(step)s AND at < %(before)s"
            await self._connections.write(delete, {"step": step_s, "before": now_s - keep_s})

    async def _write_samples(self, step_s: int, points: Sequence[SamplePoint]) -> None:
        insert = """
        INSERT INTO host_sample SELECT %(step)s, w.host, w.at, w.body
        FROM unnest(%(hosts)s::text[], %(at)s::float8[], %(bodies)s::bytea[]) AS w (host, at, body)
        WHERE w.host = 'fleet' OR EXISTS (SELECT FROM host WHERE id = w.host)
        ON CONFLICT (host_id, step, at) DO UPDATE SET body = excluded.body
        """
        values = {
            "step": step_s,
            "hosts": [point.host_id for point in points],
            "at": [point.at_s for point in points],
            "bodies": [encode(point.values) for point in points],
        }
        if points:
            await self._connections.write(insert, values)

    async def samples(self, host_id: str, step_s: int, since_s: float) -> Sequence[SamplePoint]:
        select = """
        SELECT host_id, at, body FROM host_sample
        WHERE host_id = %(host)s AND step = %(step)s AND at >= %(since)s ORDER BY at
        """
        values = {"host": host_id, "step": step_s, "since": since_s}
        return decode_points(await self._connections.run(select, values))

    async def events(self, after: str, limit: int, *, subject: str = "") -> Sequence[events.StoredEvent]:
        return await events.read(PostgresDatabase(self._connections), after, limit, subject=subject)

    async def events_before(self, before: str, limit: int, wanted: EventFilter) -> EventPage:
        return await events.read_before(PostgresDatabase(self._connections), before, limit, wanted)

    async def drop_events(self, before_s: float, limit: int = 10_000) -> int:
        return await events.drop(PostgresDatabase(self._connections), before_s, limit)

    async def close(self) -> None:
        await self._connections.close()


async def _host(connection: leases.Connection, host_id: str) -> HostRow:
    row = await (await connection.execute(f"{_HOSTS} WHERE id = %s", (host_id,))).fetchone()
    if row is None:
        raise StrataError(Code.NOT_FOUND, f"there is no host {host_id!r}")
    return decode_host(row)


async def _record_heartbeats(connection: leases.Connection, seen: Mapping[str, float]) -> None:
    ordered = sorted(seen.items())
    await connection.execute(
        "INSERT INTO host_beat SELECT w.id, w.at FROM unnest(%s::text[], %s::float8[]) AS w (id, at)"
        " JOIN host USING (id) ORDER BY w.id"
        " ON CONFLICT (host_id) DO UPDATE SET seen = greatest(host_beat.seen, excluded.seen)",
        ([host_id for host_id, _ in ordered], [at_s for _, at_s in ordered]),
    )
    # The table is empty as a rule.
    delete = "DELETE FROM host_lost WHERE host_id = ANY(%s) RETURNING host_id, since"
    returned = await (await connection.execute(delete, (list(seen),))).fetchall()
    for host_id, since_s in returned:
        at_s = seen[host_id]
        await leases.record(connection, at_s, "hub", "host.returned", host_id, silent_s=at_s - since_s)
