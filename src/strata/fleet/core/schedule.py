"""Parses start times, delays (at most 365 days) and cron expressions of schedules, computes when one is due next, and
words what is wrong with them.

Time is an argument, and so is the time zone: nothing here reads a clock or a time zone database.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, date, datetime, time, timedelta, tzinfo
from itertools import product
from typing import Annotated, Any, Final, Literal

import msgspec

from strata.base.errors import Code, StrataError
from strata.fleet.core.jobspec import JobSpec

StartTime = datetime | timedelta
"""A point in time, or how long after the job was queued."""
TimeZone = Annotated[str, msgspec.Meta(pattern=r"\A[A-Za-z][A-Za-z0-9_+/-]{0,63}\Z")]
"""A name of the time zone database, as in Europe/Berlin."""
CronText = Annotated[str, msgspec.Meta(min_length=1, max_length=256)]
Overlap = Literal["skip", "allow"]
"""What happens when a run is due and the last one has not ended: it is left out, or queued beside it."""
HORIZON_DAYS: Final = 366 * 9
"""A 29th of February comes again after eight years at most."""
_DURATION: Final = re.compile(r"([0-9]{1,9})([smhd]?)")
_UNITS: Final = {"": 1, "s": 1, "m": 60, "h": 3_600, "d": 86_400}
_LONGEST: Final = timedelta(days=365)


def parse_duration(text: str) -> timedelta | None:
    """`90s`, `30m`, `2h`, `7d`; a number alone is of seconds. None if it is not written so."""
    match = _DURATION.fullmatch(text)
    return None if match is None else timedelta(seconds=int(match[1]) * _UNITS[match[2]])


def parse_start(text: str | datetime) -> StartTime:
    """`2026-11-17T03:00+01:00`, or `+2h` after the job was queued; INVALID otherwise."""
    if isinstance(text, str) and text.startswith("+"):
        delay = parse_duration(text[1:])
        if delay is not None and delay <= _LONGEST:
            return delay
        raise StrataError(Code.INVALID, f"{text!r} is no delay: write +90s, +30m, +2h or +7d, at most +365d")
    try:
        start = text if isinstance(text, datetime) else datetime.fromisoformat(text)
    except ValueError:
        message = f"{text!r} is no time: write 2026-11-17T03:00+01:00, or +2h after the job is queued"
        raise StrataError(Code.INVALID, message) from None
    if start.tzinfo is None:
        raise StrataError(Code.INVALID, f"{start.isoformat()} has no offset: write {start.isoformat()}Z or +01:00")
    return start


def start_fields(start: StartTime | None) -> dict[str, Any]:
    """The fields of a `JobSpec` that say this; none for a job that starts when a host is free."""
    if start is None:
        return {}
    if isinstance(start, timedelta):
        return {"delay_s": start.total_seconds()}
    return {"not_before_s": max(0.0, start.timestamp())}


def format_moment(at_s: float) -> str:
    return datetime.fromtimestamp(at_s, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")


class JobSchedule(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """A job that is queued at each time that `cron` names."""

    base: JobSpec
    """What is queued; its name is that of the schedule."""
    cron: CronText
    timezone: TimeZone = "UTC"
    overlap: Overlap = "skip"


class _CronField(msgspec.Struct, frozen=True):
    name: str
    low: int
    high: int
    words: Sequence[str] = ()
    """Names of values, from `low` on."""


_FIELDS: Final = (
    _CronField("minute", 0, 59),
    _CronField("hour", 0, 23),
    _CronField("day of the month", 1, 31),
    _CronField("month", 1, 12, ("jan", "feb", "mar", "apr", "may", "jun", "jul", "aug", "sep", "oct", "nov", "dec")),
    _CronField("day of the week", 0, 7, ("sun", "mon", "tue", "wed", "thu", "fri", "sat", "sun")),
)
_MACROS: Final = {
    "@hourly": "0 * * * *",
    "@daily": "0 0 * * *",
    "@weekly": "0 0 * * 0",
    "@monthly": "0 0 1 * *",
    "@yearly": "0 0 1 1 *",
}
_HOURS: Final = 24
_PART: Final = re.compile(r"(?:\*|([a-z0-9]+)(?:-([a-z0-9]+))?)(?:/([0-9]{1,4}))?")


@dataclass(frozen=True, slots=True, kw_only=True)
class Cron:
    minutes: tuple[int, ...]
    hours: tuple[int, ...]
    days: frozenset[int]
    months: frozenset[int]
    weekdays: frozenset[int]
    """0 is Sunday."""
    either: bool
    """Both kinds of day are restricted: one of them is enough, as cron has it."""

    def includes(self, day: date) -> bool:
        if day.month not in self.months:
            return False
        by_month, by_week = day.day in self.days, day.isoweekday() % 7 in self.weekdays
        return by_month or by_week if self.either else by_month and by_week


def parse_cron(text: str) -> Cron:
    """Five fields as cron has them: minute, hour, day of the month, month, day of the week; or @daily and the like.
    INVALID otherwise."""
    written = _MACROS.get(text, text).lower().split()
    if len(written) != len(_FIELDS):
        names = ", ".join(field.name for field in _FIELDS)
        raise StrataError(Code.INVALID, f"{text!r} has {len(written)} fields, and cron has five: {names}")
    minutes, hours, days, months, weekdays = (
        _field_values(field, value) for field, value in zip(_FIELDS, written, strict=True)
    )
    return Cron(
        minutes=tuple(sorted(minutes)),
        hours=tuple(sorted(hours)),
        days=days,
        months=months,
        weekdays=frozenset(day % 7 for day in weekdays),
        either=not written[2].startswith("*") and not written[4].startswith("*"),
    )


def _field_values(field: _CronField, text: str) -> frozenset[int]:
    values: set[int] = set()
    for part in text.split(","):
        match = _PART.fullmatch(part)
        if match is None:
            raise _wrong_field(field, part)
        first, last, step = match.groups()
        low = field.low if first is None else _field_value(field, part, first)
        # `5/15` counts from 5 to the end of the field, as `5-59/15` does.
        high = field.high if first is None or (last is None and step) else low
        if last is not None:
            high = _field_value(field, part, last)
            # Sunday is the end of a week that began on another day.
            high = 7 if high == 0 and low and field.high == 7 else high
        if low > high or step == "0" * len(step or "-"):
            raise _wrong_field(field, part)
        values.update(range(low, high + 1, int(step or 1)))
    return frozenset(values)


def _field_value(field: _CronField, part: str, text: str) -> int:
    if text in field.words:
        return field.low + field.words.index(text)
    if not text.isdigit() or not field.low <= int(text) <= field.high:
        raise _wrong_field(field, part)
    return int(text)


def _wrong_field(field: _CronField, part: str) -> StrataError:
    message = f"{part!r} is no {field.name}: {field.low} to {field.high}, as in *, 5, 1-5, 1,3 or */2"
    return StrataError(Code.INVALID, message)


def next_due_s(cron: Cron, after_s: float, zone: tzinfo) -> float | None:
    """The first time after `after_s`; None if there is none within nine years.

    A local time that a change to summer time leaves out is due when it would have been, an hour later by the clock. One
    that a change to winter time repeats is due once, unless the schedule is for every hour: as cron has it.
    """
    today = datetime.fromtimestamp(after_s, zone).date()
    for days in range(HORIZON_DAYS):
        day = today + timedelta(days=days)
        due_s = min((each for each in _due_on(cron, day, zone) if each > after_s), default=None)
        if due_s is not None:
            return due_s
    return None


def _due_on(cron: Cron, day: date, zone: tzinfo) -> Iterator[float]:
    if not cron.includes(day):
        return
    folds = (0, 1) if len(cron.hours) == _HOURS else (0,)
    for hour, minute, fold in product(cron.hours, cron.minutes, folds):
        local = datetime.combine(day, time(hour, minute, fold=fold), zone)
        at_s = local.timestamp()
        # A time that was left out has two readings too: the second is the earlier one there, and does not count.
        if not fold or at_s > local.replace(fold=0).timestamp():
            yield at_s


def first_due_s(schedule: JobSchedule, after_s: float, zone: tzinfo) -> float:
    """INVALID for a cron expression that is never due."""
    due_s = next_due_s(parse_cron(schedule.cron), after_s, zone)
    if due_s is None:
        raise StrataError(Code.INVALID, f"{schedule.cron!r} is never due")
    return due_s


def run_spec(schedule: JobSchedule, due_s: float) -> JobSpec:
    """The job of the run that is due then: the same for each hub that queues it."""
    due = datetime.fromtimestamp(due_s, UTC).strftime("%Y-%m-%dT%H:%MZ")
    return msgspec.structs.replace(schedule.base, due=due)


def schedule_problem(schedule: JobSchedule) -> str:
    """Returns what is wrong with a schedule that arrived as a value, without its time zone; empty if nothing is."""
    base = schedule.base
    if base.after or base.sweep or base.due or base.starts_at_s(1.0) or base.kind != "train" or base.gang:
        return "its runs are jobs of their own: no after, no not_before, no server, no gang and no sweep"
    try:
        first_due_s(schedule, 0.0, UTC)
    except StrataError as error:
        return error.message
    return ""
