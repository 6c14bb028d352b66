"""Routes of quotas: what each owner has in use and may use, and the operator's changes."""

from __future__ import annotations

from strata.base.errors import Code, StrataError
from strata.fleet import wire
from strata.fleet.core.quota import EVERYBODY, OwnerUsage, quota_of
from strata.fleet.http.context import HubCall


async def listed(call: HubCall) -> wire.QuotasReply:
    """The quota and the usage of the caller, of each owner with a quota, and of each owner of unfinished jobs."""
    fleet = call.context.fleet
    quotas = await fleet.store.quotas()
    owners = {EVERYBODY, *quotas, *await fleet.store.owners(), call.caller.owner}
    rows = []
    for owner in sorted(owners):
        quota = quota_of(owner, quotas)
        usage = OwnerUsage()
        if owner != EVERYBODY:
            usage = await fleet.store.usage(owner, quota.window_s, fleet.now_s())
        rows.append(wire.OwnerQuota(owner=owner, own=owner in quotas, quota=quota, usage=usage))
    return wire.QuotasReply(quotas=tuple(rows))


async def change(call: HubCall, body: wire.QuotaRequest) -> None:
    """Set the quota of an owner, or of everybody who has none; null takes it back."""
    fleet = call.context.fleet
    if body.quota is not None and body.quota.problem:
        raise StrataError(Code.INVALID, body.quota.problem)
    await fleet.store.set_quota(body.owner, body.quota, call.actor, fleet.now_s())
