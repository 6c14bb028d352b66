"""Routes of identities: the certificate authority, invites, join, renewal of certificates, certificates of
coordinators, login codes, API keys; and who may make a key of which role.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, Literal, cast

from strata.base.errors import Code, StrataError
from strata.base.secret import Secret
from strata.fleet.core.ownership import check_owner_name
from strata.fleet.http.context import HubCall, HubContext
from strata.fleet.wire.identities import (
    CallerReply,
    CertificateReply,
    CoordinatorCertificateReply,
    CoordinatorCertificateRequest,
    HubKey,
    HubKeyReply,
    HubKeyRequest,
    Invited,
    InviteReply,
    InviteRequest,
    InvitesReply,
    JoinRequest,
    KeysReply,
    LocalHostReply,
    LocalHostRequest,
    LoginCodeReply,
    RenewRequest,
    RoleName,
)
from strata.http.route import RawReply
from strata.identity.ca import IssuedCertificate
from strata.identity.enroll import make_key
from strata.identity.records import ApiKey, HostIdentity
from strata.identity.roles import CallerKind, Role
from strata.identity.sessions import CODE_S


async def authority(call: HubCall) -> RawReply:
    """The certificate of the hub's authority: compare its pin before you trust it."""
    return RawReply(call.context.authority.certificate_pem, media_type="application/x-pem-file")


async def join(call: HubCall, body: JoinRequest) -> CertificateReply:
    """Become a host, with an invitation and a key of one's own. The same again gets the same host."""
    context = call.context
    secret = Secret(body.secret)
    enrolled = await context.enrollment.join(body.invite_id, secret, body.name, body.request_pem.encode())
    return _certificate_reply(context, enrolled.host, enrolled.certificate)


async def renew(call: HubCall, body: RenewRequest) -> CertificateReply:
    """A new certificate for the calling host, for the key it enrolled with."""
    context = call.context
    issued = await context.enrollment.renew(call.caller, body.request_pem.encode())
    host = await context.identity.host(call.caller.require_host())
    assert host is not None, "it was just certified"
    return _certificate_reply(context, host, issued)


async def certify_coordinator(call: HubCall, body: CoordinatorCertificateRequest) -> CoordinatorCertificateReply:
    """A certificate of the hub's authority with which a coordinator serves. Each call issues another one."""
    context = call.context
    issued = await context.enrollment.certify_coordinator(call.caller, body.names, body.request_pem.encode())
    return CoordinatorCertificateReply(
        certificate_pem=issued.certificate_pem.decode(),
        ca_pem=context.authority.certificate_pem.decode(),
        names=issued.names,
        expires_at_s=issued.until_s,
    )


async def add_local(call: HubCall, body: LocalHostRequest) -> LocalHostReply:
    """A host on the hub's own machine, with a bearer secret: only while the hub is on loopback without TLS."""
    context = call.context
    if context.tls:
        raise StrataError(Code.PRECONDITION, "this hub has TLS: hosts join it and get certificates", hint="strata join")
    host, secret = await context.enrollment.add_local(body.name)
    return LocalHostReply(host_id=host.id, secret=secret)


async def invite(call: HubCall, body: InviteRequest) -> InviteReply:
    """A join token for one host, or for ephemeral ones."""
    context = call.context
    token = await context.enrollment.invite(
        call.caller,
        name=body.name,
        pool=body.pool,
        labels=body.labels,
        valid_s=body.valid_s,
        ephemeral=body.ephemeral,
    )
    return InviteReply(token=token.spell(), id=token.id, expires_in_s=body.valid_s, tls=context.tls)


async def invites(call: HubCall) -> InvitesReply:
    """Invitations, used and unused; never their secrets."""
    return InvitesReply(
        invites=tuple(
            Invited(
                id=each.id,
                made_at_s=each.made_at_s,
                expires_at_s=each.expires_at_s,
                name=each.name,
                pool=each.pool,
                labels=each.labels,
                used=bool(each.used_by),
                revoked_at_s=each.revoked_at_s,
                ephemeral=each.ephemeral,
            )
            for each in await call.context.identity.invites()
        )
    )


async def revoke_invite(call: HubCall) -> None:
    """Take an invitation back."""
    context = call.context
    await context.identity.revoke_invite(call.path["id"], call.actor, context.clock.wall_s())


async def caller(call: HubCall) -> CallerReply:
    """Returns who the caller is, and until when."""
    context = call.context
    who = call.caller
    role = None if who.role is None else _name_of(who.role)
    key = await context.identity.key(who.id) if who.kind is CallerKind.KEY else None
    host = await context.identity.host(who.id) if who.kind is CallerKind.HOST else None
    identity = key or host
    return CallerReply(
        kind=_KINDS[who.kind],
        id=who.id,
        name="" if identity is None else identity.name,
        role=role,
        owner="" if role is None else who.owner,
        expires_at_s=key.expires_at_s if key else (host.certificate_until_s or None) if host else None,
    )


async def make_login_code(call: HubCall) -> LoginCodeReply:
    """A code with which one browser logs in to the dashboard as the caller, once and soon."""
    context = call.context
    code = await context.authenticator.make_code(call.caller)
    return LoginCodeReply(code=code, expires_in_s=CODE_S, url=context.served.url)


_KINDS: Final[Mapping[CallerKind, Literal["key", "host", "operator"]]] = {
    CallerKind.KEY: "key",
    CallerKind.HOST: "host",
    CallerKind.OPERATOR: "operator",
}
FEIGNED = (Role.RESEARCHER, Role.OPERATOR)
"""Roles that may submit jobs and seem to be less than the owner's."""


async def add_key(call: HubCall, body: HubKeyRequest) -> HubKeyReply:
    """An API key; its text is in this reply and nowhere else."""
    context = call.context
    role = Role.named(body.role)
    check_owner_name(body.name)
    if context.owner_only and role in FEIGNED and not body.owner:
        raise StrataError(
            Code.PRECONDITION,
            f"whoever submits jobs to `strata up` is its owner: a {_name_of(role)} here could do all that you can",
            hint="use `strata hub` with agents that have run_as, or --owner for a key of your own",
        )
    key, text = await make_key(
        context.identity, context.clock, call.caller, name=body.name, role=role, valid_s=body.valid_s
    )
    return HubKeyReply(key=_key_reply(context, key), secret=text)


async def keys(call: HubCall) -> KeysReply:
    """All keys; never their secrets."""
    context = call.context
    return KeysReply(keys=tuple(_key_reply(context, key) for key in await context.identity.keys()))


async def revoke_key(call: HubCall) -> None:
    """End a key."""
    context = call.context
    await context.identity.revoke_key(call.path["id"], call.actor, context.clock.wall_s())
    context.authenticator.invalidate()


def _certificate_reply(context: HubContext, host: HostIdentity, issued: IssuedCertificate) -> CertificateReply:
    return CertificateReply(
        host_id=host.id,
        name=host.name,
        certificate_pem=issued.certificate_pem.decode(),
        serving_pem=issued.serving_pem.decode(),
        ca_pem=context.authority.certificate_pem.decode(),
        valid_for_s=issued.until_s - context.clock.wall_s(),
        ephemeral=host.ephemeral,
    )


def _key_reply(context: HubContext, key: ApiKey) -> HubKey:
    return HubKey(
        id=key.id,
        name=key.name,
        role=_name_of(key.role),
        made_at_s=key.made_at_s,
        expires_at_s=key.expires_at_s,
        revoked_at_s=key.revoked_at_s,
        used_at_s=context.authenticator.last_use_s(key),
    )


def _name_of(role: Role) -> RoleName:
    return cast("RoleName", role.name.lower())
