"""Routes of quotas and usage of owners, and the check of stored bytes when an artifact is committed."""

from __future__ import annotations

import msgspec

from strata.base.errors import Code, StrataError
from strata.fleet.artifacts.ports import StorageAccount
from strata.fleet.core.ownership import OPERATOR
from strata.fleet.core.quota import EVERYBODY, OwnerUsage, check_bytes, quota_of
from strata.fleet.http.context import HubCall, HubContext, submitter_of
from strata.fleet.wire.owners import OwnerQuota, QuotaRequest, QuotasReply
from strata.identity.roles import CallerKind, Role


async def listed(call: HubCall) -> QuotasReply:
    """The quota and the usage of the caller, of each owner with a quota, and of each owner of unfinished jobs."""
    fleet = call.context.fleet
    quotas = await fleet.store.owners.quotas()
    stored = await call.context.artifacts.index.owner_bytes()
    owners = {EVERYBODY, *quotas, *await fleet.store.owners.active(), *filter(None, stored), call.caller.owner}
    windows = {quota_of(owner, quotas).window_s for owner in owners}
    usages = {window_s: await call.context.history.usages(window_s) for window_s in windows}
    rows = []
    for owner in sorted(owners):
        quota = quota_of(owner, quotas)
        usage = OwnerUsage()
        if owner != EVERYBODY:
            usage = usages[quota.window_s].get(owner, usage)
            usage = msgspec.structs.replace(usage, bytes=stored.get(owner, 0))
        rows.append(OwnerQuota(owner=owner, own=owner in quotas, quota=quota, usage=usage))
    return QuotasReply(quotas=tuple(rows))


async def change(call: HubCall, body: QuotaRequest) -> None:
    """Set the quota of an owner, or of everybody who has none; null takes it back."""
    fleet = call.context.fleet
    if body.quota is not None and body.quota.problem:
        raise StrataError(Code.INVALID, body.quota.problem)
    await fleet.store.owners.set_quota(body.owner, body.quota, call.actor, fleet.now_s())


async def caller_account(call: HubCall) -> StorageAccount:
    """Returns what the caller uploads counts against the caller's quota."""
    submitter = submitter_of(call)
    if submitter.operator:
        return StorageAccount(owner=submitter.owner, operator=True)
    quota = quota_of(submitter.owner, await call.context.fleet.store.owners.quotas())
    return StorageAccount(owner=submitter.owner, limit=quota.bytes)


async def job_account(context: HubContext, job_id: str) -> StorageAccount:
    """Returns what an attempt makes counts against the quota of the owner of its job."""
    job = await context.fleet.store.jobs.get(job_id)
    if await _is_operator(context, job.submitted_by):
        return StorageAccount(owner=job.owner)
    quota = quota_of(job.owner, await context.fleet.store.owners.quotas())
    return StorageAccount(owner=job.owner, limit=quota.attempt_bytes, refusal=Code.INVALID)


async def check_stored_bytes(call: HubCall, added: int = 0) -> None:
    """EXHAUSTED when the caller's quota of bytes is full, or has no room for `added` more."""
    account = await caller_account(call)
    if account.limit is not None:
        used = (await call.context.artifacts.index.owner_bytes()).get(account.owner, 0)
        check_bytes(account.owner, account.limit, used, max(added, 1))


async def _is_operator(context: HubContext, actor: str) -> bool:
    kind, _, key_id = actor.partition(":")
    if kind != CallerKind.KEY:
        return kind == OPERATOR.owner
    key = await context.identity.key(key_id)
    return key is not None and key.role >= Role.OPERATOR
