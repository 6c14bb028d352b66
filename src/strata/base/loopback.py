"""Decides which addresses are loopback, where secrets and unencrypted servers are allowed, and reads IPv4 inside IPv6
addresses.
"""

from __future__ import annotations

import ipaddress
from typing import Final

from strata.base.errors import Code, StrataError

Address = ipaddress.IPv4Address | ipaddress.IPv6Address
_TRANSLATED: Final = (ipaddress.IPv6Network("64:ff9b::/96"), ipaddress.IPv6Network("64:ff9b:1::/48"))
"""NAT64: the last 32 bits are where the packets go."""
_COMPATIBLE: Final = ipaddress.IPv6Network("::/96")


def is_loopback_host(host: str) -> bool:
    """A name or an address, without brackets. A name other than `localhost` may be anywhere."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def is_loopback_address(listen: str) -> bool:
    """`HOST:PORT` or `unix:PATH`."""
    if listen.startswith("unix:"):
        return True
    host, colon, port = listen.rpartition(":")
    if not colon or not port.isdigit():
        raise StrataError(Code.INVALID, f"{listen!r} is not HOST:PORT")
    return is_loopback_host(host.removeprefix("[").removesuffix("]"))


def inner_address(address: Address) -> Address:
    """Returns where packets to this address end: the IPv4 address inside one that is mapped, translated or
    tunnelled."""
    if not isinstance(address, ipaddress.IPv6Address):
        return address
    if address.teredo is not None:
        return address.teredo[1]
    if found := address.ipv4_mapped or address.sixtofour:
        return found
    last = ipaddress.IPv4Address(int(address) & 0xFFFF_FFFF)
    if any(address in network for network in _TRANSLATED):
        return last
    # `::` and `::1` are addresses of their own.
    return last if address in _COMPATIBLE and int(last) > 1 else address
