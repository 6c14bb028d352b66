"""Waiting for something that many wait for."""

from __future__ import annotations

import asyncio

import pytest

from strata.coord.server.notify import Waiters, until
from tests.support.turns import turns


async def _wait(waiters: Waiters[str], key: str, timeout_s: float | None = None) -> str | None:
    with waiters.on(key) as happening:
        return happening.result() if await until(happening, timeout_s) else None


async def test_all_who_wait_for_a_key_are_woken_with_the_same_value_and_others_are_not() -> None:
    waiters: Waiters[str] = Waiters()
    some = [asyncio.create_task(_wait(waiters, "a")) for _ in range(3)]
    other = asyncio.create_task(_wait(waiters, "b"))
    await turns()
    waiters.wake("a", "now")
    assert await asyncio.gather(*some) == ["now"] * 3
    assert not other.done()
    waiters.wake("b", "later")
    assert await other == "later"
    assert len(waiters) == 0


async def test_what_happens_between_taking_a_place_and_waiting_is_not_missed() -> None:
    waiters: Waiters[str] = Waiters()
    with waiters.on("a") as happening:
        waiters.wake("a", "early")
        assert await until(happening)
        assert happening.result() == "early"


async def test_who_comes_after_the_waking_waits_for_the_next_one() -> None:
    waiters: Waiters[str] = Waiters()
    with waiters.on("a"):
        waiters.wake("a", "first")
        late = asyncio.create_task(_wait(waiters, "a"))
        await turns()
    assert not late.done()
    waiters.wake("a", "second")
    assert await late == "second"


async def test_one_that_gives_up_leaves_the_others_waiting() -> None:
    waiters: Waiters[str] = Waiters()
    stays = asyncio.create_task(_wait(waiters, "a"))
    goes = asyncio.create_task(_wait(waiters, "a"))
    await turns()
    goes.cancel()
    with pytest.raises(asyncio.CancelledError):
        await goes
    assert await _wait(waiters, "a", timeout_s=0) is None
    waiters.wake("a", "now")
    assert await stays == "now"


async def test_a_place_is_kept_only_while_somebody_is_there() -> None:
    waiters: Waiters[str] = Waiters()
    with waiters.on("a"), waiters.on("a"):
        assert len(waiters) == 1
    assert len(waiters) == 0


async def test_when_nothing_will_be_known_everybody_is_told() -> None:
    waiters: Waiters[str] = Waiters()
    with waiters.on("a") as happening:
        waiting = asyncio.create_task(_wait(waiters, "a"))
        await turns()
        waiters.cancel_all()
        assert await waiting is None
        assert not await until(happening)
        assert happening.cancelled()
