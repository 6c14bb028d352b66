"""Messages about the hub as a whole: health, status counts, and the overview with its attention list."""

from __future__ import annotations

from typing import Literal

from strata.fleet.artifacts.manifest import Word
from strata.fleet.core.attention import AttentionItem
from strata.fleet.wire.base import HubReply, Message


class HubHealth(HubReply, frozen=True, kw_only=True):
    status: Literal["ok", "stopping"]
    version: str


class StatusReply(HubReply, frozen=True, kw_only=True):
    by_status: dict[str, int]
    ready: int
    hosts: int
    version: str
    now_s: float


class HistoryFigure(HubReply, frozen=True, kw_only=True):
    value: float | None
    """Now; null: nothing to tell it from."""
    at_s: tuple[float, ...]
    values: tuple[float, ...]
    """Values over the last 24 hours: means of 15 minutes. Empty for one project."""


class OverviewQuery(Message, frozen=True, kw_only=True):
    project: Word = ""
    """Attention and counts of the jobs of this project alone; disk, hosts, cards and goodput are those of all."""


class OverviewReply(HubReply, frozen=True, kw_only=True):
    at_s: float
    """When this was computed, a few seconds ago at most."""
    attention: tuple[AttentionItem, ...]
    """What is worst first."""
    running: HistoryFigure
    waiting: HistoryFigure
    longest_wait_s: float
    """The longest wait of the jobs in the queue."""
    longest_waiting: str
    """The id of that job; empty: none waits."""
    busy_cards: HistoryFigure
    cards: int
    """Cards of hosts that take jobs."""
    goodput: HistoryFigure
    """The useful share of the last hour, 0 to 1."""
    hosts: dict[str, int]
    """How many are `online`, `suspect` or `offline`, without those that have left."""
    by_status: dict[str, int]
