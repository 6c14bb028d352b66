"""Checks engine URLs against the allow-list and refuses private or unexpected addresses (server-side request forgery);
lookup timeout 5 s.

A URL comes from a request, and a client that can make the server connect anywhere could read what only the server can
reach. So scheme, host and port must be spelled exactly as in the settings, the name is resolved once, every address it
has is checked, and from then on the server connects to that address alone. DNS rebinding changes nothing.
"""

from __future__ import annotations

import asyncio
import ipaddress
import re
import socket
from collections.abc import Sequence
from typing import Final, NamedTuple
from urllib.parse import urlsplit

from strata.base.errors import Code, StrataError
from strata.base.loopback import Address, inner_address

_PORTS: Final = {"http": 80, "https": 443}
_HOST: Final = re.compile(r"[a-z0-9](?:[a-z0-9.-]*[a-z0-9])?|[0-9a-f:.]+")
_URL: Final = re.compile(r"[!\"$->A-\[\]-~]{1,300}")
"""Printable ASCII without `#`, `?`, `@` and the backslash."""
LOOKUP_S: Final = 5.0


class EngineOrigin(NamedTuple):
    scheme: str
    host: str
    port: int

    def __str__(self) -> str:
        return f"{self.scheme}://{_bracketed(self.host)}:{self.port}"

    def at(self, address: str) -> str:
        """The same origin with an address instead of its name."""
        return f"{self.scheme}://{_bracketed(address)}:{self.port}"


def parse_origin(url: str) -> EngineOrigin:
    """Parse a URL that is an origin and nothing more: no user, path, query or fragment."""
    invalid = StrataError(
        Code.INVALID, f"{url[:200]!r} is not the address of an inference engine", hint="use http://HOST:PORT"
    )
    if not _URL.fullmatch(url):
        raise invalid
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError:
        raise invalid from None
    host = parts.hostname or ""
    if parts.scheme not in _PORTS or parts.path not in ("", "/") or not _HOST.fullmatch(host) or port == 0:
        raise invalid
    return EngineOrigin(parts.scheme, host, port or _PORTS[parts.scheme])


def check_allowed(url: str, allow: Sequence[str]) -> EngineOrigin:
    """FORBIDDEN unless the settings name this origin."""
    origin = parse_origin(url)
    if origin not in {parse_origin(entry) for entry in allow}:
        raise StrataError(
            Code.FORBIDDEN,
            f"{origin} is not in the settings' list of inference engines",
            hint="the operator of the server adds it to `allow` of [inference]",
        )
    return origin


async def resolve_address(origin: EngineOrigin) -> str:
    """Resolve the address that is used from now on. Every address of the name must pass `check_address`."""
    loop = asyncio.get_running_loop()
    try:
        async with asyncio.timeout(LOOKUP_S):
            entries = await loop.getaddrinfo(origin.host, origin.port, type=socket.SOCK_STREAM)
    except (OSError, TimeoutError) as error:
        raise StrataError(Code.UNAVAILABLE, f"{origin.host} cannot be resolved: {error!r}") from error
    addresses = [str(entry[4][0]).partition("%")[0] for entry in entries]
    for address in addresses:
        check_address(origin, ipaddress.ip_address(address))
    return addresses[0]


def check_address(origin: EngineOrigin, address: Address) -> None:
    """FORBIDDEN for link-local addresses, where clouds serve credentials, and for those that are no single machine."""
    real = inner_address(address)
    if real.is_link_local or real.is_multicast or real.is_unspecified or real.is_reserved:
        raise StrataError(Code.FORBIDDEN, f"{origin.host} is {real}, where no inference engine can be")


def is_loopback(address: str) -> bool:
    return ipaddress.ip_address(address).is_loopback


def _bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host else host
