"""The sign and colour of every state (of jobs, hosts, workers, servers) in tables."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Final, NamedTuple

from strata.cli.layout import Cell


class StateStyle(NamedTuple):
    sign: str
    colour: str


_GOOD: Final = StateStyle("●", "green")
_WORKING: Final = StateStyle("◐", "cyan")
_WAITING: Final = StateStyle("○", "")
_SUSPECT: Final = StateStyle("▲", "yellow")
_BAD: Final = StateStyle("✗", "bold red")
_ENDED: Final = StateStyle("⊘", "dim")
STYLES: Final[Mapping[str, StateStyle]] = {
    "completed": _GOOD,
    "serving": _GOOD,
    "online": _GOOD,
    "ok": _GOOD,
    "finished": _GOOD,
    "running": _WORKING,
    "claimed": _WORKING,
    "pending": _WAITING,
    "created": _WAITING,
    "asleep": _WAITING,
    "suspect": _SUSPECT,
    "draining": _SUSPECT,
    "paused": _SUSPECT,
    "stopped": _SUSPECT,
    "quarantined": _BAD,
    "failed": _BAD,
    "offline": _BAD,
    "revoked": _BAD,
    "expired": _BAD,
    "cancelled": _ENDED,
    "left": _ENDED,
}
_COLUMNS: Final = frozenset({"status", "state", "presence"})


def state_cell(column: str, text: str) -> Cell:
    """A cell of a table. A state has its sign and its colour on a terminal; in a pipe the word stands alone."""
    style = STYLES.get(text.partition(",")[0].lower()) if column in _COLUMNS else None
    if style is None or not sys.stdout.isatty():
        return Cell(text)
    return Cell(f"{style.sign} {text}", style.colour)
