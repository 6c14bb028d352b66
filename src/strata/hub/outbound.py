"""Sends a webhook's POST to permitted addresses alone: timeout 10 s, public or allowed networks, https; with the
wording of refusals.

The name is resolved once, every address of it is checked, and the connection goes to that very address: DNS rebinding
changes nothing. Redirects are not followed.
"""

from __future__ import annotations

import http.client
import ipaddress
import socket
import ssl
from collections.abc import Mapping, Sequence
from typing import Final
from urllib.parse import urlsplit

from strata.base.errors import Code, StrataError
from strata.base.loopback import Address, inner_address

TIMEOUT_S: Final = 10.0
_ANSWER: Final = 65_536


class WebhookTarget:
    """The URL of a webhook: https, or http to a loopback address that is explicitly allowed."""

    def __init__(self, url: str, allow: Sequence[str] = ()) -> None:
        parts = urlsplit(url)
        if parts.scheme not in ("https", "http") or not parts.hostname or "@" in parts.netloc:
            raise StrataError(Code.INVALID, f"a webhook goes to https://HOST/…, without a user, not to {url[:120]!r}")
        self.url = url
        self.host = parts.hostname
        self.encrypted = parts.scheme == "https"
        self.port = parts.port or (443 if self.encrypted else 80)
        self.path = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
        try:
            self._allowed = [ipaddress.ip_network(network) for network in allow]
        except ValueError as error:
            raise StrataError(Code.INVALID, f"the networks a webhook may reach: {error}") from None

    def judge(self, address: Address) -> None:
        """FORBIDDEN unless the address is a public one, or in a network that the settings name."""
        real = inner_address(address)
        named = any(real.version == network.version and real in network for network in self._allowed)
        if not self.encrypted and not (named and real.is_loopback):
            raise StrataError(Code.FORBIDDEN, f"{self.url} is not encrypted, and {real} is not an allowed loopback")
        if not named and (not real.is_global or real.is_multicast):
            raise StrataError(
                Code.FORBIDDEN, f"{self.host} is {real}, which is not public", hint="name its network in `allow`"
            )

    def resolve(self) -> str:
        """An address of the host; all it has must be allowed."""
        try:
            found = socket.getaddrinfo(self.host, self.port, type=socket.SOCK_STREAM)
        except OSError as error:
            raise StrataError(Code.UNAVAILABLE, f"{self.host} cannot be resolved: {error}") from error
        addresses = [str(entry[4][0]).partition("%")[0] for entry in found]
        for address in addresses:
            self.judge(ipaddress.ip_address(address))
        return addresses[0]


def post(target: WebhookTarget, body: bytes, headers: Mapping[str, str], context: ssl.SSLContext | None = None) -> int:
    """The status of the response. Blocking: call it in a thread."""
    address = target.resolve()
    connection = http.client.HTTPConnection(target.host, target.port, timeout=TIMEOUT_S)
    try:
        connection.sock = _connect(target, address, context)
        connection.request("POST", target.path, body, dict(headers))
        answer = connection.getresponse()
        answer.read(_ANSWER)
    except (OSError, http.client.HTTPException) as error:
        raise StrataError(Code.UNAVAILABLE, f"{target.host} did not take it: {error!r}") from error
    finally:
        connection.close()
    return answer.status


def _connect(target: WebhookTarget, address: str, context: ssl.SSLContext | None) -> socket.socket:
    plain = socket.create_connection((address, target.port), TIMEOUT_S)
    if not target.encrypted:
        return plain
    try:
        return (context or ssl.create_default_context()).wrap_socket(plain, server_hostname=target.host)
    except BaseException:
        plain.close()
        raise
