"""Routes of gangs: the jobs of the coordinator that this hub knows, their workers, their goodput and their events, and
the parts of checkpoints that their members need of each other."""

from __future__ import annotations

from strata.base.errors import Code, StrataError
from strata.fleet.core.job import HELD
from strata.fleet.core.jobspec import gang_ids
from strata.fleet.core.lease_status import stale_attempt
from strata.fleet.http.context import Gangs, HubCall, own_hold, resolve_job_id
from strata.fleet.wire.gangs import GangEventsQuery, GangEventsReply, GangQuery, GangReply, GangsReply
from strata.fleet.wire.leases import PartsReply, PartsRequest


async def listed(call: HubCall) -> GangsReply:
    """The jobs of the coordinator; none where the hub has no coordinator."""
    gangs = call.context.gangs
    return GangsReply(gangs=(), coordinator="") if gangs is None else await gangs.listed()


async def described(call: HubCall, query: GangQuery) -> GangReply:
    """One gang with a page of its workers; first come those that may need a person."""
    return await _gangs(call).described(call.path["id"], query)


async def events(call: HubCall, query: GangEventsQuery) -> GangEventsReply:
    """What happened to a gang and what it cost, the latest first."""
    return await _gangs(call).events(call.path["id"], query)


async def find_parts(call: HubCall, body: PartsRequest) -> PartsReply:
    """The artifacts that have these parts of a checkpoint, among the last ones that the members of a gang uploaded."""
    context = call.context
    held = own_hold(call, await resolve_job_id(call), body.epoch)
    row = await context.fleet.store.job(held.job_id)
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


def _gangs(call: HubCall) -> Gangs:
    if call.context.gangs is None:
        raise StrataError(Code.NOT_FOUND, "this hub has no coordinator of gangs", hint="set hub.coordinator")
    return call.context.gangs
