"""A start is a recovery, in every language: no shard comes before a new incarnation knows which checkpoint to load."""

from __future__ import annotations

import asyncio

import pytest

from strata.coord.pb import coordinator_pb2 as pb
from tests.conformance.coordinator.drivers import Answer, Driver
from tests.conformance.coordinator.fleet import MARKS, Fleet, consume, finish, next_shard, samples

pytestmark = [
    *MARKS,
    pytest.mark.proves(
        "Never again: a restarted worker trained on the rest of the data with an empty model and reported success"
    ),
]


async def joined(fleet: Fleet, sdk: str, worker_id: str) -> tuple[Driver, Answer]:
    """A fresh process, and where it starts."""
    driver = await fleet.start(sdk)
    return driver, await driver.ask("join", job=fleet.job, worker_id=worker_id)


async def report(fleet: Fleet, driver: Driver, step: int) -> Answer:
    await driver.ask("begin_checkpoint", step=step)
    part = fleet.folder / f"{id(driver)}-{step}.bin"
    part.write_bytes(b"state")
    return await driver.ask("report_checkpoint", path=str(part))


async def test_the_first_process_of_a_job_starts_from_the_beginning(fleet: Fleet, sdk: str) -> None:
    _, start = await joined(fleet, sdk, "w")
    assert start["start"] is None


async def test_a_process_that_is_killed_and_started_again_is_told_its_checkpoint(fleet: Fleet, sdk: str) -> None:
    driver = await fleet.join(sdk, "w")
    await driver.ask("dataset", dataset_id="corpus", samples=60, shard_size=10)
    kept = await next_shard(driver)
    await finish(driver, kept)
    assert (await report(fleet, driver, 1))["committed"]
    await finish(driver, await next_shard(driver))
    await driver.ask("flush")
    await driver.die()
    driver, start = await joined(fleet, sdk, "w")
    assert start["start"]["step"] == 1
    assert start["start"]["parts"][0]["size"] == len(b"state")
    assert sorted(samples([kept, *await consume(driver)])) == list(range(60))


async def test_a_job_without_a_checkpoint_starts_again_from_the_beginning(fleet: Fleet, pair: tuple[str, str]) -> None:
    workers = await fleet.join_all(*pair)
    await workers[0].ask("dataset", dataset_id="corpus", samples=60, shard_size=10)
    for worker in workers:
        await finish(worker, await next_shard(worker))
        await worker.ask("flush")
        await worker.die()
    for number in range(2):
        await fleet.lost(f"w{number}")
    starts = await asyncio.gather(*(joined(fleet, sdk, f"w{number}") for number, sdk in enumerate(pair)))
    assert [start["start"] for _, start in starts] == [None, None]
    await fleet.until(lambda job: job.world_size == 2)
    # Whoever joined first has to go back once more, with the other.
    await asyncio.gather(*(driver.ask("recover") for driver, _ in starts))
    read = await asyncio.gather(*(consume(driver) for driver, _ in starts))
    assert samples([*read[0], *read[1]]) == list(range(60))


async def test_a_worker_that_comes_later_takes_everybody_back(fleet: Fleet, pair: tuple[str, str]) -> None:
    first = await fleet.join(pair[0], "w0")
    await first.ask("dataset", dataset_id="corpus", samples=60, shard_size=10)
    await finish(first, await next_shard(first))
    await first.ask("flush")
    second, start = await joined(fleet, pair[1], "w1")
    assert start["start"] is None
    refused = await first.refused("next_shard", dataset_id="corpus", epoch=0)
    assert (refused.code, refused.reason) == ("FAILED_PRECONDITION", "stale-generation")
    # To follow is not enough: the others went back.
    await first.ask("follow")
    refused = await first.refused("next_shard", dataset_id="corpus", epoch=0)
    assert (refused.code, refused.reason) == ("FAILED_PRECONDITION", "recover-first")
    assert (await first.ask("recover"))["checkpoint"] is None
    read = await asyncio.gather(consume(first), consume(second))
    assert samples([*read[0], *read[1]]) == list(range(60))


async def test_a_worker_that_knows_only_the_first_fields_is_refused_until_it_has_recovered(
    fleet: Fleet, sdk: str
) -> None:
    driver = await fleet.start(sdk)
    who = {"job": fleet.job, "worker": "w"}
    ask = {"dataset_id": "corpus"}
    assert "recover_first" not in await driver.call("RegisterWorker", {"worker_id": "w"}, **who)
    await driver.call("AckDataset", {"dataset_id": "corpus", "num_samples": 20, "shard_size": 10}, **who)
    await driver.call("GetNextShards", ask, **who)
    await driver.call("GetNextShards", ask, **who)
    assert (await driver.call("RegisterWorker", {"worker_id": "w"}, **who))["recover_first"]
    metadata = {"strata-job": fleet.job, "strata-worker": "w"}
    refused = await driver.refused("call", method="GetNextShards", request=ask, metadata=metadata)
    assert (refused.code, refused.reason) == ("FAILED_PRECONDITION", "recover-first")
    assert "checkpoint" not in await driver.call("RequestRecovery", {}, **who)
    read = []
    while not (assigned := await driver.call("GetNextShards", ask, **who)).get("end_of_epoch"):
        read.append(int(assigned["end_index"]))
    assert sorted(read) == [10, 20]


async def test_a_finished_job_takes_no_worker_until_it_is_reset(fleet: Fleet, sdk: str) -> None:
    driver = await fleet.join(sdk, "w")
    await driver.ask("dataset", dataset_id="corpus", samples=30, shard_size=10)
    await consume(driver)
    await driver.ask("leave")
    again = await fleet.start(sdk)
    refused = await again.refused("join", job=fleet.job, worker_id="w")
    assert (refused.code, refused.reason) == ("FAILED_PRECONDITION", "job-finished")
    assert f"strata gang reset {fleet.job}" in refused.message
    reset = await fleet.stub.ResetJob(pb.ResetJobRequest(job_id=fleet.job))
    assert (reset.job.status, reset.job.run) == (pb.JOB_STATUS_CREATED, 2)
    driver, start = await joined(fleet, sdk, "w")
    assert start["start"] is None
    await driver.ask("dataset", dataset_id="corpus", samples=30, shard_size=10)
    assert samples(await consume(driver)) == list(range(30))
