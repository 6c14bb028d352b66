"""The identity of this host at its hub, as files: hub address, key and certificate, written by `strata join`, and
renewed here.

identity/hub.json      address of the hub, id and name of the host, when the certificate was issued and its validity
identity/ca.pem        the hub's certificate authority, whose pin the join token carried
identity/host.key      the private key, made on this host and never sent
identity/host.csr      the signing request for it: sent again for each renewal, so renewing needs no cryptography
identity/host.pem      the certificate
identity/serving.pem   the one for the hub's connections to servers on this host
identity/secret        instead of the four above: the bearer secret of a host on the same machine as its hub
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Final

import msgspec

from strata.base.atomic import read_json, write_file, write_json
from strata.base.errors import Code, StrataError
from strata.base.private import private_folder
from strata.base.secret import Secret, read_secret
from strata.fleet.client.hub_client import HubClient, TlsFiles
from strata.fleet.wire.identities import CertificateReply, RenewRequest
from strata.identity.renewal import HOST_PART, needs_renewal

FOLDER: Final = "identity"


class Membership(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    url: str
    host_id: str
    name: str
    certified_at_s: float = 0.0
    """When it was certified, by this host's clock."""
    valid_for_s: float = 0.0
    """0: there is no certificate."""
    ephemeral: bool = False
    """The host leaves the fleet when its agent stops."""

    def renewal_due(self, now_s: float) -> bool:
        return bool(self.valid_for_s) and needs_renewal(self.certified_at_s, self.valid_for_s, now_s, part=HOST_PART)


def save_certified(
    state: Path, url: str, reply: CertificateReply, *, key_pem: bytes, request_pem: bytes, now_s: float
) -> None:
    """Save the reply to a join. The membership is written last: without it this host has not joined."""
    folder = private_folder(private_folder(state) / FOLDER)
    write_file(folder / "host.key", key_pem)
    write_file(folder / "host.csr", request_pem)
    write_file(folder / "ca.pem", reply.ca_pem.encode())
    write_file(folder / "host.pem", reply.certificate_pem.encode())
    write_file(folder / "serving.pem", reply.serving_pem.encode())
    write_json(
        folder / "hub.json",
        Membership(
            url=url,
            host_id=reply.host_id,
            name=reply.name,
            certified_at_s=now_s,
            valid_for_s=reply.valid_for_s,
            ephemeral=reply.ephemeral,
        ),
    )


def save_local(state: Path, url: str, *, host_id: str, name: str, secret: Secret) -> None:
    """Saves the identity of an agent on the same machine as its hub: loopback without TLS."""
    folder = private_folder(private_folder(state) / FOLDER)
    write_file(folder / "secret", secret.reveal().encode())
    write_json(folder / "hub.json", Membership(url=url, host_id=host_id, name=name))


def serving_files(state: Path) -> TlsFiles | None:
    """Returns how this host shows its hub who it is when the hub connects to it; None before the hub has given it
    that."""
    folder = state / FOLDER
    certificate = folder / "serving.pem"
    if not certificate.exists() or not certificate.stat().st_size:
        return None
    return TlsFiles(ca=folder / "ca.pem", certificate=certificate, key=folder / "host.key")


def renewal_due(state: Path, now_s: float) -> bool:
    """Says whether it is time to renew the certificates."""
    return load_membership(state).renewal_due(now_s)


def load_membership(state: Path) -> Membership:
    member = read_json(state / FOLDER / "hub.json", Membership)
    if member is None:
        raise StrataError(
            Code.PRECONDITION, f"this host has not joined a hub: there is no {state / FOLDER}", hint="strata join"
        )
    return member


def remove_membership(state: Path) -> None:
    """Removes the credentials of a host that has left."""
    shutil.rmtree(state / FOLDER, ignore_errors=True)


def connect_to_hub(state: Path, *, timeout_s: float = 30.0) -> HubClient:
    member = load_membership(state)
    folder = state / FOLDER
    if (folder / "secret").exists():
        return HubClient(member.url, bearer=read_secret(folder / "secret"), timeout_s=timeout_s)
    tls = TlsFiles(ca=folder / "ca.pem", certificate=folder / "host.pem", key=folder / "host.key")
    return HubClient(member.url, tls=tls, timeout_s=timeout_s)


def renew_certificate(state: Path, client: HubClient, now_s: float) -> Membership:
    """Get a new certificate for the same key; it is used from the next connection on."""
    folder = state / FOLDER
    request = RenewRequest(request_pem=(folder / "host.csr").read_text())
    reply = client.call("POST", "/v1/certificate/renew", CertificateReply, body=request)
    # If the process ends between these writes, the next one renews again, which is harmless.
    write_file(folder / "host.pem", reply.certificate_pem.encode())
    write_file(folder / "serving.pem", reply.serving_pem.encode())
    renewed = msgspec.structs.replace(load_membership(state), certified_at_s=now_s, valid_for_s=reply.valid_for_s)
    write_json(folder / "hub.json", renewed)
    client.reload()
    return renewed
