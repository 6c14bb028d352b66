"""Routes of hosts for people: list, drain, pause, resume, revoke."""

from __future__ import annotations

from typing import Literal

from strata.base.errors import Code, StrataError
from strata.fleet import wire
from strata.fleet.core.amounts import Capacity, Room
from strata.fleet.core.lease import SUSPECT_S
from strata.fleet.http.context import HubCall, HubContext, calling_host, resolve_host
from strata.fleet.ports import HostRow


async def listed(call: HubCall) -> wire.HostsReply:
    """All hosts that ever registered. A host sees itself."""
    context = call.context
    host = calling_host(call)
    rows = [row for row in await context.fleet.hosts() if host in ("", row.id)]
    return wire.HostsReply(hosts=tuple(_host_reply(context, row) for row in rows))


async def show(call: HubCall) -> wire.Host:
    """One host, by id or name."""
    context = call.context
    return _host_reply(context, await resolve_host(call))


async def samples(call: HubCall, query: wire.SamplesQuery) -> wire.SamplesReply:
    """What a host did: use of its processors, memory and cards, temperature, power."""
    row = await resolve_host(call)
    step_s, points = await call.context.fleet.samples(row.id, query.span_s, query.points)
    shown = tuple(wire.SampledPoint(at_s=point.at_s, values=dict(point.values)) for point in points)
    return wire.SamplesReply(step_s=step_s, points=shown)


async def room(call: HubCall) -> wire.HostRoom:
    """What a host has for jobs, which jobs it has, and what is free beside them."""
    fleet = call.context.fleet
    row = await resolve_host(call)
    capacity, held = await fleet.capacity(row.id), await fleet.held_attempts(row.id)
    free = Room(capacity, [attempt.taken for _, attempt in held]).left
    jobs = tuple(
        wire.HostJob(
            job_id=job.id,
            label=job.spec.label,
            owner=job.owner,
            status=job.status,
            epoch=attempt.epoch,
            claimed_at_s=attempt.claimed_at_s,
            taken=attempt.taken,
        )
        for job, attempt in held
    )
    return wire.HostRoom(capacity=_amounts(capacity), free=_amounts(free), jobs=jobs)


async def drain(call: HubCall, body: wire.HostStateRequest) -> wire.Host:
    """Let it finish what it has, and give it nothing more."""
    context = call.context
    return await _set(context, call, "draining", body.reason)


async def pause(call: HubCall, body: wire.HostStateRequest) -> wire.Host:
    """Give it nothing more until it is resumed."""
    context = call.context
    return await _set(context, call, "paused", body.reason)


async def resume(call: HubCall, body: wire.HostStateRequest) -> wire.Host:
    """Let it work again, also out of quarantine."""
    context = call.context
    return await _set(context, call, "active", body.reason)


async def revoke(call: HubCall, body: wire.HostStateRequest) -> None:
    """End its credentials: it is refused from now on, and its jobs go to others when their leases run out."""
    context = call.context
    host_id = await _resolve_enrolled_host(context, call)
    reason = body.reason or "revoked"
    await context.identity.revoke_host(host_id, reason, call.actor, context.clock.wall_s())
    context.authenticator.invalidate()
    # A claim that waits was let in before; only the state of the host, in the claim's own transaction, stops it.
    if any(host.id == host_id for host in await context.fleet.hosts()):
        await context.fleet.set_host_state(host_id, "left", reason, call.actor)


async def _set(
    context: HubContext, call: HubCall, state: Literal["active", "draining", "paused"], reason: str
) -> wire.Host:
    row = await resolve_host(call)
    if row.state == "left":
        raise StrataError(Code.PRECONDITION, f"{row.name} has left", hint="it comes back with strata join")
    return _host_reply(context, await context.fleet.set_host_state(row.id, state, reason, call.actor))


async def _resolve_enrolled_host(context: HubContext, call: HubCall) -> str:
    """Also a host that never registered has credentials that can be ended."""
    text = call.path["id"]
    hosts = await context.identity.hosts()
    matches = [host.id for host in hosts if text == host.id or (text == host.name and host.revoked_at_s is None)]
    if not matches:
        raise StrataError(Code.NOT_FOUND, f"there is no host {text[:100]!r}")
    return matches[0]


def _amounts(capacity: Capacity) -> wire.HostAmounts:
    cards = {card.id: card.vram_gib for card in capacity.cards}
    return wire.HostAmounts(cores=capacity.cores, ram_gib=capacity.ram_gib, slots=capacity.slots, cards=cards)


def _host_reply(context: HubContext, row: HostRow) -> wire.Host:
    ago_s = max(0.0, context.fleet.now_s() - row.seen_at_s)
    presence: Literal["online", "suspect", "offline"] = "online"
    if ago_s > max(SUSPECT_S, context.fleet.settings.stale_after_s):
        presence = "offline"
    elif ago_s > SUSPECT_S:
        presence = "suspect"
    return wire.Host(
        id=row.id,
        name=row.name,
        state=row.state,
        state_reason=row.state_reason,
        capability=row.capability,
        pool=row.pool,
        labels=dict(row.labels),
        agent_version=row.agent_version,
        registered_at_s=row.registered_at_s,
        seen_at_s=row.seen_at_s,
        seen_ago_s=ago_s,
        presence=presence,
        sample=dict(context.fleet.newest_sample(row.id)),
    )
