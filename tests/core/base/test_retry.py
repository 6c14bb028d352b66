"""What a server asks for in Retry-After, and waits that do not return together."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from strata.base.retry import Backoff, date_s, retry_after_s

NOW_S = 784_111_777.0
"""Sun, 06 Nov 1994 08:49:37 GMT, the example of RFC 9110."""


@pytest.mark.parametrize(
    ("value", "asked_s"),
    [
        ("120", 120.0),
        ("0.5", 0.5),
        ("Sun, 06 Nov 1994 08:49:47 GMT", 10.0),
        ("Sunday, 06-Nov-94 08:49:47 GMT", 10.0),
        ("Sun Nov  6 08:49:47 1994", 10.0),
        ("Sun, 06 Nov 1994 08:49:27 GMT", 0.0),
        ("-5", 0.0),
        ("nan", 0.0),
        ("inf", 0.0),
        ("soon", 0.0),
        ("", 0.0),
        (None, 0.0),
        ("Sun, 99 Nov 1994 08:49:47 GMT", 0.0),
    ],
)
def test_retry_after_is_seconds_or_a_date(value: str | None, asked_s: float) -> None:
    assert retry_after_s(value, now_s=NOW_S) == asked_s


@given(st.text(max_size=60))
def test_no_header_breaks_the_client(value: str) -> None:
    assert retry_after_s(value, now_s=NOW_S) >= 0.0
    date_s(value, default_s=NOW_S)


def test_chance_spreads_the_waits() -> None:
    backoff = Backoff(first_s=0.1, most_s=5.0)
    waits = {backoff.delay_s(failures, chance / 10) for failures in (1, 2, 3) for chance in range(10)}
    assert len(waits) == 30
    assert (min(waits), max(waits) < 0.4) == (0.05, True)
