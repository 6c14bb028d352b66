"""Hosts, for people: who is there, and who may go on."""

from __future__ import annotations

from typing import Literal

from strata.base.errors import Code, StrataError
from strata.fleet import wire
from strata.fleet.core.lease import SUSPECT_S
from strata.fleet.http.context import Call, Site, host_of
from strata.fleet.ports import HostRow


async def listed(call: Call) -> wire.HostsReply:
    """All hosts that ever registered."""
    site = call.site
    return wire.HostsReply(hosts=tuple(_shown(site, row) for row in await site.fleet.hosts()))


async def show(call: Call) -> wire.Host:
    """One host, by id or name."""
    site = call.site
    return _shown(site, await host_of(site, call))


async def drain(call: Call, body: wire.HostStateRequest) -> wire.Host:
    """Let it finish what it has, and give it nothing more."""
    site = call.site
    return await _set(site, call, "draining", body.reason)


async def pause(call: Call, body: wire.HostStateRequest) -> wire.Host:
    """Give it nothing more until it is resumed."""
    site = call.site
    return await _set(site, call, "paused", body.reason)


async def resume(call: Call, body: wire.HostStateRequest) -> wire.Host:
    """Let it work again, also out of quarantine."""
    site = call.site
    return await _set(site, call, "active", body.reason)


async def revoke(call: Call, body: wire.HostStateRequest) -> None:
    """End its credentials: it is refused from now on, and its jobs go to others when their leases run out."""
    site = call.site
    host_id = await _enrolled(site, call)
    reason = body.reason or "revoked"
    await site.identity.revoke_host(host_id, reason, call.actor, site.clock.wall_s())
    site.authenticator.forget()
    # A claim that waits was let in before; only the state of the host, in the claim's own transaction, stops it.
    if any(host.id == host_id for host in await site.fleet.hosts()):
        await site.fleet.set_host_state(host_id, "left", reason, call.actor)


async def _set(site: Site, call: Call, state: Literal["active", "draining", "paused"], reason: str) -> wire.Host:
    row = await host_of(site, call)
    if row.state == "left":
        raise StrataError(Code.PRECONDITION, f"{row.name} has left", hint="it comes back with strata join")
    return _shown(site, await site.fleet.set_host_state(row.id, state, reason, call.actor))


async def _enrolled(site: Site, call: Call) -> str:
    """Also a host that never registered has credentials that can be ended."""
    text = call.path["id"]
    hosts = await site.identity.hosts()
    found = [host.id for host in hosts if text == host.id or (text == host.name and host.revoked_at_s is None)]
    if not found:
        raise StrataError(Code.NOT_FOUND, f"there is no host {text[:100]!r}")
    return found[0]


def _shown(site: Site, row: HostRow) -> wire.Host:
    ago_s = max(0.0, site.fleet.now_s() - row.seen_at_s)
    presence: Literal["online", "suspect", "offline"] = "online"
    if ago_s > max(SUSPECT_S, site.fleet.settings.stale_after_s):
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
    )
