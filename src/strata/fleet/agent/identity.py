"""Who this host is to its hub, as files: `strata join` writes them, the agent reads and renews them.

identity/hub.json      address of the hub, id and name of the host, when the certificate came and how long it is good
identity/ca.pem        the hub's authority, whose pin the join token carried
identity/host.key      the key, made here and never sent
identity/host.csr      the signing request for it: sent again for each renewal, so renewing needs no cryptography
identity/host.pem      the certificate
identity/secret        instead of the four above: the bearer secret of a host beside its hub on loopback
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

import msgspec

from strata.base.errors import Code, StrataError
from strata.base.secret import Secret, read_secret
from strata.fleet.agent.disk import private_folder, read_json, write_json, write_whole
from strata.fleet.client import HubClient, TlsFiles
from strata.fleet.wire import CertificateReply, RenewRequest

FOLDER: Final = "identity"
RETRY_RENEWAL_S: Final = 300.0


class Membership(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    url: str
    host_id: str
    name: str
    certified_at_s: float = 0.0
    """By this host's clock."""
    valid_for_s: float = 0.0
    """0: there is no certificate."""

    def renewal_due(self, now_s: float) -> bool:
        """At half life; and when the clock says that the certificate is of the future, for then it is wrong."""
        if not self.valid_for_s:
            return False
        age_s = now_s - self.certified_at_s
        return age_s >= self.valid_for_s / 2 or age_s < -60.0


def save_certified(
    state: Path, url: str, reply: CertificateReply, *, key_pem: bytes, request_pem: bytes, now_s: float
) -> None:
    """What a join got. The membership is written last: while it is absent, this host has not joined."""
    folder = private_folder(private_folder(state) / FOLDER)
    write_whole(folder / "host.key", key_pem)
    write_whole(folder / "host.csr", request_pem)
    write_whole(folder / "ca.pem", reply.ca_pem.encode())
    write_whole(folder / "host.pem", reply.certificate_pem.encode())
    write_json(
        folder / "hub.json",
        Membership(
            url=url, host_id=reply.host_id, name=reply.name, certified_at_s=now_s, valid_for_s=reply.valid_for_s
        ),
    )


def save_local(state: Path, url: str, *, host_id: str, name: str, secret: Secret) -> None:
    """The agent beside its hub, on loopback without TLS."""
    folder = private_folder(private_folder(state) / FOLDER)
    write_whole(folder / "secret", secret.reveal().encode())
    write_json(folder / "hub.json", Membership(url=url, host_id=host_id, name=name))


def membership(state: Path) -> Membership:
    found = read_json(state / FOLDER / "hub.json", Membership)
    if found is None:
        raise StrataError(
            Code.PRECONDITION, f"this host has not joined a hub: there is no {state / FOLDER}", hint="strata join"
        )
    return found


def connect(state: Path, *, timeout_s: float = 30.0) -> HubClient:
    member = membership(state)
    folder = state / FOLDER
    if (folder / "secret").exists():
        return HubClient(member.url, bearer=read_secret(folder / "secret"), timeout_s=timeout_s)
    tls = TlsFiles(ca=folder / "ca.pem", certificate=folder / "host.pem", key=folder / "host.key")
    return HubClient(member.url, tls=tls, timeout_s=timeout_s)


def renew_certificate(state: Path, client: HubClient, now_s: float) -> Membership:
    """A new certificate for the same key, in use from the next connection on."""
    folder = state / FOLDER
    request = RenewRequest(request_pem=(folder / "host.csr").read_text())
    reply = client.call("POST", "/v1/certificate/renew", CertificateReply, body=request)
    # If the process ends between the two, the next one renews again, which does no harm.
    write_whole(folder / "host.pem", reply.certificate_pem.encode())
    renewed = msgspec.structs.replace(membership(state), certified_at_s=now_s, valid_for_s=reply.valid_for_s)
    write_json(folder / "hub.json", renewed)
    client.reload()
    return renewed
