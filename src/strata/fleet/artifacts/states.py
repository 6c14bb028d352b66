"""The states of a chunk in the index (incoming, stored, to delete, deleting, damaged) and the one table of their
transitions.

Bytes and rows live in two places, so each step that touches the bytes has a row that says so before and after. The row
goes ahead of the bytes when they come and stays behind when they go: bytes without a row cannot be.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Final


class ChunkState(StrEnum):
    INCOMING = "incoming"
    """A client has announced to upload it."""
    STORED = "stored"
    """Whole, verified and durable in the chunk store."""
    TO_DELETE = "doomed"  # the spelling of stored rows
    """Garbage: stored, but unreferenced; it is deleted unless an upload reserves it within the grace period."""
    DELETING = "deleting"
    """Its bytes are being deleted. No upload may write it until that is done."""
    DAMAGED = "damaged"
    """Its bytes were found corrupt or missing. Uploading it again repairs every artifact that has it."""


class ChunkEvent(StrEnum):
    RESERVE = "reserve"
    """A client wants to upload it or relies on it."""
    STORE = "store"
    """Its bytes are in the store."""
    MARK = "mark"
    """Nothing refers to it: it is to be deleted."""
    ERASE = "erase"
    DAMAGE = "damage"


NEXT: Final[dict[tuple[ChunkState, ChunkEvent], ChunkState]] = {
    (ChunkState.INCOMING, ChunkEvent.RESERVE): ChunkState.INCOMING,
    (ChunkState.INCOMING, ChunkEvent.STORE): ChunkState.STORED,
    (ChunkState.INCOMING, ChunkEvent.ERASE): ChunkState.DELETING,
    (ChunkState.STORED, ChunkEvent.RESERVE): ChunkState.STORED,
    (ChunkState.STORED, ChunkEvent.STORE): ChunkState.STORED,
    (ChunkState.STORED, ChunkEvent.MARK): ChunkState.TO_DELETE,
    (ChunkState.STORED, ChunkEvent.DAMAGE): ChunkState.DAMAGED,
    (ChunkState.TO_DELETE, ChunkEvent.RESERVE): ChunkState.STORED,
    (ChunkState.TO_DELETE, ChunkEvent.STORE): ChunkState.STORED,
    (ChunkState.TO_DELETE, ChunkEvent.ERASE): ChunkState.DELETING,
    (ChunkState.TO_DELETE, ChunkEvent.DAMAGE): ChunkState.DAMAGED,
    # A collector may have crashed halfway: the next one deletes it again.
    (ChunkState.DELETING, ChunkEvent.ERASE): ChunkState.DELETING,
    (ChunkState.DAMAGED, ChunkEvent.RESERVE): ChunkState.DAMAGED,
    (ChunkState.DAMAGED, ChunkEvent.STORE): ChunkState.STORED,
    (ChunkState.DAMAGED, ChunkEvent.ERASE): ChunkState.DELETING,
}

PRESENT: Final = frozenset({ChunkState.STORED, ChunkState.TO_DELETE})
"""The bytes are there and were verified."""


def sources(event: ChunkEvent) -> tuple[ChunkState, ...]:
    return tuple(state for state in ChunkState if (state, event) in NEXT)


def among(event: ChunkEvent) -> str:
    """The guard of an SQL statement: the states in which `event` is legal."""
    return "(" + ", ".join(f"'{state}'" for state in sources(event)) + ")"


def becomes(event: ChunkEvent, column: str = "state") -> str:
    """The new state as an SQL expression of the old one."""
    cases = " ".join(f"WHEN '{state}' THEN '{NEXT[state, event]}'" for state in sources(event))
    return f"CASE {column} {cases} END"
