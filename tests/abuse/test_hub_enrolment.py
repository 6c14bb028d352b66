"""Becoming a host, staying one, and speaking for another: every attempt that must not succeed."""

from __future__ import annotations

import ssl
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import httpx
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import rsa

from strata.fleet.core.jobspec import JobSpec
from strata.fleet.wire.identities import CertificateReply, InviteReply
from strata.hub.settings import HubTlsSettings
from strata.identity.tokens import JoinToken, read_join_token
from tests.shell.fleet_http.running import Running, ok, refused, running
from tests.shell.fleet_http.test_tls import joined, new_key

Tries = Callable[[int], None]
ENROLMENT, HOSTS, ROLES = "hub: enrolment", "hub: host against host", "hub: roles"


@pytest.fixture
async def site(tmp_path: Path) -> AsyncIterator[Running]:
    async with running(tmp_path / "hub", tls=HubTlsSettings(enabled=True)) as started:
        yield started


@pytest.fixture
async def local(tmp_path: Path) -> AsyncIterator[Running]:
    async with running(tmp_path / "local") as started:
        yield started


async def invited(site: Running, **more: object) -> JoinToken:
    reply = ok(await (await site.operator()).post("/v1/invites", json=more), InviteReply)
    return read_join_token(reply.token)


async def join(site: Running, token: JoinToken, name: str, request: str, **more: str) -> httpx.Response:
    body = {"invite_id": token.id, "secret": token.secret.reveal(), "name": name, "request_pem": request, **more}
    return await (await site.client()).post("/v1/join", json=body)


@pytest.mark.attack(ENROLMENT, "used invite with another key, or the same key and another name")
async def test_a_used_invite_is_for_its_host_alone(site: Running) -> None:
    token, (_, request), (_, other) = await invited(site), new_key(), new_key()
    assert (await join(site, token, "anna", request)).status_code == 200
    assert (await join(site, token, "anna", request)).status_code == 200, "the reply may have been lost"
    assert refused(await join(site, token, "anna", other))[0] == 403
    assert refused(await join(site, token, "berta", request))[0] in (403, 409)


@pytest.mark.attack(ENROLMENT, "used invite, same key, after the invite was revoked")
async def test_a_used_invite_certifies_no_more_once_it_is_revoked(site: Running) -> None:
    token, (_, request) = await invited(site), new_key()
    assert (await join(site, token, "anna", request)).status_code == 200
    assert (await (await site.operator()).post(f"/v1/invite/{token.id}/revoke")).status_code == 204
    assert refused(await join(site, token, "anna", request)) == (403, "forbidden")


@pytest.mark.attack(ENROLMENT, "used invite, same key, after the invite has expired")
async def test_a_used_invite_certifies_no_more_once_it_has_expired(site: Running) -> None:
    token, (_, request) = await invited(site, valid_s=3), new_key()
    assert (await join(site, token, "anna", request)).status_code == 200
    while (reply := await join(site, token, "anna", request)).status_code == 200:
        pass
    assert refused(reply) == (403, "forbidden")


@pytest.mark.attack(ENROLMENT, "used invite, same key, after the host has renewed its certificate")
async def test_a_used_invite_certifies_no_more_after_the_first_renewal(site: Running, tmp_path: Path) -> None:
    certified, client, again = await joined(site, tmp_path, "anna")
    del certified, again
    key, request = new_key()
    token = await invited(site)
    assert (await join(site, token, "berta", request)).status_code == 200
    host = next(each for each in await site.hub.context.identity.hosts() if each.name == "berta")
    await site.hub.context.identity.record_certificate(host.id, 9e9, f"host:{host.id}", 1.0)
    assert refused(await join(site, token, "berta", request)) == (403, "forbidden")
    assert (await client.get("/v1/caller")).status_code == 200
    del key


@pytest.mark.attack(ENROLMENT, "invite that is expired, revoked, unknown, or has a wrong secret")
async def test_an_invite_that_is_none_enrols_nobody(site: Running, tries: Tries) -> None:
    (_, request) = new_key()
    expired, revoked, good = await invited(site, valid_s=0.001), await invited(site), await invited(site)
    await (await site.operator()).post(f"/v1/invite/{revoked.id}/revoke")
    tries(4)
    assert refused(await join(site, expired, "a", request))[0] == 403
    assert refused(await join(site, revoked, "a", request))[0] == 403
    assert refused(await join(site, good, "a", request, secret="0" * 40))[0] == 403
    assert refused(await join(site, good, "a", request, invite_id="0" * 12))[0] == 403
    assert await site.hub.context.identity.hosts() == []


@pytest.mark.attack(ENROLMENT, "used invite and key after the host was revoked")
async def test_a_revoked_host_does_not_come_back_by_its_invite(site: Running) -> None:
    token, (_, request) = await invited(site), new_key()
    assert (await join(site, token, "anna", request)).status_code == 200
    assert (await (await site.operator()).post("/v1/host/anna/revoke")).status_code in (200, 204)
    assert refused(await join(site, token, "anna", request))[0] == 403


@pytest.mark.attack(ENROLMENT, "name of a live host, a path, a homoglyph, control characters")
async def test_a_name_is_given_once_and_is_a_name(site: Running, tries: Tries) -> None:
    assert (await join(site, await invited(site), "anna", new_key()[1])).status_code == 200
    for name in ("anna", "../x", "\u0430nna", "a\nb", "a b", "", "x" * 65, "-a", ".a"):
        tries(1)
        assert refused(await join(site, await invited(site), name, new_key()[1]))[0] in (400, 403, 409), name


@pytest.mark.attack(ENROLMENT, "signing request that asks to be an authority, or another host")
async def test_only_the_key_of_a_signing_request_is_used(site: Running) -> None:
    key, _ = new_key()
    wanted = (
        x509.CertificateSigningRequestBuilder()
        .subject_name(x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "host_other")]))
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .add_extension(x509.SubjectAlternativeName([x509.DNSName("host_other")]), critical=False)
        .sign(key, hashes.SHA256())
    )
    pem = wanted.public_bytes(serialization.Encoding.PEM).decode()
    reply = ok(await join(site, await invited(site), "anna", pem), CertificateReply)
    issued = x509.load_pem_x509_certificate(reply.certificate_pem.encode())
    assert not issued.extensions.get_extension_for_class(x509.BasicConstraints).value.ca
    assert "host_other" not in issued.subject.rfc4514_string()
    assert reply.host_id in str(issued.subject) + str(issued.extensions)


@pytest.mark.attack(ENROLMENT, "RSA, garbage and empty signing requests")
async def test_a_signing_request_that_is_none_is_refused(site: Running, tries: Tries) -> None:
    key = rsa.generate_private_key(public_exponent=65537, key_size=2048)
    builder = x509.CertificateSigningRequestBuilder().subject_name(x509.Name([]))
    pem = builder.sign(key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM).decode()
    for request in (pem, "garbage", "", pem[:100], "-----BEGIN CERTIFICATE REQUEST-----\n" + "A" * 4000):
        tries(1)
        assert refused(await join(site, await invited(site), "anna", request))[0] in (400, 403)


@pytest.mark.attack(ENROLMENT, "renewal for another key than the host enrolled with")
async def test_a_certificate_is_renewed_for_its_key_alone(site: Running, tmp_path: Path) -> None:
    _, client, _ = await joined(site, tmp_path, "anna")
    assert refused(await client.post("/v1/certificate/renew", json={"request_pem": new_key()[1]}))[0] == 403


@pytest.mark.attack(ENROLMENT, "certificate of a revoked host, at once")
async def test_the_certificate_of_a_revoked_host_is_of_no_use(site: Running, tmp_path: Path) -> None:
    _, client, _ = await joined(site, tmp_path, "anna")
    assert (await client.get("/v1/caller")).status_code == 200
    assert (await (await site.operator()).post("/v1/host/anna/revoke")).status_code in (200, 204)
    site.hub.context.authenticator.invalidate()
    assert refused(await client.get("/v1/caller"))[0] == 403
    assert refused(await client.post("/v1/certificate/renew", json={"request_pem": new_key()[1]}))[0] == 403


@pytest.mark.attack(ENROLMENT, "join at an address whose certificate another authority signed")
async def test_an_impostor_is_not_trusted(site: Running) -> None:
    async with httpx.AsyncClient(base_url=site.url, verify=ssl.create_default_context()) as other:
        with pytest.raises(httpx.ConnectError):
            await other.get("/v1/ca")


@pytest.mark.attack(HOSTS, "heartbeat, complete, fail, log and upload for the attempt of another host")
async def test_a_host_cannot_speak_for_another(local: Running, tries: Tries) -> None:
    holder, other = await local.host("holder"), await local.host("other")
    (job,) = await local.add(JobSpec(model="m"))
    assert len(await holder.claim()) == 1
    tries(5)
    beat = await other.http.post(f"/v1/job/{job}/heartbeat", json={"epoch": 1})
    assert beat.json()["verdict"] == "stop"
    assert refused(await other.http.post(f"/v1/job/{job}/complete", json={"epoch": 1}))[0] == 412
    failed = await other.http.post(f"/v1/job/{job}/fail", json={"epoch": 1, "cause": "user_error"})
    assert refused(failed)[0] == 412
    for name in ("log", "metrics"):
        put = await other.http.put(f"/v1/job/{job}/{name}", params={"epoch": 1, "offset": 0}, content=b"x")
        assert refused(put)[0] == 404


@pytest.mark.attack(HOSTS, "an epoch that is over")
async def test_an_epoch_that_is_over_counts_for_nothing(local: Running) -> None:
    holder = await local.host("holder")
    (job,) = await local.add(JobSpec(model="m"))
    await holder.claim()
    assert refused(await holder.http.post(f"/v1/job/{job}/complete", json={"epoch": 7}))[0] == 412


@pytest.mark.attack(HOSTS, "a host reads logs, events and reasons, and submits jobs")
async def test_a_host_does_not_do_what_people_do(local: Running, tries: Tries) -> None:
    host = await local.host("anna")
    (job,) = await local.add(JobSpec(model="m"))
    for method, path in (
        ("GET", f"/v1/job/{job}/log"),
        ("GET", f"/v1/job/{job}/why"),
        ("GET", "/v1/events"),
        ("POST", "/v1/jobs"),
    ):
        tries(1)
        assert refused(await host.http.request(method, path))[0] == 403


@pytest.mark.attack(ROLES, "an operator makes an admin key")
async def test_an_operator_makes_no_keys(local: Running) -> None:
    operator = await local.with_role("operator")
    assert refused(await operator.post("/v1/keys", json={"name": "x", "role": "admin"}))[0] == 403


@pytest.mark.attack(ROLES, "a researcher invites, revokes, applies and reloads")
async def test_a_researcher_does_not_do_what_operators_do(local: Running, tries: Tries) -> None:
    researcher = await local.with_role("researcher")
    for path in ("/v1/invites", "/v1/host/anna/revoke", "/v1/manifest/reload", "/v1/hosts/local"):
        tries(1)
        assert refused(await researcher.post(path))[0] == 403
