"""Certificates of coordinators from the hub's authority: who gets one, for which names, and what it is no good for."""

from __future__ import annotations

import ssl
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from cryptography import x509
from cryptography.x509.oid import ExtendedKeyUsageOID

from strata.base.errors import Code, StrataError
from strata.fleet.wire.events import EventsReply
from strata.fleet.wire.identities import CoordinatorCertificateReply
from strata.hub.settings import HubTlsSettings
from strata.identity.ca import SERVER_DAYS, serving_name
from tests.shell.fleet_http.running import Running, ok, refused, running
from tests.shell.fleet_http.test_tls import client_context, new_key

PATH = "/v1/certificate/coordinator"
NAMES = ["coordinator.example", "10.1.2.3", "fd00::7"]


@pytest.fixture
async def secure(tmp_path: Path) -> AsyncIterator[Running]:
    tls = HubTlsSettings(enabled=True, names=("127.0.0.1", "Hub.example"))
    async with running(tmp_path / "hub", tls=tls) as site:
        yield site


def wanted(*names: str) -> dict[str, Any]:
    return {"names": names, "request_pem": new_key()[1]}


def certificate_of(reply: CoordinatorCertificateReply) -> x509.Certificate:
    return x509.load_pem_x509_certificate(reply.certificate_pem.encode())


async def test_an_operator_gets_a_certificate_for_servers_only_with_these_names(secure: Running) -> None:
    operator = await secure.with_role("operator")
    key, request = new_key()
    body = {"names": NAMES, "request_pem": request}
    reply = ok(await operator.post(PATH, json=body), CoordinatorCertificateReply)
    issued = certificate_of(reply)
    assert issued.public_key() == key.public_key()
    names = issued.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert names.get_values_for_type(x509.DNSName) == ["coordinator.example"]
    assert [str(each) for each in names.get_values_for_type(x509.IPAddress)] == ["10.1.2.3", "fd00::7"]
    uses = issued.extensions.get_extension_for_class(x509.ExtendedKeyUsage).value
    assert list(uses) == [ExtendedKeyUsageOID.SERVER_AUTH]
    assert not issued.extensions.get_extension_for_class(x509.BasicConstraints).value.ca
    assert reply.expires_at_s == issued.not_valid_after_utc.timestamp()
    assert reply.expires_at_s == pytest.approx(time.time() + SERVER_DAYS * 86_400, abs=60)
    issued.verify_directly_issued_by(x509.load_pem_x509_certificate(reply.ca_pem.encode()))
    assert reply.ca_pem.encode() == (await (await secure.client()).get("/v1/ca")).content


async def test_an_event_keeps_who_got_a_certificate_for_which_names_until_when(secure: Running) -> None:
    operator = await secure.with_role("operator")
    key_id = (await operator.get("/v1/caller")).json()["id"]
    reply = ok(await operator.post(PATH, json=wanted(*NAMES)), CoordinatorCertificateReply)
    query = {"kind": "coordinator.*", "before": "newest"}
    (event,) = ok(await operator.get("/v1/events", params=query), EventsReply).events
    assert (event.kind, event.subject, event.actor) == ("coordinator.certified", NAMES[0], f"key:{key_id}")
    assert event.body == {"names": NAMES, "until_s": reply.expires_at_s}


async def test_nobody_below_an_operator_gets_one(secure: Running) -> None:
    for role in ("viewer", "researcher"):
        assert refused(await (await secure.with_role(role)).post(PATH, json=wanted(*NAMES))) == (403, "forbidden")
    assert refused(await (await secure.client()).post(PATH, json=wanted(*NAMES))) == (401, "unauthenticated")


NO_NAMES = [
    "", "*", "*.example", "a b", "a_b.example", "-a.example", "a-.example", "a..example", ".example", "example.",
    "coordinator.example:7070", "https://coordinator.example", "strata://hub", "us\u00e9r.example", "256.1.1.1",
    "10.0.0.0/8", "10.1", "0.0.0.0", "::", "ff02::1", "fe80::1%eth0", "a" * 64 + ".example", "a." * 127 + "a",
    "x" * 300, "a\nb", "host.strata.internal", serving_name("host_7"), serving_name("host_7").upper(),
]  # fmt: skip


async def test_what_is_no_dns_name_and_no_address_is_refused(secure: Running) -> None:
    operator = await secure.operator()
    for name in NO_NAMES:
        reply = await operator.post(PATH, json=wanted("coordinator.example", name))
        assert refused(reply) == (400, "invalid"), name


async def test_a_certificate_has_at_least_one_name_and_not_many(secure: Running) -> None:
    operator = await secure.operator()
    for count, status in ((0, 400), (1, 200), (16, 200), (17, 400)):
        reply = await operator.post(PATH, json=wanted(*(f"c{number}.example" for number in range(count))))
        assert reply.status_code == status, reply.text


async def test_names_are_written_in_one_way_and_once(secure: Running) -> None:
    body = wanted("Coordinator.Example", "coordinator.example", "FD00:0::7")
    reply = ok(await (await secure.operator()).post(PATH, json=body), CoordinatorCertificateReply)
    assert reply.names == ("coordinator.example", "fd00::7")


async def test_only_an_admin_gets_one_that_could_pose_as_the_hub(secure: Running) -> None:
    operator, admin = await secure.with_role("operator"), await secure.with_role("admin")
    for name in ("127.0.0.1", "hub.example", "HUB.example"):
        body = wanted("coordinator.example", name)
        reply = await operator.post(PATH, json=body)
        assert (refused(reply), "a name of the hub itself" in reply.text) == ((403, "forbidden"), True)
        ok(await admin.post(PATH, json=body), CoordinatorCertificateReply)


async def test_a_repeated_call_issues_another_one_and_the_first_stays_valid(secure: Running) -> None:
    operator, body = await secure.operator(), wanted(*NAMES)
    first, again = [ok(await operator.post(PATH, json=body), CoordinatorCertificateReply) for _ in range(2)]
    one, other = certificate_of(first), certificate_of(again)
    assert one.public_key() == other.public_key()
    assert one.serial_number != other.serial_number
    assert (first.names, first.ca_pem) == (again.names, again.ca_pem)


async def test_a_request_that_proves_no_key_is_refused(secure: Running) -> None:
    operator = await secure.operator()
    for request in ("", "garbage", new_key()[1][:100]):
        assert refused(await operator.post(PATH, json={"names": NAMES, "request_pem": request})) == (400, "invalid")


async def test_the_certificate_of_a_coordinator_is_no_certificate_of_a_host(secure: Running, tmp_path: Path) -> None:
    key, request = new_key()
    body = {"names": NAMES, "request_pem": request}
    reply = ok(await (await secure.operator()).post(PATH, json=body), CoordinatorCertificateReply)
    with pytest.raises(StrataError) as error:
        secure.hub.context.authority.host_of(ssl.PEM_cert_to_DER_cert(reply.certificate_pem), time.time())
    assert error.value.code is Code.UNAUTHENTICATED
    context = client_context(secure, tmp_path / "coordinator", key, reply.certificate_pem)
    async with httpx.AsyncClient(base_url=secure.url, verify=context) as client:
        with pytest.raises(httpx.HTTPError):
            await client.post("/v1/heartbeats", json={})
