"""How the hub shows who it is: TLS with a certificate of its own authority, and hosts may show theirs."""

from __future__ import annotations

import socket
import ssl
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from strata.base.atomic import write_file
from strata.base.errors import Code, StrataError
from strata.hub.settings import HubTlsSettings
from strata.identity.ca import SERVER_DAYS, Authority

_DAY_S: Final = 86_400.0
_WILDCARDS: Final = ("0.0.0.0", "::", "")  # noqa: S104 - recognised, not bound


class ServerCertificate:
    """`context` serves; `renew` puts a fresh certificate into it while it does."""

    def __init__(self, authority: Authority, folder: Path, tls: HubTlsSettings, listen: str, now_s: float) -> None:
        self._authority = authority
        self._folder = folder
        self._tls = tls
        self._names = tls.names or own_names(listen)
        self.context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self.context.minimum_version = ssl.TLSVersion.TLSv1_2
        self.context.verify_mode = ssl.CERT_OPTIONAL
        self.context.load_verify_locations(cadata=authority.certificate_pem.decode())
        self.context.set_alpn_protocols(["http/1.1"])
        self._issued_at_s = float("-inf")
        self.renew(now_s)

    def renew(self, now_s: float) -> None:
        """When a third of its life is over; connections that are open keep theirs."""
        if now_s - self._issued_at_s < SERVER_DAYS * _DAY_S / 3:
            return
        certificate, key = self._tls.certificate, self._tls.key
        if certificate is None or key is None:
            certificate = key = self._issue(now_s)
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


def own_names(listen: str) -> Sequence[str]:
    host = listen.rpartition(":")[0].removeprefix("[").removesuffix("]")
    names = [*([] if host in _WILDCARDS else [host]), socket.gethostname(), "localhost", "127.0.0.1", "::1"]
    return list(dict.fromkeys(names))
