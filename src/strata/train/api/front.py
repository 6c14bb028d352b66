"""Trusts the hub in front of this server: the header names (`x-strata-tenant` …), the front key, and what a caller
behind a hub may do.

The headers count only with the front key, which the agent of the fleet hands to both for one attempt. Whoever has that
key can be every tenant, and no operator.
"""

from __future__ import annotations

import hmac
from typing import Final
from urllib.parse import unquote

from starlette.datastructures import Headers
from starlette.types import Scope

from strata.base.errors import Code, StrataError
from strata.base.secret import Secret
from strata.http.authentication import FirstHeaders, Identify
from strata.identity.roles import CallerKind, Principal, Role

KEY: Final = "x-strata-front"
TENANT: Final = "x-strata-tenant"
"""The name of the caller's key at the hub, percent-encoded."""
ROLE: Final = "x-strata-role"
AT_FRONT: Final = "hub:"
"""Stands before the id of a key that is not of this server but of the hub."""
SEES_ALL: Final = "x-strata-sees-all"
"""`yes` if the caller may see other tenants by name: an operator of the hub."""
KEY_ID: Final = "x-strata-key"
"""The id of the caller's key at the hub, which checks it before it forwards a URL that was signed for that key."""
SESSION: Final = "x-strata-session"
"""The id of a session to open: ids of all the servers behind a hub follow from the hub's."""

MODEL: Final = "x-strata-model"
"""The id here of the model that the request calls by an id without its server, as a client behind a hub composes it."""


def identify_behind_front(identify: Identify, key: Secret | None) -> Identify:
    """`identify`, and the tenants that the holder of the front key names."""
    if key is None:
        return identify
    expected = key.reveal().encode()

    async def identify_caller(scope: Scope, headers: FirstHeaders) -> Principal:
        given = headers.get(KEY.encode())
        if given is None:
            return await identify(scope, headers)
        if not hmac.compare_digest(given, expected):
            raise StrataError(Code.UNAUTHENTICATED, "this is not the key of the hub in front of this server")
        name = unquote(headers.get(TENANT.encode(), b"").decode("latin-1"))
        if not name:
            raise StrataError(Code.INVALID, f"the hub names the tenant in {TENANT}")
        role = Role.named(headers.get(ROLE.encode(), b"").decode("latin-1"))
        return Principal(CallerKind.TENANT, name, min(role, Role.RESEARCHER))

    return identify_caller


def key_at_front(caller: Principal, headers: Headers) -> str:
    """The caller's key at the hub as grants name it; empty if there is no hub, or it names none."""
    key_id = headers.get(KEY_ID, "") if caller.kind is CallerKind.TENANT else ""
    return f"{AT_FRONT}{key_id}" if key_id else ""


def session_from_front(caller: Principal, headers: Headers) -> str:
    """The id that the hub has chosen for the session; empty if there is no hub, or it chose none."""
    return headers.get(SESSION, "") if caller.kind is CallerKind.TENANT else ""


def model_from_front(caller: Principal, headers: Headers) -> tuple[str, str]:
    """A model as the client calls it and as this server does; both empty if there is no hub, or it names none."""
    own = headers.get(MODEL, "") if caller.kind is CallerKind.TENANT else ""
    session, _, rest = own.partition(":")
    return f"{session.rpartition('.')[0]}:{rest}" if own else "", own
