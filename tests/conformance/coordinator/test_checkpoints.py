"""Checkpoints count when all ranks have reported; recovery goes back once, and to what the checkpoint has."""

from __future__ import annotations

import asyncio
import hashlib

from strata.coord.pb import coordinator_pb2 as pb
from tests.conformance.coordinator.drivers import Answer, Driver
from tests.conformance.coordinator.fleet import MARKS, Fleet, consume, finish, next_shard, samples

pytestmark = MARKS


async def report(fleet: Fleet, driver: Driver, step: int) -> Answer:
    """A part that has everything consumed so far."""
    part = fleet.folder / f"{id(driver)}-{step}.bin"
    await driver.ask("begin_checkpoint", step=step)
    part.write_bytes(f"step {step}".encode())
    return await driver.ask("report_checkpoint", path=part.name)


async def test_a_checkpoint_is_committed_when_every_rank_has_reported(fleet: Fleet, pair: tuple[str, str]) -> None:
    workers = await fleet.join_all(*pair)
    ranks = [(await worker.ask("state"))["rank"] for worker in workers]
    first = await report(fleet, workers[0], 1)
    assert (first["committed"], first["missing_ranks"]) == (False, [ranks[1]])
    second = await report(fleet, workers[1], 1)
    assert (second["committed"], second["missing_ranks"]) == (True, [])
    # A repeated report is how to look.
    part = fleet.folder / f"{id(workers[0])}-1.bin"
    assert (await workers[0].ask("report_checkpoint", path=str(part)))["committed"]
    recovered = await asyncio.gather(*(worker.ask("recover") for worker in workers))
    parts = recovered[0]["checkpoint"]["parts"]
    assert [part["rank"] for part in parts] == [0, 1]
    assert {part["uri"] for part in parts} == {str(fleet.folder / f"{id(worker)}-1.bin") for worker in workers}
    assert {part["digest"] for part in parts} == {f"sha256:{hashlib.sha256(b'step 1').hexdigest()}"}
    assert {part["size"] for part in parts} == {6}


async def test_all_who_ask_for_recovery_go_back_once(fleet: Fleet, pair: tuple[str, str]) -> None:
    workers = await fleet.join_all(*pair)
    before = (await workers[0].ask("state"))["generation"]
    recovered = await asyncio.gather(*(worker.ask("recover", reason="a loss of NaN") for worker in workers))
    assert [each["generation"] for each in recovered] == [before + 1, before + 1]
    job = (await fleet.stub.GetJob(pb.GetJobRequest(job_id=fleet.job))).job
    assert [each.kind for each in job.incidents] == [pb.INCIDENT_KIND_RECOVERY]
    await asyncio.gather(*(worker.ask("barrier", barrier_id="again") for worker in workers))


async def test_recovery_goes_back_to_what_the_checkpoint_has(fleet: Fleet, pair: tuple[str, str]) -> None:
    workers = await fleet.join_all(*pair)
    await workers[0].ask("dataset", dataset_id="corpus", samples=200, shard_size=10)
    kept: list[int] = []
    for worker in workers:
        done, begun = await next_shard(worker), await next_shard(worker)
        await finish(worker, done)
        await worker.ask("progress", lease_id=begun["lease_id"], until=begun["start"] + 4)
        await worker.ask("begin_checkpoint", step=1)
        # Consumed between taking the part and reporting it: not in the checkpoint.
        await finish(worker, begun)
        more = await next_shard(worker)
        part = fleet.folder / f"{id(worker)}.bin"
        part.write_bytes(b"state")
        await worker.ask("report_checkpoint", path=str(part))
        # After it, too.
        await finish(worker, more)
        await worker.ask("flush")
        kept += [*range(done["start"], done["end"]), *range(begun["start"], begun["start"] + 4)]
    recovered = await asyncio.gather(*(worker.ask("recover") for worker in workers))
    assert {each["checkpoint"]["step"] for each in recovered} == {1}
    read = await asyncio.gather(*(consume(worker) for worker in workers))
    assert sorted(kept + samples([*read[0], *read[1]])) == list(range(200))


async def test_a_bad_checkpoint_is_gone_back_behind(fleet: Fleet, sdk: str) -> None:
    driver = await fleet.join(sdk, "w")
    for step in (1, 2):
        assert (await report(fleet, driver, step))["committed"]
    newest = (await driver.ask("recover"))["checkpoint"]
    assert newest["step"] == 2
    older = (await driver.ask("recover", bad_checkpoint_id=newest["checkpoint_id"]))["checkpoint"]
    assert older["step"] == 1


async def test_parts_that_no_recovery_needs_come_back_as_tombstones(fleet: Fleet, sdk: str) -> None:
    driver = await fleet.join(sdk, "w")
    reported = [await report(fleet, driver, step) for step in range(5)]
    assert reported[-1]["tombstones"] == [str(fleet.folder / f"{id(driver)}-0.bin")]


async def test_a_second_checkpoint_waits_for_the_report_of_the_first(fleet: Fleet, sdk: str) -> None:
    driver = await fleet.join(sdk, "w")
    await driver.ask("begin_checkpoint", step=1)
    assert (await driver.refused("begin_checkpoint", step=2)).code == "FAILED_PRECONDITION"
