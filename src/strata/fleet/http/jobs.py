"""Routes of jobs for people: list, show, submit, cancel, requeue, archive, why; and the check of who may
change a job.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

import msgspec

from strata import __version__
from strata.base.errors import Code, StrataError
from strata.fleet.core.hyper import HyperFinding, HyperSchema
from strata.fleet.core.job import HELD, JobStatus
from strata.fleet.core.jobspec import DEFAULT_PROJECT, JobSpec, TrainerSpec, check_trainer, qualified_trainer
from strata.fleet.core.manifest_tables import env_problem
from strata.fleet.core.ownership import Submitter, check_owners
from strata.fleet.core.plan import ApplyPlan
from strata.fleet.core.why import Why
from strata.fleet.http.context import HubCall, HubContext, calling_host, resolve_job_id, submitter_of
from strata.fleet.http.quotas import check_stored_bytes
from strata.fleet.http.secrets import check_secrets
from strata.fleet.http.validation import Checkpoint
from strata.fleet.records import AttemptRow, JobAttempt, JobFilter, JobRecord, JobRow, ServerRow, fields_of
from strata.fleet.wire.base import MAX_PAGE
from strata.fleet.wire.jobs import (
    CancelRequest,
    Job,
    JobReply,
    JobsQuery,
    JobsReply,
    SubmitReply,
    SubmitRequest,
)
from strata.fleet.wire.overview import StatusReply
from strata.http.disconnect import until_disconnect

_FILTERED: Final = ("model", "sweep", "project", "owner", "search", "hidden", "order", "after", "limit")
"""Fields of the query that the filter has by the same names."""


async def listed(call: HubCall, query: JobsQuery) -> JobsReply:
    """Jobs, a page at a time, and how many there are in each status. A host sees those of its leases."""
    context = call.context
    host = calling_host(call)
    same = {name: getattr(query, name) for name in _FILTERED}
    status = tuple(HELD) if host else query.status
    wanted = JobFilter(**same, status=status, host_id=host or query.host, label=query.name)
    rows = await context.fleet.store.jobs.select(wanted)
    servers = await _servers(context, rows)
    shown = [job_reply(row, servers.get(row.id)) for row in rows]
    if query.progress:
        shown = [await with_progress(context, job) for job in shown]
    return JobsReply(
        jobs=tuple(shown),
        next=wanted.cursor_of(rows[-1]) if len(rows) == query.limit else "",
        by_status={} if host else dict(await context.history.counts(query.project)),
        hosts={} if host else dict(await context.fleet.hosts.names({row.host_id for row in rows})),
    )


async def with_progress(context: HubContext, job: Job) -> Job:
    if job.status is not JobStatus.RUNNING:
        return job
    return msgspec.structs.replace(job, progress=await context.metrics.progress(job.id, job.epoch))


async def show(call: HubCall) -> JobReply:
    """One job and its attempts. A host sees those of its leases."""
    context = call.context
    if host := calling_host(call):
        await context.leased.check_job(host, call.path["id"])
    job_id = await resolve_job_id(call)
    row = await context.fleet.store.jobs.get(job_id)
    attempts = await context.fleet.store.jobs.attempts(job_id)
    server = (await _servers(context, [row])).get(job_id)
    job = await with_progress(context, job_reply(row, server))
    return JobReply(job=job, attempts=tuple(map(attempt_reply, attempts)))


async def why(call: HubCall) -> Why:
    """Returns why a job is not running, and the nearest fix."""
    return await call.context.fleet.jobs.why(await resolve_job_id(call))


async def status(call: HubCall) -> StatusReply:
    """Returns how many jobs and hosts there are."""
    context = call.context
    counts = await context.fleet.store.statistics.counts()
    return StatusReply(
        by_status=dict(counts.by_status),
        ready=counts.ready,
        hosts=counts.hosts,
        version=__version__,
        now_s=context.fleet.now_s(),
    )


async def submit(call: HubCall, body: SubmitRequest) -> SubmitReply:
    """Queue one job that no manifest has. The same job again is the same job."""
    context = call.context
    if body.spec.gang is not None:
        raise StrataError(Code.INVALID, "a gang is several jobs: a manifest queues them together", hint="strata apply")
    spec = body.spec.with_sandbox(context.require_sandbox)
    trainers, seen = await _trainers(context, spec, body.trainer)
    await _check_hyper(call, spec)
    trainer = body.trainer or (await context.fleet.store.plans.trainers())[spec.project, spec.trainer].spec
    await check_secrets(context, call.caller.owner, spec.project, trainer.secrets)
    await context.leased.check_inputs(trainer)
    for needed in spec.after:
        await context.fleet.store.jobs.get(needed)
    job_id = spec.id
    new = await context.fleet.jobs.find(job_id) is None
    if new:
        await check_stored_bytes(call)
        submitter = submitter_of(call)
        superseded = await _superseded(context, spec, submitter)
        plan = ApplyPlan(project=spec.project, new={job_id: spec}, trainers=trainers, seen=seen, superseded=superseded)
        await context.fleet.jobs.apply(plan, call.actor, source="submitted", declared=False, submitter=submitter)
    return SubmitReply(job=job_reply(await context.fleet.store.jobs.get(job_id)), new=new)


async def cancel(call: HubCall, body: CancelRequest) -> Job:
    """End a job, or the gang that it belongs to; a host that has it learns so with its next heartbeat. A researcher may
    end a job of her own."""
    job_id = await resolve_job_id(call)
    await check_may_change(call, job_id)
    return job_reply(await call.context.fleet.jobs.cancel(job_id, body.reason, call.actor))


async def requeue(call: HubCall) -> Job:
    """Let an ended job run again, or the gang that it belongs to, or hosts try again that could not set it up. A
    researcher: only a job of her own."""
    job_id = await resolve_job_id(call)
    await check_may_change(call, job_id)
    await check_stored_bytes(call)
    return job_reply(await call.context.fleet.jobs.requeue(job_id, call.actor, submitter_of(call)))


async def archive(call: HubCall) -> Job:
    """Leave an ended job out of lists and counts, with its gang. A researcher may archive a job of her own."""
    job_id = await resolve_job_id(call)
    await check_may_change(call, job_id)
    return job_reply(await call.context.fleet.jobs.archive(job_id, call.actor))


async def check_may_change(call: HubCall, job_id: str) -> None:
    """An operator any job, others a job of their own."""
    submitter = submitter_of(call)
    if submitter.operator:
        return
    row = await call.context.fleet.store.jobs.get(job_id)
    # Jobs from before jobs had owners carry the key that submitted them.
    if row.declared or row.owner != call.caller.actor:
        check_owners(submitter, [(row.spec.label, row.owner)])


async def _superseded(context: HubContext, spec: JobSpec, submitter: Submitter) -> tuple[str, ...]:
    """The jobs of the same owner, name and seed that were submitted before this one: an edit-run loop makes many."""
    if not spec.name:
        return ()
    named = await context.fleet.store.jobs.select(
        JobFilter(label=spec.label, project=spec.project, owner=submitter.owner, limit=MAX_PAGE)
    )
    return tuple(
        row.id
        for row in named
        if not row.declared and not row.superseded and row.spec.name and row.spec.seed == spec.seed
    )


async def _servers(context: HubContext, rows: Sequence[JobRow]) -> Mapping[str, ServerRow]:
    """Those of the jobs that are servers and have served, by id."""
    if not any(row.spec.kind == "server" for row in rows):
        return {}
    return {server.job.id: server for server in await context.fleet.store.jobs.servers()}


def job_reply(row: JobRow, server: ServerRow | None = None) -> Job:
    return Job(**fields_of(JobRecord, row), serving="" if server is None else server.state)


def attempt_reply(row: AttemptRow) -> JobAttempt:
    return JobAttempt(**fields_of(JobAttempt, row))


async def _trainers(
    context: HubContext, spec: JobSpec, given: TrainerSpec | None
) -> tuple[dict[str, TrainerSpec], dict[str, str]]:
    """The trainer to add with the job, and what its name stands for now, as `ApplyPlan` has them.

    Nobody changes by a job how the jobs of others are run. A job without a trainer takes what the name stands for.
    """
    registered = (await context.fleet.store.plans.trainers()).get((spec.project, spec.trainer))
    there = None if registered is None else registered.spec
    if given is None:
        if there is None:
            whose = "" if spec.project == DEFAULT_PROJECT else f" of project {spec.project!r}"
            raise StrataError(Code.INVALID, f"there is no trainer {spec.trainer!r}{whose}", hint="send it with the job")
        return {}, {}
    if given.name != spec.trainer:
        raise StrataError(Code.INVALID, f"the job names the trainer {spec.trainer!r}, not {given.name!r}")
    check_trainer(given)
    for name in given.env:
        if problem := env_problem(name):
            raise StrataError(Code.INVALID, f"env.{name}: {problem}")
    if there is not None and there != given:
        raise StrataError(Code.CONFLICT, f"another trainer is called {given.name!r}", hint="give this one another name")
    if registered is None:
        return {given.name: given}, {given.name: ""}
    return {}, {given.name: registered.digest}


async def _check_hyper(call: HubCall, spec: JobSpec) -> None:
    context = call.context
    name = qualified_trainer(spec.project, spec.trainer)
    encoded = (await context.schemas.schemas([name])).get(name)
    if encoded is None:
        return

    def check(checkpoint: Checkpoint) -> list[HyperFinding]:
        schema = msgspec.json.decode(encoded)
        return HyperSchema(schema, source=spec.trainer, checkpoint=checkpoint).check(spec.hyper)

    findings = await until_disconnect(call, context.stopping, context.validation.run(call.caller.owner, check))
    if findings:
        lines = tuple(f"hyper{_place(finding.path)}: {finding.message}" for finding in findings)
        raise StrataError(Code.INVALID, "\n".join(lines), problems=lines)


def _place(path: tuple[str | int, ...]) -> str:
    return "".join(f"[{step}]" if isinstance(step, int) else f".{step}" for step in path)
