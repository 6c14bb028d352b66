"""TLS of the hub: old versions, weak ciphers, and what certificates may be used for."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
import warnings
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from cryptography import x509
from cryptography.x509.oid import ExtendedKeyUsageOID

from strata.hub.settings import HubTlsSettings
from tests.shell.fleet_http.running import Running, running
from tests.shell.fleet_http.test_tls import joined

Tries = Callable[[int], None]
AREA = "TLS"
WEAK = ("NULL", "aNULL", "RC4", "3DES", "DES", "EXPORT", "MD5", "CAMELLIA", "AES128-SHA", "SEED", "IDEA")


@pytest.fixture
async def site(tmp_path: Path) -> AsyncIterator[Running]:
    async with running(tmp_path / "hub", tls=HubTlsSettings(enabled=True)) as started:
        yield started


def handshake(site: Running, context: ssl.SSLContext) -> str:
    parts = urlsplit(site.url)
    with (
        socket.create_connection((parts.hostname or "", parts.port or 0), 20) as plain,
        context.wrap_socket(plain, server_hostname=parts.hostname) as connection,
    ):
        return connection.version() or ""


def trusting(site: Running) -> ssl.SSLContext:
    return ssl.create_default_context(cadata=site.hub.context.authority.certificate_pem.decode())


@pytest.mark.attack(AREA, "TLS 1.0 and 1.1")
async def test_old_versions_are_refused(site: Running, tries: Tries) -> None:
    for version in (ssl.TLSVersion.TLSv1, ssl.TLSVersion.TLSv1_1):
        tries(1)
        context = trusting(site)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            context.minimum_version = context.maximum_version = version
        context.set_ciphers("ALL:@SECLEVEL=0")
        with pytest.raises((ssl.SSLError, ConnectionError)):
            await asyncio.to_thread(handshake, site, context)
    assert await asyncio.to_thread(handshake, site, trusting(site)) in ("TLSv1.2", "TLSv1.3")


@pytest.mark.attack(AREA, "NULL, anonymous, RC4, DES, EXPORT, MD5, CAMELLIA and CBC with SHA-1")
async def test_weak_ciphers_are_refused(site: Running, tries: Tries) -> None:
    for cipher in WEAK:
        tries(1)
        context = trusting(site)
        context.maximum_version = ssl.TLSVersion.TLSv1_2
        try:
            context.set_ciphers(f"{cipher}:@SECLEVEL=0")
        except ssl.SSLError:
            continue
        with pytest.raises((ssl.SSLError, ConnectionError)):
            await asyncio.to_thread(handshake, site, context)


@pytest.mark.attack(AREA, "an authority that could make authorities; a certificate of a host as one of a server")
async def test_certificates_are_for_one_use(site: Running, tmp_path: Path) -> None:
    authority = x509.load_pem_x509_certificate(site.hub.context.authority.certificate_pem)
    constraints = authority.extensions.get_extension_for_class(x509.BasicConstraints).value
    assert (constraints.ca, constraints.path_length) == (True, 0)
    certified, _, _ = await joined(site, tmp_path, "anna")
    host = x509.load_pem_x509_certificate(certified.certificate_pem.encode())
    usage = host.extensions.get_extension_for_class(x509.ExtendedKeyUsage).value
    assert list(usage) == [ExtendedKeyUsageOID.CLIENT_AUTH]
    assert not host.extensions.get_extension_for_class(x509.BasicConstraints).value.ca


@pytest.mark.proves(
    "Never again: requests that never became whole, or one IPv6 network, locked out hosts with certificates"
)
@pytest.mark.attack(AREA, "requests to join whose bodies trickle in, on all places there are for strangers")
async def test_who_never_sends_a_whole_request_keeps_no_host_out(tmp_path: Path, tries: Tries) -> None:
    async with running(tmp_path / "hub", tls=HubTlsSettings(enabled=True), max_connections=60) as site:
        _, host, _ = await joined(site, tmp_path, "anna")
        body = {"capability": {"hostname": "anna"}}
        parts, slow = urlsplit(site.url), []
        head = b"POST /v1/join HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: 1000\r\n\r\n{"
        for _ in range(40):
            tries(1)
            reader, writer = await asyncio.open_connection(parts.hostname, parts.port, ssl=trusting(site))
            writer.write(head)
            slow.append((reader, writer))
        assert (await host.post("/v1/host/register", json=body)).status_code == 200
        assert (await (await site.operator()).get("/v1/jobs")).status_code == 200, "nor a person with a key"
        for _, writer in slow:
            writer.close()


@pytest.mark.proves(
    "Never again: a body that began fast could keep its room for hours; silent connections before TLS "
    "stayed for a minute"
)
@pytest.mark.attack(AREA, "connections that never begin the handshake")
async def test_who_does_not_begin_the_handshake_is_cut_off(tmp_path: Path, tries: Tries) -> None:
    async with running(tmp_path / "hub", tls=HubTlsSettings(enabled=True), header_s=0.5) as site:
        parts, silent = urlsplit(site.url), []
        for _ in range(50):
            tries(1)
            silent.append(await asyncio.open_connection(parts.hostname, parts.port))
        async with asyncio.timeout(20):
            for reader, writer in silent:
                with contextlib.suppress(ConnectionError):
                    assert await reader.read() == b""
                writer.close()
        assert (await (await site.operator()).get("/v1/jobs")).status_code == 200


@pytest.mark.attack(AREA, "a connection in the clear to a hub with TLS")
async def test_a_plain_connection_gets_nowhere(site: Running) -> None:
    parts = urlsplit(site.url)
    reader, writer = await asyncio.open_connection(parts.hostname, parts.port)
    writer.write(b"GET /v1/health HTTP/1.1\r\nHost: x\r\n\r\n")
    with contextlib.suppress(ConnectionError):
        assert not (await asyncio.wait_for(reader.read(), 20)).startswith(b"HTTP/1.1 200")
    writer.close()
