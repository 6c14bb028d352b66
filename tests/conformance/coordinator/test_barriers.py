"""Meeting: released together, timed out by name, and never waiting for the dead."""

from __future__ import annotations

import asyncio

import pytest

from tests.conformance.coordinator.drivers import RefusedError
from tests.conformance.coordinator.fleet import MARKS, Fleet

pytestmark = MARKS


async def test_a_barrier_opens_when_the_last_one_comes(fleet: Fleet, pair: tuple[str, str]) -> None:
    first, second = await fleet.join_all(*pair)
    waiting = asyncio.create_task(first.ask("barrier", barrier_id="epoch_0"))
    job = await fleet.until(lambda job: bool(job.barriers))
    assert list(job.barriers[0].missing) == ["w1"]
    assert not waiting.done()
    await second.ask("barrier", barrier_id="epoch_0")
    await waiting
    # Its end is a fact: whoever asks again hears the same.
    await first.ask("barrier", barrier_id="epoch_0")


async def test_a_barrier_for_some_opens_without_the_others(fleet: Fleet, pair: tuple[str, str]) -> None:
    first, _ = await fleet.join_all(*pair)
    await first.ask("barrier", barrier_id="alone", expected=1)


async def test_a_barrier_that_takes_too_long_names_who_is_missing(fleet: Fleet, pair: tuple[str, str]) -> None:
    first, _ = await fleet.join_all(*pair)
    error = await first.refused("barrier", barrier_id="epoch_0", timeout_ms=200)
    assert error.code == "DEADLINE_EXCEEDED"
    assert error.message.endswith("missing: w1")


async def test_a_death_unblocks_those_who_wait(fleet: Fleet, pair: tuple[str, str]) -> None:
    first, second = await fleet.join_all(*pair)
    waiting = asyncio.create_task(first.ask("barrier", barrier_id="epoch_0"))
    await fleet.until(lambda job: bool(job.barriers))
    await second.die()
    with pytest.raises(RefusedError) as caught:
        await waiting
    assert (caught.value.code, caught.value.reason) == ("FAILED_PRECONDITION", "stale-generation")
    assert (await first.ask("recover"))["world_size"] == 1


async def test_an_elastic_worker_meets_again_without_the_dead(fleet: Fleet, pair: tuple[str, str]) -> None:
    first, second = await fleet.join_all(*pair, elastic=True)
    waiting = asyncio.create_task(first.ask("barrier", barrier_id="epoch_0"))
    await fleet.until(lambda job: bool(job.barriers))
    await second.die()
    await waiting
    assert (await first.ask("state"))["world_size"] == 1
