"""Routes that make, list and revoke API keys, and the file of the operator token.

The routes have the paths of a hub: `strata keys` works with either. `strata.identity.authenticate` verifies keys.
"""

from __future__ import annotations

import secrets
from pathlib import Path
from typing import Final

from strata.base.atomic import write_file
from strata.base.secret import Secret, read_secret
from strata.http.route import ADMIN, KIB, Route
from strata.identity.enroll import make_key
from strata.identity.records import ApiKey
from strata.identity.roles import Role
from strata.train.api.context import ApiCall
from strata.train.wire import bodies, replies

TOKEN_FILE: Final = "operator.token"  # noqa: S105 - the name of a file


def load_operator_token(data: Path) -> Secret:
    """The operator token of this data folder, made at the first start."""
    path = data / TOKEN_FILE
    if not path.exists():
        write_file(path, f"{secrets.token_hex(24)}\n".encode())
    return read_secret(path)


async def add(call: ApiCall, body: bodies.ApiKeyBody) -> replies.ApiKeyReply:
    """An API key; its text is in this reply and nowhere else."""
    context = call.context
    key, text = await make_key(
        context.identity, context.clock, call.caller, name=body.name, role=Role.named(body.role), valid_s=body.valid_s
    )
    return replies.ApiKeyReply(key=_key_view(key), secret=text)


async def listed(call: ApiCall) -> replies.ApiKeysReply:
    """All keys; never their secrets."""
    return replies.ApiKeysReply(keys=[_key_view(key) for key in await call.context.identity.keys()])


async def revoke(call: ApiCall) -> None:
    """End a key."""
    await call.context.identity.revoke_key(call.path["id"], call.caller.actor, call.context.clock.wall_s())
    call.context.authenticator.invalidate()


def _key_view(key: ApiKey) -> replies.ApiKeyView:
    return replies.ApiKeyView(
        id=key.id,
        name=key.name,
        role=key.role.name.lower(),
        made_at_s=key.made_at_s,
        expires_at_s=key.expires_at_s,
        revoked_at_s=key.revoked_at_s,
    )


ROUTES = (
    Route("POST", "/v1/keys", ADMIN, add, 4 * KIB, operation="keys.add"),
    Route("GET", "/v1/keys", ADMIN, listed, KIB, operation="keys.listed"),
    Route("POST", "/v1/key/{id}/revoke", ADMIN, revoke, KIB, operation="keys.revoke"),
)
