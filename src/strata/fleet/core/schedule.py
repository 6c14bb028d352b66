"""When jobs start: a time or a delay for one job, written by a person.

Time is an argument, and so is the time zone: nothing here reads a clock or a time zone database.
"""

from __future__ import annotations

import re
from datetime import UTC, datetime, timedelta
from typing import Any, Final

from strata.base.errors import Code, StrataError

StartTime = datetime | timedelta
"""A point in time, or how long after the job was queued."""
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
