"""A campaign of trials against real processes: its request, its result, its random numbers and its times as text."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Coroutine, Sequence
from math import ceil
from pathlib import Path
from typing import Any, Literal

import msgspec

Database = Literal["sqlite", "postgres"]


class CampaignRequest(msgspec.Struct, frozen=True, kw_only=True):
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


class CampaignResult(msgspec.Struct, frozen=True, kw_only=True):
    times: int
    problems: list[str]
    """A sentence for each promise that was broken."""
    figures: str
    worst_s: float = 0.0
    """The longest of the times that the campaign has a limit for."""


OnProgress = Callable[[CampaignResult], None]
"""Called with the result so far after every trial."""


def seeded_random(number: int) -> random.Random:
    """The number of a trial decides what happens in it, so that a trial can be repeated."""
    return random.Random(number)  # noqa: S311 - nothing here is a secret


def percentile(values: Sequence[float], share: float) -> float:
    """The smallest value that at least this share of all do not exceed."""
    ordered = sorted(values)
    return ordered[max(0, ceil(share * len(ordered)) - 1)]


def spread_s(values: Sequence[float]) -> str:
    """Seconds as text: `p50 / p99 / max` and the number of values."""
    if not values:
        return "none"
    middle, worst = percentile(values, 0.5), percentile(values, 0.99)
    return f"{middle:.2f} / {worst:.2f} / {max(values):.2f} s (n={len(values)})"


async def while_running(tasks: Sequence[asyncio.Task[Any]], work: Coroutine[None, None, None]) -> None:
    """Do the work. One of the tasks, which should outlast it, ends before it: that ends the campaign."""
    doing = asyncio.create_task(work)
    try:
        await asyncio.wait([doing, *tasks], return_when=asyncio.FIRST_COMPLETED)
        if not doing.done():
            for task in tasks:
                if task.done():
                    task.result()
        await doing
    finally:
        doing.cancel()
