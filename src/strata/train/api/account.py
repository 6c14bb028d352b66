"""Routes of the caller's own account: its key, revoking it, usage by the hour, stored bytes."""

from __future__ import annotations

from strata.base.digest import sha256_hex
from strata.base.errors import Code, StrataError
from strata.http.route import KIB, VIEWER, Route
from strata.identity.records import ApiKey
from strata.identity.roles import CallerKind
from strata.train.api.context import ApiCall, project_of
from strata.train.core.usage import HOUR_S
from strata.train.status import queries, views
from strata.train.wire import bodies, replies

_KEY_ID_DIGITS = 12
"""Hexadecimal, of the digest of a key's id: clients read a number that JSON carries exactly."""


async def show_key(call: ApiCall) -> replies.OwnKeyReply:
    """The key of this request, without its secret."""
    key = await _own_key(call)
    return replies.OwnKeyReply(
        key_id=int(sha256_hex(key.id.encode())[:_KEY_ID_DIGITS], 16),
        name=key.name,
        note=f"{key.role.name.lower()} key {key.id}",
        details=replies.KeyDetails(
            org_details=replies.KeyOrganization(name=key.name), user_details=replies.KeyUser(email=key.name)
        ),
    )


async def revoke_key(call: ApiCall) -> None:
    """Revoke the key of this request."""
    key = await _own_key(call)
    await call.context.identity.revoke_key(key.id, call.caller.actor, call.context.clock.wall_s())
    call.context.authenticator.invalidate()


async def _own_key(call: ApiCall) -> ApiKey:
    key = await call.context.identity.key(call.caller.id) if call.caller.kind is CallerKind.KEY else None
    if key is None:
        raise StrataError(
            Code.INVALID,
            "this request did not come with an API key of this server",
            hint="keys of a hub are shown and revoked at the hub: strata keys",
        )
    return key


async def usage(call: ApiCall, query: bodies.UsageQuery) -> replies.UsageReply:
    """Tokens that the caller's sessions trained on and sampled, and checkpoints they saved, hour by hour"""
    from_s, until_s = query.window(call.context.clock.wall_s())
    counts = (await call.request(queries.ReadUsage(from_s, until_s), views.UsageView)).counts
    sessions = (await call.request(queries.ListSessions(), views.SessionList)).sessions
    server = await call.request(queries.DescribeServer(), views.ServerView)
    tenant = await call.context.tenant(call.caller)
    named = {each.session_id for each in counts}
    return replies.UsageReply(
        data=[
            replies.UsageEvent(
                bucket_start=replies.to_datetime(each.hour * HOUR_S),
                bucket_end=replies.to_datetime((each.hour + 1) * HOUR_S),
                base_model=server.base_model,
                user_id=tenant,
                user_name=project_of(tenant),
                session_id=each.session_id or None,
                project_id=project_of(tenant),
                event_info=replies.usage_info(each),
            )
            for each in counts
        ],
        sessions={
            each.session_id: replies.UsageSession(user_metadata=bodies.metadata_as_text(each.user_metadata))
            for each in sessions
            if each.session_id in named
        },
    )


async def storage(call: ApiCall, query: bodies.StorageQuery) -> replies.StorageReply:
    """Returns how many checkpoints the caller has, and their bytes"""
    tenant = await call.context.tenant(call.caller)
    project = project_of(tenant)
    if query.project_id not in (None, project):
        return replies.StorageReply(data=[])
    checkpoints = (await call.request(queries.ListCheckpoints(), views.CheckpointList)).checkpoints
    if not checkpoints:
        return replies.StorageReply(data=[])
    size = sum(each.size for each in checkpoints)
    item = replies.StorageItem(
        project_id=project,
        org_user_urn=tenant,
        user_name=project,
        checkpoint_count=len(checkpoints),
        size_bytes=size,
        size_gigabytes=size / 1e9,
    )
    return replies.StorageReply(data=[item])


ROUTES = (
    Route("GET", "/api/v1/auth/apikey/me", VIEWER, show_key, KIB),
    Route("DELETE", "/api/v1/auth/apikey/me", VIEWER, revoke_key, KIB, owner="caller"),
    Route("GET", "/api/v1/billing/usage/events", VIEWER, usage, KIB),
    Route("GET", "/api/v1/billing/usage/checkpoints/current", VIEWER, storage, KIB),
)
