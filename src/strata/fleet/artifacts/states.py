"""The life of a chunk in the index, as one table; what is absent is illegal.

Bytes and rows live in two places, so each step that touches the bytes has a row that says so before and after. The row
goes ahead of the bytes when they come and stays behind when they go: bytes without a row cannot be.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Final


class State(StrEnum):
    INCOMING = "incoming"
    """Somebody has said they will send it."""
    STORED = "stored"
    """Whole, verified and durable in the chunk store."""
    DOOMED = "doomed"
    """Stored, but nothing refers to it; it goes unless somebody wants it within the grace."""
    DELETING = "deleting"
    """Its bytes are being removed. Nobody may write it until that is done."""
    DAMAGED = "damaged"
    """Its bytes were found wrong or gone. Sending it again heals every artifact that has it."""


class Event(StrEnum):
    RESERVE = "reserve"
    """Somebody wants to send it or relies on it."""
    STORE = "store"
    """Its bytes are in the store."""
    CONDEMN = "condemn"
    ERASE = "erase"
    DAMAGE = "damage"


NEXT: Final[dict[tuple[State, Event], State]] = {
    (State.INCOMING, Event.RESERVE): State.INCOMING,
    (State.INCOMING, Event.STORE): State.STORED,
    (State.INCOMING, Event.ERASE): State.DELETING,
    (State.STORED, Event.RESERVE): State.STORED,
    (State.STORED, Event.STORE): State.STORED,
    (State.STORED, Event.CONDEMN): State.DOOMED,
    (State.STORED, Event.DAMAGE): State.DAMAGED,
    (State.DOOMED, Event.RESERVE): State.STORED,
    (State.DOOMED, Event.STORE): State.STORED,
    (State.DOOMED, Event.ERASE): State.DELETING,
    (State.DOOMED, Event.DAMAGE): State.DAMAGED,
    # Whoever removed it may have died halfway: the next one removes it again.
    (State.DELETING, Event.ERASE): State.DELETING,
    (State.DAMAGED, Event.RESERVE): State.DAMAGED,
    (State.DAMAGED, Event.STORE): State.STORED,
    (State.DAMAGED, Event.ERASE): State.DELETING,
}

PRESENT: Final = frozenset({State.STORED, State.DOOMED})
"""The bytes are there and were verified."""


def sources(event: Event) -> tuple[State, ...]:
    return tuple(state for state in State if (state, event) in NEXT)


def among(event: Event) -> str:
    """The guard of an SQL statement: the states in which `event` is legal."""
    return "(" + ", ".join(f"'{state}'" for state in sources(event)) + ")"


def becomes(event: Event, column: str = "state") -> str:
    """The new state as an SQL expression of the old one."""
    cases = " ".join(f"WHEN '{state}' THEN '{NEXT[state, event]}'" for state in sources(event))
    return f"CASE {column} {cases} END"
