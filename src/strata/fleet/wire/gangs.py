"""Messages about gangs, the jobs of a coordinator."""

from __future__ import annotations

from typing import Annotated

import msgspec

from strata.fleet.artifacts.manifest import Word
from strata.fleet.wire.base import HubReply, Message, Text


class GangRow(HubReply, frozen=True, kw_only=True):
    """A job of the coordinator."""

    id: str
    status: str
    """created, running, stopped or finished."""
    run: int
    generation: int
    workers: int
    min_workers: int
    max_workers: int
    """0: no limit."""
    checkpoint_step: int | None = None


class GangsReply(HubReply, frozen=True, kw_only=True):
    gangs: tuple[GangRow, ...]
    coordinator: str
    """Its address; empty: this hub has none."""


class GangQuery(Message, frozen=True, kw_only=True):
    search: Text = ""
    """Of the names and hosts of workers."""
    offset: Annotated[int, msgspec.Meta(ge=0, le=1_000_000)] = 0
    limit: Annotated[int, msgspec.Meta(ge=1, le=200)] = 50


class GangSpan(HubReply, frozen=True, kw_only=True):
    """What a worker did from a time to another."""

    status: str
    start_s: float
    end_s: float


class GangWorker(HubReply, frozen=True, kw_only=True):
    id: str
    status: str
    """As the worker reports it: initializing, idle, loading_data, training, checkpointing, recovering or error."""
    liveness: str
    """alive, suspect, lost or left."""
    reason: str
    """Why it is thought so."""
    rank: int | None
    hostname: str
    gpus: int
    silent_s: float
    step: int | None
    step_time_s: float | None
    slowdown: float | None
    """Its step time divided by the median of all, by computing times where they are known."""
    leased_shards: int
    compute_time_s: float | None = None
    """What it spent on a step itself, without waiting for others."""
    finding: str = ""
    """straggler or hang, as long as it counts as one."""
    finding_reason: str = ""
    lane: tuple[GangSpan, ...] = ()
    """Its last hour."""


class GangCount(HubReply, frozen=True, kw_only=True):
    status: str
    liveness: str
    count: int


class GangBarrier(HubReply, frozen=True, kw_only=True):
    id: str
    step: int
    arrived: int
    expected: int
    missing: tuple[str, ...]
    """Of many only the first ones."""
    open_s: float


class GangEpoch(HubReply, frozen=True, kw_only=True):
    """In shards."""

    epoch: int
    done: int
    leased: int
    waiting: int
    quarantined: int


class GangDataset(HubReply, frozen=True, kw_only=True):
    id: str
    mode: str
    samples: int
    shards: int
    epochs: tuple[GangEpoch, ...]
    """In progress."""
    finished: int
    """How many epochs."""


class GangCheckpoint(HubReply, frozen=True, kw_only=True):
    id: str
    step: int
    committed: bool
    parts: int
    missing: int
    size: int
    at_s: float | None


class GangGoodput(HubReply, frozen=True, kw_only=True):
    """How the time of the run was spent; the parts add up to the time since it began."""

    useful_s: float
    waiting_s: float
    checkpoint_s: float
    detect_s: float
    restart_s: float
    rolled_back_s: float
    phase: str
    share: float | None
    """Useful time of the time with workers."""


class GangEventRow(HubReply, frozen=True, kw_only=True):
    number: int
    kind: str
    at_s: float
    generation: int
    workers: tuple[str, ...]
    worker_count: int
    message: str
    detect_s: float
    restart_s: float
    rolled_back_s: float

    @property
    def cost_s(self) -> float:
        return self.detect_s + self.restart_s + self.rolled_back_s


class GangReply(HubReply, frozen=True, kw_only=True):
    gang: GangRow
    observed_at_s: float
    counts: tuple[GangCount, ...]
    workers: tuple[GangWorker, ...]
    """A page; those first that may need a person."""
    workers_total: int
    """That match the search."""
    lanes_start_s: float | None
    """Since when lanes are known."""
    barriers: tuple[GangBarrier, ...]
    datasets: tuple[GangDataset, ...]
    checkpoints: tuple[GangCheckpoint, ...]
    goodput: GangGoodput | None
    incidents: tuple[GangEventRow, ...]
    """The latest first."""


class GangEventsQuery(Message, frozen=True, kw_only=True):
    kind: tuple[Word, ...] = ()
    search: Text = ""
    before: Annotated[int, msgspec.Meta(ge=0)] = 0
    limit: Annotated[int, msgspec.Meta(ge=1, le=1000)] = 100


class GangEventsReply(HubReply, frozen=True, kw_only=True):
    events: tuple[GangEventRow, ...]
    next_before: int
    """0: there are no earlier ones."""
