"""Data: every sample once, whoever reads it in whatever language."""

from __future__ import annotations

import asyncio
from collections import Counter

from strata.coord.pb import coordinator_pb2 as pb
from tests.conformance.coordinator.drivers import Driver
from tests.conformance.coordinator.fleet import MARKS, Fleet, consume, finish, next_shard, samples

pytestmark = MARKS

LINES = 200


async def read_all(driver: Driver, epoch: int) -> list[str]:
    """The samples themselves, as the SDK reads them from the files."""
    found: list[str] = []
    while (shard := (await driver.ask("next_shard", dataset_id="corpus", epoch=epoch))["shard"]) is not None:
        found += (await driver.ask("read", lease_id=shard["lease_id"]))["samples"]
        await finish(driver, shard)
    return found


async def test_two_workers_read_every_sample_of_an_epoch_once(fleet: Fleet, pair: tuple[str, str]) -> None:
    workers = await fleet.join_all(*pair)
    files = fleet.corpus(LINES)
    assert [
        (await worker.ask("dataset", dataset_id="corpus", files=files, shard_size=7))["num_shards"]
        for worker in workers
    ] == [29, 29]
    for epoch in range(2):
        # Both take part: each has a shard before anybody goes on.
        begun = [await next_shard(worker, epoch) for worker in workers]
        read: Counter[str] = Counter()
        for worker, shard in zip(workers, begun, strict=True):
            read.update((await worker.ask("read", lease_id=shard["lease_id"]))["samples"])
            await finish(worker, shard)
        for part in await asyncio.gather(*(read_all(worker, epoch) for worker in workers)):
            read.update(part)
        assert read == Counter(str(number) for number in range(LINES))
    job = (await fleet.stub.GetJob(pb.GetJobRequest(job_id=fleet.job))).job
    assert list(job.datasets[0].finished_epochs) == [0, 1]


async def test_the_same_files_are_the_same_dataset_in_every_language(fleet: Fleet, pair: tuple[str, str]) -> None:
    workers = await fleet.join_all(*pair)
    fleet.corpus(30)
    (fleet.folder / "c.jsonl").write_text('{"a": 1}\n{"a": 2}', encoding="utf-8")
    files = ["a.txt", f"{fleet.folder}/./b.txt", ".//c.jsonl"]
    for worker in workers:
        await worker.ask("dataset", dataset_id="corpus", files=files, shard_size=8, seed=str(2**63 + 1))
    (dataset,) = (await fleet.stub.GetJob(pb.GetJobRequest(job_id=fleet.job))).job.datasets
    assert (dataset.num_samples, dataset.num_shards) == (32, 4)
    error = await workers[1].refused("dataset", dataset_id="corpus", files=files, shard_size=9, seed=str(2**63 + 1))
    assert error.code == "ALREADY_EXISTS"


async def test_an_unknown_dataset_is_not_an_eviction(fleet: Fleet, sdk: str) -> None:
    driver = await fleet.join(sdk, "w")
    assert (await driver.refused("next_shard", dataset_id="nothing", epoch=0)).code == "NOT_FOUND"
    await driver.ask("barrier", barrier_id="still here")


async def test_after_a_death_only_the_unread_rest_is_handed_out_again(fleet: Fleet, pair: tuple[str, str]) -> None:
    victim, heir = await fleet.join_all(*pair, elastic=True)
    files = fleet.corpus(40)
    await victim.ask("dataset", dataset_id="corpus", files=files, shard_size=10)
    await heir.ask("dataset", dataset_id="corpus", files=files, shard_size=10)
    done, begun = await next_shard(victim), await next_shard(victim)
    await finish(victim, done)
    await victim.ask("progress", lease_id=begun["lease_id"], until=begun["start"] + 4)
    await victim.ask("flush")
    await victim.die()
    consumed = [*range(done["start"], done["end"]), *range(begun["start"], begun["start"] + 4)]
    read = sorted(int(line) for line in await read_all(heir, 0))
    assert sorted(read + consumed) == list(range(40))


async def test_a_shard_that_cannot_be_read_goes_to_somebody_else(fleet: Fleet, pair: tuple[str, str]) -> None:
    unable, able = await fleet.join_all(*pair)
    await unable.ask("dataset", dataset_id="corpus", samples=20, shard_size=20)
    shard = await next_shard(unable)
    await unable.ask("progress", lease_id=shard["lease_id"], until=5)
    await unable.ask("fail", lease_id=shard["lease_id"], reason="the disk is gone")
    await unable.ask("flush")
    rest = await next_shard(able)
    assert (rest["shard_id"], rest["start"], rest["end"]) == (shard["shard_id"], 5, 20)


async def test_a_rebalance_gives_what_a_worker_has_not_begun_to_others(fleet: Fleet, pair: tuple[str, str]) -> None:
    slow, quick = await fleet.join_all(*pair)
    await slow.ask("dataset", dataset_id="corpus", samples=40, shard_size=10)
    begun = (await slow.ask("next_shard", dataset_id="corpus", epoch=0, at_once=4))["shard"]
    await fleet.tell(pb.COMMAND_KIND_REBALANCE)
    await fleet.until(lambda job: not job.commands)
    await slow.ask("flush")
    moved = [await next_shard(quick) for _ in range(3)]
    assert samples([begun, *moved]) == list(range(40))
    for worker, shards in ((slow, [begun]), (quick, moved)):
        for shard in shards:
            await finish(worker, shard)
        await worker.ask("flush")
    (dataset,) = (await fleet.stub.GetJob(pb.GetJobRequest(job_id=fleet.job))).job.datasets
    assert list(dataset.finished_epochs) == [0]


async def test_a_worker_hears_that_its_leases_were_lost(fleet: Fleet, pair: tuple[str, str]) -> None:
    late, other = await fleet.join_all(*pair, elastic=True)
    await late.ask("dataset", dataset_id="corpus", samples=40, shard_size=10)
    done, begun = await next_shard(late), await next_shard(late)
    await finish(late, done)
    # Everybody goes back to the beginning: leases from before are void, consumed or not.
    assert (await other.ask("recover"))["checkpoint"] is None
    lost = []
    for _ in range(2):
        error = await late.refused("flush")
        assert (error.code, error.reason) == ("FAILED_PRECONDITION", "lease-lost")
        lost += error.detail["leases"]
        if len(lost) == 2:
            break
    assert sorted(lost) == sorted([done["lease_id"], begun["lease_id"]])
    read = await asyncio.gather(consume(late), consume(other))
    assert samples([*read[0], *read[1]]) == list(range(40))
