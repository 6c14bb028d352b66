"""Actions on jobs: planning and applying manifests, cancel, requeue, archive, waking a server, and collecting what
`why` needs.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

import msgspec

from strata.base.errors import Code, StrataError
from strata.base.failpoint import failpoint
from strata.fleet.core.amounts import Amounts
from strata.fleet.core.job import HELD, JobStatus
from strata.fleet.core.jobspec import JobSpec, gang_ids
from strata.fleet.core.manifest import JobManifest
from strata.fleet.core.ownership import OPERATOR, Submitter, check_project, check_servers
from strata.fleet.core.plan import ApplyOptions, ApplyPlan, plan
from strata.fleet.core.why import UnmetDependency, Why, WhyQuery, why
from strata.fleet.records import JobRow
from strata.fleet.service.claims import ClaimService
from strata.fleet.service.hosts import HostService
from strata.fleet.service.state import FleetState


class JobService:
    def __init__(self, state: FleetState, hosts: HostService, claims: ClaimService) -> None:
        self._state = state
        self._store = state.store
        self._hosts = hosts
        self._claims = claims

    async def plan_manifest(
        self, manifest: JobManifest, options: ApplyOptions | None = None, submitter: Submitter = OPERATOR
    ) -> ApplyPlan:
        """Returns what applying this manifest would change; FORBIDDEN if the submitter may not change it."""
        check_project(submitter, manifest.project, (await self._store.owners.projects()).get(manifest.project, ""))
        registered = await self._store.plans.trainers()
        planned = plan(
            manifest,
            await self._store.plans.existing_jobs(),
            trainers={name: each for (project, name), each in registered.items() if project == manifest.project},
            hosts=await self._store.plans.policies(),
            options=options,
            submitter=submitter,
        )
        check_servers(submitter, _queued(planned))
        return planned

    async def find(self, job_id: str) -> JobRow | None:
        """None if there is no such job."""
        try:
            return await self._store.jobs.get(job_id)
        except StrataError as error:
            if error.code is not Code.NOT_FOUND:
                raise
            return None

    async def apply(
        self, wanted: ApplyPlan, actor: str, *, source: str, declared: bool = True, submitter: Submitter = OPERATOR
    ) -> None:
        check_servers(submitter, _queued(wanted))
        await self._store.plans.apply(
            wanted, actor, self._state.now_s(), source=source, declared=declared, submitter=submitter
        )
        failpoint("fleet.apply.committed")
        self._claims.on_queued(submitter.owner)
        self._state.roster.invalidate()
        if wanted.hosts:
            await self._hosts.fail_unservable_jobs()
        self._state.changes.notify()

    async def cancel(self, job_id: str, reason: str, actor: str) -> JobRow:
        row = await self._store.jobs.cancel(job_id, reason, actor, self._state.now_s())
        failpoint("fleet.cancel.committed")
        return row

    async def requeue(self, job_id: str, actor: str, submitter: Submitter = OPERATOR) -> JobRow:
        check_servers(submitter, [(await self._store.jobs.get(job_id)).spec])
        return await self._requeue(job_id, actor, submitter)

    async def _requeue(self, job_id: str, actor: str, submitter: Submitter) -> JobRow:
        row = await self._store.jobs.requeue(job_id, actor, self._state.now_s(), submitter=submitter)
        self._claims.on_queued(row.owner)
        self._state.changes.notify()
        return row

    async def archive(self, job_id: str, actor: str) -> JobRow:
        return await self._store.jobs.archive(job_id, actor, self._state.now_s())

    async def wake_server(self, job_id: str, actor: str, owner: Submitter) -> None:
        """Queue a server again that is asleep, within the quota of its owner. Another request may have done so at the
        same moment."""
        try:
            await self._requeue(job_id, actor, owner)
        except StrataError as error:
            if error.code is not Code.PRECONDITION:
                raise

    async def why(self, job_id: str) -> Why:
        row = await self._store.jobs.get(job_id)
        if row.class_id not in self._state.roster.class_ids():
            self._state.roster.invalidate()
        roster = await self._state.refresh_roster()
        waiting = [await self._store.jobs.get(needed) for needed in row.spec.after]
        question = WhyQuery(
            status=row.status,
            requirement=roster.requirement(row.class_id),
            not_before_s=row.not_before_s,
            starts_at_s=row.spec.starts_at_s(row.created_at_s),
            last_failure=row.reason,
            after=tuple(
                UnmetDependency(job_id=each.id, label=each.spec.label, status=each.status)
                for each in waiting
                if each.status is not JobStatus.COMPLETED
            ),
            gang_hosts=await self._gang_hosts(row),
        )
        held = await self._store.hosts.held()
        refused = await self._exclusion_reasons(job_id)
        reserved, draining = await self._reservations_around(job_id)
        now_s = self._state.now_s()
        states = {
            host.id: roster.state(host, now_s, held.get(host.id, ()), row.class_id)
            for host in roster.hosts()
            if host.state != "left"
        }
        for host_id in states.keys() & {*refused, *reserved, *draining}:
            states[host_id] = msgspec.structs.replace(
                states[host_id],
                refused=refused.get(host_id, ""),
                reserved=reserved.get(host_id, {}),
                drains=host_id in draining,
            )
        return why(question, tuple(states.values()), now_s=now_s)

    async def _gang_hosts(self, row: JobRow) -> int:
        """Returns how many hosts the gang of this job needs at once. One that trains already replaces lost members
        singly."""
        if row.spec.gang is None:
            return 0
        members = [await self._store.jobs.get(member) for member in gang_ids(row.id, row.spec)]
        return 0 if any(each.status in HELD for each in members) else row.spec.gang.min_size

    async def _reservations_around(self, job_id: str) -> tuple[Mapping[str, Mapping[str, Amounts]], Collection[str]]:
        """Returns by host what is reserved for other jobs, by their labels; and the hosts that are reserved for this
        one."""
        reserved: dict[str, dict[str, Amounts]] = {}
        draining = set()
        for each in await self._store.leases.reservations():
            if each.is_over(self._state.now_s()):
                continue
            if each.job.job_id == job_id:
                draining.add(each.host_id)
            else:
                label = (await self._store.jobs.get(each.job.job_id)).spec.label
                reserved.setdefault(each.host_id, {})[label] = each.amounts
        return reserved, draining

    async def _exclusion_reasons(self, job_id: str) -> Mapping[str, str]:
        """The hosts that are excluded for this job, each with the error of its last attempt."""
        hosts = await self._store.jobs.refusals(job_id)
        errors = {each.host_id: each.error for each in await self._store.jobs.attempts(job_id)} if hosts else {}
        return {host: (errors.get(host) or "").strip().partition("\n")[0] or "unknown" for host in hosts}


def _queued(wanted: ApplyPlan) -> list[JobSpec]:
    """The jobs that a plan queues, or lets run as something else."""
    return [*wanted.new.values(), *wanted.requeued.values(), *(change.spec for change in wanted.changed)]
