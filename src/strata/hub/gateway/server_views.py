"""Routes `/v1/servers`: lists and status of training servers for people, who sees which tenants, rollouts, curves, and
the playground's completions.

Looking wakes no server and keeps none awake. An operator sees all tenants of a server; everybody else sees its own work
there, and that of others in the sum.
"""

from __future__ import annotations

import asyncio
from typing import Final
from urllib.parse import quote, urlencode

import msgspec

from strata.base.errors import Code, StrataError
from strata.fleet.core.job import UNFINISHED
from strata.fleet.http.context import resolve_job_id
from strata.fleet.records import JobFilter, JobRow, ServerRow
from strata.fleet.wire.servers import (
    ServerEntry,
    ServerFigures,
    ServersReply,
)
from strata.http.route import KIB, RESEARCHER, VIEWER, RawReply, Route
from strata.hub.context import GatewayCall
from strata.hub.gateway.dispatch import ASK_S, BASE, BROKEN
from strata.hub.gateway.proxy import ForwardedRequest, Tenant, read_whole
from strata.hub.gateway.servers import MAX_COMPLETION, OPENAI, ServerCompletion, complete_at
from strata.identity.roles import CallerKind, Role
from strata.train.status.rollouts import RolloutFilter
from strata.train.wire.bodies import ActivityQuery, CurvesQuery
from strata.train.wire.rollouts import RolloutsQuery, to_parameters

NO_KEY: Final = "\x01"
"""The tenant of a caller without a key; no key has this name."""
TOKENIZER_S: Final = 120.0
"""How long a server may take for its first text: it loads its tokenizer, which takes longer if it is busy."""
_AT_ONCE: Final = 16


class ServerActivityQuery(ActivityQuery, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The query as the server reads it, but the hub refuses what it does not know."""


class ServerCurvesQuery(CurvesQuery, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The query, as above."""


async def listed(call: GatewayCall) -> ServersReply:
    """The training servers, with what those that serve say of their work."""
    fleet = call.context.fleet
    rows = {row.job.id: row for row in await fleet.store.jobs.servers()}
    unfinished = await fleet.store.jobs.select(JobFilter(status=UNFINISHED, servers=True, limit=1000))
    jobs = {row.job.id: row.job for row in rows.values()}
    jobs |= {row.id: row for row in unfinished if row.spec.kind == "server"}
    viewer, limit = await _viewer(call), asyncio.Semaphore(_AT_ONCE)

    async def figures(row: ServerRow | None) -> ServerFigures | None:
        if row is None or not row.serving:
            return None
        try:
            async with limit, asyncio.timeout(ASK_S):
                return msgspec.json.decode(await _ask(call, row, viewer, f"{BASE}/status"), type=ServerFigures)
        except (StrataError, TimeoutError, *BROKEN):
            return None

    shown = [job for job in jobs.values() if not job.archived]
    found = await asyncio.gather(*(figures(rows.get(job.id)) for job in shown))
    entries = [_entry(job, rows.get(job.id), each) for job, each in zip(shown, found, strict=True)]
    return ServersReply(
        servers=tuple(sorted(entries, key=lambda entry: (entry.label, entry.job_id))),
        hosts=dict(await fleet.hosts.names({entry.host_id for entry in entries})),
    )


async def status(call: GatewayCall) -> RawReply:
    """Returns what a server says of its ranks, queue and tenants"""
    return await _view(call, "status")


async def activity(call: GatewayCall, query: ServerActivityQuery) -> RawReply:
    """The last operations of a server with their times, its models, endpoints and throughput"""
    return await _view(call, f"activity?operations={query.operations}")


async def throughput(call: GatewayCall) -> RawReply:
    """Tokens that a server trained and sampled per second, over the last hour"""
    return await _view(call, "throughput")


async def curves(call: GatewayCall, query: ServerCurvesQuery) -> RawReply:
    """The metrics of a model over its optimizer steps"""
    names = quote(query.names, safe=",")
    run_id = quote(call.path["run_id"], safe=":")
    return await _view(call, f"training_runs/{run_id}/curves?points={query.points}&names={names}")


async def rollouts(call: GatewayCall, query: RolloutsQuery) -> RawReply:
    """The rollouts that the caller chose to keep at a server: those that match"""
    return await _view(call, f"rollouts?{urlencode(to_parameters(query))}", within_s=TOKENIZER_S)


async def rollout(call: GatewayCall, query: RolloutFilter) -> RawReply:
    """A kept rollout of the caller, token by token"""
    path = f"rollouts/{quote(call.path['rollout_id'], safe=':')}"
    return await _view(call, f"{path}?{urlencode(to_parameters(query))}", within_s=TOKENIZER_S)


async def models(call: GatewayCall) -> RawReply:
    """Returns what the caller can sample at a server: the base model and the caller's checkpoints"""
    return await _view(call, "models", base=OPENAI)


async def completions(call: GatewayCall, body: ServerCompletion) -> RawReply:
    """Continue a text at this server, as `POST /v1/completions` does"""
    return await complete_at(call, await _find_server(call), "completions", body)


async def chat_completions(call: GatewayCall, body: ServerCompletion) -> RawReply:
    """Reply to a chat at this server, as `POST /v1/chat/completions` does"""
    return await complete_at(call, await _find_server(call), "chat/completions", body)


async def _view(call: GatewayCall, path: str, *, base: str = BASE, within_s: float = ASK_S) -> RawReply:
    row = await _find_server(call)
    if not row.serving:
        what = "is asleep" if row.asleep else "does not serve now"
        raise StrataError(Code.PRECONDITION, f"the training server {row.job.spec.label} {what}")
    try:
        async with asyncio.timeout(within_s):
            return RawReply(await _ask(call, row, await _viewer(call), f"{base}/{path}"))
    except TimeoutError:
        message = f"the training server {row.job.spec.label} did not reply within {within_s:g} s"
        raise StrataError(Code.UNAVAILABLE, message, hint="try again") from None


async def _find_server(call: GatewayCall) -> ServerRow:
    job_id = await resolve_job_id(call)
    row = next((each for each in await call.context.fleet.store.jobs.servers() if each.job.id == job_id), None)
    if row is None:
        raise StrataError(Code.NOT_FOUND, f"{job_id[:20]} is no training server that has served")
    return row


async def _ask(call: GatewayCall, row: ServerRow, viewer: Tenant, target: str) -> bytes:
    context = call.context
    request = ForwardedRequest(method="GET", target=target, headers={})
    key = context.front_key(row.job.id, row.epoch)
    reply = await context.proxy.send(row.address, request, key=key, tenant=viewer)
    content = await read_whole(reply)
    if reply.status != 200:
        code = Code.NOT_FOUND if reply.status == 404 else Code.UNAVAILABLE
        raise StrataError(code, f"the training server {row.job.spec.label} replied with status {reply.status}")
    return content


async def _viewer(call: GatewayCall) -> Tenant:
    caller = call.caller
    key = await call.context.identity.key(caller.id) if caller.kind is CallerKind.KEY else None
    sees_all = caller.role is not None and caller.role >= Role.OPERATOR
    return Tenant(NO_KEY if key is None else key.name, Role.VIEWER, sees_all=sees_all)


def _entry(job: JobRow, row: ServerRow | None, figures: ServerFigures | None) -> ServerEntry:
    state = row.state if row is not None else ""
    return ServerEntry(
        job_id=job.id,
        label=job.spec.label,
        project=job.spec.project,
        owner=job.owner,
        models=row.models if row is not None else (job.spec.model,),
        state=state or ("starting" if job.status in UNFINISHED else "ended"),
        reason=job.reason,
        host_id=job.host_id if job.status in UNFINISHED else "",
        changed_at_s=job.changed_at_s,
        used_at_s=row.used_at_s if row is not None else None,
        figures=figures,
    )


ROUTES: Final = (
    Route("GET", "/v1/servers", VIEWER, listed, KIB),
    Route("GET", "/v1/server/{id}/status", VIEWER, status, KIB),
    Route("GET", "/v1/server/{id}/activity", VIEWER, activity, KIB),
    Route("GET", "/v1/server/{id}/throughput", VIEWER, throughput, KIB),
    Route("GET", "/v1/server/{id}/run/{run_id}/curves", VIEWER, curves, KIB),
    Route("GET", "/v1/server/{id}/rollouts", VIEWER, rollouts, KIB),
    Route("GET", "/v1/server/{id}/rollout/{rollout_id}", VIEWER, rollout, KIB),
    Route("GET", "/v1/server/{id}/models", VIEWER, models, KIB),
    Route("POST", "/v1/server/{id}/completions", RESEARCHER, completions, MAX_COMPLETION, owner="tenant"),
    Route("POST", "/v1/server/{id}/chat/completions", RESEARCHER, chat_completions, MAX_COMPLETION, owner="tenant"),
)
