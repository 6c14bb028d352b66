"""Where a program starts: `worker.start`, and `worker.run` that begins again after every recovery."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

import strata.coord.worker as strata
from strata.base.errors import Code, StrataError
from tests.shell.coord.running import in_process
from tests.shell.coord_worker.test_calls import worker


async def checkpointed(found: strata.AsyncWorker, folder: Path) -> None:
    """One shard is in a committed checkpoint, and one that was acked after it is not."""
    await found.dataset("corpus", samples=40, shard_size=10)
    for step in (1, 2):
        shard = await found.next_shard("corpus", 0)
        assert shard is not None
        shard.done()
        if step == 1:
            part = folder / "part"
            part.write_bytes(b"state")
            assert (await found.checkpoint(step, part)).committed
    await found.flush()


async def test_the_first_process_starts_from_the_beginning() -> None:
    async with in_process() as running, worker(running) as found:
        assert found.start is None


async def test_a_process_that_joins_again_starts_from_the_last_checkpoint(tmp_path: Path) -> None:
    async with in_process() as running:
        async with worker(running) as found:
            await checkpointed(found, tmp_path)
        async with worker(running) as found:
            start = found.start
            assert start is not None
            assert start.step == 1
            await found.dataset("corpus")
            read = [shard.end - shard.start async for shard in found.shards("corpus", 0)]
            assert sum(read) == 30


async def test_a_program_that_does_not_look_at_its_checkpoint_gets_no_shard(tmp_path: Path) -> None:
    async with in_process() as running:
        async with worker(running) as found:
            await checkpointed(found, tmp_path)
        async with worker(running) as found:
            await found.dataset("corpus")
            with pytest.raises(StrataError, match="has not looked at it") as caught:
                await found.next_shard("corpus", 0)
            assert caught.value.code is Code.PRECONDITION


async def test_a_program_runs_again_from_the_checkpoint_when_another_worker_comes(tmp_path: Path) -> None:
    async with in_process() as running, worker(running) as found:
        await checkpointed(found, tmp_path)
        starts: list[int | None] = []
        came, again, over = asyncio.Event(), asyncio.Event(), asyncio.Event()

        async def train(start: strata.Manifest | None) -> int:
            starts.append(start.step if start else None)
            came.set()
            samples = 0
            while len(starts) == 1:
                # Until the other one is noticed.
                await found.next_shard("corpus", 0, wait=False)
                await asyncio.sleep(0.01)
            again.set()
            async for shard in found.shards("corpus", 0):
                samples += shard.end - shard.start
            over.set()
            return samples

        async def other() -> int:
            await came.wait()
            async with worker(running, "other") as late:
                await late.dataset("corpus")
                assert late.start is not None
                # What it read and took along without a checkpoint, before or after, would be read again.
                await again.wait()
                samples = sum([shard.end - shard.start async for shard in late.shards("corpus", 0)])
                await over.wait()
                return samples

        counted = await asyncio.gather(found.run(train), other())
        assert (starts, sum(counted)) == ([None, 1], 30)
