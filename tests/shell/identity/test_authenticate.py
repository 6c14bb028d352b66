"""Who is calling, from what a request carries; and how a machine becomes a host."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from strata.base.errors import Code, StrataError
from strata.base.secret import Secret
from strata.database import events
from strata.database.migrations import SqliteComponents
from strata.database.sqlite import SqliteThread
from strata.database.transaction import SqliteDatabase
from strata.identity.authenticate import CACHE_TTL_S, Authenticator, Credentials
from strata.identity.ca import Authority
from strata.identity.enroll import Enrollment, make_key
from strata.identity.records import ApiKey
from strata.identity.roles import OPERATOR, CallerKind, Principal, Role
from strata.identity.sessions import CODE_S, IDLE_S, SESSION_S
from strata.identity.store import SQLITE, IdentityStore
from strata.identity.tokens import read_join_token
from tests.support.manual_clock import ManualClock

TOKEN = Secret("the operator's token, long enough")


@dataclass
class Site:
    store: IdentityStore
    clock: ManualClock
    authority: Authority
    who: Authenticator
    enrollment: Enrollment

    async def refused(self, credentials: Credentials) -> StrataError:
        with pytest.raises(StrataError) as refused:
            await self.who.identify(credentials)
        return refused.value


@pytest.fixture
async def database(tmp_path: Path) -> AsyncIterator[SqliteDatabase]:
    thread = await SqliteThread.open(tmp_path / "hub.db", SqliteComponents([events.SQLITE, SQLITE]))
    yield SqliteDatabase(thread)
    await thread.close()


@pytest.fixture
async def site(database: SqliteDatabase) -> Site:
    clock = ManualClock(wall_s=1_800_000_000.0)
    store, authority = IdentityStore(database), Authority.create("test", clock.wall_s())
    who = Authenticator(store, clock, authority=authority, operator_token=TOKEN)
    return Site(store, clock, authority, who, Enrollment(store, authority, clock))


def request() -> bytes:
    key = ec.generate_private_key(ec.SECP256R1())
    csr = x509.CertificateSigningRequestBuilder().subject_name(x509.Name([])).sign(key, hashes.SHA256())
    return csr.public_bytes(serialization.Encoding.PEM)


def certificate(pem: bytes) -> Credentials:
    return Credentials(certificate_der=ssl.PEM_cert_to_DER_cert(pem.decode()))


async def test_nothing_and_nonsense_are_nobody(site: Site) -> None:
    for credentials in (
        Credentials(),
        Credentials(bearer="tml-000000000000-" + "0" * 40),
        Credentials(bearer="tml-x"),
        Credentials(operator_token="wrong"),
        Credentials(bearer="\udcff"),
    ):
        assert (await site.refused(credentials)).code is Code.UNAUTHENTICATED


async def test_the_operator_token_counts_in_both_places(site: Site) -> None:
    assert await site.who.identify(Credentials(operator_token=TOKEN.reveal())) == OPERATOR
    assert await site.who.identify(Credentials(bearer=TOKEN.reveal())) == OPERATOR


async def test_a_key_has_its_role_until_it_is_revoked_or_expires(site: Site) -> None:
    key, text = await make_key(site.store, site.clock, OPERATOR, name="laptop", role=Role.RESEARCHER, valid_s=100)
    principal = await site.who.identify(Credentials(bearer=text))
    assert (principal.kind, principal.role, principal.actor) == (CallerKind.KEY, Role.RESEARCHER, f"key:{key.id}")
    principal.require_role(Role.VIEWER)
    with pytest.raises(StrataError, match="needs the role operator"):
        principal.require_role(Role.OPERATOR)
    await site.clock.advance(101)
    assert "expired" in (await site.refused(Credentials(bearer=text))).message
    forged = text[:-1] + ("0" if text[-1] != "0" else "1")
    assert (await site.refused(Credentials(bearer=forged))).code is Code.UNAUTHENTICATED


async def test_a_key_tells_when_it_was_used_last_also_after_a_restart(site: Site) -> None:
    key, text = await make_key(site.store, site.clock, OPERATOR, name="rosa", role=Role.VIEWER)
    assert site.who.last_use_s(key) is None
    await site.clock.advance(5.0)
    await site.who.identify(Credentials(bearer=text))
    used_s = site.clock.wall_s()
    assert site.who.last_use_s(key) == used_s
    await site.who.write_uses()
    await site.who.write_uses()
    await site.clock.advance(5.0)
    later = Authenticator(site.store, site.clock, authority=site.authority, operator_token=TOKEN)
    (stored,) = await site.store.keys()
    assert later.last_use_s(stored) == used_s


async def test_a_revocation_takes_effect_within_the_time_a_row_is_remembered(site: Site) -> None:
    key, text = await make_key(site.store, site.clock, OPERATOR, name="laptop", role=Role.VIEWER)
    await site.who.identify(Credentials(bearer=text))
    await site.store.revoke_key(key.id, "operator", site.clock.wall_s())
    await site.clock.advance(CACHE_TTL_S)
    assert "revoked" in (await site.refused(Credentials(bearer=text))).message


class CountingStore(IdentityStore):
    """Counts what is read, and holds a row back until it may go on."""

    def __init__(self, database: SqliteDatabase) -> None:
        super().__init__(database)
        self.rows = 0
        self.held: asyncio.Event | None = None

    async def key(self, id_: str) -> ApiKey | None:
        self.rows += 1
        row = await super().key(id_)
        if self.held is not None:
            await self.held.wait()
        return row


async def test_a_row_is_read_once_until_something_is_revoked(site: Site, database: SqliteDatabase) -> None:
    store = CountingStore(database)
    who = Authenticator(store, site.clock, authority=None, operator_token=None)
    _, text = await make_key(store, site.clock, OPERATOR, name="rosa", role=Role.VIEWER)
    other, _ = await make_key(store, site.clock, OPERATOR, name="otto", role=Role.VIEWER)
    for _ in range(3):
        await who.identify(Credentials(bearer=text))
        await site.clock.advance(CACHE_TTL_S)
    assert store.rows == 1
    await store.revoke_key(other.id, "operator", site.clock.wall_s())
    await who.identify(Credentials(bearer=text))
    assert store.rows == 2


async def test_a_row_from_before_a_revocation_that_comes_after_it_is_not_kept(
    site: Site, database: SqliteDatabase
) -> None:
    store = CountingStore(database)
    who = Authenticator(store, site.clock, authority=None, operator_token=None)
    key, text = await make_key(store, site.clock, OPERATOR, name="rosa", role=Role.VIEWER)
    store.held = asyncio.Event()
    first = asyncio.create_task(who.identify(Credentials(bearer=text)))
    while not store.rows:
        await asyncio.sleep(0)
    await store.revoke_key(key.id, "operator", site.clock.wall_s())
    who.invalidate()
    store.held.set()
    await first
    with pytest.raises(StrataError, match="revoked"):
        await who.identify(Credentials(bearer=text))


async def test_a_joined_host_is_known_by_its_certificate_and_renews_it(site: Site) -> None:
    token = read_join_token((await site.enrollment.invite(OPERATOR, pool="lab")).spell())
    assert token.ca_sha256 == site.authority.pin
    csr = request()
    enrolled = await site.enrollment.join(token.id, token.secret, "anna", csr)
    again = await site.enrollment.join(token.id, token.secret, "anna", csr)
    assert again.host.id == enrolled.host.id
    principal = await site.who.identify(certificate(enrolled.certificate.certificate_pem))
    assert principal == Principal(CallerKind.HOST, enrolled.host.id, None)
    await site.clock.advance(12 * 3600)
    renewed = await site.enrollment.renew(principal, csr)
    assert renewed.until_s > enrolled.certificate.until_s
    with pytest.raises(StrataError, match="the key the host enrolled with"):
        await site.enrollment.renew(principal, request())
    with pytest.raises(StrataError, match="needs the role viewer"):
        principal.require_role(Role.VIEWER)


async def test_a_revoked_host_is_refused_although_its_certificate_lives_on(site: Site) -> None:
    token = await site.enrollment.invite(OPERATOR)
    enrolled = await site.enrollment.join(token.id, token.secret, "anna", request())
    await site.store.revoke_host(enrolled.host.id, "stolen", "operator", site.clock.wall_s())
    refused = await site.refused(certificate(enrolled.certificate.certificate_pem))
    assert (refused.code, "stolen" in refused.message) == (Code.FORBIDDEN, True)


async def test_a_local_agent_is_known_by_its_secret(site: Site) -> None:
    host, text = await site.enrollment.add_local("here")
    assert await site.who.identify(Credentials(bearer=text)) == Principal(CallerKind.HOST, host.id, None)
    assert (await site.refused(Credentials(bearer=text[:-1] + "g"))).code is Code.UNAUTHENTICATED


async def test_people_without_the_role_invite_nobody_and_make_no_keys(site: Site) -> None:
    viewer = Principal(CallerKind.KEY, "k", Role.VIEWER)
    with pytest.raises(StrataError, match="needs the role operator"):
        await site.enrollment.invite(viewer)
    with pytest.raises(StrataError, match="needs the role admin"):
        await make_key(site.store, site.clock, viewer, name="x", role=Role.ADMIN)


@pytest.mark.parametrize("name", ["", "-x", "a b", "x" * 65, "../x", "a\n"])
async def test_names_that_are_no_host_names_are_refused(site: Site, name: str) -> None:
    token = await site.enrollment.invite(OPERATOR)
    with pytest.raises(StrataError) as refused:
        await site.enrollment.join(token.id, token.secret, name, request())
    assert refused.value.code is Code.INVALID


@pytest.mark.parametrize("text", ["", "fj1", "fj2." + "0" * 64 + "." + "0" * 12 + "." + "0" * 40])
def test_a_text_that_is_no_join_token_is_refused_without_repeating_it(text: str) -> None:
    with pytest.raises(StrataError) as refused:
        read_join_token(text)
    assert "0000" not in str(refused.value)


async def session_of(site: Site, role: Role) -> tuple[str, str]:
    """A session, and the id of its key."""
    key, text = await make_key(site.store, site.clock, OPERATOR, name="anna", role=role)
    caller = await site.who.identify(Credentials(bearer=text))
    return await site.who.open_session(caller), key.id


async def test_a_session_acts_as_the_key_that_opened_it_until_that_is_revoked(site: Site) -> None:
    token, key_id = await session_of(site, Role.OPERATOR)
    caller = await site.who.identify(Credentials(session=token))
    assert (caller.kind, caller.id, caller.role, caller.name) == (CallerKind.KEY, key_id, Role.OPERATOR, "anna")
    await site.store.revoke_key(key_id, "operator", site.clock.wall_s())
    site.who.invalidate()
    assert (await site.refused(Credentials(session=token))).code is Code.UNAUTHENTICATED


async def test_a_session_ends_after_a_night_without_a_request_and_after_a_week_in_any_case(site: Site) -> None:
    token, _ = await session_of(site, Role.VIEWER)
    for _ in range(15):
        await site.clock.advance(IDLE_S - 60)
        if site.clock.wall_s() - 1_800_000_000.0 >= SESSION_S:
            break
        assert (await site.who.identify(Credentials(session=token))).name == "anna"
    assert (await site.refused(Credentials(session=token))).code is Code.UNAUTHENTICATED
    token, _ = await session_of(site, Role.VIEWER)
    await site.clock.advance(IDLE_S)
    assert (await site.refused(Credentials(session=token))).message == "this session has ended"


async def test_a_session_of_the_operator_token_ends_with_that_token(site: Site) -> None:
    token = await site.who.open_session(OPERATOR)
    assert await site.who.identify(Credentials(session=token)) == OPERATOR
    after = Authenticator(site.store, site.clock, authority=None, operator_token=Secret("another one, long enough too"))
    with pytest.raises(StrataError, match="this session has ended"):
        await after.identify(Credentials(session=token))


async def test_a_login_code_opens_one_session_soon_and_is_none_itself(site: Site) -> None:
    code = await site.who.make_code(OPERATOR)
    assert (await site.refused(Credentials(session=code))).code is Code.UNAUTHENTICATED
    token = await site.who.redeem_code(code, "unix")
    assert await site.who.identify(Credentials(session=token)) == OPERATOR
    with pytest.raises(StrataError, match="used or has expired"):
        await site.who.redeem_code(code, "unix")
    late = await site.who.make_code(OPERATOR)
    await site.clock.advance(CODE_S)
    with pytest.raises(StrataError, match="used or has expired"):
        await site.who.redeem_code(late, "unix")


async def test_a_session_that_was_closed_is_no_credential_and_other_credentials_come_first(site: Site) -> None:
    token, _ = await session_of(site, Role.VIEWER)
    assert (await site.refused(Credentials(session=token, bearer="tml-x"))).code is Code.UNAUTHENTICATED
    await site.who.close_session(token, OPERATOR)
    assert (await site.refused(Credentials(session=token))).code is Code.UNAUTHENTICATED


async def test_a_host_opens_no_session(site: Site) -> None:
    host, _ = await site.enrollment.add_local("anna")
    with pytest.raises(StrataError, match="only a person"):
        await site.who.open_session(Principal(CallerKind.HOST, host.id, None))
