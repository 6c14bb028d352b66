"""The certificate authority: lifetimes (root 3,650 days, hub and coordinator 90 days, host 24 h), names in
certificates, signing requests, pins, and key files.

Keys are ECDSA on P-256, which every TLS library of the last ten years supports. Hosts and coordinators create their own
keys and send a certificate signing request, of which only the public key is used: the authority sets name, lifetime and
purpose. There is no revocation list: a host certificate is valid for a day, and the database says whether its host was
revoked.
"""

from __future__ import annotations

import datetime
import hashlib
import ipaddress
import os
import re
import socket
import ssl
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from strata.base.atomic import create_file, write_file
from strata.base.errors import Code, StrataError
from strata.identity.renewal import HUB_PART, needs_renewal

ROOT_DAYS: Final = 3650
SERVER_DAYS: Final = 90
HOST_HOURS: Final = 24
_BACKDATE: Final = datetime.timedelta(minutes=10)
"""A host whose clock is a little behind must not see a certificate from the future."""
_HOST_URI: Final = "strata://host/"
HUB_URI: Final = "strata://hub"
"""The name in the certificate with which the hub connects to its hosts: no host has it."""
_HOST_DOMAIN: Final = "host.strata.internal"
"""The domain of the names that hosts show their hub."""
_MAX_NAME: Final = 253
_LABEL: Final = r"[a-z0-9](?:[a-z0-9-]{0,61}[a-z0-9])?"
# The last label is no number: else a mistyped address would be a name.
_DNS_NAME: Final = re.compile(rf"(?:{_LABEL}\.)*(?![0-9]+\Z){_LABEL}")
_MAX_REQUEST: Final = 16_384
_DAY_S: Final = 86_400.0
_WILDCARDS: Final = ("0.0.0.0", "::", "")  # noqa: S104 - recognised, not bound


@dataclass(frozen=True)
class IssuedCertificate:
    """The certificates of a host: to connect to its hub, and for the same key and as long, to be connected to by its
    hub."""

    certificate_pem: bytes
    serving_pem: bytes
    until_s: float


@dataclass(frozen=True)
class CoordinatorCertificate:
    """The certificate that a coordinator shows its workers under these DNS names and addresses."""

    certificate_pem: bytes
    names: tuple[str, ...]
    until_s: float


class Authority:
    """Signs. `Authority.load_or_create(folder)` keeps `ca.pem` and `ca.key` (0600) there."""

    def __init__(self, certificate: x509.Certificate, key: ec.EllipticCurvePrivateKey) -> None:
        self._certificate = certificate
        self._key = key

    @classmethod
    def create(cls, name: str, now_s: float) -> Authority:
        key = ec.generate_private_key(ec.SECP256R1())
        subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, f"Strata authority {name}"[:64])])
        builder = (
            _builder(subject, subject, key.public_key(), now_s, datetime.timedelta(days=ROOT_DAYS))
            .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
            .add_extension(_usage(signs_certificates=True), critical=True)
            .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        )
        return cls(builder.sign(key, hashes.SHA256()), key)

    @classmethod
    def load_or_create(cls, folder: Path, name: str, now_s: float) -> Authority:
        """The authority of this folder. Two processes that start at once end up with the same one."""
        certificate, key = folder / "ca.pem", folder / "ca.key"
        if not key.exists():
            made = cls.create(name, now_s)
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            # One file first and alone decides who made the authority; the certificate is derived from what it holds.
            create_file(key, made.key_pem() + made.certificate_pem, mode=0o600)
        found = cls.read(key)
        if not certificate.exists():
            create_file(certificate, found.certificate_pem, mode=0o644)
        return found

    @classmethod
    def read(cls, path: Path) -> Authority:
        """Reads an authority from its key file, which nobody else may be able to read."""
        if os.name == "posix" and path.stat().st_mode & 0o077:
            raise StrataError(
                Code.INVALID, f"the authority's key {path} can be read by others", hint=f"chmod 600 {path}"
            )
        content = path.read_bytes()
        try:
            key = serialization.load_pem_private_key(content, password=None)
            certificate = x509.load_pem_x509_certificate(content)
        except ValueError as error:
            raise StrataError(Code.CORRUPT, f"{path} holds no key and certificate: {error}") from None
        if not isinstance(key, ec.EllipticCurvePrivateKey) or key.public_key() != certificate.public_key():
            raise StrataError(Code.CORRUPT, f"the key and the certificate in {path} do not belong together")
        return cls(certificate, key)

    @property
    def certificate_pem(self) -> bytes:
        return self._certificate.public_bytes(serialization.Encoding.PEM)

    @property
    def pin(self) -> str:
        """SHA-256 of the certificate: what a join token carries."""
        return pin_of(self.certificate_pem)

    @property
    def until_s(self) -> float:
        """Returns when the certificate runs out, and all that it signed with it."""
        return self._certificate.not_valid_after_utc.timestamp()

    def key_pem(self) -> bytes:
        return private_pem(self._key)

    def issue_server(self, names: Sequence[str], now_s: float) -> tuple[bytes, bytes]:
        """Certificate and key of a hub that answers under these DNS names and addresses."""
        key = ec.generate_private_key(ec.SECP256R1())
        signed = self._sign_server(names, key.public_key(), now_s)
        return signed.public_bytes(serialization.Encoding.PEM), private_pem(key)

    def issue_coordinator(self, names: Sequence[str], request_pem: bytes, now_s: float) -> CoordinatorCertificate:
        """Certificate of a coordinator for the key of this request. It is for servers only: no host is called so."""
        names = check_names(names)
        signed = self._sign_server(names, read_request(request_pem), now_s)
        until_s = signed.not_valid_after_utc.timestamp()
        return CoordinatorCertificate(signed.public_bytes(serialization.Encoding.PEM), names, until_s)

    def issue_host(self, host_id: str, request_pem: bytes, now_s: float) -> IssuedCertificate:
        """Certificates for the key of this request, which has to be signed with it."""
        lifetime = datetime.timedelta(hours=HOST_HOURS)
        public_key = read_request(request_pem)
        uses = (
            (x509.UniformResourceIdentifier(_HOST_URI + host_id), ExtendedKeyUsageOID.CLIENT_AUTH),
            (x509.DNSName(serving_name(host_id)), ExtendedKeyUsageOID.SERVER_AUTH),
        )
        client, serving = (
            self._child(host_id, public_key, now_s, lifetime)
            .add_extension(x509.SubjectAlternativeName([alternative]), critical=False)
            .add_extension(x509.ExtendedKeyUsage([purpose]), critical=False)
            .sign(self._key, hashes.SHA256())
            for alternative, purpose in uses
        )
        pem = serialization.Encoding.PEM
        return IssuedCertificate(
            client.public_bytes(pem), serving.public_bytes(pem), client.not_valid_after_utc.timestamp()
        )

    def issue_hub_client(self, now_s: float) -> tuple[bytes, bytes]:
        """Certificate and key with which the hub connects to its hosts."""
        key = ec.generate_private_key(ec.SECP256R1())
        alternative = x509.SubjectAlternativeName([x509.UniformResourceIdentifier(HUB_URI)])
        builder = (
            self._child("hub", key.public_key(), now_s, datetime.timedelta(days=SERVER_DAYS))
            .add_extension(alternative, critical=False)
            .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.CLIENT_AUTH]), critical=False)
        )
        signed = builder.sign(self._key, hashes.SHA256())
        return signed.public_bytes(serialization.Encoding.PEM), private_pem(key)

    def host_of(self, certificate_der: bytes, now_s: float) -> str:
        """The host a certificate speaks for; UNAUTHENTICATED unless we signed it, for this use, and it is in time."""
        try:
            certificate = x509.load_der_x509_certificate(certificate_der)
            certificate.verify_directly_issued_by(self._certificate)
            purposes = certificate.extensions.get_extension_for_class(x509.ExtendedKeyUsage).value
            names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
        except (ValueError, TypeError, InvalidSignature, x509.ExtensionNotFound):
            raise _unknown() from None
        uris = names.get_values_for_type(x509.UniformResourceIdentifier)
        if ExtendedKeyUsageOID.CLIENT_AUTH not in purposes or len(uris) != 1 or not uris[0].startswith(_HOST_URI):
            raise _unknown()
        if not certificate.not_valid_before_utc.timestamp() <= now_s < certificate.not_valid_after_utc.timestamp():
            raise StrataError(Code.UNAUTHENTICATED, "the host's certificate is not valid now", hint="check the clock")
        return uris[0].removeprefix(_HOST_URI)

    def _sign_server(
        self, names: Sequence[str], public_key: ec.EllipticCurvePublicKey, now_s: float
    ) -> x509.Certificate:
        return (
            self._child(names[0], public_key, now_s, datetime.timedelta(days=SERVER_DAYS))
            .add_extension(x509.SubjectAlternativeName(_alternatives(names)), critical=False)
            .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
            .sign(self._key, hashes.SHA256())
        )

    def _child(
        self, name: str, public_key: ec.EllipticCurvePublicKey, now_s: float, lifetime: datetime.timedelta
    ) -> x509.CertificateBuilder:
        subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name[:64])])
        issuer_id = x509.AuthorityKeyIdentifier.from_issuer_public_key(self._key.public_key())
        return (
            _builder(subject, self._certificate.subject, public_key, now_s, lifetime)
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .add_extension(_usage(signs_certificates=False), critical=True)
            .add_extension(issuer_id, critical=False)
        )


def pin_of(certificate_pem: bytes) -> str:
    try:
        certificate = x509.load_pem_x509_certificate(certificate_pem)
    except ValueError:
        raise StrataError(Code.INVALID, "this is not a certificate in PEM") from None
    return certificate.fingerprint(hashes.SHA256()).hex()


def read_request(request_pem: bytes) -> ec.EllipticCurvePublicKey:
    """The public key of a signing request that proves to hold the private one."""
    if len(request_pem) > _MAX_REQUEST:
        raise StrataError(Code.INVALID, f"a signing request has at most {_MAX_REQUEST} bytes")
    try:
        request = x509.load_pem_x509_csr(request_pem)
        public_key = request.public_key()
        valid = request.is_signature_valid
    except (ValueError, TypeError, InvalidSignature):
        raise StrataError(Code.INVALID, "this is not a certificate signing request in PEM") from None
    if not isinstance(public_key, ec.EllipticCurvePublicKey) or not isinstance(public_key.curve, ec.SECP256R1):
        raise StrataError(Code.INVALID, "the key of a signing request has to be ECDSA on P-256")
    if not valid:
        raise StrataError(Code.FORBIDDEN, "the signing request is not signed by its own key")
    return public_key


def key_digest(request_pem: bytes) -> str:
    """Returns the digest of the key that a request is for, whatever else stands in it."""
    spki = read_request(request_pem).public_bytes(
        serialization.Encoding.DER, serialization.PublicFormat.SubjectPublicKeyInfo
    )
    return hashlib.sha256(spki).hexdigest()


def private_pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )


def _builder(
    subject: x509.Name,
    issuer: x509.Name,
    public_key: ec.EllipticCurvePublicKey,
    now_s: float,
    lifetime: datetime.timedelta,
) -> x509.CertificateBuilder:
    now = datetime.datetime.fromtimestamp(now_s, datetime.UTC).replace(microsecond=0)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(public_key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - _BACKDATE)
        .not_valid_after(now + lifetime)
    )


def _usage(*, signs_certificates: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not signs_certificates,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        key_cert_sign=signs_certificates,
        crl_sign=signs_certificates,
        encipher_only=False,
        decipher_only=False,
    )


def _alternatives(names: Iterable[str]) -> list[x509.GeneralName]:
    found: list[x509.GeneralName] = []
    for name in names:
        try:
            found.append(x509.IPAddress(ipaddress.ip_address(name)))
        except ValueError:
            found.append(x509.DNSName(name))
    return found


def check_names(names: Iterable[str]) -> tuple[str, ...]:
    """The DNS names and addresses in their canonical form, each once. INVALID for all else, wildcards too, and for the
    names by which the hub knows its hosts."""
    canonical = tuple(dict.fromkeys(canonical_name(name) for name in names))
    for name in canonical:
        if name == _HOST_DOMAIN or name.endswith(f".{_HOST_DOMAIN}"):
            raise StrataError(Code.INVALID, f"{name[:80]!r} is kept for the hosts of this hub")
        if not _is_address(name) and (len(name) > _MAX_NAME or not _DNS_NAME.fullmatch(name)):
            raise StrataError(
                Code.INVALID,
                f"{name[:80]!r} is neither a DNS name nor an address",
                hint="name a host as workers reach it, without port and wildcards",
            )
    return canonical


def canonical_name(name: str) -> str:
    """The one spelling of an address or a DNS name, whose case means nothing."""
    try:
        return str(ipaddress.ip_address(name))
    except ValueError:
        return name.lower()


def _is_address(name: str) -> bool:
    """Says whether this is an address of one machine, without the name of an interface."""
    try:
        address = ipaddress.ip_address(name)
    except ValueError:
        return False
    return "%" not in name and not address.is_unspecified and not address.is_multicast


def _unknown() -> StrataError:
    return StrataError(Code.UNAUTHENTICATED, "the certificate is not one of ours", hint="strata join")


def new_signing_request() -> tuple[bytes, bytes]:
    """A private key and the signing request for it, both PEM. The request has no subject: the hub writes it."""
    key = ec.generate_private_key(ec.SECP256R1())
    request = x509.CertificateSigningRequestBuilder().subject_name(x509.Name([])).sign(key, hashes.SHA256())
    return private_pem(key), request.public_bytes(serialization.Encoding.PEM)


class ServerCertificate:
    """How a server shows who it is, and hosts may show theirs: TLS with a certificate of its own authority.

    `context` serves; `renew` puts a fresh certificate into it while it does. `files` are the certificate and the key of
    another authority, if the server is to show that one.
    """

    def __init__(
        self,
        authority: Authority,
        folder: Path,
        names: Sequence[str],
        now_s: float,
        *,
        files: tuple[Path, Path] | None = None,
    ) -> None:
        self._authority = authority
        self._folder = folder
        self._names = names
        self._files = files
        self.context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self.context.minimum_version = ssl.TLSVersion.TLSv1_2
        self.context.verify_mode = ssl.CERT_OPTIONAL
        self.context.load_verify_locations(cadata=authority.certificate_pem.decode())
        self.context.set_alpn_protocols(["http/1.1"])
        self._issued_at_s = float("-inf")
        self.renew(now_s)

    def renew(self, now_s: float) -> None:
        """Replace the certificate if it is due; connections that are open keep theirs."""
        if not needs_renewal(self._issued_at_s, SERVER_DAYS * _DAY_S, now_s, part=HUB_PART):
            return
        certificate, key = self._files or (self._issue(now_s),) * 2
        try:
            self.context.load_cert_chain(certificate, key)
        except (OSError, ssl.SSLError) as error:
            raise StrataError(Code.INVALID, f"the certificate {certificate} cannot be used: {error}") from error
        self._issued_at_s = now_s

    def _issue(self, now_s: float) -> Path:
        certificate_pem, key_pem = self._authority.issue_server(self._names, now_s)
        place = self._folder / "server.pem"
        write_file(place, key_pem + certificate_pem)
        return place


class HubClientCertificate:
    """How the hub shows its hosts who it is, and makes sure that they are theirs. `renew` as in ServerCertificate."""

    def __init__(self, authority: Authority, folder: Path, now_s: float) -> None:
        self._authority = authority
        self._file = folder / "client.pem"
        self.context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        self.context.minimum_version = ssl.TLSVersion.TLSv1_2
        self.context.load_verify_locations(cadata=authority.certificate_pem.decode())
        self._issued_at_s = float("-inf")
        self.renew(now_s)

    def renew(self, now_s: float) -> None:
        if not needs_renewal(self._issued_at_s, SERVER_DAYS * _DAY_S, now_s, part=HUB_PART):
            return
        certificate_pem, key_pem = self._authority.issue_hub_client(now_s)
        write_file(self._file, key_pem + certificate_pem)
        self.context.load_cert_chain(self._file)
        self._issued_at_s = now_s


def serving_name(host_id: str) -> str:
    """The name in the certificate that a host shows its hub. It is no name of any network."""
    return f"{host_id.replace('_', '-')}.{_HOST_DOMAIN}"


def own_names(listen: str) -> Sequence[str]:
    """The names under which this machine reaches what listens there."""
    host = listen.rpartition(":")[0].removeprefix("[").removesuffix("]")
    names = [*([] if host in _WILDCARDS else [host]), socket.gethostname(), "localhost", "127.0.0.1", "::1"]
    return list(dict.fromkeys(names))
