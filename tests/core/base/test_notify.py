"""Notifications that many tasks wait for."""

from __future__ import annotations

import asyncio

import pytest

from strata.base.notify import KeyedNotifier
from tests.support.turns import turns


async def _wait(notifier: KeyedNotifier[str], key: str, timeout_s: float | None = None) -> str | None:
    with notifier.subscribe(key) as notification:
        return notification.result() if await notification.wait(timeout_s) else None


async def test_all_who_wait_for_a_key_are_woken_with_the_same_value_and_others_are_not() -> None:
    notifier: KeyedNotifier[str] = KeyedNotifier()
    some = [asyncio.create_task(_wait(notifier, "a")) for _ in range(3)]
    other = asyncio.create_task(_wait(notifier, "b"))
    await turns()
    notifier.notify("a", "now")
    assert await asyncio.gather(*some) == ["now"] * 3
    assert not other.done()
    notifier.notify("b", "later")
    assert await other == "later"
    assert len(notifier) == 0


async def test_what_happens_between_subscribing_and_waiting_is_not_missed() -> None:
    notifier: KeyedNotifier[str] = KeyedNotifier()
    with notifier.subscribe("a") as notification:
        notifier.notify("a", "early")
        assert await notification.wait()
        assert notification.result() == "early"


async def test_who_comes_after_the_waking_waits_for_the_next_one() -> None:
    notifier: KeyedNotifier[str] = KeyedNotifier()
    with notifier.subscribe("a"):
        notifier.notify("a", "first")
        late = asyncio.create_task(_wait(notifier, "a"))
        await turns()
    assert not late.done()
    notifier.notify("a", "second")
    assert await late == "second"


async def test_one_that_gives_up_leaves_the_others_waiting() -> None:
    notifier: KeyedNotifier[str] = KeyedNotifier()
    stays = asyncio.create_task(_wait(notifier, "a"))
    goes = asyncio.create_task(_wait(notifier, "a"))
    await turns()
    goes.cancel()
    with pytest.raises(asyncio.CancelledError):
        await goes
    assert await _wait(notifier, "a", timeout_s=0) is None
    notifier.notify("a", "now")
    assert await stays == "now"


async def test_a_key_is_remembered_only_while_a_task_subscribes() -> None:
    notifier: KeyedNotifier[str] = KeyedNotifier()
    with notifier.subscribe("a"), notifier.subscribe("a"):
        assert len(notifier) == 1
    assert len(notifier) == 0


async def test_cancelling_all_wakes_every_waiter() -> None:
    notifier: KeyedNotifier[str] = KeyedNotifier()
    with notifier.subscribe("a") as notification:
        waiting = asyncio.create_task(_wait(notifier, "a"))
        await turns()
        notifier.cancel_all()
        assert await waiting is None
        assert not await notification.wait()
        assert notification.cancelled()
