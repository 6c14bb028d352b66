"""Page of people: keys, invites, quotas; choices of roles and validity."""

from __future__ import annotations

from typing import Any, Final

import msgspec

from strata.base.errors import Code, StrataError
from strata.fleet.core.quota import EVERYBODY
from strata.fleet.wire.identities import HubKey, Invited, InvitesReply, KeysReply
from strata.fleet.wire.owners import QuotasReply
from strata.http.route import ADMIN, KIB, OPERATOR, VIEWER, Route
from strata.identity.roles import Role
from strata.web.page import Form, Page, View

ROLES: Final = ("viewer", "researcher", "operator", "admin")
VALID: Final = {"30 minutes": 1800, "1 day": 86_400, "7 days": 604_800, "30 days": 2_592_000}
KEY_VALID: Final = {"without end": 0, "30 days": 30 * 86_400, "90 days": 90 * 86_400, "1 year": 365 * 86_400}


class PeoplePageQuery(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    ended: bool = False
    """Also keys and invites that have ended."""
    project: str = ""


async def show_people(page: Page, query: PeoplePageQuery) -> View:
    """Keys for an admin, invites for an operator, quotas for everybody."""
    return await _people(page, ended=query.ended)


async def _people(page: Page, *, ended: bool = False, made: dict[str, Any] | None = None) -> View:
    quotas = await page.get("/v1/quotas", QuotasReply)
    keys = await page.get("/v1/keys", KeysReply) if page.may(Role.ADMIN) else None
    invites = await page.get("/v1/invites", InvitesReply) if page.may(Role.OPERATOR) else None
    now_s = page.now_s
    shown_keys = None if keys is None else [(key, key_state(key, now_s)) for key in reversed(keys.keys)]
    shown_invites = (
        None if invites is None else [(each, invite_state(each, now_s)) for each in reversed(invites.invites)]
    )
    return page.render(
        "people.html",
        title="People",
        # The secret of a new key is shown once: a page that has one is not fetched again.
        topics=[] if made else ["keys", "invites", "quotas", "jobs"],
        section="/people",
        keys=_chosen(shown_keys, "active", ended=ended),
        invites=_chosen(shown_invites, "open", ended=ended),
        ended=ended,
        quotas=[each for each in quotas.quotas if each.owner not in ("", EVERYBODY)],
        everybody=next((each for each in quotas.quotas if each.owner == EVERYBODY), None),
        roles=ROLES,
        valid=VALID,
        key_valid=KEY_VALID,
        made=made,
    )


def _chosen(rows: list[tuple[Any, str]] | None, living: str, *, ended: bool) -> dict[str, Any] | None:
    """The rows that are shown, and how many are not."""
    if rows is None:
        return None
    shown = rows if ended else [row for row in rows if row[1] == living]
    return {"rows": shown, "hidden": len(rows) - len(shown)}


def key_state(key: HubKey, now_s: float) -> str:
    if key.revoked_at_s is not None:
        return "revoked"
    return "expired" if key.expires_at_s is not None and key.expires_at_s <= now_s else "active"


def invite_state(invite: Invited, now_s: float) -> str:
    if invite.used:
        return "used"
    if invite.revoked_at_s is not None:
        return "revoked"
    return "expired" if invite.expires_at_s <= now_s else "open"


async def make_key(page: Page, form: Form) -> View:
    """Make a key, and show its text once."""
    valid_s = _number(form, "valid_s")
    body = {"name": form.get("name", "").strip(), "role": form.get("role", ""), "owner": bool(form.get("owner"))}
    reply = await page.post("/v1/keys", body | ({"valid_s": valid_s} if valid_s else {}))
    return await _people(
        page, made={"what": "key", "name": reply.key.name, "secret": reply.secret, "tls": page.site.tls}
    )


async def make_invite(page: Page, form: Form) -> View:
    """Make a join token for one host, and show it once."""
    labels = tuple(form.get("labels", "").replace(",", " ").split())
    body = {"name": form.get("name", "").strip(), "pool": form.get("pool", "").strip(), "labels": labels}
    valid_s = _number(form, "valid_s")
    reply = await page.post("/v1/invites", body | ({"valid_s": valid_s} if valid_s else {}))
    return await _people(page, made={"what": "invite", "name": body["name"], "secret": reply.token, "tls": reply.tls})


async def revoke_key(page: Page, form: Form) -> str:
    """End a key."""
    del form
    await page.post(f"/v1/key/{page.path['id']}/revoke")
    return "/people"


async def revoke_invite(page: Page, form: Form) -> str:
    """Take an invite back."""
    del form
    await page.post(f"/v1/invite/{page.path['id']}/revoke")
    return "/people"


async def set_quota(page: Page, form: Form) -> str:
    """Set the quota of an owner, or take it back."""
    owner = form.get("owner", "").strip()
    quota: dict[str, Any] | None = None
    if not form.get("remove"):
        quotas = await page.get("/v1/quotas", QuotasReply)
        known = next((each for each in quotas.quotas if each.owner in (owner, EVERYBODY)), None)
        # What the form does not show stays as it is.
        quota = {} if known is None else msgspec.to_builtins(known.quota)
        gib = _number(form, "gib")
        quota |= {
            "jobs": _whole(form, "jobs"),
            "gpu_hours": _number(form, "gpu_hours"),
            "bytes": None if gib is None else round(gib * 2**30),
        }
    await page.post("/v1/quotas", {"owner": owner, "quota": quota})
    return "/people"


def _number(form: Form, name: str) -> float | None:
    """None if the field is empty."""
    text = form.get(name, "").strip()
    if not text:
        return None
    try:
        return float(text)
    except ValueError:
        raise StrataError(Code.INVALID, f"{name}: {text[:40]!r} is no number") from None


def _whole(form: Form, name: str) -> int | None:
    value = _number(form, name)
    return None if value is None else round(value)


ROUTES = (
    Route("GET", "/people", VIEWER, show_people),
    Route("POST", "/people/keys", ADMIN, make_key, 4 * KIB),
    Route("POST", "/people/keys/{id}", ADMIN, revoke_key, 4 * KIB),
    Route("POST", "/people/invites", OPERATOR, make_invite, 4 * KIB),
    Route("POST", "/people/invites/{id}", OPERATOR, revoke_invite, 4 * KIB),
    Route("POST", "/people/quotas", OPERATOR, set_quota, 4 * KIB),
)
