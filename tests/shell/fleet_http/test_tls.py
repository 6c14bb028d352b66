"""TLS from the invitation to the claim: a host that joined is known by its certificate, and by nothing else."""

from __future__ import annotations

import asyncio
import ssl
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from strata.base.clock import SystemClock
from strata.base.errors import Code, StrataError
from strata.fleet.core.jobspec import JobSpec
from strata.fleet.core.requirement import Needs
from strata.fleet.wire.hosts import RegisterReply
from strata.fleet.wire.identities import CertificateReply, InviteReply, InvitesReply
from strata.fleet.wire.leases import ClaimReply
from strata.hub.settings import HubSettings, HubTlsSettings, check_exposure
from strata.identity.ca import Authority, pin_of, private_pem
from strata.identity.tokens import read_join_token
from tests.shell.fleet_http.running import Running, ok, refused, running
from tests.support.busy import BUSY


@pytest.fixture
async def secure(tmp_path: Path) -> AsyncIterator[Running]:
    async with running(tmp_path / "hub", tls=HubTlsSettings(enabled=True)) as site:
        yield site


def new_key() -> tuple[ec.EllipticCurvePrivateKey, str]:
    key = ec.generate_private_key(ec.SECP256R1())
    request = x509.CertificateSigningRequestBuilder().subject_name(x509.Name([])).sign(key, hashes.SHA256())
    return key, request.public_bytes(serialization.Encoding.PEM).decode()


def client_context(site: Running, folder: Path, key: ec.EllipticCurvePrivateKey, certificate: str) -> ssl.SSLContext:
    context = ssl.create_default_context(cadata=site.hub.context.authority.certificate_pem.decode())
    folder.mkdir(exist_ok=True)
    pem = folder / "host.pem"
    pem.write_bytes(private_pem(key) + certificate.encode())
    context.load_cert_chain(pem)
    return context


async def joined(site: Running, tmp_path: Path, name: str) -> tuple[CertificateReply, httpx.AsyncClient, Any]:
    invited = ok(await (await site.operator()).post("/v1/invites", json={"pool": "lab"}), InviteReply)
    token = read_join_token(invited.token)
    anybody = await site.client()
    ca = (await anybody.get("/v1/ca")).content
    assert pin_of(ca) == token.ca_sha256
    key, request = new_key()
    body = {"invite_id": token.id, "secret": token.secret.reveal(), "name": name, "request_pem": request}
    reply = ok(await anybody.post("/v1/join", json=body), CertificateReply)
    context = client_context(site, tmp_path / name, key, reply.certificate_pem)
    client = httpx.AsyncClient(base_url=site.url, verify=context, timeout=30)
    return reply, await site.stack.enter_async_context(client), request


async def test_an_invited_host_joins_and_claims_with_its_certificate(secure: Running, tmp_path: Path) -> None:
    reply, http, request = await joined(secure, tmp_path, "anna")
    assert 23 * 3600 < reply.valid_for_s <= 24 * 3600
    registered = await http.post("/v1/host/register", json={"capability": {"hostname": "anna"}})
    assert ok(registered, RegisterReply).host_id == reply.host_id
    (job_id,) = await secure.add(JobSpec(model="m", needs=Needs(pool="lab")))
    claimed = ok(await http.post("/v1/job/claim", json={"claim_id": "c"}), ClaimReply)
    assert [lease.job_id for lease in claimed.leases] == [job_id]
    renewed = await http.post("/v1/certificate/renew", json={"request_pem": request})
    assert ok(renewed, CertificateReply).host_id == reply.host_id
    _, other_request = new_key()
    other = await http.post("/v1/certificate/renew", json={"request_pem": other_request})
    assert refused(other) == (403, "forbidden")


async def test_a_join_token_is_good_for_one_host(secure: Running) -> None:
    invited = ok(await (await secure.operator()).post("/v1/invites", json={}), InviteReply)
    token = read_join_token(invited.token)
    anybody = await secure.client()
    _, request = new_key()
    body = {"invite_id": token.id, "secret": token.secret.reveal(), "name": "anna", "request_pem": request}
    wrong = await anybody.post("/v1/join", json=body | {"secret": "0" * 40})
    assert wrong.status_code in (401, 403)
    first = ok(await anybody.post("/v1/join", json=body), CertificateReply)
    again = ok(await anybody.post("/v1/join", json=body), CertificateReply)
    assert again.host_id == first.host_id
    _, other = new_key()
    stolen = await anybody.post("/v1/join", json=body | {"name": "eve", "request_pem": other})
    assert refused(stolen) == (403, "forbidden")
    (listed,) = ok(await (await secure.operator()).get("/v1/invites"), InvitesReply).invites
    assert listed.used


async def test_a_revoked_host_is_refused_within_a_second_on_the_connection_it_has(
    secure: Running, tmp_path: Path
) -> None:
    _, http, _ = await joined(secure, tmp_path, "anna")
    ok(await http.post("/v1/host/register", json={"capability": {"hostname": "anna"}}), RegisterReply)
    # As another hub on the same database would do it: this one is not told.
    (host,) = await secure.hub.context.identity.hosts()
    await secure.hub.context.identity.revoke_host(host.id, "lost", "operator", SystemClock().wall_s())
    started_s = time.monotonic()
    while (reply := await http.post("/v1/heartbeats", json={})).status_code == 200:
        assert time.monotonic() - started_s < 1.0 * BUSY
    assert refused(reply) == (403, "forbidden")
    print(f"revoked host refused after {time.monotonic() - started_s:.2f} s")


async def test_a_certificate_of_another_authority_does_not_even_connect(secure: Running, tmp_path: Path) -> None:
    stranger = Authority.create("stranger", SystemClock().wall_s())
    key, request = new_key()
    (host_id, http, _) = await joined(secure, tmp_path, "anna")
    issued = stranger.issue_host(host_id.host_id, request.encode(), SystemClock().wall_s())
    context = client_context(secure, tmp_path / "stranger", key, issued.certificate_pem.decode())
    async with httpx.AsyncClient(base_url=secure.url, verify=context) as client:
        with pytest.raises(httpx.HTTPError):
            await client.post("/v1/heartbeats", json={})
    assert (await http.post("/v1/heartbeats", json={})).status_code == 200


async def test_the_certificate_of_the_hub_itself_is_no_certificate_of_a_host(secure: Running, tmp_path: Path) -> None:
    context = ssl.create_default_context(cadata=secure.hub.context.authority.certificate_pem.decode())
    context.load_cert_chain(secure.data / "ca" / "server.pem")
    async with httpx.AsyncClient(base_url=secure.url, verify=context) as client:
        with pytest.raises(httpx.HTTPError):
            refused(await client.post("/v1/heartbeats", json={}))


async def test_a_hosts_secret_is_of_no_use_where_there_is_tls(secure: Running) -> None:
    operator = await secure.operator()
    assert refused(await operator.post("/v1/hosts/local", json={"name": "x"})) == (409, "precondition")
    _, secret = await secure.hub.context.enrollment.add_local("x")
    client = await secure.client(Authorization=f"Bearer {secret}")
    assert refused(await client.post("/v1/heartbeats", json={})) == (401, "unauthenticated")


async def test_people_need_no_certificate(secure: Running) -> None:
    assert (await (await secure.with_role("viewer")).get("/v1/jobs")).status_code == 200


async def test_a_plain_connection_to_a_hub_with_tls_gets_nowhere(secure: Running) -> None:
    async with httpx.AsyncClient(base_url=secure.url.replace("https", "http")) as client:
        with pytest.raises(httpx.HTTPError):
            await client.get("/v1/health")


async def test_a_fresh_certificate_is_used_for_new_connections(secure: Running) -> None:
    tls = secure.hub.tls
    assert tls is not None

    async def serial() -> str:
        context = ssl.create_default_context(cadata=secure.hub.context.authority.certificate_pem.decode())
        host, _, port = secure.url.removeprefix("https://").rpartition(":")
        _, writer = await asyncio.open_connection(host, int(port), ssl=context)
        found = writer.get_extra_info("peercert")["serialNumber"]
        writer.close()
        return str(found)

    first = await serial()
    tls.renew(SystemClock().wall_s() + 86_400)
    assert await serial() == first, "a third of its life is not over"
    tls._issued_at_s -= 40 * 86_400
    tls.renew(SystemClock().wall_s())
    assert await serial() != first


@pytest.mark.parametrize("listen", ["0.0.0.0:8443", "[::]:8443", "192.0.2.1:8443", "hub.example.org:8443"])
def test_an_address_other_machines_reach_needs_tls(listen: str) -> None:
    with pytest.raises(StrataError) as error:
        check_exposure(HubSettings(listen=listen))
    assert error.value.code is Code.INVALID
    check_exposure(HubSettings(listen=listen, tls=HubTlsSettings(enabled=True)))


@pytest.mark.parametrize("listen", ["127.0.0.1:8443", "[::1]:0", "localhost:1", "127.9.9.9:80"])
def test_loopback_needs_none(listen: str) -> None:
    check_exposure(HubSettings(listen=listen))
