"""Connections that have not shown credentials: so many from one address, and together never all that there may be."""

from __future__ import annotations

from typing import Final, Protocol

KEEP_ALIVE_S: Final = 5
"""How long such a connection may be idle."""
FEWEST: Final = 64
"""From one address, however few connections there may be."""


class Connection(Protocol):
    def busy(self) -> bool:
        """A request is being answered."""
        ...

    def abort(self) -> None: ...


class Strangers:
    """The oldest idle one gives way to a new one, so that nobody keeps others out by being there first."""

    def __init__(self) -> None:
        # In the order in which they came.
        self._by_address: dict[str, dict[Connection, None]] = {}
        self._all: dict[Connection, str] = {}

    def __len__(self) -> int:
        return len(self._all)

    def add(self, connection: Connection, address: str, limit: int) -> bool:
        """Whether there is a place for it, of `limit` places for all connections: half are for those who are known."""
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
        if oldest is None:
            return False
        self.remove(oldest)
        oldest.abort()
        return True
