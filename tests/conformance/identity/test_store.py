"""What both databases promise about keys, invitations and hosts, and about the events of their changes."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from dataclasses import replace

import pytest

from strata.base.errors import Code, StrataError
from strata.database.events import StoredEvent
from strata.identity.records import ApiKey, BrowserSession, HostIdentity, Invite
from strata.identity.roles import Role
from strata.identity.store import IdentityStore
from tests.support.feed import ReadEvents, told_before

KEY = ApiKey("0123456789ab", "laptop", Role.RESEARCHER, "a" * 64, 1000.0)
MARKER = replace(KEY, id="ffffffffffff", name="marker")
INVITE = Invite("aabbccddeeff", "b" * 64, 1000.0, 2800.0, "lab", ("gpu", "linux"))
HOST = HostIdentity("host_1", "anna", "key-of-anna", 1001.0)


async def refusal(call: Awaitable[object]) -> StrataError:
    with pytest.raises(StrataError) as refused:
        await call
    return refused.value


async def recorded(store: IdentityStore, read_events: ReadEvents, page_size: int = 100) -> list[StoredEvent]:
    """All that was written until now."""
    await store.add_key(MARKER, "operator")
    return await told_before(MARKER.id, read_events, page_size=page_size)


async def kinds(store: IdentityStore, read_events: ReadEvents) -> list[tuple[str, str, str]]:
    return [(each.event.kind, each.event.subject, each.event.actor) for each in await recorded(store, read_events)]


async def test_a_key_is_found_until_it_is_revoked_and_stays_listed(
    store: IdentityStore, read_events: ReadEvents
) -> None:
    await store.add_key(KEY, "operator")
    assert await store.key(KEY.id) == KEY
    assert await store.key("ffffffffffff") is None
    await store.revoke_key(KEY.id, "operator", 2000.0)
    await store.revoke_key(KEY.id, "operator", 3000.0)
    assert await store.keys() == [replace(KEY, revoked_at_s=2000.0)]
    assert await kinds(store, read_events) == [("key.made", KEY.id, "operator"), ("key.revoked", KEY.id, "operator")]


async def test_the_revision_grows_with_each_revocation_of_a_key_or_a_host_alone(store: IdentityStore) -> None:
    await store.add_key(KEY, "operator")
    await store.add_host(HOST, "operator")
    await store.record_key_uses({KEY.id: 1500.0})
    before = await store.revision()
    await store.revoke_key(KEY.id, "operator", 2000.0)
    of_key = await store.revision()
    await store.revoke_host(HOST.id, "gone", "operator", 2000.0)
    of_host = await store.revision()
    await store.revoke_key(KEY.id, "operator", 3000.0)
    assert before < of_key < of_host == await store.revision()


async def test_an_unknown_id_cannot_be_revoked(store: IdentityStore) -> None:
    assert (await refusal(store.revoke_key("x", "operator", 0.0))).code is Code.NOT_FOUND
    assert (await refusal(store.revoke_host("x", "gone", "operator", 0.0))).code is Code.NOT_FOUND
    assert (await refusal(store.revoke_invite("x", "operator", 0.0))).code is Code.NOT_FOUND


async def test_an_invitation_enrolls_one_host_with_its_pool_and_labels(
    store: IdentityStore, read_events: ReadEvents
) -> None:
    await store.add_invite(INVITE, "operator")
    host = await store.enroll(INVITE.id, INVITE.secret_hash, HOST, 1001.0)
    assert host == replace(HOST, pool="lab", labels=("gpu", "linux"))
    assert await store.host(HOST.id) == host
    assert await store.hosts() == [host]
    assert await kinds(store, read_events) == [
        ("invite.made", INVITE.id, "operator"),
        ("host.enrolled", HOST.id, f"invite:{INVITE.id}"),
    ]


async def test_the_event_of_a_coordinators_certificate_has_its_names_and_its_end(
    store: IdentityStore, read_events: ReadEvents
) -> None:
    await store.record_coordinator_certificate(("c.example", "10.1.2.3"), 5000.0, "operator", 1001.0)
    (stored,) = await recorded(store, read_events)
    event = stored.event
    assert (event.at_s, event.kind, event.subject, event.actor) == (
        *(1001.0, "coordinator.certified"),
        *("c.example", "operator"),
    )
    assert event.body == {"names": ["c.example", "10.1.2.3"], "until_s": 5000.0}


async def test_an_invitation_with_a_name_is_good_for_that_name_only(store: IdentityStore) -> None:
    named = replace(INVITE, name="desk")
    await store.add_invite(named, "operator")
    assert await store.invites() == [named]
    refused = await refusal(store.enroll(INVITE.id, INVITE.secret_hash, HOST, 1001.0))
    assert (refused.code, refused.message) == (Code.FORBIDDEN, "the join token is for the host desk")
    assert (await store.enroll(INVITE.id, INVITE.secret_hash, replace(HOST, name="desk"), 1001.0)).name == "desk"


async def test_a_lost_reply_is_repeated_and_another_key_is_refused(store: IdentityStore) -> None:
    await store.add_invite(INVITE, "operator")
    first = await store.enroll(INVITE.id, INVITE.secret_hash, HOST, 1001.0)
    again = await store.enroll(INVITE.id, INVITE.secret_hash, replace(HOST, id="host_2"), 1500.0)
    assert again == first
    other = replace(HOST, id="host_3", name="bob", public_key="key-of-bob")
    refused = await refusal(store.enroll(INVITE.id, INVITE.secret_hash, other, 1002.0))
    assert (refused.code, refused.message) == (Code.FORBIDDEN, "the join token has been used")


@pytest.mark.parametrize("ends", ["expired", "revoked", "renewed"])
async def test_a_used_invitation_ends_with_its_time_its_revocation_or_the_first_renewal(
    store: IdentityStore, ends: str
) -> None:
    await store.add_invite(INVITE, "operator")
    host = await store.enroll(INVITE.id, INVITE.secret_hash, HOST, 1001.0)
    await store.record_certificate(host.id, 5000.0, f"invite:{INVITE.id}", 1001.0)
    await store.enroll(INVITE.id, INVITE.secret_hash, HOST, 1002.0)
    if ends == "revoked":
        await store.revoke_invite(INVITE.id, "operator", 1003.0)
    elif ends == "renewed":
        await store.record_certificate(host.id, 6000.0, f"host:{host.id}", 1003.0)
    now_s = 9999.0 if ends == "expired" else 1004.0
    refused = await refusal(store.enroll(INVITE.id, INVITE.secret_hash, HOST, now_s))
    assert refused.code is Code.FORBIDDEN


async def test_a_used_invitation_does_not_bring_a_revoked_host_back(store: IdentityStore) -> None:
    await store.add_invite(INVITE, "operator")
    await store.enroll(INVITE.id, INVITE.secret_hash, HOST, 1001.0)
    await store.revoke_host(HOST.id, "stolen", "operator", 1002.0)
    refused = await refusal(store.enroll(INVITE.id, INVITE.secret_hash, replace(HOST, id="host_2"), 1003.0))
    assert refused.code is Code.FORBIDDEN
    assert [host.id for host in await store.hosts()] == [HOST.id]


@pytest.mark.parametrize(
    ("secret_hash", "now_s", "why"),
    [("c" * 64, 1001.0, "not known"), (INVITE.secret_hash, 2800.0, "expired")],
)
async def test_a_wrong_secret_and_a_late_one_are_refused(
    store: IdentityStore, secret_hash: str, now_s: float, why: str
) -> None:
    await store.add_invite(INVITE, "operator")
    refused = await refusal(store.enroll(INVITE.id, secret_hash, HOST, now_s))
    assert refused.code is Code.FORBIDDEN
    assert why in refused.message
    assert await store.hosts() == []


async def test_a_revoked_invitation_enrolls_nobody(store: IdentityStore) -> None:
    await store.add_invite(INVITE, "operator")
    await store.revoke_invite(INVITE.id, "operator", 1000.5)
    assert "revoked" in (await refusal(store.enroll(INVITE.id, INVITE.secret_hash, HOST, 1001.0))).message


async def test_a_name_belongs_to_one_live_host(store: IdentityStore) -> None:
    await store.add_host(HOST, "hub")
    twin = replace(HOST, id="host_2", public_key="another key")
    assert (await refusal(store.add_host(twin, "hub"))).code is Code.CONFLICT
    await store.revoke_host(HOST.id, "replaced", "operator", 1002.0)
    assert await store.add_host(twin, "hub") == twin


async def test_a_revoked_host_gets_no_certificate(store: IdentityStore) -> None:
    await store.add_host(HOST, "hub")
    await store.record_certificate(HOST.id, 5000.0, "hub", 1001.0)
    found = await store.host(HOST.id)
    assert found is not None
    assert found.certificate_until_s == 5000.0
    await store.revoke_host(HOST.id, "stolen", "operator", 1002.0)
    refused = await refusal(store.record_certificate(HOST.id, 9000.0, "hub", 1003.0))
    assert refused.code is Code.FORBIDDEN
    assert "stolen" in refused.message


async def test_of_many_machines_with_one_token_exactly_one_is_enrolled(store: IdentityStore) -> None:
    await store.add_invite(INVITE, "operator")
    crowd = [replace(HOST, id=f"host_{n}", name=f"name{n}", public_key=f"key{n}") for n in range(16)]
    results = await asyncio.gather(
        *(store.enroll(INVITE.id, INVITE.secret_hash, host, 1001.0) for host in crowd), return_exceptions=True
    )
    assert sum(isinstance(result, HostIdentity) for result in results) == 1
    assert len(await store.hosts()) == 1


async def test_an_invitation_of_ephemeral_hosts_enrolls_each_that_comes_until_it_expires(store: IdentityStore) -> None:
    await store.add_invite(replace(INVITE, ephemeral=True), "operator")
    pods = [replace(HOST, id=f"host_{n}", name=f"pod{n}", public_key=f"key{n}") for n in range(3)]
    enrolled = [await store.enroll(INVITE.id, INVITE.secret_hash, pod, 1001.0) for pod in (*pods, pods[0])]
    assert [(host.id, host.ephemeral) for host in enrolled] == [(f"host_{n}", True) for n in (0, 1, 2, 0)]
    assert await store.hosts() == enrolled[:3]
    stranger = replace(HOST, id="host_9", name="pod0", public_key="key9")
    assert (await refusal(store.enroll(INVITE.id, INVITE.secret_hash, stranger, 1001.0))).code is Code.CONFLICT
    late = replace(HOST, id="host_8", name="pod8", public_key="key8")
    assert (
        await refusal(store.enroll(INVITE.id, INVITE.secret_hash, late, INVITE.expires_at_s))
    ).code is Code.FORBIDDEN
    await store.revoke_invite(INVITE.id, "operator", 1002.0)
    assert (await refusal(store.enroll(INVITE.id, INVITE.secret_hash, late, 1003.0))).code is Code.FORBIDDEN


async def test_events_are_read_page_by_page_without_a_gap(store: IdentityStore, read_events: ReadEvents) -> None:
    keys = [replace(KEY, id=f"{n:012x}", name=f"key {n}") for n in range(30)]
    await asyncio.gather(*(store.add_key(key, "operator") for key in keys))
    seen = await recorded(store, read_events, page_size=7)
    assert sorted(each.event.subject for each in seen) == [key.id for key in keys]
    assert (await refusal(read_events("not a cursor", 7))).code is Code.INVALID


SESSION = BrowserSession("c" * 64, f"key:{KEY.id}", 1000.0, 2000.0)


async def test_a_session_is_found_until_it_is_removed(store: IdentityStore, read_events: ReadEvents) -> None:
    await store.add_session(SESSION, SESSION.actor)
    assert await store.session(SESSION.token_hash) == SESSION
    assert await store.session("d" * 64) is None
    await store.extend_session(SESSION.token_hash, 3000.0)
    assert await store.session(SESSION.token_hash) == replace(SESSION, expires_at_s=3000.0)
    for _ in range(2):
        await store.remove_session(SESSION.token_hash, SESSION.actor, 1500.0)
    assert await store.session(SESSION.token_hash) is None
    assert await kinds(store, read_events) == [
        ("session.opened", SESSION.id, SESSION.actor),
        ("session.closed", SESSION.id, SESSION.actor),
    ]


async def test_a_new_session_removes_those_that_have_expired(store: IdentityStore) -> None:
    await store.add_session(SESSION, SESSION.actor)
    await store.add_session(replace(SESSION, token_hash="e" * 64, made_at_s=1999.0), SESSION.actor)
    assert await store.session(SESSION.token_hash) is not None
    await store.add_session(replace(SESSION, token_hash="f" * 64, made_at_s=2000.0, expires_at_s=9e3), SESSION.actor)
    assert await store.session(SESSION.token_hash) is None


async def test_of_many_browsers_with_one_login_code_one_gets_a_session(
    store: IdentityStore, read_events: ReadEvents
) -> None:
    code = replace(SESSION, credential="operator:hash", code=True)
    await store.add_session(code, "operator")
    wanted = [BrowserSession(f"{n}" * 64, "", 1500.0, 3000.0) for n in range(6)]
    results = await asyncio.gather(
        *(store.redeem_code(code.token_hash, each, "10.0.0.1") for each in wanted), return_exceptions=True
    )
    (opened,) = [each for each in results if isinstance(each, BrowserSession)]
    assert opened.credential == "operator:hash"
    assert await store.session(opened.token_hash) == opened
    assert [each.code for each in results if isinstance(each, StrataError)] == [Code.FORBIDDEN] * 5
    assert await kinds(store, read_events) == [("session.opened", opened.id, "operator")]


@pytest.mark.parametrize("used", [replace(SESSION, code=True, expires_at_s=1500.0), SESSION])
async def test_an_expired_code_and_a_session_are_no_login_codes(store: IdentityStore, used: BrowserSession) -> None:
    await store.add_session(used, SESSION.actor)
    wanted = BrowserSession("9" * 64, "", 1500.0, 3000.0)
    assert (await refusal(store.redeem_code(used.token_hash, wanted, ""))).code is Code.FORBIDDEN


async def test_the_last_use_of_a_key_is_written_and_never_goes_back(store: IdentityStore) -> None:
    await store.add_key(KEY, "operator")
    await store.record_key_uses({KEY.id: 20.0, "unknown": 1.0})
    await store.record_key_uses({KEY.id: 10.0})
    assert await store.key(KEY.id) == replace(KEY, used_at_s=20.0)
    assert await store.key("unknown") is None
