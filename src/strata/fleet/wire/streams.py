"""Messages about logs and metrics of jobs: pieces by offset, queries with their limits, series."""

from __future__ import annotations

from typing import Annotated

import msgspec

from strata.fleet.core.series import JobProgress
from strata.fleet.wire.base import Epoch, HubReply, Message, Offset, WaitS


class PieceQuery(Message, frozen=True, kw_only=True):
    epoch: Epoch
    offset: Offset
    last: bool = False
    """Nothing follows: the reply says that all of it is on the disk."""


class PieceReply(HubReply, frozen=True, kw_only=True):
    size: int
    """How many bytes of the stream are stored: go on from there."""


class StreamQuery(Message, frozen=True, kw_only=True):
    attempt: Annotated[int, msgspec.Meta(ge=0, le=2**31 - 1)] = 0
    """The number of an attempt; 0: the last one."""
    offset: Offset = 0
    tail: Offset = 0
    """Begin so many bytes before the end, instead of at `offset`."""
    limit: Annotated[int, msgspec.Meta(ge=1, le=4 * 1024 * 1024)] = 1024 * 1024
    wait_s: WaitS = 0.0
    """Wait so long for something behind `offset`, unless the attempt has ended."""


class MetricsQuery(StreamQuery, frozen=True, kw_only=True):
    points: Annotated[int, msgspec.Meta(ge=0, le=2000)] = 0
    """Points make the reply a `MetricsReply`: series with so many points at most, of all attempts if `attempt` is 0.
    Without: the JSON lines themselves."""
    names: Annotated[tuple[Annotated[str, msgspec.Meta(max_length=1024)], ...], msgspec.Meta(max_length=8)] = ()
    """Limits `points` to these metrics; several also in one, with commas between."""


class MetricSeries(HubReply, frozen=True, kw_only=True):
    """The lowest and the highest value of each of equal groups, if there are more values than points."""

    name: str
    at_s: tuple[float, ...]
    """When each value was reported, by the clock of its host."""
    steps: tuple[int | None, ...]
    values: tuple[float, ...]
    last: float | None
    """Null: it was not a finite number."""
    count: int
    """How many finite values were reported."""
    not_finite: int
    """How many others: NaN or infinite."""


class MetricsReply(HubReply, frozen=True, kw_only=True):
    series: tuple[MetricSeries, ...]
    names: tuple[str, ...]
    """All that were reported."""
    attempts: tuple[int, ...]
    """Their numbers."""
    progress: JobProgress | None = None
