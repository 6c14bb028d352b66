"""Certificates that real TLS accepts for what they are for, and refuses for the rest."""

from __future__ import annotations

import datetime
import socket
import ssl
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec, rsa
from cryptography.x509.oid import NameOID

from strata.base.errors import Code, StrataError
from strata.identity.ca import Authority, key_digest, pin_of, private_pem

NOW_S = datetime.datetime.now(datetime.UTC).timestamp()


def request(key: ec.EllipticCurvePrivateKey | rsa.RSAPrivateKey, name: str = "whatever it says") -> bytes:
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
    csr = x509.CertificateSigningRequestBuilder().subject_name(subject).sign(key, hashes.SHA256())
    return csr.public_bytes(serialization.Encoding.PEM)


def new_key() -> ec.EllipticCurvePrivateKey:
    return ec.generate_private_key(ec.SECP256R1())


def der(certificate_pem: bytes) -> bytes:
    return ssl.PEM_cert_to_DER_cert(certificate_pem.decode())


def handshake(tmp_path: Path, authority: Authority, client: tuple[bytes, bytes] | None) -> bytes | None:
    """The client certificate the server saw; raises ssl.SSLError where TLS refuses."""
    folder = tmp_path
    certificate, key = authority.issue_server(["localhost", "127.0.0.1"], NOW_S)
    (folder / "server.pem").write_bytes(certificate + key)
    (folder / "ca.pem").write_bytes(authority.certificate_pem)
    server = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH, cafile=str(folder / "ca.pem"))
    server.load_cert_chain(str(folder / "server.pem"))
    server.verify_mode = ssl.CERT_OPTIONAL
    visitor = ssl.create_default_context(cafile=str(folder / "ca.pem"))
    if client is not None:
        (folder / "client.pem").write_bytes(b"".join(client))
        visitor.load_cert_chain(str(folder / "client.pem"))
    ours, theirs = socket.socketpair()
    seen: list[bytes | None] = []

    def serve() -> None:
        with server.wrap_socket(ours, server_side=True) as wrapped:
            seen.append(wrapped.getpeercert(binary_form=True))
            wrapped.send(b"x")

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        with visitor.wrap_socket(theirs, server_hostname="127.0.0.1") as wrapped:
            wrapped.recv(1)
    finally:
        thread.join(10)
    return seen[0]


def test_a_host_certificate_passes_tls_and_names_its_host(tmp_path: Path) -> None:
    authority, key = Authority.create("test", NOW_S), new_key()
    issued = authority.issue_host("host_7", request(key), NOW_S)
    seen = handshake(tmp_path, authority, (issued.certificate_pem, private_pem(key)))
    assert seen == der(issued.certificate_pem)
    assert authority.host_of(seen, NOW_S) == "host_7"
    assert issued.until_s == pytest.approx(NOW_S + 24 * 3600, abs=2)


def test_a_caller_without_a_certificate_is_let_in_to_be_judged_by_its_token(tmp_path: Path) -> None:
    assert handshake(tmp_path, Authority.create("test", NOW_S), None) is None


@pytest.mark.parametrize("when", [-3600.0, 25 * 3600.0])
def test_a_certificate_is_for_its_time(when: float) -> None:
    authority = Authority.create("test", NOW_S)
    issued = authority.issue_host("host_7", request(new_key()), NOW_S)
    with pytest.raises(StrataError, match="not valid now"):
        authority.host_of(der(issued.certificate_pem), NOW_S + when)


def test_certificates_of_others_and_for_other_uses_are_not_hosts() -> None:
    authority = Authority.create("test", NOW_S)
    foreign = Authority.create("test", NOW_S).issue_host("host_7", request(new_key()), NOW_S)
    server, _ = authority.issue_server(["hub.example"], NOW_S)
    coordinator = authority.issue_coordinator(["coordinator.example"], request(new_key()), NOW_S).certificate_pem
    for certificate in (foreign.certificate_pem, server, coordinator, authority.certificate_pem):
        with pytest.raises(StrataError) as refused:
            authority.host_of(der(certificate), NOW_S)
        assert refused.value.code is Code.UNAUTHENTICATED
    with pytest.raises(StrataError, match="not one of ours"):
        authority.host_of(b"\x30\x03\x02\x01\x01", NOW_S)


def test_only_the_key_of_a_request_is_used() -> None:
    key = new_key()
    authority = Authority.create("test", NOW_S)
    issued = authority.issue_host("host_7", request(key, "host_1"), NOW_S)
    certificate = x509.load_pem_x509_certificate(issued.certificate_pem)
    assert certificate.subject.get_attributes_for_oid(NameOID.COMMON_NAME)[0].value == "host_7"
    assert key_digest(request(key, "a")) == key_digest(request(key, "b"))


def test_requests_that_prove_nothing_are_refused() -> None:
    authority = Authority.create("test", NOW_S)
    weak = request(rsa.generate_private_key(public_exponent=65537, key_size=2048))
    garbled = request(new_key()).replace(b"A", b"B", 3)
    for text in (weak, garbled, b"", b"-----BEGIN CERTIFICATE REQUEST-----\n", b"x" * 20_000):
        with pytest.raises(StrataError) as refused:
            authority.issue_host("host_7", text, NOW_S)
        assert refused.value.code in (Code.INVALID, Code.FORBIDDEN)


def test_the_authority_of_a_folder_is_made_once_even_by_many_at_once(tmp_path: Path) -> None:
    folder = tmp_path / "ca"
    with ThreadPoolExecutor(8) as pool:
        pins = set(pool.map(lambda _: Authority.load_or_create(folder, "test", NOW_S).pin, range(8)))
    assert len(pins) == 1
    assert pin_of((folder / "ca.pem").read_bytes()) == pins.pop()
    assert (folder / "ca.key").stat().st_mode & 0o777 == 0o600
    assert sorted(file.name for file in folder.iterdir()) == ["ca.key", "ca.pem"]


def test_a_key_that_others_can_read_is_refused(tmp_path: Path) -> None:
    Authority.load_or_create(tmp_path, "test", NOW_S)
    (tmp_path / "ca.key").chmod(0o640)
    with pytest.raises(StrataError, match="can be read by others"):
        Authority.load_or_create(tmp_path, "test", NOW_S)
