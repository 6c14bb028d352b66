"""Routes of agents: register, claim, renew by heartbeat, complete, fail, publish a server, leave; and what a lease
reply contains (secrets, front key, gang token).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import msgspec

from strata.base.errors import Code, StrataError
from strata.fleet.artifacts.manifest import ArtifactKind
from strata.fleet.artifacts.ports import LineageFilter
from strata.fleet.core.job import HELD
from strata.fleet.core.jobspec import coordinator_job, gang_ids
from strata.fleet.core.lease import RENEW_S
from strata.fleet.core.lease_status import stale_attempt
from strata.fleet.core.requirement import Label, LabelValue
from strata.fleet.http import secrets
from strata.fleet.http.context import HubCall, HubContext, own_hold, resolve_job_id
from strata.fleet.http.jobs import job_reply
from strata.fleet.records import (
    AttemptKey,
    HostRow,
    JobCompletion,
    JobFailure,
    JobLease,
    Renewal,
    RenewalResult,
    YieldRequest,
)
from strata.fleet.wire.hosts import RegisterReply, RegisterRequest
from strata.fleet.wire.jobs import Job
from strata.fleet.wire.leases import (
    TLS,
    ClaimReply,
    ClaimRequest,
    CompleteRequest,
    ExecPending,
    FailRequest,
    GangLease,
    HeartbeatRequest,
    HeartbeatsReply,
    HeartbeatsRequest,
    LeaseGiven,
    LeaseVerdict,
    PartsReply,
    PartsRequest,
    PublishRequest,
)
from strata.http.disconnect import until_disconnect
from strata.identity.ca import serving_name
from strata.identity.records import HostIdentity

_STOP: Final = {
    "stale": "another attempt has begun; drop the result",
    "unknown": "there is no such job; drop the result",
}


async def register(call: HubCall, body: RegisterRequest) -> RegisterReply:
    """Say what this host is; again whenever that has changed."""
    context = call.context
    identity = await context.identity.host(call.caller.require_host())
    if identity is None:
        raise StrataError(Code.NOT_FOUND, "this host is not enrolled", hint="strata join")
    row = await context.fleet.hosts.register(
        HostRow(
            id=identity.id,
            name=identity.name,
            capability=body.capability,
            registered_at_s=context.fleet.now_s(),
            agent_version=body.agent_version,
            pool=identity.pool,
            labels=_labels(identity),
            ephemeral=identity.ephemeral,
        ),
        call.actor,
    )
    lease_s = context.fleet.settings.stale_after_s
    return RegisterReply(
        host_id=row.id,
        name=row.name,
        state=row.state,
        state_reason=row.state_reason,
        lease_s=lease_s,
        renew_every_s=min(RENEW_S, lease_s / 4),
    )


async def claim(call: HubCall, body: ClaimRequest) -> ClaimReply:
    """Ask for jobs this host may take, and wait for some."""
    context = call.context
    host_id = call.caller.require_host()
    leases = await context.fleet.claims.claim(host_id, body.claim_id, count=body.count)
    if not leases and body.wait_s:
        waiting = context.fleet.claims.claim(host_id, body.claim_id, count=body.count, wait_s=body.wait_s)
        with context.hub_metrics.claims_waiting.track_inprogress():
            leases = await until_disconnect(call, context.stopping, waiting)
    context.hub_metrics.record_claim(len(leases))
    return ClaimReply(leases=tuple([await _lease_reply(context, lease) for lease in leases]))


async def heartbeats(call: HubCall, body: HeartbeatsRequest) -> HeartbeatsReply:
    """Renew all leases of this host at once; each gets its verdict."""
    context = call.context
    context.hub_metrics.heartbeats.inc()
    if body.sample is not None:
        context.hub_metrics.samples.inc()
        context.fleet.samples.add(call.caller.require_host(), body.sample)
    if body.incarnation:
        await context.fleet.hosts.observe_agent(call.caller.require_host(), body.incarnation)
    renewals = [Renewal(job_id=each.job_id, epoch=each.epoch, running=each.running) for each in body.leases]
    verdicts = await _renew(call, renewals)
    due = {(each.job_id, each.epoch) for each in body.leases if each.renew_token}
    if due:
        verdicts = [await _with_token(call, each) if (each.job_id, each.epoch) in due else each for each in verdicts]
    execs = context.execs.of_host(call.caller.require_host())
    return HeartbeatsReply(
        verdicts=tuple(verdicts),
        execs=tuple(ExecPending(id=each.id, job_id=each.job_id, epoch=each.epoch) for each in execs),
    )


async def heartbeat(call: HubCall, body: HeartbeatRequest) -> LeaseVerdict:
    """Renew one lease."""
    renewal = Renewal(job_id=await resolve_job_id(call), epoch=body.epoch, running=body.running)
    (verdict,) = await _renew(call, [renewal])
    return verdict


async def complete(call: HubCall, body: CompleteRequest) -> Job:
    """The attempt has a result. It has to be uploaded before."""
    context = call.context
    job_id = await resolve_job_id(call)
    held = own_hold(call, job_id, body.epoch)
    artifact = await _resolve_upload(context, body.artifact, held)
    done = JobCompletion(artifact=artifact, metrics=body.metrics, facts=body.facts)
    row = await context.fleet.leases.complete(held, done)
    context.hub_metrics.attempts.labels("completed").inc()
    return job_reply(row)


async def fail(call: HubCall, body: FailRequest) -> Job:
    """The attempt ended without a result; the reply says what becomes of the job."""
    context = call.context
    job_id = await resolve_job_id(call)
    failure = JobFailure(cause=body.cause, error=body.error, facts=body.facts)
    row = await context.fleet.leases.fail(own_hold(call, job_id, body.epoch), failure)
    context.hub_metrics.attempts.labels(body.cause.value).inc()
    return job_reply(row)


async def publish(call: HubCall, body: PublishRequest) -> None:
    """Say where the server of this attempt serves; the hub forwards the requests of its callers there."""
    context = call.context
    held = own_hold(call, await resolve_job_id(call), body.epoch)
    row = await context.fleet.store.jobs.get(held.job_id)
    if row.spec.kind != "server":
        raise StrataError(Code.PRECONDITION, f"{row.spec.label} is no server", hint='kind = "server" in the manifest')
    identity = await context.identity.host(held.host_id)
    is_local = identity is not None and bool(identity.secret_hash)
    address = body.address
    if address.startswith("unix:") and not is_local:
        raise StrataError(Code.PRECONDITION, "a socket can be reached on this hub's own machine only")
    if address.startswith(TLS) and is_local:
        raise StrataError(Code.PRECONDITION, "a host without a certificate cannot show who it is")
    if address.startswith(TLS):
        # With the name that its certificate has to have: no other machine can be put in its place.
        address = f"{TLS}{serving_name(held.host_id)}@{address.removeprefix(TLS)}"
    await context.fleet.servers.publish(held, address, body.models)


async def find_parts(call: HubCall, body: PartsRequest) -> PartsReply:
    """The artifacts that have these parts of a checkpoint, among the last ones that the members of a gang uploaded."""
    context = call.context
    held = own_hold(call, await resolve_job_id(call), body.epoch)
    row = await context.fleet.store.jobs.get(held.job_id)
    if (row.epoch, row.host_id) != (held.epoch, held.host_id) or row.status not in HELD:
        raise stale_attempt(row.id, held.epoch, row.epoch)
    missing = dict(body.parts)
    found: list[str] = []
    for member in gang_ids(row.id, row.spec):
        for artifact_id in await context.leased.last_checkpoints(member):
            files = {
                file.path: f"sha256:{file.sha256}"
                for file in (await context.artifacts.open(artifact_id)).manifest.files
            }
            if any(files.get(name, digest) != digest for name, digest in body.parts.items()):
                # Of another checkpoint: its file would lie where the host looks for the wanted one.
                continue
            here = missing.keys() & files.keys()
            if here:
                found.append(artifact_id)
            for name in here:
                del missing[name]
    return PartsReply(artifacts=() if missing else tuple(found))


async def leave(call: HubCall) -> None:
    """This host goes for good: it gets no more jobs, and its credentials end."""
    context = call.context
    host_id = call.caller.require_host()
    if await context.fleet.hosts.find(host_id):
        await context.fleet.hosts.set_state(host_id, "left", "it left", call.actor)
    await context.identity.revoke_host(host_id, "it left", call.actor, context.clock.wall_s())
    context.authenticator.invalidate()


async def _renew(call: HubCall, renewals: Sequence[Renewal]) -> Sequence[LeaseVerdict]:
    context = call.context
    renewed = await context.fleet.leases.renew(call.caller.require_host(), renewals)
    now_s = context.fleet.now_s()
    verdicts = [_verdict(each, now_s, context.fleet.servers.yield_request(each.job_id, each.epoch)) for each in renewed]
    context.hub_metrics.leases_renewed.inc(len(verdicts))
    context.hub_metrics.leases_lost.inc(sum(each.verdict == "stop" for each in verdicts))
    return verdicts


async def _with_token(call: HubCall, verdict: LeaseVerdict) -> LeaseVerdict:
    """Adds another token for the workers of a member of a gang whose host holds the lease."""
    coordinator = call.context.coordinator
    if verdict.verdict != "continue" or coordinator is None:
        return verdict
    spec = (await call.context.fleet.store.jobs.get(verdict.job_id)).spec
    if spec.gang is None:
        return verdict
    token = coordinator.issue(spec, own_hold(call, verdict.job_id, verdict.epoch))
    return msgspec.structs.replace(verdict, token=token)


def _verdict(renewed: RenewalResult, now_s: float, wanted: YieldRequest | None) -> LeaseVerdict:
    if renewed.verdict == "held":
        if renewed.preempt:
            wanted = YieldRequest("preempted", renewed.preempt)
        return LeaseVerdict(
            job_id=renewed.job_id,
            epoch=renewed.epoch,
            verdict="continue",
            expires_in_s=renewed.expires_at_s - now_s,
            yield_as="" if wanted is None else wanted.cause,
            reason="" if wanted is None else wanted.reason,
        )
    reason = f"the job is {renewed.status}" if renewed.verdict == "ended" else _STOP[renewed.verdict]
    return LeaseVerdict(
        job_id=renewed.job_id, epoch=renewed.epoch, verdict="stop", reason=reason, cause=renewed.verdict
    )


async def _lease_reply(context: HubContext, lease: JobLease) -> LeaseGiven:
    is_server = lease.spec.kind == "server"
    servers = await context.fleet.store.jobs.servers() if is_server else ()
    return LeaseGiven(
        job_id=lease.job_id,
        epoch=lease.epoch,
        expires_in_s=lease.expires_at_s - context.fleet.now_s(),
        spec=lease.spec,
        trainer=lease.trainer,
        checkpoint=lease.checkpoint,
        trainer_digest=lease.trainer_digest,
        secrets=dict(await secrets.for_lease(context, lease.job_id, lease.trainer)),
        taken=lease.taken,
        front_key=context.front_key(lease.job_id, lease.epoch) if is_server else "",
        served_epoch=next((row.epoch for row in servers if row.job.id == lease.job_id), 0),
        gang=_gang_lease(context, lease),
    )


def _gang_lease(context: HubContext, lease: JobLease) -> GangLease | None:
    coordinator = context.coordinator
    if lease.spec.gang is None or coordinator is None:
        return None
    return GangLease(
        coordinator=coordinator.address,
        job=coordinator_job(lease.spec),
        ca_pem=coordinator.ca_pem,
        token=coordinator.issue(lease.spec, AttemptKey(lease.host_id, lease.job_id, lease.epoch)),
        token_s=coordinator.token_s,
        checkpoint_root=coordinator.checkpoint_root,
    )


async def _resolve_upload(context: HubContext, artifact: str, held: AttemptKey) -> str:
    """The artifact by its id, also when it is named as the blob it was uploaded as. It is of this attempt."""
    if not artifact:
        return ""
    hint = "upload it first, then complete again"
    try:
        named = artifact.startswith("artifact1_")
        artifact_id = (
            (await context.artifacts.open(artifact)).id if named else await context.artifacts.index.blob(artifact)
        )
    except StrataError as error:
        if error.code not in (Code.NOT_FOUND, Code.GONE):
            raise
        raise StrataError(Code.PRECONDITION, error.message, hint=hint) from None
    wanted = LineageFilter(artifact_ids=[artifact_id], job_id=held.job_id, kind=ArtifactKind.RESULT, limit=1000)
    uploads = [(row.lineage.epoch, row.lineage.host_id) for row in await context.artifacts.index.lineages(wanted)]
    if (held.epoch, held.host_id) not in uploads:
        raise StrataError(
            Code.PRECONDITION,
            f"{artifact_id} was not uploaded as the result of this attempt of {held.job_id}",
            hint=hint,
        )
    return artifact_id


def _labels(identity: HostIdentity) -> dict[str, str]:
    """The labels in the invitation of this host: `gpu` or `rack=b4`."""
    labels = dict(each.partition("=")[::2] for each in identity.labels)
    try:
        return msgspec.convert({name: value or "true" for name, value in labels.items()}, dict[Label, LabelValue])
    except msgspec.ValidationError as error:
        raise StrataError(Code.INVALID, f"the labels of this host's invitation are not labels: {error}") from None
