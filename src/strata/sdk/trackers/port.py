"""The port of a tracker: what an adapter has to do, and the values (runs, points) that it gets.

The numbers of a run's points grow. An adapter tells which points it has when it opens a run, so that a mirror that was
killed goes on without a doubled or a missing point.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, Protocol


@dataclass(frozen=True, kw_only=True)
class TrackedRun:
    """A job, or a model of a training server."""

    id: str
    """Stable and unique: letters, digits, `_` and `-`."""
    name: str
    group: str = ""
    """The sweep of a job, or its project."""
    config: Mapping[str, Any] = field(default_factory=dict)


class TrackedPoint(NamedTuple):
    number: int
    step: int
    """The step as the trainer counts; the number of the point where the trainer does not."""
    at_s: float
    values: Mapping[str, float]
    resumed: bool = False
    """The first point of another attempt: what has this step or a later one was rolled back."""


class TrackerRun(Protocol):
    @property
    def next_number(self) -> int:
        """Returns the number of the first point that the tracker does not have."""

    def log(self, points: Sequence[TrackedPoint]) -> None:
        """Points that follow those it has."""

    def mark(self) -> str:
        """Write out what was logged. With this text, `open_run` continues exactly here."""

    def close(self) -> None: ...


class Tracker(Protocol):
    def open_run(self, run: TrackedRun, next_number: int, mark: str) -> TrackerRun:
        """`next_number` was that of the next point when `mark` was made; 0 and an empty text for a new run."""


@dataclass(frozen=True, kw_only=True)
class TrackerPlace:
    """Where a tracker writes: what stands behind its name in the setting, and a folder of its own."""

    target: str
    folder: Path
    offline: bool = False


MakeTracker = Callable[[TrackerPlace], Tracker]
