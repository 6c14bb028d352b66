"""SQL of jobs for people: show, attempts, refusals, sweeps, trials, cancel, requeue, archive, published servers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import msgspec

from strata.database import event_kinds
from strata.database.transaction import Database, Transaction
from strata.fleet.core.job import TERMINAL, Cause, JobStatus
from strata.fleet.core.lease_status import stale_attempt
from strata.fleet.core.ownership import OPERATOR, Submitter
from strata.fleet.core.plan import ApplyPlan, requeued_members
from strata.fleet.records import AttemptKey, AttemptRow, JobFilter, JobRow, ServerRow, SweepRow, TrialRow
from strata.fleet.store import leases
from strata.fleet.store.lists import SearchIndexes, id_range, list_jobs
from strata.fleet.store.plan import check_quota, lock_plans
from strata.fleet.store.queue import record
from strata.fleet.store.rows import HIDDEN, JOB, decode_facts, decode_job, decode_taken, encode

_ATTEMPTS: Final = (
    "SELECT job_id, number, epoch, host_id, claimed_at, started_at, ended_at, outcome, cause, error, artifact,"
    " checkpoint, facts, trainer_digest, taken FROM attempt WHERE job_id = :job ORDER BY epoch"
)
_ATTEMPT_FIELDS: Final = (
    "job_id", "attempt", "epoch", "host_id", "claimed_at_s", "started_at_s", "ended_at_s", "outcome", "cause", "error",
    "artifact", "checkpoint", "facts", "trainer_digest", "taken",
)  # fmt: skip
_SERVERS: Final = (
    f"SELECT s.epoch, s.address, s.models, s.used_at, j.* FROM server s JOIN (SELECT {JOB} FROM job) j"
    " ON j.id = s.job_id ORDER BY s.job_id"
)
_PUBLISH: Final = (
    "INSERT INTO server (job_id, epoch, address, models, used_at)"
    " SELECT id, epoch, :address, :models, :now FROM job"
    " WHERE id = :job AND epoch = :epoch AND host_id = :host AND status IN ('claimed', 'running')"
    " ON CONFLICT (job_id) DO UPDATE SET epoch = excluded.epoch, address = excluded.address,"
    " models = excluded.models, used_at = excluded.used_at WHERE server.epoch <= excluded.epoch"
)
"""A zombie changes nothing."""
_SWEEPS: Final = (
    f"SELECT project, sweep, status, count(*), max(changed_at) FROM job WHERE sweep <> '' AND NOT {HIDDEN}"
    " GROUP BY project, sweep, status ORDER BY project, sweep, status"
)
_TRIALS: Final = (
    "SELECT j.id, j.status, j.reason, j.owner, j.changed_at, a.facts FROM job j LEFT JOIN attempt a"
    " ON a.job_id = j.id AND a.outcome = 'completed' AND j.status = 'completed'"
    f" WHERE j.project = :project AND j.sweep = :sweep AND j.sweep <> '' AND NOT {HIDDEN}"
    " ORDER BY j.seq, a.epoch"
)


class _CompletedFacts(msgspec.Struct):
    """The facts of a completed attempt."""

    metrics: dict[str, float] = {}


_decode_metrics: Final = msgspec.json.Decoder(_CompletedFacts).decode
_decode_models: Final = msgspec.json.Decoder(tuple[str, ...]).decode


class JobTable:
    def __init__(self, database: Database, indexes: SearchIndexes) -> None:
        self._database = database
        self._indexes = indexes

    async def get(self, job_id: str) -> JobRow:
        return await self._database.read(lambda tx: leases.read_job(tx, job_id))

    async def find(self, prefix: str, limit: int = 6) -> Sequence[str]:
        low, high = id_range(prefix)
        select = "SELECT id FROM job WHERE id >= :low AND id < :high ORDER BY id LIMIT :limit"
        return [id_ for (id_,) in await self._database.rows(select, {"low": low, "high": high, "limit": limit})]

    async def select(self, wanted: JobFilter) -> Sequence[JobRow]:
        rows = await self._database.read(lambda tx: list_jobs(tx, wanted, self._indexes))
        return [decode_job(row) for row in rows]

    async def attempts(self, job_id: str) -> Sequence[AttemptRow]:
        await self.get(job_id)
        return [_decode_attempt(row) for row in await self._database.rows(_ATTEMPTS, {"job": job_id})]

    async def refusals(self, job_id: str) -> Sequence[str]:
        select = "SELECT r.host_id FROM job_refusal r JOIN job j ON j.seq = r.seq WHERE j.id = :job ORDER BY 1"
        return [host_id for (host_id,) in await self._database.rows(select, {"job": job_id})]

    async def sweeps(self) -> Sequence[SweepRow]:
        counts: dict[tuple[str, str], dict[str, int]] = {}
        changed: dict[tuple[str, str], float] = {}
        for project, sweep, status, count, changed_at_s in await self._database.rows(_SWEEPS):
            name = project, sweep
            counts.setdefault(name, {})[status] = count
            changed[name] = max(changed.get(name, 0.0), changed_at_s)
        return [
            SweepRow(project=name[0], name=name[1], by_status=by_status, changed_at_s=changed[name])
            for name, by_status in counts.items()
        ]

    async def trials(self, project: str, sweep: str) -> Sequence[TrialRow]:
        """Returns the trials. The last result of a job counts that was completed more than once."""
        trials = {}
        rows = await self._database.rows(_TRIALS, {"project": project, "sweep": sweep})
        for job_id, status, reason, owner, changed_at_s, facts in rows:
            trials[job_id] = TrialRow(
                job_id=job_id,
                status=JobStatus(status),
                reason=reason,
                owner=owner,
                changed_at_s=changed_at_s,
                metrics={} if facts is None else _decode_metrics(facts).metrics,
            )
        return list(trials.values())

    async def cancel(self, job_id: str, reason: str, actor: str, now_s: float) -> JobRow:
        async def end(tx: Transaction) -> JobRow:
            members = await leases.lock_members(tx, job_id)
            unfinished = [member for member, row in members.items() if row.status not in TERMINAL]
            for member in unfinished or [job_id]:
                await leases.cancel(tx, member, reason, actor, now_s)
            return await leases.read_job(tx, job_id)

        return await self._database.run(end)

    async def requeue(self, job_id: str, actor: str, now_s: float, *, submitter: Submitter = OPERATOR) -> JobRow:
        async def run_again(tx: Transaction) -> JobRow:
            if not submitter.operator:
                # Requests of one owner are counted one after the other.
                await lock_plans(tx)
            rows = await leases.lock_members(tx, job_id)
            members = requeued_members(job_id, {member: (row.status, row.spec) for member, row in rows.items()})
            await check_quota(tx, ApplyPlan(requeued=members), submitter, now_s)
            for member, spec in members.items():
                if spec != rows[member].spec:
                    update = "UPDATE job SET spec = :spec WHERE id = :job"
                    await tx.execute(update, {"spec": encode(spec), "job": member})
                await leases.requeue(tx, member, actor, now_s)
            return await leases.read_job(tx, job_id)

        return await self._database.run(run_again)

    async def archive(self, job_id: str, actor: str, now_s: float) -> JobRow:
        async def hide(tx: Transaction) -> JobRow:
            for member in await leases.lock_members(tx, job_id):
                await leases.archive(tx, member, actor, now_s)
            return await leases.read_job(tx, job_id)

        return await self._database.run(hide)

    async def publish_server(self, attempt: AttemptKey, address: str, models: Sequence[str], now_s: float) -> None:
        async def publish(tx: Transaction) -> None:
            values: dict[str, Any] = {"address": address, "models": encode(list(models)), "now": now_s}
            values |= {"job": attempt.job_id, "epoch": attempt.epoch, "host": attempt.host_id}
            if not await tx.changed(_PUBLISH, values):
                current = await leases.require_job(tx, attempt.job_id)
                raise stale_attempt(attempt.job_id, attempt.epoch, current.epoch)
            actor = f"host:{attempt.host_id}"
            await record(
                tx, now_s, actor, event_kinds.JOB_SERVING, attempt.job_id, epoch=attempt.epoch, address=address
            )

        await self._database.run(publish)

    async def touch_server(self, job_id: str, now_s: float) -> None:
        update = "UPDATE server SET used_at = :now WHERE job_id = :job AND used_at < :now"
        await self._database.changed(update, {"now": now_s, "job": job_id})

    async def servers(self) -> Sequence[ServerRow]:
        return [
            ServerRow(
                job=decode_job(job), epoch=epoch, address=address, models=_decode_models(models), used_at_s=used_at_s
            )
            for epoch, address, models, used_at_s, *job in await self._database.rows(_SERVERS)
        ]


def _decode_attempt(row: Sequence[Any]) -> AttemptRow:
    fields: dict[str, Any] = dict(zip(_ATTEMPT_FIELDS, row, strict=True))
    cause, facts, taken = fields["cause"], decode_facts(fields["facts"]), decode_taken(fields["taken"])
    return AttemptRow(**fields | {"cause": Cause(cause) if cause else None, "facts": facts, "taken": taken})
