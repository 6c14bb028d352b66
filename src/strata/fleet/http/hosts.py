"""Routes of hosts for people: lists, samples, free room, policy, and drain, pause, resume, revoke with the plan of
their effects.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, Literal

import msgspec

from strata.base.errors import Code, StrataError
from strata.fleet.core.amounts import Capacity, Room
from strata.fleet.core.capability import GIB
from strata.fleet.core.host_status import HostFacts, plan_action, policy_rules, quiet_in_words
from strata.fleet.core.jobspec import HostSpec
from strata.fleet.core.lease import FORGET_S
from strata.fleet.http.context import HubCall, HubContext, calling_host, resolve_host
from strata.fleet.records import HostJob, HostRow
from strata.fleet.service.hosts import HostView
from strata.fleet.wire.hosts import (
    Host,
    HostAmounts,
    HostCard,
    HostPageReply,
    HostPlanQuery,
    HostPlanReply,
    HostPolicyReply,
    HostRoom,
    HostsQuery,
    HostsReply,
    HostStateRequest,
    HostSummary,
    SampledPoint,
    SamplesQuery,
    SamplesReply,
)


async def listed(call: HubCall) -> HostsReply:
    """All hosts that ever registered, but for ephemeral ones that have vanished. A host sees itself."""
    context = call.context
    host = calling_host(call)
    rows = [row for row in await context.fleet.hosts.all() if host in ("", row.id)]
    return HostsReply(hosts=tuple(_host_reply(context, row) for row in rows))


async def show(call: HubCall) -> Host:
    """One host, by id or name."""
    return _host_reply(call.context, await resolve_host(call))


async def samples(call: HubCall, query: SamplesQuery) -> SamplesReply:
    """Returns what a host did: use of its processors, memory and cards, temperature, power."""
    row = await resolve_host(call)
    step_s, points = await call.context.fleet.samples.read(row.id, query.span_s, query.points)
    shown = tuple(SampledPoint(at_s=point.at_s, values=dict(point.values)) for point in points)
    return SamplesReply(step_s=step_s, points=shown)


async def room(call: HubCall) -> HostRoom:
    """Returns what a host has for jobs, which jobs it has, and what is free beside them."""
    fleet = call.context.fleet
    row = await resolve_host(call)
    capacity, held = await fleet.hosts.capacity(row.id), await _jobs_on(call.context, row.id)
    free = Room(capacity, [job.taken for job in held]).left
    return HostRoom(capacity=_amounts(capacity), free=_amounts(free), jobs=tuple(held))


async def page(call: HubCall, query: HostsQuery) -> HostPageReply:
    """Hosts with their load, cards and jobs, a page at a time."""
    fleet = call.context.fleet
    search = query.search.casefold()
    matches = [view for view in await fleet.hosts.views() if not search or _matches(view.row, search)]
    by_status = Counter[str](each.status for each in matches)
    chosen = [each for each in matches if query.status is None or each.status == query.status]
    if query.sort != "name":
        chosen.sort(key=_sort_key(call.context, query.sort))
    shown = chosen[query.offset : query.offset + query.limit]
    held = await fleet.store.hosts.jobs_on([each.row.id for each in shown])
    hosts = tuple(_summary(call.context, each, held.get(each.row.id, ())) for each in shown)
    return HostPageReply(hosts=hosts, total=len(chosen), by_status=dict(by_status))


async def policy(call: HubCall) -> HostPolicyReply:
    """Returns what an operator has declared for a host, in words."""
    row = await resolve_host(call)
    declared, quiet = await call.context.fleet.hosts.policy(row)
    spec = HostSpec(name=row.name) if declared is None else declared.spec
    return HostPolicyReply(
        project="" if declared is None else declared.project,
        rules=policy_rules(spec),
        quiet_hours=tuple(map(quiet_in_words, spec.quiet_hours)),
        utc_offset_min=row.capability.utc_offset_min,
        quiet_now=quiet,
    )


async def plan(call: HubCall, query: HostPlanQuery) -> HostPlanReply:
    """Returns what draining, pausing, resuming or revoking a host would do; nothing is changed."""
    context = call.context
    row = await resolve_host(call)
    held = await _jobs_on(context, row.id)
    servers = [job for job in held if job.serving]
    stranded = 0 if query.action == "resume" else await context.fleet.hosts.stranded_by(row.id)
    facts = HostFacts(
        name=row.name,
        state=row.state,
        presence=context.fleet.hosts.presence(_ago_s(context, row)),
        jobs=len(held) - len(servers),
        servers=len(servers),
        stranded=stranded,
        lease_s=context.fleet.settings.stale_after_s,
    )
    planned = plan_action(query.action, facts)
    ends = [job for job in held if (planned.ends_servers if job.serving else planned.ends_jobs)]
    return HostPlanReply(
        action=query.action,
        possible=planned.possible,
        effects=planned.effects,
        ends=tuple(ends),
        stays=tuple(job for job in held if job not in ends),
        stranded=stranded if planned.possible else 0,
    )


async def drain(call: HubCall, body: HostStateRequest) -> Host:
    """Let it finish what it has, and give it nothing more."""
    return await _set(call, "draining", body.reason)


async def pause(call: HubCall, body: HostStateRequest) -> Host:
    """Give it nothing more until it is resumed."""
    return await _set(call, "paused", body.reason)


async def resume(call: HubCall, body: HostStateRequest) -> Host:
    """Let it work again, also out of quarantine."""
    return await _set(call, "active", body.reason)


async def revoke(call: HubCall, body: HostStateRequest) -> None:
    """End its credentials: it is refused from now on, and its jobs go to others when their leases run out."""
    await _remove(call.context, await _resolve_enrolled_host(call), body.reason or "revoked", call.actor)


async def forget_silent(context: HubContext) -> None:
    """Remove ephemeral hosts that ended without a word. After a crash between two steps both are repeated."""
    for host in await context.fleet.leases.hosts_to_forget():
        await _remove(context, host.id, f"it was silent for more than {FORGET_S / 60:g} minutes", "hub")


async def _remove(context: HubContext, host_id: str, reason: str, actor: str) -> None:
    await context.identity.revoke_host(host_id, reason, actor, context.clock.wall_s())
    context.authenticator.invalidate()
    # A claim that waits was let in before; only the state of the host, in the claim's own transaction, stops it.
    if await context.fleet.hosts.find(host_id):
        await context.fleet.hosts.set_state(host_id, "left", reason, actor)


async def _set(call: HubCall, state: Literal["active", "draining", "paused"], reason: str) -> Host:
    context = call.context
    row = await resolve_host(call)
    if row.state == "left":
        raise StrataError(Code.PRECONDITION, f"{row.name} has left", hint="it comes back with strata join")
    return _host_reply(context, await context.fleet.hosts.set_state(row.id, state, reason, call.actor))


async def _resolve_enrolled_host(call: HubCall) -> str:
    """Also a host that never registered has credentials that can be ended."""
    text = call.path["id"]
    hosts = await call.context.identity.hosts()
    matches = [host.id for host in hosts if text == host.id or (text == host.name and host.revoked_at_s is None)]
    if not matches:
        raise StrataError(Code.NOT_FOUND, f"there is no host {text[:100]!r}")
    return matches[0]


def _sort_key(context: HubContext, sort: Literal["load", "seen"]) -> Callable[[HostView], Any]:
    if sort == "seen":
        return lambda view: (-view.seen_ago_s, view.row.name)
    return lambda view: (-_load(context, view.row.id), view.row.name)


def _load(context: HubContext, host_id: str) -> float:
    """The use of its processors or of its busiest card; -1 if neither is known."""
    sample = context.fleet.samples.newest(host_id)
    return max((value for name, value in sample.items() if name == "cpu_use" or name.endswith("/use")), default=-1.0)


def _matches(row: HostRow, search: str) -> bool:
    labels = (f"{name}={value}" for name, value in (row.capability.labels | row.labels).items())
    cards = (gpu.name for gpu in row.capability.gpus)
    return any(search in text.casefold() for text in (row.name, row.id, row.pool, *labels, *cards))


def _summary(context: HubContext, view: HostView, held: Sequence[HostJob]) -> HostSummary:
    row, sample = view.row, context.fleet.samples.newest(view.row.id)
    taken: dict[str, float] = {}
    for job in held:
        for card in job.taken.cards:
            taken[card] = taken.get(card, 0.0) + job.taken.gpu_share
    ids = [gpu.uuid or str(number) for number, gpu in enumerate(row.capability.gpus)]
    return HostSummary(
        id=row.id,
        name=row.name,
        status=view.status,
        status_reason=f"quiet hours {view.quiet}" if view.status == "quiet" else row.state_reason,
        pool=row.pool,
        seen_ago_s=view.seen_ago_s,
        cores=row.capability.cores,
        ram_gib=row.capability.ram_bytes / GIB,
        cpu_use=sample.get("cpu_use"),
        ram_used_gib=sample.get("ram_used_gib"),
        cards=tuple(
            HostCard(
                id=card,
                name=gpu.name,
                vram_gib=gpu.vram_bytes / GIB,
                taken=min(1.0, taken.get(card, 0.0)),
                use=sample.get(f"{card}/use"),
                vram_used_gib=sample.get(f"{card}/vram_used_gib"),
            )
            for card, gpu in zip(ids, row.capability.gpus, strict=True)
        ),
        jobs=tuple(held),
    )


async def _jobs_on(context: HubContext, host_id: str) -> Sequence[HostJob]:
    return (await context.fleet.store.hosts.jobs_on([host_id])).get(host_id, ())


def _ago_s(context: HubContext, row: HostRow) -> float:
    return max(0.0, context.fleet.now_s() - row.seen_at_s)


def _amounts(capacity: Capacity) -> HostAmounts:
    cards = {card.id: card.vram_gib for card in capacity.cards}
    return HostAmounts(cores=capacity.cores, ram_gib=capacity.ram_gib, slots=capacity.slots, cards=cards)


def _host_reply(context: HubContext, row: HostRow) -> Host:
    ago_s = _ago_s(context, row)
    return Host(
        **msgspec.structs.asdict(row),
        seen_ago_s=ago_s,
        presence=context.fleet.hosts.presence(ago_s),
        sample=dict(context.fleet.samples.newest(row.id)),
    )
