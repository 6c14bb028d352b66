"""The key of a host and the signing request for it, made where the key will stay."""

from __future__ import annotations

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from strata.identity.ca import private_pem


def new_request() -> tuple[bytes, bytes]:
    """Key and request, both PEM. The request names nobody: who the host is, the hub writes into the certificate."""
    key = ec.generate_private_key(ec.SECP256R1())
    request = x509.CertificateSigningRequestBuilder().subject_name(x509.Name([])).sign(key, hashes.SHA256())
    return private_pem(key), request.public_bytes(serialization.Encoding.PEM)
