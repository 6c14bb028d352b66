"""Where an engine may be: at an origin that the settings name, and at the address that this had when it was added.

A URL comes from a request, and whoever can make the server connect to a place of his choice reads what only the server
can reach. So scheme, host and port must be spelled exactly as in the settings, the name is looked up once, every
address it has is judged, and from then on nothing but that address is connected to. A name that means something else a
moment later changes nothing.
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
_URL: Final = re.compile(r"[!-~]{1,300}")
LOOKUP_S: Final = 5.0


class Origin(NamedTuple):
    scheme: str
    host: str
    port: int

    def __str__(self) -> str:
        return f"{self.scheme}://{_bracketed(self.host)}:{self.port}"

    def at(self, address: str) -> str:
        """The same origin with an address in the place of its name."""
        return f"{self.scheme}://{_bracketed(address)}:{self.port}"


def origin_of(url: str) -> Origin:
    """Of a URL that has no more than an origin: no user, path, query or fragment."""
    refused = StrataError(
        Code.INVALID, f"{url[:200]!r} is not the address of an inference engine", hint="use http://HOST:PORT"
    )
    if not _URL.fullmatch(url) or "\\" in url or "@" in url or "?" in url or "#" in url:
        raise refused
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError:
        raise refused from None
    host = parts.hostname or ""
    if parts.scheme not in _PORTS or parts.path not in ("", "/") or not _HOST.fullmatch(host) or port == 0:
        raise refused
    return Origin(parts.scheme, host, port or _PORTS[parts.scheme])


def allowed(url: str, allow: Sequence[str]) -> Origin:
    """FORBIDDEN unless the settings name this origin."""
    origin = origin_of(url)
    if origin not in {origin_of(each) for each in allow}:
        raise StrataError(
            Code.FORBIDDEN,
            f"{origin} is not in the settings' list of inference engines",
            hint="whoever runs the server adds it to `allow` of [inference]",
        )
    return origin


async def look_up(origin: Origin) -> str:
    """The address to stay with. All that the name has must be such that an engine can be there."""
    loop = asyncio.get_running_loop()
    try:
        async with asyncio.timeout(LOOKUP_S):
            found = await loop.getaddrinfo(origin.host, origin.port, type=socket.SOCK_STREAM)
    except (OSError, TimeoutError) as error:
        raise StrataError(Code.UNAVAILABLE, f"{origin.host} cannot be looked up: {error!r}") from error
    addresses = [str(entry[4][0]).partition("%")[0] for entry in found]
    for address in addresses:
        judge(origin, ipaddress.ip_address(address))
    return addresses[0]


def judge(origin: Origin, address: Address) -> None:
    """Link-local addresses are where clouds keep credentials; the others here are no machine at all."""
    real = inner_address(address)
    if real.is_link_local or real.is_multicast or real.is_unspecified or real.is_reserved:
        raise StrataError(Code.FORBIDDEN, f"{origin.host} is {real}, where no inference engine can be")


def is_loopback(address: str) -> bool:
    return ipaddress.ip_address(address).is_loopback


def _bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host else host
