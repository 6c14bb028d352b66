"""Shards that are leased and read before the loop that trains asks for them: never acked unread, never lost."""

from __future__ import annotations

import asyncio
import signal
import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import strata.coord.worker as strata
from strata.base.errors import Code, StrataError
from strata.coord.core.facts import ShardsGranted
from strata.coord.pb import coordinator_pb2 as pb
from strata.coord.worker.prefetch import BATCHES_AHEAD, ReadAhead
from tests.shell.coord.running import Running, in_process
from tests.shell.coord_worker.corpora import write
from tests.shell.coord_worker.running import acked, counted, every_sample, every_word, site
from tests.shell.coord_worker.test_calls import leases, seen, worker

LINES = 200


async def granted(running: Running, count: int) -> dict[int, int]:
    async with asyncio.timeout(10):
        while len(leases(running)) != count:
            await asyncio.sleep(0.005)
    return leases(running)


async def first(found: strata.AsyncWorker, prefetch: int = 1) -> strata.Shard:
    shard = await found.next_shard("corpus", 0, prefetch=prefetch)
    assert shard is not None
    return shard


async def rest(found: strata.AsyncWorker, prefetch: int = 0) -> list[int]:
    return [
        index async for each in found.shards("corpus", 0, prefetch=prefetch) for index in range(each.start, each.end)
    ]


async def test_the_next_shards_are_leased_and_read_while_this_one_is_in_hand(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    samples = write(path, [f"line {number}" for number in range(100)])
    async with in_process() as running, worker(running) as found:
        await found.dataset("corpus", [path], shard_size=10)
        shard = await first(found, prefetch=2)
        held = await granted(running, 3)
        assert all(until % 10 == 0 for until in held.values())
        # Both are read; the file may go.
        async with asyncio.timeout(10):
            while len(found._prefetch._ahead) < 2 or "strata-read-ahead" in {
                each.name for each in threading.enumerate()
            }:
                await asyncio.sleep(0.005)
        path.unlink()
        shard.done()
        for _ in range(2):
            shard = await first(found, prefetch=0)
            assert list(shard.open()) == samples[shard.start : shard.end]
            shard.done()
        # What was read ahead is there once.
        with pytest.raises(StrataError, match="No such file"):
            list(shard.open())


async def test_every_sample_comes_once_with_and_without_prefetching(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    samples = write(path, [f"line {number}" for number in range(103)])
    for prefetch in (0, 1, 5, 50):
        async with in_process() as running, worker(running) as found:
            await found.dataset("corpus", [path], shard_size=10)
            read = []
            async for shard in found.shards("corpus", 0, prefetch=prefetch):
                assert len(leases(running)) <= prefetch + 2
                read += [sample async for sample in shard.open_async()]
            assert Counter(read) == Counter(samples)
            assert found.is_finished("corpus", 0)


async def test_who_leaves_gives_back_what_it_prefetched() -> None:
    async with in_process() as running, worker(running, "stays", elastic=True) as stays:
        async with worker(running, "goes", elastic=True) as goes:
            await goes.dataset("corpus", samples=100, shard_size=10)
            shard = await first(goes, prefetch=3)
            await granted(running, 4)
            shard.done()
        done = set(range(shard.start, shard.end))
        assert sorted(await rest(stays)) == sorted(set(range(100)) - done)


async def test_recovery_forgets_what_was_prefetched_and_hands_it_out_again(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    write(path, [f"line {number}" for number in range(100)])
    async with in_process() as running, worker(running) as found:
        await found.dataset("corpus", [path], shard_size=10)
        shard = await first(found, prefetch=3)
        old = await granted(running, 4)
        shard.progress(shard.start + 4)
        await found.checkpoint(1, "mem://part", digest="sha256:0", size=1)
        shard.done()
        following = await first(found, prefetch=3)
        following.done()
        # Some of it is still on its way.
        await found.recover()
        assert found._session.leases.ids() == []
        assert found._prefetch._ahead == {}
        again = [each async for each in found.shards("corpus", 0, prefetch=3)]
        samples = sorted(index for each in again for index in range(each.start, each.end))
        assert samples == sorted(set(range(100)) - set(range(shard.start, shard.start + 4)))
        assert following.lost
        assert not set(old) & {each.lease_id for each in again}


async def test_an_answer_from_before_a_recovery_brings_nothing() -> None:
    async with in_process() as running, worker(running) as found:
        await found.dataset("corpus", samples=100, shard_size=10)
        asking = asyncio.create_task(found._prefetch_shards("corpus", 0, 1))
        async with asyncio.timeout(10):
            while "corpus" not in running.service.state.jobs["default"].datasets or not (
                running.service.state.jobs["default"].datasets["corpus"].epochs
            ):
                await asyncio.sleep(0)
        assert not asking.done()
        found._session.leases.clear()
        await asking
        assert found._session.leases.ids() == []
        # It is handed out again, because nobody says that it is known.
        assert sorted(await rest(found)) == list(range(100))


async def test_a_change_of_members_is_raised_to_the_loop_and_not_swallowed_by_prefetching() -> None:
    async with in_process() as running, worker(running) as found:
        await found.dataset("corpus", samples=100, shard_size=10)
        shard = await first(found)
        await granted(running, 2)
        async with worker(running, "other", elastic=True) as other:
            await seen(running, lambda job: job.world_size == 2)
            shard.done()
            with pytest.raises(StrataError) as caught:
                await rest(found, prefetch=1)
            assert strata.reason_of(caught.value) is strata.Reason.MEMBERSHIP_CHANGED
            await found.follow()
            await other.dataset("corpus")
            both = await asyncio.gather(rest(found, prefetch=1), rest(other, prefetch=1))
        assert sorted(both[0] + both[1]) == sorted(set(range(100)) - set(range(shard.start, shard.end)))


async def test_prefetching_neither_hears_what_is_for_the_loop_nor_moves_it_on() -> None:
    async with in_process() as running, worker(running, elastic=True) as found:
        await found.dataset("corpus", samples=100, shard_size=10)
        shard = await first(found, prefetch=0)
        async with worker(running, "other", elastic=True):
            await seen(running, lambda job: job.generation == 2)
            async with asyncio.timeout(10):
                while found._session._job_generation < 2:
                    await asyncio.sleep(0.005)
            found._session.leases.mark_lost([shard.lease_id])
            found._prefetch.begin("corpus", 0, 1)
            await found._prefetch.arrive()
            assert found.generation == 1
            with pytest.raises(StrataError) as caught:
                found.step(1)
            assert strata.reason_of(caught.value) is strata.Reason.LEASE_LOST


async def test_a_replaced_incarnation_acks_nothing_of_what_it_prefetched() -> None:
    async with in_process() as running, worker(running, elastic=True) as old:
        await old.dataset("corpus", samples=100, shard_size=10)
        shard = await first(old, prefetch=2)
        await granted(running, 3)
        async with worker(running, elastic=True) as new:
            shard.done()
            with pytest.raises(StrataError) as caught:
                await rest(old, prefetch=2)
            assert strata.reason_of(caught.value) is strata.Reason.REPLACED
            await new.dataset("corpus")
            assert sorted(await rest(new, prefetch=2)) == list(range(100))


async def test_draining_asks_for_no_more_and_finishes_what_was_prefetched() -> None:
    async with in_process() as running, worker(running) as found:
        await found.dataset("corpus", samples=100, shard_size=10)
        read = 0
        async for _ in found.shards("corpus", 0, prefetch=1):
            read += 1
            if read == 1:
                await granted(running, 2)
                await running.stub.IssueCommand(pb.IssueCommandRequest(kind=pb.COMMAND_KIND_DRAIN))
                await seen(running, lambda job: not job.commands)
        assert read == 2


async def test_a_killed_worker_loses_nothing_that_it_had_prefetched(tmp_path: Path) -> None:
    async with site(tmp_path, min_workers="2", heartbeat_interval_s="0.5") as found:
        given: dict[str, Any] = {"epochs": 2, "shard_size": 7, "prefetch": 2, "join": {"elastic": True}}
        files = found.corpus(LINES)
        others = [await found.start("count", f"w{number}", files=files, hold_at=2, **given) for number in range(2)]
        victim = await found.start("count", "victim", files=files, hold_at=1, **given)
        await asyncio.gather(*(each.event("held") for each in (victim, *others)))
        await found.holds("victim", 3)
        victim.signal(signal.SIGKILL)
        for each in others:
            each.release()
        assert await asyncio.gather(*(each.end() for each in others)) == [0, 0]
        await victim.end()
        facts = await found.facts()
        samples, complete = acked(facts)
        assert samples == every_sample(2, LINES)
        assert counted((victim, *others), complete) == every_word(2, LINES)
        grants = [fact for fact in facts if isinstance(fact, ShardsGranted) and fact.worker_id == "victim"]
        held = {grant.lease_id for fact in grants for grant in fact.grants} - complete
        assert len(held) == 3, "what it held when it died counts nowhere"


class Batches:
    """Batches of one sample, and how many of them were read."""

    def __init__(self, count: int, failure: StrataError | None = None) -> None:
        self.read = 0
        self._count = count
        self._failure = failure

    def __iter__(self) -> Iterator[list[Any]]:
        for number in range(self._count):
            self.read += 1
            yield [number]
        if self._failure is not None:
            raise self._failure


def test_reading_ahead_is_bounded_and_ends_when_nobody_wants_the_rest() -> None:
    batches = Batches(100)
    ahead = ReadAhead(iter(batches))
    taken = iter(ahead)
    assert [next(taken), next(taken)] == [[0], [1]]
    while batches.read < BATCHES_AHEAD + 3:
        assert ahead._thread.is_alive()
    ahead.join(0.1)
    assert batches.read == BATCHES_AHEAD + 3
    ahead.close()
    ahead.join(10)
    assert not ahead._thread.is_alive()


def test_what_goes_wrong_while_reading_ahead_is_raised_after_what_came_before() -> None:
    ahead = ReadAhead(iter(Batches(3, StrataError(Code.CORRUPT, "broken"))))
    got: list[Any] = []
    with pytest.raises(StrataError, match="broken"):
        got.extend(ahead)
    assert got == [[0], [1], [2]]
