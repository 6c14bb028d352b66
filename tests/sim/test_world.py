"""The simulation world itself: time, processes, network, disk."""

from __future__ import annotations

import asyncio
import random

import pytest

from strata.base.errors import Code, StrataError
from tests.support.simhost import SimDisk
from tests.support.simloop import SimulationStuckError
from tests.support.world import CALM, Faults, World


def calm(seed: int = 1) -> World:
    return World(seed, CALM, keep_trace=True)


async def test_time_is_virtual() -> None:
    world = calm()

    async def a_year() -> float:
        await asyncio.sleep(365 * 24 * 3600)
        return world.loop.time()

    assert await asyncio.to_thread(world.run, a_year()) == 365 * 24 * 3600


def test_ordinary_asyncio_code_runs_in_it() -> None:
    world = calm()

    async def work() -> list[int]:
        queue: asyncio.Queue[int] = asyncio.Queue(2)
        lock = asyncio.Lock()
        seen: list[int] = []

        async def produce() -> None:
            for number in range(10):
                async with lock:
                    await queue.put(number)

        async def consume() -> None:
            while len(seen) < 10:
                seen.append(await queue.get())
                await asyncio.sleep(0.1)

        async with asyncio.TaskGroup() as group:
            group.create_task(produce())
            group.create_task(consume())
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(1.0):
                await asyncio.Event().wait()
        return seen

    assert world.run(work()) == list(range(10))


def test_a_scenario_that_waits_for_nothing_is_stuck_and_says_so() -> None:
    async def wait() -> None:
        await asyncio.Event().wait()

    with pytest.raises(SimulationStuckError):
        calm().run(wait())


def test_a_crashed_process_runs_nothing_more_not_even_its_cleanup() -> None:
    world = calm()
    seen: list[str] = []

    async def boot() -> None:
        seen.append("boot")
        try:
            await asyncio.sleep(10)
            seen.append("slept")
        finally:
            if not world.loop.is_ending:
                seen.append("cleanup")

    async def scenario() -> None:
        world.add("p", boot)
        await asyncio.sleep(1)
        world.crash("p")
        await asyncio.sleep(100)
        world.start("p")
        await asyncio.sleep(100)

    world.run(scenario())
    assert seen == ["boot", "boot", "slept", "cleanup"]


def test_a_paused_process_goes_on_later() -> None:
    world = calm()
    woken_s: list[float] = []

    async def boot() -> None:
        await asyncio.sleep(1)
        woken_s.append(world.loop.time())

    async def scenario() -> None:
        world.add("p", boot)
        await asyncio.sleep(0)
        world.pause("p")
        await asyncio.sleep(50)
        world.resume("p")
        await asyncio.sleep(1)

    world.run(scenario())
    assert woken_s == [50]


def test_a_process_that_raises_fails_the_run() -> None:
    world = calm()

    async def boot() -> None:
        raise ZeroDivisionError

    async def scenario() -> None:
        world.add("p", boot)
        await asyncio.sleep(1)

    with pytest.raises(AssertionError, match="unseen failure"):
        world.run(scenario())


def echo(world: World) -> None:
    async def boot() -> None:
        async def answer(sender: str, payload: bytes) -> bytes:
            if payload == b"bad":
                raise StrataError(Code.INVALID, "no")
            return sender.encode() + b":" + payload

        world.listen(answer)

    world.add("server", boot)


def test_a_call_is_answered_and_an_error_comes_back_as_one() -> None:
    world = calm()

    async def scenario() -> bytes:
        echo(world)
        await asyncio.sleep(0.1)
        with pytest.raises(StrataError) as caught:
            await world.call("server", b"bad", 1.0)
        assert caught.value.code is Code.INVALID
        return await world.call("server", b"hi", 1.0)

    assert world.run(scenario()) == b"world:hi"


def test_a_call_to_a_crashed_process_is_unavailable() -> None:
    world = calm()

    async def scenario() -> None:
        echo(world)
        await asyncio.sleep(0.1)
        world.crash("server")
        with pytest.raises(StrataError) as caught:
            await world.call("server", b"hi", 1.0)
        assert caught.value.code is Code.UNAVAILABLE

    world.run(scenario())


def test_messages_are_lost_and_doubled_as_often_as_asked() -> None:
    world = World(1, Faults(lost=0.5, duplicated=0.5, slow_message=0.0))
    handled = 0

    async def boot() -> None:
        async def answer(sender: str, payload: bytes) -> bytes:
            nonlocal handled
            handled += 1
            return b""

        world.listen(answer)

    async def scenario() -> int:
        world.add("server", boot)
        await asyncio.sleep(0.1)
        answered = 0
        for _ in range(400):
            try:
                await world.call("server", b"", 1.0)
            except StrataError:
                continue
            answered += 1
        return answered

    answered = world.run(scenario())
    assert 250 < handled < 350
    assert answered < handled


def test_a_disk_keeps_what_was_synced_and_at_most_a_part_of_the_rest() -> None:
    kinds: set[str] = set()
    for seed in range(200):
        world = calm(seed)

        async def scenario(world: World = world, seed: int = seed) -> bytes:
            disk = SimDisk(random.Random(seed), 0.01, lambda: None)
            disk.write(b"synced")
            await disk.sync()
            disk.write(b"pending")
            disk.crash()
            return disk.read()

        left = world.run(scenario())
        assert left.startswith(b"synced")
        rest = left[6:].rstrip(b"\x00")
        assert b"pending".startswith(rest)
        kinds.add("whole" if rest == b"pending" else "none" if not left[6:] else "torn")
    assert kinds == {"whole", "none", "torn"}


def test_the_trace_tells_what_happened() -> None:
    world = calm()

    async def scenario() -> None:
        echo(world)
        await asyncio.sleep(0.1)
        await world.call("server", b"hi", 1.0)
        world.crash("server")
        world.heal()

    world.run(scenario())
    said = "\n".join(world.trace.lines)
    for part in ("start server#1", "deliver world>server#1", "crash server#1", "heal", "start server#2"):
        assert part in said
