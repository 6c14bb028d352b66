"""Addresses of clients behind trusted proxies, and the limits of connections without credentials: 64 from an address,
half of all together, 5 s idle.
"""

from __future__ import annotations

from collections.abc import Sequence
from ipaddress import IPv4Network, IPv6Address, IPv6Network, ip_address
from typing import Final, Protocol

from starlette.types import Scope

KEEP_ALIVE_S: Final = 5
"""How long such a connection may be idle."""
MIN_PER_ADDRESS: Final = 64
"""Connections that one address may have, also if the limit of the server is small."""


def origin(address: str) -> str:
    """Returns what counts as one address: of IPv6 the network of 64 bits, of which one client has all addresses."""
    try:
        parsed = ip_address(address)
    except ValueError:
        return address
    if isinstance(parsed, IPv6Address):
        return str(parsed.ipv4_mapped or f"{IPv6Address(int(parsed) >> 64 << 64)}/64")
    return address


Networks = Sequence[IPv4Network | IPv6Network]


def client_address(scope: Scope, trusted: Networks = ()) -> str:
    """The address of the client: of the connection, or of a trusted proxy what it has written into `X-Forwarded-For`.

    Each proxy adds the address that it sees at the end, so the last address that is no trusted proxy's is the client's;
    what stands before it is the client's own word.
    """
    if not scope.get("client"):
        return "unix"
    address: str = scope["client"][0]
    if not trusted or not _is_within(address, trusted):
        return address
    written = b",".join(value for name, value in scope["headers"] if name == b"x-forwarded-for").decode("latin-1")
    for part in reversed(written.split(",")):
        forwarded = part.strip()
        try:
            address = str(ip_address(forwarded))
        except ValueError:
            break
        if not _is_within(address, trusted):
            break
    return address


def _is_within(address: str, networks: Networks) -> bool:
    try:
        parsed = ip_address(address)
    except ValueError:
        return False
    plain = parsed.ipv4_mapped or parsed if isinstance(parsed, IPv6Address) else parsed
    return any(plain in network for network in networks)


class AnonymousConnection(Protocol):
    def busy(self) -> bool:
        """A request is being handled."""
        ...

    def incomplete(self) -> bool:
        """The body of that request has not arrived completely."""
        ...

    def abort(self) -> None: ...


class AnonymousConnections:
    """Evicts the oldest idle connection for a new one at the limit, so no client keeps others out by being first.

    If none is idle, the oldest whose request is incomplete is evicted: no client keeps its slot by sending slowly.
    """

    def __init__(self) -> None:
        # In the order in which they came.
        self._by_address: dict[str, dict[AnonymousConnection, None]] = {}
        self._all: dict[AnonymousConnection, str] = {}

    def __len__(self) -> int:
        return len(self._all)

    def add(self, connection: AnonymousConnection, address: str, limit: int) -> bool:
        """Says whether there is a slot for it, of `limit` slots for all connections: half are for authenticated
        ones."""
        address = origin(address)
        same = self._by_address.get(address, {})
        if len(same) >= max(MIN_PER_ADDRESS, limit // 8) and not self._evict_one(same):
            return False
        if len(self._all) >= max(1, limit // 2) and not self._evict_one(self._all):
            return False
        self._by_address.setdefault(address, {})[connection] = None
        self._all[connection] = address
        return True

    def remove(self, connection: AnonymousConnection) -> None:
        """It is authenticated from now on, or closed."""
        address = self._all.pop(connection, None)
        if address is not None:
            same = self._by_address[address]
            del same[connection]
            if not same:
                del self._by_address[address]

    def _evict_one(self, candidates: dict[AnonymousConnection, None] | dict[AnonymousConnection, str]) -> bool:
        oldest = next((each for each in candidates if not each.busy()), None)
        oldest = oldest or next((each for each in candidates if each.incomplete()), None)
        if oldest is None:
            return False
        self.remove(oldest)
        oldest.abort()
        return True
