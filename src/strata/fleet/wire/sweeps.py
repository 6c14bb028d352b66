"""Messages about sweeps: summaries, the best trial, trials, axes."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec

from strata.fleet.artifacts.manifest import Word
from strata.fleet.core.job import JobStatus
from strata.fleet.core.objective import MetricObjective
from strata.fleet.wire.base import MAX_PAGE, HubReply, Message, Offset, Page, Text


class SweepsQuery(Message, frozen=True, kw_only=True):
    project: Word = ""
    search: Text = ""
    """A text to find in the name or the project; upper and lower case are the same."""
    offset: Offset = 0
    limit: Annotated[int, msgspec.Meta(ge=1, le=100)] = 50


class SweepTrial(HubReply, frozen=True, kw_only=True):
    job_id: str
    label: str
    status: JobStatus
    pruned: bool = False
    """It was ended early, because it fell behind."""
    parameters: dict[str, Any]
    """Parameters by name, with dots where one is inside a table."""
    metrics: dict[str, float]
    """Those of its result. Of a trial that has not completed: what it reported last."""
    reason: str = ""
    host_id: str = ""
    attempt: int = 0
    created_at_s: float
    changed_at_s: float


class SweepBest(HubReply, frozen=True, kw_only=True):
    job_id: str
    label: str
    value: float
    metrics: dict[str, float]
    parameters: dict[str, Any]
    """Those in which the trials of the sweep differ."""


class SweepSummary(HubReply, frozen=True, kw_only=True):
    project: str
    name: str
    owner: str = ""
    method: str = ""
    """How points are proposed; empty: they were all given in the manifest."""
    source: str = ""
    """The file of the manifest that it belongs to."""
    state: Literal["running", "waiting", "ended", "stopped"]
    objective: MetricObjective | None = None
    """None: no trial has reported a metric."""
    trials: int
    planned: int | None = None
    """How many trials a sweep makes that searches."""
    by_status: dict[str, int]
    pruned: int = 0
    skipped: int = 0
    """Trials that waited for a host when the sweep was stopped, and were cancelled therefore."""
    changed_at_s: float
    best: SweepBest | None = None


class SweepsReply(HubReply, frozen=True, kw_only=True):
    sweeps: tuple[SweepSummary, ...]
    """The one that changed last comes first."""
    total: int


class SweepQuery(Message, frozen=True, kw_only=True):
    metric: Word = ""
    """Compare by this one; empty: by the objective."""
    lowest: bool | None = None
    """Whether less of `metric` is better; null: by its name."""
    limit: Page = MAX_PAGE


class SweepReply(HubReply, frozen=True, kw_only=True):
    sweep: SweepSummary
    axes: tuple[str, ...]
    """The parameters in which the trials differ."""
    metrics: tuple[str, ...]
    """Those that trials have reported."""
    trials: tuple[SweepTrial, ...]
    """Trials in the order in which they were queued. If there are more than `limit`: the best ones."""
