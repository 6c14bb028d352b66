"""When jobs start: times, delays and cron expressions as people write them."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from zoneinfo import ZoneInfo

import pytest
from hypothesis import given
from hypothesis import strategies as st

from strata.base.errors import Code, StrataError
from strata.fleet.core.jobspec import JobSpec
from strata.fleet.core.schedule import (
    JobSchedule,
    next_due_s,
    parse_cron,
    parse_duration,
    parse_start,
    run_spec,
    schedule_problem,
    start_fields,
)

THREE = datetime(2026, 11, 17, 3, tzinfo=UTC)


@pytest.mark.parametrize(
    ("text", "start"),
    [
        ("+90", timedelta(seconds=90)),
        ("+90s", timedelta(seconds=90)),
        ("+2h", timedelta(hours=2)),
        ("+365d", timedelta(days=365)),
        ("2026-11-17T03:00:00Z", THREE),
        ("2026-11-17T04:00+01:00", THREE),
        ("2026-11-17 03:00:00+00:00", THREE),
        (THREE, THREE),
    ],
)
def test_a_start_is_a_time_with_an_offset_or_a_delay(text: str | datetime, start: datetime | timedelta) -> None:
    assert parse_start(text) == start


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("+", "no delay"),
        ("+366d", "no delay"),
        ("+2w", "no delay"),
        ("+-2h", "no delay"),
        ("2h", "no time"),
        ("tomorrow", "no time"),
        ("2026-13-17T03:00Z", "no time"),
        ("2026-11-17T03:00", "no offset"),
        (datetime(2026, 11, 17, 3), "no offset"),  # noqa: DTZ001 (what is refused)
    ],
)
def test_another_start_is_refused_with_how_to_write_it(text: str | datetime, reason: str) -> None:
    with pytest.raises(StrataError, match=reason) as refused:
        parse_start(text)
    assert refused.value.code is Code.INVALID


def test_a_job_starts_at_the_later_of_its_time_and_its_delay() -> None:
    assert JobSpec(model="m").starts_at_s(100.0) == 0.0
    assert JobSpec(model="m", **start_fields(timedelta(minutes=1))).starts_at_s(100.0) == 160.0
    assert JobSpec(model="m", **start_fields(THREE)).starts_at_s(100.0) == THREE.timestamp()
    assert JobSpec(model="m", not_before_s=150.0, delay_s=60.0).starts_at_s(100.0) == 160.0
    assert start_fields(None) == {}
    assert start_fields(datetime(1960, 1, 1, tzinfo=UTC)) == {"not_before_s": 0.0}


def test_the_start_is_no_part_of_what_a_job_is() -> None:
    assert JobSpec(model="m").id == JobSpec(model="m", not_before_s=5.0, delay_s=5.0).id


def test_a_duration_without_a_unit_is_of_seconds() -> None:
    assert parse_duration("0") == timedelta()
    assert parse_duration("1.5h") is None


BERLIN = ZoneInfo("Europe/Berlin")


def due(text: str, after: str, count: int, zone: ZoneInfo | None = None) -> list[str]:
    """The next times, by the clock of the zone."""
    cron, at_s, times = parse_cron(text), datetime.fromisoformat(after).timestamp(), []
    for _ in range(count):
        following = next_due_s(cron, at_s, zone or UTC)
        assert following is not None
        assert following > at_s
        at_s = following
        times.append(datetime.fromtimestamp(at_s, zone or UTC).isoformat()[:16])
    return times


@pytest.mark.parametrize(
    ("text", "times"),
    [
        ("*/15 3 * * mon-fri", ["2026-11-17T03:00", "2026-11-17T03:15"]),
        ("5/20 0 * * *", ["2026-11-17T00:05", "2026-11-17T00:25"]),
        ("0 9-17/4 * * *", ["2026-11-16T13:00", "2026-11-16T17:00"]),
        ("0 0 1,15 jan-mar *", ["2027-01-01T00:00", "2027-01-15T00:00"]),
        # Both days are restricted: either is enough.
        ("0 0 20 * wed", ["2026-11-18T00:00", "2026-11-20T00:00"]),
        ("0 0 */2 * wed", ["2026-11-25T00:00", "2026-12-09T00:00"]),
        ("0 0 * * 7", ["2026-11-22T00:00", "2026-11-29T00:00"]),
        ("0 0 * * FRI-SUN", ["2026-11-20T00:00", "2026-11-21T00:00"]),
        ("0 0 29 2 *", ["2028-02-29T00:00", "2032-02-29T00:00"]),
        ("@daily", ["2026-11-17T00:00", "2026-11-18T00:00"]),
        ("@yearly", ["2027-01-01T00:00", "2028-01-01T00:00"]),
    ],
)
def test_a_cron_expression_is_due_as_cron_has_it(text: str, times: list[str]) -> None:
    assert due(text, "2026-11-16T12:00+00:00", 2) == times


def test_a_time_of_the_clock_that_is_left_out_comes_an_hour_later_and_a_repeated_one_once() -> None:
    assert due("30 2 * * *", "2026-03-28T00:00+01:00", 3, BERLIN) == [
        "2026-03-28T02:30",
        "2026-03-29T03:30",
        "2026-03-30T02:30",
    ]
    assert due("0 * * * *", "2026-03-29T00:30+01:00", 3, BERLIN) == [
        "2026-03-29T01:00",
        "2026-03-29T03:00",
        "2026-03-29T04:00",
    ]
    assert due("30 2 * * *", "2026-10-25T00:00+02:00", 2, BERLIN) == ["2026-10-25T02:30", "2026-10-26T02:30"]
    assert due("30 2,3 * * *", "2026-03-29T00:00+01:00", 2, BERLIN) == ["2026-03-29T03:30", "2026-03-30T02:30"]


def test_a_schedule_of_every_hour_runs_in_both_of_the_repeated_hours() -> None:
    hours = ["2026-10-25T01:00", "2026-10-25T02:00", "2026-10-25T02:00", "2026-10-25T03:00"]
    assert due("0 * * * *", "2026-10-25T00:30+02:00", 4, BERLIN) == hours
    # Asked within the second of the two hours.
    assert due("*/10 * * * *", "2026-10-25T02:05+01:00", 1, BERLIN) == ["2026-10-25T02:10"]


@given(
    minutes=st.sets(st.integers(0, 59), min_size=1, max_size=3),
    hours=st.sets(st.integers(0, 23), min_size=1, max_size=3),
    days=st.none() | st.sets(st.integers(1, 31), min_size=1, max_size=4),
    weekdays=st.none() | st.sets(st.integers(0, 6), min_size=1, max_size=3),
    after=st.integers(1_700_000_000, 1_900_000_000),
)
def test_the_next_due_time_is_the_first_minute_that_matches(
    minutes: set[int], hours: set[int], days: set[int] | None, weekdays: set[int] | None, after: int
) -> None:
    def text(values: set[int] | None) -> str:
        return "*" if values is None else ",".join(map(str, sorted(values)))

    def matches(at: datetime) -> bool:
        week = at.weekday() in {(day - 1) % 7 for day in weekdays or ()}
        month = at.day in (days or ())
        day = (week or month) if days and weekdays else (week or not weekdays) and (month or not days)
        return at.minute in minutes and at.hour in hours and day

    cron = parse_cron(f"{text(minutes)} {text(hours)} {text(days)} * {text(weekdays)}")
    found = next_due_s(cron, after, UTC)
    assert found is not None
    at = datetime.fromtimestamp(found, UTC)
    assert (at.second, matches(at)) == (0, True)
    # Nothing that matches was passed over: hour by hour, at the minutes that count.
    start = datetime.fromtimestamp(after, UTC).replace(minute=0, second=0)
    between = [
        moment
        for passed in range(int((at - start) / timedelta(hours=1)) + 1)
        for minute in minutes
        if start.timestamp() - 1
        < after
        < (moment := start + timedelta(hours=passed, minutes=minute)).timestamp()
        < found
    ]
    assert not any(map(matches, between))


@pytest.mark.parametrize(
    "text",
    ["", "* * * *", "* * * * * *", "60 * * * *", "* 24 * * *", "* * 0 * *", "* * 32 * *", "* * * 13 *", "* * * * 8",
     "*/0 * * * *", "5-1 * * * *", "1,, * * * *", "-1 * * * *", "mon * * * *", "1-2-3 * * * *", "@never", "٣ * * * *"],
)  # fmt: skip
def test_what_is_no_cron_expression_is_refused(text: str) -> None:
    with pytest.raises(StrataError) as refused:
        parse_cron(text)
    assert refused.value.code is Code.INVALID


def test_a_day_that_never_comes_is_refused() -> None:
    schedule = JobSchedule(base=JobSpec(model="m"), cron="0 0 30 2 *")
    assert next_due_s(parse_cron(schedule.cron), 0.0, UTC) is None
    assert "never due" in schedule_problem(schedule)


def test_each_due_time_is_a_job_of_its_own() -> None:
    schedule = JobSchedule(base=JobSpec(model="m", name="nightly"), cron="@daily")
    first, second = run_spec(schedule, THREE.timestamp()), run_spec(schedule, THREE.timestamp() + 60)
    assert (first.due, first.name) == ("2026-11-17T03:00Z", "nightly")
    assert len({first.id, second.id, schedule.base.id}) == 3
