"""A coordinator that is killed and started again: workers wait, re-attach with what they hold, and lose no ack."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

from strata.coord.core.facts import GenerationFormed
from strata.coord.pb import coordinator_pb2 as pb
from strata.coord.pb import coordinator_pb2_grpc as pb_grpc
from tests.conformance.coordinator.fleet import MARKS, Fleet, consume, finish, next_shard
from tests.shell.coord.running import connect
from tests.shell.coord_worker.running import Site, acked, every_sample, site

pytestmark = MARKS

Commands = Mapping[str, Sequence[str]]


@asynccontextmanager
async def own(folder: Path, commands: Commands) -> AsyncIterator[tuple[Site, Fleet]]:
    """A coordinator to kill, and workers on it."""
    async with site(folder, heartbeat_interval_s="1") as found, connect(found.coordinator.address) as channel:
        await found.coordinator.serving()
        stub: pb_grpc.CoordinatorAsyncStub = pb_grpc.CoordinatorStub(channel)
        fleet = Fleet(found.coordinator.address, "default", folder, stub, commands)
        try:
            yield found, fleet
        finally:
            await fleet.close()


async def restart(found: Site) -> None:
    await found.coordinator.kill()
    await found.coordinator.start()
    await found.coordinator.serving()


async def test_leases_outlive_the_coordinator_and_their_acks_count(
    tmp_path: Path, commands: Commands, pair: tuple[str, str]
) -> None:
    async with own(tmp_path, commands) as (found, fleet):
        workers = await fleet.join_all(*pair)
        generation = (await workers[0].ask("state"))["generation"]
        await workers[0].ask("dataset", dataset_id="corpus", samples=120, shard_size=10)
        held = [await next_shard(worker) for worker in workers]
        # One is consumed and not acked, the other begun.
        await finish(workers[0], held[0])
        await workers[1].ask("progress", lease_id=held[1]["lease_id"], until=held[1]["start"] + 4)
        await restart(found)
        # The name of its library is in the coordinator's memory only: who is shown with it has registered again.
        job = await fleet.until(lambda job: all(each.attached and each.sdk_version for each in job.workers))
        assert [each.liveness for each in job.workers] == [pb.LIVENESS_ALIVE] * 2
        await finish(workers[1], held[1])
        for worker in workers:
            await worker.ask("flush")
        await asyncio.gather(*(consume(worker) for worker in workers))
        assert [(await worker.ask("state"))["generation"] for worker in workers] == [generation] * 2
        facts = await found.facts()
        samples, complete = acked(facts)
        assert samples == every_sample(1, 120)
        assert {int(shard["lease_id"]) for shard in held} <= complete
        assert [fact.generation for fact in facts if isinstance(fact, GenerationFormed)][-1] == generation


async def test_no_ack_is_lost_when_the_coordinator_dies_again_and_again(
    tmp_path: Path, commands: Commands, pair: tuple[str, str]
) -> None:
    async with own(tmp_path, commands) as (found, fleet):
        workers = await fleet.join_all(*pair)
        await workers[0].ask("dataset", dataset_id="corpus", samples=1000, shard_size=2)
        reading = [asyncio.create_task(consume(worker)) for worker in workers]
        for done in (50, 150):
            await fleet.until(
                lambda job, done=done: bool(  # type: ignore[misc]
                    job.datasets and job.datasets[0].open_epochs and job.datasets[0].open_epochs[0].done_shards >= done
                )
            )
            await restart(found)
        finished = [shard for part in await asyncio.gather(*reading) for shard in part]
        samples, complete = acked(await found.facts())
        assert samples == every_sample(1, 1000)
        # What a worker thinks it consumed is what counts, shard by shard.
        assert sorted(int(shard["lease_id"]) for shard in finished) == sorted(complete)


async def test_a_barrier_is_waited_for_over_a_restart(
    tmp_path: Path, commands: Commands, pair: tuple[str, str]
) -> None:
    async with own(tmp_path, commands) as (found, fleet):
        first, second = await fleet.join_all(*pair)
        waiting = asyncio.create_task(first.ask("barrier", barrier_id="epoch_0"))
        await fleet.until(lambda job: bool(job.barriers))
        await restart(found)
        await fleet.until(lambda job: bool(job.barriers))
        await second.ask("barrier", barrier_id="epoch_0")
        await waiting
