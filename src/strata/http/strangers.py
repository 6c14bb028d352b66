"""Connections that have not shown credentials: so many from one address, and together never all that there may be."""

from __future__ import annotations

from ipaddress import IPv6Address, ip_address
from typing import Final, Protocol

KEEP_ALIVE_S: Final = 5
"""How long such a connection may be idle."""
FEWEST: Final = 64
"""From one address, however few connections there may be."""


def origin(address: str) -> str:
    """What counts as one address: of IPv6 the network of 64 bits, of which one client has all addresses."""
    try:
        found = ip_address(address)
    except ValueError:
        return address
    if isinstance(found, IPv6Address):
        return str(found.ipv4_mapped or f"{IPv6Address(int(found) >> 64 << 64)}/64")
    return address


class Connection(Protocol):
    def busy(self) -> bool:
        """A request is being answered."""
        ...

    def incomplete(self) -> bool:
        """Of that request the body has not come whole."""
        ...

    def abort(self) -> None: ...


class Strangers:
    """The oldest idle one gives way to a new one, so that nobody keeps others out by being there first.

    If none is idle, it is the oldest whose request has not come whole: nobody keeps a place by sending slowly.
    """

    def __init__(self) -> None:
        # In the order in which they came.
        self._by_address: dict[str, dict[Connection, None]] = {}
        self._all: dict[Connection, str] = {}

    def __len__(self) -> int:
        return len(self._all)

    def add(self, connection: Connection, address: str, limit: int) -> bool:
        """Whether there is a place for it, of `limit` places for all connections: half are for those who are known."""
        address = origin(address)
        same = self._by_address.get(address, {})
        if len(same) >= max(FEWEST, limit // 8) and not self._make_room(same):
            return False
        if len(self._all) >= max(1, limit // 2) and not self._make_room(self._all):
            return False
        self._by_address.setdefault(address, {})[connection] = None
        self._all[connection] = address
        return True

    def remove(self, connection: Connection) -> None:
        """It is known from now on, or gone."""
        address = self._all.pop(connection, None)
        if address is not None:
            same = self._by_address[address]
            del same[connection]
            if not same:
                del self._by_address[address]

    def _make_room(self, among: dict[Connection, None] | dict[Connection, str]) -> bool:
        oldest = next((each for each in among if not each.busy()), None)
        oldest = oldest or next((each for each in among if each.incomplete()), None)
        if oldest is None:
            return False
        self.remove(oldest)
        oldest.abort()
        return True
