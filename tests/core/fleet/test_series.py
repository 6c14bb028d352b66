"""Series of metrics: few points, no peak lost, and a memory that does not grow with the stream."""

from __future__ import annotations

import json
import math
import random

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from strata.fleet.core.report import MAX_LINE_BYTES, CheckpointReport, MetricsReport, ProgressReport, parse_lines
from strata.fleet.core.series import (
    MAX_BUCKETS,
    MAX_SERIES,
    AttemptMetrics,
    MetricPoint,
    ReportThinner,
    SeriesBuckets,
    combine,
    downsample,
    progress,
)


def line(at_s: float, step: int | None = None, **values: float | str) -> bytes:
    report = {"type": "metrics", "at_s": at_s, "values": values} | ({} if step is None else {"step": step})
    return json.dumps(report).encode() + b"\n"


@given(st.lists(st.floats(-1e9, 1e9), max_size=60), st.integers(2, 40))
def test_few_points_keep_both_extremes_and_the_order(values: list[float], limit: int) -> None:
    points = [MetricPoint(float(n), n, value) for n, value in enumerate(values)]
    shown = downsample(points, limit)
    assert len(shown) <= limit
    assert shown == sorted(shown), "in the order of time"
    assert set(shown) <= set(points)
    if values:
        found = [point.value for point in shown]
        assert (min(found), max(found)) == (min(values), max(values))
    if len(points) <= limit:
        assert shown == points


def test_a_long_series_keeps_every_spike_in_a_bounded_memory() -> None:
    series = SeriesBuckets()
    noise = random.Random(7)
    spikes = {9_999: 50.0, 123_456: -50.0}
    for n in range(200_000):
        series.add(MetricPoint(float(n), n, spikes.get(n, noise.random())))
    assert len(series) <= MAX_BUCKETS
    assert series.count == 200_000
    assert spikes.items() <= {point.step: point.value for point in series.points()}.items()
    assert [point.step for point in series.points()] == sorted(point.step or 0 for point in series.points())


def test_the_buckets_are_the_same_however_the_stream_was_cut() -> None:
    content = b"".join(line(float(n), n, loss=math.sin(n), rate=n / 7) for n in range(2500))
    whole, pieces = AttemptMetrics(), AttemptMetrics()
    whole.add(content)
    for start in range(0, len(content), 777):
        pieces.add(content[start : start + 777])
    assert pieces.offset == whole.offset == len(content)
    assert combine([pieces], [], 100) == combine([whole], [], 100)
    assert [each.name for each in combine([whole], [], 100)] == ["loss", "rate"]
    assert [each.name for each in combine([whole], ["rate", "none"], 100)] == ["rate"]


def test_attempts_are_shown_one_after_the_other() -> None:
    first, second = AttemptMetrics(), AttemptMetrics()
    first.add(line(1.0, 1, loss=3.0) + line(2.0, 2, loss=2.0))
    second.add(line(9.0, 2, loss=2.5, auc=0.5))
    auc, loss = combine([first, second], [], 100)
    assert [(point.at_s, point.value) for point in loss.points] == [(1.0, 3.0), (2.0, 2.0), (9.0, 2.5)]
    assert (loss.last, loss.reported, auc.reported) == (2.5, 3, 1)


def test_what_is_not_finite_is_counted_and_not_drawn() -> None:
    metrics = AttemptMetrics()
    metrics.add(line(1.0, loss=1.0) + line(2.0, loss="nan") + line(3.0, loss="-inf"))
    (loss,) = combine([metrics], [], 10)
    assert (len(loss.points), loss.not_finite, loss.last) == (1, 2, None)


def test_a_stream_of_nonsense_costs_no_memory() -> None:
    metrics = AttemptMetrics()
    for _ in range(5):
        metrics.add(b"x" * MAX_LINE_BYTES)
    metrics.add(b"\n" + line(1.0, loss=1.0))
    assert combine([metrics], [], 10)[0].last == 1.0
    for n in range(MAX_SERIES * 2):
        metrics.add(line(1.0, None, **{f"made_up_{n}": 1.0}))
    assert len(metrics.series) == MAX_SERIES


def test_progress_tells_how_long_it_takes_at_the_pace_of_this_attempt() -> None:
    assert progress([]) is None
    reports = [ProgressReport(at_s=100.0, fraction=0.5), ProgressReport(at_s=200.0, fraction=0.6, note="epoch 6")]
    found = progress(reports)
    assert found is not None
    assert (found.fraction, found.note, round(found.eta_s or 0)) == (0.6, "epoch 6", 400)
    only = progress(reports[:1])
    assert only is not None
    assert only.eta_s is None


def test_thinning_keeps_the_extremes_of_each_minute_and_may_be_repeated() -> None:
    lines = [line(n / 10, n, loss=math.sin(n / 50), gap="nan" if n == 700 else 1.0) for n in range(6000)]
    others = [b'{"type":"progress","at_s":%d,"fraction":0.%d}' % (n, n) for n in range(1, 9)]
    saved = [b'{"type":"checkpoint","at_s":50.0,"took_s":2.5}']
    thinner = ReportThinner(60)
    thinner.add([*lines, *others, *saved])
    kept = thinner.reports()
    assert len(kept) < 100
    assert [each.at_s for each in kept] == sorted(each.at_s for each in kept)
    assert sum(isinstance(each, ProgressReport) for each in kept) == 2
    assert [each.took_s for each in kept if isinstance(each, CheckpointReport)] == [2.5]
    before, after = AttemptMetrics(), AttemptMetrics()
    before.add(b"".join(lines))
    again = [msgspec.json.encode(each) for each in kept]
    after.add(b"\n".join(again) + b"\n")

    def extremes(metrics: AttemptMetrics) -> tuple[float, float]:
        values = [point.value for point in combine([metrics], ["loss"], 2000)[0].points]
        return min(values), max(values)

    assert extremes(after) == extremes(before)
    assert combine([after], ["gap"], 9)[0].not_finite == 1
    second = ReportThinner(60)
    second.add(again)
    assert second.reports() == kept
    assert all(isinstance(each, MetricsReport | ProgressReport | CheckpointReport) for each in parse_lines(again)[0])
