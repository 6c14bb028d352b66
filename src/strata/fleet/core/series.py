"""Reduces metrics to few points that keep every peak (at most 1,000 buckets, 512 series), joins the attempts of a job,
and estimates its progress and ETA.

A bucket keeps the lowest and the highest of the values in it, in the order in which they were reported. So a spike is
seen at every zoom, and a short series is shown as it is.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import Final, NamedTuple, cast

import msgspec

from strata.fleet.core.report import (
    MAX_LINE_BYTES,
    CheckpointReport,
    MetricsReport,
    ProgressReport,
    TrainerReport,
    Value,
    parse_lines,
)

MAX_BUCKETS: Final = 1000
"""The most buckets of one series: it is shown with up to twice as many points."""
MAX_SERIES: Final = 512
"""The most series of one attempt; a trainer that makes up names is not followed any further."""


class MetricPoint(NamedTuple):
    at_s: float
    """Wall seconds of the host."""
    step: int | None
    value: float


class _Bucket(NamedTuple):
    """The lowest and the highest point, the earlier one first; twice the same of a single value."""

    first: MetricPoint
    second: MetricPoint


def _merge(points: Sequence[MetricPoint]) -> _Bucket:
    values = [point.value for point in points]
    low, high = values.index(min(values)), values.index(max(values))
    return _Bucket(points[min(low, high)], points[max(low, high)])


class SeriesBuckets:
    """The values of one metric, in at most `MAX_BUCKETS` buckets that hold the same number of values each."""

    def __init__(self) -> None:
        self.count = 0
        """The number of finite values."""
        self.not_finite = 0
        self.last: float | None = None
        """None: it was not finite."""
        self._width = 1
        self._buckets: list[_Bucket] = []

    def __len__(self) -> int:
        return len(self._buckets)

    def add(self, point: MetricPoint) -> None:
        if not math.isfinite(point.value):
            self.not_finite += 1
            self.last = None
            return
        self.last = point.value
        if self.count % self._width == 0:
            self._buckets.append(_Bucket(point, point))
        else:
            self._buckets[-1] = _merge((*self._buckets[-1], point))
        self.count += 1
        if len(self._buckets) > MAX_BUCKETS:
            self._halve()

    def points(self) -> list[MetricPoint]:
        return [point for bucket in self._buckets for point in dict.fromkeys(bucket)]

    def _halve(self) -> None:
        pairs = [self._buckets[at : at + 2] for at in range(0, len(self._buckets), 2)]
        self._buckets = [_merge([point for bucket in pair for point in bucket]) for pair in pairs]
        # A last bucket without a pair goes on being filled.
        self._width *= 2


def downsample(points: Sequence[MetricPoint], limit: int) -> list[MetricPoint]:
    """Returns at most so many of the points, 2 at least: the lowest and the highest of each of equal groups."""
    if len(points) <= limit:
        return list(points)
    groups = max(1, limit // 2)
    bounds = [len(points) * n // groups for n in range(groups + 1)]
    merged = (_merge(points[low:high]) for low, high in pairwise(bounds))
    return [point for bucket in merged for point in dict.fromkeys(bucket)]


class AttemptMetrics:
    """What one attempt has reported so far, projected from the bytes of its stream."""

    def __init__(self) -> None:
        self.offset = 0
        """How many bytes of the stream were read."""
        self.reports = 0
        self.checkpoint_s = 0.0
        """How long the trainer wrote checkpoints."""
        self.series: dict[str, SeriesBuckets] = {}
        self._rest = b""

    def add(self, content: bytes) -> None:
        self.offset += len(content)
        *lines, self._rest = (self._rest + content).split(b"\n")
        if len(self._rest) > MAX_LINE_BYTES:
            # It is no report; so much of it is kept that it is not taken for one either.
            self._rest = self._rest[: MAX_LINE_BYTES + 1]
        for report in parse_lines(lines)[0]:
            if isinstance(report, MetricsReport):
                self._add_values(report)
            elif isinstance(report, CheckpointReport):
                self.checkpoint_s += report.took_s

    def size(self) -> int:
        """Returns the size in buckets."""
        return sum(map(len, self.series.values()))

    def _add_values(self, report: MetricsReport) -> None:
        self.reports += 1
        for name, value in report.values.items():
            if name in self.series or len(self.series) < MAX_SERIES:
                series = self.series.setdefault(name, SeriesBuckets())
                series.add(MetricPoint(report.at_s, report.step, float(value)))


class CombinedSeries(NamedTuple):
    name: str
    points: Sequence[MetricPoint]
    reported: int
    """How many finite values."""
    not_finite: int
    last: float | None


def combine(attempts: Sequence[AttemptMetrics], names: Iterable[str], limit: int) -> list[CombinedSeries]:
    """The series of these names over all attempts, one after the other; without names all, in alphabetical order."""
    wanted = list(names) or sorted({name for each in attempts for name in each.series})
    combined = []
    for name in wanted:
        parts = [each.series[name] for each in attempts if name in each.series]
        if parts:
            points = downsample([point for part in parts for point in part.points()], limit)
            count, not_finite = sum(part.count for part in parts), sum(part.not_finite for part in parts)
            combined.append(CombinedSeries(name, points, count, not_finite, parts[-1].last))
    return combined


class JobProgress(msgspec.Struct, frozen=True):
    fraction: float
    """The fraction, from 0 to 1."""
    note: str
    at_s: float
    """When it was reported, by the clock of its host."""
    eta_s: float | None
    """How long it takes from then on at the pace of this attempt; null: nothing to tell it from."""


def progress(reports: Iterable[ProgressReport]) -> JobProgress | None:
    """Computes progress from the first and the last report of an attempt."""
    given = list(reports)
    if not given:
        return None
    first, last = given[0], given[-1]
    done, took_s = last.fraction - first.fraction, last.at_s - first.at_s
    eta_s = (1 - last.fraction) * took_s / done if done > 0 and took_s > 0 else None
    return JobProgress(last.fraction, last.note, last.at_s, eta_s)


class ReportThinner:
    """Keeps reports of a stream at a resolution: of each metric the lowest value, the highest, and the first that is
    not finite, in each step; the first and the last progress; all checkpoints."""

    def __init__(self, step_s: int) -> None:
        self._step_s = step_s
        self._lows: dict[tuple[str, float], MetricPoint] = {}
        self._highs: dict[tuple[str, float], MetricPoint] = {}
        self._odd: dict[tuple[str, float], MetricPoint] = {}
        self._progress: list[ProgressReport] = []
        self._checkpoints: list[CheckpointReport] = []

    def add(self, lines: Iterable[bytes]) -> None:
        for report in parse_lines(lines)[0]:
            if isinstance(report, ProgressReport):
                self._progress = [*self._progress[:1], report]
            elif isinstance(report, CheckpointReport):
                self._checkpoints.append(report)
            else:
                self._add_values(report)

    def _add_values(self, report: MetricsReport) -> None:
        for name, value in report.values.items():
            key, point = (name, report.at_s // self._step_s), MetricPoint(report.at_s, report.step, float(value))
            if not math.isfinite(point.value):
                self._odd.setdefault(key, point)
                continue
            if point.value < self._lows.setdefault(key, point).value:
                self._lows[key] = point
            if point.value > self._highs.setdefault(key, point).value:
                self._highs[key] = point

    def reports(self) -> list[TrainerReport]:
        """Returns the reports in the order of time."""
        kept: list[TrainerReport] = [*self._progress, *self._checkpoints]
        merged: dict[tuple[float, int | None], dict[str, Value]] = {}
        for points in (self._lows, self._highs, self._odd):
            for (name, _), (at_s, step, value) in points.items():
                number: Value = value if math.isfinite(value) else cast("Value", str(value))
                merged.setdefault((at_s, step), {})[name] = number
        kept += [MetricsReport(at_s=at_s, step=step, values=values) for (at_s, step), values in merged.items()]
        return sorted(kept, key=lambda each: each.at_s)
