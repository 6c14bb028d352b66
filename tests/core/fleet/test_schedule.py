"""When jobs start: times and delays as people write them."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest

from strata.base.errors import Code, StrataError
from strata.fleet.core.jobspec import JobSpec
from strata.fleet.core.schedule import parse_duration, parse_start, start_fields

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
