"""What a campaign against real processes is asked for, and what it hands back."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Literal

import msgspec

Database = Literal["sqlite", "postgres"]


class Ask(msgspec.Struct, frozen=True, kw_only=True):
    first: int
    """The number of the first trial: those before it are in the record."""
    times: int
    """How many trials."""
    workers: int
    database: Database
    url: str
    """Of an empty database."""
    folder: Path
    """For what the coordinators log."""


class Result(msgspec.Struct, frozen=True, kw_only=True):
    times: int
    problems: list[str]
    """A sentence for each promise that was broken."""
    figures: str
    worst_s: float = 0.0
    """The longest of the times that the campaign has a limit for."""


Tell = Callable[[Result], None]
"""Told how far the campaign is, after every trial."""
