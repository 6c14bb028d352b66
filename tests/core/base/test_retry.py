"""What a server asks for in Retry-After, and waits that do not return together."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from strata.base.errors import Code, StrataError
from strata.base.retry import Backoff, RetryPolicy, date_s, no_jitter, retry, retry_after_s
from tests.support.manual_clock import ManualClock
from tests.support.turns import turns

pytestmark = pytest.mark.proves("Never again: a legal `Retry-After` date ended the SDK with ValueError")

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


class _Flaky:
    """Fails with each of the errors in turn, then succeeds."""

    def __init__(self, *codes: Code) -> None:
        self._errors = [StrataError(code, "no") for code in codes]
        self.calls = 0

    async def __call__(self) -> str:
        self.calls += 1
        if self._errors:
            raise self._errors.pop(0)
        return "done"


async def _retry(call: _Flaky, clock: ManualClock, give_up_after_s: float, failures: list[int]) -> str:
    policy = RetryPolicy(backoff=Backoff(first_s=1.0, most_s=3.0), give_up_after_s=give_up_after_s)
    return await retry(
        call, policy, clock=clock, chance=no_jitter, on_retry=lambda error, count: failures.append(count)
    )


async def test_a_transient_error_is_retried_after_doubling_delays_up_to_the_longest() -> None:
    call, clock, failures = _Flaky(*[Code.UNAVAILABLE] * 4), ManualClock(), list[int]()
    task = asyncio.create_task(_retry(call, clock, 100.0, failures))
    delays = []
    while not task.done():
        await turns()
        if not task.done():
            before_s = clock.monotonic_s()
            calls = call.calls
            while call.calls == calls:
                await clock.advance(0.5)
                await turns()
            delays.append(clock.monotonic_s() - before_s)
    assert await task == "done"
    assert delays == [1.0, 2.0, 3.0, 3.0]
    assert failures == [1, 2, 3, 4]


async def test_another_error_is_raised_at_once() -> None:
    call = _Flaky(Code.STALE)
    with pytest.raises(StrataError, match="no"):
        await _retry(call, ManualClock(), 100.0, [])
    assert call.calls == 1


async def test_the_last_error_is_raised_when_the_time_is_over() -> None:
    call, clock = _Flaky(*[Code.UNAVAILABLE] * 9), ManualClock()
    task = asyncio.create_task(_retry(call, clock, 1.5, []))
    while not task.done():
        await turns()
        await clock.advance(1.0)
    with pytest.raises(StrataError, match="no"):
        await task
    assert call.calls == 3
